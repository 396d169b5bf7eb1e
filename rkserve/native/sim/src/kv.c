/* The KV cache: token ids and, for every length, a hash of all positions up to there. Since hash[k]
 * sums up the whole context, everything the language model decides can hang on it at no cost. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t hash, int32_t id) { /* splitmix64 over a running sum */
    uint64_t z = hash * 0x9E3779B97F4A7C15u + (uint32_t)id + 0x632BE59BD9B4E019u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

void kv_open(struct kv *kv, uint32_t limit, uint64_t weights) {
    memset(kv, 0, sizeof *kv);
    kv->ids = must_alloc(limit * sizeof *kv->ids);
    kv->rows = must_alloc(limit * sizeof *kv->rows);
    kv->adapters = must_alloc(limit * sizeof *kv->adapters);
    kv->hash = must_alloc((limit + 1) * sizeof *kv->hash);
    kv->hash[0] = kv->weights = weights;
    kv->limit = limit;
}

void kv_close(struct kv *kv) {
    free(kv->ids);
    free(kv->rows);
    free(kv->adapters);
    free(kv->hash);
}

static void sum_up(struct kv *kv, uint32_t at) {
    uint64_t beside = kv->rows[at] ^ kv->adapters[at] * 0x9E3779B97F4A7C15u;
    kv->hash[at + 1] = mix(kv->hash[at] ^ beside, kv->ids[at]);
}

/* The caller has checked that there is room. */
void kv_append(struct kv *kv, int32_t id, uint64_t row) {
    kv->ids[kv->n] = id;
    kv->rows[kv->n] = row;
    kv->adapters[kv->n] = kv->adapter;
    sum_up(kv, kv->n++);
}

void kv_remove(struct kv *kv, uint32_t start, uint32_t end) {
    if (end > kv->n) end = kv->n;
    if (start >= end) return;
    uint32_t rest = kv->n - end;
    memmove(kv->ids + start, kv->ids + end, rest * sizeof *kv->ids);
    memmove(kv->rows + start, kv->rows + end, rest * sizeof *kv->rows);
    memmove(kv->adapters + start, kv->adapters + end, rest * sizeof *kv->adapters);
    kv->n = start + rest;
    for (uint32_t at = start; at < kv->n; at++) sum_up(kv, at);
}

void kv_reseed(struct kv *kv, uint64_t seed) {
    kv->hash[0] = kv->weights ^ seed;
    for (uint32_t at = 0; at < kv->n; at++) sum_up(kv, at);
}

bool kv_is_mixed(const struct kv *kv, uint32_t n) {
    for (uint32_t at = 0; at < n; at++)
        if (kv->adapters[at] != kv->adapter) return true;
    return false;
}
