/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' feed-forward networks: gate (if there is one) and up with their activation, down
 * with bias and weight, and the shared expert. Grouped: one pool job covers the rows of all experts
 * at once.
 *
 * A job is a list of spans (rows of one expert). An item is a few weight panels times one block of
 * a span's rows. So many rows of one expert and few rows of many experts both spread over all
 * threads. An item has tiles of rows by one panel on the stack. It applies bias,
 * activation and weight in fp32 before it stores a tile. It touches only rows inside spans: padding
 * rows may have any contents.
 *
 * W8A8 quantises rows before each of the two products, from their fp32 values. Rows may come
 * quantised for the first product. */
#include "cpu/compute/layer.h"

#include "base/size.h"
#include "moe/row_format.h"

#include <math.h>
#include <string.h>

enum {
    TILE_ROWS = 60,    /* of a tile; a multiple of every register block's height */
    BLOCK_ROWS = 180,  /* rows of one item: reuses a panel from cache, and bounds an item's time.
                          Of a tile, too, if weights are quantised: it decodes them once */
    SHARED_ROWS = 256, /* tokens in a pass of the shared expert */
    WIDE_ROWS_BYTES = 64 << 20, /* fp32 copies of rows at a time */
};

/* Some rows of one expert. All pointers are to the span's first row. */
struct span {
    uint32_t entry; /* of the weights: local expert index, 0 for the shared expert */
    uint32_t rows;
    uint32_t panels_per_item;
    const void *narrow; /* rows as they came, job->row_bytes each; NULL if `x` has the rows */
    const float *scale; /* [rows] factor of each prepared row, or NULL */
    const struct moe_cpu_matrix *shared_gate; /* [1, H]: computes `weight`; or NULL */
    float *x;                                 /* [rows, in] */
    float *row_scale;                         /* W8A8: [rows, groups], and x is quantised */
    const float *weight;                      /* [rows] routing weight, or NULL for 1 */
    float *out;                               /* [rows, out] */
    struct moe_cpu_pre pre;                   /* [rows, I] each, or NULLs */
};

/* How the down projection applies a weight. */
enum epilogue {
    EPILOGUE_PLAIN,         /* acc + b: input weighting */
    EPILOGUE_WEIGH_ALL,     /* w * (acc + b): late and early weighting */
    EPILOGUE_WEIGH_AND_ADD, /* out += w * acc: shared expert */
};

struct ffn_job {
    const struct moe_layer *layer;
    const struct moe_cpu_isa *isa;
    enum moe_dtype dtype;     /* of span.narrow */
    enum moe_weight gate, up; /* for gate_up items */
    enum moe_weight down;     /* for down items */
    enum moe_activation activation;
    enum epilogue epilogue;
    /* Of the current phase. */
    uint32_t in;            /* inputs of its rows */
    uint32_t group, groups; /* W8A8: inputs of a group, groups of a row; else groups = 0 */
    bool pow2;              /* scales of groups are powers of two */
    size_t row_bytes;       /* of a row of span.narrow */
    /* Rows of span.narrow are quantised, and their scales are here in a row; 0: they are not. */
    size_t scales_at;

    uint32_t spans;
    uint32_t first_item[MOE_MAX_EXPERTS + 1]; /* of each span in the current phase */
    uint32_t rows_per_item;                   /* preparation phase */
    struct span span[MOE_MAX_EXPERTS];
};

/* Begins a phase. Its rows have `in` inputs. `f` is the format of its matrices. */
static void begin_phase(struct ffn_job *job, const struct moe_weight_format *f, uint32_t in)
{
    bool quantises = f->encoding != MOE_ENC_NONE && f->activations != MOE_ACTIVATIONS_PLAIN;
    job->in = in;
    job->group = quantises ? moe_activation_group(f, in) : 0;
    job->groups = quantises ? moe_cpu_ceil_div(in, job->group) : 0;
    job->pow2 = f->activations == MOE_ACTIVATIONS_F8_POW2;
    job->row_bytes = in * moe_dtype_bytes(job->dtype);
    job->scales_at = 0;
}

/* The span of `*item`, which becomes the number inside the span. */
static const struct span *find_span(const struct ffn_job *job, uint32_t *item)
{
    uint32_t low = 0, high = job->spans;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (job->first_item[middle] <= *item)
            low = middle;
        else
            high = middle;
    }
    *item -= job->first_item[low];
    return &job->span[low];
}

