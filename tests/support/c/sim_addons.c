/* Drives what a run can be given besides text and ids, from C, for sanitizers and valgrind: every
 * buffer is exactly as large as it must be, on the heap, and gone when the call is over.
 *
 *   sim_addons MODEL FOLDER [short]     FOLDER holds adapter.rkllm and broken.rkllm
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if RKSIM_RELEASE == 10300
#include "rkllm_1_3.h"
#else
#include "rkllm_1_2.h"
#endif

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "sim_addons:%d: %s\n", __LINE__, #condition);      \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

enum { DIM = 64, CROSS = 128 };
static int finishes, errors, prefilled, normals, pause_at;
static char heard[1 << 16];

static int on_result(RKLLMResult *result, void *userdata, LLMCallState state) {
    (void)userdata;
    finishes += state == RKLLM_RUN_FINISH;
    errors += state == RKLLM_RUN_ERROR;
    if (state == RKLLM_RUN_FINISH) prefilled = result->perf.prefill_tokens;
    if (state != RKLLM_RUN_NORMAL) return 0;
    normals++;
    if (result->text) strncat(heard, result->text, sizeof heard - strlen(heard) - 1);
    return normals == pause_at;
}

static int go(LLMHandle handle, RKLLMInput *input, RKLLMInferParam *infer) {
    finishes = errors = normals = 0;
    heard[0] = '\0';
    return rkllm_run(handle, input, infer, NULL);
}

static char *copied(const char *text) { return strcpy(malloc(strlen(text) + 1), text); }

static int say(LLMHandle handle, const char *prompt, RKLLMInferParam infer) {
    char *own = copied(prompt);
    RKLLMInput input = {.role = "user", .input_type = RKLLM_INPUT_PROMPT, .prompt_input = own};
    int code = go(handle, &input, &infer);
    free(own);
    return code;
}

static float *noise(size_t floats, uint32_t seed) {
    float *at = malloc((floats ? floats : 1) * sizeof *at);
    for (size_t i = 0; i < floats; i++) {
        seed = seed * 1664525u + 1013904223u;
        at[i] = (float)seed / 4294967296.0f;
    }
    return at;
}

/* ---- handles ---- */

#if RKSIM_RELEASE == 10300
static int tokenize_returns;
static int on_tokenize(void *userdata, const char *text, int32_t n, int32_t *ids, int32_t room) {
    CHECK(*(int *)userdata == 42 && (int32_t)strlen(text) == n);
    for (int32_t i = 0; i < room; i++) ids[i] = i % 300; /* all of what is offered */
    return tokenize_returns;
}
static int on_embed(void *userdata, int32_t *ids, uint64_t n, void *rows, uint64_t bytes) {
    CHECK(*(int *)userdata == 42 && ids[n - 1] >= 0 && bytes == n * DIM * sizeof(float));
    memset(rows, 0x3F, bytes);
    return 0;
}
#endif

static LLMHandle open_handle(const char *model, int n_batch, int context) {
    RKLLMParam param = rkllm_createDefaultParam();
    LLMHandle handle = NULL;
    param.model_path = model;
    param.max_context_len = context;
    param.max_new_tokens = -1;
    param.top_k = 1;
    param.n_keep = 8;
    param.skip_special_token = true;
    param.extend_param.n_batch = (uint8_t)n_batch;
    param.extend_param.use_cross_attn = 1;
#if RKSIM_RELEASE == 10300
    static int mark = 42;
    RKLLMCallback callbacks = {on_result, NULL, on_tokenize, &mark, on_embed, &mark};
    CHECK(rkllm_init(&handle, &param, &callbacks) == 0);
#else
    char *tags[] = {copied("<|vision_start|>"), copied("<|vision_end|>"), copied("<|image_pad|>")};
    param.img_start = tags[0];
    param.img_end = tags[1];
    param.img_content = tags[2];
    CHECK(rkllm_init(&handle, &param, on_result) == 0);
    for (int i = 0; i < 3; i++) free(tags[i]); /* the runtime has copies */
#endif
    CHECK(handle);
    return handle;
}

/* ---- features ---- */

static int load(LLMHandle handle, const char *folder, const char *file, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    char *own_path = copied(path), *own_name = copied(name);
    RKLLMLoraAdapter adapter = {own_path, own_name, 0.5f};
    int code = rkllm_load_lora(handle, &adapter);
    free(own_path);
    free(own_name);
    return code;
}

