/* SPDX-License-Identifier: Apache-2.0 */
/* What a ticket of training does, on all slots alike: judged by the state alone, run, and recorded;
 * see training/training.h. Save, Load and Export, which take long, are in job.c. */
#include "training/parts.h"

#include "base/clock.h"

#include <string.h>

/* ------------------------------------------------------------------------- judgement */

static struct moe_status wrong_lineage(uint64_t asked, uint64_t present)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST,
                     "lineage %llu was asked for; it is %llu: the group went back to a checkpoint "
                     "or loaded one, or is another group; what was not saved is lost. Read the "
                     "state, and go on from there",
                     (unsigned long long)asked, (unsigned long long)present);
}

/* What would have to be true for a new call to be run. */
static struct moe_status check_new(const struct moe_train *t, const struct moe_train_call *c)
    MOE_REQUIRES(t->lock)
{
    if (c->weights_version != 0 && c->weights_version != t->weights_version)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "weights version %llu was asked for; it is %llu",
                         (unsigned long long)c->weights_version,
                         (unsigned long long)t->weights_version);
    if (c->kind == MOE_STEP_OPTIMIZER && c->expected_backwards != 0 &&
        c->expected_backwards != t->backwards)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_MISSING,
                         "gradients of %u Backward calls are expected; those of %u are there",
                         c->expected_backwards, t->backwards);
    bool of_checkpoints =
        c->kind == MOE_STEP_SAVE || c->kind == MOE_STEP_LOAD || c->kind == MOE_STEP_EXPORT;
    if (of_checkpoints && !moe_job_may_begin(&t->machine))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SAVE_RUNNING,
                         "a checkpoint is being written or loaded: one at a time (%s)",
                         moe_train__job_call(t)->name);
    if ((c->kind == MOE_STEP_SAVE || c->kind == MOE_STEP_EXPORT) && t->backwards != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_PENDING,
                         "gradients of %u Backward calls wait for OptimizerStep or ZeroGrad",
                         t->backwards);
    if (c->kind == MOE_STEP_SET_FROZEN && (t->config.trainer.frozen & ~c->frozen) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "what was frozen when the workers were started cannot learn");
    return moe_ok();
}

/* `used`: what the id was used for. */
static struct moe_status id_reused(const struct moe_train *t, const struct moe_train_call *c,
                                   const struct moe_content *used) MOE_REQUIRES(t->lock)
{
    if (c->session[0] != '\0')
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_REUSED,
                         "id %llu of session %s was used for something else",
                         (unsigned long long)c->id, c->session);
    bool others = memcmp(used->tensor_hash, c->content.tensor_hash, sizeof used->tensor_hash) != 0;
    return moe_error(
        MOE_ALREADY_EXISTS, MOE_REASON_ID_REUSED,
        "step id %llu was used %s: take last_step_id + 1 of GetTrainState (now %llu)%s",
        (unsigned long long)c->id, others ? "by another session" : "for something else",
        (unsigned long long)moe_train__highest_id(t) + 1,
        others ? ", for all sessions share one sequence of step ids" : "");
}

/* A call whose id is that of what is under way, and any progress ticket; false for
 * others. A call that began it names the lineage of then, and so does its repeat. */
static bool judge_job(const struct moe_train *t, const struct moe_train_call *c,
                      struct moe_train_execution *turn) MOE_REQUIRES(t->lock)
{
    enum moe_job_verdict verdict = MOE_JOB_UNKNOWN;
    if (c->session[0] == '\0' && moe_train__names_job_lineage(t, c->lineage))
        verdict = moe_job_judge(&t->machine, c->id, &c->content);
    if (verdict == MOE_JOB_JOINS)
        turn->run = turn->joined = true;
    else if (verdict == MOE_JOB_REUSED && !c->is_progress)
        turn->refusal = id_reused(t, c, &moe_train__job_call(t)->content);
    else if (c->is_progress)
        turn->refusal = moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "it is not under way");
    return verdict != MOE_JOB_UNKNOWN || c->is_progress;
}

/* A Load begins a new lineage, and its repeat still names the one before it: it gets
 * its answer as long as the lineage that the Load began is the present one. */
static bool repeats_load(const struct moe_train *t, const struct moe_train_call *c)
    MOE_REQUIRES(t->lock)
{
    const struct moe_ledger_call *known;
    return c->kind == MOE_STEP_LOAD && !c->is_progress &&
           moe_ledger_look(t->ledger, c->session, c->id, &c->content, &known) ==
               MOE_LEDGER_REPEAT &&
           known->outcome.lineage == t->lineage;
}

