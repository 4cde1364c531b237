/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of an added model. OPEN, LOAD and CLOSE run on the executor, one at a time and in the
 * order in which they came; the others at once. */
#include "daemon/log.h"
#include "daemon/name.h"
#include "models/assignment.h"
#include "models/models.h"
#include "models/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A step for the executor. */
struct task {
    struct moe_models *models;
    struct entry *entry; /* a reference */
    uint64_t order;
    struct moe_assignment_copy copy; /* LOAD */
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a model");
}

static void free_task(struct task *t)
{
    moe_mutex_lock(&t->models->lock);
    moe_models__drop(t->entry);
    moe_mutex_unlock(&t->models->lock);
    moe_assignment_free(&t->copy);
    free(t);
}

static bool is_stopped(struct moe_models *m)
{
    moe_mutex_lock(&m->lock);
    bool stopped = m->stopped;
    moe_mutex_unlock(&m->lock);
    return stopped;
}

/* An earlier task may have closed the model, or failed to open it. */
static struct moe_status check_listed(struct moe_models *m, const struct entry *e)
{
    moe_mutex_lock(&m->lock);
    bool listed = !m->stopped && !e->closing && moe_models__find(m, e->known.number) == e;
    moe_mutex_unlock(&m->lock);
    return listed ? moe_ok()
                  : moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "model %s is closed", e->name);
}

/* --------------------------------------------------------------------------- OPEN */

static struct moe_status too_wide(const char *what, uint32_t needed, uint32_t have,
                                  const char *option)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TOO_LARGE,
                     "a layer has %s %u; sessions have room for %u: start all workers with %s %u",
                     what, needed, have, option, needed);
}

static struct moe_status check_layer(const struct moe_models *m, const struct moe_layer_spec *spec)
{
    const struct moe_models_widths *w = &m->config.widths;
    if (spec->hidden > w->hidden)
        return too_wide("hidden", spec->hidden, w->hidden, "--max-hidden");
    if (spec->experts > w->experts)
        return too_wide("experts", spec->experts, w->experts, "--max-experts");
    if (spec->router.top_k > w->top_k)
        return too_wide("top-k", spec->router.top_k, w->top_k, "--max-top-k");
    if (spec->layer > MOE_LAYER_INDEX_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "an added model has layers up to number %d", MOE_LAYER_INDEX_MAX);
    return moe_ok();
}

/* The layers of all models have queues and keys in a limited number. */
static struct moe_status check_count(struct moe_models *m, size_t layers)
{
    size_t all = m->config.default_layers + layers;
    moe_mutex_lock(&m->lock);
    for (const struct entry *e = m->first; e != NULL; e = e->next)
        all += e->known.layer_count;
    moe_mutex_unlock(&m->lock);
    if (all <= MOE_GROUP_LAYERS_MAX)
        return moe_ok();
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE,
                     "all models would have %zu MoE layers; a group has at most %d", all,
                     MOE_GROUP_LAYERS_MAX);
}

static struct moe_status check_model(struct moe_models *m, const struct moe_model *model)
{
    size_t count = moe_model_layer_count(model);
    for (size_t i = 0; i < count; i++)
        MOE_TRY(check_layer(m, moe_model_layer(model, i)));
    return check_count(m, count);
}

static struct moe_status create_loader(struct moe_models *m, struct entry *e,
                                       struct moe_loader **out)
{
    const struct moe_loader_events events = {
        .name = e->name, .progress = moe_models__report_progress, .ctx = e};
    return moe_loader_create(m->config.backend, m->config.device, e->model, &events, out);
}

static struct moe_status copy_specs(struct entry *e)
{
    size_t count = moe_model_layer_count(e->model);
    e->specs = calloc(count + 1, sizeof *e->specs);
    e->spec_table = calloc(count + 1, sizeof *e->spec_table);
    if (e->specs == NULL || e->spec_table == NULL)
        return no_memory();
    for (size_t i = 0; i < count; i++) {
        e->specs[i] = *moe_model_layer(e->model, i);
        e->spec_table[i] = &e->specs[i];
    }
    (void)snprintf(e->family, sizeof e->family, "%s", moe_model_family(e->model));
    return moe_ok();
}

