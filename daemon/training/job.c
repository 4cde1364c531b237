/* SPDX-License-Identifier: Apache-2.0 */
/* Save, Load and Export while steps go on. The job machine decides (job_machine.h); this file gives
 * each part a thread, exchanges the reports at tickets, and carries out the actions.
 *
 * Threads: tickets, and ends of views, come on the engine's thread. A part ends on its own thread,
 * which then asks for a progress ticket until it has one. Both give inputs to the machine under the
 * room's lock, take all its actions under the same lock, and carry them out without it. */
#include "training/parts.h"

#include "base/clock.h"
#include "base/thread.h"
#include "daemon/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ASK_PAUSE_NS = 20000000 };

/* --------------------------------------------------------------------------- objects */

static void free_placements(struct moe_train_job *j)
{
    for (size_t i = 0; j->placements != NULL && i < j->context.layer_count; i++) {
        free((void *)(uintptr_t)j->placements[i].offset);
        free((void *)(uintptr_t)j->placements[i].slot);
    }
    free(j->placements);
}

static void join_threads(struct moe_train_job *j)
{
    while (j->threads > 0)
        (void)pthread_join(j->thread[--j->threads], NULL);
}

/* Its threads have ended, or end at once. */
static void free_job(struct moe_train_job *j)
{
    if (j == NULL)
        return;
    join_threads(j);
    moe_checkpoint_copy_free(j->copy);
    moe_checkpoint_state_free(&j->state);
    free_placements(j);
    free(j);
}

static void *copy_of(const void *from, size_t bytes)
{
    void *to = malloc(bytes + 1);
    if (to != NULL)
        memcpy(to, from, bytes);
    return to;
}

static bool copy_placements(struct moe_train_job *j, const struct moe_placement *from, size_t count)
{
    j->placements = calloc(count + 1, sizeof *j->placements);
    bool good = j->placements != NULL;
    for (size_t i = 0; good && i < count; i++) {
        const struct moe_placement *p = &from[i];
        j->placements[i] = *p;
        j->placements[i].offset = copy_of(p->offset, ((size_t)p->experts + 1) * sizeof *p->offset);
        j->placements[i].slot = copy_of(p->slot, p->offset[p->experts] * sizeof *p->slot);
        good = j->placements[i].offset != NULL && j->placements[i].slot != NULL;
    }
    j->context.placements = j->placements;
    return good;
}

/* The job of a call, and all that must be read while no step runs. */
static struct moe_status create_job(struct moe_train *t, const struct moe_train_call *call,
                                    struct moe_train_job **out)
{
    struct moe_train_call progress = *call;
    struct moe_train_job *j = *out = calloc(1, sizeof *j);
    if (j == NULL)
        return moe_train__out_of_memory();
    progress.is_progress = true;
    progress.lineage = 0; /* it names the job, under any lineage */
    moe_train_call_pack(&progress, j->progress.body, &j->progress.length);
    j->train = t;
    j->call = *call;
    j->lineage = t->lineage;
    j->calls = moe_ledger_count(t->ledger);
    j->begun_ns = moe_clock_ns();
    j->context = moe_train__context_of(t);
    j->context.cancel = &j->cancel;
    j->context.processed = &j->processed;
    j->context.expected = &j->expected;
    j->state = (struct moe_checkpoint_state){.lineage = t->lineage,
                                             .weights_version = t->weights_version,
                                             .steps = t->steps,
                                             .frozen = t->frozen,
                                             .explicit_loads = t->explicit_loads};
    strcpy(j->state.parent, t->checkpoint);
    if (!copy_placements(j, t->placements, t->config.layer_count))
        return moe_train__out_of_memory();
    return call->kind == MOE_STEP_SAVE ? moe_train__pack_records(j) : moe_ok();
}

/* Frees an orphan with no work left; with `wait`, waits for its work. */
static void free_orphan(struct moe_train *t, bool wait)
{
    moe_mutex_lock(&t->lock);
    bool ended = wait || t->machine.orphan.part == MOE_JOB_NONE;
    struct moe_train_job *orphan = ended ? t->orphan : NULL;
    t->orphan = ended ? NULL : t->orphan;
    moe_mutex_unlock(&t->lock);
    free_job(orphan);
}

/* --------------------------------------------------------------------------- threads */

struct actions {
    struct moe_job_action list[MOE_JOB_ACTIONS_MAX];
    size_t count;
};

static void take_actions(struct moe_train *t, struct actions *out) MOE_REQUIRES(t->lock)
{
    for (out->count = 0; moe_job_next_action(&t->machine, &out->list[out->count]);)
        out->count++;
}

