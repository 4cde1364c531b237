/* SPDX-License-Identifier: Apache-2.0 */
/* Comparison of secrets. */
#ifndef MOE_BASE_SECRET_H
#define MOE_BASE_SECRET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True if the `bytes` bytes at `a` and `b` are equal. The time does not depend on the place of the
 * first difference, so a caller that guesses learns nothing from it. Any thread. */
static inline bool moe_secret_equal(const void *a, const void *b, size_t bytes)
{
    const uint8_t *p = a, *q = b;
    unsigned different = 0;
    for (size_t i = 0; i < bytes; i++)
        different |= (unsigned)(p[i] ^ q[i]);
    return different == 0;
}

#endif