/* What failed stays in the entry, which is dropped then. */
static struct moe_status open_model(struct moe_models *m, struct entry *e)
{
    struct moe_loader *loader;
    MOE_TRY(moe_model_open(e->directory, &e->model));
    MOE_TRY(moe_model_keep_quantised(e->model,
                                     m->config.decode_weights ? NULL : m->config.backend->computes,
                                     m->config.device, m->config.w8a8));
    MOE_TRY(check_model(m, e->model));
    MOE_TRY(copy_specs(e));
    MOE_TRY(moe_model_read_token_tables(e->model, &e->token_tables));
    MOE_TRY(create_loader(m, e, &loader));
    moe_mutex_lock(&m->lock);
    e->known.family = e->family;
    e->known.layers = e->spec_table;
    e->known.layer_count = moe_model_layer_count(e->model);
    e->known.token_tables = e->token_tables;
    e->loader = loader;
    e->opened = true;
    moe_mutex_unlock(&m->lock);
    return moe_ok();
}

static void describe_layer(const struct entry *e, size_t i, struct moe_group_layer_memory *out)
{
    static const uint32_t first = 0; /* all experts of a layer are alike */
    out->spec = e->spec_table[i];
    out->common_file_bytes = moe_model_layer_bytes(e->model, i, &first, 0);
    out->common_resident_bytes = moe_model_layer_memory(e->model, i, &first, 0);
    out->expert_file_bytes = moe_model_layer_bytes(e->model, i, &first, 1) - out->common_file_bytes;
    out->expert_resident_bytes =
        moe_model_layer_memory(e->model, i, &first, 1) - out->common_resident_bytes;
}

static void report_open(struct moe_models *m, const struct entry *e, uint64_t order)
{
    struct moe_device_info info;
    size_t count = e->known.layer_count;
    struct moe_group_layer_memory *layers = calloc(count + 1, sizeof *layers);
    if (layers == NULL) {
        moe_models__answer(m, e->known.number, MOE_MODEL_OPEN, order, 0, no_memory());
        return;
    }
    for (size_t i = 0; i < count; i++)
        describe_layer(e, i, &layers[i]);
    m->config.backend->device_info(m->config.device, &info);
    const struct moe_group_model_report report = {
        .model = e->known.number,
        .step = MOE_MODEL_OPEN,
        .order = order,
        .fingerprint = moe_model_fingerprint(e->model),
        .family = e->family,
        .layers = layers,
        .layer_count = count,
        .free_bytes = info.free_bytes,
    };
    m->config.report(m->config.ctx, &report);
    free(layers);
}

static void run_open(void *ctx, void *argument)
{
    struct moe_models *m = ctx;
    struct task *t = argument;
    struct entry *e = t->entry;
    struct moe_status st = check_listed(m, e);
    bool opens = !moe_failed(&st) && !e->opened;
    if (opens)
        st = moe_error_context(open_model(m, e), "%.100s", e->directory);
    if (moe_failed(&st))
        moe_log_warn("model %s: %s", e->name, st.text);
    if (opens && moe_failed(&st)) {
        moe_mutex_lock(&m->lock);
        moe_models__unlink(m, e);
        moe_mutex_unlock(&m->lock);
        moe_models__free_weights(e);
    }
    if (moe_failed(&st))
        moe_models__answer(m, e->known.number, MOE_MODEL_OPEN, t->order, 0, st);
    else
        report_open(m, e, t->order);
    free_task(t);
}

/* --------------------------------------------------------------------------- LOAD */

/* Takes the layers from the engine. */
static struct moe_status withdraw(struct moe_models *m, struct entry *e, struct moe_status why)
{
    if (!e->loaded)
        return moe_ok();
    MOE_TRY(moe_engine_remove_model(m->config.engine, e->known.number, why));
    moe_row_metrics_destroy(e->row_metrics);
    e->row_metrics = NULL;
    moe_mutex_lock(&m->lock);
    e->loaded = e->served = false;
    moe_mutex_unlock(&m->lock);
    return moe_ok();
}

static struct moe_status offer(struct moe_models *m, struct entry *e)
{
    struct moe_engine_layers layers = {.model = e->known.number,
                                       .layers = moe_loader_layers(e->loader),
                                       .specs = moe_loader_specs(e->loader),
                                       .placements = moe_loader_placements(e->loader),
                                       .count = moe_loader_layer_count(e->loader)};
    MOE_TRY(moe_row_metrics_create(m->config.metrics, e->name, layers.specs, layers.count,
                                   m->config.row_metrics, &e->row_metrics));
    layers.row_metrics = e->row_metrics;
    MOE_TRY(moe_engine_add_model(m->config.engine, &layers));
    moe_mutex_lock(&m->lock);
    e->loaded = true;
    moe_mutex_unlock(&m->lock);
    return moe_ok();
}

