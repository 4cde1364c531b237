/* SPDX-License-Identifier: Apache-2.0 */
/* What training is about, as far as it matters here: a few numbers in place of tensors, and a disk
 * that all slots share. */
#include "simulation/world.h"

#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

void reset_state(struct state *s)
{
    memset(s, 0, offsetof(struct state, applied));
    s->version = 1;
    s->weights = 1;
}

/* All that slots of one view have to agree on after the same ticket. */
uint64_t hash_state(const struct slot *s)
{
    const struct state *t = &s->state;
    const uint64_t words[] = {t->lineage,
                              t->version,
                              t->steps,
                              t->weights,
                              t->gradients,
                              t->backwards,
                              t->applied_count,
                              s->checkpoint,
                              s->unsaved,
                              moe_ledger_count(s->ledger),
                              moe_ledger_hash(s->ledger),
                              s->job.part,
                              moe_job_blocks_weight_updates(&s->job)};
    uint64_t hash = 1;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        hash = mix(hash, words[i]);
    for (uint32_t i = 0; i < t->applied_count; i++)
        hash = mix(hash, t->applied[i]);
    return hash;
}

bool has_applied(const struct state *s, uint16_t op)
{
    for (uint32_t i = s->applied_count; i-- > 0;)
        if (s->applied[i] == op)
            return true;
    return false;
}

/* ------------------------------------------------------------------------ gradients */

static void add_part(struct world *w, struct slot *s, uint16_t op)
{
    check(w, s->part_count < PARTS_MAX, "the simulator has room for gradients");
    if (w->broken != NULL)
        return;
    s->parts[s->part_count++] = op;
    memcpy(w->ops[op].holders, s->view_processes, sizeof w->ops[op].holders);
    w->ops[op].spent = false;
}

static bool has_part(const struct slot *s, uint16_t op)
{
    for (uint32_t i = 0; i < s->part_count; i++)
        if (s->parts[i] == op)
            return true;
    return false;
}

/* A step uses all gradients that were answered under its lineage, and each with all of its parts.
 */
static void check_gradients(struct world *w, const struct slot *s)
{
    check(w, !s->undefined, "a step uses no gradients that a lost slot has left undefined");
    for (uint32_t i = 0; i < s->part_count; i++)
        check(w,
              memcmp(w->ops[s->parts[i]].holders, s->view_processes, sizeof s->view_processes) == 0,
              "a step uses all parts of a gradient");
    for (uint16_t i = 1; i < w->op_count; i++) {
        const struct op *op = &w->ops[i];
        if (op->kind == OP_BACKWARD && op->answered && !op->spent &&
            op->done_lineage == s->state.lineage)
            check(w, has_part(s, i), "a step uses all gradients that were answered");
    }
}

static void spend_gradients(struct world *w, struct slot *s)
{
    for (uint32_t i = 0; i < s->part_count; i++)
        w->ops[s->parts[i]].spent = true;
    s->part_count = 0;
}

void forget_gradients(struct slot *s)
{
    s->gradient_slots = s->unsettled = 0;
    s->part_count = 0;
    s->undefined = false;
    s->state.gradients = s->state.backwards = 0;
    s->backward = s->change = (struct moe_ledger_call){0};
}

void apply(struct world *w, struct slot *s, uint16_t op)
{
    struct state *t = &s->state;
    check(w, !has_applied(t, op), "a call happens once");
    check(w, t->applied_count < APPLIED_MAX, "the simulator has room for what happens");
    if (w->broken != NULL)
        return;
    t->applied[t->applied_count++] = op;
    switch (w->ops[op].kind) {
    case OP_BACKWARD:
        t->gradients = mix(t->gradients, op);
        t->backwards++;
        add_part(w, s, op);
        return;
    case OP_STEP:
        check_gradients(w, s);
        spend_gradients(w, s);
        check(w, s->part.runs == false || !s->part.reads_trainers,
              "no weight update while a share reads the trainers");
        t->weights = mix(mix(t->weights, t->gradients), op);
        t->gradients = t->backwards = 0;
        t->steps++;
        t->version++;
        s->unsaved++;
        return;
    case OP_ZERO:
        spend_gradients(w, s);
        t->gradients = t->backwards = 0;
        return;
    default: return;
    }
}

