/* SPDX-License-Identifier: Apache-2.0 */
/* The captured steps of a session: one CUDA graph per shape of a step and step slot, made when a
 * shape is first seen and launched from then on. It knows neither layers' weights nor tokens: those
 * are in the step parameters (step_params.h), so all layers of a shape share a graph.
 *
 * The number of shapes that are kept is bounded; the one that was not used for longest makes room.
 */
#ifndef MOE_CUDA_GRAPH_H
#define MOE_CUDA_GRAPH_H

#include "cuda/layer/layer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_CUDA_STEP_SLOTS = 2,  /* steps of a session that may be unfinished */
    MOE_CUDA_MAX_GRAPHS = 64, /* shapes that are kept: a dozen buckets of a few kinds of layers */
    MOE_CUDA_KEY_WORDS = 36,
};

/* All that the launches of a step depend on, but for the session's memory. `retains`: it leaves
 * gate and up for a backward pass. */
struct moe_cuda_graph_key {
    uint32_t word[MOE_CUDA_KEY_WORDS];
};
void moe_cuda_graph_key_of(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t bucket,
                           bool retains, struct moe_cuda_graph_key *out);

/* A shape's steps, ready to be launched. */
struct moe_cuda_graph {
    struct moe_cuda_graph_key key;
    cudaGraphExec_t exec[MOE_CUDA_STEP_SLOTS]; /* NULL: the entry is free, if it has no holders */
    uint64_t taken;                            /* number of the last take */
    uint32_t holders; /* atomic: steps that have taken it and not given it back */
};

struct moe_cuda_graphs {
    /* For capturing and uploading; nothing else runs on it. Of the highest priority, so that what
     * is captured on it goes before what is captured beside it. */
    cudaStream_t stream;
    uint64_t takes;
    struct moe_cuda_graph graph[MOE_CUDA_MAX_GRAPHS];
};

/* Puts the work of one step slot on `stream`, which captures it: launches and events only. */
typedef struct moe_status (*moe_cuda_capture_fn)(void *ctx, uint32_t step_slot,
                                                 cudaStream_t stream);

/* *g is zeroed. moe_cuda_graphs_close is to be called also after a failure. */
struct moe_status moe_cuda_graphs_open(struct moe_cuda_graphs *g) MOE_CHECKED;
/* Nothing that was taken runs any more. */
void moe_cuda_graphs_close(struct moe_cuda_graphs *g);

/* The graph of `key`; when there is none, `capture` is called once per step slot, and its work is
 * instantiated and brought to the device. Nothing is launched, so a failure concerns nobody else.
 * Every take wants a give when the step has finished, from any thread. */
struct moe_status moe_cuda_graphs_take(struct moe_cuda_graphs *g,
                                       const struct moe_cuda_graph_key *key,
                                       moe_cuda_capture_fn capture, void *ctx,
                                       struct moe_cuda_graph **out) MOE_CHECKED;
void moe_cuda_graphs_give(struct moe_cuda_graph *graph);

/* Forgets all graphs, because memory that they use has moved. The device has finished whatever was
 * launched; its takers still give back. */
void moe_cuda_graphs_clear(struct moe_cuda_graphs *g);

#ifdef __cplusplus
}
#endif

#endif
