/* One run of one handle: take the input in, wait for the prefill, then token by token choose, call
 * back, put it into the KV cache, wait. Callbacks come on the thread that runs. No lock is held
 * while the callback has control, so it may call rkllm_abort, rkllm_is_running and the like.
 *
 * All slots of a batch take their steps together; one that has ended waits for the others. The
 * order in generate() is the contract: a token is not in the KV cache while its callback runs, an
 * abort takes effect after the token that is being decoded, and only NORMAL can pause. */
#include "rksim.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

enum outcome { FINISHED, PAUSED, FAILED };

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
    job->aborted = now_ns() >= job->abort_ignored_until;
    return job->aborted;
}

/* ---- prefill ---- */

/* What a slot's context holds before this run adds to it: a single turn hears nothing older. */
static struct kv past_of(const struct job *job, const struct slot *slot) {
    struct kv past = slot->kv;
    if (!job->history && !job->resumed) past.n = 0;
    return past;
}

static bool take_inputs(const struct job *job, struct fresh *fresh) {
    for (int at = 0; at < job->h->n_slots; at++) {
        struct kv past = past_of(job, &job->h->slots[at]);
        if (!input_take(job->h, &job->inputs[at], &past, job->resumed, &fresh[at])) return false;
    }
    return true;
}

/* The beginning of the last single turn, where the runtime reuses it: its positions lie where they
 * lay, so each is appended over itself. */
static uint32_t reuse(const struct job *job, struct kv *kv, const struct fresh *fresh,
                      uint32_t in_ram) {
    uint32_t n = 0, most = in_ram < fresh->ids.n ? in_ram : fresh->ids.n;
    if (job->resumed || job->history || job->mode != RKLLM_INFER_GENERATE) return 0;
    kv->adapter = job->adapter;
    for (; n < most && kv->ids[n] == fresh->ids.at[n] && kv->rows[n] == fresh_row(fresh, n) &&
           kv->adapters[n] == job->adapter;
         n++)
        kv_append(kv, fresh->ids.at[n], fresh_row(fresh, n));
    return n;
}

/* What a loaded prompt cache has of the input is there at once. Returns how many ids that are. */
static uint32_t restore(const struct job *job, struct kv *kv, const struct fresh *fresh) {
    const struct handle *h = job->h;
    if (!h->cache.loaded || job->resumed || kv->n || job->mode != RKLLM_INFER_GENERATE ||
        (job->history && !h->settings.features.cache_with_history))
        return 0;
    uint32_t n = prompt_cache_match(&h->cache, fresh);
    for (uint32_t at = 0; at < n; at++) {
        kv->adapter = h->cache.adapters[at];
        kv_append(kv, h->cache.ids[at], h->cache.rows[at]);
    }
    return n;
}

/* The input joins a slot's context. Returns how long that takes. */
static double admit(struct job *job, int at, const struct fresh *fresh) {
    struct slot *slot = &job->h->slots[at];
    const RKLLMInput *input = &job->inputs[at];
    slot->kv.n = past_of(job, slot).n;
    uint32_t known = restore(job, &slot->kv, fresh), in_ram = slot->in_ram;
    slot->in_ram = 0;
    if (!known) known = reuse(job, &slot->kv, fresh, in_ram);
    uint32_t past = slot->kv.n;
    slot->kv.adapter = job->adapter;
    if (kv_is_mixed(&slot->kv, past))
        violation(is_strict(&job->h->settings), known && job->h->cache.foreign
                                                    ? "kv_of_another_model"
                                                    : "kv_of_another_adapter");
    for (uint32_t i = known; i < fresh->ids.n; i++)
        kv_append(&slot->kv, fresh->ids.at[i], fresh_row(fresh, i));
    context_changed(slot);
    slot->live = true;
    slot->thinking = IS_1_3 && input->enable_thinking && input->input_type == RKLLM_INPUT_PROMPT &&
                     !job->h->prompt_prefix;
    slot->fresh = fresh->ids.n - known;
    slot->generated = 0;
    slot->pending.n = 0;
    slot->surprise_limit = 2 * (double)job->sampling.mirostat_tau;
    return slot->fresh ? prefill_ms(job->h->profile, slot->fresh, past) : 0;
}

/* All inputs are in, or none is: a refused run changes nothing. */
static bool prefill(struct job *job) {
    struct handle *h = job->h;
    if (log_level() >= LOG_DETAIL)
        for (int at = 0; at < h->n_slots; at++)
            log_line("I rkllm: current kv cache size: %u", h->slots[at].kv.n);
    struct fresh *fresh = must_zero((size_t)h->n_slots * sizeof *fresh);
    bool taken = lora_select(h, job->infer->lora_params, &job->adapter) && take_inputs(job, fresh);
    double ms = 0;
    for (int at = 0; at < h->n_slots; at++) {
        if (taken) ms += admit(job, at, &fresh[at]);
        fresh_free(&fresh[at]);
    }
    free(fresh);
    if (!taken) return false;
    job->n_live = h->n_slots;
    if (fault_due(&h->settings, FAULT_HANG_IN_PREFILL, 0)) sleep_forever();
    int64_t since = gate_pass(&h->settings, GATE_PREFILL, 0) ? now_ns() : job->started;
    ms *= time_scale(&h->settings);
    if (ms > 0) sleep_until_ns(since + (int64_t)(ms * 1e6)); /* deaf to abort */
    return true;
}

