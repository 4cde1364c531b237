/* SPDX-License-Identifier: Apache-2.0 */
/* Random quantised matrices: bits are drawn, scales follow from the wanted magnitude. */
#include "support/packed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct moe_weight_format random_format(struct rng *r, enum moe_encoding encoding)
{
    static const uint32_t groups[] = {16, 32, 64, 128};
    static const uint32_t rows[] = {0, 1, 1, 16, 32, 100, 128}, columns[] = {0, 2, 32, 128, 100};
    struct moe_weight_format f = {.encoding = encoding, .block_rows = 1};
    f.scale = (enum moe_scale_type)rng_below(r, MOE_SCALE_COUNT);
    f.global_divides = f.scale == MOE_SCALE_E4M3 && rng_chance(r, 50);
    f.block_columns = groups[rng_below(r, 4)];
    if (encoding == MOE_ENC_F8E4M3) {
        f.block_rows = rows[rng_below(r, 7)];
        f.block_columns = columns[rng_below(r, 5)];
    }
    f.zero_points = encoding == MOE_ENC_INT4 && rng_chance(r, 50);
    return f;
}

/* 2^exponent as the bits of one scale, with a random mantissa. */
static void put_scale(struct rng *r, enum moe_scale_type type, int exponent, char *to)
{
    uint32_t mantissa = rng_below(r, 1 << 23), sign = rng_below(r, 8) == 0;
    uint32_t single = sign << 31 | (uint32_t)(exponent + 127) << 23 | mantissa;
    uint16_t half = (uint16_t)(single >> 16);
    switch (type) {
    case MOE_SCALE_F32: memcpy(to, &single, sizeof single); return;
    case MOE_SCALE_BF16: memcpy(to, &half, sizeof half); return;
    case MOE_SCALE_E8M0: *to = (char)(exponent + 127); return;
    case MOE_SCALE_E4M3: *to = (char)(0x28 + rng_below(r, 0x20)); return; /* 0.25 .. 3.75 */
    default: break;
    }
    /* F16: subnormal below 2^-14 */
    half = (uint16_t)(sign << 15 | mantissa >> 13);
    half = (uint16_t)(half | (exponent < -14 ? 1 : (exponent + 15) << 10));
    memcpy(to, &half, sizeof half);
}

struct random_packed random_packed(struct rng *r, const struct moe_weight_format *f, size_t rows,
                                   size_t columns, float size)
{
    struct random_packed p = {0};
    struct moe_packed_sizes s;
    if (!moe_packed_sizes(f, rows, columns, &s))
        abort();
    size_t blocks = s.scale_rows * s.scale_columns, each = moe_scale_bytes(f->scale);
    uint8_t *elements = p.elements = calloc(1, s.elements + 1);
    char *scales = p.scales = calloc(1, s.scales + 1);
    p.zeros = f->zero_points ? calloc(1, s.zeros + 1) : NULL;
    if (elements == NULL || scales == NULL || (f->zero_points && p.zeros == NULL))
        abort();
    for (size_t i = 0; i < s.elements; i++) {
        elements[i] = (uint8_t)rng_below(r, 256);
        if (f->encoding == MOE_ENC_F8E4M3 && (elements[i] & 0x7f) == 0x7f)
            elements[i] = 0x7e;
        else if (f->encoding != MOE_ENC_F8E4M3 && columns % 2 != 0 &&
                 i % s.row_bytes == s.row_bytes - 1)
            elements[i] &= 15;
    }
    float typical = f->encoding == MOE_ENC_F8E4M3 ? 130 : f->encoding == MOE_ENC_E2M1 ? 3 : 5;
    int exponent = (int)floorf(log2f(size / typical));
    for (size_t i = 0; i < blocks; i++)
        put_scale(r, f->scale, exponent - (int)rng_below(r, 2), scales + i * each);
    for (size_t i = 0; p.zeros != NULL && i < blocks; i++)
        p.zeros[i] = (uint8_t)rng_below(r, 17);
    float global = ldexpf(1 + (float)rng_below(r, 1000) / 1000, exponent);
    p.matrix = (struct moe_packed_matrix){.elements = p.elements,
                                          .scales = p.scales,
                                          .zeros = p.zeros,
                                          .global = f->global_divides ? 1 / global : global};
    return p;
}

void free_packed(struct random_packed *p)
{
    free(p->elements);
    free(p->scales);
    free(p->zeros);
    *p = (struct random_packed){0};
}

const char *format_text(const struct moe_weight_format *f)
{
    static const char *const scales[] = {"F32", "BF16", "F16", "E8M0", "E4M3"};
    static char text[96];
    snprintf(text, sizeof text, "%s, blocks %u x %u, scales %s%s%s",
             moe_encoding_traits(f->encoding).name, f->block_rows, f->block_columns,
             scales[f->scale], f->global_divides ? " / global" : "",
             f->zero_points ? ", zero points" : "");
    return text;
}
