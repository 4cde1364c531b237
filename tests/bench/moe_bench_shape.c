/* SPDX-License-Identifier: Apache-2.0 */
/* Weights; see moe_bench.h. */
#include "moe_bench.h"

#include "base/clock.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    POOL_VALUES = 96 << 20, /* more than the largest matrix: 14336 x 4096 */
    BLOCK = 128,            /* rows and columns of FP8 that share a scale */
    MX_BLOCK = 32,          /* columns of MXFP4 that share one */
    MX_SCALE = 127 - 7,     /* 2^-7: random values of E2M1 then have the size of the others */
    MAX_SCALES = POOL_VALUES / MX_BLOCK,
    PINNED_BYTES = 256 << 20,
    PINNED_COPIES = 4,
};

/* The formats of --weights, besides bf16. */
static const struct {
    const char *name;
    struct moe_weight_format format;
} formats[] = {
    {"fp8", {MOE_ENC_F8E4M3, BLOCK, BLOCK, MOE_SCALE_F32, false, false, MOE_ACTIVATIONS_PLAIN}},
    {"w8a8", {MOE_ENC_F8E4M3, BLOCK, BLOCK, MOE_SCALE_F32, false, false, MOE_ACTIVATIONS_F8}},
    {"mxfp4", {MOE_ENC_E2M1, 1, MX_BLOCK, MOE_SCALE_E8M0, false, false, MOE_ACTIVATIONS_PLAIN}},
};

/* Elements and scales: the values over BENCH_SCALE, rounded to FP8, or random values of E2M1. */
static bool quantise_pool(const struct moe_weight_format *f, struct rng *r, struct bench_pool *pool)
{
    size_t scale_bytes = MAX_SCALES * sizeof(float);
    uint8_t *codes = mmap(NULL, POOL_VALUES + scale_bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (codes == MAP_FAILED)
        return false;
    bool mx = f->encoding == MOE_ENC_E2M1;
    for (size_t i = 0; i < POOL_VALUES; i++)
        codes[i] =
            mx ? (uint8_t)(rng_next(r) >> 56)
               : moe_e4m3_byte(moe_round_to_e4m3(moe_bf16_to_f32(pool->values[i]) / BENCH_SCALE));
    float *scales = (float *)(codes + POOL_VALUES);
    for (size_t i = 0; i < MAX_SCALES && !mx; i++)
        scales[i] = BENCH_SCALE;
    if (mx)
        memset(scales, MX_SCALE, MAX_SCALES);
    pool->codes = codes;
    pool->scales = scales;
    return true;
}

bool bench_pool_make(const char *weights, struct bench_pool *out)
{
    size_t bytes = (size_t)POOL_VALUES * sizeof(uint16_t);
    uint16_t *values = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (values == MAP_FAILED)
        return false;
    struct rng r = {.state = 1};
    for (size_t i = 0; i < POOL_VALUES; i += 4) {
        uint64_t bits = rng_next(&r);
        for (size_t j = 0; j < 4; j++) /* uniform in +-1/32: outputs have the size of the inputs */
            values[i + j] = moe_f32_to_bf16((float)(int16_t)(bits >> (16 * j)) * 0x1p-20f);
    }
    *out = (struct bench_pool){.values = values, .count = POOL_VALUES};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, weights) == 0) {
            out->format = formats[i].format;
            return quantise_pool(&out->format, &r, out);
        }
    return true;
}

void bench_set_format(const struct bench_plan *plan, struct moe_layer_spec *spec)
{
    if (plan->pool.codes == NULL)
        return;
    spec->routed_format = plan->pool.format;
    if (spec->shared_intermediate != 0)
        spec->shared_format = plan->pool.format;
}

bool bench_is_quantised(const struct bench *b, enum moe_weight w)
{
    return moe_weight_format_of(&b->shape->spec, w) != NULL;
}

/* Where a weight begins in the pool. */
static size_t place_of(const struct bench *b, enum moe_weight w, uint32_t expert)
{
    size_t rows, columns;
    moe_weight_shape(&b->shape->spec, w, &rows, &columns);
    struct rng r = {.state = (uint64_t)w * 4096 + expert};
    size_t room = b->plan->pool.count - rows * columns;
    return rng_next(&r) % room / 8 * 8;
}

const uint16_t *bench_weight(const struct bench *b, enum moe_weight w, uint32_t expert)
{
    return b->plan->pool.values + place_of(b, w, expert);
}

struct moe_packed_matrix bench_matrix(const struct bench *b, enum moe_weight w, uint32_t expert)
{
    const struct bench_pool *pool = &b->plan->pool;
    size_t bits = moe_encoding_traits(pool->format.encoding).bits;
    return (struct moe_packed_matrix){.elements = pool->codes + place_of(b, w, expert) * bits / 8,
                                      .scales = pool->scales};
}

