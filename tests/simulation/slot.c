/* SPDX-License-Identifier: Apache-2.0 */
/* A worker process, as far as order and state go: calls wait for tickets, tickets become steps, two
 * at once at most, and a step needs what every slot brings to it. */
#include "simulation/world.h"

#include <string.h>

const char *const op_names[OP_KINDS] = {"forward", "backward", "step",  "zero",
                                        "save",    "load",     "export"};

static enum moe_step_kind step_kind(enum op_kind kind)
{
    static const enum moe_step_kind kinds[OP_KINDS] = {
        [OP_FORWARD] = MOE_STEP_FORWARD, [OP_BACKWARD] = MOE_STEP_BACKWARD,
        [OP_STEP] = MOE_STEP_OPTIMIZER,  [OP_ZERO] = MOE_STEP_ZERO_GRAD,
        [OP_SAVE] = MOE_STEP_SAVE,       [OP_LOAD] = MOE_STEP_LOAD,
        [OP_EXPORT] = MOE_STEP_EXPORT,
    };
    return kinds[kind];
}

static bool is_of_jobs(enum op_kind kind)
{
    return kind == OP_SAVE || kind == OP_LOAD || kind == OP_EXPORT;
}

const char *session_of(const struct world *w, uint16_t op)
{
    static const char *const names[CLIENTS] = {"s0", "s1", "s2", "s3", "s4"};
    return w->ops[op].kind == OP_BACKWARD ? names[w->ops[op].client] : "";
}

/* What travels of a call. */
struct body {
    uint16_t op;
    bool progress;
    uint64_t id; /* progress: the job's */
    uint64_t lineage;
    struct moe_content content;
};

struct moe_status reforming(void)
{
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1, "the view ended");
}

static struct moe_status cancelled(void)
{
    return moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled");
}

/* ----------------------------------------------------------------------------- calls */

struct call *new_call(struct world *w, struct slot *s)
{
    for (size_t i = 0; i < CALLS_MAX; i++)
        if (!w->calls[i].used) {
            w->calls[i] = (struct call){.used = true, .work = {.user = s}};
            return &w->calls[i];
        }
    check(w, false, "the simulator has room for calls");
    return NULL;
}

void end_call(struct world *w, struct slot *s, struct call *c, const struct moe_status *status,
              const struct moe_ledger_outcome *outcome)
{
    c->used = false;
    if (c->progress || c->cancelled || fault(w, 30))
        return;
    const struct op *op = &w->ops[c->op];
    struct event *e = new_event(w, E_ANSWER, op->client);
    e->number = c->attempt;
    e->u.answer = (struct answer){
        .code = status->code, .reason = status->reason, .lineage = s->state.lineage};
    if (outcome != NULL) {
        e->u.answer.lineage = outcome->lineage;
        e->u.answer.version = outcome->weights_version;
        e->u.answer.steps = outcome->steps;
    }
    bool done = !moe_failed(status) && op->kind != OP_FORWARD;
    check(w, !done || has_applied(&s->state, c->op), "what is answered has happened");
    check(w, !done || (op->kind != OP_SAVE && op->kind != OP_EXPORT) || op->committed,
          "a Save that is answered has been written");
    TRACE(w, "slot %u answers %s #%u of client %u: %s/%s", s->index, op_names[op->kind], c->op,
          op->client, moe_code_name(status->code), moe_reason_name(status->reason));
    post(w, e, 1 + rnd(w, 4));
}

static void describe(const struct slot *s, const struct call *c, struct moe_ticket *out)
{
    struct body body = {.op = c->op,
                        .progress = c->progress,
                        .id = c->id,
                        .lineage = c->lineage,
                        .content = c->content};
    *out = (struct moe_ticket){.epoch = s->epoch, .kind = c->kind};
    if (c->kind == MOE_STEP_BACKWARD) {
        out->layer = LAYER;
        out->dtype = MOE_DTYPE_F32;
    }
    out->descriptor.number = c->number;
    out->descriptor.length = sizeof body;
    memcpy(out->descriptor.body, &body, sizeof body);
}