static void judge(const struct moe_train *t, const struct moe_train_call *c,
                  struct moe_train_execution *turn) MOE_REQUIRES(t->lock)
{
    *turn = (struct moe_train_execution){0};
    turn->refusal = moe_ok();
    if (judge_job(t, c, turn))
        return;
    if (repeats_load(t, c)) {
        turn->repeat = true;
        return;
    }
    if (c->lineage != 0 && c->lineage != t->lineage) {
        turn->refusal = wrong_lineage(c->lineage, t->lineage);
        return;
    }
    switch (moe_ledger_look(t->ledger, c->session, c->id, &c->content, NULL)) {
    case MOE_LEDGER_REPEAT: turn->repeat = true; return;
    case MOE_LEDGER_REUSED:
        turn->refusal = id_reused(t, c, &moe_ledger_find(t->ledger, c->session, c->id)->content);
        return;
    case MOE_LEDGER_TOO_OLD:
        turn->refusal = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD,
                                  "id %llu is below one that is forgotten: it may have been used",
                                  (unsigned long long)c->id);
        return;
    case MOE_LEDGER_NEW: break;
    }
    turn->refusal = check_new(t, c);
    turn->run = !moe_failed(&turn->refusal);
}

/* A Save or Export only reads; a Load changes something in the one turn that takes it (job.c says
 * so then). */
static bool changes_state(const struct moe_train_call *call)
{
    bool is_job =
        call->kind == MOE_STEP_SAVE || call->kind == MOE_STEP_LOAD || call->kind == MOE_STEP_EXPORT;
    return !is_job || call->merge;
}

struct moe_status moe_train_begin(struct moe_train *t, const struct moe_ticket *ticket,
                                  const struct moe_train_call *call,
                                  struct moe_train_execution *turn, struct moe_trainer **trainer)
{
    if (call->kind == MOE_STEP_BACKWARD) {
        *trainer = moe_train__find_trainer(t, ticket->layer);
        if (*trainer == NULL)
            return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: layer %u is not trained",
                             (unsigned long long)ticket->seq, ticket->layer);
    }
    moe_mutex_lock(&t->lock);
    judge(t, call, turn);
    turn->origin = ticket->descriptor.origin;
    turn->changes = turn->run && changes_state(call);
    turn->weights_version = t->weights_version;
    moe_mutex_unlock(&t->lock);
    if (turn->run && moe_step_traits(call->kind)->is_weight_update &&
        moe_train_blocks_weight_updates(t))
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "ticket %llu would change weights that a checkpoint is read from",
                         (unsigned long long)ticket->seq);
    if (turn->run && call->kind == MOE_STEP_BACKWARD) {
        turn->retained = call->retained_epoch == ticket->epoch ? call->retained : 0;
        moe_activations_begin_use(t->activations, call->session, call->id);
    }
    return moe_ok();
}

/* ------------------------------------------------------------- exclusive tickets */

/* Who has a reason of its own says more than who only saw that another refuses. */
static uint64_t with_reasons(const struct moe_job_report *all, uint64_t live)
{
    uint64_t those = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && all[s].reason != MOE_REASON_SHAPE_MISMATCH)
            those |= UINT64_C(1) << s;
    return those != 0 ? those : live;
}

/* A collective act has failed here. Where all slots say so through a session that still works, it
 * was refused by all and has changed nothing: `refusal` then says why, the same on all slots.
 * Otherwise what it was is returned. */
static struct moe_status agree_on_refusal(struct moe_train *t, struct moe_session *session,
                                          struct moe_status why, struct moe_status *refusal)
{
    struct moe_job_report all[MOE_MAX_SLOTS] = {0}, mine = moe_job_report_of(&why);
    uint64_t unused;
    struct moe_status st = t->config.backend->session_exchange(session, &mine, all, sizeof mine);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS && !moe_failed(&st); s++)
        if ((t->live >> s & 1) != 0 && all[s].code == MOE_OK)
            return why; /* it has happened there */
    if (moe_failed(&st))
        return why;
    *refusal = moe_error_context(moe_job_conclude(all, with_reasons(all, t->live), &unused),
                                 "refused by all workers, nothing has changed");
    return moe_ok();
}

static struct moe_status step_optimizer(struct moe_train *t, struct moe_session *session,
                                        const struct moe_train_call *call,
                                        struct moe_ledger_outcome *o, struct moe_status *refusal)
{
    struct moe_optimizer_args args = call->optimizer;
    struct moe_optimizer_result result = {0};
    uint64_t begun_ns = moe_clock_ns();
    args.number = t->steps + 1;
    struct moe_status st = t->config.backend->training->optimizer_step(
        session, t->trainers, t->config.layer_count, &args, &result);
    if (moe_failed(&st))
        return agree_on_refusal(t, session, st, refusal);
    moe_mutex_lock(&t->lock);
    o->backwards = t->backwards;
    o->number = result.grad_norm;
    o->nonfinite = result.nonfinite;
    t->backwards = 0;
    t->steps += !result.nonfinite;
    t->unsaved += !result.nonfinite;
    t->weights_version += !result.nonfinite;
    moe_mutex_unlock(&t->lock);
    moe_train__log_stepped(t, call->id, begun_ns, result.nonfinite);
    return moe_ok();
}

