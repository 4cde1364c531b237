/* SPDX-License-Identifier: Apache-2.0 */
/* Where the model's ids come from; see domain_model.h. */
#include "domain_model.h"

#include "support/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    RECORD_HIDDEN = 64, /* width of the rows of a recording: choices of a random router depend on
                           its shape and rule, not on the width */
    RECORD_BATCH = 4096,
};

extern const struct moe_backend moe_backend_cpu;

void routing_free(struct routing *r)
{
    free(r->ids);
    r->ids = NULL;
}

static bool allocate(uint32_t tokens, uint32_t top_k, struct routing *out)
{
    *out = (struct routing){.tokens = tokens, .top_k = top_k};
    out->ids = calloc((size_t)tokens * top_k, sizeof *out->ids);
    if (out->ids == NULL)
        fprintf(stderr, "no memory for %u tokens\n", tokens);
    return out->ids != NULL;
}

static bool check_ids(const char *path, const struct moe_layer_spec *spec, const struct routing *r)
{
    int32_t limit = (int32_t)(spec->experts + spec->router.zero_experts);
    for (size_t i = 0; i < (size_t)r->tokens * r->top_k; i++)
        if (r->ids[i] >= limit) {
            fprintf(stderr, "%s: id %d of %d\n", path, r->ids[i], limit);
            return false;
        }
    return true;
}

bool routing_read(const char *path, const struct moe_layer_spec *spec, struct routing *out)
{
    uint32_t top_k = spec->router.top_k;
    bool good = false;
    long bytes = 0;
    *out = (struct routing){0};
    FILE *f = fopen(path, "rb");
    if (f == NULL || fseek(f, 0, SEEK_END) != 0 || (bytes = ftell(f)) <= 0 ||
        fseek(f, 0, SEEK_SET) != 0 || bytes % (long)(top_k * sizeof *out->ids) != 0 ||
        bytes / (long)(top_k * sizeof *out->ids) > UINT32_MAX)
        fprintf(stderr, "%s: no recording of %u choices per token\n", path, top_k);
    else if (allocate((uint32_t)(bytes / (long)(top_k * sizeof *out->ids)), top_k, out))
        good = fread(out->ids, 1, (size_t)bytes, f) == (size_t)bytes && check_ids(path, spec, out);
    if (f != NULL)
        fclose(f);
    if (!good)
        routing_free(out);
    return good;
}

