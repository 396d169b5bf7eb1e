/* The simulated RKLLM runtime: what its files share.
 *
 * Read in this order: api.c (the 15 symbols), load.c (init), engine.c (one run), responder.c and
 * rules.c (the language model); then model.c, tokens.c, kv.c, clock.c, control.c, prompt.c, tools.c
 * and log.c as needed.
 * The vendor's declarations come from the same files that the binding gives to cffi, so the two
 * cannot drift apart. RKSIM_RELEASE (10203 or 10300) chooses the release at compile time.
 */
#ifndef RKSIM_H
#define RKSIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#pragma GCC visibility push(default)
#if RKSIM_RELEASE == 10300
#include "rkllm_1_3.h"
#define RELEASE_NAME "1.3.0"
#elif RKSIM_RELEASE == 10203
#include "rkllm_1_2.h"
#define RELEASE_NAME "1.2.3"
#else
#error "RKSIM_RELEASE must be 10203 or 10300"
#endif
#pragma GCC visibility pop

#define IS_1_3 (RKSIM_RELEASE >= 10300)

/* ---- log.c: the vendor's log lines, and the memory of misuse ---- */

enum { LOG_QUIET = 0, LOG_PERF = 1, LOG_DETAIL = 2 };
int log_level(void);
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A misuse that the real runtime leaves undefined: counted, and fatal under strict. */
void violation(bool strict, const char *name);
unsigned violation_count(void);
void *must_alloc(size_t bytes);
void *must_grow(void *old, size_t bytes);

/* ---- tokens.c: growable texts and token lists, and text -> token ids ---- */

