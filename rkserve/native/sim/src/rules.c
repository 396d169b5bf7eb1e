/* What the language model says: a table of things a user can ask for, and the replies. Everything
 * here is a function of the context and of its hash; nothing remembers anything. */
#include "rksim.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_CALLS = 16, MAX_COUNT = 10000, MAX_TOKENS = 65536, QUOTED_WORDS = 6, QUOTED_BYTES = 80 };

struct question { /* what a rule may look at */
    const struct model *model;
    const char *user, *first_user, *system; /* NUL-terminated; "" if there is none */
    uint64_t hash;
    bool line; /* raw text, not a chat */
    const char *adapter; /* who speaks through the model; "": nobody */
    const struct kv *kv; /* a chat's context, up to `end` */
    uint32_t end;
};

void reply_clear(struct reply *reply) {
    reply->exact.n = 0;
    for (int i = 0; i < MAX_CANDIDATES; i++) reply->openers[i].n = 0;
    reply->n_openers = 0;
    reply->sentences = reply->thought = 0;
}

void reply_free(struct reply *reply) {
    ids_free(&reply->exact);
    for (int i = 0; i < MAX_CANDIDATES; i++) ids_free(&reply->openers[i]);
}

/* ---- words ---- */

static const char *find(const char *text, const char *phrase) { /* without regard to case */
    size_t n = strlen(phrase);
    for (; *text; text++)
        if (tolower((unsigned char)*text) == tolower((unsigned char)*phrase) &&
            strncasecmp(text, phrase, n) == 0)
            return text;
    return NULL;
}

static void say(struct reply *reply, const struct model *model, const char *words, size_t n) {
    tokenize(model, words, n, false, &reply->exact);
}

static void say_with_markers(struct reply *reply, const struct model *model, const char *words) {
    tokenize(model, words, strlen(words), true, &reply->exact);
}

static void trim(const char **at, size_t *n) {
    while (*n && isspace((unsigned char)**at)) (*at)++, (*n)--;
    while (*n && isspace((unsigned char)(*at)[*n - 1])) (*n)--;
}

/* A few of the user's words, safe inside quotation marks and inside JSON. */
static void quote(const char *user, struct text *out) {
    int words = 1;
    size_t n = strlen(user);
    trim(&user, &n);
    text_add(out, "", 0);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)user[i];
        if (out->n >= QUOTED_BYTES && (c & 0xC0) != 0x80) break; /* never inside a character */
        if (c > ' ' && !strchr("\"\\<>", c)) text_add(out, user + i, 1);
        else if (out->n && out->at[out->n - 1] != ' ' && words++ < QUOTED_WORDS)
            text_add(out, " ", 1);
        if (words > QUOTED_WORDS) break;
    }
    while (out->n && strchr(" .,;:!?", out->at[out->n - 1])) out->n--;
    out->at[out->n] = '\0';
}

/* ---- a context that is no good ---- */

/* Keys and values of another adapter: the numbers are wrong, so the answer is beside the point. */
static bool ramble(const struct question *q, struct reply *reply) {
    if (!kv_is_mixed(q->kv, q->end)) return false;
    reply->sentences = 2 + (uint32_t)(q->hash >> 16) % 4;
    return true;
}

/* ---- exact answers ---- */

static bool repeat_after_me(const struct question *q, struct reply *reply) {
    const char *at = find(q->user, "repeat after me:");
    if (!at) return false;
    at += strlen("repeat after me:");
    size_t n = strlen(at);
    trim(&at, &n);
    say(reply, q->model, at, n);
    return true;
}

/* "Count to 7", "Write 20 tokens": where that stands, and the number; NULL if nowhere. */
static const char *numbered(const char *text, const char *before, const char *after, long *number) {
    for (const char *at = find(text, before); at; at = find(at + 1, before)) {
        char *end;
        const char *digits = at + strlen(before);
        if (!isdigit((unsigned char)*digits)) continue;
        *number = strtol(digits, &end, 10);
        if (*number > 0 && strncasecmp(end, after, strlen(after)) == 0) return at;
    }
    return NULL;
}

static bool count_to(const struct question *q, struct reply *reply) {
    long last;
    if (!numbered(q->user, "count to ", "", &last)) return false;
    struct text text = {0};
    if (last > MAX_COUNT) last = MAX_COUNT;
    for (long i = 1; i <= last; i++) text_say(&text, i < last ? "%ld, " : "%ld.", i);
    say(reply, q->model, text.at, text.n);
    text_free(&text);
    return true;
}

