/* What the calls that run steps (step.c) and the capture of a step (step_capture.c) share: a lane,
 * which holds what belongs to one step, and what all steps of a session use. Internal to both. */
#ifndef MOE_CUDA_STEP_LANE_H
#define MOE_CUDA_STEP_LANE_H

#include "cuda/facts.h"
#include "cuda/graph.h"
#include "cuda/session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Offsets in a lane's buffer. From `ids` to the end is what a step answers besides y: it leaves in
 * one piece, as small copies cost the same as each other. */
struct moe_cuda_lane_layout {
    size_t x, mode, ids_in, weights_in, y, ids, weights, state, bytes;
};

/* Offsets in the scratch buffer. `done` counts rows of `base` that are there (ffn.h). */
struct moe_cuda_scratch_layout {
    size_t logits, hidden, out, base, done, shared, products, bytes;
};

/* What host and device tell each other of a step. */
struct moe_cuda_lane_mail {
    struct moe_cuda_facts facts;     /* to the device, by copy */
    struct moe_cuda_verdict verdict; /* stored by the device */
    /* Stored by the device: when each stage began, and when the last one ended; nanoseconds. 0: the
     * stage has no kernels, or runs beside others. */
    uint64_t began[MOE_STAGE_COUNT + 1];
    uint32_t rows_in_use; /* of a step that saves: by copy; padding included */
};

struct moe_step {
    struct moe_cuda_steps *owner;
    struct moe_step_args args;
    bool taken;
    bool done;  /* was held, and has an outcome */
    bool saves; /* it was given room for what a backward pass can use (saving.h) */
    struct moe_status outcome;
    struct moe_step_result result; /* of a step that was held */
    struct moe_cuda_task task;     /* over a network: to enqueue this step */
    bool refused; /* by this slot: nothing was enqueued. Valid once the task is done */
    struct moe_cuda_lane_layout at;
    struct moe_cuda_buffer tensors;
    char *answer;        /* pinned: `tensors` from at.ids on, when the step has finished */
    size_t answer_bytes; /* enough for every step of the session */
    struct moe_cuda_lane_mail *mail;           /* pinned */
    struct moe_cuda_lane_mail *mail_on_device; /* its address there */
    struct moe_cuda_facts *facts;              /* device memory */
    struct moe_cuda_graph *graph;              /* that it runs; held while it does */
    cudaEvent_t begun, came_in, left;          /* on the copy streams */
    cudaEvent_t computed;                      /* behind the graph */
};

/* Tiles of products that run beside something else (ggemm.h). Those of routed experts and of the
 * shared one may overlap. */
struct moe_cuda_step_deals {
    struct moe_cuda_ggemm_deal routed, shared;
};

struct moe_cuda_steps {
    struct moe_session *session;
    pthread_mutex_t lock; /* guards `taken` of the lanes */
    struct moe_step lane[MOE_CUDA_LANES];
    struct moe_cuda_buffer scratch;
    struct moe_cuda_scratch_layout at; /* of the step that is being enqueued */
    struct moe_cuda_step_deals *deals; /* device memory; zeros between steps */
    struct moe_cuda_graphs graphs;
    uint64_t buffers_moved; /* the device's figure when the graphs were made */
    /* While capturing: where the shared expert's kernels go, and where the branches part and meet.
     */
    cudaStream_t beside;
    cudaEvent_t parting, meeting;
};

static inline void *moe_cuda_lane_tensor(const struct moe_step *lane, size_t offset)
{
    return (char *)lane->tensors.data + offset;
}

/* What a graph is made of, besides the lane: from one step of its shape. */
struct moe_cuda_step_shape {
    struct moe_cuda_steps *steps;
    const struct moe_layer *layer;
    enum moe_dtype dtype;
    uint32_t bucket;
    struct moe_cuda_lane_layout at;
    bool saves;
};

/* The bytes of scratch that counts of the rows of `base` take for a bucket. */
size_t moe_cuda_step_done_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                uint32_t bucket);

/* Puts the kernels of a step on `stream`, all stages in their order, with the branches that go
 * beside them. `stream` captures, unless the session's rows travel over a network. `ctx`: struct
 * moe_cuda_step_shape; a moe_cuda_capture_fn. */
struct moe_status moe_cuda_step_capture(void *ctx, uint32_t lane, cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
