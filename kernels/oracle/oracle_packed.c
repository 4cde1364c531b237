/* SPDX-License-Identifier: Apache-2.0 */
/* The values of quantised matrices and rows, from the definitions of their formats. Each rounding
 * to single precision that moe/packed_matrix.h names is a conversion from a double that is exact,
 * or so close that rounding twice gives the same. */
#include "oracle/oracle_internal.h"

#include <math.h>
#include <stdlib.h>

/* A small float: `bits` are sign, exponent and mantissa; no infinities. */
static double minifloat(unsigned bits, int exponent_bits, int mantissa_bits, int bias)
{
    int mantissa = (int)(bits & ((1u << mantissa_bits) - 1));
    int exponent = (int)(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    bool negative = (bits >> (exponent_bits + mantissa_bits) & 1) != 0;
    double size = exponent == 0
                      ? ldexp(mantissa, 1 - bias - mantissa_bits)
                      : ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
    return negative ? -size : size;
}

static double scale_of(const struct moe_weight_format *f, const struct moe_packed_matrix *m,
                       size_t i)
{
    const unsigned char *bytes = m->scales;
    unsigned half = f->scale == MOE_SCALE_BF16 || f->scale == MOE_SCALE_F16
                        ? bytes[2 * i] | (unsigned)bytes[2 * i + 1] << 8
                        : 0;
    float single;
    double s;
    switch (f->scale) {
    case MOE_SCALE_F32: memcpy(&single, bytes + 4 * i, sizeof single); return (double)single;
    case MOE_SCALE_BF16: return minifloat(half, 8, 7, 127);
    case MOE_SCALE_F16: return minifloat(half, 5, 10, 15);
    case MOE_SCALE_E8M0: return ldexp(1, (int)bytes[i] - 127);
    default: break;
    }
    s = minifloat(bytes[i], 4, 3, 7);
    return (double)(float)(f->global_divides ? s / (double)m->global : s * (double)m->global);
}

static double element_of(const struct moe_weight_format *f, const struct moe_packed_matrix *m,
                         size_t row, size_t column, size_t columns, unsigned zero)
{
    const unsigned char *bytes = m->elements;
    if (f->encoding == MOE_ENC_F8E4M3) {
        unsigned b = bytes[row * columns + column];
        return (b & 0x7f) == 0x7f ? NAN : minifloat(b, 4, 3, 7);
    }
    unsigned four = bytes[row * ((columns + 1) / 2) + column / 2] >> 4 * (column % 2) & 15;
    return f->encoding == MOE_ENC_E2M1 ? minifloat(four, 2, 1, 1) : (double)four - (double)zero;
}

static size_t block_of(size_t i, uint32_t block)
{
    return block == 0 ? 0 : i / block;
}

struct moe_status moe_oracle_upload_packed(struct moe_oracle_layer *layer, enum moe_weight weight,
                                           uint32_t expert, const struct moe_packed_matrix *m)
{
    const struct moe_weight_format *f = moe_weight_format_of(&layer->spec, weight);
    size_t rows, columns;
    uint32_t entry = moe_weight_is_expert(weight) ? expert : 0;
    moe_weight_shape(&layer->spec, weight, &rows, &columns);
    if (f == NULL || rows == 0 || (moe_weight_is_expert(weight) && expert >= layer->spec.experts))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "weight %d of expert %u is not quantised", (int)weight, expert);
    double *w = calloc(rows * columns, sizeof *w);
    if (w == NULL)
        return moe_oracle_out_of_memory();
    size_t blocks = block_of(columns - 1, f->block_columns) + 1;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) {
            size_t i = block_of(r, f->block_rows) * blocks + block_of(c, f->block_columns);
            double element = element_of(f, m, r, c, columns, f->zero_points ? m->zeros[i] : 8);
            w[r * columns + c] = (double)(float)(element * scale_of(f, m, i));
        }
    free(layer->weight[weight][entry]);
    layer->weight[weight][entry] = w;
    return moe_ok();
}

/* ------------------------------------------------------------------- activations */

/* The nearest value of F8E4M3, ties to even: multiples of 2^-9, and from 2^-6 on four significant
 * bits. */
static double round_e4m3(double v)
{
    int exponent;
    if (isnan(v))
        return v;
    (void)frexp(v, &exponent); /* |v| < 2^exponent */
    double step = ldexp(1, exponent < -5 ? -9 : exponent - 4);
    double q = nearbyint(v / step) * step;
    return fmax(-448, fmin(448, q));
}

/* One group; divisions are in single precision. */
static void quantise_group(bool pow2, size_t n, double *x)
{
    float largest = 1e-10f;
    for (size_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf((float)x[i]));
    float s = largest / 448;
    if (pow2) {
        int exponent;
        float fraction = frexpf(s, &exponent); /* s = fraction * 2^exponent, fraction in [0.5, 1) */
        s = ldexpf(1, fraction == 0.5f ? exponent - 1 : exponent);
    }
    for (size_t i = 0; i < n; i++) {
        float v = (float)x[i] / s;
        x[i] = round_e4m3((double)v) * (double)s;
    }
}

void moe_oracle_quantise(const struct moe_weight_format *f, size_t n, double *x)
{
    if (f->encoding == MOE_ENC_NONE || f->activations == MOE_ACTIVATIONS_PLAIN)
        return;
    size_t group = f->block_columns == 0 ? n : f->block_columns;
    for (size_t first = 0; first < n; first += group)
        quantise_group(f->activations == MOE_ACTIVATIONS_F8_POW2,
                       n - first < group ? n - first : group, x + first);
}
