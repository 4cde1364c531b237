/* SPDX-License-Identifier: Apache-2.0 */
/* Packs quantised matrices (packed.h). Elements and scales stay as they are; two bytes of a row of
 * elements move together. */
#include "cpu/compute/packed.h"

#include "base/size.h"
#include "cpu/compute/device.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { ALIGN = 64 };

bool moe_cpu_computes(const struct moe_device *device, const struct moe_weight_format *f)
{
    (void)device;
    switch (f->encoding) {
    case MOE_ENC_F8E4M3:
    case MOE_ENC_E2M1:
    case MOE_ENC_INT4: return f->block_columns % moe_cpu_word_inputs(f->encoding) == 0;
    default: return false;
    }
}

struct pack_job {
    const struct moe_cpu_matrix *matrix;
    const struct moe_weight_format *format;
    const struct moe_packed_matrix *from;
    struct moe_packed_sizes sizes;
    const struct moe_cpu_isa *isa;
    bool odd_byte[256]; /* of scales that are bytes: those that the kernels cannot take */
    atomic_bool odd;    /* an element or a scale that the kernels cannot take */
};

/* The kernels multiply scales by up to 2^24. */
static bool fits(float scale)
{
    return isfinite(scale * 0x1p24f);
}

static void find_odd_bytes(struct pack_job *job)
{
    uint8_t bytes[256];
    if (moe_scale_bytes(job->format->scale) != 1)
        return;
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)i;
        job->odd_byte[i] = !fits(moe_scale_to_f32(job->format, bytes, i, job->from->global));
    }
}

/* Whether all of `count` scales from number `first` on fit. */
static bool all_fit(const struct pack_job *job, size_t first, size_t count)
{
    const struct moe_packed_matrix *from = job->from;
    const uint8_t *bytes = (const uint8_t *)from->scales + first;
    bool odd = false;
    if (moe_scale_bytes(job->format->scale) == 1)
        for (size_t b = 0; b < count; b++)
            odd |= job->odd_byte[bytes[b]];
    else
        for (size_t b = 0; b < count; b++)
            odd |= !fits(moe_scale_to_f32(job->format, from->scales, first + b, from->global));
    return !odd;
}

/* One scale of all rows of the panel for each block. */
static bool widen_scales(const struct pack_job *job, size_t first, float *to)
{
    for (size_t b = 0; b < job->sizes.scale_columns; b++)
        to[b] = moe_scale_to_f32(job->format, job->from->scales, first + b, job->from->global);
    return all_fit(job, first, job->sizes.scale_columns);
}

/* Scales and zero points; false if the kernels cannot take a scale. */
static bool pack_levels(const struct pack_job *job, uint32_t p, uint32_t lanes, char *panel)
{
    const struct moe_cpu_packed *packed = &job->matrix->packed;
    const size_t count = job->sizes.scale_columns, each = moe_scale_bytes(packed->scale);
    const void *scales[MOE_CPU_MAX_PANEL] = {NULL}, *zeros[MOE_CPU_MAX_PANEL] = {NULL};
    bool fit = true;
    for (uint32_t r = 0; r < lanes; r++) {
        size_t row = (size_t)p * job->isa->panel + r;
        size_t first = moe_packed_block(job->format, count, row, 0);
        scales[r] = (const char *)job->from->scales + first * each;
        if (packed->zero_points)
            zeros[r] = job->from->zeros + first;
        if (!packed->shared_scales)
            fit = all_fit(job, first, count) && fit;
        else if (r == 0)
            fit = widen_scales(job, first, (float *)(void *)(panel + packed->scales_at));
    }
    if (!packed->shared_scales)
        (void)job->isa->interleave((uint32_t)each, count * each, scales, panel + packed->scales_at);
    if (packed->zero_points)
        (void)job->isa->interleave(1, count, zeros, panel + packed->zeros_at);
    return fit;
}

/* False if an element is NaN. */
static bool pack_elements(const struct pack_job *job, uint32_t p, uint32_t lanes, char *panel)
{
    const size_t row_bytes = job->sizes.row_bytes, first = (size_t)p * job->isa->panel;
    const bool bytes = job->format->encoding == MOE_ENC_F8E4M3;
    const void *rows[MOE_CPU_MAX_PANEL] = {NULL};
    for (uint32_t r = 0; r < lanes; r++)
        rows[bytes ? r : job->isa->place[r]] =
            (const char *)job->from->elements + (first + r) * row_bytes;
    bool nan = job->isa->interleave(2, row_bytes, rows, panel + job->matrix->packed.elements_at);
    return !(bytes && nan);
}

