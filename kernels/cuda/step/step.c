/* SPDX-License-Identifier: Apache-2.0 */
/* Running whole steps; see step.h. moe_cuda_stages_capture lists the order of a step. It is
 * captured once per shape and step slot (graph.h) and launched as one graph.
 *
 * If rows travel over a network, the comm thread (net.h) enqueues the same list each time, because
 * the list waits in the middle for what peers announce. The caller only posts a task.
 *
 * A backward pass is a task of the executor (executor.h). So is a step with memory that must grow,
 * and everything enqueued while such a task is unfinished: steps begin in the order in which they
 * were enqueued.
 *
 * Rows come in on one stream, are computed on another and leave on a third. Each stream waits for
 * an event of the one before, so the copies of two steps overlap computation. The rows of a step
 * with no other one before it come in on the second stream. A step slot has what
 * belongs to one step. Scratch is shared, because steps are computed one after another. Memory
 * grows with the largest step seen, so a steady step allocates nothing. */
#include "cuda/step/step.h"

#include "base/clock.h"
#include "base/size.h"
#include "common/activation_cache.h"
#include "common/session_rules.h"
#include "cuda/core/range.h"
#include "cuda/exchange/ep.h"
#include "cuda/layer/ffn.h"
#include "cuda/layer/latent.h"
#include "cuda/router/router.h"
#include "cuda/step/retain.h"
#include "cuda/step/stages.h"
#include "cuda/step/step_slots.h"

#include <time.h>

enum {
    SPIN_NS = 500 * 1000,      /* a wait spins for this long */
    IDLE_SLEEP_NS = 20 * 1000, /* and then sleeps this long between two polls */
};

/* ---------------------------------------------------------------------- memory */

/* Places rows x columns elements of `each` bytes at `*at` and moves `*at` past them. */
static bool place(size_t *at, size_t *offset, size_t rows, size_t columns, size_t each)
{
    size_t bytes;
    *offset = *at;
    return moe_size_mul3(rows, columns, each, &bytes) && moe_size_add(*at, bytes, at) &&
           moe_size_round_up(*at, MOE_CUDA_STEP_LINE, at);
}

/* By bucket, so that all steps of a bucket fit. */
static bool lay_out_step(const struct moe_step_args *a, struct moe_cuda_step_layout *l)
{
    const struct moe_layer_spec *spec = &a->layer->spec;
    size_t at = 0, n = a->bucket, k = spec->router.top_k, each = moe_dtype_bytes(a->dtype);
    return place(&at, &l->x, n, spec->hidden, each) && place(&at, &l->y, n, spec->hidden, each) &&
           place(&at, &l->mode, n, 1, 1) && place(&at, &l->ids_in, n, k, sizeof(int32_t)) &&
           place(&at, &l->weights_in, n, k, sizeof(float)) &&
           place(&at, &l->ids, n, k, sizeof(int32_t)) &&
           place(&at, &l->weights, n, k, sizeof(float)) && place(&at, &l->state, n, 1, 1) &&
           ((l->bytes = at), true);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static bool lay_out_scratch(const struct moe_step_args *a, uint32_t rows,
                            struct moe_cuda_step_scratch *l)
{
    const struct moe_layer_spec *spec = &a->layer->spec;
    const size_t base_rows = spec->shared_intermediate != 0 ? a->bucket : 0;
    const size_t each = moe_dtype_bytes(a->dtype);
    const size_t products = larger(moe_cuda_ffn_scratch_bytes(a->layer, a->dtype, rows),
                                   moe_cuda_latent_scratch_bytes(a->layer, a->dtype, a->bucket));
    size_t at = 0, hidden = moe_cuda_ffn_hidden_bytes(a->layer, a->dtype, rows);
    if (spec->latent != 0)
        hidden = larger(hidden, (size_t)a->bucket * spec->hidden * sizeof(float));
    return place(&at, &l->logits, moe_cuda_router_bytes(a->layer, a->dtype, a->bucket), 1, 1) &&
           place(&at, &l->hidden, hidden, 1, 1) &&
           place(&at, &l->base, base_rows, spec->hidden, sizeof(float)) &&
           place(&at, &l->shared, moe_cuda_ffn_shared_bytes(a->layer, a->dtype, a->bucket), 1, 1) &&
           place(&at, &l->products, products, 1, 1) &&
           place(&at, &l->z, a->bucket, spec->latent, each) &&
           place(&at, &l->u, a->bucket, spec->latent, each) && ((l->bytes = at), true);
}

/* Whether the memory that a step needs is there. */
static bool fits(const struct moe_step *step)
{
    const struct moe_cuda_steps *steps = step->owner;
    const struct moe_step_args *a = &step->args;
    bool all = moe_cuda_ep_fits(steps->session, a->layer, a->dtype, a->bucket) &&
               steps->at.bytes <= steps->scratch.bytes;
    for (uint32_t i = 0; i < MOE_CUDA_STEP_SLOTS; i++)
        all = all && step->at.bytes <= steps->step_slot[i].tensors.bytes;
    return all;
}

/* Checks the step and finds out what memory it needs. */
static struct moe_status lay_out(struct moe_step *step)
{
    struct moe_cuda_steps *steps = step->owner;
    struct moe_session *s = steps->session;
    const struct moe_step_args *a = &step->args;
    MOE_TRY(moe_cuda_ep_check(s, a->layer, a->dtype, a->bucket, a->tokens));
    uint32_t rows = moe_cuda_ep_max_rows(s, a->layer, a->bucket);
    if (!lay_out_step(a, &step->at) || !lay_out_scratch(a, rows, &steps->at))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "a step of %u tokens does not fit in memory", a->bucket);
    return moe_ok();
}

