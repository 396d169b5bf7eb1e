/* How a handle comes to life and ends: the checks of rkllm_init in the vendor's order and words,
 * the memory of an NPU's domains, and the list of the living. It does not know what a run is. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    DOMAIN_MB = 4096, /* NPU address space of one IOMMU domain */
    DOMAINS = 16      /* RKNPU_MAX_IOMMU_DOMAIN_NUM of the driver */
};

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle *handles;

struct handle *handle_living(LLMHandle handle, const char *caller) {
    pthread_mutex_lock(&handles_lock);
    struct handle *found = handles;
    while (found && found != handle) found = found->next;
    pthread_mutex_unlock(&handles_lock);
    if (!found) {
        log_line("E rkllm: %s: the handle is NULL, or was never made, or is destroyed", caller);
        violation(false, "unknown_handle");
    }
    return found;
}

#if !IS_1_3
static char *copied(const char *text) {
    return text ? strcpy(must_alloc(strlen(text) + 1), text) : NULL;
}
#endif

static void read_image_tags(struct handle *h, const RKLLMParam *param) {
#if !IS_1_3
    if (is_strict(&h->settings)) { /* NULL crashes here, as it did in two projects on the real thing */
        volatile char first = *param->img_start;
        first = *param->img_end;
        first = *param->img_content;
        (void)first;
    }
    h->image_start = copied(param->img_start);
    h->image_end = copied(param->img_end);
    h->image_content = copied(param->img_content);
#else
    (void)h, (void)param;
#endif
}

static bool param_fits(const RKLLMParam *param) {
    int n_batch = param->extend_param.n_batch;
    if (n_batch < 1 || n_batch > 100) {
        log_line("E rkllm: The n_batch must be between 1 and 100, but got %d", n_batch);
        return false;
    }
    int domain = param->extend_param.base_domain_id;
    if (domain < 0 || domain >= DOMAINS) {
        log_line("E rkllm: The base_domain_id must be between 0 and %d, but got %d", DOMAINS - 1,
                 domain);
        return false;
    }
    int cpus = param->extend_param.enabled_cpus_num;
    uint32_t mask = param->extend_param.enabled_cpus_mask;
    if (cpus < 1 || cpus != __builtin_popcount(mask)) {
        log_line("E rkllm: enabled_cpus_num[%d] does not match enabled_cpus_mask[0x%x]", cpus,
                 (unsigned)mask);
        return false;
    }
    if (param->max_context_len < 1) {
        log_line("E rkllm: max_context[%d] must be positive", (int)param->max_context_len);
        return false;
    }
    return true;
}

/* Open the model, and report in the vendor's order: the runtime first, then the file. The model
 * names the board to imitate unless the environment does, so it has to be opened before. */
static bool open_model(struct handle *h, const char *path) {
    const char *refused = model_open(&h->model, path);
    const char *name = *h->settings.profile || refused ? h->settings.profile
                                                       : h->model.header->profile;
    h->profile = profile_find(name);
    if (!h->profile && !refused) {
        log_line("E rkllm-sim: unknown profile '%s'", name);
        return false;
    }
    const char *platform = *h->settings.platform ? h->settings.platform
                           : h->profile          ? h->profile->platform
                                                 : "RK3588";
    log_line("I rkllm: rkllm-runtime version: %s, rknpu driver version: 0.9.8, platform: %s",
             RELEASE_NAME, platform);
    log_line("I rkllm: loading rkllm model from %s", path ? path : "(null)");
    if (refused) {
        log_line("E RKNN: %s", refused);
        log_line("E rkllm: failed to load model '%s'", path ? path : "(null)");
        return false;
    }
    const char *target = h->model.header->target_platform;
    if (strcasecmp(target, "any") == 0 || strcasecmp(target, platform) == 0) return true;
    log_line("E rkllm: target_platform does not match");
    return false;
}

/* NPU cores that the model runs on: those that it was converted for, if the board has them. */
static uint32_t npu_cores(const struct handle *h) {
    const char *platform = *h->settings.platform ? h->settings.platform : h->profile->platform;
    uint32_t there = strcasecmp(platform, "RK3588") == 0 ? 3 : strcasecmp(platform, "RK3576") == 0 ? 2 : 1;
    uint32_t wanted = h->model.header->npu_core_num;
    return wanted < there ? wanted : there;
}

