/* SPDX-License-Identifier: Apache-2.0 */
/* A worker process's part in Save, Load and Export: it carries out the actions of the job machine.
 */
#include "simulation/world.h"

#include <string.h>

static enum moe_job_kind job_kind(enum op_kind kind)
{
    return kind == OP_SAVE ? MOE_JOB_SAVE : kind == OP_LOAD ? MOE_JOB_LOAD : MOE_JOB_EXPORT;
}

static const char *part_name(enum moe_job_part part)
{
    static const char *const names[] = {
        [MOE_JOB_NONE] = "none",         [MOE_JOB_PREPARE] = "prepare", [MOE_JOB_COPY] = "copy",
        [MOE_JOB_CREATE] = "create",     [MOE_JOB_WRITE] = "write",     [MOE_JOB_COMMIT] = "commit",
        [MOE_JOB_REMEMBER] = "remember", [MOE_JOB_TIDY] = "tidy",       [MOE_JOB_READ] = "read",
        [MOE_JOB_TAKE] = "take",         [MOE_JOB_UNDO] = "undo",
    };
    return names[part];
}

/* --------------------------------------------------------------------------- tickets */

/* Lowest slot: the calls that will have been run once this Save has. */
static void pack_records(struct world *w, struct slot *s, uint16_t op)
{
    const struct moe_ledger_call entry = {.id = w->ops[op].id,
                                          .content = w->ops[op].content,
                                          .outcome = {.lineage = s->state.lineage,
                                                      .weights_version = s->state.version,
                                                      .steps = s->state.steps}};
    moe_ledger_destroy(s->job_records);
    s->job_records = NULL;
    if (w->ops[op].kind != OP_SAVE || s->index != (uint32_t)__builtin_ctzll(s->live))
        return;
    struct moe_status st = moe_ledger_copy(s->ledger, &s->job_records);
    MOE_INVARIANT(!moe_failed(&st));
    moe_ledger_record(s->job_records, "", &entry);
}

static bool has_orphan(const struct world *w)
{
    for (uint32_t i = 0; i < w->slot_count; i++)
        if (w->slots[i].job.orphan.part != MOE_JOB_NONE)
            return true;
    return false;
}

void begin_job_execution(struct world *w, struct slot *s, struct execution *t)
{
    if (t->progress)
        return;
    if (t->joined) {
        moe_job_on_join(&s->job, t->ticket.descriptor.origin);
        return;
    }
    const struct op *op = &w->ops[t->op];
    const struct moe_job_description description = {.kind = job_kind(op->kind),
                                                    .id = op->id,
                                                    .content = op->content,
                                                    .tidies = op->tidies,
                                                    .weights_version = s->state.version,
                                                    .steps = s->state.steps};
    struct moe_status prepared = moe_ok();
    if (fault(w, 15))
        prepared = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory");
    s->job_op = t->op;
    s->job_lineage = s->state.lineage;
    s->job_calls = moe_ledger_count(s->ledger);
    s->job_wrote = false;
    s->job_state = s->state;
    s->job_live = s->live;
    s->job_met_orphan = has_orphan(w);
    const struct checkpoint *there = find_checkpoint(w, op->name, op->kind == OP_EXPORT);
    s->job_found = there != NULL && there->op == t->op; /* by a view that ended before it knew */
    s->part = (struct part){0};
    pack_records(w, s, t->op);
    moe_job_on_begin(&s->job, &description, t->ticket.descriptor.origin, &prepared);
    w->totals.jobs += s->index == 0;
}

static void check_called_off(struct world *w, const struct slot *s, const struct share *all)
{
    for (uint32_t i = 0; i < w->slot_count; i++)
        check(w, (s->live >> i & 1) == 0 || (s->job.asked >> i & 1) == 0 || !all[i].waited,
              "a job is called off when no caller waits for it");
}