static struct moe_status reserve(struct moe_step *step)
{
    struct moe_cuda_steps *steps = step->owner;
    struct moe_session *s = steps->session;
    const struct moe_step_args *a = &step->args;
    MOE_TRY(lay_out(step));
    /* Growing waits for the device. If the device waits for a lost peer, that wait would not end.
     */
    if (s->net != NULL && !fits(step))
        MOE_TRY(moe_cuda_net_settle(s->net));
    MOE_TRY(moe_cuda_ep_reserve(s, a->layer, a->dtype, a->bucket, a->tokens, false));
    /* For all step slots at once. Growing waits for the device, and so for the peers of a step that
     * another slot may run later. */
    for (uint32_t i = 0; i < MOE_CUDA_STEP_SLOTS; i++)
        MOE_TRY(moe_cuda_buffer_reserve(s->device, &steps->step_slot[i].tensors, step->at.bytes));
    return moe_cuda_buffer_reserve(s->device, &steps->scratch, steps->at.bytes);
}

/* --------------------------------------------------------------------- capture */

static struct moe_status capture_slot(void *ctx, uint32_t step_slot, cudaStream_t stream)
{
    const struct moe_cuda_step_shape *shape = ctx;
    moe_cuda_range_begin("router");
    struct moe_status st =
        moe_cuda_stages_capture(shape, &shape->steps->step_slot[step_slot], stream);
    moe_cuda_range_end();
    return st;
}

static struct moe_cuda_step_shape shape_of(const struct moe_step *step)
{
    const struct moe_step_args *a = &step->args;
    return (struct moe_cuda_step_shape){step->owner, a->layer, a->dtype,
                                        a->bucket,   step->at, step->retains};
}

static void graph_key_of(const struct moe_step *step, struct moe_cuda_graph_key *out)
{
    const struct moe_step_args *a = &step->args;
    const struct moe_layer *layer = a->layer;
    struct moe_cuda_graph_shape shape = {.spec = &layer->spec,
                                         .local_experts = layer->local_experts,
                                         .copies = layer->placement.offset[layer->spec.experts],
                                         .dtype = a->dtype,
                                         .bucket = a->bucket,
                                         .retains = step->retains};
    _Static_assert((int)MOE_CUDA_MATRICES == MOE_CUDA_KEY_MATRICES, "the key has all matrices");
    for (uint32_t m = 0; m < MOE_CUDA_MATRICES; m++)
        shape.matrix[m] = layer->desc.matrix[m].dtype;
    moe_cuda_graph_key_of(&shape, out);
}

