/* SPDX-License-Identifier: Apache-2.0 */
/* See moves.h. A phase asks all slots for one step, and ends when all have reported it. */
#include "coordinator/moves/moves.h"

#include "base/clock.h"
#include "base/guard.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TICK_NS (250 * MOE_NS_PER_MS) /* while something is under way */

enum phase {
    PHASE_IDLE,
    PHASE_COUNT,
    PHASE_FETCH,
    PHASE_SAVE,
    PHASE_SWAP,
    PHASE_DROP,
};

/* One slot in the present phase. */
struct place {
    bool done;
    uint64_t stream, sent_ns; /* of the order; 0 = not sent */
    uint64_t alive_ns;        /* FETCH: of the last progress */
    uint64_t loaded_bytes;
};

enum { QUEUE_MAX = 16 };

struct moe_moves {
    struct moe_moves_config config;
    uint64_t now_ns, view, live, next_order, save_sequence;
    bool loaded; /* see moe_moves_on_group */
    struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX];

    enum phase phase;
    uint64_t phase_ns, order; /* of the phase */
    uint64_t epoch;           /* phase != IDLE: the view that it belongs to */
    uint64_t members;         /* phase != IDLE: the slots that it asks */
    uint64_t processes[MOE_PLACEMENT_SLOTS_MAX];
    struct place places[MOE_PLACEMENT_SLOTS_MAX];
    struct moe_moves_request request; /* call 0: no operator waits */
    struct moe_status result;         /* DROP: the answer */

    struct moe_placement *before, *plan;
    bool moved;
    struct moe_move_gain gain;
    /* [row_count] of all experts and slots: of this count, of the last move's, and those that the
     * plan uses. */
    uint64_t *rows, *rows_before, *rows_used;
    size_t row_count;
    uint64_t processes_before[MOE_PLACEMENT_SLOTS_MAX]; /* that rows_before is of; 0 = none */

    struct moe_rebalancer rebalancer;
    bool automatic;    /* phase != IDLE: the rebalancer's */
    uint64_t ended[2]; /* automatic moves: undone, moved */

    struct moe_moves_action queue[QUEUE_MAX]; /* a ring: all but orders */
    size_t queue_head, queue_count;
};

/* ------------------------------------------------------------------ lifetime */

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a move");
}

static void enter(struct moe_moves *m, enum phase phase)
{
    m->phase = phase;
    m->phase_ns = m->now_ns;
    m->order = phase != PHASE_IDLE ? ++m->next_order : 0;
    memset(m->places, 0, sizeof m->places);
}

struct moe_status moe_moves_create(const struct moe_moves_config *config, uint64_t swap_epoch,
                                   struct moe_moves **out)
{
    MOE_INVARIANT(config->slots >= 1 && config->slots <= MOE_PLACEMENT_SLOTS_MAX);
    struct moe_moves *m = calloc(1, sizeof *m);
    if (m == NULL)
        return no_memory();
    m->config = *config;
    m->next_order = config->first_order;
    moe_rebalancer_begin(&m->rebalancer, &config->automatic, 0);
    struct moe_status st = moe_placement_create(&m->before);
    if (!moe_failed(&st))
        st = moe_placement_create(&m->plan);
    if (moe_failed(&st)) {
        moe_moves_destroy(m);
        return st;
    }
    if (swap_epoch != 0) {
        enter(m, PHASE_SWAP);
        m->epoch = m->view = swap_epoch;
        m->members = moe_placement_first_slots(config->slots); /* groups that move have all */
    }
    *out = m;
    return st;
}

void moe_moves_destroy(struct moe_moves *m)
{
    if (m == NULL)
        return;
    moe_placement_destroy(m->before);
    moe_placement_destroy(m->plan);
    free(m->rows);
    free(m->rows_before);
    free(m->rows_used);
    free(m);
}

/* The next member from slot `s` on; config.slots past the last. */
static uint32_t member_from(const struct moe_moves *m, uint32_t s)
{
    while (s < m->config.slots && (m->members >> s & 1) == 0)
        s++;
    return s;
}

