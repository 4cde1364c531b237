/* SPDX-License-Identifier: Apache-2.0 */
/* The job machine; see training/job_machine.h. A part is over when no slot runs it. `decide` then
 * chooses what follows, from the reports alone, so all slots choose alike. */
#include "training/job_machine.h"

#include "base/guard.h"

#include <string.h>

_Static_assert(sizeof(struct moe_job_report) <= 256, "more than a session exchanges");

enum { CALLED_OFF_RETRY_MS = 100 };

static bool is_lowest(const struct moe_job *j)
{
    return j->live != 0 && j->slot == (uint32_t)__builtin_ctzll(j->live);
}

static struct moe_job_action *push(struct moe_job *j, enum moe_job_action_kind kind)
{
    MOE_INVARIANT(j->count < MOE_JOB_ACTIONS_MAX);
    struct moe_job_action *a = &j->actions[(j->first + j->count++) % MOE_JOB_ACTIONS_MAX];
    a->kind = kind;
    a->job = j->number;
    a->part = MOE_JOB_NONE;
    a->from_trainers = j->from_trainers;
    a->bytes = j->bytes;
    a->weights_version = j->weights_version;
    a->steps = j->steps;
    a->status = moe_ok();
    return a;
}

bool moe_job_next_action(struct moe_job *j, struct moe_job_action *out)
{
    if (j->count == 0)
        return false;
    *out = j->actions[j->first];
    j->first = (j->first + 1) % MOE_JOB_ACTIONS_MAX;
    j->count--;
    return true;
}

/* ------------------------------------------------------------------------- parts */

enum share { NO_SLOT, LOWEST_SLOT, ALL_SLOTS };

/* What is fixed for each part. */
static const struct {
    enum share share;
    bool is_final;             /* a job with no callers left goes on all the same */
    enum moe_job_part next[4]; /* by kind of job; NONE = the job settles */
} rows[] = {
    [MOE_JOB_NONE] = {0},
    [MOE_JOB_PREPARE] = {.next = {[MOE_JOB_SAVE] = MOE_JOB_COPY,
                                  [MOE_JOB_LOAD] = MOE_JOB_READ,
                                  [MOE_JOB_EXPORT] = MOE_JOB_CREATE}},
    [MOE_JOB_COPY] = {.share = ALL_SLOTS, .next = {[MOE_JOB_SAVE] = MOE_JOB_CREATE}},
    [MOE_JOB_CREATE] = {.share = LOWEST_SLOT,
                        .next = {[MOE_JOB_SAVE] = MOE_JOB_WRITE, [MOE_JOB_EXPORT] = MOE_JOB_WRITE}},
    [MOE_JOB_WRITE] =
        {.share = ALL_SLOTS,
         .next = {[MOE_JOB_SAVE] = MOE_JOB_COMMIT, [MOE_JOB_EXPORT] = MOE_JOB_COMMIT}},
    [MOE_JOB_COMMIT] = {.share = LOWEST_SLOT, .is_final = true},
    [MOE_JOB_REMEMBER] = {.is_final = true, .next = {[MOE_JOB_SAVE] = MOE_JOB_TIDY}},
    [MOE_JOB_TIDY] = {.share = LOWEST_SLOT, .is_final = true},
    [MOE_JOB_READ] = {.share = ALL_SLOTS, .next = {[MOE_JOB_LOAD] = MOE_JOB_TAKE}},
    [MOE_JOB_TAKE] = {.share = ALL_SLOTS, .is_final = true},
    [MOE_JOB_UNDO] = {.share = LOWEST_SLOT},
};

/* From CREATE on: the files must have the state with which the job began. */
static bool writes_from_trainers(const struct moe_job *j, enum moe_job_part part)
{
    return j->from_trainers && (part == MOE_JOB_CREATE || part == MOE_JOB_WRITE);
}

static bool reads_trainers(const struct moe_job *j, enum moe_job_part part)
{
    return part == MOE_JOB_COPY || writes_from_trainers(j, part);
}

static void set_blocked(struct moe_job *j, enum moe_job_part next)
{
    bool free = MOE_GUARD(WEIGHTS_STAY_WHILE_COPIED, next != MOE_JOB_COPY) &&
                MOE_GUARD(WEIGHTS_STAY_WITHOUT_COPY, !writes_from_trainers(j, next));
    if (j->blocked == !free)
        return;
    j->blocked = !free;
    (void)push(j, free ? MOE_JOB_UNBLOCK : MOE_JOB_BLOCK);
}