static uint32_t sequencer_slot(const struct slot *s)
{
    return (uint32_t)__builtin_ctzll(s->live);
}

void announce_calls(struct world *w, struct slot *s)
{
    for (size_t i = 0; s->epoch != 0 && i < s->waiting_count; i++) {
        struct call *c = s->waiting[i];
        if (c->number != 0)
            continue;
        c->number = ++s->last_number;
        struct event *e = new_event(w, E_CALL, sequencer_slot(s));
        e->epoch = s->epoch;
        e->tokens = c->kind == MOE_STEP_BACKWARD ? w->ops[c->op].tokens : 0;
        describe(s, c, &e->u.ticket);
        send_to(w, s->index, e);
    }
}

static void announce_tokens(struct world *w, struct slot *s, const struct moe_step_key *key,
                            uint64_t tokens)
{
    struct event *e = new_event(w, E_WORK, sequencer_slot(s));
    e->epoch = s->epoch;
    e->key = *key;
    e->tokens = (uint32_t)tokens;
    send_to(w, s->index, e);
}

void add_waiting(struct world *w, struct slot *s, struct call *c)
{
    s->waiting[s->waiting_count++] = c;
    s->progress_count += c->progress;
    announce_calls(w, s);
}

static void remove_waiting(struct slot *s, size_t at)
{
    s->progress_count -= s->waiting[at]->progress;
    s->waiting_count--;
    for (; at < s->waiting_count; at++)
        s->waiting[at] = s->waiting[at + 1];
}

/* ------------------------------------------------------------------------- judgement */

/* A client names the same lineage however often it asks, but for gradients that are lost. */
static bool lineage_differs(uint64_t asked, uint64_t lineage)
{
    return asked != 0 && asked != lineage;
}

static struct moe_status refuse(enum moe_reason reason)
{
    return moe_error(MOE_FAILED_PRECONDITION, reason, "refused");
}

static struct moe_status check_new(const struct slot *s, const struct op *op, uint64_t lineage)
{
    if (is_of_jobs(op->kind) && !moe_job_may_begin(&s->job))
        return refuse(MOE_REASON_SAVE_RUNNING);
    if ((op->kind == OP_SAVE || op->kind == OP_EXPORT) && s->state.backwards != 0)
        return refuse(MOE_REASON_GRADIENTS_PENDING);
    if (op->kind == OP_STEP && lineage == 0 && s->open)
        return refuse(MOE_REASON_GRADIENTS_LOST);
    return moe_ok();
}

/* A Load begins a new lineage, and its repeat still names the one before it. */
static bool repeats_load(const struct world *w, const struct slot *s, uint16_t number)
{
    const struct op *op = &w->ops[number];
    const struct moe_ledger_call *known;
    return op->kind == OP_LOAD &&
           moe_ledger_look(s->ledger, "", op->id, &op->content, &known) == MOE_LEDGER_REPEAT &&
           known->outcome.lineage == s->state.lineage;
}

static bool judge_job(const struct slot *s, const struct op *op, uint64_t lineage,
                      struct execution *t)
{
    if (op->kind == OP_BACKWARD || lineage_differs(lineage, s->job_lineage))
        return false;
    enum moe_job_outcome outcome = moe_job_judge(&s->job, op->id, &op->content);
    t->run = t->joined = outcome == MOE_JOB_JOINS;
    if (outcome == MOE_JOB_REUSED)
        t->refusal = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_REUSED, "the job's");
    return outcome != MOE_JOB_UNKNOWN;
}