static bool write_tokens(const struct question *q, struct reply *reply) {
    long wanted;
    if (!numbered(q->user, "write ", " tokens", &wanted)) return false;
    if (wanted > MAX_TOKENS) wanted = MAX_TOKENS;
    uint64_t hash = q->hash;
    while (reply->exact.n < wanted) {
        const struct sentence *s = &q->model->bank[hash++ % q->model->header->n_bank];
        const int32_t *ids = (const int32_t *)(const void *)(q->model->map + s->at);
        if (reply->exact.n == 0) ids_add(&reply->exact, ids + s->n_spaced, s->n_bare);
        else ids_add(&reply->exact, ids, s->n_spaced);
    }
    reply->exact.n = (uint32_t)wanted;
    return true;
}

static bool greet_the_world(const struct question *q, struct reply *reply) {
    if (!find(q->user, "emoji") && !find(q->user, "greet me in many languages")) return false;
    const char *greeting = model_string(q->model, "greeting");
    say(reply, q->model, greeting, strlen(greeting));
    return true;
}

static const char *tools_of(const char *system) {
    const char *tools = strstr(system, "<tools>\n");
    return tools ? tools + strlen("<tools>\n") : NULL;
}

/* A schema in the system turn, which is not one of a tool, asks for such an object. */
static bool answer_by_schema(const struct question *q, struct reply *reply) {
    struct text text = {0};
    bool found = !tools_of(q->system) && strstr(q->system, "\"properties\"") &&
                 schema_fill(&text, q->system, q->user);
    if (found) say(reply, q->model, text.at, text.n);
    text_free(&text);
    return found;
}

/* "with 'setup' and 'punchline' keys": an object that has them; false where none is named so. */
static bool keys_add(struct text *out, const struct question *q, const char *words) {
    const char *end = find(q->user, " keys"), *at = q->user;
    int n = 0;
    while (end && (at = strchr(at, '\'')) && at < end) {
        size_t length = strspn(++at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_");
        if (!length || at[length] != '\'') continue;
        text_say(out, "%s\"%.*s\": \"%s\"", n++ ? ", " : "{", (int)length, at, words);
        at += length + 1;
    }
    if (n) text_say(out, "}");
    return n > 0;
}

static bool answer_in_json(const struct question *q, struct reply *reply) {
    if (!find(q->user, "in json") && !find(q->user, "as json") && !find(q->user, "as a json"))
        return false;
    struct text words = {0}, text = {0};
    quote(q->user, &words);
    if (!keys_add(&text, q, words.at))
        text_say(&text, "{\"answer\": \"You asked: %s\", \"confidence\": 0.%u, \"simulated\": true}",
                 words.at, (unsigned)(10 + q->hash % 90));
    say(reply, q->model, text.at, text.n);
    text_free(&words);
    text_free(&text);
    return true;
}

static bool what_did_i_say(const struct question *q, struct reply *reply) {
    if (q->line || !find(q->user, "what did i say first")) return false;
    struct text text = {0};
    const char *first = q->first_user;
    size_t n = strlen(first);
    trim(&first, &n);
    text_say(&text, "You said first: \"%.*s\"", (int)n, first);
    say(reply, q->model, text.at, text.n);
    text_free(&text);
    return true;
}

static bool who_are_you(const struct question *q, struct reply *reply) {
    if (!find(q->user, "who are you")) return false;
    const char *name = find(q->system, "you are ");
    size_t n = 0;
    if (name) {
        name += strlen("you are ");
        n = strcspn(name, ".,;!?\r\n");
        trim(&name, &n);
    }
    struct text text = {0};
    if (n) text_say(&text, "I am %.*s", (int)n, name);
    else text_say(&text, "I am %s", q->model->header->model_id);
    if (*q->adapter) text_say(&text, ", speaking through %s", q->adapter);
    text_say(&text, ".");
    say(reply, q->model, text.at, text.n);
    text_free(&text);
    return true;
}

/* ---- tools ---- */

/* The line break belongs to the braces before it: so the tokenizer cuts the whole, and so would a
 * model that was trained on it. */
static void say_call(struct reply *reply, const struct model *model, struct text *call) {
    text_say(call, "\n");
    say_with_markers(reply, model, "<tool_call>\n");
    say(reply, model, call->at, call->n);
    say_with_markers(reply, model, "</tool_call>");
}

static bool call_tool(const struct question *q, struct reply *reply) {
    const char *tools = tools_of(q->system);
    if (!tools || strstr(q->user, "<tool_response>")) return false;
    int called = 0, most = find(q->user, "in parallel") ? MAX_CALLS : 1;
    for (bool more = true; more && called < most; called += more) {
        struct text call = {0};
        more = tool_call_add(&call, tools, q->user, called, true);
        if (more && called) say_with_markers(reply, q->model, "\n");
        if (more) say_call(reply, q->model, &call);
        text_free(&call);
    }
    return called > 0;
}

static bool report_tool(const struct question *q, struct reply *reply) {
    const char *at = strstr(q->user, "<tool_response>");
    if (!at) return false;
    at += strlen("<tool_response>");
    const char *end = strstr(at, "</tool_response>");
    size_t n = end ? (size_t)(end - at) : strlen(at);
    trim(&at, &n);
    struct text text = {0};
    text_say(&text, "The tool answered: %.*s", (int)(n < 400 ? n : 400), at);
    say(reply, q->model, text.at, text.n);
    text_free(&text);
    return true;
}

/* ---- pictures ---- */

static bool say_what_is_seen(const struct question *q, struct reply *reply) {
    bool mentioned = find(q->user, "picture") || find(q->user, "image") || find(q->user, "video");
    struct text text = {0};
    describe_media(q->model, q->kv, q->end, mentioned, &text);
    bool seen = text.n > 0;
    if (seen) say(reply, q->model, text.at, text.n);
    text_free(&text);
    if (seen) reply->sentences = 1 + (uint32_t)(q->hash >> 16) % 3;
    return seen;
}

/* ---- everything else ---- */

static void open_with(const struct question *q, struct reply *reply, const char *kind) {
    struct text words = {0};
    quote(q->user, &words);
    for (int i = 0; i < MAX_CANDIDATES; i++) {
        char key[32];
        struct text text = {0};
        snprintf(key, sizeof key, "%s%d", kind, i);
        const char *opener = model_string(q->model, key), *gap = strstr(opener, "{}");
        if (!*opener) break;
        size_t before = gap ? (size_t)(gap - opener) : strlen(opener);
        text_add(&text, opener, before);
        if (gap) text_say(&text, "%s%s", words.n ? words.at : "nothing", gap + 2);
        if (*q->adapter) text_say(&text, " This is %s speaking.", q->adapter);
        tokenize(q->model, text.at, text.n, false, &reply->openers[i]);
        text_free(&text);
        if (reply->openers[i].n == 0) break;
        reply->n_openers = i + 1;
    }
    text_free(&words);
}

static bool is_greeting(const char *user) {
    static const char *const WORDS[] = {"hello", "hi", "hey", "good morning", "good evening"};
    while (isspace((unsigned char)*user)) user++;
    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++) {
        size_t n = strlen(WORDS[i]);
        if (strncasecmp(user, WORDS[i], n) == 0 && !isalnum((unsigned char)user[n])) return true;
    }
    return false;
}

