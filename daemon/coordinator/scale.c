/* SPDX-License-Identifier: Apache-2.0 */
/* Which slots hold experts, and how that changes: the slots of the new placement load their shares
 * while the view in force goes on; then the placement becomes the active one, durably, and slots
 * that lost their place are drained. formation.c replaces the view. Until the placement is active,
 * any failure undoes the change, and nothing of it is in the log. */
#include "base/guard.h"
#include "coordinator/membership_state.h"

#include <stdio.h>
#include <string.h>

bool moe_membership__is_place(const struct moe_membership *m, uint32_t slot)
{
    return (m->saved.places >> slot & 1) != 0;
}

uint32_t moe_membership__size(const struct moe_membership *m)
{
    return (uint32_t)__builtin_popcountll(m->saved.places);
}

bool moe_membership__is_replaced(const struct moe_membership *m)
{
    return m->view_epoch != 0 && m->model_known &&
           m->view_version != moe_placement_version(m->placement);
}

uint32_t moe_membership__new_version(struct moe_membership *m)
{
    return ++m->saved.last_version;
}

/* What to do comes first: a list of many slots is cut. */
static struct moe_status being_scaled(const struct moe_membership *m)
{
    char to[MOE_MEMBERSHIP_SLOT_LIST_BYTES], loading[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(to, m->next.places);
    moe_membership__list_slots(loading, m->next.places & ~m->next.loaded);
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000,
                           "the group is being scaled: ask again when that is done, or undo it "
                           "with `moectl scale %u`. The experts move to %s; still loading: %s",
                           moe_membership__size(m), to, loading);
}

struct moe_status moe_membership__may_scale(const struct moe_membership *m)
{
    if (m->trains)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "a group that trains is not scaled: save a checkpoint, end the group, and "
                         "start it with another number of workers");
    if (m->has_models)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_IN_USE,
                         "a group with added models is not scaled: `moectl model unload` first");
    if (m->next.places != 0 && !m->shutting_down)
        return being_scaled(m);
    const char *busy = m->shutting_down ? "the group is shutting down"
                       : m->removed != 0
                           ? "workers that are not needed any more finish their requests"
                       : m->restoring ? "the coordinator waits for the members of the view"
                       : m->phase != PHASE_IDLE         ? "the group is forming"
                       : moe_membership__is_replaced(m) ? "another placement comes into force"
                       : m->awaited_save != 0           ? "the state of the group is being written"
                                                        : NULL;
    if (busy == NULL)
        return moe_ok();
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000, "%s; ask again", busy);
}

void moe_membership_set_models(struct moe_membership *m, bool has_models)
{
    m->has_models = has_models;
}

/* ------------------------------------------------------------------ a new placement */

static struct moe_status place_next(struct moe_membership *m, uint64_t places)
{
    struct moe_placement_layer layers[LAYERS_MAX];
    for (size_t i = 0; i < m->layer_count; i++)
        layers[i] = (struct moe_placement_layer){m->layers[i].layer, m->layers[i].experts};
    return moe_placement_set_linear(m->next.placement, moe_membership__new_version(m), places,
                                    m->config.replicas, layers, m->layer_count);
}

static void forget_next(struct moe_membership *m)
{
    m->next.places = m->next.asked = m->next.loaded = m->next.version_save = 0;
}

/* The next placement becomes the active one. Slots in `loaded` hold it. */
static void activate(struct moe_membership *m, uint64_t loaded)
{
    struct moe_placement *old = m->placement;
    m->placement = m->next.placement;
    m->next.placement = old;
    uint64_t lost = m->saved.places & ~m->next.places;
    m->saved.places = m->next.places;
    m->saved.placement_version = moe_placement_version(m->placement);
    m->saved.placement_hash = moe_placement_content_hash(m->placement);
    m->placement_durable = false;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct member *member = &m->members[s];
        member->assigned = member->loaded = (loaded >> s & 1) != 0;
        member->order = 0;
        member->load_failed = false;
        if ((lost >> s & 1) != 0 && member->state == SLOT_TAKEN)
            m->removed |= UINT64_C(1) << s;
    }
    forget_next(m);
    m->attempts = m->waits = 0;
    m->failed = false;
    m->next_try_ns = m->now_ns;
    m->scale_error = moe_ok();
    char slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(slots, m->saved.places);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_SCALED, MOE_MEMBERSHIP_NO_SLOT,
                        "the experts are on %s from now on", slots);
}

struct moe_status moe_membership__begin_scaling(struct moe_membership *m, uint64_t places,
                                                const char *reason)
{
    char clean[MOE_MEMBERSHIP_REASON_BYTES];
    char from[MOE_MEMBERSHIP_SLOT_LIST_BYTES], to[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    m->scale_error = moe_ok();
    MOE_TRY(place_next(m, places));
    moe_membership_copy_text(clean, sizeof clean, reason);
    moe_membership__list_slots(from, m->saved.places);
    moe_membership__list_slots(to, places);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_SCALING, MOE_MEMBERSHIP_NO_SLOT,
                        "scaling: the experts move from %s to %s: %s", from, to, clean);
    m->next.places = places;
    if (m->view_epoch == 0) {
        activate(m, 0);
        m->unsaved = true;
    } else if (!MOE_GUARD(VERSION_IS_SAVED, false)) {
        moe_membership__save(m, false);
        m->next.version_save = m->save_sequence;
    }
    return moe_ok();
}

