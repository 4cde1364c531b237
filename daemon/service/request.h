/* SPDX-License-Identifier: Apache-2.0 */
/* One Forward request from its message to its answer: checks, memory of its tensors, and the
 * answer's head and parts. Unary calls and items of a stream are the same here:
 * ForwardStreamRequest and ForwardStreamResponse have all fields of the unary messages and two
 * more.
 *
 * It does not queue, wait or compute. */
#ifndef MOE_SERVICE_REQUEST_H
#define MOE_SERVICE_REQUEST_H

#include "models/models.h"
#include "rpc/msg.h"
#include "schedule/work.h"
#include "service/info.h"
#include "service/request_checks.h"
#include "service/staging.h"
#include "training/training.h"

struct moe_rpc_call;

/* Input of the checks, and source of a request's memory. */
struct moe_request_context {
    const struct moe_service_info *info;
    struct moe_staging *staging;
    struct moe_models *models;  /* NULL: the default model alone */
    struct moe_train *training; /* NULL: no pass can be retained */
    uint64_t weights_version;
    struct moe_standing worker;
    /* See moe_service_config; with the call that the message came by. */
    struct moe_status (*may_retain)(void *ctx, const struct moe_rpc_call *call);
    void *may_retain_ctx;
    const struct moe_rpc_call *call;
};

/* moe_pass_record.head of a forward pass. The record's data are x [T,H], and at the offsets given
 * the routing as used: ids [T,K] and weights [T,K]. */
struct moe_retained_pass {
    uint32_t layer, tokens, top_k;
    enum moe_dtype dtype;
    enum moe_routing_mode mode; /* MOE_ROUTE_IDS or MOE_ROUTE_IDS_WEIGHTS */
    uint64_t weights_version, lineage;
    uint64_t step, epoch; /* moe_work.retained_name, answered_epoch */
    size_t x_bytes, ids_at, weights_at;
};

_Static_assert(sizeof(struct moe_retained_pass) <= MOE_PASS_RECORD_HEAD,
               "a retained pass needs more head");

struct moe_request {
    struct moe_work work;              /* points into the buffers below */
    const struct moe_layer_spec *spec; /* of the layer asked for */
    struct moe_models *models;
    const struct moe_added_model *model; /* a reference; NULL: the default model */
    bool finished;                       /* moe_request_finish was called */
    uint64_t id;                         /* of a stream's item, 0 otherwise; set on failure too */
    uint64_t received_ns;
    uint64_t answered_ns; /* when moe_request_answer read the clock for server_ns; 0: it did not */
    bool return_routing;
    enum moe_parts parts;
    /* Retained for Backward under (retain_session, retain_id); NULL: not requested, or no room. */
    struct moe_pass_record *pass;
    char retain_session[MOE_TRAINING_NAME_MAX + 1];
    uint64_t retain_id;
    struct moe_train *training;
    /* The tensors as received, and one buffer for the engine's other inputs and outputs; NULL =
     * none. */
    struct moe_buffer *x, *ids, *weights, *token_ids, *results;
};

/* Parses and checks `m`, in this order: wire format, bytes in flight, model, layer, dtype, shape,
 * routing, references, parts, retention, epoch and version, state of the worker. Returns the first
 * error. On failure the request has no memory. `m` stays the caller's. */
struct moe_status moe_request_parse(struct moe_request *r,
                                    const struct moe_request_context *context,
                                    struct moe_rpc_msg *m) MOE_CHECKED;

/* Bytes of an answer's head; the latter with re-homed experts, of which each has at most two. */
enum { MOE_REQUEST_HEAD_PLAIN = 512, MOE_REQUEST_HEAD_MAX = 512 + 2 * MOE_MAX_EXPERTS };

/* The answer to a successful request; puts a retained pass into the store. `head` has
 * MOE_REQUEST_HEAD_MAX bytes and is part of `out`, as are references to the request's buffers. */
void moe_request_answer(struct moe_request *r, uint8_t *head, struct moe_rpc_out *out);
/* A stream's answer to a failed request. */
void moe_request_answer_error(uint64_t id, const struct moe_status *error, uint8_t *head,
                              struct moe_rpc_out *out);

/* The answer is made: the request keeps no added model in use any longer. */
void moe_request_finish(struct moe_request *r);
/* Drops the request's references to buffers and its model; answers on their way have separate ones.
 */
void moe_request_release(struct moe_request *r);

#endif
