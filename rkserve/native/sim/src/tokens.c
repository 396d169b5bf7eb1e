/* Texts, token lists, and byte-level BPE from one to the other: a text is split into words as GPT-2
 * does it, and in each word the pair of pieces that makes the lowest id is joined until none is
 * left. For ordinary text this gives the ids that tokenizer.json gives. */
#include "rksim.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void text_add(struct text *text, const char *bytes, size_t n) {
    if (text->n + n + 1 > text->room) {
        text->room = 2 * (text->n + n) + 64;
        text->at = must_grow(text->at, text->room);
    }
    if (n) memcpy(text->at + text->n, bytes, n);
    text->n += n;
    text->at[text->n] = '\0';
}

void text_say(struct text *text, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int n = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (n >= 0) {
        char *said = must_alloc((size_t)n + 1);
        vsnprintf(said, (size_t)n + 1, format, again);
        text_add(text, said, (size_t)n);
        free(said);
    }
    va_end(again);
}

void text_free(struct text *text) {
    free(text->at);
    memset(text, 0, sizeof *text);
}

void ids_add(struct ids *ids, const int32_t *more, uint32_t n) {
    if (ids->n + n > ids->room) {
        ids->room = 2 * (ids->n + n) + 16;
        ids->at = must_grow(ids->at, ids->room * sizeof *ids->at);
    }
    if (n) memcpy(ids->at + ids->n, more, n * sizeof *more);
    ids->n += n;
}

void ids_free(struct ids *ids) {
    free(ids->at);
    memset(ids, 0, sizeof *ids);
}

/* ---- words ---- */

enum kind { LETTER, DIGIT, SPACE, OTHER };

/* The kind of the character at `at` and, in *n, its length. Beyond ASCII this is a rough map of
 * Unicode: punctuation, symbols and emoji are OTHER, everything else is a letter. */
static enum kind kind_at(const unsigned char *at, size_t left, size_t *n) {
    *n = 1;
    if (at[0] < 0x80) {
        if (isalpha(at[0])) return LETTER;
        if (isdigit(at[0])) return DIGIT;
        return at[0] == ' ' || (at[0] >= '\t' && at[0] <= '\r') ? SPACE : OTHER;
    }
    size_t length = at[0] >= 0xF0 ? 4 : at[0] >= 0xE0 ? 3 : 2;
    if (at[0] < 0xC2 || length > left) return OTHER;
    uint32_t c = at[0] & (0x7F >> length);
    for (size_t i = 1; i < length; i++) {
        if ((at[i] & 0xC0) != 0x80) return OTHER;
        c = c << 6 | (at[i] & 0x3F);
    }
    *n = length;
    if ((c >= 0x2000 && c < 0x200B) || c == 0xA0 || c == 0x3000) return SPACE;
    bool symbol = (c >= 0xA1 && c < 0xC0 && c != 0xAA && c != 0xB5 && c != 0xBA) ||
                  (c >= 0x200B && c < 0x2C00) || (c >= 0x3001 && c < 0x3040) ||
                  (c >= 0xFE00 && c < 0xFE70) || (c >= 0xFF01 && c < 0xFF10) || c >= 0x1F000;
    return symbol ? OTHER : LETTER;
}

static size_t same_kind(const unsigned char *at, size_t left, enum kind kind, size_t *last) {
    size_t n = 0, step;
    while (n < left && kind_at(at + n, left - n, &step) == kind) {
        *last = step;
        n += step;
    }
    return n;
}

static size_t contraction(const unsigned char *at, size_t left) {
    static const char *const ENDINGS[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; i < sizeof ENDINGS / sizeof *ENDINGS; i++) {
        size_t n = strlen(ENDINGS[i]);
        if (left >= n && memcmp(at, ENDINGS[i], n) == 0) return n;
    }
    return 0;
}

