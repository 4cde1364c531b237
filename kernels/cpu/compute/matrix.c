/* SPDX-License-Identifier: Apache-2.0 */
/* Packs weight matrices into panels (layout: matrix.h) and owns their memory. */
#include "cpu/compute/matrix.h"

#include "base/size.h"
#include "cpu/compute/device.h"

struct pack_job {
    const struct moe_cpu_matrix *matrix;
    const char *data;
    enum moe_dtype from;
    const struct moe_cpu_isa *isa;
};

/* Outputs of panel `p`. */
static uint32_t lanes_of(const struct moe_cpu_matrix *m, uint32_t p, uint32_t width)
{
    uint32_t lanes = m->out - p * width;
    return lanes < width ? lanes : width;
}

/* Elements k and k + 1 of an fp32 row, rounded; zero past the row's end. */
static uint32_t round_pair(const char *row, uint32_t k, uint32_t in)
{
    float pair[2] = {0, 0};
    memcpy(pair, row + (size_t)k * sizeof *pair, k + 1 < in ? sizeof pair : sizeof *pair);
    return (uint32_t)moe_f32_to_bf16(pair[0]) | (uint32_t)moe_f32_to_bf16(pair[1]) << 16;
}

static uint32_t widen_bits(const char *row, uint32_t k)
{
    uint16_t b;
    memcpy(&b, row + (size_t)k * sizeof b, sizeof b);
    return (uint32_t)b << 16;
}

/* Rows of another dtype than the panel's. New memory of a panel is zero, so lanes of missing rows
 * need no store. */
static void convert_panel(const struct pack_job *job, const char *rows, uint32_t lanes,
                          uint32_t *packed)
{
    const struct moe_cpu_matrix *m = job->matrix;
    size_t row_bytes = (size_t)m->in * moe_dtype_bytes(job->from);
    bool rounds = m->dtype == MOE_DTYPE_BF16;
    for (uint32_t k = 0; k < m->in; k += rounds ? 2 : 1, packed += job->isa->panel)
        for (uint32_t r = 0; r < lanes; r++)
            packed[r] = rounds ? round_pair(rows + r * row_bytes, k, m->in)
                               : widen_bits(rows + r * row_bytes, k);
}

static void pack_panel(void *ctx, uint32_t p)
{
    const struct pack_job *job = ctx;
    const struct moe_cpu_matrix *m = job->matrix;
    const uint32_t width = job->isa->panel, lanes = lanes_of(m, p, width);
    size_t row_bytes = (size_t)m->in * moe_dtype_bytes(job->from);
    const char *from = job->data + (size_t)p * width * row_bytes;
    char *panel = (char *)m->data + (size_t)p * m->panel_bytes;
    if (m->dtype != job->from) {
        convert_panel(job, from, lanes, (uint32_t *)(void *)panel);
        return;
    }
    const void *rows[MOE_CPU_MAX_PANEL] = {NULL};
    for (uint32_t r = 0; r < lanes; r++)
        rows[r] = from + r * row_bytes;
    (void)job->isa->interleave(4, row_bytes, rows, panel);
}

struct moe_status moe_cpu_matrix_shape(struct moe_device *device, uint32_t out, uint32_t in,
                                       enum moe_dtype dtype, struct moe_cpu_matrix *matrix)
{
    uint32_t width = moe_cpu_device_isa(device)->panel;
    struct moe_cpu_matrix m = {.out = out, .in = in, .dtype = dtype};
    m.panels = (out + width - 1) / width;
    size_t packed = dtype == MOE_DTYPE_BF16 ? ((size_t)in + 1) / 2 : in;
    if (!moe_size_mul3(packed, width, 4, &m.panel_bytes) ||
        !moe_size_mul(m.panel_bytes, m.panels, &m.bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "a %u x %u matrix is too large", out, in);
    *matrix = m;
    return moe_ok();
}

struct moe_status moe_cpu_matrix_pack(struct moe_device *device, uint32_t out, uint32_t in,
                                      enum moe_dtype from, enum moe_dtype store_as,
                                      const void *data, struct moe_cpu_matrix *matrix)
{
    MOE_INVARIANT(store_as == MOE_DTYPE_F32 || store_as == from);
    struct moe_cpu_matrix m;
    MOE_TRY(moe_cpu_matrix_shape(device, out, in, store_as, &m));
    MOE_TRY(moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, m.bytes, &m.data));
    struct pack_job job = {
        .matrix = &m, .data = data, .from = from, .isa = moe_cpu_device_isa(device)};
    moe_cpu_parallel(device, m.panels, pack_panel, &job);
    *matrix = m;
    return moe_ok();
}