static struct moe_status take_graph(struct moe_step *step)
{
    struct moe_cuda_steps *steps = step->owner;
    struct moe_cuda_step_shape shape = shape_of(step);
    struct moe_cuda_graph_key key;
    if (steps->buffers_moved != steps->session->device->buffers_moved)
        moe_cuda_graphs_clear(&steps->graphs); /* growing has waited for the device */
    steps->buffers_moved = steps->session->device->buffers_moved;
    graph_key_of(step, &key);
    return moe_cuda_graphs_take(&steps->graphs, &key, capture_slot, &shape, &step->graph);
}

/* --------------------------------------------------------------------- enqueue */

static struct moe_status copy(void *dst, const void *src, size_t bytes, cudaStream_t stream)
{
    if (bytes == 0 || dst == NULL || src == NULL)
        return moe_ok();
    return MOE_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
}

/* The tensors of a step that has segments. */
static struct moe_cuda_segment_rows segment_rows(const struct moe_step *step)
{
    const struct moe_layer_spec *spec = &step->args.layer->spec;
    const struct moe_cuda_step_layout *at = &step->at;
    return (struct moe_cuda_segment_rows){.segments = step->on_device->segments,
                                          .count = step->segments,
                                          .tokens = step->args.tokens,
                                          .top_k = spec->router.top_k,
                                          .modes = step->upload->params.has_modes,
                                          .completes = step->completes,
                                          .scatter = &step->on_device->scatter,
                                          .outcome = &step->message_on_device->outcome,
                                          .row_bytes =
                                              spec->hidden * moe_dtype_bytes(step->args.dtype),
                                          .x = moe_cuda_step_tensor(step, at->x),
                                          .y = moe_cuda_step_tensor(step, at->y),
                                          .mode = moe_cuda_step_tensor(step, at->mode),
                                          .state = moe_cuda_step_tensor(step, at->state),
                                          .ids_in = moe_cuda_step_tensor(step, at->ids_in),
                                          .ids = moe_cuda_step_tensor(step, at->ids),
                                          .weights_in = moe_cuda_step_tensor(step, at->weights_in),
                                          .weights = moe_cuda_step_tensor(step, at->weights)};
}

/* Where rows come in. With no other step unfinished, nothing is left to overlap. Then they come in
 * on the stream of the stages, which saves an event between two streams. */
static cudaStream_t stream_in(const struct moe_step *step, const struct moe_device *device)
{
    return step->is_alone ? device->compute : device->copy_in;
}

/* Segments come in by a kernel, the tensors of a step without segments by copies. */
static struct moe_status enqueue_copy_in(struct moe_step *step, struct moe_device *device)
{
    const struct moe_step_args *a = &step->args;
    const struct moe_cuda_segment_rows segments = segment_rows(step);
    const struct moe_cuda_segments_upload upload = {
        .from = step->upload,
        .to = step->on_device,
        .bytes = sizeof *step->upload + step->segments * sizeof step->upload->segments[0],
        .segments = offsetof(struct moe_cuda_step_upload, segments)};
    size_t pairs = (size_t)a->tokens * a->layer->spec.router.top_k;
    size_t rows = (size_t)a->tokens * a->layer->spec.hidden * moe_dtype_bytes(a->dtype);
    cudaStream_t in = stream_in(step, device);
    MOE_TRY(MOE_CUDA(cudaEventRecord(step->begun, in)));
    if (step->segments > 0)
        MOE_TRY(moe_cuda_segments_gather(&segments, &upload, in));
    else
        MOE_TRY(copy(step->on_device, step->upload, sizeof *step->upload, in));
    MOE_TRY(copy(moe_cuda_step_tensor(step, step->at.x), a->x, rows, in));
    if (a->mode != NULL) {
        MOE_TRY(copy(moe_cuda_step_tensor(step, step->at.mode), a->mode, a->tokens, in));
        MOE_TRY(copy(moe_cuda_step_tensor(step, step->at.ids_in), a->ids_in,
                     pairs * sizeof *a->ids_in, in));
        MOE_TRY(copy(moe_cuda_step_tensor(step, step->at.weights_in), a->weights_in,
                     pairs * sizeof *a->weights_in, in));
    }
    if (step->is_alone)
        return moe_ok();
    MOE_TRY(MOE_CUDA(cudaEventRecord(step->came_in, in)));
    return MOE_CUDA(cudaStreamWaitEvent(device->compute, step->came_in, 0));
}