static void begin(struct moe_moves *m, uint64_t now_ns)
{
    if (now_ns > m->now_ns)
        m->now_ns = now_ns;
}

/* ------------------------------------------------------------------ outputs */

static struct moe_moves_action *emit(struct moe_moves *m, enum moe_moves_action_kind kind)
{
    MOE_INVARIANT(m->queue_count < QUEUE_MAX);
    struct moe_moves_action *a = &m->queue[(m->queue_head + m->queue_count++) % QUEUE_MAX];
    *a = (struct moe_moves_action){.kind = kind, .slot = MOE_MEMBERSHIP_NO_SLOT};
    return a;
}

static void note(struct moe_moves *m, enum moe_log_level level, enum moe_membership_event event,
                 const char *fmt, ...) MOE_PRINTF(4, 5);

static void note(struct moe_moves *m, enum moe_log_level level, enum moe_membership_event event,
                 const char *fmt, ...)
{
    struct moe_moves_action *a = emit(m, MOE_MOVES_LOG);
    va_list args;
    a->level = level;
    a->event = event;
    va_start(args, fmt);
    moe_membership_print_text(a->status.text, sizeof a->status.text, fmt, args);
    va_end(args);
}

static void answer(struct moe_moves *m, struct moe_status status)
{
    if (m->request.call == 0)
        return;
    struct moe_moves_action *a = emit(m, MOE_MOVES_ANSWER);
    a->call = m->request.call;
    a->status = status;
    m->request.call = 0;
}

static void undo(struct moe_moves *m, struct moe_status why)
{
    bool fetched = m->phase != PHASE_COUNT;
    if (fetched && m->automatic) {
        moe_rebalancer_moved(&m->rebalancer, m->now_ns, false);
        m->ended[false]++;
    }
    if (fetched)
        note(m, MOE_LOG_WARN, MOE_EVENT_MOVE_FAILED, "no experts move: %.200s", why.text);
    m->result = why;
    if (fetched) {
        enter(m, PHASE_DROP);
        return;
    }
    answer(m, why);
    enter(m, PHASE_IDLE);
}

static bool is_undoable(const struct moe_moves *m)
{
    return m->phase == PHASE_COUNT || m->phase == PHASE_FETCH;
}

/* ------------------------------------------------------------------ the plan */

static bool has_same_processes(const struct moe_moves *m)
{
    return memcmp(m->processes, m->processes_before, sizeof m->processes) == 0;
}

/* Whether the rows since the last move suffice for a plan. */
static bool is_recent_enough(const struct moe_moves *m)
{
    uint64_t sum = 0;
    if (!has_same_processes(m))
        return false;
    for (size_t i = 0; i < m->row_count; i++) {
        if (m->rows[i] < m->rows_before[i])
            return false;
        sum += m->rows[i] - m->rows_before[i];
    }
    return sum >= m->row_count * MOE_MOVES_ROWS_LEAST;
}

static struct moe_status make_plan(struct moe_moves *m)
{
    bool recent = is_recent_enough(m);
    for (size_t i = 0; i < m->row_count; i++)
        m->rows_used[i] = m->rows[i] - (recent ? m->rows_before[i] : 0);
    const struct moe_move_input in = {.now = m->before,
                                      .places = m->members,
                                      .replicas = m->config.replicas,
                                      .spare =
                                          m->request.dry_run ? m->request.spare : m->config.spare,
                                      .rows = m->rows_used};
    MOE_TRY(moe_move_plan(&in, m->plan, &m->gain));
    moe_placement_set_version(m->plan, m->request.new_version);
    return moe_ok();
}

static bool is_worth_it(const struct moe_moves *m)
{
    return m->gain.added > 0 &&
           m->gain.now - m->gain.planned >= m->gain.now * m->request.least_gain / 100;
}

/* The last move is the one that later counts begin at. */
static void keep_rows(struct moe_moves *m)
{
    if (m->row_count == 0)
        return;
    memcpy(m->rows_before, m->rows, m->row_count * sizeof *m->rows);
    memcpy(m->processes_before, m->processes, sizeof m->processes);
}