void moe_cpu_matrix_renew(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                          const float *data)
{
    struct pack_job job = {.matrix = matrix,
                           .data = (const char *)data,
                           .from = MOE_DTYPE_F32,
                           .isa = moe_cpu_device_isa(device)};
    moe_cpu_parallel(device, matrix->panels, pack_panel, &job);
}

/* ---------------------------------------------------------------- reading, merging */

enum { COLUMNS = 32 }; /* that are read at a time */

/* Input k of the panel's lanes, as fp32; the matrix is not quantised. */
static void load_column(const struct moe_cpu_matrix *m, uint32_t p, uint32_t k, uint32_t width,
                        float *lanes)
{
    const char *panel = (const char *)m->data + (size_t)p * m->panel_bytes;
    if (m->dtype == MOE_DTYPE_F32) {
        memcpy(lanes, (const float *)(const void *)panel + (size_t)k * width,
               width * sizeof *lanes);
        return;
    }
    const uint32_t *packed = (const uint32_t *)(const void *)panel + (size_t)(k / 2) * width;
    for (uint32_t r = 0; r < width; r++) {
        uint32_t bits = k & 1 ? packed[r] & UINT32_C(0xffff0000) : packed[r] << 16;
        memcpy(lanes + r, &bits, sizeof bits);
    }
}

/* Inputs k .. k + n - 1 of the panel's lanes, as fp32 [n][width]; k is a multiple of 4. */
static void load_columns(const struct moe_cpu_isa *isa, const struct moe_cpu_matrix *m, uint32_t p,
                         uint32_t k, uint32_t n, float *columns)
{
    if (m->dtype == MOE_DTYPE_NONE) {
        isa->unpack(&m->packed, (const char *)m->data + (size_t)p * m->panel_bytes, k, n, columns);
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        load_column(m, p, k + i, isa->panel, columns + (size_t)i * isa->panel);
}

static void store_column(const struct moe_cpu_matrix *m, uint32_t p, uint32_t k, uint32_t width,
                         uint32_t count, const float *lanes)
{
    char *panel = (char *)m->data + (size_t)p * m->panel_bytes;
    if (m->dtype == MOE_DTYPE_F32) {
        memcpy((float *)(void *)panel + (size_t)k * width, lanes, count * sizeof *lanes);
        return;
    }
    uint32_t *packed = (uint32_t *)(void *)panel + (size_t)(k / 2) * width;
    for (uint32_t r = 0; r < count; r++) {
        uint32_t bits = moe_f32_to_bf16(lanes[r]);
        packed[r] = k & 1 ? (packed[r] & UINT32_C(0xffff)) | bits << 16 : bits;
    }
}

struct read_job {
    const struct moe_cpu_matrix *matrix;
    const struct moe_cpu_isa *isa;
    float *data;
};

static void read_panel(void *ctx, uint32_t p)
{
    const struct read_job *job = ctx;
    const struct moe_cpu_matrix *m = job->matrix;
    uint32_t width = job->isa->panel, lanes = lanes_of(m, p, width);
    float column[COLUMNS * MOE_CPU_MAX_PANEL], *data = job->data + (size_t)p * width * m->in;
    for (uint32_t k = 0; k < m->in; k += COLUMNS) {
        uint32_t n = m->in - k < COLUMNS ? m->in - k : COLUMNS;
        load_columns(job->isa, m, p, k, n, column);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t r = 0; r < lanes; r++)
                data[(size_t)r * m->in + k + i] = column[i * width + r];
    }
}

void moe_cpu_matrix_read(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                         float *data)
{
    struct read_job job = {matrix, moe_cpu_device_isa(device), data};
    moe_cpu_parallel(device, matrix->panels, read_panel, &job);
}

