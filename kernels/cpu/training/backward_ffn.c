/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of the experts' feed-forward networks, the shared one included.
 *
 * Rows are processed in waves of bounded memory. A wave widens x and dy to fp32, and computes gate
 * and up again unless they were retained. The rest is products (gemm.h) and loops over the elements
 * of rows. Results replace their inputs in these buffers:
 *   gate: g -> dg      up: u -> du      hidden: dh -> h      dy: G -> w G
 * Sums over rows go wave by wave in the order of rows. */
#include "cpu/compute/gemm.h"
#include "cpu/training/backward.h"

#include "base/size.h"

#include <math.h>
#include <stddef.h>

enum { WAVE_BYTES = 64 << 20 }; /* of fp32 buffers at a time */

/* Rows of one expert in a wave, by their first row in each buffer. */
struct span {
    uint32_t entry; /* local expert, 0 for the shared expert */
    uint32_t rows;
    size_t first;        /* row of the buffers */
    const void *x, *dy;  /* the first row in the job's dtype; by `index` for the shared expert */
    const float *weight; /* [rows] routing weight, or NULL for 1 */
    float *dx;           /* [rows, H] */
    float *dweight;      /* [rows], or NULL */
    size_t retained;     /* of the first row in job->retained; by `index` for the shared expert */
};

struct backward_job {
    struct moe_trainer *trainer;
    const struct moe_layer *layer;
    const struct moe_cpu_isa *isa;
    enum moe_dtype dtype;
    bool accumulate;
    bool input; /* weighting INPUT: weights multiply x; their gradients come last */
    enum moe_weight gate, up, down;
    enum moe_activation activation;
    uint32_t hidden, inner;

    const struct moe_cpu_pre *retained; /* NULL: compute gate and up again */

    /* Shared expert only; NULL for routed ones. */
    const uint32_t *index;    /* [rows] token of each row of the wave */
    const float *gate_vector; /* [H] */
    float *row_weight;        /* [rows] sigmoid(gate vector . x) */
    float *sum;               /* [T, H] += dx */

    /* Buffers of the wave, [rows, H] and [rows, I]; q and p [rows, r] for adapters. */
    float *x, *dy, *g, *u, *d, *q, *p;

    uint32_t rows_per_item;
    uint32_t spans;
    struct span span[MOE_MAX_EXPERTS];
};

/* ------------------------------------------------------------------ row by row */

typedef void row_fn(const struct backward_job *job, const struct span *span, uint32_t row);

struct rows_job {
    const struct backward_job *job;
    row_fn *fn;
};

static void rows_item(void *ctx, uint32_t item)
{
    const struct rows_job *r = ctx;
    const struct span *span = r->job->span;
    uint32_t per_item = r->job->rows_per_item;
    for (uint32_t n; item >= (n = (span->rows + per_item - 1) / per_item); span++)
        item -= n;
    uint32_t end = moe_cpu_min(span->rows, (item + 1) * per_item);
    for (uint32_t row = item * per_item; row < end; row++)
        r->fn(r->job, span, row);
}

static void each_row(struct backward_job *job, row_fn *fn)
{
    struct rows_job rows = {job, fn};
    uint32_t items = 0;
    job->rows_per_item = moe_cpu_units_per_item(4 * (uint64_t)(job->hidden + job->inner));
    for (uint32_t s = 0; s < job->spans; s++)
        items += (job->span[s].rows + job->rows_per_item - 1) / job->rows_per_item;
    moe_cpu_parallel(job->layer->device, items, rows_item, &rows);
}

/* Row `row` of a span in a caller's tensor. */
static const void *given_row(const struct backward_job *job, const void *rows, uint32_t row)
{
    size_t at = job->index != NULL ? job->index[row] : row;
    return (const char *)rows + at * job->hidden * moe_dtype_bytes(job->dtype);
}

static void widen_row(const struct backward_job *job, const struct span *span, uint32_t row)
{
    size_t at = (span->first + row) * job->hidden;
    float scale = job->input && span->weight != NULL ? span->weight[row] : 1.0f;
    job->isa->widen(job->dtype, job->hidden, given_row(job, span->x, row), scale, job->x + at);
    job->isa->widen(job->dtype, job->hidden, given_row(job, span->dy, row), 1.0f, job->dy + at);
}

