/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels of a pass are given by value (what differs between passes of one shape is in the
 * step parameters), and the launches that ep.c strings together.
 * Internal to ep.c and ep_*.cu.
 *
 * What differs from the order of words in moe/window.h: `done` is stored by the kernel that follows
 * dispatch (combine, or the next dispatch), since its start says that all rows are out of the own
 * window; the next dispatch of a peer looks at it before it stores rows, and is satisfied by that
 * step's stamp or a later one. Combine waits for partials only. A step that was refused may have
 * left rows in the quick region, or still be sending some: before `done` of such a step, all slots
 * tell each other that theirs are through (`flushed`), and lay blanks anew. */
#ifndef MOE_CUDA_PASS_H
#define MOE_CUDA_PASS_H

#include "cuda/layer/step_params.h"
#include "cuda/session/control.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOE_CUDA_NO_ROW = 0xffffffff };

/* What combine needs to know of an own token. */
struct moe_cuda_own_token {
    uint32_t wanted; /* bit s: slot s has rows of it */
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
    uint32_t entries; /* of the placement: experts, each as often as it has copies */
    enum moe_dtype dtype;
    uint32_t row_bytes; /* H elements */
    size_t stride;      /* of rows and partials in windows */
    const void *x;
    const int32_t *ids;
    const float *weights;
    const uint8_t *token_state;

    bool quick;                          /* through the quick regions */
    uint32_t shared_bytes;               /* that a CTA may have; 0 where there is no copy engine */
    uint32_t send_pieces, expand_pieces; /* that dispatch cuts rows into; set by its launch */
    struct moe_cuda_own_token *own;      /* [max_tokens] */
    /* Between the CTAs of a dispatch: choices of each one's share of the tokens, by entry of the
     * placement, [CTAs][entries in whole units of four], and words that say that they are there. */
    uint32_t *share_tally;
    uint64_t *share_ready;
    uint32_t *start;   /* [local + 1] as in struct moe_rows */
    uint32_t *count;   /* [local] */
    uint32_t *row_of;  /* [slots][max_tokens][max_top_k] local row of each (source, t, k) */
    void *rows;        /* [row_capacity, H] of the pass's dtype */
    float *row_weight; /* [row_capacity] */
    uint32_t row_capacity;

    uint32_t parts; /* that combine cuts a row into; at most MOE_WINDOW_PARTS unless quick */
    const void *expert_out;
    enum moe_dtype out_dtype; /* of expert_out: F32, or the pass's dtype */
    const float *base;
    void *y;
    uint64_t *began; /* as in struct moe_cuda_batch */
    struct moe_cuda_step_outcome
        *outcome; /* pinned: copy of the outcome when combine ends, or NULL */
};

/* A CTA takes a multiprocessor for itself. No more than the device has: all of them are resident at
 * last, or some would wait for rows that others have not been able to send. At least two. */
struct moe_status moe_cuda_launch_dispatch(const struct moe_cuda_pass *pass, uint32_t ctas,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_combine(const struct moe_cuda_pass *pass, uint32_t ctas,
                                          cudaStream_t stream) MOE_CHECKED;
/* exchange.cu: `bytes` of the host control's `mine` to all slots, theirs into `all`; a barrier. */
struct moe_status moe_cuda_launch_exchange(const struct moe_session *session, uint32_t bytes,
                                           cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
