/* SPDX-License-Identifier: Apache-2.0 */
/* Products of the backward pass; see gemm.h. An item of a job is a group of panels times a block of
 * rows of one product. It is so large that packing a panel is cheap compared with its use. */
#include "cpu/compute/gemm.h"

enum {
    K_BLOCK = 128,      /* inputs packed at a time: a panel of them fits the L1 cache */
    TILE_ROWS = 60,     /* a multiple of every register block's height */
    PRODUCT_ROWS = 480, /* rows that use a packed panel */
    OUTER_ROWS = 240,   /* rows of an outer product that use a packed panel */
    OUTER_PANELS = 16,  /* panels that use OUTER_ROWS packed rows */
    SUM_COLUMNS = 512,  /* columns summed at a time */
    LINE = 16,          /* floats of a cache line */
};

/* -------------------------------------------------------------------- products */

struct product_job {
    const struct moe_cpu_isa *isa;
    const struct moe_cpu_product *product;
    uint32_t panels_per_item;
};

/* block [n, panel] = rows k .. k + n - 1, columns c .. c + panel - 1 of the product's M. */
static void pack_block(const struct moe_cpu_isa *isa, const struct moe_cpu_product *p, uint32_t k,
                       uint32_t n, uint32_t c, float *block)
{
    uint32_t width = isa->panel, columns = moe_cpu_min(width, p->columns - c);
    if (p->factor == MOE_CPU_WEIGHT_TRANSPOSED) {
        moe_cpu_matrix_block(isa, p->weight, k, n, c, block);
        return;
    }
    if (columns < width)
        memset(block, 0, (size_t)n * width * sizeof *block);
    for (uint32_t i = 0; p->factor == MOE_CPU_PLAIN && i < n; i++)
        memcpy(block + i * width, p->plain + (size_t)(k + i) * p->columns + c,
               columns * sizeof *block);
    for (uint32_t j = 0; p->factor == MOE_CPU_PLAIN_TRANSPOSED && j < columns; j++) {
        const float *row = p->plain + (size_t)(c + j) * p->k + k;
        for (uint32_t i = 0; i < n; i++)
            block[i * width + j] = row[i];
    }
}

/* Stores a tile of sums into y, or adds it. `first`: the tile is of the first block of inputs. */
static void store_tile(const struct moe_cpu_product *p, bool first, uint32_t row, uint32_t rows,
                       uint32_t c, uint32_t width, const float *tile)
{
    uint32_t columns = moe_cpu_min(width, p->columns - c);
    for (uint32_t r = 0; r < rows; r++) {
        float *y = p->y + (size_t)(row + r) * p->columns + c;
        const float *from = tile + r * width;
        if (first && !p->add)
            for (uint32_t j = 0; j < columns; j++)
                y[j] = p->scale * from[j] + (p->bias != NULL ? p->bias[c + j] : 0.0f);
        else
            for (uint32_t j = 0; j < columns; j++)
                y[j] += p->scale * from[j];
    }
}

/* Whether the kernels can write sums directly to y, without a tile. */
static bool stores_plainly(const struct moe_cpu_product *p, uint32_t c, uint32_t width)
{
    return p->scale == 1.0f && p->bias == NULL && p->columns - c >= width;
}

/* One panel of columns times rows [row, row_end); packs the panel during the product. */
static void multiply_packing(const struct moe_cpu_isa *isa, const struct moe_cpu_product *p,
                             uint32_t c, uint32_t row, uint32_t row_end)
{
    _Alignas(64) float block[K_BLOCK * MOE_CPU_MAX_PANEL]; /* aligned like packed weights */
    float tile[TILE_ROWS * MOE_CPU_MAX_PANEL];
    for (uint32_t k = 0; k < p->k; k += K_BLOCK) {
        uint32_t n = moe_cpu_min(K_BLOCK, p->k - k);
        pack_block(isa, p, k, n, c, block);
        if (stores_plainly(p, c, isa->panel)) {
            (k == 0 && !p->add ? isa->panel_f32 : isa->panel_f32_add)(
                row_end - row, p->x + (size_t)row * p->k + k, p->k, block, n,
                p->y + (size_t)row * p->columns + c, p->columns);
            continue;
        }
        for (uint32_t r = row; r < row_end; r += TILE_ROWS) {
            uint32_t rows = moe_cpu_min(TILE_ROWS, row_end - r);
            isa->panel_f32(rows, p->x + (size_t)r * p->k + k, p->k, block, n, tile, isa->panel);
            store_tile(p, k == 0, r, rows, c, isa->panel, tile);
        }
    }
}

