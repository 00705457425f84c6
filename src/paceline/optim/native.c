/* The update in one pass over memory, for float32 weights on a CPU: pace_step_ of rule.py, and moved averages.
 *
 * Sixteen elements at a time, one line of cache of each array, so that no line is asked for twice: arrays of
 * one size often begin at the same place of a page and would push each other out of the cache. For the same
 * reason averages are moved after a piece of weights, which are still in the cache: fewer arrays at a time.
 *
 * Built without contraction: a product and a sum are two roundings here, on every machine and for every way of
 * sharing the work out, so that results depend neither on threads nor on the kind of CPU.
 */
#include <math.h>
#include <stdint.h>

#define LINE 16
#define PIECE 512
#define BLOCK 1024 /* elements whose second moments are added up together */

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
    float sign;              /* of the gradient, and how many times it counts */
    float shrink;            /* lr * weight decay */
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
        float *restrict exp_avg_sq, float *restrict average, float *restrict lanes, const Scalars *restrict s,
        const int counts, const int momentum, const int pull, const int lookahead)
{
    float p[LINE], g[LINE], m[LINE], v[LINE], a[LINE], inverse[LINE], new[LINE];
    for (int i = 0; i < count; i++) p[i] = live[i];
    for (int i = 0; i < count; i++) g[i] = counts ? grad[i] * s->sign : grad[i];
    if (momentum)
        for (int i = 0; i < count; i++) m[i] = exp_avg[i];
    else /* the first moment is the gradient, and new_m is 1 */
        for (int i = 0; i < count; i++) m[i] = g[i];
    for (int i = 0; i < count; i++) v[i] = exp_avg_sq[i];
    if (pull != NO_PULL)
        for (int i = 0; i < count; i++) a[i] = average[i];

    for (int i = 0; i < count; i++) m[i] += (g[i] - m[i]) * s->new_m;
    for (int i = 0; i < count; i++) v[i] = v[i] * s->old_v + g[i] * g[i] * s->new_v;
    for (int i = 0; i < count; i++) inverse[i] = 1.0f / (sqrtf(v[i]) * s->root_factor + s->eps);
    for (int i = 0; i < count; i++) new[i] = p[i] + (m[i] * inverse[i] * s->step_size - p[i] * s->shrink);

    if (lookahead) /* 0 times an infinite average would be NaN */
        for (int i = 0; i < count; i++) a[i] = s->keep == 0.0f ? new[i] : a[i] * s->keep + new[i] * s->move;
    if (pull != NO_PULL)
        for (int i = 0; i < count; i++) {
            float gain = (pull == UNIFORM ? s->numerator : s->numerator * inverse[i]) * s->rate;
            gain = gain > s->limit ? s->limit : gain;
            new[i] += gain * (a[i] - (lookahead ? new[i] : p[i]));
        }

    for (int i = 0; i < count; i++) live[i] = new[i];
    if (momentum)
        for (int i = 0; i < count; i++) exp_avg[i] = m[i];
    for (int i = 0; i < count; i++) exp_avg_sq[i] = v[i];
    if (pull == OVER_DENOMINATOR)
        for (int i = 0; i < count; i++) lanes[i] += v[i];
    if (lookahead)
        for (int i = 0; i < count; i++) average[i] = a[i];
}

/* Not inlined, it is quicker. */
static EVERY_CPU __attribute__((noinline)) void
move_average(float *restrict average, const float *restrict live, int64_t count, float keep, float move)
{
    if (keep == 0.0f)
        for (int64_t i = 0; i < count; i++) average[i] = live[i];
    else
        for (int64_t i = 0; i < count; i++) average[i] = average[i] * keep + live[i] * move;
}

/* Of the second moments of a block, by place in a line: in float, over few enough lines to be exact to 1e-6. */
static inline __attribute__((always_inline)) void
gather(const int count, float *restrict lanes, const float *restrict exp_avg_sq)
{
    for (int i = 0; i < count; i++) lanes[i] += exp_avg_sq[i];
}

static inline __attribute__((always_inline)) double total(const float *lanes)
{
    double sum = 0;
    for (int i = 0; i < LINE; i++) sum += lanes[i];
    return sum;
}

/* The blocks of one tensor that begin between the elements begin and end, counted through all tensors. A block
 * is done by one thread from end to end, so that its sum is the same for every way of sharing the work out. */
typedef struct {
    int64_t first, last;
} Range;

static inline int64_t blocks_of(int64_t elements) { return (elements + BLOCK - 1) / BLOCK; }

static inline Range blocks_between(int64_t begin, int64_t end, int64_t offset, int64_t elements)
{
    Range range = {begin > offset ? blocks_of(begin - offset) : 0, end > offset ? blocks_of(end - offset) : 0};
    if (range.last > blocks_of(elements)) range.last = blocks_of(elements);
    return range;
}

