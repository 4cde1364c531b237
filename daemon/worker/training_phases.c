/* Save, Load and Export: work that takes as long as a disk does, on every slot at once, and of
 * which all slots must think alike at the end.
 *
 * A phase runs on a thread of its own while the engine's thread tells the other slots, again and
 * again, how it stands; nobody waits longer than one such exchange, however long the slowest slot
 * takes, so no wait budget runs out. When the last slot has ended, all know how each one did, and
 * go on to the next phase or give up together. */
#include "worker/training_phases.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct phase {
    struct work *work;
    phase_fn run;
    struct moe_status status;
    atomic_bool over;
};

enum { FIRST_PAUSE_NS = 50000, LAST_PAUSE_NS = 5000000 }; /* between two exchanges; doubling */

static void *run_phase(void *arg)
{
    struct phase *p = arg;
    p->status = p->run(p->work);
    atomic_store(&p->over, true);
    return NULL;
}

struct report moe_train__report_of(const struct moe_status *st)
{
    struct report r = {.code = (uint32_t)st->code, .reason = (uint32_t)st->reason};
    if (moe_failed(st))
        memcpy(r.text, st->text, sizeof r.text - 1);
    return r;
}

struct moe_status moe_train__exchange(struct work *w, struct moe_session *session,
                                      struct report *mine, struct report all[MOE_MAX_SLOTS])
{
    _Static_assert(sizeof *mine <= 256, "what a session exchanges");
    mine->writer = w->train->writer;
    memset(all, 0, MOE_MAX_SLOTS * sizeof *all);
    MOE_TRY(w->train->config.backend->session_exchange(session, mine, all, sizeof *mine));
    uint64_t writer = all[__builtin_ctzll(w->context.live)].writer;
    if (w->context.writer != writer) /* once: later on a thread may be reading it */
        w->context.writer = writer;
    return moe_ok();
}

static struct report report_of(struct phase *p)
{
    struct report r = {.running = !atomic_load(&p->over)};
    if (r.running)
        return r;
    r = moe_train__report_of(&p->status);
    r.bytes = p->work->bytes;
    return r;
}

static bool is_poor(uint32_t code, uint32_t reason)
{
    return code == MOE_RESOURCE_EXHAUSTED && reason == MOE_REASON_OUT_OF_MEMORY;
}

bool moe_train__lacks_memory(const struct moe_status *st)
{
    return is_poor((uint32_t)st->code, (uint32_t)st->reason);
}

struct moe_status moe_train__conclude(const struct report *all, uint64_t live, uint64_t *bytes)
{
    struct moe_status st = moe_ok();
    *bytes = 0;
    for (uint32_t s = MOE_MAX_SLOTS; s-- > 0;) {
        if ((live >> s & 1) == 0)
            continue;
        *bytes += all[s].bytes;
        bool said = moe_failed(&st) && !moe_train__lacks_memory(&st);
        if (all[s].code == MOE_OK || (said && is_poor(all[s].code, all[s].reason)))
            continue;
        enum moe_code code =
            all[s].code <= MOE_UNAUTHENTICATED ? (enum moe_code)all[s].code : MOE_UNKNOWN;
        enum moe_reason reason =
            all[s].reason < MOE_REASON_COUNT ? (enum moe_reason)all[s].reason : MOE_REASON_NONE;
        st = moe_error(code, reason, "%.*s", (int)sizeof all[s].text - 1, all[s].text);
    }
    return st;
}

/* Who has a reason of its own says more than who only saw that another refuses. */
static uint64_t with_reasons(const struct report *all, uint64_t live)
{
    uint64_t those = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && all[s].reason != MOE_REASON_SHAPE_MISMATCH)
            those |= UINT64_C(1) << s;
    return those != 0 ? those : live;
}

struct moe_status moe_train__agree_on_refusal(struct moe_train *t, struct moe_session *session,
                                              struct moe_status why, struct moe_status *refusal)
{
    struct report all[MOE_MAX_SLOTS] = {0}, mine = moe_train__report_of(&why);
    uint64_t unused;
    struct moe_status st = t->config.backend->session_exchange(session, &mine, all, sizeof mine);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS && !moe_failed(&st); s++)
        if ((t->live >> s & 1) != 0 && all[s].code == MOE_OK)
            return why; /* it has happened there */
    if (moe_failed(&st))
        return why;
    *refusal = moe_error_context(moe_train__conclude(all, with_reasons(all, t->live), &unused),
                                 "refused by all workers, nothing has changed");
    return moe_ok();
}