static void try_lora(LLMHandle handle, const char *folder) {
    RKLLMLoraParam one = {"one"}, none = {NULL}, unknown = {"unknown"};
    CHECK(load(handle, folder, "adapter.rkllm", "one") == 0);
    CHECK(load(handle, folder, "adapter.rkllm", "two") == 0);
    CHECK(load(handle, folder, "adapter.rkllm", "one") == -1);
    CHECK(load(handle, folder, "broken.rkllm", "three") == -1);
    CHECK(load(handle, folder, "nowhere", "three") == -1);
    CHECK(say(handle, "Who are you?", (RKLLMInferParam){.lora_params = &one}) == 0);
    CHECK(strstr(heard, "speaking through Pirate."));
    CHECK(say(handle, "Tell me more", (RKLLMInferParam){.lora_params = &one}) == 0);
    CHECK(say(handle, "Who are you?", (RKLLMInferParam){.lora_params = &none}) == 0);
    CHECK(!strstr(heard, "Pirate"));
    CHECK(say(handle, "Hello", (RKLLMInferParam){.lora_params = &unknown}) == -1);
    CHECK(say(handle, "Hello", (RKLLMInferParam){.lora_params = &one, .keep_history = 1}) == 0);
    CHECK(say(handle, "Count to 9", (RKLLMInferParam){.keep_history = 1}) == 0);
    CHECK(!strstr(heard, "1, 2, 3"));
    CHECK(rkllm_clear_kv_cache(handle, 0, NULL, NULL) == 0);
}

static void try_cache(LLMHandle handle, const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/cache.bin", folder);
    char *own = copied(path);
    RKLLMPromptCacheParam save = {1, own};
    CHECK(rkllm_clear_kv_cache(handle, 0, NULL, NULL) == 0);
    CHECK(say(handle, "Count to 9", (RKLLMInferParam){.prompt_cache_params = &save}) == 0);
    int whole = prefilled;
    CHECK(rkllm_load_prompt_cache(handle, own) == 0 && rkllm_load_prompt_cache(handle, own) == -1);
    CHECK(say(handle, "Count to 9", (RKLLMInferParam){0}) == 0 && prefilled == 0);
    CHECK(say(handle, "Tell me more", (RKLLMInferParam){0}) == 0 && prefilled > 0);
    CHECK(rkllm_release_prompt_cache(handle) == 0 && rkllm_release_prompt_cache(handle) == 0);
    CHECK(rkllm_clear_kv_cache(handle, 0, NULL, NULL) == 0);
    CHECK(say(handle, "Count to 9", (RKLLMInferParam){0}) == 0 && prefilled == whole);
    /* Any byte of the part that means something may be wrong. */
    FILE *file = fopen(own, "r+b");
    CHECK(file);
    for (long at = 0; at < 700; at += 7) {
        CHECK(fseek(file, at, SEEK_SET) == 0);
        int byte = fgetc(file);
        CHECK(fseek(file, at, SEEK_SET) == 0 && fputc(byte ^ 0xFF, file) >= 0);
        CHECK(fflush(file) == 0 && rkllm_load_prompt_cache(handle, own) == -1);
        CHECK(fseek(file, at, SEEK_SET) == 0 && fputc(byte, file) >= 0);
    }
    fclose(file);
    CHECK(rkllm_load_prompt_cache(handle, own) == 0); /* and destroy has to free it */
    free(own);
}

static int embed(LLMHandle handle, size_t tokens, uint32_t seed, int history) {
    float *rows = noise(tokens * DIM, seed);
    RKLLMInput input = {.role = "user", .input_type = RKLLM_INPUT_EMBED};
    RKLLMInferParam infer = {.keep_history = history};
    input.embed_input.embed = rows;
    input.embed_input.n_tokens = tokens;
    int code = go(handle, &input, &infer);
    free(rows);
    return code;
}

static void try_embed(LLMHandle handle, int context) {
    CHECK(embed(handle, 0, 1, 0) == -1);
    CHECK(embed(handle, 1, 1, 0) == 0 && finishes == 1);
    CHECK(embed(handle, (size_t)context, 2, 0) == 0);
    CHECK(embed(handle, (size_t)context + 1, 3, 0) == -1);
    for (uint32_t turn = 0; turn < 9; turn++) /* into the shift */
        CHECK(embed(handle, 5 + turn, turn, 1) == 0);
    CHECK(rkllm_clear_kv_cache(handle, 0, NULL, NULL) == 0);
    pause_at = 2;
    CHECK(embed(handle, 20, 4, 0) == 0 && finishes == 0);
    pause_at = 0;
    int from = 3, to = 9;
    CHECK(rkllm_clear_kv_cache(handle, 0, &from, &to) == 0);
    CHECK(embed(handle, 4, 5, 0) == 0 && finishes == 1);
}

static int look(LLMHandle handle, const char *prompt, size_t n, size_t tokens, size_t floats) {
    float *rows = noise(floats, 7);
    char *own = copied(prompt);
    RKLLMInput input = {.role = "user", .input_type = RKLLM_INPUT_MULTIMODAL};
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE};
    input.multimodal_input.prompt = own;
