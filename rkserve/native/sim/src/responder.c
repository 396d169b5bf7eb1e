/* The language model: which token comes next, as a pure function of the ids in the context.
 *
 * It is a left fold over the ids. After "<|im_start|>assistant\n" it decides on a reply (rules.c)
 * and follows it as long as the ids agree. Where they do not, because somebody edited or forced
 * them, it goes on with another sentence, chosen by the hash of everything up to there. A context
 * without "<|im_start|>" is raw text: either a line in it asks for something, or it is continued.
 * Being a fold it can always be repeated from the start, so continuing on another board, or after
 * a pause, gives the same tokens as never having stopped. */
#include "rksim.h"

#include <string.h>

#define START_OVER UINT32_MAX
static const float FIRST_CHOICE = 2.5f, OTHER_CHOICE = 1.0f;

void responder_forget(struct responder *r) { r->pos = START_OVER; }

void responder_close(struct responder *r) { reply_free(&r->reply); }

void detokenize(const struct model *model, const int32_t *ids, uint32_t n, struct text *out) {
    for (uint32_t i = 0; i < n; i++)
        if (!(model->pieces[ids[i]].flags & PIECE_SILENT))
            text_add(out, (const char *)piece_bytes(model, ids[i]), model->pieces[ids[i]].n);
}

static bool has_newline(const struct model *model, int32_t id) {
    return memchr(piece_bytes(model, id), '\n', model->pieces[id].n) != NULL;
}

/* ---- sentences ---- */

/* Whether a sentence at `at` needs a space before it. */
static bool needs_space(const struct model *model, const struct kv *kv, uint32_t at) {
    while (at > 0 && model->pieces[kv->ids[at - 1]].flags & PIECE_SILENT) at--;
    if (at == 0) return false;
    const struct piece *piece = &model->pieces[kv->ids[at - 1]];
    if (piece->n == 0 || piece->flags & PIECE_MARKER) return false;
    unsigned char last = model->map[piece->at + piece->n - 1];
    return last != ' ' && last != '\n' && last != '\t';
}

/* At a border between sentences there are several ways to go on. They differ in their first token
 * (make_sim_chat.py sees to it), so one token tells which was taken. */
static struct span way_on(const struct responder *r, const struct model *model, const struct kv *kv,
                          uint32_t at, int which) {
    uint64_t hash = kv_hash(kv, at);
    if (r->opener_next) {
        uint32_t n = (uint32_t)r->reply.n_openers;
        const struct ids *opener = &r->reply.openers[(hash % n + (uint32_t)which) % n];
        return (struct span){opener->at, opener->n};
    }
    const struct sentence *s = &model->bank[(hash + (uint32_t)which) % model->header->n_bank];
    const int32_t *ids = (const int32_t *)(const void *)(model->map + s->at);
    if (needs_space(model, kv, at)) return (struct span){ids, s->n_spaced};
    return (struct span){ids + s->n_spaced, s->n_bare};
}

static int ways_on(const struct responder *r, const struct model *model) {
    int n = r->opener_next ? r->reply.n_openers : (int)model->header->n_bank;
    return n < MAX_CANDIDATES ? n : MAX_CANDIDATES;
}

/* Something else than expected: two to four other sentences, and an end. */
static void lose_thread(struct responder *r, const struct kv *kv, uint32_t at) {
    r->phase = PHASE_REPLY;
    r->current = (struct span){NULL, 0};
    r->cursor = 0;
    r->silent_next = r->opener_next = false;
    r->sentences_left = 2 + (uint32_t)(kv_hash(kv, at) >> 20) % 3;
}

static void begin_reply(struct responder *r) {
    r->phase = PHASE_REPLY;
    r->current = (struct span){r->reply.exact.at, r->reply.exact.n};
    r->cursor = 0;
    r->in_thought = r->reply.thought > 0;
    r->silent_next = false;
    r->opener_next = r->reply.n_openers > 0;
    r->sentences_left = r->reply.sentences + (r->opener_next ? 1 : 0);
}

