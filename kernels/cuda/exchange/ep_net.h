/* SPDX-License-Identifier: Apache-2.0 */
/* Prepare, dispatch and combine of a session with peers on a network (net.h). Results have the same
 * bits as through windows. Internal to ep.c and ep_net.*; runs on the comm thread.
 *
 * prepare   gives each choice its position among the rows for its expert, lists the tokens that
 *           each peer needs, and exchanges control messages: this slot's view of the step, the
 *           number of rows that follow, and how many rows each expert gets
 * dispatch  the host reads the control messages; this is its only wait inside a pass. All slots see
 *           the same messages, so all refuse the step or none does. Now sizes are known, and slots
 *           exchange records: a token's routing and its row, once per slot that needs it. They are
 *           expanded together with this slot's rows
 * combine   sends back sums of each record's rows, in the order of the records, and finishes this
 *           slot's tokens from the peers' sums
 *
 * A message is as long as its content. Messages lie in two blocks of plain device memory. Partials
 * leave from the block where their records arrived, and arrive in the block that the records
 * left.
 *
 * Over several domains (session/relay.h), records for slots of the own domain go straight into
 * their shared memory. A record for another domain goes to the slot of equal index there, the
 * gateway, once for all slots of that domain; it also has its place among the records for each of
 * them. The gateway stores it for each of them (ep_relay.cu). Partials take the same way back: a
 * gateway adds those of its domain, in slot order, and sends one sum. Control messages go to all
 * slots. */
#ifndef MOE_CUDA_EP_NET_H
#define MOE_CUDA_EP_NET_H

#include "cuda/exchange/pass.h"
#include "cuda/plan/limits.h"
#include "cuda/session/net.h"
#include "cuda/session/relay.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_cuda_message_kind { MOE_CUDA_MESSAGE_STEP = 1, MOE_CUDA_MESSAGE_EXCHANGE };

/* Followed by the counts of rows by expert, [max_experts], valid for the reader's experts; or by
 * the bytes of a session's exchange. A trailer ends the message. */
struct moe_cuda_control_message {
    uint32_t kind;
    uint32_t size;   /* rows that follow, or bytes of the exchange */
    uint32_t across; /* records that follow for the reader's domain; 0 except to the gateway */
    uint32_t head[MOE_HEAD_COUNT];
    uint32_t body[];
};

/* Start of a record. Then come `top_k` routes, over several domains a place for each slot of a
 * domain, and the row at offset record_head. */
struct moe_cuda_record {
    uint32_t token;   /* of the source */
    uint32_t choices; /* bit k: choice k is for the reader, or its domain, and route k is valid */
    uint32_t unused[2];
};
struct moe_cuda_route {
    uint32_t expert;
    uint32_t position; /* among the source's rows for this expert on this slot */
    float weight;
};

/* Arguments by value of the kernels, besides the pass. Pointers are device memory. */
struct moe_cuda_net_pass {
    uint8_t *control_out, *control_in; /* [slots] control messages, control_bytes apart */
    size_t control_bytes;
    uint32_t *outgoing; /* [slots + domains] number of records for each; follows control_in, and is
                           read with it */
    uint8_t *out, *in;  /* [slots] messages, region bytes apart. Over several domains, `in` is in
                           shared memory, and there is no `out` */
    uint8_t *far_out, *far_in; /* over several domains: [domains] messages with the partners */
    struct moe_cuda_relay relay;
    size_t region;
    uint32_t record, record_head, partial; /* bytes of a record, its part before the row, a row */
    uint32_t *position;                    /* [T, K] */
    uint32_t *send_token; /* [slots + domains][max_tokens] the token of each record */
    uint32_t *send_index; /* [slots + domains][max_tokens] the record of each token */
    uint32_t *came_token; /* [slots][max_tokens] the token of each record */
    uint32_t parts;       /* that sums cut a row into */
    /* Valid once the control messages have been read. */
    uint32_t *layout; /* first row [slots][local], then start and count as in moe_rows */
    uint32_t rows_in[MOE_CUDA_MAX_SLOTS], tokens_of[MOE_CUDA_MAX_SLOTS];
    uint32_t across_in[MOE_CUDA_MAX_SLOTS]; /* [domains] records from the partner */
    struct moe_cuda_step_outcome outcome;
    uint64_t trailer; /* number of the exchange that sends this kernel's messages */
};