/* ---------------------------------------------------------------- preparing rows */

/* Row weights of the shared expert: sigmoid(gate vector . x). */
static void weigh_shared_rows(const struct ffn_job *job, const struct span *span, uint32_t row,
                              uint32_t rows)
{
    float dot[TILE_ROWS * MOE_CPU_MAX_PANEL], *weight = (float *)span->weight;
    size_t hidden = job->layer->spec.hidden;
    for (uint32_t end = row + rows; row < end; row += moe_cpu_min(TILE_ROWS, end - row)) {
        uint32_t tile = moe_cpu_min(TILE_ROWS, end - row);
        moe_cpu_matrix_panel(job->isa, span->shared_gate, 0, tile, span->x + row * hidden, hidden,
                             dot, job->isa->panel);
        for (uint32_t r = 0; r < tile; r++)
            weight[row + r] = 1.0f / (1.0f + expf(-dot[r * job->isa->panel]));
    }
}

/* Row r of span.narrow, which was quantised on its token's slot. */
static void read_quantised_row(const struct ffn_job *job, const struct span *span, uint32_t r)
{
    const uint8_t *row = (const uint8_t *)span->narrow + r * job->row_bytes;
    job->isa->widen_bytes(job->in, row, span->x + (size_t)r * job->in);
    memcpy(span->row_scale + (size_t)r * job->groups, row + job->scales_at,
           job->groups * sizeof(float));
}

static void prepare_item(void *ctx, uint32_t item)
{
    const struct ffn_job *job = ctx;
    const struct span *span = find_span(job, &item);
    size_t in = job->in;
    uint32_t first = item * job->rows_per_item;
    uint32_t end = moe_cpu_min(span->rows, first + job->rows_per_item);
    if (job->scales_at != 0) {
        for (uint32_t r = first; r < end; r++)
            read_quantised_row(job, span, r);
        return;
    }
    for (uint32_t r = first; span->narrow != NULL && r < end; r++)
        job->isa->widen(job->dtype, in, (const char *)span->narrow + r * job->row_bytes,
                        span->scale != NULL ? span->scale[r] : 1.0f, span->x + r * in);
    if (span->shared_gate != NULL)
        weigh_shared_rows(job, span, first, end - first);
    for (uint32_t r = first; span->row_scale != NULL && r < end; r++)
        job->isa->quantise(job->pow2, job->group, in, span->x + r * in,
                           span->row_scale + (size_t)r * job->groups);
}

static void prepare_rows(struct ffn_job *job)
{
    uint64_t row_work = job->in;
    if (job->span[0].shared_gate != NULL)
        row_work *= job->isa->panel;
    job->rows_per_item = moe_cpu_units_per_item(row_work);
    uint32_t items = 0;
    for (uint32_t s = 0; s < job->spans; s++) {
        job->first_item[s] = items;
        items += moe_cpu_ceil_div(job->span[s].rows, job->rows_per_item);
    }
    moe_cpu_parallel(job->layer->device, items, prepare_item, job);
}

/* ------------------------------------------------------------------------- items */

/* An item: panels [panel, panel_end) times rows [row, row_end) of its span. */
struct block {
    uint32_t panel, panel_end;
    uint32_t row, row_end;
};

static struct block find_block(const struct span *span, uint32_t item, uint32_t panels)
{
    uint32_t row_blocks = moe_cpu_ceil_div(span->rows, BLOCK_ROWS);
    struct block b;
    b.panel = item / row_blocks * span->panels_per_item; /* neighbours share panels */
    b.panel_end = moe_cpu_min(panels, b.panel + span->panels_per_item);
    b.row = item % row_blocks * BLOCK_ROWS;
    b.row_end = moe_cpu_min(span->rows, b.row + BLOCK_ROWS);
    return b;
}

