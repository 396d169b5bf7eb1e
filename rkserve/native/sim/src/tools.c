/* Calling a tool, the simple way: from the JSON schemas in the system prompt, one per line, choose
 * the tool that shares a word with the user's request and fill in every parameter by its type. It
 * reads just enough JSON for that, and never fails on any other text: it then calls nothing. */
#include "rksim.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

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

/* ---- arguments ---- */

enum { DEEPEST = 6 };

struct filling { /* of one call's arguments */
    struct text *out;
    struct slice root; /* the parameters: what references start from */
    const char *user;
    int numbers; /* taken from the request so far */
};

static bool is(struct slice text, const char *word) {
    return text.n == strlen(word) && memcmp(text.at, word, text.n) == 0;
}

/* The first element of an array; false if there is none. */
static bool first_of(struct slice array, struct slice *first) {
    if (array.n < 2 || *array.at != '[') return false;
    const char *end = array.at + array.n - 1, *from = skip_space(array.at + 1, end);
    *first = (struct slice){from, (size_t)(after_value(from, end) - from)};
    return first->n > 0;
}

/* "#/$defs/Name" is looked for step by step, from the parameters on. */
static struct slice referred(const struct filling *f, struct slice path) {
    struct slice found = f->root;
    const char *at = path.at, *end = path.at + path.n;
    while (at < end && (at = memchr(at, '/', (size_t)(end - at)))) {
        const char *next = memchr(at + 1, '/', (size_t)(end - at) - 1);
        char step[128];
        size_t n = (size_t)((next ? next : end) - at) - 1;
        if (n >= sizeof step) return (struct slice){"", 0};
        memcpy(step, at + 1, n);
        at++;
        step[n] = '\0';
        if (!member(found, step, &found)) return (struct slice){"", 0};
    }
    return found;
}

/* What a schema comes down to: the end of its references, and the first of several ways. */
static struct slice settled(const struct filling *f, struct slice schema) {
    static const char *const WAYS[] = {"anyOf", "oneOf", "allOf"};
    for (int step = 0; step < DEEPEST; step++) {
        struct slice found, way;
        bool further = false;
        if (member(schema, "$ref", &found)) schema = referred(f, unquoted(found)), further = true;
        for (size_t i = 0; !further && i < sizeof WAYS / sizeof *WAYS; i++)
            if (member(schema, WAYS[i], &found) && first_of(found, &way))
                schema = way, further = true;
        if (!further) break;
    }
    return schema;
}

static struct slice type_of(struct slice schema) {
    struct slice type, first;
    if (!member(schema, "type", &type)) return (struct slice){"", 0};
    return unquoted(first_of(type, &first) ? first : type);
}

static void value_add(struct filling *f, struct slice key, struct slice schema, int depth);

static void members_add(struct filling *f, struct slice schema, int depth) {
    struct slice properties, key, value;
    text_say(f->out, "{");
    if (member(schema, "properties", &properties) && *properties.at == '{') {
        const char *at = properties.at + 1, *end = properties.at + properties.n;
        for (int i = 0; next_member(&at, end, &key, &value); i++) {
            text_say(f->out, "%s\"%.*s\": ", i ? ", " : "", (int)key.n, key.at);
            value_add(f, key, value, depth + 1);
        }
    }
    text_say(f->out, "}");
}

static void number_add(struct filling *f, struct slice key, bool whole) {
    struct slice number = named_number(f->user, key, f->numbers++);
    const char *point = number.n ? memchr(number.at, '.', number.n) : NULL;
    if (whole && point) number.n = (size_t)(point - number.at);
    if (number.n) text_say(f->out, "%.*s", (int)number.n, number.at);
    else text_say(f->out, whole ? "1" : "1.5");
}

static void array_add(struct filling *f, struct slice key, struct slice schema, int depth) {
    struct slice items;
    text_say(f->out, "[");
    if (depth < DEEPEST && member(schema, "items", &items) && items.n > 2)
        value_add(f, key, items, depth + 1);
    text_say(f->out, "]");
}

static void value_add(struct filling *f, struct slice key, struct slice schema, int depth) {
    struct slice choices, fixed;
    schema = settled(f, schema);
    struct slice type = type_of(schema);
    if (member(schema, "const", &fixed)) text_add(f->out, fixed.at, fixed.n);
    else if (member(schema, "enum", &choices) && first_of(choices, &fixed))
        text_add(f->out, fixed.at, fixed.n);
    else if (is(type, "integer") || is(type, "number")) number_add(f, key, is(type, "integer"));
    else if (is(type, "boolean")) text_say(f->out, "true");
    else if (is(type, "null")) text_say(f->out, "null");
    else if (is(type, "array")) array_add(f, key, schema, depth);
    else if (is(type, "object") && depth < DEEPEST) members_add(f, schema, depth);
    else if (is(type, "object")) text_say(f->out, "{}");
    else {
        struct slice word = named_word(f->user, key);
        text_say(f->out, "\"%.*s\"", (int)word.n, word.at);
    }
}

static void call_add(struct text *out, struct slice name, struct slice parameters,
                     const char *user) {
    struct filling f = {.out = out, .root = parameters, .user = user};
    text_say(out, "{\"name\": \"%.*s\", \"arguments\": ", (int)name.n, name.at);
    members_add(&f, settled(&f, parameters), 0);
    text_say(out, "}");
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

/* The first JSON schema of an object in a text, filled in as the arguments of a call are; false, and
 * nothing is added, where there is none. */
bool schema_fill(struct text *out, const char *text, const char *user) {
    const char *end = text + strlen(text);
    struct slice properties;
    for (const char *at = text; (at = strchr(at, '{')); at++) {
        struct slice schema = {at, (size_t)(after_value(at, end) - at)};
        if (!member(schema, "properties", &properties) || *properties.at != '{') continue;
        struct filling f = {.out = out, .root = schema, .user = user};
        members_add(&f, schema, 0);
        return true;
    }
    return false;
}
