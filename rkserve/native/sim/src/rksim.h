/* The simulated RKLLM runtime: what its files share.
 *
 * Read in this order: api.c (the 15 symbols), load.c (init), engine.c (one run) with input.c,
 * sampling.c, callback.c, inside.c and held.c, responder.c and rules.c (the language model); then
 * model.c, tokens.c, kv.c, clock.c, control.c, prompt.c, tools.c and log.c as needed. What a run
 * can be given besides text and ids is in addons.h.
 * The vendor's declarations come from the same files that the binding gives to cffi, so the two
 * cannot drift apart. RKSIM_RELEASE (such as 10300) chooses the release at compile time.
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
#if RKSIM_RELEASE == 10301
#include "rkllm_1_3_1.h"
#define RELEASE_NAME "1.3.1"
#elif RKSIM_RELEASE == 10300
#include "rkllm_1_3.h"
#define RELEASE_NAME "1.3.0"
#elif RKSIM_RELEASE == 10203
#include "rkllm_1_2.h"
#define RELEASE_NAME "1.2.3"
#else
#error "RKSIM_RELEASE must be 10203, 10300 or 10301"
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
void *must_zero(size_t bytes); /* all of it 0 */
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
struct lora;
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
    struct lora *loras; /* adapters, latest first; none of them is active by itself */
};
/* NULL, or why the file is refused. */
const char *model_open(struct model *model, const char *path);
void model_close(struct model *model);
int32_t model_find(const struct model *model, const unsigned char *bytes, size_t n);
const char *model_string(const struct model *model, const char *key);
/* What the answers of this model hang on, other than the context: 0 without a string "seed". */
uint64_t model_seed(const struct model *model);
static inline const unsigned char *piece_bytes(const struct model *model, int32_t id) {
    return model->map + model->pieces[id].at;
}
static inline bool is_eos(const struct model *model, int32_t id) {
    return id == model->header->im_end || id == model->header->end_of_text;
}

/* ---- kv.c: what the context holds ---- */

struct kv {
    int32_t *ids;
    uint64_t *rows;     /* what an id does not say: see enum row; mostly 0 */
    uint64_t *adapters; /* with which adapter the position was computed; 0: the base model */
    uint64_t *hash;     /* hash[k]: of the first k positions, so it is the context's identity */
    uint32_t n, limit;
    uint64_t adapter; /* with which one the next position is computed */
    uint64_t weights; /* what tells the base weights apart; see model_seed() */
};
void kv_open(struct kv *kv, uint32_t limit, uint64_t weights);
void kv_close(struct kv *kv);
void kv_append(struct kv *kv, int32_t id, uint64_t row);
void kv_remove(struct kv *kv, uint32_t start, uint32_t end); /* half-open */
/* What changes the model itself, and with it all that follows from any context. */
void kv_reseed(struct kv *kv, uint64_t seed);
/* Whether some of the first n positions were computed with another adapter than the next is. */
bool kv_is_mixed(const struct kv *kv, uint32_t n);
static inline uint64_t kv_hash(const struct kv *kv, uint32_t at) { return kv->hash[at]; }

/* ---- responder.c and rules.c: the language model ---- */