static void pack_panel(void *ctx, uint32_t p)
{
    struct pack_job *job = ctx;
    const struct moe_cpu_matrix *m = job->matrix;
    char *panel = (char *)m->data + (size_t)p * m->panel_bytes;
    uint32_t width = job->isa->panel, lanes = moe_cpu_min(width, m->out - p * width);
    bool levels = pack_levels(job, p, lanes, panel);
    bool elements = pack_elements(job, p, lanes, panel);
    if (!levels || !elements)
        atomic_store_explicit(&job->odd, true, memory_order_relaxed);
}

/* Fills the layout of `m`; false if a size overflows. */
static bool lay_out(const struct moe_weight_format *f, const struct moe_packed_sizes *sizes,
                    uint32_t width, struct moe_cpu_matrix *m)
{
    size_t scales, zeros, words = sizes->row_bytes / 2 + sizes->row_bytes % 2, elements;
    struct moe_cpu_packed *p = &m->packed;
    p->encoding = f->encoding;
    p->scale = f->scale;
    p->shared_scales = f->block_rows % width == 0; /* also one block of all rows */
    p->zero_points = f->zero_points;
    p->global_divides = f->global_divides;
    p->block = f->block_columns == 0 ? m->in : f->block_columns;
    size_t each = p->shared_scales ? sizeof(float) : width * moe_scale_bytes(f->scale);
    if (!moe_size_mul(sizes->scale_columns, each, &scales) ||
        !moe_size_mul(sizes->scale_columns, f->zero_points ? width : 0, &zeros) ||
        !moe_size_mul3(words, width, 2, &elements))
        return false;
    p->scales_at = 0;
    p->zeros_at = scales;
    return moe_size_add(scales, zeros, &p->elements_at) &&
           moe_size_round_up(p->elements_at, ALIGN, &p->elements_at) &&
           moe_size_add(p->elements_at, elements, &m->panel_bytes) &&
           moe_size_round_up(m->panel_bytes, ALIGN, &m->panel_bytes) &&
           moe_size_mul(m->panel_bytes, m->panels, &m->bytes);
}

static struct moe_status too_large(uint32_t out, uint32_t in)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "a %u x %u matrix is too large", out, in);
}

static struct moe_status pack_values(struct moe_device *device, const struct pack_job *job,
                                     uint32_t out, uint32_t in, struct moe_cpu_matrix *matrix)
{
    size_t bytes;
    if (!moe_size_mul3(out, in, sizeof(float), &bytes))
        return too_large(out, in);
    float *values = malloc(bytes);
    if (values == NULL)
        return too_large(out, in);
    for (size_t r = 0; r < out; r++)
        for (size_t c = 0; c < in; c++)
            values[r * in + c] = moe_packed_value(job->format, &job->sizes, job->from, r, c);
    struct moe_status st =
        moe_cpu_matrix_pack(device, out, in, MOE_DTYPE_F32, MOE_DTYPE_F32, values, matrix);
    free(values);
    return st;
}

struct moe_status moe_cpu_matrix_pack_quantised(struct moe_device *device, uint32_t out,
                                                uint32_t in, const struct moe_weight_format *format,
                                                const struct moe_packed_matrix *data,
                                                struct moe_cpu_matrix *matrix)
{
    const struct moe_cpu_isa *isa = moe_cpu_device_isa(device);
    uint32_t width = isa->panel;
    struct moe_cpu_matrix m = {.out = out, .in = in, .panels = moe_cpu_ceil_div(out, width)};
    struct pack_job job = {.matrix = &m, .format = format, .from = data, .isa = isa};
    if (!moe_packed_sizes(format, out, in, &job.sizes) || !lay_out(format, &job.sizes, width, &m))
        return too_large(out, in);
    m.packed.global = data->global;
    find_odd_bytes(&job);
    MOE_TRY(moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, m.bytes, &m.data));
    moe_cpu_parallel(device, m.panels, pack_panel, &job);
    if (!job.odd) {
        *matrix = m;
        return moe_ok();
    }
    moe_cpu_matrix_free(device, &m);
    return pack_values(device, &job, out, in, matrix);
}
