/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs of the machine: its clock, its actions and their texts, which the other files use; and
 * its state for operators, which only reads. */
#include "coordinator/membership_state.h"

#include <stdarg.h>
#include <stdio.h>

void moe_membership__set_time(struct moe_membership *m, uint64_t now_ns)
{
    if (now_ns <= m->now_ns)
        return;
    uint64_t pause = now_ns - m->now_ns;
    if (pause > m->config.lease_ns / 2)
        for (uint32_t s = 0; s < m->config.slots; s++)
            m->members[s].last_message_ns += pause;
    if (pause > m->config.lease_ns / 2)
        m->prepared_ns += pause;
    m->now_ns = now_ns;
}

/* ------------------------------------------------------------------ actions */

struct moe_membership_action *moe_membership__emit(struct moe_membership *m,
                                                   enum moe_membership_action_kind kind)
{
    MOE_INVARIANT(m->action_count < ACTIONS_MAX);
    size_t at = (m->action_head + m->action_count++) % ACTIONS_MAX;
    m->actions[at] = (struct moe_membership_action){.kind = kind};
    return &m->actions[at];
}

bool moe_membership_next_action(struct moe_membership *m, struct moe_membership_action *out)
{
    if (m->action_count == 0)
        return false;
    *out = m->actions[m->action_head];
    m->action_head = (m->action_head + 1) % ACTIONS_MAX;
    m->action_count--;
    return true;
}

void moe_membership_copy_text(char *to, size_t size, const char *from)
{
    size_t n = 0;
    for (; from[n] != '\0' && n + 1 < size; n++) {
        unsigned char c = (unsigned char)from[n];
        to[n] = c < 0x20 || c >= 0x7f ? '?' : (char)c;
    }
    to[n] = '\0';
}

void moe_membership_print_text(char *to, size_t size, const char *fmt, va_list args)
{
    char text[MOE_STATUS_TEXT];
    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        text[0] = '\0';
    moe_membership_copy_text(to, size, text);
}

void moe_membership__keep_error(struct member *member, const struct moe_status *error)
{
    member->error = *error;
    moe_membership_copy_text(member->error.text, sizeof member->error.text, error->text);
}

void moe_membership__list_slots(char to[MOE_MEMBERSHIP_SLOT_LIST_BYTES], uint64_t mask)
{
    bool many = (mask & (mask - 1)) != 0;
    size_t at = (size_t)snprintf(to, MOE_MEMBERSHIP_SLOT_LIST_BYTES, "slot%s", many ? "s" : "");
    const char *before = " ";
    for (unsigned s = 0; s < SLOTS_MAX; s++) {
        if ((mask >> s & 1) == 0)
            continue;
        at += (size_t)snprintf(to + at, MOE_MEMBERSHIP_SLOT_LIST_BYTES - at, "%s%u", before, s);
        before = ", ";
    }
}

void moe_membership__log(struct moe_membership *m, enum moe_log_level level,
                         enum moe_membership_event event, uint32_t slot, const char *fmt, ...)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_LOG);
    va_list args;
    a->level = level;
    a->event = event;
    a->slot = slot;
    va_start(args, fmt);
    moe_membership_print_text(a->status.text, sizeof a->status.text, fmt, args);
    va_end(args);
}

struct moe_membership_action *moe_membership__send(struct moe_membership *m, uint32_t slot,
                                                   enum moe_membership_message message)
{
    const struct member *member = &m->members[slot];
    if (member->state != SLOT_TAKEN || member->stream == 0)
        return NULL;
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_SEND);
    a->message = message;
    a->stream = member->stream;
    a->slot = slot;
    return a;
}

bool moe_membership__assign(struct moe_membership *m, uint32_t slot, uint32_t version, bool keep)
{
    struct moe_membership_action *a = moe_membership__send(m, slot, MOE_MEMBERSHIP_ASSIGN);
    if (a == NULL)
        return false;
    a->version = version;
    a->keep = keep;
    a->order = m->members[slot].order = ++m->last_order;
    return true;
}

void moe_membership__close(struct moe_membership *m, uint64_t stream, struct moe_status status)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_CLOSE);
    a->stream = stream;
    a->status = status;
}

void moe_membership__save(struct moe_membership *m, bool await)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_SAVE);
    a->sequence = ++m->save_sequence;
    m->unsaved = false; /* a write has the whole state */
    if (await)
        m->awaited_save = a->sequence;
}

/* ------------------------------------------------------------------ the state for operators */

const char *moe_membership_cause_name(enum moe_membership_cause cause)
{
    static const char *const names[MOE_CAUSE_COUNT] = {
        "lease_expired",  "replaced",  "peer_lost",    "left",          "out_of_step", "not_formed",
        "cannot_go_back", "not_saved", "no_transport", "wrong_weights", "grown",       "scaled"};
    size_t i = (size_t)cause;
    return i < MOE_CAUSE_COUNT ? names[i] : "?";
}