struct text {
    char *at;
    size_t n, room;
};
struct ids {
    int32_t *at;
    uint32_t n, room;
};
void text_add(struct text *text, const char *bytes, size_t n);
void text_say(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_free(struct text *text);
void ids_add(struct ids *ids, const int32_t *more, uint32_t n);
void ids_free(struct ids *ids);

struct model;
/* with_markers: "<|im_start|>" and its kin in the text become their own ids. */
void tokenize(const struct model *model, const char *bytes, size_t n, bool with_markers,
              struct ids *out);

/* ---- model.c: the simulated .rkllm file, mapped read-only ---- */

#define MODEL_MAGIC "RKSIMLLM"
#define MODEL_FORMAT 1
enum piece_flag {
    PIECE_SPECIAL = 1, /* hidden by skip_special_token */
    PIECE_MARKER = 2,  /* recognised whole in a text */
    PIECE_SILENT = 4   /* has no text at all: NORMAL arrives with text == NULL */
};
struct model_header { /* little-endian, as written by scripts/make_sim_chat.py */
    char magic[8];
    uint32_t format, file_bytes;
    char model_id[64], target_platform[16], profile[64], toolkit_version[16], dtype[16];
    uint32_t max_context_limit, npu_core_num, memory_mb, load_ms;
    uint32_t n_pieces, pieces_at; /* struct piece[n_pieces] */
    uint32_t n_bank, bank_at;     /* struct sentence[n_bank] */
    uint32_t strings_at, strings_bytes;
    int32_t im_start, im_end, end_of_text, silent, think_close;
};
struct piece {
    uint32_t at;
    uint16_t n, flags;
};
struct sentence { /* its ids after a space, then its ids at the start of a line */
    uint32_t at;
    uint16_t n_spaced, n_bare;
};
struct model {
    const struct model_header *header;
    const unsigned char *map;
    size_t map_bytes;
    const struct piece *pieces;
    const struct sentence *bank;
    uint32_t *lookup; /* hash table: bytes -> id + 1 */
    uint32_t lookup_mask;
    int32_t byte_id[256];
    int32_t newline;
};
/* NULL, or why the file is refused. */
const char *model_open(struct model *model, const char *path);
void model_close(struct model *model);
int32_t model_find(const struct model *model, const unsigned char *bytes, size_t n);
const char *model_string(const struct model *model, const char *key);
static inline const unsigned char *piece_bytes(const struct model *model, int32_t id) {
    return model->map + model->pieces[id].at;
}
static inline bool is_eos(const struct model *model, int32_t id) {
    return id == model->header->im_end || id == model->header->end_of_text;
}

/* ---- kv.c: what the context holds ---- */

struct kv {
    int32_t *ids;
    uint64_t *hash; /* hash[k]: of the first k ids, so it is the context's identity at k */
    uint32_t n, limit;
};
void kv_open(struct kv *kv, uint32_t limit, uint64_t seed);
void kv_close(struct kv *kv);
void kv_append(struct kv *kv, const int32_t *ids, uint32_t n);
void kv_remove(struct kv *kv, uint32_t start, uint32_t end); /* half-open */
static inline uint64_t kv_hash(const struct kv *kv, uint32_t at) { return kv->hash[at]; }

/* ---- responder.c and rules.c: the language model ---- */

#define MAX_CANDIDATES 4
struct span {
    const int32_t *ids;
    uint32_t n;
};
struct candidates { /* what may come next: best first, with logits */
    int n;
    int32_t ids[MAX_CANDIDATES];
    float logits[MAX_CANDIDATES];
};
struct reply { /* what a rule decided to say */
    struct ids exact;                   /* first this, word for word */
    struct ids openers[MAX_CANDIDATES]; /* then one of these, if there are any */
    int n_openers;
    uint32_t sentences; /* then so many sentences of the bank, then EOS */
};
enum phase { PHASE_REPLY, PHASE_HEADER, PHASE_TURN, PHASE_RAW_LINE };
struct responder { /* a left fold over the ids of the context; forget it, and it folds again */
    uint32_t pos;  /* ids read so far; UINT32_MAX: start over */
    enum phase phase;
    uint32_t header_at;
    struct reply reply;
    struct span current;
    uint32_t cursor;
    bool silent_next, opener_next;
    uint32_t sentences_left;
};
void responder_forget(struct responder *responder);
void responder_close(struct responder *responder);
/* may_end: EOS is allowed. */
void responder_next(struct responder *responder, const struct model *model, const struct kv *kv,
                    bool may_end, struct candidates *out);
void detokenize(const struct model *model, const int32_t *ids, uint32_t n, struct text *out);

void reply_clear(struct reply *reply);
void reply_free(struct reply *reply);
void reply_to_chat(struct reply *reply, const struct model *model, const struct kv *kv,
                   uint32_t header_end);
/* The end of the line that asks for something, or 0 if no line does. */
size_t raw_request_end(const char *text, size_t n);
void reply_to_line(struct reply *reply, const struct model *model, const char *line, uint64_t hash);
void tool_call_add(struct text *out, const char *tools, const char *user);

/* ---- clock.c: how long a board takes ---- */

struct profile {
    const char *name, *platform;
    double a, b, c, d0, k;
    uint32_t window; /* decode cost stops growing here; 0: never */
    double memory_mb;
};
const struct profile *profile_find(const char *name);
double prefill_ms(const struct profile *profile, uint32_t fresh, uint32_t past);
double decode_ms(const struct profile *profile, uint32_t context);
int64_t now_ns(void);
void sleep_until_ns(int64_t deadline);
void sleep_forever(void) __attribute__((noreturn));
long timer_slack_tighten(void);
void timer_slack_restore(long before);

/* ---- control.c: environment, control file, faults ---- */

enum fault_kind {
    FAULT_NONE, FAULT_SEGV_AT_TOKEN, FAULT_ABORT_AT_TOKEN, FAULT_ERROR_AT_TOKEN,
    FAULT_HANG_AT_TOKEN, FAULT_HANG_IN_PREFILL, FAULT_HANG_AFTER_FINISH, FAULT_NO_CALLBACK,
    FAULT_INIT_FAIL, FAULT_INIT_SEGV, FAULT_INIT_NULL_HANDLE, FAULT_INIT_HANG,
    FAULT_IGNORE_ABORT_MS, FAULT_DESTROY_HANG, FAULT_OOM_SEGV
};
struct control { /* touched by the thread that runs, or by init and destroy: never by two at once */
    char path[1024];
    struct stat seen;
    bool present;
    double time_scale;
    atomic_bool strict; /* the one part that any thread may ask for */
    enum fault_kind fault;
    unsigned long fault_arg;
    bool sticky;
};
struct settings { /* read once, at init */
    char profile[64], platform[16];
    double time_scale, load_ms, memory_mb, async_read_ms;
    bool strict, resume_with_template, paused_is_running, range_clear_fails, destroy_fails;
    bool think_finish;
    uint64_t seed;
    struct control control;
};
bool settings_read(struct settings *settings);
void control_refresh(struct settings *settings);
/* True if this fault is due now; it is then used up, in every process, unless sticky. */
bool fault_due(struct settings *settings, enum fault_kind kind, unsigned long token);
void crash_now(void);
void ggml_assert_now(void);
static inline double time_scale(const struct settings *s) { return s->control.time_scale; }
static inline bool is_strict(const struct settings *s) { return s->control.strict; }

/* ---- the handle ---- */

struct sampling {
    int32_t top_k;
    float top_p, temperature;
};
enum state { STATE_IDLE, STATE_RUNNING, STATE_PAUSED };
struct handle {
    struct handle *next; /* list of the living, so that a stale pointer is refused */
    struct settings settings;
    struct model model;
    const struct profile *profile;

    LLMResultCallback on_result;
    void *on_result_userdata;
    struct sampling sampling;
    int32_t max_new_tokens, n_keep, domain;
    bool skip_special_token, ignore_eos_token;
    char *system_prompt, *prompt_prefix, *prompt_postfix; /* set_chat_template, else NULL */
    char *tools_system, *tools, *tools_tag;               /* set_function_tools, else NULL */

    pthread_mutex_t lock; /* guards state, corrupt, abort_ns, runner */
    pthread_cond_t stopped;
    enum state state;
    bool corrupt; /* cleared while paused: the next run falls over, as the real one is thought to */
    bool has_runner;
    pthread_t runner;
    int64_t abort_ns; /* when abort was asked for; 0: not */
    atomic_uint kv_size;

    struct kv kv; /* from here on: the running thread's own */
    struct responder responder;
    uint64_t rng;
    char *text_buffer;
    size_t text_room;
    RKLLMResult result;
};
/* ---- load.c: from rkllm_init to rkllm_destroy ---- */

struct handle *handle_new(const RKLLMParam *param);
bool handle_load(struct handle *handle, const RKLLMParam *param);
void handle_drop(struct handle *handle);
/* The handle, if it is alive; else NULL, and a log line that names the caller. */
struct handle *handle_living(LLMHandle handle, const char *caller);

/* ---- engine.c: running it ---- */

/* Take the handle for a run; false if it already has one. */
bool engine_begin(struct handle *handle, bool *resumed);
/* The run itself, on the calling thread. Returns what rkllm_run returns. */
int engine_run(struct handle *handle, const RKLLMInput *input, const RKLLMInferParam *infer,
               void *userdata, bool async, bool resumed);

/* ---- prompt.c: PROMPT input -> text with the chat template ---- */

uint32_t system_part(const struct model *model, const struct kv *kv);
void prompt_render(const struct handle *handle, const RKLLMInput *input, bool resumed,
                   struct text *out);

#endif
