/* SPDX-License-Identifier: Apache-2.0 */
/* A whole backward pass, top to bottom in `run_pass`; see backward.h. Where backward_plan.h allows
 * it, work that waits for the wire and work that multiplies run at the same time: one of the two on
 * the device's branch. */
#include "cuda/step/backward.h"

#include "base/clock.h"
#include "base/size.h"
#include "cuda/exchange/ep.h"
#include "cuda/exchange/exchange.h"
#include "cuda/plan/backward_plan.h"
#include "cuda/plan/limits.h"
#include "cuda/router/router.h"
#include "cuda/step/retain.h"
#include "cuda/step/step.h"
#include "cuda/training/train_ffn.h"

#include <string.h>

enum {
    LINE = 256,
    FLAG_ACCUMULATE = 1 << 9, /* in the head, next to MOE_HEAD_BACKWARD */
    FLAG_COEFF = 10,          /* from here on COEFF_BITS bits, a hash of the loss' coefficient */
    COEFF_BITS = 14,
};

struct moe_status moe_cuda_backward_supported(const struct moe_session *s)
{
    if (!s->config.training)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the session was not joined for training");
    return moe_ok();
}

/* ----------------------------------------------------------- dispatch, combine */

struct moe_status moe_cuda_x_dy_dispatch(struct moe_session *s, const struct moe_cuda_x_dy_rows *a,
                                         struct moe_rows *rows, const void **dy_rows)
{
    struct moe_device *device = s->device;
    cudaStream_t stream = device->compute;
    size_t bytes = a->layer->spec.hidden * moe_dtype_bytes(a->dtype);
    void *x_dy;
    MOE_TRY(moe_cuda_ep_reserve(s, a->layer, a->dtype, a->bucket, a->tokens, true));
    MOE_TRY(
        moe_cuda_train_scratch_take(device, MOE_CUDA_SCRATCH_X_DY, a->tokens * 2 * bytes, &x_dy));
    if (a->tokens > 0) {
        MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync(x_dy, 2 * bytes, a->x, bytes, bytes, a->tokens,
                                           cudaMemcpyDeviceToDevice, stream)));
        MOE_TRY(MOE_CUDA(cudaMemcpy2DAsync((char *)x_dy + bytes, 2 * bytes, a->dy, bytes, bytes,
                                           a->tokens, cudaMemcpyDeviceToDevice, stream)));
    }
    struct moe_cuda_step_params params;
    struct moe_cuda_batch batch = {.layer = a->layer,
                                   .dtype = a->dtype,
                                   .bucket = a->bucket,
                                   .x_dy_rows = true,
                                   .x = x_dy,
                                   .ids = a->ids,
                                   .weights = a->weights,
                                   .token_state = a->token_state,
                                   .dispatch_processors = a->dispatch_processors,
                                   .combine_processors = a->combine_processors};
    moe_cuda_step_params_fill(a->layer, a->dtype, a->bucket, a->tokens, &params);
    params.head[MOE_HEAD_DTYPE] |= a->flags;
    MOE_TRY(moe_cuda_train_upload_params(device, MOE_CUDA_SCRATCH_PASS_PARAMS, &params,
                                         &batch.params, stream));
    MOE_TRY(moe_cuda_ep_forget_rows(s->ep, stream));
    MOE_TRY(moe_cuda_ep_count_step(s));
    MOE_TRY(moe_cuda_ep_prepare(s->ep, &batch));
    MOE_TRY(moe_cuda_ep_dispatch(s->ep, rows, stream));
    *dy_rows = (const char *)rows->x + bytes;
    return moe_ok();
}

static struct moe_status take_apart(struct moe_session *s, const struct moe_cuda_x_dy_rows *a,
                                    void **x, void **dy)
{
    size_t bytes = a->layer->spec.hidden * moe_dtype_bytes(a->dtype);
    size_t rows = moe_cuda_ep_max_rows(s, a->layer, a->bucket);
    MOE_TRY(moe_cuda_train_scratch_take(s->device, MOE_CUDA_SCRATCH_X, rows * bytes, x));
    return moe_cuda_train_scratch_take(s->device, MOE_CUDA_SCRATCH_DY, rows * bytes, dy);
}

