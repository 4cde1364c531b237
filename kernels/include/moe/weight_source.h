/* SPDX-License-Identifier: Apache-2.0 */
/* Where the bytes of a weight come from when they are not in memory: a piece of a file, as a rule.
 * Whoever takes the weight reads it straight to where it wants it, in pieces, in any order. */
#ifndef MOE_WEIGHT_SOURCE_H
#define MOE_WEIGHT_SOURCE_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

struct moe_weight_source {
    /* Writes the `bytes` bytes of `ctx` from `at` on to `to`. Any number of threads at once. */
    struct moe_status (*read)(const void *ctx, uint64_t at, size_t bytes, void *to);
    const void *ctx;
    uint64_t at; /* where the weight begins */
};

#endif
