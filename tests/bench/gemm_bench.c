/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of the expert networks on the CPU: gate_up and down of one expert (or of eight) with cold
 * weights, for every instruction set that this processor has.
 *
 *   gemm_bench [THREADS [SECONDS_PER_LINE [INSTRUCTION_SET [WEIGHTS]]]]
 *
 * WEIGHTS is one of bf16, f32, fp8, w8a8, mxfp4, nvfp4, int4; without it, all.
 *
 *   gemm_bench ratio [CALLS [INSTRUCTION_SET [WEIGHTS]]]
 *
 * How often each kind's time goes into that of bf16, for DeepSeek-V3 on one thread: the median over
 * calls, which alternate between the kinds, of processor time. That is what a shared machine can
 * tell. Then both kinds' bytes of weights in a second, and those of a plain read of bf16 weights in
 * calls between: a bound for few rows.
 *
 * Every call takes the next expert of a pool that exceeds the caches, so weights come from memory,
 * as in service. Prints the best call of each line: on a shared machine the other calls measure the
 * other load. */
#include "base/clock.h"
#include "cpu/compute/layer.h"
#include "support/median.h"
#include "support/packed.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { POOL_BYTES = 1 << 30, GROUP = 8, MAX_CALLS = 1000 };

struct shape {
    const char *model;
    uint32_t hidden, intermediate;
};

static const struct shape shapes[] = {
    {"Qwen3-30B-A3B", 2048, 768},
    {"DeepSeek-V3", 7168, 2048},
    {"Mixtral-8x7B", 4096, 14336},
};

static const struct weights {
    const char *name;
    enum moe_dtype dtype; /* not quantised */
    struct moe_weight_format format;
} kinds[] = {
    {"bf16", MOE_DTYPE_BF16, {.encoding = MOE_ENC_NONE}},
    {"f32", MOE_DTYPE_F32, {.encoding = MOE_ENC_NONE}},
    {"fp8",
     MOE_DTYPE_NONE,
     {MOE_ENC_F8E4M3, 128, 128, MOE_SCALE_F32, false, false, MOE_ACTIVATIONS_PLAIN}},
    {"w8a8",
     MOE_DTYPE_NONE,
     {MOE_ENC_F8E4M3, 128, 128, MOE_SCALE_F32, false, false, MOE_ACTIVATIONS_F8}},
    {"mxfp4",
     MOE_DTYPE_NONE,
     {MOE_ENC_E2M1, 1, 32, MOE_SCALE_E8M0, false, false, MOE_ACTIVATIONS_PLAIN}},
    {"nvfp4",
     MOE_DTYPE_NONE,
     {MOE_ENC_E2M1, 1, 16, MOE_SCALE_E4M3, false, false, MOE_ACTIVATIONS_PLAIN}},
    {"int4",
     MOE_DTYPE_NONE,
     {MOE_ENC_INT4, 1, 32, MOE_SCALE_BF16, false, false, MOE_ACTIVATIONS_PLAIN}},
};

static void require_ok(struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "gemm_bench: %s\n", st.text);
    exit(1);
}

/* Values in [-1, 1) from a small generator. Speed does not depend on the values, except
 * denormals. */
static void *random_values(enum moe_dtype dtype, size_t n)
{
    char *p = malloc(n * moe_dtype_bytes(dtype));
    uint32_t bits = 1;
    for (size_t i = 0; p != NULL && i < n; i++) {
        bits = bits * 1664525 + 1013904223;
        float f = (float)(int32_t)bits * 0x1p-31f;
        uint16_t b = moe_f32_to_bf16(f);
        if (dtype == MOE_DTYPE_F32)
            memcpy(p + i * sizeof f, &f, sizeof f);
        else
            memcpy(p + i * sizeof b, &b, sizeof b);
    }
    if (p == NULL)
        require_ok(moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory"));
    return p;
}

static void upload_plain(struct moe_layer *layer, enum moe_dtype dtype, size_t count)
{
    void *data = random_values(dtype, count);
    for (uint32_t e = 0; e < layer->local_experts; e++)
        for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++)
            require_ok(
                moe_cpu_layer_upload(layer, w, e, dtype, data, count * moe_dtype_bytes(dtype)));
    free(data);
}

