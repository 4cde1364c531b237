/* SPDX-License-Identifier: Apache-2.0 */
/* Time limits of calls. All limits of a list have the same length, so the first to start is the
 * first to pass. Start, stop and the search for the next one take constant time. */
#include "base/clock.h"
#include "rpc/serving.h"

void moe_rpc_limits_init(struct moe_rpc_limits *list, uint64_t length_ns,
                         void (*passed)(struct moe_rpc_limit *limit))
{
    *list = (struct moe_rpc_limits){.length_ns = length_ns, .passed = passed};
    TAILQ_INIT(&list->running);
}

void moe_rpc_limit_start(struct moe_rpc_limits *list, struct moe_rpc_limit *limit)
{
    MOE_INVARIANT(!limit->runs);
    limit->runs = true;
    limit->since_ns = moe_clock_ns();
    TAILQ_INSERT_TAIL(&list->running, limit, link);
}

void moe_rpc_limit_stop(struct moe_rpc_limits *list, struct moe_rpc_limit *limit)
{
    if (limit->runs)
        TAILQ_REMOVE(&list->running, limit, link);
    limit->runs = false;
}

uint64_t moe_rpc_limits_expire(struct moe_rpc_limits *list)
{
    struct moe_rpc_limit *first;
    while ((first = TAILQ_FIRST(&list->running)) != NULL) {
        uint64_t at = first->since_ns + list->length_ns;
        if (moe_clock_ns() < at)
            return at;
        moe_rpc_limit_stop(list, first);
        list->passed(first);
    }
    return MOE_NEVER;
}
