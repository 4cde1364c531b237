/* SPDX-License-Identifier: Apache-2.0 */
/* Prepare, dispatch and combine on GPUs: tokens to the slots of their experts and back through the
 * windows, as in moe/window.h. Calls only enqueue; counts stay on the device. Rows are W wide: H,
 * or the width of the latent space; the caller projects.
 *
 * A pass is prepare, dispatch, combine, in this order, on one stream. All live slots must make the
 * same passes. A pass may end before combine. The stream may capture. The captured work may be
 * launched repeatedly, after one moe_cuda_ep_count_step each, with any layer of the same shape in
 * the step parameters.
 *
 * Over a network (ep_net.h), the session's comm thread makes the calls that enqueue, on the
 * device's compute stream, which must not capture. Passes of x_dy_rows differ: another thread
 * calls, after moe_cuda_session_catch_up. It posts the exchanges with peers to the comm thread, and
 * each call returns when all messages from peers have arrived. */
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
        *layer; /* for its shape; the step parameters name the layer with the weights */
    enum moe_dtype dtype;
    uint32_t bucket;
    const struct moe_cuda_step_params *params;
    bool x_dy_rows;             /* a backward pass: rows of 2W, x followed by dy */
    const void *x;              /* [T, W] or [T, 2W] */
    const int32_t *ids;         /* [T, K]; < 0: choice k is not routed; >= E: zero expert */
    const float *weights;       /* [T, K] */
    const uint8_t *token_state; /* [T] enum moe_token_state, or NULL = all MOE_TOKEN_OK */
    const uint8_t *mode; /* [T] as in moe_step_args, read if the step parameters say that there are
                            modes: tells the tokens without base. NULL = all have it */
    uint64_t *began;     /* [MOE_STAGE_COUNT + 1] receives the start times of prepare, dispatch and
                            combine and, last, the end of combine; or NULL */
    struct moe_cuda_step_counts
        *counts; /* device address of pinned memory, filled when combine ends; or NULL */
    /* Limits of multiprocessors for dispatch and for combine; 0 = all. For callers that run other
     * kernels concurrently, which must free that many sooner or later: a kernel of a pass waits
     * until all of its CTAs are resident. Slots may choose differently; results have the same bits.
     * Values below MOE_CUDA_EP_FEWEST are raised to it. Ignored over a network. */
    uint32_t dispatch_processors, combine_processors;
};

/* Dispatch and combine use at least this many multiprocessors, or all if the device has fewer. */
enum { MOE_CUDA_EP_FEWEST = 8 };

struct moe_status moe_cuda_ep_create(struct moe_session *session,
                                     struct moe_cuda_ep **out) MOE_CHECKED;
void moe_cuda_ep_destroy(struct moe_cuda_ep *ep); /* NULL is ignored */

/* Call before each step is enqueued on device->compute, and before each launch of a captured one.
 * Every 2^28 steps, and after moe_cuda_ep_start_over, it enqueues the clearing of all windows, with
 * an exchange before it and one behind. */
struct moe_status moe_cuda_ep_count_step(struct moe_session *s) MOE_CHECKED;
/* The next step finds windows without flags and rows of earlier steps, and has number 1. All live
 * slots call it between the same two steps. */
void moe_cuda_ep_start_over(struct moe_session *s);

/* Checks that this session can run passes of this shape. Makes the copies on the session's live
 * slots the active ones of the layer. */
struct moe_status moe_cuda_ep_check(const struct moe_session *session, struct moe_layer *layer,
                                    enum moe_dtype dtype, uint32_t bucket,
                                    uint32_t tokens) MOE_CHECKED;

/* The same check (`x_dy_rows` as in the batch); then takes memory for the most rows that such
 * passes can bring, so nothing overflows later. Depends only on values that are equal on all slots,
 * except `tokens` and the free memory. Waits for the device if memory must grow. */
struct moe_status moe_cuda_ep_reserve(struct moe_session *session, struct moe_layer *layer,
                                      enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                      bool x_dy_rows) MOE_CHECKED;

/* Whether moe_cuda_ep_reserve for this shape needs no more memory. */
bool moe_cuda_ep_fits(const struct moe_session *session, const struct moe_layer *layer,
                      enum moe_dtype dtype, uint32_t bucket);

/* Largest number of rows, with padding, that passes of this shape can bring to this slot. Use it as
 * the size of anything computed from moe_rows. */
