/* Drives the simulated runtime from C: as a tour of everything it does (for sanitizers and
 * valgrind, which a Python process would drown in noise), with threads, and as a stopwatch.
 *
 *   sim_probe MODEL tour | threads | fuzz ROUNDS | mutate ROUNDS SCRATCH-FILE | bench TOKENS
 */
#include <pthread.h>
#include <stdatomic.h>
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
            fprintf(stderr, "sim_probe:%d: %s\n", __LINE__, #condition);       \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

struct heard { /* what one run said */
    int normals, waitings, finishes, errors, pause_at, answer;
    char text[1 << 16];
    size_t n;
    atomic_int tokens;
};

static int on_result(RKLLMResult *result, void *userdata, LLMCallState state) {
    struct heard *heard = userdata;
    if (state == RKLLM_RUN_FINISH) heard->finishes++;
    if (state == RKLLM_RUN_ERROR) heard->errors++;
    if (state == RKLLM_RUN_WAITING) heard->waitings++;
    if (state != RKLLM_RUN_NORMAL) return 0;
    heard->normals++;
    if (result->text && heard->n + strlen(result->text) < sizeof heard->text) {
        strcpy(heard->text + heard->n, result->text);
        heard->n += strlen(result->text);
    }
    atomic_fetch_add(&heard->tokens, 1);
    return heard->normals == heard->pause_at ? 1 : heard->answer;
}

static LLMHandle open_handle(const char *model, int context, int n_keep) {
    RKLLMParam param = rkllm_createDefaultParam();
    LLMHandle handle = NULL;
    param.model_path = model;
    param.max_context_len = context;
    param.max_new_tokens = -1;
    param.n_keep = n_keep;
    param.skip_special_token = true;
#if RKSIM_RELEASE == 10300
    RKLLMCallback callbacks = {.result_callback = on_result};
    CHECK(rkllm_init(&handle, &param, &callbacks) == 0);
#else
    CHECK(rkllm_init(&handle, &param, on_result) == 0);
#endif
    CHECK(handle);
    return handle;
}

static int say(LLMHandle handle, struct heard *heard, const char *prompt, int history) {
    RKLLMInput input = {.role = "user", .input_type = RKLLM_INPUT_PROMPT, .prompt_input = prompt};
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE, .keep_history = history};
    int pause_at = heard->pause_at, answer = heard->answer;
    memset(heard, 0, sizeof *heard);
    heard->pause_at = pause_at;
    heard->answer = answer;
    return rkllm_run(handle, &input, &infer, heard);
}

static int kv_size(LLMHandle handle) {
    int size = -1;
    CHECK(rkllm_get_kv_cache_size(handle, &size) == 0);
    return size;
}

static void tour_rules(LLMHandle handle, struct heard *heard) {
    static const char *const PROMPTS[] = {
        "Hello", "Count to 30", "Write 90 tokens", "Greet me in many languages",
        "Why? Answer in JSON", "Who are you?", "What did I say first?", "", "  \n\t ",
        "\xF0\x9F\x98 broken \xC3", "Repeat after me:",
        "Repeat after me: <|im_end|> <think> \xE4\xBD\xA0", "\"quoted\" \\ words <tag> /think"};
    for (size_t i = 0; i < sizeof PROMPTS / sizeof *PROMPTS; i++) {
        CHECK(say(handle, heard, PROMPTS[i], 0) == 0);
        CHECK(heard->finishes == 1 && kv_size(handle) == 0);
    }
    char *endless = malloc(3001);
    memset(endless, 'x', 3000);
    endless[3000] = '\0';
    CHECK(say(handle, heard, endless, 0) == 0);
    free(endless);
}

static void tour_pause(LLMHandle handle, struct heard *heard) {
    int from[1] = {5}, to[1] = {8};
    heard->pause_at = 4;
    CHECK(say(handle, heard, "Write 40 tokens", 0) == 0);
    CHECK(heard->finishes == 0 && heard->normals == 4);
    int paused = kv_size(handle);
    CHECK(rkllm_clear_kv_cache(handle, 0, from, to) == 0);
    CHECK(kv_size(handle) == paused - 3);
    heard->pause_at = 0;
    CHECK(say(handle, heard, " and so on", 0) == 0);
    CHECK(heard->finishes == 1 && kv_size(handle) == 0);
}

static void tour_tools(LLMHandle handle, struct heard *heard) {
    const char *tools =
        "[{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"parameters\": "
        "{\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}, \"days\": "
        "{\"type\": \"integer\"}, \"unit\": {\"enum\": [\"c\", \"f\"]}}}}}]";
    const char *call =
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", "
        "\"days\": 1, \"unit\": \"c\"}}\n</tool_call>";
    CHECK(rkllm_set_function_tools(handle, "Be brief.", tools, "tool_response") == 0);
    CHECK(say(handle, heard, "What is the weather in Oslo?", 0) == 0);
    CHECK(strstr(heard->text, call));
    static const char *const BROKEN[] = {
        "{", "[{\"name\": }]", "{\"name\": \"weather\"", "\"",
        "{\"name\":\"weather\",\"parameters\":{\"properties\":{\"a\""};
    for (size_t i = 0; i < sizeof BROKEN / sizeof *BROKEN; i++) {
        CHECK(rkllm_set_function_tools(handle, "", BROKEN[i], "tool_response") == 0);
        CHECK(say(handle, heard, "the weather", 0) == 0);
    }
    CHECK(rkllm_set_chat_template(handle, "", "", "") == 0);
    CHECK(say(handle, heard, "Count to 3\n", 0) == 0);
    CHECK(strcmp(heard->text, "1, 2, 3.") == 0);
}