static bool talk(const struct question *q, struct reply *reply) {
    reply->sentences = 1 + (uint32_t)(q->hash >> 16) % 4; /* after the opener: two to five in all */
    open_with(q, reply, is_greeting(q->user) ? "hello" : "opener");
    return true;
}

static bool (*const CHAT_RULES[])(const struct question *, struct reply *) = {
    ramble,          report_tool,   repeat_after_me,  count_to,       write_tokens,
    greet_the_world, call_tool,     answer_by_schema, answer_in_json, what_did_i_say,
    who_are_you,     say_what_is_seen, talk};
static bool (*const LINE_RULES[])(const struct question *, struct reply *) = {
    repeat_after_me, count_to, write_tokens};

static void think_first(const struct question *q, struct reply *reply) {
    struct text words = {0}, text = {0};
    quote(q->user, &words);
    text_say(&text, "<think>\nThe user wrote: %s. I should answer briefly.\n</think>\n\n",
             words.at);
    say_with_markers(reply, q->model, text.at);
    for (uint32_t i = 0; i < reply->exact.n; i++)
        if (reply->exact.at[i] == q->model->header->think_close) reply->thought = i + 1;
    text_free(&words);
    text_free(&text);
}

/* ---- finding the question in a chat ---- */

struct turns {
    struct text system, first_user, user;
};

static void read_turn(struct turns *turns, const char *turn, size_t n) {
    const char *body = memchr(turn, '\n', n);
    if (!body) return;
    size_t role = (size_t)(body - turn), rest = n - role - 1;
    body++;
    bool user = (role == 4 && (!memcmp(turn, "user", 4) || !memcmp(turn, "tool", 4)));
    if (role == 6 && !memcmp(turn, "system", 6)) {
        text_add(&turns->system, body, rest);
    } else if (user) {
        if (!turns->first_user.at) text_add(&turns->first_user, body, rest);
        turns->user.n = 0;
        text_add(&turns->user, body, rest);
    }
}

