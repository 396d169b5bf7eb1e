/* llama.cpp with gates: linked to the library of the wheel, it stands in for llama_decode alone.
 *
 * Compile it with -DWHEEL="the library's path". It obeys three lines of the simulated runtime's control file (docs/reference/simulator.md), at
 * $RKSIM_CONTROL: "gate=prefill", "gate=token:5" and "time_scale=0.5". A gate counts from its order:
 * the first call computes the prompt, which tests keep shorter than one part, each further one the
 * token that was delivered last. Without a file it passes on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
} llama_batch;

enum { LOOK_US = 1000, TOKEN_US = 60000 }; /* of a token at time_scale 1 */

static char order[512];
static long gate = -1; /* so many tokens may be delivered; -1: open */
static double time_scale;
static long calls; /* since the order */

static void read_order(const char *path) {
    char now[sizeof order] = "";
    FILE *file = fopen(path, "re");
    if (file) {
        now[fread(now, 1, sizeof now - 1, file)] = 0;
        fclose(file);
    }
    if (!strcmp(now, order)) return;
    strcpy(order, now);
    gate = -1, time_scale = 0, calls = 0;
    for (char *line = strtok(now, "\n"); line; line = strtok(NULL, "\n")) {
        if (!strcmp(line, "gate=prefill")) gate = 0;
        sscanf(line, "gate=token:%ld", &gate);
        sscanf(line, "time_scale=%lf", &time_scale);
    }
}

static void pass_gate(const char *path) {
    char sign[512];
    snprintf(sign, sizeof sign, "%s.gate", path);
    read_order(path);
    bool stood = false;
    for (long call = calls++; gate >= 0 && call >= gate; stood = true) {
        int fd = open(sign, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        if (fd >= 0) close(fd);
        usleep(LOOK_US);
        read_order(path);
    }
    if (stood) unlink(sign);
    if (time_scale > 0) usleep((useconds_t)(time_scale * TOKEN_US));
}

int32_t llama_decode(void *context, llama_batch batch) {
    static int32_t (*decode)(void *, llama_batch);
    if (!decode) *(void **)&decode = dlsym(dlopen(WHEEL, RTLD_LAZY), "llama_decode");
    const char *path = getenv("RKSIM_CONTROL");
    if (path) pass_gate(path);
    return decode(context, batch);
}