static void start(struct moe_job *j, enum moe_job_part part)
{
    set_blocked(j, part);
    j->part = part;
    j->end = (struct moe_job_end){.status = moe_ok()};
    j->running = rows[part].share == ALL_SLOTS || (rows[part].share == LOWEST_SLOT && is_lowest(j));
    if (j->running)
        push(j, MOE_JOB_START)->part = part;
}

/* The next ticket confirms what all slots have done in this one. */
static void request_ticket_as_lowest(struct moe_job *j)
{
    if (!is_lowest(j))
        return;
    j->unreported = true;
    (void)push(j, MOE_JOB_REQUEST_TICKET);
}

static void settle(struct moe_job *j, struct moe_status status)
{
    set_blocked(j, MOE_JOB_NONE);
    bool records = j->call.kind != MOE_JOB_LOAD; /* a Load is recorded when it takes */
    if (records && MOE_GUARD(RECORD_WHAT_IS_DONE, !moe_failed(&status)))
        (void)push(j, MOE_JOB_RECORD);
    push(j, MOE_JOB_SETTLE)->status = status;
    (void)push(j, MOE_JOB_FORGET);
    j->part = MOE_JOB_NONE;
    j->running = j->unreported = false;
}

/* ------------------------------------------------------------------------- views */

void moe_job_on_view(struct moe_job *j, uint32_t slot, uint64_t live)
{
    MOE_INVARIANT(j->part == MOE_JOB_NONE && slot < MOE_MAX_SLOTS && (live >> slot & 1) != 0);
    j->slot = slot;
    j->live = live;
}

static bool leaves_files(enum moe_job_part part, const struct moe_job_end *end)
{
    bool done = !moe_failed(&end->status);
    return part == MOE_JOB_WRITE || (part == MOE_JOB_CREATE && done && !end->found) ||
           (part == MOE_JOB_COMMIT && !done);
}

/* The orphan's share has ended. */
static void tidy_orphan(struct moe_job *j, const struct moe_job_end *end)
{
    bool clean = !j->orphan.undo || !leaves_files(j->orphan.part, end);
    struct moe_job_action *a;
    j->orphan.reads_trainers = false;
    if (MOE_GUARD(ORPHAN_IS_UNDONE, clean)) {
        j->orphan.part = MOE_JOB_NONE;
        a = push(j, MOE_JOB_FORGET);
    } else {
        j->orphan.part = MOE_JOB_UNDO;
        a = push(j, MOE_JOB_START);
        a->part = MOE_JOB_UNDO;
    }
    a->job = j->orphan.number;
}

static void make_orphan(struct moe_job *j)
{
    j->orphan.part = j->part;
    j->orphan.number = j->number;
    j->orphan.undo = is_lowest(j) && j->call.kind != MOE_JOB_LOAD;
    j->orphan.reads_trainers = j->running && reads_trainers(j, j->part);
    if (j->running)
        (void)push(j, MOE_JOB_CANCEL);
    else
        tidy_orphan(j, &j->end);
}

void moe_job_on_view_ended(struct moe_job *j)
{
    if (j->part == MOE_JOB_PREPARE) /* it may have found an orphan in its way */
        (void)push(j, MOE_JOB_FORGET);
    else if (j->part != MOE_JOB_NONE)
        make_orphan(j);
    j->part = MOE_JOB_NONE;
    j->live = 0;
    j->running = j->unreported = j->blocked = false;
}

/* ----------------------------------------------------------------------- tickets */

static struct moe_status save_running(void)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SAVE_RUNNING,
                     "a checkpoint is being written or loaded: one at a time");
}

void moe_job_on_begin(struct moe_job *j, const struct moe_job_description *description,
                      uint32_t origin, const struct moe_status *prepared)
{
    bool clear = MOE_GUARD(ORPHAN_GOES_FIRST, j->orphan.part == MOE_JOB_NONE);
    j->part = MOE_JOB_PREPARE;
    j->number++;
    j->call = *description;
    j->asked = 0;
    j->from_trainers = description->kind == MOE_JOB_EXPORT;
    j->called_off = j->running = j->unwanted = j->unreported = false;
    j->failure = moe_ok();
    j->bytes = 0;
    j->weights_version = description->weights_version;
    j->steps = description->steps;
    j->end = (struct moe_job_end){.status = *prepared};
    if (!clear && !moe_failed(prepared))
        j->end.status = save_running();
    moe_job_on_join(j, origin);
}

