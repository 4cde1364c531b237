/* SPDX-License-Identifier: Apache-2.0 */
/* The inner loops, in portable GNU C vectors; built once per instruction set (CMakeLists.txt).
 *
 * A register block holds up to ROWS rows times two vectors of output columns. Each step takes two
 * neighbouring inputs. One vector load brings a pair of bf16 weights for every column. A shift and
 * a mask widen them exactly to fp32. Each row adds its two broadcast inputs times them. On
 * processors without a matrix unit, bf16 dot products run at half the rate of fp32 multiply-adds.
 * So bf16 only reduces memory traffic.
 *
 * Every output element is one chain of multiply-adds over k in ascending order, for any number of
 * rows: results are bitwise independent of the batch. */
#include "cpu/compute/isa.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define ISA_NAME     "avx512"
#define VECTOR_BYTES 64
#define ROWS         12 /* 24 accumulators + 4 weight vectors of 32 registers */
#elif defined(__AVX2__)
#define ISA_NAME     "avx2"
#define VECTOR_BYTES 32
#define ROWS         5 /* 10 accumulators + 4 weight vectors + 2 broadcasts of 16 registers */
#elif defined(__aarch64__)
#define ISA_NAME     "neon"
#define VECTOR_BYTES 16
#define ROWS         10 /* 20 accumulators + 4 weight vectors of 32 registers */
#else
#define ISA_NAME     "sse2"
#define VECTOR_BYTES 16
#define ROWS         4 /* 8 accumulators + 4 weight vectors + products of 16 registers */
#endif

#define GLUE2(a, b) a##b
#define GLUE(a, b)  GLUE2(a, b)

/* Loops over rows and vectors must be unrolled, or the accumulators go to memory. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum {
    LANES = VECTOR_BYTES / 4,
    VECTORS = 2,
    PANEL = LANES * VECTORS,
    PREFETCH_BYTES = 6144, /* distance from a load to its prefetch */
};
_Static_assert((int)PANEL <= (int)MOE_CPU_MAX_PANEL, "panel buffers elsewhere have that size");

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t uvec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ivec __attribute__((vector_size(VECTOR_BYTES)));

static inline vec vec_set(float f)
{
    return f - (vec){0};
}

/* One register block: `rows` is a constant after inlining. */
#define BLOCK static inline __attribute__((always_inline)) void

BLOCK store_block(uint32_t rows, vec acc[ROWS][VECTORS], float *y, size_t y_stride)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            memcpy(y + r * y_stride + v * LANES, &acc[r][v], sizeof(vec));
    }
}

BLOCK block_bf16(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                 float *y, size_t y_stride)
{
    vec acc[ROWS][VECTORS] = {0};
    const uvec *pairs = w;
    uint32_t i = 0;
    for (; i + 1 < k; i += 2, pairs += VECTORS) {
        vec even[VECTORS], odd[VECTORS];
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            __builtin_prefetch((const char *)(pairs + v) + PREFETCH_BYTES);
            even[v] = (vec)(pairs[v] << 16);
            odd[v] = (vec)(pairs[v] & UINT32_C(0xffff0000));
        }
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            float a = x[r * x_stride + i], b = x[r * x_stride + i + 1];
            UNROLL
            for (int v = 0; v < VECTORS; v++) {
                acc[r][v] += a * even[v];
                acc[r][v] += b * odd[v];
            }
        }
    }
    if (i < k) { /* odd k: the second weight of the last pair is padding, x has no such element */
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] += x[r * x_stride + i] * (vec)(pairs[v] << 16);
        }
    }
    store_block(rows, acc, y, y_stride);
}

BLOCK add_block(uint32_t rows, vec acc[ROWS][VECTORS], float *y, size_t y_stride)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            vec old;
            memcpy(&old, y + r * y_stride + v * LANES, sizeof old);
            acc[r][v] += old;
        }
    }
    store_block(rows, acc, y, y_stride);
}

/* Prefetches y of the next block, which is usually not in a cache. */
BLOCK prefetch_next_rows(uint32_t rows, const float *y, size_t y_stride)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            __builtin_prefetch(y + (rows + r) * y_stride + v * LANES, 1);
    }
}