struct moe_cuda_ep_net;

/* Tables and control messages for passes of the session's limits. */
struct moe_status moe_cuda_ep_net_create(struct moe_session *session,
                                         struct moe_cuda_ep_net **out) MOE_CHECKED;
void moe_cuda_ep_net_destroy(struct moe_cuda_ep_net *n); /* NULL is ignored */

/* Shared memory of a slot in a session over several domains, for all its passes. */
size_t moe_cuda_ep_net_shared_bytes(const struct moe_session *session);

/* Memory for messages of passes of this shape. `x_dy_rows`: of backward passes; their records carry
 * rows of 2W and their partials are fp32 gradients. No enqueued work may use it. */
struct moe_status moe_cuda_ep_net_reserve(struct moe_cuda_ep_net *n, const struct moe_layer *layer,
                                          enum moe_dtype dtype, uint32_t bucket,
                                          bool x_dy_rows) MOE_CHECKED;

/* Whether that memory is there for a forward pass. */
bool moe_cuda_ep_net_fits(const struct moe_cuda_ep_net *n, const struct moe_layer *layer,
                          enum moe_dtype dtype, uint32_t bucket);

/* Lends the same memory, at least `bytes` of it, for messages of another kind. Valid until the next
 * pass or the next call. No enqueued work may use it. */
struct moe_status moe_cuda_ep_net_borrow(struct moe_cuda_ep_net *n, size_t bytes,
                                         void **out) MOE_CHECKED;

/* As in ep.h, with the pass that ep.c has filled. A slot that refuses the pass needs no memory for
 * messages; every other slot has reserved it. Dispatch of x_dy_rows sets row_of to MOE_CUDA_NO_ROW
 * for all choices without a row, for readers of the whole table. */
struct moe_status moe_cuda_ep_net_prepare(struct moe_cuda_ep_net *n,
                                          const struct moe_cuda_pass *pass,
                                          const struct moe_layer *layer,
                                          bool x_dy_rows) MOE_CHECKED;
struct moe_status moe_cuda_ep_net_dispatch(struct moe_cuda_ep_net *n,
                                           const struct moe_cuda_pass *pass) MOE_CHECKED;
struct moe_status moe_cuda_ep_net_combine(struct moe_cuda_ep_net *n,
                                          const struct moe_cuda_pass *pass) MOE_CHECKED;

/* Sends `bytes` of `mine` to all slots, and stores theirs, with their lengths, in the host control.
 * Waits for them. */
struct moe_status moe_cuda_ep_net_exchange(struct moe_cuda_ep_net *n, const void *mine,
                                           size_t bytes,
                                           struct moe_cuda_host_control *host_control) MOE_CHECKED;

/* ep_relay.cu: what a session over several domains adds, in the order of a pass. Announce: all
 * earlier stores of this slot for the pass's exchange `number` are there. Await: so are those of
 * all slots that store here. */
enum moe_cuda_relay_flag {
    MOE_CUDA_RELAY_RECORDS,   /* own records, in the memory of the slots of the domain */
    MOE_CUDA_RELAY_FORWARDED, /* records of partners, the same */
    MOE_CUDA_RELAY_SUMS,      /* partials for slots of the domain and their partners */
};
struct moe_status moe_cuda_launch_relay_announce(const struct moe_cuda_pass *pass,
                                                 const struct moe_cuda_net_pass *n,
                                                 enum moe_cuda_relay_flag flag, uint64_t number,
                                                 cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_relay_await(const struct moe_cuda_pass *pass,
                                              const struct moe_cuda_net_pass *n, bool sums,
                                              uint64_t number, cudaStream_t stream) MOE_CHECKED;
/* Stores the records of the partners into the memory of this domain's slots. */
struct moe_status moe_cuda_launch_relay_forward(const struct moe_cuda_pass *pass,
                                                const struct moe_cuda_net_pass *n, uint32_t ctas,
                                                cudaStream_t stream) MOE_CHECKED;
/* Adds the domain's partials for the partners' tokens, into far_out. */
struct moe_status moe_cuda_launch_relay_gather(const struct moe_cuda_pass *pass,
                                               const struct moe_cuda_net_pass *n, uint32_t ctas,
                                               cudaStream_t stream) MOE_CHECKED;

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
