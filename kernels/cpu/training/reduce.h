/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over slots of what several slots hold: gradients of replicated weights and of experts with
 * several copies. Through the windows, whose regions of rows and partials are free between steps.
 */
#ifndef MOE_CPU_REDUCE_H
#define MOE_CPU_REDUCE_H

#include "cpu/exchange/session.h"

/* A piece of the list that all slots walk through together. */
struct moe_cpu_shared_piece {
    uint64_t holders; /* the slots that have it; the same on all slots */
    size_t n;         /* floats; the same on all slots */
    float *data;      /* the own copy; not looked at where the own slot is no holder */
};

/* Collective: every holder's data becomes the sum over all holders in slot order, the same bits
 * everywhere. All slots must give the same list. Errors: those of waits. */
struct moe_status moe_cpu_reduce(struct moe_session *session,
                                 const struct moe_cpu_shared_piece *piece,
                                 uint32_t pieces) MOE_CHECKED;

#endif
