/* SPDX-License-Identifier: Apache-2.0 */
/* The host's part of passes: tables, memory for the rows, and the order of launches; see ep.h. Also
 * dispatch and combine alone, which are passes followed by a wait. */
#include "cuda/exchange/ep.h"

#include "common/session_rules.h"
#include "cuda/exchange/ep_net.h"
#include "cuda/exchange/pass.h"
#include "cuda/layer/ffn.h"
#include "cuda/plan/limits.h"
#include "cuda/plan/rows.h"
#include "moe/row_format.h"

#include <stddef.h>
#include <stdlib.h>

enum {
    QUICK_COLUMNS = 8, /* unit of columns in the quick regions */
    QUICK_PARTS = 8,   /* pieces of a row for sums in the quick regions */
    ALIGNMENT = 16,    /* of a part's tensors */
    LAST_STEP = (1 << MOE_WINDOW_STEP_BITS) - 1,
};

struct moe_cuda_ep {
    struct moe_session *session;
    struct moe_cuda_pass pass;            /* the last enqueued one */
    uint32_t dispatch_ctas, combine_ctas; /* of that pass */
    const struct moe_layer *layer;        /* of that pass */
    bool x_dy_rows;                       /* as in its batch */
    struct moe_cuda_step_params *params;  /* device memory; for passes that are a single part */

    /* The last pass that was a single part, while it can be combined. */
    bool dispatched;
    struct moe_cuda_batch batch;
    uint32_t tokens;

    /* As in struct moe_cuda_pass. */
    struct moe_cuda_own_token *own;
    uint32_t *share_tally;
    uint64_t *share_ready;
    uint32_t *start, *count, *row_of;
    struct moe_cuda_buffer rows, row_weight;
    struct moe_cuda_buffer outgoing; /* this slot's rows, if they are quantised */
};

/* ------------------------------------------------------------------ tables */

static uint32_t max_ctas(const struct moe_session *s)
{
    return (uint32_t)s->device->multiprocessors;
}

/* One CTA per multiprocessor that a launch may use. */
static uint32_t ctas_on(const struct moe_session *s, uint32_t processors)
{
    const uint32_t all = max_ctas(s);
    if (processors == 0 || processors > all)
        return all;
    const uint32_t fewest = all < MOE_CUDA_EP_FEWEST ? all : MOE_CUDA_EP_FEWEST;
    return processors < fewest ? fewest : processors;
}

struct table {
    void **at;
    size_t bytes;
};

enum { TABLES = 7 };

static void list_tables(struct moe_cuda_ep *ep, struct table out[TABLES])
{
    const struct moe_window_shape *w = &ep->session->layout.shape;
    size_t pairs = (size_t)w->max_tokens * w->max_top_k, ctas = max_ctas(ep->session);
    size_t copies = (size_t)w->max_experts * w->slots;
    copies = copies < MOE_CUDA_MAX_COPIES ? copies : MOE_CUDA_MAX_COPIES;
    out[0] = (struct table){(void **)&ep->own, w->max_tokens * sizeof *ep->own};
    out[1] = (struct table){(void **)&ep->row_of, w->slots * pairs * sizeof(uint32_t)};
    out[2] = (struct table){(void **)&ep->start, (w->max_experts + (size_t)1) * sizeof(uint32_t)};
    out[3] = (struct table){(void **)&ep->count, w->max_experts * sizeof(uint32_t)};
    out[4] = (struct table){(void **)&ep->params, sizeof *ep->params};
    out[5] = (struct table){(void **)&ep->share_tally, ctas * (copies + 3) * sizeof(uint32_t)};
    out[6] = (struct table){(void **)&ep->share_ready, ctas * sizeof(uint64_t)};
}

