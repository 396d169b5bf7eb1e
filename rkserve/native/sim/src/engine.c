/* One run of one handle: take the input in, wait for the prefill, then token by token choose, call
 * back, put it into the KV cache, wait. Callbacks come on the thread that runs. No lock is held
 * while the callback has control, so it may call rkllm_abort, rkllm_is_running and the like.
 *
 * The order in generate() is the contract: a token is not in the KV cache while its callback runs,
 * an abort takes effect after the token that is being decoded, and only NORMAL can pause. */
#include "rksim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum outcome { GO_ON, FINISHED, PAUSED, FAILED };

struct job {
    struct handle *h;
    void *userdata;
    bool async, history, thinking;
    int64_t budget; /* tokens; 0: until the context is full */
    struct sampling sampling;
    uint32_t fresh, generated;
    int64_t started, first_token, last_return; /* ns */
    int64_t abort_ignored_until;
    struct text pending; /* bytes of a character that is not complete yet */
};

/* ---- the handle's state ---- */

bool engine_begin(struct handle *h, bool *resumed) {
    pthread_mutex_lock(&h->lock);
    bool busy = h->state == STATE_RUNNING, corrupt = h->corrupt;
    *resumed = h->state == STATE_PAUSED;
    if (!busy) {
        h->state = STATE_RUNNING;
        h->abort_ns = 0;
    }
    pthread_mutex_unlock(&h->lock);
    if (busy) violation(is_strict(&h->settings), "run_while_running");
    if (corrupt) violation(true, "run_after_clear_while_paused");
    return !busy;
}

static void end_run(struct handle *h, enum state state) {
    atomic_store(&h->kv_size, h->kv.n);
    pthread_mutex_lock(&h->lock);
    h->state = state;
    pthread_cond_broadcast(&h->stopped);
    pthread_mutex_unlock(&h->lock);
}

static bool aborted(struct job *job) {
    struct handle *h = job->h;
    pthread_mutex_lock(&h->lock);
    int64_t asked = h->abort_ns;
    pthread_mutex_unlock(&h->lock);
    if (!asked) return false;
    unsigned long ignore_ms = h->settings.control.fault_arg;
    if (!job->abort_ignored_until)
        job->abort_ignored_until =
            fault_due(&h->settings, FAULT_IGNORE_ABORT_MS, 0) ? asked + (int64_t)ignore_ms * 1000000
                                                              : asked;
    return now_ns() >= job->abort_ignored_until;
}

static void context_changed(struct handle *h) {
    responder_forget(&h->responder);
    atomic_store(&h->kv_size, h->kv.n);
}

/* ---- input ---- */

static bool unsupported(const char *what) {
    log_line("E rkllm: %s not supported by this simulator yet", what);
    return false;
}

static bool accepts(const RKLLMInput *input, const RKLLMInferParam *infer) {
    if (!input || !infer) {
        log_line("E rkllm: rkllm_run needs an input and infer params");
        return false;
    }
    if (infer->mode == RKLLM_INFER_GET_LAST_HIDDEN_LAYER)
        return unsupported("RKLLM_INFER_GET_LAST_HIDDEN_LAYER is");
    if (infer->mode == RKLLM_INFER_GET_LOGITS) return unsupported("RKLLM_INFER_GET_LOGITS is");
    if (infer->lora_params && infer->lora_params->lora_adapter_name)
        return unsupported("lora adapters are");
    if (infer->prompt_cache_params && infer->prompt_cache_params->save_prompt_cache)
        return unsupported("prompt caches are");
    return true;
}

static bool take_tokens(const struct handle *h, const RKLLMTokenInput *input, struct ids *out) {
    if (!input->input_ids || !input->n_tokens) {
        log_line("E rkllm: the token input is empty");
        return false;
    }
    if (input->n_tokens > h->kv.limit) {
        log_line("E rkllm: prompt of %zu tokens exceeds max_context_len %u", input->n_tokens,
                 h->kv.limit);
        return false;
    }
    for (size_t i = 0; i < input->n_tokens; i++) {
        int32_t id = input->input_ids[i];
        if (id >= 0 && (uint32_t)id < h->model.header->n_pieces) continue;
        log_line("E rkllm: invalid token id %d at %zu", (int)id, i);
        violation(is_strict(&h->settings), "token_out_of_range");
        return false;
    }
    ids_add(out, input->input_ids, (uint32_t)input->n_tokens);
    return true;
}

