/* What a test or an operator can say to a simulated board: environment variables, read at init,
 * and a control file, read again whenever it changes. It does not know what a run is. */
#include "rksim.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

static const int64_t GATE_LOOK_NS = 1000000; /* how often a run at a gate looks whether it is open */
static const struct {
    const char *name;
    enum fault_kind kind;
} FAULTS[] = {
    {"segv_at_token", FAULT_SEGV_AT_TOKEN},       {"abort_at_token", FAULT_ABORT_AT_TOKEN},
    {"error_at_token", FAULT_ERROR_AT_TOKEN},     {"hang_at_token", FAULT_HANG_AT_TOKEN},
    {"hang_in_prefill", FAULT_HANG_IN_PREFILL},   {"hang_after_finish", FAULT_HANG_AFTER_FINISH},
    {"no_callback", FAULT_NO_CALLBACK},           {"init_fail", FAULT_INIT_FAIL},
    {"init_segv", FAULT_INIT_SEGV},               {"init_null_handle", FAULT_INIT_NULL_HANDLE},
    {"init_hang", FAULT_INIT_HANG},               {"ignore_abort_ms", FAULT_IGNORE_ABORT_MS},
    {"destroy_hang", FAULT_DESTROY_HANG},         {"oom_segv", FAULT_OOM_SEGV},
    {"init_signal", FAULT_INIT_SIGNAL},           {"lora_segv", FAULT_LORA_SEGV},
    {"lora_fail", FAULT_LORA_FAIL},               {"lora_hang", FAULT_LORA_HANG},
};

/* ---- environment ---- */

static bool number_from(const char *text, const char *name, double least, double *out) {
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || errno || !(value >= least && value <= 1e18)) {
        log_line("E rkllm-sim: %s must be a number of at least %g, but got '%s'", name, least,
                 text);
        return false;
    }
    *out = value;
    return true;
}

bool env_number(const char *name, double least, double *out) {
    const char *text = getenv(name);
    return !text || !*text || number_from(text, name, least, out);
}

bool env_flag(const char *name, bool *out) {
    double value = *out;
    bool ok = env_number(name, 0, &value);
    *out = value != 0;
    return ok;
}

static void env_name(const char *name, char *out, size_t room) {
    const char *text = getenv(name);
    snprintf(out, room, "%s", text ? text : "");
}

/* What a batch gains, by name. No gain is published, so the default is none. */
static bool read_batch_gain(double *out) {
    static const struct {
        const char *name;
        double at_four;
    } GAINS[] = {{"none", 1}, {"modest", 1.6}, {"bound", 3}};
    const char *text = getenv("RKSIM_BATCH_GAIN");
    if (!text || !*text) text = GAINS[0].name;
    for (size_t i = 0; i < sizeof GAINS / sizeof *GAINS; i++) {
        *out = GAINS[i].at_four;
        if (strcmp(GAINS[i].name, text) == 0) return true;
    }
    log_line("E rkllm-sim: RKSIM_BATCH_GAIN must be none, modest or bound, but got '%s'", text);
    return false;
}

static bool read_seed(uint64_t *out) {
    double seed = -1;
    if (!env_number("RKSIM_SEED", 0, &seed)) return false;
    if (seed >= 0) *out = (uint64_t)seed;
    else if (getrandom(out, sizeof *out, 0) != sizeof *out) *out = (uint64_t)now_ns();
    return true;
}

/* Each of these turns one answer to an open question about the real runtime over. */
static bool read_deviations(struct settings *s) {
    return env_flag("RKSIM_RANGE_WITH_HISTORY", &s->range_with_history) &&
           env_flag("RKSIM_RESUME_UNLIMITED", &s->resume_unlimited) &&
           env_flag("RKSIM_ABORT_DEADLOCKS", &s->abort_deadlocks) &&
           env_flag("RKSIM_ASYNC_BROKEN", &s->async_broken) &&
           env_flag("RKSIM_PREFIX_REUSE", &s->prefix_reuse) &&
           env_flag("RKSIM_CLOSE_TURNS", &s->close_turns) &&
           env_flag("RKSIM_ABORT_LOSES", &s->abort_loses) &&
           env_flag("RKSIM_WAITING_NO_ID", &s->waiting_no_id) &&
           env_flag("RKSIM_EOS_MISREAD", &s->eos_misread) &&
           env_flag("RKSIM_KEEP_ROWS", &s->keep_rows) &&
           env_flag("RKSIM_LAST_TOKEN_IN_KV", &s->last_in_kv) &&
           env_flag("RKSIM_COUNT_FIRST_TOKEN", &s->count_first) &&
           env_flag("RKSIM_NO_SHIFT", &s->no_shift) &&
           env_flag("RKSIM_NO_NULL_TEXT", &s->no_null_text) &&
           env_flag("RKSIM_FEWER_CPUS", &s->fewer_cpus) &&
           env_flag("RKSIM_INIT_CRASHES", &s->init_crashes) &&
           env_flag("RKSIM_WRONG_COUNTS", &s->wrong_counts);
}

