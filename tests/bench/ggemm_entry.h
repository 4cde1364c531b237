/* SPDX-License-Identifier: Apache-2.0 */
/* The grouped products of kernels/cuda as functions with plain arguments, for ggemm_vs_torch.py.
 *
 * A list names the arguments of a function once. The prototype, the code that fills the product's
 * struct and the text from moe_entry_signatures all come from that list. The Python side builds its
 * types from the text, so both sides agree about order, type and number.
 *
 * Functions return NULL or an error text, valid until the thread's next call. */
#ifndef MOE_BENCH_GGEMM_ENTRY_H
#define MOE_BENCH_GGEMM_ENTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *pointer; /* device memory unless stated otherwise */
typedef const char *text;

/* struct moe_cuda_ggemm, field by field */
#define MOE_GGEMM_FIELDS(X)                                                                        \
    X(int, tile)                                                                                   \
    X(bool, gated)                                                                                 \
    X(bool, relu2)                                                                                 \
    X(bool, back)                                                                                  \
    X(int, packing)                                                                                \
    X(uint32_t, experts)                                                                           \
    X(uint32_t, row_capacity)                                                                      \
    X(uint32_t, n)                                                                                 \
    X(uint32_t, k)                                                                                 \
    X(pointer, start)                                                                              \
    X(pointer, count)                                                                              \
    X(pointer, x)                                                                                  \
    X(uint32_t, x_stride)                                                                          \
    X(pointer, x_scales)                                                                           \
    X(pointer, weights)                                                                            \
    X(bool, has_bias)                                                                              \
    X(pointer, row_weight)                                                                         \
    X(int, weighting)                                                                              \
    X(int, activation)                                                                             \
    X(float, limit)                                                                                \
    X(float, alpha)                                                                                \
    X(int, out_dtype)                                                                              \
    X(int, out_activations)                                                                        \
    X(pointer, out)                                                                                \
    X(uint32_t, out_stride)                                                                        \
    X(pointer, pre)                                                                                \
    X(pointer, began)                                                                              \
    X(uint32_t, processors)

/* struct moe_cuda_wgrad, field by field */
#define MOE_WGRAD_FIELDS(X)                                                                        \
    X(uint32_t, experts)                                                                           \
    X(uint32_t, row_capacity)                                                                      \
    X(uint32_t, n)                                                                                 \
    X(uint32_t, k)                                                                                 \
    X(pointer, start)                                                                              \
    X(pointer, count)                                                                              \
    X(pointer, dy)                                                                                 \
    X(pointer, x)                                                                                  \
    X(uint32_t, dy_stride)                                                                         \
    X(uint32_t, x_stride)                                                                          \
    X(bool, accumulate)                                                                            \
    X(pointer, dw)                                                                                 \
    X(uint32_t, processors)

/* struct moe_cuda_quantise, field by field */
#define MOE_QUANTISE_FIELDS(X)                                                                     \
    X(int, dtype)                                                                                  \
    X(pointer, x)                                                                                  \
    X(pointer, weight)                                                                             \
    X(uint32_t, experts)                                                                           \
    X(uint32_t, row_capacity)                                                                      \
    X(uint32_t, columns)                                                                           \
    X(pointer, start)                                                                              \
    X(pointer, count)                                                                              \
    X(bool, whole_rows)                                                                            \
    X(bool, pow2)                                                                                  \
    X(pointer, quantised)                                                                          \
    X(uint32_t, row_bytes)                                                                         \
    X(pointer, values)                                                                             \
    X(pointer, began)                                                                              \
    X(uint32_t, processors)

/* Arguments of a function: L for the last one, X for the others. */
#define MOE_ENTRY_GGEMM(X, L)    MOE_GGEMM_FIELDS(X) L(pointer, stream)
#define MOE_ENTRY_WGRAD(X, L)    MOE_WGRAD_FIELDS(X) L(pointer, stream)
#define MOE_ENTRY_QUANTISE(X, L) MOE_QUANTISE_FIELDS(X) L(pointer, stream)
/* Bytes of the buffer, and the offset of its scales. */
#define MOE_ENTRY_QUANTISED_BYTES(X, L)  X(uint32_t, rows) L(uint32_t, columns)
#define MOE_ENTRY_QUANTISED_OFFSET(X, L) X(uint32_t, rows) L(uint32_t, columns)
/* scratch: device memory of moe_entry_cublas_bytes */
#define MOE_ENTRY_CUBLAS(X, L) MOE_GGEMM_FIELDS(X) X(pointer, scratch) L(pointer, stream)
#define MOE_ENTRY_CUBLAS_BYTES(X, L)                                                               \
    X(bool, gated) X(int, out_dtype) X(uint32_t, row_capacity) L(uint32_t, n)