static float dot(uint32_t n, const float *a, const float *b)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return (float)sum;
}

/* Computes from dh: the weight's gradient, dg, du, h and w G. */
static void activation_row(const struct backward_job *job, const struct span *span, uint32_t row)
{
    const struct moe_layer_spec *spec = &job->layer->spec;
    size_t at = (span->first + row) * job->inner;
    float *dy = job->dy + (span->first + row) * job->hidden;
    float w = !job->input && span->weight != NULL ? span->weight[row] : 1.0f;
    float dw = job->isa->activate_backward(job->activation, spec->swiglu_limit, spec->swiglu_alpha,
                                           job->inner, w, job->g + at, job->u + at, job->d + at);
    if (job->input)
        return;
    if (job->down == MOE_WEIGHT_DOWN && spec->down_bias)
        dw +=
            dot(job->hidden, dy, moe_cpu_layer_bias(job->layer, MOE_WEIGHT_DOWN_BIAS, span->entry));
    if (span->dweight != NULL)
        span->dweight[row] = dw;
    for (uint32_t i = 0; i < job->hidden; i++)
        dy[i] *= w;
}

/* Input weighting, after dx'. Uses the caller's x, because a weight of 0 has a gradient too. */
static void input_weight_row(const struct backward_job *job, const struct span *span, uint32_t row)
{
    float *dx = span->dx + (size_t)row * job->hidden, w = span->weight[row];
    const void *given = given_row(job, span->x, row);
    double dw = 0;
    for (uint32_t i = 0; i < job->hidden; i++) {
        float x = job->dtype == MOE_DTYPE_F32 ? ((const float *)given)[i]
                                              : moe_bf16_to_f32(((const uint16_t *)given)[i]);
        dw += (double)dx[i] * x;
        dx[i] *= w;
    }
    span->dweight[row] = (float)dw;
}

static void gate_row(const struct backward_job *job, const struct span *span, uint32_t row)
{
    float logit = dot(job->hidden, job->x + (span->first + row) * job->hidden, job->gate_vector);
    job->row_weight[row] = 1.0f / (1.0f + expf(-logit));
}

/* After dx: adds the gate's part to dx; dweight becomes the cotangent of the gate's logit. */
static void gate_backward_row(const struct backward_job *job, const struct span *span, uint32_t row)
{
    float w = job->row_weight[row], slope = span->dweight[row] * w * (1.0f - w);
    float *dx = span->dx + (size_t)row * job->hidden;
    span->dweight[row] = slope;
    for (uint32_t i = 0; i < job->hidden; i++)
        dx[i] += slope * job->gate_vector[i];
}

static void add_to_sum_row(const struct backward_job *job, const struct span *span, uint32_t row)
{
    const float *dx = span->dx + (size_t)row * job->hidden;
    float *sum = job->sum + (size_t)job->index[row] * job->hidden;
    for (uint32_t i = 0; i < job->hidden; i++)
        sum[i] += dx[i];
}

/* -------------------------------------------------------------------- products */

/* Products of the spans of a wave. */
struct products {
    uint32_t count;
    struct moe_cpu_product product[2 * MOE_MAX_EXPERTS];
};

/* y (+)= x W or x W^T for the span; x and y are the wave's buffers. */
static void add_product(const struct backward_job *job, struct products *list,
                        enum moe_cpu_factor factor, enum moe_weight w, const struct span *span,
                        const float *x, float *y)
{
    const struct moe_cpu_matrix *m = &job->layer->matrix[w][span->entry];
    bool forward = factor == MOE_CPU_WEIGHT;
    uint32_t k = forward ? m->in : m->out, columns = forward ? m->out : m->in;
    const float *bias = NULL;
    if (w == MOE_WEIGHT_GATE && forward)
        bias = moe_cpu_layer_bias(job->layer, MOE_WEIGHT_GATE_BIAS, span->entry);
    if (w == MOE_WEIGHT_UP && forward)
        bias = moe_cpu_layer_bias(job->layer, MOE_WEIGHT_UP_BIAS, span->entry);
    list->product[list->count++] = (struct moe_cpu_product){.factor = factor,
                                                            .rows = span->rows,
                                                            .k = k,
                                                            .columns = columns,
                                                            .x = x + span->first * k,
                                                            .weight = m,
                                                            .bias = bias,
                                                            .scale = 1,
                                                            .y = y + span->first * columns};
}

