/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes per leg and modelled times of a layer on several nodes. See domain_model.h; figures are in
 * results/domains.md.
 *
 *   domain_model --record FILE [--shape S] [--record-tokens N] [--seed N]
 *   domain_model --check                               one node against measured figures
 *   domain_model [--shape S] [--tokens T] [--nodes 2,4,8] [--per-node 8] [--backward]
 *                [--routing FILE | uniform | skew:A]   [--nic GB/s] [--nvlink GB/s] */
#include "domain_model.h"
#include "plain_layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NODE_COUNTS = 16, DRAWN_TOKENS = 1 << 16 };

/* Bandwidths of the task; rates of products and fixed times as measured on one host:
 * results/layer.md and results/exchange.md (two GPUs, 128 tokens of 4 KB, through windows and over
 * NCCL's network transport, less the bytes' time). */
static const struct model_rates standard_rates = {.nvlink = 350e9,
                                                  .nic = 50e9,
                                                  .hbm = 4.35e12,
                                                  .flops = 640e12,
                                                  .windows_dispatch = 12e-6,
                                                  .windows_combine = 8e-6,
                                                  .network_dispatch = 73e-6,
                                                  .network_combine = 19e-6};

struct options {
    const char *record, *routing;
    const struct bench_shape *shape;
    uint32_t tokens, per_node, record_tokens;
    uint32_t nodes[MAX_NODE_COUNTS], node_counts;
    uint64_t seed;
    bool check, backward;
    struct model_rates rates;
};

/* ------------------------------------------------------------------------------ options */

static const struct bench_shape *find_shape(const char *name)
{
    for (uint32_t i = 0; i < bench_shape_count; i++)
        if (strcmp(bench_shapes[i].name, name) == 0)
            return &bench_shapes[i];
    return NULL;
}

static bool parse_number(const char *text, double low, double high, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return end != text && *end == 0 && *out >= low && *out <= high;
}

static bool parse_count(const char *text, uint32_t high, uint32_t *out)
{
    double number;
    bool good = parse_number(text, 1, high, &number);
    *out = good ? (uint32_t)number : 0;
    return good && number == *out;
}

static bool parse_nodes(const char *text, struct options *o)
{
    char list[128], *rest = NULL;
    if (snprintf(list, sizeof list, "%s", text) >= (int)sizeof list)
        return false;
    o->node_counts = 0;
    for (char *n = strtok_r(list, ",", &rest); n != NULL; n = strtok_r(NULL, ",", &rest))
        if (o->node_counts == MAX_NODE_COUNTS ||
            !parse_count(n, MOE_DOMAINS_MAX, &o->nodes[o->node_counts++]))
            return false;
    return o->node_counts > 0;
}

static bool parse_option(const char *name, const char *value, struct options *o)
{
    double number;
    if (strcmp(name, "--record") == 0)
        o->record = value;
    else if (strcmp(name, "--routing") == 0)
        o->routing = value;
    else if (strcmp(name, "--shape") == 0)
        return (o->shape = find_shape(value)) != NULL;
    else if (strcmp(name, "--tokens") == 0)
        return parse_count(value, 1 << 20, &o->tokens);
    else if (strcmp(name, "--per-node") == 0)
        return parse_count(value, MOE_DOMAINS_MAX_SIZE, &o->per_node);
    else if (strcmp(name, "--record-tokens") == 0)
        return parse_count(value, 1 << 24, &o->record_tokens);
    else if (strcmp(name, "--nodes") == 0)
        return parse_nodes(value, o);
    else if (strcmp(name, "--seed") == 0)
        o->seed = strtoull(value, NULL, 10);
    else if (strcmp(name, "--nic") == 0 && parse_number(value, 0.001, 1e6, &number))
        o->rates.nic = number * 1e9;
    else if (strcmp(name, "--nvlink") == 0 && parse_number(value, 0.001, 1e6, &number))
        o->rates.nvlink = number * 1e9;
    else
        return false;
    return true;
}