/* Numbers the items of all spans for `panels` panels of `panel_work` multiply-adds a row. */
static uint32_t number_items(struct ffn_job *job, uint32_t panels, uint64_t panel_work)
{
    uint32_t items = 0;
    for (uint32_t s = 0; s < job->spans; s++) {
        struct span *span = &job->span[s];
        uint32_t rows = moe_cpu_min(span->rows, BLOCK_ROWS);
        span->panels_per_item = moe_cpu_units_per_item(panel_work * rows);
        job->first_item[s] = items;
        items += moe_cpu_ceil_div(panels, span->panels_per_item) *
                 moe_cpu_ceil_div(span->rows, BLOCK_ROWS);
    }
    return items;
}

/* The products of rows of the span with one or two panels, of matrices of the same shape. */
static void multiply(const struct ffn_job *job, const struct span *span, uint32_t count,
                     const struct moe_cpu_part *parts, uint32_t row, uint32_t rows)
{
    const struct moe_cpu_rows x = {
        .x = span->x + (size_t)row * job->in,
        .stride = job->in,
        .scale = span->row_scale != NULL ? span->row_scale + (size_t)row * job->groups : NULL,
        .group = job->group,
        .groups = job->groups};
    moe_cpu_matrix_parts(job->isa, count, parts, rows, &x, job->isa->panel);
}

static void add_bias(float *tile, uint32_t rows, uint32_t width, const float *bias,
                     uint32_t columns)
{
    for (uint32_t r = 0; bias != NULL && r < rows; r++)
        for (uint32_t c = 0; c < columns; c++)
            tile[r * width + c] += bias[c];
}

/* Entry `entry` of a bias at output column `column`, or NULL. */
static const float *bias_at(const struct moe_layer *layer, enum moe_weight w, uint32_t entry,
                            uint32_t column)
{
    const float *bias = moe_cpu_layer_bias(layer, w, entry);
    return bias == NULL ? NULL : bias + column;
}

/* `columns` of each row of a tile into [.., inner], from row `row` and column `column` on. */
static void store_tile(float *to, size_t inner, uint32_t row, uint32_t rows, uint32_t column,
                       uint32_t columns, uint32_t width, const float *tile)
{
    for (uint32_t r = 0; r < rows; r++)
        memcpy(to + (row + r) * inner + column, tile + r * width, columns * sizeof *to);
}

static void gate_up_tile(const struct ffn_job *job, const struct span *span, uint32_t panel,
                         uint32_t panels, uint32_t row, uint32_t rows)
{
    float gate[BLOCK_ROWS * MOE_CPU_MAX_PANEL], up[BLOCK_ROWS * MOE_CPU_MAX_PANEL];
    const struct moe_layer *layer = job->layer;
    const struct moe_cpu_matrix *wg = &layer->matrix[job->gate][span->entry];
    const struct moe_cpu_matrix *wu = &layer->matrix[job->up][span->entry];
    uint32_t width = job->isa->panel, column = panel * width;
    uint32_t columns = moe_cpu_min(width, wg->out - column);
    const struct moe_cpu_part parts[2] = {{wg, panel, gate}, {wu, panel, up}};

    MOE_INVARIANT(panels == 1);
    multiply(job, span, 2, parts, row, rows);
    if (job->gate == MOE_WEIGHT_GATE) {
        add_bias(gate, rows, width, bias_at(layer, MOE_WEIGHT_GATE_BIAS, span->entry, column),
                 columns);
        add_bias(up, rows, width, bias_at(layer, MOE_WEIGHT_UP_BIAS, span->entry, column), columns);
    }
    if (span->pre.gate != NULL) {
        store_tile(span->pre.gate, wg->out, row, rows, column, columns, width, gate);
        store_tile(span->pre.up, wg->out, row, rows, column, columns, width, up);
    }
    job->isa->activate(job->activation, layer->spec.swiglu_limit, layer->spec.swiglu_alpha,
                       (size_t)rows * width, gate, up);
    store_tile(span->out, wg->out, row, rows, column, columns, width, gate);
}

/* One panel of the hidden activation from its products, without a gate. */
static void store_up(const struct ffn_job *job, const struct span *span,
                     const struct moe_cpu_part *part, uint32_t row, uint32_t rows)
{
    uint32_t width = job->isa->panel, column = part->panel * width, inner = part->matrix->out;
    uint32_t columns = moe_cpu_min(width, inner - column);
    if (job->up == MOE_WEIGHT_UP)
        add_bias(part->y, rows, width, bias_at(job->layer, MOE_WEIGHT_UP_BIAS, span->entry, column),
                 columns);
    job->isa->activate_ungated((size_t)rows * width, part->y);
    store_tile(span->out, inner, row, rows, column, columns, width, part->y);
}

