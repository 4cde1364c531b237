/* Save and Load beside serving: a thread copies the trainers to host memory, writes and reads
 * files, phase by phase, while forward and training steps go on. Only what changes the trainers is
 * kept away from their copying: no ticket of such a call comes meanwhile (moe_train_is_copying).
 * Load takes what was checked while the engine waits, and so does a Save that has no room for a
 * copy.
 *
 * Slots meet at tickets only. A slot whose part of a phase is over asks for one (it pokes); at each
 * such ticket all slots tell each other how their parts stand, and so take every decision together:
 * wait, go on to the next phase, undo, or settle. The ticket that finds the last part over settles.
 */
#include "worker/training_phases.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POKE_PAUSE_NS = 20000000, CALLED_OFF_RETRY_MS = 100 };

struct moe_train_job {
    struct work work; /* its `call` is the next */
    struct moe_train_call call, poke;
    struct moe_placement
        *placements; /* [layer_count], its own: a view's may go before the thread */
    uint64_t live;
    uint64_t asked; /* bit s: somebody has asked slot s for it; the same on all slots */
    struct moe_ledger_outcome outcome; /* of a Save: the state that was copied */
    size_t phase;                      /* that runs; or, of one that failed, that did */
    uint64_t begun_ns;
    bool undoing;              /* it has failed; the lowest slot removes what it wrote */
    struct moe_status verdict; /* why */
    uint64_t bytes;            /* of the phases that are over, by all slots */
    uint64_t total;            /* of `processed`; 0 = not known */
    _Atomic uint64_t processed;

    /* The thread of this slot's part. */
    bool threaded;
    pthread_t thread;
    struct moe_status status; /* once `over` */
    atomic_bool over;
    atomic_bool seen;     /* that it is over: no ticket is needed any more */
    atomic_bool unwanted; /* nobody waits at this slot */
    atomic_bool cancel;   /* nor at any other: the part is to end soon */
    atomic_bool given_up; /* as is the job, with its view */
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

static void free_job(struct moe_train_job *j)
{
    if (j == NULL)
        return;
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
    return good;
}

static struct moe_status create_job(struct moe_train *t, const struct moe_train_call *call,
                                    struct moe_train_job **out)
{
    struct moe_train_job *j = calloc(1, sizeof *j);
    if (j == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    j->call = j->poke = *call;
    j->poke.poke = true;
    j->poke.lineage = 0; /* it speaks of the job, whatever the state is called by then */
    j->live = t->live;
    j->begun_ns = moe_clock_ns();
    j->outcome = (struct moe_ledger_outcome){
        .lineage = t->lineage, .weights_version = t->weights_version, .steps = t->steps};
    j->work = (struct work){.train = t,
                            .call = &j->call,
                            .context = moe_train__context_of(t),
                            .state = {.lineage = t->lineage,
                                      .weights_version = t->weights_version,
                                      .steps = t->steps,
                                      .frozen = t->frozen}};
    strcpy(j->work.state.parent, t->checkpoint);
    j->work.state.told = t->told;
    j->work.context.cancel = &j->cancel;
    j->work.context.processed = &j->processed;
    *out = j;
    if (copy_placements(j, t->placements, t->config.layer_count))
        return moe_ok();
    free_job(j);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

/* ---------------------------------------------------------------------------- phases */

static bool is_save(const struct moe_train_job *j)
{
    return j->call.kind == MOE_STEP_SAVE;
}

static size_t phase_count(const struct moe_train_job *j)
{
    if (is_save(j))
        return j->call.keep > 0 ? SAVE_PHASES : SAVE_TIDY;
    return 1;
}

static struct moe_status run_part(struct moe_train_job *j)
{
    struct work *w = &j->work;
    if (!j->undoing)
        return is_save(j) ? moe_train__save_phases[j->phase](w) : moe_train__load_read(w);
    moe_checkpoint_save_abandon(&w->context, j->call.name);
    return moe_ok();
}

/* What is done once is the lowest slot's. */
static bool has_part(const struct moe_train_job *j)
{
    bool of_all = !j->undoing && (!is_save(j) || j->phase == SAVE_COPY || j->phase == SAVE_WRITE);
    return of_all || moe_train__is_lowest(&j->work);
}

static void *run_thread(void *arg)
{
    struct moe_train_job *j = arg;
    struct moe_train *t = j->work.train;
    j->status = run_part(j);
    atomic_store(&j->over, true);
    while (!atomic_load(&j->given_up) && !atomic_load(&j->seen) && !t->poke(t->poke_ctx, &j->poke))
        (void)nanosleep(&(struct timespec){.tv_nsec = POKE_PAUSE_NS}, NULL);
    return NULL;
}

static struct moe_status start_part(struct moe_train_job *j)
{
    j->work.bytes = 0;
    j->status = moe_ok();
    atomic_store(&j->seen, false);
    atomic_store(&j->over, !has_part(j));
    if (!has_part(j))
        return moe_ok();
    j->threaded = pthread_create(&j->thread, NULL, run_thread, j) == 0;
    if (j->threaded)
        return moe_ok();
    atomic_store(&j->over, true);
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "cannot start a thread");
}

static void join_part(struct moe_train_job *j)
{
    atomic_store(&j->seen, true);
    if (j->threaded)
        (void)pthread_join(j->thread, NULL);
    j->threaded = false;
}

/* ----------------------------------------------------------------------------- begin */

/* Somebody waits for it where this call was made. */
static void note_asked(struct moe_train_job *j, const struct moe_train_call *call,
                       const struct moe_train_turn *turn)
{
    if (call->poke || turn->origin >= MOE_MAX_SLOTS)
        return;
    j->asked |= UINT64_C(1) << turn->origin;
    if (turn->origin == j->work.context.slot)
        atomic_store(&j->unwanted, false);
}

static bool is_copying(const struct moe_train_job *j)
{
    return j != NULL && is_save(j) && j->phase == SAVE_COPY;
}

/* Waits for its thread, and removes what it left. */
static void tidy_old(struct moe_train *t)
{
    struct moe_train_job *old = t->old;
    if (old == NULL)
        return;
    join_part(old);
    if (is_save(old) && !is_copying(old) && moe_train__is_lowest(&old->work))
        moe_checkpoint_save_abandon(&old->work.context, old->call.name);
    t->old = NULL;
    free_job(old);
}

void moe_train__end_copying(struct moe_train *t)
{
    if (is_copying(t->old))
        tidy_old(t);
}

static struct moe_status save_running(void)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SAVE_RUNNING,
                     "a checkpoint is being written or loaded: one at a time");
}

