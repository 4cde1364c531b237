/* One Forward request from its message to its answer: the checks, the memory its tensors live in,
 * and the answer's head and parts. Unary calls and items of a stream are the same here, because
 * ForwardStreamRequest and ForwardStreamResponse have all fields of the unary messages and two
 * more.
 *
 * It never queues, waits or computes. */
#ifndef MOE_WORKER_REQUEST_H
#define MOE_WORKER_REQUEST_H

#include "rpc/msg.h"
#include "worker/service.h"

/* What a request is checked against, and where its memory comes from. */
struct moe_request_context {
    const struct moe_service_info *info;
    struct moe_staging *staging;
    uint64_t epoch; /* of the committed view; 0 = there is none */
    bool draining;
};

struct moe_request {
    struct moe_work work;              /* points into the buffers below */
    const struct moe_layer_spec *spec; /* of the layer asked for */
    uint64_t id;                       /* of a stream's item, 0 otherwise; set on failure too */
    uint64_t received_ns;
    /* The tensors as they came, and one buffer for what the engine reads and writes besides; NULL
     * where there is none. */
    struct moe_buffer *x, *ids, *weights, *results;
};

/* Parses and checks `m`, in this order: wire format, bytes in flight, model, layer, dtype, shape,
 * routing, references, epoch and version, state of the worker. The first thing wrong is the answer.
 * On failure the request holds no memory. `m` stays the caller's. */
struct moe_status moe_request_parse(struct moe_request *r,
                                    const struct moe_request_context *context,
                                    struct moe_rpc_msg *m) MOE_CHECKED;

enum { MOE_REQUEST_HEAD_MAX = 512 }; /* bytes of an answer's head */

/* The answer to a request that has succeeded. `head` has MOE_REQUEST_HEAD_MAX bytes and is part of
 * `out`, as are references to the request's buffers. */
void moe_request_answer(struct moe_request *r, const struct moe_service_info *info, uint8_t *head,
                        struct moe_rpc_out *out);
/* A stream's answer to a request that has failed. */
void moe_request_answer_error(uint64_t id, const struct moe_status *error, uint8_t *head,
                              struct moe_rpc_out *out);

/* Lets go of the buffers; answers that are on their way keep theirs. */
void moe_request_release(struct moe_request *r);

#endif