/* ---- generating ---- */

static void end_slot(struct job *job, struct slot *slot) {
    slot->live = false;
    job->n_live--;
}

static void choose(struct job *job, struct slot *slot) {
    struct handle *h = job->h;
    struct candidates candidates;
    responder_next(&slot->responder, &h->model, &slot->kv, !h->ignore_eos_token, &candidates);
    slot->id = sample(&job->sampling, slot, &candidates);
    slot->eos = is_eos(&h->model, slot->id) && !h->ignore_eos_token && !h->settings.eos_misread;
    bool ends = (slot->thinking && h->settings.think_finish) ||
                (IS_1_3 && h->settings.think_finish_always);
    if (ends && slot->id == h->model.header->think_close)
        end_slot(job, slot);
    else
        slot->generated++;
}

/* A full context moves on: half of what comes after n_keep is forgotten. */
static bool make_room(struct job *job, struct slot *slot) {
    const struct handle *h = job->h;
    struct kv *kv = &slot->kv;
    if (kv->n < kv->limit) return true;
    if ((!job->history && h->settings.no_shift) || h->n_keep < 0 || (uint32_t)h->n_keep + 1 >= kv->limit) return false;
    uint32_t keep = (uint32_t)h->n_keep, forget = (kv->n - keep + 1) / 2;
    kv_remove(kv, keep, keep + forget);
    context_changed(slot);
    if (log_level() >= LOG_DETAIL)
        log_line("I rkllm: context shift: kept %u, forgot %u tokens", keep, forget);
    return true;
}

/* False: the caller's embedding layer has none for this token. The last one of a run joins the
 * context only where it is switched so: its decode would be the next step. */
static bool keep_token(struct job *job, struct slot *slot) {
    bool full = job->budget > 0 && slot->generated >= job->budget, last = full || job->aborted;
    if (slot->eos || (last && !job->h->settings.last_in_kv) || !make_room(job, slot)) {
        end_slot(job, slot);
        return true;
    }
    uint64_t row = 0;
    if (!hooks_embed_one(job->h, slot->id, &row)) return false;
    kv_append(&slot->kv, slot->id, row);
    atomic_store(&slot->kv_size, slot->kv.n);
    if (full) end_slot(job, slot);
    return true;
}

static bool token_faults(struct job *job) { /* true: this token fails the run */
    struct settings *s = &job->h->settings;
    unsigned long token = job->steps;
    if (fault_due(s, FAULT_SEGV_AT_TOKEN, token)) crash_now();
    if (fault_due(s, FAULT_ABORT_AT_TOKEN, token)) ggml_assert_now("backend_res != nullptr");
    if (fault_due(s, FAULT_HANG_AT_TOKEN, token)) sleep_forever();
    return fault_due(s, FAULT_ERROR_AT_TOKEN, token);
}

static void decode(struct job *job) {
    struct handle *h = job->h;
    double ms = 0;
    if (gate_pass(&h->settings, GATE_TOKEN, job->steps)) job->last_return = now_ns();
    for (int at = 0; at < h->n_slots; at++)
        if (h->slots[at].live) ms += decode_ms(h->profile, h->slots[at].kv.n);
    ms *= time_scale(&h->settings) / batch_gain(h->settings.batch_gain, job->n_live);
    /* The next decode starts when the callback returns: a slow callback delays it. */
    if (ms > 0) sleep_until_ns(job->last_return + (int64_t)(ms * 1e6));
}

static enum outcome generate(struct job *job) {
    struct handle *h = job->h;
    job->first_token = job->last_return = now_ns();
    for (;;) {
        if (job->steps == 0 && aborted(job)) return FINISHED;
        for (int at = 0; at < h->n_slots; at++)
            if (h->slots[at].live) choose(job, &h->slots[at]);
        if (!job->n_live) return FINISHED;
        job->steps++;
        control_refresh(&h->settings);
        if (token_faults(job)) return FAILED;
        if (report_tokens(job)) return PAUSED;
        aborted(job);
        for (int at = 0; at < h->n_slots; at++)
            if (h->slots[at].live && !keep_token(job, &h->slots[at])) return FAILED;
        if (!job->n_live || aborted(job)) return FINISHED;
        decode(job);
    }
}

/* Logits that go on, as reported of real boards: the model generates an answer after the requested
 * rows, and delivers a row for each of its tokens. */
static enum outcome generate_rows(struct job *job) {
    struct slot *slot = &job->h->slots[0];
    for (;;) {
        if (aborted(job)) return FINISHED;
        choose(job, slot);
        if (!job->n_live) return FINISHED;
        if (!keep_token(job, slot)) return FAILED;
        if (!job->n_live || aborted(job)) return FINISHED;
        decode(job);
        slot->fresh = 1;
        job->steps++;
        control_refresh(&job->h->settings);
        if (token_faults(job)) return FAILED;
        report_inside(job);
    }
}