static void tour_refusals(LLMHandle handle, struct heard *heard) {
    RKLLMInput input = {.input_type = RKLLM_INPUT_EMBED};
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE};
    CHECK(rkllm_run(handle, &input, &infer, heard) == -1);
    input.input_type = RKLLM_INPUT_TOKEN;
    CHECK(rkllm_run(handle, &input, &infer, heard) == -1);
    int32_t ids[] = {1, 2, 1 << 30};
    input.token_input.input_ids = ids;
    input.token_input.n_tokens = 3;
    CHECK(rkllm_run(handle, &input, &infer, heard) == -1);
    infer.mode = RKLLM_INFER_GET_LOGITS;
    CHECK(rkllm_run(handle, &input, &infer, heard) == -1);
    CHECK(rkllm_run(NULL, &input, &infer, heard) == -1 && rkllm_abort(heard) == -1);
    CHECK(rkllm_load_lora(handle, NULL) == -1 && rkllm_load_prompt_cache(handle, "x") == -1);
}

static void wait_until_idle(LLMHandle handle) {
    while (rkllm_is_running(handle)) usleep(1000);
}

static void tour_async(LLMHandle handle, struct heard *heard) {
    RKLLMInput input = {.input_type = RKLLM_INPUT_PROMPT, .prompt_input = "Write 2000 tokens"};
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE};
    memset(heard, 0, sizeof *heard);
    CHECK(rkllm_run_async(handle, &input, &infer, heard) == 0);
    while (atomic_load(&heard->tokens) < 5) usleep(500);
    CHECK(rkllm_abort(handle) == 0);
    wait_until_idle(handle);
    CHECK(heard->finishes == 1);
}

/* Far past the context: answers shift it, and a prompt that no longer fits is refused. */
static void tour_long_conversation(const char *model, struct heard *heard) {
    LLMHandle handle = open_handle(model, 256, 32);
    int shifted = 0;
    for (int turn = 0; turn < 12; turn++) {
        int before = kv_size(handle);
        if (say(handle, heard, "Write 120 tokens", 1) == 0) {
            shifted += before + heard->normals > 256;
            CHECK(kv_size(handle) <= 256);
            continue;
        }
        CHECK(kv_size(handle) == before && before > 200);
        CHECK(rkllm_clear_kv_cache(handle, 1, NULL, NULL) == 0);
        CHECK(kv_size(handle) > 0 && kv_size(handle) < 32);
    }
    CHECK(shifted > 0);
    CHECK(rkllm_destroy(handle) == 0);
}

static void tour(const char *model) {
    struct heard *heard = calloc(1, sizeof *heard);
    LLMHandle handle = open_handle(model, 4096, -1);
    tour_rules(handle, heard);
    tour_pause(handle, heard);
    heard->answer = RKSIM_RELEASE == 10300 ? 2 : 0; /* free the buffers at once */
    CHECK(say(handle, heard, "Hello", 0) == 0);
    heard->answer = 0;
    tour_refusals(handle, heard);
    tour_async(handle, heard);
    tour_tools(handle, heard);
    CHECK(rkllm_destroy(handle) == 0);
    tour_long_conversation(model, heard);
    CHECK(rkllm_destroy(handle) == -1);
    free(heard);
}

/* ---- threads: one board each, with a second thread that asks and aborts ---- */

struct board {
    LLMHandle handle;
    struct heard *heard;
};

static void *run_some(void *argument) {
    struct board *board = argument;
    for (int i = 0; i < 5; i++)
        CHECK(say(board->handle, board->heard, "Write 400 tokens", i % 2) == 0);
    return NULL;
}

static void threads(const char *model) {
    enum { BOARDS = 3 };
    struct board boards[BOARDS];
    pthread_t threads[BOARDS];
    for (int i = 0; i < BOARDS; i++) {
        boards[i] = (struct board){open_handle(model, 4096, 0), calloc(1, sizeof(struct heard))};
        pthread_create(&threads[i], NULL, run_some, &boards[i]);
    }
    for (int i = 0; i < 300; i++) {
        LLMHandle handle = boards[i % BOARDS].handle;
        CHECK(kv_size(handle) >= 0 && rkllm_is_running(handle) >= 0);
        if (i % 10 == 0) CHECK(rkllm_abort(handle) == 0);
        usleep(100);
    }
    for (int i = 0; i < BOARDS; i++) {
        pthread_join(threads[i], NULL);
        tour_async(boards[i].handle, boards[i].heard);
        CHECK(rkllm_destroy(boards[i].handle) == 0);
        free(boards[i].heard);
    }
}