typedef void store_fn(const struct ffn_job *, const struct span *, const struct moe_cpu_part *,
                      uint32_t row, uint32_t rows);

/* One or two panels of one matrix. */
static void plain_tile(const struct ffn_job *job, const struct span *span, enum moe_weight weight,
                       uint32_t panel, uint32_t panels, uint32_t row, uint32_t rows,
                       store_fn *store)
{
    float tile[2][BLOCK_ROWS * MOE_CPU_MAX_PANEL];
    const struct moe_cpu_matrix *w = &job->layer->matrix[weight][span->entry];
    const struct moe_cpu_part parts[2] = {{w, panel, tile[0]}, {w, panel + panels - 1, tile[1]}};
    multiply(job, span, panels, parts, row, rows);
    for (uint32_t i = 0; i < panels; i++)
        store(job, span, &parts[i], row, rows);
}

static void up_tile(const struct ffn_job *job, const struct span *span, uint32_t panel,
                    uint32_t panels, uint32_t row, uint32_t rows)
{
    plain_tile(job, span, job->up, panel, panels, row, rows, store_up);
}

static void store_down_row(enum epilogue epilogue, float w, uint32_t columns, const float *acc,
                           const float *bias, float *out)
{
    for (uint32_t c = 0; c < columns; c++) {
        float b = bias != NULL ? bias[c] : 0.0f;
        switch (epilogue) {
        case EPILOGUE_PLAIN: out[c] = acc[c] + b; break;
        case EPILOGUE_WEIGH_ALL: out[c] = w * (acc[c] + b); break;
        case EPILOGUE_WEIGH_AND_ADD: out[c] += w * acc[c]; break;
        }
    }
}

/* One panel of the down projection from its products. */
static void store_down(const struct ffn_job *job, const struct span *span,
                       const struct moe_cpu_part *part, uint32_t row, uint32_t rows)
{
    const struct moe_cpu_matrix *wd = part->matrix;
    uint32_t width = job->isa->panel, column = part->panel * width;
    uint32_t columns = moe_cpu_min(width, wd->out - column);
    const float *bias = NULL;
    if (job->down == MOE_WEIGHT_DOWN)
        bias = bias_at(job->layer, MOE_WEIGHT_DOWN_BIAS, span->entry, column);
    for (uint32_t r = 0; r < rows; r++)
        store_down_row(job->epilogue, span->weight != NULL ? span->weight[row + r] : 1.0f, columns,
                       part->y + r * width, bias, span->out + (size_t)(row + r) * wd->out + column);
}

static void down_tile(const struct ffn_job *job, const struct span *span, uint32_t panel,
                      uint32_t panels, uint32_t row, uint32_t rows)
{
    plain_tile(job, span, job->down, panel, panels, row, rows, store_down);
}

typedef void tile_fn(const struct ffn_job *, const struct span *, uint32_t panel, uint32_t panels,
                     uint32_t row, uint32_t rows);

/* `m`: the matrix of any expert; `together`: panels of a tile. */
static void run_item(const struct ffn_job *job, uint32_t item, const struct moe_cpu_matrix *m,
                     uint32_t together, tile_fn *tile)
{
    const uint32_t tile_rows = m->dtype == MOE_DTYPE_NONE ? BLOCK_ROWS : TILE_ROWS;
    const struct span *span = find_span(job, &item);
    struct block b = find_block(span, item, m->panels);
    for (uint32_t p = b.panel, n; p < b.panel_end; p += n) {
        n = moe_cpu_min(together, b.panel_end - p);
        for (uint32_t row = b.row; row < b.row_end; row += moe_cpu_min(tile_rows, b.row_end - row))
            tile(job, span, p, n, row, moe_cpu_min(tile_rows, b.row_end - row));
    }
}

static void gate_up_item(void *ctx, uint32_t item)
{
    const struct ffn_job *job = ctx;
    run_item(job, item, &job->layer->matrix[job->gate][0], 1, gate_up_tile);
}

/* Panels of one matrix in a tile. Two of a quantised matrix, because these take less time together;
 * gate and up are two, too. */
