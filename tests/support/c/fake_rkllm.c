/* A librkllmrt.so for the odd cases: it does what a script says and records what it was given.
 *
 * Build with FAKE_ABI_13 for the interface of 1.3.0, FAKE_VERSION for the version string, and
 * FAKE_ZERO_DEFAULTS or FAKE_WITHOUT_CROSS_ATTN for libraries that nobody should trust.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef FAKE_ABI_13
#include "rkllm_1_3.h"
#else
#include "rkllm_1_2.h"
#endif
#include "fake_rkllm.h"

#ifdef FAKE_VERSION
const char fake_version[] = "RKLLM SDK (version: " FAKE_VERSION " (fake)";
#endif

enum { WAIT_LIMIT_MS = 10000, MAX_BATCH = 16, MAX_FUNCTIONS = 32, MAX_KEPT = 16 };
#define COPY(to, from) snprintf(to, sizeof(to), "%s", (from) ? (from) : "(null)")

FakeScript fake_script;
FakeRecord fake_record;
volatile int fake_go;
volatile int fake_in_run;

static volatile int in_init, in_callback, aborted;
static LLMResultCallback callback;
#ifdef FAKE_ABI_13
static RKLLMCallback callbacks;
#endif
static pthread_t callback_thread;
static int handle_target;
static char text[256];
static const RKLLMInput *last_input, *earlier_input;
static RKLLMCrossAttnParam cross;
static const char* kept[MAX_KEPT];
static int n_kept;
static struct { const char* name; int calls; } functions[MAX_FUNCTIONS];

static void called(const char* name) {
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!functions[i].name) functions[i].name = name;
        if (strcmp(functions[i].name, name) == 0) {
            functions[i].calls++;
            return;
        }
    }
}
#define CALLED() called(__func__)

int fake_calls(const char* function) {
    for (int i = 0; i < MAX_FUNCTIONS && functions[i].name; i++)
        if (strcmp(functions[i].name, function) == 0) return functions[i].calls;
    return 0;
}

static void keep(const char* string) {
    if (n_kept < MAX_KEPT) kept[n_kept++] = string;
}

void fake_reset(void) {
    memset(&fake_script, 0, sizeof fake_script);
    memset(&fake_record, 0, sizeof fake_record);
    fake_go = fake_in_run = in_init = in_callback = aborted = 0;
    last_input = earlier_input = NULL;
    n_kept = 0;
}

/* ---- init ---- */

RKLLMParam rkllm_createDefaultParam(void) {
    CALLED();
    RKLLMParam param;
    memset(&param, 0, sizeof param);
#ifndef FAKE_ZERO_DEFAULTS
    param.top_k = 40;
    param.n_keep = -1;
    param.is_async = true; /* not the vendor's default: to see that it is set */
    param.top_p = 0.9f;
    param.temperature = 0.8f;
    param.repeat_penalty = 1.1f;
    param.mirostat_tau = 5.0f;
    param.mirostat_eta = 0.1f;
#ifndef FAKE_ABI_13
    param.img_start = param.img_end = "";  /* img_content stays NULL */
#endif
    param.extend_param.embed_flash = 1;
    param.extend_param.enabled_cpus_num = 4;
    param.extend_param.enabled_cpus_mask = 0xf0;
    param.extend_param.n_batch = 1;
#endif
    return param;
}

static void record_init(const RKLLMParam* param) {
    FakeRecord* seen = &fake_record;
#ifdef FAKE_ABI_13
    seen->ignore_eos = param->ignore_eos_token;
    seen->has_tokenizer = callbacks.tokenizer_callback != NULL;
    seen->has_embed = callbacks.embed_callback != NULL;
#else
    seen->null_image_tags = !param->img_start + !param->img_end + !param->img_content;
    COPY(seen->img_start, param->img_start);
    COPY(seen->img_content, param->img_content);
#endif
    seen->n_batch = param->extend_param.n_batch;
    seen->is_async = param->is_async;
    seen->max_context_len = param->max_context_len;
    seen->max_new_tokens = param->max_new_tokens;
    seen->top_k = param->top_k;
    seen->n_keep = param->n_keep;
    seen->temperature = param->temperature;
    seen->mirostat = param->mirostat;
    seen->mirostat_tau = param->mirostat_tau;
    seen->mirostat_eta = param->mirostat_eta;
    seen->skip_special_token = param->skip_special_token;
    seen->base_domain_id = param->extend_param.base_domain_id;
    seen->embed_flash = param->extend_param.embed_flash;
    seen->use_cross_attn = param->extend_param.use_cross_attn;
    seen->cpus_num = param->extend_param.enabled_cpus_num;
    seen->cpus_mask = param->extend_param.enabled_cpus_mask;
}