static bool wants_ticket(struct moe_train *t, const struct moe_train_job *j)
{
    moe_mutex_lock(&t->lock);
    bool wants = t->machine.number == j->number && moe_job_wants_ticket(&t->machine);
    moe_mutex_unlock(&t->lock);
    return wants;
}

/* False when there is no room for it at the moment. */
static bool request_ticket(struct moe_train *t, const struct moe_train_job *j)
{
    return t->request(t->engine, j->call.kind, &j->progress);
}

static void end_part(struct moe_train *t, struct moe_train_job *j, enum moe_job_part part,
                     const struct moe_job_end *end, struct actions *next)
{
    moe_mutex_lock(&t->lock);
    moe_job_on_part_ended(&t->machine, j->number, part, end);
    take_actions(t, next);
    moe_mutex_unlock(&t->lock);
}

/* The part that START begins; NONE where no action is one. */
static enum moe_job_part started(const struct actions *a)
{
    for (size_t i = 0; i < a->count; i++)
        if (a->list[i].kind == MOE_JOB_START)
            return a->list[i].part;
    return MOE_JOB_NONE;
}

static void *run_thread(void *arg)
{
    struct moe_train_job *j = arg;
    struct moe_train *t = j->train;
    struct actions next;
    for (enum moe_job_part part = j->part; part != MOE_JOB_NONE; part = started(&next)) {
        const struct moe_job_end end = moe_train__run_part(j, part);
        end_part(t, j, part, &end, &next); /* an orphan may start another part */
    }
    while (wants_ticket(t, j) && !request_ticket(t, j))
        (void)nanosleep(&(struct timespec){.tv_nsec = ASK_PAUSE_NS}, NULL);
    return NULL;
}

/* Earlier threads of the job have nothing left to do but to see that no ticket is wanted. */
static void start_thread(struct moe_train *t, struct moe_train_job *j, enum moe_job_part part)
{
    struct actions next;
    j->part = part;
    int rc = moe_thread_create(&j->thread[j->threads], "moe-train-job", run_thread, j);
    if (rc == 0) {
        j->threads++;
        return;
    }
    const struct moe_job_end end = {.status = moe_thread_failure("moe-train-job", rc)};
    if (part != MOE_JOB_NONE)
        end_part(t, j, part, &end, &next);
    if (wants_ticket(t, j))
        (void)request_ticket(t, j);
}

/* --------------------------------------------------------------------------- actions */

/* One ticket of a job. */
struct context {
    struct moe_train *train;
    struct moe_session *session;
    const struct moe_ticket *ticket;
    struct moe_call_exec *exec;
};

static struct moe_status take(struct moe_train *t, struct moe_call_exec *x, struct moe_job_end *end)
{
    struct moe_train_job *j = t->job;
    j->outcome.lost_steps = t->unsaved; /* changed on this thread alone */
    j->outcome.backwards = t->backwards;
    x->changes = true;
    *end = moe_train__run_part(j, MOE_JOB_TAKE);
    if (moe_failed(&end->status)) /* the view ends, and the state is inconsistent */
        return end->status;
    moe_mutex_lock(&t->lock);
    moe_train__begin_lineage(t, t->lineage + 1, t->weights_version + 1);
    moe_checkpoint_explicit_loads_add(&t->explicit_loads, j->call.name);
    moe_mutex_unlock(&t->lock);
    moe_train__note_checkpoint(t, j->call.name, t->steps);
    return moe_ok();
}

static void run_actions(const struct context *c, const struct actions *next, struct moe_status *st);

static void start_part(const struct context *c, const struct moe_job_action *a,
                       struct moe_status *st)
{
    struct moe_train *t = c->train;
    struct moe_train_job *j = t->job;
    struct actions next;
    struct moe_job_end end;
    if (moe_job_is_in_ticket(a->part)) {
        *st = take(t, c->exec, &end);
        end_part(t, j, a->part, &end, &next);
        run_actions(c, &next, st);
        return;
    }
    join_threads(j);
    if (a->part == MOE_JOB_CREATE && a->from_trainers && j->call.kind == MOE_STEP_SAVE)
        moe_log_warn("checkpoint %s: some worker has no room for a copy; weight updates wait "
                     "while it is written",
                     j->call.name);
    j->from_trainers = a->from_trainers;
    j->wrote = j->wrote || a->part == MOE_JOB_WRITE;
    start_thread(t, j, a->part);
}

