/* The kernels of a step in their order, and what runs beside what; see step_lane.h.
 *
 * The shared expert needs tokens only, so it can go where the device has room. Its branch has the
 * lowest priority and never waits for a peer; dispatch and combine wait for peers, so that all
 * their CTAs must be resident at last, and they take no more multiprocessors than the branch
 * leaves. Either may begin late because of the other: late is all that can happen. */
#include "cuda/step_lane.h"

#include "cuda/ep.h"
#include "cuda/ffn.h"
#include "cuda/range.h"
#include "cuda/router.h"

enum {
    /* Up to this bucket the shared expert runs beside the routing. */
    BESIDE_BUCKET = 512,
    /* Beside the wire from such buckets, slots and rows on: where that was measured to gain. With
     * fewer slots most bytes stay at home, and moving them takes the whole device; so do shorter
     * rows. */
    WIRE_BUCKET = 4096,
    WIRE_SLOTS = 4,
    WIRE_ROW_BYTES = 12000,
    /* Percent of the multiprocessors that dispatch and combine then have: measured
     * (tests/bench/results/layer.md). */
    DISPATCH_SHARE = 43,
    COMBINE_SHARE = 55,
};

/* ------------------------------------------------------------------- the plan */

/* Where the shared expert's two products run.
 *
 * LAST            after the routed experts, on all multiprocessors.
 * BESIDE_ROUTING  both beside router and dispatch: few tokens take few multiprocessors and most of
 *                 their time for reading weights, while routing waits, for its own kernels one
 *                 after the other, and for the peers.
 * BESIDE_WIRE     gate and up beside dispatch, down beside combine, whose pace the links decide:
 *                 they keep it on half of the multiprocessors. What gate and up have not done when
 *                 dispatch ends, they do while the routed experts begin, which deal out their tiles
 *                 as multiprocessors come; combine finishes tokens as their rows of down come. */
enum place { LAST, BESIDE_ROUTING, BESIDE_WIRE };

/* The multiprocessors of dispatch, and of combine, are those that the branch leaves. */
struct plan {
    enum place place;
    uint32_t beside_dispatch, beside_combine; /* multiprocessors of the branch; 0 = all */
};

static struct plan plan_of(const struct moe_cuda_step_shape *shape)
{
    const struct moe_session *s = shape->steps->session;
    const uint32_t all = (uint32_t)s->device->multiprocessors;
    uint32_t rows, times;
    /* Not with cuBLAS, whose workspace products share, and not where a step is not captured. */
    if (shape->layer->spec.shared_intermediate == 0 || s->net != NULL || s->device->cublas != NULL)
        return (struct plan){.place = LAST};
    if (shape->bucket <= BESIDE_BUCKET)
        return (struct plan){.place = BESIDE_ROUTING, .beside_dispatch = all / 2};
    if (shape->bucket < WIRE_BUCKET || __builtin_popcountll(s->config.live) < WIRE_SLOTS ||
        shape->layer->spec.hidden * moe_dtype_bytes(shape->dtype) < WIRE_ROW_BYTES ||
        !moe_cuda_ffn_shared_counts(shape->layer, shape->dtype, shape->bucket, &rows, &times))
        return (struct plan){.place = LAST};
    return (struct plan){.place = BESIDE_WIRE,
                         .beside_dispatch = all - all * DISPATCH_SHARE / 100,
                         .beside_combine = all - all * COMBINE_SHARE / 100};
}

size_t moe_cuda_step_done_bytes(const struct moe_layer *layer, enum moe_dtype dtype,
                                uint32_t bucket)
{
    uint32_t rows, times;
    if (!moe_cuda_ffn_shared_counts(layer, dtype, bucket, &rows, &times))
        return 0;
    return ((size_t)bucket + rows - 1) / rows * sizeof(uint32_t);
}

/* ------------------------------------------------------------------- a capture */

/* One lane's step on its way into a graph. */
struct capture {
    const struct moe_cuda_step_shape *shape;
    struct moe_cuda_steps *steps;
    struct moe_step *lane;
    cudaStream_t stream;
    struct plan plan;
    float *base; /* the shared expert's output; NULL: the layer has none */
    struct moe_cuda_batch batch;
    struct moe_cuda_batch_rows rows;
};

static void *tensor(const struct capture *c, size_t offset)
{
    return moe_cuda_lane_tensor(c->lane, offset);
}

static void *scratch(const struct capture *c, size_t offset)
{
    return (char *)c->steps->scratch.data + offset;
}

