/* SPDX-License-Identifier: Apache-2.0 */
/* Between a moe_client_forward and its messages: checks a request, packs it, and moves the answer
 * into the caller's memory.
 *
 * ForwardRequest and ForwardResponse are ForwardStreamRequest and ForwardStreamResponse without
 * their last fields (see moe/v1/expert.proto), so one pair of functions serves both. */
#ifndef MOE_CLIENT_WIRE_H
#define MOE_CLIENT_WIRE_H

#include "moe/client.h"
#include "moe/v1/types.pb-c.h"
#include "rpc/msg.h"

enum {
    /* A request's head: a model's name (255 bytes), a digest and a session's name (64 each), and 14
     * numbers with their tags, most of at most 6 bytes. */
    MOE_CLIENT_HEAD_MAX = 512,
    MOE_CLIENT_FIELD_REQUEST_ID = 30, /* of a stream's messages */
};

/* The model that a client is bound to. */
struct moe_client_wanted {
    char model[256]; /* name; "" = the default model */
    char digest[65]; /* of its weights, hexadecimal; "" = any */
};

/* Rows [first, first + tokens) of a forward, sent in one message. */
struct moe_client_rows {
    struct moe_client_forward *f;
    const struct moe_client_layer *layer;
    uint32_t first, tokens;
    /* At least 2: the worker gets so many parts of the batch with this number, for one step. */
    uint32_t parts;
    uint64_t batch;
};

/* An answer without its tensors. */
struct moe_client_answer {
    uint64_t epoch, weights_version;
    bool retained, retained_activations;
    struct moe_client_stages stages;
    uint64_t rehomed[MOE_MAX_EXPERTS / 64]; /* bit e: expert e is re-homed; if that was asked for */
};

/* Finds the layer with that index and checks its width. Errors: MOE_NOT_FOUND/LAYER_NOT_FOUND,
 * MOE_INVALID_ARGUMENT/SHAPE_MISMATCH. */
struct moe_status moe_client_wire_layer(const struct moe_client_info *info, uint32_t index,
                                        uint32_t hidden,
                                        const struct moe_client_layer **layer) MOE_CHECKED;

/* Checks that each of ids [tokens,K] is an id of the layer or -1. Errors:
 * MOE_INVALID_ARGUMENT/EXPERT_INDEX_RANGE. */
struct moe_status moe_client_wire_check_ids(const int32_t *ids, uint32_t tokens,
                                            const struct moe_client_layer *layer) MOE_CHECKED;

/* Checks the name of a session or checkpoint: 1 to 64 characters of [A-Za-z0-9._-], no dot first;
 * not NULL. Errors: MOE_INVALID_ARGUMENT/NAME_INVALID. */
struct moe_status moe_client_wire_check_name(const char *what, const char *name) MOE_CHECKED;

/* `t` may be NULL: zeros. */
struct moe_client_stages moe_client_wire_stages(const Moe__V1__StageTimes *t);

/* Turns INVALID_ARGUMENT, found in a server's answer, into MOE_INTERNAL. */
struct moe_status moe_client_wire_blame(struct moe_status st) MOE_CHECKED;

/* Checks `f` and finds its layer. Errors: MOE_INVALID_ARGUMENT (SHAPE_MISMATCH, DTYPE_UNSUPPORTED,
 * ROUTING_INVALID, EXPERT_INDEX_RANGE, VALUE_INVALID), MOE_NOT_FOUND/LAYER_NOT_FOUND,
 * MOE_UNIMPLEMENTED/UNSUPPORTED. */
struct moe_status moe_client_wire_check(const struct moe_client_info *info,
                                        const struct moe_client_forward *f,
                                        const struct moe_client_layer **layer) MOE_CHECKED;

/* Checks the limits of one message. Errors: MOE_INVALID_ARGUMENT with TOKEN_LIMIT or TOO_LARGE. */
struct moe_status moe_client_wire_check_rows(const struct moe_client_info *info,
                                             const struct moe_client_rows *rows) MOE_CHECKED;

/* Makes the message for `rows`. `head` has MOE_CLIENT_HEAD_MAX bytes. The parts point into the
 * caller's tensors; the transport calls `release(owner)` for each. `id` 0 = not on a stream. */
void moe_client_wire_pack(const struct moe_client_rows *rows, uint64_t id,
                          const struct moe_client_wanted *wanted, uint8_t *head,
                          void (*release)(void *owner), void *owner, struct moe_rpc_out *out);

/* Gives the caller what a whole answer says, or the joined answers to its parts say. */
void moe_client_wire_answer(struct moe_client_forward *f, const struct moe_client_answer *answer);

/* Moves the tensors of `m` into the caller's memory and checks that the answer fits the request.
 * The caller owns `m`. After a failure the contents of the caller's memory are undefined.
 * Errors: MOE_INTERNAL with MALFORMED, TRUNCATED, TOO_LARGE, DUPLICATE_TENSOR, SHAPE_MISMATCH or
 * DTYPE_UNSUPPORTED if the server's answer is broken; MOE_UNIMPLEMENTED/UNSUPPORTED if the server
 * does not know a field of the request; or the error in a stream's answer. */
struct moe_status moe_client_wire_unpack(const struct moe_client_rows *rows, struct moe_rpc_msg *m,
                                         struct moe_client_answer *answer) MOE_CHECKED;

#endif
