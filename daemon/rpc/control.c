/* SPDX-License-Identifier: Apache-2.0 */
/* Packs through protobuf-c into memory that the sending function copies, so it may be freed at
 * once. */
#include "rpc/control.h"

#include <stdlib.h>

struct moe_status moe_control_pack(const ProtobufCMessage *message, struct moe_control_out *out)
{
    size_t length = protobuf_c_message_get_packed_size(message);
    uint8_t *to = out->small;
    out->large = NULL;
    if (length > sizeof out->small) {
        to = out->large = malloc(length);
        if (to == NULL)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "no memory for a control message");
    }
    out->out = (struct moe_rpc_out){.head = to};
    out->out.head_length = protobuf_c_message_pack(message, to);
    return moe_ok();
}

void moe_control_free(struct moe_control_out *out)
{
    free(out->large);
    out->large = NULL;
}

struct moe_status moe_control_send(struct moe_rpc_stream *stream, const ProtobufCMessage *message)
{
    struct moe_control_out packed;
    MOE_TRY(moe_control_pack(message, &packed));
    struct moe_status st = moe_rpc_stream_send(stream, &packed.out);
    moe_control_free(&packed);
    return st;
}

void moe_control_error(const struct moe_status *status, Moe__V1__Error *error)
{
    moe__v1__error__init(error);
    error->code = (uint32_t)status->code;
    /* protobuf-c has no const strings; packing only reads them. */
    error->reason = status->reason == MOE_REASON_NONE ? (char *)protobuf_c_empty_string
                                                      : (char *)moe_reason_name(status->reason);
    error->message = (char *)status->text;
    error->retry_after_ms = status->retry_after_ms;
}

struct moe_status moe_control_status(const Moe__V1__Error *error)
{
    if (error == NULL || error->code == MOE_OK)
        return moe_ok();
    enum moe_code code =
        error->code <= MOE_UNAUTHENTICATED ? (enum moe_code)error->code : MOE_UNKNOWN;
    return moe_error_retry(code, moe_reason_from_name(error->reason), error->retry_after_ms, "%s",
                           error->message);
}
