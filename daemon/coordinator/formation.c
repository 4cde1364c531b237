/* SPDX-License-Identifier: Apache-2.0 */
/* How an epoch forms and ends: SAVE -> PREPARE -> blob rounds -> READY of all -> SAVE -> COMMIT,
 * and ABORT from any phase. members.c and membership.c decide which members are lost. Forming has
 * one answer to every failure: the epoch ends, and a later attempt starts under a higher number. */
#include "base/guard.h"
#include "coordinator/membership_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { ROUND_TRIPS = 4, ANSWERS_PER_LEASE = 5 };
#define ANSWER_SLACK_NS (20 * MOE_NS_PER_MS)

bool moe_membership__covers(const struct moe_membership *m, uint64_t slots)
{
    return m->moved ? moe_placement_is_live(m->placement, slots)
                    : moe_placement_covers(m->saved.places, m->config.replicas, slots);
}

/* A view without some experts follows on one with all of them, and has at least half of the slots:
 * a few that do not see the others do not go on alone. */
static bool may_lack_experts(const struct moe_membership *m, uint64_t slots)
{
    uint32_t count = (uint32_t)__builtin_popcountll(slots);
    return m->config.partial && MOE_GUARD(PARTIAL_FOLLOWS, m->degraded || m->view_epoch != 0) &&
           MOE_GUARD(PARTIAL_HAS_HALF, 2 * count >= moe_membership__size(m)) && count > 0;
}

/* Slots with a process of the view in force, or of the last one. In a group that trains, they alone
 * know what was answered last. */
static uint64_t find_heirs(const struct moe_membership *m, uint64_t slots)
{
    uint64_t heirs = 0;
    if (m->view_epoch != 0)
        return slots & m->view_live;
    for (uint32_t s = 0; s < m->config.slots; s++)
        for (uint32_t p = 0; p < SLOTS_MAX; p++)
            if ((slots >> s & 1) != 0 && m->members[s].incarnation != 0 &&
                m->members[s].incarnation == m->past.incarnations[p])
                heirs |= UINT64_C(1) << s;
    return heirs;
}

/* These slots can serve. */
static bool suffice(const struct moe_membership *m, uint64_t slots)
{
    bool whole = !m->trains || slots == m->saved.places ||
                 MOE_GUARD(TRAINING_HAS_HEIRS, find_heirs(m, slots) != 0);
    return whole && (moe_membership__covers(m, slots) || may_lack_experts(m, slots));
}

bool moe_membership__may_shrink(const struct moe_membership *m)
{
    return m->config.replicas > 1 || m->config.partial;
}

bool moe_membership__has_heirs(const struct moe_membership *m)
{
    return find_heirs(m, m->live) != 0;
}

bool moe_membership__takes_part(const struct moe_membership *m, uint32_t slot)
{
    uint64_t live = m->phase != PHASE_IDLE ? m->live : m->view_epoch != 0 ? m->view_live : 0;
    return (live >> slot & 1) != 0;
}

static uint64_t taken_slots(const struct moe_membership *m)
{
    uint64_t taken = 0;
    for (uint32_t s = 0; s < SLOTS_MAX; s++) /* slots that the group lacks are empty */
        if (m->members[s].state == SLOT_TAKEN && moe_membership__is_place(m, s))
            taken |= UINT64_C(1) << s;
    return taken;
}

uint32_t moe_membership__count_taken(const struct moe_membership *m)
{
    return (uint32_t)__builtin_popcountll(taken_slots(m));
}

bool moe_membership__all_taken(const struct moe_membership *m)
{
    return taken_slots(m) == m->saved.places;
}

/* Why this slot keeps the group from forming; NULL when it does not. */
static const char *blocker(const struct moe_membership *m, uint32_t slot)
{
    const struct member *member = &m->members[slot];
    bool cordoned = moe_membership__is_cordoned(m, slot);
    return member->state != SLOT_TAKEN           ? cordoned ? "is cordoned" : "is empty"
           : member->stream == 0                 ? "is not connected"
           : member->draining || member->leaving ? "is leaving"
           : member->load_failed                 ? "cannot load"
           : !member->assigned                   ? "waits for its share of the experts"
           : !member->loaded                     ? "is loading"
                                                 : NULL;
}

