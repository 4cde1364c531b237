/* SPDX-License-Identifier: Apache-2.0 */
/* The number of open streams: who gives way when all are taken.
 *
 * Owners stand in lists by their number of streams, so the one with the most is found at once. */
#include "uploads/state.h"

/* The list of an owner with so many streams. */
static uint32_t list_of(uint32_t open)
{
    return open < MOE_RPC_STREAMS_MAX ? open : MOE_RPC_STREAMS_MAX;
}

static void set_open(struct moe_rpc_budget *b, struct moe_rpc_payer *p, uint32_t open)
    MOE_REQUIRES(b->lock)
{
    if (p->open > 0)
        LIST_REMOVE(p, by_open);
    p->open = open;
    if (open > 0)
        LIST_INSERT_HEAD(&b->by_open[list_of(open)], p, by_open);
    b->most = list_of(open) > b->most ? list_of(open) : b->most;
    while (b->most > 0 && LIST_EMPTY(&b->by_open[b->most])) /* each stream has raised it by one */
        b->most--;
}

void moe_rpc__add_stream(struct moe_rpc_budget *b, struct moe_rpc_uploads *u)
{
    if (u->ends)
        return;
    u->open++;
    b->open++;
    set_open(b, u->payer, u->payer->open + 1);
}

void moe_rpc__remove_stream(struct moe_rpc_budget *b, struct moe_rpc_uploads *u)
{
    if (u->ends)
        return;
    u->open--;
    b->open--;
    set_open(b, u->payer, u->payer->open - 1);
}

static void end(struct moe_rpc_budget *b, struct moe_rpc_uploads *u) MOE_REQUIRES(b->lock)
{
    b->open -= u->open;
    set_open(b, u->payer, u->payer->open - u->open);
    u->open = 0;
    u->ends = true;
    b->waiters.end(u->connection);
}

/* The owner with the most streams loses its largest connection, if it has more than `wanted`. */
static bool give_way(struct moe_rpc_budget *b, uint32_t wanted) MOE_REQUIRES(b->lock)
{
    if (b->most <= wanted || b->most <= MOE_RPC_STREAMS_LEAST)
        return false;
    const struct moe_rpc_payer *payer = LIST_FIRST(&b->by_open[b->most]);
    struct moe_rpc_uploads *u, *largest = LIST_FIRST(&payer->members);
    LIST_FOREACH(u, &payer->members, member)
    largest = u->open > largest->open ? u : largest;
    end(b, largest);
    return true;
}

bool moe_rpc_uploads_admit(struct moe_rpc_uploads *u, uint32_t most)
{
    struct moe_rpc_budget *b = u->budget;
    moe_mutex_lock(&b->lock);
    const uint32_t own = u->payer->open;
    bool admitted = !u->ends && u->open < most;
    if (admitted) {
        while (b->open >= MOE_RPC_STREAMS_MAX && give_way(b, own + 1))
            ;
        admitted = b->open < MOE_RPC_STREAMS_MAX || own < MOE_RPC_STREAMS_LEAST;
    }
    moe_mutex_unlock(&b->lock);
    return admitted;
}