void moe_job_on_join(struct moe_job *j, uint32_t origin)
{
    MOE_INVARIANT(origin < MOE_MAX_SLOTS);
    j->asked |= UINT64_C(1) << origin;
    if (origin == j->slot)
        j->unwanted = false;
}

struct moe_job_report moe_job_report_of(const struct moe_status *status)
{
    struct moe_job_report r = {.code = (uint32_t)status->code, .reason = (uint32_t)status->reason};
    if (moe_failed(status))
        memcpy(r.text, status->text, sizeof r.text - 1);
    return r;
}

void moe_job_report(struct moe_job *j, struct moe_job_report *out)
{
    const struct moe_status none = moe_ok();
    *out = moe_job_report_of(j->running ? &none : &j->end.status);
    out->running = j->running;
    out->unwanted = j->unwanted;
    j->unreported = false;
    if (j->running)
        return;
    out->bytes = j->end.bytes;
    out->found = j->end.found;
    out->weights_version = j->end.weights_version;
    out->steps = j->end.steps;
}

/* ----------------------------------------------------------------- what follows */

static bool is_poor(uint32_t code, uint32_t reason)
{
    return code == MOE_RESOURCE_EXHAUSTED && reason == MOE_REASON_OUT_OF_MEMORY;
}

static struct moe_status status_of(const struct moe_job_report *r)
{
    enum moe_code code = r->code <= MOE_UNAUTHENTICATED ? (enum moe_code)r->code : MOE_UNKNOWN;
    enum moe_reason reason =
        r->reason < MOE_REASON_COUNT ? (enum moe_reason)r->reason : MOE_REASON_NONE;
    return moe_error(code, reason, "%.*s", (int)sizeof r->text - 1, r->text);
}

struct moe_status moe_job_conclude(const struct moe_job_report *all, uint64_t live, uint64_t *bytes)
{
    const struct moe_job_report *poor = NULL, *other = NULL;
    *bytes = 0;
    for (uint32_t s = MOE_MAX_SLOTS; s-- > 0;) {
        const struct moe_job_report *r = &all[s];
        if ((live >> s & 1) == 0)
            continue;
        *bytes += r->bytes;
        if (MOE_GUARD(EVERY_FAILURE_COUNTS, r->code == MOE_OK))
            continue;
        if (is_poor(r->code, r->reason))
            poor = r;
        else
            other = r;
    }
    if (other != NULL)
        return status_of(other);
    return poor != NULL ? status_of(poor) : moe_ok();
}

static bool is_over(const struct moe_job *j, const struct moe_job_report *all)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((j->live >> s & 1) != 0 && all[s].running != 0)
            return false;
    return true;
}

static void note_callers(struct moe_job *j, const struct moe_job_report *all)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((j->asked >> s & 1) != 0 && !MOE_GUARD(ALL_CALLERS_LEFT, all[s].unwanted != 0))
            return;
    if (j->called_off)
        return;
    j->called_off = true;
    if (j->running && j->part != MOE_JOB_UNDO && j->part != MOE_JOB_TIDY)
        (void)push(j, MOE_JOB_CANCEL);
}

static struct moe_status called_off(void)
{
    return moe_error_retry(MOE_ABORTED, MOE_REASON_ABORTED, CALLED_OFF_RETRY_MS,
                           "called off, because no caller waited for it: ask again");
}

static void give_up(struct moe_job *j, struct moe_status why, bool undo)
{
    j->failure = why;
    if (undo)
        start(j, MOE_JOB_UNDO);
    else
        settle(j, why);
}

/* The checkpoint is whole. Older ones are removed once all slots have noted it: before, a slot
 * could still recover from one of them. */
static void keep_checkpoint(struct moe_job *j)
{
    (void)push(j, MOE_JOB_KEEP);
    if (!j->call.tidies) {
        settle(j, moe_ok());
        return;
    }
    start(j, MOE_GUARD(KEEP_BEFORE_TIDY, false) ? MOE_JOB_TIDY : MOE_JOB_REMEMBER);
    if (j->part == MOE_JOB_REMEMBER)
        request_ticket_as_lowest(j);
}

static bool found_at_create(const struct moe_job *j, const struct moe_job_report *all)
{
    return j->part == MOE_JOB_CREATE && all[__builtin_ctzll(j->live)].found != 0;
}

