/* SPDX-License-Identifier: Apache-2.0 */
/* Which of several coordinators leads: the machine of one of them. Pure: no I/O, no clock, no
 * allocation. Times are of moe_lease_clock_ns.
 *
 * The leader has a key in etcd, made by a transaction that needs its absence, with a lease that the
 * leader renews. The revision at which the key was made is the leader's fence: each write of the
 * group's state needs it (struct moe_fence). So a leader that has lost the key changes nothing, if
 * it knows of that or not.
 *
 * Workers must not get messages of two leaders either. So the leader counts its lease from when it
 * *sent* the request that was answered, and stops with a margin (daemon/lease.h: two clocks may
 * drift by 5 % each). Then its time is over before etcd can remove the key.
 *
 * The machine makes one call at a time, except for renewals. Each call gets its answer, or a
 * failure when its deadline is over; the call may have been carried out then. */
#ifndef MOE_STORE_ELECTION_H
#define MOE_STORE_ELECTION_H

#include "daemon/lease.h"

enum moe_election_phase {
    MOE_ELECTION_WAITS,    /* the next look is due at next_ns */
    MOE_ELECTION_LOOKS,    /* reads the leader's key */
    MOE_ELECTION_GRANTS,   /* asks for a lease */
    MOE_ELECTION_PROPOSES, /* tries to make the key */
    MOE_ELECTION_LEADS,
    MOE_ELECTION_RELEASES, /* the lease is to end; a call is under way */
};

enum moe_election_call {
    MOE_ELECTION_NONE,
    MOE_ELECTION_LOOK,    /* read the leader's key, then on_looked */
    MOE_ELECTION_GRANT,   /* a lease of ttl_s, then on_granted */
    MOE_ELECTION_PROPOSE, /* make the key with `lease_id` if there is none, then on_proposed */
    MOE_ELECTION_RENEW,   /* renew `lease_id`; on_renewed if it is answered */
    MOE_ELECTION_RELEASE, /* end `lease_id`, then on_released */
};

struct moe_election {
    uint32_t ttl_s;          /* of the leader's lease, as asked for */
    uint64_t poll_ns;        /* from one look at the leader's key to the next */
    unsigned margin_percent; /* MOE_LEASE_MARGIN_PERCENT, except in the simulation */
    bool held;               /* only looks at the key */
    unsigned failed_looks;   /* in a row; each further one makes the pause longer */
    enum moe_election_phase phase;
    bool unsent;      /* the call of the phase is not made yet */
    int64_t lease_id; /* 0 = none */
    int64_t revision; /* of the key's creation while this process leads; else 0 */
    uint64_t next_ns; /* WAITS: of the look; LEADS: of the renewal */
    uint64_t grant;   /* number of the grant's request, as of renewals */
    struct moe_lease lease;
};

void moe_election_init(struct moe_election *e, uint32_t ttl_s, uint64_t poll_ns, uint64_t now_ns);
/* While held, this process looks at the leader's key and does not propose itself. */
void moe_election_hold(struct moe_election *e, bool held);
/* The next time at which moe_election_next has something to do; MOE_NEVER while an answer is
 * awaited. */
uint64_t moe_election_deadline(const struct moe_election *e);
/* The call to make now. Repeat until it is NONE. */
enum moe_election_call moe_election_next(struct moe_election *e, uint64_t now_ns);
/* Number of the last renewal, for on_renewed. */
uint64_t moe_election_renewal(const struct moe_election *e);

/* `ok` is false if the call failed, or may have. */
void moe_election_on_looked(struct moe_election *e, uint64_t now_ns, bool ok, bool exists);
void moe_election_on_granted(struct moe_election *e, uint64_t now_ns, bool ok, int64_t lease_id,
                             int64_t ttl_s);
/* `revision`: of the transaction that has made the key; 0 = another one was there. */
void moe_election_on_proposed(struct moe_election *e, uint64_t now_ns, bool ok, int64_t revision);
/* `ttl_s` 0: the lease has ended. */
void moe_election_on_renewed(struct moe_election *e, uint64_t now_ns, uint64_t renewal,
                             int64_t ttl_s);
void moe_election_on_released(struct moe_election *e, uint64_t now_ns);

/* This process leads: it may write, and talk to workers. */
bool moe_election_leads(const struct moe_election *e, uint64_t now_ns);
/* It does not want to lead any more, or knows that it does not: looks again after `pause_ns`.
 */
void moe_election_resign(struct moe_election *e, uint64_t now_ns, uint64_t pause_ns);

/* ------------------------------------------------------------------ the fence of writes
 *
 * A write is a transaction: it puts the state if the leader's key has the revision `leader`, and
 * the state was last changed at `state`. Otherwise the transaction reads both revisions. The second
 * condition is for a write of this process that had no answer: it may be carried out at any
 * time, also after a later one. */

struct moe_fence {
    int64_t leader; /* revision of the leader's key */
    int64_t state;  /* revision of the last change of the state that this process knows; 0 = none */
};

enum moe_fence_result {
    MOE_FENCE_WRITTEN,
    MOE_FENCE_AGAIN, /* an own write without an answer came first: make the transaction again */
    MOE_FENCE_LOST,  /* another process leads, or none */
};

/* The transaction was answered. `revision`: of the transaction; `leader` and `state`: as it read
 * them, 0 = no such key. They count only where it did not succeed. */
enum moe_fence_result moe_fence_on_written(struct moe_fence *f, bool succeeded, int64_t revision,
                                           int64_t leader, int64_t state);

#endif