/* From here on peers may wait for this slot. */
static struct moe_status enqueue_stages(struct moe_step *step, struct moe_device *device)
{
    const struct moe_cuda_steps *steps = step->owner;
    uint32_t number = (uint32_t)(step - steps->step_slot);
    struct moe_cuda_step_shape shape = shape_of(step);
    MOE_TRY(moe_cuda_ep_count_step(steps->session));
    if (steps->session->net != NULL)
        MOE_TRY(capture_slot(&shape, number, device->compute));
    else
        MOE_TRY(MOE_CUDA(cudaGraphLaunch(step->graph->exec[number], device->compute)));
    return MOE_CUDA(cudaEventRecord(step->computed, device->compute));
}

static struct moe_status enqueue_copy_out(struct moe_step *step, struct moe_device *device)
{
    const struct moe_step_args *a = &step->args;
    size_t rows = (size_t)a->tokens * a->layer->spec.hidden * moe_dtype_bytes(a->dtype);
    size_t answer = a->tokens > 0 ? step->at.bytes - step->at.ids : 0;
    const struct moe_cuda_segment_rows segments = segment_rows(step);
    cudaStream_t out = device->copy_out;
    MOE_TRY(MOE_CUDA(cudaStreamWaitEvent(out, step->computed, 0)));
    if (step->segments > 0)
        MOE_TRY(moe_cuda_segments_scatter(&segments, out));
    MOE_TRY(copy(a->y, moe_cuda_step_tensor(step, step->at.y), rows, out));
    MOE_TRY(copy(step->answer, moe_cuda_step_tensor(step, step->at.ids), answer, out));
    return MOE_CUDA(cudaEventRecord(step->left, out));
}

static struct moe_status enqueue(struct moe_step *step)
{
    struct moe_device *device = step->owner->session->device;
    MOE_TRY(enqueue_copy_in(step, device));
    MOE_TRY(enqueue_stages(step, device));
    return enqueue_copy_out(step, device);
}

/* ----------------------------------------------------------------------- calls */

/* All errors of a step must be found here: later they would cost all slots their session. */
static struct moe_status check_args(struct moe_session *s, const struct moe_step_args *a,
                                    bool *has_modes, bool *need_logits)
{
    const bool rows = a->segments != NULL || (a->x != NULL && a->y != NULL);
    MOE_TRY(moe_cuda_session_usable(s));
    if (!a->layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                         "layer %u is not finished", a->layer->spec.layer);
    if (a->tokens > 0 &&
        (!rows || a->ids_out == NULL || a->weights_out == NULL || a->token_state == NULL))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "a step with tokens needs x, y, ids, weights and token states");
    if (a->segments != NULL)
        return moe_session_check_segments(a, s->config.max_tokens, has_modes, need_logits);
    *has_modes = a->mode != NULL;
    return moe_cuda_router_check_modes(a->tokens, a->mode, a->ids_in != NULL, a->weights_in != NULL,
                                       need_logits);
}

static void fill_params(struct moe_step *step, bool has_modes, bool need_logits)
{
    const struct moe_step_args *a = &step->args;
    struct moe_cuda_step_params *params = &step->upload->params;
    moe_cuda_step_params_fill(a->layer, a->dtype, a->bucket, a->tokens, params);
    params->need_logits = need_logits;
    params->has_modes = has_modes;
    step->upload->scatter = (struct moe_cuda_scatter){0};
    step->segments = 0;
    step->completes = false;
    if (a->segments != NULL)
        step->segments = moe_cuda_segments_list(a, step->upload->segments, &step->completes);
    step->message->outcome.code = MOE_CUDA_PASS_ABORTED; /* until the last stage has stored it */
    memset(step->message->began, 0, sizeof step->message->began);
    step->message->rows_in_use = 0;
    step->begun_stages = 0;
    step->retains = false;
}

/* Keeps what the step retained, or frees its room. Returns whether it is retained. */
static bool settle_retained(struct moe_step *step, bool good)
{
    struct moe_session *s = step->owner->session;
    return step->retains &&
           moe_cuda_retaining_end(s, &step->args, step->upload->params.pre, good,
                                  step->message->outcome.rows, step->message->rows_in_use);
}

/* Without memory, retained activations are dropped. */
static struct moe_status reserve_or_drop(struct moe_step *step)
{
    struct moe_status st = reserve(step);
    if (st.code != MOE_RESOURCE_EXHAUSTED ||
        !moe_activation_cache_give_back(step->owner->session->device->activation_cache))
        return st;
    return reserve(step);
}

