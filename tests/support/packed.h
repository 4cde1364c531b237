/* SPDX-License-Identifier: Apache-2.0 */
/* Random quantised matrices (moe/packed_matrix.h) for tests of kernels and backends. */
#ifndef MOE_TEST_SUPPORT_PACKED_H
#define MOE_TEST_SUPPORT_PACKED_H

#include "moe/packed_matrix.h"
#include "support/random.h"

/* A format of this encoding, with blocks, scales and zero points as checkpoints have them. Matrices
 * with an even number of columns may have it. */
struct moe_weight_format random_format(struct rng *r, enum moe_encoding encoding);

struct random_packed {
    struct moe_packed_matrix matrix;
    void *elements, *scales;
    uint8_t *zeros;
};

/* Values are of magnitude `size`, finite, and never all zero. Free it with free_packed. */
struct random_packed random_packed(struct rng *r, const struct moe_weight_format *f, size_t rows,
                                   size_t columns, float size);
void free_packed(struct random_packed *p);

/* "F8E4M3, blocks 128 x 128, F32" in a buffer that the next call overwrites. */
const char *format_text(const struct moe_weight_format *f);

#endif