/* A process that cannot load blocks the group until another one takes its slot. */
static bool find_load_failure(const struct moe_membership *m, uint32_t *slot)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if (m->members[s].state == SLOT_TAKEN && m->members[s].load_failed) {
            *slot = s;
            return true;
        }
    }
    return false;
}

static enum moe_group_state group_state(const struct moe_membership *m)
{
    if (m->shutting_down)
        return MOE_GROUP_DRAINING;
    if (m->view_epoch != 0)
        return m->restoring ? MOE_GROUP_WAITING : MOE_GROUP_SERVING;
    uint32_t slot;
    if (m->failed || find_load_failure(m, &slot))
        return MOE_GROUP_FAILED;
    if (m->phase != PHASE_IDLE)
        return MOE_GROUP_FORMING;
    if (m->degraded)
        return MOE_GROUP_DEGRADED;
    return moe_membership__all_taken(m) ? MOE_GROUP_LOADING : MOE_GROUP_WAITING;
}

static void describe_load_failure(const struct moe_membership *m, uint32_t slot, char *to,
                                  size_t size)
{
    char clean[MOE_MEMBERSHIP_REASON_BYTES];
    moe_membership_copy_text(clean, sizeof clean, m->members[slot].error.text);
    snprintf(to, size, "slot %u cannot load: %s", slot, clean);
}

/* Why the group does not form: "slot 1 is empty (1 of 2 workers)". False when nothing blocks it. */
static bool describe_blocker(const struct moe_membership *m, char *to, size_t size)
{
    uint32_t slot, taken = moe_membership__count_taken(m);
    const char *why;
    if (!moe_membership__blocked(m, &slot, &why)) {
        uint64_t left_ms = (m->past.lease_end_ns - m->now_ns) / MOE_NS_PER_MS;
        bool fenced = moe_membership__fenced(m);
        if (fenced)
            snprintf(to, size, "workers of the last view may hold a lease for %u.%u s",
                     (unsigned)(left_ms / 1000), (unsigned)(left_ms % 1000 / 100));
        return fenced;
    }
    if (taken < moe_membership__size(m))
        snprintf(to, size, "slot %u %s (%u of %u workers)", slot, why, taken,
                 moe_membership__size(m));
    else
        snprintf(to, size, "slot %u %s", slot, why);
    return true;
}

static void describe(const struct moe_membership *m, struct moe_membership_group *out)
{
    uint32_t slot = 0;
    char blocker[80];
    bool blocked = describe_blocker(m, blocker, sizeof blocker);
    size_t size = sizeof out->reason;
    switch (out->state) {
    case MOE_GROUP_SERVING: out->reason[0] = '\0'; break;
    case MOE_GROUP_DRAINING:
        snprintf(out->reason, size, "shutting down: %s", m->shutdown_reason);
        break;
    case MOE_GROUP_FAILED:
        if (find_load_failure(m, &slot))
            describe_load_failure(m, slot, out->reason, size);
        else
            snprintf(out->reason, size, "gave up: %s", m->trouble);
        break;
    case MOE_GROUP_FORMING:
        snprintf(out->reason, size, "attempt %u%s%s", m->attempts + m->waits + 1,
                 m->trouble[0] != '\0' ? "; last: " : "", m->trouble);
        break;
    case MOE_GROUP_DEGRADED:
        if (blocked)
            snprintf(out->reason, size, "%s; %s", m->trouble, blocker);
        else
            snprintf(out->reason, size, "%s; trying again", m->trouble);
        break;
    case MOE_GROUP_WAITING:
    case MOE_GROUP_LOADING:
        if (m->restoring)
            snprintf(out->reason, size,
                     "the coordinator restarted: waiting for the members to reconnect");
        else if (blocked && (m->placement_durable || m->trouble[0] == '\0'))
            snprintf(out->reason, size, "%s", blocker);
        else
            snprintf(out->reason, size, "%s; trying again", m->trouble);
        break;
    }
}