/* One word, as in 's|'t|...| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static size_t word_length(const unsigned char *at, size_t left) {
    size_t step, last = 1, n = contraction(at, left);
    if (n) return n;
    enum kind kind = kind_at(at, left, &step);
    if (kind != SPACE) return same_kind(at, left, kind, &last);
    if (at[0] == ' ' && left > 1) {
        enum kind next = kind_at(at + 1, left - 1, &step);
        if (next != SPACE) return 1 + same_kind(at + 1, left - 1, next, &last);
    }
    n = same_kind(at, left, SPACE, &last);
    return n < left && n > last ? n - last : n; /* the last space goes with the next word */
}

/* ---- joining ---- */

enum { WORD_MAX = 192 }; /* a longer word is cut: joining is quadratic */

struct joint { /* one piece of a word, and the id it would make with the piece after it */
    uint32_t start, n;
    int32_t id, joined;
};

static int32_t joined_id(const struct model *model, const unsigned char *word,
                         const struct joint *left, const struct joint *right) {
    return model_find(model, word + left->start, left->n + right->n);
}

static void join_word(const struct model *model, const unsigned char *word, size_t n,
                      struct ids *out) {
    struct joint parts[WORD_MAX];
    size_t count = n;
    for (size_t i = 0; i < n; i++)
        parts[i] = (struct joint){(uint32_t)i, 1, model->byte_id[word[i]], -1};
    for (size_t i = 0; i + 1 < n; i++)
        parts[i].joined = joined_id(model, word, &parts[i], &parts[i + 1]);
    for (;;) {
        size_t best = count;
        for (size_t i = 0; i + 1 < count; i++)
            if (parts[i].joined >= 0 && (best == count || parts[i].joined < parts[best].joined))
                best = i;
        if (best == count) break;
        parts[best].id = parts[best].joined;
        parts[best].n += parts[best + 1].n;
        count--;
        memmove(&parts[best + 1], &parts[best + 2], (count - best - 1) * sizeof *parts);
        bool last = best + 1 == count;
        parts[best].joined = last ? -1 : joined_id(model, word, &parts[best], &parts[best + 1]);
        if (best > 0)
            parts[best - 1].joined = joined_id(model, word, &parts[best - 1], &parts[best]);
    }
    for (size_t i = 0; i < count; i++) ids_add(out, &parts[i].id, 1);
}

static void tokenize_plain(const struct model *model, const unsigned char *at, size_t left,
                           struct ids *out) {
    while (left) {
        size_t n = word_length(at, left);
        if (n > WORD_MAX) n = WORD_MAX;
        int32_t whole = model_find(model, at, n);
        if (whole >= 0) ids_add(out, &whole, 1);
        else join_word(model, at, n, out);
        at += n;
        left -= n;
    }
}

/* Markers all look like <...>, so only a '<' can begin one. The longest match wins. */
static int32_t marker_at(const struct model *model, const unsigned char *at, size_t left) {
    int32_t best = -1;
    size_t most = left < 24 ? left : 24;
    for (size_t n = 2; n <= most; n++) {
        if (at[n - 1] != '>') continue;
        int32_t id = model_find(model, at, n);
        if (id >= 0 && model->pieces[id].flags & PIECE_MARKER) best = id;
    }
    return best;
}

void tokenize(const struct model *model, const char *bytes, size_t n, bool with_markers,
              struct ids *out) {
    const unsigned char *at = (const unsigned char *)bytes, *end = at + n, *plain = at;
    while (with_markers && at < end) {
        at = memchr(at, '<', (size_t)(end - at));
        if (!at) break;
        int32_t marker = marker_at(model, at, (size_t)(end - at));
        if (marker < 0) {
            at++;
            continue;
        }
        tokenize_plain(model, plain, (size_t)(at - plain), out);
        ids_add(out, &marker, 1);
        at += model->pieces[marker].n;
        plain = at;
    }
    tokenize_plain(model, plain, (size_t)(end - plain), out);
}
