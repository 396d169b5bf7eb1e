/* How a test scripts and questions tests/fake_rkllm.c. Declarations only: C and cffi read it. */
enum {
    FAKE_CALL,       /* call back with state, token_id and text */
    FAKE_WAIT_ABORT, /* decode until an abort comes */
    FAKE_WAIT_GO,    /* hold still until fake_go is set */
    FAKE_ROWS        /* call back with state and rows x columns floats: 0, 1, 2 ... */
};

/* In a batch, entry k gets token_id + 100 * k and the same text; ended entries get -1 and NULL. */
typedef struct {
    int op;
    int state;
    int token_id;
    const char* text;
    unsigned int ended; /* a bit per entry */
    int rows, columns;
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
    int async_late;           /* an asynchronous run reads its input when fake_go is set */
    int async_lost;           /* an asynchronous run never calls back, though it reads its input */
    int async_error;          /* an asynchronous run calls back with ERROR before it begins */
    int init_tokenizes;       /* 1.3.0: init asks the tokenizer callback */
    int token_room;           /* 1.3.0: ask the tokenizer callback; room for so many ids */
    int embed_bytes;          /* 1.3.0: ask the embedding callback; a buffer of so many bytes */
    int n_steps;
    FakeStep steps[64];
} FakeScript;

/* What the fake saw. */
typedef struct {
    int inits, init_overlaps, runs, async_runs, overlaps, aborts, idle_aborts, clears, ranges;
    int sizes, templates, tools, loras, cache_loads, cache_releases, cross;
    int destroys, destroyed_running, is_running_calls, timeouts;
    int n_replies, wrong_replies;
    int replies[256];
    int abort_in_callback;
    int null_image_tags, n_batch, is_async, max_context_len, max_new_tokens, top_k, n_keep;
    int skip_special_token, base_domain_id, cpus_num, embed_flash, use_cross_attn, ignore_eos;
    int mirostat, has_tokenizer, has_embed;
    unsigned int cpus_mask;
    float temperature, mirostat_tau, mirostat_eta;
    char img_start[16], img_content[16];
    int mode, lora_null, cache_null, keep_history, input_type, n_tokens, first_id, last_id;
    int save_cache, last_ids[16];
    int run_max_new_tokens, run_top_k, run_mirostat;
    float run_temperature, run_mirostat_tau;
    long long userdata;
    char role[16], prompt[64], template_prefix[64], run_lora[64], run_cache[256];
    char lora_path[256], lora_name[64], cache_path[256], tools_json[128], tools_tag[64];
    float lora_scale;
    int range_start[16], range_end[16], keep_system_prompt;
    float embed_sum, image_sum, video_sum;
    int images, image_tokens, image_width, videos, frames, frame_tokens, frame_height;
    char image_start[16], video_content[16];
    int cross_tokens, cross_positions;
    float cross_k, cross_v, cross_mask;
    int tokenized, token_ids[16], embedded;
    float embedding_sum;
} FakeRecord;

extern FakeScript fake_script;
extern FakeRecord fake_record;
extern volatile int fake_go;
extern volatile int fake_in_run;

void fake_reset(void);
/* How often the library's function of that name was called since it was loaded. */
int fake_calls(const char* function);
/* Call back although no run of ours asked for it. */
int fake_call_back(int state, int token_id, long long userdata);
/* Read the last run's input again, as a resumed run of the library would. */
int fake_reread_last_id(void);
int fake_reread_earlier_id(void);
float fake_reread_cross(void);
/* Call the tokenizer callback although nobody asked for it. */
int fake_tokenize(void);
/* Read again what the library was given to keep, as it might do at any time; the length. */
int fake_reread(char* out, int room);
