/* SPDX-License-Identifier: Apache-2.0 */
/* Prepare, dispatch and combine on the CPU: tokens to the slots of their experts and back, through
 * the windows, as moe/window.h lays it out. Computes nothing but sums.
 *
 * A pass is prepare, send, [agree,] receive, combine, in this order; a backward
 * pass moves two rows per token and is combined in fp32; all live slots must make
 * the same passes. A pass that ends before combine is closed by the next prepare. */
#ifndef MOE_CPU_EP_H
#define MOE_CPU_EP_H

#include "cpu/compute/layer.h"

struct moe_cpu_ep;

/* What a backward pass tells all peers besides its rows. */
struct moe_cpu_pass_facts {
    uint32_t routed;       /* own tokens that went through the router */
    const uint32_t *loads; /* [E] their choices per expert */
    bool accumulate;       /* the same on all slots */
    float aux_coeff;       /* the same on all slots */
};

/* What the slots told each other. */
struct moe_cpu_group_facts {
    uint64_t routed;
    const uint64_t *loads; /* [E] */
};

/* One slot's part of a pass. Must stay until the pass is over. */
struct moe_cpu_batch {
    const struct moe_layer *layer;
    enum moe_dtype dtype;
    uint32_t bucket, tokens;
    const void *x; /* [T, H] */
    bool backward;
    const void *dy;                         /* [T, H]; backward only */
    const struct moe_cpu_pass_facts *facts; /* backward only; NULL = nothing to tell */
    const int32_t *ids;         /* [T, K]; < 0: this k is not routed; >= E: zero expert */
    const float *weights;       /* [T, K] */
    const uint8_t *token_state; /* [T] enum moe_token_state, or NULL = all MOE_TOKEN_OK */
    bool no_memory;             /* this slot cannot: all are to refuse. T is 0 then */
};

struct moe_status moe_cpu_ep_create(struct moe_session *session,
                                    struct moe_cpu_ep **out) MOE_CHECKED;
void moe_cpu_ep_destroy(struct moe_cpu_ep *ep); /* NULL is ignored */

/* Whether this session can run passes of this shape. Depends only on what is equal on all slots,
 * but for `tokens`. */
struct moe_status moe_cpu_ep_check(const struct moe_session *session, const struct moe_layer *layer,
                                   enum moe_dtype dtype, uint32_t bucket,
                                   uint32_t tokens) MOE_CHECKED;

/* Decides where each (token, k) goes, and tells the peers how many rows to expect. */
struct moe_status moe_cpu_ep_prepare(struct moe_cpu_ep *ep,
                                     const struct moe_cpu_batch *batch) MOE_CHECKED;
/* Moves the rows into the peers' windows. Waits for no one: other work may follow before receive.
 */
void moe_cpu_ep_send(struct moe_cpu_ep *ep);
/* Waits until all slots have said what this pass is. Receive does it where nobody did before.
 * Errors: as of receive. facts: of a backward pass, valid until the next prepare; NULL is ignored.
 */
struct moe_status moe_cpu_ep_agree(struct moe_cpu_ep *ep,
                                   struct moe_cpu_group_facts *facts) MOE_CHECKED;
/* Waits for the peers' rows and puts all rows of local experts into `out`.
 * Errors: MOE_FAILED_PRECONDITION/SHAPE_MISMATCH when the slots do not agree on what this pass is,
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY when one has no memory for it; on all slots alike, and the
 * session stays usable then. After moe_cpu_ep_agree, OUT_OF_MEMORY says that this slot has none for
 * its rows: it may be tried again. */
struct moe_status moe_cpu_ep_receive(struct moe_cpu_ep *ep, struct moe_rows *out) MOE_CHECKED;
/* After receive in a backward pass: dy of the received rows, [start[local], H]. */
const void *moe_cpu_ep_dy_rows(const struct moe_cpu_ep *ep);
/* Whether `batch` and `rows` are what the last receive was for. */
struct moe_status moe_cpu_ep_same_pass(const struct moe_cpu_ep *ep,
                                       const struct moe_cpu_batch *batch,
                                       const struct moe_rows *rows) MOE_CHECKED;
/* After receive. Sums the experts' rows per token, sends the sums home, and finishes the own
 * tokens: y [T,H] in the pass's dtype = base + sums in slot order, each rounded to that dtype, the
 * own one too, + zero experts' w * x, rounded once. base [T,H] or NULL = zeros. A token that is not
 * OK gets zeros. */
struct moe_status moe_cpu_ep_combine(struct moe_cpu_ep *ep, const float *expert_out,
                                     const float *base, void *y) MOE_CHECKED;

/* The same of a backward pass: dx [T,H] f32 = the sums of dx_rows, in the same order, and of the
 * zero experts' w * dy; dweights [T,K] = each row's own value of dweight_rows, 0 where no row was.
 */
struct moe_status moe_cpu_ep_combine_backward(struct moe_cpu_ep *ep, const float *dx_rows,
                                              const float *dweight_rows, float *dx,
                                              float *dweights) MOE_CHECKED;

/* Whether the last pass since this was asked was refused by all slots. */
bool moe_cpu_ep_take_refusal(struct moe_cpu_ep *ep);

/* Rows computed on this slot in the current pass. */
uint64_t moe_cpu_ep_rows(const struct moe_cpu_ep *ep);

#endif
