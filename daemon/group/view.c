/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a view: load, form, read, serve and leave, each a task, and the messages and events
 * that begin and end them. The coordinator alone decides membership. */
#include "group/state.h"

#include "base/clock.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "group/report.h"

#include <stdlib.h>
#include <string.h>

/* An attempt to form a view takes at most two leases, and another one may follow. */
enum { SESSION_LEASES = 4 };

/* ------------------------------------------------------------------------ tasks */

struct moe_status moe_group__send_blob(void *ctx, uint64_t epoch, uint32_t round, const void *data,
                                       size_t length)
{
    struct moe_group *g = ctx;
    moe_mutex_lock(&g->lock);
    struct moe_status st =
        g->stream != NULL
            ? moe_report_blob(g->stream, epoch, round, data, length)
            : moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "the coordinator is not connected");
    moe_mutex_unlock(&g->lock);
    return st;
}

void moe_group__read_layers(Moe__V1__LayerPlacement *const *layers, size_t count,
                            struct moe_group_layer *out)
{
    for (size_t i = 0; i < count; i++)
        out[i] = (struct moe_group_layer){
            .layer = layers[i]->layer,
            .copies = layers[i]->copies,
            .experts = layers[i]->n_copies,
            .slots = layers[i]->slots,
            .slot_count = layers[i]->n_slots,
        };
}

struct load_task {
    uint32_t slot, slots;
    Moe__V1__SessionResponse *response; /* holds the assignment */
};

static void run_load(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    struct load_task *task = argument;
    const Moe__V1__Assign *a = task->response->assign;
    struct moe_group_layer *layers = calloc(a->n_layers + 1, sizeof *layers);
    struct parts parts = {0};
    struct moe_status st;
    if (layers == NULL) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                       "no memory for an assignment");
    } else {
        moe_group__read_layers(a->layers, a->n_layers, layers);
        const struct moe_group_assignment assignment = {
            .slot = task->slot,
            .slots = task->slots,
            .placement_version = a->placement_version,
            .spare_experts = a->spare_experts,
            .keep = a->keep != 0,
            .layers = layers,
            .layer_count = a->n_layers,
        };
        st = g->config.hooks.load(g->config.hooks.ctx, &assignment);
    }
    if (!moe_failed(&st))
        st = g->config.hooks.digests(g->config.hooks.ctx, moe_group__add_part, &parts);
    moe_group__post_parts(g, EVENT_LOADED, a->placement_version, a->order, st, &parts);
    free(parts.bytes);
    free(layers);
    moe__v1__session_response__free_unpacked(task->response, NULL);
    free(task);
}

struct read_task {
    uint64_t order;
    uint32_t slot, slots;
    struct moe_saved_training state;
};

static void run_read(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    struct read_task *task = argument;
    const struct parts none = {0};
    struct moe_status st =
        g->config.hooks.read_checkpoint(g->config.hooks.ctx, &task->state, task->slot, task->slots);
    moe_group__post_parts(g, EVENT_READ, 0, task->order, st, &none);
    free(task);
}

static struct moe_status allgather(void *ctx, const void *mine, void *all, size_t bytes)
{
    struct moe_group *g = ctx;
    uint64_t deadline_ns = moe_clock_ns() + g->config.gather_ms * MOE_NS_PER_MS;
    return moe_gather_exchange(g->gather, mine, all, bytes, deadline_ns);
}

static void post_formed(struct moe_group *g, uint64_t epoch, uint64_t slots, struct moe_status st)
{
    struct event *e = moe_group__new_event(EVENT_FORMED, 0);
    if (e == NULL)
        return;
    e->number = epoch;
    e->slots = slots;
    e->status = st;
    moe_mutex_lock(&g->lock);
    moe_group__append_event(g, e);
    moe_mutex_unlock(&g->lock);
}

struct form_task {
    struct moe_group_view view;         /* points into the response */
    Moe__V1__SessionResponse *response; /* holds the members' texts */
};