void end_job_execution(struct world *w, struct slot *s, struct execution *t)
{
    const struct share *shares = s->shares[t->ticket.seq % SEQ_RING];
    struct moe_job_report all[MOE_MAX_SLOTS] = {0};
    bool was_called_off = s->job.called_off, had_copy = !s->job.from_trainers;
    for (uint32_t i = 0; i < w->slot_count; i++)
        all[i] = shares[i].report;
    s->job_writer = all[__builtin_ctzll(s->live)].writer;
    moe_job_on_reports(&s->job, all);
    if (s->job.called_off && !was_called_off) {
        check_called_off(w, s, shares);
        w->totals.called_off += s->index == 0;
    }
    w->totals.without_copy += s->index == 0 && had_copy && s->job.from_trainers;
    carry_out(w, s, t);
    struct call *c = t->call;
    t->call = NULL;
    if (c == NULL || t->failed)
        return;
    struct moe_status over = moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled");
    if (!c->progress && !c->cancelled) {
        s->pending[s->pending_count++] = c;
    } else {
        end_call(w, s, c, &over, NULL);
        if (!c->progress)
            stop_waiting(w, s, c);
    }
}

/* ----------------------------------------------------------------------------- parts */

static uint64_t duration(struct world *w, enum moe_job_part part)
{
    if (fault(w, 60)) /* a disk that hangs */
        return 50 + rnd(w, 200);
    switch (part) {
    case MOE_JOB_COPY: return 2 + rnd(w, 20);
    case MOE_JOB_WRITE: return 3 + rnd(w, 30);
    case MOE_JOB_READ: return 2 + rnd(w, 15);
    default: return 1 + rnd(w, 6);
    }
}

static void take(struct world *w, struct slot *s, struct execution *t,
                 const struct moe_job_action *a)
{
    struct moe_job_end end = {.status = moe_ok()};
    t->changes = true;
    if (fault(w, 20))
        end.status = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "a file cannot be read");
    else
        take_checkpoint(w, s, &s->taken);
    moe_job_on_part_ended(&s->job, a->job, a->part, &end);
}

static void start_part(struct world *w, struct slot *s, struct execution *t,
                       const struct moe_job_action *a)
{
    struct part *p = s->orphan.job == a->job ? &s->orphan : &s->part;
    TRACE(w, "slot %u: %s of #%u begins", s->index, part_name(a->part), s->job_op);
    if (moe_job_is_in_ticket(a->part)) {
        check(w, t != NULL, "what changes trainers happens in a ticket");
        if (t != NULL)
            take(w, s, t, a);
        return;
    }
    s->job_wrote = s->job_wrote || a->part == MOE_JOB_WRITE;
    bool reads = a->part == MOE_JOB_COPY || (a->part == MOE_JOB_WRITE && a->from_trainers);
    check(w, !p->runs, "a slot runs one share at a time");
    *p = (struct part){.runs = true,
                       .reads_trainers = reads,
                       .job = a->job,
                       .weights = a->part == MOE_JOB_WRITE && !reads ? s->copied_weights
                                                                     : s->state.weights};
    struct event *e = new_event(w, E_PART, s->index);
    e->process = s->process;
    e->number = a->job;
    e->u.part = a->part;
    post(w, e, duration(w, a->part));
}

static struct moe_job_end run_part(struct world *w, struct slot *s, enum moe_job_part part,
                                   struct part *p)
{
    struct moe_job_end end = {.status = moe_ok()};
    check(w, !p->reads_trainers || p->weights == s->state.weights,
          "weights stay the same while a share reads them");
    if (part == MOE_JOB_COPY && chance(w, 80))
        end.status = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no room");
    else if (part == MOE_JOB_COPY)
        s->copied_weights = p->weights;
    if ((part == MOE_JOB_WRITE || part == MOE_JOB_COMMIT) && fault(w, 40))
        end.status = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "the disk refuses");
    if (moe_failed(&end.status))
        return end;
    return disk_part(w, s, part, p, p == &s->orphan);
}

static void part_ended(struct world *w, struct slot *s, const struct event *e)
{
    struct part *p = s->orphan.runs && s->orphan.job == e->number ? &s->orphan : &s->part;
    if (!p->runs || p->job != e->number)
        return;
    struct moe_job_end end = run_part(w, s, e->u.part, p);
    p->runs = false;
    TRACE(w, "slot %u: %s of #%u ends: %s", s->index, part_name(e->u.part), s->job_op,
          moe_code_name(end.status.code));
    moe_job_on_part_ended(&s->job, e->number, e->u.part, &end);
    carry_out(w, s, NULL);
}