void moe_cpu_matrix_read_serial(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                                float *data)
{
    struct read_job job = {matrix, moe_cpu_device_isa(device), data};
    for (uint32_t p = 0; p < matrix->panels; p++)
        read_panel(&job, p);
}

/* Widens columns column .. column + width - 1 of a bf16 panel's lanes, a pair of neighbours at a
 * time, to [lanes, width]; width is even. */
static void widen_pairs(const struct moe_cpu_matrix *m, uint32_t p, uint32_t lanes, uint32_t column,
                        uint32_t width, float *to)
{
    const char *panel = (const char *)m->data + (size_t)p * m->panel_bytes;
    const uint32_t *packed = (const uint32_t *)(const void *)panel + (size_t)(column / 2) * width;
    uint32_t left = m->in - column, pairs = (left < width ? left + 1 : width) / 2;
    if (left < width)
        memset(to, 0, (size_t)lanes * width * sizeof *to);
    for (uint32_t c = 0; c < pairs; c++, packed += width)
        for (uint32_t r = 0; r < lanes; r++) {
            const uint32_t pair[2] = {packed[r] << 16, packed[r] & UINT32_C(0xffff0000)};
            memcpy(to + (size_t)r * width + 2 * c, pair, sizeof pair);
        }
}

void moe_cpu_matrix_block(const struct moe_cpu_isa *isa, const struct moe_cpu_matrix *m,
                          uint32_t row, uint32_t rows, uint32_t column, float *block)
{
    const uint32_t width = isa->panel;
    float lane[MOE_CPU_MAX_PANEL * MOE_CPU_MAX_PANEL];
    uint32_t left = column < m->in ? m->in - column : 0, n = left < width ? left : width;
    for (uint32_t first = 0; first < rows; first += width) {
        uint32_t lanes = rows - first < width ? rows - first : width;
        float *to = block + (size_t)first * width;
        if (m->dtype == MOE_DTYPE_BF16) {
            widen_pairs(m, (row + first) / width, lanes, column, width, to);
            continue;
        }
        load_columns(isa, m, (row + first) / width, column, n, lane);
        for (uint32_t r = 0; r < lanes; r++)
            for (uint32_t c = 0; c < width; c++)
                to[r * width + c] = c < n ? lane[c * width + r] : 0.0f;
    }
}

struct merge_job {
    const struct moe_cpu_matrix *matrix, *base;
    const struct moe_cpu_isa *isa;
    uint32_t rank;
    float scale;
    const float *a, *b;
};

static void merge_panel(void *ctx, uint32_t p)
{
    const struct merge_job *job = ctx;
    const struct moe_cpu_matrix *m = job->matrix;
    float b[MOE_CPU_MAX_RANK * MOE_CPU_MAX_PANEL], column[COLUMNS * MOE_CPU_MAX_PANEL];
    uint32_t width = job->isa->panel, lanes = lanes_of(m, p, width);
    for (uint32_t j = 0; j < job->rank; j++)
        for (uint32_t r = 0; r < width; r++)
            b[j * width + r] = r < lanes ? job->b[((size_t)p * width + r) * job->rank + j] : 0.0f;
    for (uint32_t k = 0; k < m->in; k++) {
        float sum[MOE_CPU_MAX_PANEL] = {0};
        for (uint32_t j = 0; j < job->rank; j++) {
            float a = job->a[(size_t)j * m->in + k];
            for (uint32_t r = 0; r < width; r++)
                sum[r] += a * b[j * width + r];
        }
        if (k % COLUMNS == 0)
            load_columns(job->isa, job->base, p, k, m->in - k < COLUMNS ? m->in - k : COLUMNS,
                         column);
        float *lane = column + k % COLUMNS * width;
        for (uint32_t r = 0; r < width; r++)
            lane[r] += job->scale * sum[r];
        store_column(m, p, k, width, lanes, lane);
    }
}

void moe_cpu_matrix_merge(struct moe_device *device, const struct moe_cpu_matrix *matrix,
                          const struct moe_cpu_matrix *base, float scale, uint32_t rank,
                          const float *a, const float *b)
{
    MOE_INVARIANT(rank <= MOE_CPU_MAX_RANK && base->out == matrix->out && base->in == matrix->in);
    MOE_INVARIANT(matrix->dtype != MOE_DTYPE_NONE);
    struct merge_job job = {.matrix = matrix,
                            .base = base,
                            .isa = moe_cpu_device_isa(device),
                            .rank = rank,
                            .scale = scale,
                            .a = a,
                            .b = b};
    moe_cpu_parallel(device, matrix->panels, merge_panel, &job);
}