/* "always": not only where the library itself was asked to think. */
static bool read_think_finish(struct settings *s) {
    const char *text = getenv("RKSIM_THINK_FINISH");
    s->think_finish_always = text && strcmp(text, "always") == 0;
    return s->think_finish_always || env_flag("RKSIM_THINK_FINISH", &s->think_finish);
}

bool settings_read(struct settings *s) {
    memset(s, 0, sizeof *s);
    s->time_scale = 1;
    s->load_ms = s->memory_mb = -1; /* -1: as the model file says */
    s->prefix_reuse = IS_1_3;
    env_name("RKSIM_PROFILE", s->profile, sizeof s->profile);
    env_name("RKSIM_PLATFORM", s->platform, sizeof s->platform);
    env_name("RKSIM_CONTROL", s->control.path, sizeof s->control.path);
    bool ok = env_number("RKSIM_TIME_SCALE", 0, &s->time_scale) &&
              env_number("RKSIM_LOAD_MS", 0, &s->load_ms) &&
              env_number("RKSIM_MEMORY_MB", 0, &s->memory_mb) &&
              env_number("RKSIM_ASYNC_READ_MS", 0, &s->async_read_ms) &&
              env_flag("RKSIM_STRICT", &s->strict) &&
              env_flag("RKSIM_RESUME_TEMPLATE", &s->resume_with_template) &&
              env_flag("RKSIM_PAUSED_IS_RUNNING", &s->paused_is_running) &&
              env_flag("RKSIM_RANGE_CLEAR_FAILS", &s->range_clear_fails) &&
              env_flag("RKSIM_DESTROY_FAILS", &s->destroy_fails) &&
              read_think_finish(s) &&
              env_flag("RKSIM_PAUSE_WITH_HISTORY", &s->pause_with_history) &&
              env_flag("RKSIM_PAUSE_WITH_BATCH", &s->pause_with_batch) &&
              env_flag("RKSIM_ASYNC_PAUSE", &s->async_pause) &&
              env_flag("RKSIM_HIDDEN_EMPTY_FIRST", &s->hidden_empty_first) &&
              env_flag("RKSIM_HIDDEN_FINISH", &s->hidden_finish) &&
              env_flag("RKSIM_LOGITS_GENERATE", &s->logits_generate) &&
              read_deviations(s) && read_batch_gain(&s->batch_gain) && read_seed(&s->seed) && features_read(&s->features);
    control_refresh(s);
    return ok;
}

/* ---- control file ---- */

static void control_fault(struct control *c, const char *value) {
    size_t n = strcspn(value, ":");
    for (size_t i = 0; i < sizeof FAULTS / sizeof *FAULTS; i++) {
        if (strlen(FAULTS[i].name) != n || strncmp(FAULTS[i].name, value, n) != 0) continue;
        double arg = 0;
        if (value[n] == ':' && !number_from(value + n + 1, FAULTS[i].name, 0, &arg)) return;
        c->fault = FAULTS[i].kind;
        c->fault_arg = (unsigned long)arg;
        return;
    }
    if (*value) log_line("W rkllm-sim: control file: unknown fault '%s'", value);
}

static void control_gate(struct control *c, const char *value) {
    static const char token[] = "token:";
    double arg = 0;
    if (strcmp(value, "input") == 0) {
        c->gate = GATE_INPUT;
    } else if (strcmp(value, "prefill") == 0) {
        c->gate = GATE_PREFILL;
    } else if (strncmp(value, token, sizeof token - 1) == 0) {
        if (!number_from(value + sizeof token - 1, "gate", 1, &arg)) return;
        c->gate = GATE_TOKEN;
        c->gate_arg = (unsigned long)arg;
    } else if (*value) {
        log_line("W rkllm-sim: control file: unknown gate '%s'", value);
    }
}