uint64_t moe_membership__able_slots(const struct moe_membership *m)
{
    uint64_t able = 0;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (moe_membership__is_place(m, s) && blocker(m, s) == NULL && !m->members[s].silent &&
            m->now_ns >= m->members[s].excluded_until_ns)
            able |= UINT64_C(1) << s;
    return able;
}

/* Empty slots come first: no worker loads before all slots are taken. */
bool moe_membership__blocked(const struct moe_membership *m, uint32_t *slot, const char **why)
{
    bool complete = moe_membership__all_taken(m);
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        if (!moe_membership__is_place(m, s))
            continue;
        *slot = s;
        *why = complete || member->state != SLOT_TAKEN ? blocker(m, s) : NULL;
        if (*why != NULL)
            return true;
    }
    return false;
}

/* ------------------------------------------------------------------ sessions */

uint32_t moe_membership__least_tokens(const struct moe_membership *m, uint64_t slots)
{
    uint32_t least = 0;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        uint32_t tokens = (slots >> s & 1) != 0 ? m->members[s].max_tokens : 0;
        if (tokens != 0 && (least == 0 || tokens < least))
            least = tokens;
    }
    return least;
}

/* These slots can go on in the session of the last view: they are fewer, and the same processes. A
 * new process has other windows, and a write of its predecessor may still come. Slots that forward
 * rows for each other stay together. */
static bool can_mask(const struct moe_membership *m, uint64_t slots)
{
    bool fewer = (slots & ~m->session.live) == 0 && slots != m->session.live;
    bool same = true, whole = true;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if ((slots >> s & 1) == 0)
            continue;
        same = same && m->members[s].incarnation == m->session.incarnations[s];
        whole = whole && m->session.together[s] != 0 && (m->session.together[s] & ~slots) == 0;
    }
    return m->session.epoch != 0 && MOE_GUARD(MASK_IS_WHOLE, whole) &&
           MOE_GUARD(MASK_HAS_FEWER, fewer) && MOE_GUARD(MASK_KEEPS_PROCESSES, same) &&
           m->session.slots == moe_placement_slots(m->placement);
}

/* PREPARE is about to be sent. */
static void note_session(struct moe_membership *m)
{
    if (!m->masks) {
        memset(&m->session, 0, sizeof m->session);
        m->session.epoch = m->epoch;
        m->session.slots = moe_placement_slots(m->placement);
        m->session.max_tokens = moe_membership__least_tokens(m, m->live);
        for (uint32_t s = 0; s < m->config.slots; s++)
            m->session.incarnations[s] = (m->live >> s & 1) != 0 ? m->members[s].incarnation : 0;
    }
    m->session.live = m->live;
}

/* Members of one view have one session, which they joined in its epoch or before. While the log has
 * the view, no later epoch was announced, so they have the mask of that view still. A member that
 * tells something else takes no mask. */
void moe_membership__learn_session(struct moe_membership *m, uint32_t slot,
                                   const struct moe_membership_register *r)
{
    if (m->session.restored == 0 || m->session.incarnations[slot] != r->incarnation)
        return;
    if (m->session.epoch == 0 && r->session.epoch <= m->session.restored) {
        m->session.epoch = r->session.epoch;
        m->session.slots = moe_placement_slots(m->placement);
        m->session.max_tokens = r->session.max_tokens;
    }
    bool same = r->session.epoch != 0 && r->session.epoch == m->session.epoch &&
                r->session.max_tokens == m->session.max_tokens &&
                r->session.max_tokens <= r->max_tokens_per_step;
    m->session.together[slot] = same ? r->session.together : 0;
}

/* The epoch that forms ends, perhaps before it was announced. A new session that was not committed
 * is left; one that is kept may have a smaller mask. */
static void forget_session(struct moe_membership *m)
{
    if (m->phase != PHASE_SAVE_EPOCH && !MOE_GUARD(MASK_OF_A_VIEW, m->masks))
        memset(&m->session, 0, sizeof m->session);
}

/* ------------------------------------------------------------------ end of an epoch */

/* When the next attempt begins. `missed`: failures in a row, including this one. */
static uint64_t after_pause(const struct moe_membership *m, uint32_t missed)
{
    uint64_t pause = m->config.backoff_ns;
    for (uint32_t i = 1; i < missed && pause < m->config.backoff_max_ns; i++)
        pause *= 2;
    return m->now_ns + (pause < m->config.backoff_max_ns ? pause : m->config.backoff_max_ns);
}

