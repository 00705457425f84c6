/* The update in one pass over memory, for float32 weights on a CPU: pace_step_ of rule.py, and moved averages.
 *
 * Sixteen elements at a time, one line of cache of each array, so that no line is asked for twice: arrays of
 * one size often begin at the same place of a page and would push each other out of the cache. What comes next
 * is asked for ahead: a CPU does so by itself too, but for fewer arrays, and not beyond a page. Averages of
 * which only residuals are kept are opened and closed a piece at a time, in memory that stays in the first cache.
 *
 * Built without contraction: a product and a sum are two roundings here, on every machine and for every way of
 * sharing the work out, so that results depend neither on threads nor on the kind of CPU.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LINE 16
#define AHEAD 128 /* elements between what is worked on and what is asked for */
#define SHARING 128 /* neighbours that share a scale */
#define PIECE SHARING
#define BLOCK 1024 /* elements whose second moments are added up together */

#if defined(__x86_64__) && defined(__GLIBC__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    float *live;
    const float *grad;
    float *exp_avg, *exp_avg_sq;
    void *average;  /* the target of the pull, kept as its storage says */
    void *returned; /* a second average; not looked at where there is one only */
    int64_t elements;
    float *average_scale, *returned_scale; /* of int8 */
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
enum { FLOAT32, BFLOAT16, INT8 }; /* storages of averages; of the last two, that of what live has beyond them */

/* What is the same for all elements of a tensor. */
typedef struct {
    int momentum, pull, lookahead;
    int averages; /* how many of them move */
    int ends;     /* whether one of them moves all the way to live weights, or not at all */
} Kind;

/* Without `ends` nothing is looked at. All the way is also away from an infinite average, and one that does not
 * move rests also beside an infinite weight: 0 times infinity would be NaN. */
INLINE void
move(const int count, float *restrict average, const float *restrict live, float keep, float move, int ends)
{
    if (!ends || (keep != 0.0f && move != 0.0f))
        for (int i = 0; i < count; i++) average[i] = average[i] * keep + live[i] * move;
    else if (keep == 0.0f)
        for (int i = 0; i < count; i++) average[i] = live[i];
}

/* Each loop over a line is a vector or a few; decisions are made between them. */
INLINE void
advance(const int count, float *restrict live, const float *restrict grad, float *restrict exp_avg,
        float *restrict exp_avg_sq, float *restrict average, float *restrict returned, float *restrict lanes,
        const Scalars *restrict s, const Kind kind)
{
    float p[LINE], g[LINE], m[LINE], v[LINE], a[LINE] = {0}, r[LINE] = {0}, inverse[LINE], new[LINE];
    for (int i = 0; i < count; i++) p[i] = live[i];
    for (int i = 0; i < count; i++) g[i] = grad[i] * s->sign;
    if (kind.momentum)
        for (int i = 0; i < count; i++) m[i] = exp_avg[i];
    else /* the first moment is the gradient, and new_m is 1 */
        for (int i = 0; i < count; i++) m[i] = g[i];
    for (int i = 0; i < count; i++) v[i] = exp_avg_sq[i];
    if (kind.averages > 0)
        for (int i = 0; i < count; i++) a[i] = average[i];
    if (kind.averages > 1)
        for (int i = 0; i < count; i++) r[i] = returned[i];

    for (int i = 0; i < count; i++) m[i] += (g[i] - m[i]) * s->new_m;
    for (int i = 0; i < count; i++) v[i] = v[i] * s->old_v + g[i] * g[i] * s->new_v;
    for (int i = 0; i < count; i++) inverse[i] = 1.0f / (sqrtf(v[i]) * s->root_factor + s->eps);
    for (int i = 0; i < count; i++) new[i] = p[i] + (m[i] * inverse[i] * s->step_size - p[i] * s->shrink);

    if (kind.lookahead) move(count, a, new, s->keep, s->move, kind.ends);
    if (kind.pull != NO_PULL)
        for (int i = 0; i < count; i++) {
            float gain = (kind.pull == UNIFORM ? s->numerator : s->numerator * inverse[i]) * s->rate;
            gain = gain > s->limit ? s->limit : gain;
            new[i] += gain * (a[i] - (kind.lookahead ? new[i] : p[i]));
        }
    if (kind.averages > 0 && !kind.lookahead) move(count, a, new, s->keep, s->move, kind.ends);
    if (kind.averages > 1) move(count, r, new, s->keep_returned, s->move_returned, kind.ends);

    for (int i = 0; i < count; i++) live[i] = new[i];
    if (kind.momentum)
        for (int i = 0; i < count; i++) exp_avg[i] = m[i];
    for (int i = 0; i < count; i++) exp_avg_sq[i] = v[i];
    if (kind.pull == OVER_DENOMINATOR)
        for (int i = 0; i < count; i++) lanes[i] += v[i];
    if (kind.averages > 0)
        for (int i = 0; i < count; i++) average[i] = a[i];
    if (kind.averages > 1)
        for (int i = 0; i < count; i++) returned[i] = r[i];
}