static struct moe_status zero_gradients(struct moe_train *t, struct moe_ledger_outcome *o)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->zero_grad(t->trainers[i]));
    moe_mutex_lock(&t->lock);
    o->backwards = t->backwards;
    t->backwards = 0;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

static struct moe_status set_frozen(struct moe_train *t, uint32_t frozen)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->set_frozen(t->trainers[i], frozen));
    moe_mutex_lock(&t->lock);
    t->frozen = frozen;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

static struct moe_status check_job(const struct moe_train *t, const struct moe_train_call *call)
{
    if (call->kind == MOE_STEP_EXPORT && t->config.trainer.lora_rank == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "there are no adapters: the workers train the whole weights");
    if (!call->merge && t->config.directory == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the workers were started without --training-dir");
    return moe_ok();
}

struct moe_status moe_train_run(struct moe_train *t, struct moe_session *session,
                                const struct moe_ticket *ticket, const struct moe_train_call *call,
                                struct moe_train_execution *turn,
                                struct moe_ledger_outcome *outcome)
{
    *outcome = (struct moe_ledger_outcome){.epoch = ticket->epoch};
    switch (call->kind) {
    case MOE_STEP_OPTIMIZER: return step_optimizer(t, session, call, outcome, &turn->refusal);
    case MOE_STEP_ZERO_GRAD: return zero_gradients(t, outcome);
    case MOE_STEP_SET_FROZEN: return set_frozen(t, call->frozen);
    default: break;
    }
    turn->refusal = check_job(t, call);
    if (moe_failed(&turn->refusal))
        return moe_ok();
    return call->merge ? moe_train__merge(t) : moe_train__run_job(t, session, call, turn, outcome);
}

/* ------------------------------------------------------------------------------ ends */

/* Another slot of the view has the answer, if any has. */
static bool is_elsewhere(const struct moe_train *t, const struct moe_ledger_call *call)
    MOE_REQUIRES(t->lock)
{
    return call->origin != t->slot && call->origin < MOE_MAX_SLOTS &&
           (t->live >> call->origin & 1) != 0;
}

/* The answer of a call that is in the ledger. */
static struct moe_status answer_repeat(struct moe_train *t, const struct moe_train_call *call,
                                       struct moe_train_answer *answer) MOE_REQUIRES(t->lock)
{
    const struct moe_ledger_call *known = moe_ledger_find(t->ledger, call->session, call->id);
    if (known == NULL)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD,
                         "id %llu has been run and forgotten", (unsigned long long)call->id);
    answer->outcome = known->outcome;
    answer->repeated = true;
    answer->recorded_at = known->origin;
    if (call->kind != MOE_STEP_BACKWARD)
        return moe_ok();
    if (is_elsewhere(t, known))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RECORDED_ELSEWHERE,
                         "the answer is recorded at slot %u", known->origin);
    answer->record = moe_pass_store_get(t->answers, call->session, call->id, moe_clock_ns());
    if (answer->record != NULL)
        return moe_ok();
    return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ANSWER_GONE,
                     "id %llu has been run; its answer is no longer cached",
                     (unsigned long long)call->id);
}

static void record(struct moe_train *t, const struct moe_train_call *call, uint32_t origin,
                   struct moe_ledger_outcome *outcome) MOE_REQUIRES(t->lock)
{
    if (outcome->lineage == 0) { /* a Save speaks of the state that it copied */
        outcome->lineage = t->lineage;
        outcome->weights_version = t->weights_version;
        outcome->steps = t->steps;
    }
    const struct moe_ledger_call entry = {
        .id = call->id,
        .content = call->content,
        .origin = origin,
        .outcome = *outcome,
    };
    moe_ledger_record(t->ledger, call->session, &entry);
}

void moe_train__record(struct moe_train *t, const struct moe_train_call *call, uint32_t origin,
                       struct moe_ledger_outcome *outcome)
{
    moe_mutex_lock(&t->lock);
    record(t, call, origin, outcome);
    moe_mutex_unlock(&t->lock);
}

/* A Backward's own numbers are not recorded: its answer is kept with the tensors, and
 * only where it was asked. */
static void record_backward(struct moe_train *t, const struct moe_ticket *ticket,
                            const struct moe_train_call *call, struct moe_ledger_outcome *outcome)
    MOE_REQUIRES(t->lock)
{
    *outcome = (struct moe_ledger_outcome){.epoch = ticket->epoch};
    record(t, call, ticket->descriptor.origin, outcome);
    t->backwards += !call->input_only;
}

