/* SPDX-License-Identifier: Apache-2.0 */
/* Reads little-endian records from bytes of another process or of a file, never beyond their end.
 */
#ifndef MOE_BASE_BYTES_H
#define MOE_BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What is left to read; the memory is borrowed. */
struct moe_bytes {
    const uint8_t *at;
    size_t left;
};

/* The next `count` bytes; NULL, and nothing is taken, if fewer are left. */
static inline const uint8_t *moe_bytes_take(struct moe_bytes *b, size_t count)
{
    if (count > b->left)
        return NULL;
    const uint8_t *taken = b->at;
    b->at += count;
    b->left -= count;
    return taken;
}

/* The next four bytes as a number. False, and `*value` stays, if fewer are left. */
static inline bool moe_bytes_take_u32(struct moe_bytes *b, uint32_t *value)
{
    const uint8_t *at = moe_bytes_take(b, 4);
    if (at != NULL)
        *value =
            (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    return at != NULL;
}

#endif
