/* SPDX-License-Identifier: Apache-2.0 */
/* The values of a quantised matrix, from the bytes of its parts. Pure: no I/O, any thread.
 *
 * Arithmetic is single precision: the scale first (with the scale of the matrix, if there is one),
 * then element times scale, each rounded to nearest even. The bytes are little-endian, as in the
 * file. */
#ifndef MOE_QUANT_DECODE_H
#define MOE_QUANT_DECODE_H

#include "quant/scheme.h"

#include <stddef.h>

/* Parts [MOE_QUANT_PARTS] have the shapes of moe_quant_part_shape; NULL where the matrix has no
 * such part. Row r of the matrix is row first_row + r * row_step of DATA and SCALE: others than 0
 * and 1 only for MOE_PACKED_ROWS without zero points and with block_rows = 1. */
struct moe_quant_matrix {
    const struct moe_quant *quant;
    enum moe_scale_type scale; /* of part SCALE */
    size_t rows, columns;
    size_t first_row, row_step;
    const void *part[MOE_QUANT_PARTS];
};

/* Checks all that does not depend on the elements, before moe_quant_decode. Errors:
 * MOE_INVALID_ARGUMENT/TENSOR_INVALID with MOE_QUANT_* of the wrong part in `*part`: a scale that
 * is NaN, infinite or zero, or so large that values overflow; columns of other groups than column /
 * group; a shape that is not the matrix'. */
struct moe_status moe_quant_check(const struct moe_quant_matrix *m,
                                  enum moe_quant_part *part) MOE_CHECKED;

/* Rows [first, first + count) to `to` [count, columns]. A NaN element gives NaN. */
void moe_quant_decode(const struct moe_quant_matrix *m, size_t first, size_t count, float *to);
/* The same, rounded to BF16 (nearest even); `values` [count, columns] is scratch. */
void moe_quant_decode_bf16(const struct moe_quant_matrix *m, size_t first, size_t count,
                           float *values, uint16_t *to);

#endif