struct moe_status moe_cuda_x_dy_reserve_split(struct moe_session *s,
                                              const struct moe_cuda_x_dy_rows *a)
{
    void *x, *dy;
    return take_apart(s, a, &x, &dy);
}

struct moe_status moe_cuda_x_dy_split(struct moe_session *s, const struct moe_cuda_x_dy_rows *a,
                                      struct moe_rows *rows, const void **dy_rows)
{
    size_t bytes = a->layer->spec.hidden * moe_dtype_bytes(a->dtype);
    void *x, *dy;
    MOE_TRY(take_apart(s, a, &x, &dy));
    MOE_TRY(moe_cuda_split_x_dy_rows(rows->start + rows->local_experts, bytes, rows->x, x, dy,
                                     s->device->compute));
    rows->x = x;
    *dy_rows = dy;
    return moe_ok();
}

struct moe_status moe_cuda_x_dy_combine(struct moe_session *s, const struct moe_cuda_x_dy_rows *a,
                                        float *dx_rows, const float *dweight_rows, float **combined,
                                        cudaStream_t stream)
{
    const struct moe_window_shape *shape = &s->layout.shape;
    size_t columns = a->layer->spec.hidden + (size_t)MOE_CUDA_WEIGHT_COLUMNS;
    void *home;
    MOE_TRY(moe_cuda_train_scratch_take(s->device, MOE_CUDA_SCRATCH_COMBINED,
                                        a->tokens * columns * sizeof(float), &home));
    struct moe_cuda_label_rows label = {.slots = shape->slots,
                                        .max_tokens = shape->max_tokens,
                                        .max_top_k = shape->max_top_k,
                                        .top_k = a->layer->spec.router.top_k,
                                        .hidden = a->layer->spec.hidden,
                                        .row_of = moe_cuda_ep_row_table(s->ep),
                                        .tokens_of = s->control->tokens_of,
                                        .dweight = dweight_rows,
                                        .rows = dx_rows};
    MOE_TRY(moe_cuda_label_rows(&label, stream));
    *combined = home;
    return moe_cuda_ep_combine_gradients(s->ep, dx_rows, home, NULL, stream);
}

/* ------------------------------------------------------------------ whole pass */

/* Device memory of a pass. */
struct pass {
    struct moe_session *s;
    const struct moe_backward_args *a;
    struct moe_layer *layer;
    uint32_t tokens, top_k, choices, capacity;
    size_t row_bytes;
    bool need_logits;
    void *x, *dy, *out;
    uint8_t *mode, *state, *ok, *routed;
    int32_t *ids_in, *ids, *ids_sent;
    float *weights_in, *weights, *dweights, *dlogits, *dweight_rows;
    float *dx_experts, *dx_router, *dx_shared; /* shared: NULL without a shared expert */
    double *loss;
    float *logits;
    void *dx_rows; /* scratch [capacity, H + MOE_CUDA_WEIGHT_COLUMNS] f32 */
    struct moe_cuda_backward_plan plan;
    struct moe_cuda_train_ffn shared; /* between its two parts */
    bool refused; /* by all slots: nothing has changed, and the session goes on */
};

struct piece {
    void **at;
    size_t bytes;
};

static bool has_shared(const struct pass *p)
{
    return p->layer->spec.shared_intermediate > 0;
}

static struct moe_status take_memory(struct pass *p)
{
    size_t n = p->tokens, pairs = n * p->top_k, hidden = p->layer->spec.hidden, at = 0;
    struct piece pieces[] = {
        {&p->x, n * p->row_bytes},
        {&p->dy, n * p->row_bytes},
        {&p->out, n * p->row_bytes},
        {(void **)&p->mode, n},
        {(void **)&p->state, n},
        {(void **)&p->ok, n},
        {(void **)&p->routed, n},
        {(void **)&p->ids_in, pairs * sizeof(int32_t)},
        {(void **)&p->ids, pairs * sizeof(int32_t)},
        {(void **)&p->ids_sent, pairs * sizeof(int32_t)},
        {(void **)&p->weights_in, pairs * sizeof(float)},
        {(void **)&p->weights, pairs * sizeof(float)},
        {(void **)&p->dweights, pairs * sizeof(float)},
        {(void **)&p->dlogits, n * p->choices * sizeof(float)},
        {(void **)&p->dx_experts, n * hidden * sizeof(float)},
        {(void **)&p->dx_router, n * hidden * sizeof(float)},
        {(void **)&p->dx_shared, has_shared(p) ? n * hidden * sizeof(float) : 0},
        {(void **)&p->loss, n * sizeof(double)},
        {(void **)&p->dweight_rows, p->capacity * sizeof(float)},
    };
    size_t count = sizeof pieces / sizeof *pieces;
    for (size_t i = 0; i < count; i++)
        at += (pieces[i].bytes + LINE - 1) / LINE * LINE;
    void *memory;
    MOE_TRY(moe_cuda_train_scratch_take(p->s->device, MOE_CUDA_SCRATCH_PASS, at, &memory));
    char *next = memory;
    for (size_t i = 0; i < count; i++) {
        *pieces[i].at = next;
        next += (pieces[i].bytes + LINE - 1) / LINE * LINE;
    }
    return moe_ok();
}