BLOCK sum_f32(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k, float *y,
              size_t y_stride, bool add)
{
    vec acc[ROWS][VECTORS] = {0};
    const vec *weights = w;
    for (uint32_t i = 0; i < k; i++, weights += VECTORS) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            __builtin_prefetch((const char *)(weights + v) + PREFETCH_BYTES);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] += x[r * x_stride + i] * weights[v];
        }
    }
    if (add)
        add_block(rows, acc, y, y_stride);
    else
        store_block(rows, acc, y, y_stride);
}

BLOCK block_f32(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k, float *y,
                size_t y_stride)
{
    sum_f32(rows, x, x_stride, w, k, y, y_stride, false);
}

BLOCK block_f32_add(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                    float *y, size_t y_stride)
{
    prefetch_next_rows(rows, y, y_stride);
    sum_f32(rows, x, x_stride, w, k, y, y_stride, true);
}

/* Calls `block` with the row count as a constant, so that each count has its own unrolled loop. */
#define ROW_CASE(block, n)                                                                         \
    case n:                                                                                        \
        block(n <= ROWS ? n : 1, x, x_stride, w, k, y, y_stride);                                  \
        break;
#define DEFINE_PANEL(name, block)                                                                  \
    static void name##_rows(uint32_t rows, const float *x, size_t x_stride, const void *w,         \
                            uint32_t k, float *y, size_t y_stride)                                 \
    {                                                                                              \
        switch (rows) {                                                                            \
            ROW_CASE(block, 1)                                                                     \
            ROW_CASE(block, 2)                                                                     \
            ROW_CASE(block, 3)                                                                     \
            ROW_CASE(block, 4)                                                                     \
            ROW_CASE(block, 5)                                                                     \
            ROW_CASE(block, 6)                                                                     \
            ROW_CASE(block, 7)                                                                     \
            ROW_CASE(block, 8)                                                                     \
            ROW_CASE(block, 9)                                                                     \
            ROW_CASE(block, 10)                                                                    \
            ROW_CASE(block, 11)                                                                    \
            ROW_CASE(block, 12)                                                                    \
        }                                                                                          \
    }                                                                                              \
    static void name(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,    \
                     float *y, size_t y_stride)                                                    \
    {                                                                                              \
        /* Blocks of nearly equal height: 13 rows are 7 + 6, not 12 + 1. */                        \
        for (uint32_t blocks = (rows + ROWS - 1) / ROWS; blocks > 0; blocks--) {                   \
            uint32_t take = (rows + blocks - 1) / blocks;                                          \
            name##_rows(take, x, x_stride, w, k, y, y_stride);                                     \
            rows -= take;                                                                          \
            x += take * x_stride;                                                                  \
            y += take * y_stride;                                                                  \
        }                                                                                          \
    }
DEFINE_PANEL(panel_bf16, block_bf16)
DEFINE_PANEL(panel_f32, block_f32)
DEFINE_PANEL(panel_f32_add, block_f32_add)

/* ----------------------------------------------------------- quantised weights
 *
 * Elements become F16 by moving their bits: as F16, a byte of F8E4M3 shifted to the right place is
 * 2^-8 times its value, four bits of E2M1 2^-14 times, and an integer 2^-24 times. F16 subnormals
 * make that right for every element. Conversion to F32 is exact, and scales carry the inverse
 * factor, so the product with the scale is rounded once, as moe/packed_matrix.h defines.
 * (packed.c keeps a matrix in F32 if a scale would overflow or an element is NaN.) */

enum {
    HALF_LANES = PANEL < 16 ? PANEL : 16, /* of a vector of uint16 */
    HALVES = PANEL / HALF_LANES,          /* such vectors in a row of a panel */
    FEW_ROWS = 4,                         /* up to here, weights are used as they are widened */
    UNPACKED = 128,                       /* inputs that are widened at a time for more rows */
};

typedef uint16_t half __attribute__((may_alias, vector_size(HALF_LANES * 2)));
typedef int16_t signed_half __attribute__((vector_size(HALF_LANES * 2)));
typedef uint16_t half_part __attribute__((may_alias, vector_size(LANES * 2)));
typedef uint8_t half_bytes __attribute__((may_alias, vector_size(HALF_LANES)));
typedef uint8_t byte_part __attribute__((may_alias, vector_size(LANES)));

/* F16 to F32, for finite values. */
static inline void widen_halves(const half h[HALVES], vec to[VECTORS])
{
#if defined(__AVX512F__)
    for (int v = 0; v < VECTORS; v++)
        to[v] = (vec)_mm512_cvtph_ps((__m256i)h[v]);
#elif defined(__AVX2__)
    to[0] = (vec)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)h[0]));
    to[1] = (vec)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)h[0], 1));
