/* Calling a tool, the simple way: from the JSON schemas in the system prompt, one per line, choose
 * the tool that shares a word with the user's request and fill in every parameter by its type. It
 * reads just enough JSON for that, and never fails on any other text: it then calls nothing. */
#include "rksim.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

struct slice {
    const char *at;
    size_t n;
};

static const char *skip_space(const char *at, const char *end) {
    while (at < end && isspace((unsigned char)*at)) at++;
    return at;
}

static const char *after_string(const char *at, const char *end) { /* at: its opening quote */
    for (at++; at < end && *at != '"'; at++)
        if (*at == '\\') at++;
    return at < end ? at + 1 : end;
}

static const char *after_value(const char *at, const char *end) {
    int depth = 0;
    while (at < end) {
        char c = *at;
        if (c == '"') {
            at = after_string(at, end);
            if (!depth) return at;
            continue;
        }
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
        if (depth < 0 || (!depth && c == ',')) return at;
        at++;
        if (!depth && (c == '}' || c == ']')) return at;
    }
    return end;
}

/* Walk an object: the next key and its value. *at begins behind the '{'. */
static bool next_member(const char **at, const char *end, struct slice *key, struct slice *value) {
    *at = skip_space(*at, end);
    if (*at < end && **at == ',') *at = skip_space(*at + 1, end);
    if (*at >= end || **at != '"') return false;
    const char *key_end = after_string(*at, end);
    if (key_end - *at < 2) return false;
    *key = (struct slice){*at + 1, (size_t)(key_end - *at) - 2};
    const char *colon = skip_space(key_end, end);
    if (colon >= end || *colon != ':') return false;
    const char *from = skip_space(colon + 1, end);
    *at = after_value(from, end);
    *value = (struct slice){from, (size_t)(*at - from)};
    return true;
}

static bool member(struct slice object, const char *name, struct slice *value) {
    if (!object.n || *object.at != '{') return false;
    const char *at = object.at + 1, *end = object.at + object.n;
    struct slice key;
    while (next_member(&at, end, &key, value))
        if (key.n == strlen(name) && memcmp(key.at, name, key.n) == 0) return true;
    return false;
}

static struct slice unquoted(struct slice value) {
    if (value.n >= 2 && *value.at == '"') return (struct slice){value.at + 1, value.n - 2};
    return (struct slice){value.at, 0};
}

/* Whether some word of at least so many letters stands in both. */
static bool share_a_word(struct slice tool, size_t letters, const char *user) {
    for (size_t i = 0; i < tool.n;) {
        size_t n = 0;
        while (i + n < tool.n && isalpha((unsigned char)tool.at[i + n])) n++;
        for (const char *at = user; n >= letters && *at; at++)
            if (strncasecmp(at, tool.at + i, n) == 0) return true;
        i += n + 1;
    }
    return false;
}

/* A description is prose: only its longer words say what it is about. */
static bool is_asked_for(struct slice tool, struct slice name, const char *user) {
    struct slice about;
    return share_a_word(name, 4, user) || strcasestr(user, "use the tool") ||
           (member(tool, "description", &about) && share_a_word(about, 6, user));
}

static struct slice last_word(const char *user) {
    size_t end = strlen(user);
    while (end && !isalnum((unsigned char)user[end - 1])) end--;
    size_t start = end;
    while (start && isalnum((unsigned char)user[start - 1])) start--;
    return (struct slice){user + start, end - start};
}

static void argument_add(struct text *out, struct slice key, struct slice schema,
                         const char *user) {
    struct slice type, choices, word = last_word(user);
    type = member(schema, "type", &type) ? unquoted(type) : (struct slice){"", 0};
    text_say(out, "\"%.*s\": ", (int)key.n, key.at);
    if (member(schema, "enum", &choices) && choices.n > 2) {
        const char *from = skip_space(choices.at + 1, choices.at + choices.n);
        text_add(out, from, (size_t)(after_value(from, choices.at + choices.n) - from));
    } else if (type.n == 7 && !memcmp(type.at, "integer", 7)) text_say(out, "1");
    else if (type.n == 6 && !memcmp(type.at, "number", 6)) text_say(out, "1.5");
    else if (type.n == 7 && !memcmp(type.at, "boolean", 7)) text_say(out, "true");
    else if (type.n == 5 && !memcmp(type.at, "array", 5)) text_say(out, "[]");
    else if (type.n == 6 && !memcmp(type.at, "object", 6)) text_say(out, "{}");
    else text_say(out, "\"%.*s\"", (int)word.n, word.at);
}

static void call_add(struct text *out, struct slice name, struct slice parameters,
                     const char *user) {
    struct slice properties, key, schema;
    text_say(out, "{\"name\": \"%.*s\", \"arguments\": {", (int)name.n, name.at);
    if (member(parameters, "properties", &properties) && *properties.at == '{') {
        const char *at = properties.at + 1, *end = properties.at + properties.n;
        for (int i = 0; next_member(&at, end, &key, &schema); i++) {
            if (i) text_say(out, ", ");
            argument_add(out, key, schema, user);
        }
    }
    text_say(out, "}}");
}

/* `tools`: one {"type": "function", "function": {...}} (or the inner object) after another, until
 * "</tools>". The call of the nth of them is added, or of the nth that fits the request; false, and
 * nothing is added, where there is none. */
bool tool_call_add(struct text *out, const char *tools, const char *user, int nth, bool fitting) {
    const char *end = strstr(tools, "</tools>");
    if (!end) end = tools + strlen(tools);
    while ((tools = memchr(tools, '{', (size_t)(end - tools)))) {
        const char *next = after_value(tools, end);
        struct slice tool = {tools, (size_t)(next - tools)}, inner, name, parameters;
        if (member(tool, "function", &inner)) tool = inner;
        if (member(tool, "name", &name) &&
            (!fitting || is_asked_for(tool, unquoted(name), user)) && nth-- == 0) {
            if (!member(tool, "parameters", &parameters)) parameters = (struct slice){"", 0};
            call_add(out, unquoted(name), parameters, user);
            return true;
        }
        tools = next;
    }
    return false;
}
