/* A look inside the model, instead of a generation: its last hidden layer, or its logits, one row
 * for each position that this run added to the context. Row r speaks after the first r + 1 of them,
 * on top of what the context held before. It computes rows; callback.c hands them out.
 *
 * Logits are what the responder would choose from, and for the rest of the vocabulary a floor that
 * a softmax does not see. A hidden state is a direction in 64 dimensions: the sum of the directions
 * of the words so far, so that texts with words in common are near each other, and a smaller part
 * that hangs on the whole context, so that no two contexts are the same. */
#include "rksim.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

static const float FLOOR_LOGIT = -16, FLOOR_DEPTH = 4; /* of the vocabulary that is not meant */
static const float CONTEXT_SHARE = 0.35f;              /* of a hidden state's length */

static float in_unit(uint64_t hash) { return (float)(hash >> 40) / (float)(1u << 24); } /* [0, 1) */

/* ---- whether ---- */

static bool loses_its_mask(const struct handle *h, const RKLLMInput *input,
                           const RKLLMInferParam *infer) {
    if (IS_1_3 || infer->mode != RKLLM_INFER_GET_LOGITS || !infer->keep_history ||
        input->input_type != RKLLM_INPUT_TOKEN)
        return false;
    violation(false, "logits_with_history");
    if (is_strict(&h->settings)) ggml_assert_now("mask->ne[0]==a->ne[0]");
    return true;
}

bool inside_accepts(const struct handle *h, const RKLLMInput *inputs, const RKLLMInferParam *infer,
                    bool resumed) {
    bool logits = infer->mode == RKLLM_INFER_GET_LOGITS;
    if (infer->mode == RKLLM_INFER_GENERATE) return true;
    if (!logits && infer->mode != RKLLM_INFER_GET_LAST_HIDDEN_LAYER) {
        log_line("E rkllm: unknown infer mode %d", (int)infer->mode);
        return false;
    }
    if (h->n_slots > 1) {
        log_line("E rkllm: Getting the %s is not supported for multiple batches.",
                 logits ? "logits" : "last hidden layer");
        return false;
    }
    if (resumed) {
        violation(is_strict(&h->settings), "hidden_while_paused");
        return false;
    }
    return !loses_its_mask(h, inputs, infer);
}

/* ---- logits ---- */

static void logits_row(const struct model *model, uint64_t hash, const struct candidates *c,
                       float *row) {
    for (uint32_t id = 0; id < model->header->n_pieces; id++)
        row[id] = FLOOR_LOGIT - FLOOR_DEPTH * in_unit(spread(hash + id * 0x9E3779B97F4A7C15u));
    for (int i = 0; i < c->n; i++) row[c->ids[i]] = c->logits[i];
}

static void logits_rows(const struct handle *h, struct kv kv, uint32_t past, float *out) {
    struct responder responder = {0};
    struct candidates candidates;
    uint32_t all = kv.n;
    bool raw = true;
    responder_forget(&responder);
    for (uint32_t at = 0; at < past; at++) raw &= kv.ids[at] != h->model.header->im_start;
    for (kv.n = past + 1; kv.n <= all; kv.n++, out += h->model.header->n_pieces) {
        raw &= kv.ids[kv.n - 1] != h->model.header->im_start;
        if (raw) responder_forget(&responder); /* raw text is judged as a whole */
        responder_next(&responder, &h->model, &kv, !h->ignore_eos_token, &candidates);
        logits_row(&h->model, kv_hash(&kv, kv.n), &candidates, out);
    }
    responder_close(&responder);
}

/* ---- hidden states ---- */

static void add_direction(uint64_t seed, float *out) {
    for (uint32_t d = 0; d < SIM_EMBED_DIM; d++)
        out[d] += 2 * in_unit(spread(seed + (d + 1) * 0x9E3779B97F4A7C15u)) - 1;
}

static float length_of(const float *vector) {
    float square = 0;
    for (int d = 0; d < SIM_EMBED_DIM; d++) square += vector[d] * vector[d];
    return square > 0 ? sqrtf(square) : 1;
}

/* "Cat", " cat" and "cat" are one word; markers and punctuation are none. */
static uint64_t word_of(const struct model *model, int32_t id) {
    const struct piece *piece = &model->pieces[id];
    if (piece->flags) return 0;
    const unsigned char *bytes = piece_bytes(model, id);
    uint64_t hash = 0;
    for (uint32_t i = 0; i < piece->n; i++)
        if (bytes[i] >= 0x80 || isalnum(bytes[i]))
            hash = spread(hash + (uint64_t)tolower(bytes[i]) + 1);
    return hash;
}

static void hidden_rows(const struct handle *h, const struct kv *kv, uint32_t past, float *out) {
    float words[SIM_EMBED_DIM] = {0};
    for (uint32_t at = 0; at < kv->n; at++) {
        /* A position that is no token of the vocabulary has its embedding for a word. */
        uint64_t word = kv->rows[at] ? kv->rows[at] : word_of(&h->model, kv->ids[at]);
        if (word) add_direction(word, words);
        if (at < past) continue;
        float whole[SIM_EMBED_DIM] = {0};
        add_direction(kv_hash(kv, at + 1), whole);
        float of_words = 1 / length_of(words), of_whole = CONTEXT_SHARE / length_of(whole);
        for (int d = 0; d < SIM_EMBED_DIM; d++)
            out[d] = words[d] * of_words + whole[d] * of_whole;
        float length = length_of(out);
        for (int d = 0; d < SIM_EMBED_DIM; d++) out[d] /= length;
        out += SIM_EMBED_DIM;
    }
}

/* ---- both ---- */

static float *room_for(struct handle *h, size_t floats) {
    if (floats > h->inside_room) {
        h->inside = must_grow(h->inside, floats * sizeof *h->inside);
        h->inside_room = floats;
    }
    return h->inside;
}

void inside_show(struct handle *h, RKLLMInferMode mode, RKLLMResult *result) {
    const struct slot *slot = &h->slots[0];
    uint32_t past = slot->kv.n - slot->fresh, vocabulary = h->model.header->n_pieces;
    if (mode == RKLLM_INFER_GET_LOGITS) {
        float *rows = room_for(h, (size_t)slot->fresh * vocabulary);
        logits_rows(h, slot->kv, past, rows);
        result->logits = (RKLLMResultLogits){rows, (int)vocabulary, (int)slot->fresh};
    } else {
        float *rows = room_for(h, (size_t)slot->fresh * SIM_EMBED_DIM);
        hidden_rows(h, &slot->kv, past, rows);
        result->last_hidden_layer =
            (RKLLMResultLastHiddenLayer){rows, SIM_EMBED_DIM, (int)slot->fresh};
    }
}