/* A look: the rows since the last one. Too few of them wait for the next look. */
static bool is_wanted(struct moe_moves *m, struct moe_status *st)
{
    bool known = is_recent_enough(m);
    if (known)
        *st = make_plan(m);
    if (known || !has_same_processes(m))
        keep_rows(m);
    if (!known || moe_failed(st))
        return moe_rebalancer_decide(&m->rebalancer, -1);
    double gain = m->gain.now > 0 ? 100 * (m->gain.now - m->gain.planned) / m->gain.now : 0;
    return moe_rebalancer_decide(&m->rebalancer, m->gain.added > 0 && gain > 0 ? gain : 0);
}

static void end_count(struct moe_moves *m)
{
    struct moe_status st = moe_ok();
    bool moves = false;
    if (m->automatic) {
        moves = is_wanted(m, &st);
    } else {
        st = make_plan(m);
        moves = !moe_failed(&st) && !m->request.dry_run && is_worth_it(m);
    }
    if (!moves) {
        answer(m, st);
        enter(m, PHASE_IDLE);
        return;
    }
    note(m, MOE_LOG_INFO, MOE_EVENT_MOVE_BEGUN,
         "slots fetch %" PRIu64 " copies of experts: the busiest one has %.3f of the mean rows, "
         "then %.3f",
         m->gain.added, m->gain.now / m->gain.mean, m->gain.planned / m->gain.mean);
    enter(m, PHASE_FETCH);
}

/* ------------------------------------------------------------------ progress */

static enum moe_moves_step step_of(enum phase phase)
{
    switch (phase) {
    case PHASE_COUNT: return MOE_MOVES_COUNT;
    case PHASE_FETCH: return MOE_MOVES_FETCH;
    case PHASE_SWAP: return MOE_MOVES_SWAP;
    default: return MOE_MOVES_DROP;
    }
}

static bool is_asking(const struct moe_moves *m)
{
    return m->phase != PHASE_IDLE && m->phase != PHASE_SAVE;
}

static void end_swap(struct moe_moves *m, const char *how)
{
    note(m, MOE_LOG_INFO, MOE_EVENT_MOVED,
         "experts have moved: placement %" PRIu32 " is in force%s", moe_placement_version(m->plan),
         how);
    m->moved = true;
    keep_rows(m);
    moe_rebalancer_moved(&m->rebalancer, m->now_ns, true);
    m->ended[true] += m->automatic;
    answer(m, moe_ok());
    enter(m, PHASE_IDLE);
}

static void end_phase(struct moe_moves *m)
{
    switch (m->phase) {
    case PHASE_COUNT: end_count(m); break;
    case PHASE_FETCH:
        enter(m, MOE_GUARD(SAVE_BEFORE_SWAP, false) ? PHASE_SWAP : PHASE_SAVE);
        if (m->phase == PHASE_SAVE)
            emit(m, MOE_MOVES_SAVE)->sequence = ++m->save_sequence;
        break;
    case PHASE_SWAP:
        if (moe_placement_layer_count(m->plan) > 0) /* else of an earlier coordinator */
            end_swap(m, "");
        else
            enter(m, PHASE_IDLE);
        break;
    case PHASE_DROP:
        answer(m, m->result);
        enter(m, PHASE_IDLE);
        break;
    case PHASE_SAVE:
    case PHASE_IDLE: break;
    }
}

/* A slot without the process that was asked has nothing to drop. */
static bool is_done(const struct moe_moves *m, uint32_t slot)
{
    bool gone = m->slots[slot].process != m->processes[slot] || m->slots[slot].stream == 0;
    return m->places[slot].done || (m->phase == PHASE_DROP && gone);
}

static bool all_done(const struct moe_moves *m)
{
    bool all = true;
    for (uint32_t s = member_from(m, 0); s < m->config.slots; s = member_from(m, s + 1))
        all = all && is_done(m, s);
    return m->phase == PHASE_FETCH ? MOE_GUARD(FETCHED_BY_ALL, all) : all;
}

static bool has_lasted(const struct moe_moves *m, enum phase phase, uint64_t limit_ns)
{
    return m->phase == phase && m->now_ns - m->phase_ns >= limit_ns;
}