/* What the answer says so far, without the thoughts that it began with. */
static void said_so_far(const struct responder *r, const struct model *model, const struct kv *kv,
                        uint32_t end, struct text *out) {
    uint32_t from = r->answer_at;
    for (uint32_t at = from; at < end; at++)
        if (kv->ids[at] == model->header->think_close) from = at + 1;
    text_add(out, "", 0);
    detokenize(model, kv->ids + from, end - from, out);
}

static bool begins_json(const struct responder *r, const struct model *model, const struct kv *kv,
                        uint32_t end) {
    struct text said = {0};
    said_so_far(r, model, kv, end, &said);
    bool begun = json_is_begun(said.at, said.n);
    text_free(&said);
    return begun;
}

/* An id that was not expected. Whoever ends the thoughts gets the answer that was to follow them,
 * whoever begins a call gets the rest of it, and whoever begins JSON gets JSON. */
static void stray(struct responder *r, const struct model *model, const struct kv *kv,
                  uint32_t at) {
    if (r->in_thought && kv->ids[at] == model->header->think_close) {
        begin_reply(r);
        r->cursor = r->reply.thought;
        r->in_thought = false;
    } else if (r->answer_at <= at &&
               reply_forced_call(&r->reply, model, kv, r->answer_at, at + 1)) {
        begin_reply(r);
        r->cursor = at + 1 - r->answer_at;
    } else if (r->answer_at <= at && begins_json(r, model, kv, at + 1)) {
        r->phase = PHASE_JSON;
    } else {
        lose_thread(r, kv, at + 1);
    }
}

/* ---- the fold ---- */

static void read_in_reply(struct responder *r, const struct model *model, const struct kv *kv,
                          uint32_t at) {
    int32_t id = kv->ids[at];
    if (r->cursor < r->current.n) {
        if (id != r->current.ids[r->cursor]) {
            stray(r, model, kv, at);
            return;
        }
        r->cursor++;
        if (r->current.ids == r->reply.exact.at && r->cursor >= r->reply.thought)
            r->in_thought = false;
        return;
    }
    if (r->silent_next && id == model->header->silent) {
        r->silent_next = false;
        return;
    }
    /* Also when the reply is complete: with EOS forbidden, the model goes on here. */
    int ways = r->silent_next ? 0 : ways_on(r, model);
    for (int which = 0; which < ways; which++) {
        struct span way = way_on(r, model, kv, at, which);
        if (way.ids[0] != id) continue;
        r->current = way;
        r->cursor = 1;
        /* Now and then a token without text, as the real runtime delivers. */
        r->silent_next = !r->opener_next && (kv_hash(kv, at + 1) >> 40) % 8 == 0;
        r->opener_next = false;
        if (r->sentences_left) r->sentences_left--;
        return;
    }
    stray(r, model, kv, at);
}

static void read_header(struct responder *r, const struct model *model, const struct kv *kv,
                        uint32_t at) {
    if (!has_newline(model, kv->ids[at])) return;
    struct text role = {0};
    text_add(&role, "", 0);
    detokenize(model, kv->ids + r->header_at, at + 1 - r->header_at, &role);
    r->phase = PHASE_TURN;
    if (strncmp(role.at, "assistant\n", 10) == 0) {
        reply_to_chat(&r->reply, model, kv, at + 1);
        r->answer_at = at + 1;
        begin_reply(r);
    }
    text_free(&role);
}

static void read_id(struct responder *r, const struct model *model, const struct kv *kv,
                    uint32_t at) {
    if (kv->ids[at] == model->header->im_start) {
        r->phase = PHASE_HEADER;
        r->header_at = at + 1;
    } else if (r->phase == PHASE_HEADER) {
        read_header(r, model, kv, at);
    } else if (r->phase == PHASE_REPLY) {
        read_in_reply(r, model, kv, at);
    }
}

