/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over slots, for gradients of replicated weights and of experts with several copies. Values
 * travel through the windows: their regions of rows and partials are free between steps. */
#ifndef MOE_CPU_REDUCE_H
#define MOE_CPU_REDUCE_H

#include "cpu/exchange/session.h"

/* A piece of the list; all slots process the list together. */
struct moe_cpu_shared_piece {
    uint64_t holders; /* the slots with a copy; the same on all slots */
    size_t n;         /* floats; the same on all slots */
    float *data;      /* this slot's copy; ignored if this slot is no holder */
};

/* Collective: the data of every holder becomes the sum over all holders in slot order, the same
 * bits everywhere. All slots must pass the same list. Errors: those of waits. */
struct moe_status moe_cpu_reduce(struct moe_session *session,
                                 const struct moe_cpu_shared_piece *piece,
                                 uint32_t pieces) MOE_CHECKED;

#endif