static void judge(const struct world *w, const struct slot *s, uint16_t number, uint64_t lineage,
                  struct execution *t)
{
    const struct op *op = &w->ops[number];
    t->refusal = moe_ok();
    t->op = number;
    if (judge_job(s, op, lineage, t))
        return;
    if (repeats_load(w, s, number)) {
        t->repeat = true;
        return;
    }
    if (lineage_differs(lineage, s->state.lineage)) {
        bool gradients = lineage == s->earlier && !s->lost_call;
        t->refusal = refuse(gradients ? MOE_REASON_GRADIENTS_LOST : MOE_REASON_STATE_LOST);
        return;
    }
    switch (moe_ledger_look(s->ledger, session_of(w, number), op->id, &op->content, NULL)) {
    case MOE_LEDGER_REPEAT: t->repeat = true; return;
    case MOE_LEDGER_REUSED:
        t->refusal = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_REUSED, "the ledger's");
        return;
    case MOE_LEDGER_TOO_OLD:
        t->refusal = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD, "too old");
        return;
    case MOE_LEDGER_NEW: break;
    }
    t->refusal = check_new(s, op, lineage);
    t->run = !moe_failed(&t->refusal);
}

static void record_backward(struct world *w, struct slot *s, uint16_t op,
                            const struct moe_ledger_call *entry)
{
    s->before = moe_ledger_hash(s->ledger);
    s->change = (struct moe_ledger_call){0};
    s->backward = *entry;
    strcpy(s->backward_session, session_of(w, op));
    moe_ledger_record_pending(s->ledger, s->backward_session, entry);
}

static bool can_be_finished(enum op_kind kind)
{
    return kind == OP_STEP || kind == OP_ZERO;
}

static void record_change(struct world *w, struct slot *s, uint16_t op,
                          const struct moe_ledger_call *entry)
{
    s->before = moe_ledger_hash(s->ledger);
    s->backward = s->change = (struct moe_ledger_call){0};
    moe_ledger_record(s->ledger, session_of(w, op), entry);
    s->only_recorded = w->ops[op].kind == OP_SAVE || w->ops[op].kind == OP_EXPORT;
    if (s->only_recorded || can_be_finished(w->ops[op].kind))
        s->change = *entry;
    if (!can_be_finished(w->ops[op].kind))
        return;
    moe_ledger_settle(s->ledger);
    s->gradient_slots = 0;
    s->open = false;
}

void record_op(struct world *w, struct slot *s, uint16_t op, uint32_t origin,
               const struct moe_ledger_outcome *outcome)
{
    struct moe_ledger_call entry = {
        .id = w->ops[op].id, .content = w->ops[op].content, .origin = origin, .outcome = *outcome};
    apply(w, s, op);
    if (entry.outcome.lineage == 0) {
        entry.outcome.lineage = s->state.lineage;
        entry.outcome.weights_version = s->state.version;
        entry.outcome.steps = s->state.steps;
    }
    if (w->ops[op].kind != OP_BACKWARD) {
        record_change(w, s, op, &entry);
        return;
    }
    record_backward(w, s, op, &entry);
    s->gradient_slots |= s->live;
}

/* The operation that a record is of. */
static uint16_t op_of(const struct world *w, const struct moe_ledger_call *entry)
{
    for (uint16_t i = 1; i < w->op_count; i++) {
        const struct op *op = &w->ops[i];
        if (op->id == entry->id && op->kind != OP_BACKWARD &&
            memcmp(&op->content, &entry->content, sizeof op->content) == 0)
            return i;
    }
    return 0;
}

void finish_op(struct world *w, struct slot *s, const struct moe_train_recovery *d)
{
    uint16_t op = d->only_recorded ? op_of(w, &d->change) : s->begun_op;
    check(w, op != 0 && op == op_of(w, &d->change), "a slot finishes what the others have run");
    if (w->broken != NULL)
        return;
    TRACE(w, "slot %u finishes %s #%u", s->index, op_names[w->ops[op].kind], op);
    s->undefined = s->undefined && d->only_recorded;
    apply(w, s, op);
    record_change(w, s, op, &d->change);
    if (d->settled) {
        s->saved_calls = moe_ledger_count(s->ledger);
        moe_ledger_settle(s->ledger);
    }
    w->totals.finished++;
}

