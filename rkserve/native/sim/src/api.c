/* The 15 symbols of librkllmrt.so. This file checks arguments and states; how a handle comes to
 * life is in load.c, what a run does in engine.c. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

/* Bindings look for this text in the file to learn the release, as in the vendor's library. */
__attribute__((used)) static const char SDK_TEXT[] = "RKLLM SDK (version: " RELEASE_NAME " (sim)";
__attribute__((used)) static const char SOURCE_TEXT[] = "rksim-source:" RKSIM_SOURCE_HASH ";";

/* ---- init ---- */

RKLLMParam rkllm_createDefaultParam(void) {
    RKLLMParam param;
    memset(&param, 0, sizeof param);
    param.max_context_len = 512; /* the vendor's two defaults are not public: always set them */
    param.max_new_tokens = 256;
    param.top_k = 40;
    param.n_keep = -1;
    param.top_p = 0.9f;
    param.temperature = 0.8f;
    param.repeat_penalty = 1.1f;
    param.mirostat_tau = 5.0f;
    param.mirostat_eta = 0.1f;
#if !IS_1_3
    param.img_start = param.img_end = param.img_content = "";
#endif
    param.extend_param.embed_flash = 1;
    param.extend_param.enabled_cpus_num = 4;
    param.extend_param.enabled_cpus_mask = 0xF0; /* cores 4 to 7, the big ones of an RK3588 */
    param.extend_param.n_batch = 1;
    return param;
}