static void upload_packed(struct moe_layer *layer)
{
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++) {
        struct rng r = {1};
        size_t rows, columns;
        moe_weight_shape(&layer->spec, w, &rows, &columns);
        struct random_packed p =
            random_packed(&r, &layer->spec.routed_format, rows, columns, 0.01f);
        for (uint32_t e = 0; e < layer->local_experts; e++)
            require_ok(moe_cpu_layer_upload_packed(layer, w, e, &p.matrix));
        free_packed(&p);
    }
}

static struct moe_layer *make_layer(struct moe_device *device, const struct shape *shape,
                                    const struct weights *kind, uint32_t *experts)
{
    size_t count = (size_t)shape->hidden * shape->intermediate;
    bool packed = kind->dtype == MOE_DTYPE_NONE;
    size_t bytes = packed ? count * moe_encoding_traits(kind->format.encoding).bits / 8
                          : count * moe_dtype_bytes(kind->dtype);
    *experts = (uint32_t)(POOL_BYTES / (3 * bytes)) + 1;
    if (*experts < GROUP)
        *experts = GROUP;
    struct moe_layer_spec spec = {
        .hidden = shape->hidden,
        .experts = *experts,
        .intermediate = shape->intermediate,
        .router = {.top_k = 1, .groups = 1, .topk_group = 1, .group_best = 1, .scale = 1},
        .routed_format = kind->format,
    };
    uint32_t offset[MOE_MAX_EXPERTS + 1];
    uint16_t slot[MOE_MAX_EXPERTS] = {0};
    for (uint32_t e = 0; e <= *experts; e++)
        offset[e] = e;
    struct moe_placement placement = {.experts = *experts, .slots = 1, offset, slot};
    struct moe_layer *layer;
    require_ok(moe_cpu_layer_create(device, &spec, &placement, 0, &layer));
    if (packed)
        upload_packed(layer);
    else
        upload_plain(layer, kind->dtype, count);
    void *data = random_values(MOE_DTYPE_F32, (size_t)*experts * shape->hidden);
    require_ok(moe_cpu_layer_upload(layer, MOE_WEIGHT_ROUTER, 0, MOE_DTYPE_F32, data,
                                    (size_t)*experts * shape->hidden * sizeof(float)));
    free(data);
    require_ok(moe_cpu_layer_finish(layer));
    return layer;
}

/* `m` rows for each of `group` experts, starting at expert `first`. */
struct batch {
    struct moe_rows rows;
    uint32_t expert[GROUP], start[GROUP + 1], count[GROUP];
    float *weight, *hidden, *out;
};

static void make_batch(const struct shape *shape, uint32_t group, uint32_t m, struct batch *b)
{
    uint32_t stride = (m + MOE_ROW_ALIGN - 1) / MOE_ROW_ALIGN * MOE_ROW_ALIGN;
    for (uint32_t g = 0; g < group; g++) {
        b->start[g] = g * stride;
        b->count[g] = m;
    }
    size_t rows = b->start[group] = group * stride;
    b->weight = random_values(MOE_DTYPE_F32, rows);
    b->hidden = random_values(MOE_DTYPE_F32, rows * shape->intermediate);
    b->out = random_values(MOE_DTYPE_F32, rows * shape->hidden);
    b->rows = (struct moe_rows){.local_experts = group,
                                .expert = b->expert,
                                .start = b->start,
                                .count = b->count,
                                .x = random_values(MOE_DTYPE_BF16, rows * shape->hidden),
                                .weight = b->weight};
}

static void free_batch(struct batch *b)
{
    free(b->rows.x);
    free(b->weight);
    free(b->hidden);
    free(b->out);
}