void moe_membership__exclude(struct moe_membership *m, uint64_t slots)
{
    bool all_are_needed = !suffice(m, moe_membership__able_slots(m) & ~slots);
    if (MOE_GUARD(SUSPECTS_STAY_OUT,
                  slots == 0 || !moe_membership__may_shrink(m) || all_are_needed))
        return;
    m->shrinks = true;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct member *member = &m->members[s];
        if ((slots >> s & 1) == 0)
            continue;
        if (member->strikes < UINT32_MAX)
            member->strikes++;
        member->silent = true;
        member->excluded_until_ns = after_pause(m, member->strikes);
    }
}

/* An attempt that failed because an operator must decide, or free disk space, does not count as a
 * failure of the group. The group retries without limit. */
static void await_operator(struct moe_membership *m)
{
    m->attempts = 0;
    if (m->operator_decided) {
        m->operator_decided = false;
        m->waits = 0;
        m->next_try_ns = m->now_ns;
        return;
    }
    if (m->waits < UINT32_MAX)
        m->waits++;
    m->next_try_ns = after_pause(m, m->waits);
}

static void give_up(struct moe_membership *m)
{
    m->failed = true;
    moe_membership__log(m, MOE_LOG_ERROR, MOE_EVENT_FAILED, MOE_MEMBERSHIP_NO_SLOT,
                        "giving up after %u attempt%s: %s", m->attempts,
                        m->attempts == 1 ? "" : "s", m->trouble);
}

/* Counts a failed attempt, and sets the time of the next one or gives up. */
static void back_off(struct moe_membership *m)
{
    m->attempts++;
    m->waits = 0;
    if (m->attempts >= m->config.attempts_max) {
        give_up(m);
        return;
    }
    m->next_try_ns = after_pause(m, m->attempts);
}

/* Another attempt would fail in the same way. */
static void end_for_good(struct moe_membership *m)
{
    m->attempts++;
    give_up(m);
}

static void forget_saved_view(struct moe_membership *m)
{
    if (m->saved.view_epoch == 0)
        return;
    m->saved.view_epoch = 0;
    memset(m->saved.members, 0, sizeof m->saved.members);
    m->unsaved = true;
}

/* A view that lasted less than a lease counts as a failed attempt. A group that repeatedly falls
 * apart thus gives up, like one that never forms. If the next view does without a lost slot, this
 * is no such failure: there are only so many slots. */
static void end_view(struct moe_membership *m, bool shrinks)
{
    m->past.lease_end_ns = MOE_NEVER;
    m->past.settled = m->saved.settled = false;
    for (uint32_t s = 0; s < SLOTS_MAX; s++)
        m->past.incarnations[s] = (m->view_live >> s & 1) != 0 ? m->members[s].incarnation : 0;
    bool stable = m->now_ns - m->view_since_ns >= m->config.lease_ns;
    m->view_epoch = 0;
    const struct moe_status why =
        moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "the view ended meanwhile");
    moe_membership__abandon_scaling(m, &why);
    m->mask_from_ns = m->now_ns + (m->restoring && m->trains ? m->config.lease_ns : 0);
    m->degraded = true;
    m->restoring = false;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        m->members[s].unverified = false;
        if (stable && (m->view_live >> s & 1) != 0 && m->now_ns >= m->members[s].excluded_until_ns)
            m->members[s].strikes = 0;
    }
    if (stable)
        m->attempts = 0;
    else if (!m->failed && !shrinks)
        back_off(m);
}

/* A change that somebody wants, no failure: operators need not look for its reason. */
static bool is_intended(enum moe_membership_cause cause)
{
    return cause == MOE_CAUSE_SCALED || cause == MOE_CAUSE_GROWN || cause == MOE_CAUSE_LEFT;
}