/* The same with a packed weight. */
static void multiply_packed(const struct moe_cpu_isa *isa, const struct moe_cpu_product *p,
                            uint32_t panel, uint32_t row, uint32_t row_end)
{
    float tile[TILE_ROWS * MOE_CPU_MAX_PANEL];
    uint32_t c = panel * isa->panel;
    if (!p->add && stores_plainly(p, c, isa->panel)) {
        moe_cpu_matrix_panel(isa, p->weight, panel, row_end - row, p->x + (size_t)row * p->k, p->k,
                             p->y + (size_t)row * p->columns + c, p->columns);
        return;
    }
    for (uint32_t r = row; r < row_end; r += TILE_ROWS) {
        uint32_t rows = moe_cpu_min(TILE_ROWS, row_end - r);
        moe_cpu_matrix_panel(isa, p->weight, panel, rows, p->x + (size_t)r * p->k, p->k, tile,
                             isa->panel);
        store_tile(p, true, r, rows, c, isa->panel, tile);
    }
}

static uint32_t product_items(const struct product_job *job, const struct moe_cpu_product *p)
{
    uint32_t panels = moe_cpu_ceil_div(p->columns, job->isa->panel);
    return moe_cpu_ceil_div(panels, job->panels_per_item) * moe_cpu_ceil_div(p->rows, PRODUCT_ROWS);
}

static void product_item(void *ctx, uint32_t item)
{
    const struct product_job *job = ctx;
    const struct moe_cpu_product *p = job->product;
    for (uint32_t n; item >= (n = product_items(job, p)); p++)
        item -= n;
    uint32_t blocks = moe_cpu_ceil_div(p->rows, PRODUCT_ROWS);
    uint32_t panels = moe_cpu_ceil_div(p->columns, job->isa->panel);
    uint32_t panel = item / blocks * job->panels_per_item; /* neighbours share panels */
    uint32_t end = moe_cpu_min(panels, panel + job->panels_per_item);
    uint32_t row = item % blocks * PRODUCT_ROWS, row_end = moe_cpu_min(p->rows, row + PRODUCT_ROWS);
    for (; panel < end; panel++)
        if (p->factor == MOE_CPU_WEIGHT)
            multiply_packed(job->isa, p, panel, row, row_end);
        else
            multiply_packing(job->isa, p, panel * job->isa->panel, row, row_end);
}

void moe_cpu_gemm_products(struct moe_device *device, const struct moe_cpu_product *product,
                           uint32_t count)
{
    struct product_job job = {.isa = moe_cpu_device_isa(device), .product = product};
    uint64_t max_work = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t work = (uint64_t)moe_cpu_min(product[i].rows, PRODUCT_ROWS) * product[i].k;
        max_work = work > max_work ? work : max_work;
    }
    job.panels_per_item = moe_cpu_units_per_item(max_work * job.isa->panel);
    uint32_t items = 0;
    for (uint32_t i = 0; i < count; i++)
        items += product_items(&job, &product[i]);
    moe_cpu_parallel(device, items, product_item, &job);
}

/* -------------------------------------------------------------- outer products */

struct outer_job {
    const struct moe_cpu_isa *isa;
    const struct moe_cpu_outer *outer;
};

static uint32_t outer_items(const struct outer_job *job, const struct moe_cpu_outer *o)
{
    if (o->rows == 0)
        return 0;
    if (o->in == 0)
        return moe_cpu_ceil_div(o->out, SUM_COLUMNS);
    return moe_cpu_ceil_div(o->out, OUTER_ROWS) *
           moe_cpu_ceil_div(moe_cpu_ceil_div(o->in, job->isa->panel), OUTER_PANELS);
}

static void sum_columns(const struct moe_cpu_outer *o, uint32_t c, uint32_t end)
{
    for (uint32_t r = 0; r < o->rows; r++)
        for (uint32_t j = c; j < end; j++)
            o->sum[j] += o->a[(size_t)r * o->out + j];
}

