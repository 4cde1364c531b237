/* SPDX-License-Identifier: Apache-2.0 */
/* Masks of a session; see masks.h. */
#include "common/masks.h"

#include "base/guard.h"
#include "moe/window.h"

#include <string.h>

static uint64_t bit(uint32_t slot)
{
    return UINT64_C(1) << slot;
}

void moe_masks_begin(struct moe_masks *m, uint32_t slot, uint64_t epoch, uint64_t live)
{
    *m = (struct moe_masks){.slot = slot, .joined = epoch, .epoch = epoch, .live = live};
}

struct moe_status moe_masks_check(const struct moe_masks *m, uint64_t epoch, uint64_t live,
                                  bool idle)
{
    if (epoch <= m->epoch)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a mask needs a higher epoch than %llu", (unsigned long long)m->epoch);
    if ((live & bit(m->slot)) == 0 || !MOE_GUARD(MASK_SHRINKS, (live & ~m->live) == 0))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a mask has this slot, and only slots of the mask before");
    if (!MOE_GUARD(STEPS_END_FIRST, idle))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "the session has unfinished steps");
    if (!MOE_GUARD(EPOCHS_IN_RANGE, epoch - m->joined < UINT64_C(1) << MOE_WINDOW_EPOCH_BITS))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "epoch %llu is too far from %llu, in which the session was joined",
                         (unsigned long long)epoch, (unsigned long long)m->joined);
    uint64_t missing = live & (m->dead | m->gone);
    if (missing != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %d has left the session",
                         __builtin_ctzll(missing));
    return moe_ok();
}

void moe_masks_take(struct moe_masks *m, uint64_t epoch, uint64_t live)
{
    m->epoch = epoch;
    m->live = live;
}

/* Notices of one slot come in order, so an older epoch than before is none that it can name. */
static void note(struct moe_masks *m, uint32_t slot, uint64_t epoch, uint64_t lost)
{
    if (epoch > m->said_epoch[slot])
        m->said_lost[slot] = 0;
    if (epoch >= m->said_epoch[slot]) {
        m->said_epoch[slot] = epoch;
        m->said_lost[slot] |= lost;
    }
}

/* A slot that goes on to a later epoch has reported losses of this one. They still count here: else
 * that slot, which has left, would be taken for the lost one. */
void moe_masks_notice(struct moe_masks *m, uint32_t from, uint64_t epoch, uint64_t lost)
{
    if (epoch > m->epoch && m->said_epoch[from] == m->epoch)
        note(m, m->slot, m->epoch, m->said_lost[from]);
    note(m, from, epoch, lost);
}

void moe_masks_report(struct moe_masks *m, uint64_t lost)
{
    note(m, m->slot, m->epoch, lost);
}

void moe_masks_leave(struct moe_masks *m, uint32_t from)
{
    m->gone |= bit(from);
}

void moe_masks_close(struct moe_masks *m, uint32_t from)
{
    if ((m->gone & bit(from)) == 0)
        m->dead |= bit(from);
}

/* Whether what the slot said last is about this epoch. */
static bool speaks_of_now(const struct moe_masks *m, uint32_t slot)
{
    return MOE_GUARD(NOTICE_HAS_EPOCH, m->said_epoch[slot] == m->epoch);
}

uint64_t moe_masks_lost(const struct moe_masks *m)
{
    uint64_t lost = m->dead;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (speaks_of_now(m, s))
            lost |= m->said_lost[s];
    return lost & m->live & ~bit(m->slot);
}

uint64_t moe_masks_left(const struct moe_masks *m)
{
    uint64_t left = m->gone;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        bool later = m->said_epoch[s] > m->epoch;
        bool lost_us = speaks_of_now(m, s) && (m->said_lost[s] & bit(m->slot)) != 0;
        if (!MOE_GUARD(LATER_MASK_LEAVES, !later) || lost_us)
            left |= bit(s);
    }
    return left & m->live & ~bit(m->slot);
}