struct moe_status moe_cuda_ep_create(struct moe_session *session, struct moe_cuda_ep **out)
{
    struct moe_cuda_ep *ep = calloc(1, sizeof *ep);
    if (ep == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session's tables");
    ep->session = session;
    struct table tables[TABLES];
    list_tables(ep, tables);
    struct moe_status st = moe_ok();
    for (uint32_t i = 0; i < TABLES; i++)
        MOE_TRY_GOTO(
            st, moe_cuda_mem_alloc(session->device, MOE_MEM_DEVICE, tables[i].bytes, tables[i].at),
            failed);
    *out = ep;
    return st;
failed:
    moe_cuda_ep_destroy(ep);
    return st;
}

void moe_cuda_ep_destroy(struct moe_cuda_ep *ep)
{
    if (ep == NULL)
        return;
    struct moe_device *device = ep->session->device;
    struct table tables[TABLES];
    list_tables(ep, tables);
    for (uint32_t i = 0; i < TABLES; i++)
        moe_cuda_mem_free(device, MOE_MEM_DEVICE, *tables[i].at, tables[i].bytes);
    moe_cuda_buffer_free(device, &ep->rows);
    moe_cuda_buffer_free(device, &ep->row_weight);
    moe_cuda_buffer_free(device, &ep->outgoing);
    free(ep);
}

/* Before the next step, windows hold no flag and only blanks in quick regions, and steps count from
 * 1 again. Either the step number has used all its bits, so flags of the first steps would look new
 * again. Or the session has taken a mask, and a failed step may have left rows in quick regions.
 * All slots come here at the same step, and clear their windows between two barriers. All in stream
 * order, like a step. */
static struct moe_status start_over(struct moe_session *s)
{
    cudaStream_t stream = s->device->compute;
    const struct moe_window_layout *l = &s->layout;
    uint8_t *own = s->window.base[s->config.slot];
    MOE_TRY(moe_cuda_launch_exchange(s, 0, stream));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(own + l->head, 0, l->rows - l->head, stream)));
    /* Whom this slot has missed before says nothing of what follows. */
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(own + offsetof(struct moe_window_header, waiting), 0,
                                     sizeof(uint64_t), stream)));
    if (s->window.comm != NULL) /* else the window has no quick regions */
        MOE_TRY(moe_cuda_window_lay_blanks(own, l, stream));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(&s->control->step, 0, sizeof s->control->step, stream)));
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(&s->control->refused, 0, sizeof s->control->refused, stream)));
    MOE_TRY(
        MOE_CUDA(cudaMemsetAsync(&s->control->done_sent, 0, sizeof s->control->done_sent, stream)));
    MOE_TRY(MOE_CUDA(
        cudaMemsetAsync(s->ep->share_ready, 0, max_ctas(s) * sizeof *s->ep->share_ready, stream)));
    s->step = 0;
    return moe_cuda_launch_exchange(s, 0, stream);
}

struct moe_status moe_cuda_ep_count_step(struct moe_session *s)
{
    /* A network has no permanent flags. */
    if (s->net == NULL && s->step == LAST_STEP)
        MOE_TRY(start_over(s));
    s->step++;
    return moe_ok();
}

void moe_cuda_ep_start_over(struct moe_session *s)
{
    s->step = LAST_STEP;
}

/* ------------------------------------------------------------------ checks */

struct moe_status moe_cuda_ep_check(const struct moe_session *session, struct moe_layer *layer,
                                    enum moe_dtype dtype, uint32_t bucket, uint32_t tokens)
{
    if (!layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "layer %u has weights missing",
                         layer->spec.layer);
    MOE_TRY(moe_session_check_step(&session->config, &layer->spec, &layer->placement, layer->slot,
                                   dtype, bucket, tokens));
    return moe_cuda_layer_activate(layer, session->config.live);
}

uint32_t moe_cuda_ep_max_rows(const struct moe_session *session, const struct moe_layer *layer,
                              uint32_t bucket)
{
    return moe_cuda_max_rows(session->joined_slots, bucket, layer->spec.router.top_k,
                             layer->local_experts);
}

size_t moe_cuda_ep_row_bytes(const struct moe_layer *layer, enum moe_dtype dtype, bool x_dy_rows)
{
    if (x_dy_rows)
        return 2 * (size_t)moe_expert_width(&layer->spec) * moe_dtype_bytes(dtype);
    return moe_row_format(&layer->spec, dtype).bytes;
}

/* Bytes of the place of an arrived row. */
static size_t row_room_of(const struct moe_layer *layer, enum moe_dtype dtype, bool x_dy_rows)
{
    const size_t width = moe_expert_width(&layer->spec);
    if (x_dy_rows)
        return 2 * width * moe_dtype_bytes(dtype);
    return moe_cuda_row_bytes(width, dtype, moe_cuda_ffn_out_dtype(layer, dtype));
}