static void run_form(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    struct form_task *task = argument;
    moe_gather_begin(g->gather, task->view.epoch, task->view.slots, task->view.live);
    uint64_t slots = 0;
    struct moe_status st =
        g->config.hooks.form(g->config.hooks.ctx, &task->view, allgather, g, &slots);
    post_formed(g, task->view.epoch, slots, st);
    moe__v1__session_response__free_unpacked(task->response, NULL);
    free(task);
}

static void run_serve(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    uint64_t *epoch = argument;
    struct moe_status st = g->config.hooks.serve(g->config.hooks.ctx);
    moe_group__post(g, EVENT_SERVED, *epoch, 0, st);
    free(epoch);
}

static void run_leave(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    (void)argument;
    g->config.hooks.leave(g->config.hooks.ctx);
}

static void run_drop_session(void *ctx, void *argument)
{
    struct moe_group *g = ctx;
    (void)argument;
    g->config.hooks.leave(g->config.hooks.ctx); /* an earlier one may have had no memory */
    g->config.hooks.drop_session(g->config.hooks.ctx);
}

static void run_last_leave(void *ctx, void *argument)
{
    run_leave(ctx, argument);
    moe_group__post(ctx, EVENT_LEFT, 0, 0, moe_ok());
}

/* ------------------------------------------------------------------ ends of a view */

void moe_group__post_leave(struct moe_group *g, bool last)
{
    struct moe_status st =
        moe_serial_executor_post(g->executor, last ? run_last_leave : run_leave, g, NULL);
    if (moe_failed(&st))
        moe_log_error("group: %s", st.text);
}

/* The next view may be a mask of the session, but its windows take memory. */
static void limit_session(struct moe_group *g)
{
    g->session_end_ns = moe_clock_ns() + SESSION_LEASES * g->lease_ms * MOE_NS_PER_MS;
}

/* A mask of it that is asked for later fails, and the next view has a new session. */
void moe_group__drop_session(struct moe_group *g)
{
    g->session_end_ns = MOE_NEVER;
    g->session = (struct moe_group_session){0};
    struct moe_status st = moe_serial_executor_post(g->executor, run_drop_session, g, NULL);
    if (moe_failed(&st))
        moe_log_error("group: %s", st.text);
}

void moe_group__end_view(struct moe_group *g, const char *why)
{
    if (g->forming == 0 && g->epoch == 0)
        return;
    uint64_t epoch = g->forming != 0 ? g->forming : g->epoch;
    moe_log_write(g->shutdown == RUNNING ? MOE_LOG_WARN : MOE_LOG_INFO, "epoch %llu is over: %s",
                  (unsigned long long)epoch, why);
    if (g->shutdown == RUNNING)
        moe_notify_status("not serving: epoch %llu is over: %s", (unsigned long long)epoch, why);
    if (g->epoch != 0 || g->committed)
        g->give_up_ns = moe_clock_ns() + g->config.reform_ms * MOE_NS_PER_MS;
    if (g->shutdown != RUNNING)
        g->give_up_ns = moe_clock_ns(); /* this worker joins no further view */
    g->forming = g->epoch = 0;
    g->committed = false;
    limit_session(g);
    moe_gather_abort(g->gather, epoch);
    g->config.hooks.allow_next_load(g->config.hooks.ctx, false);
    moe_group__post_leave(g, false);
}

void moe_group__on_lost(struct moe_group *g, const struct event *e)
{
    bool current =
        e->number != 0 && (e->number == g->epoch || (g->committed && e->number == g->forming));
    if (!current)
        return;
    moe_report_peer_lost(g->stream, e->number, e->slots);
    moe_group__end_view(g, e->status.text);
}

/* -------------------------------------------------------- messages of the coordinator */

/* A view forms here, or experts are loaded: this does not wait for a read. */
static void end_read(struct moe_group *g)
{
    if (g->reads > 0)
        g->config.hooks.allow_read(g->config.hooks.ctx, false);
}

