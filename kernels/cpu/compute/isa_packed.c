/* SPDX-License-Identifier: Apache-2.0 */
/* The inner loops over quantised weights; built once per instruction set, as isa_kernels.c.
 *
 * A product sums rows times elements over a block of inputs, and multiplies this sum by the block's
 * scale (in W8A8 also by the row's) when it adds it to y. Sums of a block are one chain of
 * multiply-adds in ascending order, and so are the sums of blocks: for any number of rows.
 *
 * A decoded element is its value, less its zero point, times a constant: the inverse of
 * `factor_of`. Scales carry the factor. Two ways to decode:
 *
 *   by F16    elements become F16 by moving their bits: a byte of F8E4M3 is then 2^-8 times its
 *             value, four bits of E2M1 2^-14 times, and an integer 2^-24 times. F16 subnormals make
 *             that right for every element. Conversion to F32 is exact
 *   by table  four bits: they select an F32 (AVX-512), or a BF16 (AVX2), which has the value
 *             exactly
 *
 * Few rows use elements as they are decoded. One row is one chain for each output, and waits for
 * each multiply-add, so two panels at a time keep twice as many chains under way. More rows share
 * elements that are decoded once into a cache. With 32 registers, a block of these has two panels
 * and half as many rows. It reads each input of a row once for both. Also, rows are often a
 * multiple of 4 KB apart: 12 of them would displace one another from the first-level cache. */
#include "cpu/compute/isa_vectors.h"

/* Compilers take minutes for the instrumented code of more rows (CMakeLists.txt). */
#if defined(MOE_CPU_SMALL_CODE)
#define FEW_WITH_AVX512 4
#else
#define FEW_WITH_AVX512 ROWS
#endif

#if defined(__AVX2__)
#define TABLES 1
#else
#define TABLES 0
#endif

enum {
    /* Up to here, elements are used as they are decoded. With 16 registers only while sums and
     * decoding fit them; F8E4M3 takes more of them without AVX-512. */
    FEW_ROWS = VECTOR_BYTES == 64 ? FEW_WITH_AVX512 : 4,
    FEW_F8_ROWS = VECTOR_BYTES == 64 ? FEW_WITH_AVX512 : 3,
    PAIR_ROWS = 2,                    /* up to here, two panels at a time */
    CHUNK = 128,                      /* inputs that are decoded at a time for more rows */
    MAX_ROWS = 180,                   /* of these, at a time */
    MANY_PANELS = ROWS >= 10 ? 2 : 1, /* of these, at a time */
};

/* ROWS_CASE of each number of rows, which is so a constant. */
#define ALL_ROWS_CASES                                                                             \
    ROWS_CASE(1)                                                                                   \
    ROWS_CASE(2)                                                                                   \
    ROWS_CASE(3)                                                                                   \
    ROWS_CASE(4)                                                                                   \
    ROWS_CASE(5)                                                                                   \
    ROWS_CASE(6)                                                                                   \
    ROWS_CASE(7)                                                                                   \
    ROWS_CASE(8)                                                                                   \
    ROWS_CASE(9)                                                                                   \
    ROWS_CASE(10)                                                                                  \
    ROWS_CASE(11)                                                                                  \
    ROWS_CASE(12)

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
    /* From memory, because the conversion of a register takes the only unit for shuffles, too. The
     * empty statement keeps compilers from cutting the register. */
    half stored = h;
    __asm__("" : "+m"(stored));
    UNROLL
    for (int v = 0; v < VECTORS; v++)
        to[v] = (vec)_mm512_cvtph_ps(((const __m256i *)(const void *)&stored)[v]);
#elif defined(__AVX2__)
    to[0] = (vec)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)h));
    to[1] = (vec)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)h, 1));
#else
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        half_part part;
        memcpy(&part, (const char *)&h + (size_t)v * sizeof part, sizeof part);
        uvec bits = __builtin_convertvector(part, uvec);
        vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f;
        to[v] = (vec)((uvec)size | (bits & 0x8000) << 16);
    }
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
        widen_half(select_input(MOE_ENC_F8E4M3, w->half, j), to);
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
        widen_half(select_input(MOE_ENC_F8E4M3, w->half, j), to);
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
    widen_half(select_input(encoding_of(kind), w->half, j), to);
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