bool moe_train__any_running(const struct report *all, uint64_t live)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && all[s].running != 0)
            return true;
    return false;
}

struct moe_status moe_train__together(struct work *w, struct moe_session *session, phase_fn run,
                                      struct moe_status *verdict, uint64_t *bytes)
{
    struct report all[MOE_MAX_SLOTS];
    struct phase p = {.work = w, .run = run};
    struct moe_status st = moe_ok();
    struct timespec pause = {.tv_nsec = FIRST_PAUSE_NS};
    pthread_t thread;
    bool threaded = pthread_create(&thread, NULL, run_phase, &p) == 0;
    if (!threaded)
        (void)run_phase(&p);
    do {
        if (!atomic_load(&p.over))
            (void)nanosleep(&pause, NULL);
        if (pause.tv_nsec < LAST_PAUSE_NS)
            pause.tv_nsec *= 2;
        struct report mine = report_of(&p);
        st = moe_train__exchange(w, session, &mine, all);
    } while (!moe_failed(&st) && moe_train__any_running(all, w->context.live));
    if (threaded)
        (void)pthread_join(thread, NULL);
    if (!moe_failed(&st))
        *verdict = moe_train__conclude(all, w->context.live, bytes);
    return st;
}

bool moe_train__is_lowest(const struct work *w)
{
    return w->context.slot == (uint32_t)__builtin_ctzll(w->context.live);
}

struct moe_checkpoint_context moe_train__context_of(struct moe_train *t)
{
    return (struct moe_checkpoint_context){
        .root = t->config.directory,
        .backend = t->config.backend,
        .model = t->config.model,
        .specs = t->config.specs,
        .placements = t->placements,
        .trainers = t->trainers,
        .layer_count = t->config.layer_count,
        .slot = t->slot,
        .slots = t->slots,
        .live = t->live,
        .config = &t->config.trainer,
        .writer = t->writer,
        .shown = &t->shown,
    };
}

/* ------------------------------------------------------------------------------ Save */

static struct moe_status save_copy(struct work *w)
{
    return moe_checkpoint_copy_take(&w->context, &w->copy);
}

static struct moe_status save_begin(struct work *w)
{
    if (!moe_train__is_lowest(w))
        return moe_ok();
    w->state.save[0] = w->call->id;
    memcpy(&w->state.save[1], w->call->content.said, sizeof w->call->content.said);
    memcpy(&w->state.save[3], w->call->content.rest, sizeof w->call->content.rest);
    MOE_TRY(moe_checkpoint_save_begin(&w->context, w->call->name, &w->state, &w->found));
    if (!w->found || w->context.copy != NULL)
        return moe_ok();
    return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_CHECKPOINT_EXISTS,
                     "checkpoint %s is complete, but was not recorded", w->call->name);
}

/* Giving gigabytes back takes the time of many steps, which the engine's thread does not have. */
static void give_copy_back(struct work *w)
{
    w->context.copy = NULL;
    moe_checkpoint_copy_free(w->copy);
    w->copy = NULL;
}

static struct moe_status save_write(struct work *w)
{
    struct moe_status st =
        moe_checkpoint_save_write(&w->context, w->call->name, &w->state, &w->bytes);
    give_copy_back(w);
    return st;
}