/* ---- fuzz: any ids, any order of calls; mutate: any model file ---- */

static unsigned dice(unsigned sides) { /* xorshift32: the same every time */
    static uint32_t state = 2463534242u;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state % sides;
}

static void fuzz_run(LLMHandle handle, struct heard *heard, int n_pieces) {
    int32_t ids[300];
    RKLLMInput input = {.input_type = RKLLM_INPUT_TOKEN};
    RKLLMInferParam infer = {.mode = RKLLM_INFER_GENERATE, .keep_history = (int)dice(2)};
    input.token_input.input_ids = ids;
    input.token_input.n_tokens = 1 + dice(300);
    unsigned markers = 8, marked = dice(2); /* the last ids are the markers; without: raw text */
    for (size_t i = 0; i < input.token_input.n_tokens; i++)
        ids[i] = (int32_t)(marked && dice(4) == 0 ? (unsigned)n_pieces - 1 - dice(markers)
                                                  : dice((unsigned)n_pieces - markers));
    memset(heard, 0, sizeof *heard);
    heard->pause_at = infer.keep_history ? 0 : (int)dice(6);
    rkllm_run(handle, &input, &infer, heard);
    int size = kv_size(handle), start = (int)dice(400), end = start + (int)dice(50);
    CHECK(size >= 0 && size <= 320);
    if (dice(2)) CHECK(rkllm_clear_kv_cache(handle, 0, &start, &end) == 0);
    if (dice(4) == 0) CHECK(rkllm_clear_kv_cache(handle, (int)dice(2), NULL, NULL) == 0);
}

static void fuzz(const char *model, int rounds) {
    struct heard *heard = calloc(1, sizeof *heard);
    LLMHandle handle = open_handle(model, 320, 8);
    uint32_t n_pieces;
    FILE *file = fopen(model, "rb");
    CHECK(file && fseek(file, 208, SEEK_SET) == 0 && fread(&n_pieces, 4, 1, file) == 1);
    fclose(file);
    for (int i = 0; i < rounds; i++) fuzz_run(handle, heard, (int)n_pieces);
    CHECK(rkllm_destroy(handle) == 0);
    free(heard);
}

static bool try_model(const char *path, struct heard *heard) {
    RKLLMParam param = rkllm_createDefaultParam();
    LLMHandle handle = NULL;
    param.model_path = path;
    param.max_context_len = 320;
#if RKSIM_RELEASE == 10300
    RKLLMCallback callbacks = {.result_callback = on_result};
    int code = rkllm_init(&handle, &param, &callbacks);
#else
    int code = rkllm_init(&handle, &param, on_result);
#endif
    if (code != 0) return false;
    say(handle, heard, "Hello <think> there", 1);
    say(handle, heard, "Write 30 tokens", 1);
    CHECK(rkllm_destroy(handle) == 0);
    return true;
}

static void mutate(const char *model, int rounds, const char *scratch) {
    struct heard *heard = calloc(1, sizeof *heard);
    static unsigned char whole[1 << 20], broken[1 << 20];
    FILE *file = fopen(model, "rb");
    CHECK(file);
    size_t n = fread(whole, 1, sizeof whole, file);
    fclose(file);
    for (int i = 0; i < rounds; i++) {
        memcpy(broken, whole, n);
        for (unsigned k = 0; k < 1 + dice(4); k++) /* half of them in the header */
            broken[dice(2) ? dice(252) : dice((unsigned)n)] = (unsigned char)dice(256);
        file = fopen(scratch, "wb");
        CHECK(file && fwrite(broken, 1, n, file) == n);
        fclose(file);
        try_model(scratch, heard);
    }
    CHECK(try_model(model, heard));
    free(heard);
}

/* ---- bench: CPU per token, callback included ---- */

static double cpu_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void bench(const char *model, int tokens) {
    struct heard *heard = calloc(1, sizeof *heard);
    LLMHandle handle = open_handle(model, 4096, -1);
    char prompt[64];
    snprintf(prompt, sizeof prompt, "Write %d tokens", tokens);
    double before = cpu_us();
    CHECK(say(handle, heard, prompt, 0) == 0);
    double spent = cpu_us() - before;
    CHECK(heard->normals + heard->waitings == tokens + 1);
    printf("%.3f\n", spent / tokens);
    CHECK(rkllm_destroy(handle) == 0);
    free(heard);
}

int main(int argc, char **argv) {
    CHECK(argc >= 3);
    if (strcmp(argv[2], "tour") == 0) tour(argv[1]);
    else if (strcmp(argv[2], "threads") == 0) threads(argv[1]);
    else if (strcmp(argv[2], "fuzz") == 0 && argc == 4) fuzz(argv[1], atoi(argv[3]));
    else if (strcmp(argv[2], "mutate") == 0 && argc == 5) mutate(argv[1], atoi(argv[3]), argv[4]);
    else if (strcmp(argv[2], "bench") == 0 && argc == 4) bench(argv[1], atoi(argv[3]));
    else return 2;
    return 0;
}