/* ----------------------------------------------------------------------------- disk */

struct checkpoint *find_checkpoint(struct world *w, uint32_t name, bool adapter)
{
    for (size_t i = 0; i < CHECKPOINTS_MAX; i++) {
        struct checkpoint *c = &w->disk[i];
        if (c->used && c->complete && c->adapter == adapter && c->name == name)
            return c;
    }
    return NULL;
}

struct checkpoint *find_hidden(struct world *w, uint64_t writer, uint32_t name, bool adapter)
{
    for (size_t i = 0; i < CHECKPOINTS_MAX; i++) {
        struct checkpoint *c = &w->disk[i];
        if (c->used && !c->complete && c->adapter == adapter && c->name == name &&
            c->writer == writer)
            return c;
    }
    return NULL;
}

void remove_checkpoint(struct world *w, struct checkpoint *c)
{
    TRACE(w, "disk: %s %u is removed%s", c->adapter ? "adapter" : "checkpoint", c->name,
          c->complete ? "" : ", unfinished");
    moe_ledger_destroy(c->records);
    *c = (struct checkpoint){0};
}

static bool writer_lives(const struct world *w, uint64_t writer)
{
    for (uint32_t i = 0; i < w->slot_count; i++)
        if (w->slots[i].alive && w->slots[i].process == writer)
            return true;
    return false;
}

static void remove_of_the_dead(struct world *w)
{
    for (size_t i = 0; i < CHECKPOINTS_MAX; i++)
        if (w->disk[i].used && !w->disk[i].complete && !writer_lives(w, w->disk[i].writer))
            remove_checkpoint(w, &w->disk[i]);
}

static struct moe_status io_error(const char *what)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "%s", what);
}

/* The owner of the share: the job that is under way, or the orphan. */
struct owner {
    const struct op *op;
    uint16_t number;
    uint64_t writer, live;
    const struct state *state;
    const struct moe_ledger *records;
    bool adapter;
};

static struct owner owner_of(const struct world *w, const struct slot *s, bool orphan)
{
    uint16_t n = orphan ? s->orphan_op : s->job_op;
    return (struct owner){.op = &w->ops[n],
                          .number = n,
                          .writer = orphan ? s->orphan_writer : s->job_writer,
                          .live = orphan ? s->orphan_live : s->job_live,
                          .state = orphan ? &s->orphan_state : &s->job_state,
                          .records = orphan ? s->orphan_records : s->job_records,
                          .adapter = w->ops[n].kind == OP_EXPORT};
}

static void create(struct world *w, struct slot *s, const struct owner *o, struct moe_job_end *end)
{
    remove_of_the_dead(w);
    const struct checkpoint *there = find_checkpoint(w, o->op->name, o->adapter);
    end->found = there != NULL && !o->adapter && there->writer == o->writer &&
                 there->id == o->op->id && there->state.lineage == o->state->lineage &&
                 memcmp(&there->content, &o->op->content, sizeof there->content) == 0;
    if (end->found) {
        end->weights_version = there->state.version;
        end->steps = there->state.steps;
        return;
    }
    if (there != NULL) {
        end->status = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_CHECKPOINT_EXISTS, "it exists");
        return;
    }
    check(w, find_hidden(w, o->writer, o->op->name, o->adapter) == NULL,
          "two jobs do not write into one directory");
    struct checkpoint *c = w->disk;
    while (c < w->disk + CHECKPOINTS_MAX && c->used)
        c++;
    check(w, c < w->disk + CHECKPOINTS_MAX, "the simulator has room for checkpoints");
    if (w->broken != NULL)
        return;
    *c = (struct checkpoint){.used = true,
                             .adapter = o->adapter,
                             .name = o->op->name,
                             .parent = s->checkpoint,
                             .writer = o->writer,
                             .op = o->number,
                             .content = o->op->content,
                             .id = o->op->id,
                             .live = o->live,
                             .state = *o->state};
    c->state.gradients = c->state.backwards = 0;
    if (!c->adapter && c->state.applied_count < APPLIED_MAX) /* a checkpoint records its own Save */
        c->state.applied[c->state.applied_count++] = o->number;
}

