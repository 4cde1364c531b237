/* SPDX-License-Identifier: Apache-2.0 */
/* One Backward request from its message to its answer: the checks, the memory of its tensors, what
 * was saved for it, and the answer that is cached. It never queues, waits or computes. */
#ifndef MOE_SERVICE_TRAINING_REQUEST_H
#define MOE_SERVICE_TRAINING_REQUEST_H

#include "rpc/msg.h"
#include "service/service.h"
#include "training/training.h"

struct moe_backward_context {
    const struct moe_service_info *info;
    struct moe_staging *staging;
    struct moe_train *training;
    uint64_t epoch; /* of the committed view; 0 = there is none */
    bool draining;
};

/* One training call of a client. All fields below `answer` are of a Backward only. */
struct moe_training_request {
    struct moe_train_work work; /* points into the buffers below */
    struct moe_train_call call;
    struct moe_train_answer answer;

    const struct moe_layer_spec *spec;
    uint64_t received_ns;
    bool return_weights; /* gradients of the routing weights are asked for */
    bool whole;          /* x and routing are there, sent or saved: the content is complete */
    bool used_retained;
    struct moe_buffer *x, *dy, *ids, *weights,
        *wide_ids;                  /* as they came; NULL where there is none */
    struct moe_pass_record *pass;   /* the saved forward pass that is used */
    struct moe_pass_record *cached; /* memory of the answer; see prepare */
};

/* What moe_pass_record.head says of a cached answer; its data are dx [T,H], and at `weights_at` the
 * gradients of the weights [T,K]. */
struct moe_cached_answer {
    struct moe_ledger_outcome outcome;
    struct moe_content content;
    uint32_t tokens, hidden, top_k;
    enum moe_dtype dtype;
    enum moe_code code; /* a pass that ended with a bad token is recorded as well */
    enum moe_reason reason;
    bool used_retained, used_activations;
    uint32_t dx_bytes, weights_at, weights_bytes;
};

/* Parses and checks `m`, in this order: wire format, bytes in flight, model, layer, dtype, shape,
 * names and numbers, routing, state of the worker. Then looks for the saved forward pass where the
 * message brings no x. On failure the request holds no memory. `m` stays the caller's. */
struct moe_status moe_backward_parse(struct moe_training_request *r,
                                     const struct moe_backward_context *context,
                                     struct moe_rpc_msg *m) MOE_CHECKED;
/* Takes the memory of the answer: now the request can be given to the engine. */
struct moe_status moe_backward_prepare(struct moe_training_request *r,
                                       const struct moe_backward_context *context) MOE_CHECKED;
/* The pass has been run, with this end: the answer is cached from now on, a saved pass of this id
 * is not, whether or not it was used. */
void moe_backward_cache(struct moe_training_request *r, struct moe_train *training,
                        const struct moe_status *end);

_Static_assert(sizeof(struct moe_cached_answer) <= MOE_PASS_RECORD_HEAD,
               "a cached answer needs more head");

enum { MOE_BACKWARD_HEAD_MAX = 512 };

/* Whether the cached answer is one to what `r` asks, as far as it says anything. */
bool moe_backward_matches(const struct moe_pass_record *cached,
                          const struct moe_training_request *r);
/* The end that a cached answer tells of. */
struct moe_status moe_backward_cached_status(const struct moe_pass_record *cached);
/* The answer out of a cached one, whose data it references; `head` has MOE_BACKWARD_HEAD_MAX bytes.
 */
void moe_backward_answer(const struct moe_training_request *r, struct moe_pass_record *cached,
                         bool repeated, uint8_t *head, struct moe_rpc_out *out);

void moe_backward_release(struct moe_training_request *r);

#endif
