/* SPDX-License-Identifier: Apache-2.0 */
/* Prepare, dispatch and combine on GPUs: tokens to the slots of their experts and back, through the
 * windows, as moe/window.h lays it out. Everything is enqueued; counts stay on the device. In a
 * session whose rows travel over a network (ep_net.h), calls that enqueue come from the comm
 * thread's thread, and the stream is the device's compute stream and does not capture. Passes of
 * pairs are the exception there: their calls come from any other thread, after
 * moe_cuda_session_catch_up, have the comm thread do what concerns the peers, and return when all
 * that they send has come.
 *
 * A pass is prepare, dispatch, combine, in this order, on one stream; all live slots must make the
 * same passes. A pass may end before combine. A stream that captures is as good as any: what was
 * captured may be launched as often as moe_cuda_ep_count_step is called, with any layer of the
 * same shape in the step parameters. */
#ifndef MOE_CUDA_EP_H
#define MOE_CUDA_EP_H

#include "cuda/layer/step_params.h"
#include "cuda/session/session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One slot's part of a pass. All pointers are device memory. */
struct moe_cuda_batch {
    const struct moe_layer
        *layer; /* for its shape; the step parameters name the layer that is run */
    enum moe_dtype dtype;
    uint32_t bucket;
    const struct moe_cuda_step_params *params;
    bool x_dy_rows;             /* a backward pass: rows of 2H, x and dy side by side */
    const void *x;              /* [T, H] or [T, 2H] */
    const int32_t *ids;         /* [T, K]; < 0: this k is not routed; >= E: zero expert */
    const float *weights;       /* [T, K] */
    const uint8_t *token_state; /* [T] enum moe_token_state, or NULL = all MOE_TOKEN_OK */
    uint64_t *began; /* [MOE_STAGE_COUNT + 1] gets the times when prepare, dispatch and combine
                        began and, last, when combine ended; or NULL */
    /* Most multiprocessors that dispatch, and combine, may take; 0 = all. For callers that run
     * something else beside them, which must leave that many free sooner or later: a kernel of a
     * pass waits until all of its CTAs are there. Slots may choose differently, and results are the
     * same bits. Fewer than MOE_CUDA_EP_FEWEST count as that many; without meaning over a network.
     */
    uint32_t dispatch_processors, combine_processors;
};

/* Dispatch and combine run on no fewer multiprocessors (or all, where there are fewer). */
enum { MOE_CUDA_EP_FEWEST = 8 };

struct moe_status moe_cuda_ep_create(struct moe_session *session,
                                     struct moe_cuda_ep **out) MOE_CHECKED;
void moe_cuda_ep_destroy(struct moe_cuda_ep *ep); /* NULL is ignored */

/* To be called before each step is enqueued on device->compute, also before a captured one is
 * launched. Every 2^28 steps it enqueues the wiping of words that would look new again. */
struct moe_status moe_cuda_ep_count_step(struct moe_session *s) MOE_CHECKED;

/* Whether this session can run passes of this shape. */
struct moe_status moe_cuda_ep_check(const struct moe_session *session,
                                    const struct moe_layer *layer, enum moe_dtype dtype,
                                    uint32_t bucket, uint32_t tokens) MOE_CHECKED;

/* The same (`x_dy_rows` as in the batch), and memory for the most rows that such passes can bring:
 * nothing overflows later. Depends only on what is equal on all slots, but for `tokens` and for the
 * memory that is left. Waits for the device when memory has to grow. */
struct moe_status moe_cuda_ep_reserve(struct moe_session *session, const struct moe_layer *layer,
                                      enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                      bool x_dy_rows) MOE_CHECKED;

/* Whether moe_cuda_ep_reserve for this shape would find its memory there already. */
bool moe_cuda_ep_fits(const struct moe_session *session, const struct moe_layer *layer,
                      enum moe_dtype dtype, uint32_t bucket);

/* Most rows, padding included, that passes of this shape can bring to this slot: the size to give
 * to what is computed from moe_rows. */
uint32_t moe_cuda_ep_max_rows(const struct moe_session *session, const struct moe_layer *layer,
                              uint32_t bucket);