/* Instead of generating: one look inside, and that is all, unless logits are to go on. */
static enum outcome look_inside(struct job *job) {
    job->first_token = job->last_return = now_ns();
    if (aborted(job)) return FINISHED;
    job->steps++;
    control_refresh(&job->h->settings);
    if (token_faults(job)) return FAILED;
    job->h->slots[0].generated = 1; /* as the vendor counts it */
    report_inside(job);
    bool goes_on = job->mode == RKLLM_INFER_GET_LOGITS && job->h->settings.logits_generate;
    return goes_on ? generate_rows(job) : FINISHED;
}

/* ---- from begin to end ---- */

static struct job job_for(struct handle *h, const RKLLMInput *inputs, const RKLLMInferParam *infer,
                          void *userdata) {
    struct job job = {.h = h, .inputs = inputs, .infer = infer, .userdata = userdata,
                      .mode = infer->mode,
                      .sampling = h->sampling,
                      .budget = h->max_new_tokens > 0 ? h->max_new_tokens : 0,
                      .history = infer->keep_history != 0,
                      .save_path = prompt_cache_path(h, infer), .started = now_ns()};
#if IS_1_3
    if (!userdata) job.userdata = h->on_result_userdata;
    if (infer->max_new_tokens > 0) job.budget = infer->max_new_tokens;
    const RKLLMSamplingParam *how = infer->sampling_params;
    if (how) job.sampling = sampling_of(*how);
#endif
    return job;
}

/* Where an aborted conversation is not what was delivered of it. */
static void lose_the_end(struct slot *slot) {
    enum { LOST = 4 };
    uint32_t n = slot->kv.n;
    kv_remove(&slot->kv, n > LOST ? n - LOST : 0, n);
    context_changed(slot);
}

static int settle(struct job *job, enum outcome outcome) {
    struct handle *h = job->h;
    bool generates = job->mode == RKLLM_INFER_GENERATE;
    h->was_aborted = h->was_aborted || job->aborted;
    if (outcome == FINISHED && job->save_path)
        prompt_cache_save(h, &h->slots[0].kv, job->save_path);
    if (outcome == FINISHED && (generates || h->settings.hidden_finish)) report_finish(job);
    if (outcome == FAILED) report_error(job);
    if (outcome == FINISHED && fault_due(&h->settings, FAULT_HANG_AFTER_FINISH, 0)) sleep_forever();
    for (int at = 0; at < h->n_slots && job->aborted && job->history && h->settings.abort_loses; at++)
        lose_the_end(&h->slots[at]);
    for (int at = 0; at < h->n_slots && outcome != PAUSED && !job->history; at++) {
        h->slots[at].in_ram = h->settings.prefix_reuse ? h->slots[at].kv.n : 0;
        h->slots[at].kv.n = 0;
        context_changed(&h->slots[at]);
    }
    pthread_mutex_lock(&h->lock);
    h->paused_history = outcome == PAUSED && job->history;
    pthread_mutex_unlock(&h->lock);
    if (outcome != PAUSED) held_drop(h);
    end_run(h, outcome == PAUSED ? STATE_PAUSED : STATE_IDLE);
    return outcome == FAILED ? -1 : 0;
}

/* What the control file asks a run to keep for ever. */
static void leak(const struct control *c) {
    size_t size = (size_t)(c->leak_mb * 1e6);
    char *memory = size ? malloc(size) : NULL;
    if (memory) memset(memory, 1, size);
    for (double n = 0; n < c->leak_files; n++)
        if (open("/dev/null", O_RDONLY | O_CLOEXEC) < 0) break;
}

int engine_run(struct handle *h, const RKLLMInput *inputs, const RKLLMInferParam *infer,
               void *userdata, bool async, bool resumed) {
    enum state before = resumed ? STATE_PAUSED : STATE_IDLE;
    control_refresh(&h->settings);
    leak(&h->settings.control);
    bool accepted = input_accepts(h, inputs, infer) && inside_accepts(h, inputs, infer, resumed);
    bool silent = async && h->settings.async_broken;
    if (!accepted || silent || fault_due(&h->settings, FAULT_NO_CALLBACK, 0)) {
        end_run(h, before);
        return accepted ? 0 : -1;
    }
    struct job job = job_for(h, inputs, infer, userdata);
    job.async = async;
    job.resumed = resumed;
    if (resumed && h->settings.resume_unlimited) job.budget = h->max_new_tokens;
    long slack = timer_slack_tighten();
    int code = -1;
    if (resumed) held_check(h, inputs, infer);
    if (prefill(&job)) {
        held_drop(h);
        if (async && h->settings.async_pause) held_take(h, inputs, infer);
        code = settle(&job, job.mode ? look_inside(&job) : generate(&job));
    } else {
        end_run(h, before);
    }
    free(job.save_path);
    timer_slack_restore(slack);
    return code;
}
