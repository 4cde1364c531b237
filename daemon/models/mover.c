/* SPDX-License-Identifier: Apache-2.0 */
/* COUNT_ROWS and SWAP are done at once; FETCH, DROP and what frees memory run on the executor, one
 * at a time. */
#include "models/mover.h"

#include "daemon/log.h"
#include "group/serial_executor.h"
#include "models/assignment.h"

#include <stdatomic.h>
#include <stdlib.h>

struct moe_mover {
    struct moe_mover_config config;
    struct moe_serial_executor *executor;
    _Atomic uint64_t fetching; /* order of the FETCH that is queued or runs; 0 = none */
    uint32_t fetching_version; /* of that, or of the last one */
};

/* A step for the executor. */
struct task {
    struct moe_mover *mover;
    uint64_t order, epoch, loader_order; /* the last: see moe_loader_fetch */
    uint32_t version;
    struct moe_assignment_copy copy; /* FETCH */
};

static void answer(struct moe_mover *m, enum moe_model_step step, uint64_t order, uint64_t epoch,
                   struct moe_status status)
{
    const struct moe_group_model_report report = {
        .step = step, .order = order, .epoch = epoch, .status = status};
    m->config.report(m->config.ctx, &report);
}

static struct moe_status post(struct moe_mover *m, moe_serial_task_fn run, const struct task *from)
{
    struct task *t = malloc(sizeof *t);
    if (t == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a task");
    *t = *from;
    t->mover = m;
    struct moe_status st = moe_serial_executor_post(m->executor, run, NULL, t);
    if (moe_failed(&st))
        free(t);
    return st;
}

/* ------------------------------------------------------------------------------- tasks */

static struct moe_status pass_digests(void *ctx, moe_group_part_fn add, void *add_ctx)
{
    return moe_loader_pass_digests(ctx, add, add_ctx);
}

static void run_fetch(void *ctx, void *argument)
{
    struct task *t = argument;
    struct moe_mover *m = t->mover;
    (void)ctx;
    struct moe_group_model_report report = {
        .step = MOE_MODEL_FETCH,
        .order = t->order,
        .status = moe_loader_fetch(m->config.loader, &t->copy.assignment, t->loader_order,
                                   m->config.share, m->config.progress, m->config.ctx)};
    if (moe_failed(&report.status)) {
        moe_log_warn("no experts are fetched for placement %u: %s", t->version, report.status.text);
    } else {
        report.digests = pass_digests;
        report.digests_ctx = m->config.loader;
    }
    uint64_t mine = t->order;
    atomic_compare_exchange_strong(&m->fetching, &mine, 0);
    m->config.report(m->config.ctx, &report);
    moe_assignment_free(&t->copy);
    free(t);
}

static void run_drop(void *ctx, void *argument)
{
    struct task *t = argument;
    (void)ctx;
    moe_loader_drop_fetched(t->mover->config.loader, t->version);
    if (t->order != 0)
        answer(t->mover, MOE_MODEL_DROP, t->order, 0, moe_ok());
    free(t);
}

static void run_settle(void *ctx, void *argument)
{
    struct task *t = argument;
    struct moe_mover *m = t->mover;
    (void)ctx;
    moe_loader_settle(m->config.loader);
    moe_log_info("experts have moved: placement %u is in use", t->version);
    answer(m, MOE_MODEL_SWAP, 0, t->epoch, moe_ok());
    free(t);
}

/* ------------------------------------------------------------------------------ orders */

static void count_rows(struct moe_mover *m, const struct moe_group_model_order *o)
{
    uint64_t rows[MOE_MAX_EXPERTS] = {0};
    const struct moe_layer_spec *const *specs = moe_loader_specs(m->config.loader);
    for (size_t i = 0; i < moe_loader_layer_count(m->config.loader); i++) {
        (void)moe_row_metrics_read(m->config.row_metrics, specs[i]->layer, rows);
        m->config.rows(m->config.ctx, o->order, specs[i]->layer, rows, specs[i]->experts);
    }
    answer(m, MOE_MODEL_COUNT_ROWS, o->order, 0, moe_ok());
}

static void fetch(struct moe_mover *m, const struct moe_group_model_order *o)
{
    uint64_t before = atomic_load(&m->fetching);
    if (before == o->order)
        return; /* a repeat: its report comes */
    if (before != 0)
        moe_loader_cancel_fetch(m->config.loader);
    struct task t = {.order = o->order,
                     .version = o->assignment.placement_version,
                     .loader_order = moe_loader_order_fetch(m->config.loader)};
    atomic_store(&m->fetching, o->order);
    m->fetching_version = t.version;
    struct moe_status st = moe_assignment_copy(&o->assignment, &t.copy);
    if (!moe_failed(&st))
        st = post(m, run_fetch, &t);
    if (!moe_failed(&st))
        return;
    moe_assignment_free(&t.copy);
    atomic_store(&m->fetching, 0);
    answer(m, MOE_MODEL_FETCH, o->order, 0, st);
}

static void swap(struct moe_mover *m, const struct moe_group_model_order *o)
{
    uint32_t version = o->assignment.placement_version;
    if (moe_loader_version(m->config.loader) == version)
        answer(m, MOE_MODEL_SWAP, o->order, o->epoch, moe_ok());
    else if (moe_loader_fetched_version(m->config.loader) == version)
        m->config.swap(m->config.ctx, o->epoch, version);
    else
        answer(m, MOE_MODEL_SWAP, o->order, o->epoch,
               moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "placement %u was not fetched", version));
}

static void drop(struct moe_mover *m, uint64_t order, uint32_t except)
{
    const struct task t = {.order = order, .version = except};
    struct moe_status st = post(m, run_drop, &t);
    if (moe_failed(&st) && order != 0)
        answer(m, MOE_MODEL_DROP, order, 0, st);
}

void moe_mover_order(struct moe_mover *m, const struct moe_group_model_order *o)
{
    switch (o->step) {
    case MOE_MODEL_COUNT_ROWS: count_rows(m, o); break;
    case MOE_MODEL_FETCH: fetch(m, o); break;
    case MOE_MODEL_SWAP: swap(m, o); break;
    case MOE_MODEL_DROP:
        moe_loader_cancel_fetch(m->config.loader);
        drop(m, o->order, 0);
        break;
    default: moe_log_warn("an order about the default model is of an unknown step");
    }
}

void moe_mover_registered(struct moe_mover *m, uint32_t version)
{
    if (atomic_load(&m->fetching) != 0 && m->fetching_version != version)
        moe_loader_cancel_fetch(m->config.loader);
    drop(m, 0, version);
}

void moe_mover_swapped(struct moe_mover *m, uint32_t version, uint64_t epoch)
{
    const struct task t = {.version = version, .epoch = epoch};
    struct moe_status st = post(m, run_settle, &t);
    if (!moe_failed(&st))
        return;
    moe_log_warn("experts of the placement before stay until the next one: %s", st.text);
    answer(m, MOE_MODEL_SWAP, 0, epoch, moe_ok());
}

/* ---------------------------------------------------------------------------- lifetime */

struct moe_status moe_mover_create(const struct moe_mover_config *config, struct moe_mover **out)
{
    struct moe_mover *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for moves");
    m->config = *config;
    struct moe_status st = moe_serial_executor_create(&m->executor);
    if (moe_failed(&st)) {
        free(m);
        return st;
    }
    *out = m;
    return st;
}

void moe_mover_destroy(struct moe_mover *m)
{
    if (m == NULL)
        return;
    moe_loader_cancel_fetch(m->config.loader);
    moe_serial_executor_destroy(m->executor);
    free(m);
}