/* A Backward may have run on another slot: its record is there, and its gradients are undefined.
 * Any other call leaves the state as it was, and another slot may have answered it. A slot that has
 * run it has had the shares of all: so a step can be finished here. */
void abandon_op(struct world *w, struct slot *s, uint16_t op, uint32_t origin)
{
    const struct moe_ledger_call entry = {.id = w->ops[op].id,
                                          .content = w->ops[op].content,
                                          .origin = origin,
                                          .outcome = {.lineage = s->state.lineage,
                                                      .weights_version = s->state.version,
                                                      .steps = s->state.steps}};
    enum op_kind kind = w->ops[op].kind;
    s->undefined = s->undefined || kind == OP_BACKWARD || kind == OP_STEP;
    if (kind == OP_BACKWARD)
        record_backward(w, s, op, &entry);
    else
        s->unsettled |= s->live;
    s->begun_op = can_be_finished(kind) ? op : 0;
}

static void answer_repeat(struct world *w, struct slot *s, struct call *c)
{
    const struct moe_ledger_call *known =
        moe_ledger_find(s->ledger, session_of(w, c->op), w->ops[c->op].id);
    struct moe_status st = moe_ok();
    if (known == NULL)
        st = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD, "forgotten");
    end_call(w, s, c, &st, known != NULL ? &known->outcome : NULL);
}

/* ---------------------------------------------------------------------------- asking */

static void submit_forward(struct world *w, struct slot *s, struct call *c)
{
    const struct moe_step_key key = {LAYER, MOE_STEP_FORWARD, MOE_DTYPE_F32};
    c->work.layer = LAYER;
    c->work.dtype = MOE_DTYPE_F32;
    c->work.tokens = w->ops[c->op].tokens;
    c->work.deadline_ns = UINT64_MAX;
    moe_batcher_push(s->batcher, &key, &c->work);
    if (s->epoch != 0)
        announce_tokens(w, s, &key, c->work.tokens);
}

static void asked(struct world *w, struct slot *s, const struct event *e)
{
    struct execution t = {0};
    struct call *c = new_call(w, s);
    if (c == NULL)
        return;
    c->op = (uint16_t)e->op;
    c->attempt = (uint32_t)e->number;
    const struct op *op = &w->ops[c->op];
    c->kind = step_kind(op->kind);
    if (op->kind == OP_FORWARD) {
        submit_forward(w, s, c);
        return;
    }
    c->lineage = op->lineage;
    judge(w, s, c->op, c->lineage, &t);
    if (t.repeat && s->epoch != 0) {
        answer_repeat(w, s, c);
    } else if (s->waiting_count - s->progress_count == WAITING_MAX) {
        struct moe_status full = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, "full");
        end_call(w, s, c, &full, NULL);
    } else {
        add_waiting(w, s, c);
    }
}

static void settle_forward(struct world *w, struct slot *s, struct call *c)
{
    if (c->work.queued || c->work.taken != c->work.finished)
        return;
    struct moe_status st = c->cancelled ? cancelled() : moe_ok();
    end_call(w, s, c, &st, NULL);
}

static void left(struct world *w, struct slot *s, const struct event *e)
{
    for (size_t i = 0; i < CALLS_MAX; i++) {
        struct call *c = &w->calls[i];
        if (!c->used || c->progress || c->work.user != s || w->ops[c->op].client != e->from ||
            c->attempt != e->number)
            continue;
        c->cancelled = true;
        if (c->kind == MOE_STEP_FORWARD) {
            (void)moe_batcher_remove(s->batcher, &c->work);
            settle_forward(w, s, c);
            return;
        }
        for (size_t n = 0; n < s->pending_count; n++)
            if (s->pending[n] == c) {
                s->pending[n] = s->pending[--s->pending_count];
                c->used = false;
            }
        for (size_t n = 0; n < s->waiting_count; n++)
            if (s->waiting[n] == c && (c->number == 0 || s->epoch == 0)) {
                remove_waiting(s, n);
                c->used = false;
            }
        stop_waiting(w, s, c);
        return;
    }
}