/* After a failure nothing is loaded: an empty loader takes the place of the full one. */
static struct moe_status forget_layers(struct moe_models *m, struct entry *e)
{
    struct moe_loader *empty, *full = e->loader;
    MOE_TRY(create_loader(m, e, &empty));
    moe_mutex_lock(&m->lock);
    e->loader = empty;
    moe_mutex_unlock(&m->lock);
    moe_row_metrics_destroy(e->row_metrics);
    e->row_metrics = NULL;
    moe_loader_destroy(full);
    return moe_ok();
}

static struct moe_status load(struct moe_models *m, struct entry *e,
                              const struct moe_group_assignment *a)
{
    if (!e->opened)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "model %s is not open", e->name);
    if (e->loaded && moe_loader_holds(e->loader, a))
        return moe_ok();
    MOE_TRY(withdraw(m, e,
                     moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_MODEL_LOADING, 0,
                                     "model %s is loaded again", e->name)));
    MOE_TRY(moe_loader_load(e->loader, a));
    struct moe_status st = offer(m, e);
    if (moe_failed(&st))
        MOE_TRY(forget_layers(m, e));
    return st;
}

static struct moe_status pass_digests(void *ctx, moe_group_part_fn add, void *add_ctx)
{
    return moe_loader_pass_digests(ctx, add, add_ctx);
}

static void run_load(void *ctx, void *argument)
{
    struct moe_models *m = ctx;
    struct task *t = argument;
    struct entry *e = t->entry;
    struct moe_group_model_report report = {
        .model = e->known.number, .step = MOE_MODEL_LOAD, .order = t->order};
    report.status = check_listed(m, e);
    if (!moe_failed(&report.status))
        report.status = load(m, e, &t->copy.assignment);
    if (moe_failed(&report.status)) {
        moe_log_warn("model %s is not loaded: %s", e->name, report.status.text);
    } else {
        report.digests = pass_digests;
        report.digests_ctx = e->loader;
    }
    m->config.report(m->config.ctx, &report);
    free_task(t);
}

/* -------------------------------------------------------------------------- CLOSE */

static void run_close(void *ctx, void *argument)
{
    struct moe_models *m = ctx;
    struct task *t = argument;
    struct entry *e = t->entry;
    struct moe_status st = is_stopped(m)
                               ? moe_ok()
                               : withdraw(m, e,
                                          moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND,
                                                    "model %s was unloaded", e->name));
    moe_mutex_lock(&m->lock);
    bool gone = m->stopped || moe_models__find(m, e->known.number) != e;
    if (moe_failed(&st))
        e->closing = false;
    else if (!gone)
        moe_models__unlink(m, e);
    moe_mutex_unlock(&m->lock);
    if (!moe_failed(&st) && !gone) {
        moe_models__free_weights(e);
        moe_log_info("model %s is closed", e->name);
    }
    moe_models__answer(m, e->known.number, MOE_MODEL_CLOSE, t->order, 0, st);
    free_task(t);
}

/* ------------------------------------------------------------- tasks for the executor */

/* Takes over a reference of `e`. */
static void post(struct moe_models *m, struct entry *e, moe_serial_task_fn run,
                 const struct moe_group_model_order *o)
{
    struct task *t = calloc(1, sizeof *t);
    struct moe_status st = no_memory();
    if (t == NULL) {
        moe_mutex_lock(&m->lock);
        moe_models__drop(e);
        moe_mutex_unlock(&m->lock);
    } else {
        *t = (struct task){.models = m, .entry = e, .order = o->order};
        st = moe_assignment_copy(&o->assignment, &t->copy);
        if (!moe_failed(&st))
            st = moe_serial_executor_post(m->executor, run, m, t);
        if (moe_failed(&st))
            free_task(t);
    }
    if (moe_failed(&st))
        moe_models__answer(m, o->model, o->step, o->order, o->epoch, st);
}

/* ------------------------------------------------------------------------- orders */

static bool is_name(const char *name)
{
    return moe_training_name_ok(name) && strlen(name) < MOE_MODELS_NAME_BYTES;
}