static struct moe_status end_run(struct moe_train *t, const struct moe_ticket *ticket,
                                 const struct moe_train_call *call,
                                 const struct moe_train_execution *turn,
                                 const struct moe_ledger_outcome *outcome,
                                 struct moe_train_answer *answer)
{
    moe_mutex_lock(&t->lock);
    if (call->kind == MOE_STEP_BACKWARD) {
        record_backward(t, ticket, call, &answer->outcome);
        answer->outcome.number = turn->aux_loss;
    } else {
        answer->outcome = *outcome;
        answer->removed = turn->removed;
        if (!turn->settles) /* that was recorded as it was done */
            record(t, call, ticket->descriptor.origin, &answer->outcome);
    }
    moe_mutex_unlock(&t->lock);
    if (call->kind == MOE_STEP_BACKWARD && t->metrics.backwards != NULL)
        moe_counter_add(t->metrics.backwards, 1);
    return moe_ok();
}

/* What was kept for a Backward goes with it, and everything goes with the weights that it is of. */
static void end_activations(struct moe_train *t, const struct moe_train_call *call,
                            const struct moe_train_execution *turn, bool done)
{
    bool merged = call->merge && done;
    bool other_weights = merged || moe_train_weights_version(t) != turn->weights_version;
    if (call->kind != MOE_STEP_BACKWARD && turn->run && other_weights)
        moe_activations_drop_all(t->activations);
    else if (call->kind == MOE_STEP_BACKWARD && done)
        moe_activations_drop(t->activations, call->session, call->id);
    else if (call->kind == MOE_STEP_BACKWARD && turn->run)
        moe_activations_end_use(t->activations, call->session, call->id);
}

struct moe_status moe_train_end(struct moe_train *t, const struct moe_ticket *ticket,
                                const struct moe_train_call *call,
                                const struct moe_train_execution *turn,
                                const struct moe_ledger_outcome *outcome,
                                struct moe_train_answer *answer)
{
    struct moe_status st = turn->refusal;
    bool done = turn->run && !turn->waits && !moe_failed(&st);
    *answer = (struct moe_train_answer){0};
    end_activations(t, call, turn, done);
    if (done) {
        st = end_run(t, ticket, call, turn, outcome, answer);
    } else if (turn->repeat && ticket->descriptor.origin == t->slot) {
        moe_mutex_lock(&t->lock);
        st = answer_repeat(t, call, answer);
        moe_mutex_unlock(&t->lock);
        if (st.reason != MOE_REASON_RECORDED_ELSEWHERE) /* the other worker counts it */
            moe_train_count_repeat(t);
    }
    moe_train__show(t);
    return st;
}

void moe_train_mark_inconsistent(struct moe_train *t)
{
    moe_mutex_lock(&t->lock);
    t->inconsistent = true;
    moe_mutex_unlock(&t->lock);
}

/* ------------------------------------------------------------- before a ticket is asked for */

void moe_train_count_repeat(struct moe_train *t)
{
    if (t->metrics.repeats != NULL)
        moe_counter_add(t->metrics.repeats, 1);
}

bool moe_train_recall(struct moe_train *t, const struct moe_train_call *call,
                      struct moe_train_answer *answer)
{
    struct moe_train_execution turn;
    *answer = (struct moe_train_answer){0};
    moe_mutex_lock(&t->lock);
    judge(t, call, &turn);
    struct moe_status st = turn.refusal;
    if (turn.repeat)
        st = answer_repeat(t, call, answer);
    moe_mutex_unlock(&t->lock);
    /* A Backward that is recorded here and has no answer may be about to get one. */
    bool is_answered = turn.repeat && !moe_failed(&st);
    if (is_answered)
        moe_train_count_repeat(t);
    return is_answered;
}

bool moe_train_knows(struct moe_train *t, const struct moe_train_call *call,
                     struct moe_train_known *out)
{
    *out = (struct moe_train_known){0};
    moe_mutex_lock(&t->lock);
    const struct moe_ledger_call *known = NULL;
    if (call->lineage != 0 && call->lineage != t->lineage)
        out->refusal = wrong_lineage(call->lineage, t->lineage);
    else
        known = moe_ledger_find(t->ledger, call->session, call->id);
    if (known != NULL) {
        out->content = known->content;
        out->origin = known->origin;
        out->origin_elsewhere = is_elsewhere(t, known);
    } else if (!moe_failed(&out->refusal)) {
        out->refusal = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RETAINED_PASS_GONE,
                                 "no forward pass is retained here under this name: send x and the "
                                 "routing");
    }
    moe_mutex_unlock(&t->lock);
    return known != NULL;
}