static void run_products(const struct backward_job *job, struct products *list)
{
    moe_cpu_gemm_products(job->layer->device, list->product, list->count);
    list->count = 0;
}

static void compute_pre(const struct backward_job *job, struct products *list)
{
    for (uint32_t s = 0; s < job->spans; s++) {
        add_product(job, list, MOE_CPU_WEIGHT, job->gate, &job->span[s], job->x, job->g);
        add_product(job, list, MOE_CPU_WEIGHT, job->up, &job->span[s], job->x, job->u);
    }
    run_products(job, list);
}

static void fetch_pre_row(const struct backward_job *job, const struct span *span, uint32_t row)
{
    size_t from = span->retained + (job->index != NULL ? job->index[row] : row);
    size_t at = (span->first + row) * job->inner, bytes = job->inner * sizeof(float);
    memcpy(job->g + at, job->retained->gate + from * job->inner, bytes);
    memcpy(job->u + at, job->retained->up + from * job->inner, bytes);
}

static void compute_dh(const struct backward_job *job, struct products *list)
{
    for (uint32_t s = 0; s < job->spans; s++)
        add_product(job, list, MOE_CPU_WEIGHT_TRANSPOSED, job->down, &job->span[s], job->dy,
                    job->d);
    run_products(job, list);
}

static void gradient_of_x(const struct backward_job *job, struct products *list)
{
    const enum moe_weight weights[] = {job->gate, job->up};
    for (int i = 0; i < 2; i++) {
        for (uint32_t s = 0; s < job->spans; s++) {
            const struct span *span = &job->span[s];
            add_product(job, list, MOE_CPU_WEIGHT_TRANSPOSED, weights[i], span,
                        i == 0 ? job->g : job->u, job->x);
            list->product[list->count - 1].y = span->dx;
            list->product[list->count - 1].add = i == 1;
        }
        run_products(job, list);
    }
}

/* ----------------------------------------------------------- gradients of weights */

struct outers {
    uint32_t count;
    struct moe_cpu_outer outer[6 * MOE_MAX_EXPERTS];
};

/* grad += the transpose of a [rows, out] times b [rows, in], for a weight that is trained. */
static void add_outer(const struct backward_job *job, struct outers *list, enum moe_weight w,
                      const struct span *span, const float *a, uint32_t out, const float *b,
                      uint32_t in)
{
    float *grad = moe_cpu_trainer_grad(job->trainer, w, MOE_PART_WEIGHT, span->entry);
    if (grad != NULL)
        list->outer[list->count++] = (struct moe_cpu_outer){.rows = span->rows,
                                                            .out = out,
                                                            .in = in,
                                                            .a = a + span->first * out,
                                                            .b = b + span->first * in,
                                                            .sum = grad};
}

/* Adapters of one weight: q = scale * (a B), p = scale * (b A^T), then dA += q^T b, dB += a^T p. */
static void adapter_gradients(const struct backward_job *job, struct products *products,
                              struct outers *list, enum moe_weight w, const float *a, uint32_t out,
                              const float *b, uint32_t in)
{
    struct moe_trainer *t = job->trainer;
    const struct moe_cpu_param *pa = moe_cpu_trainer_param(t, w, MOE_PART_LORA_A);
    const struct moe_cpu_param *pb = moe_cpu_trainer_param(t, w, MOE_PART_LORA_B);
    if (pa == NULL || moe_cpu_trainer_grad(t, w, MOE_PART_LORA_A, 0) == NULL)
        return;
    uint32_t rank = t->config.lora_rank;
    for (uint32_t s = 0; s < job->spans; s++) {
        const struct span *span = &job->span[s];
        struct moe_cpu_product product = {.factor = MOE_CPU_PLAIN,
                                          .rows = span->rows,
                                          .k = out,
                                          .columns = rank,
                                          .x = a + span->first * out,
                                          .plain = pb->value + span->entry * pb->n,
                                          .scale = moe_cpu_trainer_lora_scale(t),
                                          .y = job->q + span->first * rank};
        products->product[products->count++] = product;
        product.factor = MOE_CPU_PLAIN_TRANSPOSED;
        product.k = in;
        product.x = b + span->first * in;
        product.plain = pa->value + span->entry * pa->n;
        product.y = job->p + span->first * rank;
        products->product[products->count++] = product;
        struct moe_cpu_outer outer = {.rows = span->rows,
                                      .out = rank,
                                      .in = in,
                                      .a = job->q + span->first * rank,
                                      .b = b + span->first * in,
                                      .sum = pa->grad + span->entry * pa->n};
        list->outer[list->count++] = outer;
        outer = (struct moe_cpu_outer){.rows = span->rows,
                                       .out = out,
                                       .in = rank,
                                       .a = a + span->first * out,
                                       .b = job->p + span->first * rank,
                                       .sum = pb->grad + span->entry * pb->n};
        list->outer[list->count++] = outer;
    }
    run_products(job, products);
    moe_cpu_gemm_outers(job->layer->device, list->outer, list->count);
    list->count = 0;
}