static void write_files(struct world *w, struct slot *s, const struct owner *o,
                        const struct part *p, struct moe_job_end *end)
{
    struct checkpoint *c = find_hidden(w, o->writer, o->op->name, o->adapter);
    if (c == NULL) {
        end->status = io_error("no such directory");
        return;
    }
    check(w, c->op == o->number && (c->written >> s->index & 1) == 0,
          "two jobs do not write into one directory");
    c->weights[s->index] = p->weights;
    c->written |= UINT64_C(1) << s->index;
    end->bytes = 1;
}

static void commit(struct world *w, const struct owner *o, struct moe_job_end *end)
{
    struct checkpoint *c = find_hidden(w, o->writer, o->op->name, o->adapter);
    if (c == NULL || c->written != c->live) {
        end->status = io_error("files are missing");
        return;
    }
    if (find_checkpoint(w, o->op->name, o->adapter) != NULL) {
        end->status = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_CHECKPOINT_EXISTS, "it exists");
        return;
    }
    for (uint32_t i = 0; i < w->slot_count; i++)
        if ((c->live >> i & 1) != 0)
            check(w, c->weights[i] == c->state.weights,
                  "all files of a checkpoint are of the state that its Save began with");
    c->complete = true;
    w->ops[o->number].committed = true;
    c->order = ++w->disk_order;
    if (o->records != NULL) {
        struct moe_status st = moe_ledger_copy(o->records, &c->records);
        MOE_INVARIANT(!moe_failed(&st));
    }
    TRACE(w, "disk: %s %u is whole", c->adapter ? "adapter" : "checkpoint", c->name);
}

/* Keeps this one and the newest; those of this writer, or that it came from, go. */
static void tidy(struct world *w, const struct owner *o)
{
    enum { KEPT = 1 };
    const struct checkpoint *at = find_checkpoint(w, o->op->name, false);
    uint64_t chain = 0;
    for (int hops = 0; at != NULL && !at->explicit_load && hops < NAMES; hops++) {
        chain |= UINT64_C(1) << at->name;
        at = at->parent != 0 ? find_checkpoint(w, at->parent, false) : NULL;
    }
    uint32_t kept = 0;
    for (uint64_t order = w->disk_order; order > 0; order--)
        for (size_t i = 0; i < CHECKPOINTS_MAX; i++) {
            struct checkpoint *c = &w->disk[i];
            bool own = c->used && c->complete && c->order == order && !c->adapter &&
                       !c->explicit_load && (c->writer == o->writer || (chain >> c->name & 1) != 0);
            if (own && kept++ >= KEPT && c->name != o->op->name)
                remove_checkpoint(w, c);
        }
}

static void read_files(struct world *w, struct slot *s, const struct owner *o,
                       struct moe_job_end *end)
{
    struct checkpoint *c = find_checkpoint(w, o->op->name, false);
    if (c == NULL)
        end->status = moe_error(MOE_NOT_FOUND, MOE_REASON_CHECKPOINT_NOT_FOUND, "there is none");
    else
        s->taken = *c;
}

