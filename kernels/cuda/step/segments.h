/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a step's segments (moe/backend.h) into its tensors, and back: one kernel each way. The
 * addresses may be pinned or registered host memory, memory of this device, or imported memory of
 * another one: loads and stores reach all of them. */
#ifndef MOE_CUDA_SEGMENTS_H
#define MOE_CUDA_SEGMENTS_H

#include "cuda/core/check.h"
#include "cuda/session/control.h"
#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One that has tokens. */
struct moe_cuda_segment {
    struct moe_step_segment at;
    uint32_t first; /* its first token in the step */
    uint32_t bad;   /* 0; the scatter stores 1 if a token of it is not MOE_TOKEN_OK */
};

/* How far a scatter is, in device memory. It begins with zeros. */
struct moe_cuda_scatter {
    uint32_t arrived; /* blocks with rows that have left */
    uint32_t failed;  /* the step has not succeeded */
};

/* The step's tensors in device memory, as in struct moe_step_args. */
struct moe_cuda_segment_rows {
    struct moe_cuda_segment *segments; /* [count], by token; device memory */
    uint32_t count, tokens;            /* both at least 1 */
    uint32_t top_k;
    bool modes;     /* gather modes, ids and weights too */
    bool completes; /* some have completions, which the scatter stores; it uses the next two */
    struct moe_cuda_scatter *scatter;
    const struct moe_cuda_step_outcome *outcome; /* of the step, where its last stage stores it */
    size_t row_bytes;                            /* of x and y */
    void *x, *y;
    uint8_t *mode, *state;
    int32_t *ids_in, *ids;
    float *weights_in, *weights;
};

/* Copies the segments of a step that have tokens to `out` [args->segment_count]; returns how many
 * these are. `*completes`: one of them has a completion. */
uint32_t moe_cuda_segments_list(const struct moe_step_args *args, struct moe_cuda_segment *out,
                                bool *completes);

/* What the host gives a step's kernels; it ends with the segments. */
struct moe_cuda_segments_upload {
    const void *from; /* memory of the host */
    void *to;         /* device memory */
    size_t bytes;     /* a multiple of 8 */
    size_t segments;  /* offset of the first segment */
};

/* Enqueues the upload; then x and, with `modes`, modes, ids_in and weights_in of all segments, into
 * the tensors. A small upload is an argument of the kernel: a copy would cost some microseconds. */
struct moe_status moe_cuda_segments_gather(const struct moe_cuda_segment_rows *rows,
                                           const struct moe_cuda_segments_upload *upload,
                                           cudaStream_t stream) MOE_CHECKED;
/* Enqueues y, ids, weights and token states, to those segments that want them; then completions. */
struct moe_status moe_cuda_segments_scatter(const struct moe_cuda_segment_rows *rows,
                                            cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
