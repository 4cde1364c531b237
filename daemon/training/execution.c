/* SPDX-License-Identifier: Apache-2.0 */
/* Training as the engine sees it (schedule/call_ops.h): a ticket is read, judged, run, and recorded
 * at its end. All slots do the same; see training/training.h. */
#include "training/parts.h"

#include "base/clock.h"

#include <string.h>

/* ------------------------------------------------------------------ descriptors */

static void open_calls(void *ctx, moe_call_request_fn request, void *engine)
{
    struct moe_train *t = ctx;
    t->request = request;
    t->engine = engine;
}

static uint32_t own_slot(void *ctx)
{
    struct moe_train *t = ctx;
    moe_mutex_lock(&t->lock);
    uint32_t slot = t->slot;
    moe_mutex_unlock(&t->lock);
    return slot;
}

static uint64_t weights_version(void *ctx)
{
    struct moe_train *t = ctx;
    moe_mutex_lock(&t->lock);
    uint64_t version = t->weights_version;
    moe_mutex_unlock(&t->lock);
    return version;
}

static bool blocks_weight_updates(void *ctx)
{
    struct moe_train *t = ctx;
    moe_mutex_lock(&t->lock);
    bool blocks = moe_job_blocks_weight_updates(&t->machine);
    moe_mutex_unlock(&t->lock);
    return blocks;
}

static uint64_t moved(const void *ctx)
{
    const struct moe_train *t = ctx;
    return atomic_load_explicit(&t->moved, memory_order_relaxed);
}

static struct moe_status read_descriptor(const struct moe_ticket *ticket, struct moe_call_exec *x)
{
    return moe_train_call_read(ticket, &x->call);
}

static uint64_t id_of(enum moe_step_kind kind, const struct moe_call_descriptor *descriptor)
{
    const struct moe_ticket ticket = {.kind = kind, .descriptor = *descriptor};
    struct moe_train_call call;
    struct moe_status st = moe_train_call_read(&ticket, &call);
    return moe_failed(&st) ? 0 : call.id;
}

static void describe(const struct moe_work *w, struct moe_call_descriptor *descriptor)
{
    struct moe_train_call call = {.kind = MOE_STEP_FORWARD_RETAIN, .id = w->retain_id};
    strncpy(call.session, w->retain_session, MOE_TRAINING_NAME_MAX);
    moe_train_call_pack(&call, descriptor->body, &descriptor->length);
}

/* -------------------------------------------------------------- exclusive kinds */

/* Slots that fail for a reason of theirs, not only because another slot refuses; if there are none,
 * all. */
static uint64_t with_reasons(const struct moe_job_report *all, uint64_t live)
{
    uint64_t those = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && all[s].reason != MOE_REASON_SHAPE_MISMATCH)
            those |= UINT64_C(1) << s;
    return those != 0 ? those : live;
}

static struct moe_status refused(struct moe_status why)
{
    return moe_error_context(why, "refused by all workers, nothing has changed");
}

/* A collective act has failed here with `why`. If it failed on all slots and the session still
 * works, nothing has changed: `refusal` then says why, the same on all slots. Else returns `why`.
 */
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
    *refusal = refused(moe_job_conclude(all, with_reasons(all, t->live), &unused));
    return moe_ok();
}

static struct moe_status step_optimizer(struct moe_train *t, struct moe_session *session,
                                        struct moe_call_exec *x)
{
    struct moe_ledger_outcome *o = &x->answer.outcome;
    struct moe_optimizer_args args = x->call.optimizer;
    struct moe_optimizer_result result = {0};
    uint64_t begun_ns = moe_clock_ns();
    args.number = t->steps + 1;
    struct moe_status st = t->config.backend->training->optimizer_step(
        session, t->trainers, t->config.layer_count, &args, &result);
    x->unchanged = moe_failed(&st) && result.unchanged;
    x->can_finish = moe_failed(&st) && result.can_finish;
    if (moe_failed(&st))
        return agree_on_refusal(t, session, st, &x->refusal);
    moe_mutex_lock(&t->lock);
    o->backwards = t->backwards;
    o->number = result.grad_norm;
    o->nonfinite = result.nonfinite;
    t->squares = result.squares;
    moe_train__count_step(t, result.nonfinite);
    moe_mutex_unlock(&t->lock);
    moe_train__log_stepped(t, x->call.id, begun_ns, result.nonfinite);
    return moe_ok();
}

