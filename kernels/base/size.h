/* SPDX-License-Identifier: Apache-2.0 */
/* Checked size arithmetic. Every size that depends on input goes through here: on overflow the
 * functions return false and do not change `*out`. */
#ifndef MOE_BASE_SIZE_H
#define MOE_BASE_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool moe_size_add(size_t a, size_t b, size_t *out)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

static inline bool moe_size_mul(size_t a, size_t b, size_t *out)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

/* a * b * c */
static inline bool moe_size_mul3(size_t a, size_t b, size_t c, size_t *out)
{
    size_t ab;
    return moe_size_mul(a, b, &ab) && moe_size_mul(ab, c, out);
}

/* `n` rounded up to a multiple of `align`, a power of two. */
static inline bool moe_size_round_up(size_t n, size_t align, size_t *out)
{
    size_t sum;
    if (!moe_size_add(n, align - 1, &sum))
        return false;
    *out = sum & ~(align - 1);
    return true;
}

/* The smallest power of two >= n; n = 0 gives 1. */
static inline uint32_t moe_pow2_ceil(uint32_t n)
{
    return n <= 1 ? 1 : UINT32_C(1) << (32 - __builtin_clz(n - 1));
}

#endif
