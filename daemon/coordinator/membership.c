/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs of the machine, and its life from the log to the shutdown. */
#include "base/guard.h"
#include "coordinator/membership_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* When a worker reports a higher epoch than ours, our state was lost: epochs continue from its
 * number. A number above this limit is an error of the worker. */
#define EPOCH_PLAUSIBLE (UINT64_C(1) << 48)

#define REFUSALS_EVERY_NS (30 * MOE_NS_PER_S)

/* ------------------------------------------------------------------ life of the machine */

/* Workers may still hold a lease that is longer than the present one. */
static uint64_t extra_lease(const struct moe_membership *m)
{
    uint64_t saved_ns = m->saved.lease_ms * MOE_NS_PER_MS;
    return saved_ns > m->config.lease_ns ? saved_ns - m->config.lease_ns : 0;
}

/* What the log says of views that are over. Without a record of a settled end, unknown workers may
 * hold a lease of the last one. */
static void restore_past(struct moe_membership *m)
{
    m->past.settled = m->saved.epoch == 0 || m->saved.settled;
    m->past.lease_end_ns = m->now_ns + m->config.lease_ns + extra_lease(m);
    if (m->saved.group_id == 0)
        m->saved.group_id = m->config.group_id;
    m->saved.lease_ms = (uint32_t)(m->config.lease_ns / MOE_NS_PER_MS);
    memcpy(m->past.incarnations, m->saved.last_members, sizeof m->past.incarnations);
}

/* A group of a fixed size has all of its slots. One that was scaled, and has lost its
 * --max-workers, is such a group again: the operator learns what that changes. */
static void say_fixed(struct moe_membership *m, uint64_t before)
{
    char was[MOE_MEMBERSHIP_SLOT_LIST_BYTES], is[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    if (before == 0 || before == m->saved.places)
        return;
    moe_membership__list_slots(was, before);
    moe_membership__list_slots(is, m->saved.places);
    moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_SCALED, MOE_MEMBERSHIP_NO_SLOT,
                        "the experts were on %s, and are on %s now: without --max-workers, "
                        "--workers is the size of the group",
                        was, is);
}

static struct moe_status restore_places(struct moe_membership *m)
{
    uint64_t before = m->saved.places, all = moe_placement_first_slots(m->config.slots);
    bool fixed = m->config.size == 0;
    uint64_t first = fixed ? all : moe_placement_first_slots(m->config.size);
    if (fixed || m->saved.places == 0)
        m->saved.places = first;
    if ((m->saved.places & ~all) != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "slot %u of the group holds experts, and it can have %u workers",
                         moe_placement_slot_bound(m->saved.places) - 1, m->config.slots);
    if (m->config.replicas > moe_membership__size(m))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%u workers hold the experts of the group, too few for %u replicas",
                         moe_membership__size(m), m->config.replicas);
    if (fixed)
        say_fixed(m, before);
    char slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(slots, m->saved.places);
    if (m->saved.places != first)
        moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_SCALED, MOE_MEMBERSHIP_NO_SLOT,
                            "the group was scaled: the experts are on %s", slots);
    return moe_ok();
}

/* A smaller group has fewer slots. */
static void restore_cordons(struct moe_membership *m)
{
    m->saved.cordoned &= UINT64_MAX >> (SLOTS_MAX - m->config.slots);
    for (uint32_t s = 0; s < SLOTS_MAX; s++)
        if (!moe_membership__is_cordoned(m, s))
            memset(m->saved.cordon_reasons[s], 0, sizeof m->saved.cordon_reasons[s]);
}

/* Other settings than before may not allow it any more. */
static void restore_placement(struct moe_membership *m, const struct moe_placement *p)
{
    if (p == NULL || m->config.size != 0 || moe_placement_slots(p) != m->config.slots ||
        !moe_placement_fits(p, m->config.replicas, m->config.spare))
        return;
    moe_placement_assign(m->placement, p);
    m->moved = true;
}