/* ------------------------------------------------------------------------- sequencer */

/* While a process waits to join, the state stays as a Save has written it. */
void hold_changes(struct slot *s)
{
    bool saves = moe_job_is_active(&s->job) && s->job.call.kind == MOE_JOB_SAVE;
    bool saved = is_saved(s) && moe_ledger_count(s->ledger) != s->released;
    enum moe_hold hold = moe_job_is_active(&s->job) ? MOE_HOLD_CHANGES : MOE_HOLD_TRAINING;
    moe_sequencer_hold(s->sequencer, s->joiner && (saves || saved) ? hold : MOE_HOLD_NOTHING);
}

static void issue_tickets(struct world *w, struct slot *s)
{
    struct moe_ticket t;
    hold_changes(s);
    for (; moe_sequencer_next(s->sequencer, &t); hold_changes(s))
        for (uint32_t i = 0; i < w->slot_count; i++) {
            if ((s->live >> i & 1) == 0)
                continue;
            struct event *e = new_event(w, E_TICKET, i);
            e->epoch = s->epoch;
            e->u.ticket = t;
            send_to(w, s->index, e);
        }
}

static void sequencer_event(struct world *w, struct slot *s, const struct event *e)
{
    struct moe_status st = moe_ok();
    if (e->kind == E_WORK)
        st = moe_sequencer_work(s->sequencer, e->from, &e->key, e->tokens);
    else if (e->kind == E_CALL)
        st = moe_sequencer_call(s->sequencer, e->from, &e->u.ticket, e->tokens);
    else
        st = moe_sequencer_done(s->sequencer, e->from, e->number, e->ok);
    check(w, !moe_failed(&st), "the sequencer takes what slots tell it");
    issue_tickets(w, s);
}

/* --------------------------------------------------------------------------- tickets */

static void send_share(struct world *w, struct slot *s, struct execution *t)
{
    struct share mine = {
        .seq = t->ticket.seq, .version = s->state.version, .weights = s->state.weights};
    t->collective = true;
    if (t->progress || (t->run && is_of_jobs(w->ops[t->op].kind))) {
        mine.waited = t->call != NULL && !t->call->progress && !t->call->cancelled;
        for (size_t i = 0; i < s->pending_count; i++)
            mine.waited = mine.waited || !s->pending[i]->cancelled;
        moe_job_report(&s->job, &mine.report);
        mine.report.writer = s->process;
    }
    s->shares[mine.seq % SEQ_RING][s->index] = mine;
    for (uint32_t i = 0; i < w->slot_count; i++) {
        if (i == s->index || (s->live >> i & 1) == 0)
            continue;
        struct event *e = new_event(w, E_SHARE, i);
        e->epoch = s->epoch;
        e->u.share = mine;
        send_to(w, s->index, e);
    }
}

static void claim_call(struct world *w, struct slot *s, struct execution *t)
{
    if (t->ticket.descriptor.origin != s->index)
        return;
    for (size_t i = 0; i < s->waiting_count; i++)
        if (s->waiting[i]->number == t->ticket.descriptor.number) {
            t->call = s->waiting[i];
            remove_waiting(s, i);
            return;
        }
    check(w, false, "a ticket is for a call that was announced");
}

/* Calls of one slot keep their order; only some may pass a blocked call. */
static void check_order(struct world *w, struct slot *s, const struct moe_ticket *t)
{
    uint64_t *last = &s->last_ordered[t->descriptor.origin];
    if (moe_step_traits(t->kind)->passes_blocked)
        return;
    check(w, t->descriptor.number > *last, "calls run in the order in which they came");
    *last = t->descriptor.number;
}

