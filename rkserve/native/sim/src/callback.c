/* What the caller hears: results that live as long as the callback, and what its answer means. One
 * callback serves all slots of a batch, and so does its answer. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

enum { POISON = 0xDD }; /* what a result holds once the callback has returned */

/* ---- calling ---- */

static void set_text(struct slot *slot, const struct text *text, RKLLMResult *result) {
    if (text->n + 1 > slot->text_room) {
        slot->text_room = text->n + 64;
        slot->text_buffer = must_grow(slot->text_buffer, slot->text_room);
    }
    if (text->n) memcpy(slot->text_buffer, text->at, text->n);
    slot->text_buffer[text->n] = '\0';
    result->text = slot->text_buffer;
}

static void poison(struct slot *slot, RKLLMResult *result, bool give_back) {
    memset(result, POISON, sizeof *result);
    if (!slot->text_buffer) return;
    memset(slot->text_buffer, POISON, slot->text_room);
    if (!give_back) return;
    free(slot->text_buffer);
    slot->text_buffer = NULL;
    slot->text_room = 0;
}

static void poison_inside(struct handle *h, bool give_back) {
    if (!h->inside) return;
    memset(h->inside, POISON, h->inside_room * sizeof *h->inside);
    if (!give_back) return;
    free(h->inside);
    h->inside = NULL;
    h->inside_room = 0;
}

static void note_callback(struct handle *h, bool inside) {
    if (!h->settings.abort_deadlocks) return;
    pthread_mutex_lock(&h->lock);
    h->in_callback = inside;
    h->caller = pthread_self();
    pthread_mutex_unlock(&h->lock);
}

static int call_back(struct job *job, LLMCallState state) {
    struct handle *h = job->h;
    note_callback(h, true);
    int code = h->on_result(h->results, job->userdata, state);
    note_callback(h, false);
    bool known = code == 2 && IS_1_3; /* "free the output buffer at once" */
    bool give_back = known && !h->settings.keep_rows;
    for (int at = 0; at < h->n_slots; at++) poison(&h->slots[at], &h->results[at], give_back);
    poison_inside(h, give_back || job->mode == RKLLM_INFER_GENERATE);
    job->last_return = now_ns();
    return known ? 0 : code;
}

/* Why a callback's answer is not the plain 0, or a pause that this runtime supports. */
static const char *misuse(const struct job *job, LLMCallState state, int code) {
    if (code == 0) return NULL;
    if (code == 2) return "return_2_before_1_3";
    if (code != 1) return "unknown_return_value";
    if (state == RKLLM_RUN_WAITING) return "pause_on_waiting";
    if (state == RKLLM_RUN_FINISH) return "pause_on_finish";
    if (state == RKLLM_RUN_ERROR) return "pause_on_error";
    if (job->mode != RKLLM_INFER_GENERATE) return "pause_of_hidden";
    const struct settings *s = &job->h->settings;
    if (job->history && !s->pause_with_history) return "pause_with_history";
    if (job->h->n_slots > 1 && !s->pause_with_batch) return "pause_with_batch";
    return job->async && !s->async_pause ? "pause_async" : NULL;
}

static bool pauses(struct job *job, LLMCallState state) {
    int code = call_back(job, state);
    const char *name = misuse(job, state, code);
    if (name) violation(is_strict(&job->h->settings), name);
    return code == 1 && !name;
}

/* ---- tokens ---- */

static bool ends_inside_character(const struct text *text) {
    for (size_t back = 1; back <= 3 && back <= text->n; back++) {
        unsigned char c = (unsigned char)text->at[text->n - back];
        if ((c & 0xC0) == 0x80) continue;
        size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC2 ? 2 : 1;
        return back < length;
    }
    return false;
}

