/* What the caller of a suspended asynchronous run must not lose. With RKSIM_ASYNC_PAUSE the runtime
 * honours a pause of such a run and, as a job that is suspended in the middle would, goes on
 * referring to the structs it was started with. When it resumes it looks at them again: if they are
 * not what they were, the caller has dropped them, and the real thing would by now work on somebody
 * else's memory. It does not repair anything, and it copies no more than it needs to know. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

static uint64_t sum_bytes(uint64_t sum, const void *at, size_t n) { /* FNV-1a */
    const unsigned char *bytes = at;
    for (size_t i = 0; at && i < n; i++) sum = (sum ^ bytes[i]) * 0x100000001B3u;
    return sum * 31 + n;
}

static uint64_t sum_text(uint64_t sum, const char *text) {
    return sum_bytes(sum, text, text ? strlen(text) : 0);
}

static uint64_t sum_input(uint64_t sum, const RKLLMInput *input) {
    sum = sum_text(sum, input->role);
    switch (input->input_type) {
    case RKLLM_INPUT_PROMPT: return sum_text(sum, input->prompt_input);
    case RKLLM_INPUT_MULTIMODAL: return sum_text(sum, input->multimodal_input.prompt);
    case RKLLM_INPUT_TOKEN:
        return sum_bytes(sum, input->token_input.input_ids,
                         input->token_input.n_tokens * sizeof *input->token_input.input_ids);
    case RKLLM_INPUT_EMBED:
        return sum_bytes(sum, input->embed_input.embed,
                         input->embed_input.n_tokens * SIM_EMBED_DIM * sizeof(float));
    }
    return sum;
}

static uint64_t sum_inputs(const struct handle *h, const RKLLMInput *inputs) {
    uint64_t sum = 14695981039346656037u;
    for (int at = 0; at < h->n_slots; at++) sum = sum_input(sum, &inputs[at]);
    return sum;
}

void held_take(struct handle *h, const RKLLMInput *inputs, const RKLLMInferParam *infer) {
    struct held *held = &h->held;
    size_t bytes = (size_t)h->n_slots * sizeof *inputs;
    held->inputs = inputs;
    held->infer = infer;
    held->inputs_then = must_grow(held->inputs_then, bytes);
    memcpy(held->inputs_then, inputs, bytes);
    memcpy(&held->infer_then, infer, sizeof *infer);
    held->sum = sum_inputs(h, inputs);
}

void held_drop(struct handle *h) {
    free(h->held.inputs_then);
    h->held = (struct held){0};
}

/* The structs first: their pointers are followed only while they are the same. */
static bool still_there(const struct handle *h, const RKLLMInput *inputs,
                        const RKLLMInferParam *infer) {
    const struct held *held = &h->held;
    size_t bytes = (size_t)h->n_slots * sizeof *inputs;
    if (infer != held->infer && memcmp(held->infer, &held->infer_then, sizeof *infer) != 0)
        return false;
    if (inputs == held->inputs) return true; /* the caller has updated its content, as it may */
    return memcmp(held->inputs, held->inputs_then, bytes) == 0 &&
           sum_inputs(h, held->inputs) == held->sum;
}

void held_check(struct handle *h, const RKLLMInput *inputs, const RKLLMInferParam *infer) {
    if (h->held.inputs && !still_there(h, inputs, infer))
        violation(is_strict(&h->settings), "input_dropped_while_paused");
}
