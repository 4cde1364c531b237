/* SPDX-License-Identifier: Apache-2.0 */
/* The values of a quantised matrix, or the form that backends take, from the bytes of its parts.
 * Pure: no I/O, any thread.
 *
 * Arithmetic is single precision: the scale first (with the scale of the matrix, if there is one),
 * then element times scale, each rounded to nearest even. The bytes are little-endian, as in the
 * file. */
#ifndef MOE_QUANT_DECODE_H
#define MOE_QUANT_DECODE_H

#include "moe/packed_matrix.h"
#include "quant/scheme.h"

#include <stddef.h>

/* Parts [MOE_QUANT_PARTS] have the shapes of moe_quant_part_shape; NULL where the matrix has no
 * such part. Row r of the matrix is row first_row + r * row_step of DATA and SCALE: others than 0
 * and 1 only for MOE_PACKED_COLUMNS, and for MOE_PACKED_ROWS without zero points and with
 * block_rows = 1. */
struct moe_quant_matrix {
    const struct moe_quant *quant;
    enum moe_scale_type scale; /* of part SCALE */
    size_t rows, columns;
    size_t first_row, row_step;
    size_t stored_rows; /* MOE_PACKED_COLUMNS: those of DATA [columns, stored_rows] and SCALE */
    const void *part[MOE_QUANT_PARTS];
};

/* Checks all that does not depend on the elements, before moe_quant_decode; scales only if the part
 * is there. Errors:
 * MOE_INVALID_ARGUMENT/TENSOR_INVALID with MOE_QUANT_* of the wrong part in `*part`: a scale that
 * is NaN, infinite or zero, or so large that values overflow; columns of other groups than column /
 * group; a shape that is not the matrix'. */
struct moe_status moe_quant_check(const struct moe_quant_matrix *m,
                                  enum moe_quant_part *part) MOE_CHECKED;
/* The same for scales first .. first + count - 1 of the part, which are at `scales`. */
struct moe_status moe_quant_check_scales(const struct moe_quant_matrix *m, const void *scales,
                                         size_t first, size_t count) MOE_CHECKED;

/* Rows [first, first + count) to `to` [count, columns]. A NaN element gives NaN. */
void moe_quant_decode(const struct moe_quant_matrix *m, size_t first, size_t count, float *to);
/* The same, rounded to BF16 (nearest even); `values` [count, columns] is scratch. */
void moe_quant_decode_bf16(const struct moe_quant_matrix *m, size_t first, size_t count,
                           float *values, uint16_t *to);

/* ---- packed: moe/packed_matrix.h ---- */

/* The format of packed matrices of a scheme with scales of this type in the file. If the files of a
 * layer have several types, `several`, it is F32. */
struct moe_weight_format moe_quant_packed_format(const struct moe_quant *q,
                                                 enum moe_scale_type scale, bool several);

/* True if the stored rows of the parts have the form of those of a packed matrix of format `f`.
 * Reads no part. */
bool moe_quant_rows_are_packed(const struct moe_quant_matrix *m, const struct moe_weight_format *f);
/* True if the parts are the arrays of a packed matrix of format `f` already: `*out` points there.
 */
bool moe_quant_is_packed(const struct moe_quant_matrix *m, const struct moe_weight_format *f,
                         struct moe_packed_matrix *out);

/* Arrays of a packed matrix, with the sizes of moe_packed_sizes. */
struct moe_quant_arrays {
    uint8_t *elements, *scales, *zeros; /* zeros: NULL without zero points */
};
/* Fills rows [first, first + count), with their scales and zero points. Values do not change. */
void moe_quant_pack(const struct moe_quant_matrix *m, const struct moe_weight_format *f,
                    const struct moe_packed_sizes *sizes, size_t first, size_t count,
                    const struct moe_quant_arrays *to);
/* The scale of the whole matrix, as moe_packed_matrix.global. */
float moe_quant_global(const struct moe_quant_matrix *m);

#endif