static bool model_fits(const struct handle *h, const RKLLMParam *param) {
    const struct model_header *header = h->model.header;
    log_line("I rkllm: rkllm-toolkit version: %s, max_context_limit: %u, npu_core_num: %u, "
             "target_platform: %s, model_dtype: %s", header->toolkit_version,
             header->max_context_limit, header->npu_core_num, header->target_platform,
             header->dtype);
    if ((uint32_t)param->max_context_len > header->max_context_limit) {
        log_line("E rkllm: max_context[%d] must be less than the model's max_context_limit[%u]",
                 (int)param->max_context_len, header->max_context_limit);
        return false;
    }
    if ((uint32_t)param->extend_param.enabled_cpus_num < npu_cores(h) && !h->settings.fewer_cpus) {
        log_line("E rkllm: The number of enabled CPUs must be greater than or equal to the number of "
                 "NPU cores.");
        return false;
    }
    return true;
}

static double model_mb(const struct handle *h) {
    return h->settings.memory_mb >= 0 ? h->settings.memory_mb : h->model.header->memory_mb;
}

/* From here on the handle counts against its domain, and is alive. */
static bool join_domain(struct handle *h) {
    double used = model_mb(h);
    pthread_mutex_lock(&handles_lock);
    for (struct handle *other = handles; other; other = other->next)
        if (other->domain == h->domain) used += model_mb(other) + other->adapters_mb;
    bool fits = used <= DOMAIN_MB;
    if (fits) {
        h->next = handles;
        handles = h;
    }
    pthread_mutex_unlock(&handles_lock);
    if (fits) return true;
    log_line("E RKNN: failed to malloc npu memory, size: %.0f, flags: 0x2", model_mb(h) * 1048576);
    if (IS_1_3 && fault_due(&h->settings, FAULT_OOM_SEGV, 0)) crash_now();
    return false;
}

bool domain_grow(struct handle *h, double mb) {
    double used = mb;
    pthread_mutex_lock(&handles_lock);
    for (struct handle *other = handles; other; other = other->next)
        if (other->domain == h->domain) used += model_mb(other) + other->adapters_mb;
    bool fits = used <= DOMAIN_MB;
    if (fits) h->adapters_mb += mb;
    pthread_mutex_unlock(&handles_lock);
    if (!fits)
        log_line("E RKNN: failed to malloc npu memory, size: %.0f, flags: 0x2", mb * 1048576);
    return fits;
}

static void leave_domain(struct handle *h) {
    pthread_mutex_lock(&handles_lock);
    struct handle **at = &handles;
    while (*at && *at != h) at = &(*at)->next;
    if (*at) *at = h->next;
    pthread_mutex_unlock(&handles_lock);
}

static void slots_open(struct handle *h, uint32_t context) {
    for (int at = 0; at < h->n_slots; at++) {
        struct slot *slot = &h->slots[at];
        kv_open(&slot->kv, context, model_seed(&h->model));
        responder_forget(&slot->responder);
        /* Entries draw apart; xorshift must not start at 0. */
        slot->rng = (h->settings.seed + (uint64_t)at * 0x9E3779B97F4A7C15u) * 2 + 1;
    }
}

static void slots_close(struct handle *h) {
    for (int at = 0; at < h->n_slots; at++) {
        responder_close(&h->slots[at].responder);
        kv_close(&h->slots[at].kv);
        text_free(&h->slots[at].pending);
        free(h->slots[at].text_buffer);
    }
    free(h->slots);
    free(h->results);
    free(h->inside);
    held_drop(h);
}

void context_changed(struct slot *slot) {
    responder_forget(&slot->responder);
    atomic_store(&slot->kv_size, slot->kv.n);
}

void handle_drop(struct handle *h) {
    leave_domain(h);
    slots_close(h);
    model_close(&h->model);
    prompt_cache_release(&h->cache);
    pthread_cond_destroy(&h->stopped);
    pthread_mutex_destroy(&h->lock);
    free(h->system_prompt);
    free(h->prompt_prefix);
    free(h->prompt_postfix);
    free(h->tools_system);
    free(h->tools);
    free(h->tools_tag);
    free(h->image_start);
    free(h->image_end);
    free(h->image_content);
    free(h);
}

