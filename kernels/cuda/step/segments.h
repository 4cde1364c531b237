/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a step's segments (moe/backend.h) into its tensors, and back: one kernel each way. The
 * addresses may be pinned or registered host memory, memory of this device, or imported memory of
 * another one: loads and stores reach all of them. */
#ifndef MOE_CUDA_SEGMENTS_H
#define MOE_CUDA_SEGMENTS_H

#include "cuda/core/check.h"
#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One that has tokens. */
struct moe_cuda_segment {
    struct moe_step_segment at;
    uint32_t first; /* its first token in the step */
};

/* The step's tensors in device memory, as in struct moe_step_args. */
struct moe_cuda_segment_rows {
    const struct moe_cuda_segment *segments; /* [count], by token; device memory */
    uint32_t count, tokens;                  /* both at least 1 */
    uint32_t top_k;
    bool modes;       /* gather modes, ids and weights too */
    size_t row_bytes; /* of x and y */
    void *x, *y;
    uint8_t *mode, *state;
    int32_t *ids_in, *ids;
    float *weights_in, *weights;
};

/* Copies the segments of a step that have tokens to `out` [args->segment_count]; returns how many
 * these are. */
uint32_t moe_cuda_segments_list(const struct moe_step_args *args, struct moe_cuda_segment *out);

/* Enqueues x and, with `modes`, modes, ids_in and weights_in of all segments, into the tensors. */
struct moe_status moe_cuda_segments_gather(const struct moe_cuda_segment_rows *rows,
                                           cudaStream_t stream) MOE_CHECKED;
/* Enqueues y, ids, weights and token states, to those segments that want them. */
struct moe_status moe_cuda_segments_scatter(const struct moe_cuda_segment_rows *rows,
                                            cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
