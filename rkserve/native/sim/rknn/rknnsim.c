/* The simulated RKNN runtime: an image encoder whose embeddings say which pixels it was given.
 *
 * One context at a time is enough for an engine process. A token stands for one patch of the image,
 * and its row is a digest of the pixels there, of the place and of the output: an image that differs
 * in one pixel has another row, and the same image always has the same ones. What is misused is
 * refused with the code that the vendor's header has for it, and a line on stderr.
 * docs/reference/simulator.md describes the model's file and the switches.
 */
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#pragma GCC visibility push(default)
#include "rknn_api.h"
#pragma GCC visibility pop

#define VERSION "2.3.2"
#define CONTEXT 0x524B4E4Eu /* the one there is; no pointer, so that a stale one is recognised */
#define MAX_OUTPUTS 8
#define POISON 0xDD

struct header { /* little-endian, as written by rkserve/native/sim/encoders.py */
    char magic[8];
    uint32_t format, width, height, tokens, embed, n_output, encode_ms;
    char platform[16];
};

static struct {
    pthread_mutex_t lock; /* init and destroy may come from any thread */
    bool open, has_input, has_run;
    struct header model;
    unsigned char *pixels;
    float *rows[MAX_OUTPUTS]; /* given out, until they are released */
} sim = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Marks what this library was built from; build.py looks for it in the file. */
__attribute__((used)) static const char SOURCE[] = "rksim-source:" RKSIM_SOURCE_HASH ";";
__attribute__((used)) static const char RELEASE[] = "librknnrt version: " VERSION " (sim)";

static int refuse(int code, const char *why) {
    fprintf(stderr, "E RKNN: %s\n", why);
    return code;
}

static bool faulty(const char *fault) {
    const char *wanted = getenv("RKSIM_ENCODER_FAULT");
    return wanted && strcmp(wanted, fault) == 0;
}

