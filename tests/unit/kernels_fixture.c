/* SPDX-License-Identifier: Apache-2.0 */
/* Random layers, tensors and comparisons for the tests of the compute kernels. */
#include "kernels_fixture.h"

#include "cpu/compute/packed.h"
#include "support/packed.h"

void *random_tensor(enum moe_dtype dtype, size_t n, float scale)
{
    char *p = malloc(n * moe_dtype_bytes(dtype) + 1);
    assert_non_null(p);
    for (size_t i = 0; i < n; i++) {
        float f = scale * random_normal();
        uint16_t b = moe_f32_to_bf16(f);
        if (dtype == MOE_DTYPE_F32)
            memcpy(p + i * 4, &f, 4);
        else
            memcpy(p + i * 2, &b, 2);
    }
    return p;
}

double element_of(enum moe_dtype dtype, const void *tensor, size_t i)
{
    return dtype == MOE_DTYPE_F32 ? (double)((const float *)tensor)[i]
                                  : (double)moe_bf16_to_f32(((const uint16_t *)tensor)[i]);
}

double relative_error(size_t n, const float *got, const double *want)
{
    double error = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)got[i] - want[i];
        if (isnan(d))
            return INFINITY;
        error += d * d;
        norm += want[i] * want[i];
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

struct moe_device *open_device(const struct moe_cpu_isa *isa, uint32_t threads)
{
    struct moe_device_config config = {.threads = threads};
    struct moe_device *device = NULL;
    if (isa == NULL)
        assert_ok(moe_cpu_device_open(&config, &device));
    else
        assert_ok(moe_cpu_device_open_isa(&config, isa, &device));
    return device;
}

struct moe_layer_spec plain_spec(void)
{
    return (struct moe_layer_spec){
        .layer = 3,
        .hidden = 4,
        .experts = 1,
        .intermediate = 4,
        .router = {.top_k = 1, .groups = 1, .topk_group = 1, .group_best = 1, .scale = 1},
        .swiglu_limit = 7,
        .swiglu_alpha = 1.702f,
    };
}

/* All experts on slot 0 of 2. */
static struct moe_layer *create_layer(struct moe_device *device, const struct moe_layer_spec *spec,
                                      uint32_t slot)
{
    uint32_t offset[MOE_MAX_EXPERTS + 1];
    uint16_t owner[MOE_MAX_EXPERTS] = {0};
    for (uint32_t e = 0; e <= spec->experts; e++)
        offset[e] = e;
    struct moe_placement placement = {
        .version = 1, .experts = spec->experts, .slots = 2, .offset = offset, .slot = owner};
    struct moe_layer *layer = NULL;
    assert_ok(moe_cpu_layer_create(device, spec, &placement, slot, &layer));
    return layer;
}

/* A quantised weight, to the layer and to `oracle`, unless it is NULL. */
static void upload_packed(struct moe_layer *layer, enum moe_weight w, uint32_t e,
                          struct moe_oracle_layer *oracle)
{
    struct rng r = {random_bits()};
    size_t rows, columns;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    const struct moe_weight_format *format = moe_weight_format_of(&layer->spec, w);
    struct random_packed p = random_packed(&r, format, rows, columns, 1.0f / sqrtf((float)columns));
    assert_ok(moe_cpu_layer_upload_packed(layer, w, e, &p.matrix));
    if (oracle != NULL)
        assert_ok(moe_oracle_upload_packed(oracle, w, e, &p.matrix));
    free_packed(&p);
}

struct moe_layer *random_layer(struct moe_device *device, const struct moe_layer_spec *spec,
                               enum moe_dtype dtype, bool holds_experts,
                               struct moe_oracle_layer **oracle)
{
    struct moe_layer *layer = create_layer(device, spec, holds_experts ? 0 : 1);
    if (oracle != NULL)
        assert_ok(moe_oracle_create(spec, oracle));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        moe_weight_shape(spec, w, &rows, &columns);
        uint32_t entries = !moe_weight_is_expert(w) ? 1 : holds_experts ? spec->experts : 0;
        for (uint32_t e = 0; rows != 0 && e < entries; e++) {
            if (moe_weight_format_of(spec, w) != NULL) {
                upload_packed(layer, w, e, oracle != NULL ? *oracle : NULL);
                continue;
            }
            enum moe_dtype d = dtype != MOE_DTYPE_NONE ? dtype
                               : one_in(2)             ? MOE_DTYPE_F32
                                                       : MOE_DTYPE_BF16;
            size_t bytes = rows * columns * moe_dtype_bytes(d);
            void *data = random_tensor(d, rows * columns, 1.0f / sqrtf((float)columns));
            assert_ok(moe_cpu_layer_upload(layer, w, e, d, data, bytes));
            if (oracle != NULL)
                assert_ok(moe_oracle_upload(*oracle, w, e, d, data, bytes));
            free(data);
        }
    }
    assert_ok(moe_cpu_layer_finish(layer));
    return layer;
}

struct moe_layer *identity_router(struct moe_device *device, const struct moe_layer_spec *spec,
                                  const float *logit_bias, const float *select_bias)
{
    size_t n = spec->hidden;
    struct moe_layer *layer = create_layer(device, spec, 1);
    float *identity = calloc(n * n, sizeof *identity);
    assert_non_null(identity);
    for (size_t i = 0; i < n; i++)
        identity[i * n + i] = 1;
    assert_ok(moe_cpu_layer_upload(layer, MOE_WEIGHT_ROUTER, 0, MOE_DTYPE_F32, identity,
                                   n * n * sizeof *identity));
    free(identity);
    if (spec->router.logit_bias)
        assert_ok(moe_cpu_layer_upload(layer, MOE_WEIGHT_LOGIT_BIAS, 0, MOE_DTYPE_F32, logit_bias,
                                       n * sizeof *logit_bias));
    if (spec->router.select_bias)
        assert_ok(moe_cpu_layer_upload(layer, MOE_WEIGHT_SELECT_BIAS, 0, MOE_DTYPE_F32, select_bias,
                                       n * sizeof *select_bias));
    assert_ok(moe_cpu_layer_finish(layer));
    return layer;
}