static void gradients_of_weights(const struct backward_job *job, struct products *products,
                                 struct outers *list)
{
    uint32_t h = job->hidden, n = job->inner;
    bool routed = job->down == MOE_WEIGHT_DOWN;
    for (uint32_t s = 0; s < job->spans; s++) {
        const struct span *span = &job->span[s];
        add_outer(job, list, job->gate, span, job->g, n, job->x, h);
        add_outer(job, list, job->up, span, job->u, n, job->x, h);
        add_outer(job, list, job->down, span, job->dy, h, job->d, n);
        if (routed) {
            add_outer(job, list, MOE_WEIGHT_GATE_BIAS, span, job->g, n, job->x, 0);
            add_outer(job, list, MOE_WEIGHT_UP_BIAS, span, job->u, n, job->x, 0);
            add_outer(job, list, MOE_WEIGHT_DOWN_BIAS, span, job->dy, h, job->x, 0);
        }
    }
    moe_cpu_gemm_outers(job->layer->device, list->outer, list->count);
    list->count = 0;
    if (!routed || job->q == NULL)
        return;
    adapter_gradients(job, products, list, MOE_WEIGHT_GATE, job->g, n, job->x, h);
    adapter_gradients(job, products, list, MOE_WEIGHT_UP, job->u, n, job->x, h);
    adapter_gradients(job, products, list, MOE_WEIGHT_DOWN, job->dy, h, job->d, n);
}

/* ------------------------------------------------------------------------ waves */

/* Memory of a pass over waves, in two scratch buffers. */
struct workspace {
    struct products *products;
    struct outers *outers;
    struct backward_job *job;
    uint32_t rows; /* of a wave */
    void *floats, *lists;
};

static void close_workspace(struct moe_device *device, struct workspace *w)
{
    moe_cpu_scratch_give(device, w->floats);
    moe_cpu_scratch_give(device, w->lists);
}

