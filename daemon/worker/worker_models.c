/* SPDX-License-Identifier: Apache-2.0 */
/* Connects the table of added models, and moves of experts, with engine, peers and group. */
#include "worker/worker_state.h"

/* ------------------------------------------------------------- callbacks of the table */

/* On any thread, also before the group exists and after its end. */
static void report(void *ctx, const struct moe_group_model_report *report)
{
    struct moe_worker *w = ctx;
    moe_mutex_lock(&w->wake_lock);
    if (w->may_wake_group)
        moe_group_report_model(w->group, report);
    moe_mutex_unlock(&w->wake_lock);
}

static void progress(void *ctx, uint32_t model, uint64_t loaded_bytes, uint64_t total_bytes)
{
    struct moe_worker *w = ctx;
    moe_mutex_lock(&w->wake_lock);
    if (w->may_wake_group)
        moe_group_report_model_progress(w->group, model, loaded_bytes, total_bytes);
    moe_mutex_unlock(&w->wake_lock);
}

static void change(void *ctx, uint64_t epoch, uint32_t model, bool serve)
{
    struct moe_worker *w = ctx;
    moe_peers_change_model(w->peers, epoch, model, serve);
}

/* ----------------------------------------------------------------------------- hooks */

void moe_worker__model_changed(void *ctx, uint32_t model, bool served, uint64_t epoch)
{
    struct moe_worker *w = ctx;
    moe_models_changed(w->models, model, served, epoch);
}

void moe_worker__model_order(void *ctx, const struct moe_group_model_order *order)
{
    struct moe_worker *w = ctx;
    if (order->model == 0)
        moe_mover_order(w->mover, order);
    else
        moe_models_order(w->models, order);
}

void moe_worker__models_listed(void *ctx, const uint32_t *models, const char *const *names,
                               size_t count)
{
    struct moe_worker *w = ctx;
    moe_models_keep(w->models, models, names, count);
}

/* ---------------------------------------------------------------------------- create */

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

void moe_worker__measure_widths(struct moe_worker *w)
{
    const struct moe_layer_spec *const *specs = moe_loader_specs(w->loader);
    w->widths = (struct moe_models_widths){w->config.max_hidden, w->config.max_experts,
                                           w->config.max_top_k};
    for (size_t i = 0; i < moe_loader_layer_count(w->loader); i++) {
        w->widths.hidden = larger(w->widths.hidden, specs[i]->hidden);
        w->widths.experts = larger(w->widths.experts, specs[i]->experts);
        w->widths.top_k = larger(w->widths.top_k, specs[i]->router.top_k);
    }
}

struct moe_status moe_worker__create_models(struct moe_worker *w)
{
    const struct moe_models_config models = {
        .backend = w->config.backend,
        .device = w->device,
        .decode_weights = w->config.decode_weights,
        .w8a8 = w->config.w8a8,
        .engine = w->engine,
        .default_model = moe_model_name(w->model),
        .default_layers = moe_loader_layer_count(w->loader),
        .widths = w->widths,
        .metrics = w->config.metrics,
        .row_metrics = w->row_metrics,
        .report = report,
        .progress = progress,
        .change = change,
        .ctx = w,
    };
    return moe_models_create(&models, &w->models);
}

/* ----------------------------------------------------------------------------- moves */

static void rows(void *ctx, uint64_t order, uint32_t layer, const uint64_t *rows, size_t count)
{
    struct moe_worker *w = ctx;
    moe_mutex_lock(&w->wake_lock);
    if (w->may_wake_group)
        moe_group_report_rows(w->group, order, layer, rows, count);
    moe_mutex_unlock(&w->wake_lock);
}

static void fetch_progress(void *ctx, uint64_t read_bytes)
{
    progress(ctx, 0, read_bytes, 0);
}

static void swap(void *ctx, uint64_t epoch, uint32_t version)
{
    struct moe_worker *w = ctx;
    moe_peers_swap_placement(w->peers, epoch, version);
}

struct moe_status moe_worker__swap_placement(void *ctx, uint32_t version)
{
    struct moe_worker *w = ctx;
    return moe_loader_swap(w->loader, version);
}

void moe_worker__placement_swapped(void *ctx, uint32_t version, uint64_t epoch)
{
    struct moe_worker *w = ctx;
    moe_mover_swapped(w->mover, version, epoch);
}

void moe_worker__fetched_listed(void *ctx, uint32_t version)
{
    struct moe_worker *w = ctx;
    moe_mover_registered(w->mover, version);
}

struct moe_status moe_worker__create_mover(struct moe_worker *w)
{
    const struct moe_mover_config mover = {
        .loader = w->loader,
        .row_metrics = w->row_metrics,
        .share = w->config.rebalance_share != 0 ? w->config.rebalance_share : 100,
        .report = report,
        .rows = rows,
        .progress = fetch_progress,
        .swap = swap,
        .ctx = w};
    return moe_mover_create(&mover, &w->mover);
}