uint32_t moe_cuda_ep_max_rows(const struct moe_session *session, const struct moe_layer *layer,
                              uint32_t bucket);

/* Enqueues: quantises the rows of x, if they travel so (moe/row_format.h). Call it for each pass,
 * after moe_cuda_ep_reserve. It needs no routing; dispatch must come after it in stream order, and
 * over a network prepare too. The next one must come after dispatch. `rows` receives the quantised
 * rows [T], valid until then, or NULL. */
struct moe_status moe_cuda_ep_quantise(struct moe_cuda_ep *ep, const struct moe_cuda_batch *batch,
                                       cudaStream_t stream, const void **rows) MOE_CHECKED;
/* Sets up the pass; through windows, enqueues nothing yet. Call after moe_cuda_ep_reserve for this
 * shape, and after moe_cuda_ep_count_step. */
struct moe_status moe_cuda_ep_prepare(struct moe_cuda_ep *ep,
                                      const struct moe_cuda_batch *batch) MOE_CHECKED;
/* Enqueues, instead of prepare and dispatch, a refusal: this slot has no memory for the pass in
 * `what`, so all slots refuse it. Needs no memory, and does not read tensors and step parameters of
 * `what`. Call after moe_cuda_ep_count_step. */
struct moe_status moe_cuda_ep_refuse(struct moe_cuda_ep *ep, const struct moe_cuda_batch *what,
                                     cudaStream_t stream) MOE_CHECKED;
/* Enqueues: no expert has rows. A stopped session skips dispatch and leaves the previous pass's
 * tables. Some passes take only as much scratch as they need, and enqueue readers of those tables
 * before the outcome is known; they need this call. */
struct moe_status moe_cuda_ep_forget_rows(struct moe_cuda_ep *ep, cudaStream_t stream) MOE_CHECKED;
/* Enqueues: routes each (token, k), sends rows, receives and expands peers' rows. From here on in
 * stream order, `out` is valid (all device memory; `expert` for the batch's layer only). If the
 * pass fails or is refused, every expert has zero rows. */
struct moe_status moe_cuda_ep_dispatch(struct moe_cuda_ep *ep, struct moe_rows *out,
                                       cudaStream_t stream) MOE_CHECKED;

/* Input of combine; device memory, 16-byte aligned. */
struct moe_cuda_results {
    const void *expert_out; /* [start[local], W], weighted */
    enum moe_dtype dtype;   /* of expert_out: F32, or BF16 if the pass's dtype is */
    const float *base;      /* [T, W] or NULL = zeros */
};

/* Enqueues: sums each token's rows, sends the sums home, and finishes this slot's tokens: y [T,W]
 * in the pass's dtype = base + sums in slot order + zero experts' w * x, in fp32. Each slot's sum
 * is fp32 in k order and rounded to the pass's dtype before it is added, on every slot. A token
 * that is not OK gets zeros. `outcome`: device address of pinned memory for a copy of the pass's
 * outcome, or NULL. */
struct moe_status moe_cuda_ep_combine(struct moe_cuda_ep *ep,
                                      const struct moe_cuda_results *results, void *y,
                                      struct moe_cuda_step_outcome *outcome,
                                      cudaStream_t stream) MOE_CHECKED;

/* The same for a backward pass: gradients [start[local], H + columns] f32 per row, y [T, H +
 * columns] f32, both summed and sent in fp32; no zero experts. The last MOE_COMMON_TOP_K columns
 * hold values of one choice k each. */
struct moe_status moe_cuda_ep_combine_gradients(struct moe_cuda_ep *ep, const float *gradients,
                                                float *y, struct moe_cuda_step_outcome *outcome,
                                                cudaStream_t stream) MOE_CHECKED;
/* Device memory [slots][max_tokens][max_top_k]. After dispatch: the local row of each source's (t,
 * k), or 0xffffffff. */
const uint32_t *moe_cuda_ep_row_table(const struct moe_cuda_ep *ep);

/* Checks untrusted ids in device memory: none is beyond the layer's experts. Waits. */
struct moe_status moe_cuda_ep_check_ids(const struct moe_session *session,
                                        const struct moe_layer *layer, uint32_t tokens,
                                        const int32_t *ids) MOE_CHECKED;

/* Like the members of struct moe_backend; synchronous, and only while no step is unfinished. All
 * pointers in struct moe_rows are device memory. */
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
