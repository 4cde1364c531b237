/* SPDX-License-Identifier: Apache-2.0 */
/* Between a moe_client_forward and its messages: what is wrong with a request before it is sent,
 * the request's head and parts, and the answer's way into the caller's memory.
 *
 * ForwardRequest and ForwardResponse are ForwardStreamRequest and ForwardStreamResponse without
 * their last fields (see moe/v1/expert.proto), so one pair of functions serves both. */
#ifndef MOE_CLIENT_WIRE_H
#define MOE_CLIENT_WIRE_H

#include "moe/client.h"
#include "moe/v1/types.pb-c.h"
#include "rpc/msg.h"

enum {
    MOE_CLIENT_HEAD_MAX = 256,        /* a request's head: small numbers and a session's name */
    MOE_CLIENT_FIELD_REQUEST_ID = 30, /* of a stream's messages */
};

/* Rows [first, first + tokens) of a forward: what one message carries. */
struct moe_client_rows {
    struct moe_client_forward *f;
    const struct moe_client_layer *layer;
    uint32_t first, tokens;
};

/* What an answer says besides its tensors. */
struct moe_client_answer {
    uint64_t epoch, weights_version;
    bool retained, retained_activations;
    struct moe_client_stages stages;
};

/* The layer of that index, `hidden` wide. Errors: MOE_NOT_FOUND/LAYER_NOT_FOUND,
 * MOE_INVALID_ARGUMENT/SHAPE_MISMATCH. */
struct moe_status moe_client_wire_layer(const struct moe_client_info *info, uint32_t index,
                                        uint32_t hidden,
                                        const struct moe_client_layer **layer) MOE_CHECKED;

/* Ids [tokens,K] that the layer knows, or -1. Errors: MOE_INVALID_ARGUMENT/EXPERT_INDEX_RANGE. */
struct moe_status moe_client_wire_check_ids(const int32_t *ids, uint32_t tokens,
                                            const struct moe_client_layer *layer) MOE_CHECKED;

/* Whether that is a name of a session or checkpoint: 1 to 64 characters of [A-Za-z0-9._-], no dot
 * first. NULL is none. Errors: MOE_INVALID_ARGUMENT/NAME_INVALID. */
struct moe_status moe_client_wire_check_name(const char *what, const char *name) MOE_CHECKED;

/* `t` may be NULL: zeros. */
struct moe_client_stages moe_client_wire_stages(const Moe__V1__StageTimes *t);

/* What is wrong with a server's answer, as MOE_INTERNAL; other failures stay as they are. */
struct moe_status moe_client_wire_blame(struct moe_status st) MOE_CHECKED;

/* The layer of `f`, or why `f` must not be sent. Errors: MOE_INVALID_ARGUMENT (SHAPE_MISMATCH,
 * DTYPE_UNSUPPORTED, ROUTING_INVALID, EXPERT_INDEX_RANGE), MOE_NOT_FOUND/LAYER_NOT_FOUND. */
struct moe_status moe_client_wire_check(const struct moe_client_info *info,
                                        const struct moe_client_forward *f,
                                        const struct moe_client_layer **layer) MOE_CHECKED;

/* Limits of one message: MOE_INVALID_ARGUMENT with TOKEN_LIMIT or TOO_LARGE. */
struct moe_status moe_client_wire_check_rows(const struct moe_client_info *info,
                                             const struct moe_client_rows *rows) MOE_CHECKED;

/* The message for `rows`: `head` holds MOE_CLIENT_HEAD_MAX bytes, the parts point into the caller's
 * tensors and are released with `release(owner)`. `id` 0 = not on a stream. */
void moe_client_wire_pack(const struct moe_client_rows *rows, uint64_t id, uint8_t *head,
                          void (*release)(void *owner), void *owner, struct moe_rpc_out *out);

/* Moves the tensors of `m` into the caller's memory and checks that the answer fits the request.
 * `m` stays the caller's. What was written is undefined after a failure.
 * Errors: MOE_INTERNAL with MALFORMED, TRUNCATED, TOO_LARGE, DUPLICATE_TENSOR, SHAPE_MISMATCH or
 * DTYPE_UNSUPPORTED when the server's answer is broken; or the error that a stream's answer
 * carries. */
struct moe_status moe_client_wire_unpack(const struct moe_client_rows *rows, struct moe_rpc_msg *m,
                                         struct moe_client_answer *answer) MOE_CHECKED;

#endif