#else
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        half_part part;
        memcpy(&part, (const char *)h + (size_t)v * sizeof part, sizeof part);
        uvec bits = __builtin_convertvector(part, uvec);
        vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f;
        to[v] = (vec)((uvec)size | (bits & 0x8000) << 16);
    }
#endif
}

/* Not by memcpy: compilers copy it in parts, and wait for these before the next whole load. */
static inline __attribute__((always_inline)) void load_word(const uint16_t *words,
                                                            half word[HALVES])
{
    UNROLL
    for (int i = 0; i < HALVES; i++)
        word[i] = ((const half *)(const void *)words)[i];
}

/* Input `j` of each word, as F16 with the factor above. */
static inline half select_input(enum moe_encoding e, half word, int j)
{
    if (e == MOE_ENC_F8E4M3)
        return (half)((signed_half)(word << (8 - 8 * j)) >> 1) & 0xbf80;
    if (e == MOE_ENC_E2M1)
        return (half)((signed_half)(word << (12 - 4 * j)) >> 3) & 0x8e00;
    return word >> 4 * j & 15;
}

/* The inverse of the factor. */
static inline float factor_of(enum moe_encoding e)
{
    return e == MOE_ENC_F8E4M3 ? 0x1p8f : e == MOE_ENC_E2M1 ? 0x1p14f : 0x1p24f;
}

/* Scales and zero points of a block, for each lane and with the factors. */
struct levels {
    vec scale[VECTORS], zero[VECTORS];
};

/* [PANEL] scales of one or two bytes to F32; `global` is not applied. */
static inline void widen_scales(enum moe_scale_type type, const void *from, vec to[VECTORS])
{
    half halves[HALVES];
    if (type == MOE_SCALE_F16) {
        load_word(from, halves);
        widen_halves(halves, to);
        return;
    }
    if (type == MOE_SCALE_E4M3) {
        for (int i = 0; i < HALVES; i++) {
            half_bytes narrow = ((const half_bytes *)from)[i];
            halves[i] = select_input(MOE_ENC_F8E4M3, __builtin_convertvector(narrow, half), 0);
        }
        widen_halves(halves, to);
        for (int v = 0; v < VECTORS; v++)
            to[v] *= 0x1p8f;
        return;
    }
    for (int v = 0; v < VECTORS; v++) {
        half_part wide;
        byte_part narrow;
        if (type == MOE_SCALE_BF16) {
            wide = ((const half_part *)from)[v];
            to[v] = (vec)(__builtin_convertvector(wide, uvec) << 16);
            continue;
        }
        narrow = ((const byte_part *)from)[v];
        uvec exponent = __builtin_convertvector(narrow, uvec);
        /* 2^-127 is subnormal */
        to[v] = (vec)(exponent << 23 | ((uvec)(exponent == 0) & 0x00400000));
    }
}

static inline void load_levels(const struct moe_cpu_packed *p, const char *panel, uint32_t block,
                               struct levels *l)
{
    const char *scales = panel + p->scales_at;
    float factor = factor_of(p->encoding);
    if (p->shared_scales) {
        float f = ((const float *)(const void *)scales)[block];
        for (int v = 0; v < VECTORS; v++)
            l->scale[v] = vec_set(f);
    } else if (p->scale == MOE_SCALE_F32) {
        for (int v = 0; v < VECTORS; v++)
            l->scale[v] = ((const vec *)(const void *)scales)[block * VECTORS + (unsigned)v];
    } else {
        widen_scales(p->scale, scales + (size_t)block * PANEL * moe_scale_bytes(p->scale),
                     l->scale);
    }
    bool has_global = !p->shared_scales && p->scale == MOE_SCALE_E4M3;
    for (int v = 0; v < VECTORS; v++) {
        if (has_global)
            l->scale[v] = p->global_divides ? l->scale[v] / p->global : l->scale[v] * p->global;
        l->scale[v] *= factor;
        l->zero[v] = vec_set(8 * 0x1p-24f);
    }
    if (!p->zero_points)
        return;
    const char *zeros = panel + p->zeros_at + (size_t)block * PANEL;
    for (int v = 0; v < VECTORS; v++) {
        byte_part zero;
        memcpy(&zero, zeros + (size_t)v * sizeof zero, sizeof zero);
        l->zero[v] = __builtin_convertvector(__builtin_convertvector(zero, ivec), vec) * 0x1p-24f;
    }
}