static uint32_t panels_together(const struct moe_cpu_matrix *m)
{
    return m->dtype == MOE_DTYPE_NONE ? 2 : 1;
}

static void up_item(void *ctx, uint32_t item)
{
    const struct ffn_job *job = ctx;
    const struct moe_cpu_matrix *up = &job->layer->matrix[job->up][0];
    run_item(job, item, up, panels_together(up), up_tile);
}

static void down_item(void *ctx, uint32_t item)
{
    const struct ffn_job *job = ctx;
    const struct moe_cpu_matrix *down = &job->layer->matrix[job->down][0];
    run_item(job, item, down, panels_together(down), down_tile);
}

static void run_up(struct ffn_job *job)
{
    const struct moe_cpu_matrix *up = &job->layer->matrix[job->up][0];
    uint32_t items = number_items(job, up->panels, (uint64_t)up->in * job->isa->panel);
    moe_cpu_parallel(job->layer->device, items, up_item, job);
}

static void run_gate_up(struct ffn_job *job)
{
    if (!moe_activation_has_gate(job->activation)) {
        run_up(job);
        return;
    }
    const struct moe_cpu_matrix *gate = &job->layer->matrix[job->gate][0];
    uint32_t items = number_items(job, gate->panels, (uint64_t)2 * gate->in * job->isa->panel);
    moe_cpu_parallel(job->layer->device, items, gate_up_item, job);
}

static void run_down(struct ffn_job *job)
{
    const struct moe_cpu_matrix *down = &job->layer->matrix[job->down][0];
    uint32_t items = number_items(job, down->panels, (uint64_t)down->in * job->isa->panel);
    moe_cpu_parallel(job->layer->device, items, down_item, job);
}

/* ------------------------------------------------------------------ routed experts */

struct moe_status moe_cpu_check_rows(const struct moe_layer *layer, const struct moe_rows *rows)
{
    if (rows->local_experts > layer->local_experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "rows of %u experts, %u are here", rows->local_experts,
                         layer->local_experts);
    for (uint32_t l = 0; l < rows->local_experts; l++)
        if (rows->expert[l] >= layer->spec.experts || layer->local_index[rows->expert[l]] < 0)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                             "rows of expert %u, which is not here", rows->expert[l]);
    return moe_ok();
}

static struct moe_status check_rows(const struct moe_layer *layer, const struct moe_rows *rows)
{
    if (!layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                         "layer %u is not finished", layer->spec.layer);
    return moe_cpu_check_rows(layer, rows);
}

static struct moe_status check_dtype(enum moe_dtype dtype)
{
    if (dtype != MOE_DTYPE_F32 && dtype != MOE_DTYPE_BF16)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "rows are neither F32 nor BF16");
    return moe_ok();
}

static void init_job(struct ffn_job *job, struct moe_layer *layer)
{
    job->layer = layer;
    job->isa = moe_cpu_device_isa(layer->device);
    job->gate = MOE_WEIGHT_GATE;
    job->up = MOE_WEIGHT_UP;
    job->down = MOE_WEIGHT_DOWN;
    job->activation = layer->spec.activation;
    job->spans = 0;
}

/* The start of the next wave of rows. */
struct cursor {
    uint32_t expert; /* index into moe_rows */
    uint32_t row;    /* number of its rows that are done */
};

/* Collects spans with at most `max_rows` rows in all; false if there are none left. */
static bool next_wave(struct ffn_job *job, const struct moe_rows *rows, struct cursor *at,
                      uint32_t max_rows)
{
    job->spans = 0;
    while (at->expert < rows->local_experts && max_rows > 0) {
        uint32_t left = rows->count[at->expert] - at->row;
        uint32_t take = moe_cpu_min(left, max_rows);
        size_t first = (size_t)rows->start[at->expert] + at->row;
        if (take > 0)
            job->span[job->spans++] = (struct span){
                .entry = (uint32_t)job->layer->local_index[rows->expert[at->expert]],
                .rows = take,
                .weight = rows->weight + first,
            };
        max_rows -= take;
        at->row += take;
        if (take == left)
            *at = (struct cursor){.expert = at->expert + 1};
    }
    return job->spans > 0;
}

/* The index in `rows` of the span's first row. */
static size_t first_row(const struct moe_rows *rows, const struct span *span)
{
    return (size_t)(span->weight - rows->weight);
}

