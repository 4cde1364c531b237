/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that depend on the instruction set: one table per instruction set.
 *
 * isa_*.c are compiled once per table; the rest of the backend only for the
 * baseline. Weights are packed for the panel width of the table that reads them (matrix.h). All
 * arithmetic is fp32. The bits of a row's result do not depend on the number of rows in a call. */
#ifndef MOE_CPU_ISA_H
#define MOE_CPU_ISA_H

#include "common/training_rules.h"
#include "moe/packed_matrix.h"

enum { MOE_CPU_MAX_PANEL = 32 };

/* A quantised matrix in panels (packed.h). A panel has, from its start:
 *
 *   scales    [blocks] F32, if all its rows share them; else [blocks][panel] of type `scale`
 *   zeros     [blocks][panel] bytes, if `zero_points`
 *   elements  [words][panel] uint16: two bytes of one row of elements, so two inputs of F8E4M3 or
 *             four of E2M1 and INT4. Zero after the last input and in rows past the matrix's end.
 *             Output row r is number r in a row of words, of E2M1 and INT4 number `place[r]` of
 *             moe_cpu_isa
 *
 * An input's weight is scale * (element - zero point). */
struct moe_cpu_packed {
    enum moe_encoding encoding; /* MOE_ENC_NONE: the matrix is not quantised */
    enum moe_scale_type scale;
    bool shared_scales, zero_points, global_divides;
    float global;
    uint32_t block;             /* inputs of a block; the last may have fewer */
    size_t scales_at, zeros_at; /* bytes from the panel's start */
    size_t elements_at;         /* the same; a multiple of 64 */
};

/* Inputs in one uint16 of a row. */
static inline uint32_t moe_cpu_word_inputs(enum moe_encoding e)
{
    return e == MOE_ENC_F8E4M3 ? 2 : 4;
}

/* A panel of a quantised matrix, and its products: y [rows, panel], rows are y_stride apart. */
struct moe_cpu_panel {
    const struct moe_cpu_packed *packed;
    const void *data;
    float *y;
};

/* Rows of a product. */
struct moe_cpu_rows {
    const float *x; /* [rows, k], rows are `stride` apart */
    size_t stride;
    /* W8A8: `quantise` has made x, and the scales [rows, groups]; groups are the matrix's blocks of
     * `group` inputs, the last may have fewer. NULL: x are the rows themselves. */
    const float *scale;
    uint32_t group, groups;
};

struct moe_cpu_isa {
    const char *name;                 /* "avx512", for people */
    uint32_t panel;                   /* output columns of one weight panel, <= MOE_CPU_MAX_PANEL */
    uint8_t place[MOE_CPU_MAX_PANEL]; /* of each output in a row of words: see moe_cpu_packed */

    /* y[r * y_stride + c] = sum over k of x[r * x_stride + k] * w(c, k), for r < rows and all
     * c < panel. `w` is one packed panel (matrix.h); strides are in elements. */
    void (*panel_bf16)(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                       float *y, size_t y_stride);
    void (*panel_f32)(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                      float *y, size_t y_stride);
    /* The same added to y: the sum over k first, then the addition. */
    void (*panel_f32_add)(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,
                          float *y, size_t y_stride);

    /* The same with one or two panels of quantised matrices. A block's sum is one chain over its
     * inputs, times the block's scale; W8A8 of moe/weight_format.h if `x` has scales. Two panels
     * are of matrices with the same encoding, block, and presence of zero points; with few rows
     * they take less time together. */
    void (*panels_packed)(uint32_t count, const struct moe_cpu_panel *panels, uint32_t rows,
                          const struct moe_cpu_rows *x, uint32_t k, size_t y_stride);
    /* to [n][panel] = the weights of inputs first .. first + n - 1; `first` is a multiple of 4. */
    void (*unpack)(const struct moe_cpu_packed *packed, const void *panel, uint32_t first,
                   uint32_t n, float *to);
    /* Rows to a panel: to [ceil(bytes / size)][panel] words of `size` bytes (1, 2 or 4). Word i of
     * number r is the i-th of rows[r] [bytes], any alignment; zero past the row's end, and for a
     * row that is NULL. Returns whether a byte, taken as F8E4M3, is NaN. */
    bool (*interleave)(uint32_t size, size_t bytes, const void *const *rows, void *to);

    /* to[i] = scale * from[i]; `from` is F32 or BF16. */
    void (*widen)(enum moe_dtype dtype, size_t n, const void *from, float scale, float *to);

    /* Quantises a row x [n] in place, in groups of `group` inputs: x becomes the values q of
     * moe/weight_format.h, and scale [groups] their s, with `pow2` a power of two. */
    void (*quantise)(bool pow2, uint32_t group, size_t n, float *x, float *scale);

    /* The same to bytes of F8E4M3, from a row of F32 or BF16. */
    void (*quantise_bytes)(enum moe_dtype dtype, bool pow2, uint32_t group, size_t n,
                           const void *from, uint8_t *to, float *scale);
    /* to[i] = the value of a byte of F8E4M3. */
    void (*widen_bytes)(size_t n, const uint8_t *from, float *to);

    /* gate[i] = activation(gate[i], up[i]) for i < n; a NaN input gives NaN. Not RELU2. */
    void (*activate)(enum moe_activation activation, float limit, float alpha, size_t n,
                     float *gate, const float *up);
    /* The same without a gate: up[i] = MOE_ACT_RELU2 of up[i]. */
    void (*activate_ungated)(size_t n, float *up);

    /* Of a = activation(gate, up), weighted by `weight`, with the cotangent `hidden` (before its
     * weight): gate[i] and up[i] become weight * hidden[i] times the derivative by gate and up,
     * hidden[i] becomes a[i]. Returns the sum of hidden[i] * a[i], in an order that depends on n
     * alone. */
    float (*activate_backward)(enum moe_activation activation, float limit, float alpha, size_t n,
                               float weight, float *gate, float *up, float *hidden);

    /* One optimizer step of n elements (moe_train_adamw, moe_train_sgd); gradients become 0. m2 is
     * read for AdamW only. */
    void (*optimize)(const struct moe_train_update *update, size_t n, float *value, float *grad,
                     float *m1, float *m2);
};

/* The tables of this build that this processor can run, slowest first; `*count` >= 1. */
const struct moe_cpu_isa *const *moe_cpu_isa_list(uint32_t *count);

#endif