static struct moe_status record(const struct context *c, const struct moe_job_action *a)
{
    struct moe_train *t = c->train;
    struct moe_train_job *j = t->job;
    struct moe_ledger_outcome *o = &j->outcome;
    o->epoch = c->ticket->epoch;
    if (j->call.kind != MOE_STEP_LOAD)
        o->bytes = a->bytes;
    if (j->call.kind == MOE_STEP_SAVE) {
        o->lineage = j->lineage; /* of the state that was copied */
        o->weights_version = a->weights_version;
        o->steps = a->steps;
        MOE_TRY(moe_train__share_removed(j, c->session, &c->exec->answer.removed));
    }
    moe_mutex_lock(&t->lock);
    moe_train__record(t, &j->call, c->ticket->descriptor.origin, o);
    bool same = j->wrote && moe_ledger_count(t->ledger) == j->calls + 1 &&
                strcmp(t->checkpoint, j->call.name) == 0;
    if (j->call.kind == MOE_STEP_SAVE && same) {
        t->saved_calls = moe_ledger_count(t->ledger);
        moe_ledger_settle(t->ledger); /* as for a slot that reads these records */
    }
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

/* Engine's thread: it is over, as `st` says. `written`: by all slots. */
static void log_end(struct moe_train *t, const struct moe_train_job *j, uint64_t written,
                    struct moe_status st)
{
    uint64_t bytes = j->call.kind == MOE_STEP_SAVE ? written : atomic_load(&j->processed);
    moe_log_debug("checkpoint %s: done with %" PRIu64 " of %" PRIu64 " bytes of this worker",
                  j->call.name, atomic_load(&j->processed), atomic_load(&j->expected));
    moe_train__log_ended(t, &j->call, j->begun_ns, bytes, j->outcome.lost_steps, st);
}

static void settle(const struct context *c, const struct moe_job_action *a)
{
    c->exec->settles = true;
    c->exec->refusal = a->status;
    c->exec->answer.outcome = c->train->job->outcome;
    log_end(c->train, c->train->job, a->bytes, a->status);
}

static void forget(struct moe_train *t)
{
    struct moe_train_job *j = t->job;
    moe_mutex_lock(&t->lock);
    t->job = NULL;
    moe_mutex_unlock(&t->lock);
    free_job(j);
}

static void run_action(const struct context *c, const struct moe_job_action *a,
                       struct moe_status *st)
{
    struct moe_train *t = c->train;
    switch (a->kind) {
    case MOE_JOB_START: start_part(c, a, st); return;
    case MOE_JOB_CANCEL: atomic_store(&t->job->cancel, true); return;
    case MOE_JOB_REQUEST_TICKET:
        if (!request_ticket(t, t->job))
            start_thread(t, t->job, MOE_JOB_NONE);
        return;
    case MOE_JOB_KEEP: moe_train__note_checkpoint(t, t->job->call.name, a->steps); return;
    case MOE_JOB_RECORD: *st = record(c, a); return;
    case MOE_JOB_SETTLE: settle(c, a); return;
    case MOE_JOB_END_VIEW: *st = a->status; return;
    case MOE_JOB_FORGET: forget(t); return;
    case MOE_JOB_BLOCK: /* the engine looks, before it reports the end of this ticket */
    case MOE_JOB_UNBLOCK: return;
    }
}

/* A failure ends the view, and the remaining actions with it. */
static void run_actions(const struct context *c, const struct actions *next, struct moe_status *st)
{
    for (size_t i = 0; i < next->count && !moe_failed(st); i++)
        run_action(c, &next->list[i], st);
}

/* --------------------------------------------------------------------------- tickets */

static const enum moe_job_kind job_kinds[MOE_STEP_KINDS] = {
    [MOE_STEP_SAVE] = MOE_JOB_SAVE,
    [MOE_STEP_LOAD] = MOE_JOB_LOAD,
    [MOE_STEP_EXPORT] = MOE_JOB_EXPORT,
};

static struct moe_status begin(struct moe_train *t, const struct moe_train_call *call,
                               uint32_t origin)
{
    struct moe_train_job *j;
    free_orphan(t, false);
    const struct moe_status prepared = create_job(t, call, &j);
    if (j == NULL)
        return prepared;
    const struct moe_job_description description = {.kind = job_kinds[call->kind],
                                                    .id = call->id,
                                                    .content = call->content,
                                                    .tidies = call->keep > 0,
                                                    .weights_version = t->weights_version,
                                                    .steps = t->steps};
    moe_mutex_lock(&t->lock);
    moe_job_on_begin(&t->machine, &description, origin, &prepared);
    j->number = t->machine.number;
    t->job = j;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

/* All slots exchange their reports. */
static struct moe_status exchange(struct moe_train *t, struct moe_session *session,
                                  struct moe_job_report all[MOE_MAX_SLOTS])
{
    struct moe_checkpoint_context *context = &t->job->context;
    struct moe_job_report mine;
    moe_mutex_lock(&t->lock);
    moe_job_report(&t->machine, &mine);
    moe_mutex_unlock(&t->lock);
    mine.writer = t->writer;
    memset(all, 0, MOE_MAX_SLOTS * sizeof *all);
    MOE_TRY(t->config.backend->session_exchange(session, &mine, all, sizeof mine));
    uint64_t writer = all[__builtin_ctzll(t->live)].writer;
    if (context->writer != writer) /* once: later on a thread may be reading it */
        context->writer = writer;
    return moe_ok();
}

struct moe_status moe_train__run_job(struct moe_train *t, struct moe_session *session,
                                     const struct moe_ticket *ticket, struct moe_call_exec *x)
{
    const struct context context = {t, session, ticket, x};
    uint32_t origin = ticket->descriptor.origin;
    struct moe_job_report all[MOE_MAX_SLOTS];
    struct actions next;
    struct moe_status st = moe_ok();
    if (!x->joined)
        MOE_TRY(begin(t, &x->call, origin));
    moe_mutex_lock(&t->lock);
    if (x->joined && !x->call.is_progress && origin < MOE_MAX_SLOTS)
        moe_job_on_join(&t->machine, origin);
    moe_mutex_unlock(&t->lock);
    MOE_TRY(exchange(t, session, all));
    moe_mutex_lock(&t->lock);
    moe_job_on_reports(&t->machine, all);
    bool began = !x->joined && moe_job_is_active(&t->machine);
    take_actions(t, &next);
    moe_mutex_unlock(&t->lock);
    if (began)
        moe_train__log_begun(t, &x->call);
    run_actions(&context, &next, &st);
    x->waits = !x->settles;
    return st;
}

/* -------------------------------------------------------------------- from other files */

const struct moe_train_call *moe_train__job_call(const struct moe_train *t, uint64_t lineage)
{
    bool named = lineage == 0 || (t->job != NULL && t->job->lineage == lineage);
    return moe_job_is_active(&t->machine) && named ? &t->job->call : NULL;
}

void moe_train__read_job(const struct moe_train *t, struct moe_train_state *out)
{
    const struct moe_train_job *j = t->job;
    if (j == NULL && t->machine.orphan.part != MOE_JOB_NONE) /* no other begins before it ends */
        j = t->orphan;
    if (j == NULL)
        return;
    out->job = j->call.kind;
    memcpy(out->job_name, j->call.name, sizeof out->job_name);
    out->job_bytes = atomic_load(&j->processed);
    out->job_bytes_total = atomic_load(&j->expected);
}

bool moe_train__is_unwanted(void *train, enum moe_step_kind kind, uint64_t id,
                            struct moe_call_descriptor *descriptor)
{
    struct moe_train *t = train;
    struct actions requests; /* the caller makes them */
    moe_mutex_lock(&t->lock);
    struct moe_train_job *j = t->job;
    bool found = j != NULL && j->call.kind == kind && j->call.id == id &&
                 moe_job_on_unwanted(&t->machine, id, &j->call.content);
    take_actions(t, &requests);
    if (found)
        *descriptor = j->progress;
    moe_mutex_unlock(&t->lock);
    return found;
}

/* Does not wait for threads: one may be asking the engine, which holds its lock. */
void moe_train__give_up_job(struct moe_train *t)
{
    struct actions next;
    moe_mutex_lock(&t->lock);
    struct moe_train_job *j = t->job;
    moe_job_on_view_ended(&t->machine);
    take_actions(t, &next);
    bool undo = started(&next) != MOE_JOB_NONE;
    bool idle = j != NULL && j->threads == 0 && !undo; /* nothing is left to do */
    t->job = NULL;
    if (j != NULL && !idle)
        t->orphan = j;
    moe_mutex_unlock(&t->lock);
    if (j == NULL)
        return;
    atomic_store(&j->cancel, true);
    if (undo)
        start_thread(t, j, MOE_JOB_UNDO);
    log_end(t, j, 0,
            moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "given up, as its view ended"));
    if (idle)
        free_job(j);
}

void moe_train__end_copying(struct moe_train *t)
{
    moe_mutex_lock(&t->lock);
    bool reads = !moe_job_frees_trainers(&t->machine);
    moe_mutex_unlock(&t->lock);
    if (reads)
        free_orphan(t, true);
}

void moe_train__end_jobs(void *train)
{
    moe_train__give_up_job(train);
    free_orphan(train, true);
}
