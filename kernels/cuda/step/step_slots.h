/* SPDX-License-Identifier: Apache-2.0 */
/* The two step slots of a session, one per unfinished step, and what belongs to each. Internal to
 * step_slots.c, stages.c and step.c. */
#ifndef MOE_CUDA_STEP_SLOTS_H
#define MOE_CUDA_STEP_SLOTS_H

#include "base/mutex.h"
#include "cuda/core/executor.h"
#include "cuda/layer/step_params.h"
#include "cuda/step/graph.h"
#include "cuda/step/segments.h"
#include "cuda/step/steps.h"

enum { MOE_CUDA_STEP_LINE = 256 /* alignment of tensors inside a buffer */ };

/* Offsets in a step slot's buffer. From `ids` to the end lies a step's answer except y; it
 * leaves in one copy, because a small copy costs as much as a larger one. */
struct moe_cuda_step_layout {
    size_t x, mode, ids_in, weights_in, y, ids, weights, state, bytes;
};

/* Offsets in the scratch buffer. In a latent space, `z` and `u` are the experts' inputs and sums;
 * their projection lies over `hidden`, which nothing reads after down. */
struct moe_cuda_step_scratch {
    size_t logits, hidden, base, shared, products, z, u, bytes;
};

/* What the host gives the device for a step: an argument of the gather, or one copy. */
struct moe_cuda_step_upload {
    struct moe_cuda_step_params params;
    struct moe_cuda_scatter scatter;    /* zeros */
    struct moe_cuda_segment segments[]; /* as many as the session has tokens */
};

_Static_assert(sizeof(struct moe_cuda_step_upload) % 8 == 0 &&
                   sizeof(struct moe_cuda_segment) % 8 == 0,
               "an upload is moved in words of 8 bytes");

/* What the device stores for the host. */
struct moe_cuda_step_message {
    struct moe_cuda_step_outcome outcome; /* stored by the device */
    /* Stored by the device: when each stage began and when the last one ended, in nanoseconds. 0:
     * the stage has no kernels. */
    uint64_t began[MOE_STAGE_COUNT + 1];
    struct moe_cuda_step_counts counts; /* stored by the device */
    uint32_t rows_in_use;               /* of a step that retains: copied here; padding included */
};

struct moe_step {
    struct moe_cuda_steps *owner;
    struct moe_step_args args;
    bool taken;
    bool is_alone;         /* when it was taken, no other step was unfinished */
    uint32_t begun_stages; /* as last seen */
    bool retains;          /* has room for what a backward pass can use (retain.h) */
    /* A task of the executor makes the pass, or starts the forward step after earlier tasks. */
    bool deferred;
    moe_cuda_pass_fn pass; /* NULL: a forward step */
    struct moe_cuda_task executor_task;
    struct moe_backward_args backward; /* of the pass */
    struct moe_step_result result;     /* of the pass, or of a step that could not start */
    struct moe_cuda_task net_task;     /* over a network: to enqueue this step */
    bool refused; /* by this slot: nothing was enqueued. Valid once the task is done */
    struct moe_cuda_step_layout at;
    struct moe_cuda_buffer tensors;
    char *answer;        /* pinned: `tensors` from at.ids on, when the step has finished */
    size_t answer_bytes; /* enough for every step of the session */
    struct moe_cuda_step_message *message;           /* pinned */
    struct moe_cuda_step_message *message_on_device; /* its address there */
    struct moe_cuda_step_upload *upload;             /* pinned */
    struct moe_cuda_step_upload *on_device;          /* device memory */
    size_t upload_bytes;                             /* of each of the two */
    uint32_t segments;                               /* in `upload`; 0: the step has none */
    bool completes;                                  /* one of them has a completion */
    struct moe_cuda_graph *graph;     /* the graph that it runs, until it has finished */
    cudaEvent_t begun, came_in, left; /* on the copy streams */
    cudaEvent_t computed;             /* after the graph */
};

/* A tensor of a step, from its offset in `at`. */
static inline void *moe_cuda_step_tensor(const struct moe_step *step, size_t offset)
{
    return (char *)step->tensors.data + offset;
}

struct moe_cuda_steps {
    struct moe_session *session;
    struct moe_cuda_executor *executor;
    struct moe_mutex lock; /* guards `taken` of the step slots */
    struct moe_step step_slot[MOE_CUDA_STEP_SLOTS];
    struct moe_cuda_buffer scratch;
    struct moe_cuda_step_scratch at; /* of the step that is being enqueued */
    struct moe_cuda_graphs graphs;
    uint64_t buffers_moved; /* the device's figure when the graphs were made */
    /* While capturing: the stream of kernels that need no routing, where it forks, where it has
     * quantised the rows, and where it joins with the shared expert's result. */
    cudaStream_t side_stream;
    cudaEvent_t fork_event, rows_event, join_event;
};

/* Takes a free step slot, the caller's until moe_cuda_step_slot_give.
 * Errors: MOE_FAILED_PRECONDITION if none is free. */
struct moe_status moe_cuda_step_slot_take(struct moe_cuda_steps *steps,
                                          struct moe_step **out) MOE_CHECKED;
void moe_cuda_step_slot_give(struct moe_step *step);

/* Waits for all work on the device's streams of steps. */
void moe_cuda_step_slots_wait(struct moe_device *device);

#endif