/* The checkpoint remembers its own Save, so that a repeat after a restart from it is one. */
struct moe_status moe_train__pack_records(struct work *w)
{
    struct moe_train *t = w->train;
    struct moe_ledger_outcome outcome = {0};
    struct moe_ledger *copy;
    if (!moe_train__is_lowest(w) || w->state.owned != NULL)
        return moe_ok();
    outcome.lineage = t->lineage;
    outcome.weights_version = t->weights_version;
    outcome.steps = t->steps;
    const struct moe_ledger_call entry = {.id = w->call->id,
                                          .content = w->call->content,
                                          .origin = (uint32_t)__builtin_ctzll(t->live),
                                          .outcome = outcome};
    MOE_TRY(moe_ledger_copy(t->ledger, &copy));
    moe_ledger_record(copy, "", &entry);
    w->state.record_bytes = moe_ledger_packed_size(copy);
    w->state.owned = malloc(w->state.record_bytes);
    if (w->state.owned != NULL)
        moe_ledger_pack(copy, w->state.owned);
    moe_ledger_destroy(copy);
    w->state.records = w->state.owned;
    return w->state.owned != NULL
               ? moe_ok()
               : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

static struct moe_status save_commit(struct work *w)
{
    w->bytes = 0; /* counted */
    return !moe_train__is_lowest(w)
               ? moe_ok()
               : moe_checkpoint_save_commit(&w->context, w->call->name, &w->state);
}

static struct moe_status save_tidy(struct work *w)
{
    w->bytes = 0;
    if (moe_train__is_lowest(w))
        moe_checkpoint_save_tidy(&w->context, w->call->name, w->call->keep, &w->removed);
    return moe_ok();
}

const phase_fn moe_train__save_phases[SAVE_PHASES] = {
    [SAVE_COPY] = save_copy,     [SAVE_BEGIN] = save_begin, [SAVE_WRITE] = save_write,
    [SAVE_COMMIT] = save_commit, [SAVE_TIDY] = save_tidy,
};

void moe_train__note_checkpoint(struct moe_train *t, const char *name, uint64_t steps)
{
    pthread_mutex_lock(&t->lock);
    memset(t->checkpoint, 0, sizeof t->checkpoint);
    strncpy(t->checkpoint, name, MOE_TRAINING_NAME_MAX);
    t->unsaved = t->steps - (steps < t->steps ? steps : t->steps); /* taken beside the Save */
    pthread_mutex_unlock(&t->lock);
}

struct moe_status moe_train__share_removed(struct work *w, struct moe_session *session,
                                           struct moe_checkpoint_removed *out)
{
    enum { NAMES = 3 };
    struct page {
        uint32_t count;
        char names[NAMES][MOE_CHECKPOINT_NAME_MAX + 1];
    };
    _Static_assert(sizeof(struct page) <= 256, "what a session exchanges");
    uint32_t first = 0, named = 0;
    *out = (struct moe_checkpoint_removed){0};
    if (w->call->keep == 0)
        return moe_ok();
    do {
        struct page mine = {.count = w->removed.count}, all[MOE_MAX_SLOTS] = {0};
        const struct page *lowest = &all[__builtin_ctzll(w->context.live)];
        for (uint32_t i = 0; i < NAMES && first + i < MOE_CHECKPOINT_REMOVED_MAX; i++)
            memcpy(mine.names[i], w->removed.names[first + i], sizeof mine.names[i]);
        MOE_TRY(w->train->config.backend->session_exchange(session, &mine, all, sizeof mine));
        out->count = lowest->count;
        named =
            lowest->count < MOE_CHECKPOINT_REMOVED_MAX ? lowest->count : MOE_CHECKPOINT_REMOVED_MAX;
        for (uint32_t i = 0; i < NAMES && first + i < named; i++) {
            memcpy(out->names[first + i], lowest->names[i], sizeof lowest->names[i]);
            out->names[first + i][MOE_CHECKPOINT_NAME_MAX] = '\0';
        }
        first += NAMES;
    } while (first < named);
    return moe_ok();
}

struct moe_status moe_train__run_save(struct work *w, struct moe_session *session,
                                      struct moe_status *verdict, uint64_t *bytes)
{
    uint64_t more;
    *bytes = 0;
    struct moe_status st = moe_ok();
    size_t done = SAVE_BEGIN;
    for (; done < SAVE_PHASES; done++) {
        st = moe_train__together(w, session, moe_train__save_phases[done], verdict, &more);
        if (moe_failed(&st) || moe_failed(verdict))
            break;
        *bytes += more;
        if (done == SAVE_COMMIT)
            moe_train__note_checkpoint(w->train, w->call->name, w->state.steps);
    }
    /* Else begin's is not ours, or there is nothing more to undo. */
    if (done > SAVE_BEGIN && done <= SAVE_COMMIT && moe_train__is_lowest(w))
        moe_checkpoint_save_abandon(&w->context, w->call->name);
    return st;
}

/* ------------------------------------------------------------------------------ Load */

struct moe_status moe_train__load_read(struct work *w)
{
    return moe_checkpoint_load_read(&w->context, w->call->name, &w->state);
}

static struct moe_status take_tensors(struct moe_train *t,
                                      const struct moe_checkpoint_context *context,
                                      const char *name, const struct moe_checkpoint_state *state)
{
    MOE_TRY(moe_checkpoint_load_take(context, name));
    uint32_t frozen = state->frozen | t->config.trainer.frozen;
    for (size_t i = 0; i < t->config.layer_count; i++) {
        MOE_TRY(t->config.backend->training->zero_grad(t->trainers[i]));
        MOE_TRY(t->config.backend->training->set_frozen(t->trainers[i], frozen));
    }
    pthread_mutex_lock(&t->lock);
    struct moe_status st = moe_ledger_unpack(t->ledger, state->records, state->record_bytes);
    t->steps = state->steps;
    t->unsaved = 0;
    t->frozen = frozen;
    t->backwards = 0;
    pthread_mutex_unlock(&t->lock);
    return st;
}

struct moe_status moe_train__load_take(struct work *w)
{
    return take_tensors(w->train, &w->context, w->call->name, &w->state);
}

struct moe_status moe_train__load_checkpoint(struct moe_train *t)
{
    const struct moe_checkpoint_context context = moe_train__context_of(t);
    struct moe_checkpoint_state state = {0};
    struct moe_status st = t->config.directory != NULL
                               ? moe_checkpoint_load_read(&context, t->checkpoint, &state)
                               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CHECKPOINT_NOT_FOUND,
                                           "checkpoint %s needs --training-dir", t->checkpoint);
    if (!moe_failed(&st))
        st = take_tensors(t, &context, t->checkpoint, &state);
    if (!moe_failed(&st)) {
        pthread_mutex_lock(&t->lock);
        moe_checkpoint_told_join(&t->told, &state.told);
        pthread_mutex_unlock(&t->lock);
    }
    moe_checkpoint_state_free(&state);
    return st;
}

