/* SPDX-License-Identifier: Apache-2.0 */
/* One thread adds to totals since the start; a rendering subtracts the totals at the begin of the
 * window from them. So steps never wait for a rendering, and a window costs steps nothing. */
#include "engine/row_metrics.h"

#include "daemon/log.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Written by one thread, so an addition needs no atomic read-modify-write. */
typedef _Atomic uint64_t total;

struct top {
    struct moe_gauge *rows, *id;
};

struct layer {
    uint32_t number, experts, width;
    _Atomic uint32_t local_experts; /* 0: the backend has reported nothing */
    struct moe_counter *rows;
    total *expert_rows; /* [experts] since the start */
    /* Of renderings. */
    uint64_t *before, *since; /* [experts] totals at the begin of the last two windows */
    bool registered;
    struct moe_gauge *balancedness, *mean;
    uint32_t top_count;
    struct top top[MOE_ROW_TOP];
};

struct peer {
    total rows, bytes;
    struct moe_gauge *rows_series, *bytes_series; /* NULL: not registered */
};

struct moe_row_metrics {
    struct moe_metrics *registry;
    char *model;
    struct moe_row_metrics *rows_sent; /* counts in its `peers` and `slots`; may be this one */
    size_t layer_count;
    uint64_t window_ns;     /* begin of the younger window */
    uint64_t *counts;       /* memory of all layers' totals */
    _Atomic uint32_t slots; /* 0: the backend has reported none */
    struct peer peers[MOE_MAX_SLOTS];
    bool complained;
    struct layer layers[];
};

/* ------------------------------------------------------------------ after a step */

static void add(total *t, uint64_t n)
{
    uint64_t old = atomic_load_explicit(t, memory_order_relaxed);
    atomic_store_explicit(t, old + n, memory_order_relaxed);
}

static uint64_t value_of(const total *t)
{
    return atomic_load_explicit(t, memory_order_relaxed);
}

static void add_sent(struct moe_row_metrics *m, const struct moe_step_counts *counts,
                     uint64_t row_bytes)
{
    for (uint32_t p = 0; p < counts->slots; p++) {
        add(&m->peers[p].rows, counts->sent_rows[p]);
        add(&m->peers[p].bytes, counts->sent_rows[p] * row_bytes);
    }
    if (atomic_load_explicit(&m->slots, memory_order_relaxed) < counts->slots)
        atomic_store_explicit(&m->slots, counts->slots, memory_order_relaxed);
}

void moe_row_metrics_add(struct moe_row_metrics *m, size_t index, enum moe_dtype dtype,
                         uint64_t rows, const struct moe_step_counts *counts)
{
    if (m == NULL)
        return;
    struct layer *l = &m->layers[index];
    moe_counter_add(l->rows, rows);
    for (uint32_t e = 0; counts->by_expert && e < l->experts; e++)
        add(&l->expert_rows[e], counts->expert_rows[e]);
    if (counts->by_expert)
        atomic_store_explicit(&l->local_experts, counts->local_experts, memory_order_relaxed);
    if (counts->to_slots)
        add_sent(m->rows_sent, counts, (uint64_t)l->width * moe_dtype_bytes(dtype));
}

/* ------------------------------------------------------------------ registration */

static struct moe_status add_gauge(struct moe_row_metrics *m, const char *name, const char *help,
                                   const char *layer, const char *rank, struct moe_gauge **out)
{
    const struct moe_metric_desc desc = {
        .name = name,
        .help = help,
        .labels = {{"model", m->model}, {"layer", layer}, {rank != NULL ? "rank" : NULL, rank}}};
    return moe_metrics_add_gauge(m->registry, &desc, out);
}

