/* SPDX-License-Identifier: Apache-2.0 */
/* Save, Load and Export beside serving. The job machine decides (job_machine.h); this file gives
 * each share of a part a thread, exchanges the reports at tickets, and carries out the actions.
 *
 * Threads: tickets, and ends of views, come on the engine's thread. A share ends on its own thread,
 * which then asks for a progress ticket until it has one. Both tell the machine under the room's
 * lock, take all its actions under the same lock, and carry them out without it. */
#include "training/parts.h"

#include "base/clock.h"
#include "base/size.h"
#include "base/thread.h"
#include "daemon/log.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    ASK_PAUSE_NS = 20000000,
    THREADS = 3 /* a share's; one that only asks; the undoing of what has ended */
};

struct moe_train_job {
    struct work work; /* its `call` is the next */
    struct moe_train_call call, progress;
    struct moe_placement
        *placements; /* [layer_count], its own: a view's may go before the thread */
    uint64_t number; /* of the machine; 0 = it never began */
    uint64_t lineage, begun_ns;
    uint64_t lost_steps; /* Load */
    struct moe_ledger_outcome outcome;
    enum moe_job_part part; /* that the thread runs; NONE: it only asks */
    uint64_t total;         /* of `processed`; 0 = not known */
    _Atomic uint64_t processed;
    atomic_bool cancel; /* the share is to end soon */
    unsigned threads;
    pthread_t thread[THREADS];
};

/* --------------------------------------------------------------------------- objects */

static void free_placements(struct moe_train_job *j)
{
    for (size_t i = 0; j->placements != NULL && i < j->work.context.layer_count; i++) {
        free((void *)(uintptr_t)j->placements[i].offset);
        free((void *)(uintptr_t)j->placements[i].slot);
    }
    free(j->placements);
}

/* Its threads have ended, or end at once. */
static void free_job(struct moe_train_job *j)
{
    if (j == NULL)
        return;
    while (j->threads > 0)
        (void)pthread_join(j->thread[--j->threads], NULL);
    moe_checkpoint_copy_free(j->work.copy);
    moe_checkpoint_state_free(&j->work.state);
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
    j->work.context.placements = j->placements;
    return good;
}

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

/* The job of a call, and what has to be read while no step runs. */
static struct moe_status create_job(struct moe_train *t, const struct moe_train_call *call,
                                    struct moe_train_job **out)
{
    struct moe_train_job *j = *out = calloc(1, sizeof *j);
    if (j == NULL)
        return out_of_memory();
    j->call = j->progress = *call;
    j->progress.is_progress = true;
    j->progress.lineage = 0; /* it speaks of the job, whatever the state is called by then */
    j->lineage = t->lineage;
    j->begun_ns = moe_clock_ns();
    j->work = (struct work){.train = t,
                            .call = &j->call,
                            .context = moe_train__context_of(t),
                            .state = {.lineage = t->lineage,
                                      .weights_version = t->weights_version,
                                      .steps = t->steps,
                                      .frozen = t->frozen}};
    strcpy(j->work.state.parent, t->checkpoint);
    j->work.state.explicit_loads = t->explicit_loads;
    j->work.context.cancel = &j->cancel;
    j->work.context.processed = &j->processed;
    if (!copy_placements(j, t->placements, t->config.layer_count))
        return out_of_memory();
    return call->kind == MOE_STEP_SAVE ? moe_train__pack_records(&j->work) : moe_ok();
}

