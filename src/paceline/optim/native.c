/* The update in one pass over memory, for float32 weights on a CPU: pace_step_ of rule.py, and moved averages.
 *
 * Sixteen elements at a time, one line of cache of each array, so that no line is asked for twice: arrays of
 * one size often begin at the same place of a page and would push each other out of the cache.
 *
 * Built without contraction: a product and a sum are two roundings here, on every machine and for every way of
 * sharing the work out, so that results depend neither on threads nor on the kind of CPU.
 */
#include <math.h>
#include <stdint.h>

#define LINE 16

#if defined(__x86_64__) && defined(__GLIBC__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif

typedef struct {
    float *live;
    const float *grad;
    float *exp_avg, *exp_avg_sq;
    float *average;  /* the target of the pull */
    float *returned; /* a second average; not looked at where there is one only */
    int64_t elements;
} Tensor;

typedef struct {
    float decay;             /* 1 - lr * weight decay */
    float new_m;             /* 1 - beta1 */
    float old_v, new_v;      /* beta2, 1 - beta2 */
    float root_factor;       /* 1 / sqrt(1 - beta2^t) */
    float eps;
    float step_size;         /* -lr / (1 - beta1^t) */
    float numerator;         /* of the ratio R */
    float rate, limit;       /* the gain is min(rate * R, limit) */
    float keep, move;        /* of the average; their sum is 1 */
    float keep_returned, move_returned;
} Scalars;

enum { NO_PULL, OVER_DENOMINATOR, UNIFORM };

static inline __attribute__((always_inline)) void
advance(const int count, float *restrict live, const float *restrict grad, float *restrict exp_avg,
        float *restrict exp_avg_sq, float *restrict average, float *restrict returned,
        const Scalars *restrict s, const int pull, const int lookahead, const int averages, const int maximize)
{
    float p[LINE], g[LINE], m[LINE], v[LINE], a[LINE], r[LINE], inverse[LINE], new[LINE];
    for (int i = 0; i < count; i++) p[i] = live[i];
    for (int i = 0; i < count; i++) g[i] = maximize ? -grad[i] : grad[i];
    for (int i = 0; i < count; i++) m[i] = exp_avg[i];
    for (int i = 0; i < count; i++) v[i] = exp_avg_sq[i];
    if (averages > 0)
        for (int i = 0; i < count; i++) a[i] = average[i];
    if (averages > 1)
        for (int i = 0; i < count; i++) r[i] = returned[i];

    for (int i = 0; i < count; i++) m[i] += (g[i] - m[i]) * s->new_m;
    for (int i = 0; i < count; i++) v[i] = v[i] * s->old_v + g[i] * g[i] * s->new_v;
    for (int i = 0; i < count; i++) inverse[i] = 1.0f / (sqrtf(v[i]) * s->root_factor + s->eps);
    for (int i = 0; i < count; i++) new[i] = p[i] * s->decay + m[i] * inverse[i] * s->step_size;

/* 0 times an infinite average would be NaN. */
#define MOVED(old, keep, move) ((keep) == 0.0f ? new[i] : (old) * (keep) + new[i] * (move))
    if (averages > 0 && lookahead)
        for (int i = 0; i < count; i++) a[i] = MOVED(a[i], s->keep, s->move);
    if (pull != NO_PULL)
        for (int i = 0; i < count; i++) {
            float gain = (pull == UNIFORM ? s->numerator : s->numerator * inverse[i]) * s->rate;
            gain = gain > s->limit ? s->limit : gain;
            new[i] += gain * (a[i] - (lookahead ? new[i] : p[i]));
        }
    if (averages > 0 && !lookahead)
        for (int i = 0; i < count; i++) a[i] = MOVED(a[i], s->keep, s->move);
    if (averages > 1)
        for (int i = 0; i < count; i++) r[i] = MOVED(r[i], s->keep_returned, s->move_returned);

    for (int i = 0; i < count; i++) live[i] = new[i];
    for (int i = 0; i < count; i++) exp_avg[i] = m[i];
    for (int i = 0; i < count; i++) exp_avg_sq[i] = v[i];
    if (averages > 0)
        for (int i = 0; i < count; i++) average[i] = a[i];
    if (averages > 1)
        for (int i = 0; i < count; i++) returned[i] = r[i];
}

/* Elements first to last of one tensor. */
static inline __attribute__((always_inline)) void
walk(const Tensor *t, int64_t first, int64_t last, const Scalars *s, const int pull, const int lookahead,
     const int averages, const int maximize)
{
    int64_t i = first;
#define ARRAYS t->live + i, t->grad + i, t->exp_avg + i, t->exp_avg_sq + i, t->average + i, t->returned + i
    for (; i + LINE <= last; i += LINE) advance(LINE, ARRAYS, s, pull, lookahead, averages, maximize);
    for (; i < last; i++) advance(1, ARRAYS, s, pull, lookahead, averages, maximize);
}

/* One step of the elements begin to end, counted through all tensors; averages: how many of them move. */
EVERY_CPU void
paceline_step(const Tensor *tensors, int64_t count, int64_t begin, int64_t end, const Scalars *scalars, int pull,
              int lookahead, int averages, int maximize)
{
    const Scalars s = *scalars;
    int64_t offset = 0;
    for (int64_t k = 0; k < count && offset < end; offset += tensors[k].elements, k++) {
        int64_t first = begin > offset ? begin - offset : 0;
        int64_t last = end - offset < tensors[k].elements ? end - offset : tensors[k].elements;
        if (first >= last) continue;
#define CASE(P, L, A, M) \
        if (pull == P && lookahead == L && averages == A && maximize == M) \
            walk(&tensors[k], first, last, &s, P, L, A, M);
#define CASES(P, L, A) CASE(P, L, A, 0) CASE(P, L, A, 1)
        CASES(NO_PULL, 0, 0)
        CASES(NO_PULL, 0, 1) CASES(NO_PULL, 0, 2) CASES(NO_PULL, 1, 1) CASES(NO_PULL, 1, 2)
        CASES(UNIFORM, 0, 1) CASES(UNIFORM, 0, 2) CASES(UNIFORM, 1, 1) CASES(UNIFORM, 1, 2)
        CASES(OVER_DENOMINATOR, 0, 1) CASES(OVER_DENOMINATOR, 0, 2)
        CASES(OVER_DENOMINATOR, 1, 1) CASES(OVER_DENOMINATOR, 1, 2)
    }
}