/* Row `row` of the retained gate and up. */
static struct moe_cpu_pre pre_at(const struct moe_cpu_pre *pre, size_t row, uint32_t inner)
{
    if (pre == NULL)
        return (struct moe_cpu_pre){0};
    return (struct moe_cpu_pre){pre->gate + row * inner, pre->up + row * inner};
}

/* fp32 copies of rows in scratch: bf16 rows, rows with input weighting, and rows that W8A8
 * quantises are copied, max_rows at a time. */
struct copies {
    uint32_t max_rows; /* UINT32_MAX without copies */
    float *x;          /* [max_rows, in]; NULL: no copies */
    float *scale;      /* W8A8: [max_rows, groups], else NULL */
};

static struct moe_status take_copies(const struct ffn_job *job, const struct moe_rows *rows,
                                     struct copies *c)
{
    uint64_t all = 0;
    void *p;
    for (uint32_t l = 0; l < rows->local_experts; l++)
        all += rows->count[l];
    size_t row_floats = (size_t)job->in + job->groups;
    c->max_rows = (uint32_t)(WIDE_ROWS_BYTES / (row_floats * sizeof(float)));
    if (all < c->max_rows)
        c->max_rows = (uint32_t)all;
    MOE_TRY(moe_cpu_scratch_take(job->layer->device, c->max_rows * row_floats * sizeof(float), &p));
    c->x = p;
    c->scale = job->groups != 0 ? c->x + (size_t)c->max_rows * job->in : NULL;
    return moe_ok();
}

/* Where the span finds its rows, which are at `rows` in the job's dtype; `used` rows of the copies
 * belong to spans before it. */
static void place_rows(const struct ffn_job *job, const struct copies *c, size_t used, char *rows,
                       struct span *span)
{
    span->x = c->x != NULL ? c->x + used * job->in : (float *)(void *)rows;
    span->narrow = c->x != NULL ? rows : NULL;
    span->row_scale = c->scale != NULL ? c->scale + used * job->groups : NULL;
}

static void place_gate_up(struct ffn_job *job, const struct moe_rows *rows,
                          const struct copies *copies, const struct moe_cpu_pre *pre, float *hidden)
{
    size_t used = 0;
    for (uint32_t s = 0; s < job->spans; s++) {
        struct span *span = &job->span[s];
        size_t first = first_row(rows, span);
        place_rows(job, copies, used, (char *)rows->x + first * job->row_bytes, span);
        span->out = hidden + first * job->layer->spec.intermediate;
        span->pre = pre_at(pre, first, job->layer->spec.intermediate);
        span->scale = job->layer->spec.weighting == MOE_WEIGHT_INPUT ? span->weight : NULL;
        used += span->rows;
    }
}

struct moe_status moe_cpu_gate_up_retaining(struct moe_layer *layer, enum moe_dtype dtype,
                                            const struct moe_rows *rows,
                                            const struct moe_cpu_pre *pre, float *hidden)
{
    MOE_TRY(check_rows(layer, rows));
    MOE_TRY(check_dtype(dtype));
    struct ffn_job job;
    init_job(&job, layer);
    job.dtype = dtype;
    begin_phase(&job, &layer->spec.routed_format, moe_expert_width(&layer->spec));
    if (rows->quantised) {
        const struct moe_row_format format = moe_row_format(&layer->spec, dtype);
        job.row_bytes = format.bytes;
        job.scales_at = format.scales_at;
    }
    struct copies copies = {.max_rows = UINT32_MAX};
    if (dtype != MOE_DTYPE_F32 || layer->spec.weighting == MOE_WEIGHT_INPUT || job.groups != 0)
        MOE_TRY(take_copies(&job, rows, &copies));
    for (struct cursor at = {0}; next_wave(&job, rows, &at, copies.max_rows);) {
        place_gate_up(&job, rows, &copies, pre, hidden);
        if (copies.x != NULL)
            prepare_rows(&job);
        run_gate_up(&job);
    }
    moe_cpu_scratch_give(layer->device, copies.x);
    return moe_ok();
}

