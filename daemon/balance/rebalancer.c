/* SPDX-License-Identifier: Apache-2.0 */
#include "balance/rebalancer.h"

#include "base/clock.h"

void moe_rebalancer_begin(struct moe_rebalancer *r, const struct moe_rebalancer_policy *policy,
                          uint64_t now_ns)
{
    *r = (struct moe_rebalancer){.policy = *policy};
    moe_rebalancer_look(r, now_ns);
}

uint64_t moe_rebalancer_due(const struct moe_rebalancer *r)
{
    return r->policy.every_ns != 0 ? r->due_ns : MOE_NEVER;
}

void moe_rebalancer_look(struct moe_rebalancer *r, uint64_t now_ns)
{
    r->due_ns = now_ns + r->policy.every_ns;
}

/* Too few rows say nothing: they neither count nor break a row of looks. */
bool moe_rebalancer_decide(struct moe_rebalancer *r, double gain)
{
    if (gain < 0)
        return false;
    if (r->resting > 0) {
        r->resting--;
        return false;
    }
    r->found = gain >= r->policy.least_gain ? r->found + 1 : 0;
    return r->found >= MOE_REBALANCER_LOOKS;
}

void moe_rebalancer_moved(struct moe_rebalancer *r, uint64_t now_ns, bool success)
{
    uint64_t looks = 1;
    r->found = 0;
    r->resting = MOE_REBALANCER_REST;
    if (success)
        r->failures = 0;
    else if (r->failures < UINT32_MAX)
        r->failures++;
    for (uint32_t i = 0; i < r->failures && looks < MOE_REBALANCER_PAUSE_MAX; i++)
        looks *= 2;
    r->due_ns = now_ns + looks * r->policy.every_ns;
}