void moe_membership__end_epoch(struct moe_membership *m, enum moe_membership_cause cause,
                               const char *why)
{
    bool forming = m->phase != PHASE_IDLE;
    if (m->view_epoch == 0 && !forming)
        return;
    uint64_t epoch = forming ? m->epoch : m->view_epoch;
    bool at_once = m->view_epoch != 0 || m->now_ns >= m->mask_from_ns;
    bool shrinks = m->planned || (m->shrinks && moe_membership__may_shrink(m) && at_once &&
                                  suffice(m, moe_membership__able_slots(m)));
    m->shrinks = m->planned = false;
    moe_membership_copy_text(m->trouble, sizeof m->trouble, why);
    m->causes[cause]++;
    moe_membership__log(m, is_intended(cause) ? MOE_LOG_INFO : MOE_LOG_WARN, MOE_EVENT_ENDED,
                        MOE_MEMBERSHIP_NO_SLOT, "epoch %" PRIu64 " ends: %s", epoch, why);
    for (uint32_t s = 0; m->phase != PHASE_SAVE_EPOCH && s < m->config.slots; s++) {
        struct moe_membership_action *a = moe_membership__takes_part(m, s)
                                              ? moe_membership__send(m, s, MOE_MEMBERSHIP_ABORT)
                                              : NULL;
        if (a == NULL)
            continue;
        a->epoch = epoch;
        moe_membership_copy_text(a->status.text, sizeof a->status.text, why);
    }
    if (forming) {
        forget_session(m);
        memcpy(m->saved.last_members, m->past.incarnations, sizeof m->saved.last_members);
    }
    m->awaited_save = 0;
    m->phase = PHASE_IDLE;
    if (forming && (cause == MOE_CAUSE_CANNOT_GO_BACK || cause == MOE_CAUSE_NOT_SAVED))
        await_operator(m);
    else if (forming && cause == MOE_CAUSE_NO_TRANSPORT)
        end_for_good(m);
    else if (forming && shrinks)
        m->next_try_ns = m->now_ns;
    else if (forming)
        back_off(m);
    else
        end_view(m, shrinks);
    forget_saved_view(m);
}

/* ------------------------------------------------------------------ start of an epoch */

/* A process of the last view that is here joins the new one, and so has left that view: without it,
 * no change of that view completes. */
static bool has_survivor(const struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        for (uint32_t p = 0; p < SLOTS_MAX; p++)
            if (m->members[s].state == SLOT_TAKEN &&
                m->members[s].incarnation == m->past.incarnations[p])
                return true;
    return false;
}

bool moe_membership__fenced(const struct moe_membership *m)
{
    return m->trains && m->view_epoch == 0 && !m->past.settled &&
           m->now_ns < m->past.lease_end_ns && !has_survivor(m);
}

/* During a scaling, slots outside of the view have room for their next share only. */
static void assign(struct moe_membership *m)
{
    bool scaling = m->next.places != 0;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct member *member = &m->members[s];
        if (member->assigned || member->draining || !moe_membership__is_place(m, s) ||
            (scaling && (m->view_live >> s & 1) == 0))
            continue;
        if (moe_membership__assign(m, s, moe_placement_version(m->placement), false))
            member->assigned = true;
    }
}

static uint64_t form_limit(const struct moe_membership *m)
{
    uint64_t leases = 2 * m->config.lease_ns;
    return moe_membership__may_shrink(m) && leases < m->config.form_ns ? leases : m->config.form_ns;
}

static void begin_epoch(struct moe_membership *m, uint64_t live)
{
    m->operator_decided = false;
    m->saved.epoch++;
    m->epoch = m->saved.epoch;
    m->live = live;
    m->masks = can_mask(m, live);
    m->phase = PHASE_SAVE_EPOCH;
    m->form_deadline_ns = m->now_ns + form_limit(m);
    moe_membership__save(m, true);
}

/* Slots with a worker that may still load. */
static uint64_t loading_slots(const struct moe_membership *m)
{
    uint64_t loading = 0;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        bool done = member->loaded || member->load_failed;
        bool place = moe_membership__is_place(m, s);
        loading |= (uint64_t)(place && member->state == SLOT_TAKEN && !done) << s;
    }
    return loading;
}

/* After a restart, members have a lease to come back. In a group that trains, one that is a moment
 * late would lose its state: the others wait for all members of the last view. */
static bool all_heirs_are_back(const struct moe_membership *m, uint64_t slots)
{
    return m->degraded && (find_heirs(m, taken_slots(m)) & ~slots) == 0;
}

/* Slots that may serve without the others. */
static bool may_mask(const struct moe_membership *m, uint64_t slots)
{
    bool waits = m->now_ns < m->mask_from_ns && !all_heirs_are_back(m, slots);
    return slots == m->saved.places ||
           (MOE_GUARD(START_WAITS, !waits) && MOE_GUARD(MASK_COVERS, suffice(m, slots)));
}

