/* How long a board takes, and waiting for exactly that long. Waiting is always a sleep until an
 * absolute deadline: no drift, no spinning, a hundred boards on two cores. */
#include "rksim.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <time.h>

#include "profiles_generated.h" /* PROFILES[]: made from profiles.csv by build.py */

const struct profile *profile_find(const char *name) {
    for (size_t i = 0; i < sizeof PROFILES / sizeof *PROFILES; i++)
        if (strcasecmp(PROFILES[i].name, name) == 0) return &PROFILES[i];
    return NULL;
}

double prefill_ms(const struct profile *p, uint32_t fresh, uint32_t past) {
    double all = (double)fresh + past, before = past;
    return p->a + p->b * fresh + p->c * (all * all - before * before);
}

double decode_ms(const struct profile *p, uint32_t context) {
    if (p->window && context > p->window) context = p->window;
    return p->d0 + p->k * context;
}

/* A power of n, so that every doubling of the batch gains the same factor. */
double batch_gain(double at_four, int n) {
    return at_four <= 1 || n < 2 ? 1 : pow(n, log(at_four) / log(4));
}

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void sleep_until_ns(int64_t deadline) {
    struct timespec t = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

void sleep_forever(void) {
    for (;;) sleep_until_ns(now_ns() + 3600LL * 1000000000);
}

/* The kernel may round a sleep up by the thread's slack, 50 us by default. The thread is the
 * caller's, so its own value comes back when the run is over. */
long timer_slack_tighten(void) {
    long before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    return before;
}

void timer_slack_restore(long before) {
    if (before > 0) prctl(PR_SET_TIMERSLACK, (unsigned long)before, 0, 0, 0);
}
