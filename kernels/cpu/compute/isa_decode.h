/* SPDX-License-Identifier: Apache-2.0 */
/* How quantised weights are decoded, for isa_packed.c.
 *
 * A decoded element is its value, less its zero point, times a constant: the inverse of
 * `factor_of`. Scales carry the factor. Two ways to decode:
 *
 *   by F16    elements become F16 by moving their bits: a byte of F8E4M3 is then 2^-8 times its
 *             value, four bits of E2M1 2^-14 times, and an integer 2^-24 times. F16 subnormals make
 *             that right for every element. Conversion to F32 is exact
 *   by table  four bits: they select an F32 (AVX-512), or a BF16 (AVX2), which has the value
 *             exactly */
#ifndef MOE_CPU_ISA_DECODE_H
#define MOE_CPU_ISA_DECODE_H

#include "cpu/compute/isa_vectors.h"

#if defined(__AVX2__)
#define TABLES 1
#else
#define TABLES 0
#endif

/* A row of a panel in uint16, which takes one vector; and the part that one `vec` comes from. */
typedef uint16_t half __attribute__((may_alias, vector_size(PANEL * 2)));
typedef int16_t signed_half __attribute__((vector_size(PANEL * 2)));
typedef uint16_t half_part __attribute__((may_alias, vector_size(LANES * 2)));
typedef uint8_t half_bytes __attribute__((may_alias, vector_size(PANEL)));
typedef uint8_t byte_part __attribute__((may_alias, vector_size(LANES)));

/* F16 to F32, for finite values. */
static inline __attribute__((always_inline)) void widen_half(half h, vec to[VECTORS])
{
#if defined(__AVX512F__)
    to[0] = (vec)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)h));
    to[1] = (vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)h, 1));
#elif defined(__AVX2__)
    to[0] = (vec)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)h));
    to[1] = (vec)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)h, 1));
#else
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        half_part part;
        memcpy(&part, (const char *)&h + (size_t)v * sizeof part, sizeof part);
        uvec bits = __builtin_convertvector(part, uvec);
        /* Right but for the exponent 0, where the value is 2^-14 m and this is 2^-15 (1 + m). No
         * intermediate F32 is subnormal: x86 takes 100 times as long for products of these. */
        vec size = (vec)(((bits & 0x7fff) << 13) + (112 << 23));
        ivec subnormal = (ivec)((bits & 0x7c00) == 0);
        size += (vec)(subnormal & (ivec)(size - 0x1p-14f));
        to[v] = (vec)((uvec)size | (bits & 0x8000) << 16);
    }
#endif
}

/* The same for elements. From memory where there is an instruction, because it takes the only unit
 * for shuffles, too, if it converts a register. For scales, the way through memory takes longer. */
static inline __attribute__((always_inline)) void widen_elements(half h, vec to[VECTORS])
{
#if defined(__AVX2__)
    half stored = h;
    __asm__("" : "+m"(stored)); /* keeps compilers from cutting the register */
#if defined(__AVX512F__)
    const __m256i *from = (const void *)&stored;
    UNROLL
    for (int v = 0; v < VECTORS; v++)
        to[v] = (vec)_mm512_cvtph_ps(from[v]);
#else
    const __m128i *from = (const void *)&stored;
    UNROLL
    for (int v = 0; v < VECTORS; v++)
        to[v] = (vec)_mm256_cvtph_ps(from[v]);
#endif
#else
    widen_half(h, to);
#endif
}