static struct moe_status bring(const struct pass *p, void *to, const void *from, size_t bytes)
{
    if (bytes == 0 || from == NULL || to == NULL)
        return moe_ok();
    return MOE_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, p->s->device->compute));
}

static struct moe_status copy_in(struct pass *p)
{
    const struct moe_backward_args *a = p->a;
    size_t pairs = (size_t)p->tokens * p->top_k;
    MOE_TRY(bring(p, p->x, a->x, p->tokens * p->row_bytes));
    MOE_TRY(bring(p, p->dy, a->dy, p->tokens * p->row_bytes));
    MOE_TRY(bring(p, p->ids_in, a->ids, pairs * sizeof *a->ids));
    MOE_TRY(bring(p, p->weights_in, a->weights, pairs * sizeof *a->weights));
    if (a->mode != NULL)
        return bring(p, p->mode, a->mode, p->tokens);
    if (p->tokens == 0)
        return moe_ok();
    return MOE_CUDA(cudaMemsetAsync(p->mode, MOE_ROUTE_IDS, p->tokens, p->s->device->compute));
}

static struct moe_status copy_out(const struct pass *p)
{
    const struct moe_backward_args *a = p->a;
    size_t pairs = (size_t)p->tokens * p->top_k;
    MOE_TRY(bring(p, a->dx, p->out, p->tokens * p->row_bytes));
    MOE_TRY(bring(p, a->dweights, p->dweights, pairs * sizeof *a->dweights));
    return bring(p, a->token_state, p->state, p->tokens);
}

/* Repeats the routing of the forward pass and derives masks from it. */
static struct moe_status route(struct pass *p)
{
    struct moe_layer *layer = p->layer;
    cudaStream_t stream = p->s->device->compute;
    struct moe_cuda_step_params params;
    void *logits;
    MOE_TRY(moe_cuda_train_scratch_take(p->s->device, MOE_CUDA_SCRATCH_LOGITS,
                                        moe_cuda_router_bytes(layer, p->a->dtype, p->tokens),
                                        &logits));
    p->logits = logits;
    if (p->tokens == 0)
        return moe_ok();
    moe_cuda_step_params_fill(layer, p->a->dtype, 0, p->tokens, &params);
    params.has_modes = 1;
    params.need_logits = p->need_logits;
    struct moe_cuda_routing r = {.dtype = p->a->dtype,
                                 .capacity = p->tokens,
                                 .x = p->x,
                                 .mode = p->mode,
                                 .ids_in = p->ids_in,
                                 .weights_in = p->weights_in,
                                 .logits = p->logits,
                                 .ids = p->ids,
                                 .weights = p->weights,
                                 .token_state = p->state};
    struct moe_cuda_sorted_tokens sorted = {.tokens = p->tokens,
                                            .top_k = p->top_k,
                                            .experts = layer->spec.experts,
                                            .mode = p->mode,
                                            .token_state = p->state,
                                            .ids = p->ids,
                                            .ok = p->ok,
                                            .routed = p->routed,
                                            .ids_sent = p->ids_sent};
    MOE_TRY(moe_cuda_train_upload_params(p->s->device, MOE_CUDA_SCRATCH_PASS_PARAMS, &params,
                                         &r.params, stream));
    MOE_TRY(moe_cuda_router_enqueue(layer, &r, stream));
    MOE_TRY(moe_cuda_sort_tokens(&sorted, stream));
    /* Products take all rows, so rows of refused tokens become zeros. */
    return moe_cuda_clear_rows(p->tokens, p->row_bytes, p->ok, p->x, p->x, p->dy, stream);
}