/* --- Residuals in few bits: storage.py says it, and what follows is the same to the bit ---------------- */

#define NOT_FINITE 0x7F800000u /* the least bits of a magnitude that is not */

typedef union {
    float number;
    uint32_t bits;
} Word;

INLINE uint32_t mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

/* Elements first to first + count of an average beside live weights, which are those before the step. */
static EVERY_CPU void
open_average(float *restrict average, const void *restrict kept, const float *restrict scale,
             const float *restrict live, int64_t first, int count, int storage)
{
    live += first;
    if (storage == BFLOAT16) {
        const uint16_t *codes = (const uint16_t *)kept + first;
        for (int i = 0; i < count; i++) {
            Word residual = {.bits = (uint32_t)codes[i] << 16};
            average[i] = live[i] - residual.number;
        }
        return;
    }
    const int8_t *codes = (const int8_t *)kept + first;
    for (int i = 0; i < count;) {
        const float own = scale[(first + i) / SHARING];
        const int end = i + SHARING < count ? i + SHARING : count;
        for (; i < end; i++) average[i] = live[i] - codes[i] * own;
    }
}

/* The way back, beside the weights after the step; `average` is used up, `seed` is mix(2 * t + salt). In loops of
 * 32 bits, and others that narrow: mixed, half of a vector would stay empty. */
static EVERY_CPU void
close_average(float *restrict average, void *restrict kept, float *restrict scale,
              const float *restrict live, int64_t first, int count, int storage, uint32_t seed)
{
    const uint32_t place = (uint32_t)first;
    uint32_t words[PIECE];
    live += first;
    if (storage == BFLOAT16) {
        for (int i = 0; i < count; i++) {
            const Word residual = {.number = live[i] - average[i]};
            const uint32_t magnitude = residual.bits & 0x7FFFFFFFu;
            const uint32_t up = magnitude + (mix((place + i) ^ seed) & 0xFFFFu);
            /* What is finite stays so, at most the largest bfloat16; a NaN or Inf stays as it is. */
            uint32_t rounded = up < 0x7F7FFFFFu ? up : 0x7F7FFFFFu;
            rounded = magnitude >= NOT_FINITE ? NOT_FINITE : rounded;
            rounded = magnitude > NOT_FINITE ? 0x7FC00000u : rounded;
            words[i] = (residual.bits & 0x80000000u) | rounded;
        }
        uint16_t *codes = (uint16_t *)kept + first;
        for (int i = 0; i < count; i++) codes[i] = words[i] >> 16;
        return;
    }
    int8_t *codes = (int8_t *)kept + first;
    for (int begin = 0; begin < count; begin += SHARING) {
        const int end = begin + SHARING < count ? begin + SHARING : count;
        uint32_t most = 0; /* as integers magnitudes have the order that they have as numbers, a NaN above all */
        for (int i = begin; i < end; i++) {
            const Word residual = {.number = live[i] - average[i]};
            const uint32_t magnitude = residual.bits & 0x7FFFFFFFu;
            most = magnitude > most ? magnitude : most;
        }
        const Word largest = {.bits = most};
        const float own = most < NOT_FINITE ? largest.number / 127.0f : NAN;
        scale[(first + begin) / SHARING] = own;
        for (int i = begin; i < end; i++) {
            const float chance = (float)(int32_t)(mix((place + i) ^ seed) >> 8) * 0x1p-24f;
            const float step = floorf((live[i] - average[i]) / own + chance);
            words[i] = (int32_t)(step > -127.0f ? (step < 127.0f ? step : 127.0f) : -127.0f); /* also a NaN */
        }
        if (own > 0.0f)
            for (int i = begin; i < end; i++) codes[i] = (int8_t)words[i];
        else
            for (int i = begin; i < end; i++) codes[i] = 0;
    }
}