static struct moe_status check_open(const struct moe_models *m,
                                    const struct moe_group_model_order *o) MOE_REQUIRES(m->lock)
{
    if (o->model == 0 || o->model > MOE_MODEL_NUMBER_MAX || !is_name(o->name) ||
        o->directory[0] != '/')
        return moe_error(
            MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID,
            "a model needs a number, a name of 1 to 63 characters A-Z a-z 0-9 . _ - that "
            "begins with no dot, and an absolute path");
    bool taken = strcmp(o->name, m->config.default_model) == 0;
    for (const struct entry *e = m->first; e != NULL; e = e->next)
        taken = taken || strcmp(o->name, e->name) == 0;
    if (taken)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NAME_INVALID,
                         "this worker has a model %s already", o->name);
    if (m->count == MOE_ADDED_MODELS_MAX)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE,
                         "a group has at most %d added models", MOE_ADDED_MODELS_MAX);
    return moe_ok();
}

static struct entry *new_entry(struct moe_models *m, const struct moe_group_model_order *o)
{
    struct entry *e = calloc(1, sizeof *e);
    char *directory = strdup(o->directory);
    if (e == NULL || directory == NULL) {
        free(e);
        free(directory);
        return NULL;
    }
    e->owner = m;
    e->directory = directory;
    e->references = 1;
    (void)snprintf(e->name, sizeof e->name, "%s", o->name);
    e->known = (struct moe_added_model){
        .number = o->model, .name = e->name, .family = "", .digest = e->digest};
    return e;
}

static void insert(struct moe_models *m, struct entry *e) MOE_REQUIRES(m->lock)
{
    struct entry **at = &m->first;
    while (*at != NULL && (*at)->known.number < e->known.number)
        at = &(*at)->next;
    e->next = *at;
    *at = e;
    m->count++;
}

static struct moe_status find_or_add(struct moe_models *m, const struct moe_group_model_order *o,
                                     struct entry **out) MOE_REQUIRES(m->lock)
{
    *out = moe_models__find(m, o->model);
    if (*out != NULL)
        return moe_ok();
    MOE_TRY(check_open(m, o));
    *out = new_entry(m, o);
    if (*out == NULL)
        return no_memory();
    insert(m, *out);
    return moe_ok();
}

static void order_open(struct moe_models *m, const struct moe_group_model_order *o)
{
    struct entry *e;
    moe_mutex_lock(&m->lock);
    struct moe_status st = find_or_add(m, o, &e);
    if (!moe_failed(&st))
        e->references++;
    moe_mutex_unlock(&m->lock);
    if (moe_failed(&st))
        moe_models__answer(m, o->model, o->step, o->order, 0, st);
    else
        post(m, e, run_open, o);
}

static void order_load(struct moe_models *m, const struct moe_group_model_order *o)
{
    moe_mutex_lock(&m->lock);
    struct entry *e = moe_models__find(m, o->model);
    if (e != NULL)
        e->references++;
    moe_mutex_unlock(&m->lock);
    if (e != NULL)
        post(m, e, run_load, o);
    else
        moe_models__answer(
            m, o->model, o->step, o->order, 0,
            moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "model %u is not open", o->model));
}

/* A load ends soon. */
static void order_close(struct moe_models *m, const struct moe_group_model_order *o)
{
    moe_mutex_lock(&m->lock);
    struct entry *e = moe_models__find(m, o->model);
    if (!o->again)
        moe_models__unlist(m, o->model);
    if (e != NULL) {
        e->references++;
        e->closing = true;
        e->quiesce_order = 0;
        if (e->loader != NULL)
            moe_loader_cancel(e->loader);
    }
    moe_mutex_unlock(&m->lock);
    if (e != NULL)
        post(m, e, run_close, o);
    else
        moe_models__answer(m, o->model, o->step, o->order, 0, moe_ok());
}

