/* Prompt caches: the KV cache of a run in a file, and back. The file has the size that the vendor's
 * has, but only the ids, rows and adapters of its positions are in it: from these the rest follows.
 *
 * Assumed, as nothing is known: the file is written in place, so a crash leaves half of it; a file
 * that cannot be written is a log line, and the run ends as it would have; damage is noticed. */
#include "rksim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CACHE_MAGIC "RKSIMKVC"
#define CACHE_FORMAT 2
enum { FIXED_BYTES = 615371 }; /* measured for Qwen3-4B; assumed to be the same for all */
struct cache_header { /* little-endian; then rows, adapters and ids, then nothing of meaning */
    char magic[8];
    uint32_t format, crc; /* CRC-32 of everything from here to the end of the ids */
    uint64_t file_bytes, adapter; /* that of the last position */
    char model_id[64];
    uint32_t n_tokens, weights; /* of the model: its seed, folded */
    uint64_t writer;            /* the process */
};
enum { POSITION_BYTES = 2 * sizeof(uint64_t) + sizeof(int32_t) };

/* 2 (key, value) x layers x KV heads x head size x 2 bytes. Qwen3-4B is measured, 16 bytes more. */
static const struct {
    const char *family;
    uint32_t bytes;
} PER_TOKEN[] = {
    {"qwen3-4b", 147472},   {"qwen3-0.6b", 114688},    {"qwen3-1.7b", 114688},
    {"qwen3-vl-2b", 114688}, {"qwen2-0.5b", 12288},    {"qwen2.5-1.5b", 28672},
    {"tinyllama", 22528},   {"phi3-3.8b", 393216},
};

static uint64_t bytes_per_token(const struct profile *profile) {
    for (size_t i = 0; i < sizeof PER_TOKEN / sizeof *PER_TOKEN; i++)
        if (strstr(profile->name, PER_TOKEN[i].family)) return PER_TOKEN[i].bytes;
    return 28672;
}

static int64_t disk_ns(const struct handle *h, uint64_t bytes) {
    double ms = (double)bytes / 1048.576 / h->settings.features.disk_mb_per_s;
    return (int64_t)(ms * 1e6 * time_scale(&h->settings));
}

static uint32_t weights_of(const struct handle *h) {
    uint64_t seed = model_seed(&h->model);
    return (uint32_t)(seed ^ seed >> 32);
}

static bool is_supported(const struct handle *h) {
    if (!strstr(h->model.header->model_id, "qwen3.5") && !strstr(h->profile->name, "qwen3.5"))
        return true;
    log_line("W rkllm: The qwen35 model does not support saving prompt cache!");
    return false;
}

/* ---- saving ---- */

static bool write_all(int fd, const void *bytes, size_t n) {
    const char *at = bytes;
    while (n) {
        ssize_t written = write(fd, at, n);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        at += written;
        n -= (size_t)written;
    }
    return true;
}

/* What stands for keys and values: a hole, or real bytes where a test wants real traffic on the disk. */
static bool pad(const struct handle *h, int fd, uint64_t written, uint64_t file_bytes) {
    uint64_t block[8192];
    if (!h->settings.features.cache_dense) return ftruncate(fd, (off_t)file_bytes) == 0;
    while (written < file_bytes) {
        uint64_t left = file_bytes - written, n = left < sizeof block ? left : sizeof block;
        for (size_t i = 0; i < sizeof block / sizeof *block; i++) block[i] = spread(written + i);
        if (!write_all(fd, block, n)) return false;
        written += n;
    }
    return true;
}

static bool write_cache(const struct handle *h, const struct kv *kv, int fd) {
    size_t n = kv->n, meaningful = sizeof(struct cache_header) + n * POSITION_BYTES;
    struct cache_header *header = must_zero(meaningful);
    memcpy(header->magic, CACHE_MAGIC, sizeof header->magic);
    header->format = CACHE_FORMAT;
    header->file_bytes = FIXED_BYTES + n * bytes_per_token(h->profile);
    header->adapter = n ? kv->adapters[n - 1] : 0;
    memcpy(header->model_id, h->model.header->model_id, sizeof header->model_id);
    header->n_tokens = kv->n;
    header->weights = weights_of(h);
    header->writer = (uint64_t)getpid();
    uint64_t *rows = (uint64_t *)(header + 1);
    memcpy(rows, kv->rows, n * sizeof *rows);
    memcpy(rows + n, kv->adapters, n * sizeof *rows);
    memcpy(rows + 2 * n, kv->ids, n * sizeof *kv->ids);
    size_t before = offsetof(struct cache_header, file_bytes);
    header->crc = crc32_add(0, (char *)header + before, meaningful - before);
    int64_t done = now_ns() + disk_ns(h, header->file_bytes);
    bool ok = write_all(fd, header, meaningful);
    sleep_until_ns(done); /* until then the file is too short, as it would be */
    ok = ok && pad(h, fd, meaningful, header->file_bytes);
    free(header);
    return ok;
}

void prompt_cache_save(struct handle *h, const struct kv *kv, const char *path) {
    if (!is_supported(h)) return;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && write_cache(h, kv, fd);
    if (fd >= 0 && close(fd) != 0) ok = false;
    if (!ok) log_line("E rkllm: failed to save prompt cache to '%s': %s", path, strerror(errno));
}

