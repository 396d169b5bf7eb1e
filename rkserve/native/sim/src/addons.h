/* What a run can be given besides text and token ids: adapters, prompt caches, embeddings, pictures
 * and videos, cross attention, and the caller's own tokenizer and embedding layer. Part of rksim.h,
 * which includes it; docs/reference/simulator.md describes the files. */
#ifndef RKSIM_ADDONS_H
#define RKSIM_ADDONS_H

struct handle;
struct ids;
struct kv;
struct model;
struct text;

struct features { /* switches of the environment, read at init */
    double lora_ms_per_mb, disk_mb_per_s;
    bool cache_dense, foreign_cache, cache_bound, cache_with_history, no_save_with_history;
    bool cache_after_abort_ok, cache_after_abort_crash;
    bool no_tokenizer, no_embedding;
};
bool features_read(struct features *features);

/* ---- digest.c: what a row of floats or the content of a file comes down to ---- */

uint32_t crc32_add(uint32_t crc, const void *bytes, size_t n); /* as zlib; begin with 0 */
uint64_t spread(uint64_t value); /* the finish of splitmix64: similar in, unlike out */

/* ---- fresh.c: input on its way into the KV cache ---- */

/* A position whose embedding is not that of its id has a row: a digest of the embedding, and in its
 * low bits where it came from. An ordinary position has the row 0. */
enum row { ROW_PLAIN = 1, ROW_IMAGE = 2, ROW_VIDEO = 3, ROW_KIND = 3, ROW_FIRST = 4 };
struct fresh {
    struct ids ids;
    uint64_t *rows; /* of the first n_rows ids; every other row is 0 */
    uint32_t n_rows, rows_room;
};
void fresh_add(struct fresh *fresh, int32_t id, uint64_t row);
void fresh_set_row(struct fresh *fresh, uint32_t at, uint64_t row);
static inline uint64_t fresh_row(const struct fresh *fresh, uint32_t at) {
    return at < fresh->n_rows ? fresh->rows[at] : 0;
}
void fresh_free(struct fresh *fresh);

/* ---- embed.c: embeddings, and EMBED input ---- */

void embedding_of(int32_t id, float *row);
uint64_t row_digest(const float *row, enum row kind, bool first);
bool take_embeddings(const struct model *model, const RKLLMEmbedInput *input, uint32_t limit,
                     struct fresh *out);

/* ---- media.c: pictures and videos ---- */

bool take_multimodal(const struct handle *h, const RKLLMInput *input, const struct kv *past,
                     bool resumed, struct fresh *out);
/* What the context before `end` shows, in words; nothing if the last turn shows nothing, unless
 * what was shown before that is mentioned. */
void describe_media(const struct model *model, const struct kv *kv, uint32_t end, bool mentioned,
                    struct text *out);

/* ---- hooks.c: the caller's tokenizer and embedding layer (1.3.0) ---- */

struct hooks { /* both NULL before 1.3.0 */
    int (*tokenize)(void *, const char *, int32_t, int32_t *, int32_t);
    int (*embed)(void *, int32_t *, uint64_t, void *, uint64_t);
    void *tokenize_userdata, *embed_userdata;
};
/* Text to ids, by the model's tokenizer or by the caller's; false, and a log line, if neither. */
bool hooks_tokenize(const struct handle *h, const struct text *text, struct fresh *out);
/* The rows of all ids that have none yet, as the caller's embedding layer gives them. */
bool hooks_embed(const struct handle *h, struct fresh *fresh);
bool hooks_embed_one(const struct handle *h, int32_t id, uint64_t *row);
/* False, and a log line, if the model has no embedding layer and the caller gives none. */
bool hooks_suffice(const struct handle *h);

/* ---- lora.c: adapters ---- */

struct lora {
    struct lora *next;
    char *name;     /* as the caller calls it */
    char title[64]; /* as the file calls itself, and as the model says */
    uint64_t key;   /* of content and scale; 0, the base model's, at scale 0 */
};
bool lora_load(struct handle *h, const RKLLMLoraAdapter *adapter);
/* The key of the adapter that the run names; false, and a log line, if there is none such. */
bool lora_select(const struct handle *h, const RKLLMLoraParam *param, uint64_t *key);
const char *lora_title(const struct model *model, uint64_t key);
void lora_free(struct lora *lora);

/* ---- promptcache.c: the KV cache in a file ---- */

struct prompt_cache { /* what rkllm_load_prompt_cache loaded */
    uint32_t n;
    int32_t *ids;
    uint64_t *rows, *adapters;
    bool loaded, foreign; /* foreign: accepted although it should not have been */
};
#define FOREIGN_KEY UINT64_MAX /* the adapter of positions that another model computed */
bool prompt_cache_load(struct handle *h, const char *path);
/* Where the run wants its KV cache saved, for the caller to free; NULL: nowhere. */
char *prompt_cache_path(const struct handle *h, const RKLLMInferParam *infer);
void prompt_cache_release(struct prompt_cache *cache);
/* How many tokens of the input the cache already has. */
uint32_t prompt_cache_match(const struct prompt_cache *cache, const struct fresh *fresh);
void prompt_cache_save(struct handle *h, const struct kv *kv, const char *path);

/* ---- crossattn.c: the encoder's side of an encoder-decoder model ---- */

#define SIM_CROSS_DIM 128
/* Reads all arrays. False, and a log line, if they are not all there. */
bool cross_attn_digest(const RKLLMCrossAttnParam *param, uint64_t *digest);

#endif
