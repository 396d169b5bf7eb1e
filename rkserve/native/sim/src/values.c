/* What values a request names: for an argument of a call, or in JSON that somebody makes the model
 * write. "age: 25", "age is 25" and "age=25" name the value of `age`; whatever is not named is the
 * request's last word, or the next of its numbers. */
#include "rksim.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

static bool in_word(char c) {
    return isalnum((unsigned char)c) || c == '_' || (unsigned char)c >= 0x80;
}

static struct slice word_at(const char *at) {
    size_t n = 0;
    while (in_word(at[n])) n++;
    return (struct slice){at, n};
}

static struct slice number_at(const char *at) {
    size_t n = strspn(at, "0123456789");
    if (n && at[n] == '.' && isdigit((unsigned char)at[n + 1]))
        n += 1 + strspn(at + n + 1, "0123456789");
    return (struct slice){at, n};
}

/* Where the request says what `key` is; NULL if nowhere. */
static const char *said_of(const char *user, struct slice key) {
    for (const char *at = user; key.n && *at; at++) {
        if ((at > user && in_word(at[-1])) || strncasecmp(at, key.at, key.n) != 0) continue;
        const char *next = at + key.n;
        if (*next == '=' || *next == ':') next++;
        else if (strncmp(next, " is ", 4) == 0) next += 4;
        else continue;
        next += strspn(next, " \"'");
        if (in_word(*next)) return next;
    }
    return NULL;
}

/* "named 'X Y'" names the value of a key with "name" in it. */
static struct slice given_name(const char *user, struct slice key) {
    const char *at = strcasestr(user, "named ");
    if (!at || !memmem(key.at, key.n, "name", 4)) return (struct slice){user, 0};
    at += strlen("named ");
    const char *end = strchr("\"'", *at) ? strchr(at + 1, *at) : NULL;
    return end ? (struct slice){at + 1, (size_t)(end - at) - 1} : word_at(at);
}

struct slice named_word(const char *user, struct slice key) {
    const char *said = said_of(user, key);
    if (said) return word_at(said);
    struct slice name = key.n ? given_name(user, key) : (struct slice){user, 0};
    if (name.n && !memchr(name.at, '\\', name.n) && !memchr(name.at, '"', name.n)) return name;
    size_t end = strlen(user);
    while (end && !in_word(user[end - 1])) end--;
    size_t start = end;
    while (start && in_word(user[start - 1])) start--;
    return (struct slice){user + start, end - start};
}

/* nth: how many numbers have been taken from the request already. Empty where there is none. */
struct slice named_number(const char *user, struct slice key, int nth) {
    const char *said = said_of(user, key);
    if (said && isdigit((unsigned char)*said)) return number_at(said);
    for (const char *at = user; *at; at++) {
        struct slice number = number_at(at);
        if (!number.n || (at > user && in_word(at[-1]))) continue;
        if (nth-- == 0) return number;
        at += number.n - 1;
    }
    return (struct slice){user, 0};
}
