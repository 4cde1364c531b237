/* SPDX-License-Identifier: Apache-2.0 */
/* The captured steps of a session: one CUDA graph per shape and step slot, made when a shape is
 * first seen and launched from then on. It knows neither weights nor tokens: those are in the step
 * parameters (step_params.h), so all layers of a shape share a graph.
 *
 * The number of cached shapes is bounded; the least recently used is replaced. */
#ifndef MOE_CUDA_GRAPH_H
#define MOE_CUDA_GRAPH_H

#include "cuda/core/device.h"
#include "cuda/plan/graph_key.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_CUDA_STEP_SLOTS = 2,  /* steps of a session that may be unfinished */
    MOE_CUDA_MAX_GRAPHS = 64, /* cached shapes: a dozen buckets of a few kinds of layers */
};

/* A shape's steps, ready to be launched. */
struct moe_cuda_graph {
    struct moe_cuda_graph_key key;
    cudaGraphExec_t exec[MOE_CUDA_STEP_SLOTS]; /* NULL: the entry is free, if `holders` is 0 */
    uint64_t taken;                            /* value of `takes` at the last take */
    uint32_t holders;                          /* atomic: steps that use the graph */
};

struct moe_cuda_graphs {
    /* For capturing and uploading only. It has the highest priority, so work captured on it runs
     * before work captured on the side stream. */
    cudaStream_t stream;
    uint64_t takes;
    struct moe_cuda_graph graph[MOE_CUDA_MAX_GRAPHS];
};

/* Puts the work of one step slot on `stream`, which captures it: only launches and events. */
typedef struct moe_status (*moe_cuda_capture_fn)(void *ctx, uint32_t step_slot,
                                                 cudaStream_t stream);

/* *g is zeroed. Call moe_cuda_graphs_close also after a failure. */
struct moe_status moe_cuda_graphs_open(struct moe_cuda_graphs *g) MOE_CHECKED;
/* No graph may run any more. */
void moe_cuda_graphs_close(struct moe_cuda_graphs *g);

/* The graph of `key`. If there is none, `capture` is called once per step slot, and the work is
 * instantiated and uploaded. Nothing is launched, so a failure stays local to this slot. When the
 * step has finished, give the graph back, from any thread. */
struct moe_status moe_cuda_graphs_take(struct moe_cuda_graphs *g,
                                       const struct moe_cuda_graph_key *key,
                                       moe_cuda_capture_fn capture, void *ctx,
                                       struct moe_cuda_graph **out) MOE_CHECKED;
void moe_cuda_graphs_give(struct moe_cuda_graph *graph);

/* Drops all graphs, because memory that they use has moved. The device has finished all launches;
 * steps that took a graph still give it back. */
void moe_cuda_graphs_clear(struct moe_cuda_graphs *g);

#ifdef __cplusplus
}
#endif

#endif
