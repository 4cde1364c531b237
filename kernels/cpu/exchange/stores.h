/* SPDX-License-Identifier: Apache-2.0 */
/* Stores for one slot, in order: straight into its window if this process has mapped it, else into
 * messages of the network. Callers name places by their addresses in this slot's own window, since
 * all windows have one layout. */
#ifndef MOE_CPU_STORES_H
#define MOE_CPU_STORES_H

#include "cpu/exchange/session.h"

struct moe_cpu_stores {
    struct moe_session *session;
    uint32_t slot;
    struct moe_cpu_message *message; /* network: being filled, or NULL */
    bool dropped;                    /* network: the slot takes nothing more */
};

static inline struct moe_cpu_stores moe_cpu_stores_begin(struct moe_session *s, uint32_t slot)
{
    return (struct moe_cpu_stores){.session = s, .slot = slot};
}

/* Where the caller writes the `bytes` for the place `at`; at most one row with its gradient. NULL:
 * the slot takes nothing more, and a later wait fails. Before the next call the data are written.
 */
void *moe_cpu_stores_data(struct moe_cpu_stores *b, const void *at, size_t bytes);
/* A flag, behind everything that was stored before. */
void moe_cpu_stores_flag(struct moe_cpu_stores *b, const uint64_t *at, uint64_t stamp,
                         uint32_t value);
/* The slot may be asleep: wakes it, or sends the last message. */
void moe_cpu_stores_end(struct moe_cpu_stores *b);

#endif