void moe_membership_group(const struct moe_membership *m, struct moe_membership_group *out)
{
    *out = (struct moe_membership_group){.state = group_state(m),
                                         .epoch = m->view_epoch,
                                         .slots = m->config.slots,
                                         .places = m->saved.places,
                                         .size = moe_membership__size(m),
                                         .scale_error = &m->scale_error,
                                         .replicas = m->config.replicas,
                                         .partial = m->config.partial,
                                         .may_shrink = moe_membership__may_shrink(m),
                                         .has_heirs = moe_membership__has_heirs(m),
                                         .trains = m->trains,
                                         .model = m->model,
                                         .family = m->family,
                                         .backend = m->backend,
                                         .fingerprint = m->fingerprint,
                                         .layers = m->layers,
                                         .layer_count = m->layer_count,
                                         .last_epoch = m->announced_epoch,
                                         .group_id = m->saved.group_id,
                                         .causes = m->causes};
    out->scaling_to = (uint32_t)__builtin_popcountll(m->next.places);
    if (out->scaling_to == 0 && (m->removed != 0 || moe_membership__is_replaced(m)))
        out->scaling_to = out->size;
    describe(m, out);
    for (uint32_t s = 0; s < m->config.slots; s++)
        out->live |= (uint64_t)moe_membership__takes_part(m, s) << s;
    uint64_t counted = out->live;
    for (uint32_t s = 0; out->live == 0 && s < m->config.slots; s++)
        counted |= (uint64_t)(m->members[s].state == SLOT_TAKEN && moe_membership__is_place(m, s))
                   << s;
    bool known = m->session.epoch != 0 && m->session.live == out->live;
    out->max_tokens_per_step =
        known ? m->session.max_tokens : moe_membership__least_tokens(m, counted);
}

static enum moe_worker_state worker_state(const struct moe_membership *m,
                                          const struct member *member)
{
    if (member->state != SLOT_TAKEN || member->load_failed)
        return MOE_WORKER_GONE;
    if (member->draining || member->leaving)
        return MOE_WORKER_DRAINING;
    bool takes_part = moe_membership__takes_part(m, (uint32_t)(member - m->members));
    if (takes_part && m->view_epoch != 0 && !member->unverified)
        return MOE_WORKER_SERVING;
    if (takes_part && (m->phase == PHASE_PREPARE || m->phase == PHASE_SAVE_VIEW))
        return MOE_WORKER_PREPARING;
    return member->loaded     ? MOE_WORKER_LOADED
           : member->assigned ? MOE_WORKER_LOADING
                              : MOE_WORKER_REGISTERED;
}

bool moe_membership_worker(const struct moe_membership *m, uint32_t slot,
                           struct moe_membership_worker *out)
{
    if (slot >= m->config.slots || m->members[slot].state == SLOT_EMPTY)
        return false;
    const struct member *member = &m->members[slot];
    uint64_t end = member->last_message_ns + m->config.lease_ns;
    bool taken = member->state == SLOT_TAKEN;
    if (!taken && !moe_membership__is_place(m, slot))
        return false; /* a worker that was not needed any more, or a spare, has left */
    *out = (struct moe_membership_worker){
        .slot = slot,
        .state = worker_state(m, member),
        .worker_id = member->worker_id,
        .endpoint = member->endpoint,
        .control_endpoint = member->control_endpoint,
        .host = {member->host.id, member->host.name, member->host.domain,
                 member->host.network_address},
        .incarnation = member->incarnation,
        .lease_remaining_ns = taken && end > m->now_ns ? end - m->now_ns : 0,
        .connected = taken && member->stream != 0,
        .stream = taken ? member->stream : 0,
        .taken = taken,
        .last = member->last,
        .error = &member->error};
    return true;
}

bool moe_membership_slot_of(const struct moe_membership *m, uint64_t stream, uint32_t *slot)
{
    return moe_membership__find_stream(m, stream, slot);
}

bool moe_membership_awaits(const struct moe_membership *m, uint32_t slot,
                           uint32_t placement_version, uint64_t order)
{
    if (order != 0 && order != m->members[slot].order)
        return false;
    if (m->next.places != 0 && placement_version == moe_placement_version(m->next.placement))
        return (m->next.asked >> slot & 1) != 0;
    return m->members[slot].assigned && placement_version == moe_placement_version(m->placement);
}

const struct moe_placement *moe_membership_placement(const struct moe_membership *m)
{
    return m->placement;
}

uint32_t moe_membership_next_version(const struct moe_membership *m)
{
    return m->next.places != 0 ? moe_placement_version(m->next.placement) : 0;
}

const struct moe_placement *moe_membership_find_placement(const struct moe_membership *m,
                                                          uint32_t version)
{
    if (version == moe_placement_version(m->placement))
        return m->placement;
    bool next = m->next.places != 0 && version == moe_placement_version(m->next.placement);
    return next ? m->next.placement : NULL;
}

const struct moe_membership_saved *moe_membership_to_save(const struct moe_membership *m)
{
    return &m->saved;
}

const struct moe_saved_training *moe_membership_to_read(const struct moe_membership *m)
{
    return &m->join.state;
}

const uint8_t *moe_membership_blob(const struct moe_membership *m, uint32_t slot, size_t *length)
{
    MOE_INVARIANT(slot < m->config.slots);
    *length = m->blobs[slot].length;
    return m->blobs[slot].data;
}
