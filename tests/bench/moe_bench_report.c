/* SPDX-License-Identifier: Apache-2.0 */
/* One table row and one line of JSON per measurement; see moe_bench.h. */
#include "moe_bench.h"

const char *bench_routing_name(enum bench_routing routing)
{
    switch (routing) {
    case BENCH_ROUTER: return "router";
    case BENCH_UNIFORM: return "uniform";
    case BENCH_ZIPF: return "zipf";
    case BENCH_ONE_EXPERT: return "one-expert";
    case BENCH_ONE_SLOT: return "one-slot";
    case BENCH_ROUTINGS: break;
    }
    return "?";
}

/* Largest value of a field over all slots. */
#define LARGEST(b, field) largest(b, offsetof(struct bench_slot_report, field))

static double largest(const struct bench *b, size_t offset)
{
    double most = 0;
    for (uint32_t s = 0; s < b->member->slots; s++) {
        const char *report = (const char *)&b->plan->report[s];
        double value = *(const double *)(const void *)(report + offset);
        most = value > most ? value : most;
    }
    return most;
}

/* The slot that the others wait for. */
static uint32_t busiest_slot(const struct bench *b)
{
    uint32_t busiest = 0;
    for (uint32_t s = 1; s < b->member->slots; s++)
        if (b->plan->report[s].gemm_us > b->plan->report[busiest].gemm_us)
            busiest = s;
    return busiest;
}

void bench_print_header(void)
{
    printf("times in us: medians of the slowest slot; stages of the slot with most GEMM time\n"
           "%-13s %5s %-10s %9s %9s %9s %9s %6s %8s |",
           "shape", "T", "routing", "layer", "wall", "alone", "gemm", "over", "enqueue");
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        printf(" %8s", moe_stage_names[i]);
    printf(" | error\n");
    fflush(stdout);
}

void bench_print_layer(const struct bench *b)
{
    const struct moe_layer_spec *spec = &b->shape->spec;
    double upload = b->plan->report[0].upload_gb_s, pinned = b->plan->report[0].pinned_gb_s;
    for (uint32_t s = 1; s < b->member->slots; s++) {
        const struct bench_slot_report *r = &b->plan->report[s];
        upload = r->upload_gb_s < upload ? r->upload_gb_s : upload;
        pinned = r->pinned_gb_s < pinned ? r->pinned_gb_s : pinned;
    }
    printf("%s: H %u, I %u, E %u on %u slots, K %u, shared %u; weights came in at %.1f GB/s, one "
           "pinned copy at %.1f GB/s (slowest slot, all at once)\n",
           b->shape->name, spec->hidden, spec->intermediate, spec->experts, b->member->slots,
           spec->router.top_k, spec->shared_intermediate, upload, pinned);
    fflush(stdout);
}

static void print_row(const struct bench *b, uint32_t tokens, enum bench_routing routing)
{
    const struct bench_slot_report *r = &b->plan->report[busiest_slot(b)];
    double layer = LARGEST(b, layer_us), gemm = LARGEST(b, gemm_us);
    printf("%-13s %5u %-10s %9.1f %9.1f %9.1f %9.1f %6.3f %8.1f |", b->shape->name, tokens,
           bench_routing_name(routing), layer, LARGEST(b, wall_us), LARGEST(b, alone_us), gemm,
           layer / gemm, LARGEST(b, enqueue_us));
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        printf(" %8.1f", r->stage_us[i]);
    printf(" | %.1e", LARGEST(b, exact_error));
    if (LARGEST(b, oracle_error) > 0)
        printf(" (oracle %.1e)", LARGEST(b, oracle_error));
    printf("\n");
    fflush(stdout);
}

static void write_stages(const char *name, const double *us, FILE *to)
{
    fprintf(to, ", \"%s\": {", name);
    for (int i = 0; i < MOE_STAGE_COUNT; i++)
        fprintf(to, "%s\"%s\": %.2f", i > 0 ? ", " : "", moe_stage_names[i], us[i]);
    fprintf(to, "}");
}

static void write_slot(const struct bench_slot_report *r, FILE *to)
{
    fprintf(to,
            "{\"layer_us\": %.2f, \"wall_us\": %.2f, \"alone_us\": %.2f, \"alone_layer_us\": %.2f, "
            "\"gemm_us\": %.2f, \"enqueue_us\": %.2f, \"rows\": %llu, \"upload_gb_s\": %.2f, "
            "\"pinned_gb_s\": %.2f, \"exact_error\": %.3e",
            r->layer_us, r->wall_us, r->alone_us, r->alone_layer_us, r->gemm_us, r->enqueue_us,
            (unsigned long long)r->rows, r->upload_gb_s, r->pinned_gb_s, r->exact_error);
    write_stages("stages_us", r->stage_us, to);
    write_stages("alone_stages_us", r->alone_stage_us, to);
    fprintf(to, "}");
}

