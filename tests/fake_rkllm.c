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

enum { WAIT_LIMIT_MS = 10000 };

FakeScript fake_script;
FakeRecord fake_record;
volatile int fake_go;
volatile int fake_in_run;

static volatile int in_init, in_callback, aborted;
static LLMResultCallback callback;
static pthread_t callback_thread;
static int handle_target;
static char text[256];
static const RKLLMInput* last_input;

void fake_reset(void) {
    memset(&fake_script, 0, sizeof fake_script);
    memset(&fake_record, 0, sizeof fake_record);
    fake_go = fake_in_run = in_init = in_callback = aborted = 0;
    last_input = NULL;
}

RKLLMParam rkllm_createDefaultParam(void) {
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
    param.extend_param.enabled_cpus_num = 4;
    param.extend_param.enabled_cpus_mask = 0xf0;
    param.extend_param.n_batch = 1;
#endif
    return param;
}

static void record_init(const RKLLMParam* param) {
    FakeRecord* seen = &fake_record;
#ifndef FAKE_ABI_13
    seen->null_image_tags = !param->img_start + !param->img_end + !param->img_content;
#endif
    seen->n_batch = param->extend_param.n_batch;
    seen->is_async = param->is_async;
    seen->max_context_len = param->max_context_len;
    seen->max_new_tokens = param->max_new_tokens;
    seen->top_k = param->top_k;
    seen->n_keep = param->n_keep;
    seen->temperature = param->temperature;
    seen->mirostat_tau = param->mirostat_tau;
    seen->skip_special_token = param->skip_special_token;
    seen->base_domain_id = param->extend_param.base_domain_id;
    seen->cpus_num = param->extend_param.enabled_cpus_num;
    seen->cpus_mask = param->extend_param.enabled_cpus_mask;
}