static struct moe_status count_loads(struct pass *p)
{
    struct moe_trainer *t = p->a->trainer;
    uint32_t experts = p->layer->spec.experts;
    cudaStream_t stream = p->s->device->compute;
    MOE_TRY(MOE_CUDA(
        cudaMemsetAsync(t->counted, 0, (experts + (size_t)1) * sizeof *t->counted, stream)));
    MOE_TRY(moe_cuda_count_loads(p->tokens, p->top_k, experts, p->routed, p->ids, t->counted,
                                 t->counted + experts, stream));
    return p->a->accumulate ? moe_cuda_add_loads(experts, t->counted, t->loads, stream) : moe_ok();
}

/* counted [E + 1] of this slot becomes the group's sum, on the device; *tokens gets its last entry.
 */
static struct moe_status sum_counts(struct pass *p, uint64_t *tokens)
{
    enum { AT_ONCE = MOE_WINDOW_EXCHANGE_BYTES / sizeof(uint32_t) };
    struct moe_session *s = p->s;
    struct moe_trainer *t = p->a->trainer;
    uint32_t mine[MOE_CUDA_MAX_EXPERTS + 1], sum[MOE_CUDA_MAX_EXPERTS + 1] = {0};
    uint32_t n = p->layer->spec.experts + 1, all[MOE_CUDA_MAX_SLOTS * AT_ONCE];
    MOE_TRY(moe_cuda_mem_copy(s->device, mine, t->counted, n * sizeof *mine));
    for (uint32_t first = 0; first < n; first += AT_ONCE) {
        uint32_t part = n - first < AT_ONCE ? n - first : AT_ONCE;
        memset(all, 0, sizeof all);
        MOE_TRY(moe_cuda_session_exchange_inside(s, mine + first, all, part * sizeof *mine));
        for (uint32_t slot = 0; slot < s->config.slots; slot++)
            for (uint32_t i = 0; i < part; i++)
                sum[first + i] += all[(size_t)slot * part + i];
    }
    *tokens = sum[n - 1];
    return moe_cuda_mem_copy(s->device, t->counted, sum, n * sizeof *sum);
}

static struct moe_status sum_loss(struct pass *p, double *loss)
{
    struct moe_session *s = p->s;
    double mine = 0, all[MOE_CUDA_MAX_SLOTS] = {0};
    MOE_TRY(moe_cuda_train_sum_losses(s->device, p->loss, p->tokens, &mine));
    MOE_TRY(moe_cuda_session_exchange_inside(s, &mine, all, sizeof mine));
    *loss = 0;
    for (uint32_t slot = 0; slot < s->config.slots; slot++)
        *loss += all[slot];
    return moe_ok();
}

/* The load-balance loss: adds its gradient to dlogits and stores its value. Collective. */
static struct moe_status balance_loss(struct pass *p)
{
    const struct moe_backward_args *a = p->a;
    double loss = 0;
    if (a->aux_coeff != 0) {
        uint64_t tokens;
        MOE_TRY(sum_counts(p, &tokens));
        MOE_TRY(moe_cuda_train_aux(
            a->trainer, a->dtype, p->tokens, p->logits, p->routed, a->trainer->counted,
            moe_aux_constant(&p->layer->spec, a->aux_coeff, tokens), p->dlogits, p->loss));
        MOE_TRY(sum_loss(p, &loss));
    }
    if (a->aux_loss != NULL)
        *a->aux_loss = loss;
    return moe_ok();
}

/* The part of the shared expert that changes no gradient: while dispatch runs, or later on the
 * compute stream. */
static struct moe_status begin_shared(struct pass *p, cudaStream_t stream)
{
    const struct moe_backward_args *a = p->a;
    struct moe_activation_piece piece;
    bool retained = moe_cuda_retaining_find(p->s, a, MOE_ACTIVATION_SHARED, &piece);
    struct moe_cuda_train_tokens shared = {.dtype = a->dtype,
                                           .tokens = p->tokens,
                                           .bucket = a->bucket,
                                           .x = p->x,
                                           .dy = p->dy,
                                           .ok = p->ok,
                                           .accumulate = a->accumulate,
                                           .dx = p->dx_shared,
                                           .retained = retained ? piece.data : NULL,
                                           .stream = stream,
                                           .processors = p->plan.shared};
    return moe_cuda_train_shared_begin(a->trainer, &shared, &p->shared);
}