static void begin_training(struct world *w, struct slot *s, struct execution *t)
{
    struct body body;
    memcpy(&body, t->ticket.descriptor.body, sizeof body);
    check_order(w, s, &t->ticket);
    claim_call(w, s, t);
    t->op = body.op;
    t->progress = body.progress;
    if (t->progress) {
        t->progress = moe_job_judge(&s->job, body.id, &body.content) == MOE_JOB_JOINS;
    } else {
        judge(w, s, body.op, body.lineage, t);
        t->changes = t->run && !is_of_jobs(w->ops[t->op].kind);
    }
    bool updates = t->run && w->ops[t->op].kind == OP_STEP;
    check(w, !updates || !moe_job_blocks_weight_updates(&s->job),
          "no weight update is ordered while they are blocked");
    if (t->progress || (t->run && is_of_jobs(w->ops[t->op].kind)))
        begin_job_execution(w, s, t);
    if (t->progress || t->run)
        send_share(w, s, t);
}

static void begin_ticket(struct world *w, struct slot *s)
{
    const struct moe_step_key key = {LAYER, MOE_STEP_FORWARD, MOE_DTYPE_F32};
    struct execution *t = &s->executions[(s->first_execution + s->execution_count++) % LANES];
    uint32_t tokens;
    *t = (struct execution){.ticket = s->tickets[s->ticket_first], .version = s->state.version};
    t->refusal = moe_ok();
    s->ticket_first = (s->ticket_first + 1) % TICKETS_MAX;
    s->ticket_count--;
    check(w, t->ticket.seq == s->last_seq + 1, "tickets come in order");
    s->last_seq = t->ticket.seq;
    if (t->ticket.kind != MOE_STEP_FORWARD) {
        begin_training(w, s, t);
        return;
    }
    t->segment_count = moe_batcher_take(s->batcher, &key, t->ticket.bucket, t->segments, &tokens);
    send_share(w, s, t);
}

static bool may_begin(const struct slot *s)
{
    if (s->ticket_count == 0 || s->execution_count == LANES)
        return false;
    if (s->execution_count == 0)
        return true;
    enum moe_step_kind next = s->tickets[s->ticket_first].kind,
                       now = s->executions[s->first_execution].ticket.kind;
    return !moe_step_traits(next)->is_exclusive && !moe_step_traits(now)->is_exclusive &&
           !(moe_step_traits(next)->is_training && moe_step_traits(now)->is_training);
}

/* ------------------------------------------------------------------------------ ends */

static bool may_end(const struct world *w, const struct slot *s)
{
    const struct execution *t = &s->executions[s->first_execution];
    if (s->execution_count == 0)
        return false;
    for (uint32_t i = 0; t->collective && i < w->slot_count; i++)
        if ((s->live >> i & 1) != 0 && s->shares[t->ticket.seq % SEQ_RING][i].seq != t->ticket.seq)
            return false;
    return true;
}

static void check_one_version(struct world *w, const struct slot *s, const struct execution *t)
{
    const struct share *all = s->shares[t->ticket.seq % SEQ_RING], *own = &all[s->index];
    for (uint32_t i = 0; t->collective && i < w->slot_count; i++)
        check(w,
              (s->live >> i & 1) == 0 ||
                  (all[i].version == own->version && all[i].weights == own->weights),
              "all slots run a step with the same weights");
}

static void end_forward(struct world *w, struct slot *s, struct execution *t)
{
    for (size_t i = 0; i < t->segment_count; i++) {
        struct call *c = (struct call *)((char *)t->segments[i].work - offsetof(struct call, work));
        if (c->work.finished == 0)
            c->served_by = t->version;
        check(w, c->served_by == t->version, "a request is served by one version");
        c->work.finished += t->segments[i].count;
        settle_forward(w, s, c);
    }
}

