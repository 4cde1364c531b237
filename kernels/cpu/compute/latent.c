/* SPDX-License-Identifier: Apache-2.0 */
/* The projections of a layer with a latent space: tokens into it before the experts' rows are sent,
 * and the experts' sums out of it at the token's slot. All arithmetic is fp32; rows are rounded to
 * the step's dtype once on either side. Like every product here, a row's bits do not depend on the
 * other rows. */
#include "cpu/compute/gemm.h"
#include "cpu/compute/layer.h"

#include "base/size.h"

#include <math.h>

enum { PASS_ROWS = 256 }; /* tokens at a time: bounds the scratch */

/* One pass over some tokens. Pointers are to the pass's first row. */
struct latent_job {
    const struct moe_layer *layer;
    const struct moe_cpu_isa *isa;
    enum moe_dtype dtype;
    uint32_t rows, rows_per_item;
    uint32_t in, out;      /* columns */
    const void *from;      /* [rows, in] of the dtype */
    const float *norm;     /* [in] weight of the norm, or NULL: none */
    float *x, *y;          /* [rows, in], [rows, out]: scratch */
    const float *base;     /* [rows, out] is added to y; or NULL */
    const uint8_t *mode;   /* [rows] as in moe_step_args: some rows have no base; or NULL */
    const uint8_t *states; /* [rows] rows that are not MOE_TOKEN_OK become zeros; or NULL */
    void *to;              /* [rows, out] of the dtype */
};

/* x [n] = norm * x / sqrt(mean(x^2) + eps) */
static void normalise(size_t n, float eps, const float *norm, float *x)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    const float scale = (float)(1.0 / sqrt(sum / (double)n + (double)eps));
    for (size_t i = 0; i < n; i++)
        x[i] = x[i] * scale * norm[i];
}

static void take_rows(void *ctx, uint32_t item)
{
    const struct latent_job *job = ctx;
    uint32_t end = moe_cpu_min(job->rows, (item + 1) * job->rows_per_item);
    for (uint32_t r = item * job->rows_per_item; r < end; r++) {
        float *x = job->x + (size_t)r * job->in;
        job->isa->widen(job->dtype, job->in,
                        (const char *)job->from + r * job->in * moe_dtype_bytes(job->dtype), 1.0f,
                        x);
        if (job->norm != NULL)
            normalise(job->in, job->layer->spec.latent_eps, job->norm, x);
    }
}

static void store(enum moe_dtype dtype, size_t n, const float *from, void *to)
{
    if (dtype == MOE_DTYPE_F32) {
        memcpy(to, from, n * sizeof *from);
        return;
    }
    for (size_t i = 0; i < n; i++)
        ((uint16_t *)to)[i] = moe_f32_to_bf16(from[i]);
}

static void put_rows(void *ctx, uint32_t item)
{
    const struct latent_job *job = ctx;
    uint32_t end = moe_cpu_min(job->rows, (item + 1) * job->rows_per_item);
    for (uint32_t r = item * job->rows_per_item; r < end; r++) {
        const size_t bytes = job->out * moe_dtype_bytes(job->dtype);
        const bool bare = job->mode != NULL && (job->mode[r] & MOE_ROUTE_WITHOUT_SHARED) != 0;
        float *y = job->y + (size_t)r * job->out;
        if (job->states != NULL && job->states[r] != MOE_TOKEN_OK) {
            memset((char *)job->to + r * bytes, 0, bytes);
            continue;
        }
        for (uint32_t c = 0; job->base != NULL && !bare && c < job->out; c++)
            y[c] += job->base[(size_t)r * job->out + c];
        store(job->dtype, job->out, y, (char *)job->to + r * bytes);
    }
}

static void run_pass(struct latent_job *job, const struct moe_cpu_matrix *weight)
{
    struct moe_device *device = job->layer->device;
    const struct moe_cpu_product product = {.factor = MOE_CPU_WEIGHT,
                                            .rows = job->rows,
                                            .k = job->in,
                                            .columns = job->out,
                                            .x = job->x,
                                            .weight = weight,
                                            .scale = 1,
                                            .y = job->y};
    job->rows_per_item = moe_cpu_units_per_item(job->in);
    moe_cpu_parallel(device, moe_cpu_ceil_div(job->rows, job->rows_per_item), take_rows, job);
    moe_cpu_gemm_products(device, &product, 1);
    job->rows_per_item = moe_cpu_units_per_item(job->out);
    moe_cpu_parallel(device, moe_cpu_ceil_div(job->rows, job->rows_per_item), put_rows, job);
}

/* All tokens, in passes. `job` describes all of them. */
static struct moe_status run(const struct latent_job *job, const struct moe_cpu_matrix *weight)
{
    struct latent_job pass = *job;
    uint32_t most = moe_cpu_min(job->rows, PASS_ROWS);
    size_t bytes, size = moe_dtype_bytes(job->dtype);
    void *scratch;
    if (job->rows == 0)
        return moe_ok();
    if (!moe_size_mul3((size_t)job->in + job->out, most, sizeof(float), &bytes))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "scratch too large");
    MOE_TRY(moe_cpu_scratch_take(job->layer->device, bytes, &scratch));
    pass.x = scratch;
    pass.y = pass.x + (size_t)most * job->in;
    for (size_t t = 0; t < job->rows; t += pass.rows) {
        pass.rows = moe_cpu_min(most, job->rows - (uint32_t)t);
        pass.from = (const char *)job->from + t * job->in * size;
        pass.to = (char *)job->to + t * job->out * size;
        pass.base = job->base != NULL ? job->base + t * job->out : NULL;
        pass.mode = job->mode != NULL ? job->mode + t : NULL;
        pass.states = job->states != NULL ? job->states + t : NULL;
        run_pass(&pass, weight);
    }
    moe_cpu_scratch_give(job->layer->device, scratch);
    return moe_ok();
}

struct moe_status moe_cpu_to_latent(const struct moe_layer *layer, enum moe_dtype dtype,
                                    uint32_t tokens, const void *x, void *z)
{
    const struct latent_job job = {.layer = layer,
                                   .isa = moe_cpu_device_isa(layer->device),
                                   .dtype = dtype,
                                   .rows = tokens,
                                   .in = layer->spec.hidden,
                                   .out = layer->spec.latent,
                                   .from = x,
                                   .to = z};
    return run(&job, &layer->matrix[MOE_WEIGHT_TO_LATENT][0]);
}

struct moe_status moe_cpu_from_latent(const struct moe_layer *layer, enum moe_dtype dtype,
                                      uint32_t tokens, const void *u, const float *base,
                                      const uint8_t *mode, const uint8_t *token_state, void *y)
{
    const struct latent_job job = {.layer = layer,
                                   .isa = moe_cpu_device_isa(layer->device),
                                   .dtype = dtype,
                                   .rows = tokens,
                                   .in = layer->spec.latent,
                                   .out = layer->spec.hidden,
                                   .from = u,
                                   .norm = moe_cpu_layer_bias(layer, MOE_WEIGHT_LATENT_NORM, 0),
                                   .base = base,
                                   .mode = mode,
                                   .states = token_state,
                                   .to = y};
    return run(&job, &layer->matrix[MOE_WEIGHT_FROM_LATENT][0]);
}
