/* SPDX-License-Identifier: Apache-2.0 */
/* Masks: how a session goes on without some of its slots, and what its slots say of each other.
 *
 * A session is joined once. Each later mask has a higher epoch and fewer slots, and keeps windows
 * and connections. A notice counts only in the epoch that it names, so a report that comes late
 * harms no later mask. Pure: no lock, no I/O. tests/simulation/mask runs this code.
 *
 * Why a late writer harms nothing
 *   flags   carry the epoch (moe_window_stamp), and a reader waits for its own epoch's. The epochs
 *           of a session span less than the bits that a stamp has for them.
 *   data    of a slot lie in regions that this slot alone writes. A slot that the mask lacks may
 *           still write there: no slot reads them. A slot that the mask has has ended its steps
 *           before it takes the mask, and no slot stores for the new epoch before all have.
 *   a slot  that is taken again needs a new session, which has other windows. So a mask never has
 *           a slot that the mask before it lacks. */
#ifndef MOE_COMMON_MASKS_H
#define MOE_COMMON_MASKS_H

#include "base/status.h"
#include "moe/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_masks {
    uint32_t slot;   /* this slot */
    uint64_t joined; /* epoch in which the session was joined */
    uint64_t epoch;  /* of the present mask */
    uint64_t live;   /* bit s: slot s takes part; this slot's bit is set */
    uint64_t dead;   /* connections that ended without a goodbye */
    uint64_t gone;   /* slots that said goodbye */
    /* The latest epoch of which a slot has spoken, and the slots that it has lost in that epoch. */
    uint64_t said_epoch[MOE_MAX_SLOTS], said_lost[MOE_MAX_SLOTS];
};

/* The session has been joined. */
void moe_masks_begin(struct moe_masks *m, uint32_t slot, uint64_t epoch, uint64_t live);

/* Whether the session can go on in `epoch` with the slots of `live`. `idle`: it has no unfinished
 * step. Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID (the epoch is not higher; `live` lacks this
 * slot, or has one that the present mask lacks); MOE_FAILED_PRECONDITION (unfinished steps; an
 * epoch out of the session's range); MOE_UNAVAILABLE/PEER_LOST (a slot of `live` is gone). */
struct moe_status moe_masks_check(const struct moe_masks *m, uint64_t epoch, uint64_t live,
                                  bool idle) MOE_CHECKED;
/* Takes a mask that moe_masks_check allows. The caller then tells all slots of `live`, by a notice
 * that has the epoch and no lost slots. */
void moe_masks_take(struct moe_masks *m, uint64_t epoch, uint64_t live);

/* Slot `from` speaks of `epoch`: it has that mask, and has lost the slots of `lost`. */
void moe_masks_notice(struct moe_masks *m, uint32_t from, uint64_t epoch, uint64_t lost);
/* This slot has lost these. */
void moe_masks_report(struct moe_masks *m, uint64_t lost);
/* Slot `from` says goodbye, or its connection ends. */
void moe_masks_leave(struct moe_masks *m, uint32_t from);
void moe_masks_close(struct moe_masks *m, uint32_t from);

/* Live slots that are lost, by a closed connection or by a report in this epoch. Any of them ends
 * every wait. Never this slot. */
uint64_t moe_masks_lost(const struct moe_masks *m);
/* Live slots that take no part in this epoch any more, without being lost: they said goodbye, have
 * a later mask, or have lost this slot. A wait for one of them ends. */
uint64_t moe_masks_left(const struct moe_masks *m);

#ifdef __cplusplus
}
#endif

#endif