/* Bytes of this slot's rows, if they are quantised. */
static size_t outgoing_bytes_of(const struct moe_layer *layer, enum moe_dtype dtype,
                                uint32_t bucket, bool x_dy_rows)
{
    const struct moe_row_format format = moe_row_format(&layer->spec, dtype);
    return format.quantised && !x_dy_rows ? bucket * format.bytes : 0;
}

struct moe_status moe_cuda_ep_reserve(struct moe_session *session, struct moe_layer *layer,
                                      enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                      bool x_dy_rows)
{
    struct moe_cuda_ep *ep = session->ep;
    MOE_TRY(moe_cuda_ep_check(session, layer, dtype, bucket, tokens));
    size_t rows = moe_cuda_ep_max_rows(session, layer, bucket);
    MOE_TRY(moe_cuda_buffer_reserve(session->device, &ep->rows,
                                    rows * row_room_of(layer, dtype, x_dy_rows)));
    MOE_TRY(moe_cuda_buffer_reserve(session->device, &ep->row_weight, rows * sizeof(float)));
    MOE_TRY(moe_cuda_buffer_reserve(session->device, &ep->outgoing,
                                    outgoing_bytes_of(layer, dtype, bucket, x_dy_rows)));
    if (session->net == NULL)
        return moe_ok();
    return moe_cuda_ep_net_reserve(session->ep_net, layer, dtype, bucket, x_dy_rows);
}

bool moe_cuda_ep_fits(const struct moe_session *session, const struct moe_layer *layer,
                      enum moe_dtype dtype, uint32_t bucket)
{
    const struct moe_cuda_ep *ep = session->ep;
    size_t rows = moe_cuda_ep_max_rows(session, layer, bucket);
    return rows * row_room_of(layer, dtype, false) <= ep->rows.bytes &&
           outgoing_bytes_of(layer, dtype, bucket, false) <= ep->outgoing.bytes &&
           rows * sizeof(float) <= ep->row_weight.bytes &&
           (session->net == NULL || moe_cuda_ep_net_fits(session->ep_net, layer, dtype, bucket));
}

/* ------------------------------------------------------------------- passes */

/* Whether all slots use the quick regions. It follows from values that are equal on all slots. */
static bool is_quick(const struct moe_cuda_ep *ep, const struct moe_cuda_batch *b)
{
    const uint32_t width = moe_expert_width(&b->layer->spec);
    return ep->session->config.slots > 1 && !b->x_dy_rows && width % QUICK_COLUMNS == 0 &&
           moe_window_is_quick(&ep->session->layout, b->bucket, width, b->dtype);
}

/* Few tokens would leave warps without work, and long rows would take a warp too long. */
static uint32_t parts_of(const struct moe_cuda_pass *pass)
{
    if (pass->quick)
        return QUICK_PARTS;
    return pass->bucket <= MOE_WINDOW_QUICK_TOKENS || pass->hidden > 2048 ? MOE_WINDOW_PARTS : 1;
}

static void fill_pass(struct moe_cuda_ep *ep, const struct moe_cuda_batch *b)
{
    const struct moe_session *s = ep->session;
    const struct moe_layer *layer = b->layer;
    struct moe_cuda_pass *p = &ep->pass;
    uint32_t width = moe_expert_width(&layer->spec) * (b->x_dy_rows ? 2 : 1);
    bool quantised = outgoing_bytes_of(layer, b->dtype, b->bucket, b->x_dy_rows) != 0;
    *p = (struct moe_cuda_pass){
        .layout = s->layout,
        .control = s->control,
        .abort = &s->host_control_on_device->abort,
        .params = b->params,
        .slot = s->config.slot,
        .slots = s->config.slots,
        .bucket = b->bucket,
        .top_k = layer->spec.router.top_k,
        .experts = layer->spec.experts,
        .local_experts = layer->local_experts,
        .hidden = width,
        .entries = layer->placement.offset[layer->spec.experts],
        .dtype = b->dtype,
        .row_bytes = (uint32_t)moe_cuda_ep_row_bytes(layer, b->dtype, b->x_dy_rows),
        .stride = moe_window_row_stride(width, b->dtype),
        .x = b->x,
        .outgoing = quantised ? ep->outgoing.data : b->x,
        .ids = b->ids,
        .weights = b->weights,
        .token_state = b->token_state,
        .mode = b->mode,
        .began = b->began,
        .counts = b->counts,
        .quick = is_quick(ep, b),
        .shared_bytes = s->device->bulk_shared_bytes,
        .own = ep->own,
        .share_tally = ep->share_tally,
        .share_ready = ep->share_ready,
        .start = ep->start,
        .count = ep->count,
        .row_of = ep->row_of,
        .rows = ep->rows.data,
        .row_weight = ep->row_weight.data,
        .row_capacity = moe_cuda_ep_max_rows(s, layer, b->bucket),
    };
    p->parts = parts_of(p);
}

