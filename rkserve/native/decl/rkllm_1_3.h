/* Declarations of the RKLLM runtime 1.3.0, trimmed from the vendor's header.
 *
 * RKLLMParam, RKLLMInput, RKLLMMultiModalInput and RKLLMInferParam are laid out differently from
 * 1.2.x, and rkllm_init takes a struct of callbacks. This file is the input to cffi's cdef() and is also
 * included by the simulated runtime, so it holds declarations only: no includes, no macros.
 * tests/native/binding/test_releases.py holds every size and offset to tests/data/rkllm_abi.json.
 *
 * Origin: rkllm.h of https://github.com/airockchip/rknn-llm, Copyright (c) Rockchip Electronics Co.,
 * Ltd., all rights reserved; redistributed under its BSD-style licence, reproduced in NOTICE.
 */
typedef void* LLMHandle;

typedef enum {
    RKLLM_RUN_NORMAL = 0,
    RKLLM_RUN_WAITING = 1,
    RKLLM_RUN_FINISH = 2,
    RKLLM_RUN_ERROR = 3
} LLMCallState;

typedef enum {
    RKLLM_INPUT_PROMPT = 0,
    RKLLM_INPUT_TOKEN = 1,
    RKLLM_INPUT_EMBED = 2,
    RKLLM_INPUT_MULTIMODAL = 3
} RKLLMInputType;

typedef enum {
    RKLLM_INFER_GENERATE = 0,
    RKLLM_INFER_GET_LAST_HIDDEN_LAYER = 1,
    RKLLM_INFER_GET_LOGITS = 2
} RKLLMInferMode;

typedef struct {
    int32_t base_domain_id;
    int8_t embed_flash;
    int8_t enabled_cpus_num;
    uint32_t enabled_cpus_mask;
    uint8_t n_batch;
    int8_t use_cross_attn;
    uint8_t reserved[104];
} RKLLMExtendParam;

typedef struct {
    const char* model_path;
    int32_t max_context_len;
    int32_t max_new_tokens;
    int32_t top_k;
    int32_t n_keep;
    float top_p;
    float temperature;
    float repeat_penalty;
    float frequency_penalty;
    float presence_penalty;
    int32_t mirostat;
    float mirostat_tau;
    float mirostat_eta;
    bool skip_special_token;
    bool ignore_eos_token;
    bool is_async;
    RKLLMExtendParam extend_param;
} RKLLMParam;

typedef struct {
    const char* lora_adapter_path;
    const char* lora_adapter_name;
    float scale;
} RKLLMLoraAdapter;

typedef struct {
    float* embed;
    size_t n_tokens;
} RKLLMEmbedInput;

typedef struct {
    int32_t* input_ids;
    size_t n_tokens;
} RKLLMTokenInput;

typedef struct {
    char* prompt;
    struct {
        float* image_embed;
        size_t n_image_tokens;
        size_t n_image;
        const char* image_start;
        const char* image_end;
        const char* image_content;
        size_t image_width;
        size_t image_height;
    } image;
    struct {
        float* video_embed;
        size_t n_frame_tokens;
        size_t n_frame_per_video;
        size_t n_video;
        const char* video_start;
        const char* video_end;
        const char* video_content;
        size_t frame_width;
        size_t frame_height;
    } video;
} RKLLMMultiModalInput;

typedef struct {
    const char* role;
    bool enable_thinking;
    RKLLMInputType input_type;
    union {
        const char* prompt_input;
        RKLLMEmbedInput embed_input;
        RKLLMTokenInput token_input;
        RKLLMMultiModalInput multimodal_input;
    };
} RKLLMInput;

typedef struct {
    const char* lora_adapter_name;
} RKLLMLoraParam;

typedef struct {
    int save_prompt_cache;
    const char* prompt_cache_path;
} RKLLMPromptCacheParam;

typedef struct {
    float* encoder_k_cache;
    float* encoder_v_cache;
    float* encoder_mask;
    int32_t* encoder_pos;
    int num_tokens;
} RKLLMCrossAttnParam;

typedef struct {
    int32_t top_k;
    float top_p;
    float temperature;
    float repeat_penalty;
    float frequency_penalty;
    float presence_penalty;
    int32_t mirostat;
    float mirostat_tau;
    float mirostat_eta;
} RKLLMSamplingParam;

typedef struct {
    RKLLMInferMode mode;
    RKLLMLoraParam* lora_params;
    RKLLMPromptCacheParam* prompt_cache_params;
    RKLLMSamplingParam* sampling_params;
    int keep_history;
    int max_new_tokens;
} RKLLMInferParam;

typedef struct {
    const float* hidden_states;
    int embd_size;
    int num_tokens;
} RKLLMResultLastHiddenLayer;

typedef struct {
    const float* logits;
    int vocab_size;
    int num_tokens;
} RKLLMResultLogits;

typedef struct {
    float prefill_time_ms;
    int prefill_tokens;
    float generate_time_ms;
    int generate_tokens;
    float memory_usage_mb;
} RKLLMPerfStat;

typedef struct {
    const char* text;
    int32_t token_id;
    RKLLMResultLastHiddenLayer last_hidden_layer;
    RKLLMResultLogits logits;
    RKLLMPerfStat perf;
} RKLLMResult;

typedef int (*LLMResultCallback)(RKLLMResult* result, void* userdata, LLMCallState state);
typedef int (*LLMTokenizerCallback)(void* userdata, const char* text, int32_t text_len,
                                    int32_t* tokens, int32_t n_tokens_max);
typedef int (*LLMGetEmbedCallback)(void* userdata, int32_t* tokens, uint64_t num_tokens,
                                   void* embed, uint64_t len);

typedef struct {
    LLMResultCallback result_callback;
    void* result_userdata;
    LLMTokenizerCallback tokenizer_callback;
    void* tokenizer_userdata;
    LLMGetEmbedCallback embed_callback;
    void* embed_userdata;
} RKLLMCallback;

RKLLMParam rkllm_createDefaultParam(void);
int rkllm_init(LLMHandle* handle, RKLLMParam* param, RKLLMCallback* callback);
int rkllm_load_lora(LLMHandle handle, RKLLMLoraAdapter* lora_adapter);
int rkllm_load_prompt_cache(LLMHandle handle, const char* prompt_cache_path);
int rkllm_release_prompt_cache(LLMHandle handle);
int rkllm_destroy(LLMHandle handle);
int rkllm_run(LLMHandle handle, RKLLMInput* rkllm_input, RKLLMInferParam* rkllm_infer_params,
              void* userdata);
int rkllm_run_async(LLMHandle handle, RKLLMInput* rkllm_input,
                    RKLLMInferParam* rkllm_infer_params, void* userdata);
int rkllm_abort(LLMHandle handle);
int rkllm_is_running(LLMHandle handle);
int rkllm_clear_kv_cache(LLMHandle handle, int keep_system_prompt, int* start_pos, int* end_pos);
int rkllm_get_kv_cache_size(LLMHandle handle, int* cache_sizes);
int rkllm_set_chat_template(LLMHandle handle, const char* system_prompt,
                            const char* prompt_prefix, const char* prompt_postfix);
int rkllm_set_function_tools(LLMHandle handle, const char* system_prompt, const char* tools,
                             const char* tool_response_str);
int rkllm_set_cross_attn_params(LLMHandle handle, RKLLMCrossAttnParam* cross_attn_params);
