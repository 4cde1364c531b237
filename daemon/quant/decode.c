/* SPDX-License-Identifier: Apache-2.0 */
/* Two loops for each way of packing: to values, and to rows of packed elements. Scales are read
 * once for each block of a row. */
#include "quant/decode.h"

#include "moe/numbers.h"
#include "moe/types.h"

#include <math.h>
#include <string.h>

enum { WORD = 8 }; /* four-bit elements in 32 bits */

/* Largest finite BF16: weights are given to backends as such. */
static const float LARGEST = 0x1.fep127f;

static uint32_t word_at(const void *words, size_t i)
{
    uint32_t w;
    memcpy(&w, (const char *)words + 4 * i, sizeof w);
    return w;
}

/* Scale `i` of the part, with that of the matrix. */
static float scale_at(const struct moe_quant_matrix *m, size_t i)
{
    const char *scales = m->part[MOE_QUANT_SCALE];
    uint16_t half;
    float f, global;
    switch (m->scale) {
    case MOE_SCALE_F32: memcpy(&f, scales + 4 * i, sizeof f); return f;
    case MOE_SCALE_E8M0: return moe_e8m0_to_f32((uint8_t)scales[i]);
    case MOE_SCALE_E4M3:
        f = moe_e4m3_to_f32((uint8_t)scales[i]);
        if (m->part[MOE_QUANT_GLOBAL] == NULL)
            return f;
        memcpy(&global, m->part[MOE_QUANT_GLOBAL], sizeof global);
        return m->quant->scheme->global_divides ? f / global : f * global;
    default: break;
    }
    memcpy(&half, scales + 2 * i, sizeof half);
    return m->scale == MOE_SCALE_BF16 ? moe_bf16_to_f32(half) : moe_f16_to_f32(half);
}

static size_t block_columns(const struct moe_quant_matrix *m)
{
    uint32_t b = m->quant->format.block_columns;
    return b == 0 || b > m->columns ? m->columns : b;
}

static size_t blocks_of(const struct moe_quant_matrix *m)
{
    size_t b = block_columns(m);
    return (m->columns + b - 1) / b;
}

static size_t block_row(const struct moe_quant_matrix *m, size_t row)
{
    uint32_t b = m->quant->format.block_rows;
    return b == 0 ? 0 : row / b;
}

/* The row of DATA and SCALE that has row `r` of the matrix. */
static size_t stored_row(const struct moe_quant_matrix *m, size_t r)
{
    return m->first_row + r * m->row_step;
}

/* ---- checks ---- */

static struct moe_status wrong(enum moe_quant_part part, enum moe_quant_part *out, const char *what)
{
    *out = part;
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "%s", what);
}

/* `largest`: magnitude of an element. */
static bool is_scale(float s, float largest)
{
    return isfinite(s) && s != 0 && fabsf(s) * largest <= LARGEST;
}

static float largest_element(const struct moe_quant_matrix *m)
{
    return moe_encoding_traits(m->quant->format.encoding).largest;
}

/* Scale `number` of the whole part. */
static struct moe_status wrong_scale(float s, size_t number)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                     "scale %zu is %g, which is %s", number, (double)s,
                     isnan(s) || s == 0 ? "not a scale" : "too large for BF16 weights");
}

/* Which bytes are scales of the matrix; nothing for other types. */
static void find_scale_bytes(const struct moe_quant_matrix *m, bool known[256])
{
    uint8_t bytes[256];
    const float largest = largest_element(m);
    struct moe_quant_matrix all = *m;
    all.part[MOE_QUANT_SCALE] = bytes;
    for (size_t i = 0; moe_scale_bytes(m->scale) == 1 && i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)i;
        known[i] = is_scale(scale_at(&all, i), largest);
    }
}

/* Scales first .. first + count - 1; the first one of the array is number `base` of the part. */
static struct moe_status check_scales_at(const struct moe_quant_matrix *m, const bool known[256],
                                         size_t first, size_t count, size_t base)
{
    const uint8_t *bytes = m->part[MOE_QUANT_SCALE];
    const bool byte = moe_scale_bytes(m->scale) == 1;
    const float largest = largest_element(m);
    for (size_t i = first; i < first + count; i++)
        if (byte ? !known[bytes[i]] : !is_scale(scale_at(m, i), largest))
            return wrong_scale(scale_at(m, i), base + i);
    return moe_ok();
}

struct moe_status moe_quant_check_scales(const struct moe_quant_matrix *m, const void *scales,
                                         size_t first, size_t count)
{
    struct moe_quant_matrix some = *m;
    bool known[256];
    some.part[MOE_QUANT_SCALE] = scales;
    find_scale_bytes(&some, known);
    return check_scales_at(&some, known, 0, count, first);
}