/* The state that a checkpoint has, as the lowest of these slots reports it; NULL = none. `*all`:
 * the others report the same. All that report it hold changes back. */
static const struct moe_saved_training *find_saved(const struct moe_membership *m, uint64_t slots,
                                                   bool *all)
{
    const struct moe_saved_training *first = NULL;
    *all = true;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct moe_saved_training *saved = &m->members[s].last.training_saved;
        if ((slots >> s & 1) == 0)
            continue;
        first = first == NULL ? saved : first;
        *all = *all && saved->calls != 0 && moe_saved_training_same(saved, first);
    }
    return first != NULL && first->calls != 0 ? first : NULL;
}

/* A process without the state of training takes part once it has read the checkpoint that has that
 * state, or if the others cannot go on without it. */
static uint64_t leave_out_newcomers(const struct moe_membership *m, uint64_t able)
{
    bool all;
    uint64_t heirs = find_heirs(m, able);
    bool apart = m->trains && m->config.replicas > 1 && heirs != able && suffice(m, heirs);
    if (MOE_GUARD(NEWCOMERS_WAIT, !apart))
        return able;
    const struct moe_saved_training *state = find_saved(m, heirs, &all);
    return heirs | (all ? moe_membership__find_readers(m, able & ~heirs, state) : 0);
}

/* The view in force may end for one of these slots. A view that serves grows only: a member that
 * cannot take part any more, but has not left, keeps it. */
static bool may_grow(const struct moe_membership *m, uint64_t able)
{
    bool has_all = MOE_GUARD(GROWTH_KEEPS_MEMBERS, (m->view_live & ~able) == 0);
    bool scaling = m->next.places != 0; /* would lose what its members have loaded */
    return !m->restoring && !scaling && has_all;
}

/* As next_live, once they have the state. */
uint64_t moe_membership__newcomers(const struct moe_membership *m)
{
    uint64_t able = moe_membership__able_slots(m);
    bool wait = m->trains && m->view_epoch != 0 && may_grow(m, able) && m->now_ns >= m->next_try_ns;
    uint64_t newcomers = wait ? able & ~m->view_live : 0;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (!moe_membership__may_read(m, s))
            newcomers &= ~(UINT64_C(1) << s);
    return newcomers;
}

static void ask_newcomers(struct moe_membership *m)
{
    bool all;
    const struct moe_saved_training *state = find_saved(m, m->view_live, &all);
    if (m->trains && m->view_epoch != 0)
        moe_membership__ask_to_read(m, moe_membership__newcomers(m), state, all);
}

/* The slots of the view that should form now; 0 = none. */
static uint64_t next_live(const struct moe_membership *m)
{
    uint64_t able = leave_out_newcomers(m, moe_membership__able_slots(m));
    if (!may_mask(m, able))
        return 0;
    bool changes = able != m->view_live || moe_membership__is_replaced(m);
    if (m->view_epoch != 0)
        return changes && may_grow(m, able) ? able : 0;
    if (able != m->saved.places && !m->degraded && loading_slots(m) != 0)
        return 0; /* the group starts */
    return moe_membership__fenced(m) ? 0 : able;
}

/* Ends the view in force for one with more slots, or with another placement. */
static void end_smaller_view(struct moe_membership *m, uint64_t live)
{
    char why[MOE_MEMBERSHIP_REASON_BYTES], slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    if (m->view_epoch == 0)
        return;
    bool scaled = moe_membership__is_replaced(m);
    moe_membership__list_slots(slots, scaled ? live : live & ~m->view_live);
    snprintf(why, sizeof why, scaled ? "the experts move to %s" : "%s can take part", slots);
    m->shrinks = true; /* no failure */
    m->planned = scaled;
    moe_membership__end_epoch(m, scaled ? MOE_CAUSE_SCALED : MOE_CAUSE_GROWN, why);
}

/* The view from the log is in force again once its last member is back. */
static void check_restored(struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (m->members[s].unverified)
            return;
    m->restoring = false;
    m->view_since_ns = m->now_ns;
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_SERVING, MOE_MEMBERSHIP_NO_SLOT,
                        "all members of epoch %" PRIu64 " are back", m->view_epoch);
}

