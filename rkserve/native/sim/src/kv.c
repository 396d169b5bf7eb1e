/* The KV cache: token ids and, for every length, a hash of all ids up to there. Since hash[k] sums
 * up the whole context, everything the language model decides can hang on it at no cost. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t hash, int32_t id) { /* splitmix64 over a running sum */
    uint64_t z = hash * 0x9E3779B97F4A7C15u + (uint32_t)id + 0x632BE59BD9B4E019u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* The seed is the place for what changes the model itself, such as an adapter and its scale. */
void kv_open(struct kv *kv, uint32_t limit, uint64_t seed) {
    kv->ids = must_alloc(limit * sizeof *kv->ids);
    kv->hash = must_alloc((limit + 1) * sizeof *kv->hash);
    kv->hash[0] = seed;
    kv->limit = limit;
    kv->n = 0;
}

void kv_close(struct kv *kv) {
    free(kv->ids);
    free(kv->hash);
}

/* The caller has checked that there is room. */
void kv_append(struct kv *kv, const int32_t *ids, uint32_t n) {
    for (uint32_t i = 0; i < n; i++, kv->n++) {
        kv->ids[kv->n] = ids[i];
        kv->hash[kv->n + 1] = mix(kv->hash[kv->n], ids[i]);
    }
}

void kv_remove(struct kv *kv, uint32_t start, uint32_t end) {
    if (end > kv->n) end = kv->n;
    if (start >= end) return;
    uint32_t rest = kv->n - end;
    memmove(kv->ids + start, kv->ids + end, rest * sizeof *kv->ids);
    kv->n = start;
    kv_append(kv, kv->ids + start, rest); /* in place: only the hashes are new */
}