static struct moe_status check_scales(const struct moe_quant_matrix *m)
{
    const struct moe_weight_format *f = &m->quant->format;
    enum moe_quant_packing packing = m->quant->scheme->packing;
    size_t columns = blocks_of(m), step = f->block_rows == 0 ? m->rows : f->block_rows;
    bool known[256];
    find_scale_bytes(m, known);
    if (packing != MOE_PACKED_COLUMNS && packing != MOE_PACKED_ROWS)
        return check_scales_at(m, known, 0, columns * m->rows, 0);
    for (size_t r = 0; packing == MOE_PACKED_COLUMNS && r < m->rows; r++)
        MOE_TRY(check_scales_at(m, known, stored_row(m, r), 1, 0));
    for (size_t r = 0; packing == MOE_PACKED_ROWS && r < m->rows; r += step)
        MOE_TRY(check_scales_at(m, known, block_row(m, stored_row(m, r)) * columns, columns, 0));
    return moe_ok();
}

static struct moe_status check_global(const struct moe_quant_matrix *m, enum moe_quant_part *part)
{
    float global;
    if (m->part[MOE_QUANT_GLOBAL] == NULL)
        return moe_ok();
    memcpy(&global, m->part[MOE_QUANT_GLOBAL], sizeof global);
    return isfinite(global) && global != 0
               ? moe_ok()
               : wrong(MOE_QUANT_GLOBAL, part, "it is NaN, infinite or zero, and no scale");
}

static struct moe_status check_groups(const struct moe_quant_matrix *m, enum moe_quant_part *part)
{
    const void *groups = m->part[MOE_QUANT_GROUPS];
    for (size_t k = 0; groups != NULL && k < m->columns; k++)
        if (word_at(groups, k) != k / block_columns(m))
            return wrong(MOE_QUANT_GROUPS, part,
                         "its columns are in other groups than column / group_size (desc_act), "
                         "which is not supported");
    return moe_ok();
}

static struct moe_status check_shape(const struct moe_quant_matrix *m, enum moe_quant_part *part)
{
    int64_t shape[2];
    if (m->part[MOE_QUANT_SHAPE] == NULL)
        return moe_ok();
    memcpy(shape, m->part[MOE_QUANT_SHAPE], sizeof shape);
    if (shape[0] == (int64_t)m->rows && shape[1] == (int64_t)m->columns)
        return moe_ok();
    return wrong(MOE_QUANT_SHAPE, part, "it is not the shape that config.json implies");
}

struct moe_status moe_quant_check(const struct moe_quant_matrix *m, enum moe_quant_part *part)
{
    MOE_TRY(check_shape(m, part));
    MOE_TRY(check_groups(m, part));
    MOE_TRY(check_global(m, part));
    *part = MOE_QUANT_SCALE;
    return m->part[MOE_QUANT_SCALE] != NULL ? check_scales(m) : moe_ok();
}

/* ---- values ---- */

static void decode_e4m3(const uint8_t *restrict from, size_t n, float scale, float *restrict to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = moe_e4m3_to_f32(from[i]) * scale;
}

/* `n` elements of packed bytes, an even number. The value of each of 16 is computed once. */
static void decode_nibbles(const uint8_t *restrict from, size_t n, const float values[16],
                           float *restrict to)
{
    for (size_t i = 0; i < n / 2; i++) {
        to[2 * i] = values[from[i] & 15];
        to[2 * i + 1] = values[from[i] >> 4];
    }
}

static void values_of(const struct moe_quant_matrix *m, float scale, uint32_t zero,
                      float values[16])
{
    for (int i = 0; i < 16; i++)
        values[i] = (m->quant->format.encoding == MOE_ENC_E2M1 ? moe_e2m1_to_f32((uint8_t)i)
                                                               : (float)(i - (int)zero)) *
                    scale;
}

static uint32_t zero_of_row(const struct moe_quant_matrix *m, size_t row, size_t block)
{
    const void *zeros = m->part[MOE_QUANT_ZERO];
    if (zeros == NULL)
        return 8;
    return word_at(zeros, row / WORD * blocks_of(m) + block) >> 4 * (row % WORD) & 15;
}

static void decode_row(const struct moe_quant_matrix *m, size_t r, float *to)
{
    const uint8_t *data = m->part[MOE_QUANT_DATA];
    size_t row = stored_row(m, r), step = block_columns(m), count = blocks_of(m);
    size_t at = block_row(m, row) * count;
    float values[16];
    for (size_t b = 0; b < count; b++) {
        size_t first = b * step, n = m->columns - first < step ? m->columns - first : step;
        float scale = scale_at(m, at + b);
        if (m->quant->format.encoding == MOE_ENC_F8E4M3) {
            decode_e4m3(data + row * m->columns + first, n, scale, to + first);
            continue;
        }
        values_of(m, scale, zero_of_row(m, row, b), values);
        decode_nibbles(data + row * (m->columns / 2) + first / 2, n, values, to + first);
    }
}