struct moe_status moe_train__settle_old(struct work *w)
{
    struct moe_train *t = w->train;
    if (t->old != NULL && !atomic_load(&t->old->over))
        return save_running();
    tidy_old(t);
    return moe_ok();
}

/* What has to happen while no step runs. */
static struct moe_status prepare(struct work *w)
{
    MOE_TRY(moe_train__settle_old(w));
    return w->call->kind == MOE_STEP_SAVE ? moe_train__pack_records(w) : moe_ok();
}

/* Engine's thread: it is over, as `st` says. */
static void tell_end(struct moe_train *t, const struct moe_train_job *j, uint64_t bytes,
                     uint64_t lost_steps, struct moe_status st)
{
    if (is_save(j))
        moe_train__tell_saved(t, j->call.name, j->begun_ns, bytes, st);
    else
        moe_train__tell_loaded(t, j->call.name, j->begun_ns, atomic_load(&j->processed), lost_steps,
                               st);
}

static struct moe_status begin(struct moe_train *t, struct moe_session *session,
                               const struct moe_train_call *call, struct moe_train_turn *turn)
{
    struct moe_train_job *j = NULL;
    uint64_t unused;
    MOE_TRY(create_job(t, call, &j));
    struct moe_status st = moe_train__together(&j->work, session, prepare, &turn->refusal, &unused);
    if (moe_failed(&st) || moe_failed(&turn->refusal)) {
        tell_end(t, j, 0, 0, moe_failed(&st) ? st : turn->refusal);
        free_job(j);
        return st;
    }
    j->work.context.placements = j->placements;
    note_asked(j, call, turn);
    moe_train__tell_begun(t, call);
    turn->waits = true;
    pthread_mutex_lock(&t->lock);
    t->job = j;
    pthread_mutex_unlock(&t->lock);
    return start_part(j);
}

/* -------------------------------------------------------------------------- settling */

static void forget_job(struct moe_train *t)
{
    struct moe_train_job *j = t->job;
    pthread_mutex_lock(&t->lock);
    t->job = NULL;
    pthread_mutex_unlock(&t->lock);
    free_job(j);
}

/* All slots have checked it. */
static struct moe_status take(struct moe_train_job *j, struct moe_session *session,
                              struct moe_train_turn *turn, struct moe_ledger_outcome *outcome)
{
    struct moe_train *t = j->work.train;
    struct moe_status verdict = moe_ok();
    uint64_t unused;
    outcome->lost_steps = t->unsaved; /* changed on this thread alone */
    outcome->backwards = t->backwards;
    j->work.context = moe_train__context_of(t);
    turn->changes = true;
    MOE_TRY(moe_train__together(&j->work, session, moe_train__load_take, &verdict, &unused));
    if (moe_failed(&verdict)) /* some slot has half of it: the view ends, the state is torn */
        return verdict;
    pthread_mutex_lock(&t->lock);
    moe_train__begin_lineage(t, t->lineage + 1, t->weights_version + 1);
    moe_checkpoint_told_add(&t->told, j->call.name);
    pthread_mutex_unlock(&t->lock);
    moe_train__note_checkpoint(t, j->call.name, t->steps);
    return moe_ok();
}