/* --- A step ------------------------------------------------------------------------------------------- */

/* Of the second moments of a block, by place in a line: in float, over few enough lines to be exact to 1e-6. */
INLINE void gather(const int count, float *restrict lanes, const float *restrict exp_avg_sq)
{
    for (int i = 0; i < count; i++) lanes[i] += exp_avg_sq[i];
}

INLINE double total(const float *lanes)
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

INLINE int64_t blocks_of(int64_t elements) { return (elements + BLOCK - 1) / BLOCK; }

INLINE Range blocks_between(int64_t begin, int64_t end, int64_t offset, int64_t elements)
{
    Range range = {begin > offset ? blocks_of(begin - offset) : 0, end > offset ? blocks_of(end - offset) : 0};
    if (range.last > blocks_of(elements)) range.last = blocks_of(elements);
    return range;
}

/* For what is done AHEAD elements from now; what lies beyond an array is asked for to no effect. */
INLINE void ask(const void *array, int64_t element, int size)
{
    __builtin_prefetch((const void *)((uintptr_t)array + (uintptr_t)((element + AHEAD) * size)));
}

INLINE void
walk(const Tensor *t, Range range, const Scalars *s, double *sums, int storage, int64_t age, const Kind kind)
{
#define ARRAYS t->live + i, t->grad + i, kind.momentum ? t->exp_avg + i : 0, t->exp_avg_sq + i, \
               average + (i - begin), returned + (i - begin)
    const int size = storage == FLOAT32 ? 4 : storage == BFLOAT16 ? 2 : 1;
    for (int64_t block = range.first; block < range.last; block++) {
        float lanes[LINE] = {0};
        int64_t i = block * BLOCK, last = i + BLOCK < t->elements ? i + BLOCK : t->elements;
        while (i < last) {
            const int64_t begin = i, end = i + PIECE < last ? i + PIECE : last, count = end - begin;
            float opened[2][PIECE], *average = opened[0], *returned = opened[1];
            if (storage == FLOAT32) {
                average = (float *)t->average + begin;
                returned = (float *)t->returned + begin;
            } else if (kind.averages > 0 && age == 1) { /* whatever was kept before a first step, it is live */
                memcpy(average, t->live + begin, sizeof(float) * count);
                memcpy(returned, t->live + begin, sizeof(float) * count);
            } else if (kind.averages > 0) {
                open_average(average, t->average, t->average_scale, t->live, begin, count, storage);
                if (kind.averages > 1)
                    open_average(returned, t->returned, t->returned_scale, t->live, begin, count, storage);
            }
            for (; i + LINE <= end; i += LINE) {
                ask(t->live, i, sizeof(float));
                ask(t->grad, i, sizeof(float));
                if (kind.momentum) ask(t->exp_avg, i, sizeof(float));
                ask(t->exp_avg_sq, i, sizeof(float));
                if (kind.averages > 0) ask(t->average, i, size);
                if (kind.averages > 1) ask(t->returned, i, size);
                advance(LINE, ARRAYS, lanes, s, kind);
            }
            for (; i < end; i++) advance(1, ARRAYS, lanes, s, kind);
            if (storage == FLOAT32) continue;
            const uint32_t moment = 2 * (uint32_t)age;
            if (kind.averages > 0)
                close_average(average, t->average, t->average_scale, t->live, begin, count, storage, mix(moment));
            if (kind.averages > 1)
                close_average(returned, t->returned, t->returned_scale, t->live, begin, count, storage,
                              mix(moment + 1));
        }
        if (kind.pull == OVER_DENOMINATOR) sums[block] = total(lanes);
    }
}