static inline const uint16_t *words_of(const struct moe_cpu_panel *p)
{
    return (const void *)((const char *)p->data + p->packed->elements_at);
}

/* total += the sums of a block of row `row`, times the scales of the row (W8A8) and of its
 * elements. No branch between product and sum: compilers join them in one basic block only, and few
 * and many rows must round alike. */
BLOCK fold(bool w8a8, const vec sum[VECTORS], const struct moe_cpu_rows *x, uint32_t row,
           uint32_t block, const vec scale[VECTORS], vec total[VECTORS])
{
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        vec factor = scale[v];
        if (w8a8)
            factor *= x->scale[row * x->groups + block];
        total[v] += sum[v] * factor;
    }
}

/* Where rows of a register block are: every fourth of them. So all addresses of an input take six
 * registers at most: compilers keep one for each row, and spill them to vectors. */
struct row_pointers {
    const char *row[(ROWS + 3) / 4];
    size_t stride, three_strides; /* bytes */
};

/* The empty statements keep compilers from computing addresses in another way. */
BLOCK point_to_rows(uint32_t rows, const float *x, size_t stride, struct row_pointers *p)
{
    p->stride = stride * sizeof *x;
    p->three_strides = 3 * p->stride;
    __asm__("" : "+r"(p->stride), "+r"(p->three_strides));
    UNROLL
    for (uint32_t r = 0; r < rows; r += 4)
        p->row[r / 4] = (const char *)(x + r * stride);
}

BLOCK advance_rows(uint32_t rows, uint32_t inputs, struct row_pointers *p)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r += 4) {
        p->row[r / 4] += inputs * sizeof(float);
        __asm__("" : "+r"(p->row[r / 4]));
    }
}

static inline __attribute__((always_inline)) float row_input(const struct row_pointers *p,
                                                             uint32_t row, uint32_t input)
{
    size_t offset = row % 4 == 3 ? p->three_strides : row % 4 * p->stride;
    return ((const float *)(const void *)(p->row[row / 4] + offset))[input];
}

/* --------------------------------------------------------------------- few rows */

/* Adds the inputs of one word, of which `inputs` exist, to the sums of `rows` rows. */
BLOCK add_word(enum kind kind, uint32_t rows, const uint16_t *words, const struct levels *l,
               const struct row_pointers *x, uint32_t inputs, vec sum[FEW_ROWS][VECTORS])
{
    struct word word;
    read_word(kind, words, &word);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        vec value[VECTORS];
        if (j >= inputs)
            break;
        values_of(kind, &word, (int)j, l, value);
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] += row_input(x, r, j) * value[v];
        }
    }
}

/* Adds the next `n` inputs, which are of one block, for `count` panels; `x` and `words` of each
 * panel move on. */
BLOCK add_inputs(enum kind kind, uint32_t count, uint32_t rows, const uint16_t *words[2],
                 const struct levels *l, struct row_pointers *x, uint32_t n,
                 vec sum[2][FEW_ROWS][VECTORS])
{
    const uint32_t step = word_inputs(kind), left = n % step;
    for (uint32_t steps = n / step; steps > 0; steps--) {
        UNROLL
        for (uint32_t c = 0; c < count; c++) {
            __builtin_prefetch((const char *)words[c] + PREFETCH_BYTES);
            add_word(kind, rows, words[c], &l[c], x, step, sum[c]);
            words[c] += PANEL;
        }
        advance_rows(rows, step, x);
    }
    if (left == 0)
        return;
    UNROLL
    for (uint32_t c = 0; c < count; c++) /* the matrix's last inputs */
        add_word(kind, rows, words[c], &l[c], x, left, sum[c]);
}

BLOCK load_all_levels(enum kind kind, uint32_t count, const struct moe_cpu_panel *p, uint32_t block,
                      struct levels l[2])
{
    UNROLL
    for (uint32_t c = 0; c < count; c++)
        load_levels(kind, p[c].packed, p[c].data, block, &l[c]);
}

