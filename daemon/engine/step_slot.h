/* SPDX-License-Identifier: Apache-2.0 */
/* A step slot carries one step at a time: its segments, and host memory for the routing and the
 * states of its tokens. The engine has two, so that one step's rows move while the other computes.
 *
 * A training ticket also takes a step slot, with or without a step, so that tickets end in order.
 *
 * No rows move here. A request that is alone in its step is computed in place, unless it is
 * `by_copy`. Otherwise the backend gets the segments, and moves their rows itself. A step slot
 * takes no lock and is used by one thread. */
#ifndef MOE_ENGINE_STEP_SLOT_H
#define MOE_ENGINE_STEP_SLOT_H

#include "schedule/batcher.h"

/* Capacity of a step slot: tokens of the largest bucket, H and K over all layers, and the memory of
 * a call's execution. */
struct moe_step_slot_shape {
    uint32_t tokens, hidden, top_k;
    size_t exec_bytes; /* see moe_call_ops */
};

struct moe_engine_model;

struct moe_step_slot {
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_step_slot_shape shape;
    /* the step */
    struct moe_ticket ticket;
    struct moe_engine_model *model; /* of the ticket; NULL for exclusive kinds */
    size_t layer;                   /* index among the model's, of kinds with a layer */
    struct moe_segment *segments;   /* [shape.tokens] */
    size_t segment_count;
    struct moe_step_segment *places; /* [shape.tokens] where their rows are, for the backend */
    uint32_t tokens;                 /* sum over the segments */
    struct moe_step *step;           /* NULL with a `failure`: it could not be enqueued */
    struct moe_status failure;
    bool timed; /* a request wants times: the three below are measured */
    uint64_t taken_ns, enqueued_ns, ended_ns; /* see moe_step_times */
    uint64_t weights_version;                 /* used by the step */
                                              /* a training ticket */
    struct moe_train_work *call;              /* on the origin; NULL on other slots */
    struct moe_call_exec
        *exec; /* [shape.exec_bytes], of tickets with a descriptor; aligned for any type */
    /* host memory; rows of the step's layer, packed */
    int32_t *ids_out;              /* [tokens, top_k] */
    float *weights_out;            /* [tokens, top_k] */
    uint8_t *mode, *token_state;   /* [tokens] */
    struct moe_step_counts counts; /* of a forward step */
};

/* `step_slot` is zeroed. On failure nothing is left behind. */
struct moe_status moe_step_slot_init(struct moe_step_slot *step_slot,
                                     const struct moe_backend *backend, struct moe_device *device,
                                     const struct moe_step_slot_shape *shape) MOE_CHECKED;
/* A step slot that was never initialised is ignored. */
void moe_step_slot_free(struct moe_step_slot *step_slot);

/* Fills `args` but for `layer`: where the rows of the segments are. */
void moe_step_slot_args(struct moe_step_slot *step_slot, const struct moe_layer_spec *spec,
                        struct moe_step_args *args);
/* The outcome of one segment that begins at row `row` of the step: success, or the failure of its
 * first bad token. */
struct moe_status moe_step_slot_outcome(const struct moe_step_slot *step_slot,
                                        const struct moe_segment *segment,
                                        uint32_t row) MOE_CHECKED;

#endif