/* The members of the view in the log keep their slots for one lease without a message. */
static void restore_view(struct moe_membership *m)
{
    uint64_t live = 0;
    for (uint32_t s = 0; s < m->config.slots; s++)
        live |= (uint64_t)(m->saved.members[s].incarnation != 0) << s;
    if (m->saved.view_version == 0)
        m->saved.view_version = m->saved.placement_version;
    bool covers =
        moe_membership__covers(m, live) || m->saved.view_version != m->saved.placement_version;
    bool fits = m->config.size != 0 ? m->saved.slots <= m->config.slots /* --max-workers may rise */
                                    : m->saved.slots == m->config.slots;
    if (!fits || !(m->config.partial || covers))
        m->saved.view_epoch = 0; /* the size of the group, or what it allows, has changed */
    if (m->saved.view_epoch == 0) {
        memset(m->saved.members, 0, sizeof m->saved.members);
        m->saved.slots = m->config.slots;
        return;
    }
    m->view_epoch = m->saved.view_epoch;
    m->view_live = live;
    m->view_version = m->saved.view_version;
    m->removed = live & ~m->saved.places; /* they were about to leave */
    m->view_since_ns = m->now_ns;
    m->restoring = true;
    m->session.restored = m->view_epoch;
    m->session.live = live;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct member *member = &m->members[s];
        if ((live >> s & 1) == 0)
            continue;
        member->state = SLOT_TAKEN;
        memcpy(member->worker_id, m->saved.members[s].worker_id, sizeof member->worker_id);
        member->incarnation = m->saved.members[s].incarnation;
        m->session.incarnations[s] = member->incarnation;
        member->last_message_ns = m->now_ns + extra_lease(m);
        member->unverified = true;
        moe_membership__remember(m, member);
    }
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_RESTORING, MOE_MEMBERSHIP_NO_SLOT,
                        "waiting for the members of epoch %" PRIu64, m->view_epoch);
}

struct moe_status moe_membership_create(const struct moe_membership_config *config,
                                        const struct moe_membership_saved *saved, uint64_t now_ns,
                                        struct moe_membership **out)
{
    if (config->slots < 1 || config->slots > SLOTS_MAX || config->lease_ns == 0 ||
        config->form_ns == 0 || config->attempts_max == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a group has 1..%d slots, and times above 0", SLOTS_MAX);
    uint32_t size = config->size != 0 ? config->size : config->slots;
    if (size > config->slots)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "of %u workers, %u cannot hold experts", config->slots, size);
    if (config->replicas < 1 || config->replicas > size)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a group of %u slots can have 1..%u replicas, not %u", size, size,
                         config->replicas);
    if (config->size != 0 && config->spare != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a group that can be scaled (--max-workers) has no places for moves of "
                         "experts (--spare-experts)");
    struct moe_membership *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "membership");
    struct moe_status st = moe_placement_create(&m->placement);
    if (st.code == MOE_OK)
        st = moe_placement_create(&m->next.placement);
    if (st.code == MOE_OK)
        st = moe_placement_create(&m->before);
    if (st.code != MOE_OK)
        goto fail;
    m->config = *config;
    m->config.placement = NULL;
    m->now_ns = now_ns;
    m->last_order = now_ns; /* most likely unlike those before a restart */
    m->saved = *saved;
    m->announced_epoch = saved->epoch;
    if (m->saved.last_version < saved->placement_version)
        m->saved.last_version = saved->placement_version;
    m->placement_durable = saved->placement_version != 0;
    m->mask_from_ns = now_ns + config->lease_ns;
    MOE_TRY_GOTO(st, restore_places(m), fail);
    restore_placement(m, config->placement);
    restore_view(m);
    restore_cordons(m);
    restore_past(m);
    *out = m;
    return moe_ok();
fail:
    moe_membership_destroy(m);
    return st;
}

void moe_membership_destroy(struct moe_membership *m)
{
    if (m == NULL)
        return;
    moe_placement_destroy(m->placement);
    moe_placement_destroy(m->next.placement);
    moe_placement_destroy(m->before);
    free(m);
}

bool moe_membership__begin_input(struct moe_membership *m, uint64_t now_ns)
{
    MOE_INVARIANT(m->action_count == 0);
    moe_membership__set_time(m, now_ns);
    return !m->exited;
}

