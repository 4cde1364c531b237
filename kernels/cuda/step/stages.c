/* SPDX-License-Identifier: Apache-2.0 */
/* The stages of a forward step; see stages.h. */
#include "cuda/step/stages.h"

#include "cuda/core/range.h"
#include "cuda/exchange/ep.h"
#include "cuda/layer/ffn.h"
#include "cuda/layer/latent.h"
#include "cuda/router/router.h"
#include "cuda/step/step_slots.h"
#include "moe/row_format.h"

/* Up to this bucket the shared expert overlaps the routing. Above it both want the whole device,
 * and the routed products would find half of it taken (bench/results/layer.md). */
enum { SIDE_STREAM_MAX_BUCKET = 512 };

static void *scratch(const struct moe_cuda_steps *steps, size_t offset)
{
    return (char *)steps->scratch.data + offset;
}

/* Ends the profiler's range and begins that of the next stage. */
static void next_range(const char *stage)
{
    moe_cuda_range_end();
    moe_cuda_range_begin(stage);
}

static struct moe_status capture_router(const struct moe_cuda_step_shape *shape,
                                        struct moe_step *step, cudaStream_t stream)
{
    const struct moe_cuda_step_layout *at = &shape->at;
    struct moe_cuda_routing r = {.dtype = shape->dtype,
                                 .capacity = shape->bucket,
                                 .params = &step->on_device->params,
                                 .began = &step->message_on_device->began[MOE_STAGE_ROUTER],
                                 .x = moe_cuda_step_tensor(step, at->x),
                                 .mode = moe_cuda_step_tensor(step, at->mode),
                                 .ids_in = moe_cuda_step_tensor(step, at->ids_in),
                                 .weights_in = moe_cuda_step_tensor(step, at->weights_in),
                                 .logits = scratch(shape->steps, shape->steps->at.logits),
                                 .ids = moe_cuda_step_tensor(step, at->ids),
                                 .weights = moe_cuda_step_tensor(step, at->weights),
                                 .token_state = moe_cuda_step_tensor(step, at->state)};
    return moe_cuda_router_enqueue(shape->layer, &r, stream);
}

/* The shared expert needs only the tokens. At small buckets it takes few multiprocessors and mostly
 * reads weights, while routing waits for its own kernels and for the peers. Not with cuBLAS,
 * because products share its workspace, and not if a step is not captured. */
static bool runs_on_side_stream(const struct moe_cuda_step_shape *shape)
{
    const struct moe_session *s = shape->steps->session;
    return shape->layer->spec.shared_intermediate != 0 && shape->bucket <= SIDE_STREAM_MAX_BUCKET &&
           s->net == NULL && s->device->cublas == NULL;
}

/* Captures the shared expert's output, if there is one, as `base` of combine. `rows`: the tokens,
 * quantised for the routed experts, or NULL. */
static struct moe_status capture_shared(const struct moe_cuda_step_shape *shape,
                                        struct moe_step *step, cudaStream_t stream,
                                        const void *rows, float *base)
{
    const struct moe_cuda_steps *steps = shape->steps;
    const bool side_stream = runs_on_side_stream(shape);
    if (base == NULL)
        return moe_ok();
    struct moe_cuda_shared shared = {.params = &step->on_device->params,
                                     .dtype = shape->dtype,
                                     .bucket = shape->bucket,
                                     .capacity = shape->bucket,
                                     .x = moe_cuda_step_tensor(step, shape->at.x),
                                     .rows = rows,
                                     .scratch = scratch(steps, steps->at.shared),
                                     .out = base,
                                     .retains = shape->retains};
    /* Half of the device stays free for the routing, which must not begin late: peers wait for it.
     */
    if (side_stream)
        shared.processors = (uint32_t)steps->session->device->multiprocessors / 2;
    else
        shared.began = &step->message_on_device->began[MOE_STAGE_SHARED];
    return moe_cuda_ffn_shared(shape->layer, &shared, stream);
}

/* Whether the rows for the experts are quantised while the router works, which does not need them.
 * Not if a step is not captured, and not in a latent space: its rows come later. */
