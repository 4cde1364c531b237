/* SPDX-License-Identifier: Apache-2.0 */
/* Prepare, dispatch and combine on the CPU: tokens to the slots of their experts and back, through
 * the windows, as moe/window.h lays it out. The only computation here is sums.
 *
 * W is the width of the experts' rows: H, or that of the latent space. The caller projects.
 *
 * A pass is prepare, send, [agree,] receive, combine, in this order. A backward pass moves two rows
 * per token, and its combine is in fp32. All live slots must run the same passes. If a pass ends
 * before combine, the next prepare closes it. */
#ifndef MOE_CPU_EP_H
#define MOE_CPU_EP_H

#include "common/domains.h"
#include "cpu/compute/layer.h"

struct moe_cpu_ep;

/* What this slot sends to all peers in a backward pass, in addition to rows. */
struct moe_cpu_pass_params {
    uint32_t routed;       /* local tokens that used the router */
    const uint32_t *loads; /* [E] their choices per expert */
    bool accumulate;       /* the same on all slots */
    float aux_coeff;       /* the same on all slots */
};

/* The sums over all slots. */
struct moe_cpu_group_params {
    uint64_t routed;
    const uint64_t *loads; /* [E] */
};

/* One slot's part of a pass. Must stay until the pass is over. */
struct moe_cpu_batch {
    const struct moe_layer *layer;
    enum moe_dtype dtype;
    uint32_t bucket, tokens;
    const void *x; /* [T, W] */
    /* If row_bytes is not 0: what the experts get instead of the rows of x, [T, row_bytes]. All
     * slots have the same row_bytes, at most those of a row of x. Not in backward passes. */
    const void *rows;
    size_t row_bytes;
    bool backward;
    const void *dy;                           /* [T, W]; backward only */
    const struct moe_cpu_pass_params *params; /* backward only; NULL = all zero */
    const int32_t *ids;                       /* [T, K]; < 0: not routed; >= E: zero expert */
    const float *weights;                     /* [T, K] */
    const uint8_t *token_state; /* [T] enum moe_token_state, or NULL = all MOE_TOKEN_OK */
    const uint8_t *mode;        /* [T] as in moe_step_args or NULL; tells who has no base */
    bool no_memory;             /* this slot has no memory, so all slots refuse; T = 0 */
};

struct moe_status moe_cpu_ep_create(struct moe_session *session,
                                    struct moe_cpu_ep **out) MOE_CHECKED;
void moe_cpu_ep_destroy(struct moe_cpu_ep *ep); /* NULL is ignored */
/* Once, before the first pass: rows cross between the domains of `map` once per domain. Without
 * this call, or with a flat map, every row goes straight to the slots that compute it. */
struct moe_status moe_cpu_ep_use_domains(struct moe_cpu_ep *ep,
                                         const struct moe_domains *map) MOE_CHECKED;

/* Slots that a mask has, or lacks, together with this one: moe_domains_together of the map in use;
 * 0 = the session takes no mask. */
uint64_t moe_cpu_ep_together(const struct moe_cpu_ep *ep);
/* Before the session takes a mask of these slots. What a failed pass has begun to send goes out: it
 * has the stamps of the epoch before. False, and nothing is done: regions of windows would have
 * other writers. */
bool moe_cpu_ep_prepare_mask(struct moe_cpu_ep *ep, uint64_t live);
/* After it: no pass is open, whatever became of the last one. */
void moe_cpu_ep_mask(struct moe_cpu_ep *ep);

/* Whether this session can run passes of this shape. Apart from `tokens`, the result is the same on
 * all slots. Makes the copies on the session's live slots the active ones of the layer. */
struct moe_status moe_cpu_ep_check(const struct moe_session *session, struct moe_layer *layer,
                                   enum moe_dtype dtype, uint32_t bucket,
                                   uint32_t tokens) MOE_CHECKED;

/* Decides where each (token, k) goes, and sends the counts of rows to the peers. */
struct moe_status moe_cpu_ep_prepare(struct moe_cpu_ep *ep,
                                     const struct moe_cpu_batch *batch) MOE_CHECKED;
/* Moves the rows into the peers' windows. Never waits: other work may follow before receive. */
void moe_cpu_ep_send(struct moe_cpu_ep *ep);
/* Waits for the heads of all slots, which describe this pass. Receive calls it if needed. Errors:
 * as of receive. params: of a backward pass, valid until the next prepare; NULL is ignored. */
struct moe_status moe_cpu_ep_agree(struct moe_cpu_ep *ep,
                                   struct moe_cpu_group_params *params) MOE_CHECKED;
/* Waits for the peers' rows and puts all rows of local experts into `out`.
 * Errors: MOE_FAILED_PRECONDITION/SHAPE_MISMATCH if the slots run different passes,
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY if a slot has no memory for the pass. Both are the same on
 * all slots, and the session stays usable. After moe_cpu_ep_agree, OUT_OF_MEMORY means that this
 * slot has no memory for its rows: the caller may try again. */
struct moe_status moe_cpu_ep_receive(struct moe_cpu_ep *ep, struct moe_rows *out) MOE_CHECKED;
/* After receive in a backward pass: dy of the received rows, [start[local], W]. */
const void *moe_cpu_ep_dy_rows(const struct moe_cpu_ep *ep);
/* Whether `batch` and `rows` belong to the last receive. */
struct moe_status moe_cpu_ep_same_pass(const struct moe_cpu_ep *ep,
                                       const struct moe_cpu_batch *batch,
                                       const struct moe_rows *rows) MOE_CHECKED;
/* After receive. Sums the experts' rows per token, returns the sums to the tokens' slots, and
 * finishes the local tokens:
 *   y [T,W] in the pass's dtype = base + sums in slot order + zero experts' w * x, rounded once.
 * Each sum is rounded to that dtype first, also this slot's. base [T,W] or NULL = zeros. A token
 * that is not OK gets zeros. */
struct moe_status moe_cpu_ep_combine(struct moe_cpu_ep *ep, const float *expert_out,
                                     const float *base, void *y) MOE_CHECKED;

/* The same for a backward pass: dx [T,W] f32 = sums of dx_rows in the same order + zero experts'
 * w * dy, all in fp32. dweights [T,K] = the row's value of dweight_rows, x . dy for a zero expert,
 * 0 if not routed. */
struct moe_status moe_cpu_ep_combine_backward(struct moe_cpu_ep *ep, const float *dx_rows,
                                              const float *dweight_rows, float *dx,
                                              float *dweights) MOE_CHECKED;

/* Whether all slots refused the current pass; resets the answer to false. */
bool moe_cpu_ep_take_refusal(struct moe_cpu_ep *ep);

/* Rows computed on this slot in the current pass. */
uint64_t moe_cpu_ep_rows(const struct moe_cpu_ep *ep);
/* After receive: the numbers of rows of the current pass. */
void moe_cpu_ep_count(const struct moe_cpu_ep *ep, struct moe_step_counts *out);

#endif