static void settle_shutdown(struct moe_membership *m)
{
    bool all_left = true;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        if (member->state == SLOT_TAKEN && !member->leaving)
            all_left = false;
        if (member->state == SLOT_TAKEN && !member->leaving && m->now_ns >= m->shutdown_deadline_ns)
            moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_LOST, s, "slot %u did not leave in time",
                                s);
    }
    if (!all_left && m->now_ns < m->shutdown_deadline_ns)
        return;
    bool settled = all_left && (m->view_epoch != 0 || !moe_membership__fenced(m));
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct member *member = &m->members[s];
        if (member->state == SLOT_TAKEN && member->stream != 0)
            moe_membership__close(m, member->stream, moe_ok());
        if (member->state == SLOT_TAKEN)
            member->state = SLOT_LEFT;
        member->stream = 0;
    }
    if (m->saved.view_epoch != 0 || (settled && m->saved.epoch != 0)) {
        m->saved.view_epoch = 0;
        m->saved.settled = settled;
        moe_membership__save(m, false);
    }
    m->view_epoch = 0;
    m->exited = true;
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_ENDING, MOE_MEMBERSHIP_NO_SLOT,
                        "the group has shut down");
    moe_membership__emit(m, MOE_MEMBERSHIP_EXIT);
}

void moe_membership__end_input(struct moe_membership *m)
{
    if (m->exited)
        return;
    moe_membership__advance(m);
    if (m->unsaved)
        moe_membership__save(m, false);
    if (m->shutting_down)
        settle_shutdown(m);
}

/* Begins the input of a member and renews its lease. Ends a stream without a slot. */
static bool begin_member_input(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                               uint32_t *slot)
{
    if (!moe_membership__begin_input(m, now_ns))
        return false;
    if (!moe_membership__find_stream(m, stream, slot)) {
        moe_membership__close(m, stream,
                              moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                                        "the stream has no slot: send Register first"));
        return false;
    }
    struct member *member = &m->members[*slot];
    if (now_ns > member->last_message_ns)
        member->last_message_ns = now_ns;
    return true;
}

/* A refused worker retries: refusals with the same code within REFUSALS_EVERY_NS give one line. */
static void log_refusal(struct moe_membership *m, const struct moe_status *st)
{
    bool repeated = m->refused_ns != 0 && m->refused_code == st->code;
    if (repeated && m->now_ns < m->refused_ns + REFUSALS_EVERY_NS) {
        m->refusals_unlogged++;
        return;
    }
    if (m->refusals_unlogged > 0)
        moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_REFUSED, MOE_MEMBERSHIP_NO_SLOT,
                            "refused a worker: %s (%u more before)", st->text,
                            m->refusals_unlogged);
    else
        moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_REFUSED, MOE_MEMBERSHIP_NO_SLOT,
                            "refused a worker: %s", st->text);
    m->refused_ns = m->now_ns;
    m->refused_code = st->code;
    m->refusals_unlogged = 0;
}

void moe_membership_on_register(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                const struct moe_membership_register *r)
{
    if (!moe_membership__begin_input(m, now_ns))
        return;
    struct moe_status st = moe_membership__register(m, stream, r);
    if (st.code != MOE_OK) {
        log_refusal(m, &st);
        uint32_t slot;
        if (!moe_membership__find_stream(m, stream, &slot))
            moe_membership__close(m, stream, st);
        else
            moe_membership__lose(m, slot, MOE_CAUSE_OUT_OF_STEP, "broke the protocol", st);
    }
    moe_membership__end_input(m);
}

/* ------------------------------------------------------------------ messages of members */

/* Sends ABORT to a worker that was disconnected when its epoch ended and still serves it. A worker
 * that has already left the epoch ignores the message. */
static void abort_stale(struct moe_membership *m, uint32_t slot, uint64_t epoch)
{
    struct moe_membership_action *a = moe_membership__send(m, slot, MOE_MEMBERSHIP_ABORT);
    if (a == NULL)
        return;
    a->epoch = epoch;
    moe_membership_copy_text(a->status.text, sizeof a->status.text, "this epoch is over");
}

/* How long the member of the view, or of the group, has been silent that was silent for longest.
 * After a restart that is not known until all are back. */