/* ---------------------------------------------------------------------------- Export */

static struct moe_status export_begin(struct work *w)
{
    return moe_train__is_lowest(w) ? moe_checkpoint_export_begin(&w->context, w->call->name)
                                   : moe_ok();
}

static struct moe_status export_write(struct work *w)
{
    return moe_checkpoint_export_write(&w->context, w->call->name, &w->bytes);
}

static struct moe_status export_commit(struct work *w)
{
    w->bytes = 0;
    return moe_train__is_lowest(w) ? moe_checkpoint_export_commit(&w->context, w->call->name)
                                   : moe_ok();
}

static struct moe_status run_export(struct work *w, struct moe_session *session,
                                    struct moe_status *verdict, uint64_t *bytes)
{
    enum { BEGUN = 2, PHASES = 4 };
    static const phase_fn phases[PHASES] = {moe_train__settle_old, export_begin, export_write,
                                            export_commit};
    uint64_t more;
    *bytes = 0;
    struct moe_status st = moe_ok();
    size_t done = 0;
    for (; done < PHASES; done++) {
        st = moe_train__together(w, session, phases[done], verdict, &more);
        if (moe_failed(&st) || moe_failed(verdict))
            break;
        *bytes += more;
    }
    if (done >= BEGUN && done < PHASES && moe_train__is_lowest(w))
        moe_checkpoint_export_abandon(&w->context, w->call->name);
    return st;
}

/* The resident weights are the merged ones already: what is new is that adapters start from them.
 */
static struct moe_status merge_adapters(struct work *w)
{
    struct moe_train *t = w->train;
    moe_train__drop_trainers(t);
    MOE_TRY(moe_train__make_trainers(t));
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->set_frozen(t->trainers[i], t->frozen));
    return moe_ok();
}

static struct moe_status run_merge(struct work *w, struct moe_session *session,
                                   struct moe_status *verdict)
{
    uint64_t bytes;
    MOE_TRY(moe_train__together(w, session, merge_adapters, verdict, &bytes));
    if (moe_failed(verdict))
        return *verdict;
    pthread_mutex_lock(&w->train->lock);
    w->train->steps = 0;
    pthread_mutex_unlock(&w->train->lock);
    return moe_ok();
}

/* ------------------------------------------------------------------------------- all */

static struct moe_status check_call(const struct moe_train *t, const struct moe_train_call *call)
{
    if (call->kind == MOE_STEP_EXPORT && t->config.trainer.lora_rank == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "there are no adapters: the workers train the whole weights");
    if (!call->merge && t->config.directory == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the workers were started without --training-dir");
    return moe_ok();
}

static struct moe_status run(struct work *w, struct moe_session *session,
                             struct moe_train_turn *turn, struct moe_ledger_outcome *outcome)
{
    if (w->call->kind != MOE_STEP_EXPORT)
        return moe_train__run_job(w->train, session, w->call, turn, outcome);
    return w->call->merge ? run_merge(w, session, &turn->refusal)
                          : run_export(w, session, &turn->refusal, &outcome->bytes);
}

struct moe_status moe_train__run_phases(struct moe_train *t, struct moe_session *session,
                                        const struct moe_train_call *call,
                                        struct moe_train_turn *turn,
                                        struct moe_ledger_outcome *outcome)
{
    struct work w = {.train = t, .call = call, .context = moe_train__context_of(t)};
    turn->refusal = check_call(t, call);
    if (moe_failed(&turn->refusal))
        return moe_ok();
    return run(&w, session, turn, outcome);
}