/* Takes room to retain if there is any. Without room the step runs and retains nothing. */
static struct moe_status prepare(struct moe_step *step)
{
    struct moe_session *s = step->owner->session;
    step->retains = moe_cuda_retaining_begin(s, &step->args, step->upload->params.pre);
    struct moe_status st = take_graph(step);
    if (!moe_failed(&st) || !step->retains)
        return st;
    (void)settle_retained(step, false);
    step->retains = false;
    (void)moe_activation_cache_give_back(s->device->activation_cache);
    return take_graph(step);
}

/* The step's memory is there (fits). The graph comes first: its failure stays local to this slot.
 */
static struct moe_status start(struct moe_step *step)
{
    struct moe_session *s = step->owner->session;
    MOE_TRY(prepare(step));
    struct moe_status st = enqueue(step);
    if (!moe_failed(&st))
        return st;
    /* Peers may already wait for rows that never come. The caller's memory must be free when this
     * call has failed. */
    moe_cuda_session_fail(s);
    moe_cuda_step_slots_wait(s->device);
    moe_cuda_graphs_give(step->graph);
    (void)settle_retained(step, false);
    return st;
}

/* Takes room to retain if there is any. The first time this allocates memory, which must not wait
 * for a peer. */
static struct moe_status begin_retaining_over_network(struct moe_step *step)
{
    struct moe_session *s = step->owner->session;
    if (step->args.retain != 0 && moe_activation_cache_bytes(s->device->activation_cache) == 0)
        MOE_TRY(moe_cuda_net_settle(s->net));
    step->retains = moe_cuda_retaining_begin(s, &step->args, step->upload->params.pre);
    return moe_ok();
}

/* A task of the comm thread. */
static struct moe_status start_over_network(void *ctx)
{
    struct moe_step *step = ctx;
    struct moe_status st = reserve_or_drop(step);
    step->refused = moe_failed(&st);
    if (step->refused)
        return st;
    MOE_TRY(begin_retaining_over_network(step));
    return enqueue(step);
}

static struct moe_status post(struct moe_step *step)
{
    struct moe_session *s = step->owner->session;
    const struct moe_step_args *a = &step->args;
    MOE_TRY(moe_cuda_ep_check(s, a->layer, a->dtype, a->bucket, a->tokens));
    step->net_task = (struct moe_cuda_task){.run = start_over_network, .ctx = step};
    moe_cuda_net_post(s->net, &step->net_task);
    return moe_ok();
}

/* ------------------------------------------------------------ tasks of the executor */

static void post_deferred(struct moe_step *step, moe_cuda_pass_fn pass,
                          struct moe_status (*run)(void *ctx))
{
    step->deferred = true;
    step->pass = pass;
    step->result = (struct moe_step_result){.missing_slot = -1};
    step->executor_task = (struct moe_cuda_task){.run = run, .ctx = step};
    moe_cuda_executor_post(step->owner->executor, &step->executor_task);
}

static struct moe_status run_pass(void *ctx)
{
    struct moe_step *step = ctx;
    return step->pass(step->owner->session, &step->backward, &step->result);
}

struct moe_status moe_cuda_step_post_pass(struct moe_session *s,
                                          const struct moe_backward_args *args,
                                          moe_cuda_pass_fn pass, struct moe_step **out)
{
    struct moe_step *step;
    MOE_TRY(moe_cuda_step_slot_take(s->steps, &step));
    step->backward = *args;
    post_deferred(step, pass, run_pass);
    *out = step;
    return moe_ok();
}

/* An earlier step may have ended the session, or laid out scratch anew. */
static struct moe_status begin_deferred(void *ctx)
{
    struct moe_step *step = ctx;
    struct moe_session *s = step->owner->session;
    MOE_TRY(moe_cuda_session_usable(s));
    if (s->net != NULL)
        return post(step);
    MOE_TRY(lay_out(step));
    if (!fits(step))
        MOE_TRY(reserve_or_drop(step));
    return start(step);
}

