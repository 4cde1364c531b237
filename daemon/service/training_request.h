/* SPDX-License-Identifier: Apache-2.0 */
/* One Backward request from its message to its answer: the checks, the memory of its tensors, the
 * retained forward pass, and the cached answer. It never queues, waits or computes. */
#ifndef MOE_SERVICE_TRAINING_REQUEST_H
#define MOE_SERVICE_TRAINING_REQUEST_H

#include "rpc/msg.h"
#include "service/service.h"
#include "training/training.h"

struct moe_backward_context {
    const struct moe_service_info *info;
    struct moe_staging *staging;
    struct moe_train *training;
    struct moe_standing worker;
};

/* Tensors of the message, in the order of their field numbers. */
enum {
    MOE_BACKWARD_IDS,
    MOE_BACKWARD_WEIGHTS,
    MOE_BACKWARD_DY,
    MOE_BACKWARD_X,
    MOE_BACKWARD_PARTS
};

/* One training call of a client. All fields below `answer` are of a Backward only. */
struct moe_training_request {
    struct moe_train_work work; /* points into the buffers below */
    struct moe_train_call call;
    struct moe_train_answer answer;

    const struct moe_layer_spec *spec;
    uint64_t received_ns;
    bool return_weights; /* gradients of the routing weights are asked for */
    bool whole;          /* x and routing are there, sent or retained: the content is complete */
    bool used_retained;
    struct {
        struct moe_buffer *buffer; /* NULL: the message has no such tensor */
        size_t bytes;
    } parts[MOE_BACKWARD_PARTS];
    struct moe_buffer *wide_ids;    /* ids of another format than int32, as int32; or NULL */
    struct moe_pass_record *pass;   /* the retained forward pass, if it is used */
    struct moe_pass_record *cached; /* memory of the answer; see prepare */
};

/* moe_pass_record.head of a cached answer. Its data are dx [T,H], and at `weights_at` the gradients
 * of the weights [T,K]. */
struct moe_cached_answer {
    struct moe_ledger_outcome outcome;
    struct moe_content content;
    uint32_t tokens, hidden, top_k;
    enum moe_dtype dtype;
    enum moe_code code; /* a pass with bad tokens is recorded as well */
    enum moe_reason reason;
    bool used_retained, used_activations;
    uint32_t dx_bytes, weights_at, weights_bytes;
};

/* Parses and checks `m`, in this order: wire format, bytes in flight, model, layer, dtype, shape,
 * names and numbers, routing, state of the worker. If the message has no x, looks for the retained
 * forward pass. On failure the request holds no memory. `m` stays the caller's. */
struct moe_status moe_backward_parse(struct moe_training_request *r,
                                     const struct moe_backward_context *context,
                                     struct moe_rpc_msg *m) MOE_CHECKED;
/* Takes the memory of the answer; then the request can go to the engine. */
struct moe_status moe_backward_prepare(struct moe_training_request *r,
                                       const struct moe_backward_context *context) MOE_CHECKED;
/* The pass has ended with `end`: caches the answer, and drops the retained pass of this id, used or
 * not. */
void moe_backward_cache(struct moe_training_request *r, struct moe_train *training,
                        const struct moe_status *end);

_Static_assert(sizeof(struct moe_cached_answer) <= MOE_PASS_RECORD_HEAD,
               "a cached answer needs more head");

enum { MOE_BACKWARD_HEAD_MAX = 512 };

/* The cached answer fits the content of `r`; only its header, without x. */
bool moe_backward_matches(const struct moe_pass_record *cached,
                          const struct moe_training_request *r);
/* The status of a cached answer. */
struct moe_status moe_backward_cached_status(const struct moe_pass_record *cached);
/* Builds the answer, with references to the cached data; `head` has MOE_BACKWARD_HEAD_MAX bytes. */
void moe_backward_answer(const struct moe_training_request *r, struct moe_pass_record *cached,
                         bool repeated, uint8_t *head, struct moe_rpc_out *out);

void moe_backward_release(struct moe_training_request *r);

#endif
