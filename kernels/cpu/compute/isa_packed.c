/* SPDX-License-Identifier: Apache-2.0 */
/* The inner loops over quantised weights; built once per instruction set, as isa_kernels.c.
 *
 * Elements become F16 by moving their bits: as F16, a byte of F8E4M3 shifted to the right place is
 * 2^-8 times its value, four bits of E2M1 2^-14 times, and an integer 2^-24 times. F16 subnormals
 * make that right for every element. Conversion to F32 is exact, and scales carry the inverse
 * factor, so the product with the scale is rounded once, as moe/packed_matrix.h defines.
 * (packed.c keeps a matrix in F32 if a scale would overflow or an element is NaN.)
 *
 * W8A8 multiplies quantised rows by elements without their scales. These come after the sum over a
 * block (moe/weight_format.h). */
#include "cpu/compute/isa_vectors.h"

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

/* The weights of input `j` of a row of words. `l` NULL: without scales, times the factor. */
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
    if (l == NULL)
        return;
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        if (e == MOE_ENC_INT4)
            to[v] -= l->zero[v];
        to[v] *= l->scale[v];
    }
}

/* Adds the inputs of one word, of which `inputs` exist, to the sums of `rows` rows. */
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

/* Adds the inputs i .. end - 1, which are of one block; `words` is at input i. */
BLOCK add_block_of(enum moe_encoding e, uint32_t rows, const uint16_t **words,
                   const struct levels *l, const float *x, size_t x_stride, uint32_t i,
                   uint32_t end, vec acc[FEW_ROWS][VECTORS])
{
    const uint32_t step = e == MOE_ENC_F8E4M3 ? 2 : 4;
    const uint16_t *at = *words;
    for (; end - i >= step; i += step, at += PANEL) {
        __builtin_prefetch((const char *)at + PREFETCH_BYTES);
        add_word(e, rows, at, l, x + i, x_stride, step, acc);
    }
    if (i < end) /* the matrix's last inputs */
        add_word(e, rows, at, l, x + i, x_stride, end - i, acc);
    *words = at;
}

/* `e` and `rows` are constants after inlining. */
BLOCK few_packed(enum moe_encoding e, uint32_t rows, const struct moe_cpu_packed *p, const float *x,
                 size_t x_stride, const char *panel, uint32_t k, float *y, size_t y_stride)
{
    const uint16_t *words = (const void *)(panel + p->elements_at);
    vec acc[FEW_ROWS][VECTORS] = {0};
    struct levels l;
    for (uint32_t i = 0, block = 0; i < k; block++) {
        uint32_t end = k - i < p->block ? k : i + p->block;
        load_levels(p, panel, block, &l);
        add_block_of(e, rows, &words, &l, x, x_stride, i, end, acc);
        i = end;
    }
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            memcpy(y + r * y_stride + v * LANES, &acc[r][v], sizeof(vec));
    }
}

/* Without scales if not `scaled`, as weights_of. */
BLOCK unpack_as(enum moe_encoding e, bool scaled, const struct moe_cpu_packed *p, const char *panel,
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
        if (scaled)
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
                weights_of(e, word, j, scaled ? &l : NULL, weight);
                memcpy(to, weight, sizeof weight);
                to += PANEL;
            }
        }
        i = end;
    }
}

