/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/lease.h"

#include "base/clock.h"

#include <time.h>

uint64_t moe_lease_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * MOE_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* ------------------------------------------------------------------ the worker's belief */

uint64_t moe_lease_term_ns(uint64_t coordinator_ns, unsigned margin_percent)
{
    return coordinator_ns / (100 + margin_percent) * 100;
}

uint64_t moe_lease_on_sent(struct moe_lease *l, uint64_t now_ns)
{
    l->sequence++;
    l->sent_ns[l->sequence % MOE_LEASE_UNANSWERED] = now_ns;
    return l->sequence;
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

uint64_t moe_lease_sent_ns(const struct moe_lease *l, uint64_t sequence)
{
    if (sequence > l->sequence || l->sequence - sequence >= MOE_LEASE_UNANSWERED)
        return 0;
    return l->sent_ns[sequence % MOE_LEASE_UNANSWERED];
}

void moe_lease_on_answered(struct moe_lease *l, uint64_t sequence, uint64_t oldest_ns)
{
    uint64_t sent_ns = moe_lease_sent_ns(l, sequence);
    if (sent_ns == 0)
        return;
    uint64_t until_ns = sent_ns + l->term_ns;
    uint64_t all_ns = until_ns > oldest_ns ? until_ns - oldest_ns : 0;
    l->answered_ns = later(l->answered_ns, sent_ns);
    l->until_ns = later(l->until_ns, until_ns);
    l->all_until_ns = later(l->all_until_ns, all_ns);
}

void moe_lease_end(struct moe_lease *l)
{
    l->until_ns = l->all_until_ns = 0;
    for (unsigned i = 0; i < MOE_LEASE_UNANSWERED; i++)
        l->sent_ns[i] = 0;
}

/* ------------------------------------------------------------------ for other threads */

void moe_lease_gate_init(struct moe_lease_gate *g, uint64_t (*clock)(void))
{
    g->clock = clock;
    atomic_init(&g->until_ns, 0);
    atomic_init(&g->all_until_ns, 0);
    atomic_init(&g->ticket_ns, 0);
    atomic_init(&g->slack_ns, 0);
    atomic_init(&g->answered_ns, 0);
}

void moe_lease_gate_set(struct moe_lease_gate *g, const struct moe_lease *l)
{
    atomic_store(&g->ticket_ns, l->term_ns / MOE_LEASE_TICKETS);
    atomic_store(&g->slack_ns, l->term_ns / MOE_LEASE_SLACKS);
    atomic_store(&g->all_until_ns, l->all_until_ns);
    atomic_store(&g->answered_ns, l->answered_ns);
    atomic_store(&g->until_ns, l->until_ns);
}

bool moe_lease_gate_held(const struct moe_lease_gate *g)
{
    return g == NULL || g->clock() < atomic_load(&g->until_ns);
}

bool moe_lease_gate_covers_change(const struct moe_lease_gate *g)
{
    return g == NULL || g->clock() + atomic_load(&g->ticket_ns) < atomic_load(&g->until_ns);
}

/* Counts pauses: a test may hold the clock. */
bool moe_lease_gate_await_change(const struct moe_lease_gate *g)
{
    if (moe_lease_gate_covers_change(g))
        return true;
    uint64_t pauses =
        atomic_load(&g->ticket_ns) * MOE_LEASE_TICKETS / MOE_LEASE_HEARTBEATS / MOE_NS_PER_MS;
    for (uint64_t i = 0; i < pauses && i < MOE_LEASE_AWAIT_MS; i++) {
        (void)nanosleep(&(struct timespec){.tv_nsec = MOE_NS_PER_MS}, NULL);
        if (moe_lease_gate_covers_change(g))
            return true;
    }
    return false;
}

bool moe_lease_gate_covers_group(const struct moe_lease_gate *g)
{
    return g == NULL || g->clock() + atomic_load(&g->ticket_ns) + atomic_load(&g->slack_ns) <
                            atomic_load(&g->all_until_ns);
}

uint64_t moe_lease_gate_remaining_ns(const struct moe_lease_gate *g)
{
    uint64_t now = g->clock(), until = atomic_load(&g->until_ns);
    return now < until ? until - now : 0;
}

uint64_t moe_lease_gate_heartbeat_age_ns(const struct moe_lease_gate *g)
{
    uint64_t answered = atomic_load(&g->answered_ns), now = g->clock();
    return answered != 0 && now > answered ? now - answered : 0;
}