#ifdef FAKE_ABI_13
int rkllm_init(LLMHandle* handle, RKLLMParam* param, RKLLMCallback* callbacks) {
    callback = callbacks->result_callback;
#else
int rkllm_init(LLMHandle* handle, RKLLMParam* param, LLMResultCallback on_result) {
    callback = on_result;
#endif
    fake_record.inits++;
    fake_record.init_overlaps += __sync_fetch_and_add(&in_init, 1) > 0;
    record_init(param);
    usleep(fake_script.init_ms * 1000);
    __sync_fetch_and_sub(&in_init, 1);
    *handle = fake_script.init_null_handle ? NULL : &handle_target;
    return fake_script.init_return;
}

static int call_back(int state, int token_id, const char* piece, void* userdata) {
    RKLLMResult result;
    memset(&result, 0, sizeof result);
    result.token_id = token_id;
    if (piece) {
        snprintf(text, sizeof text, "%s", piece);
        result.text = text;
    }
    if (state == RKLLM_RUN_FINISH) {
        result.perf = (RKLLMPerfStat){12.5f, 7, 30.0f, 3, 99.0f};
        result.text = (const char*)16; /* whoever reads it crashes */
    }
    callback_thread = pthread_self();
    in_callback = 1;
    int reply = callback(&result, userdata, state);
    in_callback = 0;
    memset(text, 0xDD, sizeof text);
    if (fake_record.n_replies < 256) fake_record.replies[fake_record.n_replies++] = reply;
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
    bool deaf = fake_script.deaf_until_token;
    for (int i = 0; i < fake_script.n_steps; i++) {
        FakeStep* step = &fake_script.steps[i];
        if (step->op == FAKE_WAIT_GO) {
            wait_for(&fake_go);
            continue;
        }
        if (step->op == FAKE_WAIT_ABORT) {
            wait_for(&aborted);
            continue;
        }
        if (deaf) aborted = 0;
        deaf = false;
        int reply = call_back(step->state, step->token_id, step->text, userdata);
        if (reply == 1 && !fake_script.ignore_pause) return NULL;
        if (step->state == RKLLM_RUN_ERROR) return NULL;
    }
    if (!fake_script.no_finish) call_back(RKLLM_RUN_FINISH, 0, NULL, userdata);
    return NULL;
}

static void record_run(const RKLLMInput* input, const RKLLMInferParam* infer, void* userdata) {
    FakeRecord* seen = &fake_record;
    last_input = input;
    seen->userdata = (long long)(uintptr_t)userdata;
    seen->mode = infer->mode;
    seen->lora_null = infer->lora_params == NULL;
    seen->cache_null = infer->prompt_cache_params == NULL;
    seen->keep_history = infer->keep_history;
    seen->input_type = input->input_type;
    snprintf(seen->role, sizeof seen->role, "%s", input->role ? input->role : "(null)");
    if (input->input_type == RKLLM_INPUT_TOKEN) {
        seen->n_tokens = (int)input->token_input.n_tokens;
        seen->first_id = input->token_input.input_ids[0];
        seen->last_id = fake_reread_last_id();
    } else {
        snprintf(seen->prompt, sizeof seen->prompt, "%s", input->prompt_input);
    }
#ifdef FAKE_ABI_13
    seen->run_max_new_tokens = infer->max_new_tokens;
    seen->run_top_k = infer->sampling_params ? infer->sampling_params->top_k : -1;
    seen->run_temperature = infer->sampling_params ? infer->sampling_params->temperature : -1;
    seen->run_mirostat_tau = infer->sampling_params ? infer->sampling_params->mirostat_tau : -1;
#endif
}

int rkllm_run(LLMHandle handle, RKLLMInput* input, RKLLMInferParam* infer, void* userdata) {
    (void)handle;
    fake_record.runs++;
    fake_record.overlaps += __sync_fetch_and_add(&fake_in_run, 1) > 0;
    aborted = 0;
    record_run(input, infer, userdata);
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

int rkllm_abort(LLMHandle handle) {
    (void)handle;
    fake_record.aborts++;
    fake_record.idle_aborts += !fake_in_run;
    if (in_callback && pthread_equal(callback_thread, pthread_self()))
        fake_record.abort_in_callback++;
    aborted = 1;
    return fake_script.abort_return;
}

int rkllm_is_running(LLMHandle handle) {
    (void)handle;
    fake_record.is_running_calls++;
    return fake_in_run;
}

int rkllm_clear_kv_cache(LLMHandle handle, int keep_system_prompt, int* start, int* end) {
    (void)handle, (void)keep_system_prompt, (void)start, (void)end;
    fake_record.clears++;
    fake_record.overlaps += fake_in_run;
    return fake_script.other_return;
}

int rkllm_get_kv_cache_size(LLMHandle handle, int* sizes) {
    (void)handle;
    fake_record.sizes++;
    sizes[0] = 42;
    return fake_script.other_return;
}

int rkllm_set_chat_template(LLMHandle handle, const char* system, const char* prefix,
                            const char* postfix) {
    (void)handle, (void)system, (void)postfix;
    fake_record.templates++;
    snprintf(fake_record.template_prefix, sizeof fake_record.template_prefix, "%s", prefix);
    return fake_script.other_return;
}

int rkllm_destroy(LLMHandle handle) {
    (void)handle;
    fake_record.destroys++;
    fake_record.destroyed_running += fake_in_run;
    return fake_script.other_return;
}

/* Exported because the vendor exports them; the binding has no call for them. */
int rkllm_run_async(LLMHandle handle, RKLLMInput* input, RKLLMInferParam* infer, void* userdata) {
    (void)handle, (void)input, (void)infer, (void)userdata;
    return -1;
}
int rkllm_load_lora(LLMHandle handle, RKLLMLoraAdapter* adapter) {
    (void)handle, (void)adapter;
    return -1;
}
int rkllm_load_prompt_cache(LLMHandle handle, const char* path) {
    (void)handle, (void)path;
    return -1;
}
int rkllm_release_prompt_cache(LLMHandle handle) {
    (void)handle;
    return -1;
}
int rkllm_set_function_tools(LLMHandle handle, const char* system, const char* tools,
                             const char* response) {
    (void)handle, (void)system, (void)tools, (void)response;
    return -1;
}
#ifndef FAKE_WITHOUT_CROSS_ATTN
int rkllm_set_cross_attn_params(LLMHandle handle, RKLLMCrossAttnParam* params) {
    (void)handle, (void)params;
    return -1;
}
#endif

int fake_call_back(int state, int token_id, long long userdata) {
    return call_back(state, token_id, "late", (void*)(uintptr_t)userdata);
}

int fake_reread_last_id(void) {
    const RKLLMTokenInput* tokens = &last_input->token_input;
    return tokens->input_ids[tokens->n_tokens - 1];
}