static inline __attribute__((always_inline)) void
walk(const Tensor *t, Range range, const Scalars *s, double *sums, const int counts, const int momentum,
     const int pull, const int lookahead, const int averages)
{
#define ARRAYS t->live + i, t->grad + i, momentum ? t->exp_avg + i : 0, t->exp_avg_sq + i, t->average + i
    for (int64_t block = range.first; block < range.last; block++) {
        float lanes[LINE] = {0};
        int64_t i = block * BLOCK, last = i + BLOCK < t->elements ? i + BLOCK : t->elements;
        while (i < last) {
            const int64_t begin = i, end = i + PIECE < last ? i + PIECE : last, count = end - begin;
            for (; i + LINE <= end; i += LINE) advance(LINE, ARRAYS, lanes, s, counts, momentum, pull, lookahead);
            for (; i < end; i++) advance(1, ARRAYS, lanes, s, counts, momentum, pull, lookahead);
            const float *live = t->live + begin;
            if (averages > 0 && !lookahead) move_average(t->average + begin, live, count, s->keep, s->move);
            if (averages > 1)
                move_average(t->returned + begin, live, count, s->keep_returned, s->move_returned);
        }
        if (pull == OVER_DENOMINATOR) sums[block] = total(lanes);
    }
}

/* One step of the blocks that begin between the elements begin and end, counted through all tensors; averages:
 * how many of them move. Sums of the new second moments, a block each, are left where the pull may need them. */
EVERY_CPU void
paceline_step(const Tensor *tensors, int64_t count, int64_t begin, int64_t end, double *sums,
              const Scalars *scalars, int pull, int lookahead, int averages)
{
    const Scalars s = *scalars;
    int64_t offset = 0;
    for (int64_t k = 0; k < count && offset < end; k++) {
        Range range = blocks_between(begin, end, offset, tensors[k].elements);
        const int counts = s.sign != 1, momentum = tensors[k].exp_avg != 0;
#define CASE(C, M, P, L, A) \
        if (counts <= C && momentum == M && pull == P && lookahead == L && averages == A) \
            walk(&tensors[k], range, &s, sums, C, M, P, L, A); \
        else
        CASE(0, 1, NO_PULL, 0, 0) CASE(0, 1, NO_PULL, 0, 1) CASE(0, 1, NO_PULL, 0, 2)
        CASE(0, 1, UNIFORM, 0, 1) CASE(0, 1, UNIFORM, 0, 2) CASE(0, 1, UNIFORM, 1, 1) CASE(0, 1, UNIFORM, 1, 2)
        CASE(0, 1, OVER_DENOMINATOR, 0, 1) CASE(0, 1, OVER_DENOMINATOR, 0, 2)
        CASE(0, 1, OVER_DENOMINATOR, 1, 1) CASE(0, 1, OVER_DENOMINATOR, 1, 2)
        /* Clipped, or without momentum. Each takes a third of a second to build, so of what is rare there is
         * one for all, which is several times slower. */
        CASE(1, 1, NO_PULL, 0, 0) CASE(1, 1, NO_PULL, 0, 1) CASE(1, 1, OVER_DENOMINATOR, 0, 1) CASE(1, 1, OVER_DENOMINATOR, 0, 2)
        CASE(1, 0, NO_PULL, 0, 0) CASE(1, 0, OVER_DENOMINATOR, 0, 1) CASE(1, 0, OVER_DENOMINATOR, 0, 2)
        walk(&tensors[k], range, &s, sums, 1, momentum, pull, lookahead, averages);
        offset += tensors[k].elements;
        sums += blocks_of(tensors[k].elements);
    }
}

/* The same sums of the second moments as they are. */
EVERY_CPU void
paceline_sums(const Tensor *tensors, int64_t count, int64_t begin, int64_t end, double *sums)
{
    int64_t offset = 0;
    for (int64_t k = 0; k < count && offset < end; k++) {
        const Tensor *t = &tensors[k];
        Range range = blocks_between(begin, end, offset, t->elements);
        for (int64_t block = range.first; block < range.last; block++) {
            float lanes[LINE] = {0};
            int64_t i = block * BLOCK, last = i + BLOCK < t->elements ? i + BLOCK : t->elements;
            for (; i + LINE <= last; i += LINE) gather(LINE, lanes, t->exp_avg_sq + i);
            for (; i < last; i++) gather(1, lanes, t->exp_avg_sq + i);
            sums[block] = total(lanes);
        }
        offset += t->elements;
        sums += blocks_of(t->elements);
    }
}

/* From sums of blocks to those of tensors. */
void paceline_totals(const Tensor *tensors, int64_t count, const double *sums, double *totals)
{
    for (int64_t k = 0; k < count; k++) {
        int64_t blocks = blocks_of(tensors[k].elements);
        totals[k] = 0;
        for (int64_t block = 0; block < blocks; block++) totals[k] += sums[block];
        sums += blocks;
    }
}
