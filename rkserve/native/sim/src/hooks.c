/* The caller's own tokenizer and embedding layer, for models that were exported without (1.3.0).
 * What comes back is checked before it is believed: a count beyond the buffer, a negative one or an
 * id that the model does not have is an error of the run, never a read beyond the buffer. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

static bool ask_tokenizer(const struct handle *h, const struct text *text, struct fresh *out) {
    int32_t most = (int32_t)h->slots[0].kv.limit;
    if (text->n > INT32_MAX) {
        log_line("E rkllm: a text of %zu bytes is too long for tokenizer_callback", text->n);
        return false;
    }
    int32_t *ids = must_alloc((size_t)most * sizeof *ids);
    int n = h->hooks.tokenize(h->hooks.tokenize_userdata, text->n ? text->at : "",
                              (int32_t)text->n, ids, most);
    bool ok = n >= 0 && n <= most;
    if (!ok) log_line("E rkllm: tokenizer_callback returned %d, with room for %d", n, (int)most);
    for (int i = 0; ok && i < n; i++) {
        ok = ids[i] >= 0 && (uint32_t)ids[i] < h->model.header->n_pieces;
        if (!ok) log_line("E rkllm: tokenizer_callback gave the invalid token id %d", (int)ids[i]);
    }
    if (ok) ids_add(&out->ids, ids, (uint32_t)n);
    free(ids);
    return ok;
}

bool hooks_tokenize(const struct handle *h, const struct text *text, struct fresh *out) {
    if (!h->settings.features.no_tokenizer) {
        tokenize(&h->model, text->at ? text->at : "", text->n, true, &out->ids);
        return true;
    }
    if (h->hooks.tokenize) return ask_tokenizer(h, text, out);
    log_line("E rkllm: Tokenizer is unavailable: model has no internal tokenizer and no external "
             "tokenizer_callback provided.");
    return false;
}

/* A row that is the very embedding of its id changes nothing: then it is no row at all. */
static uint64_t row_for(int32_t id, const float *given) {
    float own[SIM_EMBED_DIM];
    embedding_of(id, own);
    return memcmp(own, given, sizeof own) == 0 ? 0 : row_digest(given, ROW_PLAIN, false);
}

static bool ask_embedding(const struct handle *h, int32_t *ids, uint32_t n, float *embeddings) {
    size_t bytes = (size_t)n * SIM_EMBED_DIM * sizeof *embeddings;
    memset(embeddings, 0xDD, bytes); /* what the caller leaves out is garbage, and shows */
    int code = h->hooks.embed(h->hooks.embed_userdata, ids, n, embeddings, bytes);
    if (code != 0) log_line("E rkllm: embed_callback returned %d for %u tokens", code, n);
    return code == 0;
}

bool hooks_embed(const struct handle *h, struct fresh *fresh) {
    if (!h->settings.features.no_embedding || fresh->ids.n == 0) return true;
    float *embeddings = must_alloc((size_t)fresh->ids.n * SIM_EMBED_DIM * sizeof *embeddings);
    int32_t *ids = must_alloc(fresh->ids.n * sizeof *ids);
    uint32_t n = 0;
    for (uint32_t at = 0; at < fresh->ids.n; at++)
        if (!fresh_row(fresh, at)) ids[n++] = fresh->ids.at[at];
    bool ok = !n || ask_embedding(h, ids, n, embeddings);
    const float *next = embeddings;
    for (uint32_t at = 0; ok && at < fresh->ids.n; at++) {
        if (fresh_row(fresh, at)) continue;
        uint64_t row = row_for(fresh->ids.at[at], next);
        if (row) fresh_set_row(fresh, at, row);
        next += SIM_EMBED_DIM;
    }
    free(embeddings);
    free(ids);
    return ok;
}

bool hooks_embed_one(const struct handle *h, int32_t id, uint64_t *row) {
    float embedding[SIM_EMBED_DIM];
    *row = 0;
    if (!h->settings.features.no_embedding) return true;
    if (!ask_embedding(h, &id, 1, embedding)) return false;
    *row = row_for(id, embedding);
    return true;
}

bool hooks_suffice(const struct handle *h) {
    if (!h->settings.features.no_embedding || h->hooks.embed) return true;
    log_line("E rkllm: Model has no embedding layer and no embed callback provided.");
    return false;
}