/* `kind`, `w8a8`, `count` and `rows` are constants after inlining. */
BLOCK few_packed(enum kind kind, bool w8a8, uint32_t count, uint32_t rows,
                 const struct moe_cpu_panel *p, const struct moe_cpu_rows *x, uint32_t k,
                 size_t y_stride)
{
    const uint16_t *words[2] = {words_of(&p[0]), words_of(&p[count - 1])};
    const uint32_t size = p->packed->block;
    vec total[2][FEW_ROWS][VECTORS] = {0};
    struct levels l[2];
    struct row_pointers from;
    point_to_rows(rows, x->x, x->stride, &from);
    for (uint32_t i = 0, block = 0, n; i < k; i += n, block++) {
        n = k - i < size ? k - i : size;
        vec sum[2][FEW_ROWS][VECTORS] = {0};
        if (subtracts(kind))
            load_all_levels(kind, count, p, block, l);
        add_inputs(kind, count, rows, words, l, &from, n, sum);
        if (!subtracts(kind)) /* late: to spare registers */
            load_all_levels(kind, count, p, block, l);
        UNROLL
        for (uint32_t c = 0; c < count; c++) {
            UNROLL
            for (uint32_t r = 0; r < rows; r++)
                fold(w8a8, sum[c][r], x, r, block, l[c].scale, total[c][r]);
        }
    }
    UNROLL
    for (uint32_t c = 0; c < count; c++) {
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                memcpy(p[c].y + r * y_stride + v * LANES, &total[c][r][v], sizeof(vec));
        }
    }
}

/* -------------------------------------------------------------------- many rows */

/* Up to CHUNK inputs of one or two panels, decoded, and the sums of rows times these panels. A
 * piece is a block, or the part of a block that is in the chunk. Vectors of a panel are neighbours.
 */
struct chunk {
    uint32_t first, end;            /* inputs */
    bool last;                      /* the matrix has no more */
    uint32_t block;                 /* inputs of a block */
    uint32_t first_block, in_block; /* the block of `first`, and its inputs before `first` */
    /* Words of the next chunk. A product prefetches them evenly: all at once, while they are
     * decoded, would be more than a processor has on the way. */
    const char *next[2];
    size_t next_step; /* bytes for each input */
    vec values[CHUNK * 2 * VECTORS];
    vec scale[CHUNK / 2 * 2 * VECTORS]; /* of each piece; blocks have two inputs or more */
    vec total[MAX_ROWS * 2 * VECTORS];  /* [rows] */
    vec sum[MAX_ROWS * 2 * VECTORS];    /* [rows]: of a block that began in the chunk before */
};

/* Decodes the inputs of one word, of which `inputs` exist. Inputs are `width` vectors apart. */
BLOCK decode_word(enum kind kind, const uint16_t *words, const struct levels *l, uint32_t inputs,
                  uint32_t width, vec *to)
{
    struct word word;
    read_word(kind, words, &word);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        vec value[VECTORS];
        if (j >= inputs)
            break;
        values_of(kind, &word, (int)j, l, value);
        UNROLL
        for (uint32_t v = 0; v < VECTORS; v++)
            to[j * width + v] = value[v];
    }
}

/* Decodes panel number `n` of `count`. */
BLOCK decode_chunk(enum kind kind, uint32_t count, uint32_t n, const struct moe_cpu_panel *p,
                   struct chunk *c)
{
    const uint32_t step = word_inputs(kind), width = count * VECTORS;
    const uint16_t *words = words_of(p) + (size_t)(c->first / step) * PANEL;
    vec *to = c->values + n * VECTORS, *scale = c->scale + n * VECTORS;
    for (uint32_t i = c->first, end; i < c->end; i = end, scale += width) {
        struct levels l;
        uint32_t left = c->block - i % c->block;
        end = c->end - i < left ? c->end : i + left;
        load_levels(kind, p->packed, p->data, i / c->block, &l);
        for (int v = 0; v < VECTORS; v++)
            scale[v] = l.scale[v];
        for (uint32_t steps = (end - i) / step; steps > 0; steps--) {
            decode_word(kind, words, &l, step, width, to);
            words += PANEL;
            to += step * width;
        }
        if ((end - i) % step != 0) /* the matrix's last inputs */
            decode_word(kind, words, &l, (end - i) % step, width, to);
    }
}

BLOCK copy_vectors(uint32_t n, const vec *from, vec *to)
{
    UNROLL
    for (uint32_t i = 0; i < n; i++)
        to[i] = from[i];
}

/* Prefetches inputs first .. first + n - 1 of `rows` rows to the second-level cache. In the first
 * they would displace values, because rows are often a multiple of 4 KB apart. */