/* Requests that have seen part of the old version begin again. */
static void change_version(struct world *w, struct slot *s)
{
    struct moe_step_key key;
    uint32_t tokens;
    struct moe_work *first;
    if (s->state.version == s->served_version)
        return;
    s->served_version = s->state.version;
    for (size_t i = 0; moe_batcher_rewind(s->batcher, i, &key, &tokens, &first); i++)
        if (tokens > 0 && s->epoch != 0)
            announce_tokens(w, s, &key, tokens);
}

static void end_training(struct world *w, struct slot *s, struct execution *t)
{
    const struct moe_ledger_outcome none = {.epoch = s->epoch};
    const struct op *op = &w->ops[t->op];
    if (t->progress || (t->run && is_of_jobs(op->kind))) {
        end_job_execution(w, s, t);
        return;
    }
    if (t->run)
        record_op(w, s, t->op, t->ticket.descriptor.origin, &none);
    t->changes = false;
    if (t->call == NULL)
        return;
    if (t->call->progress || moe_failed(&t->refusal))
        end_call(w, s, t->call, &t->refusal, NULL);
    else
        answer_repeat(w, s, t->call);
}

/* All slots are alike after the same ticket. */
static void check_alike(struct world *w, const struct slot *s, const struct execution *t)
{
    size_t at = t->ticket.seq % SEQS_MAX;
    uint64_t hash = hash_state(s);
    if (w->after[at].epoch != s->epoch) {
        w->after[at].epoch = s->epoch;
        w->after[at].hash = hash;
    }
    check(w, t->ticket.seq < SEQS_MAX, "the simulator has room for tickets");
    check(w, w->after[at].hash == hash, "slots have the same state after the same ticket");
}

static void end_ticket(struct world *w, struct slot *s)
{
    struct execution *t = &s->executions[s->first_execution];
    check_one_version(w, s, t);
    if (t->ticket.kind == MOE_STEP_FORWARD)
        end_forward(w, s, t);
    else
        end_training(w, s, t);
    if (t->failed || w->broken != NULL)
        return;
    change_version(w, s);
    if (t->ticket.kind != MOE_STEP_FORWARD)
        check_alike(w, s, t);
    struct event *e = new_event(w, E_DONE, sequencer_slot(s));
    e->epoch = s->epoch;
    e->number = t->ticket.seq;
    e->ok = true;
    send_to(w, s->index, e);
    s->first_execution = (s->first_execution + 1) % LANES;
    s->execution_count--;
}

static void run_tickets(struct world *w, struct slot *s)
{
    for (bool more = true; more && w->broken == NULL && s->epoch != 0;) {
        more = false;
        if (may_begin(s)) {
            begin_ticket(w, s);
            more = true;
        }
        if (may_end(w, s)) {
            end_ticket(w, s);
            more = true;
            if (s->execution_count > 0 && s->executions[s->first_execution].failed) {
                tell_coordinator_lost(w, s);
                end_view(w, s);
            }
        }
    }
}

/* ----------------------------------------------------------------------------- views */

/* Also at the end of a run, of all slots. */
static void check_answers(struct world *w, const struct slot *s)
{
    for (uint32_t i = 1; i < w->op_count; i++) {
        const struct op *op = &w->ops[i];
        if (op->answered && op->kind != OP_FORWARD && op->done_lineage == s->state.lineage)
            check(w, has_applied(&s->state, (uint16_t)i),
                  "an answered call is in each later state of its lineage");
    }
}

void begin_view(struct world *w, struct slot *s, uint64_t epoch, uint64_t live)
{
    struct moe_step_key key;
    uint64_t tokens;
    TRACE(w, "slot %u: view %llu", s->index, (unsigned long long)epoch);
    check_answers(w, s);
    change_version(w, s);
    s->epoch = s->last_epoch = epoch;
    s->live = live;
    for (uint32_t i = 0; i < w->slot_count; i++)
        s->view_processes[i] = (live >> i & 1) != 0 ? w->slots[i].process : 0;
    s->last_seq = 0;
    memset(s->last_ordered, 0, sizeof s->last_ordered);
    moe_job_on_view(&s->job, s->index, live);
    if (sequencer_slot(s) == s->index)
        moe_sequencer_begin(s->sequencer, epoch, live, BUCKET);
    for (size_t i = 0; moe_batcher_queue(s->batcher, i, &key, &tokens); i++)
        if (tokens > 0)
            announce_tokens(w, s, &key, tokens);
    announce_calls(w, s);
}