static struct moe_status settle(struct moe_train *t, struct moe_session *session,
                                struct moe_train_turn *turn, struct moe_ledger_outcome *outcome)
{
    struct moe_train_job *j = t->job;
    struct moe_status st = moe_ok();
    turn->settles = true;
    turn->refusal = j->verdict;
    if (!moe_failed(&j->verdict) && !is_save(j)) {
        st = take(j, session, turn, outcome);
    } else if (!moe_failed(&j->verdict)) {
        uint64_t epoch = outcome->epoch;
        *outcome = j->outcome;
        outcome->epoch = epoch;
        outcome->bytes = j->bytes;
        st = moe_train__share_removed(&j->work, session, &turn->removed);
    }
    tell_end(t, j, j->bytes, outcome->lost_steps, moe_failed(&st) ? st : j->verdict);
    forget_job(t);
    return st;
}

/* -------------------------------------------------------------------------- progress */

/* How all parts stand; `*cancelled`: nobody waits any more. */
static struct moe_status look(struct moe_train_job *j, struct moe_session *session,
                              struct report all[MOE_MAX_SLOTS], bool *cancelled)
{
    bool over = atomic_load(&j->over);
    struct report mine = over ? moe_train__report_of(&j->status) : (struct report){.running = 1};
    mine.bytes = over ? j->work.bytes : 0;
    mine.unwanted = atomic_load(&j->unwanted);
    mine.found = over && j->work.found;
    mine.weights_version = mine.found ? j->work.state.weights_version : 0;
    mine.steps = mine.found ? j->work.state.steps : 0;
    MOE_TRY(moe_train__exchange(&j->work, session, &mine, all));
    *cancelled = true;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        *cancelled = *cancelled && ((j->asked >> s & 1) == 0 || all[s].unwanted != 0);
    return moe_ok();
}

/* To those who joined a job too late: nobody waited for it when it was called off. */
static struct moe_status called_off(void)
{
    return moe_error_retry(MOE_ABORTED, MOE_REASON_ABORTED, CALLED_OFF_RETRY_MS,
                           "called off, as nobody waited for it: ask again");
}

/* Of a phase that is over on all slots. The commit is the lowest slot's own affair: when somebody
 * calls it off, only that slot knows whether it was in time; and behind it there is nothing left to
 * call off. */
static struct moe_status judge_phase(struct moe_train_job *j, const struct report *all,
                                     bool cancelled, bool *undo)
{
    uint64_t more;
    struct moe_status st = moe_train__conclude(all, j->live, &more);
    j->bytes += more;
    /* What begin refused is not ours. */
    *undo = is_save(j) && j->phase >= SAVE_BEGIN && j->phase <= SAVE_COMMIT &&
            (j->phase > SAVE_BEGIN || !moe_failed(&st));
    if (st.code == MOE_CANCELLED ||
        (cancelled && !moe_failed(&st) && !(is_save(j) && j->phase >= SAVE_COMMIT)))
        st = called_off();
    return st;
}

/* The lowest slot has found that the Save had been done, and what it had saved. */
static bool take_found(struct moe_train_job *j, const struct report *all)
{
    const struct report *lowest = &all[__builtin_ctzll(j->live)];
    if (!is_save(j) || j->phase != SAVE_BEGIN || lowest->found == 0)
        return false;
    j->outcome.weights_version = lowest->weights_version;
    j->outcome.steps = lowest->steps;
    return true;
}

/* From here on trainers go on learning. */
static void turn_to_copy(struct moe_train_job *j)
{
    j->work.context.copy = j->work.copy;
    j->work.context.trainers = NULL;
    pthread_mutex_lock(&j->work.train->lock);
    j->total = moe_checkpoint_copy_bytes(j->work.copy);
    pthread_mutex_unlock(&j->work.train->lock);
}

/* After one that went well; true when it was the last. No older checkpoint goes before all slots
 * would go back to this one. */
static bool next_phase(struct moe_train_job *j, const struct report *all)
{
    if (take_found(j, all))
        j->phase = SAVE_COMMIT;
    if (is_copying(j))
        turn_to_copy(j);
    if (is_save(j) && j->phase == SAVE_COMMIT)
        moe_train__note_checkpoint(j->work.train, j->call.name, j->outcome.steps);
    return ++j->phase >= phase_count(j);
}