struct moe_status moe_cpu_gemm_gate_up(struct moe_layer *layer, enum moe_dtype dtype,
                                       const struct moe_rows *rows, float *hidden)
{
    return moe_cpu_gate_up_retaining(layer, dtype, rows, NULL, hidden);
}

static void place_down(struct ffn_job *job, const struct moe_rows *rows,
                       const struct copies *copies, const float *hidden, float *out)
{
    size_t used = 0, width = moe_expert_width(&job->layer->spec);
    for (uint32_t s = 0; s < job->spans; s++) {
        struct span *span = &job->span[s];
        size_t first = first_row(rows, span);
        place_rows(job, copies, used, (char *)(hidden + first * job->in), span);
        span->out = out + first * width;
        used += span->rows;
    }
}

struct moe_status moe_cpu_gemm_down(struct moe_layer *layer, enum moe_dtype dtype,
                                    const struct moe_rows *rows, const float *hidden, float *out)
{
    MOE_TRY(check_rows(layer, rows));
    MOE_TRY(check_dtype(dtype)); /* hidden is fp32 for every dtype */
    struct ffn_job job;
    init_job(&job, layer);
    job.dtype = MOE_DTYPE_F32;
    job.epilogue = layer->spec.weighting == MOE_WEIGHT_INPUT ? EPILOGUE_PLAIN : EPILOGUE_WEIGH_ALL;
    begin_phase(&job, &layer->spec.routed_format, layer->spec.intermediate);
    struct copies copies = {.max_rows = UINT32_MAX};
    if (job.groups != 0)
        MOE_TRY(take_copies(&job, rows, &copies));
    for (struct cursor at = {0}; next_wave(&job, rows, &at, copies.max_rows);) {
        place_down(&job, rows, &copies, hidden, out);
        if (copies.x != NULL)
            prepare_rows(&job);
        run_down(&job);
    }
    moe_cpu_scratch_give(layer->device, copies.x);
    return moe_ok();
}

/* ------------------------------------------------------------------- shared expert */

struct quantise_job {
    const struct moe_layer *layer;
    struct moe_row_format format;
    enum moe_dtype dtype;
    uint32_t tokens, per_item;
    const char *x;
    uint8_t *to;
};

static void quantise_item(void *ctx, uint32_t item)
{
    const struct quantise_job *job = ctx;
    const struct moe_layer_spec *spec = &job->layer->spec;
    const uint32_t width = moe_expert_width(spec);
    const size_t from_bytes = width * moe_dtype_bytes(job->dtype);
    uint32_t t = item * job->per_item, end = moe_cpu_min(job->tokens, t + job->per_item);
    for (; t < end; t++) {
        uint8_t *row = job->to + t * job->format.bytes;
        memset(row + width, 0, job->format.bytes - width);
        moe_cpu_device_isa(job->layer->device)
            ->quantise_bytes(job->dtype, spec->routed_format.activations == MOE_ACTIVATIONS_F8_POW2,
                             job->format.group, width, job->x + t * from_bytes, row,
                             (float *)(void *)(row + job->format.scales_at));
    }
}