static void undo_execution(struct world *w, struct slot *s, struct execution *t)
{
    struct moe_status why = reforming();
    for (size_t i = t->segment_count; i-- > 0;) {
        struct call *c = (struct call *)((char *)t->segments[i].work - offsetof(struct call, work));
        if (!c->cancelled) {
            moe_batcher_put_back(s->batcher, &t->segments[i]);
            continue;
        }
        c->work.finished += t->segments[i].count;
        settle_forward(w, s, c);
    }
    bool training = t->ticket.kind != MOE_STEP_FORWARD;
    bool job = training && (t->progress || is_of_jobs(w->ops[t->op].kind));
    s->inconsistent = s->inconsistent || (t->changes && job);
    if (training && (t->run || t->progress))
        abandon_op(w, s, t->progress ? s->job_op : t->op, t->ticket.descriptor.origin);
    if (t->call != NULL)
        end_call(w, s, t->call, &why, NULL);
}

static void forget_numbers(struct world *w, struct slot *s)
{
    struct moe_status why = cancelled();
    for (size_t i = s->waiting_count; i-- > 0;) {
        struct call *c = s->waiting[i];
        c->number = 0;
        if (!c->progress && !c->cancelled)
            continue;
        remove_waiting(s, i);
        end_call(w, s, c, &why, NULL);
    }
}

void end_view(struct world *w, struct slot *s)
{
    struct moe_status why = reforming();
    TRACE(w, "slot %u: view %llu ends", s->index, (unsigned long long)s->epoch);
    for (size_t i = s->execution_count; i-- > 0;)
        undo_execution(w, s, &s->executions[(s->first_execution + i) % LANES]);
    s->execution_count = s->ticket_count = 0;
    s->epoch = s->live = 0;
    s->joiner = false;
    memset(s->shares, 0, sizeof s->shares);
    for (size_t i = 0; i < s->pending_count; i++)
        end_call(w, s, s->pending[i], &why, NULL);
    s->pending_count = 0;
    forget_numbers(w, s);
    give_up_job(w, s);
}

/* ---------------------------------------------------------------------------- events */

static void message(struct world *w, struct slot *s, const struct event *e)
{
    bool lost = e->from != s->index && w->link_epoch[e->from][s->index] >= e->epoch;
    if (lost || s->epoch == 0 || e->epoch != s->epoch)
        return;
    if (e->kind == E_TICKET) {
        check(w, s->ticket_count < TICKETS_MAX, "tickets do not pile up");
        s->tickets[(s->ticket_first + s->ticket_count++) % TICKETS_MAX] = e->u.ticket;
    } else if (e->kind == E_SHARE) {
        s->shares[e->u.share.seq % SEQ_RING][e->from] = e->u.share;
    } else {
        sequencer_event(w, s, e);
    }
    run_tickets(w, s);
}

void slot_event(struct world *w, struct slot *s, const struct event *e)
{
    switch (e->kind) {
    case E_ASKED: asked(w, s, e); return;
    case E_LEFT: left(w, s, e); return;
    case E_LOST:
    case E_STOP:
        if (s->epoch == 0 || s->epoch != e->epoch)
            return;
        if (e->kind == E_LOST)
            tell_coordinator_lost(w, s);
        end_view(w, s);
        return;
    case E_JOINER:
        if (s->epoch == 0 || s->epoch != e->epoch)
            return;
        s->joiner = e->ok;
        s->released = e->number;
        if (sequencer_slot(s) == s->index)
            issue_tickets(w, s);
        return;
    default: message(w, s, e); return;
    }
}
