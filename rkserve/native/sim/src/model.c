/* The simulated .rkllm file: checked, then mapped read-only and used in place. It knows the format
 * and nothing of what the ids mean. docs/reference/simulator.md describes the format. */
#include "rksim.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char *refuse(struct model *model, const char *why) {
    model_close(model);
    return why;
}

static bool map_file(struct model *model, const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (fd < 0) return false;
    if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0) {
        model->map_bytes = (size_t)about.st_size;
        void *map = mmap(NULL, model->map_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        model->map = map == MAP_FAILED ? NULL : map;
    }
    close(fd);
    return model->map != NULL;
}

static bool inside(const struct model *model, uint64_t at, uint64_t bytes) {
    return at % 4 == 0 && at <= model->map_bytes && bytes <= model->map_bytes - at;
}

static bool is_id(const struct model *model, int32_t id) {
    return id >= 0 && (uint32_t)id < model->header->n_pieces;
}

static bool sections_fit(const struct model *model) {
    const struct model_header *h = model->header;
    return h->file_bytes == model->map_bytes && h->n_pieces > 0 && h->n_bank > 0 &&
           h->strings_bytes > 0 &&
           inside(model, h->pieces_at, (uint64_t)h->n_pieces * sizeof(struct piece)) &&
           inside(model, h->bank_at, (uint64_t)h->n_bank * sizeof(struct sentence)) &&
           inside(model, h->strings_at, h->strings_bytes) &&
           model->map[h->strings_at + h->strings_bytes - 1] == '\0' && is_id(model, h->im_start) &&
           is_id(model, h->im_end) && is_id(model, h->end_of_text) && is_id(model, h->silent) &&
           is_id(model, h->think_close) && h->model_id[63] == '\0' &&
           h->target_platform[15] == '\0' && h->profile[63] == '\0' &&
           h->toolkit_version[15] == '\0' && h->dtype[15] == '\0';
}

static bool contents_fit(const struct model *model) {
    const struct model_header *h = model->header;
    for (uint32_t i = 0; i < h->n_pieces; i++)
        if ((uint64_t)model->pieces[i].at + model->pieces[i].n > model->map_bytes) return false;
    for (uint32_t i = 0; i < h->n_bank; i++) {
        const struct sentence *s = &model->bank[i];
        uint32_t n = (uint32_t)s->n_spaced + s->n_bare;
        if (!s->n_spaced || !s->n_bare || !inside(model, s->at, n * 4ull)) return false;
        const int32_t *ids = (const int32_t *)(const void *)(model->map + s->at);
        for (uint32_t k = 0; k < n; k++)
            if (!is_id(model, ids[k])) return false;
    }
    return true;
}

static uint32_t hash_bytes(const unsigned char *bytes, size_t n) { /* FNV-1a */
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 16777619u;
    return hash ^ (hash >> 15);
}

static void build_lookup(struct model *model) {
    uint32_t slots = 1;
    while (slots < 2 * model->header->n_pieces) slots *= 2;
    model->lookup = must_alloc(slots * sizeof *model->lookup);
    memset(model->lookup, 0, slots * sizeof *model->lookup);
    model->lookup_mask = slots - 1;
    for (uint32_t id = 0; id < model->header->n_pieces; id++) {
        const struct piece *piece = &model->pieces[id];
        const unsigned char *bytes = piece_bytes(model, (int32_t)id);
        if (!piece->n || model_find(model, bytes, piece->n) >= 0) continue;
        uint32_t slot = hash_bytes(bytes, piece->n) & model->lookup_mask;
        while (model->lookup[slot]) slot = (slot + 1) & model->lookup_mask;
        model->lookup[slot] = id + 1;
    }
}

int32_t model_find(const struct model *model, const unsigned char *bytes, size_t n) {
    uint32_t slot = hash_bytes(bytes, n) & model->lookup_mask;
    for (; model->lookup[slot]; slot = (slot + 1) & model->lookup_mask) {
        int32_t id = (int32_t)model->lookup[slot] - 1;
        if (model->pieces[id].n == n && memcmp(piece_bytes(model, id), bytes, n) == 0) return id;
    }
    return -1;
}

static bool covers_every_byte(struct model *model) {
    for (int byte = 0; byte < 256; byte++) {
        unsigned char as_byte = (unsigned char)byte;
        model->byte_id[byte] = model_find(model, &as_byte, 1);
        if (model->byte_id[byte] < 0) return false;
    }
    model->newline = model->byte_id['\n'];
    return true;
}

const char *model_open(struct model *model, const char *path) {
    memset(model, 0, sizeof *model);
    if (!path || !map_file(model, path)) return refuse(model, "cannot read the file");
    size_t magic = strlen(MODEL_MAGIC);
    if (model->map_bytes < magic || memcmp(model->map, MODEL_MAGIC, magic) != 0)
        return refuse(model, "invalid rknn llm model magic");
    model->header = (const struct model_header *)(const void *)model->map;
    if (model->map_bytes < sizeof *model->header || model->header->format != MODEL_FORMAT)
        return refuse(model, "unknown format");
    if (!sections_fit(model)) return refuse(model, "damaged file");
    model->pieces = (const struct piece *)(const void *)(model->map + model->header->pieces_at);
    model->bank = (const struct sentence *)(const void *)(model->map + model->header->bank_at);
    if (!contents_fit(model)) return refuse(model, "damaged file");
    build_lookup(model);
    if (!covers_every_byte(model)) return refuse(model, "a byte is missing in the vocabulary");
    return NULL;
}

void model_close(struct model *model) {
    lora_free(model->loras);
    free(model->lookup);
    if (model->map) munmap((void *)(uintptr_t)model->map, model->map_bytes);
    memset(model, 0, sizeof *model);
}

/* Strings are "key=value" with a NUL after each. A missing key is an empty value. */
const char *model_string(const struct model *model, const char *key) {
    const char *at = (const char *)model->map + model->header->strings_at;
    const char *end = at + model->header->strings_bytes;
    size_t n = strlen(key);
    for (; at < end; at += strlen(at) + 1)
        if (strncmp(at, key, n) == 0 && at[n] == '=') return at + n + 1;
    return "";
}

uint64_t model_seed(const struct model *model) {
    uint64_t seed = strtoull(model_string(model, "seed"), NULL, 10);
    return seed ? spread(seed) : 0;
}