static uint32_t oldest_ms(const struct moe_membership *m)
{
    uint64_t oldest_ns = 0;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        uint64_t silent_ns =
            member->last_message_ns < m->now_ns ? m->now_ns - member->last_message_ns : 0;
        if (member->unverified)
            silent_ns = m->config.lease_ns;
        bool counts = m->view_epoch == 0 || (m->view_live >> s & 1) != 0;
        if (counts && member->state == SLOT_TAKEN && silent_ns > oldest_ns)
            oldest_ns = silent_ns;
    }
    return (uint32_t)((oldest_ns + MOE_NS_PER_MS - 1) / MOE_NS_PER_MS);
}

static void answer_heartbeat(struct moe_membership *m, uint32_t slot, uint64_t sequence)
{
    struct moe_membership_action *a =
        moe_membership__send(m, slot, MOE_MEMBERSHIP_HEARTBEAT_ANSWER);
    if (a == NULL)
        return;
    a->sequence = sequence;
    a->oldest_ms = oldest_ms(m);
    uint64_t newcomers = moe_membership__newcomers(m);
    a->keep = moe_membership__free_to_read(m, newcomers) != 0;
    a->released_calls = moe_membership__released_calls(m, newcomers);
    struct moe_saved_training *saved = &m->members[slot].last.training_saved;
    if (!a->keep || a->released_calls == saved->calls)
        *saved = (struct moe_saved_training){0}; /* the member holds it no longer */
}

void moe_membership_on_heartbeat(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                 const struct moe_membership_heartbeat *h)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    struct member *member = &m->members[slot];
    member->last = *h;
    if (h->epoch == 0 || h->epoch == m->view_epoch)
        member->silent = false;
    if (h->epoch > m->saved.epoch && h->epoch < EPOCH_PLAUSIBLE) {
        moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_ADOPTED, slot,
                            "slot %u knows epoch %" PRIu64
                            ", later than ours: continuing from there",
                            slot, h->epoch);
        if (m->phase != PHASE_IDLE)
            moe_membership__end_epoch(m, MOE_CAUSE_OUT_OF_STEP, "a worker knows a later epoch");
        m->saved.epoch = h->epoch;
    }
    if (member->unverified && h->epoch == m->view_epoch) {
        member->unverified = false;
    } else if (member->unverified) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "slot %u came back without the epoch in force", slot);
        moe_membership__end_epoch(m, MOE_CAUSE_OUT_OF_STEP, why);
    }
    if (h->epoch != 0 && h->epoch != m->view_epoch)
        abort_stale(m, slot, h->epoch);
    else
        answer_heartbeat(m, slot, h->sequence);
    moe_membership__end_input(m);
}

void moe_membership_on_loaded(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                              uint32_t placement_version, uint64_t order,
                              const struct moe_status *error)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    struct member *member = &m->members[slot];
    bool awaited = moe_membership_awaits(m, slot, placement_version, order);
    bool ours = awaited && placement_version == moe_placement_version(m->placement);
    if (awaited && !ours)
        moe_membership__next_loaded(m, slot, error);
    if (awaited)
        member->order = 0;
    if (ours && error->code == MOE_OK) {
        member->loaded = true;
        member->load_failed = false;
        if (m->trains && m->view_epoch != 0 && (m->view_live >> slot & 1) == 0)
            moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_JOINED, slot,
                                "slot %u takes part once a checkpoint has the present state of "
                                "training (SaveCheckpoint)",
                                slot);
    } else if (ours && !member->loaded) {
        member->load_failed = true;
        moe_membership__keep_error(member, error);
        moe_membership__log(m, MOE_LOG_ERROR, MOE_EVENT_LOAD_FAILED, slot,
                            "slot %u cannot load: %s", slot, error->text);
    }
    moe_membership__end_input(m);
}

void moe_membership_on_checkpoint_read(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                       uint64_t order, const struct moe_status *error)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    moe_membership__checkpoint_read(m, slot, order, error);
    moe_membership__end_input(m);
}