/* The expert with the interval of the running sums that contains `at`. */
static uint32_t expert_at(const double *sum, uint32_t experts, double at)
{
    uint32_t low = 0, high = experts - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (sum[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

bool routing_draw(const struct moe_layer_spec *spec, double skew, uint32_t tokens, uint64_t seed,
                  struct routing *out)
{
    struct rng r = {.state = seed};
    double sum[MOE_MAX_EXPERTS], total = 0;
    uint32_t top_k = spec->router.top_k;
    if (!allocate(tokens, top_k, out))
        return false;
    for (uint32_t e = 0; e < spec->experts; e++) {
        total += pow(e + 1.0, -skew);
        sum[e] = total;
    }
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t k = 0; k < top_k;) {
            int32_t *ids = out->ids + (size_t)t * top_k;
            double at = (double)(rng_next(&r) >> 11) * 0x1p-53 * total;
            ids[k] = (int32_t)expert_at(sum, spec->experts, at);
            bool repeated = false;
            for (uint32_t i = 0; i < k; i++)
                repeated = repeated || ids[i] == ids[k];
            k += !repeated;
        }
    return true;
}

/* ---------------------------------------------------------------------------- recordings */

static float normal(struct rng *r)
{
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += rng_float(r);
    return (float)(sum / 2); /* variance 1 */
}

static void fill_normal(struct rng *r, float *to, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++)
        to[i] = scale * normal(r);
}

/* Only the router runs, so the experts are as small as possible. */
static struct moe_layer_spec router_only(const struct moe_layer_spec *spec)
{
    struct moe_layer_spec small = *spec;
    small.hidden = RECORD_HIDDEN;
    small.intermediate = 1;
    small.shared_intermediate = 0;
    return small;
}

static struct moe_status upload_random(struct moe_layer *layer, const struct moe_layer_spec *spec,
                                       struct rng *r)
{
    static float values[2 * MOE_MAX_EXPERTS * RECORD_HIDDEN];
    for (int w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        moe_weight_shape(spec, (enum moe_weight)w, &rows, &columns);
        uint32_t entries = moe_weight_is_expert((enum moe_weight)w) ? spec->experts : 1;
        for (uint32_t e = 0; e < entries && rows > 0; e++) {
            fill_normal(r, values, rows * columns, w == MOE_WEIGHT_ROUTER ? 0.125f : 0.01f);
            MOE_TRY(moe_backend_cpu.layer_upload(layer, (enum moe_weight)w, e, MOE_DTYPE_F32,
                                                 values, rows * columns * sizeof *values));
        }
    }
    return moe_backend_cpu.layer_finish(layer);
}

static struct moe_status route_all(struct moe_layer *layer, struct rng *r, struct routing *out)
{
    static float x[RECORD_BATCH * RECORD_HIDDEN], weights[RECORD_BATCH * MOE_MAX_TOP_K];
    static uint8_t state[RECORD_BATCH];
    for (uint32_t t = 0; t < out->tokens; t += RECORD_BATCH) {
        uint32_t n = out->tokens - t < RECORD_BATCH ? out->tokens - t : RECORD_BATCH;
        fill_normal(r, x, (size_t)n * RECORD_HIDDEN, 1);
        MOE_TRY(moe_backend_cpu.router_forward(layer, MOE_DTYPE_F32, n, x, NULL, NULL, NULL,
                                               out->ids + (size_t)t * out->top_k, weights, state));
    }
    return moe_ok();
}

static struct moe_status record(const struct moe_layer_spec *full, uint64_t seed,
                                struct routing *out)
{
    static const uint16_t zeros[MOE_MAX_EXPERTS];
    uint32_t offset[MOE_MAX_EXPERTS + 1];
    struct moe_layer_spec spec = router_only(full);
    struct moe_placement one = {
        .experts = spec.experts, .slots = 1, .offset = offset, .slot = zeros};
    struct moe_device_config config = {.threads = 1};
    struct moe_device *device = NULL;
    struct moe_layer *layer = NULL;
    struct rng r = {.state = seed};
    for (uint32_t e = 0; e <= spec.experts; e++)
        offset[e] = e;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_backend_cpu.device_open(&config, &device), done);
    MOE_TRY_GOTO(st, moe_backend_cpu.layer_create(device, &spec, &one, 0, &layer), done);
    MOE_TRY_GOTO(st, upload_random(layer, &spec, &r), done);
    MOE_TRY_GOTO(st, route_all(layer, &r, out), done);
done:
    if (layer != NULL)
        moe_backend_cpu.layer_destroy(layer);
    if (device != NULL)
        moe_backend_cpu.device_close(device);
    return st;
}

bool routing_record(const struct moe_layer_spec *spec, uint32_t tokens, uint64_t seed,
                    const char *path)
{
    struct routing r;
    if (!allocate(tokens, spec->router.top_k, &r))
        return false;
    struct moe_status st = record(spec, seed, &r);
    FILE *f = moe_failed(&st) ? NULL : fopen(path, "wb");
    size_t n = (size_t)tokens * r.top_k;
    bool good = f != NULL && fwrite(r.ids, sizeof *r.ids, n, f) == n;
    good = f != NULL && fclose(f) == 0 && good;
    if (!good)
        fprintf(stderr, "%s: %s\n", path, moe_failed(&st) ? st.text : "cannot be written");
    routing_free(&r);
    return good;
}
