/* Which of the candidates comes next. Without a choice, with top_k 1 or without temperature it is
 * the best one, whatever else is asked for. Otherwise penalties, then temperature, then either
 * mirostat's cut or top_k and top_p, then a draw. It does not know where the candidates come from.
 *
 * Penalties and mirostat follow llama.cpp, which the vendor's parameters are named after. */
#include "rksim.h"

#include <math.h>

enum { PENALTY_WINDOW = 64 }; /* llama.cpp's default: the vendor has no parameter for it */
static const float NEVER = -INFINITY;

static double draw(uint64_t *rng) { /* xorshift64*, in [0, 1) */
    *rng ^= *rng >> 12;
    *rng ^= *rng << 25;
    *rng ^= *rng >> 27;
    return (double)((*rng * 0x2545F4914F6CDD1Du) >> 11) / 9007199254740992.0;
}

/* ---- penalties ---- */

static void penalise(const struct sampling *how, const struct kv *kv, struct candidates *c) {
    uint32_t from = kv->n > PENALTY_WINDOW ? kv->n - PENALTY_WINDOW : 0;
    for (int i = 0; i < c->n; i++) {
        int times = 0;
        for (uint32_t at = from; at < kv->n; at++) times += kv->ids[at] == c->ids[i];
        if (!times) continue;
        float *logit = &c->logits[i];
        if (how->repeat_penalty > 0)
            *logit = *logit > 0 ? *logit / how->repeat_penalty : *logit * how->repeat_penalty;
        *logit -= (float)times * how->frequency_penalty + how->presence_penalty;
        if (isnan(*logit)) *logit = NEVER; /* a caller may ask for inf - inf */
    }
}

static void sort_by_logit(struct candidates *c) { /* best first; equals keep their order */
    for (int i = 1; i < c->n; i++)
        for (int k = i; k > 0 && c->logits[k] > c->logits[k - 1]; k--) {
            float logit = c->logits[k];
            int32_t id = c->ids[k];
            c->logits[k] = c->logits[k - 1];
            c->ids[k] = c->ids[k - 1];
            c->logits[k - 1] = logit;
            c->ids[k - 1] = id;
        }
}

/* ---- mirostat: cut what would surprise too much, and learn from what was drawn ---- */

static double surprise(const double *p, int i) { return -log2(p[i]); }

/* Version 1 guesses from the slope of the probabilities how many to keep. */
static int cut_by_slope(const double *p, int n, double limit) {
    double tb = 0, tt = 0;
    for (int i = 0; i + 1 < n && p[i + 1] > 0; i++) {
        double t = log((double)(i + 2) / (i + 1));
        tb += t * log(p[i] / p[i + 1]);
        tt += t * t;
    }
    double s = tt > 0 ? tb / tt : 0;
    if (s < 1e-6) return n; /* flat: nothing surprises more than the rest */
    double epsilon = s - 1;
    double scale = fabs(epsilon) < 1e-6 ? 1 / log(n) : epsilon / (1 - pow(n, -epsilon));
    double keep = round(pow(scale * exp2(limit), 1 / s));
    return keep < 1 ? 1 : keep < n ? (int)keep : n; /* also where keep is infinite */
}

static int cut_by_surprise(const double *p, int n, double limit) {
    int kept = 1;
    while (kept < n && surprise(p, kept) <= limit) kept++;
    return kept;
}

static int cut_by_share(const double *p, int n, const struct sampling *how) {
    int most = how->top_k > 0 && how->top_k < n ? how->top_k : n, kept = 0;
    double all = 0, sum = 0;
    for (int i = 0; i < most; i++) all += p[i];
    double enough = how->top_p > 0 && how->top_p < 1 ? (double)how->top_p * all : all;
    while (kept < most && (kept == 0 || sum < enough)) sum += p[kept++];
    return kept;
}

/* ---- drawing ---- */

static void probabilities(const struct candidates *c, double temperature, double *p) {
    double all = 0;
    for (int i = 0; i < c->n; i++)
        all += p[i] = i ? exp((double)(c->logits[i] - c->logits[0]) / temperature) : 1;
    for (int i = 0; i < c->n; i++) p[i] /= all;
}

static int draw_one(const double *p, int n, uint64_t *rng) {
    double kept = 0;
    for (int i = 0; i < n; i++) kept += p[i];
    double at = draw(rng) * kept;
    for (int i = 0; i < n; i++)
        if ((at -= p[i]) < 0) return i;
    return 0;
}

int32_t sample(const struct sampling *how, struct slot *slot, const struct candidates *given) {
    if (given->n == 1 || how->top_k == 1 || how->temperature <= 0) return given->ids[0];
    struct candidates c = *given;
    penalise(how, &slot->kv, &c);
    sort_by_logit(&c);
    double p[MAX_CANDIDATES];
    probabilities(&c, (double)how->temperature, p);
    if (how->mirostat != 1 && how->mirostat != 2)
        return c.ids[draw_one(p, cut_by_share(p, c.n, how), &slot->rng)];
    int kept = how->mirostat == 1 ? cut_by_slope(p, c.n, slot->surprise_limit)
                                  : cut_by_surprise(p, c.n, slot->surprise_limit);
    double sum = 0;
    for (int i = 0; i < kept; i++) sum += p[i];
    for (int i = 0; i < kept; i++) p[i] /= sum;
    int chosen = draw_one(p, kept, &slot->rng);
    double error = surprise(p, chosen) - (double)how->mirostat_tau;
    slot->surprise_limit -= (double)how->mirostat_eta * error;
    return c.ids[chosen];
}
