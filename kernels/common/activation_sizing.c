/* SPDX-License-Identifier: Apache-2.0 */
/* See activation_sizing.h. */
#include "common/activation_sizing.h"

/* Slack of the room, and decay of the expectation per step: 1 / SLACK each. */
static const double SLACK = 8;

bool moe_activation_sizing_ask(const struct moe_activation_sizing *of, uint32_t *rows)
{
    double expected = (of->learnt != 0 ? of->learnt : of->even) * of->bucket;
    /* A block has at least one row. Twice, because the average is not reliable for few rows. */
    double blocks = 2 * expected + SLACK;
    if (blocks > of->local_experts)
        blocks = of->local_experts;
    double wanted = expected * (1 + 1 / SLACK) + blocks * (double)MOE_ROW_ALIGN;
    uint64_t room = of->room < of->max_rows ? of->room : of->max_rows;
    *rows = wanted < (double)room ? (uint32_t)wanted : (uint32_t)room;
    return of->learnt == 0 || expected <= (double)of->room;
}

double moe_activation_sizing_learn(double before, uint64_t rows, uint32_t bucket)
{
    double now = (double)rows / bucket;
    before -= before / SLACK;
    return now > before ? now : before;
}
