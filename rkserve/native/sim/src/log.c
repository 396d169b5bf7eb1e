/* Log lines in the vendor's words, on stderr (stdout belongs to the host program), and the counter
 * of violations. It knows nothing about handles. */
#include "rksim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static atomic_uint violations;

int log_level(void) {
    const char *level = getenv("RKLLM_LOG_LEVEL");
    return level ? atoi(level) : LOG_QUIET;
}

void log_line(const char *format, ...) {
    char line[2048];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (n < 0) return;
    if ((size_t)n > sizeof line - 2) n = sizeof line - 2;
    line[n] = '\n';
    /* One write per line: lines of two boards in one process do not mix. */
    ssize_t written = write(STDERR_FILENO, line, (size_t)n + 1);
    (void)written; /* a closed stderr must not stop a board */
}

void violation(bool strict, const char *name) {
    atomic_fetch_add(&violations, 1);
    log_line("E rkllm-sim: violation: %s", name);
    if (strict) abort();
}

unsigned violation_count(void) { return atomic_load(&violations); }

void *must_grow(void *old, size_t bytes) {
    void *memory = realloc(old, bytes ? bytes : 1);
    if (!memory) {
        log_line("E rkllm-sim: out of memory (%zu bytes)", bytes);
        abort();
    }
    return memory;
}

void *must_alloc(size_t bytes) { return must_grow(NULL, bytes); }

void *must_zero(size_t bytes) { return memset(must_alloc(bytes), 0, bytes); }