struct moe_status moe_cuda_ep_quantise(struct moe_cuda_ep *ep, const struct moe_cuda_batch *b,
                                       cudaStream_t stream, const void **rows)
{
    *rows = NULL;
    if (outgoing_bytes_of(b->layer, b->dtype, b->bucket, b->x_dy_rows) == 0)
        return moe_ok();
    *rows = ep->outgoing.data;
    return moe_cuda_ffn_quantise_tokens(b->layer, b->dtype, b->params, b->bucket, b->x,
                                        ep->outgoing.data, stream);
}

struct moe_status moe_cuda_ep_prepare(struct moe_cuda_ep *ep, const struct moe_cuda_batch *batch)
{
    MOE_TRY(moe_cuda_session_usable(ep->session));
    ep->dispatched = false;
    ep->layer = batch->layer;
    ep->x_dy_rows = batch->x_dy_rows;
    fill_pass(ep, batch);
    ep->dispatch_ctas = ctas_on(ep->session, batch->dispatch_processors);
    ep->combine_ctas = ctas_on(ep->session, batch->combine_processors);
    if (ep->session->net != NULL && !ep->x_dy_rows)
        return moe_cuda_ep_net_prepare(ep->session->ep_net, &ep->pass, ep->layer, false);
    return moe_ok();
}

/* x_dy_rows over a network: the caller is not the comm thread, so its own launches do not delay the
 * comm thread. Returns when all rows have arrived. */
static struct moe_status dispatch_x_dy_rows(void *ctx)
{
    struct moe_cuda_ep *ep = ctx;
    struct moe_cuda_ep_net *net = ep->session->ep_net;
    MOE_TRY(moe_cuda_ep_net_prepare(net, &ep->pass, ep->layer, true));
    return moe_cuda_ep_net_dispatch(net, &ep->pass);
}

static struct moe_status combine_x_dy_rows(void *ctx)
{
    struct moe_cuda_ep *ep = ctx;
    return moe_cuda_ep_net_combine(ep->session->ep_net, &ep->pass);
}

struct moe_status moe_cuda_ep_refuse(struct moe_cuda_ep *ep, const struct moe_cuda_batch *what,
                                     cudaStream_t stream)
{
    struct moe_cuda_batch batch = {.layer = what->layer,
                                   .dtype = what->dtype,
                                   .bucket = what->bucket,
                                   .params = ep->params,
                                   .x_dy_rows = what->x_dy_rows};
    struct moe_cuda_step_params params;
    struct moe_rows none;
    moe_cuda_step_params_fill(what->layer, what->dtype, what->bucket, 0, &params);
    params.head[MOE_HEAD_BUCKET] |= MOE_HEAD_NO_MEMORY;
    MOE_TRY(MOE_CUDA(
        cudaMemcpyAsync(ep->params, &params, sizeof params, cudaMemcpyHostToDevice, stream)));
    MOE_TRY(moe_cuda_ep_prepare(ep, &batch));
    return moe_cuda_ep_dispatch(ep, &none, stream);
}

struct moe_status moe_cuda_ep_forget_rows(struct moe_cuda_ep *ep, cudaStream_t stream)
{
    size_t experts = ep->session->layout.shape.max_experts;
    MOE_TRY(MOE_CUDA(cudaMemsetAsync(ep->start, 0, (experts + 1) * sizeof *ep->start, stream)));
    return MOE_CUDA(cudaMemsetAsync(ep->count, 0, experts * sizeof *ep->count, stream));
}