/* Scale and zero point of row `n` in a group of columns. */
struct level {
    float scale;
    int zero;
};

static struct level level_of(const struct moe_quant_matrix *m, size_t group, size_t n,
                             uint32_t place)
{
    const void *zeros = m->part[MOE_QUANT_ZERO];
    struct level l = {scale_at(m, group * m->rows + n), 8};
    if (zeros != NULL) {
        uint32_t word = word_at(zeros, group * (m->rows / WORD) + n / WORD);
        l.zero = (int)(word >> 4 * place & 15) + (int)m->quant->zero_offset;
    }
    return l;
}

/* Where the elements and zero points of row `n` are in a word that has eight rows. */
static uint32_t place_of(const struct moe_quant_matrix *m, size_t n)
{
    static const uint8_t awq[WORD] = {0, 4, 1, 5, 2, 6, 3, 7};
    return m->quant->scheme->packing == MOE_PACKED_AWQ ? awq[n % WORD] : (uint32_t)(n % WORD);
}

static float value_in(uint32_t word, uint32_t place, struct level l)
{
    return (float)((int)(word >> 4 * place & 15) - l.zero) * l.scale;
}

/* A word has elements of one row. */
static void decode_gptq(const struct moe_quant_matrix *m, size_t first, size_t count, float *to)
{
    for (size_t k = 0; k < m->columns; k += WORD)
        for (size_t r = 0; r < count; r++) {
            size_t n = first + r;
            struct level l = level_of(m, k / block_columns(m), n, place_of(m, n));
            uint32_t word = word_at(m->part[MOE_QUANT_DATA], k / WORD * m->rows + n);
            for (uint32_t i = 0; i < WORD; i++)
                to[r * m->columns + k + i] = value_in(word, i, l);
        }
}

/* A word has elements of eight rows. */
static void decode_awq(const struct moe_quant_matrix *m, size_t first, size_t count, float *to)
{
    size_t step = block_columns(m);
    for (size_t r = 0; r < count; r++) {
        size_t n = first + r, words = m->rows / WORD;
        uint32_t place = place_of(m, n);
        struct level l = {0};
        for (size_t k = 0; k < m->columns; k++) {
            if (k % step == 0)
                l = level_of(m, k / step, n, place);
            to[r * m->columns + k] =
                value_in(word_at(m->part[MOE_QUANT_DATA], k * words + n / WORD), place, l);
        }
    }
}

/* Column by column: a line of the memory has elements of many rows. */
static void decode_columns(const struct moe_quant_matrix *m, size_t first, size_t count, float *to)
{
    const uint8_t *data = m->part[MOE_QUANT_DATA];
    for (size_t k = 0; k < m->columns; k++)
        for (size_t r = 0; r < count; r++) {
            size_t row = stored_row(m, first + r);
            to[r * m->columns + k] =
                moe_e4m3_to_f32(data[k * m->stored_rows + row]) * scale_at(m, row);
        }
}

void moe_quant_decode(const struct moe_quant_matrix *m, size_t first, size_t count, float *to)
{
    switch (m->quant->scheme->packing) {
    case MOE_PACKED_COLUMNS: decode_columns(m, first, count, to); return;
    case MOE_PACKED_GPTQ: decode_gptq(m, first, count, to); return;
    case MOE_PACKED_AWQ: decode_awq(m, first, count, to); return;
    case MOE_PACKED_ROWS: break;
    }
    for (size_t r = 0; r < count; r++)
        decode_row(m, first + r, to + r * m->columns);
}

void moe_quant_decode_bf16(const struct moe_quant_matrix *m, size_t first, size_t count,
                           float *restrict values, uint16_t *restrict to)
{
    moe_quant_decode(m, first, count, values);
    for (size_t i = 0; i < count * m->columns; i++)
        to[i] = moe_f32_to_bf16(values[i]);
}

/* ---- packed ---- */

struct moe_weight_format moe_quant_packed_format(const struct moe_quant *q,
                                                 enum moe_scale_type scale, bool several)
{
    struct moe_weight_format f = q->format;
    f.scale = several ? MOE_SCALE_F32 : scale;
    f.global_divides = q->scheme->global_divides && f.scale == MOE_SCALE_E4M3;
    return f;
}

float moe_quant_global(const struct moe_quant_matrix *m)
{
    float global = 1;
    if (m->part[MOE_QUANT_GLOBAL] != NULL)
        memcpy(&global, m->part[MOE_QUANT_GLOBAL], sizeof global);
    return global;
}

bool moe_quant_rows_are_packed(const struct moe_quant_matrix *m, const struct moe_weight_format *f)
{
    bool four = moe_encoding_traits(f->encoding).bits == 4;
    return m->quant->scheme->packing == MOE_PACKED_ROWS && m->scale == f->scale &&
           !f->zero_points && (!four || m->columns % 2 == 0);
}