#if RKSIM_RELEASE == 10300
    input.multimodal_input.image.image_embed = rows;
    input.multimodal_input.image.n_image = n;
    input.multimodal_input.image.n_image_tokens = tokens;
#else
    input.multimodal_input.image_embed = rows;
    input.multimodal_input.n_image = n;
    input.multimodal_input.n_image_tokens = tokens;
#endif
    int code = go(handle, &input, &infer);
    free(rows);
    free(own);
    return code;
}

static void try_pictures(LLMHandle handle) {
    CHECK(look(handle, "<image>describe", 1, 9, 9 * DIM) == 0);
    CHECK(strstr(heard, "The picture shows pattern "));
    CHECK(look(handle, "<image> and <image>", 2, 9, 18 * DIM) == 0);
    CHECK(strstr(heard, "The pictures show patterns "));
    CHECK(look(handle, "<image", 1, 9, 9 * DIM) == -1);
    CHECK(look(handle, "<image><video>", 1, 9, 9 * DIM) == -1);
    CHECK(look(handle, "<image>", 0, 0, 0) == -1);
    CHECK(look(handle, "<image>", 1, SIZE_MAX / 2, 0) == -1);
    CHECK(look(handle, "<image><image>", 2, SIZE_MAX / 2 + 2, 0) == -1);
}

static void try_cross_attention(LLMHandle handle) {
    for (int tokens = 1; tokens < 4; tokens++) {
        size_t n = (size_t)tokens;
        float *k = noise(n * CROSS, 1), *v = noise(n * CROSS, 2), *mask = noise(n, 3);
        int32_t *pos = calloc(n, sizeof *pos);
        RKLLMCrossAttnParam param = {k, v, mask, pos, tokens};
        CHECK(rkllm_set_cross_attn_params(handle, &param) == 0);
        free(k);
        free(v);
        free(mask);
        free(pos);
        CHECK(say(handle, "Count to 3", (RKLLMInferParam){0}) == 0 && !strcmp(heard, "1, 2, 3."));
    }
}

static void try_batch(const char *model, const char *folder) {
    LLMHandle handle = open_handle(model, 2, 256);
    float *rows = noise(6 * DIM, 9);
    RKLLMInput *inputs = calloc(2, sizeof *inputs);
    RKLLMLoraParam one = {"one"};
    RKLLMInferParam infer = {.lora_params = &one};
    inputs[0] = (RKLLMInput){.input_type = RKLLM_INPUT_PROMPT, .prompt_input = "Count to 3"};
    inputs[1].input_type = RKLLM_INPUT_EMBED;
    inputs[1].embed_input.embed = rows;
    inputs[1].embed_input.n_tokens = 6;
    CHECK(load(handle, folder, "adapter.rkllm", "one") == 0);
    CHECK(go(handle, inputs, &infer) == 0 && finishes == 1);
    free(rows);
    free(inputs);
    CHECK(rkllm_destroy(handle) == 0);
}

static void try_hooks(const char *model) {
#if RKSIM_RELEASE == 10300
    setenv("RKSIM_NO_TOKENIZER", "1", 1);
    setenv("RKSIM_NO_EMBEDDING", "1", 1);
    LLMHandle handle = open_handle(model, 1, 64);
    static const int RETURNS[] = {0, -1, 65, 1 << 30, 1, 64};
    for (size_t i = 0; i < sizeof RETURNS / sizeof *RETURNS; i++) {
        tokenize_returns = RETURNS[i];
        int expected = RETURNS[i] > 0 && RETURNS[i] <= 64 ? 0 : -1;
        CHECK(say(handle, "Hello", (RKLLMInferParam){0}) == expected);
    }
    tokenize_returns = 2;
    CHECK(look(handle, "<image>x", 1, 3, 3 * DIM) == 0);
    CHECK(rkllm_destroy(handle) == 0);
    unsetenv("RKSIM_NO_TOKENIZER");
    unsetenv("RKSIM_NO_EMBEDDING");
#else
    (void)model;
#endif
}

int main(int argc, char **argv) {
    CHECK(argc >= 3);
    const char *model = argv[1], *folder = argv[2];
    LLMHandle handle = open_handle(model, 1, 256);
    if (argc > 3 && strcmp(argv[3], "short") == 0) { /* a row less than the counts say */
        look(handle, "<image>describe", 1, 9, 8 * DIM);
        return 0;
    }
    try_lora(handle, folder);
    try_embed(handle, 256);
    try_pictures(handle);
    try_cross_attention(handle);
    try_cache(handle, folder);
    CHECK(rkllm_destroy(handle) == 0);
    try_batch(model, folder);
    try_hooks(model);
    return 0;
}