static bool parse(int argc, char **argv, struct options *o)
{
    *o = (struct options){.routing = "uniform",
                          .shape = &bench_shapes[0],
                          .tokens = 4096,
                          .per_node = 8,
                          .record_tokens = DRAWN_TOKENS,
                          .nodes = {1, 2, 4, 8, 16, 32, 64},
                          .node_counts = 7,
                          .seed = 1,
                          .rates = standard_rates};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--check") == 0) {
            o->check = true;
        } else if (strcmp(argv[i], "--backward") == 0) {
            o->backward = true;
        } else if (i + 1 == argc || !parse_option(argv[i], argv[i + 1], o)) {
            fprintf(stderr, "domain_model: wrong option or value: %s; options are in the source\n",
                    argv[i]);
            return false;
        } else {
            i++;
        }
    }
    return true;
}

static bool get_routing(const struct options *o, const struct bench_shape *shape,
                        struct routing *out)
{
    double skew = 0;
    if (strncmp(o->routing, "skew:", 5) == 0 && !parse_number(o->routing + 5, 0, 4, &skew)) {
        fprintf(stderr, "domain_model: no skew: %s\n", o->routing);
        return false;
    }
    if (strcmp(o->routing, "uniform") == 0 || strncmp(o->routing, "skew:", 5) == 0)
        return routing_draw(&shape->spec, skew, DRAWN_TOKENS, o->seed, out);
    return routing_read(o->routing, &shape->spec, out);
}

/* -------------------------------------------------------------------------------- check */

/* Measured on 4x H200 of one host, uniform routing: results/exchange.md ("The same on four GPUs"),
 * and products from results/layer.md; 0 = not measured there. MB and us. */
static const struct measured {
    const char *shape;
    uint32_t tokens;
    double wire_mb, dispatch_us, both_us, products_us;
} measurements[] = {
    {"deepseek-v3", 4096, 159, 476, 1000, 5085},  {"deepseek-v3", 512, 20.1, 77.2, 150, 0},
    {"deepseek-v3", 128, 5.00, 25.1, 53.8, 1325}, {"qwen3-30b", 4096, 45.8, 153, 317, 452},
    {"qwen3-30b", 128, 1.46, 14.2, 25.8, 83},     {"mixtral-8x7b", 4096, 46.8, 152, 313, 4403},
};

/* One line of the check; false if the bytes are more than 2 % off. */
static bool check_one(const struct options *o, const struct measured *m)
{
    const struct bench_shape *shape = find_shape(m->shape);
    struct model_group g = {.nodes = 1,
                            .per_node = 4,
                            .tokens = m->tokens,
                            .pass = {.hidden = shape->spec.hidden,
                                     .top_k = shape->spec.router.top_k,
                                     .dtype = MOE_DTYPE_BF16},
                            .spec = &shape->spec};
    struct routing r;
    struct model_traffic t;
    bool good = routing_draw(&shape->spec, 0, DRAWN_TOKENS, o->seed, &r);
    good = good && model_traffic_of(&g, &r, &t);
    routing_free(&r);
    if (!good)
        return false;
    struct model_times times = model_times_of(&g, &t, &o->rates);
    double mb = t.rows[MOE_LEG_INSIDE] * (double)moe_dispatch_sum_bytes(&g.pass) / 1e6;
    double both = (times.dispatch + times.combine) * 1e6, products = times.products * 1e6;
    printf("| %s, %u | %.2f | %.2f | %.0f / %.0f | %.0f / %.0f | %.2f |", m->shape, m->tokens,
           m->wire_mb, mb, m->dispatch_us, m->both_us, times.dispatch * 1e6, both,
           both / m->both_us);
    if (m->products_us > 0)
        printf(" %.0f | %.0f | %.2f |\n", m->products_us, products, products / m->products_us);
    else
        printf(" | %.0f | |\n", products);
    bool close = mb > 0.98 * m->wire_mb && mb < 1.02 * m->wire_mb;
    if (!close)
        fprintf(stderr, "%s, %u tokens: bytes differ\n", m->shape, m->tokens);
    return close;
}