/* Wrong arguments are reported now, as by a step that begins at once. */
static struct moe_status defer(struct moe_step *step)
{
    const struct moe_step_args *a = &step->args;
    MOE_TRY(moe_cuda_ep_check(step->owner->session, a->layer, a->dtype, a->bucket, a->tokens));
    post_deferred(step, NULL, begin_deferred);
    return moe_ok();
}

/* Starts at once if that waits for nothing. It waits if a task of the executor comes first, or if
 * memory must grow: growing waits for the device, and so for the peers of the step before. */
static struct moe_status begin(struct moe_step *step)
{
    struct moe_cuda_steps *steps = step->owner;
    if (moe_cuda_executor_busy(steps->executor))
        return defer(step);
    step->deferred = false;
    if (steps->session->net != NULL)
        return post(step);
    MOE_TRY(lay_out(step));
    return fits(step) ? start(step) : defer(step);
}

/* --------------------------------------------------------------------- enqueue, wait */

struct moe_status moe_cuda_step_enqueue(struct moe_session *s, const struct moe_step_args *args,
                                        struct moe_step **out)
{
    bool has_modes, need_logits;
    MOE_TRY(check_args(s, args, &has_modes, &need_logits));
    MOE_TRY(moe_cuda_device_use(s->device));
    struct moe_step *step;
    MOE_TRY(moe_cuda_step_slot_take(s->steps, &step));
    step->args = *args;
    fill_params(step, has_modes, need_logits);
    moe_cuda_range_begin("step enqueue");
    struct moe_status st = begin(step);
    moe_cuda_range_end();
    if (moe_failed(&st))
        moe_cuda_step_slot_give(step);
    else
        *out = step;
    return st;
}

static uint64_t elapsed_ns(cudaEvent_t from, cudaEvent_t to)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, from, to) != cudaSuccess || !(ms > 0))
        return 0;
    return (uint64_t)((double)ms * 1e6);
}

/* A stage lasts until the next one begins, so gaps between kernels count. Work on the side stream
 * has no stamp, so its time is 0. */
static void read_times(const struct moe_step *step, struct moe_step_result *r)
{
    uint64_t next = step->message->began[MOE_STAGE_COUNT];
    for (int i = MOE_STAGE_COUNT - 1; i >= 0; i--) {
        uint64_t began = step->message->began[i] != 0 ? step->message->began[i] : next;
        r->stage_ns[i] = next > began ? next - began : 0;
        next = began;
    }
    r->total_ns = elapsed_ns(step->begun, step->left);
}

/* Copies from the step slot's pinned memory to the caller's. */
static void hand_over_answer(const struct moe_step *step)
{
    const struct moe_step_args *a = &step->args;
    size_t pairs = (size_t)a->tokens * a->layer->spec.router.top_k;
    const char *ids = step->answer;
    if (a->tokens == 0)
        return;
    memcpy(a->ids_out, ids, pairs * sizeof *a->ids_out);
    memcpy(a->weights_out, ids + (step->at.weights - step->at.ids), pairs * sizeof(float));
    memcpy(a->token_state, ids + (step->at.state - step->at.ids), a->tokens);
}

/* Counts a step's stages as they begin. The stamps are in this slot's memory, and the device stores
 * each of them once. */
static void look_at_stages(struct moe_step *step)
{
    uint32_t begun = 0;
    for (int i = 0; i <= MOE_STAGE_COUNT; i++)
        begun += __atomic_load_n(&step->message->began[i], __ATOMIC_RELAXED) != 0;
    if (begun != step->begun_stages)
        moe_cuda_device_moved(step->owner->session->device);
    step->begun_stages = begun;
}

/* Waits for the step's end. cudaErrorNotReady if the deadline passes first. A step that lasts shows
 * its progress; one that ends while this spins does not need to. */
static cudaError_t await(struct moe_step *step, uint64_t deadline_ns)
{
    uint64_t start = moe_clock_ns();
    for (;;) {
        cudaError_t rc = cudaEventQuery(step->left);
        uint64_t now = moe_clock_ns();
        if (rc == cudaErrorNotReady && (now - start > SPIN_NS || now >= deadline_ns))
            look_at_stages(step);
        if (rc == cudaSuccess)
            moe_cuda_device_moved(step->owner->session->device);
        if (rc != cudaErrorNotReady || now >= deadline_ns)
            return rc;
        if (now - start > SPIN_NS)
            nanosleep(&(struct timespec){.tv_nsec = IDLE_SLEEP_NS}, NULL);
    }
}