/* An orphan whose work is done. */
static void tidy_old(struct moe_train *t, bool wait)
{
    moe_mutex_lock(&t->lock);
    struct moe_train_job *old = t->old;
    bool free_it = wait || t->machine.orphan.part == MOE_JOB_NONE;
    if (free_it)
        t->old = NULL;
    moe_mutex_unlock(&t->lock);
    if (free_it)
        free_job(old);
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

/* The share has ended, as `end` says; true when the same thread has another part to run. */
static bool end_share(struct moe_train *t, struct moe_train_job *j, const struct moe_job_end *end)
{
    struct actions next;
    bool more = false;
    moe_mutex_lock(&t->lock);
    moe_job_on_part_ended(&t->machine, j->number, j->part, end);
    take_actions(t, &next);
    moe_mutex_unlock(&t->lock);
    for (size_t i = 0; i < next.count; i++) /* of an orphan; to ask follows in any case */
        if (next.list[i].kind == MOE_JOB_START) {
            j->part = next.list[i].part;
            more = true;
        }
    return more;
}

static void *run_thread(void *arg)
{
    struct moe_train_job *j = arg;
    struct moe_train *t = j->work.train;
    for (bool more = j->part != MOE_JOB_NONE; more;) {
        const struct moe_job_end end = moe_train__run_part(&j->work, j->part);
        more = end_share(t, j, &end);
    }
    while (wants_ticket(t, j) && !t->request_progress(t->progress_ctx, &j->progress))
        (void)nanosleep(&(struct timespec){.tv_nsec = ASK_PAUSE_NS}, NULL);
    return NULL;
}

/* Its earlier threads have nothing left to do but to see that no ticket is wanted. */
static void start_thread(struct moe_train *t, struct moe_train_job *j, enum moe_job_part part)
{
    j->part = part;
    if (moe_thread_create(&j->thread[j->threads], "moe-train-job", run_thread, j) == 0) {
        j->threads++;
        return;
    }
    const struct moe_job_end end = {.status = out_of_memory()};
    if (part != MOE_JOB_NONE)
        (void)end_share(t, j, &end);
    if (wants_ticket(t, j))
        (void)t->request_progress(t->progress_ctx, &j->progress);
}

/* --------------------------------------------------------------------------- actions */

/* One ticket of a job. */
struct execution {
    struct moe_train *train;
    struct moe_train_job *job;
    struct moe_session *session;
    struct moe_train_execution *turn;
    struct moe_ledger_outcome *outcome;
};

static struct moe_status take(struct execution *x, struct moe_job_end *end)
{
    struct moe_train *t = x->train;
    struct moe_train_job *j = x->job;
    j->outcome.lost_steps = j->lost_steps = t->unsaved; /* changed on this thread alone */
    j->outcome.backwards = t->backwards;
    x->turn->changes = true;
    *end = moe_train__run_part(&j->work, MOE_JOB_TAKE);
    if (moe_failed(&end->status)) /* some slot has half of it: the view ends, the state is torn */
        return end->status;
    moe_mutex_lock(&t->lock);
    moe_train__begin_lineage(t, t->lineage + 1, t->weights_version + 1);
    moe_checkpoint_explicit_loads_add(&t->explicit_loads, j->call.name);
    moe_mutex_unlock(&t->lock);
    moe_train__note_checkpoint(t, j->call.name, t->steps);
    return moe_ok();
}

static void run_actions(struct execution *x, const struct actions *next, struct moe_status *st);

static void start_part(struct execution *x, const struct moe_job_action *a, struct moe_status *st)
{
    struct moe_train *t = x->train;
    struct moe_train_job *j = x->job;
    struct actions next;
    struct moe_job_end end;
    if (!moe_job_is_in_ticket(a->part)) {
        while (j->threads > 0)
            (void)pthread_join(j->thread[--j->threads], NULL);
        if (a->part == MOE_JOB_CREATE && a->from_trainers && j->call.kind == MOE_STEP_SAVE)
            moe_log_warn("checkpoint %s: some worker has no room for a copy; weight updates wait "
                         "while it is written",
                         j->call.name);
        j->work.from_trainers = a->from_trainers;
        moe_mutex_lock(&t->lock);
        if (a->part == MOE_JOB_WRITE && !a->from_trainers)
            j->total = moe_checkpoint_copy_bytes(j->work.copy);
        moe_mutex_unlock(&t->lock);
        start_thread(t, j, a->part);
        return;
    }
    *st = take(x, &end);
    moe_mutex_lock(&t->lock);
    moe_job_on_part_ended(&t->machine, j->number, a->part, &end);
    take_actions(t, &next);
    moe_mutex_unlock(&t->lock);
    run_actions(x, &next, st);
}

static struct moe_status record(struct execution *x, const struct moe_job_action *a)
{
    struct moe_train_job *j = x->job;
    j->outcome.epoch = x->outcome->epoch;
    if (j->call.kind != MOE_STEP_LOAD)
        j->outcome.bytes = a->bytes;
    if (j->call.kind == MOE_STEP_SAVE) {
        j->outcome.lineage = j->lineage; /* it speaks of the state that was copied */
        j->outcome.weights_version = a->weights_version;
        j->outcome.steps = a->steps;
        MOE_TRY(moe_train__share_removed(&j->work, x->session, &x->turn->removed));
    }
    moe_train__record(x->train, &j->call, x->turn->origin, &j->outcome);
    return moe_ok();
}

/* Engine's thread: it is over, as `st` says. */
static void tell_end(struct moe_train *t, const struct moe_train_job *j, uint64_t bytes,
                     struct moe_status st)
{
    if (j->call.kind == MOE_STEP_SAVE)
        moe_train__log_saved(t, j->call.name, j->begun_ns, bytes, st);
    else if (j->call.kind == MOE_STEP_LOAD)
        moe_train__log_loaded(t, j->call.name, j->begun_ns, atomic_load(&j->processed),
                              j->lost_steps, st);
}

static void settle(struct execution *x, const struct moe_job_action *a)
{
    x->turn->settles = true;
    x->turn->refusal = a->status;
    *x->outcome = x->job->outcome;
    tell_end(x->train, x->job, a->bytes, a->status);
}

static void forget(struct execution *x)
{
    moe_mutex_lock(&x->train->lock);
    x->train->job = NULL;
    moe_mutex_unlock(&x->train->lock);
    free_job(x->job);
    x->job = NULL;
}

/* To end before the end of this ticket is told (BLOCK, UNBLOCK): the engine looks. */
static void run_action(struct execution *x, const struct moe_job_action *a, struct moe_status *st)
{
    struct moe_train *t = x->train;
    switch (a->kind) {
    case MOE_JOB_START: start_part(x, a, st); return;
    case MOE_JOB_CANCEL: atomic_store(&x->job->cancel, true); return;
    case MOE_JOB_REQUEST_TICKET:
        if (!t->request_progress(t->progress_ctx, &x->job->progress))
            start_thread(t, x->job, MOE_JOB_NONE);
        return;
    case MOE_JOB_KEEP: moe_train__note_checkpoint(t, x->job->call.name, a->steps); return;
    case MOE_JOB_RECORD: *st = record(x, a); return;
    case MOE_JOB_SETTLE: settle(x, a); return;
    case MOE_JOB_END_VIEW: *st = a->status; return;
    case MOE_JOB_FORGET: forget(x); return;
    case MOE_JOB_BLOCK:
    case MOE_JOB_UNBLOCK: return;
    }
}

/* A failure ends the view, and the rest with it. */
static void run_actions(struct execution *x, const struct actions *next, struct moe_status *st)
{
    for (size_t i = 0; i < next->count && !moe_failed(st); i++)
        run_action(x, &next->list[i], st);
}

/* --------------------------------------------------------------------------- tickets */

static enum moe_job_kind job_kind(enum moe_step_kind kind)
{
    return kind == MOE_STEP_SAVE   ? MOE_JOB_SAVE
           : kind == MOE_STEP_LOAD ? MOE_JOB_LOAD
                                   : MOE_JOB_EXPORT;
}

static struct moe_status begin(struct moe_train *t, const struct moe_train_call *call,
                               const struct moe_train_execution *turn)
{
    struct moe_train_job *j;
    tidy_old(t, false);
    const struct moe_status prepared = create_job(t, call, &j);
    if (j == NULL)
        return prepared;
    const struct moe_job_description description = {.kind = job_kind(call->kind),
                                                    .id = call->id,
                                                    .content = call->content,
                                                    .tidies = call->keep > 0,
                                                    .weights_version = t->weights_version,
                                                    .steps = t->steps};
    moe_mutex_lock(&t->lock);
    moe_job_on_begin(&t->machine, &description, turn->origin, &prepared);
    j->number = t->machine.number;
    t->job = j;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

/* Tells all slots how this one stands, and gets to know how they do. */
static struct moe_status exchange(struct moe_train *t, struct moe_session *session,
                                  struct moe_job_report all[MOE_MAX_SLOTS])
{
    struct moe_checkpoint_context *context = &t->job->work.context;
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
                                     const struct moe_train_call *call,
                                     struct moe_train_execution *turn,
                                     struct moe_ledger_outcome *outcome)
{
    struct moe_job_report all[MOE_MAX_SLOTS];
    struct actions next;
    struct moe_status st = moe_ok();
    if (!turn->joined)
        MOE_TRY(begin(t, call, turn));
    moe_mutex_lock(&t->lock);
    if (turn->joined && !call->is_progress && turn->origin < MOE_MAX_SLOTS)
        moe_job_on_join(&t->machine, turn->origin);
    moe_mutex_unlock(&t->lock);
    MOE_TRY(exchange(t, session, all));
    moe_mutex_lock(&t->lock);
    moe_job_on_reports(&t->machine, all);
    bool began = !turn->joined && moe_job_is_active(&t->machine);
    take_actions(t, &next);
    moe_mutex_unlock(&t->lock);
    if (began && call->kind != MOE_STEP_EXPORT)
        moe_train__log_begun(t, call);
    struct execution x = {t, t->job, session, turn, outcome};
    run_actions(&x, &next, &st);
    turn->waits = !turn->settles;
    return st;
}

/* -------------------------------------------------------------------- from other files */

const struct moe_train_call *moe_train__job_call(const struct moe_train *t)
{
    return moe_job_is_active(&t->machine) ? &t->job->call : NULL;
}

bool moe_train__names_job_lineage(const struct moe_train *t, uint64_t lineage)
{
    return moe_job_is_active(&t->machine) && (lineage == 0 || lineage == t->job->lineage);
}

bool moe_train_blocks_weight_updates(struct moe_train *t)
{
    moe_mutex_lock(&t->lock);
    bool blocks = moe_job_blocks_weight_updates(&t->machine);
    moe_mutex_unlock(&t->lock);
    return blocks;
}

void moe_train__read_job(const struct moe_train *t, struct moe_train_state *out)
{
    const struct moe_train_job *j = t->job;
    if (j == NULL && t->machine.orphan.part != MOE_JOB_NONE) /* no other begins before it ends */
        j = t->old;
    if (j == NULL)
        return;
    out->job = j->call.kind;
    memcpy(out->job_name, j->call.name, sizeof out->job_name);
    out->job_bytes = atomic_load(&j->processed);
    out->job_bytes_total = j->total;
}

void moe_train_set_progress(struct moe_train *t, moe_train_progress_fn request_progress, void *ctx)
{
    t->request_progress = request_progress;
    t->progress_ctx = ctx;
}

bool moe_train_job_unwanted(struct moe_train *t, enum moe_step_kind kind, uint64_t id,
                            struct moe_train_call *progress)
{
    struct actions asked; /* the caller asks */
    moe_mutex_lock(&t->lock);
    struct moe_train_job *j = t->job;
    bool found = j != NULL && j->call.kind == kind && j->call.id == id &&
                 moe_job_on_unwanted(&t->machine, id, &j->call.content);
    take_actions(t, &asked);
    if (found)
        *progress = j->progress;
    moe_mutex_unlock(&t->lock);
    return found;
}

/* Threads are not waited for here: one may be asking the engine, which holds its lock. */
void moe_train_give_up_job(struct moe_train *t)
{
    struct actions next;
    bool undo = false;
    moe_mutex_lock(&t->lock);
    struct moe_train_job *j = t->job;
    moe_job_on_view_ended(&t->machine);
    take_actions(t, &next);
    for (size_t i = 0; i < next.count; i++)
        undo = undo || next.list[i].kind == MOE_JOB_START;
    t->job = NULL;
    bool parted = j != NULL && j->threads == 0 && !undo; /* it has nothing left to do */
    if (j != NULL && !parted)
        t->old = j;
    moe_mutex_unlock(&t->lock);
    if (j == NULL)
        return;
    atomic_store(&j->cancel, true);
    if (undo)
        start_thread(t, j, MOE_JOB_UNDO);
    tell_end(t, j, 0,
             moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "given up, as its view ended"));
    if (parted)
        free_job(j);
}

void moe_train__end_copying(struct moe_train *t)
{
    moe_mutex_lock(&t->lock);
    bool reads = !moe_job_frees_trainers(&t->machine);
    moe_mutex_unlock(&t->lock);
    if (reads)
        tidy_old(t, true);
}

void moe_train_end_jobs(struct moe_train *t)
{
    moe_train_give_up_job(t);
    tidy_old(t, true);
}