/* The range that a profiler sees becomes that of the next stage. */
static void next_range(const char *stage)
{
    moe_cuda_range_end();
    moe_cuda_range_begin(stage);
}

static struct capture begin_capture(const struct moe_cuda_step_shape *shape, struct moe_step *lane,
                                    cudaStream_t stream)
{
    struct moe_cuda_steps *steps = shape->steps;
    const struct moe_session *s = steps->session;
    const struct moe_layer *layer = shape->layer;
    const uint32_t all = (uint32_t)s->device->multiprocessors;
    struct capture c = {
        .shape = shape, .steps = steps, .lane = lane, .stream = stream, .plan = plan_of(shape)};
    const bool beside_wire = c.plan.place == BESIDE_WIRE;
    if (layer->spec.shared_intermediate != 0)
        c.base = scratch(&c, steps->at.base);
    c.batch = (struct moe_cuda_batch){
        .layer = layer,
        .dtype = shape->dtype,
        .bucket = shape->bucket,
        .facts = lane->facts,
        .x = tensor(&c, shape->at.x),
        .ids = tensor(&c, shape->at.ids),
        .weights = tensor(&c, shape->at.weights),
        .token_state = tensor(&c, shape->at.state),
        .began = lane->mail_on_device->began,
        .dispatch_processors = beside_wire ? all - c.plan.beside_dispatch : 0,
        .combine_processors = beside_wire ? all - c.plan.beside_combine : 0};
    c.rows =
        (struct moe_cuda_batch_rows){.facts = lane->facts,
                                     .capacity = moe_cuda_ep_most_rows(s, layer, shape->bucket),
                                     .bucket = shape->bucket,
                                     .began = lane->mail_on_device->began,
                                     .slots = (uint32_t)__builtin_popcountll(s->config.live),
                                     .scratch = scratch(&c, steps->at.products),
                                     .deal = beside_wire ? &steps->deals->routed : NULL,
                                     .saves = shape->saves};
    return c;
}

static struct moe_status capture_router(const struct capture *c)
{
    const struct moe_cuda_lane_layout *at = &c->shape->at;
    struct moe_cuda_routing r = {.dtype = c->shape->dtype,
                                 .capacity = c->shape->bucket,
                                 .facts = c->lane->facts,
                                 .began = &c->lane->mail_on_device->began[MOE_STAGE_ROUTER],
                                 .x = tensor(c, at->x),
                                 .mode = tensor(c, at->mode),
                                 .ids_in = tensor(c, at->ids_in),
                                 .weights_in = tensor(c, at->weights_in),
                                 .logits = scratch(c, c->steps->at.logits),
                                 .ids = tensor(c, at->ids),
                                 .weights = tensor(c, at->weights),
                                 .token_state = tensor(c, at->state)};
    return moe_cuda_router_enqueue(c->shape->layer, &r, c->stream);
}

/* -------------------------------------------------------------- shared expert */

static struct moe_cuda_shared shared_of(const struct capture *c, uint32_t processors)
{
    return (struct moe_cuda_shared){.facts = c->lane->facts,
                                    .dtype = c->shape->dtype,
                                    .bucket = c->shape->bucket,
                                    .capacity = c->shape->bucket,
                                    .x = tensor(c, c->shape->at.x),
                                    .scratch = scratch(c, c->steps->at.shared),
                                    .out = c->base,
                                    .processors = processors,
                                    .saves = c->shape->saves};
}

/* What comes next on the branch waits for what the stream has been given so far. */
static struct moe_status part_ways(const struct capture *c)
{
    MOE_TRY(MOE_CUDA(cudaEventRecord(c->steps->parting, c->stream)));
    return MOE_CUDA(cudaStreamWaitEvent(c->steps->beside, c->steps->parting, 0));
}

/* What comes next on the stream waits for the branch. */
static struct moe_status meet(const struct capture *c)
{
    MOE_TRY(MOE_CUDA(cudaEventRecord(c->steps->meeting, c->steps->beside)));
    return MOE_CUDA(cudaStreamWaitEvent(c->stream, c->steps->meeting, 0));
}

/* Half of the device is left to the routing, which may not begin late: peers wait for it. */
static struct moe_status begin_beside_routing(const struct capture *c)
{
    const struct moe_cuda_shared shared = shared_of(c, c->plan.beside_dispatch);
    MOE_TRY(part_ways(c));
    return moe_cuda_ffn_shared(c->shape->layer, &shared, c->steps->beside);
}