/* A slot runs the call only once all have begun it: if it is lost then, the others know that there
 * was one; and those that still wait for it can finish the call. */
static struct moe_status meet(struct moe_train *t, struct moe_session *session,
                              struct moe_call_exec *x)
{
    uint64_t all[MOE_MAX_SLOTS];
    if (!t->config.backend->training->live_copies)
        return moe_ok();
    x->unchanged = x->can_finish = true;
    MOE_TRY(t->config.backend->session_exchange(session, &x->epoch, all, sizeof x->epoch));
    x->unchanged = x->can_finish = false;
    return moe_ok();
}

static struct moe_status zero_gradients(struct moe_train *t, struct moe_session *session,
                                        struct moe_call_exec *x)
{
    MOE_TRY(meet(t, session, x));
    x->answer.outcome.backwards = t->backwards; /* changed on this thread alone */
    return moe_train__run_zero_grad(t);
}

static struct moe_status set_frozen(struct moe_train *t, struct moe_session *session,
                                    struct moe_call_exec *x)
{
    MOE_TRY(meet(t, session, x));
    return moe_train__run_set_frozen(t, x->call.frozen);
}

/* The resident weights are the merged ones already; new adapters start from them. After a failure
 * the trainers are undefined. */
static struct moe_status merge(struct moe_train *t, struct moe_session *session,
                               struct moe_call_exec *x)
{
    MOE_TRY(meet(t, session, x));
    moe_train__end_copying(t);
    moe_train__drop_trainers(t);
    MOE_TRY(moe_train__make_trainers(t));
    MOE_TRY(moe_train__set_frozen(t, t->frozen));
    moe_mutex_lock(&t->lock);
    t->steps = 0;
    moe_mutex_unlock(&t->lock);
    return moe_ok();
}

static struct moe_status check_job(const struct moe_train *t, const struct moe_train_call *call)
{
    if (call->kind == MOE_STEP_EXPORT && t->config.trainer.lora_rank == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "there are no adapters: the workers train the whole weights");
    if (call->merge && t->config.model != NULL && moe_model_quantisation(t->config.model) != NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "quantised experts cannot take an adapter: export it");
    if (!call->merge && t->config.directory == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the workers were started without --training-dir");
    return moe_ok();
}

/* No step runs. A failure ends the view. A fault of the call goes into `refusal`, the same on all
 * slots, and nothing has changed then. */
static struct moe_status run(struct moe_train *t, struct moe_session *session,
                             const struct moe_ticket *ticket, struct moe_call_exec *x)
{
    x->answer.outcome = (struct moe_ledger_outcome){.epoch = ticket->epoch};
    switch (x->call.kind) {
    case MOE_STEP_OPTIMIZER: return step_optimizer(t, session, x);
    case MOE_STEP_ZERO_GRAD: return zero_gradients(t, session, x);
    case MOE_STEP_SET_FROZEN: return set_frozen(t, session, x);
    default: break;
    }
    x->refusal = check_job(t, &x->call);
    if (moe_failed(&x->refusal))
        return moe_ok();
    return x->call.merge ? merge(t, session, x) : moe_train__run_job(t, session, ticket, x);
}

/* ------------------------------------------------------------------------ begin */

/* A Save or Export only reads. A Load changes state in its last part, which sets x->changes. */
static bool changes_state(const struct moe_train_call *c)
{
    return c->merge || !moe_step_traits(c->kind)->is_job;
}

struct moe_status moe_train__begin(struct moe_train *t, const struct moe_ticket *ticket,
                                   struct moe_call_exec *x, struct moe_trainer **trainer)
{
    bool is_backward = x->call.kind == MOE_STEP_BACKWARD;
    *trainer = is_backward ? moe_train__find_trainer(t, ticket->layer) : NULL;
    if (is_backward && *trainer == NULL)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: layer %u is not trained",
                         (unsigned long long)ticket->seq, ticket->layer);
    moe_mutex_lock(&t->lock);
    moe_train__judge(t, x);
    x->weights_version = t->weights_version;
    bool blocked = moe_job_blocks_weight_updates(&t->machine);
    moe_mutex_unlock(&t->lock);
    if (x->run && blocked && moe_step_traits(x->call.kind)->is_weight_update)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "ticket %llu would change weights that a checkpoint is read from",
                         (unsigned long long)ticket->seq);
    x->changes = x->run && changes_state(&x->call);
    x->unchanged = is_backward;
    x->origin = ticket->descriptor.origin;
    x->epoch = ticket->epoch;
    if (x->run && is_backward)
        moe_activations_set_use(t->activations, x->call.session, x->call.id, true);
    return moe_ok();
}