bool moe_quant_is_packed(const struct moe_quant_matrix *m, const struct moe_weight_format *f,
                         struct moe_packed_matrix *out)
{
    if (!moe_quant_rows_are_packed(m, f) || m->first_row != 0 || m->row_step != 1)
        return false;
    *out = (struct moe_packed_matrix){.elements = m->part[MOE_QUANT_DATA],
                                      .scales = m->part[MOE_QUANT_SCALE],
                                      .global = moe_quant_global(m)};
    return true;
}

/* Scale and zero point of a block of row `r`. */
static void pack_level(const struct moe_quant_matrix *m, const struct moe_weight_format *f,
                       size_t r, size_t block, size_t at, const struct moe_quant_arrays *to)
{
    size_t row = stored_row(m, r), from = block_row(m, row) * blocks_of(m) + block;
    size_t each = moe_scale_bytes(f->scale);
    uint32_t zero = 8;
    if (m->quant->scheme->packing == MOE_PACKED_ROWS) {
        zero = zero_of_row(m, row, block);
    } else if (m->quant->scheme->packing == MOE_PACKED_COLUMNS) {
        from = row;
    } else {
        from = block * m->rows + r;
        zero = (uint32_t)level_of(m, block, r, place_of(m, r)).zero;
    }
    if (m->scale == f->scale) {
        memcpy(to->scales + at * each, (const char *)m->part[MOE_QUANT_SCALE] + from * each, each);
    } else { /* F32 */
        float s = scale_at(m, from);
        memcpy(to->scales + at * each, &s, sizeof s);
    }
    if (to->zeros != NULL)
        to->zeros[at] = (uint8_t)zero;
}

/* Those of all `count` blocks of row `r`. */
static void pack_levels(const struct moe_quant_matrix *m, const struct moe_weight_format *f,
                        size_t r, size_t count, const struct moe_quant_arrays *to)
{
    size_t at = moe_packed_block(f, count, r, 0), each = moe_scale_bytes(f->scale);
    if (m->quant->scheme->packing == MOE_PACKED_ROWS && m->scale == f->scale && to->zeros == NULL) {
        size_t from = block_row(m, stored_row(m, r)) * count;
        memcpy(to->scales + at * each, (const char *)m->part[MOE_QUANT_SCALE] + from * each,
               count * each);
        return;
    }
    for (size_t b = 0; b < count; b++)
        pack_level(m, f, r, b, at + b, to);
}

/* As decode_columns. */
static void pack_columns(const struct moe_quant_matrix *m, size_t row_bytes, size_t first,
                         size_t count, uint8_t *to)
{
    const uint8_t *data = m->part[MOE_QUANT_DATA];
    for (size_t k = 0; k < m->columns; k++)
        for (size_t r = 0; r < count; r++)
            to[r * row_bytes + k] = data[k * m->stored_rows + stored_row(m, first + r)];
}

static void pack_elements(const struct moe_quant_matrix *m, size_t row_bytes, size_t r, uint8_t *to)
{
    const uint8_t *data = m->part[MOE_QUANT_DATA];
    switch (m->quant->scheme->packing) {
    case MOE_PACKED_GPTQ:
        for (size_t w = 0; w < m->columns / WORD; w++)
            memcpy(to + 4 * w, data + 4 * (w * m->rows + r), 4);
        return;
    case MOE_PACKED_AWQ:
        memset(to, 0, row_bytes);
        for (size_t k = 0; k < m->columns; k++) {
            uint32_t word = word_at(data, k * (m->rows / WORD) + r / WORD);
            to[k / 2] |= (uint8_t)((word >> 4 * place_of(m, r) & 15) << 4 * (k % 2));
        }
        return;
    case MOE_PACKED_COLUMNS: return; /* pack_columns */
    case MOE_PACKED_ROWS: break;
    }
    memcpy(to, data + stored_row(m, r) * row_bytes, row_bytes);
}

void moe_quant_pack(const struct moe_quant_matrix *m, const struct moe_weight_format *f,
                    const struct moe_packed_sizes *sizes, size_t first, size_t count,
                    const struct moe_quant_arrays *to)
{
    if (m->quant->scheme->packing == MOE_PACKED_COLUMNS)
        pack_columns(m, sizes->row_bytes, first, count, to->elements + first * sizes->row_bytes);
    for (size_t r = first; r < first + count; r++) {
        bool first_of_block = f->block_rows == 0 ? r == 0 : r % f->block_rows == 0;
        pack_elements(m, sizes->row_bytes, r, to->elements + r * sizes->row_bytes);
        if (first_of_block)
            pack_levels(m, f, r, sizes->scale_columns, to);
    }
}
