/* Drives batches, hidden states, logits and the pauses that can be switched on, from C: for
 * sanitizers and valgrind, and as a stopwatch. It reads every byte of every result that it is
 * given, and calls what may be called in any order.
 *
 *   sim_batch_probe MODEL fuzz ROUNDS | suspend ROUNDS | look TOKENS | bench ENTRIES TOKENS
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if RKSIM_RELEASE == 10300
#include "rkllm_1_3.h"
#else
#include "rkllm_1_2.h"
#endif

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "sim_batch_probe:%d: %s\n", __LINE__, #condition); \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

enum { MOST_ENTRIES = 8, CONTEXT = 160, MOST_TOKENS = 60 };

struct heard { /* what one run said, and what the callback is to do */
    LLMHandle handle;
    int entries, steps, finishes, errors, pause_at, abort_at, answer;
    bool ended[MOST_ENTRIES];
    size_t bytes;
    double sum;
};

static void read_floats(struct heard *heard, const float *at, int rows, int columns) {
    for (size_t i = 0; at && i < (size_t)rows * (size_t)columns; i++) heard->sum += (double)at[i];
}

static void read_entry(struct heard *heard, const RKLLMResult *result, int entry) {
    CHECK(!heard->ended[entry] || result->token_id == -1);
    heard->ended[entry] = result->token_id == -1;
    CHECK(!heard->ended[entry] || !result->text);
    CHECK(result->perf.prefill_tokens == 0);
    if (result->text) heard->bytes += strlen(result->text);
    read_floats(heard, result->last_hidden_layer.hidden_states,
                result->last_hidden_layer.num_tokens, result->last_hidden_layer.embd_size);
    read_floats(heard, result->logits.logits, result->logits.num_tokens,
                result->logits.vocab_size);
}

static int on_result(RKLLMResult *result, void *userdata, LLMCallState state) {
    struct heard *heard = userdata;
    if (state == RKLLM_RUN_FINISH) heard->finishes++;
    if (state == RKLLM_RUN_ERROR) heard->errors++;
    if (state == RKLLM_RUN_FINISH || state == RKLLM_RUN_ERROR) return 0;
    CHECK(!heard->finishes && !heard->errors);
    CHECK(state == RKLLM_RUN_NORMAL || heard->entries == 1);
    for (int entry = 0; entry < heard->entries; entry++) read_entry(heard, &result[entry], entry);
    heard->steps++;
    if (heard->steps == heard->abort_at) CHECK(rkllm_abort(heard->handle) == 0);
    if (state != RKLLM_RUN_NORMAL) return 0;
    return heard->steps == heard->pause_at ? 1 : heard->answer;
}

static LLMHandle open_handle(const char *model, int entries, int context, int mirostat) {
    RKLLMParam param = rkllm_createDefaultParam();
    LLMHandle handle = NULL;
    param.model_path = model;
    param.max_context_len = context;
    param.max_new_tokens = -1;
    param.n_keep = 8;
    param.mirostat = mirostat;
    param.mirostat_tau = 1;
    param.frequency_penalty = 0.2f;
    param.extend_param.n_batch = (uint8_t)entries;
#if RKSIM_RELEASE == 10300
    RKLLMCallback callbacks = {.result_callback = on_result};
    CHECK(rkllm_init(&handle, &param, &callbacks) == 0);
#else
    CHECK(rkllm_init(&handle, &param, on_result) == 0);
#endif
    CHECK(handle);
    return handle;
}

/* ---- fuzz ---- */

static unsigned dice(unsigned sides) { /* xorshift32: the same every time */
    static uint32_t state = 2463534242u;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state % sides;
}

static void any_input(RKLLMInput *input, int32_t *ids, unsigned n_pieces) {
    static const char *const PROMPTS[] = {"Hello", "Count to 12", "Write 40 tokens",
                                          "Greet me in many languages", "\xF0\x9F broken"};
    memset(input, 0, sizeof *input);
    input->role = "user";
    if (dice(3) == 0) {
        input->input_type = RKLLM_INPUT_PROMPT;
        input->prompt_input = PROMPTS[dice(5)];
        return;
    }
    input->input_type = RKLLM_INPUT_TOKEN;
    input->token_input.input_ids = ids;
    input->token_input.n_tokens = 1 + dice(MOST_TOKENS);
    for (size_t i = 0; i < input->token_input.n_tokens; i++) ids[i] = (int32_t)dice(n_pieces);
}

