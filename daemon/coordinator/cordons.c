/* SPDX-License-Identifier: Apache-2.0 */
/* Cordons: operators close slots to new workers. Part of the durable state. */
#include "coordinator/membership_state.h"

#include <stdio.h>
#include <string.h>

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

static struct moe_status check(const struct moe_membership *m, uint32_t slot, const char *reason)
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

static void save(struct moe_membership *m)
{
    moe_membership__save(m, false);
    m->cordon_save = m->save_sequence;
}

struct moe_status moe_membership_cordon(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                        const char *reason)
{
    MOE_TRY(check(m, slot, reason));
    moe_membership__set_time(m, now_ns);
    moe_membership_copy_text(m->saved.cordon_reasons[slot], MOE_MEMBERSHIP_CORDON_BYTES, reason);
    m->saved.cordoned |= UINT64_C(1) << slot;
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_CORDONED, slot, "slot %u is cordoned: %s", slot,
                        m->saved.cordon_reasons[slot]);
    save(m);
    return moe_ok();
}

struct moe_status moe_membership_uncordon(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                          const char *reason)
{
    char clean[MOE_MEMBERSHIP_CORDON_BYTES];
    MOE_TRY(check(m, slot, reason));
    moe_membership__set_time(m, now_ns);
    if (!moe_membership__is_cordoned(m, slot) && m->cordon_save == 0)
        return moe_ok();
    moe_membership_copy_text(clean, sizeof clean, reason);
    m->saved.cordoned &= ~(UINT64_C(1) << slot);
    memset(m->saved.cordon_reasons[slot], 0, sizeof m->saved.cordon_reasons[slot]);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_UNCORDONED, slot, "slot %u is uncordoned: %s",
                        slot, clean);
    save(m);
    return moe_ok();
}
