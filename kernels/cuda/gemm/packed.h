/* SPDX-License-Identifier: Apache-2.0 */
/* Places quantised weights in device memory in the order in which the tensor cores take them.
 *
 * In a block of a packed matrix (cuda/plan/packing.h) elements lie in the order in which threads
 * hold the first operand of a multiplication: one 16-byte load has what a thread needs for 32
 * columns (8-bit elements) or 64 (4-bit). Every 32-bit word has elements of one row only, so gate
 * and up can be placed one after the other. */
#ifndef MOE_CUDA_PACKED_H
#define MOE_CUDA_PACKED_H

#include "base/status.h"
#include "cuda/plan/packing.h"
#include "moe/packed_matrix.h"
#include "moe/types.h"

#include <stddef.h>

struct CUstream_st;

#ifdef __cplusplus
extern "C" {
#endif

/* One weight of an entry: all of its rows, or gate or up. */
struct moe_cuda_packed_weight {
    enum moe_cuda_packing packing;
    void *entry; /* device, 16-byte aligned */
    uint32_t rows, columns;
    bool interleaved; /* row i is stored as row i / 8 * 16 + i % 8 + offset, else as row i */
    uint32_t offset;  /* gate 0, up 8 */
    float global;     /* MOE_SCALE_E4M3: what the scales are multiplied by */
    uint32_t *wrong; /* device; becomes 1 if a block cannot hold an element (NaN), a scale or a zero
                        point (above 16). Scales: E8M0 is at most 2^65 where it multiplies
                        operands, E4M3 is positive, INT4's are at most 2^27 */
};

/* All enqueue, and place `count` rows from row `first` on. src: device, 4-byte aligned; of these
 * rows on. Elements and scales must be placed, zero points if the format has them. */

/* Elements as in moe/packed_matrix.h. */
struct moe_status moe_cuda_packed_place(const struct moe_cuda_packed_weight *w, const void *src,
                                        uint32_t first, uint32_t count,
                                        struct CUstream_st *stream) MOE_CHECKED;

/* Scales as in moe/packed_matrix.h, of this format; rows of scales. */
struct moe_status moe_cuda_packed_scale(const struct moe_cuda_packed_weight *w,
                                        const struct moe_weight_format *format, const void *src,
                                        uint32_t first, uint32_t count,
                                        struct CUstream_st *stream) MOE_CHECKED;

/* The same for zero points. */
struct moe_status moe_cuda_packed_zeros(const struct moe_cuda_packed_weight *w,
                                        const struct moe_weight_format *format, const void *src,
                                        uint32_t first, uint32_t count,
                                        struct CUstream_st *stream) MOE_CHECKED;

/* Enqueues: the values of elements [first, first + n) of a weight, counted along its rows, to `to`
 * on the device, as F32 or rounded once to BF16. `global` and `wrong` are unused. */
struct moe_status moe_cuda_packed_read(const struct moe_cuda_packed_weight *w, size_t first,
                                       size_t n, enum moe_dtype dtype, void *to,
                                       struct CUstream_st *stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