void moe_membership__abandon_scaling(struct moe_membership *m, const struct moe_status *why)
{
    if (m->next.places == 0)
        return;
    m->scale_error = *why;
    moe_membership_copy_text(m->scale_error.text, sizeof m->scale_error.text, why->text);
    char slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(slots, m->saved.places);
    moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_NOT_SCALED, MOE_MEMBERSHIP_NO_SLOT,
                        "not scaled, the experts stay on %s: %s", slots, m->scale_error.text);
    /* Members of the view get their present share again, and free the rest. Others have dropped
     * what they had. */
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if ((m->next.asked >> s & 1) == 0 || !moe_membership__is_place(m, s))
            continue;
        m->members[s].assigned = false;
        if ((m->view_live >> s & 1) == 0)
            m->members[s].loaded = false;
    }
    forget_next(m);
}

/* ------------------------------------------------------------------ steps */

void moe_membership__version_saved(struct moe_membership *m, const struct moe_status *status)
{
    m->next.version_save = 0;
    if (status->code != MOE_OK) {
        struct moe_status why = moe_error_context(*status, "cannot save the group's state");
        moe_membership__abandon_scaling(m, &why);
    }
    moe_membership__advance(m);
}

void moe_membership__next_loaded(struct moe_membership *m, uint32_t slot,
                                 const struct moe_status *error)
{
    if (error->code == MOE_OK) {
        m->next.loaded |= UINT64_C(1) << slot;
        return;
    }
    struct moe_status why = *error;
    (void)snprintf(why.text, sizeof why.text, "slot %u: %.*s", slot, MOE_STATUS_TEXT - 16,
                   error->text);
    moe_membership__abandon_scaling(m, &why);
}

void moe_membership__note_lost_place(struct moe_membership *m, uint32_t slot)
{
    m->removed &= ~(UINT64_C(1) << slot);
    if (MOE_GUARD(LOSS_UNDOES_SCALING, (m->next.places >> slot & 1) == 0))
        return;
    const struct moe_status why =
        moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u has lost its worker", slot);
    moe_membership__abandon_scaling(m, &why);
}

/* No order or report about its present share is under way to or from the slot. */
static bool is_settled(const struct moe_membership *m, uint32_t slot)
{
    const struct member *member = &m->members[slot];
    if ((m->view_live >> slot & 1) != 0)
        return member->assigned && member->loaded;
    return !member->assigned || (member->order == 0 && (member->loaded || member->load_failed));
}

/* A process that reconnects is asked again. */
static void ask(struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        uint64_t bit = UINT64_C(1) << s;
        if ((m->next.places & bit) == 0 || (m->next.asked & bit) != 0 || !is_settled(m, s))
            continue;
        bool keep = (m->view_live >> s & 1) != 0;
        if (moe_membership__assign(m, s, moe_placement_version(m->next.placement), keep))
            m->next.asked |= bit;
    }
}

static void drain_removed(struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if ((m->removed >> s & 1) == 0 || m->members[s].draining)
            continue;
        moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_DRAINING, s,
                            "slot %u is drained: it holds no experts any more", s);
        moe_membership__drain(m, s, "the group needs fewer workers", 0);
    }
}

/* All that lost their place leave together, when the last has finished its requests: the view goes
 * on for those that have not. */
static void let_removed_go(struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (!MOE_GUARD(LEAVE_TOGETHER, (m->removed >> s & 1) == 0 || m->members[s].leaving))
            return;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if ((m->removed >> s & 1) != 0)
            moe_membership__lose(m, s, MOE_CAUSE_SCALED, "left: it holds no experts any more",
                                 moe_ok());
}

/* Workers that asked to leave, after the end of a move of their experts: as without the move. */
static void drain_waiting(struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct member *member = &m->members[s];
        bool moves = m->next.places != 0 || (m->removed >> s & 1) != 0;
        if (member->state != SLOT_TAKEN || !member->wants_to_leave || member->draining || moves)
            continue;
        moe_membership__begin_drain(m, s, "a worker leaves", "its experts could not move", 0);
    }
}

void moe_membership__advance_scaling(struct moe_membership *m)
{
    drain_waiting(m);
    if (m->next.places != 0) {
        if (m->next.version_save == 0)
            ask(m);
        if (MOE_GUARD(SCALE_LOADS_FIRST, (m->next.places & ~m->next.loaded) == 0))
            activate(m, m->next.places);
    }
    if (m->removed == 0 || !MOE_GUARD(PLACEMENT_IS_DURABLE, m->placement_durable))
        return;
    drain_removed(m);
    let_removed_go(m);
}

/* ------------------------------------------------------------------ operators */