void moe_membership__advance(struct moe_membership *m)
{
    if (m->shutting_down || m->phase != PHASE_IDLE || m->awaited_save != 0)
        return;
    if (m->restoring)
        check_restored(m);
    moe_membership__advance_scaling(m);
    if (m->awaited_save != 0)
        return;
    if (!may_mask(m, taken_slots(m)) || !m->model_known || m->failed || m->now_ns < m->next_try_ns)
        return;
    if (!m->placement_durable) {
        moe_membership__save(m, true);
        return;
    }
    assign(m);
    ask_newcomers(m);
    uint64_t live = next_live(m);
    if (live == 0)
        return;
    end_smaller_view(m, live);
    begin_epoch(m, live);
}

/* ------------------------------------------------------------------ progress of an epoch */

static void prepare(struct moe_membership *m)
{
    m->phase = PHASE_PREPARE;
    m->announced_epoch = m->epoch;
    m->prepared_ns = m->now_ns;
    m->answer_grace_ns = 0;
    m->ready_mask = 0;
    m->blob_mask = 0;
    m->round = 0;
    note_session(m);
    for (uint32_t s = 0; s < m->config.slots; s++) {
        m->blobs[s].length = 0;
        if (!moe_membership__takes_part(m, s))
            continue;
        struct moe_membership_action *a = moe_membership__send(m, s, MOE_MEMBERSHIP_PREPARE);
        MOE_INVARIANT(a != NULL); /* a lost stream would have ended the epoch */
        a->epoch = m->epoch;
        a->session_epoch = m->masks ? m->session.epoch : 0;
    }
    if (m->live == m->saved.places) {
        moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_PREPARING, MOE_MEMBERSHIP_NO_SLOT,
                            "preparing epoch %" PRIu64, m->epoch);
        return;
    }
    char without[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(without, m->saved.places & ~m->live);
    moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_PREPARING, MOE_MEMBERSHIP_NO_SLOT,
                        "preparing epoch %" PRIu64 " without %s", m->epoch, without);
}

static void commit(struct moe_membership *m)
{
    m->phase = PHASE_IDLE;
    m->view_epoch = m->epoch;
    m->view_live = m->live;
    m->view_version = moe_placement_version(m->placement);
    m->view_since_ns = m->now_ns;
    m->degraded = false;
    m->waits = 0;
    m->reported_epoch = 0;
    m->operator_decided = false;
    m->trouble[0] = '\0';
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if ((m->view_live >> s & 1) == 0)
            continue;
        struct moe_membership_action *a = moe_membership__send(m, s, MOE_MEMBERSHIP_COMMIT);
        MOE_INVARIANT(a != NULL);
        a->epoch = m->view_epoch;
        m->members[s].error = moe_ok();
        m->members[s].missed = false;
        m->members[s].read_failures = 0;
    }
    moe_membership__forget_readers(m, m->view_live);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_SERVING, MOE_MEMBERSHIP_NO_SLOT,
                        "serving under epoch %" PRIu64, m->view_epoch);
}

void moe_membership_on_saved(struct moe_membership *m, uint64_t now_ns, uint64_t sequence,
                             const struct moe_status *status)
{
    moe_membership__set_time(m, now_ns);
    if (status->code != MOE_OK)
        moe_membership__log(m, MOE_LOG_ERROR, MOE_EVENT_NOT_SAVED, MOE_MEMBERSHIP_NO_SLOT,
                            "cannot save the group's state: %s", status->text);
    if (status->code == MOE_OK && sequence >= m->cordon_save)
        m->cordon_save = 0; /* a write has the whole state */
    if (sequence == m->next.version_save && !m->exited)
        moe_membership__version_saved(m, status);
    if (sequence != m->awaited_save || m->exited)
        return;
    m->awaited_save = 0;
    if (status->code != MOE_OK) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "cannot save the group's state: %s", status->text);
        if (m->phase != PHASE_IDLE) {
            moe_membership__end_epoch(m, MOE_CAUSE_NOT_SAVED, why);
        } else {
            moe_membership_copy_text(m->trouble, sizeof m->trouble, why);
            await_operator(m);
        }
        if (m->unsaved)
            moe_membership__save(m, false);
        return;
    }
    switch (m->phase) {
    case PHASE_IDLE:
        m->placement_durable = true;
        m->attempts = 0;
        m->trouble[0] = '\0';
        moe_membership__advance(m);
        break;
    case PHASE_SAVE_EPOCH: prepare(m); break;
    case PHASE_SAVE_VIEW: commit(m); break;
    case PHASE_PREPARE: break; /* no write is pending */
    }
}

