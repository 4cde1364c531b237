/* SPDX-License-Identifier: Apache-2.0 */
/* One Forward request from its message to its answer: the checks, the memory its tensors live in,
 * and the answer's head and parts. Unary calls and items of a stream are the same here, because
 * ForwardStreamRequest and ForwardStreamResponse have all fields of the unary messages and two
 * more.
 *
 * It never queues, waits or computes. */
#ifndef MOE_SERVICE_REQUEST_H
#define MOE_SERVICE_REQUEST_H

#include "rpc/msg.h"
#include "schedule/work.h"
#include "service/info.h"
#include "service/staging.h"
#include "training/training.h"

/* What a request is checked against, and where its memory comes from. */
struct moe_request_context {
    const struct moe_service_info *info;
    struct moe_staging *staging;
    struct moe_train *training; /* NULL: nothing can be saved for Backward */
    uint64_t epoch;             /* of the committed view; 0 = there is none */
    uint64_t weights_version;
    bool draining;
};

/* What moe_pass_record.head says of a forward pass; its data are x [T,H], and at the offsets given
 * the routing as used, ids [T,K] and weights [T,K]. */
struct moe_saved_pass {
    uint32_t layer, tokens, top_k;
    enum moe_dtype dtype;
    enum moe_routing_mode mode; /* MOE_ROUTE_IDS or MOE_ROUTE_IDS_WEIGHTS */
    uint64_t weights_version, lineage;
    uint64_t step, epoch; /* moe_work.retained_name, answered_epoch */
    size_t x_bytes, ids_at, weights_at;
};

_Static_assert(sizeof(struct moe_saved_pass) <= MOE_PASS_RECORD_HEAD,
               "a saved pass needs more head");

struct moe_request {
    struct moe_work work;              /* points into the buffers below */
    const struct moe_layer_spec *spec; /* of the layer asked for */
    uint64_t id;                       /* of a stream's item, 0 otherwise; set on failure too */
    uint64_t received_ns;
    bool return_routing;
    /* Kept for Backward under this name; NULL: not asked for, or no room. */
    struct moe_pass_record *pass;
    char retain_session[MOE_TRAINING_NAME_MAX + 1];
    uint64_t retain_id;
    struct moe_train *training;
    /* The tensors as they came, and one buffer for what the engine reads and writes besides; NULL
     * where there is none. */
    struct moe_buffer *x, *ids, *weights, *results;
};

/* Parses and checks `m`, in this order: wire format, bytes in flight, model, layer, dtype, shape,
 * routing, references, saving, epoch and version, state of the worker. The first thing wrong is the
 * answer. On failure the request holds no memory. `m` stays the caller's. */
struct moe_status moe_request_parse(struct moe_request *r,
                                    const struct moe_request_context *context,
                                    struct moe_rpc_msg *m) MOE_CHECKED;

enum { MOE_REQUEST_HEAD_MAX = 512 }; /* bytes of an answer's head */

/* The answer to a request that has succeeded; a pass that is to be kept is kept. `head` has
 * MOE_REQUEST_HEAD_MAX bytes and is part of `out`, as are references to the request's buffers. */
void moe_request_answer(struct moe_request *r, uint8_t *head, struct moe_rpc_out *out);
/* A stream's answer to a request that has failed. */
void moe_request_answer_error(uint64_t id, const struct moe_status *error, uint8_t *head,
                              struct moe_rpc_out *out);

/* Lets go of the buffers; answers that are on their way keep theirs. */
void moe_request_release(struct moe_request *r);

#endif