static int check(const struct options *o)
{
    bool good = true;
    printf("| shape, tokens per slot | wire MB measured | model | dispatch / with combine, us, "
           "measured | model | model / measured | products, us, measured | model | model / "
           "measured |\n|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof measurements / sizeof *measurements; i++)
        good = check_one(o, &measurements[i]) && good;
    return good ? 0 : 1;
}

/* -------------------------------------------------------------------------------- model */

static void print_header(const struct options *o)
{
    printf("MODEL, not a measurement. %s, %u tokens per slot, %u slots per node, %s pass, routing "
           "%s; NIC %.0f, NVLink %.0f GB/s.\n\n",
           o->shape->name, o->tokens, o->per_node, o->backward ? "backward" : "forward", o->routing,
           o->rates.nic / 1e9, o->rates.nvlink / 1e9);
    printf(
        "| nodes | rows per token: inside, across, forward | flat, to other nodes | MB at the "
        "busiest slot, out: inside, across, forward | back | flat, out | dispatch / combine, us, "
        "legs overlap | legs in turn | flat | products, us | exchanges / flat | step, us: all "
        "overlaps, or all in turn |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|\n");
}

static void print_line(const struct options *o, const struct model_group *g,
                       const struct model_traffic *t)
{
    struct model_times m = model_times_of(g, t, &o->rates);
    double tokens = g->tokens;
    printf("| %u | %.2f, %.2f, %.2f | %.2f |", g->nodes, t->rows[MOE_LEG_INSIDE] / tokens,
           t->rows[MOE_LEG_ACROSS] / tokens, t->rows[MOE_LEG_FORWARD] / tokens,
           t->flat_rows / tokens);
    printf(" %.1f, %.1f, %.1f | %.1f, %.1f, %.1f | %.1f |", t->leg[MOE_LEG_INSIDE] / 1e6,
           t->leg[MOE_LEG_ACROSS] / 1e6, t->leg[MOE_LEG_FORWARD] / 1e6,
           t->leg_back[MOE_LEG_INSIDE] / 1e6, t->leg_back[MOE_LEG_ACROSS] / 1e6,
           t->leg_back[MOE_LEG_FORWARD] / 1e6, t->flat_nic / 1e6);
    double overlapped = m.dispatch + m.combine;
    overlapped = m.products > overlapped ? m.products : overlapped;
    printf(" %.0f / %.0f | %.0f / %.0f | %.0f / %.0f | %.0f | %.2f to %.2f |", m.dispatch * 1e6,
           m.combine * 1e6, m.dispatch_legs * 1e6, m.combine_legs * 1e6, m.flat_dispatch * 1e6,
           m.flat_combine * 1e6, m.products * 1e6,
           (m.dispatch + m.combine) / (m.flat_dispatch + m.flat_combine),
           (m.dispatch_legs + m.combine_legs) / (m.flat_dispatch + m.flat_combine));
    printf(" %.0f to %.0f |\n", overlapped * 1e6,
           (m.dispatch_legs + m.products + m.combine_legs) * 1e6);
}

static int model(const struct options *o)
{
    struct routing r;
    if (!get_routing(o, o->shape, &r))
        return 1;
    bool good = true;
    print_header(o);
    for (uint32_t i = 0; good && i < o->node_counts; i++) {
        struct model_group g = {.nodes = o->nodes[i],
                                .per_node = o->per_node,
                                .tokens = o->tokens,
                                .pass = {.hidden = o->shape->spec.hidden,
                                         .top_k = r.top_k,
                                         .dtype = MOE_DTYPE_BF16,
                                         .backward = o->backward},
                                .spec = &o->shape->spec};
        struct model_traffic t;
        good = model_traffic_of(&g, &r, &t);
        if (good)
            print_line(o, &g, &t);
    }
    routing_free(&r);
    return good ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct options o;
    if (!parse(argc, argv, &o))
        return 2;
    if (o.record != NULL)
        return routing_record(&o.shape->spec, o.record_tokens, o.seed, o.record) ? 0 : 1;
    return o.check ? check(&o) : model(&o);
}
