/* SPDX-License-Identifier: Apache-2.0 */
/* Narrow number formats to single precision, which is exact; and rounding to F8E4M3. */
#ifndef MOE_NUMBERS_H
#define MOE_NUMBERS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline float moe_float_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* IEEE 754 half; a NaN keeps its payload. */
static inline float moe_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31) /* infinity, NaN */
        return moe_float_of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0)
        return moe_float_of_bits(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
    if (mantissa == 0)
        return moe_float_of_bits(sign);
    /* Subnormal: shift the leading one up to its implicit place. */
    uint32_t shift = (uint32_t)__builtin_clz(mantissa) - 21;
    return moe_float_of_bits(sign | (127 - 14 - shift) << 23 | (mantissa << shift & 0x3ff) << 13);
}

/* The bits of the magnitude in place of a single's are 2^-120 times the value, also if it is
 * subnormal. No branch but that of NaN, so that compilers make vectors of it. */
static inline float moe_e4m3_to_f32(uint8_t b)
{
    uint32_t magnitude = b & 0x7f, sign = (uint32_t)(b & 0x80) << 24;
    float f = moe_float_of_bits(sign | magnitude << 20) * 0x1p120f;
    return magnitude == 0x7f ? moe_float_of_bits(sign | 0x7fc00000) : f;
}

/* The byte of a value of F8E4M3; a NaN becomes 0x7f or 0xff. No branch, as above. */
static inline uint8_t moe_e4m3_byte(float value)
{
    float small = value * 0x1p-120f;
    uint32_t bits;
    memcpy(&bits, &small, sizeof bits);
    uint32_t magnitude = bits >> 20 & 0x7ff;
    magnitude = magnitude > 0x7f ? 0x7f : magnitude;
    return (uint8_t)((bits >> 24 & 0x80) | magnitude);
}

/* The scale of a group of activations with this largest magnitude (weight_format.h). */
static inline float moe_e4m3_scale(float largest, bool pow2)
{
    float s = (largest > 1e-10f ? largest : 1e-10f) / 448.0f;
    if (!pow2 || !(s < 0x1p127f)) /* above, no power of two is finite */
        return s;
    uint32_t bits;
    memcpy(&bits, &s, sizeof bits);
    return moe_float_of_bits((bits + 0x007fffff) & 0x7f800000);
}

/* The value of F8E4M3 nearest to `v`, ties to even; at most +-448. NaN stays NaN. Adding and
 * subtracting 1.5 * 2^23 steps of the format rounds to a multiple of a step. At |v| >= 2^-6 the
 * step is 2^-3 times the power of two at or below |v|, and below 2^-6 it is 2^-9. No branch, so
 * that compilers make vectors of it. */
static inline float moe_round_to_e4m3(float v)
{
    uint32_t bits, least = (uint32_t)(127 - 6) << 23;
    memcpy(&bits, &v, sizeof bits);
    uint32_t power = bits & 0x7f800000;
    power = power < least ? least : power;
    power = power > 0x7f800000 - (20u << 23) ? 0x7f800000 - (20u << 23) : power; /* no overflow */
    float magic = moe_float_of_bits((power + (20u << 23)) | 0x00400000);
    float q = (v + magic) - magic;
    q = q > 448.0f ? 448.0f : q;
    return q < -448.0f ? -448.0f : q;
}

/* 2^(b - 127): 0 is 2^-127, a subnormal; 255 is NaN. */
static inline float moe_e8m0_to_f32(uint8_t b)
{
    return moe_float_of_bits(b == 255 ? 0x7fc00000 : b == 0 ? 0x00400000 : (uint32_t)b << 23);
}

/* The low four bits. */
static inline float moe_e2m1_to_f32(uint8_t b)
{
    static const float values[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                     -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return values[b & 15];
}

#endif
