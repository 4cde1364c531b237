/* A lane carries one step at a time: the segments that it is made of and the host memory that their
 * rows are gathered into and scattered from. The engine has two, so that one step's rows move while
 * the other computes.
 *
 * A training ticket takes a lane as well, with or without a step: so it ends in its turn.
 *
 * A step with a single segment needs no rows moved: the backend reads and writes the request's own
 * buffers. A lane takes no lock and is used by one thread. */
#ifndef MOE_WORKER_LANE_H
#define MOE_WORKER_LANE_H

#include "worker/batcher.h"
#include "worker/training.h"

/* Capacity of a lane: tokens of the largest bucket, H and K over all layers. */
struct moe_lane_shape {
    uint32_t tokens, hidden, top_k;
};

struct moe_lane {
    const struct moe_backend *backend;
    struct moe_device *device;
    struct moe_lane_shape shape;
    /* the step */
    struct moe_ticket ticket;
    struct moe_segment *segments; /* [shape.tokens] */
    size_t segment_count;
    uint32_t tokens;       /* sum over the segments */
    struct moe_step *step; /* NULL: it could not be enqueued, and `failure` says why */
    struct moe_status failure;
    uint64_t weights_version; /* that the step uses */
    /* a training ticket */
    struct moe_train_work *train; /* the call, on its origin; NULL elsewhere */
    struct moe_train_call call;
    struct moe_train_turn turn;
    struct moe_ledger_outcome outcome;
    bool changing; /* the state of training may be half changed until the turn ends */
    /* host memory; rows of the layer at hand, packed */
    void *x, *y;                     /* [tokens, hidden] F32 at most */
    int32_t *ids_in, *ids_out;       /* [tokens, top_k] */
    float *weights_in, *weights_out; /* [tokens, top_k] */
    uint8_t *mode, *token_state;     /* [tokens] */
};

/* `lane` is zeroed. On failure nothing is left behind. */
struct moe_status moe_lane_init(struct moe_lane *lane, const struct moe_backend *backend,
                                struct moe_device *device,
                                const struct moe_lane_shape *shape) MOE_CHECKED;
/* A lane that was never initialised is ignored. */
void moe_lane_free(struct moe_lane *lane);

/* Rows in: gathers the segments and fills `args` but for `layer`. Adds to the requests' copy_in_ns.
 */
void moe_lane_gather(struct moe_lane *lane, const struct moe_layer_spec *spec,
                     struct moe_step_args *args);
/* Rows out, after the step has finished well. Adds to the requests' copy_out_ns. */
void moe_lane_scatter(struct moe_lane *lane, const struct moe_layer_spec *spec);
/* What the step says about the tokens of one segment, whose first row in the step is `row`:
 * success, or the failure of its first bad token. */
struct moe_status moe_lane_verdict(const struct moe_lane *lane, const struct moe_segment *segment,
                                   uint32_t row) MOE_CHECKED;

#endif
