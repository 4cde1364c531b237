/* SPDX-License-Identifier: Apache-2.0 */
/* A weight matrix in the layout of the panel kernels.
 *
 * A matrix [out, in] is cut into panels of `isa->panel` output rows; the last panel is padded with
 * zeros. A BF16 panel is [ceil(in / 2)][panel][2] of bf16. So one uint32 has two neighbouring
 * inputs of one output, and a shift or a mask widens them to fp32; an odd `in` ends with a zero. An
 * F32 panel is [in][panel]. isa.h has the panels of quantised matrices. */
#ifndef MOE_CPU_MATRIX_H
#define MOE_CPU_MATRIX_H

#include "base/status.h"
#include "cpu/compute/isa.h"

struct moe_device;

enum {
    MOE_CPU_MAX_RANK = 512,  /* of moe_cpu_matrix_merge */
    MOE_CPU_W8A8_ROWS = 180, /* of moe_cpu_matrix_parts */
};

struct moe_cpu_matrix {
    void *data; /* NULL: not uploaded */
    size_t bytes;
    size_t panel_bytes;
    uint32_t out, in;
    uint32_t panels;
    enum moe_dtype dtype;         /* MOE_DTYPE_NONE: quantised */
    struct moe_cpu_packed packed; /* of a quantised matrix */
};

/* Packs `data` (row-major, dtype `from`, any alignment) for the device's kernels. `store_as`: the
 * dtype in memory, `from` or F32. */
struct moe_status moe_cpu_matrix_pack(struct moe_device *device, uint32_t out, uint32_t in,
                                      enum moe_dtype from, enum moe_dtype store_as,
                                      const void *data, struct moe_cpu_matrix *matrix) MOE_CHECKED;
/* An empty matrix of this form, without memory: `data` is NULL. Errors: OUT_OF_MEMORY (too large).
 */
struct moe_status moe_cpu_matrix_shape(struct moe_device *device, uint32_t out, uint32_t in,
                                       enum moe_dtype dtype,
                                       struct moe_cpu_matrix *matrix) MOE_CHECKED;
/* Packs new values [out, in], rounded to the matrix's dtype, over the old ones. It is not
 * quantised. */
void moe_cpu_matrix_renew(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                          const float *data);
/* The same with base + scale * B A, summed in fp32: `base` has the same shape, A [rank,
 * in], B [out, rank], rank <= MOE_CPU_MAX_RANK. */
void moe_cpu_matrix_merge(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                          const struct moe_cpu_matrix *base, float scale, uint32_t rank,
                          const float *a, const float *b);
/* Writes the values to data [out, in]. */
void moe_cpu_matrix_read(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                         float *data);
/* The same on the calling thread only, while the device's threads may run something else. */
void moe_cpu_matrix_read_serial(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                                float *data);
/* block [rows, panel] = rows `row` .. row + rows - 1 times columns `column` .. column + panel - 1
 * in fp32; `row` and `column` are multiples of the panel. Columns past the matrix's end are 0. */
void moe_cpu_matrix_block(const struct moe_cpu_isa *isa, const struct moe_cpu_matrix *matrix,
                          uint32_t row, uint32_t rows, uint32_t column, float *block);

void moe_cpu_matrix_free(struct moe_device *device, struct moe_cpu_matrix *matrix);

/* y [rows, panel] = x [rows, in] times panel `p` transposed. */
void moe_cpu_matrix_panel(const struct moe_cpu_isa *isa, const struct moe_cpu_matrix *matrix,
                          uint32_t p, uint32_t rows, const float *x, size_t x_stride, float *y,
                          size_t y_stride);
/* A panel of a matrix, and its products y [rows, panel]; rows are y_stride apart. */
struct moe_cpu_part {
    const struct moe_cpu_matrix *matrix;
    uint32_t panel;
    float *y;
};

/* The same for one or two panels, of matrices with the same number of inputs. In W8A8 (`x` has
 * scales), rows <= MOE_CPU_W8A8_ROWS, and each matrix is quantised, or packed.c has kept its values
 * in F32. */
void moe_cpu_matrix_parts(const struct moe_cpu_isa *isa, uint32_t count,
                          const struct moe_cpu_part *parts, uint32_t rows,
                          const struct moe_cpu_rows *x, size_t y_stride);

#endif