static void expire_fetch(struct moe_moves *m)
{
    for (uint32_t s = member_from(m, 0); m->phase == PHASE_FETCH && s < m->config.slots;
         s = member_from(m, s + 1)) {
        const struct place *p = &m->places[s];
        uint64_t alive = p->alive_ns > m->phase_ns ? p->alive_ns : m->phase_ns;
        if (!p->done && m->now_ns - alive >= MOE_MOVES_STALL_NS)
            undo(m, moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                              "slot %u makes no progress with its experts", s));
    }
}

static void expire(struct moe_moves *m)
{
    if (has_lasted(m, PHASE_COUNT, MOE_MOVES_COUNT_NS))
        undo(m, moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                          "a worker does not report its rows"));
    expire_fetch(m);
    if (has_lasted(m, PHASE_SWAP, MOE_MOVES_SWAP_NS))
        answer(m, moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                            "the ticket of the swap does not come; the placement is saved, and "
                            "in force with the next view at the latest"));
    if (has_lasted(m, PHASE_DROP, MOE_MOVES_DROP_NS))
        end_phase(m);
}

static void advance(struct moe_moves *m)
{
    expire(m);
    while (is_asking(m) && all_done(m))
        end_phase(m);
}

/* ------------------------------------------------------------------ inputs */

/* Rows that were counted over a lost stream would be added twice. */
static bool is_lost(const struct moe_moves *m, uint32_t slot)
{
    uint64_t asked = m->phase == PHASE_COUNT ? m->places[slot].stream : 0;
    return m->slots[slot].process != m->processes[slot] ||
           (asked != 0 && asked != m->slots[slot].stream);
}

static void check_group(struct moe_moves *m)
{
    bool other_view = m->view != m->epoch;
    if (m->phase == PHASE_SWAP && other_view) {
        if (moe_placement_layer_count(m->plan) > 0)
            end_swap(m, " from the next view on");
        else
            enter(m, PHASE_IDLE);
        return;
    }
    if (!is_undoable(m))
        return;
    if (!MOE_GUARD(MOVE_ENDS_WITH_ITS_VIEW, !other_view)) {
        undo(m, moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000, "the view has ended"));
        return;
    }
    for (uint32_t s = member_from(m, 0); s < m->config.slots && is_undoable(m);
         s = member_from(m, s + 1))
        if (is_lost(m, s))
            undo(m, moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000,
                                    "slot %u has lost its worker, or its connection", s));
}

void moe_moves_on_group(struct moe_moves *m, uint64_t now_ns, uint64_t view, uint64_t live,
                        bool loaded, const struct moe_added_slot *slots)
{
    begin(m, now_ns);
    memcpy(m->slots, slots, m->config.slots * sizeof *slots);
    m->view = view;
    m->live = view != 0 ? live : 0;
    m->loaded = loaded;
    if (m->phase != PHASE_IDLE)
        check_group(m);
    advance(m);
}

/* A look of the rebalancer: it may be dropped. */
static bool is_looking(const struct moe_moves *m)
{
    return m->phase == PHASE_COUNT && m->automatic;
}

static struct moe_status check_request(const struct moe_moves *m, const struct moe_moves_request *r)
{
    if (m->phase != PHASE_IDLE && !is_looking(m))
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_NONE, 1000,
                               "experts are being moved: one change at a time");
    if (!r->dry_run && r->trains)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "a group that trains (--training) moves no experts");
    if (!r->dry_run && m->config.spare == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the group has no spare places: start the coordinator with "
                         "--spare-experts N");
    if (m->view == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING, "no view is in force");
    for (uint32_t s = 0; s < m->config.slots; s++)
        if ((r->places >> s & 1) != 0 && ((m->live >> s & 1) == 0 || m->slots[s].stream == 0))
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING,
                             "slot %u takes no part: experts move in a view of all slots", s);
    if (!m->loaded)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING, "a slot is loading");
    if (r->version != 0 && r->version != moe_placement_version(r->now))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "placement %u is in force, not %u", moe_placement_version(r->now),
                         r->version);
    return moe_ok();
}