static void clear_some(LLMHandle handle, int entries) {
    /* As big as the batch and no bigger, so that a sanitizer sees one int too many. */
    int *start = malloc((size_t)entries * sizeof *start), *end = malloc((size_t)entries * sizeof *end);
    for (int at = 0; at < entries; at++) {
        start[at] = (int)dice(CONTEXT);
        end[at] = start[at] + (int)dice(20);
    }
    CHECK(rkllm_clear_kv_cache(handle, 0, start, end) == 0);
    free(start);
    free(end);
}

static void check_sizes(LLMHandle handle, int entries) {
    int *sizes = malloc((size_t)entries * sizeof *sizes);
    CHECK(rkllm_get_kv_cache_size(handle, sizes) == 0);
    for (int at = 0; at < entries; at++) CHECK(sizes[at] >= 0 && sizes[at] <= CONTEXT);
    free(sizes);
}

static void fuzz_run(LLMHandle handle, int entries, unsigned n_pieces) {
    RKLLMInput *inputs = malloc((size_t)entries * sizeof *inputs);
    int32_t(*ids)[MOST_TOKENS] = malloc((size_t)entries * sizeof *ids);
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE, .keep_history = (int)dice(2)};
    if (dice(4) == 0) infer.mode = dice(2) ? RKLLM_INFER_GET_LOGITS
                                           : RKLLM_INFER_GET_LAST_HIDDEN_LAYER;
    for (int at = 0; at < entries; at++) any_input(&inputs[at], ids[at], n_pieces);
    struct heard heard = {.handle = handle, .entries = entries, .pause_at = (int)dice(8),
                          .abort_at = dice(4) ? 0 : (int)dice(20),
                          .answer = RKSIM_RELEASE == 10300 && dice(2) ? 2 : 0};
    if (dice(8) == 0) {
        CHECK(rkllm_run_async(handle, inputs, &infer, &heard) == 0);
        while (rkllm_is_running(handle)) usleep(200);
    } else {
        int code = rkllm_run(handle, inputs, &infer, &heard);
        CHECK(code == 0 || heard.steps == 0);
    }
    check_sizes(handle, entries);
    if (dice(2)) clear_some(handle, entries);
    if (dice(6) == 0) CHECK(rkllm_clear_kv_cache(handle, (int)dice(2), NULL, NULL) == 0);
    free(ids);
    free(inputs);
}

static unsigned pieces_of(const char *model) {
    uint32_t n_pieces;
    FILE *file = fopen(model, "rb");
    CHECK(file && fseek(file, 208, SEEK_SET) == 0 && fread(&n_pieces, 4, 1, file) == 1);
    fclose(file);
    return n_pieces;
}

static void fuzz(const char *model, int rounds) {
    unsigned n_pieces = pieces_of(model);
    for (int round = 0; round < rounds; round += 50) {
        int entries = dice(3) ? 1 + (int)dice(MOST_ENTRIES) : 1;
        setenv("RKSIM_PAUSE_WITH_BATCH", dice(2) ? "1" : "0", 1);
        setenv("RKSIM_PAUSE_WITH_HISTORY", dice(2) ? "1" : "0", 1);
        setenv("RKSIM_HIDDEN_EMPTY_FIRST", dice(2) ? "1" : "0", 1);
        setenv("RKSIM_HIDDEN_FINISH", dice(2) ? "1" : "0", 1);
        LLMHandle handle = open_handle(model, entries, CONTEXT, (int)dice(3));
        for (int at = 0; at < 50; at++) fuzz_run(handle, entries, n_pieces);
        CHECK(rkllm_destroy(handle) == 0);
    }
}

/* ---- suspend: asynchronous runs that pause, with everything kept as it must be ---- */