/* Whether the slots that serve, or could, have every expert without this one. */
bool moe_membership__spares(const struct moe_membership *m, uint32_t slot)
{
    uint64_t others = moe_membership__able_slots(m) & ~(UINT64_C(1) << slot);
    return moe_membership__covers(m, others);
}

/* The experts of the slot go to others before its worker leaves. */
bool moe_membership__moves_first(const struct moe_membership *m, uint32_t slot)
{
    bool can_move = m->config.size != 0 && moe_membership__is_place(m, slot) &&
                    m->view_epoch != 0 && !m->trains;
    return can_move && !m->members[slot].draining && !moe_membership__spares(m, slot);
}

/* Its worker does not leave. */
static bool stays(const struct member *member)
{
    return member->state == SLOT_TAKEN && !member->draining && !member->leaving &&
           !member->wants_to_leave;
}

/* The places without this one, and without workers that leave: with a spare worker instead if
 * there is one. */
struct moe_status moe_membership__find_other_places(const struct moe_membership *m, uint32_t slot,
                                                    uint64_t *places)
{
    uint64_t rest = m->saved.places & ~(UINT64_C(1) << slot);
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        if (member->state == SLOT_TAKEN && !stays(member))
            rest &= ~(UINT64_C(1) << s);
    }
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        if (moe_membership__is_place(m, s) || !stays(member) || member->stream == 0 ||
            moe_membership__is_cordoned(m, s))
            continue;
        rest |= UINT64_C(1) << s;
        break;
    }
    if ((uint32_t)__builtin_popcountll(rest) < m->config.replicas)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_EXPERT_UNAVAILABLE,
                         "slot %u has the last copy of some experts, and too few others can take "
                         "them",
                         slot);
    for (uint32_t s = 0; s < m->config.slots; s++)
        if ((rest >> s & 1) != 0 && m->members[s].state != SLOT_TAKEN)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_EXPERT_UNAVAILABLE,
                             "slot %u has the last copy of some experts, and slot %u has no worker "
                             "to take some",
                             slot, s);
    *places = rest;
    return moe_membership__may_scale(m);
}

struct moe_status moe_membership__move_away(struct moe_membership *m, uint64_t now_ns,
                                            uint32_t slot, const char *reason, uint64_t *epoch)
{
    uint64_t places;
    struct moe_status st = moe_membership__find_other_places(m, slot, &places);
    if (st.reason == MOE_REASON_EXPERT_UNAVAILABLE)
        return moe_error(st.code, st.reason, "%s: --force drains it nevertheless", st.text);
    MOE_TRY(st);
    if (!moe_membership__begin_input(m, now_ns))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_DRAINING, "the group has shut down");
    *epoch = m->view_epoch;
    st = moe_membership__begin_scaling(m, places, reason);
    moe_membership__end_input(m);
    return st;
}

/* Slots that can hold experts come first: those that do, spares, then empty ones. A view in force
 * cannot wait for a worker. */
static uint64_t choose_places(const struct moe_membership *m, uint32_t size)
{
    uint64_t chosen = 0;
    uint32_t count = 0;
    for (int rank = 0; rank < (m->view_epoch != 0 ? 2 : 4); rank++)
        for (uint32_t s = 0; s < m->config.slots && count < size; s++) {
            const struct member *member = &m->members[s];
            bool place = moe_membership__is_place(m, s);
            if (rank != (stays(member) ? 0 : 2) + (place ? 0 : 1) ||
                (!place && moe_membership__is_cordoned(m, s)))
                continue;
            chosen |= UINT64_C(1) << s;
            count++;
        }
    return chosen;
}

static struct moe_status check_size(const struct moe_membership *m, uint32_t size)
{
    if (m->config.size == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the group has a fixed size: with --max-workers, it could be scaled");
    if (size < 1 || size > m->config.slots)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "this group can have 1 to %u workers (--max-workers), not %u",
                         m->config.slots, size);
    if (size < m->config.replicas)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "%u workers cannot hold %u copies of each expert", size,
                         m->config.replicas);
    return moe_ok();
}

struct moe_status moe_membership_scale(struct moe_membership *m, uint64_t now_ns, uint32_t size,
                                       const char *reason)
{
    MOE_TRY(moe_membership__check_reason(reason));
    MOE_TRY(check_size(m, size));
    bool undo = m->next.places != 0 && size == moe_membership__size(m);
    if (!undo)
        MOE_TRY(moe_membership__may_scale(m));
    uint64_t places = choose_places(m, size);
    uint32_t found = (uint32_t)__builtin_popcountll(places);
    if (!undo && found < size)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "%u workers can hold experts: start %u more, which wait as spares", found,
                         size - found);
    if (!moe_membership__begin_input(m, now_ns))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_DRAINING, "the group has shut down");
    struct moe_status st = moe_ok();
    if (undo) {
        st = moe_error(MOE_ABORTED, MOE_REASON_NONE, "an operator has ended it");
        moe_membership__abandon_scaling(m, &st);
        st = moe_ok();
    } else if (places != m->saved.places) {
        st = moe_membership__begin_scaling(m, places, reason);
    }
    moe_membership__end_input(m);
    return st;
}
