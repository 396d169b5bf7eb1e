/* LoRA adapters: the table of a handle, and the simulator's adapter files. An adapter changes the
 * model only while a run names it, and nothing can unload it. What it changes is in rules.c, and
 * in the hash of every position that was computed with it.
 *
 * Assumed, as nothing is known: a name that is taken is refused, and so is a scale that is no
 * number; scale 0 is the base model. */
#include "rksim.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LORA_MAGIC "RKSIMLRA"
#define LORA_FORMAT 1
struct lora_header { /* little-endian, as written by rkserve/native/sim/models.py */
    char magic[8];
    uint32_t format, crc; /* CRC-32 of everything after this */
    uint64_t file_bytes, seed;
    char base[64], title[64];
};

/* ---- the file ---- */

static bool is_text(const char *field, size_t room) { return memchr(field, '\0', room) != NULL; }

/* NULL, or why the file is refused. */
static const char *flaw(const struct handle *h, const struct lora_header *header, size_t bytes) {
    size_t before = offsetof(struct lora_header, file_bytes);
    if (bytes < sizeof *header || memcmp(header->magic, LORA_MAGIC, sizeof header->magic) != 0)
        return "not an adapter file";
    if (header->format != LORA_FORMAT) return "unknown format";
    if (header->file_bytes != bytes || !is_text(header->base, sizeof header->base) ||
        !is_text(header->title, sizeof header->title) ||
        crc32_add(0, (const char *)header + before, bytes - before) != header->crc)
        return "damaged file";
    bool fits = strcmp(header->base, "any") == 0 ||
                strcmp(header->base, h->model.header->model_id) == 0;
    return fits ? NULL : "it was made for another base model";
}

static uint64_t key_of(const struct lora_header *header, float scale) {
    uint32_t bits;
    if (scale == 0) return 0;
    memcpy(&bits, &scale, sizeof bits);
    return spread(spread(header->seed ^ (uint64_t)header->crc << 32) + bits) | 1;
}

static const void *map_adapter(const char *path, size_t *bytes) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    void *map = MAP_FAILED;
    if (fd < 0) return NULL;
    if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0) {
        *bytes = (size_t)about.st_size;
        map = mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    close(fd);
    return map == MAP_FAILED ? NULL : map;
}

/* ---- the table ---- */

static const struct lora *lora_named(const struct model *model, const char *name) {
    const struct lora *lora = model->loras;
    while (lora && strcmp(lora->name, name) != 0) lora = lora->next;
    return lora;
}

static const char *add(struct handle *h, const RKLLMLoraAdapter *adapter,
                       const struct lora_header *header, size_t bytes) {
    const char *why = flaw(h, header, bytes);
    double mb = (double)bytes / 1048576;
    if (why) return why;
    if (!domain_grow(h, mb)) return "no memory left in its domain";
    struct lora *lora = must_zero(sizeof *lora);
    lora->name = must_alloc(strlen(adapter->lora_adapter_name) + 1);
    strcpy(lora->name, adapter->lora_adapter_name);
    memcpy(lora->title, header->title, sizeof lora->title);
    lora->key = key_of(header, adapter->scale);
    lora->next = h->model.loras;
    h->model.loras = lora;
    double ms = mb * h->settings.features.lora_ms_per_mb * time_scale(&h->settings);
    if (ms > 0) sleep_until_ns(now_ns() + (int64_t)(ms * 1e6));
    return NULL;
}

bool lora_load(struct handle *h, const RKLLMLoraAdapter *adapter) {
    if (!adapter || !adapter->lora_adapter_path || !adapter->lora_adapter_name ||
        !isfinite(adapter->scale)) {
        log_line("E rkllm: rkllm_load_lora needs a path, a name and a scale");
        return false;
    }
    const char *path = adapter->lora_adapter_path;
    size_t bytes = 0;
    const void *map = NULL;
    const char *why = "the name is taken";
    control_refresh(&h->settings);
    if (fault_due(&h->settings, FAULT_LORA_SEGV, 0)) crash_now();
    if (fault_due(&h->settings, FAULT_LORA_HANG, 0)) sleep_forever();
    if (fault_due(&h->settings, FAULT_LORA_FAIL, 0)) {
        log_line("E rkllm: failed to load lora adapter '%s': a fault that was asked for", path);
        return false;
    }
    if (!lora_named(&h->model, adapter->lora_adapter_name)) {
        map = map_adapter(path, &bytes);
        why = map ? add(h, adapter, map, bytes) : "cannot read the file";
    }
    if (map) munmap((void *)(uintptr_t)map, bytes);
    if (why) log_line("E rkllm: failed to load lora adapter '%s': %s", path, why);
    return why == NULL;
}

bool lora_select(const struct handle *h, const RKLLMLoraParam *param, uint64_t *key) {
    const char *name = param ? param->lora_adapter_name : NULL;
    const struct lora *lora = name ? lora_named(&h->model, name) : NULL;
    *key = lora ? lora->key : 0;
    if (!name || lora) return true;
    log_line("E rkllm: lora adapter '%s' is not loaded", name);
    return false;
}

const char *lora_title(const struct model *model, uint64_t key) {
    const struct lora *lora = key ? model->loras : NULL;
    while (lora && lora->key != key) lora = lora->next;
    return lora ? lora->title : "";
}

void lora_free(struct lora *lora) {
    while (lora) {
        struct lora *next = lora->next;
        free(lora->name);
        free(lora);
        lora = next;
    }
}