void moe_membership_on_digests(struct moe_membership *m, uint64_t now_ns, uint64_t stream)
{
    uint32_t slot;
    if (begin_member_input(m, now_ns, stream, &slot))
        moe_membership__end_input(m);
}

void moe_membership_on_wrong_weights(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                     const struct moe_status *why)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    char what[MOE_MEMBERSHIP_REASON_BYTES];
    snprintf(what, sizeof what, "was refused: %s", why->text);
    moe_membership__lose(m, slot, MOE_CAUSE_WRONG_WEIGHTS, what, *why);
    moe_membership__keep_error(&m->members[slot], why);
    moe_membership__end_input(m);
}

void moe_membership_on_blob(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                            uint64_t epoch, uint32_t round, const uint8_t *data, size_t length)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    moe_membership__blob(m, slot, epoch, round, data, length);
    moe_membership__end_input(m);
}

void moe_membership_on_ready(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                             uint64_t epoch, uint64_t together, const struct moe_status *error)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    moe_membership__ready(m, slot, epoch, together, error);
    moe_membership__end_input(m);
}

static void lose_missed(struct moe_membership *m, uint32_t slot)
{
    moe_membership__lose(m, slot, MOE_CAUSE_PEER_LOST, "lost: disconnected and missed by its peers",
                         moe_ok());
}

/* Peers miss these slots. One is lost only if its stream is closed too, before or after. Any other
 * keeps its slot while it renews its lease, and may answer the next PREPARE; with replicas, the
 * next view does without it. */
static void miss(struct moe_membership *m, uint64_t slots)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if ((slots >> s & 1) == 0 || m->members[s].state != SLOT_TAKEN)
            continue;
        m->members[s].missed = true;
        if (m->members[s].stream == 0)
            lose_missed(m, s);
    }
}

/* With replicas, views form without these slots for a while. */
static void suspect(struct moe_membership *m, uint64_t slots)
{
    moe_membership__exclude(m, slots);
    if (m->shrinks)
        m->suspects |= slots;
}

/* A member that reports the end of the view is there: an earlier report of it does not count. */
static void end_suspicion(struct moe_membership *m, uint32_t slot)
{
    struct member *member = &m->members[slot];
    member->missed = false;
    if ((m->suspects >> slot & 1) == 0)
        return;
    m->suspects &= ~(UINT64_C(1) << slot);
    member->silent = false;
    member->excluded_until_ns = 0;
    if (member->strikes > 0)
        member->strikes--;
}