static void bench_line(struct moe_layer *layer, const struct shape *shape, uint32_t group,
                       uint32_t m, double seconds)
{
    struct batch b;
    make_batch(shape, group, m, &b);
    uint64_t best_up = UINT64_MAX, best_down = UINT64_MAX;
    uint64_t end = moe_clock_ns() + (uint64_t)(seconds * 1e9);
    uint32_t next = 0;
    for (uint32_t call = 0; call < 3 || moe_clock_ns() < end; call++) {
        if (next + group > layer->local_experts)
            next = 0;
        for (uint32_t g = 0; g < group; g++)
            b.expert[g] = next++;
        uint64_t t0 = moe_clock_ns();
        require_ok(moe_cpu_gemm_gate_up(layer, MOE_DTYPE_BF16, &b.rows, b.hidden));
        uint64_t t1 = moe_clock_ns();
        require_ok(moe_cpu_gemm_down(layer, MOE_DTYPE_BF16, &b.rows, b.hidden, b.out));
        uint64_t t2 = moe_clock_ns();
        best_up = t1 - t0 < best_up ? t1 - t0 : best_up;
        best_down = t2 - t1 < best_down ? t2 - t1 : best_down;
    }
    double flop = 2.0 * group * m * shape->hidden * shape->intermediate;
    printf("  %u x %4u rows   gate_up %8.1f us %6.1f GFLOP/s   down %8.1f us %6.1f GFLOP/s\n",
           group, m, (double)best_up / 1e3, 2 * flop / (double)best_up, (double)best_down / 1e3,
           flop / (double)best_down);
    fflush(stdout);
    free_batch(&b);
}

/* ------------------------------------------------------------------------ ratios */

static double processor_s(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* One kind of weights, and the expert that is next. */
struct runner {
    struct moe_layer *layer;
    uint32_t experts, next;
    double seconds[MAX_CALLS];
};

static void init_runner(struct runner *r, struct moe_device *device, const struct weights *kind)
{
    r->layer = make_layer(device, &shapes[1], kind, &r->experts);
    r->next = 0;
}

static uint32_t next_expert(struct runner *r)
{
    return r->next = (r->next + 1) % r->experts;
}

static double time_call(struct runner *r, struct batch *b)
{
    b->expert[0] = next_expert(r);
    double begin = processor_s();
    require_ok(moe_cpu_gemm_gate_up(r->layer, MOE_DTYPE_BF16, &b->rows, b->hidden));
    require_ok(moe_cpu_gemm_down(r->layer, MOE_DTYPE_BF16, &b->rows, b->hidden, b->out));
    return processor_s() - begin;
}

/* Each expert once. The first calls after an upload would measure memory that is being written. */
static void warm_up(struct runner *r)
{
    struct batch b;
    make_batch(&shapes[1], 1, 1, &b);
    for (uint32_t i = 0; i < r->experts; i++)
        (void)time_call(r, &b);
    free_batch(&b);
}

/* Bytes of one expert's weights. */
static double expert_bytes(const struct runner *r)
{
    size_t bytes = 0;
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++)
        bytes += r->layer->matrix[w][0].bytes;
    return (double)bytes;
}

/* Reads the next expert's weights and does nothing with them. */
static double time_read(struct runner *r)
{
    static volatile uint64_t result;
    uint32_t expert = next_expert(r);
    uint64_t sum[8] = {0};
    double begin = processor_s();
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN; w++) {
        const struct moe_cpu_matrix *m = &r->layer->matrix[w][expert];
        const uint64_t *from = m->data;
        for (size_t i = 0; i < m->bytes / sizeof *from; i += 8)
            for (size_t j = 0; j < 8; j++)
                sum[j] += from[i + j];
    }
    for (size_t j = 0; j < 8; j++)
        result = result + sum[j];
    return processor_s() - begin;
}

