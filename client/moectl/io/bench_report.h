/* SPDX-License-Identifier: Apache-2.0 */
/* Figures of moectl bench, as a table or as JSON. */
#ifndef MOECTL_BENCH_REPORT_H
#define MOECTL_BENCH_REPORT_H

#include "moe/client.h"
#include "moectl/io/histogram.h"

#include <stdbool.h>

enum { MOECTL_BENCH_STAGES = 13, MOECTL_BENCH_RUNS_MAX = 16 };

/* Figures of one concurrency. The histograms hold ns. */
struct moectl_bench_run {
    const char *transport; /* NULL: all runs have the same */
    uint32_t concurrency;  /* open loop: the most requests in flight */
    double rate;           /* open loop: intended requests a second; 0 = closed loop */
    double seconds;        /* of the measured window */
    uint64_t errors;
    struct moectl_histogram latency;         /* at the client; open loop: from the intended start */
    struct moectl_histogram overhead;        /* latency minus the step's own time */
    struct moectl_histogram server_overhead; /* on the server, minus the step's own time */
    struct moectl_histogram beyond_layer;    /* latency minus the layer's time */
    struct moectl_histogram stages[MOECTL_BENCH_STAGES];
    uint64_t step_tokens; /* sum over requests */
};

struct moectl_bench_report {
    const struct moe_client_info *info;
    const char *dtype, *mode;
    bool spread;
    uint32_t layer, tokens, hidden;
    uint64_t seed;
    struct moectl_bench_run *runs[MOECTL_BENCH_RUNS_MAX];
    size_t run_count;
    double slo_p99_ms,
        highest_rate; /* of a search: the limit, the highest rate within it. 0 = none */
};

/* Adds one answered request. `layer_ns`: the stages from router to combine; 0 = their sum. */
void moectl_bench_record(struct moectl_bench_run *run, uint64_t latency_ns,
                         const struct moe_client_stages *stages, uint64_t layer_ns);

/* Both return an exit code. */
int moectl_bench_print_json(const struct moectl_bench_report *report);
int moectl_bench_print_table(const struct moectl_bench_report *report);

#endif