static void write_json(const struct bench *b, uint32_t tokens, enum bench_routing routing, FILE *to)
{
    const struct moe_layer_spec *spec = &b->shape->spec;
    double layer = LARGEST(b, layer_us), gemm = LARGEST(b, gemm_us);
    uint32_t slots = b->member->slots;
    uint32_t sources = b->plan->sources < slots ? (uint32_t)b->plan->sources : slots;
    fprintf(to,
            "{\"who\": \"moed\", \"backend\": \"%s\", \"shape\": \"%s\", \"weights\": \"%s\", "
            "\"hidden\": %u, "
            "\"intermediate\": %u, \"experts\": %u, \"top_k\": %u, \"slots\": %u, \"sources\": %u, "
            "\"tokens\": %u, "
            "\"routing\": \"%s\", \"repeats\": %llu, \"layer_us\": %.2f, \"wall_us\": %.2f, "
            "\"alone_us\": %.2f, \"alone_layer_us\": %.2f, \"gemm_us\": %.2f, \"overhead\": %.4f, "
            "\"enqueue_us\": %.2f, \"slot\": [",
            b->plan->backend->name, b->shape->name, b->plan->weights, spec->hidden,
            spec->intermediate, spec->experts, spec->router.top_k, slots, sources, tokens,
            bench_routing_name(routing), (unsigned long long)b->plan->repeats, layer,
            LARGEST(b, wall_us), LARGEST(b, alone_us), LARGEST(b, alone_layer_us), gemm,
            layer / gemm, LARGEST(b, enqueue_us));
    for (uint32_t s = 0; s < slots; s++) {
        fprintf(to, "%s", s > 0 ? ", " : "");
        write_slot(&b->plan->report[s], to);
    }
    fprintf(to, "]}\n");
    fflush(to);
}

void bench_print(const struct bench *b, uint32_t tokens, enum bench_routing routing, FILE *json)
{
    print_row(b, tokens, routing);
    if (json != NULL)
        write_json(b, tokens, routing, json);
}

/* -------------------------------------------------------------------- backward */

static const char *const kind_names[BENCH_BACKWARD_KINDS] = {
    "overwritten", "accumulated", "overwritten, from a retained forward",
    "accumulated, from a retained forward"};

/* The slot with the longest passes of this kind. */
static uint32_t slowest_slot(const struct bench *b, int kind)
{
    uint32_t slowest = 0;
    for (uint32_t s = 1; s < b->member->slots; s++)
        if (b->plan->report[s].backward.layer_us[kind] >
            b->plan->report[slowest].backward.layer_us[kind])
            slowest = s;
    return slowest;
}

static void write_backward(const struct bench *b, uint32_t tokens, int kind, FILE *to)
{
    const struct bench_backward_report *r = &b->plan->report[slowest_slot(b, kind)].backward;
    double forward = LARGEST(b, layer_us);
    fprintf(to,
            "{\"who\": \"moed\", \"backend\": \"%s\", \"shape\": \"%s\", \"experts\": %u, "
            "\"slots\": %u, \"tokens\": %u, \"pass\": \"backward\", \"gradients\": \"%s\", "
            "\"on_tensor_cores\": %s, \"rows\": %llu, \"layer_us\": %.2f, \"wall_us\": %.2f, "
            "\"forward_layer_us\": %.2f, \"forward_alone_us\": %.2f, "
            "\"forward_retaining_us\": %.2f, \"ratio\": %.4f, \"error\": %.3e, \"stages_us\": {",
            b->plan->backend->name, b->shape->name, b->shape->spec.experts, b->member->slots,
            tokens, kind_names[kind], r->on_tensor_cores ? "true" : "false",
            (unsigned long long)r->rows, r->layer_us[kind], r->wall_us[kind], forward,
            LARGEST(b, backward.plain_us), LARGEST(b, backward.retaining_us),
            r->layer_us[kind] / forward, LARGEST(b, backward.error));
    for (int i = 0; i < MOE_BACKWARD_STAGE_COUNT; i++)
        fprintf(to, "%s\"%s\": %.2f", i > 0 ? ", " : "", moe_backward_stage_names[i],
                r->stage_us[kind][i]);
    fprintf(to, "}}\n");
    fflush(to);
}

void bench_print_backward(const struct bench *b, uint32_t tokens, FILE *json)
{
    double forward = LARGEST(b, layer_us);
    int kinds = bench_all_retain(b) ? BENCH_BACKWARD_KINDS : BENCH_FROM_RETAINED;
    printf("  forward, one in flight: layer %.1f, %.1f where it retains %.1f MiB\n",
           LARGEST(b, backward.plain_us), LARGEST(b, backward.retaining_us),
           LARGEST(b, backward.retained_mib));
    for (int kind = 0; kind < kinds; kind++) {
        const struct bench_backward_report *r = &b->plan->report[slowest_slot(b, kind)].backward;
        printf("  backward, gradients %s: layer %.1f, %.3f x forward, wall %.1f |",
               kind_names[kind], r->layer_us[kind], r->layer_us[kind] / forward, r->wall_us[kind]);
        for (int i = 0; i < MOE_BACKWARD_STAGE_COUNT; i++)
            printf(" %s %.1f", moe_backward_stage_names[i], r->stage_us[kind][i]);
        printf(" | %.1e%s\n", LARGEST(b, backward.error),
               r->on_tensor_cores ? ", tensor cores" : "");
        fflush(stdout);
        if (json != NULL)
            write_backward(b, tokens, kind, json);
    }
}
