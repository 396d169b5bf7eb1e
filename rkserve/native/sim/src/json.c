/* JSON that somebody makes the model write, by taking every other token out of the choice or by
 * putting a beginning into the answer. The answer so far is read as JSON, and what may come next is
 * proposed, best first; whoever holds the model to a schema takes the first that fits. It wants to
 * come to an end: a string is one word, an array one element, and an object has no more members
 * than it must. Where nothing of this fits (names of properties, say), nothing is proposed that
 * could be taken, and the floor of the logits decides. */
#include "rksim.h"

#include <ctype.h>
#include <string.h>

enum { MOST_DEPTH = 48, DEEP = 6 };
enum place { VALUE, FIRST_KEY, KEY, COLON, STRING, NUMBER, WORD, AFTER, DONE, BROKEN };

struct scan { /* where the answer stands */
    enum place place;
    int depth, numbers;
    char stack[MOST_DEPTH]; /* '{' or '[' */
    bool first;             /* nothing stands in the array yet */
    bool is_key;
    struct slice key, part; /* the last key, and what the string, number or word has so far */
};

static void value_ended(struct scan *s) { s->place = s->depth ? AFTER : DONE; }

static void opens(struct scan *s, char c) {
    if (s->depth == MOST_DEPTH) {
        s->place = BROKEN;
        return;
    }
    s->stack[s->depth++] = c;
    s->place = c == '{' ? FIRST_KEY : VALUE;
    s->first = true;
}

static void closes(struct scan *s, char c) {
    if (!s->depth || s->stack[--s->depth] != (c == '}' ? '{' : '[')) s->place = BROKEN;
    else value_ended(s);
}

static void begins(struct scan *s, const char *at) {
    bool was_first = s->first;
    s->part = (struct slice){at, 1};
    s->first = false;
    if (*at == '{' || *at == '[') opens(s, *at);
    else if (*at == '"') s->place = STRING, s->is_key = false, s->part = (struct slice){at + 1, 0};
    else if (*at == '-' || isdigit((unsigned char)*at)) s->place = NUMBER;
    else if (strchr("tfn", *at)) s->place = WORD;
    else if (*at == ']' && was_first) closes(s, ']');
    else s->place = BROKEN;
}

static void between(struct scan *s, const char *at) { /* outside of strings, numbers and words */
    char c = *at;
    if (isspace((unsigned char)c)) return;
    if (s->place == VALUE) {
        begins(s, at);
    } else if ((s->place == FIRST_KEY || s->place == KEY) && c == '"') {
        s->place = STRING, s->is_key = true, s->part = (struct slice){at + 1, 0};
    } else if (s->place == COLON && c == ':') {
        s->place = VALUE, s->first = false;
    } else if (s->place == AFTER && c == ',') {
        s->place = s->stack[s->depth - 1] == '{' ? KEY : VALUE, s->first = false;
    } else if ((s->place == AFTER || s->place == FIRST_KEY) && (c == '}' || c == ']')) {
        closes(s, c);
    } else {
        s->place = BROKEN;
    }
}

static struct scan read_json(const char *text, size_t n) {
    struct scan s = {.place = VALUE};
    for (size_t i = 0; i < n && s.place != BROKEN; i++) {
        const char *at = text + i;
        if (s.place == STRING) {
            s.part.n = (size_t)(at - s.part.at);
            if (*at == '\\') i++;
            if (*at != '"') continue;
            if (s.is_key) s.key = s.part, s.place = COLON;
            else value_ended(&s);
        } else if ((s.place == NUMBER || s.place == WORD) && strchr("+-.", *at) == NULL &&
                   !isalnum((unsigned char)*at)) {
            s.numbers += s.place == NUMBER;
            value_ended(&s);
            between(&s, at);
        } else if (s.place == NUMBER || s.place == WORD) {
            s.part.n++;
        } else {
            between(&s, at);
        }
    }
    if (s.place == STRING) s.part.n = (size_t)(text + n - s.part.at);
    return s;
}

/* ---- what comes next ---- */

/* Far apart, so that no temperature makes the model stumble over its braces. */
static const float SURE[MAX_CANDIDATES] = {18, 10, 2, -6};

static void propose(struct candidates *out, const struct model *model, const char *text, size_t n) {
    struct ids ids = {0};
    tokenize(model, text, n, false, &ids);
    bool fits = ids.n && out->n < MAX_CANDIDATES;
    for (int i = 0; fits && i < out->n; i++) fits = out->ids[i] != ids.at[0];
    if (fits) {
        out->logits[out->n] = SURE[out->n];
        out->ids[out->n++] = ids.at[0];
    }
    ids_free(&ids);
}

/* The rest of a word of which some has been said; false where something else was. */
static bool propose_rest(struct candidates *out, const struct model *model, struct slice word,
                         struct slice said) {
    if (said.n >= word.n || memcmp(word.at, said.at, said.n) != 0) return false;
    propose(out, model, word.at + said.n, word.n - said.n);
    return true;
}

static void propose_value(struct candidates *out, const struct model *model,
                          const struct scan *s, struct slice number) {
    bool deep = s->depth > DEEP;
    if (deep && s->first) propose(out, model, "]", 1);
    if (deep) propose(out, model, "null", 4);
    propose(out, model, "\"", 1);
    if (!deep) propose(out, model, "{", 1);
    if (!deep) propose(out, model, "[", 1);
    propose(out, model, number.n ? number.at : "1", 1);
}

static void propose_end(struct candidates *out, const struct model *model, const struct scan *s) {
    propose(out, model, s->stack[s->depth - 1] == '{' ? "}" : "]", 1);
    propose(out, model, ",", 1);
}

static void propose_word(struct candidates *out, const struct model *model, struct slice said) {
    static const char *const WORDS[] = {"true", "false", "null"};
    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++)
        propose_rest(out, model, (struct slice){WORDS[i], strlen(WORDS[i])}, said);
}

bool json_is_begun(const char *text, size_t n) {
    size_t i = 0;
    while (i < n && isspace((unsigned char)text[i])) i++;
    return i < n && (text[i] == '{' || text[i] == '[');
}

bool json_next(const struct model *model, const char *text, size_t n, const char *user,
               struct candidates *out) {
    struct scan s = read_json(text, n);
    struct slice number = named_number(user, s.key, s.numbers);
    *out = (struct candidates){0};
    switch (s.place) {
    case VALUE: propose_value(out, model, &s, number); break;
    case FIRST_KEY:
        propose(out, model, "\"", 1);
        propose(out, model, "}", 1);
        break;
    case KEY: propose(out, model, "\"", 1); break;
    case COLON: propose(out, model, ":", 1); break;
    case STRING:
        propose_rest(out, model, named_word(user, s.is_key ? (struct slice){0} : s.key), s.part);
        propose(out, model, "\"", 1);
        break;
    case NUMBER:
        propose_rest(out, model, number, s.part);
        propose_end(out, model, &s);
        propose(out, model, "0", 1);
        break;
    case WORD:
        propose_word(out, model, s.part);
        propose_end(out, model, &s);
        break;
    case AFTER: propose_end(out, model, &s); break;
    case DONE:
    case BROKEN: break;
    }
    return s.place != BROKEN;
}
