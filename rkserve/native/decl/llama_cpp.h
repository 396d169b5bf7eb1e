/* Declarations of llama.cpp's C interface (libllama), as far as rkserve calls it.
 *
 * Written anew from the binary interface of the release in rkserve.native.llama_cpp.RELEASES: names,
 * order and types of the members. Both structs of parameters are longer here than in the library,
 * which writes and reads only its own part of them: their members are checked by the
 * values that the library gives them (llama_cpp.Library), so that another layout is refused.
 */
typedef int32_t llama_token;
typedef struct llama_model llama_model;
typedef struct llama_context llama_context;
typedef struct llama_vocab llama_vocab;
typedef struct llama_memory llama_memory;
typedef struct llama_adapter_lora llama_adapter_lora;

typedef struct {
    void *devices;
    const void *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int32_t split_mode;
    int32_t load_mode;
    int32_t lazy_mode;
    int32_t main_gpu;
    const float *tensor_split;
    void *progress_callback;
    void *progress_callback_user_data;
    const void *kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
    uint8_t more[128];
} llama_model_params;

typedef struct {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t ctx_type;
    int32_t rope_scaling_type;
    int32_t pooling_type;
    int32_t attention_type;
    int32_t flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval;
    void *cb_eval_user_data;
    int32_t type_k;
    int32_t type_v;
    void *callbacks[3];
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    uint8_t more[128];
} llama_context_params;

typedef struct {
    int32_t n_tokens;
    llama_token *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
} llama_batch;

typedef void (*ggml_log_callback)(int32_t level, const char *text, void *user_data);

void llama_backend_init(void);
void llama_log_set(ggml_log_callback log_callback, void *user_data);

llama_model_params llama_model_default_params(void);
llama_context_params llama_context_default_params(void);
llama_model *llama_model_load_from_file(const char *path, llama_model_params params);
void llama_model_free(llama_model *model);
llama_context *llama_init_from_model(llama_model *model, llama_context_params params);
void llama_free(llama_context *context);

const llama_vocab *llama_model_get_vocab(const llama_model *model);
int32_t llama_model_n_embd(const llama_model *model);
int32_t llama_vocab_n_tokens(const llama_vocab *vocab);
bool llama_vocab_is_eog(const llama_vocab *vocab, llama_token token);
int32_t llama_token_to_piece(const llama_vocab *vocab, llama_token token, char *text,
                             int32_t length, int32_t lstrip, bool special);

llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(llama_batch batch);
int32_t llama_decode(llama_context *context, llama_batch batch);
void llama_set_embeddings(llama_context *context, bool embeddings);
float *llama_get_logits_ith(llama_context *context, int32_t i);
float *llama_get_embeddings_ith(llama_context *context, int32_t i);

llama_memory *llama_get_memory(const llama_context *context);
void llama_memory_clear(llama_memory *memory, bool data);
bool llama_memory_seq_rm(llama_memory *memory, int32_t seq_id, int32_t p0, int32_t p1);
void llama_memory_seq_add(llama_memory *memory, int32_t seq_id, int32_t p0, int32_t p1,
                          int32_t delta);
bool llama_memory_can_shift(llama_memory *memory);

size_t llama_state_seq_save_file(llama_context *context, const char *path, int32_t seq_id,
                                 const llama_token *tokens, size_t n_tokens);
size_t llama_state_seq_load_file(llama_context *context, const char *path, int32_t seq_id,
                                 llama_token *tokens, size_t capacity, size_t *n_tokens);

llama_adapter_lora *llama_adapter_lora_init(llama_model *model, const char *path);
int32_t llama_set_adapters_lora(llama_context *context, llama_adapter_lora **adapters,
                                size_t n_adapters, float *scales);