static struct moe_status begin_beside_dispatch(const struct capture *c)
{
    const struct moe_cuda_step_shape *shape = c->shape;
    struct moe_cuda_shared shared = shared_of(c, c->plan.beside_dispatch);
    shared.deal = &c->steps->deals->shared;
    MOE_TRY(part_ways(c));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(
        scratch(c, c->steps->at.done), 0,
        moe_cuda_step_done_bytes(shape->layer, shape->dtype, shape->bucket), c->steps->beside)));
    return moe_cuda_ffn_shared_up(shape->layer, &shared, c->steps->beside);
}

/* Before combine is given to the stream: should something make one kernel wait for the end of the
 * one that was launched before, it is combine that waits. */
static struct moe_status begin_beside_combine(const struct capture *c,
                                              struct moe_cuda_results *results)
{
    struct moe_cuda_shared shared = shared_of(c, c->plan.beside_combine);
    shared.deal = &c->steps->deals->shared;
    shared.done = scratch(c, c->steps->at.done);
    results->base_done = shared.done;
    if (!moe_cuda_ffn_shared_counts(c->shape->layer, c->shape->dtype, c->shape->bucket,
                                    &results->base_rows, &results->base_times))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "rows of the shared expert do not count");
    MOE_TRY(part_ways(c));
    return moe_cuda_ffn_shared_down(c->shape->layer, &shared, c->steps->beside);
}

/* `base` is there for combine, or on its way. */
static struct moe_status finish_shared(const struct capture *c, struct moe_cuda_results *results)
{
    if (c->base == NULL)
        return moe_ok();
    if (c->plan.place == BESIDE_ROUTING)
        return meet(c);
    if (c->plan.place == BESIDE_WIRE)
        return begin_beside_combine(c, results);
    struct moe_cuda_shared shared = shared_of(c, 0);
    shared.began = &c->lane->mail_on_device->began[MOE_STAGE_SHARED];
    return moe_cuda_ffn_shared(c->shape->layer, &shared, c->stream);
}

/* --------------------------------------------------------------------- stages */

static struct moe_status capture_routing(struct capture *c)
{
    struct moe_cuda_ep *ep = c->steps->session->ep;
    const uint32_t local = c->shape->layer->local_experts;
    if (c->plan.place == BESIDE_ROUTING)
        MOE_TRY(begin_beside_routing(c));
    MOE_TRY(capture_router(c));
    next_range("prepare");
    MOE_TRY(moe_cuda_ep_prepare(ep, &c->batch));
    if (c->plan.place == BESIDE_WIRE)
        MOE_TRY(begin_beside_dispatch(c));
    next_range("dispatch");
    MOE_TRY(moe_cuda_ep_dispatch(ep, &c->rows.rows, c->stream));
    if (!c->shape->saves || local == 0)
        return moe_ok();
    return MOE_CUDA(cudaMemcpyAsync(&c->lane->mail->rows_in_use, c->rows.rows.start + local,
                                    sizeof c->lane->mail->rows_in_use, cudaMemcpyDeviceToHost,
                                    c->stream));
}

static struct moe_status capture_stages(struct capture *c)
{
    const struct moe_layer *layer = c->shape->layer;
    const enum moe_dtype dtype = c->shape->dtype, inner = moe_cuda_ffn_hidden_dtype(layer, dtype);
    void *hidden = scratch(c, c->steps->at.hidden), *out = scratch(c, c->steps->at.out);
    struct moe_cuda_results results = {
        .expert_out = out, .dtype = moe_cuda_ffn_out_dtype(layer, dtype), .base = c->base};
    MOE_TRY(capture_routing(c));
    next_range("gate and up");
    MOE_TRY(moe_cuda_ffn_gate_up(layer, dtype, &c->rows, hidden, inner, c->stream));
    next_range("down");
    MOE_TRY(moe_cuda_ffn_down(layer, &c->rows, hidden, inner, out, results.dtype, c->stream));
    next_range("shared expert");
    MOE_TRY(finish_shared(c, &results));
    next_range("combine");
    MOE_TRY(moe_cuda_ep_combine(c->steps->session->ep, &results, tensor(c, c->shape->at.y),
                                &c->lane->mail_on_device->verdict, c->stream));
    return c->plan.place == BESIDE_WIRE ? meet(c) : moe_ok();
}

struct moe_status moe_cuda_step_capture(void *ctx, uint32_t lane, cudaStream_t stream)
{
    const struct moe_cuda_step_shape *shape = ctx;
    struct capture c = begin_capture(shape, &shape->steps->lane[lane], stream);
    moe_cuda_range_begin("router");
    struct moe_status st = capture_stages(&c);
    moe_cuda_range_end();
    return st;
}