void MOE_CPU_UNPACK(const struct moe_cpu_packed *p, const void *panel, uint32_t first, uint32_t n,
                    float *to)
{
    switch (p->encoding) {
    case MOE_ENC_F8E4M3: unpack_as(MOE_ENC_F8E4M3, true, p, panel, first, n, to); break;
    case MOE_ENC_E2M1: unpack_as(MOE_ENC_E2M1, true, p, panel, first, n, to); break;
    default: unpack_as(MOE_ENC_INT4, true, p, panel, first, n, to);
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
        MOE_CPU_UNPACK(p, panel, i, n, weights);
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

void MOE_CPU_PANEL_PACKED(const struct moe_cpu_packed *p, uint32_t rows, const float *x,
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

/* ------------------------------------------------------------------------- W8A8 */

/* y += the sums of a block, times the scales of its row and weights. No branch: compilers join
 * product and sum of one basic block only, and all callers must round alike. */
BLOCK fold_row(const vec sum[VECTORS], float row_scale, const struct levels *l, float *y)
{
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        vec total;
        memcpy(&total, y + v * LANES, sizeof total);
        total += sum[v] * (row_scale * l->scale[v]);
        memcpy(y + v * LANES, &total, sizeof total);
    }
}

BLOCK few_w8a8(uint32_t rows, const struct moe_cpu_packed *p, const struct moe_cpu_quantised *x,
               const char *panel, uint32_t k, float *y, size_t y_stride)
{
    const uint16_t *words = (const void *)(panel + p->elements_at);
    struct levels l;
    for (uint32_t i = 0, block = 0; i < k; block++) {
        uint32_t end = k - i < p->block ? k : i + p->block;
        vec sum[FEW_ROWS][VECTORS] = {0};
        add_block_of(MOE_ENC_F8E4M3, rows, &words, NULL, x->q, x->stride, i, end, sum);
        load_levels(p, panel, block, &l);
        UNROLL
        for (uint32_t r = 0; r < rows; r++)
            fold_row(sum[r], x->scale[r * x->groups + block], &l, y + r * y_stride);
        i = end;
    }
}

/* The sums [rows][PANEL] over the inputs of one block. */
static void sum_block(const struct moe_cpu_packed *p, uint32_t rows, const float *q, size_t stride,
                      const char *panel, uint32_t first, uint32_t end, float *sums)
{
    _Alignas(64) float weights[UNPACKED * PANEL];
    memset(sums, 0, (size_t)rows * PANEL * sizeof *sums);
    for (uint32_t i = first; i < end; i += UNPACKED) {
        uint32_t n = end - i < UNPACKED ? end - i : UNPACKED;
        unpack_as(MOE_ENC_F8E4M3, false, p, panel, i, n, weights);
        panel_f32_on(rows, q + i, stride, weights, n, sums, PANEL);
    }
}

static void many_w8a8(const struct moe_cpu_packed *p, uint32_t rows,
                      const struct moe_cpu_quantised *x, const char *panel, uint32_t k, float *y,
                      size_t y_stride)
{
    _Alignas(64) float sums[MOE_CPU_W8A8_ROWS * PANEL];
    struct levels l;
    for (uint32_t i = 0, block = 0; i < k; block++) {
        uint32_t end = k - i < p->block ? k : i + p->block;
        sum_block(p, rows, x->q, x->stride, panel, i, end, sums);
        load_levels(p, panel, block, &l);
        for (uint32_t r = 0; r < rows; r++) {
            vec sum[VECTORS];
            memcpy(sum, sums + r * PANEL, sizeof sum);
            fold_row(sum, x->scale[r * x->groups + block], &l, y + r * y_stride);
        }
        i = end;
    }
}

void MOE_CPU_PANEL_W8A8(const struct moe_cpu_packed *p, uint32_t rows,
                        const struct moe_cpu_quantised *x, const void *panel, uint32_t k, float *y,
                        size_t y_stride)
{
    for (uint32_t r = 0; r < rows; r++)
        memset(y + r * y_stride, 0, PANEL * sizeof *y);
    switch (rows) {
    case 1: few_w8a8(1, p, x, panel, k, y, y_stride); break;
    case 2: few_w8a8(2, p, x, panel, k, y, y_stride); break;
    case 3: few_w8a8(3, p, x, panel, k, y, y_stride); break;
    case 4: few_w8a8(4, p, x, panel, k, y, y_stride); break;
    default: many_w8a8(p, rows, x, panel, k, y, y_stride);
    }
}