static struct moe_status register_layer(struct moe_row_metrics *m, struct layer *l, uint32_t local)
{
    char number[16];
    (void)snprintf(number, sizeof number, "%u", l->number);
    l->registered = true; /* also after a failure, which would only repeat */
    MOE_TRY(add_gauge(m, "moe_expert_balancedness",
                      "Mean over the maximum of rows of this worker's experts; 1 = even.", number,
                      NULL, &l->balancedness));
    MOE_TRY(add_gauge(m, "moe_expert_mean_rows", "Mean of rows of this worker's experts.", number,
                      NULL, &l->mean));
    uint32_t top = local < MOE_ROW_TOP ? local : MOE_ROW_TOP;
    for (uint32_t i = 0; i < top; i++) {
        char rank[16];
        struct top *t = &l->top[i];
        (void)snprintf(rank, sizeof rank, "%u", i + 1);
        MOE_TRY(add_gauge(m, "moe_expert_top_rows",
                          "Rows of this worker's most loaded experts; rank 1 has the most.", number,
                          rank, &t->rows));
        MOE_TRY(add_gauge(m, "moe_expert_top_id",
                          "Ids of these experts; -1 if no other expert had rows.", number, rank,
                          &t->id));
        l->top_count = i + 1;
    }
    return moe_ok();
}

static struct moe_status register_peer(struct moe_row_metrics *m, uint32_t slot)
{
    char number[16];
    struct peer *p = &m->peers[slot];
    (void)snprintf(number, sizeof number, "%u", slot);
    const struct moe_metric_desc rows = {
        .name = "moe_peer_rows_total",
        .help = "Rows of tokens that this worker sent to the worker of each slot.",
        .labels = {{"peer", number}}};
    const struct moe_metric_desc bytes = {.name = "moe_peer_bytes_total",
                                          .help = "Bytes of these rows.",
                                          .labels = {{"peer", number}}};
    MOE_TRY(moe_metrics_add_set_counter(m->registry, &rows, &p->rows_series));
    return moe_metrics_add_set_counter(m->registry, &bytes, &p->bytes_series);
}

/* ------------------------------------------------------------------ windows */

/* Rows of each expert in the window, and their sum. */
static uint64_t read_window(const struct layer *l, uint64_t rows[MOE_MAX_EXPERTS])
{
    uint64_t sum = 0;
    for (uint32_t e = 0; e < l->experts; e++) {
        rows[e] = value_of(&l->expert_rows[e]) - l->before[e];
        sum += rows[e];
    }
    return sum;
}

/* The expert with the most rows, the lower id first, or -1 if no expert has any. */
static int32_t find_most(const uint64_t *rows, uint32_t experts)
{
    int32_t best = -1;
    for (uint32_t e = 0; e < experts; e++)
        if (rows[e] > (best < 0 ? 0 : rows[best]))
            best = (int32_t)e;
    return best;
}

static void show_layer(struct layer *l, uint32_t local)
{
    uint64_t rows[MOE_MAX_EXPERTS];
    double mean = (double)read_window(l, rows) / local, most = 0;
    for (uint32_t i = 0; i < l->top_count; i++) {
        int32_t e = find_most(rows, l->experts);
        double n = e < 0 ? 0 : (double)rows[e];
        moe_gauge_set(l->top[i].rows, n);
        moe_gauge_set(l->top[i].id, e);
        most = i == 0 ? n : most;
        if (e >= 0)
            rows[e] = 0;
    }
    moe_gauge_set(l->mean, mean);
    moe_gauge_set(l->balancedness, most > 0 ? mean / most : 1);
}

size_t moe_row_metrics_read(const struct moe_row_metrics *m, uint32_t layer,
                            uint64_t rows[MOE_MAX_EXPERTS])
{
    for (size_t i = 0; m != NULL && i < m->layer_count; i++) {
        const struct layer *l = &m->layers[i];
        if (l->number != layer)
            continue;
        for (uint32_t e = 0; e < l->experts; e++)
            rows[e] = value_of(&l->expert_rows[e]);
        return l->experts;
    }
    return 0;
}

static void begin_window(struct moe_row_metrics *m, uint64_t now_ns)
{
    m->window_ns = now_ns;
    for (size_t i = 0; i < m->layer_count; i++) {
        struct layer *l = &m->layers[i];
        memcpy(l->before, l->since, l->experts * sizeof *l->before);
        for (uint32_t e = 0; e < l->experts; e++)
            l->since[e] = value_of(&l->expert_rows[e]);
    }
}

static void complain(struct moe_row_metrics *m, const struct moe_status *st)
{
    if (moe_failed(st) && !m->complained) {
        m->complained = true;
        moe_log_warn("metrics of rows are incomplete: %s", st->text);
    }
}