void moe_cpu_matrix_free(struct moe_device *device, struct moe_cpu_matrix *matrix)
{
    moe_cpu_mem_free(device, MOE_MEM_DEVICE, matrix->data, matrix->bytes);
    *matrix = (struct moe_cpu_matrix){0};
}

static struct moe_cpu_panel panel_of(const struct moe_cpu_part *part)
{
    const struct moe_cpu_matrix *m = part->matrix;
    return (struct moe_cpu_panel){
        &m->packed, (const char *)m->data + (size_t)part->panel * m->panel_bytes, part->y};
}

/* W8A8 with values in F32, which have their scales. */
static void multiply_values(const struct moe_cpu_isa *isa, const struct moe_cpu_panel *panel,
                            uint32_t rows, const struct moe_cpu_rows *x, uint32_t in,
                            size_t y_stride)
{
    float sums[MOE_CPU_W8A8_ROWS * MOE_CPU_MAX_PANEL], *y = panel->y;
    const float *values = panel->data;
    const uint32_t width = isa->panel;
    for (uint32_t g = 0, i = 0; g < x->groups; g++, i += x->group) {
        uint32_t n = in - i < x->group ? in - i : x->group;
        isa->panel_f32(rows, x->x + i, x->stride, values + (size_t)i * width, n, sums, width);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t c = 0; c < width; c++)
                y[r * y_stride + c] = (g == 0 ? 0.0f : y[r * y_stride + c]) +
                                      sums[r * width + c] * x->scale[r * x->groups + g];
    }
}

static void multiply(const struct moe_cpu_isa *isa, const struct moe_cpu_part *part, uint32_t rows,
                     const struct moe_cpu_rows *x, size_t y_stride)
{
    const struct moe_cpu_matrix *m = part->matrix;
    const struct moe_cpu_panel panel = panel_of(part);
    if (m->dtype == MOE_DTYPE_NONE)
        isa->panels_packed(1, &panel, rows, x, m->in, y_stride);
    else if (x->scale != NULL)
        multiply_values(isa, &panel, rows, x, m->in, y_stride);
    else if (m->dtype == MOE_DTYPE_BF16)
        isa->panel_bf16(rows, x->x, x->stride, panel.data, m->in, panel.y, y_stride);
    else
        isa->panel_f32(rows, x->x, x->stride, panel.data, m->in, panel.y, y_stride);
}

/* Whether the kernels take both panels at a time. */
static bool go_together(const struct moe_cpu_matrix *a, const struct moe_cpu_matrix *b)
{
    return a->dtype == MOE_DTYPE_NONE && b->dtype == MOE_DTYPE_NONE && a->in == b->in &&
           a->packed.encoding == b->packed.encoding && a->packed.block == b->packed.block &&
           a->packed.zero_points == b->packed.zero_points;
}

void moe_cpu_matrix_parts(const struct moe_cpu_isa *isa, uint32_t count,
                          const struct moe_cpu_part *parts, uint32_t rows,
                          const struct moe_cpu_rows *x, size_t y_stride)
{
    MOE_INVARIANT(x->scale == NULL || rows <= MOE_CPU_W8A8_ROWS);
    if (count == 2 && go_together(parts[0].matrix, parts[1].matrix)) {
        const struct moe_cpu_panel panels[2] = {panel_of(&parts[0]), panel_of(&parts[1])};
        isa->panels_packed(2, panels, rows, x, parts->matrix->in, y_stride);
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        multiply(isa, &parts[i], rows, x, y_stride);
}

void moe_cpu_matrix_panel(const struct moe_cpu_isa *isa, const struct moe_cpu_matrix *matrix,
                          uint32_t p, uint32_t rows, const float *x, size_t x_stride, float *y,
                          size_t y_stride)
{
    const struct moe_cpu_part part = {matrix, p, y};
    const struct moe_cpu_rows plain = {.x = x, .stride = x_stride};
    multiply(isa, &part, rows, &plain, y_stride);
}