/* A large selection bias would make some experts too popular, so it is small. */
static void upload_select_bias(struct bench *b)
{
    float bias[MOE_MAX_EXPERTS];
    size_t n, columns;
    moe_weight_shape(&b->shape->spec, MOE_WEIGHT_SELECT_BIAS, &n, &columns);
    const uint16_t *values = bench_weight(b, MOE_WEIGHT_SELECT_BIAS, 0);
    for (size_t i = 0; i < n; i++)
        bias[i] = moe_bf16_to_f32(values[i]) / 64;
    bench_require(b, "upload",
                  b->plan->backend->layer_upload(b->layer, MOE_WEIGHT_SELECT_BIAS, 0, MOE_DTYPE_F32,
                                                 bias, n * sizeof *bias));
}

/* moe_weight_source.read */
static struct moe_status read_pool(const void *pool, uint64_t at, size_t bytes, void *to)
{
    memcpy(to, (const char *)pool + at, bytes);
    return moe_ok();
}

/* As a worker does, but from memory: if the backend can, it reads the weight itself. */
static struct moe_status upload(struct bench *b, enum moe_weight w, uint32_t expert, size_t bytes)
{
    const struct moe_backend *k = b->plan->backend;
    if (bench_is_quantised(b, w)) {
        const struct moe_packed_matrix m = bench_matrix(b, w, expert);
        return k->layer_upload_packed(b->layer, w, expert, &m);
    }
    const uint16_t *values = bench_weight(b, w, expert);
    struct moe_weight_source source = {.read = read_pool, .ctx = values};
    return k->layer_fetch != NULL
               ? k->layer_fetch(b->layer, w, expert, MOE_DTYPE_BF16, &source, bytes)
               : k->layer_upload(b->layer, w, expert, MOE_DTYPE_BF16, values, bytes);
}

static size_t upload_one(struct bench *b, enum moe_weight w)
{
    size_t rows, columns, sent = 0;
    moe_weight_shape(&b->shape->spec, w, &rows, &columns);
    size_t bytes = rows * columns * sizeof(uint16_t);
    struct moe_packed_sizes packed;
    if (bench_is_quantised(b, w) && moe_packed_sizes(&b->plan->pool.format, rows, columns, &packed))
        bytes = packed.elements;
    uint32_t entries = moe_weight_is_expert(w) ? b->shape->spec.experts : 1;
    for (uint32_t e = 0; e < entries && rows > 0; e++) {
        if (moe_weight_is_expert(w) && b->homes.slot[e] != b->member->slot)
            continue;
        bench_require(b, "upload", upload(b, w, e, bytes));
        sent += bytes;
    }
    return sent;
}

/* Gigabytes per second of one large copy of pinned memory: the bus's rate. All slots at the same
 * time, as in uploads. */
static double pinned_rate(struct bench *b)
{
    const struct moe_backend *k = b->plan->backend;
    void *host, *device;
    double best = 0;
    bench_require(b, "memory", k->mem_alloc(b->device, MOE_MEM_HOST, PINNED_BYTES, &host));
    bench_require(b, "memory", k->mem_alloc(b->device, MOE_MEM_DEVICE, PINNED_BYTES, &device));
    bench_meet(b);
    for (int i = 0; i < PINNED_COPIES; i++) {
        uint64_t start = moe_clock_ns();
        bench_require(b, "copy", k->mem_copy(b->device, device, host, PINNED_BYTES));
        double rate = (double)PINNED_BYTES / (double)(moe_clock_ns() - start);
        best = rate > best ? rate : best;
    }
    k->mem_free(b->device, MOE_MEM_HOST, host, PINNED_BYTES);
    k->mem_free(b->device, MOE_MEM_DEVICE, device, PINNED_BYTES);
    return best;
}

static void create_layer(struct bench *b)
{
    struct moe_placement placement =
        deal_experts(&b->homes, b->shape->spec.experts, b->member->slots);
    bench_require(b, "layer",
                  b->plan->backend->layer_create(b->device, &b->shape->spec, &placement,
                                                 b->member->slot, &b->layer));
}

void bench_make_layer(struct bench *b)
{
    struct bench_slot_report *report = &b->plan->report[b->member->slot];
    report->pinned_gb_s = pinned_rate(b);
    create_layer(b);
    bench_meet(b);
    uint64_t start = moe_clock_ns();
    size_t bytes = 0;
    for (uint32_t w = 0; w < MOE_WEIGHT_COUNT; w++)
        if (w != MOE_WEIGHT_SELECT_BIAS)
            bytes += upload_one(b, (enum moe_weight)w);
    if (b->shape->spec.router.select_bias)
        upload_select_bias(b);
    bench_require(b, "finish", b->plan->backend->layer_finish(b->layer));
    report->upload_gb_s = (double)bytes / (double)(moe_clock_ns() - start);
}