BLOCK prefetch_rows(uint32_t rows, const struct moe_cpu_rows *x, uint32_t row, uint32_t first,
                    uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 16) {
        UNROLL
        for (uint32_t r = 0; r < rows; r++)
            __builtin_prefetch(x->x + (row + r) * x->stride + first + i, 0, 2);
    }
}

/* The chunk times `rows` rows from row `row`. `count`, `rows` and `w8a8` are constants after
 * inlining. */
BLOCK multiply_rows(uint32_t count, uint32_t rows, bool w8a8, const struct moe_cpu_rows *x,
                    uint32_t row, struct chunk *c)
{
    const uint32_t width = count * VECTORS, size = c->block;
    const vec *values = c->values, *scale = c->scale;
    const char *next[2] = {c->next[0], c->next[count - 1]};
    const size_t next_step = c->next_step;
    vec *total = c->total + (size_t)row * width, *carried = c->sum + (size_t)row * width;
    uint32_t in_block = c->in_block, block = c->first_block, n;
    struct row_pointers from;
    point_to_rows(rows, x->x + row * x->stride + c->first, x->stride, &from);
    for (uint32_t i = c->first; i < c->end; i += n, block++, scale += width, in_block = 0) {
        vec sum[ROWS][2 * VECTORS] = {0};
        n = c->end - i < size - in_block ? c->end - i : size - in_block;
        if (count == 2) /* measured: with one panel, it takes as long as it saves */
            prefetch_rows(rows, x, row + rows, i, n);
        if (in_block != 0) {
            UNROLL
            for (uint32_t r = 0; r < rows; r++)
                copy_vectors(width, carried + r * width, sum[r]);
        }
        UNROLL_4
        for (uint32_t left = n; left > 0; left--, values += width) {
            UNROLL
            for (uint32_t p = 0; p < count; p++) {
                __builtin_prefetch(next[p]);
                next[p] += next_step;
            }
            UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                UNROLL
                for (uint32_t v = 0; v < width; v++)
                    sum[r][v] += row_input(&from, r, 0) * values[v];
            }
            advance_rows(rows, 1, &from);
        }
        if (i + n == c->end && !c->last && in_block + n < size) { /* the block goes on */
            UNROLL
            for (uint32_t r = 0; r < rows; r++)
                copy_vectors(width, sum[r], carried + r * width);
            return;
        }
        __asm__("" : "+r"(total)); /* one register for all addresses of totals */
        UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            UNROLL
            for (uint32_t p = 0; p < count; p++)
                fold(w8a8, sum[r] + p * VECTORS, x, row + r, block, scale + p * VECTORS,
                     total + r * width + p * VECTORS);
        }
    }
}

/* The same for `blocks` blocks of `rows` rows, from row `row` on. */
BLOCK multiply_blocks(uint32_t count, bool w8a8, uint32_t blocks, uint32_t rows,
                      const struct moe_cpu_rows *x, uint32_t row, struct chunk *c)
{
#define ROWS_CASE(n)                                                                               \
    case n:                                                                                        \
        for (; n <= ROWS / count && blocks > 0; blocks--, row += n)                                \
            multiply_rows(count, n <= ROWS / count ? n : 1, w8a8, x, row, c);                      \
        break;
    switch (rows) {
        ALL_ROWS_CASES
    }
#undef ROWS_CASE
}

typedef void multiply_fn(uint32_t blocks, uint32_t rows, const struct moe_cpu_rows *x, uint32_t row,
                         struct chunk *c);
#define DEFINE_MULTIPLY(name, count, w8a8)                                                         \
    static void name(uint32_t blocks, uint32_t rows, const struct moe_cpu_rows *x, uint32_t row,   \
                     struct chunk *c)                                                              \
    {                                                                                              \
        multiply_blocks(count, w8a8, blocks, rows, x, row, c);                                     \
    }
DEFINE_MULTIPLY(multiply_one, 1, false)
DEFINE_MULTIPLY(multiply_one_w8a8, 1, true)
#if ROWS >= 10
DEFINE_MULTIPLY(multiply_two, 2, false)
DEFINE_MULTIPLY(multiply_two_w8a8, 2, true)
#endif

