/* What the kernels of a pass are given by value (what differs between passes of one shape is in the
 * facts), and the launches that ep.c strings together.
 * Internal to ep.c and ep_*.cu.
 *
 * What differs from the order of words in moe/window.h: `done` is stored by dispatch, once all rows
 * are out of the own window, and looked at by the next step's dispatch before it stores rows. It is
 * satisfied by that step's stamp or a later one. Combine waits for partials only. */
#ifndef MOE_CUDA_PASS_H
#define MOE_CUDA_PASS_H

#include "cuda/ep.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOE_CUDA_NO_ROW = 0xffffffff };

struct moe_cuda_pass {
    struct moe_window_layout layout;
    struct moe_cuda_control *control;
    const uint32_t *abort;              /* in the mailbox */
    const struct moe_cuda_facts *facts; /* T, the placement and the head */
    uint32_t slot, slots;
    uint32_t bucket, top_k, experts, local_experts, hidden;
    enum moe_dtype dtype;
    uint32_t row_bytes; /* H elements */
    size_t stride;      /* of rows and partials in windows */
    const void *x;
    const int32_t *ids;
    const float *weights;
    const uint8_t *token_state;

    uint32_t *position; /* [T, K] among the own rows for the same expert on the same slot */
    uint32_t *start;    /* [local + 1] as in struct moe_rows */
    uint32_t *count;    /* [local] */
    uint32_t *row_of;   /* [slots][max_tokens][max_top_k] local row of each (source, t, k) */
    void *rows;         /* [row_capacity, H] of the pass's dtype */
    float *row_weight;  /* [row_capacity] */
    uint32_t row_capacity;

    uint32_t parts;        /* that combine cuts a row into */
    uint32_t *parts_ready; /* [slots][max_tokens] parts of a partial that are stored; else zero */
    const float *expert_out, *base;
    void *y;
    uint64_t *began;                  /* as in struct moe_cuda_batch */
    struct moe_cuda_verdict *verdict; /* pinned: copy of the verdict when combine ends, or NULL */
};

/* CTAs are as many as the device has multiprocessors: all of them are resident, or some would wait
 * for rows that others have not been able to send. */
struct moe_status moe_cuda_launch_announce(const struct moe_cuda_pass *pass,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_dispatch(const struct moe_cuda_pass *pass, uint32_t ctas,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_combine(const struct moe_cuda_pass *pass, uint32_t ctas,
                                          cudaStream_t stream) MOE_CHECKED;
/* session.cu: `bytes` of the mailbox's `mine` to all slots, theirs into `all`; a barrier. */
struct moe_status moe_cuda_launch_exchange(const struct moe_session *session, uint32_t bytes,
                                           cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