static void read_turns(struct turns *turns, const struct model *model, const struct kv *kv,
                       uint32_t end) {
    struct text turn = {0};
    for (uint32_t at = 0; at < end; at++) {
        if (kv->ids[at] != model->header->im_start) continue;
        uint32_t from = at + 1;
        while (at + 1 < end && kv->ids[at + 1] != model->header->im_start &&
               !is_eos(model, kv->ids[at + 1]))
            at++;
        turn.n = 0;
        detokenize(model, kv->ids + from, at + 1 - from, &turn);
        if (turn.n) read_turn(turns, turn.at, turn.n);
    }
    text_free(&turn);
}

/* "/think" at the end of a user's turn asks for thinking, as Qwen3's soft switch does. */
static bool cut_think_switch(struct text *user) {
    char *at = NULL;
    for (char *next = user->at; next && (next = strstr(next, "/think")); next++) at = next;
    if (!at) return false;
    const char *rest = at + strlen("/think");
    if (rest[strspn(rest, " \r\n")] != '\0') return false;
    *at = '\0';
    user->n = (size_t)(at - user->at);
    return true;
}

void reply_to_chat(struct reply *reply, const struct model *model, const struct kv *kv,
                   uint32_t header_end) {
    struct turns turns = {0};
    read_turns(&turns, model, kv, header_end);
    bool think = cut_think_switch(&turns.user);
    struct question q = {
        .model = model,
        .user = turns.user.at ? turns.user.at : "",
        .first_user = turns.first_user.at ? turns.first_user.at : "",
        .system = turns.system.at ? turns.system.at : "",
        .hash = kv_hash(kv, header_end),
        .adapter = lora_title(model, kv->adapter),
        .kv = kv,
        .end = header_end,
    };
    reply_clear(reply);
    if (think) think_first(&q, reply);
    for (size_t i = 0; i < sizeof CHAT_RULES / sizeof *CHAT_RULES; i++)
        if (CHAT_RULES[i](&q, reply)) break;
    text_free(&turns.system);
    text_free(&turns.first_user);
    text_free(&turns.user);
}

/* Somebody put the beginning of a call into the answer. It is gone on with, by the first tool that
 * it may be the call of, whatever was asked. */
static bool is_begun_by(const struct ids *whole, const int32_t *ids, uint32_t n) {
    return n <= whole->n && memcmp(whole->at, ids, n * sizeof *ids) == 0;
}

bool reply_forced_call(struct reply *reply, const struct model *model, const struct kv *kv,
                       uint32_t answer_at, uint32_t end) {
    struct text first = {0};
    detokenize(model, kv->ids + answer_at, 1, &first);
    bool begun = first.n && strncmp(first.at, "<tool_call>", first.n) == 0, found = false;
    text_free(&first);
    if (!begun) return false;
    struct turns turns = {0};
    read_turns(&turns, model, kv, answer_at);
    const char *tools = tools_of(turns.system.at ? turns.system.at : "");
    bool more = tools != NULL;
    for (int nth = 0; more && !found; nth++) {
        struct text call = {0};
        more = tool_call_add(&call, tools, turns.user.at ? turns.user.at : "", nth, false);
        reply_clear(reply);
        if (more) say_call(reply, model, &call);
        found = more && is_begun_by(&reply->exact, kv->ids + answer_at, end - answer_at);
        text_free(&call);
    }
    text_free(&turns.system);
    text_free(&turns.first_user);
    text_free(&turns.user);
    return found;
}

void last_request(struct text *out, const struct model *model, const struct kv *kv, uint32_t end) {
    struct turns turns = {0};
    read_turns(&turns, model, kv, end);
    cut_think_switch(&turns.user);
    text_add(out, turns.user.at ? turns.user.at : "", turns.user.n);
    text_free(&turns.system);
    text_free(&turns.first_user);
    text_free(&turns.user);
}

/* ---- finding the question in raw text ---- */

size_t raw_request_end(const char *text, size_t n) {
    long number;
    const char *const found[] = {find(text, "repeat after me:"),
                                 numbered(text, "count to ", "", &number),
                                 numbered(text, "write ", " tokens", &number)};
    const char *first = NULL;
    for (size_t i = 0; i < sizeof found / sizeof *found; i++)
        if (found[i] && (!first || found[i] < first)) first = found[i];
    if (!first) return 0;
    const char *newline = memchr(first, '\n', n - (size_t)(first - text));
    return newline ? (size_t)(newline - text) + 1 : n;
}

/* `line` ends where the request ends, and may have other lines before it. */
void reply_to_line(struct reply *reply, const struct model *model, const char *line,
                   uint64_t hash) {
    const char *last = strrchr(line, '\n');
    struct question q = {.model = model, .user = last ? last + 1 : line, .first_user = "",
                         .system = "", .hash = hash, .line = true, .adapter = ""};
    reply_clear(reply);
    for (size_t i = 0; i < sizeof LINE_RULES / sizeof *LINE_RULES; i++)
        if (LINE_RULES[i](&q, reply)) break;
}
