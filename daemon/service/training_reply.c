/* SPDX-License-Identifier: Apache-2.0 */
/* What all methods of the training service answer with. */
#include "service/training_service_state.h"

struct moe_status moe_training_service__out_of_memory(void)
{
    return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, 100, "out of memory");
}

void moe_training_service__count(struct moe_training_service *s, enum moe_service_rpc rpc,
                                 const struct moe_status *st, uint64_t received_ns)
{
    moe_service_metrics_end(moe_service_counts(s->config.service), rpc, st, received_ns);
}

/* ---------------------------------------------------------------------------- answers */

enum { ANSWER_BYTES = MOE_RPC_HEAD_MAX };

/* A state names three checkpoints and a problem; a Save the checkpoints that it removed. */
_Static_assert(MOE_CHECKPOINT_REMOVED_MAX *(MOE_CHECKPOINT_NAME_MAX + 2) + 64 <= ANSWER_BYTES,
               "the answer to a Save may be longer than what holds it");

void moe_training_service__reply(struct moe_rpc_call *call, const ProtobufCMessage *answer)
{
    uint8_t bytes[ANSWER_BYTES];
    size_t length = protobuf_c_message_get_packed_size(answer);
    MOE_INVARIANT(length <= sizeof bytes);
    protobuf_c_message_pack(answer, bytes);
    const struct moe_rpc_out out = {.head = bytes, .head_length = length};
    moe_rpc_reply(call, &out);
}
