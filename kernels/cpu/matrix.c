/* Packs weight matrices into panels (matrix.h says how they look) and owns their memory. */
#include "cpu/matrix.h"

#include "base/size.h"
#include "cpu/device.h"

struct pack_job {
    const struct moe_cpu_matrix *matrix;
    const char *data;
    enum moe_dtype from;
    uint32_t width; /* output rows of a panel */
};

/* Elements k and k + 1 of one bf16 row as one word; beyond the row's end is zero. */
static uint32_t load_pair(const char *row, uint32_t k, uint32_t in)
{
    uint16_t pair[2] = {0, 0};
    memcpy(pair, row + (size_t)k * 2, k + 1 < in ? 4 : 2);
    return (uint32_t)pair[0] | (uint32_t)pair[1] << 16;
}

static float load_f32(const char *row, uint32_t k, enum moe_dtype from)
{
    if (from == MOE_DTYPE_F32) {
        float f;
        memcpy(&f, row + (size_t)k * 4, sizeof f);
        return f;
    }
    uint16_t b;
    memcpy(&b, row + (size_t)k * 2, sizeof b);
    return moe_bf16_to_f32(b);
}

/* The panel's memory is zero already: lanes of rows that do not exist are left alone. */
static void pack_panel(void *ctx, uint32_t p)
{
    const struct pack_job *job = ctx;
    const struct moe_cpu_matrix *m = job->matrix;
    size_t row_bytes = (size_t)m->in * moe_dtype_bytes(job->from);
    const char *rows = job->data + (size_t)p * job->width * row_bytes;
    char *panel = (char *)m->data + (size_t)p * m->panel_bytes;
    uint32_t lanes = m->out - p * job->width;
    if (lanes > job->width)
        lanes = job->width;

    if (m->dtype == MOE_DTYPE_BF16) {
        uint32_t *words = (uint32_t *)panel;
        for (uint32_t k = 0; k < m->in; k += 2, words += job->width)
            for (uint32_t r = 0; r < lanes; r++)
                words[r] = load_pair(rows + r * row_bytes, k, m->in);
        return;
    }
    float *floats = (float *)panel;
    for (uint32_t k = 0; k < m->in; k++, floats += job->width)
        for (uint32_t r = 0; r < lanes; r++)
            floats[r] = load_f32(rows + r * row_bytes, k, job->from);
}

struct moe_status moe_cpu_matrix_pack(struct moe_device *device, uint32_t out, uint32_t in,
                                      enum moe_dtype from, enum moe_dtype keep, const void *data,
                                      struct moe_cpu_matrix *matrix)
{
    MOE_INVARIANT(keep == MOE_DTYPE_F32 || keep == from);
    uint32_t width = moe_cpu_device_isa(device)->panel;
    struct moe_cpu_matrix m = {.out = out, .in = in, .dtype = keep};
    m.panels = (out + width - 1) / width;
    size_t words = keep == MOE_DTYPE_BF16 ? ((size_t)in + 1) / 2 : in;
    if (!moe_size_mul3(words, width, 4, &m.panel_bytes) ||
        !moe_size_mul(m.panel_bytes, m.panels, &m.bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "a %u x %u matrix is too large", out, in);
    MOE_TRY(moe_cpu_mem_alloc(device, MOE_MEM_DEVICE, m.bytes, &m.data));
    struct pack_job job = {.matrix = &m, .data = data, .from = from, .width = width};
    moe_cpu_parallel(device, m.panels, pack_panel, &job);
    *matrix = m;
    return moe_ok();
}

void moe_cpu_matrix_free(struct moe_device *device, struct moe_cpu_matrix *matrix)
{
    moe_cpu_mem_free(device, MOE_MEM_DEVICE, matrix->data, matrix->bytes);
    *matrix = (struct moe_cpu_matrix){0};
}

void moe_cpu_matrix_panel(const struct moe_cpu_isa *isa, const struct moe_cpu_matrix *matrix,
                          uint32_t p, uint32_t rows, const float *x, size_t x_stride, float *y,
                          size_t y_stride)
{
    const void *panel = (const char *)matrix->data + (size_t)p * matrix->panel_bytes;
    if (matrix->dtype == MOE_DTYPE_BF16)
        isa->panel_bf16(rows, x, x_stride, panel, matrix->in, y, y_stride);
    else
        isa->panel_f32(rows, x, x_stride, panel, matrix->in, y, y_stride);
}