static struct moe_status make_room(struct moe_moves *m, const struct moe_placement *p)
{
    size_t count = 0;
    for (size_t i = 0; i < moe_placement_layer_count(p); i++)
        count += moe_placement_layer_at(p, i).experts;
    if (count == m->row_count) {
        memset(m->rows, 0, count * sizeof *m->rows);
        return moe_ok();
    }
    uint64_t *rows = calloc(count + 1, sizeof *rows), *before = calloc(count + 1, sizeof *before),
             *used = calloc(count + 1, sizeof *used);
    if (rows == NULL || before == NULL || used == NULL) {
        free(rows);
        free(before);
        free(used);
        return no_memory();
    }
    free(m->rows);
    free(m->rows_before);
    free(m->rows_used);
    m->rows = rows;
    m->rows_before = before;
    m->rows_used = used;
    m->row_count = count;
    memset(m->processes_before, 0, sizeof m->processes_before);
    return moe_ok();
}

struct moe_status moe_moves_begin(struct moe_moves *m, uint64_t now_ns,
                                  const struct moe_moves_request *request)
{
    begin(m, now_ns);
    if (request->call == 0)
        moe_rebalancer_look(&m->rebalancer, m->now_ns);
    MOE_TRY(check_request(m, request));
    MOE_TRY(make_room(m, request->now));
    moe_placement_assign(m->before, request->now);
    m->request = *request;
    m->request.now = NULL;
    m->automatic = request->call == 0;
    m->moved = false;
    m->epoch = m->view;
    m->members = request->places;
    for (uint32_t s = 0; s < m->config.slots; s++)
        m->processes[s] = m->slots[s].process;
    enter(m, PHASE_COUNT);
    return moe_ok();
}

void moe_moves_cancel(struct moe_moves *m, uint64_t now_ns, uint64_t call)
{
    begin(m, now_ns);
    if (call != 0 && m->request.call == call) {
        m->request.call = 0;
        if (is_undoable(m))
            undo(m, moe_error(MOE_CANCELLED, MOE_REASON_ABORTED, "the operator has left"));
    }
    advance(m);
}

struct moe_status moe_moves_on_rows(struct moe_moves *m, uint64_t now_ns, uint32_t slot,
                                    uint64_t order, uint32_t layer, const uint64_t *rows,
                                    size_t count)
{
    size_t at = 0, index;
    begin(m, now_ns);
    if (m->phase != PHASE_COUNT || order != m->order || m->places[slot].done)
        return moe_ok();
    if (!moe_placement_find_layer(m->before, layer, &index) ||
        moe_placement_layer_at(m->before, index).experts != count)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "rows of layer %u with %zu experts, which is none of the group", layer,
                         count);
    for (size_t i = 0; i < index; i++)
        at += moe_placement_layer_at(m->before, i).experts;
    for (size_t e = 0; e < count; e++)
        m->rows[at + e] += rows[e];
    return moe_ok();
}

/* SWAP is identified by its epoch: slots report it when its ticket has run, for whatever order. */
static bool is_awaited(const struct moe_moves *m, uint32_t slot, const struct moe_moves_report *r)
{
    if (!is_asking(m) || r->step != step_of(m->phase) || m->places[slot].done)
        return false;
    if (m->phase == PHASE_SWAP)
        return r->epoch == m->epoch;
    return r->order == m->order;
}

void moe_moves_on_report(struct moe_moves *m, uint64_t now_ns, uint32_t slot,
                         const struct moe_moves_report *r)
{
    begin(m, now_ns);
    MOE_INVARIANT(slot < m->config.slots);
    if (is_awaited(m, slot, r)) {
        bool failed = moe_failed(r->error);
        if (failed && is_undoable(m))
            undo(m, moe_error_context(*r->error, "slot %u", slot));
        else if (!failed || m->phase == PHASE_DROP)
            m->places[slot].done = true;
    }
    advance(m);
}