struct moe_job_end disk_part(struct world *w, struct slot *s, enum moe_job_part part,
                             const struct part *p, bool orphan)
{
    struct moe_job_end end = {.status = moe_ok()};
    struct owner o = owner_of(w, s, orphan);
    struct checkpoint *hidden;
    if (p->cancelled && part != MOE_JOB_UNDO && part != MOE_JOB_TIDY && chance(w, 600)) {
        end.status = moe_error(MOE_CANCELLED, MOE_REASON_NONE, "cancelled");
        return end;
    }
    switch (part) {
    case MOE_JOB_CREATE: create(w, s, &o, &end); break;
    case MOE_JOB_WRITE: write_files(w, s, &o, p, &end); break;
    case MOE_JOB_COMMIT: commit(w, &o, &end); break;
    case MOE_JOB_TIDY: tidy(w, &o); break;
    case MOE_JOB_READ: read_files(w, s, &o, &end); break;
    case MOE_JOB_UNDO:
        hidden = find_hidden(w, o.writer, o.op->name, o.adapter);
        if (hidden != NULL)
            remove_checkpoint(w, hidden);
        break;
    default: break;
    }
    return end;
}

/* ---------------------------------------------------------------------------- taking */

static void load_state(struct world *w, struct slot *s, const struct checkpoint *c)
{
    s->state = c->state;
    bool wrote = (c->live >> s->index & 1) != 0;
    s->state.weights = c->weights[wrote ? s->index : (uint32_t)__builtin_ctzll(c->live)];
    moe_ledger_reset(s->ledger);
    if (c->records != NULL) {
        moe_ledger_destroy(s->ledger);
        struct moe_status st = moe_ledger_copy(c->records, &s->ledger);
        MOE_INVARIANT(!moe_failed(&st));
    }
    s->unsaved = 0;
    forget_gradients(s);
    s->open = s->lost_call = false;
    s->earlier = 0;
    s->saved_calls = moe_ledger_count(s->ledger);
    (void)w;
}

/* LoadCheckpoint: `c` as it was read. */
void take_checkpoint(struct world *w, struct slot *s, const struct checkpoint *c)
{
    uint64_t lineage = s->state.lineage, version = s->state.version;
    struct checkpoint *there = find_checkpoint(w, c->name, false);
    check(w, there != NULL && there->op == c->op, "what was checked is what is loaded");
    check(w, !s->orphan.runs || !s->orphan.reads_trainers,
          "trainers are not replaced while a share reads them");
    if (w->broken != NULL)
        return;
    load_state(w, s, there);
    s->state.lineage = lineage + 1;
    s->state.version = version + 1;
    s->checkpoint = c->name;
    s->checkpoint_explicit_load = there->explicit_load = true;
}

/* The group goes back, as it forms. */
void restart_state(struct world *w, struct slot *s, const struct moe_train_recovery *d)
{
    uint32_t name = checkpoint_named(d->checkpoint);
    struct checkpoint *c = name != 0 ? find_checkpoint(w, name, false) : NULL;
    check(w, name == 0 || c != NULL, "the checkpoint that recovery goes to is there");
    s->ahead = (struct moe_saved_training){0};
    check(w, !s->orphan.runs || !s->orphan.reads_trainers,
          "trainers are not replaced while a share reads them");
    reset_state(&s->state);
    moe_ledger_reset(s->ledger);
    forget_gradients(s);
    s->open = s->lost_call = false;
    s->earlier = s->saved_calls = 0;
    if (c != NULL)
        load_state(w, s, c);
    s->state.lineage = d->lineage;
    s->state.version = d->weights_version;
    s->unsaved = 0;
    s->inconsistent = false;
    s->checkpoint = name;
    s->checkpoint_explicit_load = d->explicit_load && name != 0;
    w->totals.restarts += s->index == 0;
}

/* Backward calls without effect are as if they had not been. */
static void take_out_parts(struct slot *s)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->state.applied_count; i++)
        if (!has_part(s, s->state.applied[i]))
            s->state.applied[kept++] = s->state.applied[i];
    s->state.applied_count = kept;
}