/* The failed step ends the epoch. */
static void end_by_peer(struct moe_membership *m, uint32_t slot, uint64_t slots)
{
    char why[MOE_MEMBERSHIP_REASON_BYTES], missed[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(missed, slots);
    if (slots != 0)
        snprintf(why, sizeof why, "slot %u got no answer from %s", slot, missed);
    else
        snprintf(why, sizeof why, "slot %u reports a failed step", slot);
    m->suspects = 0;
    suspect(m, slots & m->view_live & ~(UINT64_C(1) << slot));
    m->reported_epoch = m->view_epoch;
    m->reporters = UINT64_C(1) << slot;
    moe_membership__end_epoch(m, MOE_CAUSE_PEER_LOST, why);
}

/* Several members report the end of one view, and the first report may be the one that says least:
 * the sequencer learns from others that a step has failed, and a member that leaves the view may be
 * missed by one that does not know why. So each counts, once. Who reports is there. */
static void receive_another_report(struct moe_membership *m, uint32_t slot, uint64_t slots)
{
    char why[MOE_MEMBERSHIP_REASON_BYTES], missed[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    if (MOE_GUARD(LATER_REPORTS_COUNT, (m->reporters >> slot & 1) != 0))
        return;
    m->reporters |= UINT64_C(1) << slot;
    end_suspicion(m, slot);
    slots &= m->view_live & ~m->reporters;
    if (slots == 0)
        return;
    suspect(m, slots);
    bool forms_with = m->phase != PHASE_IDLE && (m->live & slots) != 0;
    moe_membership__list_slots(missed, slots);
    snprintf(why, sizeof why, "slot %u got no answer from %s", slot, missed);
    if (m->shrinks && m->phase == PHASE_IDLE)
        m->next_try_ns = m->now_ns;
    if (m->shrinks && forms_with)
        moe_membership__end_epoch(m, MOE_CAUSE_PEER_LOST, why);
    m->shrinks = false;
    miss(m, slots);
}

void moe_membership_on_peer_lost(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                 uint64_t epoch, uint64_t slots)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    if (m->view_epoch != 0 && epoch == m->view_epoch) {
        end_by_peer(m, slot, slots);
        miss(m, slots);
    } else if (epoch != 0 && epoch == m->reported_epoch && m->view_epoch == 0) {
        receive_another_report(m, slot, slots);
    }
    moe_membership__end_input(m);
}

void moe_membership__begin_drain(struct moe_membership *m, uint32_t slot, const char *why,
                                 const char *reason, uint32_t limit_ms)
{
    m->members[slot].draining = true;
    m->shrinks = true;
    if (m->phase != PHASE_IDLE && moe_membership__takes_part(m, slot))
        moe_membership__end_epoch(m, MOE_CAUSE_LEFT, why);
    m->shrinks = false;
    moe_membership__drain(m, slot, reason, limit_ms);
}

/* Its experts move to a spare first, if there is one. Without one the size would change, and a
 * worker that restarts would find no place. */
static bool move_before_leaving(struct moe_membership *m, uint32_t slot, const char *why)
{
    uint64_t places;
    if (!moe_membership__moves_first(m, slot))
        return false;
    struct moe_status st = moe_membership__find_other_places(m, slot, &places);
    if (st.code == MOE_OK && __builtin_popcountll(places) < __builtin_popcountll(m->saved.places))
        return false;
    if (st.code == MOE_OK)
        st = moe_membership__begin_scaling(m, places, why);
    if (st.code != MOE_OK) {
        moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_NOT_SCALED, slot,
                            "the experts of slot %u do not move: %s", slot, st.text);
        return false;
    }
    m->members[slot].wants_to_leave = true;
    struct moe_membership_action *a = moe_membership__send(m, slot, MOE_MEMBERSHIP_DRAIN);
    if (a != NULL) { /* without an answer, the worker soon drains by itself */
        a->keep = true;
        moe_membership_copy_text(a->status.text, sizeof a->status.text, why);
    }
    return true;
}

void moe_membership_on_drain_notice(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                    const char *reason)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    if (!m->members[slot].draining && !m->members[slot].wants_to_leave) {
        char clean[MOE_MEMBERSHIP_REASON_BYTES], why[MOE_MEMBERSHIP_REASON_BYTES];
        moe_membership_copy_text(clean, sizeof clean, reason);
        snprintf(why, sizeof why, "slot %u is leaving: %s", slot, clean);
        moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_DRAINING, slot, "%s", why);
        if (!move_before_leaving(m, slot, why))
            moe_membership__begin_drain(m, slot, why, clean, 0);
    }
    moe_membership__end_input(m);
}

void moe_membership_on_leaving(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                               const char *reason)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    m->members[slot].leaving = true;
    bool with_others = (m->removed >> slot & 1) != 0; /* scale.c ends the view for all */
    if (!m->shutting_down && !with_others) {
        char clean[MOE_MEMBERSHIP_REASON_BYTES], what[MOE_MEMBERSHIP_REASON_BYTES];
        moe_membership_copy_text(clean, sizeof clean, reason);
        snprintf(what, sizeof what, "left: %s", clean);
        moe_membership__lose(m, slot, MOE_CAUSE_LEFT, what, moe_ok());
    }
    moe_membership__end_input(m);
}

/* An operator's decision ends the wait for it. A forming epoch may have begun before the decision.
 */
void moe_membership_on_try_again(struct moe_membership *m, uint64_t now_ns, uint64_t stream)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    (void)moe_membership__send(m, slot, MOE_MEMBERSHIP_TRYING_AGAIN);
    m->operator_decided = m->phase != PHASE_IDLE;
    m->attempts = 0;
    m->waits = 0;
    m->failed = false;
    m->next_try_ns = m->now_ns;
    moe_membership__end_input(m);
}

