/* How a test scripts and questions tests/fake_rkllm.c. Declarations only: C and cffi read it. */
enum {
    FAKE_CALL,       /* call back with state, token_id and text */
    FAKE_WAIT_ABORT, /* decode until an abort comes */
    FAKE_WAIT_GO     /* hold still until fake_go is set */
};

typedef struct {
    int op;
    int state;
    int token_id;
    const char* text;
} FakeStep;

/* What the fake shall do. A run plays the steps, then FINISH unless no_finish, and returns. */
typedef struct {
    int init_return;
    int init_null_handle;
    int init_ms;
    int run_return;
    int abort_return;
    int other_return;
    int no_finish;
    int foreign_thread;       /* call back from a thread of its own */
    int ignore_pause;         /* go on after a 1 */
    int linger;               /* take until fake_go to return after a 1 or FINISH */
    int deaf_until_token;     /* forget aborts that came before the first callback */
    int n_steps;
    FakeStep steps[64];
} FakeScript;

/* What the fake saw. */
typedef struct {
    int inits, init_overlaps, runs, overlaps, aborts, idle_aborts, clears, sizes, templates;
    int destroys, destroyed_running, is_running_calls, timeouts;
    int n_replies;
    int replies[256];
    int abort_in_callback;
    int null_image_tags, n_batch, is_async, max_context_len, max_new_tokens, top_k, n_keep;
    int skip_special_token, base_domain_id, cpus_num;
    unsigned int cpus_mask;
    float temperature, mirostat_tau;
    int mode, lora_null, cache_null, keep_history, input_type, n_tokens, first_id, last_id;
    int run_max_new_tokens, run_top_k;
    float run_temperature, run_mirostat_tau;
    long long userdata;
    char role[16], prompt[64], template_prefix[64];
} FakeRecord;

extern FakeScript fake_script;
extern FakeRecord fake_record;
extern volatile int fake_go;
extern volatile int fake_in_run;

void fake_reset(void);
/* Call back although no run of ours asked for it. */
int fake_call_back(int state, int token_id, long long userdata);
/* Read the last run's input again, as a resumed run of the library would. */
int fake_reread_last_id(void);