/* packed [OUTER_ROWS, K_BLOCK] = the transpose of n rows from `row` of a, columns out .. */
static void pack_outputs(const struct moe_cpu_outer *o, uint32_t row, uint32_t n, uint32_t out,
                         uint32_t outs, float *packed)
{
    for (uint32_t first = 0; first < outs; first += LINE) {
        uint32_t end = moe_cpu_min(outs, first + LINE);
        for (uint32_t i = 0; i < n; i++) {
            const float *from = o->a + (size_t)(row + i) * o->out + out;
            for (uint32_t j = first; j < end; j++)
                packed[j * K_BLOCK + i] = from[j];
        }
    }
}

static void add_tile(const struct moe_cpu_outer *o, uint32_t out, uint32_t outs, uint32_t c,
                     uint32_t columns, uint32_t width, const float *tile)
{
    for (uint32_t r = 0; r < outs; r++) {
        float *sum = o->sum + (size_t)(out + r) * o->in + c;
        for (uint32_t j = 0; j < columns; j++)
            sum[j] += tile[r * width + j];
    }
}

/* Adds the part of n rows from `row` to `outs` outputs times one panel of columns. */
static void outer_panel(const struct moe_cpu_isa *isa, const struct moe_cpu_outer *o, uint32_t row,
                        uint32_t n, uint32_t out, uint32_t outs, uint32_t c, const float *packed)
{
    _Alignas(64) float block[K_BLOCK * MOE_CPU_MAX_PANEL]; /* aligned like packed weights */
    float tile[TILE_ROWS * MOE_CPU_MAX_PANEL];
    uint32_t width = isa->panel, columns = moe_cpu_min(width, o->in - c);
    if (columns < width)
        memset(block, 0, (size_t)n * width * sizeof *block);
    for (uint32_t i = 0; i < n; i++)
        memcpy(block + i * width, o->b + (size_t)(row + i) * o->in + c, columns * sizeof *block);
    if (columns == width) {
        isa->panel_f32_add(outs, packed, K_BLOCK, block, n, o->sum + (size_t)out * o->in + c,
                           o->in);
        return;
    }
    for (uint32_t r = 0; r < outs; r += TILE_ROWS) {
        uint32_t rows = moe_cpu_min(TILE_ROWS, outs - r);
        isa->panel_f32(rows, packed + (size_t)r * K_BLOCK, K_BLOCK, block, n, tile, width);
        add_tile(o, out + r, rows, c, columns, width, tile);
    }
}

static void outer_item(void *ctx, uint32_t item)
{
    const struct outer_job *job = ctx;
    const struct moe_cpu_outer *o = job->outer;
    float packed[OUTER_ROWS * K_BLOCK];
    for (uint32_t n; item >= (n = outer_items(job, o)); o++)
        item -= n;
    if (o->in == 0) {
        sum_columns(o, item * SUM_COLUMNS, moe_cpu_min(o->out, (item + 1) * SUM_COLUMNS));
        return;
    }
    uint32_t width = job->isa->panel,
             groups = moe_cpu_ceil_div(moe_cpu_ceil_div(o->in, width), OUTER_PANELS);
    uint32_t out = item / groups * OUTER_ROWS, outs = moe_cpu_min(OUTER_ROWS, o->out - out);
    uint32_t first = item % groups * OUTER_PANELS * width;
    uint32_t end = moe_cpu_min(o->in, first + OUTER_PANELS * width);
    for (uint32_t row = 0; row < o->rows; row += K_BLOCK) {
        uint32_t n = moe_cpu_min(K_BLOCK, o->rows - row);
        pack_outputs(o, row, n, out, outs, packed);
        for (uint32_t c = first; c < end; c += width)
            outer_panel(job->isa, o, row, n, out, outs, c, packed);
    }
}

void moe_cpu_gemm_outers(struct moe_device *device, const struct moe_cpu_outer *outer,
                         uint32_t count)
{
    struct outer_job job = {.isa = moe_cpu_device_isa(device), .outer = outer};
    uint32_t items = 0;
    for (uint32_t i = 0; i < count; i++)
        items += outer_items(&job, &outer[i]);
    moe_cpu_parallel(device, items, outer_item, &job);
}
