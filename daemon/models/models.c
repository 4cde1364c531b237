/* SPDX-License-Identifier: Apache-2.0 */
/* The table of added models: what requests and the engine do with it. orders.c has the steps of the
 * coordinator. */
#include "models/models.h"

#include "daemon/log.h"
#include "daemon/name.h"
#include "models/state.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

enum { LOADING_RETRY_MS = 500 };

/* ------------------------------------------------------------------------ entries */

struct entry *moe_models__find(const struct moe_models *m, uint32_t number)
{
    struct entry *e = m->first;
    while (e != NULL && e->known.number != number)
        e = e->next;
    return e;
}

void moe_models__free_weights(struct entry *e)
{
    moe_row_metrics_destroy(e->row_metrics);
    moe_loader_destroy(e->loader);
    moe_model_close(e->model);
    e->row_metrics = NULL;
    e->loader = NULL;
    e->model = NULL;
    (void)malloc_trim(0); /* tables of tensors are large, too */
}

void moe_models__drop(struct entry *e)
{
    if (--e->references > 0)
        return;
    free(e->directory);
    free(e->specs);
    free(e->spec_table);
    moe_token_tables_free(&e->token_tables);
    free(e);
}

void moe_models__unlink(struct moe_models *m, struct entry *e)
{
    struct entry **at = &m->first;
    while (*at != e)
        at = &(*at)->next;
    *at = e->next;
    m->count--;
    moe_models__drop(e);
}

/* ------------------------------------------------------------------------ reports */

void moe_models__report_progress(void *entry, uint64_t loaded, uint64_t total)
{
    const struct entry *e = entry;
    const struct moe_models_config *c = &e->owner->config;
    c->progress(c->ctx, e->known.number, loaded, total);
}

void moe_models__answer(struct moe_models *m, uint32_t model, enum moe_model_step step,
                        uint64_t order, uint64_t epoch, struct moe_status status)
{
    const struct moe_group_model_report report = {
        .model = model, .step = step, .order = order, .epoch = epoch, .status = status};
    if (order != 0) /* else the coordinator did not ask */
        m->config.report(m->config.ctx, &report);
}

/* --------------------------------------------------------------------- the engine */

/* A ticket that ran before its order came is reported with the order. */
void moe_models_changed(struct moe_models *m, uint32_t model, bool served, uint64_t epoch)
{
    uint64_t order = 0;
    moe_mutex_lock(&m->lock);
    struct entry *e = moe_models__find(m, model);
    struct model_ticket *t = e == NULL ? NULL : served ? &e->add : &e->remove;
    bool report = t != NULL && t->ordered_epoch == epoch;
    if (t != NULL) {
        t->run_epoch = epoch;
        order = t->order;
    }
    if (e != NULL && served)
        e->served = e->served || report;
    else if (e != NULL)
        e->add.run_epoch = 0;
    moe_mutex_unlock(&m->lock);
    moe_log_info("epoch %llu: model %u is %s", (unsigned long long)epoch, model,
                 served ? "served" : "served no longer");
    if (report)
        moe_models__answer(m, model, served ? MOE_MODEL_ADD : MOE_MODEL_REMOVE, order, epoch,
                           moe_ok());
}

/* ----------------------------------------------------------------------- requests */

/* The name comes from a client: a text that can be no name is not repeated. */
static struct moe_status not_found(const char *name)
{
    if (!moe_training_name_ok(name))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND,
                         "the group has no model of this name");
    return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "the group has no model %.64s",
                     name);
}

void moe_models__unlist(struct moe_models *m, uint32_t number)
{
    for (size_t i = 0; i < MOE_ADDED_MODELS_MAX; i++)
        if (m->listed[i].number == number)
            m->listed[i] = (struct listed){0};
}

static bool is_listed(const struct moe_models *m, const char *name) MOE_REQUIRES(m->lock)
{
    for (size_t i = 0; i < MOE_ADDED_MODELS_MAX; i++)
        if (m->listed[i].number != 0 && strcmp(m->listed[i].name, name) == 0)
            return true;
    return false;
}