char *prompt_cache_path(const struct handle *h, const RKLLMInferParam *infer) {
    const RKLLMPromptCacheParam *param = infer->prompt_cache_params;
    if (!param || !param->save_prompt_cache || infer->mode != RKLLM_INFER_GENERATE) return NULL;
    if (infer->keep_history && h->settings.features.no_save_with_history) {
        log_line("W rkllm: the prompt cache of a run with history is not saved");
        return NULL;
    }
    const char *path = param->prompt_cache_path ? param->prompt_cache_path : "./prompt_cache.bin";
    return strcpy(must_alloc(strlen(path) + 1), path);
}

/* ---- loading ---- */

static bool read_all(int fd, void *bytes, size_t n) {
    char *at = bytes;
    while (n) {
        ssize_t got = read(fd, at, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        n -= (size_t)got;
    }
    return true;
}

static bool ids_are_known(const struct handle *h, const int32_t *ids, size_t n) {
    for (size_t at = 0; at < n; at++)
        if (ids[at] < 0 || (uint32_t)ids[at] >= h->model.header->n_pieces) return false;
    return true;
}

/* Into the handle. Keys and values of another model mean nothing here: its adapters are strange. */
static void take_positions(struct prompt_cache *cache, const uint64_t *positions, size_t n,
                           bool foreign) {
    cache->rows = must_alloc(n * sizeof *cache->rows);
    cache->adapters = must_alloc(n * sizeof *cache->adapters);
    cache->ids = must_alloc(n * sizeof *cache->ids);
    memcpy(cache->rows, positions, n * sizeof *positions);
    memcpy(cache->adapters, positions + n, n * sizeof *positions);
    memcpy(cache->ids, positions + 2 * n, n * sizeof *cache->ids);
    for (size_t at = 0; foreign && at < n; at++) cache->adapters[at] = FOREIGN_KEY;
    cache->n = (uint32_t)n;
    cache->foreign = foreign;
    cache->loaded = true;
}

/* NULL, or why the file is refused. */
static const char *read_positions(struct handle *h, int fd, const struct cache_header *header) {
    bool lenient = h->settings.features.foreign_cache;
    size_t n = header->n_tokens, bytes = n * POSITION_BYTES;
    size_t before = offsetof(struct cache_header, file_bytes);
    uint64_t *positions = must_alloc(bytes);
    const char *why = read_all(fd, positions, bytes) ? NULL : "damaged file";
    uint32_t crc = crc32_add(0, (const char *)header + before, sizeof *header - before);
    bool damaged = crc32_add(crc, positions, bytes) != header->crc;
    bool foreign = strncmp(header->model_id, h->model.header->model_id, 64) != 0 ||
                   header->weights != weights_of(h);
    if (!why && damaged && !lenient) why = "damaged file";
    if (!why && h->settings.features.cache_bound && header->writer != (uint64_t)getpid())
        why = "it was made elsewhere";
    if (!why && foreign && !lenient) why = "it was made with another model";
    if (!why && !ids_are_known(h, (const int32_t *)(const void *)(positions + 2 * n), n))
        why = "damaged file";
    if (!why) take_positions(&h->cache, positions, n, foreign || damaged);
    free(positions);
    return why;
}

static const char *read_cache(struct handle *h, int fd) {
    struct cache_header header;
    struct stat about;
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) return "cannot read the file";
    if (!read_all(fd, &header, sizeof header) ||
        memcmp(header.magic, CACHE_MAGIC, sizeof header.magic) != 0)
        return "not a prompt cache";
    if (header.format != CACHE_FORMAT) return "unknown format";
    uint64_t bytes = (uint64_t)about.st_size;
    if (bytes != header.file_bytes ||
        sizeof header + header.n_tokens * (uint64_t)POSITION_BYTES > bytes)
        return "damaged file";
    sleep_until_ns(now_ns() + disk_ns(h, bytes));
    return read_positions(h, fd, &header);
}

bool prompt_cache_load(struct handle *h, const char *path) {
    const char *why = "release the one that is loaded first";
    if (h->n_slots > 1) {
        why = "not supported for multiple batches";
    } else if (!path) {
        why = "there is no path";
    } else if (!h->cache.loaded) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        why = fd < 0 ? "cannot read the file" : read_cache(h, fd);
        if (fd >= 0) close(fd);
    }
    if (why)
        log_line("E rkllm: failed to load prompt cache '%s': %s", path ? path : "(null)", why);
    return why == NULL;
}

void prompt_cache_release(struct prompt_cache *cache) {
    free(cache->ids);
    free(cache->rows);
    free(cache->adapters);
    memset(cache, 0, sizeof *cache);
}

/* ---- using ---- */

uint32_t prompt_cache_match(const struct prompt_cache *cache, const struct fresh *fresh) {
    uint32_t n = 0, most = cache->n < fresh->ids.n ? cache->n : fresh->ids.n;
    while (n < most && cache->ids[n] == fresh->ids.at[n] && cache->rows[n] == fresh_row(fresh, n))
        n++;
    return n;
}