static struct moe_status enqueue_backward(struct moe_train *t, const struct moe_ticket *ticket,
                                          const struct moe_train_work *w,
                                          struct moe_session *session,
                                          const struct moe_call_rows *rows,
                                          struct moe_trainer *trainer, struct moe_call_exec *x,
                                          struct moe_step **step)
{
    struct moe_backward_args args = {
        .trainer = trainer,
        .dtype = ticket->dtype,
        .bucket = ticket->bucket,
        .aux_coeff = x->call.aux_coeff,
        .accumulate = !x->call.input_only,
        .aux_loss = &x->aux_loss,
        .retained = x->call.retained_epoch == ticket->epoch ? x->call.retained : 0,
    };
    if (w != NULL) {
        args.tokens = w->tokens;
        memset(rows->mode, (int)w->mode, w->tokens);
        args.x = w->x;
        args.dy = w->dy;
        args.mode = rows->mode;
        args.ids = w->ids;
        args.weights = w->weights;
        args.dx = w->dx;
        args.dweights = w->dweights;
        args.token_state = rows->token_state;
    }
    return t->config.backend->training->backward_enqueue(session, &args, step);
}

static struct moe_status begin(void *ctx, const struct moe_ticket *ticket,
                               const struct moe_train_work *w, struct moe_session *session,
                               const struct moe_call_rows *rows, struct moe_call_exec *x,
                               struct moe_step **step)
{
    const struct moe_train *t = ctx;
    struct moe_trainer *trainer;
    /* The sequencer issues no ticket that would come here without a lease, as far as it can know.
     * Nothing has changed on this slot yet. */
    if (!moe_lease_gate_await_change(t->config.lease))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST,
                         "this worker's lease is too short for ticket %llu",
                         (unsigned long long)ticket->seq);
    MOE_TRY(moe_train__begin(ctx, ticket, x, &trainer));
    if (!x->run)
        return moe_ok();
    if (trainer != NULL)
        return enqueue_backward(ctx, ticket, w, session, rows, trainer, x, step);
    return run(ctx, session, ticket, x);
}

/* ------------------------------------------------------------------------- ends */

static void refuse(struct moe_call_exec *x, struct moe_status why)
{
    x->refusal = refused(why);
}

/* A Backward's numbers are not recorded: the slot that was asked caches them with the tensors. */
static void record(struct moe_train *t, const struct moe_ticket *ticket, struct moe_call_exec *x)
    MOE_REQUIRES(t->lock)
{
    struct moe_ledger_outcome *o = &x->answer.outcome;
    bool is_backward = x->call.kind == MOE_STEP_BACKWARD;
    if (is_backward)
        *o = (struct moe_ledger_outcome){.epoch = ticket->epoch};
    if (!x->settles) /* a job is recorded as soon as it is done */
        moe_train__record(t, &x->call, ticket->descriptor.origin, o);
    if (is_backward) {
        o->number = x->aux_loss;
        t->gradients |= x->call.input_only ? 0 : t->live;
        moe_train__count(t->metrics.backwards, 1);
    }
}

/* A Backward takes its activations with it; new weights make all activations useless. */
static void end_activations(struct moe_train *t, const struct moe_call_exec *x, bool done)
{
    const struct moe_train_call *c = &x->call;
    bool new_weights = (c->merge && done) || weights_version(t) != x->weights_version;
    if (c->kind != MOE_STEP_BACKWARD && x->run && new_weights)
        moe_activations_drop_all(t->activations);
    else if (c->kind == MOE_STEP_BACKWARD && done)
        moe_activations_drop(t->activations, c->session, c->id);
    else if (c->kind == MOE_STEP_BACKWARD && x->run)
        moe_activations_set_use(t->activations, c->session, c->id, false);
}

struct moe_status moe_train__end(struct moe_train *t, const struct moe_ticket *ticket,
                                 struct moe_call_exec *x)
{
    struct moe_status st = x->refusal;
    bool done = x->run && !x->waits && !moe_failed(&st);
    bool repeat = x->repeat && ticket->descriptor.origin == t->slot;
    end_activations(t, x, done);
    moe_mutex_lock(&t->lock);
    if (done)
        record(t, ticket, x);
    else
        x->answer = (struct moe_train_answer){0};
    if (repeat)
        st = moe_train__answer_repeat(t, &x->call, &x->answer);
    moe_mutex_unlock(&t->lock);
    if (repeat && st.reason != MOE_REASON_RECORDED_ELSEWHERE) /* the other worker counts it */
        moe_train__count(t->metrics.repeats, 1);
    moe_train__show(t);
    x->changes = false;
    return st;
}