/* Says what the pass is about; nothing is enqueued yet. After moe_cuda_ep_reserve for this shape,
 * and moe_cuda_ep_count_step. */
struct moe_status moe_cuda_ep_prepare(struct moe_cuda_ep *ep,
                                      const struct moe_cuda_batch *batch) MOE_CHECKED;
/* Enqueues, in place of prepare and dispatch: this slot has no memory for the pass that `what`
 * says, so that all slots refuse it. Needs no memory: of `what`, tensors and step parameters are
 * not read. After moe_cuda_ep_count_step. */
struct moe_status moe_cuda_ep_refuse(struct moe_cuda_ep *ep, const struct moe_cuda_batch *what,
                                     cudaStream_t stream) MOE_CHECKED;
/* Enqueues: no expert has rows. A session that has stopped skips dispatch and leaves the tables of
 * the pass before it; for passes whose scratch is no larger than they need, and which enqueue what
 * reads those tables before they know the outcome. */
struct moe_status moe_cuda_ep_forget_rows(struct moe_cuda_ep *ep, cudaStream_t stream) MOE_CHECKED;
/* Enqueues: where each (token, k) goes, rows out, peers' rows in and expanded. `out`, all device
 * memory, is valid from here on in stream order (`expert` for the batch's layer only); a pass that
 * fails or is refused has zero rows of every expert. */
struct moe_status moe_cuda_ep_dispatch(struct moe_cuda_ep *ep, struct moe_rows *out,
                                       cudaStream_t stream) MOE_CHECKED;

/* What there is to combine; device memory, 16-byte aligned. */
struct moe_cuda_results {
    const void *expert_out; /* [start[local], H], weighted */
    enum moe_dtype dtype;   /* of expert_out: F32, or BF16 where the pass's is */
    const float *base;      /* [T, H] or NULL = zeros */
};

/* Enqueues: sums of the experts' rows per token, home, and the own tokens: y [T,H] in the pass's
 * dtype = base + sums in slot order + zero experts' w * x, in fp32. Each slot's sum is fp32 in k
 * order, and rounded to the pass's dtype before it is added, on whatever slot it was made. A token
 * that is not OK gets zeros. `outcome`: device address of pinned memory that gets a copy of the
 * pass's outcome, or NULL. */
struct moe_status moe_cuda_ep_combine(struct moe_cuda_ep *ep,
                                      const struct moe_cuda_results *results, void *y,
                                      struct moe_cuda_step_outcome *outcome,
                                      cudaStream_t stream) MOE_CHECKED;

/* The same for a backward pass: gradients [start[local], H + columns] f32 per row, y [T, H +
 * columns] f32, both summed and sent in fp32; no zero experts. The last MOE_MAX_TOP_K columns are
 * for what belongs to one choice k alone. */
struct moe_status moe_cuda_ep_combine_gradients(struct moe_cuda_ep *ep, const float *gradients,
                                                float *y, struct moe_cuda_step_outcome *outcome,
                                                cudaStream_t stream) MOE_CHECKED;
/* Device memory [slots][max_tokens][max_top_k]: the local row of each source's (t, k), or
 * 0xffffffff, after dispatch. */
const uint32_t *moe_cuda_ep_row_table(const struct moe_cuda_ep *ep);

/* Ids in device memory that may come from anyone: none is beyond the layer's experts. Waits. */
struct moe_status moe_cuda_ep_check_ids(const struct moe_session *session,
                                        const struct moe_layer *layer, uint32_t tokens,
                                        const int32_t *ids) MOE_CHECKED;

/* As the members of struct moe_backend, while no step is unfinished; synchronous. Of struct
 * moe_rows all pointers are device memory. */
struct moe_status moe_cuda_ep_dispatch_alone(struct moe_session *session, struct moe_layer *layer,
                                             enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                             const void *x, const int32_t *ids,
                                             const float *weights,
                                             struct moe_rows *out) MOE_CHECKED;
struct moe_status moe_cuda_ep_combine_alone(struct moe_session *session, struct moe_layer *layer,
                                            enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                            const void *x, const int32_t *ids, const float *weights,
                                            const struct moe_rows *rows, const float *expert_out,
                                            void *y) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