static bool take_prompt(const struct handle *h, const RKLLMInput *input, bool resumed,
                        struct ids *out) {
    if (!input->prompt_input) {
        log_line("E rkllm: prompt_input is NULL");
        return false;
    }
    struct text text = {0};
    prompt_render(h, input, resumed, &text);
    tokenize(&h->model, text.at, text.n, true, out);
    text_free(&text);
    if (out->n == 0) log_line("E rkllm: the prompt is empty");
    return out->n > 0;
}

static bool take_multimodal(const RKLLMMultiModalInput *input) {
#if IS_1_3
    bool counted = input->image.n_image && input->image.n_image_tokens;
#else
    bool counted = input->n_image && input->n_image_tokens;
#endif
    if (counted) return unsupported("multimodal input is");
    log_line("E rkllm: The n_image/n_image_token of multimodal_input is not set");
    return false;
}

static bool take_input(const struct handle *h, const RKLLMInput *input, bool resumed,
                       struct ids *out) {
    switch (input->input_type) {
    case RKLLM_INPUT_TOKEN: return take_tokens(h, &input->token_input, out);
    case RKLLM_INPUT_PROMPT: return take_prompt(h, input, resumed, out);
    case RKLLM_INPUT_MULTIMODAL: return take_multimodal(&input->multimodal_input);
    case RKLLM_INPUT_EMBED: return unsupported("embed input is");
    }
    log_line("E rkllm: unknown input_type %d", (int)input->input_type);
    return false;
}

/* The input joins the context. Nothing of the context is lost when it does not fit. */
static bool prefill(struct job *job, const RKLLMInput *input, bool resumed) {
    struct handle *h = job->h;
    struct ids fresh = {0};
    if (log_level() >= LOG_DETAIL) log_line("I rkllm: current kv cache size: %u", h->kv.n);
    if (!job->history && !resumed) { /* single-turn: whatever was said before is not heard */
        h->kv.n = 0;
        context_changed(h);
    }
    bool ok = take_input(h, input, resumed, &fresh);
    if (ok && fresh.n > h->kv.limit - h->kv.n) {
        log_line("E rkllm: prompt of %u tokens after %u in the kv cache exceeds max_context_len %u",
                 fresh.n, h->kv.n, h->kv.limit);
        ok = false;
    }
    if (ok) {
        double ms = prefill_ms(h->profile, fresh.n, h->kv.n) * time_scale(&h->settings);
        kv_append(&h->kv, fresh.at, fresh.n);
        context_changed(h);
        job->fresh = fresh.n;
        if (fault_due(&h->settings, FAULT_HANG_IN_PREFILL, 0)) sleep_forever();
        if (ms > 0) sleep_until_ns(job->started + (int64_t)(ms * 1e6)); /* deaf to abort */
    }
    ids_free(&fresh);
    return ok;
}

/* ---- choosing ---- */

static double draw(struct handle *h) { /* xorshift64*, in [0, 1) */
    h->rng ^= h->rng >> 12;
    h->rng ^= h->rng << 25;
    h->rng ^= h->rng >> 27;
    return (double)((h->rng * 0x2545F4914F6CDD1Du) >> 11) / 9007199254740992.0;
}

static int32_t sample(struct job *job, const struct candidates *c) {
    const struct sampling *how = &job->sampling;
    int n = how->top_k > 0 && how->top_k < c->n ? how->top_k : c->n;
    if (n == 1 || how->temperature <= 0) return c->ids[0];
    double weight[MAX_CANDIDATES], all = 0, kept = 0;
    for (int i = 0; i < n; i++)
        all += weight[i] = exp((double)(c->logits[i] - c->logits[0]) / (double)how->temperature);
    double enough = how->top_p > 0 && how->top_p < 1 ? (double)how->top_p * all : all;
    int nucleus = 0;
    while (nucleus < n && (nucleus == 0 || kept < enough)) kept += weight[nucleus++];
    double at = draw(job->h) * kept;
    for (int i = 0; i < nucleus; i++)
        if ((at -= weight[i]) < 0) return c->ids[i];
    return c->ids[0];
}

static int32_t next_token(struct job *job) {
    struct handle *h = job->h;
    struct candidates candidates;
    responder_next(&h->responder, &h->model, &h->kv, !h->ignore_eos_token, &candidates);
    return sample(job, &candidates);
}

/* ---- calling back ---- */

static void set_text(struct handle *h, const struct text *text) {
    if (text->n + 1 > h->text_room) {
        h->text_room = text->n + 64;
        h->text_buffer = must_grow(h->text_buffer, h->text_room);
    }
    if (text->n) memcpy(h->text_buffer, text->at, text->n);
    h->text_buffer[text->n] = '\0';
    h->result.text = h->text_buffer;
}

