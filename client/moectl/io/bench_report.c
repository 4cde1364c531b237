/* SPDX-License-Identifier: Apache-2.0 */
/* See bench_report.h. Times are stored in ns and shown in us. */
#include "moectl/io/bench_report.h"

#include "moectl/io/cli.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>

enum stage {
    QUEUE,
    COPY_IN,
    ROUTER,
    PREPARE,
    DISPATCH,
    GEMM1,
    GEMM2,
    SHARED,
    COMBINE,
    LAYER,
    STEP,
    COPY_OUT,
    SERVER,
    STAGES
};
_Static_assert((int)STAGES == (int)MOECTL_BENCH_STAGES, "the histograms of a run");

/* The stages of struct moe_client_stages, by the names under which they are reported. */
static const struct {
    const char *name;  /* in JSON */
    const char *title; /* in the table */
    size_t offset;
} stage_table[MOECTL_BENCH_STAGES] = {
    [QUEUE] = {"queue", "queue", offsetof(struct moe_client_stages, queue_ns)},
    [COPY_IN] = {"copyIn", "copy in", offsetof(struct moe_client_stages, copy_in_ns)},
    [ROUTER] = {"router", "router", offsetof(struct moe_client_stages, router_ns)},
    [PREPARE] = {"prepare", "prepare", offsetof(struct moe_client_stages, prepare_ns)},
    [DISPATCH] = {"dispatch", "dispatch", offsetof(struct moe_client_stages, dispatch_ns)},
    [GEMM1] = {"gemm1", "gemm1", offsetof(struct moe_client_stages, gemm1_ns)},
    [GEMM2] = {"gemm2", "gemm2", offsetof(struct moe_client_stages, gemm2_ns)},
    [SHARED] = {"shared", "shared", offsetof(struct moe_client_stages, shared_ns)},
    [COMBINE] = {"combine", "combine", offsetof(struct moe_client_stages, combine_ns)},
    [LAYER] = {"layer", "layer", 0}, /* no field: the sum of those from router to combine */
    [STEP] = {"step", "step", offsetof(struct moe_client_stages, step_ns)},
    [COPY_OUT] = {"copyOut", "copy out", offsetof(struct moe_client_stages, copy_out_ns)},
    [SERVER] = {"server", "server", offsetof(struct moe_client_stages, server_ns)},
};

static uint64_t minus(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static uint64_t sum_of(const struct moe_client_stages *s)
{
    return s->router_ns + s->prepare_ns + s->dispatch_ns + s->gemm1_ns + s->gemm2_ns +
           s->shared_ns + s->combine_ns;
}

void moectl_bench_record(struct moectl_bench_run *run, uint64_t latency_ns,
                         const struct moe_client_stages *stages, uint64_t layer_ns)
{
    if (layer_ns == 0)
        layer_ns = sum_of(stages);
    moectl_histogram_add(&run->latency, latency_ns);
    moectl_histogram_add(&run->overhead, minus(latency_ns, stages->step_ns));
    moectl_histogram_add(&run->server_overhead, minus(stages->server_ns, stages->step_ns));
    moectl_histogram_add(&run->beyond_layer, minus(latency_ns, layer_ns));
    run->step_tokens += stages->step_tokens;
    for (size_t i = 0; i < MOECTL_BENCH_STAGES; i++) {
        const uint64_t *field = (const uint64_t *)((const char *)stages + stage_table[i].offset);
        uint64_t ns = i == LAYER ? layer_ns : *field;
        moectl_histogram_add(&run->stages[i], ns);
    }
}

/* To 1 / `parts`: more digits than that are noise. */
static double round_to(double value, double parts)
{
    return round(value * parts) / parts;
}

static double us(const struct moectl_histogram *h, double percent)
{
    return (double)moectl_histogram_percentile(h, percent) / 1000.0;
}

static double mean_us(const struct moectl_histogram *h)
{
    return round_to(moectl_histogram_mean(h) / 1000.0, 1000);
}

static double requests_per_s(const struct moectl_bench_run *run)
{
    return run->seconds > 0 ? round_to((double)run->latency.count / run->seconds, 100) : 0;
}

static double step_tokens_mean(const struct moectl_bench_run *run)
{
    return run->latency.count > 0
               ? round_to((double)run->step_tokens / (double)run->latency.count, 100)
               : 0;
}

/* ------------------------------------------------------------------ JSON */

static json_t *distribution(const struct moectl_histogram *h)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f}", "mean", mean_us(h), "p50", us(h, 50), "p90",
                     us(h, 90), "p99", us(h, 99), "max", (double)h->max / 1000.0);
}

static json_t *stages_to_json(const struct moectl_bench_run *run)
{
    json_t *stages = json_object();
    for (size_t i = 0; i < MOECTL_BENCH_STAGES; i++) {
        const struct moectl_histogram *h = &run->stages[i];
        json_object_set_new(
            stages, stage_table[i].name,
            json_pack("{s:f, s:f, s:f}", "mean", mean_us(h), "p50", us(h, 50), "p99", us(h, 99)));
    }
    return stages;
}

static json_t *run_to_json(const struct moectl_bench_report *report,
                           const struct moectl_bench_run *run)
{
    char requests[24], errors[24];
    snprintf(requests, sizeof requests, "%" PRIu64, run->latency.count);
    snprintf(errors, sizeof errors, "%" PRIu64, run->errors);
    double rate = requests_per_s(run);
    return json_pack("{s:s*, s:f, s:I, s:s, s:s, s:f, s:f, s:f, s:f, s:o, s:o, s:o, s:o, s:o}",
                     "transport", run->transport, "rate", run->rate, "concurrency",
                     (json_int_t)run->concurrency, "requests", requests, "errors", errors,
                     "durationS", round_to(run->seconds, 1000), "requestsPerS", rate, "tokensPerS",
                     rate * report->tokens, "stepTokensMean", step_tokens_mean(run), "latencyUs",
                     distribution(&run->latency), "overheadUs", distribution(&run->overhead),
                     "serverOverheadUs", distribution(&run->server_overhead), "beyondLayerUs",
                     distribution(&run->beyond_layer), "stagesUs", stages_to_json(run));
}