/* The weights of input `j` of a row of words. */
static inline __attribute__((always_inline)) void weights_of(enum moe_encoding e,
                                                             const half word[HALVES], int j,
                                                             const struct levels *l,
                                                             vec to[VECTORS])
{
    half selected[HALVES];
    UNROLL
    for (int i = 0; i < HALVES; i++)
        selected[i] = select_input(e, word[i], j);
    widen_halves(selected, to);
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        if (e == MOE_ENC_INT4)
            to[v] -= l->zero[v];
        to[v] *= l->scale[v];
    }
}

/* Adds the inputs i .. of one word, of which `inputs` exist, to the sums of `rows` rows. */
BLOCK add_word(enum moe_encoding e, uint32_t rows, const uint16_t *words, const struct levels *l,
               const float *x, size_t x_stride, uint32_t inputs, vec acc[FEW_ROWS][VECTORS])
{
    half word[HALVES];
    load_word(words, word);
    UNROLL
    for (int j = 0; j < 4; j++) {
        vec weight[VECTORS];
        if (j >= (int)inputs)
            break;
        weights_of(e, word, j, l, weight);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] += x[r * x_stride + (uint32_t)j] * weight[v];
        }
    }
}

/* `e` and `rows` are constants after inlining. */
BLOCK few_packed(enum moe_encoding e, uint32_t rows, const struct moe_cpu_packed *p, const float *x,
                 size_t x_stride, const char *panel, uint32_t k, float *y, size_t y_stride)
{
    const uint32_t step = e == MOE_ENC_F8E4M3 ? 2 : 4;
    const uint16_t *words = (const void *)(panel + p->elements_at);
    vec acc[FEW_ROWS][VECTORS] = {0};
    struct levels l;
    for (uint32_t i = 0, block = 0; i < k; block++) {
        uint32_t end = k - i < p->block ? k : i + p->block;
        load_levels(p, panel, block, &l);
        for (; end - i >= step; i += step, words += PANEL) {
            __builtin_prefetch((const char *)words + PREFETCH_BYTES);
            add_word(e, rows, words, &l, x + i, x_stride, step, acc);
        }
        if (i < end) { /* the matrix's last inputs */
            add_word(e, rows, words, &l, x + i, x_stride, end - i, acc);
            i = end;
        }
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            memcpy(y + r * y_stride + v * LANES, &acc[r][v], sizeof(vec));
    }
}

BLOCK unpack_as(enum moe_encoding e, const struct moe_cpu_packed *p, const char *panel,
                uint32_t first, uint32_t n, float *to)
{
    const uint32_t step = e == MOE_ENC_F8E4M3 ? 2 : 4;
    const uint16_t *words = (const void *)(panel + p->elements_at);
    words += (size_t)(first / step) * PANEL;
    struct levels l;
    uint32_t i = first, last = first + n;
    while (i < last) {
        uint32_t block = i / p->block, end = p->block - i % p->block;
        end = last - i < end ? last : i + end;
        load_levels(p, panel, block, &l);
        for (; i < end; i += step, words += PANEL) {
            half word[HALVES];
            load_word(words, word);
            __builtin_prefetch((const char *)words + PREFETCH_BYTES);
            UNROLL
            for (int j = 0; j < 4; j++) {
                vec weight[VECTORS];
                if (j >= (int)step || i + (uint32_t)j >= end)
                    break;
                weights_of(e, word, j, &l, weight);
                memcpy(to, weight, sizeof weight);
                to += PANEL;
            }
        }
        i = end;
    }
}

static void unpack(const struct moe_cpu_packed *p, const void *panel, uint32_t first, uint32_t n,
                   float *to)
{
    switch (p->encoding) {
    case MOE_ENC_F8E4M3: unpack_as(MOE_ENC_F8E4M3, p, panel, first, n, to); break;
    case MOE_ENC_E2M1: unpack_as(MOE_ENC_E2M1, p, panel, first, n, to); break;
    default: unpack_as(MOE_ENC_INT4, p, panel, first, n, to);
    }
}

/* Many rows: a few weights are widened to `w` [n][PANEL] and used by all rows. The sums of the
 * inputs before are in y, so each sum stays one chain over k. */