static multiply_fn *const multiply_of[MANY_PANELS][2] = {{multiply_one, multiply_one_w8a8},
#if ROWS >= 10
                                                         {multiply_two, multiply_two_w8a8}
#endif
};

static inline enum kind kind_of(const struct moe_cpu_packed *p)
{
    if (p->encoding == MOE_ENC_INT4)
        return p->zero_points ? KIND_INT4_ZEROS : KIND_INT4;
    return p->encoding == MOE_ENC_E2M1 ? KIND_E2M1 : KIND_F8;
}

static void decode(uint32_t count, uint32_t n, const struct moe_cpu_panel *p, struct chunk *c)
{
    switch (kind_of(p->packed)) {
    case KIND_F8: decode_chunk(KIND_F8, count, n, p, c); break;
    case KIND_E2M1: decode_chunk(KIND_E2M1, count, n, p, c); break;
    case KIND_INT4: decode_chunk(KIND_INT4, count, n, p, c); break;
    case KIND_INT4_ZEROS: decode_chunk(KIND_INT4_ZEROS, count, n, p, c); break;
    }
}

static void decode_panels(uint32_t count, const struct moe_cpu_panel *p, struct chunk *c)
{
    for (uint32_t n = 0; n < count; n++) {
        decode(count, n, &p[n], c);
        c->next[n] = (const char *)words_of(&p[n]) + c->end * c->next_step;
    }
}

static void store_totals(uint32_t count, uint32_t rows, const vec *total,
                         const struct moe_cpu_panel *p, size_t y_at, size_t y_stride)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t n = 0; n < count; n++, total += VECTORS)
            memcpy(p[n].y + y_at + r * y_stride, total, PANEL * sizeof(float));
}

/* Rows row .. row + rows - 1; rows <= MAX_ROWS. */
static void many_packed(uint32_t count, const struct moe_cpu_panel *p, uint32_t row, uint32_t rows,
                        const struct moe_cpu_rows *all, uint32_t k, size_t y_stride)
{
    struct moe_cpu_rows x = *all;
    struct chunk c; /* large: not initialised as a whole */
    const uint32_t size = p->packed->block, height = ROWS / count;
    /* Blocks of nearly equal height, as in DEFINE_PANEL: `higher` of low + 1 rows, others of low.
     */
    const uint32_t blocks = (rows + height - 1) / height, low = rows / blocks,
                   higher = rows % blocks;
    multiply_fn *const multiply = multiply_of[count - 1][all->scale != NULL];
    /* Whole blocks, if they fit. */
    const uint32_t inputs = size > CHUNK ? CHUNK : CHUNK / size * size;
    x.x += row * x.stride;
    if (x.scale != NULL)
        x.scale += (size_t)row * x.groups;
    c.block = size;
    c.next_step = PANEL * sizeof(uint16_t) / moe_cpu_word_inputs(p->packed->encoding);
    memset(c.total, 0, rows * count * VECTORS * sizeof(vec));
    for (c.first = 0; c.first < k; c.first = c.end) {
        c.end = k - c.first < inputs ? k : c.first + inputs;
        c.last = c.end == k;
        c.first_block = c.first / size;
        c.in_block = c.first % size;
        decode_panels(count, p, &c);
        multiply(higher, low + 1, &x, 0, &c);
        multiply(blocks - higher, low, &x, higher * (low + 1), &c);
    }
    store_totals(count, rows, c.total, p, row * y_stride, y_stride);
}

/* ------------------------------------------------------------------ entry points */

/* All but `rows` are constants after inlining. */
BLOCK few_of(enum kind kind, bool w8a8, uint32_t count, uint32_t rows,
             const struct moe_cpu_panel *p, const struct moe_cpu_rows *x, uint32_t k,
             size_t y_stride)
{
#define ROWS_CASE(n)                                                                               \
    case n:                                                                                        \
        if (n <= (count == 2 ? (int)PAIR_ROWS : (int)FEW_ROWS))                                    \
            few_packed(kind, w8a8, count, n <= FEW_ROWS ? n : 1, p, x, k, y_stride);               \
        break;
    switch (rows) {
        ALL_ROWS_CASES
    }
#undef ROWS_CASE
}

typedef void few_fn(uint32_t rows, const struct moe_cpu_panel *p, const struct moe_cpu_rows *x,
                    uint32_t k, size_t y_stride);