struct moe_status moe_cuda_ep_dispatch(struct moe_cuda_ep *ep, struct moe_rows *out,
                                       cudaStream_t stream)
{
    *out = (struct moe_rows){.local_experts = ep->pass.local_experts,
                             .expert = ep->layer->desc.placement.local,
                             .start = ep->start,
                             .count = ep->count,
                             .x = ep->pass.rows,
                             .quantised = ep->pass.outgoing != ep->pass.x,
                             .weight = ep->pass.row_weight};
    if (ep->session->net != NULL)
        return ep->x_dy_rows ? moe_cuda_session_run(ep->session, dispatch_x_dy_rows, ep)
                             : moe_cuda_ep_net_dispatch(ep->session->ep_net, &ep->pass);
    return moe_cuda_launch_dispatch(&ep->pass, ep->dispatch_ctas, stream);
}

struct moe_status moe_cuda_ep_combine(struct moe_cuda_ep *ep,
                                      const struct moe_cuda_results *results, void *y,
                                      struct moe_cuda_step_outcome *outcome, cudaStream_t stream)
{
    ep->dispatched = false;
    ep->pass.expert_out = results->expert_out;
    ep->pass.out_dtype = results->dtype;
    ep->pass.base = results->base;
    ep->pass.y = y;
    ep->pass.outcome = outcome;
    if (ep->session->net != NULL)
        return ep->x_dy_rows ? moe_cuda_session_run(ep->session, combine_x_dy_rows, ep)
                             : moe_cuda_ep_net_combine(ep->session->ep_net, &ep->pass);
    return moe_cuda_launch_combine(&ep->pass, ep->combine_ctas, stream);
}

struct moe_status moe_cuda_ep_combine_gradients(struct moe_cuda_ep *ep, const float *gradients,
                                                float *y, struct moe_cuda_step_outcome *outcome,
                                                cudaStream_t stream)
{
    struct moe_cuda_pass *p = &ep->pass;
    p->hidden = p->hidden / 2 + MOE_COMMON_TOP_K;
    p->dtype = MOE_DTYPE_F32;
    p->stride = moe_window_row_stride(p->hidden, MOE_DTYPE_F32);
    struct moe_cuda_results results = {.expert_out = gradients, .dtype = MOE_DTYPE_F32};
    return moe_cuda_ep_combine(ep, &results, y, outcome, stream);
}

const uint32_t *moe_cuda_ep_row_table(const struct moe_cuda_ep *ep)
{
    return ep->row_of;
}

/* -------------------------------------------------------------------- parts */

/* A step's router gives legal ids; these ids are the caller's. */
struct moe_status moe_cuda_ep_check_ids(const struct moe_session *s, const struct moe_layer *layer,
                                        uint32_t tokens, const int32_t *ids)
{
    uint32_t top_k = layer->spec.router.top_k;
    int64_t limit = (int64_t)layer->spec.experts + layer->spec.router.zero_experts;
    size_t pairs = (size_t)tokens * top_k;
    if (pairs == 0)
        return moe_ok();
    int32_t *copy = malloc(pairs * sizeof *copy);
    if (copy == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a copy of the routing");
    struct moe_status st = moe_cuda_mem_copy(s->device, copy, ids, pairs * sizeof *copy);
    for (size_t i = 0; i < pairs && !moe_failed(&st); i++)
        if (copy[i] >= limit)
            st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                           "token %zu is routed to expert %d of %lld", i / top_k, copy[i],
                           (long long)limit);
    free(copy);
    return st;
}

/* Arguments of a single part. */
struct part {
    struct moe_session *session;
    const struct moe_cuda_batch *batch;
    uint32_t tokens;
    struct moe_rows *out;    /* dispatch */
    const float *expert_out; /* combine */
    void *y;
};