/* Results live as long as the callback. What comes after finds 0xDD, not yesterday's text. */
static int call_back(struct job *job, LLMCallState state) {
    struct handle *h = job->h;
    int code = h->on_result(&h->result, job->userdata, state);
    memset(&h->result, 0xDD, sizeof h->result);
    if (h->text_buffer) memset(h->text_buffer, 0xDD, h->text_room);
    if (code == 2 && IS_1_3) { /* "free the output buffer at once" */
        free(h->text_buffer);
        h->text_buffer = NULL;
        h->text_room = 0;
        code = 0;
    }
    job->last_return = now_ns();
    return code;
}

/* Why a callback's answer is not the plain 0, or a pause that this runtime supports. */
static const char *misuse(const struct job *job, LLMCallState state, int code) {
    if (code == 0) return NULL;
    if (code == 2) return "return_2_before_1_3";
    if (code != 1) return "unknown_return_value";
    if (state == RKLLM_RUN_WAITING) return "pause_on_waiting";
    if (state == RKLLM_RUN_FINISH) return "pause_on_finish";
    if (state == RKLLM_RUN_ERROR) return "pause_on_error";
    if (job->history) return "pause_with_history";
    return job->async ? "pause_async" : NULL;
}

static bool pauses(struct job *job, LLMCallState state) {
    int code = call_back(job, state);
    const char *name = misuse(job, state, code);
    if (name) violation(is_strict(&job->h->settings), name);
    return code == 1 && !name;
}

static bool ends_inside_character(const struct text *text) {
    for (size_t back = 1; back <= 3 && back <= text->n; back++) {
        unsigned char c = (unsigned char)text->at[text->n - back];
        if ((c & 0xC0) == 0x80) continue;
        size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC2 ? 2 : 1;
        return back < length;
    }
    return false;
}

static enum outcome emit(struct job *job, int32_t id, bool eos) {
    struct handle *h = job->h;
    const struct piece *piece = &h->model.pieces[id];
    bool hidden = piece->flags & PIECE_SILENT ||
                  (h->skip_special_token && piece->flags & PIECE_SPECIAL);
    if (!hidden) text_add(&job->pending, (const char *)piece_bytes(&h->model, id), piece->n);
    LLMCallState state = RKLLM_RUN_NORMAL;
    memset(&h->result, 0, sizeof h->result);
    h->result.token_id = id;
    if (!eos && ends_inside_character(&job->pending)) {
        state = RKLLM_RUN_WAITING; /* text stays NULL: it comes with the next NORMAL */
    } else if (eos || job->pending.n) {
        set_text(h, &job->pending);
        job->pending.n = 0;
    }
    return pauses(job, state) ? PAUSED : GO_ON;
}

static void log_stage(const char *name, double ms, int tokens) {
    double each = tokens ? ms / tokens : 0;
    log_line("I rkllm:  %-12s  %-15.2f  %-8d  %-23.2f  %.2f", name, ms, tokens, each,
             each > 0 ? 1000 / each : 0);
}

static void log_perf(const RKLLMPerfStat *perf) {
    log_line("I rkllm:  Stage         Total Time (ms)  Tokens    Time per Token (ms)      "
             "Tokens per Second");
    log_stage("Prefill", (double)perf->prefill_time_ms, perf->prefill_tokens);
    log_stage("Generate", (double)perf->generate_time_ms, perf->generate_tokens);
    log_line("I rkllm:  Peak Memory Usage (GB)");
    log_line("I rkllm:  %.2f", (double)perf->memory_usage_mb / 1024);
}

static void report_finish(struct job *job) {
    struct handle *h = job->h;
    int64_t first = job->generated ? job->first_token : job->last_return;
    memset(&h->result, 0, sizeof h->result);
    h->result.perf = (RKLLMPerfStat){
        .prefill_time_ms = (float)((double)(first - job->started) / 1e6),
        .prefill_tokens = (int)job->fresh,
        .generate_time_ms = (float)((double)(job->last_return - first) / 1e6),
        .generate_tokens = (int)job->generated,
        .memory_usage_mb = (float)h->profile->memory_mb,
    };
    if (log_level() >= LOG_PERF) log_perf(&h->result.perf);
    if (log_level() >= LOG_DETAIL)
        log_line("I rkllm: In this conversation: the newly added user cache size is %u; system "
                 "cache size is %u", job->fresh + job->generated, system_part(&h->model, &h->kv));
    pauses(job, RKLLM_RUN_FINISH);
}

static void report_error(struct job *job) {
    memset(&job->h->result, 0, sizeof job->h->result);
    pauses(job, RKLLM_RUN_ERROR);
}

/* ---- generating ---- */