static void suspend_once(const char *model, unsigned n_pieces) {
    int entries = 1 + (int)dice(MOST_ENTRIES);
    int32_t(*ids)[MOST_TOKENS] = malloc(2 * (size_t)entries * sizeof *ids);
    RKLLMInput *inputs = malloc(2 * (size_t)entries * sizeof *inputs); /* first, then to resume */
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE};
    LLMHandle handle = open_handle(model, entries, CONTEXT, 0);
    struct heard heard = {.handle = handle, .entries = entries, .pause_at = 1};
    for (int at = 0; at < 2 * entries; at++) any_input(&inputs[at], ids[at], n_pieces);
    CHECK(rkllm_run_async(handle, inputs, &infer, &heard) == 0);
    while (rkllm_is_running(handle)) usleep(200);
    bool paused = heard.steps == 1 && !heard.finishes;
    struct heard resumed = {.handle = handle, .entries = entries, .abort_at = 3};
    if (paused && dice(4)) { /* else it is destroyed as it is */
        rkllm_run(handle, inputs + entries, &infer, &resumed);
        CHECK(resumed.finishes == (resumed.steps > 0));
    }
    CHECK(rkllm_destroy(handle) == 0);
    free(inputs);
    free(ids);
}

static void suspend(const char *model, int rounds) {
    unsigned n_pieces = pieces_of(model);
    setenv("RKSIM_ASYNC_PAUSE", "1", 1);
    setenv("RKSIM_PAUSE_WITH_BATCH", "1", 1);
    for (int round = 0; round < rounds; round++) suspend_once(model, n_pieces);
}

/* ---- bench: CPU per token, callback included ---- */

static double cpu_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void bench(const char *model, int entries, int tokens) {
    RKLLMInput inputs[MOST_ENTRIES];
    char prompt[64];
    CHECK(entries >= 1 && entries <= MOST_ENTRIES);
    snprintf(prompt, sizeof prompt, "Write %d tokens", tokens);
    for (int at = 0; at < entries; at++)
        inputs[at] = (RKLLMInput){.role = "user", .input_type = RKLLM_INPUT_PROMPT,
                                  .prompt_input = prompt};
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE};
    LLMHandle handle = open_handle(model, entries, 4096, 0);
    struct heard heard = {.handle = handle, .entries = entries};
    double before = cpu_us();
    CHECK(rkllm_run(handle, inputs, &infer, &heard) == 0);
    double spent = cpu_us() - before;
    CHECK(heard.steps == tokens + 1);
    printf("%.3f\n", spent / tokens / entries);
    CHECK(rkllm_destroy(handle) == 0);
}

static void look(const char *model, int tokens) {
    int32_t *ids = malloc((size_t)tokens * sizeof *ids);
    unsigned n_pieces = pieces_of(model);
    for (int at = 0; at < tokens; at++) ids[at] = (int32_t)dice(n_pieces - 8);
    RKLLMInput input = {.input_type = RKLLM_INPUT_TOKEN};
    input.token_input.input_ids = ids;
    input.token_input.n_tokens = (size_t)tokens;
    LLMHandle handle = open_handle(model, 1, 4096, 0);
    for (int mode = RKLLM_INFER_GET_LAST_HIDDEN_LAYER; mode <= RKLLM_INFER_GET_LOGITS; mode++) {
        RKLLMInferParam infer = {.mode = (RKLLMInferMode)mode};
        struct heard heard = {.handle = handle, .entries = 1};
        double before = cpu_us();
        CHECK(rkllm_run(handle, &input, &infer, &heard) == 0);
        CHECK(heard.steps == 1 && heard.sum != 0);
        printf("%.3f\n", (cpu_us() - before) / tokens);
    }
    CHECK(rkllm_destroy(handle) == 0);
    free(ids);
}

int main(int argc, char **argv) {
    CHECK(argc >= 4);
    if (strcmp(argv[2], "fuzz") == 0) fuzz(argv[1], atoi(argv[3]));
    else if (strcmp(argv[2], "suspend") == 0) suspend(argv[1], atoi(argv[3]));
    else if (strcmp(argv[2], "look") == 0) look(argv[1], atoi(argv[3]));
    else if (strcmp(argv[2], "bench") == 0 && argc == 5) bench(argv[1], atoi(argv[3]), atoi(argv[4]));
    else return 2;
    return 0;
}
