/* SPDX-License-Identifier: Apache-2.0 */
/* Backward passes on a GPU: whole passes, their parts, and the optimizer step; members of struct
 * moe_training. The session's executor runs a whole pass (executor.h) and waits inside it for the
 * device and for the peers. moe_cuda_backward_enqueue waits for neither. */
#ifndef MOE_CUDA_BACKWARD_H
#define MOE_CUDA_BACKWARD_H

#include "cuda/session/session.h"
#include "cuda/training/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the session was joined for training. */
struct moe_status moe_cuda_backward_supported(const struct moe_session *session) MOE_CHECKED;

struct moe_status moe_cuda_backward_enqueue(struct moe_session *session,
                                            const struct moe_backward_args *args,
                                            struct moe_step **out) MOE_CHECKED;
struct moe_status moe_cuda_optimizer_step(struct moe_session *session,
                                          struct moe_trainer *const *trainers, size_t count,
                                          const struct moe_optimizer_args *args,
                                          struct moe_optimizer_result *result) MOE_CHECKED;
struct moe_status moe_cuda_optimizer_finish(struct moe_trainer *const *trainers, size_t count,
                                            const struct moe_optimizer_args *args, double squares,
                                            struct moe_optimizer_result *result) MOE_CHECKED;

/* Dispatch of rows of x and dy, enqueued: x's rows in *rows and dy's in *dy_rows, all in device
 * memory. Both have a stride of 2H elements and lie next to each other until moe_cuda_x_dy_split.
 * `flags` goes into the head with the dtype: if flags differ between slots, all slots refuse.
 * token_state as in struct moe_cuda_batch. */
struct moe_cuda_x_dy_rows {
    struct moe_layer *layer;
    enum moe_dtype dtype;
    uint32_t bucket, tokens, flags;
    const void *x, *dy;   /* [T, H] */
    const int32_t *ids;   /* [T, K]; no zero experts */
    const float *weights; /* [T, K] */
    const uint8_t *token_state;
    uint32_t dispatch_processors, combine_processors; /* as in struct moe_cuda_batch */
};
struct moe_status moe_cuda_x_dy_dispatch(struct moe_session *session,
                                         const struct moe_cuda_x_dy_rows *batch,
                                         struct moe_rows *rows, const void **dy_rows) MOE_CHECKED;
/* Scratch for moe_cuda_x_dy_split; may be taken before a peer waits. */
struct moe_status moe_cuda_x_dy_reserve_split(struct moe_session *session,
                                              const struct moe_cuda_x_dy_rows *batch) MOE_CHECKED;
/* Enqueued: separates x's rows from dy's, each with a stride of H elements. */
struct moe_status moe_cuda_x_dy_split(struct moe_session *session,
                                      const struct moe_cuda_x_dy_rows *batch, struct moe_rows *rows,
                                      const void **dy_rows) MOE_CHECKED;
/* Enqueued on `stream`: dx_rows [rows, H + MOE_CUDA_WEIGHT_COLUMNS] f32, with the last columns
 * written here; *combined [T, H + MOE_CUDA_WEIGHT_COLUMNS], from scratch. */
struct moe_status moe_cuda_x_dy_combine(struct moe_session *session,
                                        const struct moe_cuda_x_dy_rows *batch, float *dx_rows,
                                        const float *dweight_rows, float **combined,
                                        cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