void moe_moves_on_progress(struct moe_moves *m, uint64_t now_ns, uint32_t slot,
                           uint64_t loaded_bytes)
{
    begin(m, now_ns);
    struct place *p = &m->places[slot];
    if (m->phase == PHASE_FETCH && loaded_bytes != p->loaded_bytes) {
        p->loaded_bytes = loaded_bytes;
        p->alive_ns = m->now_ns;
    }
}

void moe_moves_on_saved(struct moe_moves *m, uint64_t now_ns, uint64_t sequence,
                        const struct moe_status *status)
{
    begin(m, now_ns);
    if (m->phase != PHASE_SAVE || sequence != m->save_sequence)
        return;
    if (moe_failed(status))
        undo(m, *status);
    else
        enter(m, PHASE_SWAP);
    advance(m);
}

void moe_moves_on_tick(struct moe_moves *m, uint64_t now_ns)
{
    begin(m, now_ns);
    advance(m);
}

uint64_t moe_moves_deadline(const struct moe_moves *m)
{
    if (m->phase != PHASE_IDLE)
        return m->now_ns + TICK_NS;
    return m->view != 0 ? moe_rebalancer_due(&m->rebalancer) : MOE_NEVER;
}

/* ------------------------------------------------------------------ actions */

/* How long an order may be without a report, until it is sent again on its stream. */
static uint64_t repeat_ns(const struct moe_moves *m)
{
    return m->phase == PHASE_COUNT   ? MOE_NEVER / 2
           : m->phase == PHASE_FETCH ? 30 * MOE_NS_PER_S
                                     : MOE_NS_PER_S;
}

static bool may_order(const struct moe_moves *m)
{
    return is_asking(m) && (m->phase != PHASE_SWAP || MOE_GUARD(SWAP_WHAT_ALL_HOLD, m->loaded));
}

/* The next order that is due. */
static bool next_order(struct moe_moves *m, struct moe_moves_action *out)
{
    for (uint32_t s = member_from(m, 0); may_order(m) && s < m->config.slots;
         s = member_from(m, s + 1)) {
        struct place *p = &m->places[s];
        uint64_t stream = m->slots[s].stream;
        bool sent = p->stream == stream && m->now_ns < p->sent_ns + repeat_ns(m);
        if (stream == 0 || is_done(m, s) || sent)
            continue;
        p->stream = stream;
        p->sent_ns = m->now_ns;
        *out = (struct moe_moves_action){.kind = MOE_MOVES_ORDER,
                                         .step = step_of(m->phase),
                                         .slot = s,
                                         .stream = stream,
                                         .order = m->order,
                                         .epoch = m->epoch};
        return true;
    }
    return false;
}

bool moe_moves_next_action(struct moe_moves *m, struct moe_moves_action *out)
{
    if (m->queue_count == 0)
        return next_order(m, out);
    *out = m->queue[m->queue_head];
    m->queue_head = (m->queue_head + 1) % QUEUE_MAX;
    m->queue_count--;
    return true;
}

/* ------------------------------------------------------------------ reading */

void moe_moves_outcome(const struct moe_moves *m, struct moe_moves_outcome *out)
{
    *out = (struct moe_moves_outcome){
        .moved = m->moved, .places = m->members, .plan = m->plan, .gain = &m->gain};
}

const struct moe_placement *moe_moves_plan(const struct moe_moves *m)
{
    return m->plan;
}

bool moe_moves_awaits_fetch(const struct moe_moves *m, uint32_t slot, uint64_t order)
{
    return m->phase == PHASE_FETCH && order == m->order && !m->places[slot].done;
}

uint32_t moe_moves_fetched_version(const struct moe_moves *m)
{
    bool fetched = m->phase == PHASE_FETCH || m->phase == PHASE_SAVE;
    return fetched ? moe_placement_version(m->plan) : 0;
}

bool moe_moves_wants_look(const struct moe_moves *m)
{
    return m->phase == PHASE_IDLE && m->view != 0 &&
           m->now_ns >= moe_rebalancer_due(&m->rebalancer);
}

uint64_t moe_moves_automatic(const struct moe_moves *m, bool moved)
{
    return m->ended[moved];
}

bool moe_moves_busy(const struct moe_moves *m)
{
    return m->phase != PHASE_IDLE && !is_looking(m);
}