static struct moe_status post_read(struct moe_group *g, const Moe__V1__ReadCheckpoint *r)
{
    const Moe__V1__SavedTraining *s = r->state;
    if (g->config.hooks.read_checkpoint == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "this worker does not train");
    if (s == NULL || !moe_training_name_ok(s->checkpoint))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "no checkpoint is named");
    struct read_task *task = calloc(1, sizeof *task);
    if (task == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a task");
    *task = (struct read_task){.order = r->order,
                               .slot = g->slot,
                               .slots = g->slots,
                               .state = {.lineage = s->lineage,
                                         .weights_version = s->weights_version,
                                         .calls = s->calls,
                                         .record = s->record}};
    strcpy(task->state.checkpoint, s->checkpoint);
    if (g->reads == 0) /* else an earlier one may have been ended, and must end */
        g->config.hooks.allow_read(g->config.hooks.ctx, true);
    struct moe_status st = moe_serial_executor_post(g->executor, run_read, g, task);
    if (moe_failed(&st))
        free(task);
    else
        g->reads++;
    return st;
}

void moe_group__on_read_checkpoint(struct moe_group *g, const Moe__V1__ReadCheckpoint *r)
{
    if (g->shutdown >= LEAVING)
        return;
    struct moe_status st = post_read(g, r);
    if (moe_failed(&st))
        moe_report_checkpoint_read(g->stream, r->order, &st);
}

void moe_group__on_assign(struct moe_group *g, Moe__V1__SessionResponse *response)
{
    end_read(g);
    struct load_task *task = calloc(1, sizeof *task);
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for an assignment");
    uint32_t version = response->assign->placement_version;
    uint64_t order = response->assign->order;
    uint32_t slots = response->assign->slots != 0 ? response->assign->slots : g->slots;
    g->config.hooks.allow_next_load(g->config.hooks.ctx, response->assign->keep != 0);
    if (task != NULL) {
        *task = (struct load_task){g->slot, slots, response};
        st = moe_serial_executor_post(g->executor, run_load, g, task);
    }
    if (!moe_failed(&st))
        return;
    free(task);
    moe__v1__session_response__free_unpacked(response, NULL);
    moe_report_loaded(g->stream, version, order, &st);
}

static struct moe_status read_view(const struct moe_group *g, const Moe__V1__Prepare *p,
                                   struct moe_group_view *view)
{
    if (p->epoch < g->floor)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH,
                         "this worker accepts no epoch below %llu", (unsigned long long)g->floor);
    uint32_t bucket = p->max_tokens_per_step;
    bool sound = p->slots <= g->slots && g->slot < p->slots &&
                 p->secret.len == sizeof view->secret && bucket != 0 &&
                 (bucket & (bucket - 1)) == 0 && bucket <= g->config.identity.max_tokens_per_step;
    *view = (struct moe_group_view){
        .epoch = p->epoch,
        .slot = g->slot,
        .slots = p->slots,
        .session_epoch = p->session_epoch,
        .placement_version = p->placement_version,
        .placement_hash = p->placement_hash,
        .max_tokens_per_step = bucket,
        .group_id = p->group_id,
        .may_shrink = p->may_shrink != 0,
        .has_heirs = p->has_heirs != 0,
        .partial = p->partial != 0,
        .model = p->model,
        .model_digest = p->model_digest,
    };
    if (sound)
        memcpy(view->secret, p->secret.data, sizeof view->secret);
    for (size_t i = 0; sound && i < p->n_members; i++) {
        const Moe__V1__Member *m = p->members[i];
        sound = m->slot < p->slots && (view->live >> m->slot & 1) == 0;
        if (!sound)
            break;
        view->live |= UINT64_C(1) << m->slot;
        view->members[m->slot] = (struct moe_group_member){
            m->worker_id, m->endpoint, m->control_endpoint, m->incarnation, "", "", ""};
        if (m->host != NULL) {
            view->members[m->slot].host_id = m->host->id;
            view->members[m->slot].domain = m->host->domain;
            view->members[m->slot].network_address = m->host->network_address;
        }
    }
    if (!sound || (view->live >> g->slot & 1) == 0 ||
        view->members[g->slot].incarnation != g->config.identity.incarnation)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "PREPARE of epoch %llu does not fit this worker",
                         (unsigned long long)p->epoch);
    return moe_ok();
}