/* What is usual has loops of its own, in which nothing is decided. Each takes half a second to build. */
static EVERY_CPU void
step(const Tensor *t, Range range, const Scalars *scalars, double *sums, int storage, int64_t age, Kind kind)
{
    const Scalars s = *scalars;
    const int usual = !kind.lookahead && !kind.ends;
#define CASE(M, P, A) \
    if (usual && kind.momentum == M && kind.pull == P && kind.averages == A) \
        walk(t, range, &s, sums, storage, age, (Kind){.momentum = M, .pull = P, .averages = A}); \
    else
    CASE(1, OVER_DENOMINATOR, 2) CASE(1, OVER_DENOMINATOR, 1) CASE(1, NO_PULL, 0)
    CASE(0, OVER_DENOMINATOR, 2) CASE(0, OVER_DENOMINATOR, 1)
    walk(t, range, &s, sums, storage, age, kind);
}

static EVERY_CPU void add_up(const Tensor *t, Range range, double *sums)
{
    for (int64_t block = range.first; block < range.last; block++) {
        float lanes[LINE] = {0};
        int64_t i = block * BLOCK, last = i + BLOCK < t->elements ? i + BLOCK : t->elements;
        for (; i + LINE <= last; i += LINE) gather(LINE, lanes, t->exp_avg_sq + i);
        for (; i < last; i++) gather(1, lanes, t->exp_avg_sq + i);
        sums[block] = total(lanes);
    }
}

/* --- What Python calls: without clones, whose names not every compiler leaves as they are ----------------- */

/* One step of the blocks that begin between the elements begin and end, counted through all tensors; averages:
 * how many of them move, or with residuals of live weights, which move in any case, how many there are (a pull
 * wants one at least); age: how many steps the tensors have taken, this one included. Sums of the new second
 * moments, a block each, are left where the pull may need them. */
void paceline_step(const Tensor *tensors, int64_t count, int64_t begin, int64_t end, double *sums,
                   const Scalars *s, int pull, int lookahead, int averages, int storage, int64_t age)
{
    const int end_of_first = averages > 0 && (!s->keep || !s->move);
    const int ends = end_of_first || (averages > 1 && (!s->keep_returned || !s->move_returned));
    int64_t offset = 0;
    for (int64_t k = 0; k < count && offset < end; k++) {
        const Range range = blocks_between(begin, end, offset, tensors[k].elements);
        const Kind kind = {tensors[k].exp_avg != 0, pull, lookahead, averages, ends};
        step(&tensors[k], range, s, sums, storage, age, kind);
        offset += tensors[k].elements;
        sums += blocks_of(tensors[k].elements);
    }
}

/* The same sums of the second moments as they are. */
void paceline_sums(const Tensor *tensors, int64_t count, int64_t begin, int64_t end, double *sums)
{
    int64_t offset = 0;
    for (int64_t k = 0; k < count && offset < end; k++) {
        add_up(&tensors[k], blocks_between(begin, end, offset, tensors[k].elements), sums);
        offset += tensors[k].elements;
        sums += blocks_of(tensors[k].elements);
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