static struct moe_status enqueue_dispatch(void *ctx)
{
    const struct part *part = ctx;
    const struct moe_cuda_batch *batch = part->batch;
    struct moe_session *s = part->session;
    cudaStream_t stream = s->device->compute;
    struct moe_cuda_step_params params;
    moe_cuda_step_params_fill(batch->layer, batch->dtype, batch->bucket, part->tokens, &params);
    MOE_TRY(moe_cuda_mem_copy(s->device, s->ep->params, &params, sizeof params));
    MOE_TRY(moe_cuda_ep_count_step(s));
    const void *unused;
    MOE_TRY(moe_cuda_ep_quantise(s->ep, batch, stream, &unused));
    MOE_TRY(moe_cuda_ep_prepare(s->ep, batch));
    return moe_cuda_ep_dispatch(s->ep, part->out, stream);
}

static struct moe_status enqueue_combine(void *ctx)
{
    const struct part *part = ctx;
    struct moe_cuda_results results = {.expert_out = part->expert_out, .dtype = MOE_DTYPE_F32};
    return moe_cuda_ep_combine(part->session->ep, &results, part->y, NULL,
                               part->session->device->compute);
}

static struct moe_status check_aligned(const void *a, const void *b)
{
    if ((uintptr_t)a % ALIGNMENT == 0 && (uintptr_t)b % ALIGNMENT == 0)
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                     "rows in device memory begin at multiples of %d bytes", ALIGNMENT);
}

static struct moe_cuda_batch batch_of(const struct moe_session *s, const struct moe_layer *layer,
                                      enum moe_dtype dtype, uint32_t bucket, const void *x,
                                      const int32_t *ids, const float *weights)
{
    return (struct moe_cuda_batch){.layer = layer,
                                   .dtype = dtype,
                                   .bucket = bucket,
                                   .params = s->ep->params,
                                   .x = x,
                                   .ids = ids,
                                   .weights = weights};
}

struct moe_status moe_cuda_ep_dispatch_alone(struct moe_session *s, struct moe_layer *layer,
                                             enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                             const void *x, const int32_t *ids,
                                             const float *weights, struct moe_rows *out)
{
    struct moe_cuda_batch batch = batch_of(s, layer, dtype, bucket, x, ids, weights);
    MOE_TRY(moe_cuda_device_use(s->device));
    MOE_TRY(moe_cuda_session_usable(s));
    MOE_TRY(moe_cuda_ep_reserve(s, layer, dtype, bucket, tokens, false));
    MOE_TRY(check_aligned(x, x));
    MOE_TRY(moe_cuda_ep_check_ids(s, layer, tokens, ids));
    struct part part = {.session = s, .batch = &batch, .tokens = tokens, .out = out};
    MOE_TRY(moe_cuda_session_run(s, enqueue_dispatch, &part));
    MOE_TRY(moe_cuda_session_finish(s));
    s->ep->batch = batch;
    s->ep->tokens = tokens;
    s->ep->dispatched = true;
    return moe_ok();
}

static bool same_pass(const struct moe_cuda_ep *ep, const struct moe_cuda_batch *batch,
                      uint32_t tokens, const struct moe_rows *rows)
{
    const struct moe_cuda_batch *b = &ep->batch;
    return ep->dispatched && b->layer == batch->layer && b->dtype == batch->dtype &&
           b->bucket == batch->bucket && ep->tokens == tokens && b->x == batch->x &&
           b->ids == batch->ids && b->weights == batch->weights && rows->x == ep->pass.rows;
}

struct moe_status moe_cuda_ep_combine_alone(struct moe_session *s, struct moe_layer *layer,
                                            enum moe_dtype dtype, uint32_t bucket, uint32_t tokens,
                                            const void *x, const int32_t *ids, const float *weights,
                                            const struct moe_rows *rows, const float *expert_out,
                                            void *y)
{
    struct moe_cuda_batch batch = batch_of(s, layer, dtype, bucket, x, ids, weights);
    MOE_TRY(moe_cuda_device_use(s->device));
    if (!same_pass(s->ep, &batch, tokens, rows))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "combine wants a dispatch with the same arguments before it");
    MOE_TRY(moe_cuda_session_usable(s));
    MOE_TRY(check_aligned(expert_out, y));
    struct part part = {.session = s, .expert_out = expert_out, .y = y};
    MOE_TRY(moe_cuda_session_run(s, enqueue_combine, &part));
    return moe_cuda_session_finish(s);
}