void moe_group__on_prepare(struct moe_group *g, Moe__V1__SessionResponse *response)
{
    uint64_t epoch = response->prepare->epoch;
    struct form_task *task = calloc(1, sizeof *task);
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a view");
    if (task == NULL)
        goto refuse;
    task->response = response;
    MOE_TRY_GOTO(st, read_view(g, response->prepare, &task->view), refuse);
    moe_group__end_view(g, "a new epoch is prepared");
    end_read(g);
    const bool joins = task->view.session_epoch == 0; /* and leaves the session before */
    const struct moe_group_session new_session = {.epoch = epoch,
                                                  .max_tokens = task->view.max_tokens_per_step};
    MOE_TRY_GOTO(st, moe_serial_executor_post(g->executor, run_form, g, task), refuse);
    moe_group__send_heartbeat(g); /* this worker is there, however long it takes to form */
    if (joins)
        g->session = new_session;
    g->session_end_ns = MOE_NEVER;
    g->forming = epoch;
    g->floor = epoch + 1;
    return;
refuse:
    free(task);
    moe__v1__session_response__free_unpacked(response, NULL);
    moe_report_ready(g->stream, epoch, 0, &st);
}

void moe_group__on_blobs(struct moe_group *g, const Moe__V1__Blobs *b)
{
    for (size_t i = 0; i < b->n_blobs; i++)
        moe_gather_deliver(g->gather, b->epoch, b->round, b->blobs[i]->slot, b->blobs[i]->data.data,
                           b->blobs[i]->data.len);
}

void moe_group__on_commit(struct moe_group *g, uint64_t epoch)
{
    if (epoch != g->forming || g->committed)
        return;
    struct moe_status st =
        moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a view");
    uint64_t *argument = malloc(sizeof *argument);
    g->committed = true;
    if (argument != NULL) {
        *argument = epoch;
        st = moe_serial_executor_post(g->executor, run_serve, g, argument);
    }
    if (!moe_failed(&st))
        return;
    free(argument);
    moe_group__post(g, EVENT_LOST, epoch, 0, st);
}

void moe_group__on_abort(struct moe_group *g, const Moe__V1__Abort *a)
{
    if (a->epoch != 0 && (a->epoch == g->forming || a->epoch == g->epoch))
        moe_group__end_view(g, a->reason);
}

/* ------------------------------------------------------------------- ends of tasks */

void moe_group__on_loaded(struct moe_group *g, const struct event *e)
{
    if (moe_failed(&e->status)) /* a worker that shuts down cancels its load */
        moe_log_write(g->shutdown == RUNNING ? MOE_LOG_ERROR : MOE_LOG_INFO, "cannot load: %s",
                      e->status.text);
    const uint8_t *part;
    size_t at = 0, length;
    while (!moe_failed(&e->status) && moe_group__next_part(e, &at, &part, &length))
        moe_report_digests(g->stream, part, length);
    moe_report_loaded(g->stream, (uint32_t)e->number, e->order, &e->status);
}

void moe_group__on_read(struct moe_group *g, const struct event *e)
{
    g->reads--;
    if (moe_failed(&e->status))
        moe_log_warn("the state of training is not read: %s", e->status.text);
    moe_report_checkpoint_read(g->stream, e->order, &e->status);
}

void moe_group__on_formed(struct moe_group *g, const struct event *e)
{
    if (e->number != g->forming)
        return;
    if (moe_failed(&e->status)) {
        moe_log_warn("epoch %llu does not form: %s", (unsigned long long)e->number, e->status.text);
        g->forming = 0;
        limit_session(g);
    } else {
        g->session.together = e->slots;
    }
    moe_report_ready(g->stream, e->number, e->slots, &e->status);
}

void moe_group__on_served(struct moe_group *g, const struct event *e)
{
    if (e->number != g->forming)
        return;
    if (moe_failed(&e->status)) {
        moe_group__on_lost(g, e);
        return;
    }
    g->epoch = e->number;
    g->forming = 0;
    g->committed = false;
    g->give_up_ns = MOE_NEVER;
    moe_log_info("serving under epoch %llu", (unsigned long long)g->epoch);
    moe_notify_status("serving under epoch %llu", (unsigned long long)g->epoch);
    moe_group__send_heartbeat(g);
}
