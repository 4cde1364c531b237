/* SPDX-License-Identifier: Apache-2.0 */
/* The source of a weight that is not in memory: usually a piece of a file. The backend reads it
 * directly to the destination, in pieces, in any order. */
#ifndef MOE_WEIGHT_SOURCE_H
#define MOE_WEIGHT_SOURCE_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct moe_weight_source {
    /* Copies `bytes` bytes of `ctx`, from offset `at` on, to `to`. Any number of threads at once.
     */
    struct moe_status (*read)(const void *ctx, uint64_t at, size_t bytes, void *to);
    const void *ctx;
    uint64_t at; /* where the weight begins */
};

/* The same for a quantised matrix without zero points: its arrays as in moe/packed_matrix.h. Reads
 * begin and end with rows of elements or of scales. */
struct moe_packed_source {
    struct moe_weight_source elements, scales;
    float global;  /* with MOE_SCALE_E4M3 */
    bool by_turns; /* of gate and up at once: rows 2 i and 2 i + 1 are row i of gate and of up, and
                      each row has separate scales */
};

#endif