/* ------------------------------------------------------------------ messages of members */

/* True when `epoch` is the one in preparation, with this slot. Messages about an ended epoch have
 * crossed with ABORT and are ignored. */
static bool prepares(const struct moe_membership *m, uint32_t slot, uint64_t epoch)
{
    return m->phase == PHASE_PREPARE && epoch == m->epoch && moe_membership__takes_part(m, slot);
}

void moe_membership__blob(struct moe_membership *m, uint32_t slot, uint64_t epoch, uint32_t round,
                          const uint8_t *data, size_t length)
{
    if (!prepares(m, slot, epoch))
        return;
    uint64_t bit = UINT64_C(1) << slot;
    const char *fault = length > MOE_MEMBERSHIP_BLOB_BYTES       ? "too large"
                        : round >= MOE_MEMBERSHIP_ROUNDS_MAX     ? "of too many rounds"
                        : round != m->round                      ? "of another round"
                        : ((m->blob_mask | m->ready_mask) & bit) ? "more than asked for"
                                                                 : NULL;
    if (fault != NULL) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "slot %u sent a blob %s", slot, fault);
        moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED, why);
        return;
    }
    m->blobs[slot].length = length;
    if (length > 0)
        memcpy(m->blobs[slot].data, data, length);
    m->blob_mask |= bit;
    if (m->blob_mask != m->live)
        return;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if ((m->live >> s & 1) == 0)
            continue;
        struct moe_membership_action *a = moe_membership__send(m, s, MOE_MEMBERSHIP_BLOBS);
        MOE_INVARIANT(a != NULL);
        a->epoch = m->epoch;
        a->round = m->round;
    }
    m->blob_mask = 0;
    m->round++;
}

static enum moe_membership_cause cause_of(const struct moe_status *error)
{
    return error->reason == MOE_REASON_CANNOT_GO_BACK ? MOE_CAUSE_CANNOT_GO_BACK
           : error->reason == MOE_REASON_UNSUPPORTED  ? MOE_CAUSE_NO_TRANSPORT
                                                      : MOE_CAUSE_NOT_FORMED;
}

void moe_membership__ready(struct moe_membership *m, uint32_t slot, uint64_t epoch,
                           uint64_t together, const struct moe_status *error)
{
    if (!prepares(m, slot, epoch))
        return;
    if (error->code != MOE_OK) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "slot %u: %s", slot, error->text);
        moe_membership__keep_error(&m->members[slot], error);
        if (error->reason == MOE_REASON_VERSION_MISMATCH) /* it is asked again to load */
            m->members[slot].assigned = m->members[slot].loaded = false;
        moe_membership__exclude(m, m->live & (together | ~m->view_live));
        m->shrinks = m->shrinks || m->masks; /* the next attempt is at once: a mask that fails is no
                                                failure of the group */
        if (m->masks && error->reason != MOE_REASON_PEER_LOST)
            memset(&m->session, 0, sizeof m->session);
        moe_membership__end_epoch(m, cause_of(error), why);
        return;
    }
    m->session.together[slot] = together;
    m->ready_mask |= UINT64_C(1) << slot;
    if (!MOE_GUARD(READY_OF_ALL, m->ready_mask == m->live))
        return;
    m->phase = PHASE_SAVE_VIEW;
    m->saved.view_epoch = m->epoch;
    m->saved.view_version = m->saved.placement_version;
    m->saved.settled = false;
    m->saved.slots = m->config.slots;
    memset(m->saved.members, 0, sizeof m->saved.members);
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if ((m->live >> s & 1) == 0)
            continue;
        memcpy(m->saved.members[s].worker_id, m->members[s].worker_id, MOE_MEMBERSHIP_ID_BYTES);
        m->saved.members[s].incarnation = m->members[s].incarnation;
    }
    for (uint32_t s = 0; s < SLOTS_MAX; s++)
        m->saved.last_members[s] = m->saved.members[s].incarnation;
    moe_membership__save(m, true);
}