static bool quantises_on_side_stream(const struct moe_cuda_step_shape *shape)
{
    const struct moe_layer_spec *spec = &shape->layer->spec;
    return moe_row_format(spec, shape->dtype).quantised && spec->latent == 0 &&
           shape->steps->session->net == NULL;
}

/* The side stream forks from `stream` here. It quantises the rows, and runs the shared expert.
 * `rows` as in moe_cuda_ep_quantise. */
static struct moe_status fork_side_stream(const struct moe_cuda_step_shape *shape,
                                          struct moe_step *step, const struct moe_cuda_batch *batch,
                                          cudaStream_t stream, const void **rows, float *base)
{
    const struct moe_cuda_steps *steps = shape->steps;
    const bool quantises = quantises_on_side_stream(shape), shared = runs_on_side_stream(shape);
    *rows = NULL;
    if (!quantises && !shared)
        return moe_ok();
    MOE_TRY(MOE_CUDA(cudaEventRecord(steps->fork_event, stream)));
    MOE_TRY(MOE_CUDA(cudaStreamWaitEvent(steps->side_stream, steps->fork_event, 0)));
    if (quantises) {
        MOE_TRY(moe_cuda_ep_quantise(steps->session->ep, batch, steps->side_stream, rows));
        MOE_TRY(MOE_CUDA(cudaEventRecord(steps->rows_event, steps->side_stream)));
    }
    if (!shared)
        return moe_ok();
    MOE_TRY(capture_shared(shape, step, steps->side_stream, *rows, base));
    return MOE_CUDA(cudaEventRecord(steps->join_event, steps->side_stream));
}

/* Makes dispatch wait for quantised rows, or quantises them here. */
static struct moe_status ready_rows(const struct moe_cuda_step_shape *shape,
                                    const struct moe_cuda_batch *batch, cudaStream_t stream,
                                    const void **rows)
{
    const struct moe_cuda_steps *steps = shape->steps;
    return quantises_on_side_stream(shape)
               ? MOE_CUDA(cudaStreamWaitEvent(stream, steps->rows_event, 0))
               : moe_cuda_ep_quantise(steps->session->ep, batch, stream, rows);
}

/* Makes work that follows on `stream` wait for `base`. */
static struct moe_status join_shared(const struct moe_cuda_step_shape *shape, struct moe_step *step,
                                     cudaStream_t stream, const void *rows, float *base)
{
    if (runs_on_side_stream(shape))
        return MOE_CUDA(cudaStreamWaitEvent(stream, shape->steps->join_event, 0));
    return capture_shared(shape, step, stream, rows, base);
}

static struct moe_cuda_latent latent_of(const struct moe_cuda_step_shape *shape,
                                        struct moe_step *step)
{
    return (struct moe_cuda_latent){.layer = shape->layer,
                                    .params = &step->on_device->params,
                                    .dtype = shape->dtype,
                                    .bucket = shape->bucket,
                                    .scratch = scratch(shape->steps, shape->steps->at.products)};
}

/* Captures the projection of the tokens into the latent space, if there is one. Next to the shared
 * expert it takes the other half of the device. *x: what the experts get. */
static struct moe_status enter_latent(const struct moe_cuda_step_shape *shape,
                                      struct moe_step *step, cudaStream_t stream, const void **x)
{
    const struct moe_cuda_steps *steps = shape->steps;
    struct moe_cuda_latent l = latent_of(shape, step);
    if (shape->layer->spec.latent == 0)
        return moe_ok();
    if (runs_on_side_stream(shape))
        l.processors = (uint32_t)steps->session->device->multiprocessors / 2;
    void *z = scratch(steps, steps->at.z);
    MOE_TRY(moe_cuda_to_latent(&l, *x, z, stream));
    *x = z;
    return moe_ok();
}

/* Captures combine and, after it, the projection of the sums out of the latent space, where the
 * shared expert is added. */