/* The member may reconnect until its lease ends, unless its peers miss it too. */
void moe_membership_on_stream_closed(struct moe_membership *m, uint64_t now_ns, uint64_t stream)
{
    uint32_t slot;
    if (!moe_membership__begin_input(m, now_ns) || !moe_membership__find_stream(m, stream, &slot))
        return;
    m->members[slot].stream = 0;
    char why[MOE_MEMBERSHIP_REASON_BYTES];
    snprintf(why, sizeof why, "slot %u disconnected", slot);
    if (m->shutting_down) {
        moe_membership__lose(m, slot, MOE_CAUSE_LEFT, "left", moe_ok());
    } else if (m->members[slot].missed) {
        lose_missed(m, slot);
    } else {
        moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_DISCONNECTED, slot, "%s", why);
        m->shrinks = true;
        if (m->phase != PHASE_IDLE && moe_membership__takes_part(m, slot))
            moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED, why);
        m->shrinks = false;
    }
    moe_membership__end_input(m);
}

/* ------------------------------------------------------------------ time */

void moe_membership_on_tick(struct moe_membership *m, uint64_t now_ns)
{
    if (!moe_membership__begin_input(m, now_ns))
        return;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        if (member->state == SLOT_TAKEN && now_ns >= member->last_message_ns + m->config.lease_ns)
            moe_membership__lose(
                m, s, MOE_CAUSE_LEASE_EXPIRED, "lost: lease expired",
                moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_PEER_LOST, "the lease expired"));
    }
    if (m->phase != PHASE_IDLE && now_ns >= m->form_deadline_ns)
        moe_membership__form_timeout(m);
    else if (now_ns >= moe_membership__answer_deadline(m))
        moe_membership__answer_timeout(m);
    moe_membership__end_input(m);
}

uint64_t moe_membership_deadline(const struct moe_membership *m)
{
    if (m->exited)
        return MOE_NEVER;
    /* Ticks tell a pause of this process from silence of a worker: at least four in a lease. */
    uint64_t at = m->now_ns + m->config.lease_ns / 4;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (m->members[s].state == SLOT_TAKEN)
            at = moe_earlier(at, m->members[s].last_message_ns + m->config.lease_ns);
    if (moe_membership__fenced(m))
        at = moe_earlier(at, m->past.lease_end_ns);
    if (m->phase != PHASE_IDLE)
        at = moe_earlier(moe_earlier(at, m->form_deadline_ns), moe_membership__answer_deadline(m));
    else if (m->next_try_ns > m->now_ns)
        at = moe_earlier(at, m->next_try_ns);
    if (m->join.state.calls != 0 && m->join.deadline_ns > m->now_ns)
        at = moe_earlier(at, m->join.deadline_ns);
    if (m->shutting_down)
        at = moe_earlier(at, m->shutdown_deadline_ns);
    if (m->mask_from_ns > m->now_ns)
        at = moe_earlier(at, m->mask_from_ns);
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (m->members[s].excluded_until_ns > m->now_ns)
            at = moe_earlier(at, m->members[s].excluded_until_ns);
    return at;
}

/* ------------------------------------------------------------------ operators */

struct moe_status moe_membership__check_reason(const char *reason)
{
    if (reason[0] == '\0')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "a reason is required");
    return moe_ok();
}

struct moe_status moe_membership_drain(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                       const char *reason, uint32_t limit_ms, bool force,
                                       uint64_t *epoch)
{
    MOE_TRY(moe_membership__check_reason(reason));
    if (slot >= m->config.slots || m->members[slot].state != SLOT_TAKEN)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "slot %u has no worker", slot);
    if (!force && moe_membership__moves_first(m, slot))
        return moe_membership__move_away(m, now_ns, slot, reason, epoch);
    if (m->config.replicas > 1 && !force && !m->members[slot].draining &&
        !moe_membership__spares(m, slot))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_EXPERT_UNAVAILABLE,
                         "slot %u has the last copy of some experts: without it the group does "
                         "not serve; --force drains it nevertheless",
                         slot);
    if (!moe_membership__begin_input(m, now_ns))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_DRAINING, "the group has shut down");
    *epoch = m->view_epoch;
    if (!m->members[slot].draining) {
        char clean[MOE_MEMBERSHIP_REASON_BYTES], why[MOE_MEMBERSHIP_REASON_BYTES];
        moe_membership_copy_text(clean, sizeof clean, reason);
        snprintf(why, sizeof why, "slot %u is drained: %s", slot, clean);
        moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_DRAINING, slot, "%s", why);
        moe_membership__begin_drain(m, slot, why, clean, limit_ms);
    }
    moe_membership__end_input(m);
    return moe_ok();
}

