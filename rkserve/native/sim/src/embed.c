/* Embeddings, and input that is made of them: EMBED, and the pictures and videos of MULTIMODAL.
 *
 * A row of floats that is exactly the embedding of a token id is that id, so text can be given
 * either way. Any other row becomes a position without text, whose digest changes the context. It
 * does not know the release's two ways to pass pictures: media.c does. */
#include "rksim.h"

#include <string.h>

/* Component 0 tells the id; the others are there so that no two rows look alike. All of them are
 * exact in a float, so rkserve/native/sim/models.py makes the same bytes. */
void embedding_of(int32_t id, float *row) {
    row[0] = (float)(id + 1) / 1048576.0f;
    for (int at = 1; at < SIM_EMBED_DIM; at++) {
        uint64_t bits = spread((uint64_t)id * SIM_EMBED_DIM + (uint64_t)at) >> 40;
        row[at] = (float)bits / 8388608.0f - 1.0f;
    }
}

static int32_t embedded_id(const struct model *model, const float *row) { /* -1: none */
    float own[SIM_EMBED_DIM], id = row[0] * 1048576.0f - 1.0f;
    if (!(id >= 0 && id < (float)model->header->n_pieces)) return -1;
    embedding_of((int32_t)id, own);
    return memcmp(own, row, sizeof own) == 0 ? (int32_t)id : -1;
}

uint64_t row_digest(const float *row, enum row kind, bool first) {
    uint64_t digest = spread(crc32_add(0, row, SIM_EMBED_DIM * sizeof *row));
    return (digest & ~7ull) | (uint64_t)kind | (first ? ROW_FIRST : 0);
}

bool take_embeddings(const struct model *model, const RKLLMEmbedInput *input, uint32_t limit,
                     struct fresh *out) {
    if (!input->embed || !input->n_tokens) {
        log_line("E rkllm: the embed input is empty");
        return false;
    }
    if (input->n_tokens > limit) {
        log_line("E rkllm: prompt of %zu tokens exceeds max_context_len %u", input->n_tokens,
                 limit);
        return false;
    }
    for (size_t at = 0; at < input->n_tokens; at++) {
        const float *row = input->embed + at * SIM_EMBED_DIM;
        int32_t id = embedded_id(model, row);
        if (id >= 0) fresh_add(out, id, 0);
        else fresh_add(out, model->header->silent, row_digest(row, ROW_PLAIN, false));
    }
    return true;
}
