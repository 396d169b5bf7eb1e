/*
 * What any librkllmrt.so is asked before its release is known: the functions that each release
 * exports, and default parameters that are larger than those of any release and returned through a
 * hidden pointer like them. What a release leaves unwritten stays undefined.
 */

typedef struct { uint8_t bytes[256]; } Oversized;

Oversized rkllm_createDefaultParam(void);
void rkllm_init(void);
void rkllm_load_lora(void);
void rkllm_load_prompt_cache(void);
void rkllm_release_prompt_cache(void);
void rkllm_destroy(void);
void rkllm_run(void);
void rkllm_run_async(void);
void rkllm_abort(void);
void rkllm_is_running(void);
void rkllm_clear_kv_cache(void);
void rkllm_get_kv_cache_size(void);
void rkllm_set_chat_template(void);
void rkllm_set_function_tools(void);
void rkllm_set_cross_attn_params(void);