/* -------------------------------------------------------------------------- progress */

static bool has_asked(const struct slot *s)
{
    for (size_t i = 0; i < s->waiting_count; i++)
        if (s->waiting[i]->progress && s->waiting[i]->id == s->job.call.id &&
            memcmp(&s->waiting[i]->content, &s->job.call.content, sizeof s->job.call.content) == 0)
            return true;
    return false;
}

static void ask(struct world *w, struct slot *s)
{
    if (!moe_job_wants_ticket(&s->job) || s->epoch == 0 || has_asked(s))
        return;
    if (s->progress_count == PROGRESS_MAX || fault(w, 50)) {
        struct event *e = new_event(w, E_ASK, s->index);
        e->process = s->process;
        post(w, e, 5);
        return;
    }
    struct call *c = new_call(w, s);
    if (c == NULL)
        return;
    c->progress = true;
    c->kind = MOE_STEP_SAVE; /* a Save may pass blocked calls */
    c->id = s->job.call.id;
    c->content = s->job.call.content;
    add_waiting(w, s, c);
}

static bool waits_for(const struct call *c, uint16_t op)
{
    return !c->progress && !c->cancelled && c->op == op;
}

void stop_waiting(struct world *w, struct slot *s, const struct call *c)
{
    uint16_t op = c->op;
    enum op_kind kind = w->ops[op].kind;
    if (kind != OP_SAVE && kind != OP_LOAD && kind != OP_EXPORT)
        return;
    for (size_t i = 0; i < s->pending_count; i++)
        if (waits_for(s->pending[i], op))
            return;
    for (size_t i = 0; i < s->waiting_count; i++)
        if (waits_for(s->waiting[i], op))
            return;
    for (size_t i = 0; i < s->execution_count; i++) {
        const struct execution *t = &s->executions[(s->first_execution + i) % LANES];
        if (t->call != NULL && waits_for(t->call, op))
            return;
    }
    if (moe_job_on_unwanted(&s->job, w->ops[op].id, &w->ops[op].content))
        carry_out(w, s, NULL);
}

/* --------------------------------------------------------------------------- actions */

static void check_settled(struct world *w, struct slot *s, const struct moe_job_action *a)
{
    const struct op *op = &w->ops[s->job_op];
    bool adapter = op->kind == OP_EXPORT;
    if (op->kind == OP_LOAD)
        return;
    const struct checkpoint *c = find_checkpoint(w, op->name, adapter);
    bool ours = c != NULL && c->op == s->job_op && c->writer == s->job_writer;
    /* The files may be an orphan's, of an earlier view, even if it has ended since. */
    bool orphans =
        s->job_met_orphan || a->status.reason == MOE_REASON_SAVE_RUNNING || has_orphan(w);
    check(w, orphans || find_hidden(w, s->job_writer, op->name, adapter) == NULL,
          "a job that is over leaves nothing unfinished");
    if (!moe_failed(&a->status))
        check(w, ours, "a Save that went well has written its checkpoint");
    else
        check(w,
              !ours || a->status.reason == MOE_REASON_CHECKPOINT_EXISTS || s->job_found || orphans,
              "a Save that failed has written none");
}

static void settle(struct world *w, struct slot *s, struct execution *t,
                   const struct moe_job_action *a)
{
    const struct moe_ledger_call *known = moe_ledger_find(s->ledger, "", w->ops[s->job_op].id);
    struct moe_status st = a->status;
    TRACE(w, "slot %u: #%u is settled: %s %s", s->index, s->job_op, moe_code_name(st.code),
          moe_failed(&st) ? st.text : "");
    check_settled(w, s, a);
    if (!moe_failed(&st) && known == NULL)
        st = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD, "forgotten");
    const struct moe_ledger_outcome *outcome = known != NULL ? &known->outcome : NULL;
    for (size_t i = 0; i < s->pending_count; i++)
        end_call(w, s, s->pending[i], &st, outcome);
    s->pending_count = 0;
    if (t->call != NULL) {
        struct call *c = t->call;
        t->call = NULL;
        end_call(w, s, c, &st, outcome);
    }
}