/* A full context moves on in a conversation: half of what comes after n_keep is forgotten. */
static bool make_room(struct job *job) {
    struct handle *h = job->h;
    if (h->kv.n < h->kv.limit) return true;
    if (!job->history || h->n_keep < 0 || (uint32_t)h->n_keep + 1 >= h->kv.limit) return false;
    uint32_t keep = (uint32_t)h->n_keep, forget = (h->kv.n - keep + 1) / 2;
    kv_remove(&h->kv, keep, keep + forget);
    context_changed(h);
    if (log_level() >= LOG_DETAIL)
        log_line("I rkllm: context shift: kept %u, forgot %u tokens", keep, forget);
    return true;
}

static bool token_faults(struct job *job) { /* true: this token fails the run */
    struct settings *s = &job->h->settings;
    unsigned long token = job->generated;
    if (fault_due(s, FAULT_SEGV_AT_TOKEN, token)) crash_now();
    if (fault_due(s, FAULT_ABORT_AT_TOKEN, token)) ggml_assert_now();
    if (fault_due(s, FAULT_HANG_AT_TOKEN, token)) sleep_forever();
    return fault_due(s, FAULT_ERROR_AT_TOKEN, token);
}

static void decode(struct job *job) {
    const struct handle *h = job->h;
    double ms = decode_ms(h->profile, h->kv.n) * time_scale(&h->settings);
    /* The next decode starts when the callback returns: a slow callback delays it. */
    if (ms > 0) sleep_until_ns(job->last_return + (int64_t)(ms * 1e6));
}

static enum outcome generate(struct job *job) {
    struct handle *h = job->h;
    job->first_token = job->last_return = now_ns();
    for (;;) {
        if (job->generated == 0 && aborted(job)) return FINISHED;
        int32_t id = next_token(job);
        bool eos = is_eos(&h->model, id) && !h->ignore_eos_token;
        if (job->thinking && h->settings.think_finish && id == h->model.header->think_close)
            return FINISHED;
        job->generated++;
        control_refresh(&h->settings);
        if (token_faults(job)) return FAILED;
        enum outcome outcome = emit(job, id, eos);
        if (outcome != GO_ON) return outcome;
        if (eos || !make_room(job)) return FINISHED;
        kv_append(&h->kv, &id, 1);
        atomic_store(&h->kv_size, h->kv.n);
        if (job->budget > 0 && job->generated >= job->budget) return FINISHED;
        if (aborted(job)) return FINISHED;
        decode(job);
    }
}

static struct job job_for(struct handle *h, const RKLLMInferParam *infer, void *userdata) {
    struct job job = {.h = h, .userdata = userdata, .sampling = h->sampling,
                      .budget = h->max_new_tokens > 0 ? h->max_new_tokens : 0,
                      .history = infer->keep_history != 0, .started = now_ns()};
#if IS_1_3
    if (!userdata) job.userdata = h->on_result_userdata;
    if (infer->max_new_tokens > 0) job.budget = infer->max_new_tokens;
    const RKLLMSamplingParam *how = infer->sampling_params;
    if (how) job.sampling = (struct sampling){how->top_k, how->top_p, how->temperature};
#endif
    return job;
}

static int settle(struct job *job, enum outcome outcome) {
    struct handle *h = job->h;
    if (outcome == FINISHED) report_finish(job);
    if (outcome == FAILED) report_error(job);
    if (outcome == FINISHED && fault_due(&h->settings, FAULT_HANG_AFTER_FINISH, 0)) sleep_forever();
    if (outcome != PAUSED && !job->history) {
        h->kv.n = 0;
        context_changed(h);
    }
    text_free(&job->pending);
    end_run(h, outcome == PAUSED ? STATE_PAUSED : STATE_IDLE);
    return outcome == FAILED ? -1 : 0;
}

int engine_run(struct handle *h, const RKLLMInput *input, const RKLLMInferParam *infer,
               void *userdata, bool async, bool resumed) {
    enum state before = resumed ? STATE_PAUSED : STATE_IDLE;
    control_refresh(&h->settings);
    bool accepted = accepts(input, infer);
    if (!accepted || fault_due(&h->settings, FAULT_NO_CALLBACK, 0)) {
        end_run(h, before);
        return accepted ? 0 : -1;
    }
    struct job job = job_for(h, infer, userdata);
    job.async = async;
    job.thinking = IS_1_3 && input->enable_thinking && input->input_type == RKLLM_INPUT_PROMPT &&
                   !h->prompt_prefix;
    long slack = timer_slack_tighten();
    bool taken = prefill(&job, input, resumed);
    int code = -1;
    if (taken) code = settle(&job, generate(&job));
    else end_run(h, before);
    timer_slack_restore(slack);
    return code;
}