static struct moe_status check(const struct moe_models *m, const struct entry *e, const char *name)
    MOE_REQUIRES(m->lock)
{
    bool has = e != NULL && !e->closing;
    if (!has && !is_listed(m, name))
        return not_found(name);
    if (has && e->quiesced)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "model %s is being unloaded",
                         e->name);
    if (!has || !e->served)
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING, LOADING_RETRY_MS,
                               "model %.63s is being loaded", name);
    return moe_ok();
}

struct moe_status moe_models_take(struct moe_models *m, const char *name,
                                  const struct moe_added_model **out)
{
    *out = NULL;
    if (m == NULL)
        return not_found(name);
    moe_mutex_lock(&m->lock);
    struct entry *e = m->first;
    while (e != NULL && strcmp(e->name, name) != 0)
        e = e->next;
    struct moe_status st = check(m, e, name);
    if (!moe_failed(&st)) {
        e->references++;
        e->requests++;
        *out = &e->known;
    }
    moe_mutex_unlock(&m->lock);
    return st;
}

/* The first member of an entry is its model. */
static struct entry *entry_of(const struct moe_added_model *model)
{
    return (struct entry *)(uintptr_t)model;
}

void moe_models_finish(struct moe_models *m, const struct moe_added_model *model)
{
    struct entry *e = entry_of(model);
    moe_mutex_lock(&m->lock);
    MOE_INVARIANT(e->requests > 0);
    e->requests--;
    uint64_t order = e->requests == 0 && e->quiesced ? e->quiesce_order : 0;
    if (order != 0)
        e->quiesce_order = 0;
    uint32_t number = e->known.number;
    moe_mutex_unlock(&m->lock);
    if (order != 0)
        moe_models__answer(m, number, MOE_MODEL_QUIESCE, order, 0, moe_ok());
}

void moe_models_unref(struct moe_models *m, const struct moe_added_model *model)
{
    moe_mutex_lock(&m->lock);
    moe_models__drop(entry_of(model));
    moe_mutex_unlock(&m->lock);
}

size_t moe_models_list(struct moe_models *m, uint64_t epoch,
                       char names[MOE_ADDED_MODELS_MAX][MOE_MODELS_NAME_BYTES])
{
    size_t count = 0;
    if (m == NULL)
        return 0;
    moe_mutex_lock(&m->lock);
    for (const struct entry *e = m->first; e != NULL && epoch != 0; e = e->next)
        if (e->served && !e->quiesced && !e->closing && e->add.run_epoch == epoch)
            memcpy(names[count++], e->name, sizeof e->name);
    moe_mutex_unlock(&m->lock);
    return count;
}

/* ----------------------------------------------------------------------- lifetime */

struct moe_status moe_models_create(const struct moe_models_config *config, struct moe_models **out)
{
    struct moe_models *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the table of models");
    m->config = *config;
    struct moe_status st = moe_serial_executor_create(&m->executor);
    if (moe_failed(&st)) {
        free(m);
        return st;
    }
    moe_mutex_init(&m->lock);
    *out = m;
    return st;
}

void moe_models_stop(struct moe_models *m)
{
    if (m == NULL)
        return;
    moe_mutex_lock(&m->lock);
    m->stopped = true;
    for (struct entry *e = m->first; e != NULL; e = e->next)
        if (e->loader != NULL)
            moe_loader_cancel(e->loader);
    moe_mutex_unlock(&m->lock);
    moe_serial_executor_destroy(m->executor);
    m->executor = NULL;
}

void moe_models_destroy(struct moe_models *m)
{
    if (m == NULL)
        return;
    moe_mutex_not_shared(&m->lock);
    while (m->first != NULL) {
        struct entry *e = m->first;
        moe_models__free_weights(e);
        MOE_INVARIANT(e->references == 1);
        moe_models__unlink(m, e);
    }
    moe_mutex_destroy(&m->lock);
    free(m);
}
