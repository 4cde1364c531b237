/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's state for operators: states, reasons, leases. Reads only. */
#include "coordinator/membership_state.h"

#include <stdio.h>

const char *moe_membership_cause_name(enum moe_membership_cause cause)
{
    static const char *const names[MOE_CAUSE_COUNT] = {
        "lease_expired",  "replaced",  "peer_lost",    "left",          "out_of_step", "not_formed",
        "cannot_go_back", "not_saved", "no_transport", "wrong_weights", "grown"};
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
    if (taken < m->config.slots)
        snprintf(to, size, "slot %u %s (%u of %u workers)", slot, why, taken, m->config.slots);
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
                                         .replicas = m->config.replicas,
                                         .partial = m->config.partial,
                                         .may_shrink = moe_membership__may_shrink(m),
                                         .model = m->model,
                                         .family = m->family,
                                         .backend = m->backend,
                                         .fingerprint = m->fingerprint,
                                         .layers = m->layers,
                                         .layer_count = m->layer_count,
                                         .last_epoch = m->announced_epoch,
                                         .group_id = m->saved.group_id,
                                         .causes = m->causes};
    describe(m, out);
    for (uint32_t s = 0; s < m->config.slots; s++)
        out->live |= (uint64_t)moe_membership__takes_part(m, s) << s;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        bool counts = out->live != 0 ? out->live >> s & 1 : m->members[s].state == SLOT_TAKEN;
        uint32_t tokens = counts ? m->members[s].max_tokens : 0;
        if (tokens != 0 && (out->max_tokens_per_step == 0 || tokens < out->max_tokens_per_step))
            out->max_tokens_per_step = tokens;
    }
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
                           uint32_t placement_version)
{
    return m->members[slot].assigned && placement_version == moe_placement_version(m->placement);
}

const struct moe_placement *moe_membership_placement(const struct moe_membership *m)
{
    return m->placement;
}

const struct moe_membership_saved *moe_membership_to_save(const struct moe_membership *m)
{
    return &m->saved;
}

const uint8_t *moe_membership_blob(const struct moe_membership *m, uint32_t slot, size_t *length)
{
    MOE_INVARIANT(slot < m->config.slots);
    *length = m->blobs[slot].length;
    return m->blobs[slot].data;
}