static void order_add(struct moe_models *m, const struct moe_group_model_order *o)
{
    moe_mutex_lock(&m->lock);
    struct entry *e = moe_models__find(m, o->model);
    bool loaded = e != NULL && e->loaded && !e->closing, has_run = false;
    if (loaded) {
        e->add.order = o->order;
        e->add.ordered_epoch = o->epoch;
        if (!e->served)
            (void)snprintf(e->digest, sizeof e->digest, "%s", o->digest);
        has_run = e->add.run_epoch == o->epoch;
        e->served = e->served || has_run;
    }
    moe_mutex_unlock(&m->lock);
    if (loaded && !has_run)
        m->config.change(m->config.ctx, o->epoch, o->model, true);
    if (!loaded || has_run)
        moe_models__answer(m, o->model, o->step, o->order, o->epoch,
                           loaded ? moe_ok()
                                  : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                                              "model %u is not loaded", o->model));
}

/* A slot that has neither an order nor a ticket to add it in this epoch has nothing to wait for. */
static void order_remove(struct moe_models *m, const struct moe_group_model_order *o)
{
    moe_mutex_lock(&m->lock);
    struct entry *e = moe_models__find(m, o->model);
    bool waits = e != NULL && e->remove.run_epoch != o->epoch &&
                 (e->add.ordered_epoch == o->epoch || e->add.run_epoch == o->epoch);
    if (e != NULL) {
        e->remove.order = o->order;
        e->remove.ordered_epoch = o->epoch;
    }
    moe_mutex_unlock(&m->lock);
    if (waits)
        m->config.change(m->config.ctx, o->epoch, o->model, false);
    else
        moe_models__answer(m, o->model, o->step, o->order, o->epoch, moe_ok());
}

/* What is to be reported now; false while requests run. */
static bool quiesce(struct entry *e, const struct moe_group_model_order *o, struct moe_status *st)
{
    *st = moe_ok();
    if (o->if_idle && !o->resume && e->requests > 0) {
        *st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE,
                        "%u requests for model %s are in flight", e->requests, e->name);
        return true;
    }
    bool now = o->resume || e->requests == 0;
    e->quiesced = !o->resume;
    e->quiesce_order = now ? 0 : o->order;
    return now;
}

static void order_quiesce(struct moe_models *m, const struct moe_group_model_order *o)
{
    struct moe_status st = moe_ok();
    moe_mutex_lock(&m->lock);
    struct entry *e = moe_models__find(m, o->model);
    bool now = e == NULL || quiesce(e, o, &st);
    moe_mutex_unlock(&m->lock);
    if (now)
        moe_models__answer(m, o->model, o->step, o->order, 0, st);
}

static bool is_listed(uint32_t number, const uint32_t *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (numbers[i] == number)
            return true;
    return false;
}

static void list_models(struct moe_models *m, const uint32_t *numbers, const char *const *names,
                        size_t count) MOE_REQUIRES(m->lock)
{
    memset(m->listed, 0, sizeof m->listed);
    for (size_t i = 0; i < count && i < MOE_ADDED_MODELS_MAX; i++) {
        if (!is_name(names[i]))
            continue;
        m->listed[i].number = numbers[i];
        strcpy(m->listed[i].name, names[i]);
    }
}

void moe_models_keep(struct moe_models *m, const uint32_t *numbers, const char *const *names,
                     size_t count)
{
    uint32_t others[MOE_ADDED_MODELS_MAX];
    size_t n = 0;
    if (is_stopped(m))
        return;
    moe_mutex_lock(&m->lock);
    list_models(m, numbers, names, count);
    for (const struct entry *e = m->first; e != NULL && n < MOE_ADDED_MODELS_MAX; e = e->next)
        if (!e->closing && !is_listed(e->known.number, numbers, count))
            others[n++] = e->known.number;
    moe_mutex_unlock(&m->lock);
    for (size_t i = 0; i < n; i++) {
        moe_log_info("model %u: the group does not have it any more", others[i]);
        order_close(m,
                    &(struct moe_group_model_order){.model = others[i], .step = MOE_MODEL_CLOSE});
    }
}

void moe_models_order(struct moe_models *m, const struct moe_group_model_order *order)
{
    if (is_stopped(m))
        return;
    switch (order->step) {
    case MOE_MODEL_OPEN: order_open(m, order); return;
    case MOE_MODEL_LOAD: order_load(m, order); return;
    case MOE_MODEL_ADD: order_add(m, order); return;
    case MOE_MODEL_QUIESCE: order_quiesce(m, order); return;
    case MOE_MODEL_REMOVE: order_remove(m, order); return;
    case MOE_MODEL_CLOSE: order_close(m, order); return;
    default: break; /* of the default model */
    }
    moe_log_warn("an order about model %u is of an unknown step", order->model);
}