#define MAX_CANDIDATES 4
struct span {
    const int32_t *ids;
    uint32_t n;
};
struct slice {
    const char *at;
    size_t n;
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
    uint32_t thought;   /* so much of `exact` comes before the answer */
};
enum phase { PHASE_REPLY, PHASE_HEADER, PHASE_TURN, PHASE_RAW_LINE, PHASE_JSON };
struct responder { /* a left fold over the ids of the context; forget it, and it folds again */
    uint32_t pos;  /* ids read so far; UINT32_MAX: start over */
    enum phase phase;
    uint32_t header_at, answer_at;
    struct reply reply;
    struct span current;
    uint32_t cursor;
    bool silent_next, opener_next, in_thought;
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
/* The last thing that the user said before the answer at `end`. */
void last_request(struct text *out, const struct model *model, const struct kv *kv, uint32_t end);
/* The end of the line that asks for something, or 0 if no line does. */
size_t raw_request_end(const char *text, size_t n);
void reply_to_line(struct reply *reply, const struct model *model, const char *line, uint64_t hash);
/* What has been said of the answer is the beginning of a call: call that tool. */
bool reply_forced_call(struct reply *reply, const struct model *model, const struct kv *kv,
                       uint32_t answer_at, uint32_t end);
bool tool_call_add(struct text *out, const char *tools, const char *user, int nth, bool fitting);
bool schema_fill(struct text *out, const char *text, const char *user);

/* ---- values.c: what the request says of a value ---- */

struct slice named_word(const char *user, struct slice key);
struct slice named_number(const char *user, struct slice key, int nth);

/* ---- json.c: JSON that the model is made to write ---- */

bool json_is_begun(const char *text, size_t n);
/* False: that is no JSON, or none that goes on. No candidates: it is complete. */
bool json_next(const struct model *model, const char *text, size_t n, const char *user,
               struct candidates *out);

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
/* How many times as much a step of n entries does as one of a single entry in the same time. */
double batch_gain(double at_four, int n);
int64_t now_ns(void);
void sleep_until_ns(int64_t deadline);
void sleep_forever(void) __attribute__((noreturn));
long timer_slack_tighten(void);
void timer_slack_restore(long before);

#include "addons.h"

/* ---- control.c: environment, control file, faults ---- */

enum fault_kind {
    FAULT_NONE, FAULT_SEGV_AT_TOKEN, FAULT_ABORT_AT_TOKEN, FAULT_ERROR_AT_TOKEN,
    FAULT_HANG_AT_TOKEN, FAULT_HANG_IN_PREFILL, FAULT_HANG_AFTER_FINISH, FAULT_NO_CALLBACK,
    FAULT_INIT_FAIL, FAULT_INIT_SEGV, FAULT_INIT_NULL_HANDLE, FAULT_INIT_HANG,
    FAULT_IGNORE_ABORT_MS, FAULT_DESTROY_HANG, FAULT_OOM_SEGV, FAULT_INIT_SIGNAL,
    FAULT_LORA_SEGV, FAULT_LORA_FAIL, FAULT_LORA_HANG
};
enum gate_kind { GATE_OPEN, GATE_INPUT, GATE_PREFILL, GATE_TOKEN };
struct control { /* touched by the thread that runs, or by init and destroy: never by two at once */
    char path[1024];
    struct stat seen;
    bool present;
    double time_scale, leak_mb, leak_files; /* per run */
    atomic_bool strict; /* the one part that any thread may ask for */
    enum fault_kind fault;
    unsigned long fault_arg;
    bool sticky;
    enum gate_kind gate;
    unsigned long gate_arg;
};
struct settings { /* read once, at init */
    char profile[64], platform[16];
    double time_scale, load_ms, memory_mb, async_read_ms;
    bool strict, resume_with_template, paused_is_running, range_clear_fails, destroy_fails;
    bool think_finish, think_finish_always;
    bool pause_with_history, pause_with_batch, async_pause, hidden_empty_first, hidden_finish;
    bool logits_generate;
    bool range_with_history, resume_unlimited, abort_deadlocks, async_broken, prefix_reuse;
    bool close_turns, abort_loses, waiting_no_id, eos_misread, keep_rows;
    bool fewer_cpus, init_crashes, wrong_counts;
    bool last_in_kv, count_first, no_shift, no_null_text;
    double batch_gain; /* of four entries */
    uint64_t seed;
    struct features features;
    struct control control;
};
bool settings_read(struct settings *settings);
/* One variable of the environment; false, and a log line, if it is no such thing. */
bool env_number(const char *name, double least, double *out);
bool env_flag(const char *name, bool *out);
void control_refresh(struct settings *settings);
/* True if this fault is due now; it is then used up, in every process, unless sticky. */
bool fault_due(struct settings *settings, enum fault_kind kind, unsigned long token);
/* Stands still as long as the control file shuts this gate. True: it did, for a while. */
bool gate_pass(struct settings *settings, enum gate_kind kind, unsigned long token);
void crash_now(void);
void die_of(int number);
void ggml_assert_now(const char *what);
static inline double time_scale(const struct settings *s) { return s->control.time_scale; }
static inline bool is_strict(const struct settings *s) { return s->control.strict; }

/* ---- the handle ---- */

struct sampling { /* as RKLLMSamplingParam of 1.3.0 */
    int32_t top_k;
    float top_p, temperature, repeat_penalty, frequency_penalty, presence_penalty;
    int32_t mirostat;
    float mirostat_tau, mirostat_eta;
};
/* RKLLMParam has the same fields, and so has RKLLMSamplingParam. */
#define sampling_of(from)                                                                        \
    ((struct sampling){(from).top_k, (from).top_p, (from).temperature, (from).repeat_penalty,    \
                       (from).frequency_penalty, (from).presence_penalty, (from).mirostat,       \
                       (from).mirostat_tau, (from).mirostat_eta})
enum { WRONG_BY = 7 }; /* positions that RKSIM_WRONG_COUNTS adds to the size of a KV cache */
#define SIM_EMBED_DIM 64 /* floats of a hidden state, and of a token's embedding */
enum state { STATE_IDLE, STATE_RUNNING, STATE_PAUSED };
struct slot { /* one entry of a batch: its context, and who speaks in it */
    struct kv kv;
    uint32_t in_ram; /* positions of the last single turn that lie behind kv.n and may be reused */
    atomic_uint kv_size; /* kv.n, for other threads */
    struct responder responder;
    uint64_t rng;
    char *text_buffer;
    size_t text_room;

