/* What a run is given: checked, and turned into the token ids that join the context. Nothing here
 * changes the handle, so a run that is refused leaves no trace.
 *
 * A handle of n_batch slots reads so many inputs. Whether the caller passed so many cannot be
 * known: with fewer, what lies behind them in memory is read, here as on the real thing. */
#include "rksim.h"

/* ---- before anything is read from the inputs ---- */

static const void *content(const RKLLMInput *input) { /* what the input points to */
    switch (input->input_type) {
    case RKLLM_INPUT_PROMPT: return input->prompt_input;
    case RKLLM_INPUT_TOKEN: return input->token_input.input_ids;
    case RKLLM_INPUT_EMBED: return input->embed_input.embed;
    case RKLLM_INPUT_MULTIMODAL: return input->multimodal_input.prompt;
    }
    return NULL;
}

/* The one sign of a batch that is too short that can be seen: an entry that is no input at all. */
static bool entries_are_inputs(const struct handle *h, const RKLLMInput *inputs) {
    for (int at = 0; at < h->n_slots && h->n_slots > 1; at++) {
        if (content(&inputs[at])) continue;
        log_line("E rkllm: entry %d of a batch of %d is no input", at, h->n_slots);
        violation(is_strict(&h->settings), "bad_batch_entry");
        return false;
    }
    return true;
}

bool input_accepts(const struct handle *h, const RKLLMInput *inputs, const RKLLMInferParam *infer) {
    if (!inputs || !infer) {
        log_line("E rkllm: rkllm_run needs an input and infer params");
        return false;
    }
    bool saves = infer->prompt_cache_params && infer->prompt_cache_params->save_prompt_cache;
    if (saves && h->n_slots > 1) {
        log_line("E rkllm: Saving the prompt cache is not supported for multiple batches.");
        return false;
    }
    return entries_are_inputs(h, inputs);
}

/* ---- one entry ---- */

static bool take_tokens(const struct handle *h, const RKLLMTokenInput *input, const struct kv *past,
                        bool resumed, struct fresh *out) {
    uint32_t limit = past->limit;
    if (!input->input_ids || !input->n_tokens) {
        log_line("E rkllm: the token input is empty");
        return false;
    }
    if (input->n_tokens > limit) {
        log_line("E rkllm: prompt of %zu tokens exceeds max_context_len %u", input->n_tokens,
                 limit);
        return false;
    }
    for (size_t i = 0; i < input->n_tokens; i++) {
        int32_t id = input->input_ids[i];
        if (id >= 0 && (uint32_t)id < h->model.header->n_pieces) continue;
        log_line("E rkllm: invalid token id %d at %zu", (int)id, i);
        violation(is_strict(&h->settings), "token_out_of_range");
        return false;
    }
    /* Not verbatim: the last turn is closed first, as before a PROMPT. */
    if (h->settings.close_turns && past->n && !resumed)
        ids_add(&out->ids, &h->model.header->im_end, 1);
    ids_add(&out->ids, input->input_ids, (uint32_t)input->n_tokens);
    return true;
}

static bool take_prompt(const struct handle *h, const RKLLMInput *input, const struct kv *past,
                        bool resumed, struct fresh *out) {
    if (!input->prompt_input) {
        log_line("E rkllm: prompt_input is NULL");
        return false;
    }
    struct text text = {0};
    prompt_render(h, past, input, resumed, &text);
    bool ok = hooks_tokenize(h, &text, out);
    text_free(&text);
    if (ok && out->ids.n == 0) log_line("E rkllm: the prompt is empty");
    return out->ids.n > 0;
}

static bool take(const struct handle *h, const RKLLMInput *input, const struct kv *past,
                 bool resumed, struct fresh *out) {
    switch (input->input_type) {
    case RKLLM_INPUT_TOKEN: return take_tokens(h, &input->token_input, past, resumed, out);
    case RKLLM_INPUT_PROMPT: return take_prompt(h, input, past, resumed, out);
    case RKLLM_INPUT_MULTIMODAL: return take_multimodal(h, input, past, resumed, out);
    case RKLLM_INPUT_EMBED: 
        return take_embeddings(&h->model, &input->embed_input, past->limit, out);
    }
    log_line("E rkllm: unknown input_type %d", (int)input->input_type);
    return false;
}

bool input_take(const struct handle *h, const RKLLMInput *input, const struct kv *past,
                bool resumed, struct fresh *out) {
    if (!take(h, input, past, resumed, out)) return false;
    uint32_t n = out->ids.n;
    if (n <= past->limit - past->n)
        return input->input_type == RKLLM_INPUT_EMBED || hooks_embed(h, out);
    log_line("E rkllm: prompt of %u tokens after %u in the kv cache exceeds max_context_len %u",
             n, past->n, past->limit);
    return false;
}
