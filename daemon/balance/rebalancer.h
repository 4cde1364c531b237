/* SPDX-License-Identifier: Apache-2.0 */
/* When experts move without an operator. The caller looks at the rows of experts at intervals and
 * says what a plan would gain; this decides whether it is worth a move. Moves take reading, and
 * change the last bits of answers, so they are rare:
 *
 *  - a gain counts if it is at least the least one, and a move needs it in several looks in a row:
 * a short peak moves nothing;
 *  - after a move, looks count from the beginning, and some do not count at all: the first rows may
 *    be from before;
 *  - after a move that failed, the pause doubles each time.
 *
 * Pure: no I/O, no clock, no allocation; one thread at a time. */
#ifndef MOE_BALANCE_REBALANCER_H
#define MOE_BALANCE_REBALANCER_H

#include <stdbool.h>
#include <stdint.h>

enum {
    MOE_REBALANCER_LOOKS = 3,     /* in a row with a gain, before a move */
    MOE_REBALANCER_REST = 2,      /* after a move, so many do not count */
    MOE_REBALANCER_PAUSE_MAX = 64 /* looks: longest pause after failed moves */
};

struct moe_rebalancer_policy {
    uint64_t every_ns;   /* between two looks; 0 = never */
    uint32_t least_gain; /* 1..100: percent fewer rows of the busiest slot, at least */
};

struct moe_rebalancer {
    struct moe_rebalancer_policy policy;
    uint64_t due_ns;   /* of the next look */
    uint32_t found;    /* looks in a row with a gain */
    uint32_t resting;  /* looks that do not count yet */
    uint32_t failures; /* moves in a row that failed */
};

void moe_rebalancer_begin(struct moe_rebalancer *r, const struct moe_rebalancer_policy *policy,
                          uint64_t now_ns);
/* When the next look is due; MOE_NEVER: not. */
uint64_t moe_rebalancer_due(const struct moe_rebalancer *r);
/* A look begins, or could not: the next one is due after the interval. */
void moe_rebalancer_look(struct moe_rebalancer *r, uint64_t now_ns);
/* The look has ended. `gain`: percent; negative: not known. True: a move should begin now;
 * moe_rebalancer_moved follows. */
bool moe_rebalancer_decide(struct moe_rebalancer *r, double gain);
/* Experts have moved, also by an operator, or a move has failed. */
void moe_rebalancer_moved(struct moe_rebalancer *r, uint64_t now_ns, bool success);

#endif
