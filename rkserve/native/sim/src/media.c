/* Pictures and videos: from the release's way of passing them to rows in the prompt, and from those
 * rows to what the language model says about them. What a picture shows is unknown here: it has a
 * pattern of four letters, a digest of all its floats. */
#include "rksim.h"

#include <string.h>

struct media { /* one kind of them, as 1.2.x and 1.3.0 both mean it */
    enum row kind;
    const char *tag; /* where one stands in the prompt */
    const float *embed;
    size_t n, n_tokens; /* how many, and rows of each */
    const char *start, *end, *content;
};
enum { KINDS = 2 };

static size_t times(size_t a, size_t b) { /* SIZE_MAX: too many to count */
    return b && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

#if IS_1_3
static void read_media(const struct handle *h, const RKLLMMultiModalInput *in, struct media *out) {
    (void)h;
    out[0] = (struct media){ROW_IMAGE, "<image>", in->image.image_embed, in->image.n_image,
                            in->image.n_image_tokens, in->image.image_start, in->image.image_end,
                            in->image.image_content};
    out[1] = (struct media){ROW_VIDEO, "<video>", in->video.video_embed, in->video.n_video,
                            times(in->video.n_frame_tokens, in->video.n_frame_per_video),
                            in->video.video_start, in->video.video_end, in->video.video_content};
}
#else
static void read_media(const struct handle *h, const RKLLMMultiModalInput *in, struct media *out) {
    out[0] = (struct media){ROW_IMAGE, "<image>", in->image_embed, in->n_image, in->n_image_tokens,
                            h->image_start, h->image_end, h->image_content};
    out[1] = (struct media){.kind = ROW_VIDEO, .tag = "<video>"};
}
#endif

static size_t count_of(const char *text, const char *phrase) {
    size_t n = 0;
    while ((text = strstr(text, phrase))) n++, text += strlen(phrase);
    return n;
}

/* Whether one kind of media is given, and whole. Rows are only read if there may be room. */
static bool is_whole(const struct media *m, const char *prompt, uint32_t limit) {
    size_t rows = times(m->n, m->n_tokens), tags = count_of(prompt, m->tag);
    if (rows == 0) {
        if (!m->n && !m->n_tokens && tags == 0) return true;
        if (m->n || m->n_tokens) log_line("E rkllm: The n_image/n_image_token of multimodal_input "
                                          "is not set");
        else log_line("E rkllm: the prompt holds %zu %s, but none is given", tags, m->tag);
        return false;
    }
    if (!m->embed) {
        log_line("E rkllm: the embedding for %s is NULL", m->tag);
        return false;
    }
    if (tags != m->n) {
        log_line("E rkllm: the prompt holds %zu %s, but %zu are given", tags, m->tag, m->n);
        return false;
    }
    if (rows <= limit) return true;
    log_line("E rkllm: prompt of %zu tokens exceeds max_context_len %u", rows, limit);
    return false;
}

/* Each row stands on the content tag if that is one token, else on the token without text. */
static void add_rows(const struct model *model, struct media *m, struct fresh *out) {
    const char *content = m->content ? m->content : "";
    int32_t id = *content ? model_find(model, (const unsigned char *)content, strlen(content)) : -1;
    if (id < 0) id = model->header->silent;
    for (size_t at = 0; at < m->n_tokens; at++, m->embed += SIM_EMBED_DIM)
        fresh_add(out, id, row_digest(m->embed, m->kind, at == 0));
}

/* The rendered prompt, with start, rows and end in the place of each tag. */
static bool weave(const struct handle *h, const char *prompt, struct media *media,
                  struct fresh *out) {
    struct text between = {0};
    bool ok = true;
    while (ok && *prompt) {
        struct media *next = NULL;
        const char *at = NULL;
        for (int kind = 0; kind < KINDS; kind++) {
            const char *tag = strstr(prompt, media[kind].tag);
            if (tag && (!at || tag < at)) at = tag, next = &media[kind];
        }
        text_add(&between, prompt, at ? (size_t)(at - prompt) : strlen(prompt));
        if (!next) break;
        text_say(&between, "%s", next->start ? next->start : "");
        ok = hooks_tokenize(h, &between, out);
        if (ok) add_rows(&h->model, next, out);
        between.n = 0;
        text_say(&between, "%s", next->end ? next->end : "");
        prompt = at + strlen(next->tag);
    }
    ok = ok && (!between.n || hooks_tokenize(h, &between, out));
    text_free(&between);
    return ok;
}

bool take_multimodal(const struct handle *h, const RKLLMInput *input, const struct kv *past,
                     bool resumed, struct fresh *out) {
    const RKLLMMultiModalInput *in = &input->multimodal_input;
    struct media media[KINDS];
    read_media(h, in, media);
    if (!media[0].n && !media[1].n) {
        log_line("E rkllm: The n_image/n_image_token of multimodal_input is not set");
        return false;
    }
    if (!in->prompt) {
        log_line("E rkllm: the prompt of multimodal_input is NULL");
        return false;
    }
    RKLLMInput words = *input;
    words.prompt_input = in->prompt;
    struct text prompt = {0};
    text_add(&prompt, "", 0);
    prompt_render(h, past, &words, resumed, &prompt);
    bool ok = is_whole(&media[0], prompt.at, past->limit) &&
              is_whole(&media[1], prompt.at, past->limit) && weave(h, prompt.at, media, out);
    text_free(&prompt);
    return ok;
}

/* ---- what is seen ---- */

static void pattern_add(struct text *out, uint64_t digest) {
    for (int letter = 0; letter < 4; letter++, digest /= 26)
        text_say(out, "%c", (char)('A' + digest % 26));
}

/* The patterns of one kind between two positions, as "ABCD", "ABCD and EFGH", ... */
static size_t patterns(const struct kv *kv, uint32_t from, uint32_t to, enum row kind,
                       struct text *out) {
    size_t n = 0;
    for (uint32_t at = from; at < to; at++) {
        if ((kv->rows[at] & ROW_KIND) != kind) continue;
        uint64_t digest = 0;
        do digest = spread(digest ^ (kv->rows[at] & ~7ull));
        while (++at < to && (kv->rows[at] & ROW_KIND) == kind && !(kv->rows[at] & ROW_FIRST));
        at--;
        if (n++) text_say(out, " and ");
        pattern_add(out, digest);
    }
    return n;
}

static void describe(const struct kv *kv, uint32_t from, uint32_t to, enum row kind,
                     struct text *out) {
    const char *name = kind == ROW_IMAGE ? "picture" : "video";
    struct text shown = {0};
    size_t n = patterns(kv, from, to, kind, &shown);
    if (n == 1) text_say(out, "%sThe %s shows pattern %s.", out->n ? " " : "", name, shown.at);
    if (n > 1) text_say(out, "%sThe %ss show patterns %s.", out->n ? " " : "", name, shown.at);
    text_free(&shown);
}

void describe_media(const struct model *model, const struct kv *kv, uint32_t end, bool mentioned,
                    struct text *out) {
    uint32_t to = end;
    int turns = 0; /* the header of the answer counts as one */
    for (uint32_t at = end; at > 0 && out->n == 0; at--) {
        if (kv->ids[at - 1] != model->header->im_start) continue;
        describe(kv, at, to, ROW_IMAGE, out);
        describe(kv, at, to, ROW_VIDEO, out);
        to = at - 1;
        if (++turns >= 2 && !mentioned) return;
    }
}