static void control_line(struct control *c, char *line) {
    line[strcspn(line, "\r\n")] = '\0';
    char *value = strchr(line, '=');
    if (!*line || *line == '#') return;
    if (!value) {
        log_line("W rkllm-sim: control file: expected key=value, but got '%s'", line);
        return;
    }
    *value++ = '\0';
    double number = 0;
    if (strcmp(line, "fault") == 0) {
        control_fault(c, value);
    } else if (strcmp(line, "gate") == 0) {
        control_gate(c, value);
    } else if (strcmp(line, "time_scale") == 0) {
        if (number_from(value, line, 0, &number)) c->time_scale = number;
    } else if (strcmp(line, "leak_mb") == 0) {
        if (number_from(value, line, 0, &number)) c->leak_mb = number;
    } else if (strcmp(line, "leak_files") == 0) {
        if (number_from(value, line, 0, &number)) c->leak_files = number;
    } else if (strcmp(line, "sticky") == 0) {
        if (number_from(value, line, 0, &number)) c->sticky = number != 0;
    } else if (strcmp(line, "strict") == 0) {
        if (number_from(value, line, 0, &number)) c->strict = number != 0;
    } else {
        log_line("W rkllm-sim: control file: unknown key '%s'", line);
    }
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* A crash takes the memory of "already fired" with it, and the respawned process would crash again
 * and again. So the stamp of the file whose fault has fired is kept beside it, under a lock. */
static bool claim_fault(const struct control *c) {
    char path[sizeof c->path + 8], stamp[96], before[96] = "";
    snprintf(path, sizeof path, "%s.fired", c->path);
    int n = snprintf(stamp, sizeof stamp, "%lld.%09ld %lld %llu\n",
                     (long long)c->seen.st_mtim.tv_sec, c->seen.st_mtim.tv_nsec,
                     (long long)c->seen.st_size, (unsigned long long)c->seen.st_ino);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || flock(fd, LOCK_EX) != 0) {
        log_line("W rkllm-sim: cannot note a fired fault in %s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return true;
    }
    ssize_t had = read(fd, before, sizeof before - 1);
    bool fired = had == n && memcmp(before, stamp, (size_t)n) == 0;
    if (!fired && (ftruncate(fd, 0) != 0 || pwrite(fd, stamp, (size_t)n, 0) != n))
        log_line("W rkllm-sim: cannot note a fired fault in %s: %s", path, strerror(errno));
    close(fd);
    return !fired;
}

void control_refresh(struct settings *s) {
    struct control *c = &s->control;
    struct stat now;
    bool present = *c->path && stat(c->path, &now) == 0;
    if (present && c->present && same_file(&now, &c->seen)) return;
    c->time_scale = s->time_scale;
    c->strict = s->strict;
    c->fault = FAULT_NONE;
    c->sticky = false;
    c->gate = GATE_OPEN;
    c->leak_mb = c->leak_files = 0;
    c->present = present;
    if (!present) return;
    c->seen = now;
    FILE *file = fopen(c->path, "re");
    if (!file) {
        log_line("W rkllm-sim: cannot read %s: %s", c->path, strerror(errno));
        return;
    }
    char line[256];
    while (fgets(line, sizeof line, file)) control_line(c, line);
    fclose(file);
}

bool fault_due(struct settings *s, enum fault_kind kind, unsigned long token) {
    struct control *c = &s->control;
    if (c->fault != kind || (token && c->fault_arg != token)) return false;
    if (c->sticky) return true;
    c->fault = FAULT_NONE;
    return claim_fault(c);
}

/* ---- gates ---- */

static bool gate_is_shut(const struct control *c, enum gate_kind kind, unsigned long token) {
    return c->gate == kind && (kind != GATE_TOKEN || token >= c->gate_arg);
}

/* Who shut it learns from the file beside the control file that a run has arrived; who removes the
 * file learns that it still stands there. */
static void gate_note(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) log_line("W rkllm-sim: cannot create %s: %s", path, strerror(errno));
    else close(fd);
}

bool gate_pass(struct settings *s, enum gate_kind kind, unsigned long token) {
    struct control *c = &s->control;
    char path[sizeof c->path + 8];
    if (!gate_is_shut(c, kind, token)) return false;
    snprintf(path, sizeof path, "%s.gate", c->path);
    do {
        gate_note(path);
        sleep_until_ns(now_ns() + GATE_LOOK_NS);
        control_refresh(s);
    } while (gate_is_shut(c, kind, token));
    unlink(path);
    return true;
}

/* ---- ways to go down ---- */

void crash_now(void) {
    raise(SIGSEGV); /* a handler of the host, such as Python's faulthandler, gets its say */
    abort();
}

void die_of(int number) {
    raise(number);
    abort();
}

void ggml_assert_now(const char *what) {
    log_line("GGML_ASSERT(%s) failed", what);
    abort();
}