#ifdef FAKE_ABI_13
int rkllm_init(LLMHandle* handle, RKLLMParam* param, RKLLMCallback* given) {
    callbacks = *given;
    callback = given->result_callback;
#else
int rkllm_init(LLMHandle* handle, RKLLMParam* param, LLMResultCallback on_result) {
    callback = on_result;
#endif
    CALLED();
    fake_record.inits++;
    fake_record.init_overlaps += __sync_fetch_and_add(&in_init, 1) > 0;
    record_init(param);
    usleep(fake_script.init_ms * 1000);
    if (fake_script.init_tokenizes) fake_record.tokenized = fake_tokenize();
    __sync_fetch_and_sub(&in_init, 1);
    *handle = fake_script.init_null_handle ? NULL : &handle_target;
    return fake_script.init_return;
}

/* ---- calling back ---- */

static int answer(RKLLMResult* results, int state, void* userdata) {
    callback_thread = pthread_self();
    in_callback = 1;
    int reply = callback(results, userdata, state);
    in_callback = 0;
#ifdef FAKE_ABI_13
    bool may_free = fake_record.mode != RKLLM_INFER_GENERATE;
#else
    bool may_free = false;
#endif
    fake_record.wrong_replies += reply != 0 && reply != 1 && !(reply == 2 && may_free);
    if (fake_record.n_replies < 256) fake_record.replies[fake_record.n_replies++] = reply;
    return reply;
}

static int call_back(const FakeStep* step, void* userdata) {
    RKLLMResult results[MAX_BATCH];
    int n = fake_record.n_batch > 1 ? fake_record.n_batch : 1;
    memset(results, 0, sizeof results);
    if (step->text) snprintf(text, sizeof text, "%s", step->text);
    for (int i = 0; i < n; i++) {
        bool ended = step->ended >> i & 1;
        results[i].token_id = ended ? -1 : step->token_id + 100 * i;
        results[i].text = step->text && !ended ? text : NULL;
    }
    if (step->state == RKLLM_RUN_FINISH) {
        memset(results + 1, 0xDD, sizeof results - sizeof *results); /* only [0] may be read */
        results[0].perf = (RKLLMPerfStat){12.5f, 7, 30.0f, 3, 99.0f};
        results[0].text = (const char*)16; /* whoever reads it crashes */
    }
    int reply = answer(results, step->state, userdata);
    memset(text, 0xDD, sizeof text);
    return reply;
}

static int call_back_rows(const FakeStep* step, void* userdata) {
    RKLLMResult result;
    int n = step->rows * step->columns;
    float* data = malloc((n ? n : 1) * sizeof *data);
    memset(&result, 0, sizeof result);
    for (int i = 0; i < n; i++) data[i] = (float)i;
    if (fake_record.mode == RKLLM_INFER_GET_LOGITS)
        result.logits = (RKLLMResultLogits){n ? data : NULL, step->columns, step->rows};
    else
        result.last_hidden_layer =
            (RKLLMResultLastHiddenLayer){n ? data : NULL, step->columns, step->rows};
    int reply = answer(&result, step->state, userdata);
    free(data);
    return reply;
}

static void wait_for(volatile int* flag) {
    for (int ms = 0; !*flag; ms++) {
        if (ms == WAIT_LIMIT_MS) {
            fake_record.timeouts++;
            return;
        }
        usleep(1000);
    }
}

static void* play(void* userdata) {
    static const FakeStep finish = {.op = FAKE_CALL, .state = RKLLM_RUN_FINISH};
    bool deaf = fake_script.deaf_until_token;
    for (int i = 0; i < fake_script.n_steps; i++) {
        FakeStep* step = &fake_script.steps[i];
        if (step->op == FAKE_WAIT_GO || step->op == FAKE_WAIT_ABORT) {
            wait_for(step->op == FAKE_WAIT_GO ? &fake_go : &aborted);
            continue;
        }
        if (deaf) aborted = 0;
        deaf = false;
        int reply = step->op == FAKE_ROWS ? call_back_rows(step, userdata)
                                          : call_back(step, userdata);
        if (reply == 1 && !fake_script.ignore_pause) return NULL;
        if (step->state == RKLLM_RUN_ERROR) return NULL;
    }
    if (!fake_script.no_finish) call_back(&finish, userdata);
    return NULL;
}

/* ---- a run ---- */

static float sum(const float* data, size_t n) {
    float total = 0;
    for (size_t i = 0; i < n; i++) total += data[i];
    return total;
}

/* An embedding of the fake has two floats. */
static void record_multimodal(const RKLLMMultiModalInput* given) {
    FakeRecord* seen = &fake_record;
    COPY(seen->prompt, given->prompt);
#ifdef FAKE_ABI_13
    seen->images = (int)given->image.n_image;
    seen->image_tokens = (int)given->image.n_image_tokens;
    seen->image_width = (int)given->image.image_width;
    seen->image_sum = sum(given->image.image_embed, 2 * seen->images * seen->image_tokens);
    COPY(seen->image_start, given->image.image_start);
    seen->videos = (int)given->video.n_video;
    seen->frames = (int)given->video.n_frame_per_video;
    seen->frame_tokens = (int)given->video.n_frame_tokens;
    seen->frame_height = (int)given->video.frame_height;
    seen->video_sum = sum(given->video.video_embed, 2 * seen->videos * seen->frames
                                                        * seen->frame_tokens);
    COPY(seen->video_content, given->video.video_content);
#else
    seen->images = (int)given->n_image;
    seen->image_tokens = (int)given->n_image_tokens;
    seen->image_width = (int)given->image_width;
    seen->image_sum = sum(given->image_embed, 2 * seen->images * seen->image_tokens);
#endif
}

static void record_input(const RKLLMInput* input) {
    FakeRecord* seen = &fake_record;
    last_input = input;
    seen->input_type = input->input_type;
    COPY(seen->role, input->role);
    switch (input->input_type) {
    case RKLLM_INPUT_TOKEN:
        seen->n_tokens = (int)input->token_input.n_tokens;
        seen->first_id = input->token_input.input_ids[0];
        seen->last_id = fake_reread_last_id();
        break;
    case RKLLM_INPUT_PROMPT: COPY(seen->prompt, input->prompt_input); break;
    case RKLLM_INPUT_EMBED:
        seen->n_tokens = (int)input->embed_input.n_tokens;
        seen->embed_sum = sum(input->embed_input.embed, 2 * input->embed_input.n_tokens);
        break;
    case RKLLM_INPUT_MULTIMODAL: record_multimodal(&input->multimodal_input); break;
    }
}

static void record_run(const RKLLMInput* inputs, const RKLLMInferParam* infer, void* userdata) {
    FakeRecord* seen = &fake_record;
    earlier_input = last_input;
    seen->userdata = (long long)(uintptr_t)userdata;
    seen->mode = infer->mode;
    seen->lora_null = infer->lora_params == NULL;
    if (infer->lora_params) COPY(seen->run_lora, infer->lora_params->lora_adapter_name);
    seen->cache_null = infer->prompt_cache_params == NULL;
    if (infer->prompt_cache_params) {
        seen->save_cache = infer->prompt_cache_params->save_prompt_cache;
        COPY(seen->run_cache, infer->prompt_cache_params->prompt_cache_path);
    }
    seen->keep_history = infer->keep_history;
    for (int i = seen->n_batch - 1; i >= 0; i--) { /* exactly so many, the first one last */
        record_input(&inputs[i]);
        if (i < MAX_BATCH) seen->last_ids[i] = seen->last_id;
    }
#ifdef FAKE_ABI_13
    seen->run_max_new_tokens = infer->max_new_tokens;
    seen->run_top_k = infer->sampling_params ? infer->sampling_params->top_k : -1;
    seen->run_temperature = infer->sampling_params ? infer->sampling_params->temperature : -1;
    seen->run_mirostat = infer->sampling_params ? infer->sampling_params->mirostat : -1;
    seen->run_mirostat_tau = infer->sampling_params ? infer->sampling_params->mirostat_tau : -1;
#endif
}

/* 1.3.0: what a model without a tokenizer or an embedding layer asks for. False: refused. */
static bool ask_hooks(const RKLLMInput* input) {
#ifdef FAKE_ABI_13
    FakeRecord* seen = &fake_record;
    if (fake_script.token_room) {
        size_t n = strlen(input->prompt_input);
        char* exact = malloc(n + 1); /* without a NUL of its own */
        int32_t* ids = calloc(fake_script.token_room, sizeof *ids);
        memcpy(exact, input->prompt_input, n);
        exact[n] = '!';
        seen->tokenized = callbacks.tokenizer_callback(NULL, exact, (int32_t)n, ids,
                                                       fake_script.token_room);
        for (int i = 0; i < seen->tokenized && i < 16; i++) seen->token_ids[i] = ids[i];
        free(exact);
        free(ids);
        if (seen->tokenized < 0) return false;
    }
    if (fake_script.embed_bytes) {
        int32_t ids[] = {5, 6};
        float* rows = calloc(1, fake_script.embed_bytes);
        seen->embedded = callbacks.embed_callback(NULL, ids, 2, rows, fake_script.embed_bytes);
        seen->embedding_sum = sum(rows, fake_script.embed_bytes / sizeof *rows);
        free(rows);
        if (seen->embedded < 0) return false;
    }
#else
    (void)input;
#endif
    return true;
}

static void enter_run(void) {
    fake_record.overlaps += __sync_fetch_and_add(&fake_in_run, 1) > 0;
    aborted = 0;
}

int rkllm_run(LLMHandle handle, RKLLMInput* input, RKLLMInferParam* infer, void* userdata) {
    (void)handle;
    CALLED();
    fake_record.runs++;
    enter_run();
    record_run(input, infer, userdata);
    if (!ask_hooks(input)) {
        __sync_fetch_and_sub(&fake_in_run, 1);
        return -1;
    }
    if (fake_script.foreign_thread) {
        pthread_t thread;
        pthread_create(&thread, NULL, play, userdata);
        pthread_join(thread, NULL);
    } else {
        play(userdata);
    }
    if (fake_script.linger) wait_for(&fake_go);
    __sync_fetch_and_sub(&fake_in_run, 1);
    return fake_script.run_return;
}

struct async {
    RKLLMInput* input;
    RKLLMInferParam* infer;
    void* userdata;
};

static void* run_aside(void* argument) {
    struct async run = *(struct async*)argument;
    free(argument);
    if (fake_script.async_late) wait_for(&fake_go);
    record_run(run.input, run.infer, run.userdata);
    if (fake_script.async_lost) return NULL;
    play(run.userdata);
    if (fake_script.linger) wait_for(&fake_go);
    __sync_fetch_and_sub(&fake_in_run, 1);
    return NULL;
}

int rkllm_run_async(LLMHandle handle, RKLLMInput* input, RKLLMInferParam* infer, void* userdata) {
    (void)handle;
    CALLED();
    fake_record.async_runs++;
    if (fake_script.async_error) {
        static const FakeStep error = {.op = FAKE_CALL, .state = RKLLM_RUN_ERROR};
        call_back(&error, userdata);
    }
    if (fake_script.run_return) return fake_script.run_return;
    if (!fake_script.async_lost) enter_run();
    struct async* run = malloc(sizeof *run);
    *run = (struct async){input, infer, userdata};
    pthread_t thread;
    pthread_create(&thread, NULL, run_aside, run);
    pthread_detach(thread);
    return 0;
}

int rkllm_abort(LLMHandle handle) {
    (void)handle;
    CALLED();
    fake_record.aborts++;
    fake_record.idle_aborts += !fake_in_run;
    if (in_callback && pthread_equal(callback_thread, pthread_self()))
        fake_record.abort_in_callback++;
    aborted = 1;
    return fake_script.abort_return;
}

int rkllm_is_running(LLMHandle handle) {
    (void)handle;
    CALLED();
    fake_record.is_running_calls++;
    return fake_in_run;
}

/* ---- between runs ---- */

static int other(int* count) {
    (*count)++;
    fake_record.overlaps += fake_in_run;
    return fake_script.other_return;
}

int rkllm_clear_kv_cache(LLMHandle handle, int keep_system_prompt, int* start, int* end) {
    (void)handle;
    CALLED();
    FakeRecord* seen = &fake_record;
    seen->keep_system_prompt = keep_system_prompt;
    if (!start) return other(&seen->clears);
    for (int i = 0; i < seen->n_batch && i < MAX_BATCH; i++) {
        seen->range_start[i] = start[i];
        seen->range_end[i] = end[i];
    }
    return other(&seen->ranges);
}

int rkllm_get_kv_cache_size(LLMHandle handle, int* sizes) {
    (void)handle;
    CALLED();
    for (int i = 0; i < fake_record.n_batch; i++) sizes[i] = 42 + i;
    return other(&fake_record.sizes);
}

int rkllm_set_chat_template(LLMHandle handle, const char* system, const char* prefix,
                            const char* postfix) {
    (void)handle, (void)system, (void)postfix;
    CALLED();
    COPY(fake_record.template_prefix, prefix);
    keep(prefix);
    return other(&fake_record.templates);
}

int rkllm_set_function_tools(LLMHandle handle, const char* system, const char* tools,
                             const char* response) {
    (void)handle, (void)system;
    CALLED();
    COPY(fake_record.tools_json, tools);
    COPY(fake_record.tools_tag, response);
    keep(tools);
    return other(&fake_record.tools);
}

int rkllm_load_lora(LLMHandle handle, RKLLMLoraAdapter* adapter) {
    (void)handle;
    CALLED();
    COPY(fake_record.lora_path, adapter->lora_adapter_path);
    COPY(fake_record.lora_name, adapter->lora_adapter_name);
    fake_record.lora_scale = adapter->scale;
    keep(adapter->lora_adapter_name);
    return other(&fake_record.loras);
}

int rkllm_load_prompt_cache(LLMHandle handle, const char* path) {
    (void)handle;
    CALLED();
    COPY(fake_record.cache_path, path);
    keep(path);
    return other(&fake_record.cache_loads);
}

int rkllm_release_prompt_cache(LLMHandle handle) {
    (void)handle;
    CALLED();
    return other(&fake_record.cache_releases);
}

#ifndef FAKE_WITHOUT_CROSS_ATTN
/* A token of the fake has two floats in each cache. */
int rkllm_set_cross_attn_params(LLMHandle handle, RKLLMCrossAttnParam* params) {
    (void)handle;
    CALLED();
    FakeRecord* seen = &fake_record;
    int n = seen->cross_tokens = params->num_tokens;
    cross = *params;
    seen->cross_k = sum(params->encoder_k_cache, 2 * n);
    seen->cross_v = sum(params->encoder_v_cache, 2 * n);
    seen->cross_mask = sum(params->encoder_mask, n);
    seen->cross_positions = 0;
    for (int i = 0; i < n; i++) seen->cross_positions += params->encoder_pos[i];
    return other(&seen->cross);
}
#endif

int rkllm_destroy(LLMHandle handle) {
    (void)handle;
    CALLED();
    fake_record.destroys++;
    fake_record.destroyed_running += fake_in_run;
    return fake_script.other_return;
}

/* ---- for tests ---- */

int fake_call_back(int state, int token_id, long long userdata) {
    FakeStep step = {.op = FAKE_CALL, .state = state, .token_id = token_id, .text = "late"};
    return call_back(&step, (void*)(uintptr_t)userdata);
}

static int last_id_of(const RKLLMInput* input) {
    return input->token_input.input_ids[input->token_input.n_tokens - 1];
}

int fake_reread_last_id(void) { return last_id_of(last_input); }
int fake_reread_earlier_id(void) { return last_id_of(earlier_input); }

float fake_reread_cross(void) {
    return sum(cross.encoder_k_cache, 2 * cross.num_tokens)
           + sum(cross.encoder_v_cache, 2 * cross.num_tokens);
}

int fake_tokenize(void) {
#ifdef FAKE_ABI_13
    int32_t ids[4];
    return callbacks.tokenizer_callback(NULL, "late", 4, ids, 4);
#else
    return -2;
#endif
}

int fake_reread(char* out, int room) {
    int n = 0;
    for (int i = 0; i < n_kept && n < room; i++) n += snprintf(out + n, room - n, "%s;", kept[i]);
    return n;
}
