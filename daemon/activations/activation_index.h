/* SPDX-License-Identifier: Apache-2.0 */
/* Which forward steps this slot's device still keeps the activations of, for a Backward that has
 * not come yet: the (session, id) that it will have, the name that the backend knows the step by,
 * and until when. The backend owns the memory; this list says when it is to be dropped.
 *
 * Slots keep and drop without asking each other: a pass that finds nothing computes it again, to
 * the same bits. So the list need not be the same on two slots.
 *
 * Pure: no clock, no lock, no thread, no memory after create. Few entries: walks are cheap. */
#ifndef MOE_ACTIVATIONS_ACTIVATION_INDEX_H
#define MOE_ACTIVATIONS_ACTIVATION_INDEX_H

#include "base/status.h"
#include "daemon/name.h"

#include <stddef.h>
#include <stdint.h>

enum { MOE_ACTIVATION_INDEX_MAX = 256 }; /* steps at once; the oldest go first */

struct moe_activation_entry {
    char session[MOE_TRAINING_NAME_MAX + 1];
    uint64_t id;         /* of the Backward */
    uint32_t layer;      /* the model's layer index */
    uint64_t name;       /* of the step, for the backend; not 0 */
    uint64_t expires_ns; /* rises from entry to entry */
    bool busy;           /* a pass uses it, or may */
};

/* Zeroed is empty. */
struct moe_activation_index {
    size_t count;
    struct moe_activation_entry entries[MOE_ACTIVATION_INDEX_MAX]; /* the oldest first */
};

/* Adds a copy of `a`; the list must not be full. */
void moe_activation_index_add(struct moe_activation_index *l, const struct moe_activation_entry *a);
bool moe_activation_index_full(const struct moe_activation_index *l);
/* Takes one that waits for the Backward (session, id), a busy one only if told to; false when there
 * is none (any more). */
bool moe_activation_index_take(struct moe_activation_index *l, const char *session, uint64_t id,
                               bool busy_too, struct moe_activation_entry *out);
/* Takes the oldest that is not busy, if its time is over at `now`. */
bool moe_activation_index_take_old(struct moe_activation_index *l, uint64_t now,
                                   struct moe_activation_entry *out);
/* When the next one's time is over; MOE_NEVER when none's is ever. */
uint64_t moe_activation_index_next(const struct moe_activation_index *l);
/* All that wait for the Backward (session, id). */
void moe_activation_index_set_busy(struct moe_activation_index *l, const char *session, uint64_t id,
                                   bool busy);

#endif
