/* SPDX-License-Identifier: Apache-2.0 */
/* A whole MoE layer on every backend: its times, by stage, and whether its results are correct.
 *
 *     moe_bench --backend cuda --slots 2 [--shapes deepseek-v3,qwen3-30b] [--tokens 1,128,4096]
 *               [--routings router,zipf] [--json FILE]
 *
 * Forks one process per slot (one GPU each). It checks every line before and after timing, and
 * fails if a number is wrong. Times are medians of the slowest slot:
 *
 *   layer   device time of one step from its router to its combine, two steps in flight
 *   wall    time per step, two in flight, including copies from and to host memory
 *   alone   one step from step_enqueue to its result, with nothing else in flight
 *   gemm    gemm1 + gemm2 + shared; overhead = layer / gemm, both of the slowest slot
 *   enqueue the calling thread's time in step_enqueue
 *
 * --backward also times backward passes, and compares them with the line's forward pass. Gradients
 * begin as zeros, or add up.
 *
 * JSON: one object per line, appended to FILE. */
#include "moe_bench.h"

#include "daemon/options.h"

#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { BUDGET_MS = 20000 };

void bench_require(const struct bench *b, const char *what, struct moe_status st)
{
    if (!moe_failed(&st))
        return;
    fprintf(stderr, "slot %u: %s: %s: %s\n", b->member->slot, what, moe_code_name(st.code),
            st.text);
    __atomic_store_n(&b->member->board->failed, 1, __ATOMIC_RELEASE);
    exit(1);
}

void *bench_alloc(const struct bench *b, size_t bytes)
{
    void *p = calloc(1, bytes > 0 ? bytes : 1);
    if (p == NULL)
        bench_require(b, "memory",
                      moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                "no memory for %zu bytes", bytes));
    return p;
}

void bench_meet(struct bench *b)
{
    if (!board_barrier(b->member, BENCH_BARRIER_MS))
        bench_require(b, "barrier",
                      moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "another slot gave up"));
}

/* Whether a comma-separated list contains the name; "all" contains every name but the toy shape. */
static bool listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    if (strcmp(list, "all") == 0)
        return strcmp(name, "tiny") != 0;
    for (const char *at = list; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, name, n) == 0 && (at[n] == ',' || at[n] == '\0'))
            return true;
    }
    return false;
}

static void join(struct bench *b)
{
    const struct bench_plan *plan = b->plan;
    struct moe_session_config config = member_session(b->member, 1, BUDGET_MS);
    config.max_tokens = 1;
    for (uint32_t i = 0; i < plan->lengths; i++)
        while (config.max_tokens < plan->length[i] || config.max_tokens < BENCH_SAMPLES)
            config.max_tokens *= 2;
    config.max_hidden = b->shape->spec.hidden;
    config.max_top_k = b->shape->spec.router.top_k;
    config.max_experts = b->shape->spec.experts;
    config.training = plan->backward;
    bench_require(b, "join", plan->backend->session_join(b->device, &config, &b->session));
}

/* Measures one line and its backward passes. */
static bool run_line(struct bench *b, uint32_t tokens, enum bench_routing routing, FILE *json)
{
    bool backward = b->plan->backward && routing == BENCH_ROUTER;
    bool good = bench_measure(b, tokens, routing);
    if (!good)
        __atomic_store_n(&b->member->board->failed, 1, __ATOMIC_RELEASE);
    bench_meet(b);
    if (b->member->slot == 0)
        bench_print(b, tokens, routing, json);
    bench_meet(b);
    if (!backward)
        return good;
    good = bench_measure_backward(b, tokens);
    if (!good)
        __atomic_store_n(&b->member->board->failed, 1, __ATOMIC_RELEASE);
    bench_meet(b);
    if (b->member->slot == 0)
        bench_print_backward(b, tokens, json);
    bench_meet(b);
    return good;
}

static bool run_shape(struct bench *b, FILE *json)
{
    const struct bench_plan *plan = b->plan;
    bool good = true;
    bench_make_layer(b);
    join(b);
    bench_meet(b);
    if (b->member->slot == 0)
        bench_print_layer(b);
    for (uint32_t r = 0; r < BENCH_ROUTINGS; r++) {
        enum bench_routing routing = (enum bench_routing)r;
        if (!listed(plan->routings, bench_routing_name(routing)))
            continue;
        for (uint32_t i = 0; i < plan->lengths && good; i++)
            good = run_line(b, plan->length[i], routing, json);
    }
    plan->backend->session_leave(b->session);
    plan->backend->layer_destroy(b->layer);
    return good;
}

static int run_member(struct member *m)
{
    const struct bench_plan *plan = m->ctx;
    struct bench b = {.plan = plan, .member = m};
    struct moe_device_config config = {.ordinal = (int)m->slot, .threads = plan->slots > 1};
    FILE *json = plan->json != NULL && m->slot == 0 ? fopen(plan->json, "a") : NULL;
    if (plan->json != NULL && m->slot == 0 && json == NULL) {
        perror(plan->json);
        return 1;
    }
    bench_require(&b, "device", plan->backend->device_open(&config, &b.device));
    if (m->slot == 0)
        bench_print_header();
    bool good = true;
    for (uint32_t i = 0; i < bench_shape_count && good; i++) {
        struct bench_shape shape = bench_shapes[i];
        if (!listed(plan->shapes, shape.name))
            continue;
        if (plan->experts != 0)
            shape.spec.experts = (uint32_t)plan->experts;
        else if (plan->like_slots != 0)
            shape.spec.experts = (uint32_t)(shape.spec.experts * plan->slots / plan->like_slots);
        bench_set_format(plan, &shape.spec);
        b.shape = &shape;
        good = run_shape(&b, json);
    }
    plan->backend->device_close(b.device);
    if (json != NULL && fclose(json) != 0)
        good = false;
    return good ? 0 : 1;
}