static struct moe_status capture_combine(const struct moe_cuda_step_shape *shape,
                                         struct moe_step *step, struct moe_cuda_results *results,
                                         cudaStream_t stream)
{
    const struct moe_cuda_steps *steps = shape->steps;
    struct moe_cuda_ep *ep = steps->session->ep;
    struct moe_cuda_step_outcome *outcome = &step->message_on_device->outcome;
    void *y = moe_cuda_step_tensor(step, shape->at.y);
    if (shape->layer->spec.latent == 0)
        return moe_cuda_ep_combine(ep, results, y, outcome, stream);
    const struct moe_cuda_latent l = latent_of(shape, step);
    const struct moe_cuda_latent_sums f = {
        .u = scratch(steps, steps->at.u),
        .out = scratch(steps, steps->at.hidden),
        .base = results->base,
        .mode = moe_cuda_step_tensor(step, shape->at.mode),
        .token_state = moe_cuda_step_tensor(step, shape->at.state),
        .y = y,
        .ends = &step->message_on_device->began[MOE_STAGE_COUNT]};
    results->base = NULL;
    MOE_TRY(moe_cuda_ep_combine(ep, results, f.u, outcome, stream));
    return moe_cuda_from_latent(&l, &f, stream);
}

struct moe_status moe_cuda_stages_capture(const struct moe_cuda_step_shape *shape,
                                          struct moe_step *step, cudaStream_t stream)
{
    const struct moe_layer *layer = shape->layer;
    const struct moe_cuda_steps *steps = shape->steps;
    struct moe_session *s = steps->session;
    void *hidden = scratch(steps, steps->at.hidden);
    struct moe_cuda_results results = {.dtype = moe_cuda_ffn_out_dtype(layer, shape->dtype)};
    float *base =
        layer->spec.shared_intermediate != 0 ? scratch(steps, steps->at.base) : (float *)NULL;
    struct moe_cuda_batch batch = {.layer = layer,
                                   .dtype = shape->dtype,
                                   .bucket = shape->bucket,
                                   .params = &step->on_device->params,
                                   .x = moe_cuda_step_tensor(step, shape->at.x),
                                   .ids = moe_cuda_step_tensor(step, shape->at.ids),
                                   .weights = moe_cuda_step_tensor(step, shape->at.weights),
                                   .token_state = moe_cuda_step_tensor(step, shape->at.state),
                                   .mode = moe_cuda_step_tensor(step, shape->at.mode),
                                   .began = step->message_on_device->began,
                                   .counts = &step->message_on_device->counts};
    struct moe_cuda_batch_rows b = {.params = &step->on_device->params,
                                    .capacity = moe_cuda_ep_max_rows(s, layer, shape->bucket),
                                    .bucket = shape->bucket,
                                    .began = step->message_on_device->began,
                                    .slots = s->joined_slots,
                                    .scratch = scratch(steps, steps->at.products),
                                    .retains = shape->retains};
    const void *rows;
    MOE_TRY(fork_side_stream(shape, step, &batch, stream, &rows, base));
    MOE_TRY(capture_router(shape, step, stream));
    MOE_TRY(enter_latent(shape, step, stream, &batch.x));
    MOE_TRY(ready_rows(shape, &batch, stream, &rows));
    next_range("prepare");
    MOE_TRY(moe_cuda_ep_prepare(s->ep, &batch));
    next_range("dispatch");
    MOE_TRY(moe_cuda_ep_dispatch(s->ep, &b.rows, stream));
    if (shape->retains && layer->local_experts > 0)
        MOE_TRY(MOE_CUDA(
            cudaMemcpyAsync(&step->message->rows_in_use, b.rows.start + layer->local_experts,
                            sizeof step->message->rows_in_use, cudaMemcpyDeviceToHost, stream)));
    next_range("gate and up");
    MOE_TRY(moe_cuda_ffn_gate_up(layer, shape->dtype, &b, hidden, stream));
    next_range("down");
    void *out = b.rows.x; /* nothing reads the rows any more */
    MOE_TRY(moe_cuda_ffn_down(layer, shape->dtype, &b, hidden, out, results.dtype, stream));
    next_range("shared expert");
    MOE_TRY(join_shared(shape, step, stream, rows, base));
    next_range("combine");
    results.expert_out = out;
    results.base = base;
    return capture_combine(shape, step, &results, stream);
}
