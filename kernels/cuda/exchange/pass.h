/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments by value of a pass's kernels (step parameters hold the rest, which differs between
 * passes of one shape), and the launches for ep.c. Internal to ep.c and ep_*.cu.
 *
 * The order of flags differs from moe/window.h in these points. The kernel that follows dispatch
 * (combine, or the next dispatch) stores `done`: its start means that all rows have left this
 * slot's window. A peer's next dispatch checks it before it stores rows, and accepts that step's
 * stamp or a later one. Combine waits for partials only. A refused step may leave rows in the quick
 * region, or still send some. So before `done` of such a step, each slot signals that it has sent
 * all (`flushed`), and all slots write blanks again. */
#ifndef MOE_CUDA_PASS_H
#define MOE_CUDA_PASS_H

#include "cuda/layer/step_params.h"
#include "cuda/session/control.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOE_CUDA_NO_ROW = 0xffffffff };

/* Combine's data about one of this slot's tokens. */
struct moe_cuda_own_token {
    uint64_t wanted; /* bit s: slot s has rows of it */
    uint32_t zero;   /* bit k: choice k is a zero expert */
};

struct moe_session;

struct moe_cuda_pass {
    struct moe_window_layout layout;
    struct moe_cuda_control *control;
    const uint32_t *abort;                     /* in the host control */
    const struct moe_cuda_step_params *params; /* T, the placement and the head */
    uint32_t slot, slots;
    uint32_t bucket, top_k, experts, local_experts, hidden;
    uint32_t entries; /* of the placement: one per copy of an expert, on whatever slot */
    enum moe_dtype dtype;
    uint32_t row_bytes;   /* of a row on its way to the experts */
    size_t stride;        /* bytes between rows and between partials in windows */
    const void *x;        /* [T, W] */
    const void *outgoing; /* [T, row_bytes]: x, or its rows quantised */
    const int32_t *ids;
    const float *weights;
    const uint8_t *token_state;

    bool quick;                          /* through the quick regions */
    uint32_t shared_bytes;               /* limit for a CTA; 0 without a copy engine */
    uint32_t send_pieces, expand_pieces; /* per row in dispatch; its launch sets them */
    struct moe_cuda_own_token *own;      /* [max_tokens] */
    /* Exchanged between the CTAs of a dispatch: the choices in each CTA's share of the tokens, by
     * entry of the placement, [CTAs][entries, rounded up to four], and a flag per CTA that they are
     * valid. */
    uint32_t *share_tally;
    uint64_t *share_ready;
    uint32_t *start;   /* [local + 1] as in struct moe_rows */
    uint32_t *count;   /* [local] */
    uint32_t *row_of;  /* [slots][max_tokens][max_top_k] local row of each (source, t, k) */
    void *rows;        /* [row_capacity, row_bytes] */
    float *row_weight; /* [row_capacity] */
    uint32_t row_capacity;

    uint32_t parts; /* per row in combine; at most MOE_WINDOW_PARTS unless quick */
    const void *expert_out;
    enum moe_dtype out_dtype; /* of expert_out: F32, or the pass's dtype */
    const float *base;
    const uint8_t *mode; /* of tokens, as in struct moe_cuda_batch */
    void *y;
    uint64_t *began; /* as in struct moe_cuda_batch */
    struct moe_cuda_step_outcome
        *outcome; /* pinned: copy of the outcome at the end of combine, or NULL */
    struct moe_cuda_step_counts *counts; /* as in struct moe_cuda_batch */
};

/* Bytes of a row on its way to the experts: of the dtype, or as moe/row_format.h says. The only
 * rule for it; whatever moves rows moves so many bytes. */
size_t moe_cuda_ep_row_bytes(const struct moe_layer *layer, enum moe_dtype dtype, bool x_dy_rows);

/* Each CTA uses a whole multiprocessor. At least two, and no more than the device has: all CTAs
 * must be resident in the end, or some would wait for rows that others cannot send. */
struct moe_status moe_cuda_launch_dispatch(const struct moe_cuda_pass *pass, uint32_t ctas,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_combine(const struct moe_cuda_pass *pass, uint32_t ctas,
                                          cudaStream_t stream) MOE_CHECKED;
/* exchange.cu: sends `bytes` of the host control's `mine` to all slots, receives theirs in `all`.
 * Also a barrier. */
struct moe_status moe_cuda_launch_exchange(const struct moe_session *session, uint32_t bytes,
                                           cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