static void go_on(struct moe_job *j, const struct moe_job_report *all)
{
    const struct moe_job_report *lowest = &all[__builtin_ctzll(j->live)];
    enum moe_job_part next = rows[j->part].next[j->call.kind];
    bool found = found_at_create(j, all);
    if (found) {
        j->weights_version = lowest->weights_version;
        j->steps = lowest->steps;
    }
    if (found || (j->part == MOE_JOB_COMMIT && j->call.kind == MOE_JOB_SAVE))
        keep_checkpoint(j);
    else if (next != MOE_JOB_NONE)
        start(j, next);
    else
        settle(j, moe_ok());
}

/* The part is over on all slots. */
static void decide(struct moe_job *j, const struct moe_job_report *all)
{
    uint64_t bytes;
    struct moe_status st = moe_job_conclude(all, j->live, &bytes);
    j->bytes += bytes;
    if (j->part == MOE_JOB_UNDO) {
        settle(j, j->failure);
        return;
    }
    if (j->part == MOE_JOB_COPY && is_poor(st.code, st.reason) && !j->called_off) {
        j->from_trainers = true;
        start(j, MOE_JOB_CREATE);
        return;
    }
    bool made = j->part == MOE_JOB_WRITE || j->part == MOE_JOB_COMMIT ||
                (j->part == MOE_JOB_CREATE && !moe_failed(&st) && !found_at_create(j, all));
    bool counts = MOE_GUARD(COMMIT_COUNTS, !rows[j->part].is_final);
    if (st.code == MOE_CANCELLED || (j->called_off && !moe_failed(&st) && counts))
        st = called_off();
    if (moe_failed(&st))
        give_up(j, st, !MOE_GUARD(UNDO_WHAT_WAS_WRITTEN, !made));
    else
        go_on(j, all);
}

void moe_job_on_reports(struct moe_job *j, const struct moe_job_report all[MOE_MAX_SLOTS])
{
    if (j->part == MOE_JOB_NONE)
        return;
    note_callers(j, all);
    if (MOE_GUARD(ALL_SLOTS_ENDED, is_over(j, all)))
        decide(j, all);
}

/* -------------------------------------------------------------- ends and callers */

void moe_job_on_part_ended(struct moe_job *j, uint64_t number, enum moe_job_part part,
                           const struct moe_job_end *end)
{
    if (j->orphan.part == part && j->orphan.number == number) {
        tidy_orphan(j, end);
        return;
    }
    if (!j->running || j->part != part || j->number != number)
        return;
    j->running = false;
    j->end = *end;
    if (part == MOE_JOB_TIDY || part == MOE_JOB_UNDO)
        j->end.status = moe_ok();
    if (part != MOE_JOB_TAKE) {
        j->unreported = true;
        (void)push(j, MOE_JOB_REQUEST_TICKET);
    } else if (moe_failed(&end->status)) {
        push(j, MOE_JOB_END_VIEW)->status = end->status;
    } else {
        (void)push(j, MOE_JOB_RECORD);
        request_ticket_as_lowest(j);
    }
}

bool moe_job_on_unwanted(struct moe_job *j, uint64_t id, const struct moe_content *content)
{
    if (moe_job_judge(j, id, content) != MOE_JOB_JOINS)
        return false;
    j->unwanted = j->unreported = true;
    (void)push(j, MOE_JOB_REQUEST_TICKET);
    return true;
}

/* ----------------------------------------------------------------------- reading */

enum moe_job_outcome moe_job_judge(const struct moe_job *j, uint64_t id,
                                   const struct moe_content *content)
{
    if (j->part == MOE_JOB_NONE || j->call.id != id)
        return MOE_JOB_UNKNOWN;
    bool same = memcmp(&j->call.content, content, sizeof *content) == 0;
    return MOE_GUARD(JOIN_THE_SAME, same) ? MOE_JOB_JOINS : MOE_JOB_REUSED;
}

bool moe_job_is_active(const struct moe_job *j)
{
    return j->part != MOE_JOB_NONE;
}

bool moe_job_may_begin(const struct moe_job *j)
{
    return MOE_GUARD(ONE_JOB, j->part == MOE_JOB_NONE);
}

bool moe_job_blocks_weight_updates(const struct moe_job *j)
{
    return j->blocked;
}

bool moe_job_frees_trainers(const struct moe_job *j)
{
    return MOE_GUARD(ORPHAN_LETS_GO, j->orphan.part == MOE_JOB_NONE || !j->orphan.reads_trainers);
}

bool moe_job_wants_ticket(const struct moe_job *j)
{
    return j->part != MOE_JOB_NONE && j->unreported;
}

bool moe_job_is_in_ticket(enum moe_job_part part)
{
    return part == MOE_JOB_TAKE;
}