struct handle *handle_new(const RKLLMParam *param) {
    struct handle *h = must_zero(sizeof *h);
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->stopped, NULL);
    h->n_slots = param->extend_param.n_batch;
    h->slots = must_zero((size_t)h->n_slots * sizeof *h->slots);
    h->results = must_zero((size_t)h->n_slots * sizeof *h->results);
    h->sampling = sampling_of(*param);
    h->max_new_tokens = param->max_new_tokens;
    h->n_keep = param->n_keep;
    h->domain = param->extend_param.base_domain_id;
    h->use_cross_attn = param->extend_param.use_cross_attn != 0;
    h->skip_special_token = param->skip_special_token;
#if IS_1_3
    h->ignore_eos_token = param->ignore_eos_token;
#endif
    return h;
}

static void log_param(const struct handle *h, const RKLLMParam *param) {
    struct text cpus = {0};
    for (int cpu = 0; cpu < 32; cpu++)
        if (param->extend_param.enabled_cpus_mask >> cpu & 1)
            text_say(&cpus, cpus.n ? ", %d" : "%d", cpu);
    log_line("I rkllm: Enabled cpus: [%s]", cpus.n ? cpus.at : "");
    text_free(&cpus);
    log_line("I rkllm: Enabled cpus num: %d", param->extend_param.enabled_cpus_num);
    if (log_level() < LOG_DETAIL) return;
    log_line("I rkllm: Model Path: %s", param->model_path);
    log_line("I rkllm: Max Context Length: %d", (int)param->max_context_len);
    log_line("I rkllm: Max New Tokens: %d", (int)param->max_new_tokens);
    log_line("I rkllm: Top-K: %d", (int)param->top_k);
    log_line("I rkllm: Top-P: %.6f", (double)param->top_p);
    log_line("I rkllm: Temperature: %.6f", (double)param->temperature);
    log_line("I rkllm: N Keep: %d", (int)param->n_keep);
    log_line("I rkllm: Repeat Penalty: %.6f", (double)param->repeat_penalty);
    log_line("I rkllm: Frequency Penalty: %.6f", (double)param->frequency_penalty);
    log_line("I rkllm: Presence Penalty: %.6f", (double)param->presence_penalty);
    log_line("I rkllm: Mirostat: %d, Tau: %.6f, Eta: %.6f", (int)param->mirostat,
             (double)param->mirostat_tau, (double)param->mirostat_eta);
    log_line("I rkllm: N Batch: %d", param->extend_param.n_batch);
    log_line("I rkllm: Base Domain ID: %d", (int)param->extend_param.base_domain_id);
    log_line("I rkllm: Embed Flash: %d", param->extend_param.embed_flash);
    log_line("I rkllm: vocab_size: %u", h->model.header->n_pieces);
    log_line("I rkllm: EOS token%s: %d '<|im_end|>'", IS_1_3 ? "[0]" : "",
             (int)h->model.header->im_end);
}

bool handle_load(struct handle *h, const RKLLMParam *param) {
    if (!settings_read(&h->settings)) return false;
    read_image_tags(h, param);
    if (fault_due(&h->settings, FAULT_INIT_SEGV, 0)) crash_now();
    if (fault_due(&h->settings, FAULT_INIT_SIGNAL, 0)) die_of((int)h->settings.control.fault_arg);
    if (fault_due(&h->settings, FAULT_INIT_HANG, 0)) sleep_forever();
    if (fault_due(&h->settings, FAULT_INIT_FAIL, 0) || !param_fits(param)) return false;
    if (!open_model(h, param->model_path) || !model_fits(h, param) || !hooks_suffice(h) ||
        !join_domain(h))
        return false;
    double ms = h->settings.load_ms >= 0 ? h->settings.load_ms : h->model.header->load_ms;
    ms *= time_scale(&h->settings);
    if (ms > 0) sleep_until_ns(now_ns() + (int64_t)(ms * 1e6));
    slots_open(h, (uint32_t)param->max_context_len);
    log_param(h, param);
    return true;
}