/* Gives the caller the numbers of rows of a step that has succeeded. */
static void hand_over_counts(const struct moe_step *step)
{
    const struct moe_layer *layer = step->args.layer;
    const struct moe_cuda_step_counts *from = &step->message->counts;
    struct moe_step_counts *to = step->args.counts;
    if (to == NULL)
        return;
    memset(to->expert_rows, 0, layer->spec.experts * sizeof *to->expert_rows);
    for (uint32_t l = 0; l < layer->local_experts; l++)
        to->expert_rows[layer->local[l]] = from->local_rows[l];
    to->local_experts = layer->local_experts;
    to->by_expert = true;
    to->slots = step->owner->session->config.slots;
    memcpy(to->sent_rows, from->sent_rows, to->slots * sizeof *to->sent_rows);
    to->to_slots = true;
}

/* The result of a step with kernels that have ended. */
static struct moe_status end_step(struct moe_step *step, cudaError_t rc, struct moe_step_result *r)
{
    struct moe_session *s = step->owner->session;
    struct moe_status st = moe_cuda_status(rc, "a step");
    if (moe_failed(&st)) {
        moe_cuda_session_fail(s);
        (void)settle_retained(step, false);
        return st;
    }
    st = moe_cuda_session_outcome_status(s, &step->message->outcome);
    r->refused = step->message->outcome.code == MOE_CUDA_PASS_REFUSED;
    r->retained = settle_retained(step, !moe_failed(&st));
    r->rows = step->message->outcome.rows;
    if (!moe_failed(&st))
        moe_cuda_retaining_learn(s, &step->args, r->rows);
    if (!moe_failed(&st))
        hand_over_counts(step);
    hand_over_answer(step);
    read_times(step, r);
    return st;
}

/* The comm thread could not enqueue the whole step. */
static struct moe_status end_unfinished_step(struct moe_step *step)
{
    struct moe_session *s = step->owner->session;
    if (!step->refused) {
        moe_cuda_session_fail(s);
        moe_cuda_step_slots_wait(s->device); /* the caller's memory must be free again */
    }
    (void)settle_retained(step, false);
    return moe_cuda_session_explain(s, step->net_task.status);
}

static struct moe_status still_running(void)
{
    return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "the step is still running");
}

/* The task of a pass is done, or the task of a step could not start it. */
static struct moe_status end_deferred(struct moe_step *step, struct moe_step_result *result)
{
    struct moe_status st = step->executor_task.status;
    if (st.reason == MOE_REASON_PEER_LOST)
        step->result.missing_slot = moe_cuda_session_missing(step->owner->session);
    if (result != NULL)
        *result = step->result;
    moe_cuda_step_slot_give(step);
    return st;
}

struct moe_status moe_cuda_step_wait(struct moe_step *step, uint64_t deadline_ns,
                                     struct moe_step_result *result)
{
    struct moe_session *s = step->owner->session;
    struct moe_step_result r = {.missing_slot = -1};
    if (step->deferred &&
        !moe_cuda_executor_await(step->owner->executor, &step->executor_task, deadline_ns))
        return still_running();
    if (step->deferred && (step->pass != NULL || moe_failed(&step->executor_task.status)))
        return end_deferred(step, result);
    MOE_TRY(moe_cuda_device_use(s->device));
    const bool net = s->net != NULL;
    const bool in_time = !net || moe_cuda_net_await(s->net, &step->net_task, deadline_ns);
    const bool enqueued = in_time && (!net || !moe_failed(&step->net_task.status));
    cudaError_t rc = enqueued ? await(step, deadline_ns) : cudaSuccess;
    if (!in_time || rc == cudaErrorNotReady)
        return still_running();
    struct moe_status st = enqueued ? end_step(step, rc, &r) : end_unfinished_step(step);
    if (st.reason == MOE_REASON_PEER_LOST)
        r.missing_slot = moe_cuda_session_missing(s);
    r.refused = r.refused || moe_cuda_session_refused(s, &st);
    if (result != NULL)
        *result = r;
    if (!net)
        moe_cuda_graphs_give(step->graph);
    moe_cuda_step_slot_give(step);
    return st;
}