/* Sends rows home, sums them, and adds what the tokens' own slot computes. */
static struct moe_status bring_home(struct pass *p, const struct moe_cuda_x_dy_rows *batch)
{
    const struct moe_layer_spec *spec = &p->layer->spec;
    struct moe_device *device = p->s->device;
    const bool overlaps = p->plan.combine != 0;
    cudaStream_t stream = overlaps ? device->branch.stream : device->compute;
    float *combined;
    if (overlaps)
        MOE_TRY(moe_cuda_branch_fork(device));
    else
        moe_cuda_train_mark(device, MOE_BACKWARD_COMBINE);
    MOE_TRY(moe_cuda_x_dy_combine(p->s, batch, p->dx_rows, p->dweight_rows, &combined, stream));
    struct moe_cuda_home_gradients home = {.tokens = p->tokens,
                                           .hidden = spec->hidden,
                                           .top_k = p->top_k,
                                           .experts = spec->experts,
                                           .dtype = p->a->dtype,
                                           .x = p->x,
                                           .dy = p->dy,
                                           .ok = p->ok,
                                           .ids = p->ids,
                                           .weights = p->weights,
                                           .combined = combined,
                                           .dx = p->dx_experts,
                                           .dweights = p->dweights};
    return moe_cuda_home_gradients(&home, stream);
}

/* After bring_home: router, shared expert, and all parts of dx. */
static struct moe_status finish_tokens(struct pass *p)
{
    const struct moe_backward_args *a = p->a;
    struct moe_device *device = p->s->device;
    struct moe_cuda_logits_backward logits = {.dtype = a->dtype,
                                              .tokens = p->tokens,
                                              .x = p->x,
                                              .use = a->mode != NULL ? p->routed : NULL,
                                              .dlogits = p->dlogits,
                                              .accumulate = a->accumulate,
                                              .dx = p->dx_router};
    struct moe_cuda_dx_parts parts = {.experts = p->dx_experts,
                                      .router = p->dx_router,
                                      .shared = has_shared(p) ? p->dx_shared : NULL};
    moe_cuda_train_mark(device, MOE_BACKWARD_LOGITS);
    MOE_TRY(moe_cuda_train_router(a->trainer, a->dtype, p->tokens, p->logits, p->routed, p->ids,
                                  p->dweights, p->dlogits));
    MOE_TRY(balance_loss(p));
    MOE_TRY(moe_cuda_train_logits_backward(a->trainer, &logits));
    moe_cuda_train_mark(device, MOE_BACKWARD_SHARED);
    if (p->plan.shared == 0)
        MOE_TRY(begin_shared(p, device->compute));
    MOE_TRY(moe_cuda_train_shared_end(&p->shared));
    moe_cuda_train_mark(device, MOE_BACKWARD_FINISH);
    return moe_cuda_finish_dx(p->tokens, p->layer->spec.hidden, a->dtype, p->ok, &parts, p->out,
                              device->compute);
}

static uint32_t flags_of(const struct moe_backward_args *a)
{
    uint32_t bits;
    memcpy(&bits, &a->aux_coeff, sizeof bits);
    bits = (bits ^ bits >> COEFF_BITS ^ bits >> 2 * COEFF_BITS) & ((1u << COEFF_BITS) - 1);
    return MOE_HEAD_BACKWARD | (a->accumulate ? FLAG_ACCUMULATE : 0) | bits << FLAG_COEFF;
}

static struct moe_status take_scratch(struct pass *p, enum moe_cuda_scratch_use use, size_t bytes)
{
    void *unused;
    return moe_cuda_train_scratch_take(p->s->device, use, bytes, &unused);
}