static void record(struct world *w, struct slot *s, const struct moe_job_action *a)
{
    struct moe_ledger_outcome outcome = {.epoch = s->epoch};
    if (w->ops[s->job_op].kind == OP_SAVE) {
        outcome.lineage = s->job_lineage;
        outcome.weights_version = a->weights_version;
        outcome.steps = a->steps;
    }
    record_op(w, s, s->job_op, 0, &outcome);
    bool same = s->job_wrote && moe_ledger_count(s->ledger) == s->job_calls + 1;
    if (w->ops[s->job_op].kind == OP_SAVE && same && s->checkpoint == w->ops[s->job_op].name)
        s->saved_calls = moe_ledger_count(s->ledger);
}

static void keep(struct slot *s, const struct world *w, const struct moe_job_action *a)
{
    uint64_t unsaved = s->state.steps - a->steps;
    if (unsaved > s->unsaved) /* a Save of before, that had been written and not recorded */
        return;
    s->checkpoint = w->ops[s->job_op].name;
    s->checkpoint_explicit_load = false;
    s->saved_calls = 0; /* it has one call more: its own */
    s->unsaved = unsaved;
}

static void carry_out_one(struct world *w, struct slot *s, struct execution *t,
                          const struct moe_job_action *a)
{
    bool orders = s->epoch != 0 && s->index == (uint32_t)__builtin_ctzll(s->live);
    switch (a->kind) {
    case MOE_JOB_START: start_part(w, s, t, a); return;
    case MOE_JOB_CANCEL: s->part.cancelled = true; return;
    case MOE_JOB_REQUEST_TICKET: ask(w, s); return;
    case MOE_JOB_BLOCK:
    case MOE_JOB_UNBLOCK:
        check(w, t != NULL, "weight updates are blocked and let go in a ticket");
        if (orders)
            moe_sequencer_block_weight_updates(s->sequencer, a->kind == MOE_JOB_BLOCK);
        return;
    case MOE_JOB_KEEP: keep(s, w, a); return;
    case MOE_JOB_RECORD: record(w, s, a); return;
    case MOE_JOB_SETTLE:
        check(w, t != NULL, "a job is settled in a ticket");
        if (t != NULL)
            settle(w, s, t, a);
        return;
    case MOE_JOB_END_VIEW: t->failed = true; return;
    case MOE_JOB_FORGET:
        if (s->orphan.job == a->job)
            s->orphan = (struct part){0};
        return;
    }
}

void carry_out(struct world *w, struct slot *s, struct execution *t)
{
    struct moe_job_action a;
    while (w->broken == NULL && moe_job_next_action(&s->job, &a)) {
        carry_out_one(w, s, t, &a);
        if (fault(w,
                  a.kind == MOE_JOB_KEEP ? 80 : 4)) /* faults are worst where something changes */
            post(w, new_event(w, E_CRASH, s->index), rnd(w, 8));
    }
}

void give_up_job(struct world *w, struct slot *s)
{
    if (moe_job_is_active(&s->job) && s->job.part != MOE_JOB_PREPARE) {
        s->orphan = s->part;
        s->orphan.job = s->job.number;
        s->orphan.cancelled = true;
        s->orphan_writer = s->job_writer;
        s->orphan_live = s->job_live;
        s->orphan_op = s->job_op;
        s->orphan_state = s->job_state;
        moe_ledger_destroy(s->orphan_records);
        s->orphan_records = s->job_records;
        s->job_records = NULL;
        s->part = (struct part){0};
        w->totals.orphans += s->orphan.runs;
    }
    moe_job_on_view_ended(&s->job);
    carry_out(w, s, NULL);
}

void job_event(struct world *w, struct slot *s, const struct event *e)
{
    if (e->kind == E_PART)
        part_ended(w, s, e);
    else
        ask(w, s);
}