BLOCK block_f32_on(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                   float *y, size_t y_stride)
{
    vec acc[ROWS][VECTORS];
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            memcpy(&acc[r][v], y + r * y_stride + v * LANES, sizeof(vec));
    }
    const vec *weights = w;
    for (uint32_t i = 0; i < k; i++, weights += VECTORS) {
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] += x[r * x_stride + i] * weights[v];
        }
    }
    store_block(rows, acc, y, y_stride);
}
DEFINE_PANEL(panel_f32_on, block_f32_on)

static void many_packed(const struct moe_cpu_packed *p, uint32_t rows, const float *x,
                        size_t x_stride, const void *panel, uint32_t k, float *y, size_t y_stride)
{
    _Alignas(64) float weights[UNPACKED * PANEL];
    for (uint32_t r = 0; r < rows; r++)
        memset(y + r * y_stride, 0, PANEL * sizeof *y);
    for (uint32_t i = 0; i < k; i += UNPACKED) {
        uint32_t n = k - i < UNPACKED ? k - i : UNPACKED;
        unpack(p, panel, i, n, weights);
        panel_f32_on(rows, x + i, x_stride, weights, n, y, y_stride);
    }
}

#define FEW_CASE(e, n)                                                                             \
    case n:                                                                                        \
        few_packed(e, n, p, x, x_stride, panel, k, y, y_stride);                                   \
        break;
#define DEFINE_FEW(name, e)                                                                        \
    static void name(const struct moe_cpu_packed *p, uint32_t rows, const float *x,                \
                     size_t x_stride, const void *panel, uint32_t k, float *y, size_t y_stride)    \
    {                                                                                              \
        switch (rows) {                                                                            \
            FEW_CASE(e, 1)                                                                         \
            FEW_CASE(e, 2)                                                                         \
            FEW_CASE(e, 3)                                                                         \
            FEW_CASE(e, 4)                                                                         \
        }                                                                                          \
    }
DEFINE_FEW(few_f8e4m3, MOE_ENC_F8E4M3)
DEFINE_FEW(few_e2m1, MOE_ENC_E2M1)
DEFINE_FEW(few_int4, MOE_ENC_INT4)

static void panel_packed(const struct moe_cpu_packed *p, uint32_t rows, const float *x,
                         size_t x_stride, const void *panel, uint32_t k, float *y, size_t y_stride)
{
    if (rows > FEW_ROWS)
        many_packed(p, rows, x, x_stride, panel, k, y, y_stride);
    else if (p->encoding == MOE_ENC_F8E4M3)
        few_f8e4m3(p, rows, x, x_stride, panel, k, y, y_stride);
    else if (p->encoding == MOE_ENC_E2M1)
        few_e2m1(p, rows, x, x_stride, panel, k, y, y_stride);
    else
        few_int4(p, rows, x, x_stride, panel, k, y, y_stride);
}

static void widen(enum moe_dtype dtype, size_t n, const void *from, float scale, float *to)
{
    if (dtype == MOE_DTYPE_F32) {
        const float *f = from;
        for (size_t i = 0; i < n; i++)
            to[i] = scale * f[i];
        return;
    }
    const uint16_t *b = from;
    for (size_t i = 0; i < n; i++)
        to[i] = scale * moe_bf16_to_f32(b[i]);
}

/* ----------------------------------------------------------------- activation */

/* Lane-wise x < bound ? bound : x, and x > bound ? bound : x below: NaN stays NaN. */
static inline vec vec_at_least(vec x, float bound)
{
    ivec below = x < bound;
    return (vec)((below & (ivec)vec_set(bound)) | (~below & (ivec)x));
}

static inline vec vec_at_most(vec x, float bound)
{
    ivec above = x > bound;
    return (vec)((above & (ivec)vec_set(bound)) | (~above & (ivec)x));
}

/* exp(x) to about one unit in the last place, for x in [-87, 87]; clamped outside.
 * x = n ln2 + r, |r| <= ln2 / 2; exp(r) by its Taylor series up to r^7. The next term, r^8 / 8!, is
 * below 2^-27. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum. */
static inline vec vec_exp(vec x)
{
    const float round = 12582912.0f;
    x = vec_at_most(vec_at_least(x, -87.0f), 87.0f);
    vec shifted = x * 1.44269504f + round;
    vec n = shifted - round;
    vec r = x - n * 0.693359375f; /* ln2 in two parts, the first with few bits: n * it is exact */
    r = r - n * -2.12194440e-4f;
    vec p = vec_set(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vec)((uvec)p + ((uvec)shifted << 23)); /* times 2^n: n added to the exponent */
}