static bool parse_lengths(const char *text, struct bench_plan *plan)
{
    while (plan->lengths < BENCH_MAX_LENGTHS) {
        char *end;
        unsigned long n = strtoul(text, &end, 10);
        if (end == text || n < 1 || n > 65536)
            return false;
        plan->length[plan->lengths++] = (uint32_t)n;
        if (*end == '\0')
            return true;
        if (*end != ',')
            return false;
        text = end + 1;
    }
    return false;
}

static bool names_something(const struct bench_plan *plan)
{
    bool shape = false, routing = false;
    for (uint32_t i = 0; i < bench_shape_count; i++)
        shape = shape || listed(plan->shapes, bench_shapes[i].name);
    for (uint32_t i = 0; i < BENCH_ROUTINGS; i++)
        routing = routing || listed(plan->routings, bench_routing_name((enum bench_routing)i));
    return shape && routing;
}

int main(int argc, char **argv)
{
    uint64_t domain_size = 0;
    const char *backend = "cuda", *transport = "auto", *lengths = "1,32,128,512,4096";
    struct bench_plan plan = {.shapes = "all",
                              .routings = "router",
                              .weights = "bf16",
                              .slots = 2,
                              .sources = MOE_MAX_SLOTS,
                              .repeats = 50,
                              .oracle_tokens = 1,
                              .timeout_s = 3600};
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &backend, 0, 0, "NAME", "cuda or cpu"},
        {"slots", 'n', MOE_OPTION_UINT, &plan.slots, 1, MOE_MAX_SLOTS, "N", "processes (GPUs)"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME",
         "how rows travel between GPUs: auto, nvlink or network"},
        {"domain-size", 0, MOE_OPTION_UINT, &domain_size, 0, MOE_MAX_SLOTS, "N",
         "N slots each count as a host; 0 = all are on one"},
        {"shapes", 's', MOE_OPTION_STRING, &plan.shapes, 0, 0, "LIST",
         "deepseek-v3, qwen3-30b, mixtral-8x7b, gpt-oss-120b, tiny, or all"},
        {"experts", 'e', MOE_OPTION_UINT, &plan.experts, 0, MOE_MAX_EXPERTS, "E",
         "experts of the layer instead of the preset's, 0 = the preset's"},
        {"like-slots", 'l', MOE_OPTION_UINT, &plan.like_slots, 0, MOE_MAX_SLOTS, "N",
         "as many experts per slot as N slots would have; 0 = all experts on the slots there are"},
        {"sources", 0, MOE_OPTION_UINT, &plan.sources, 1, MOE_MAX_SLOTS, "N",
         "only the first N slots bring tokens, as when clients ask N workers"},
        {"tokens", 't', MOE_OPTION_STRING, &lengths, 0, 0, "LIST", "tokens per slot"},
        {"routings", 'r', MOE_OPTION_STRING, &plan.routings, 0, 0, "LIST",
         "router, uniform, zipf, one-expert, one-slot, or all"},
        {"repeats", 'c', MOE_OPTION_UINT, &plan.repeats, 2, BENCH_MAX_REPEATS, "R",
         "timed steps per line"},
        {"oracle-tokens", 'o', MOE_OPTION_UINT, &plan.oracle_tokens, 0, BENCH_SAMPLES, "M",
         "sampled tokens that slot 0 also computes in double precision, on the first line"},
        {"weights", 0, MOE_OPTION_CHOICE, &plan.weights, 0, 0, "bf16|fp8|w8a8|mxfp4",
         "experts in BF16, in FP8 blocks of 128 x 128, those with FP8 activations, or in MXFP4"},
        {"backward", 0, MOE_OPTION_BOOL, &plan.backward, 0, 0, NULL, "backward passes as well"},
        {"json", 'j', MOE_OPTION_STRING, &plan.json, 0, 0, "FILE", "appends one object a line"},
        {"timeout", 0, MOE_OPTION_UINT, &plan.timeout_s, 1, 86400, "SECONDS", "watchdog"},
    };
    size_t count = sizeof options / sizeof *options;
    struct moe_options parsed;
    int first;
    struct moe_status st = moe_options_parse(options, count, NULL, argc, argv, &first, &parsed);
    if (!moe_failed(&st))
        st = moe_backend_find(backend, &plan.backend);
    if (moe_failed(&st) || (plan.backward && plan.backend->training == NULL) ||
        !parse_lengths(lengths, &plan) || !names_something(&plan) || first != argc) {
        fprintf(stderr, "%s\n",
                moe_failed(&st) ? st.text : "a list names nothing, or a token count is impossible");
        moe_options_print(stderr, options, count, SIZE_MAX);
        return 2;
    }
    group_set(plan.backend, "transport", transport);
    group_domain_size = (uint32_t)domain_size;
    size_t bytes = MOE_MAX_SLOTS * sizeof *plan.report;
    plan.report = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (plan.report == MAP_FAILED || !bench_pool_make(plan.weights, &plan.pool)) {
        fprintf(stderr, "no memory for weights\n");
        return 1;
    }
    struct group group;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&group, (uint32_t)plan.slots, run_member, &plan);
    bool good = group_finish(&group, (uint32_t)plan.timeout_s, status);
    moe_options_free(&parsed);
    printf("%s\n", good ? "all results right" : "FAILED");
    return good ? 0 : 1;
}
