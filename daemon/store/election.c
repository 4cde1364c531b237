/* SPDX-License-Identifier: Apache-2.0 */
#include "store/election.h"

#include "base/clock.h"
#include "base/guard.h"

/* After some failed looks in a row, each further one doubles the pause, up to 8 times. A cluster
 * that has lost a member answers before. */
enum { FAILED_LOOKS_FREE = 4, PAUSE_SHIFT_MAX = 3 };

void moe_election_init(struct moe_election *e, uint32_t ttl_s, uint64_t poll_ns, uint64_t now_ns)
{
    *e = (struct moe_election){.ttl_s = ttl_s,
                               .poll_ns = poll_ns,
                               .margin_percent = MOE_LEASE_MARGIN_PERCENT,
                               .next_ns = now_ns};
}

void moe_election_hold(struct moe_election *e, bool held)
{
    e->held = held;
}

static void enter(struct moe_election *e, enum moe_election_phase phase)
{
    e->phase = phase;
    e->unsent = true;
}

static void wait_until(struct moe_election *e, uint64_t next_ns)
{
    e->phase = MOE_ELECTION_WAITS;
    e->unsent = false;
    e->next_ns = next_ns;
}

/* The time of this leader is over; the lease may go on in etcd for a while. */
static void stop_leading(struct moe_election *e, uint64_t next_ns)
{
    e->revision = 0;
    moe_lease_end(&e->lease);
    e->next_ns = next_ns;
    enter(e, MOE_ELECTION_RELEASES);
}

uint64_t moe_election_deadline(const struct moe_election *e)
{
    if (e->unsent)
        return 0;
    if (e->phase == MOE_ELECTION_WAITS)
        return e->next_ns;
    if (e->phase == MOE_ELECTION_LEADS)
        return e->next_ns < e->lease.until_ns ? e->next_ns : e->lease.until_ns;
    return MOE_NEVER;
}

static enum moe_election_call call_of(enum moe_election_phase phase)
{
    switch (phase) {
    case MOE_ELECTION_LOOKS: return MOE_ELECTION_LOOK;
    case MOE_ELECTION_GRANTS: return MOE_ELECTION_GRANT;
    case MOE_ELECTION_PROPOSES: return MOE_ELECTION_PROPOSE;
    case MOE_ELECTION_RELEASES: return MOE_ELECTION_RELEASE;
    case MOE_ELECTION_WAITS:
    case MOE_ELECTION_LEADS: break;
    }
    return MOE_ELECTION_NONE;
}

enum moe_election_call moe_election_next(struct moe_election *e, uint64_t now_ns)
{
    if (e->phase == MOE_ELECTION_LEADS && !moe_election_leads(e, now_ns))
        stop_leading(e, now_ns);
    if (e->phase == MOE_ELECTION_WAITS && now_ns >= e->next_ns)
        enter(e, MOE_ELECTION_LOOKS);
    if (e->phase == MOE_ELECTION_LEADS && now_ns >= e->next_ns) {
        (void)moe_lease_on_sent(&e->lease, now_ns);
        e->next_ns = now_ns + e->lease.term_ns / MOE_LEASE_HEARTBEATS;
        return MOE_ELECTION_RENEW;
    }
    if (!e->unsent)
        return MOE_ELECTION_NONE;
    e->unsent = false;
    if (e->phase == MOE_ELECTION_GRANTS)
        e->grant = moe_lease_on_sent(&e->lease, now_ns);
    return call_of(e->phase);
}

uint64_t moe_election_renewal(const struct moe_election *e)
{
    return e->lease.sequence;
}

static uint64_t pause_ns(const struct moe_election *e)
{
    unsigned more = e->failed_looks > FAILED_LOOKS_FREE ? e->failed_looks - FAILED_LOOKS_FREE : 0;
    return e->poll_ns << (more < PAUSE_SHIFT_MAX ? more : PAUSE_SHIFT_MAX);
}

void moe_election_on_looked(struct moe_election *e, uint64_t now_ns, bool ok, bool exists)
{
    if (e->phase != MOE_ELECTION_LOOKS)
        return;
    if (ok)
        e->failed_looks = 0;
    else if (e->failed_looks < FAILED_LOOKS_FREE + PAUSE_SHIFT_MAX)
        e->failed_looks++;
    if (ok && !exists && !e->held)
        enter(e, MOE_ELECTION_GRANTS);
    else
        wait_until(e, now_ns + pause_ns(e));
}

void moe_election_on_granted(struct moe_election *e, uint64_t now_ns, bool ok, int64_t lease_id,
                             int64_t ttl_s)
{
    if (e->phase != MOE_ELECTION_GRANTS)
        return;
    if (!ok || lease_id == 0 || ttl_s <= 0) {
        wait_until(e, now_ns + e->poll_ns);
        return;
    }
    e->lease_id = lease_id;
    e->lease.term_ns = moe_lease_term_ns((uint64_t)ttl_s * MOE_NS_PER_S, e->margin_percent);
    moe_lease_on_answered(&e->lease, e->grant, 0);
    enter(e, MOE_ELECTION_PROPOSES);
}

/* A proposal without an answer may have made the key: the lease is released, and the key with it.
 */
void moe_election_on_proposed(struct moe_election *e, uint64_t now_ns, bool ok, int64_t revision)
{
    if (e->phase != MOE_ELECTION_PROPOSES)
        return;
    if (!ok || revision == 0) { /* another one leads: the next look tells which */
        stop_leading(e, ok ? now_ns : now_ns + e->poll_ns);
        return;
    }
    e->revision = revision;
    e->phase = MOE_ELECTION_LEADS;
    e->next_ns = now_ns;
}

void moe_election_on_renewed(struct moe_election *e, uint64_t now_ns, uint64_t renewal,
                             int64_t ttl_s)
{
    if (e->phase != MOE_ELECTION_LEADS)
        return;
    if (ttl_s <= 0)
        stop_leading(e, now_ns);
    else
        moe_lease_on_answered(&e->lease, renewal, 0);
}

void moe_election_on_released(struct moe_election *e, uint64_t now_ns)
{
    if (e->phase != MOE_ELECTION_RELEASES)
        return;
    e->lease_id = 0;
    wait_until(e, e->next_ns > now_ns ? e->next_ns : now_ns);
}

bool moe_election_leads(const struct moe_election *e, uint64_t now_ns)
{
    return e->revision != 0 && MOE_GUARD(LEADS_IN_ITS_LEASE, now_ns < e->lease.until_ns);
}

void moe_election_resign(struct moe_election *e, uint64_t now_ns, uint64_t pause_ns)
{
    if (e->phase == MOE_ELECTION_LEADS)
        stop_leading(e, now_ns + pause_ns);
}

/* ------------------------------------------------------------------ the fence of writes */

enum moe_fence_result moe_fence_on_written(struct moe_fence *f, bool succeeded, int64_t revision,
                                           int64_t leader, int64_t state)
{
    if (succeeded) {
        f->state = revision;
        return MOE_FENCE_WRITTEN;
    }
    if (leader == f->leader) {
        f->state = state;
        return MOE_FENCE_AGAIN;
    }
    return MOE_FENCE_LOST;
}
