/* Control messages: small protobuf messages between daemons, packed for a stream and unpacked from
 * one. Tensors never come this way (see worker/service.h). */
#ifndef MOE_WORKER_CONTROL_H
#define MOE_WORKER_CONTROL_H

#include "moe/layer_spec.h"
#include "moe/v1/types.pb-c.h"
#include "rpc/client.h"
#include "rpc/server.h"

/* A message on its way out, packed; small ones live in `small`. */
struct moe_control_out {
    struct moe_rpc_out out;
    uint8_t *large; /* NULL where `small` is enough */
    uint8_t small[512];
};

/* The packed form of `message`. Give it back with moe_control_free once it is sent. */
struct moe_status moe_control_pack(const ProtobufCMessage *message,
                                   struct moe_control_out *out) MOE_CHECKED;
void moe_control_free(struct moe_control_out *out);

/* Packs and sends. */
struct moe_status moe_control_send(struct moe_rpc_stream *stream,
                                   const ProtobufCMessage *message) MOE_CHECKED;

/* `error` borrows the texts of `status`. */
void moe_control_error(const struct moe_status *status, Moe__V1__Error *error);
/* What messages say about a layer. */
void moe_control_layer(const struct moe_layer_spec *spec, Moe__V1__LayerInfo *out);
/* What a peer reported; `error` = NULL is success. */
struct moe_status moe_control_status(const Moe__V1__Error *error) MOE_CHECKED;

#endif
