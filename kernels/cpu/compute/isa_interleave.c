/* SPDX-License-Identifier: Apache-2.0 */
/* moe_cpu_isa.interleave: turns rows into panels, a line of the cache of every row at a time.
 *
 * A line of each row is first copied side by side. So ends of rows and missing rows need no
 * separate code, and a line is read once, also where rows are a power of two apart and evict each
 * other from the first-level cache.
 *
 * With AVX2 and AVX-512, registers hold 16 bytes of several rows, one row in each 128-bit lane. The
 * rows are chosen so that a transposition within the lanes leaves words in the panel's order. The
 * transposition of 2^n x 2^n words is n times the same step: vectors i and i + 2^(n - 1) become
 * vectors 2 i and 2 i + 1, word by word in turn. A step rotates the number (vector, word) by one
 * bit. Elsewhere, the same is a plain loop. */
#include "cpu/compute/isa_vectors.h"

enum {
    LINE = 64,                       /* bytes of a row */
    BLOCK_BYTES = LINE * (int)PANEL, /* of all rows */
};

typedef uint8_t bytes_vec __attribute__((vector_size(VECTOR_BYTES)));

struct line_block {
    _Alignas(LINE) uint8_t row[PANEL][LINE];
};

/* Copies bytes at .. at + n - 1 of each row, n <= LINE, and zeros behind them. */
static void take_lines(const void *const *rows, size_t at, size_t n, struct line_block *block)
{
    for (uint32_t r = 0; r < PANEL; r++) {
        if (rows[r] == NULL || n < LINE)
            memset(block->row[r], 0, LINE);
        if (rows[r] != NULL)
            memcpy(block->row[r], (const char *)rows[r] + at, n == LINE ? LINE : n);
    }
}

#if defined(__AVX512F__)
typedef __m512i whole;
#define ZIP_LOW(size, a, b)  (size == 2 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpacklo_epi32(a, b))
#define ZIP_HIGH(size, a, b) (size == 2 ? _mm512_unpackhi_epi16(a, b) : _mm512_unpackhi_epi32(a, b))

/* 16 bytes from `column` on of rows r, r + step, ... */
static inline whole load_lanes(const struct line_block *block, uint32_t r, uint32_t step,
                               uint32_t column)
{
    const void *at = &block->row[r][column];
    const size_t next = (size_t)step * LINE;
    __m512i v = _mm512_castsi128_si512(_mm_load_si128(at));
    v = _mm512_inserti32x4(v, _mm_load_si128((const void *)((const char *)at + next)), 1);
    v = _mm512_inserti32x4(v, _mm_load_si128((const void *)((const char *)at + 2 * next)), 2);
    return _mm512_inserti32x4(v, _mm_load_si128((const void *)((const char *)at + 3 * next)), 3);
}
#elif defined(__AVX2__)
typedef __m256i whole;
#define ZIP_LOW(size, a, b)  (size == 2 ? _mm256_unpacklo_epi16(a, b) : _mm256_unpacklo_epi32(a, b))
#define ZIP_HIGH(size, a, b) (size == 2 ? _mm256_unpackhi_epi16(a, b) : _mm256_unpackhi_epi32(a, b))

static inline whole load_lanes(const struct line_block *block, uint32_t r, uint32_t step,
                               uint32_t column)
{
    const void *at = &block->row[r][column];
    __m256i v = _mm256_castsi128_si256(_mm_load_si128(at));
    at = &block->row[r + step][column];
    return _mm256_inserti128_si256(v, _mm_load_si128(at), 1);
}
#endif

#if defined(__AVX2__)
/* Words of 2 or 4 bytes: 16 bytes of rows first, first + count, ... and of the rows behind each of
 * them; v[j] becomes word j of all these rows, in order. `count` = 16 / size. */