static void ignore_call(void *ctx, const char *session, const struct moe_ledger_call *call)
{
    (void)ctx;
    (void)session;
    (void)call;
}

/* The group goes on without the gradients since the last step. */
void lose_gradients(struct world *w, struct slot *s, const struct moe_train_recovery *d)
{
    if (moe_ledger_count(s->ledger) + 1 == d->calls)
        moe_ledger_record_pending(s->ledger, d->backward_session, &d->backward);
    check(w, moe_ledger_count(s->ledger) == d->calls && moe_ledger_hash(s->ledger) == d->record,
          "slots that go on have recorded the same calls");
    moe_ledger_take_back(s->ledger, ignore_call, NULL);
    take_out_parts(s);
    forget_gradients(s);
    s->state.lineage = d->lineage;
    s->earlier = d->earlier;
    s->lost_call = d->loss == MOE_TRAIN_LOSS_CALL;
    s->open = true;
    s->saved_calls = 0;
}

/* The slot knows no more of where the group would go back to than before: the members may go on and
 * remove the checkpoint. */
void begin_ahead(struct slot *s, const struct moe_saved_training *state)
{
    reset_state(&s->state);
    moe_ledger_reset(s->ledger);
    forget_gradients(s);
    s->open = s->lost_call = false;
    s->earlier = s->saved_calls = 0;
    s->begun_op = 0;
    s->state.lineage = state->lineage;
    s->state.version = state->weights_version;
    s->inconsistent = true;
    s->ahead = (struct moe_saved_training){0};
}

/* The group may have gone on meanwhile, and have removed the checkpoint. */
bool read_ahead(struct world *w, struct slot *s, const struct moe_saved_training *state)
{
    struct checkpoint *c = find_checkpoint(w, checkpoint_named(state->checkpoint), false);
    if (c == NULL || fault(w, 100))
        return false;
    uint64_t unsaved = s->unsaved;
    load_state(w, s, c);
    s->unsaved = unsaved;
    s->state.lineage = state->lineage;
    s->state.version = state->weights_version;
    if (moe_ledger_count(s->ledger) == state->calls)
        s->ahead = *state;
    return s->ahead.calls != 0;
}

/* A slot takes the state of the others, from the checkpoint that has it. */
void join_state(struct world *w, struct slot *s, const struct moe_train_recovery *d)
{
    struct checkpoint *c = find_checkpoint(w, checkpoint_named(d->checkpoint), false);
    bool ahead = moe_train_is_ahead(&s->ahead, d);
    s->ahead = (struct moe_saved_training){0};
    check(w, c != NULL || ahead, "the checkpoint that a slot joins with is there");
    if (w->broken != NULL)
        return;
    if (!ahead)
        load_state(w, s, c);
    w->totals.joins_ahead += ahead;
    check(w, moe_ledger_count(s->ledger) == d->calls, "the checkpoint has all calls");
    moe_ledger_set_hash(s->ledger, d->record);
    s->state.lineage = d->lineage;
    s->state.version = d->weights_version;
    s->inconsistent = false;
    s->checkpoint = checkpoint_named(d->checkpoint);
    s->checkpoint_explicit_load = d->explicit_load;
    w->totals.joins++;
}

bool is_saved(const struct slot *s)
{
    return s->saved_calls != 0 && s->saved_calls == moe_ledger_count(s->ledger) &&
           s->checkpoint != 0 && s->unsaved == 0 && s->state.backwards == 0 && !s->undefined &&
           s->unsettled == 0 && !s->open && !s->inconsistent;
}

void check_disk_at_end(struct world *w)
{
    for (size_t i = 0; i < CHECKPOINTS_MAX; i++) {
        const struct checkpoint *c = &w->disk[i];
        if (c->used && !c->complete)
            check(w, !writer_lives(w, c->writer), "nothing unfinished stays on the disk");
        else if (c->used)
            check(w, c->written == c->live, "a checkpoint is whole");
    }
}