/* True: the token ends inside a character, so its text comes with the next one. */
static bool tell_token(const struct handle *h, struct slot *slot, RKLLMResult *result) {
    const struct piece *piece = &h->model.pieces[slot->id];
    bool mute = h->settings.features.no_tokenizer; /* it cannot be decoded: the id has to do */
    bool hidden = mute || piece->flags & PIECE_SILENT ||
                  (h->skip_special_token && piece->flags & PIECE_SPECIAL);
    if (!hidden) text_add(&slot->pending, (const char *)piece_bytes(&h->model, slot->id), piece->n);
    result->token_id = slot->id;
    if (!slot->eos && ends_inside_character(&slot->pending)) {
        if (h->settings.waiting_no_id && h->n_slots == 1) result->token_id = 0;
        return true;
    }
    if (slot->eos || slot->pending.n || mute || h->settings.no_null_text) {
        set_text(slot, &slot->pending, result);
        slot->pending.n = 0;
    }
    return false;
}

bool report_tokens(struct job *job) {
    struct handle *h = job->h;
    bool waiting = false;
    for (int at = 0; at < h->n_slots; at++) {
        RKLLMResult *result = &h->results[at];
        memset(result, 0, sizeof *result);
        if (h->slots[at].live) waiting = tell_token(h, &h->slots[at], result);
        else result->token_id = -1;
    }
    /* WAITING speaks of one text. Of a batch, the others' texts would be lost with it. */
    return pauses(job, waiting && h->n_slots == 1 ? RKLLM_RUN_WAITING : RKLLM_RUN_NORMAL);
}

/* ---- hidden states and logits ---- */

void report_inside(struct job *job) {
    struct handle *h = job->h;
    RKLLMResult *result = &h->results[0];
    if (h->settings.hidden_empty_first) { /* seen with 1.2.1b1: one NORMAL that brings nothing */
        memset(result, 0, sizeof *result);
        pauses(job, RKLLM_RUN_NORMAL);
    }
    memset(result, 0, sizeof *result);
    inside_show(h, job->mode, result);
    pauses(job, RKLLM_RUN_NORMAL);
}

/* ---- the end ---- */

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

/* The last callback speaks of the run, in result[0]: the others are not there to be read. */
static RKLLMResult *last_result(struct job *job) {
    RKLLMResult *results = job->h->results;
    memset(results, POISON, (size_t)job->h->n_slots * sizeof *results);
    return memset(results, 0, sizeof *results);
}

void report_finish(struct job *job) {
    struct handle *h = job->h;
    /* The first token of an entry comes with the prefill, and is counted nowhere. */
    uint32_t fresh = 0, generated = 0, of_prefill = 0, system = 0;
    for (int at = 0; at < h->n_slots; at++) {
        fresh += h->slots[at].fresh;
        generated += h->slots[at].generated;
        of_prefill += h->slots[at].generated > 0;
        if (log_level() >= LOG_DETAIL) system += system_part(&h->model, &h->slots[at].kv);
    }
    int64_t first = generated ? job->first_token : job->last_return;
    RKLLMPerfStat *perf = &last_result(job)->perf;
    *perf = (RKLLMPerfStat){
        .prefill_time_ms = (float)((double)(first - job->started) / 1e6),
        .prefill_tokens = h->settings.wrong_counts ? 1 : (int)fresh,
        .generate_time_ms = (float)((double)(job->last_return - first) / 1e6),
        .generate_tokens = (int)(generated - (h->settings.count_first ? 0 : of_prefill)),
        .memory_usage_mb = (float)(h->profile->memory_mb + h->adapters_mb),
    };
    if (log_level() >= LOG_PERF) log_perf(perf);
    if (log_level() >= LOG_DETAIL)
        log_line("I rkllm: In this conversation: the newly added user cache size is %u; system "
                 "cache size is %u", fresh + generated, system);
    pauses(job, RKLLM_RUN_FINISH);
}

void report_error(struct job *job) {
    last_result(job);
    pauses(job, RKLLM_RUN_ERROR);
}
