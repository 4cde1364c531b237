/* SPDX-License-Identifier: Apache-2.0 */
/* What a call is to the state of training: new, a repeat, or refused. Looks at call and state
 * alone, so all slots judge alike; see training/training.h. */
#include "training/state.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>

/* Gradients went with a slot, and all else is there. Without an explanation (`gradients_lost`), the
 * caller takes no step on what is left of them. */
static struct moe_status lost_gradients(const struct moe_train *t) MOE_REQUIRES(t->lock)
{
    const struct moe_train_micro_batch *b = &t->lost[0];
    const bool all = t->lost_count == t->lost_total;
    char first[sizeof b->session + 32] = "";
    if (t->lost_count > 0)
        (void)snprintf(first, sizeof first, " (%s/%llu%s)", b->session, (unsigned long long)b->id,
                       t->lost_total > 1 ? ", ..." : "");
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_LOST,
                     "the gradients of %llu Backward calls%s went with a worker: send %s, with "
                     "lineage %llu; GetTrainState names %s",
                     (unsigned long long)t->lost_total, first,
                     all ? "them again" : "all since the last step again under new ids",
                     (unsigned long long)t->lineage, all ? "them" : "only some");
}

/* A worker was lost, and perhaps an answered call with it. The weights are those before that call.
 */
static struct moe_status lost_call(const struct moe_train *t) MOE_REQUIRES(t->lock)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST,
                     "one call that a lost worker has answered may be lost, and gradients since "
                     "the last step are: steps are %llu, weights version %llu, lineage %llu. Read "
                     "the state, and go on from there",
                     (unsigned long long)t->steps, (unsigned long long)t->weights_version,
                     (unsigned long long)t->lineage);
}

/* What went with the lineage before, and the weights stayed. */
static struct moe_status lost_with_a_slot(const struct moe_train *t) MOE_REQUIRES(t->lock)
{
    return t->loss == MOE_TRAIN_LOSS_CALL ? lost_call(t) : lost_gradients(t);
}

static struct moe_status wrong_lineage(const struct moe_train *t, uint64_t asked)
    MOE_REQUIRES(t->lock)
{
    const uint64_t present = t->lineage;
    if (asked == t->earlier)
        return lost_with_a_slot(t);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST,
                     "lineage %llu was asked for; it is %llu: the group went back to a checkpoint "
                     "or loaded one, or is another group; what was not saved is lost. Read the "
                     "state, and go on from there",
                     (unsigned long long)asked, (unsigned long long)present);
}

/* The conditions of a new call. */
static struct moe_status check_new(const struct moe_train *t, const struct moe_train_call *c)
    MOE_REQUIRES(t->lock)
{
    if (c->weights_version != 0 && c->weights_version != t->weights_version)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "weights version %llu was asked for; it is %llu",
                         (unsigned long long)c->weights_version,
                         (unsigned long long)t->weights_version);
    if (c->kind == MOE_STEP_OPTIMIZER && c->lineage == 0 && c->expected_backwards == 0 &&
        t->gradients_lost)
        return lost_with_a_slot(t);
    if (c->kind == MOE_STEP_OPTIMIZER && c->expected_backwards != 0 &&
        c->expected_backwards != t->backwards)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_MISSING,
                         "gradients of %u Backward calls are expected; those of %u are there",
                         c->expected_backwards, t->backwards);
    if (moe_step_traits(c->kind)->is_job && !moe_job_may_begin(&t->machine))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SAVE_RUNNING,
                         "a checkpoint is being written or loaded: one at a time (%s)",
                         moe_train__job_call(t, 0)->name);
    if ((c->kind == MOE_STEP_SAVE || c->kind == MOE_STEP_EXPORT) && t->backwards != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_PENDING,
                         "gradients of %u Backward calls wait for OptimizerStep or ZeroGrad",
                         t->backwards);
    if (c->kind == MOE_STEP_SET_FROZEN && (t->config.trainer.frozen & ~c->frozen) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "what was frozen when the workers were started cannot learn");
    return moe_ok();
}

uint64_t moe_train__highest_id(const struct moe_train *t)
{
    const struct moe_train_call *job = moe_train__job_call(t, 0);
    uint64_t highest = moe_ledger_highest(t->ledger, "");
    return job != NULL && job->id > highest ? job->id : highest;
}

/* `used`: the content of the earlier call with this id. */
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

/* Decides a call with the id of the job, and any progress ticket; false for other calls. Repeats of
 * the job's call name the lineage with which the job began. */
static bool judge_job(const struct moe_train *t, struct moe_call_exec *x) MOE_REQUIRES(t->lock)
{
    const struct moe_train_call *c = &x->call, *job = moe_train__job_call(t, c->lineage);
    enum moe_job_outcome outcome = MOE_JOB_UNKNOWN;
    if (c->session[0] == '\0' && job != NULL)
        outcome = moe_job_judge(&t->machine, c->id, &c->content);
    if (outcome == MOE_JOB_JOINS)
        x->run = x->joined = true;
    else if (outcome == MOE_JOB_REUSED && !c->is_progress)
        x->refusal = id_reused(t, c, &job->content);
    else if (c->is_progress)
        x->refusal = moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "it is not under way");
    return outcome != MOE_JOB_UNKNOWN || c->is_progress;
}