    bool live, thinking; /* from here on: of this run */
    double surprise_limit; /* mirostat's mu, in bits */
    uint32_t fresh, generated;
    int32_t id; /* the token that is being delivered */
    bool eos;
    struct text pending; /* bytes of a character that is not complete yet */
};
struct held { /* what a suspended asynchronous run refers to: the caller's, and as it was */
    const RKLLMInput *inputs;
    const RKLLMInferParam *infer;
    RKLLMInput *inputs_then;
    RKLLMInferParam infer_then;
    uint64_t sum; /* of all that the inputs pointed to */
};
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
    char *image_start, *image_end, *image_content;        /* 1.2.x has them from init */
    bool use_cross_attn;
    double adapters_mb; /* guarded like the list of the living */
    struct hooks hooks;

    pthread_mutex_t lock; /* guards state, corrupt, paused_history, abort_ns, runner */
    pthread_cond_t stopped;
    enum state state;
    bool corrupt; /* cleared while paused: the next run falls over, as the real one is thought to */
    bool paused_history; /* paused in a run with keep_history */
    bool has_runner;
    pthread_t runner;
    int64_t abort_ns; /* when abort was asked for; 0: not */
    bool in_callback; /* guarded too: of the thread `caller` */
    pthread_t caller;

    /* From here on: the running thread's own, but for kv_size of a slot. */
    struct prompt_cache cache;
    bool was_aborted; /* some run, ever */
    int n_slots; /* n_batch: every run takes so many inputs and delivers so many results */
    struct slot *slots;
    RKLLMResult *results; /* one for each slot */
    struct held held;
    float *inside;        /* hidden states or logits */
    size_t inside_room;   /* floats */
};
/* ---- load.c: from rkllm_init to rkllm_destroy ---- */

struct handle *handle_new(const RKLLMParam *param);
bool handle_load(struct handle *handle, const RKLLMParam *param);
void handle_drop(struct handle *handle);
/* The handle, if it is alive; else NULL, and a log line that names the caller. */
struct handle *handle_living(LLMHandle handle, const char *caller);

/* So much more memory of the handle's domain; false if it is full. */
bool domain_grow(struct handle *handle, double mb);

/* A slot's context is no longer what it was a moment ago. */
void context_changed(struct slot *slot);

/* ---- engine.c: running it ---- */

struct job { /* one run */
    struct handle *h;
    const RKLLMInput *inputs; /* as many as the handle has slots */
    const RKLLMInferParam *infer;
    void *userdata;
    RKLLMInferMode mode;
    bool async, history, resumed, aborted;
    uint64_t adapter;
    char *save_path; /* where the KV cache goes when the run ends; NULL: nowhere */
    int n_live;
    uint32_t steps; /* tokens delivered to the slot that has most */
    int64_t budget; /* tokens of a slot; 0: until the context is full */
    struct sampling sampling;
    int64_t started, first_token, last_return; /* ns */
    int64_t abort_ignored_until;
};
/* Take the handle for a run; false if it already has one. */
bool engine_begin(struct handle *handle, bool *resumed);
/* The run itself, on the calling thread. Returns what rkllm_run returns. */
int engine_run(struct handle *handle, const RKLLMInput *inputs, const RKLLMInferParam *infer,
               void *userdata, bool async, bool resumed);

/* ---- input.c: what a run is given, checked and as token ids ---- */

bool input_accepts(const struct handle *handle, const RKLLMInput *inputs,
                   const RKLLMInferParam *infer);
/* The ids that join the context `past`; false, and a log line, if there are none. */
bool input_take(const struct handle *handle, const RKLLMInput *input, const struct kv *past,
                bool resumed, struct fresh *out);

/* ---- held.c: what a suspended asynchronous run still refers to ---- */

void held_take(struct handle *handle, const RKLLMInput *inputs, const RKLLMInferParam *infer);
/* At a resume with these: is what was taken still there? */
void held_check(struct handle *handle, const RKLLMInput *inputs, const RKLLMInferParam *infer);
void held_drop(struct handle *handle);

/* ---- sampling.c: which of the candidates ---- */

/* Draws from the slot's generator; penalties look at its context. */
int32_t sample(const struct sampling *how, struct slot *slot, const struct candidates *candidates);

/* ---- inside.c: hidden states and logits ---- */

/* Whether this runtime looks inside for this run; also true if it is not asked to. */
bool inside_accepts(const struct handle *handle, const RKLLMInput *inputs,
                    const RKLLMInferParam *infer, bool resumed);
/* Fill in the rows of what this run added to the context; they lie in handle->inside. */
void inside_show(struct handle *handle, RKLLMInferMode mode, RKLLMResult *result);

/* ---- callback.c: what the caller hears ---- */

/* Deliver one token of each live slot. True: the caller wants a pause, and gets it. */
bool report_tokens(struct job *job);
/* Deliver hidden states or logits. */
void report_inside(struct job *job);
void report_finish(struct job *job);
void report_error(struct job *job);

/* ---- prompt.c: PROMPT input -> text with the chat template ---- */

uint32_t system_part(const struct model *model, const struct kv *kv);
void prompt_render(const struct handle *handle, const struct kv *past, const RKLLMInput *input,
                   bool resumed, struct text *out);

#endif
