/* SPDX-License-Identifier: Apache-2.0 */
/* Finds, makes and drops captured steps; see graph.h. */
#include "cuda/step/graph.h"

#include "cuda/core/range.h"

/* -------------------------------------------------------------------------- keys */

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Appends to a key. Keys are compared as a whole, so unused words stay zero. */
struct writer {
    struct moe_cuda_graph_key *key;
    uint32_t at;
};

static void put(struct writer *w, uint32_t value)
{
    MOE_INVARIANT(w->at < MOE_CUDA_KEY_WORDS);
    w->key->word[w->at++] = value;
}

static void put_router(struct writer *w, const struct moe_router_spec *r)
{
    put(w, r->score);
    put(w, r->top_k);
    put(w, (uint32_t)r->logit_bias | (uint32_t)r->select_bias << 1);
    put(w, r->groups);
    put(w, r->topk_group);
    put(w, r->group_best);
    put(w, r->renorm);
    put(w, bits_of(r->renorm_eps));
    put(w, bits_of(r->scale));
    put(w, r->zero_experts);
}

static void put_format(struct writer *w, const struct moe_weight_format *f)
{
    put(w, f->encoding);
    put(w, f->block_rows);
    put(w, f->block_columns);
    put(w, f->scale);
    put(w, (uint32_t)f->zero_points | (uint32_t)f->global_divides << 1 |
               (uint32_t)f->activations << 2);
}

/* All but the layer's index. */
static void put_spec(struct writer *w, const struct moe_layer_spec *s)
{
    put(w, s->hidden);
    put(w, s->experts);
    put(w, s->intermediate);
    put_router(w, &s->router);
    put(w, s->weighting);
    put(w, s->activation);
    put(w, bits_of(s->swiglu_limit));
    put(w, bits_of(s->swiglu_alpha));
    put(w,
        (uint32_t)s->gate_up_bias | (uint32_t)s->down_bias << 1 | (uint32_t)s->shared_gated << 2);
    put(w, s->shared_intermediate);
    put(w, s->shared_activation);
    put_format(w, &s->routed_format);
    put_format(w, &s->shared_format);
}
_Static_assert(sizeof(struct moe_layer_spec) == 136,
               "a new field of the spec belongs into the key");

void moe_cuda_graph_key_of(const struct moe_layer *layer, enum moe_dtype dtype, uint32_t bucket,
                           bool retains, struct moe_cuda_graph_key *out)
{
    *out = (struct moe_cuda_graph_key){{0}};
    struct writer w = {.key = out};
    put(&w, bucket);
    put(&w, dtype);
    put(&w, retains);
    put(&w, layer->local_experts);
    put(&w, layer->active.offset[layer->spec.experts]);
    put_spec(&w, &layer->spec);
    for (uint32_t m = 0; m < MOE_CUDA_MATRICES; m++)
        put(&w, layer->desc.matrix[m].dtype);
}

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