static inline vec vec_sigmoid(vec x)
{
    return 1.0f / (1.0f + vec_exp(-x));
}

#define MOE_ACTIVATION_REAL              vec
#define MOE_ACTIVATION_AT_MOST(x, bound) vec_at_most(x, bound)
#define MOE_ACTIVATION_WITHIN(x, bound)  vec_at_most(vec_at_least(x, -(bound)), bound)
#define MOE_ACTIVATION_SIGMOID(x)        vec_sigmoid(x)
#include "common/activation_math.h"

static void activate(enum moe_activation activation, float limit, float alpha, size_t n,
                     float *gate, const float *up)
{
    for (size_t i = 0; i < n; i += LANES) {
        size_t bytes = (n - i < LANES ? n - i : LANES) * sizeof(float);
        vec g = {0}, u = {0};
        memcpy(&g, gate + i, bytes);
        memcpy(&u, up + i, bytes);
        g = moe_activate(activation, limit, alpha, g, u);
        memcpy(gate + i, &g, bytes);
    }
}

/* One vector of activate_backward: d is the cotangent and becomes the activation. */
static inline void vec_activate_backward(enum moe_activation activation, float limit, float alpha,
                                         float weight, vec *g, vec *u, vec *d)
{
    vec gate = *g, up = *u, cotangent = *d * weight;
    ivec gate_unclamped = ~(ivec){0}, up_unclamped = gate_unclamped;
    if (moe_activation_clamps(activation)) {
        gate_unclamped = ~(gate > limit);
        up_unclamped = ~((up > limit) | (up < -limit));
        gate = MOE_ACTIVATION_AT_MOST(gate, limit);
        up = MOE_ACTIVATION_WITHIN(up, limit);
    }
    vec sigmoid = vec_sigmoid(moe_activation_z(activation, alpha, gate));
    vec slope = moe_activation_slope(activation, alpha, gate, sigmoid);
    vec factor = moe_activation_factor(activation, up);
    *g = (vec)((ivec)(cotangent * factor * slope) & gate_unclamped);
    *u = (vec)((ivec)(cotangent * (gate * sigmoid)) & up_unclamped);
    *d = gate * sigmoid * factor;
}

static float activate_backward(enum moe_activation activation, float limit, float alpha, size_t n,
                               float weight, float *gate, float *up, float *hidden)
{
    vec dot = {0};
    for (size_t i = 0; i < n; i += LANES) {
        size_t bytes = (n - i < LANES ? n - i : LANES) * sizeof(float);
        vec g = {0}, u = {0}, d = {0}, cotangent;
        memcpy(&g, gate + i, bytes);
        memcpy(&u, up + i, bytes);
        memcpy(&d, hidden + i, bytes);
        cotangent = d;
        vec_activate_backward(activation, limit, alpha, weight, &g, &u, &d);
        dot += cotangent * d;
        memcpy(gate + i, &g, bytes);
        memcpy(up + i, &u, bytes);
        memcpy(hidden + i, &d, bytes);
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += dot[lane];
    return sum;
}

static void optimize(const struct moe_train_update *update, size_t n, float *restrict value,
                     float *restrict grad, float *restrict m1, float *restrict m2)
{
    const struct moe_train_update u = *update;
    if (u.optimizer == MOE_OPTIMIZER_ADAMW) {
        for (size_t i = 0; i < n; i++) {
            value[i] = moe_train_adamw(&u, value[i], grad[i], &m1[i], &m2[i]);
            grad[i] = 0;
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        value[i] = moe_train_sgd(&u, value[i], grad[i], &m1[i]);
        grad[i] = 0;
    }
}

const struct moe_cpu_isa GLUE(moe_cpu_isa_, MOE_CPU_ISA);
const struct moe_cpu_isa GLUE(moe_cpu_isa_, MOE_CPU_ISA) = {
    .name = ISA_NAME,
    .panel = PANEL,
    .panel_bf16 = panel_bf16,
    .panel_f32 = panel_f32,
    .panel_f32_add = panel_f32_add,
    .panel_packed = panel_packed,
    .unpack = unpack,
    .widen = widen,
    .activate = activate,
    .activate_backward = activate_backward,
    .optimize = optimize,
};