/* Not by memcpy: compilers copy it in parts, and wait for these before the next whole load. */
static inline half load_half(const void *from)
{
    return *(const half *)from;
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

/* How elements are decoded: an encoding, and for integers whether they have zero points. */
enum kind { KIND_F8, KIND_E2M1, KIND_INT4, KIND_INT4_ZEROS };

static inline enum kind kind_of(const struct moe_cpu_packed *p)
{
    if (p->encoding == MOE_ENC_INT4)
        return p->zero_points ? KIND_INT4_ZEROS : KIND_INT4;
    return p->encoding == MOE_ENC_E2M1 ? KIND_E2M1 : KIND_F8;
}

static inline enum moe_encoding encoding_of(enum kind kind)
{
    return kind == KIND_F8 ? MOE_ENC_F8E4M3 : kind == KIND_E2M1 ? MOE_ENC_E2M1 : MOE_ENC_INT4;
}

#if defined(__AVX512F__) || !TABLES
struct word {
    half half;
};

static inline __attribute__((always_inline)) void read_word(enum kind kind, const uint16_t *words,
                                                            struct word *w)
{
    (void)kind;
    w->half = load_half(words);
}
#endif

#if defined(__AVX512F__)
/* Four bits select an F32. `moe_cpu_isa.place` puts outputs n and n + LANES into one uint32, so
 * that only a shift comes before the selection, which takes the lowest four bits. */
static inline vec table_of(enum kind kind)
{
    if (kind == KIND_E2M1)
        return (vec){0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    if (kind == KIND_INT4) /* less its zero, 8 */
        return (vec){-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

static inline __attribute__((always_inline)) void elements_of(enum kind kind, const struct word *w,
                                                              int j, vec to[VECTORS])
{
    if (kind == KIND_F8) {
        widen_elements(select_input(MOE_ENC_F8E4M3, w->half, j), to);
        return;
    }
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        uvec code = (uvec)w->half >> (16 * v + 4 * j);
        to[v] = (vec)_mm512_permutexvar_ps((__m512i)code, (__m512)table_of(kind));
    }
}

static inline float factor_of(enum kind kind)
{
    return kind == KIND_F8 ? 0x1p8f : 1;
}
#elif TABLES
/* Four bits select a BF16 from a table, which holds it exactly: by its high byte, then its low one.
 * Interleaved, two inputs of an output are one uint32, as in panels of bf16. The words of a row
 * stand in the order of `moe_cpu_isa.place`, so that this gives the outputs in order. */
struct word {
    __m256i pair[2][VECTORS]; /* inputs 0 and 2; inputs 1 and 3 */
    half half;
};

#define TABLE(b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15)                \
    _mm256_setr_epi8(b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b0, b1, \
                     b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15)
#define N(x) ((char)(x))

static inline __m256i high_table(enum kind kind)
{
    if (kind == KIND_E2M1)
        return TABLE(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, N(0x80), N(0xbf), N(0xbf),
                     N(0xbf), N(0xc0), N(0xc0), N(0xc0), N(0xc0));
    if (kind == KIND_INT4) /* less its zero, 8 */
        return TABLE(N(0xc1), N(0xc0), N(0xc0), N(0xc0), N(0xc0), N(0xc0), N(0xc0), N(0xbf), 0,
                     0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40);
    return TABLE(0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
                 0x41, 0x41);
}

static inline __m256i low_table(enum kind kind)
{
    if (kind == KIND_E2M1)
        return TABLE(0, 0, N(0x80), N(0xc0), 0, 0x40, N(0x80), N(0xc0), 0, 0, N(0x80), N(0xc0), 0,
                     0x40, N(0x80), N(0xc0));
    if (kind == KIND_INT4)
        return TABLE(0, N(0xe0), N(0xc0), N(0xa0), N(0x80), 0x40, 0, N(0x80), 0, N(0x80), 0, 0x40,
                     N(0x80), N(0xa0), N(0xc0), N(0xe0));
    return TABLE(0, N(0x80), 0, 0x40, N(0x80), N(0xa0), N(0xc0), N(0xe0), 0, 0x10, 0x20, 0x30, 0x40,
                 0x50, 0x60, 0x70);
}
#undef N
#undef TABLE

static inline __attribute__((always_inline)) void read_word(enum kind kind, const uint16_t *words,
                                                            struct word *w)
{
    w->half = load_half(words);
    if (kind == KIND_F8)
        return;
    const __m256i nibble = _mm256_set1_epi8(15);
    UNROLL
    for (int i = 0; i < 2; i++) {
        __m256i codes = _mm256_and_si256(
            i == 0 ? (__m256i)w->half : _mm256_srli_epi16((__m256i)w->half, 4), nibble);
        __m256i high = _mm256_shuffle_epi8(high_table(kind), codes);
        __m256i low = _mm256_shuffle_epi8(low_table(kind), codes);
        w->pair[i][0] = _mm256_unpacklo_epi8(low, high);
        w->pair[i][1] = _mm256_unpackhi_epi8(low, high);
    }
}

static inline __attribute__((always_inline)) void elements_of(enum kind kind, const struct word *w,
                                                              int j, vec to[VECTORS])
{
    if (kind == KIND_F8) {
        widen_elements(select_input(MOE_ENC_F8E4M3, w->half, j), to);
        return;
    }
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        uvec pair = (uvec)w->pair[j & 1][v];
        to[v] = j < 2 ? (vec)(pair << 16) : (vec)(pair & UINT32_C(0xffff0000));
    }
}

static inline float factor_of(enum kind kind)
{
    return kind == KIND_F8 ? 0x1p8f : 1;
}
#else
static inline __attribute__((always_inline)) void elements_of(enum kind kind, const struct word *w,
                                                              int j, vec to[VECTORS])
{
    widen_elements(select_input(encoding_of(kind), w->half, j), to);
}

static inline float factor_of(enum kind kind)
{
    return kind == KIND_F8 ? 0x1p8f : kind == KIND_E2M1 ? 0x1p14f : 0x1p24f;
}
#endif

/* LANES bytes or uint16, and PANEL bytes, widened. By instructions where there are any: GCC 12
 * would take the bytes one by one. */
static inline uvec widen_bytes(const void *from)
{
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu8_epi32(_mm_loadu_si128(from));
#elif defined(__AVX2__)
    return (uvec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
#else
    return __builtin_convertvector(*(const byte_part *)from, uvec);
#endif
}

static inline uvec widen_words(const void *from)
{
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu16_epi32(_mm256_loadu_si256(from));
#elif defined(__AVX2__)
    return (uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128(from));
#else
    return __builtin_convertvector(*(const half_part *)from, uvec);
#endif
}

static inline half widen_bytes_to_half(const void *from)
{
#if defined(__AVX512F__)
    return (half)_mm512_cvtepu8_epi16(_mm256_loadu_si256(from));
#elif defined(__AVX2__)
    return (half)_mm256_cvtepu8_epi16(_mm_loadu_si128(from));
#else
    return __builtin_convertvector(*(const half_bytes *)from, half);
#endif
}

/* Scales and zero points of a block, for each lane and with the factors. */
struct levels {
    vec scale[VECTORS], zero[VECTORS];
};

/* [PANEL] scales of one or two bytes to F32; `global` is not applied. */
static inline void widen_scales(enum moe_scale_type type, const void *from, vec to[VECTORS])
{
    if (type == MOE_SCALE_F16) {
        widen_half(load_half(from), to);
        return;
    }
    if (type == MOE_SCALE_E4M3) {
        widen_half(select_input(MOE_ENC_F8E4M3, widen_bytes_to_half(from), 0), to);
        for (int v = 0; v < VECTORS; v++)
            to[v] *= 0x1p8f;
        return;
    }
    for (int v = 0; v < VECTORS; v++) {
        if (type == MOE_SCALE_BF16) {
            to[v] = (vec)(widen_words((const half_part *)from + v) << 16);
            continue;
        }
        uvec exponent = widen_bytes((const byte_part *)from + v);
        /* 2^-127 is subnormal */
        to[v] = (vec)(exponent << 23 | ((uvec)(exponent == 0) & 0x00400000));
    }
}

static inline void load_levels(enum kind kind, const struct moe_cpu_packed *p, const char *panel,
                               uint32_t block, struct levels *l)
{
    const char *scales = panel + p->scales_at;
    const float factor = factor_of(kind);
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
        l->zero[v] = vec_set(8 / factor);
    }
    if (kind != KIND_INT4_ZEROS)
        return;
    const char *zeros = panel + p->zeros_at + (size_t)block * PANEL;
    for (int v = 0; v < VECTORS; v++) {
        ivec zero = (ivec)widen_bytes(zeros + (size_t)v * sizeof(byte_part));
        l->zero[v] = __builtin_convertvector(zero, vec) * (1 / factor);
    }
}

/* Whether decoding leaves zero points to be subtracted. The table of KIND_INT4 has values less it.
 */
static inline bool subtracts(enum kind kind)
{
    return kind == KIND_INT4_ZEROS || (kind == KIND_INT4 && !TABLES);
}

/* Input `j` of a row of words: its elements less their zero points, times the constant. */
BLOCK values_of(enum kind kind, const struct word *w, int j, const struct levels *l,
                vec to[VECTORS])
{
    elements_of(kind, w, j, to);
    UNROLL
    for (int v = 0; v < VECTORS; v++)
        if (subtracts(kind))
            to[v] -= l->zero[v];
}

static inline uint32_t word_inputs(enum kind kind)
{
    return moe_cpu_word_inputs(encoding_of(kind));
}

#endif
