/* SPDX-License-Identifier: Apache-2.0 */
/* Training as the engine sees it (schedule/call_ops.h): reads the order of a ticket, begins, runs
 * and ends its execution, and answers. What a ticket means is in tickets.c. */
#include "training/state.h"

#include "base/clock.h"

#include <string.h>

/* One ticket's, from its turn to its end. */
struct moe_call_exec {
    struct moe_train_call call;
    struct moe_train_execution turn;
    struct moe_ledger_outcome outcome;
    struct moe_train_answer answer; /* as of its end */
    bool changing; /* the state of training may be half changed until the turn ends */
};

/* ---------------------------------------------------------------------- open, close */

static bool request(void *ctx, const struct moe_train_call *call)
{
    struct moe_train *t = ctx;
    struct moe_call_descriptor descriptor;
    moe_train_call_pack(call, descriptor.body, &descriptor.length);
    return t->request(t->engine, call->kind, &descriptor);
}

static void open_calls(void *ctx, moe_call_request_fn fn, void *engine)
{
    struct moe_train *t = ctx;
    t->request = fn;
    t->engine = engine;
    moe_train_set_progress(t, request, t);
}

static void close_calls(void *ctx)
{
    moe_train_end_jobs(ctx); /* no progress tickets from now on */
}

/* ---------------------------------------------------------------------------- orders */

static uint32_t own_slot(void *ctx)
{
    return moe_train_slot(ctx);
}

static uint64_t version(void *ctx)
{
    return moe_train_weights_version(ctx);
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

/* ------------------------------------------------------------------------ executions */

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
        .aux_loss = &x->turn.aux_loss,
        .retained = x->turn.retained,
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
    struct moe_train *t = ctx;
    struct moe_trainer *trainer = NULL;
    MOE_TRY(moe_train_begin(t, ticket, &x->call, &x->turn, &trainer));
    if (!x->turn.run)
        return moe_ok();
    x->changing = x->turn.changes;
    if (ticket->kind == MOE_STEP_BACKWARD)
        return enqueue_backward(t, ticket, w, session, rows, trainer, x, step);
    struct moe_status st = moe_train_run(t, session, ticket, &x->call, &x->turn, &x->outcome);
    x->changing = x->turn.changes;
    return st;
}

static void refuse(struct moe_call_exec *x, struct moe_status why)
{
    x->turn.refusal = moe_error_context(why, "refused by all workers, nothing has changed");
}

static void end(void *ctx, const struct moe_ticket *ticket, struct moe_train_work *w,
                const struct moe_step_result *result, struct moe_call_exec *x,
                struct moe_call_end *out)
{
    struct moe_train *t = ctx;
    struct moe_status st = moe_train_end(t, ticket, &x->call, &x->turn, &x->outcome, &x->answer);
    *out = (struct moe_call_end){
        .status = st,
        .passed = ticket->kind == MOE_STEP_BACKWARD && x->turn.run && !moe_failed(&x->turn.refusal),
        .waits = x->turn.waits,
        .joined = x->turn.joined,
        .settles = x->turn.settles,
    };
    if (w != NULL && out->passed)
        w->aux_loss = x->turn.aux_loss;
    if (result->used_retained)
        moe_train_count_reused(t);
    x->changing = false;
}

static void abandon(void *ctx, struct moe_call_exec *x)
{
    if (x->changing)
        moe_train_mark_inconsistent(ctx);
    x->changing = false;
}

static void answer(const struct moe_call_exec *x, struct moe_train_work *w)
{
    *w->answer = x != NULL ? x->answer : (struct moe_train_answer){0};
    w->answer->repeated = w->answer->repeated || w->joined;
}

static bool blocks_weight_updates(void *ctx)
{
    return moe_train_blocks_weight_updates(ctx);
}

static bool is_unwanted(void *ctx, enum moe_step_kind kind, uint64_t id,
                        struct moe_call_descriptor *descriptor)
{
    struct moe_train_call progress;
    bool unwanted = moe_train_job_unwanted(ctx, kind, id, &progress);
    if (unwanted)
        moe_train_call_pack(&progress, descriptor->body, &descriptor->length);
    return unwanted;
}

/* ---------------------------------------------------------------- activations, memory */

/* The id has been used: no Backward will come that could use what is kept for it. */
static bool is_recorded(struct moe_train *t, const struct moe_train_call *call)
{
    moe_mutex_lock(&t->lock);
    bool recorded = moe_ledger_find(t->ledger, call->session, call->id) != NULL;
    moe_mutex_unlock(&t->lock);
    return recorded;
}

static void retained(void *ctx, const struct moe_ticket *ticket, uint32_t tokens,
                     const struct moe_step_result *result, const struct moe_call_exec *x)
{
    struct moe_train *t = ctx;
    /* No tokens here and no rows of others': an empty step, or one whose tokens all went to experts
     * of other slots. This slot need not know which: there is nothing to keep in either. */
    if (tokens == 0 && result->rows == 0) {
        moe_activations_note_empty(t->activations, ticket->layer, ticket->seq);
        return;
    }
    const struct moe_retained_step step = {
        .session = x->call.session,
        .id = x->call.id,
        .name = ticket->seq,
        .layer = ticket->layer,
        .dtype = ticket->dtype,
        .retained = result->retained,
        .asked_here = ticket->descriptor.origin == moe_train_slot(t),
        .used = is_recorded(t, &x->call),
    };
    moe_activations_note(t->activations, &step);
    if (result->retained)
        moe_train_count_retained(t);
    moe_train__show(t);
}

static uint64_t next_expiry(void *ctx, bool view)
{
    struct moe_train *t = ctx;
    uint64_t activations = view ? moe_activations_next_expiry(t->activations) : MOE_NEVER;
    uint64_t memory = moe_train_next_expiry(t, moe_clock_ns());
    return activations < memory ? activations : memory;
}

static void expire(void *ctx, uint64_t now, bool view)
{
    struct moe_train *t = ctx;
    if (view)
        moe_activations_expire(t->activations, now);
    moe_train_expire(t, now);
}

static void end_view(void *ctx)
{
    struct moe_train *t = ctx;
    moe_activations_forget(t->activations);
    moe_train__show(t);
    moe_train_give_up_job(t);
}

const struct moe_call_ops moe_train_call_ops = {
    .exec_bytes = sizeof(struct moe_call_exec),
    .open = open_calls,
    .close = close_calls,
    .slot = own_slot,
    .weights_version = version,
    .id_of = id_of,
    .describe = describe,
    .read = read_descriptor,
    .begin = begin,
    .refuse = refuse,
    .end = end,
    .abandon = abandon,
    .answer = answer,
    .blocks_weight_updates = blocks_weight_updates,
    .is_unwanted = is_unwanted,
    .retained = retained,
    .next_expiry = next_expiry,
    .expire = expire,
    .end_view = end_view,
};