#if IS_1_3
int rkllm_init(LLMHandle *handle, RKLLMParam *param, RKLLMCallback *callback) {
    LLMResultCallback on_result = callback ? callback->result_callback : NULL;
    void *userdata = callback ? callback->result_userdata : NULL;
#else
int rkllm_init(LLMHandle *handle, RKLLMParam *param, LLMResultCallback callback) {
    LLMResultCallback on_result = callback;
    void *userdata = NULL;
#endif
    static atomic_flag busy = ATOMIC_FLAG_INIT;
    if (!handle || !param || !on_result) {
        log_line("E rkllm: rkllm_init needs a handle, a param and a result callback");
        return -1;
    }
    *handle = NULL;
    if (atomic_flag_test_and_set(&busy)) {
        violation(false, "concurrent_init");
        return -1;
    }
    struct handle *h = handle_new(param);
    h->on_result = on_result;
    h->on_result_userdata = userdata;
#if IS_1_3
    h->hooks = (struct hooks){callback->tokenizer_callback, callback->embed_callback,
                              callback->tokenizer_userdata, callback->embed_userdata};
#endif
    bool loaded = handle_load(h, param);
    bool lost = loaded && fault_due(&h->settings, FAULT_INIT_NULL_HANDLE, 0);
    if (!loaded && h->settings.init_crashes) crash_now();
    if (!loaded || lost) {
        handle_drop(h);
    } else {
        *handle = h;
    }
    atomic_flag_clear(&busy);
    if (!loaded) log_line("E rkllm: rkllm_init failed");
    return loaded ? 0 : -1;
}

/* ---- run ---- */

int rkllm_run(LLMHandle handle, RKLLMInput *input, RKLLMInferParam *infer, void *userdata) {
    struct handle *h = handle_living(handle, "rkllm_run");
    bool resumed;
    if (!h || !engine_begin(h, &resumed)) return -1;
    return engine_run(h, input, infer, userdata, false, resumed);
}

struct async_run {
    struct handle *h;
    RKLLMInput *input;
    RKLLMInferParam *infer;
    void *userdata;
    bool resumed;
};

/* Reads the caller's structs late, when a caller that did not keep them has lost them. */
static void *async_main(void *argument) {
    struct async_run run = *(struct async_run *)argument;
    free(argument);
    double late = run.h->settings.async_read_ms;
    control_refresh(&run.h->settings);
    gate_pass(&run.h->settings, GATE_INPUT, 0);
    if (late > 0) sleep_until_ns(now_ns() + (int64_t)(late * 1e6));
    engine_run(run.h, run.input, run.infer, run.userdata, true, run.resumed);
    return NULL;
}

static void join_runner(struct handle *h) { /* only when no run is going on */
    pthread_mutex_lock(&h->lock);
    bool had = h->has_runner;
    pthread_t runner = h->runner;
    h->has_runner = false;
    pthread_mutex_unlock(&h->lock);
    if (had) pthread_join(runner, NULL);
}

int rkllm_run_async(LLMHandle handle, RKLLMInput *input, RKLLMInferParam *infer, void *userdata) {
    struct handle *h = handle_living(handle, "rkllm_run_async");
    bool resumed;
    if (!h || !engine_begin(h, &resumed)) return -1;
    join_runner(h);
    struct async_run *run = must_alloc(sizeof *run);
    *run = (struct async_run){h, input, infer, userdata, resumed};
    pthread_mutex_lock(&h->lock);
    bool started = pthread_create(&h->runner, NULL, async_main, run) == 0;
    h->has_runner = started;
    if (!started) h->state = resumed ? STATE_PAUSED : STATE_IDLE;
    pthread_mutex_unlock(&h->lock);
    if (started) return 0;
    free(run);
    log_line("E rkllm: cannot start the thread of an asynchronous run");
    return -1;
}

int rkllm_abort(LLMHandle handle) {
    struct handle *h = handle_living(handle, "rkllm_abort");
    if (!h) return -1;
    pthread_mutex_lock(&h->lock);
    bool paused = h->state == STATE_PAUSED;
    bool stuck = h->in_callback && pthread_equal(h->caller, pthread_self());
    if (h->state == STATE_RUNNING && !h->abort_ns) h->abort_ns = now_ns();
    pthread_mutex_unlock(&h->lock);
    if (stuck) sleep_forever(); /* waits for the end of the callback that it was called in */
    if (paused) violation(is_strict(&h->settings), "abort_while_paused");
    return 0;
}

static enum state state_of(struct handle *h) {
    pthread_mutex_lock(&h->lock);
    enum state state = h->state;
    pthread_mutex_unlock(&h->lock);
    return state;
}

int rkllm_is_running(LLMHandle handle) {
    struct handle *h = handle_living(handle, "rkllm_is_running");
    if (!h) return -1;
    enum state state = state_of(h);
    return state == STATE_RUNNING || (state == STATE_PAUSED && h->settings.paused_is_running);
}

static bool must_idle(struct handle *h, const char *running, const char *paused) {
    enum state state = state_of(h);
    if (state == STATE_IDLE) return true;
    violation(is_strict(&h->settings), state == STATE_RUNNING ? running : paused);
    return false;
}

/* ---- KV cache ---- */

static int clear_range(struct handle *h, const int *start, const int *end) {
    pthread_mutex_lock(&h->lock);
    bool open_to_it = h->state == STATE_PAUSED &&
                      (!h->paused_history || h->settings.range_with_history);
    pthread_mutex_unlock(&h->lock);
    if (!open_to_it) return h->settings.range_clear_fails ? -1 : 0;
    for (int at = 0; at < h->n_slots; at++) {
        if (start[at] >= 0 && end[at] >= start[at]) continue;
        log_line("E rkllm: invalid range [%d, %d) of the kv cache", start[at], end[at]);
        return -1;
    }
    for (int at = 0; at < h->n_slots; at++) {
        kv_remove(&h->slots[at].kv, (uint32_t)start[at], (uint32_t)end[at]);
        context_changed(&h->slots[at]);
    }
    return 0;
}

static void clear_while_paused(struct handle *h) {
    bool strict = is_strict(&h->settings);
    violation(false, "clear_while_paused"); /* strict: the next run falls over, not this call */
    pthread_mutex_lock(&h->lock);
    h->corrupt = strict;
    if (!strict) h->state = STATE_IDLE;
    pthread_mutex_unlock(&h->lock);
}

int rkllm_clear_kv_cache(LLMHandle handle, int keep_system_prompt, int *start_pos, int *end_pos) {
    struct handle *h = handle_living(handle, "rkllm_clear_kv_cache");
    if (!h) return -1;
    if (state_of(h) == STATE_RUNNING) {
        violation(is_strict(&h->settings), "clear_while_running");
        return -1;
    }
    if (start_pos && end_pos) return clear_range(h, start_pos, end_pos);
    if (state_of(h) == STATE_PAUSED) clear_while_paused(h);
    for (int at = 0; at < h->n_slots; at++) {
        struct slot *slot = &h->slots[at];
        uint32_t keep = keep_system_prompt ? system_part(&h->model, &slot->kv) : 0;
        kv_remove(&slot->kv, keep, slot->kv.n);
        slot->in_ram = 0;
        context_changed(slot);
    }
    return 0;
}

int rkllm_get_kv_cache_size(LLMHandle handle, int *cache_sizes) {
    struct handle *h = handle_living(handle, "rkllm_get_kv_cache_size");
    if (!h || !cache_sizes) return -1;
    for (int at = 0; at < h->n_slots; at++)
        cache_sizes[at] =
            (int)atomic_load(&h->slots[at].kv_size) + (h->settings.wrong_counts ? WRONG_BY : 0);
    return 0;
}

/* ---- template and tools ---- */

static void keep_copy(char **slot, const char *text) {
    free(*slot);
    *slot = strcpy(must_alloc(text ? strlen(text) + 1 : 1), text ? text : "");
}

int rkllm_set_chat_template(LLMHandle handle, const char *system_prompt, const char *prompt_prefix,
                            const char *prompt_postfix) {
    struct handle *h = handle_living(handle, "rkllm_set_chat_template");
    if (!h || !must_idle(h, "template_while_running", "template_while_paused")) return -1;
    keep_copy(&h->system_prompt, system_prompt);
    keep_copy(&h->prompt_prefix, prompt_prefix);
    keep_copy(&h->prompt_postfix, prompt_postfix);
    log_line("I rkllm: reset chat template:");
    log_line("I rkllm: system_prompt: %s", h->system_prompt);
    log_line("I rkllm: prompt_prefix: %s", h->prompt_prefix);
    log_line("I rkllm: prompt_postfix: %s", h->prompt_postfix);
    return 0;
}

int rkllm_set_function_tools(LLMHandle handle, const char *system_prompt, const char *tools,
                             const char *tool_response_str) {
    struct handle *h = handle_living(handle, "rkllm_set_function_tools");
    if (!h || !must_idle(h, "tools_while_running", "tools_while_paused")) return -1;
    keep_copy(&h->tools_system, system_prompt);
    keep_copy(&h->tools, tools);
    keep_copy(&h->tools_tag, tool_response_str);
    return 0;
}

/* ---- adapters, prompt caches, cross attention ---- */

/* Take an idle handle for a call that is no run, but takes as long. */
static bool take_idle(struct handle *h, const char *running, const char *paused) {
    pthread_mutex_lock(&h->lock);
    enum state state = h->state;
    if (state == STATE_IDLE) h->state = STATE_RUNNING;
    h->abort_ns = state == STATE_RUNNING ? h->abort_ns : 0;
    pthread_mutex_unlock(&h->lock);
    if (state != STATE_IDLE)
        violation(is_strict(&h->settings), state == STATE_RUNNING ? running : paused);
    else
        control_refresh(&h->settings);
    return state == STATE_IDLE;
}

static int give_back(struct handle *h, bool ok) {
    pthread_mutex_lock(&h->lock);
    h->state = STATE_IDLE;
    pthread_cond_broadcast(&h->stopped);
    pthread_mutex_unlock(&h->lock);
    return ok ? 0 : -1;
}

int rkllm_load_lora(LLMHandle handle, RKLLMLoraAdapter *lora_adapter) {
    struct handle *h = handle_living(handle, "rkllm_load_lora");
    if (!h || !take_idle(h, "lora_while_running", "lora_while_paused")) return -1;
    return give_back(h, lora_load(h, lora_adapter));
}

/* A report says that this brought the process down; until a new init nothing else is known. */
static void after_abort(struct handle *h) {
    if (!h->was_aborted || h->settings.features.cache_after_abort_ok) return;
    bool crash = h->settings.features.cache_after_abort_crash;
    violation(is_strict(&h->settings) && !crash, "prompt_cache_after_abort");
    if (crash) crash_now();
}

int rkllm_load_prompt_cache(LLMHandle handle, const char *prompt_cache_path) {
    struct handle *h = handle_living(handle, "rkllm_load_prompt_cache");
    if (!h || !take_idle(h, "cache_while_running", "cache_while_paused")) return -1;
    after_abort(h);
    return give_back(h, prompt_cache_load(h, prompt_cache_path));
}

int rkllm_release_prompt_cache(LLMHandle handle) {
    struct handle *h = handle_living(handle, "rkllm_release_prompt_cache");
    if (!h || !take_idle(h, "cache_while_running", "cache_while_paused")) return -1;
    prompt_cache_release(&h->cache);
    return give_back(h, true);
}

int rkllm_set_cross_attn_params(LLMHandle handle, RKLLMCrossAttnParam *cross_attn_params) {
    struct handle *h = handle_living(handle, "rkllm_set_cross_attn_params");
    uint64_t digest;
    if (!h || !take_idle(h, "cross_attn_while_running", "cross_attn_while_paused")) return -1;
    if (!h->use_cross_attn) log_line("E rkllm: use_cross_attn was not set at init");
    if (!h->use_cross_attn || !cross_attn_digest(cross_attn_params, &digest))
        return give_back(h, false);
    for (int at = 0; at < h->n_slots; at++) kv_reseed(&h->slots[at].kv, digest);
    for (int at = 0; at < h->n_slots; at++) responder_forget(&h->slots[at].responder);
    return give_back(h, true);
}

/* ---- destroy ---- */

int rkllm_destroy(LLMHandle handle) {
    struct handle *h = handle_living(handle, "rkllm_destroy");
    if (!h) return -1;
    pthread_mutex_lock(&h->lock);
    bool running = h->state == STATE_RUNNING, strict = is_strict(&h->settings);
    pthread_mutex_unlock(&h->lock);
    if (running) violation(strict, "destroy_while_running");
    if (running && h->settings.destroy_fails) return -1;
    pthread_mutex_lock(&h->lock);
    while (h->state == STATE_RUNNING) pthread_cond_wait(&h->stopped, &h->lock);
    pthread_mutex_unlock(&h->lock);
    join_runner(h);
    control_refresh(&h->settings);
    if (fault_due(&h->settings, FAULT_DESTROY_HANG, 0)) sleep_forever();
    handle_drop(h);
    log_line("I rkllm-sim: violations: %u", violation_count());
    return 0;
}