/* Raw text. If a line asks for something, what follows that line is the reply to it; the first such
 * line counts, so that a reply that repeats a request does not become one. */
static uint32_t start_raw(struct responder *r, const struct model *model, const struct kv *kv) {
    struct text text = {0};
    detokenize(model, kv->ids, kv->n, &text);
    size_t end = kv_is_mixed(kv, kv->n) ? 0 : raw_request_end(text.at ? text.at : "", text.n);
    uint32_t at = 0;
    r->answer_at = START_OVER;
    lose_thread(r, kv, 0);
    if (end > 0 && text.at[end - 1] != '\n') {
        r->phase = PHASE_RAW_LINE;
        at = kv->n;
    } else if (end > 0) {
        for (size_t seen = 0; seen < end; at++)
            if (!(model->pieces[kv->ids[at]].flags & PIECE_SILENT))
                seen += model->pieces[kv->ids[at]].n;
        text.at[end - 1] = '\0';
        reply_to_line(&r->reply, model, text.at, kv_hash(kv, at));
        begin_reply(r);
    }
    text_free(&text);
    return at;
}

/* Nothing before the last <|im_start|> changes the state, only what rules.c will find there. */
static uint32_t start_over(struct responder *r, const struct model *model, const struct kv *kv) {
    for (uint32_t at = kv->n; at > 0; at--)
        if (kv->ids[at - 1] == model->header->im_start) return at - 1;
    return start_raw(r, model, kv);
}

static void catch_up(struct responder *r, const struct model *model, const struct kv *kv) {
    if (r->phase == PHASE_RAW_LINE || r->pos > kv->n) r->pos = start_over(r, model, kv);
    for (; r->pos < kv->n; r->pos++) read_id(r, model, kv, r->pos);
}

/* ---- what comes next ---- */

static void only(struct candidates *out, int32_t id) {
    *out = (struct candidates){.n = 1, .ids = {id}, .logits = {FIRST_CHOICE}};
}

static void any_way_on(const struct responder *r, const struct model *model, const struct kv *kv,
                       struct candidates *out) {
    out->n = ways_on(r, model);
    for (int which = 0; which < out->n; which++) {
        out->ids[which] = way_on(r, model, kv, kv->n, which).ids[0];
        out->logits[which] = which ? OTHER_CHOICE : FIRST_CHOICE;
    }
}

/* False: there is nothing to say in JSON. */
static bool go_on_in_json(const struct responder *r, const struct model *model,
                          const struct kv *kv, bool may_end, struct candidates *out) {
    struct text said = {0}, user = {0};
    said_so_far(r, model, kv, kv->n, &said);
    last_request(&user, model, kv, r->answer_at);
    bool known = json_next(model, said.at, said.n, user.at, out);
    if (known && out->n == 0 && may_end) only(out, model->header->im_end);
    text_free(&said);
    text_free(&user);
    return known && out->n > 0;
}

void responder_next(struct responder *r, const struct model *model, const struct kv *kv,
                    bool may_end, struct candidates *out) {
    catch_up(r, model, kv);
    if (r->phase == PHASE_HEADER || r->phase == PHASE_RAW_LINE) {
        only(out, model->newline);
    } else if (r->phase == PHASE_TURN) { /* a turn that is not ours: there is nothing to say */
        only(out, may_end ? model->header->im_end : model->header->im_start);
    } else if (r->phase == PHASE_JSON) {
        if (!go_on_in_json(r, model, kv, may_end, out)) any_way_on(r, model, kv, out);
    } else if (r->cursor < r->current.n) {
        only(out, r->current.ids[r->cursor]);
    } else if (r->silent_next) {
        only(out, model->header->silent);
    } else if (r->sentences_left == 0 && may_end) {
        only(out, model->header->im_end);
    } else {
        any_way_on(r, model, kv, out);
    }
}