static uint64_t spread(uint64_t z) { /* as in ../src/digest.c */
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static const char *model_read(const char *path, struct header *out) {
    FILE *file = fopen(path, "rb");
    if (!file) return "the model cannot be opened";
    bool whole = fread(out, sizeof *out, 1, file) == 1;
    fclose(file);
    if (!whole || memcmp(out->magic, "RKSIMRKN", 8) != 0) return "invalid RKNN model";
    if (out->format != 1) return "the model's version is not supported";
    if (!out->width || !out->height || out->width > 4096 || out->height > 4096 || !out->tokens ||
        out->tokens > 65536 || !out->embed || out->embed > 65536 || !out->n_output ||
        out->n_output > MAX_OUTPUTS)
        return "the model's sizes make no sense";
    return NULL;
}

int rknn_init(rknn_context *context, void *model, uint32_t size, uint32_t flag, void *extend) {
    (void)flag;
    if (!context || !model || extend) return refuse(RKNN_ERR_PARAM_INVALID, "rknn_init: arguments");
    *context = 0;
    if (size) return refuse(RKNN_ERR_PARAM_INVALID, "the simulated runtime takes a path only");
    pthread_mutex_lock(&sim.lock);
    int code = RKNN_SUCC;
    const char *why = sim.open ? "the simulated runtime has one context" : NULL;
    if (!why) why = model_read(model, &sim.model);
    if (!why && faulty("init")) why = "failed to malloc npu memory";
    if (why) {
        code = refuse(sim.open ? RKNN_ERR_FAIL : RKNN_ERR_MODEL_INVALID, why);
    } else {
        sim.open = true;
        *context = CONTEXT;
    }
    pthread_mutex_unlock(&sim.lock);
    return code;
}

static bool living(rknn_context context) { return context == CONTEXT && sim.open; }

static void rows_free(void) {
    size_t bytes = (size_t)sim.model.tokens * sim.model.embed * sizeof(float);
    for (int at = 0; at < MAX_OUTPUTS; at++) {
        if (sim.rows[at]) memset(sim.rows[at], POISON, bytes); /* who still reads them shall see it */
        free(sim.rows[at]);
        sim.rows[at] = NULL;
    }
}

int rknn_destroy(rknn_context context) {
    if (!living(context)) return refuse(RKNN_ERR_CTX_INVALID, "rknn_destroy: no such context");
    pthread_mutex_lock(&sim.lock);
    rows_free();
    free(sim.pixels);
    sim.pixels = NULL;
    sim.open = sim.has_input = sim.has_run = false;
    pthread_mutex_unlock(&sim.lock);
    return RKNN_SUCC;
}

static int describe(rknn_tensor_attr *attr, bool input) {
    const struct header *model = &sim.model;
    uint32_t index = attr->index;
    if (index >= (input ? 1 : model->n_output))
        return refuse(RKNN_ERR_PARAM_INVALID, "rknn_query: no such tensor");
    memset(attr, 0, sizeof *attr);
    attr->index = index;
    attr->scale = 1.0f;
    if (input) {
        uint32_t dims[] = {1, model->height, model->width, 3};
        attr->n_dims = 4, attr->fmt = RKNN_TENSOR_NHWC;
        memcpy(attr->dims, dims, sizeof dims);
        strcpy(attr->name, "pixel");
        attr->n_elems = model->height * model->width * 3;
    } else {
        uint32_t dims[] = {model->tokens, model->embed};
        attr->n_dims = 2, attr->fmt = RKNN_TENSOR_NCHW;
        memcpy(attr->dims, dims, sizeof dims);
        snprintf(attr->name, sizeof attr->name, "feature_%u", index);
        attr->n_elems = model->tokens * model->embed;
    }
    attr->type = RKNN_TENSOR_FLOAT16;
    attr->size = attr->size_with_stride = attr->n_elems * 2;
    return RKNN_SUCC;
}

int rknn_query(rknn_context context, rknn_query_cmd cmd, void *info, uint32_t size) {
    if (!living(context)) return refuse(RKNN_ERR_CTX_INVALID, "rknn_query: no such context");
    if (!info) return refuse(RKNN_ERR_PARAM_INVALID, "rknn_query: info is NULL");
    if (cmd == RKNN_QUERY_IN_OUT_NUM && size == sizeof(rknn_input_output_num)) {
        *(rknn_input_output_num *)info = (rknn_input_output_num){1, sim.model.n_output};
        return RKNN_SUCC;
    }
    if ((cmd == RKNN_QUERY_INPUT_ATTR || cmd == RKNN_QUERY_OUTPUT_ATTR) &&
        size == sizeof(rknn_tensor_attr))
        return describe(info, cmd == RKNN_QUERY_INPUT_ATTR);
    if (cmd == RKNN_QUERY_SDK_VERSION && size == sizeof(rknn_sdk_version)) {
        rknn_sdk_version *version = info;
        memset(version, 0, sizeof *version);
        const char *said = getenv("RKSIM_ENCODER_VERSION");
        snprintf(version->api_version, sizeof version->api_version, "%s (sim@2025)",
                 said ? said : VERSION);
        strcpy(version->drv_version, "0.9.8");
        return RKNN_SUCC;
    }
    return refuse(RKNN_ERR_PARAM_INVALID, "rknn_query: unknown command, or a wrong size");
}

int rknn_inputs_set(rknn_context context, uint32_t n_inputs, rknn_input *inputs) {
    if (!living(context)) return refuse(RKNN_ERR_CTX_INVALID, "rknn_inputs_set: no such context");
    uint32_t bytes = sim.model.width * sim.model.height * 3;
    if (n_inputs != 1 || !inputs || inputs->index || !inputs->buf || inputs->pass_through ||
        inputs->type != RKNN_TENSOR_UINT8 || inputs->fmt != RKNN_TENSOR_NHWC ||
        inputs->size != bytes)
        return refuse(RKNN_ERR_INPUT_INVALID, "rknn_inputs_set: not one image of the model's size");
    unsigned char *copy = realloc(sim.pixels, bytes);
    if (!copy) abort();
    memcpy(copy, inputs->buf, bytes); /* as the real one does: the buffer is the caller's again */
    sim.pixels = copy;
    sim.has_input = true, sim.has_run = false;
    return RKNN_SUCC;
}

int rknn_run(rknn_context context, void *extend) {
    if (!living(context) || extend) return refuse(RKNN_ERR_CTX_INVALID, "rknn_run: no such context");
    if (!sim.has_input) return refuse(RKNN_ERR_INPUT_INVALID, "rknn_run: no input was set");
    if (faulty("run")) return refuse(RKNN_ERR_FAIL, "failed to submit");
    if (faulty("segv")) raise(SIGSEGV);
    const char *scale = getenv("RKSIM_TIME_SCALE");
    double ms = sim.model.encode_ms * (scale ? strtod(scale, NULL) : 1.0);
    if (ms > 0) {
        struct timespec wait = {(time_t)(ms / 1e3), (long)((uint64_t)(ms * 1e6) % 1000000000u)};
        nanosleep(&wait, NULL);
    }
    sim.has_run = true;
    return RKNN_SUCC;
}

/* A digest of the pixels that a token stands for: one patch of a square grid. */
static uint64_t patch_digest(uint32_t token) {
    uint32_t side = 1, width = sim.model.width, height = sim.model.height;
    while (side * side < sim.model.tokens) side++;
    uint32_t row = token / side, column = token % side;
    uint64_t digest = token;
    for (uint32_t y = row * height / side; y < (row + 1) * height / side; y++)
        for (uint32_t x = column * width / side; x < (column + 1) * width / side; x++) {
            const unsigned char *at = sim.pixels + 3 * ((size_t)y * width + x);
            digest = spread(digest ^ (at[0] | at[1] << 8 | (uint64_t)at[2] << 16));
        }
    return digest;
}

int rknn_outputs_get(rknn_context context, uint32_t n_outputs, rknn_output *outputs, void *extend) {
    if (!living(context) || extend)
        return refuse(RKNN_ERR_CTX_INVALID, "rknn_outputs_get: no such context");
    if (!sim.has_run || n_outputs != sim.model.n_output || !outputs)
        return refuse(RKNN_ERR_OUTPUT_INVALID, "rknn_outputs_get: nothing was computed");
    uint32_t tokens = sim.model.tokens, embed = sim.model.embed;
    for (uint32_t j = 0; j < n_outputs; j++)
        if (outputs[j].index != j || outputs[j].is_prealloc || !outputs[j].want_float || sim.rows[j])
            return refuse(RKNN_ERR_OUTPUT_INVALID, "rknn_outputs_get: not as floats, or twice");
    for (uint32_t j = 0; j < n_outputs; j++) {
        sim.rows[j] = malloc((size_t)tokens * embed * sizeof(float));
        if (!sim.rows[j]) abort();
        outputs[j].buf = sim.rows[j];
        outputs[j].size = (uint32_t)((size_t)tokens * embed * sizeof(float));
    }
    for (uint32_t token = 0; token < tokens; token++) {
        uint64_t digest = patch_digest(token);
        for (uint32_t j = 0; j < n_outputs; j++)
            for (uint32_t at = 0; at < embed; at++)
                sim.rows[j][(size_t)token * embed + at] =
                    (float)(spread(digest ^ spread(j * 65536ull + at)) >> 40) / 8388608.0f - 1.0f;
    }
    return RKNN_SUCC;
}

int rknn_outputs_release(rknn_context context, uint32_t n_outputs, rknn_output *outputs) {
    if (!living(context))
        return refuse(RKNN_ERR_CTX_INVALID, "rknn_outputs_release: no such context");
    if (n_outputs != sim.model.n_output || !outputs || !sim.rows[0])
        return refuse(RKNN_ERR_OUTPUT_INVALID, "rknn_outputs_release: nothing was given out");
    rows_free();
    return RKNN_SUCC;
}

int rknn_set_core_mask(rknn_context context, rknn_core_mask core_mask) {
    if (!living(context)) return refuse(RKNN_ERR_CTX_INVALID, "rknn_set_core_mask: no such context");
    if (core_mask != RKNN_NPU_CORE_AUTO && core_mask != RKNN_NPU_CORE_0_1 &&
        core_mask != RKNN_NPU_CORE_0_1_2)
        return refuse(RKNN_ERR_PARAM_INVALID, "rknn_set_core_mask: no such cores");
    return RKNN_SUCC;
}