/* `shape` has the fields before `span` of the job; `max_rows`: rows in all. */
static struct moe_status open_workspace(const struct backward_job *shape, uint64_t max_rows,
                                        struct workspace *w)
{
    struct moe_device *device = shape->layer->device;
    size_t rank = shape->down == MOE_WEIGHT_DOWN ? shape->trainer->config.lora_rank : 0;
    size_t per_row = 2 * (size_t)shape->hidden + 3 * (size_t)shape->inner + 2 * rank;
    uint64_t rows = WAVE_BYTES / (per_row * sizeof(float)) + 1;
    *w = (struct workspace){.rows = (uint32_t)(rows < max_rows ? rows : max_rows)};
    size_t bytes, lists = sizeof *w->products + sizeof *w->outers + sizeof *w->job;
    if (!moe_size_mul3(w->rows, per_row, sizeof(float), &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "scratch too large");
    MOE_TRY(moe_cpu_scratch_take(device, lists, &w->lists));
    struct moe_status st = moe_cpu_scratch_take(device, bytes, &w->floats);
    if (moe_failed(&st)) {
        moe_cpu_scratch_give(device, w->lists);
        return st;
    }
    w->products = w->lists;
    w->outers = (void *)(w->products + 1);
    w->job = (void *)(w->outers + 1);
    w->products->count = w->outers->count = 0;
    memcpy(w->job, shape, offsetof(struct backward_job, span));
    struct backward_job *job = w->job;
    float *at = w->floats;
    job->x = at, at += w->rows * (size_t)job->hidden;
    job->dy = at, at += w->rows * (size_t)job->hidden;
    job->g = at, at += w->rows * (size_t)job->inner;
    job->u = at, at += w->rows * (size_t)job->inner;
    job->d = at, at += w->rows * (size_t)job->inner;
    job->q = rank > 0 ? at : NULL;
    job->p = rank > 0 ? at + w->rows * rank : NULL;
    return moe_ok();
}

static void finish_shared(struct workspace *w)
{
    struct backward_job *job = w->job;
    if (job->gate_vector != NULL) {
        each_row(job, gate_backward_row);
        if (job->accumulate)
            add_outer(job, w->outers, MOE_WEIGHT_SHARED_GATE_VECTOR, job->span, job->span->dweight,
                      1, job->x, job->hidden);
        moe_cpu_gemm_outers(job->layer->device, w->outers->outer, w->outers->count);
        w->outers->count = 0;
    }
    each_row(job, add_to_sum_row);
}

static void run_wave(struct workspace *w)
{
    struct backward_job *job = w->job;
    each_row(job, widen_row);
    if (job->gate_vector != NULL)
        each_row(job, gate_row);
    if (job->retained != NULL)
        each_row(job, fetch_pre_row);
    else
        compute_pre(job, w->products);
    compute_dh(job, w->products);
    each_row(job, activation_row);
    gradient_of_x(job, w->products);
    if (job->accumulate)
        gradients_of_weights(job, w->products, w->outers);
    if (job->input)
        each_row(job, input_weight_row);
    if (job->sum != NULL)
        finish_shared(w);
}

/* -------------------------------------------------------------- routed experts */

struct given_rows {
    const struct moe_rows *rows;
    const void *dy;
    float *dx, *dweight;
};

/* The span of `take` rows of expert l, from its row `done` on. */
static struct span span_of(const struct backward_job *job, const struct given_rows *g, uint32_t l,
                           uint32_t done, uint32_t take, size_t first)
{
    size_t row = (size_t)g->rows->start[l] + done;
    size_t at = row * job->hidden, bytes = at * moe_dtype_bytes(job->dtype);
    return (struct span){.entry = (uint32_t)job->layer->local_index[g->rows->expert[l]],
                         .rows = take,
                         .first = first,
                         .x = (const char *)g->rows->x + bytes,
                         .dy = (const char *)g->dy + bytes,
                         .weight = g->rows->weight + row,
                         .dx = g->dx + at,
                         .dweight = g->dweight + row,
                         .retained = row};
}

static void run_expert_waves(struct workspace *w, const struct given_rows *g)
{
    struct backward_job *job = w->job;
    uint32_t used = 0;
    job->spans = 0;
    for (uint32_t l = 0; l < g->rows->local_experts; l++) {
        for (uint32_t done = 0; done < g->rows->count[l];) {
            uint32_t take = moe_cpu_min(g->rows->count[l] - done, w->rows - used);
            job->span[job->spans++] = span_of(job, g, l, done, take, used);
            done += take;
            used += take;
            if (used == w->rows) {
                run_wave(w);
                used = job->spans = 0;
            }
        }
    }
    if (used > 0)
        run_wave(w);
}

struct moe_status moe_cpu_experts_backward(struct moe_trainer *t, enum moe_dtype dtype,
                                           bool accumulate, const struct moe_rows *rows,
                                           const void *dy_rows, const struct moe_cpu_pre *retained,
                                           float *dx_rows, float *dweight_rows)
{
    const struct moe_layer *layer = t->layer;
    MOE_TRY(moe_cpu_check_rows(layer, rows));
    struct backward_job shape = {.trainer = t,
                                 .layer = layer,
                                 .isa = moe_cpu_device_isa(layer->device),
                                 .dtype = dtype,
                                 .accumulate = accumulate,
                                 .input = layer->spec.weighting == MOE_WEIGHT_INPUT,
                                 .gate = MOE_WEIGHT_GATE,
                                 .up = MOE_WEIGHT_UP,
                                 .down = MOE_WEIGHT_DOWN,
                                 .activation = layer->spec.activation,
                                 .hidden = layer->spec.hidden,
                                 .inner = layer->spec.intermediate,
                                 .retained = retained};
    uint64_t all = 0;
    for (uint32_t l = 0; l < rows->local_experts; l++)
        all += rows->count[l];
    if (all == 0)
        return moe_ok();
    struct workspace w;
    MOE_TRY(open_workspace(&shape, all, &w));
    struct given_rows given = {rows, dy_rows, dx_rows, dweight_rows};
    run_expert_waves(&w, &given);
    close_workspace(layer->device, &w);
    return moe_ok();
}

/* ---------------------------------------------------------------- shared expert */

uint32_t moe_cpu_tokens_next(const struct moe_cpu_tokens *tokens, uint32_t *at, uint32_t max_tokens,
                             uint32_t *index)
{
    uint32_t n = 0;
    for (; *at < tokens->count && n < max_tokens; (*at)++)
        if (tokens->active == NULL || tokens->active[*at])
            index[n++] = *at;
    return n;
}

/* Buffers of a wave, only for the shared expert. */
struct shared_buffers {
    uint32_t *index;         /* [rows] */
    float *weight, *dweight; /* [rows] */
    float *dx;               /* [rows, H] */
    float *gate;             /* [H] */
    void *scratch;
};

static struct moe_status open_shared(const struct moe_layer *layer, uint32_t rows,
                                     struct shared_buffers *b)
{
    size_t hidden = layer->spec.hidden, bytes;
    if (!moe_size_mul3(rows + (size_t)1, hidden + 3, sizeof(float), &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "scratch too large");
    MOE_TRY(moe_cpu_scratch_take(layer->device, bytes, &b->scratch));
    b->index = b->scratch;
    b->weight = (float *)(void *)(b->index + rows);
    b->dweight = b->weight + rows;
    b->gate = b->dweight + rows;
    b->dx = b->gate + hidden;
    return moe_ok();
}

static void run_shared_waves(struct workspace *w, const struct shared_buffers *b,
                             const struct moe_cpu_tokens *tokens, const void *dy, float *dx)
{
    struct backward_job *job = w->job;
    bool gated = job->layer->spec.shared_gated;
    job->index = b->index;
    job->row_weight = gated ? b->weight : NULL;
    job->gate_vector = gated ? b->gate : NULL;
    job->spans = 1;
    for (uint32_t at = 0, n; (n = moe_cpu_tokens_next(tokens, &at, w->rows, b->index)) > 0;) {
        job->span[0] = (struct span){.rows = n,
                                     .x = tokens->x,
                                     .dy = dy,
                                     .weight = job->row_weight,
                                     .dx = b->dx,
                                     .dweight = gated ? b->dweight : NULL};
        job->sum = dx;
        run_wave(w);
    }
}

struct moe_status moe_cpu_shared_backward(struct moe_trainer *t,
                                          const struct moe_cpu_tokens *tokens, bool accumulate,
                                          const void *dy, const struct moe_cpu_pre *retained,
                                          float *dx)
{
    const struct moe_layer *layer = t->layer;
    if (layer->spec.shared_intermediate == 0 || tokens->count == 0)
        return moe_ok();
    struct backward_job shape = {.trainer = t,
                                 .layer = layer,
                                 .isa = moe_cpu_device_isa(layer->device),
                                 .dtype = tokens->dtype,
                                 .accumulate = accumulate,
                                 .gate = MOE_WEIGHT_SHARED_GATE,
                                 .up = MOE_WEIGHT_SHARED_UP,
                                 .down = MOE_WEIGHT_SHARED_DOWN,
                                 .activation = layer->spec.shared_activation,
                                 .hidden = layer->spec.hidden,
                                 .inner = layer->spec.shared_intermediate,
                                 .retained = retained};
    struct workspace w;
    struct shared_buffers buffers;
    MOE_TRY(open_workspace(&shape, tokens->count, &w));
    struct moe_status st = open_shared(layer, w.rows, &buffers);
    if (!moe_failed(&st)) {
        if (layer->spec.shared_gated)
            moe_cpu_matrix_read(layer->device, layer->matrix[MOE_WEIGHT_SHARED_GATE_VECTOR],
                                buffers.gate);
        run_shared_waves(&w, &buffers, tokens, dy, dx);
        moe_cpu_scratch_give(layer->device, buffers.scratch);
    }
    close_workspace(layer->device, &w);
    return st;
}
