/* SPDX-License-Identifier: Apache-2.0 */
/* Control messages: small protobuf messages between daemons, packed for a stream and unpacked from
 * one. They never contain tensors. */
#ifndef MOE_RPC_CONTROL_H
#define MOE_RPC_CONTROL_H

#include "moe/v1/types.pb-c.h"
#include "rpc/client.h"
#include "rpc/server.h"

/* A packed message to send; `small` holds it if it fits. */
struct moe_control_out {
    struct moe_rpc_out out;
    uint8_t *large; /* NULL where `small` is enough */
    uint8_t small[512];
};

/* Packs `message`. Free with moe_control_free after sending. */
struct moe_status moe_control_pack(const ProtobufCMessage *message,
                                   struct moe_control_out *out) MOE_CHECKED;
void moe_control_free(struct moe_control_out *out);

/* Packs and sends. */
struct moe_status moe_control_send(struct moe_rpc_stream *stream,
                                   const ProtobufCMessage *message) MOE_CHECKED;

/* `error` borrows the texts of `status`. */
void moe_control_error(const struct moe_status *status, Moe__V1__Error *error);
/* The status that a peer reported; `error` = NULL is success. */
struct moe_status moe_control_status(const Moe__V1__Error *error) MOE_CHECKED;

#endif