void moe_membership__form_timeout(struct moe_membership *m)
{
    char why[MOE_MEMBERSHIP_REASON_BYTES], slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(slots, m->live & ~m->ready_mask);
    snprintf(why, sizeof why, "no READY in time from %s", slots);
    if (m->phase == PHASE_PREPARE)
        moe_membership__exclude(m, m->live & ~m->ready_mask);
    moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED,
                              m->phase == PHASE_PREPARE ? why : "saving the state took too long");
}

/* A worker answers PREPARE at once, however long its session takes to form. Several that have
 * stopped, or are cut off, are so found together, and not one after the other by their leases. */
static uint64_t find_silent(const struct moe_membership *m, uint64_t *slowest_ns)
{
    uint64_t silent = 0;
    *slowest_ns = 0;
    for (uint32_t s = 0; m->phase == PHASE_PREPARE && s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        uint64_t round_trip_ns = member->last.round_trip_ns;
        if ((m->live >> s & 1) == 0 || round_trip_ns == 0 ||
            member->last_message_ns > m->prepared_ns)
            continue;
        silent |= UINT64_C(1) << s;
        *slowest_ns = round_trip_ns > *slowest_ns ? round_trip_ns : *slowest_ns;
    }
    return silent;
}

uint64_t moe_membership__answer_deadline(const struct moe_membership *m)
{
    uint64_t slowest_ns, silent = find_silent(m, &slowest_ns);
    bool wait = silent == 0 || m->config.answer_ns == 0 || !moe_membership__may_shrink(m) ||
                !may_mask(m, moe_membership__able_slots(m) & ~silent);
    if (MOE_GUARD(PREPARE_IS_ANSWERED, wait))
        return MOE_NEVER;
    /* At most a part of the lease: a link that was away has slow round trips for a while. */
    uint64_t max_ns = m->config.lease_ns / ANSWERS_PER_LEASE;
    uint64_t limit_ns = max_ns;
    if (slowest_ns < max_ns)
        limit_ns = moe_earlier(max_ns, ROUND_TRIPS * slowest_ns + ANSWER_SLACK_NS);
    return m->prepared_ns + m->answer_grace_ns +
           (limit_ns > m->config.answer_ns ? limit_ns : m->config.answer_ns);
}

void moe_membership__answer_timeout(struct moe_membership *m)
{
    char why[MOE_MEMBERSHIP_REASON_BYTES], slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    uint64_t late_ns = m->now_ns - moe_membership__answer_deadline(m);
    /* This process was away: answers may wait in its sockets. It looks once more. */
    if (late_ns > ANSWER_SLACK_NS && m->answer_grace_ns == 0) {
        m->answer_grace_ns = late_ns + m->config.answer_ns;
        return;
    }
    uint64_t slowest_ns, silent = find_silent(m, &slowest_ns);
    moe_membership__list_slots(slots, silent);
    snprintf(why, sizeof why, "no answer to PREPARE from %s", slots);
    moe_membership__exclude(m, silent);
    moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED, why);
}

/* ------------------------------------------------------------------ moves */

bool moe_membership_may_move(const struct moe_membership *m)
{
    bool all = m->view_epoch != 0 && m->view_live == m->saved.places && m->phase == PHASE_IDLE &&
               m->awaited_save == 0 && !m->restoring && !m->shutting_down;
    for (uint32_t s = 0; all && s < m->config.slots; s++)
        all = !moe_membership__is_place(m, s) ||
              (m->members[s].loaded && !m->members[s].leaving && !m->members[s].draining);
    return all;
}

static void use(struct moe_membership *m, const struct moe_placement *p, bool moved)
{
    moe_placement_assign(m->placement, p);
    m->moved = moved;
    m->saved.placement_version = moe_placement_version(p);
    m->saved.placement_hash = moe_placement_content_hash(p);
    m->view_version = m->saved.view_version = moe_placement_version(p); /* the view goes on */
    if (m->saved.last_version < m->view_version)
        m->saved.last_version = m->view_version;
}

void moe_membership_move(struct moe_membership *m, const struct moe_placement *p)
{
    MOE_INVARIANT(moe_membership_may_move(m));
    moe_placement_assign(m->before, m->placement);
    m->moved_before = m->moved;
    use(m, p, true);
}

void moe_membership_undo_move(struct moe_membership *m)
{
    use(m, m->before, m->moved_before);
}