/* Reserves all memory of a pass, so that no stage fails for lack of it while peers wait. */
static struct moe_status reserve(struct pass *p)
{
    struct moe_trainer *t = p->a->trainer;
    enum moe_dtype dtype = p->a->dtype;
    struct moe_cuda_x_dy_rows batch = {.layer = p->layer, .dtype = dtype, .bucket = p->a->bucket};
    size_t columns = p->layer->spec.hidden + (size_t)MOE_CUDA_WEIGHT_COLUMNS;
    MOE_TRY(moe_cuda_ep_reserve(p->s, p->layer, dtype, p->a->bucket, p->tokens, true));
    MOE_TRY(take_memory(p));
    MOE_TRY(take_scratch(p, MOE_CUDA_SCRATCH_LOGITS,
                         moe_cuda_router_bytes(p->layer, dtype, p->tokens)));
    MOE_TRY(take_scratch(p, MOE_CUDA_SCRATCH_X_DY, p->tokens * 2 * p->row_bytes));
    MOE_TRY(take_scratch(p, MOE_CUDA_SCRATCH_PASS_PARAMS, sizeof(struct moe_cuda_step_params)));
    MOE_TRY(take_scratch(p, MOE_CUDA_SCRATCH_COMBINED, p->tokens * columns * sizeof(float)));
    MOE_TRY(moe_cuda_train_reserve_ffn(t, dtype, p->capacity, p->tokens));
    MOE_TRY(moe_cuda_train_reserve_logits(t, dtype, p->tokens));
    if (!moe_cuda_train_reads_x_dy_rows(t, dtype))
        MOE_TRY(moe_cuda_x_dy_reserve_split(p->s, &batch));
    return moe_cuda_train_scratch_take(p->s->device, MOE_CUDA_SCRATCH_DX,
                                       p->capacity * columns * sizeof(float), &p->dx_rows);
}

/* Copies dispatch's outcome to the host, while products run that change no gradient. */
static struct moe_status copy_outcome(struct pass *p, const struct moe_rows *rows)
{
    struct moe_session *s = p->s;
    struct moe_cuda_step_outcome *copy = &s->host_control->outcome;
    s->host_control->rows_in_use = 0;
    if (rows->local_experts > 0)
        MOE_TRY(MOE_CUDA(cudaMemcpyAsync(
            &s->host_control->rows_in_use, rows->start + rows->local_experts,
            sizeof s->host_control->rows_in_use, cudaMemcpyDeviceToHost, s->device->compute)));
    MOE_TRY(MOE_CUDA(cudaMemcpyAsync(copy, &s->control->outcome, sizeof *copy,
                                     cudaMemcpyDeviceToHost, s->device->compute)));
    return MOE_CUDA(cudaEventRecord(p->s->outcome_ready, s->device->compute));
}

static struct moe_status await_outcome(struct pass *p, uint64_t *rows)
{
    struct moe_session *s = p->s;
    struct moe_status st = MOE_CUDA(cudaEventSynchronize(p->s->outcome_ready));
    *rows = s->host_control->outcome.rows;
    MOE_TRY(st);
    moe_cuda_device_moved(s->device);
    st = moe_cuda_session_outcome_status(s, &s->host_control->outcome);
    p->refused = s->host_control->outcome.code == MOE_CUDA_PASS_REFUSED;
    return st;
}

/* This slot has no memory: it announces a refusal instead of the pass, and all slots refuse. */
static struct moe_status refuse(struct pass *p, struct moe_step_result *result)
{
    const struct moe_cuda_batch batch = {
        .layer = p->layer, .dtype = p->a->dtype, .bucket = p->a->bucket, .x_dy_rows = true};
    const struct moe_rows none = {0};
    MOE_TRY(moe_cuda_ep_count_step(p->s));
    MOE_TRY(moe_cuda_ep_refuse(p->s->ep, &batch, p->s->device->compute));
    MOE_TRY(copy_outcome(p, &none));
    return await_outcome(p, &result->rows);
}

/* Whether this pass computes the experts' weight gradients that backward_plan.h can overlap. */
static bool has_weight_products(const struct pass *p, bool *adds)
{
    struct moe_trainer *t = p->a->trainer;
    const struct moe_cuda_block *b = moe_cuda_trainer_block(t, MOE_WEIGHT_GATE, MOE_PART_WEIGHT);
    *adds = b != NULL && !b->grad_is_zero;
    return b != NULL && p->a->accumulate && moe_cuda_block_moves(t, b) &&
           moe_cuda_train_reads_x_dy_rows(t, p->a->dtype);
}