#define DEFINE_FEW(name, kind, w8a8)                                                               \
    static void one_##name(uint32_t rows, const struct moe_cpu_panel *p,                           \
                           const struct moe_cpu_rows *x, uint32_t k, size_t y_stride)              \
    {                                                                                              \
        few_of(kind, w8a8, 1, rows, p, x, k, y_stride);                                            \
    }                                                                                              \
    static void two_##name(uint32_t rows, const struct moe_cpu_panel *p,                           \
                           const struct moe_cpu_rows *x, uint32_t k, size_t y_stride)              \
    {                                                                                              \
        few_of(kind, w8a8, 2, rows, p, x, k, y_stride);                                            \
    }
DEFINE_FEW(f8, KIND_F8, false)
DEFINE_FEW(f8_w8a8, KIND_F8, true)
DEFINE_FEW(e2m1, KIND_E2M1, false)
DEFINE_FEW(int4, KIND_INT4, false)
DEFINE_FEW(int4_zeros, KIND_INT4_ZEROS, false)

static few_fn *find_few(enum kind kind, bool w8a8, uint32_t count)
{
    static few_fn *const of_kind[][2] = {[KIND_F8] = {one_f8, two_f8},
                                         [KIND_E2M1] = {one_e2m1, two_e2m1},
                                         [KIND_INT4] = {one_int4, two_int4},
                                         [KIND_INT4_ZEROS] = {one_int4_zeros, two_int4_zeros}};
    if (w8a8)
        return count == 2 ? two_f8_w8a8 : one_f8_w8a8;
    return of_kind[kind][count - 1];
}

void MOE_CPU_PANELS_PACKED(uint32_t count, const struct moe_cpu_panel *panels, uint32_t rows,
                           const struct moe_cpu_rows *x, uint32_t k, size_t y_stride)
{
    const uint32_t few_rows = panels->packed->encoding == MOE_ENC_F8E4M3 ? FEW_F8_ROWS : FEW_ROWS;
    uint32_t together = rows <= PAIR_ROWS ? count : 1;
    few_fn *few = find_few(kind_of(panels->packed), x->scale != NULL, together);
    for (uint32_t c = 0; rows <= few_rows && c < count; c += together)
        few(rows, &panels[c], x, k, y_stride);
    if (rows <= few_rows)
        return;
    for (uint32_t c = 0, n; c < count; c += n) {
        n = count - c < MANY_PANELS ? count - c : MANY_PANELS;
        for (uint32_t row = 0; row < rows; row += MAX_ROWS)
            many_packed(n, &panels[c], row, rows - row < MAX_ROWS ? rows - row : MAX_ROWS, x, k,
                        y_stride);
    }
}

/* The weights themselves: values times scales, rounded once, as moe/packed_matrix.h defines. */
BLOCK unpack_as(enum kind kind, const struct moe_cpu_packed *p, const char *panel, uint32_t first,
                uint32_t n, float *to)
{
    const uint32_t step = word_inputs(kind);
    const uint16_t *words = (const void *)(panel + p->elements_at);
    words += (size_t)(first / step) * PANEL;
    struct levels l;
    uint32_t i = first, last = first + n;
    while (i < last) {
        uint32_t block = i / p->block, end = p->block - i % p->block;
        end = last - i < end ? last : i + end;
        load_levels(kind, p, panel, block, &l);
        for (; i < end; i += step, words += PANEL) {
            struct word word;
            read_word(kind, words, &word);
            UNROLL
            for (int j = 0; j < 4; j++) {
                vec weight[VECTORS];
                if (j >= (int)step || i + (uint32_t)j >= end)
                    break;
                values_of(kind, &word, j, &l, weight);
                UNROLL
                for (int v = 0; v < VECTORS; v++)
                    weight[v] *= l.scale[v];
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
    switch (kind_of(p)) {
    case KIND_F8: unpack_as(KIND_F8, p, panel, first, n, to); break;
    case KIND_E2M1: unpack_as(KIND_E2M1, p, panel, first, n, to); break;
    case KIND_INT4: unpack_as(KIND_INT4, p, panel, first, n, to); break;
    case KIND_INT4_ZEROS: unpack_as(KIND_INT4_ZEROS, p, panel, first, n, to); break;
    }
}
