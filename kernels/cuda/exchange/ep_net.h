/* SPDX-License-Identifier: Apache-2.0 */
/* Prepare, dispatch and combine of a session whose peers are reached over a network (net.h), where
 * they end in the same bits as through windows. Internal to ep.c and ep_net.*; on the comm thread's
 * thread.
 *
 *   prepare    places each choice among the rows for its expert, lists the tokens that each peer
 *              wants, and exchanges control messages: what this slot believes the step to be, how
 * many rows follow, and how many of them are for which expert dispatch   the host reads the control
 * messages, the one time that it waits inside a pass: all slots see the same ones, so all refuse
 * the step or none. Then sizes are known, and records are exchanged: a token's routing and its row,
 * once per slot that wants it. They are expanded together with the own rows combine    sums of each
 * record's rows go back in the order in which the records came, and the own tokens are finished
 * from them
 *
 * Messages are as long as what is in them and lie in two blocks of plain device memory: partials
 * leave from where their records came in, and come in where the records left from. */
#ifndef MOE_CUDA_EP_NET_H
#define MOE_CUDA_EP_NET_H

#include "cuda/exchange/pass.h"
#include "cuda/session/net.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_cuda_message_kind { MOE_CUDA_MESSAGE_STEP = 1, MOE_CUDA_MESSAGE_EXCHANGE };

/* Followed by the counts of rows by expert, [max_experts], valid for experts of the reader; or by
 * the bytes of a session's exchange. A message's trailer ends it. */
struct moe_cuda_control_message {
    uint32_t kind;
    uint32_t size; /* rows that follow, or bytes of the exchange */
    uint32_t head[MOE_HEAD_COUNT];
    uint32_t body[];
};

/* First in a record: then `top_k` routes, and from record_head on the row. */
struct moe_cuda_record {
    uint32_t token;   /* of the source */
    uint32_t choices; /* bit k: choice k is for the reader, and route k is valid */
    uint32_t unused[2];
};
struct moe_cuda_route {
    uint32_t expert;
    uint32_t position; /* among the source's rows for this expert on this slot */
    float weight;
};

/* What the kernels get besides the pass, by value. Addresses are of device memory. */
struct moe_cuda_net_pass {
    uint8_t *control_out, *control_in; /* [slots] control messages, control_bytes apart */
    size_t control_bytes;
    uint32_t *outgoing; /* [slots] records for each; behind control_in, and read with it */
    uint8_t *out, *in;  /* [slots] messages, region bytes apart */
    size_t region;
    uint32_t record, record_head, partial; /* bytes of a record, its part before the row, a row */
    uint32_t *position;                    /* [T, K] */
    uint32_t *send_token;                  /* [slots][max_tokens] the token of each record */
    uint32_t *send_index;                  /* [slots][max_tokens] the record of each token */
    uint32_t *came_token;                  /* [slots][max_tokens] the token of each record */
    uint32_t parts;                        /* that sums cut a row into */
    /* Known once the control messages have been read. */
    uint32_t *layout; /* first row [slots][local], then start and count as in moe_rows */
    uint32_t rows_in[MOE_MAX_SLOTS], tokens_of[MOE_MAX_SLOTS];
    struct moe_cuda_step_outcome outcome;
    uint64_t trailer; /* of the exchange that the kernel's messages are for */
};

struct moe_cuda_ep_net;

/* Tables and control messages for passes of the session's limits. */
struct moe_status moe_cuda_ep_net_create(struct moe_session *session,
                                         struct moe_cuda_ep_net **out) MOE_CHECKED;
void moe_cuda_ep_net_destroy(struct moe_cuda_ep_net *n); /* NULL is ignored */

/* Memory for messages of passes of this shape; `x_dy_rows`: of backward passes, whose records carry
 * rows of 2H and whose partials are fp32 gradients. Nothing may be enqueued that uses it. */
struct moe_status moe_cuda_ep_net_reserve(struct moe_cuda_ep_net *n, const struct moe_layer *layer,
                                          enum moe_dtype dtype, uint32_t bucket,
                                          bool x_dy_rows) MOE_CHECKED;

/* Whether that memory is there for a forward pass. */
bool moe_cuda_ep_net_fits(const struct moe_cuda_ep_net *n, const struct moe_layer *layer,
                          enum moe_dtype dtype, uint32_t bucket);

/* The same memory, at least `bytes` of it, for messages of another kind. Valid until the next pass
 * or the next call, and nothing may be enqueued that uses it. */
struct moe_status moe_cuda_ep_net_borrow(struct moe_cuda_ep_net *n, size_t bytes,
                                         void **out) MOE_CHECKED;

/* As in ep.h, with the pass that ep.c has filled. A slot that refuses the pass needs no memory for
 * its messages; any other has reserved it. Dispatch of pairs leaves MOE_CUDA_NO_ROW in row_of
 * wherever nothing came, for whoever walks over all of it. */
struct moe_status moe_cuda_ep_net_prepare(struct moe_cuda_ep_net *n,
                                          const struct moe_cuda_pass *pass,
                                          const struct moe_layer *layer,
                                          bool x_dy_rows) MOE_CHECKED;
struct moe_status moe_cuda_ep_net_dispatch(struct moe_cuda_ep_net *n,
                                           const struct moe_cuda_pass *pass) MOE_CHECKED;
struct moe_status moe_cuda_ep_net_combine(struct moe_cuda_ep_net *n,
                                          const struct moe_cuda_pass *pass) MOE_CHECKED;

/* `bytes` of `mine` to all slots; theirs, and how many came, into the host control. Waits for them.
 */
struct moe_status moe_cuda_ep_net_exchange(struct moe_cuda_ep_net *n, const void *mine,
                                           size_t bytes,
                                           struct moe_cuda_host_control *host_control) MOE_CHECKED;

/* ep_net.cu, in the order of a pass. */
struct moe_status moe_cuda_launch_net_list(const struct moe_cuda_pass *pass,
                                           const struct moe_cuda_net_pass *n,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_net_pack(const struct moe_cuda_pass *pass,
                                           const struct moe_cuda_net_pass *n, uint32_t ctas,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_net_expand(const struct moe_cuda_pass *pass,
                                             const struct moe_cuda_net_pass *n, uint32_t ctas,
                                             cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_net_sum(const struct moe_cuda_pass *pass,
                                          const struct moe_cuda_net_pass *n, uint32_t ctas,
                                          cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_net_finish(const struct moe_cuda_pass *pass,
                                             const struct moe_cuda_net_pass *n, uint32_t ctas,
                                             cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