/* No slot may write from a copy unless all have one: then all write while the engine waits. Nothing
 * has changed what is written since the Save began. */
static struct moe_status save_without_copy(struct moe_train_job *j, struct moe_session *session,
                                           struct moe_train_turn *turn,
                                           struct moe_ledger_outcome *outcome)
{
    uint64_t epoch = outcome->epoch;
    struct moe_train *t = j->work.train;
    moe_log_warn("checkpoint %s: %s; forward requests wait while it is written", j->call.name,
                 j->verdict.text);
    moe_checkpoint_copy_free(j->work.copy);
    j->work.copy = NULL;
    *outcome = j->outcome;
    outcome->epoch = epoch;
    turn->settles = true;
    struct moe_status st = moe_train__run_save(&j->work, session, &turn->refusal, &outcome->bytes);
    if (!moe_failed(&st) && !moe_failed(&turn->refusal))
        st = moe_train__share_removed(&j->work, session, &turn->removed);
    tell_end(t, j, outcome->bytes, 0, moe_failed(&st) ? st : turn->refusal);
    forget_job(t);
    return st;
}

static struct moe_status progress(struct moe_train *t, struct moe_session *session,
                                  const struct moe_train_call *call, struct moe_train_turn *turn,
                                  struct moe_ledger_outcome *outcome)
{
    struct moe_train_job *j = t->job;
    struct report all[MOE_MAX_SLOTS];
    bool cancelled, undo;
    note_asked(j, call, turn);
    MOE_TRY(look(j, session, all, &cancelled));
    if (cancelled)
        atomic_store(&j->cancel, true);
    turn->waits = true;
    if (moe_train__any_running(all, j->live))
        return moe_ok();
    join_part(j);
    if (!j->undoing) {
        j->verdict = judge_phase(j, all, cancelled, &undo);
        if (is_copying(j) && moe_train__lacks_memory(&j->verdict) && !cancelled) {
            turn->waits = false;
            return save_without_copy(j, session, turn, outcome);
        }
        j->undoing = moe_failed(&j->verdict) && undo;
        bool done = moe_failed(&j->verdict) ? !undo : next_phase(j, all);
        if (!done)
            return start_part(j);
    }
    turn->waits = false;
    return settle(t, session, turn, outcome);
}

struct moe_status moe_train__run_job(struct moe_train *t, struct moe_session *session,
                                     const struct moe_train_call *call, struct moe_train_turn *turn,
                                     struct moe_ledger_outcome *outcome)
{
    return t->job == NULL ? begin(t, session, call, turn)
                          : progress(t, session, call, turn, outcome);
}

/* -------------------------------------------------------------------- from other rooms */

const struct moe_train_call *moe_train__job_call(const struct moe_train *t)
{
    return t->job != NULL ? &t->job->call : NULL;
}

bool moe_train_is_copying(const struct moe_train *t)
{
    return is_copying(t->job);
}

void moe_train__read_job(const struct moe_train *t, struct moe_train_state *out)
{
    const struct moe_train_job *j = t->job;
    if (j == NULL)
        return;
    out->job = j->call.kind;
    memcpy(out->job_name, j->call.name, sizeof out->job_name);
    out->job_bytes = atomic_load(&j->processed);
    out->job_bytes_total = j->total;
}

void moe_train_set_poke(struct moe_train *t, moe_train_poke_fn poke, void *ctx)
{
    t->poke = poke;
    t->poke_ctx = ctx;
}

bool moe_train_job_unwanted(struct moe_train *t, enum moe_step_kind kind, uint64_t id,
                            struct moe_train_call *poke)
{
    pthread_mutex_lock(&t->lock);
    struct moe_train_job *j = t->job;
    bool found = j != NULL && j->call.kind == kind && j->call.id == id;
    if (found) {
        atomic_store(&j->unwanted, true);
        *poke = j->poke;
    }
    pthread_mutex_unlock(&t->lock);
    return found;
}

void moe_train_give_up_job(struct moe_train *t)
{
    pthread_mutex_lock(&t->lock);
    struct moe_train_job *j = t->job;
    if (j != NULL) {
        atomic_store(&j->given_up, true);
        atomic_store(&j->cancel, true);
        t->old = j;
        t->job = NULL;
    }
    pthread_mutex_unlock(&t->lock);
    if (j != NULL)
        tell_end(t, j, 0, 0,
                 moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "given up, as its view ended"));
}

void moe_train_end_jobs(struct moe_train *t)
{
    moe_train_give_up_job(t);
    tidy_old(t);
}