static inline __attribute__((always_inline)) void transpose_lanes(uint32_t size,
                                                                  const struct line_block *block,
                                                                  uint32_t first, uint32_t column,
                                                                  whole v[8])
{
    const uint32_t count = 16 / size, steps = size == 2 ? 3 : 2;
    whole other[8];
    UNROLL
    for (uint32_t i = 0; i < count; i++)
        v[i] = load_lanes(block, first + i, count, column);
    UNROLL
    for (uint32_t step = 0; step < steps; step++) {
        UNROLL
        for (uint32_t i = 0; i < count / 2; i++) {
            other[2 * i] = ZIP_LOW(size, v[i], v[i + count / 2]);
            other[2 * i + 1] = ZIP_HIGH(size, v[i], v[i + count / 2]);
        }
        UNROLL
        for (uint32_t i = 0; i < count; i++)
            v[i] = other[i];
    }
}

/* A row of the panel in bytes, from each half of the words. */
static inline __attribute__((always_inline)) void store_halves(whole words, uint8_t *to)
{
    typedef uint16_t words_vec __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint8_t panel_bytes __attribute__((vector_size(PANEL)));
    const words_vec low = (words_vec)words & 0xff, high = (words_vec)words >> 8;
    const panel_bytes a = __builtin_convertvector(low, panel_bytes),
                      b = __builtin_convertvector(high, panel_bytes);
    memcpy(to, &a, sizeof a);
    memcpy(to + PANEL, &b, sizeof b);
}

static inline __attribute__((always_inline)) void
transpose(uint32_t size, const struct line_block *block, uint8_t *to)
{
    const uint32_t parts = size == 4 ? 2 : 1; /* vectors of a row of the panel */
    const uint32_t words = size == 4 ? 4 : 8;
    for (uint32_t column = 0; column < LINE; column += 16) {
        UNROLL
        for (uint32_t part = 0; part < parts; part++) {
            whole v[8];
            transpose_lanes(size == 1 ? 2 : size, block, part * LANES, column, v);
            UNROLL
            for (uint32_t j = 0; j < words; j++) {
                uint8_t *row = to + (j * parts + part) * VECTOR_BYTES;
                if (size == 1)
                    store_halves(v[j], row);
                else
                    memcpy(row, &v[j], sizeof v[j]);
            }
        }
        to += 16 * PANEL;
    }
}
#else
static inline __attribute__((always_inline)) void
transpose(uint32_t size, const struct line_block *block, uint8_t *to)
{
    for (uint32_t at = 0; at < LINE; at += size)
        for (uint32_t r = 0; r < PANEL; r++, to += size)
            memcpy(to, &block->row[r][at], size);
}
#endif

/* Adds to `seen`: a NaN sets the highest bit of a byte there. */
static inline void see_bytes(const struct line_block *block, bytes_vec *seen)
{
    for (size_t at = 0; at < sizeof block->row; at += sizeof *seen) {
        bytes_vec v;
        memcpy(&v, (const char *)block->row + at, sizeof v);
        *seen |= (v & 0x7f) + 1;
    }
}

static inline __attribute__((always_inline)) bool
interleave_words(uint32_t size, size_t bytes, const void *const *rows, uint8_t *to)
{
    bytes_vec seen = {0};
    struct line_block block;
    for (size_t at = 0; at < bytes; at += LINE, to += BLOCK_BYTES) {
        size_t n = bytes - at;
        take_lines(rows, at, n < LINE ? n : LINE, &block);
        see_bytes(&block, &seen);
        if (n >= LINE) {
            transpose(size, &block, to);
            continue;
        }
        uint8_t last[BLOCK_BYTES];
        transpose(size, &block, last);
        memcpy(to, last, (n + size - 1) / size * size * PANEL);
    }
    uint8_t all = 0;
    for (size_t i = 0; i < sizeof seen; i++)
        all |= seen[i];
    return all >> 7;
}

bool MOE_CPU_INTERLEAVE(uint32_t size, size_t bytes, const void *const *rows, void *to)
{
    switch (size) {
    case 1: return interleave_words(1, bytes, rows, to);
    case 2: return interleave_words(2, bytes, rows, to);
    default: return interleave_words(4, bytes, rows, to);
    }
}