static void show_peers(struct moe_row_metrics *m)
{
    uint32_t slots = atomic_load_explicit(&m->slots, memory_order_relaxed);
    for (uint32_t i = 0; i < slots; i++) {
        struct peer *p = &m->peers[i];
        if (p->rows_series == NULL) {
            struct moe_status st = register_peer(m, i);
            complain(m, &st);
        }
        if (p->bytes_series == NULL)
            continue;
        moe_gauge_set(p->rows_series, (double)value_of(&p->rows));
        moe_gauge_set(p->bytes_series, (double)value_of(&p->bytes));
    }
}

void moe_row_metrics_show(struct moe_row_metrics *m, uint64_t now_ns)
{
    if (now_ns >= m->window_ns + MOE_ROW_WINDOW_NS)
        begin_window(m, now_ns);
    for (size_t i = 0; i < m->layer_count; i++) {
        struct layer *l = &m->layers[i];
        uint32_t local = atomic_load_explicit(&l->local_experts, memory_order_relaxed);
        if (local > 0 && !l->registered) {
            struct moe_status st = register_layer(m, l, local);
            complain(m, &st);
        }
        if (local > 0 && l->top_count > 0)
            show_layer(l, local);
    }
    show_peers(m);
}

static void collect(void *ctx)
{
    moe_row_metrics_show(ctx, moe_clock_ns());
}

/* ------------------------------------------------------------------ life */

static void free_memory(struct moe_row_metrics *m)
{
    if (m == NULL)
        return;
    free(m->counts);
    free(m->model);
    free(m);
}

static struct moe_status add_layers(struct moe_row_metrics *m,
                                    const struct moe_layer_spec *const *specs)
{
    uint64_t *at = m->counts;
    for (size_t i = 0; i < m->layer_count; i++) {
        struct layer *l = &m->layers[i];
        char number[16];
        l->number = specs[i]->layer;
        l->experts = specs[i]->experts;
        l->width = moe_expert_width(specs[i]);
        l->expert_rows = (total *)at;
        l->before = at + l->experts;
        l->since = at + 2 * (size_t)l->experts;
        at += 3 * (size_t)l->experts;
        (void)snprintf(number, sizeof number, "%u", l->number);
        const struct moe_metric_desc rows = {
            .name = "moe_expert_rows_total",
            .help = "Rows, each of one token and expert, that this worker computed in forward "
                    "steps.",
            .labels = {{"model", m->model}, {"layer", number}}};
        MOE_TRY(moe_metrics_add_counter(m->registry, &rows, &l->rows));
    }
    return moe_metrics_add_collector(m->registry, collect, m);
}

struct moe_status moe_row_metrics_create(struct moe_metrics *registry, const char *model,
                                         const struct moe_layer_spec *const *specs, size_t count,
                                         struct moe_row_metrics *rows_sent,
                                         struct moe_row_metrics **out)
{
    size_t experts = 0;
    *out = NULL;
    if (registry == NULL)
        return moe_ok();
    for (size_t i = 0; i < count; i++)
        experts += specs[i]->experts;
    struct moe_row_metrics *m = calloc(1, sizeof *m + count * sizeof m->layers[0]);
    if (m != NULL) {
        m->counts = calloc(3 * experts + 1, sizeof *m->counts);
        m->model = strdup(model);
    }
    if (m == NULL || m->counts == NULL || m->model == NULL) {
        free_memory(m);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for metrics");
    }
    m->registry = registry;
    m->rows_sent = rows_sent != NULL ? rows_sent : m;
    m->layer_count = count;
    m->window_ns = moe_clock_ns();
    struct moe_status st = add_layers(m, specs);
    if (moe_failed(&st))
        moe_row_metrics_destroy(m);
    else
        *out = m;
    return st;
}

void moe_row_metrics_destroy(struct moe_row_metrics *m)
{
    if (m == NULL)
        return;
    moe_metrics_remove_collector(m->registry, collect, m);
    moe_metrics_remove_series(m->registry, (struct moe_metric_label){"model", m->model});
    free_memory(m);
}