/* A Load begins a new lineage, and its repeat names the one before. The repeat gets its answer
 * while the lineage that the Load began is the present one. */
static bool repeats_load(const struct moe_train *t, const struct moe_train_call *c)
    MOE_REQUIRES(t->lock)
{
    const struct moe_ledger_call *known;
    return c->kind == MOE_STEP_LOAD &&
           moe_ledger_look(t->ledger, c->session, c->id, &c->content, &known) ==
               MOE_LEDGER_REPEAT &&
           known->outcome.lineage == t->lineage;
}

void moe_train__judge(const struct moe_train *t, struct moe_call_exec *x)
{
    const struct moe_train_call *c = &x->call;
    x->run = x->repeat = x->joined = false;
    x->refusal = moe_ok();
    if (judge_job(t, x))
        return;
    x->repeat = repeats_load(t, c);
    if (x->repeat)
        return;
    if (c->lineage != 0 && c->lineage != t->lineage) {
        x->refusal = wrong_lineage(t, c->lineage);
        return;
    }
    switch (moe_ledger_look(t->ledger, c->session, c->id, &c->content, NULL)) {
    case MOE_LEDGER_REPEAT: x->repeat = true; return;
    case MOE_LEDGER_REUSED:
        x->refusal = id_reused(t, c, &moe_ledger_find(t->ledger, c->session, c->id)->content);
        return;
    case MOE_LEDGER_TOO_OLD:
        x->refusal = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD,
                               "id %llu is below one that is forgotten: it may have been used",
                               (unsigned long long)c->id);
        return;
    case MOE_LEDGER_NEW: break;
    }
    x->refusal = check_new(t, c);
    x->run = !moe_failed(&x->refusal);
}

/* ------------------------------------------------------------------------- repeats */

struct moe_status moe_train__answer_repeat(struct moe_train *t, const struct moe_train_call *call,
                                           struct moe_train_answer *answer)
{
    const struct moe_ledger_call *known = moe_ledger_find(t->ledger, call->session, call->id);
    if (known == NULL)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD,
                         "id %llu has been run and forgotten", (unsigned long long)call->id);
    answer->outcome = known->outcome;
    answer->repeated = true;
    answer->recorded_at = (uint32_t)known->origin;
    if (call->kind != MOE_STEP_BACKWARD)
        return moe_ok();
    if (known->origin != t->slot && known->origin < MOE_MAX_SLOTS &&
        (t->live >> known->origin & 1) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RECORDED_ELSEWHERE,
                         "the answer is recorded at slot %u", answer->recorded_at);
    answer->record = moe_pass_store_get(t->answers, call->session, call->id, moe_clock_ns());
    if (answer->record != NULL)
        return moe_ok();
    return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ANSWER_GONE,
                     "id %llu has been run; its answer is no longer cached",
                     (unsigned long long)call->id);
}

bool moe_train_recall(struct moe_train *t, const struct moe_train_call *call,
                      struct moe_train_answer *answer)
{
    struct moe_call_exec x = {.call = *call};
    *answer = (struct moe_train_answer){0};
    moe_mutex_lock(&t->lock);
    if (!t->apart)
        moe_train__judge(t, &x);
    struct moe_status st = x.refusal;
    if (x.repeat)
        st = moe_train__answer_repeat(t, call, answer);
    moe_mutex_unlock(&t->lock);
    /* A Backward that is recorded here and has no answer may be about to get one. */
    bool is_answered = x.repeat && !moe_failed(&st);
    if (is_answered)
        moe_train__count(t->metrics.repeats, 1);
    return is_answered;
}

static struct moe_status recall_header(struct moe_train *t, const struct moe_train_call *call,
                                       struct moe_train_answer *answer) MOE_REQUIRES(t->lock)
{
    if (!t->apart && call->lineage != 0 && call->lineage != t->lineage)
        return wrong_lineage(t, call->lineage);
    const struct moe_ledger_call *known =
        t->apart ? NULL : moe_ledger_find(t->ledger, call->session, call->id);
    if (known == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RETAINED_PASS_GONE,
                         "no forward pass is retained here under this name: send x and the "
                         "routing");
    const struct moe_content *c = &call->content;
    bool same = memcmp(known->content.header_hash, c->header_hash, sizeof c->header_hash) == 0;
    struct moe_status st = moe_train__answer_repeat(t, call, answer);
    if (st.reason != MOE_REASON_RECORDED_ELSEWHERE && !same)
        return id_reused(t, call, &known->content);
    return st;
}

struct moe_status moe_train_recall_header(struct moe_train *t, const struct moe_train_call *call,
                                          struct moe_train_answer *answer)
{
    *answer = (struct moe_train_answer){0};
    moe_mutex_lock(&t->lock);
    struct moe_status st = recall_header(t, call, answer);
    moe_mutex_unlock(&t->lock);
    if (!moe_failed(&st) || st.reason == MOE_REASON_ANSWER_GONE)
        moe_train__count(t->metrics.repeats, 1);
    return st;
}