int moectl_bench_print_json(const struct moectl_bench_report *report)
{
    const struct moe_client_info *info = report->info;
    char seed[24];
    snprintf(seed, sizeof seed, "%" PRIu64, report->seed);
    json_t *runs = json_array();
    for (size_t i = 0; i < report->run_count; i++)
        json_array_append_new(runs, run_to_json(report, report->runs[i]));
    json_t *document = moectl_document("BenchResult");
    json_t *fields = json_pack(
        "{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:s, s:b, s:s, s:o}", "model", info->model,
        "family", info->family, "backend", info->backend, "workers", (json_int_t)info->worker_count,
        "layer", (json_int_t)report->layer, "tokens", (json_int_t)report->tokens, "hidden",
        (json_int_t)report->hidden, "dtype", report->dtype, "mode", report->mode, "spread",
        (int)report->spread, "seed", seed, "runs", runs);
    if (report->slo_p99_ms > 0) {
        json_object_set_new(fields, "sloP99Ms", json_real(report->slo_p99_ms));
        json_object_set_new(fields, "highestRate", json_real(report->highest_rate));
    }
    if (fields == NULL || document == NULL || json_object_update(document, fields) != 0) {
        json_decref(document);
        document = NULL;
    }
    json_decref(fields);
    return moectl_print(document);
}

/* ------------------------------------------------------------------ table */

static void print_distribution(const char *name, const struct moectl_histogram *h)
{
    moectl_put("  %-16s %10.1f %10.1f %10.1f %10.1f %10.1f\n", name, mean_us(h), us(h, 50),
               us(h, 90), us(h, 99), (double)h->max / 1000.0);
}

/* False for requests through shared memory: their answers do not have the parts of the layer. */
static bool has_parts_of_layer(const struct moectl_bench_run *run)
{
    for (size_t i = ROUTER; i <= COMBINE; i++)
        if (run->stages[i].max > 0)
            return true;
    return false;
}

static void print_run(const struct moectl_bench_report *report, const struct moectl_bench_run *run)
{
    double rate = requests_per_s(run);
    moectl_put("\n");
    if (run->transport != NULL)
        moectl_put("%s, ", run->transport);
    if (run->rate > 0)
        moectl_put("rate %.1f requests/s, ", run->rate);
    moectl_put("concurrency %" PRIu32
               ": %.0f requests/s, %.0f tokens/s, %.1f tokens per step, %" PRIu64
               " errors in %.1f s\n",
               run->concurrency, rate, rate * report->tokens, step_tokens_mean(run), run->errors,
               run->seconds);
    moectl_put("  %-16s %10s %10s %10s %10s %10s\n", "microseconds", "mean", "p50", "p90", "p99",
               "max");
    print_distribution("latency", &run->latency);
    print_distribution("overhead", &run->overhead);
    print_distribution("server overhead", &run->server_overhead);
    print_distribution("beyond layer", &run->beyond_layer);
    bool parts = has_parts_of_layer(run);
    for (size_t i = 0; i < MOECTL_BENCH_STAGES; i++)
        if (parts || i < ROUTER || i > COMBINE)
            print_distribution(stage_table[i].title, &run->stages[i]);
}

/* Several transports, one a line. */
static void print_comparison(const struct moectl_bench_report *report)
{
    moectl_put("\n");
    moectl_put("%-9s %3s %10s %10s %10s %10s %10s %10s %10s %12s\n", "p50, us", "C", "latency",
               "p99", "server", "step", "layer", "copy in", "copy out", "beyond layer");
    for (size_t i = 0; i < report->run_count; i++) {
        const struct moectl_bench_run *r = report->runs[i];
        moectl_put("%-9s %3" PRIu32 " %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %12.1f\n",
                   r->transport, r->concurrency, us(&r->latency, 50), us(&r->latency, 99),
                   us(&r->stages[SERVER], 50), us(&r->stages[STEP], 50), us(&r->stages[LAYER], 50),
                   us(&r->stages[COPY_IN], 50), us(&r->stages[COPY_OUT], 50),
                   us(&r->beyond_layer, 50));
    }
}

int moectl_bench_print_table(const struct moectl_bench_report *report)
{
    const struct moe_client_info *info = report->info;
    moectl_put("%s layer %" PRIu32 ", %" PRIu32 " token%s of %" PRIu32
               " (%s, %s%s), %zu %s worker%s\n",
               info->model, report->layer, report->tokens, report->tokens == 1 ? "" : "s",
               report->hidden, report->dtype, report->mode, report->spread ? ", spread" : "",
               info->worker_count, info->backend, info->worker_count == 1 ? "" : "s");
    for (size_t i = 0; i < report->run_count; i++)
        print_run(report, report->runs[i]);
    if (report->run_count > 0 && report->runs[0]->transport != NULL)
        print_comparison(report);
    moectl_put("\n");
    if (report->slo_p99_ms > 0)
        moectl_put("highest rate with a p99 of at most %g ms: %.1f requests/s\n",
                   report->slo_p99_ms, report->highest_rate);
    moectl_put(
        "layer = router to combine; step contains it; server contains queue, copy in, step\n");
    moectl_put("and copy out; latency contains server. overhead = latency - step; server\n");
    moectl_put("overhead = server - step; beyond layer = latency - layer.\n");
    return MOECTL_OK;
}