/* out: host memory of WEIGHTS_BYTES (a constant) bytes */
#define MOE_ENTRY_DESCRIBE(X, L)                                                                   \
    X(pointer, data) X(uint32_t, experts) X(uint32_t, rows) X(uint32_t, columns) L(pointer, out)
/* struct moe_cuda_packed_weight, field by field: one matrix, or gate (interleaved, offset 0) or up
 * (8). */
#define MOE_PACKED_FIELDS(X)                                                                       \
    X(int, packing)                                                                                \
    X(pointer, entry)                                                                              \
    X(uint32_t, rows)                                                                              \
    X(uint32_t, columns)                                                                           \
    X(bool, interleaved)                                                                           \
    X(uint32_t, offset)                                                                            \
    X(float, global)                                                                               \
    X(pointer, wrong)
/* A number format. */
#define MOE_FORMAT_FIELDS(X, L)                                                                    \
    X(int, encoding)                                                                               \
    X(uint32_t, block_rows) X(uint32_t, block_columns) X(int, scale) L(bool, zero_points)
#define MOE_ENTRY_PACKED_PLACE(X, L) MOE_PACKED_FIELDS(X) X(pointer, src) L(pointer, stream)
#define MOE_ENTRY_PACKED_SCALE(X, L)                                                               \
    MOE_PACKED_FIELDS(X) MOE_FORMAT_FIELDS(X, X) X(pointer, src) L(pointer, stream)
#define MOE_ENTRY_PACKED_ZEROS(X, L) MOE_ENTRY_PACKED_SCALE(X, L)
#define MOE_ENTRY_PACKING_OF(X, L)   MOE_FORMAT_FIELDS(X, X) L(int, activations)
#define MOE_ENTRY_PACKED_BYTES(X, L) X(int, packing) X(size_t, rows) L(size_t, columns)
#define MOE_ENTRY_CHOOSE_TILE(X, L)                                                                \
    X(uint32_t, bucket)                                                                            \
    X(uint32_t, slots)                                                                             \
    X(uint32_t, top_k) X(uint32_t, experts) X(uint32_t, n) X(uint32_t, k) L(uint32_t, processors)
#define MOE_ENTRY_TILE_NAME(X, L) L(int, tile)  /* NULL after the last one */
#define MOE_ENTRY_CONSTANT(X, L)  L(text, name) /* -1 for an unknown name */

/* F(result, name, list) for each function moe_entry_NAME. */
#define MOE_ENTRIES(F)                                                                             \
    F(text, ggemm, MOE_ENTRY_GGEMM)                                                                \
    F(text, cublas, MOE_ENTRY_CUBLAS)                                                              \
    F(size_t, cublas_bytes, MOE_ENTRY_CUBLAS_BYTES)                                                \
    F(text, wgrad, MOE_ENTRY_WGRAD)                                                                \
    F(text, quantise, MOE_ENTRY_QUANTISE)                                                          \
    F(size_t, quantised_bytes, MOE_ENTRY_QUANTISED_BYTES)                                          \
    F(size_t, quantised_offset, MOE_ENTRY_QUANTISED_OFFSET)                                        \
    F(text, describe, MOE_ENTRY_DESCRIBE)                                                          \
    F(text, packed_place, MOE_ENTRY_PACKED_PLACE)                                                  \
    F(text, packed_scale, MOE_ENTRY_PACKED_SCALE)                                                  \
    F(text, packed_zeros, MOE_ENTRY_PACKED_ZEROS)                                                  \
    F(int, packing_of, MOE_ENTRY_PACKING_OF)                                                       \
    F(size_t, packed_bytes, MOE_ENTRY_PACKED_BYTES)                                                \
    F(int, choose_packed_tile, MOE_ENTRY_CHOOSE_TILE)                                              \
    F(int, choose_tile, MOE_ENTRY_CHOOSE_TILE)                                                     \
    F(text, tile_name, MOE_ENTRY_TILE_NAME)                                                        \
    F(int, constant, MOE_ENTRY_CONSTANT)

#define MOE_ENTRY_PARAMETER(type, name) type name,
#define MOE_ENTRY_LAST(type, name)      type name
#define MOE_ENTRY_PROTOTYPE(result, name, list)                                                    \
    result moe_entry_##name(list(MOE_ENTRY_PARAMETER, MOE_ENTRY_LAST))
#define MOE_ENTRY_DECLARE(result, name, list) MOE_ENTRY_PROTOTYPE(result, name, list);
MOE_ENTRIES(MOE_ENTRY_DECLARE)

/* One line for each function: "text ggemm int tile, bool gated, ..., pointer stream". */
text moe_entry_signatures(void);

#endif