static struct moe_cuda_backward_plan make_plan(const struct pass *p)
{
    const struct moe_layer_spec *spec = &p->layer->spec;
    struct moe_cuda_backward_params params = {
        .multiprocessors = (uint32_t)p->s->device->multiprocessors,
        /* Over a network rows travel on the compute stream, so the plan is that of one slot. */
        .slots = p->s->net != NULL ? 1 : (uint32_t)__builtin_popcountll(p->s->config.live),
        .bucket = p->a->bucket,
        .top_k = p->top_k,
        .hidden = spec->hidden,
        .intermediate = spec->intermediate,
        .local_experts = p->layer->local_experts,
        .shared = moe_cuda_train_shared_on_tensor_cores(p->layer, p->a->dtype)};
    struct moe_activation_piece unused;
    params.shared_pre = !moe_cuda_retaining_find(p->s, p->a, MOE_ACTIVATION_SHARED, &unused);
    params.weights = has_weight_products(p, &params.adds);
    return moe_cuda_backward_plan(&params);
}

/* Sends x and dy to the slots of their experts, and runs the shared expert at the same time. */
static struct moe_status send_out(struct pass *p, const struct moe_cuda_x_dy_rows *batch,
                                  struct moe_rows *rows, const void **dy_rows)
{
    struct moe_device *device = p->s->device;
    const bool overlaps = p->plan.dispatch != 0;
    moe_cuda_train_mark(device, MOE_BACKWARD_DISPATCH);
    if (overlaps) {
        MOE_TRY(moe_cuda_branch_fork(device));
        MOE_TRY(begin_shared(p, device->branch.stream));
    }
    MOE_TRY(moe_cuda_x_dy_dispatch(p->s, batch, rows, dy_rows));
    MOE_TRY(copy_outcome(p, rows));
    return overlaps ? moe_cuda_branch_join(device) : moe_ok();
}

/* A refusal is known after dispatch, before any slot changes something or waits again. */
static struct moe_status run_pass(struct pass *p, struct moe_step_result *result)
{
    const struct moe_backward_args *a = p->a;
    uint32_t stride = p->layer->spec.hidden + MOE_CUDA_WEIGHT_COLUMNS;
    struct moe_cuda_x_dy_rows batch = {.layer = p->layer,
                                       .dtype = a->dtype,
                                       .bucket = a->bucket,
                                       .tokens = p->tokens,
                                       .flags = flags_of(a),
                                       .x = p->x,
                                       .dy = p->dy,
                                       .ids = p->ids_sent,
                                       .weights = p->weights,
                                       .token_state = p->state,
                                       .dispatch_processors = p->plan.dispatch,
                                       .combine_processors = p->plan.combine};
    struct moe_device *device = p->s->device;
    struct moe_rows rows;
    struct moe_cuda_train_rows r = {.rows = &rows,
                                    .stride = 2 * p->layer->spec.hidden,
                                    .capacity = p->capacity,
                                    .bucket = a->bucket,
                                    .slots = (uint32_t)__builtin_popcountll(p->s->config.live),
                                    .accumulate = a->accumulate,
                                    .dx = p->dx_rows,
                                    .dx_stride = stride,
                                    .dweight = p->dweight_rows};
    struct moe_cuda_train_ffn experts;
    struct moe_activation_piece retained;
    const bool found = moe_cuda_retaining_find(p->s, a, MOE_ACTIVATION_ROUTED, &retained);
    if (found)
        r.retained = retained.data;
    MOE_TRY(copy_in(p));
    moe_cuda_train_marks_begin(device);
    moe_cuda_train_mark(device, MOE_BACKWARD_ROUTER);
    MOE_TRY(route(p));
    MOE_TRY(send_out(p, &batch, &rows, &r.dy));
    if (!moe_cuda_train_reads_x_dy_rows(a->trainer, a->dtype)) {
        MOE_TRY(moe_cuda_x_dy_split(p->s, &batch, &rows, &r.dy));
        r.stride = p->layer->spec.hidden;
    }
    MOE_TRY(moe_cuda_train_experts_begin(a->trainer, a->dtype, &r, &experts));
    MOE_TRY(await_outcome(p, &result->rows));
    /* Only row counts are compared: a different batch is assumed to give a different count. */
    result->used_retained = found && retained.rows == result->rows &&
                            retained.in_use == p->s->host_control->rows_in_use;
    if (found && !result->used_retained)
        MOE_TRY(moe_cuda_train_experts_without_retained(&experts));
    MOE_TRY(count_loads(p));
    MOE_TRY(moe_cuda_train_experts_rows(&experts));
    MOE_TRY(bring_home(p, &batch));
    MOE_TRY(moe_cuda_train_experts_weights(&experts, &p->plan.overlap));
    if (p->plan.combine != 0) {
        moe_cuda_train_mark(device, MOE_BACKWARD_COMBINE); /* the rest of it */
        MOE_TRY(moe_cuda_branch_join(device));
    }
    if (a->aux_coeff != 0) /* the following work waits for the other slots again */
        MOE_TRY(moe_cuda_session_finish(p->s));
    MOE_TRY(finish_tokens(p));
    moe_cuda_train_mark(device, MOE_BACKWARD_STAGE_COUNT);
    MOE_TRY(copy_out(p));
    moe_cuda_train_marks_follow(device);
    MOE_TRY(moe_cuda_session_finish(p->s));
    moe_cuda_train_marks_read(device, result->backward_ns);
    result->on_tensor_cores = moe_cuda_train_on_tensor_cores(a->trainer, a->dtype);
    return moe_ok();
}