static void ratio_line(struct runner *bf16, struct runner *other, const char *name, uint32_t m,
                       uint32_t calls)
{
    static double ratio[MAX_CALLS], read[MAX_CALLS];
    struct batch b;
    make_batch(&shapes[1], 1, m, &b);
    for (uint32_t i = 0; i < calls; i++) {
        bf16->seconds[i] = time_call(bf16, &b);
        other->seconds[i] = time_call(other, &b);
        ratio[i] = bf16->seconds[i] / other->seconds[i];
        read[i] = time_read(bf16);
    }
    double middle = median(ratio, calls); /* sorts */
    printf("  %-6s %4u rows   %.2f   (quartiles %.2f, %.2f)   %5.1f GB/s; bf16 %5.1f, read %5.1f\n",
           name, m, middle, ratio[calls / 4], ratio[calls * 3 / 4],
           expert_bytes(other) / median(other->seconds, calls) * 1e-9,
           expert_bytes(bf16) / median(bf16->seconds, calls) * 1e-9,
           expert_bytes(bf16) / median(read, calls) * 1e-9);
    fflush(stdout);
    free_batch(&b);
}

/* `only`: the kind, or NULL for all. */
static void run_ratios(const struct moe_cpu_isa *isa, uint32_t calls, const char *only)
{
    static const uint32_t row_counts[] = {1, 2, 4, 8, 12, 16, 32, 64, 180};
    static struct runner bf16, other;
    struct moe_device_config config = {.threads = 1};
    struct moe_device *device;
    require_ok(moe_cpu_device_open_isa(&config, isa, &device));
    init_runner(&bf16, device, &kinds[0]);
    printf("%s, %s: time of bf16 over that of\n", isa->name, shapes[1].model);
    for (size_t k = 2; k < sizeof kinds / sizeof *kinds; k++) {
        if (only != NULL && strcmp(only, kinds[k].name) != 0)
            continue;
        init_runner(&other, device, &kinds[k]);
        warm_up(&bf16);
        warm_up(&other);
        for (size_t r = 0; r < sizeof row_counts / sizeof *row_counts; r++)
            ratio_line(&bf16, &other, kinds[k].name, row_counts[r], calls);
        moe_cpu_layer_destroy(other.layer);
    }
    moe_cpu_layer_destroy(bf16.layer);
    moe_cpu_device_close(device);
}

static int main_ratios(int argc, char **argv)
{
    int calls = argc > 2 ? atoi(argv[2]) : 15;
    uint32_t isas;
    const struct moe_cpu_isa *const *isa = moe_cpu_isa_list(&isas);
    if (calls < 1 || calls > MAX_CALLS)
        require_ok(moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "CALLS: 1 to %d", MAX_CALLS));
    for (uint32_t i = 0; i < isas; i++)
        if (argc > 3 ? strcmp(argv[3], isa[i]->name) == 0 : i == isas - 1)
            run_ratios(isa[i], (uint32_t)calls, argc > 4 ? argv[4] : NULL);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "ratio") == 0)
        return main_ratios(argc, argv);
    static const uint32_t row_counts[] = {1, 8, 64, 512};
    struct moe_device_config config = {.threads = argc > 1 ? (uint32_t)atoi(argv[1]) : 0};
    double seconds = argc > 2 ? atof(argv[2]) : 0.3;
    uint32_t isas;
    const struct moe_cpu_isa *const *isa = moe_cpu_isa_list(&isas);
    for (uint32_t i = 0; i < isas; i++) {
        if (argc > 3 && strcmp(argv[3], isa[i]->name) != 0)
            continue;
        struct moe_device *device;
        struct moe_device_info info;
        require_ok(moe_cpu_device_open_isa(&config, isa[i], &device));
        moe_cpu_device_info(device, &info);
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
                uint32_t experts;
                if (argc > 4 && strcmp(argv[4], kinds[k].name) != 0)
                    continue;
                struct moe_layer *layer = make_layer(device, &shapes[s], &kinds[k], &experts);
                printf("%s; %s, hidden %u, intermediate %u, %s weights of %u experts\n", info.name,
                       shapes[s].model, shapes[s].hidden, shapes[s].intermediate, kinds[k].name,
                       experts);
                for (size_t r = 0; r < sizeof row_counts / sizeof *row_counts; r++)
                    bench_line(layer, &shapes[s], 1, row_counts[r], seconds);
                bench_line(layer, &shapes[s], GROUP, 1, seconds);
                moe_cpu_layer_destroy(layer);
            }
        }
        moe_cpu_device_close(device);
    }
    return 0;
}