struct moe_status moe_cpu_quantise_rows(const struct moe_layer *layer, enum moe_dtype dtype,
                                        uint32_t tokens, const void *x, void **rows,
                                        size_t *row_bytes)
{
    struct quantise_job job = {.layer = layer,
                               .format = moe_row_format(&layer->spec, dtype),
                               .dtype = dtype,
                               .tokens = tokens,
                               .x = x};
    size_t bytes;
    *rows = NULL;
    *row_bytes = job.format.quantised ? job.format.bytes : 0;
    if (*row_bytes == 0 || tokens == 0)
        return moe_ok();
    if (!moe_size_mul(tokens, *row_bytes, &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "%u rows of %zu bytes do not fit in memory", tokens, *row_bytes);
    MOE_TRY(moe_cpu_scratch_take(layer->device, bytes, rows));
    job.to = *rows;
    job.per_item = moe_cpu_units_per_item(2 * (uint64_t)moe_expert_width(&layer->spec));
    moe_cpu_parallel(layer->device, moe_cpu_ceil_div(tokens, job.per_item), quantise_item, &job);
    return moe_ok();
}

/* Scratch of one pass: fp32 rows (of bf16, or for W8A8), hidden activations, row weights, scales of
 * quantised rows. */
struct shared_scratch {
    float *x, *hidden, *weight, *scale;
};

static void shared_pass(struct ffn_job *job, const struct shared_scratch *scratch, const void *x,
                        uint32_t rows, struct moe_cpu_pre pre, float *y)
{
    const struct moe_layer *layer = job->layer;
    bool gated = layer->spec.shared_gated;
    begin_phase(job, &layer->spec.shared_format, layer->spec.hidden);
    bool quantises = job->groups != 0, copies = job->dtype != MOE_DTYPE_F32 || quantises;
    job->spans = 1;
    job->span[0] = (struct span){
        .rows = rows,
        .narrow = copies ? x : NULL,
        .x = copies ? scratch->x : (float *)x,
        .row_scale = quantises ? scratch->scale : NULL,
        .weight = gated ? scratch->weight : NULL,
        .shared_gate = gated ? &layer->matrix[MOE_WEIGHT_SHARED_GATE_VECTOR][0] : NULL,
        .out = scratch->hidden,
        .pre = pre,
    };
    if (copies || gated)
        prepare_rows(job);
    run_gate_up(job);
    begin_phase(job, &layer->spec.shared_format, layer->spec.shared_intermediate);
    job->span[0].narrow = NULL;
    job->span[0].shared_gate = NULL;
    job->span[0].x = scratch->hidden;
    job->span[0].out = y;
    if (quantises)
        prepare_rows(job);
    run_down(job);
}

/* Groups of a quantised row, at most, in both products. */
static uint32_t shared_groups(const struct moe_layer_spec *spec)
{
    uint32_t in =
        spec->hidden > spec->shared_intermediate ? spec->hidden : spec->shared_intermediate;
    return spec->shared_format.encoding == MOE_ENC_NONE ||
                   spec->shared_format.activations == MOE_ACTIVATIONS_PLAIN
               ? 0
               : moe_cpu_ceil_div(in, moe_activation_group(&spec->shared_format, in));
}

struct moe_status moe_cpu_shared_retaining(struct moe_layer *layer, enum moe_dtype dtype,
                                           uint32_t tokens, const void *x,
                                           const struct moe_cpu_pre *pre, float *y)
{
    const struct moe_layer_spec *spec = &layer->spec;
    if (spec->shared_intermediate == 0 || tokens == 0)
        return moe_ok();
    const struct moe_rows none = {0};
    MOE_TRY(check_rows(layer, &none));
    MOE_TRY(check_dtype(dtype));
    struct ffn_job job;
    init_job(&job, layer);
    job.dtype = dtype;
    job.gate = MOE_WEIGHT_SHARED_GATE;
    job.up = MOE_WEIGHT_SHARED_UP;
    job.down = MOE_WEIGHT_SHARED_DOWN;
    job.activation = spec->shared_activation;
    job.epilogue = EPILOGUE_WEIGH_AND_ADD;

    uint32_t pass = moe_cpu_min(tokens, SHARED_ROWS);
    size_t floats = (size_t)spec->hidden + spec->shared_intermediate + 1, bytes;
    floats += shared_groups(spec);
    void *p;
    if (!moe_size_mul3(floats, pass, sizeof(float), &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "scratch too large");
    MOE_TRY(moe_cpu_scratch_take(layer->device, bytes, &p));
    struct shared_scratch scratch = {.x = p};
    scratch.hidden = scratch.x + (size_t)pass * spec->hidden;
    scratch.weight = scratch.hidden + (size_t)pass * spec->shared_intermediate;
    scratch.scale = scratch.weight + pass;
    size_t row_bytes = spec->hidden * moe_dtype_bytes(dtype);
    for (uint32_t t = 0; t < tokens; t += moe_cpu_min(pass, tokens - t))
        shared_pass(&job, &scratch, (const char *)x + t * row_bytes, moe_cpu_min(pass, tokens - t),
                    pre_at(pre, t, spec->shared_intermediate), y + (size_t)t * spec->hidden);
    moe_cpu_scratch_give(layer->device, p);
    return moe_ok();
}

struct moe_status moe_cpu_shared_forward(struct moe_layer *layer, enum moe_dtype dtype,
                                         uint32_t tokens, const void *x, float *y)
{
    return moe_cpu_shared_retaining(layer, dtype, tokens, x, NULL, y);
}
