/* SPDX-License-Identifier: Apache-2.0 */
/* Finds, makes and drops captured steps; see graph.h. */
#include "cuda/step/graph.h"

#include "cuda/core/range.h"

/* ------------------------------------------------------------------ open, close */

struct moe_status moe_cuda_graphs_open(struct moe_cuda_graphs *g)
{
    int lowest = 0, highest = 0;
    MOE_TRY(MOE_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest)));
    return MOE_CUDA(cudaStreamCreateWithPriority(&g->stream, cudaStreamNonBlocking, highest));
}

static void forget(struct moe_cuda_graph *graph)
{
    for (uint32_t step_slot = 0; step_slot < MOE_CUDA_STEP_SLOTS; step_slot++) {
        if (graph->exec[step_slot] != NULL)
            (void)cudaGraphExecDestroy(graph->exec[step_slot]);
        graph->exec[step_slot] = NULL;
    }
    graph->key = (struct moe_cuda_graph_key){{0}};
}

void moe_cuda_graphs_clear(struct moe_cuda_graphs *g)
{
    for (uint32_t i = 0; i < MOE_CUDA_MAX_GRAPHS; i++)
        forget(&g->graph[i]);
}

void moe_cuda_graphs_close(struct moe_cuda_graphs *g)
{
    moe_cuda_graphs_clear(g);
    if (g->stream != NULL)
        (void)cudaStreamDestroy(g->stream);
    g->stream = NULL;
}

/* ------------------------------------------------------------------------ capture */

static struct moe_status capture_slot(struct moe_cuda_graphs *g, uint32_t step_slot,
                                      moe_cuda_capture_fn capture, void *ctx, cudaGraph_t *out)
{
    *out = NULL;
    MOE_TRY(MOE_CUDA(cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal)));
    struct moe_status st = capture(ctx, step_slot, g->stream);
    struct moe_status ended = MOE_CUDA(cudaStreamEndCapture(g->stream, out));
    if (!moe_failed(&st) && !moe_failed(&ended))
        return st;
    if (*out != NULL)
        (void)cudaGraphDestroy(*out);
    (void)cudaGetLastError(); /* else the next launch would report this error */
    return moe_failed(&st) ? st : ended;
}

static struct moe_status make_slot(struct moe_cuda_graphs *g, uint32_t step_slot,
                                   moe_cuda_capture_fn capture, void *ctx, cudaGraphExec_t *out)
{
    cudaGraph_t graph;
    MOE_TRY(capture_slot(g, step_slot, capture, ctx, &graph));
    struct moe_status st = MOE_CUDA(cudaGraphInstantiate(out, graph, 0));
    (void)cudaGraphDestroy(graph);
    MOE_TRY(st);
    return MOE_CUDA(cudaGraphUpload(*out, g->stream));
}

static struct moe_status make(struct moe_cuda_graphs *g, moe_cuda_capture_fn capture, void *ctx,
                              struct moe_cuda_graph *graph)
{
    for (uint32_t step_slot = 0; step_slot < MOE_CUDA_STEP_SLOTS; step_slot++)
        MOE_TRY(make_slot(g, step_slot, capture, ctx, &graph->exec[step_slot]));
    return MOE_CUDA(cudaStreamSynchronize(g->stream));
}

/* --------------------------------------------------------------------------- take */

static struct moe_cuda_graph *find(struct moe_cuda_graphs *g, const struct moe_cuda_graph_key *key)
{
    for (uint32_t i = 0; i < MOE_CUDA_MAX_GRAPHS; i++)
        if (g->graph[i].exec[0] != NULL && memcmp(&g->graph[i].key, key, sizeof *key) == 0)
            return &g->graph[i];
    return NULL;
}

/* Returns an entry without users: a free one, or the least recently used. There is one, because
 * there are fewer step slots than entries. */
static struct moe_cuda_graph *make_room(struct moe_cuda_graphs *g)
{
    struct moe_cuda_graph *oldest = NULL;
    for (uint32_t i = 0; i < MOE_CUDA_MAX_GRAPHS; i++) {
        struct moe_cuda_graph *graph = &g->graph[i];
        if (__atomic_load_n(&graph->holders, __ATOMIC_ACQUIRE) != 0)
            continue;
        if (graph->exec[0] == NULL)
            return graph;
        if (oldest == NULL || graph->taken < oldest->taken)
            oldest = graph;
    }
    MOE_INVARIANT(oldest != NULL);
    forget(oldest);
    return oldest;
}
_Static_assert((int)MOE_CUDA_MAX_GRAPHS > (int)MOE_CUDA_STEP_SLOTS, "an entry without users");

struct moe_status moe_cuda_graphs_take(struct moe_cuda_graphs *g,
                                       const struct moe_cuda_graph_key *key,
                                       moe_cuda_capture_fn capture, void *ctx,
                                       struct moe_cuda_graph **out)
{
    struct moe_cuda_graph *graph = find(g, key);
    if (graph == NULL) {
        graph = make_room(g);
        moe_cuda_range_begin("capture");
        struct moe_status st = make(g, capture, ctx, graph);
        moe_cuda_range_end();
        if (moe_failed(&st)) {
            forget(graph);
            return st;
        }
        graph->key = *key;
    }
    graph->taken = ++g->takes;
    (void)__atomic_add_fetch(&graph->holders, 1, __ATOMIC_RELAXED);
    *out = graph;
    return moe_ok();
}

void moe_cuda_graphs_give(struct moe_cuda_graph *graph)
{
    (void)__atomic_sub_fetch(&graph->holders, 1, __ATOMIC_RELEASE);
}