static bool any_logits(const struct moe_backward_args *a)
{
    bool any = a->mode == NULL && a->tokens > 0;
    for (uint32_t t = 0; a->mode != NULL && t < a->tokens; t++)
        any = any || a->mode[t] == MOE_ROUTE_IDS;
    return any;
}

static struct pass describe(struct moe_session *s, const struct moe_backward_args *a)
{
    struct moe_layer *layer = a->trainer->layer;
    return (struct pass){.s = s,
                         .a = a,
                         .layer = layer,
                         .tokens = a->tokens,
                         .top_k = layer->spec.router.top_k,
                         .choices = layer->spec.experts + layer->spec.router.zero_experts,
                         .capacity = moe_cuda_ep_max_rows(s, layer, a->bucket),
                         .row_bytes = layer->spec.hidden * moe_dtype_bytes(a->dtype),
                         .need_logits = any_logits(a)};
}

/* Waits for all work of a failed pass: the caller's tensors must be free when its step has ended.
 */
static void leave_memory(struct moe_device *device)
{
    (void)moe_cuda_branch_join(device).code;
    (void)moe_cuda_device_finish(device).code;
}

/* Takes all memory first, then runs the pass. Without memory this slot refuses. */
static struct moe_status run(struct pass *p, struct moe_step_result *result)
{
    struct moe_device *device = p->s->device;
    struct moe_status st = moe_cuda_session_catch_up(p->s);
    if (!moe_failed(&st))
        st = reserve(p);
    /* Without memory, retained activations are dropped. */
    if (st.code == MOE_RESOURCE_EXHAUSTED &&
        moe_activation_cache_give_back(device->activation_cache))
        st = reserve(p);
    if (!moe_failed(&st)) {
        p->plan = make_plan(p);
        st = run_pass(p, result);
        if (moe_failed(&st))
            leave_memory(device);
    } else if (st.code == MOE_RESOURCE_EXHAUSTED)
        st = refuse(p, result);
    return st;
}

/* A moe_cuda_pass_fn. An earlier step may have ended the session. */
static struct moe_status make_pass(struct moe_session *s, const struct moe_backward_args *a,
                                   struct moe_step_result *result)
{
    struct pass p = describe(s, a);
    uint64_t begun = moe_clock_ns();
    MOE_TRY(moe_cuda_session_usable(s));
    struct moe_status st = run(&p, result);
    result->total_ns = moe_clock_ns() - begun;
    result->refused = p.refused;
    if (moe_failed(&st) && !p.refused)
        moe_cuda_session_fail(s); /* the other slots wait for data that will not come */
    return st;
}

struct moe_status moe_cuda_backward_enqueue(struct moe_session *s,
                                            const struct moe_backward_args *a,
                                            struct moe_step **out)
{
    MOE_TRY(moe_cuda_session_usable(s));
    MOE_TRY(moe_cuda_backward_supported(s));
    MOE_TRY(moe_backward_check(&s->config, a));
    MOE_TRY(moe_cuda_ep_check(s, a->trainer->layer, a->dtype, a->bucket, a->tokens));
    return moe_cuda_step_post_pass(s, a, make_pass, out);
}