static void end(void *ctx, const struct moe_ticket *ticket, struct moe_train_work *w,
                const struct moe_step_result *result, struct moe_call_exec *x,
                struct moe_call_end *out)
{
    struct moe_train *t = ctx;
    struct moe_status st = moe_train__end(t, ticket, x);
    *out = (struct moe_call_end){
        .status = st,
        .passed = ticket->kind == MOE_STEP_BACKWARD && x->run && !moe_failed(&x->refusal),
        .waits = x->waits,
        .joined = x->joined,
        .settles = x->settles,
    };
    if (w != NULL && out->passed)
        w->aux_loss = x->aux_loss;
    if (result->used_retained)
        moe_train__count(t->metrics.reused, 1);
}

static void abandon(void *ctx, struct moe_call_exec *x)
{
    struct moe_train *t = ctx;
    moe_mutex_lock(&t->lock);
    moe_train__cut_short(t, x);
    moe_mutex_unlock(&t->lock);
    x->changes = x->run = false;
}

static void answer(const struct moe_call_exec *x, struct moe_train_work *w)
{
    *w->answer = x != NULL ? x->answer : (struct moe_train_answer){0};
    w->answer->repeated = w->answer->repeated || w->joined;
}

/* ---------------------------------------------------------- activations, memory */

static void retained(void *ctx, const struct moe_ticket *ticket, uint32_t tokens,
                     const struct moe_step_result *result, const struct moe_call_exec *x)
{
    struct moe_train *t = ctx;
    /* An empty step, or one with all its tokens at experts of other slots: nothing to retain. */
    if (tokens == 0 && result->rows == 0) {
        moe_activations_note_empty(t->activations, ticket->layer, ticket->seq);
        return;
    }
    moe_mutex_lock(&t->lock);
    /* An id that has been used: no Backward will come for it. */
    bool used = moe_ledger_find(t->ledger, x->call.session, x->call.id) != NULL;
    bool asked_here = ticket->descriptor.origin == t->slot;
    moe_mutex_unlock(&t->lock);
    const struct moe_retained_step step = {
        .session = x->call.session,
        .id = x->call.id,
        .name = ticket->seq,
        .layer = ticket->layer,
        .dtype = ticket->dtype,
        .retained = result->retained,
        .asked_here = asked_here,
        .used = used,
    };
    moe_activations_note(t->activations, &step);
    moe_train__count(t->metrics.retained_steps, result->retained);
    moe_train__show(t);
}

static uint64_t next_expiry(void *ctx, bool view)
{
    struct moe_train *t = ctx;
    uint64_t now = moe_clock_ns();
    uint64_t stored = moe_earlier(moe_pass_store_next_expiry(t->passes, now),
                                  moe_pass_store_next_expiry(t->answers, now));
    return view ? moe_earlier(stored, moe_activations_next_expiry(t->activations)) : stored;
}

static void expire(void *ctx, uint64_t now, bool view)
{
    struct moe_train *t = ctx;
    if (view)
        moe_activations_expire(t->activations, now);
    moe_pass_store_expire(t->passes, now);
    moe_pass_store_expire(t->answers, now);
    moe_train__show(t);
}

static void end_view(void *ctx)
{
    struct moe_train *t = ctx;
    moe_activations_forget(t->activations);
    (void)moe_train_set_joiner(t, false, 0);
    moe_train__show(t);
    moe_train__give_up_job(t);
}

const struct moe_call_ops moe_train_call_ops = {
    .exec_bytes = sizeof(struct moe_call_exec),
    .open = open_calls,
    .close = moe_train__end_jobs,
    .slot = own_slot,
    .weights_version = weights_version,
    .id_of = id_of,
    .describe = describe,
    .read = read_descriptor,
    .begin = begin,
    .refuse = refuse,
    .end = end,
    .abandon = abandon,
    .answer = answer,
    .blocks_weight_updates = blocks_weight_updates,
    .moved = moved,
    .is_unwanted = moe_train__is_unwanted,
    .retained = retained,
    .next_expiry = next_expiry,
    .expire = expire,
    .end_view = end_view,
};