struct moe_status moe_membership_shutdown(struct moe_membership *m, uint64_t now_ns,
                                          const char *reason, uint32_t limit_ms, uint64_t *epoch)
{
    MOE_TRY(moe_membership__check_reason(reason));
    *epoch = m->view_epoch;
    if (!moe_membership__begin_input(m, now_ns) || m->shutting_down)
        return moe_ok();
    moe_membership_copy_text(m->shutdown_reason, sizeof m->shutdown_reason, reason);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_ENDING, MOE_MEMBERSHIP_NO_SLOT,
                        "shutting down: %s", m->shutdown_reason);
    if (m->phase != PHASE_IDLE)
        moe_membership__end_epoch(m, MOE_CAUSE_LEFT, "the group is shutting down");
    m->shutting_down = true;
    /* At the limit, workers cancel their calls and need time to send Leaving. */
    uint64_t limit =
        limit_ms != 0 ? limit_ms * MOE_NS_PER_MS + m->config.lease_ns : m->config.shutdown_ns;
    m->shutdown_deadline_ns = m->now_ns + limit;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (m->members[s].state == SLOT_TAKEN && !m->members[s].draining)
            moe_membership__drain(m, s, m->shutdown_reason, limit_ms);
    moe_membership__end_input(m);
    return moe_ok();
}

/* ------------------------------------------------------------------ cordons */

bool moe_membership__is_cordoned(const struct moe_membership *m, uint32_t slot)
{
    return (m->saved.cordoned >> slot & 1) != 0;
}

const char *moe_membership_cordon_reason(const struct moe_membership *m, uint32_t slot)
{
    return moe_membership__is_cordoned(m, slot) ? m->saved.cordon_reasons[slot] : NULL;
}

bool moe_membership_cordons_saved(const struct moe_membership *m)
{
    return m->cordon_save == 0;
}

static struct moe_status check_cordon(const struct moe_membership *m, uint32_t slot,
                                      const char *reason)
{
    if (reason[0] == '\0')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "a reason is required");
    if (slot >= m->config.slots)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "the group has slots 0 to %u",
                         m->config.slots - 1);
    if (m->exited)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_DRAINING, "the group has shut down");
    return moe_ok();
}

static void save_cordons(struct moe_membership *m)
{
    moe_membership__save(m, false);
    m->cordon_save = m->save_sequence;
}

struct moe_status moe_membership_cordon(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                        const char *reason)
{
    MOE_TRY(check_cordon(m, slot, reason));
    moe_membership__set_time(m, now_ns);
    moe_membership_copy_text(m->saved.cordon_reasons[slot], MOE_MEMBERSHIP_CORDON_BYTES, reason);
    m->saved.cordoned |= UINT64_C(1) << slot;
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_CORDONED, slot, "slot %u is cordoned: %s", slot,
                        m->saved.cordon_reasons[slot]);
    save_cordons(m);
    return moe_ok();
}

struct moe_status moe_membership_uncordon(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                          const char *reason)
{
    char clean[MOE_MEMBERSHIP_CORDON_BYTES];
    MOE_TRY(check_cordon(m, slot, reason));
    moe_membership__set_time(m, now_ns);
    if (!moe_membership__is_cordoned(m, slot) && m->cordon_save == 0)
        return moe_ok();
    moe_membership_copy_text(clean, sizeof clean, reason);
    m->saved.cordoned &= ~(UINT64_C(1) << slot);
    memset(m->saved.cordon_reasons[slot], 0, sizeof m->saved.cordon_reasons[slot]);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_UNCORDONED, slot, "slot %u is uncordoned: %s",
                        slot, clean);
    save_cordons(m);
    return moe_ok();
}
