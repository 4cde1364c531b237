/* SPDX-License-Identifier: Apache-2.0 */
/* The list of forward steps that this slot's device retains activations of: the (session, id) of
 * the Backward to come, the backend's name of the step, and its expiry. The backend owns the
 * memory; this list decides when it is dropped.
 *
 * Slots keep and drop independently: a pass without activations computes them again, to the same
 * bits. So the list may differ between slots.
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
    uint64_t expires_ns; /* entries are sorted by it, earliest first */
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
/* Takes one entry of the Backward (session, id), a busy one only with `busy_too`; false when there
 * is none. */
bool moe_activation_index_take(struct moe_activation_index *l, const char *session, uint64_t id,
                               bool busy_too, struct moe_activation_entry *out);
/* Takes the oldest entry that is not busy, if it has expired at `now`. */
bool moe_activation_index_take_old(struct moe_activation_index *l, uint64_t now,
                                   struct moe_activation_entry *out);
/* The next expiry; MOE_NEVER when all entries are busy, or there is none. */
uint64_t moe_activation_index_next(const struct moe_activation_index *l);
/* Marks all entries of the Backward (session, id). */
void moe_activation_index_set_busy(struct moe_activation_index *l, const char *session, uint64_t id,
                                   bool busy);

#endif
