/* SPDX-License-Identifier: Apache-2.0 */
/* The lease: how long a worker may believe that the coordinator counts it as a member.
 *
 * Each heartbeat is answered. The worker's lease runs from the moment at which it *sent* the
 * heartbeat that was answered, the coordinator's from the moment at which it *received* it, and the
 * coordinator's is longer by a margin. So the worker's lease ends first, also when both clocks
 * drift: the coordinator gives a slot away only after its last holder knows that it has lost it.
 *
 * struct moe_lease is pure: times are arguments, and one thread uses it. The worker's session and
 * the membership simulation call the same functions. struct moe_lease_gate hands the result to
 * other threads. */
#ifndef MOE_DAEMON_LEASE_H
#define MOE_DAEMON_LEASE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    /* Two clocks may run this much faster or slower than true time, each. */
    MOE_LEASE_DRIFT_PERCENT = 5,
    /* The coordinator's lease is longer than the worker's by this much. */
    MOE_LEASE_MARGIN_PERCENT = 15,
    MOE_LEASE_HEARTBEATS = 6,  /* in a worker's lease */
    MOE_LEASE_UNANSWERED = 32, /* heartbeats without an answer that are remembered */
    /* A change of training may take half a worker's lease: it begins only with that much left. */
    MOE_LEASE_TICKETS = 2,
    MOE_LEASE_SLACKS = 20,     /* in a worker's lease; see moe_lease_gate_covers_group */
    MOE_LEASE_AWAIT_MS = 1000, /* at most; see moe_lease_gate_await_change */
};
/* A fast coordinator's lease lasts at least as long as a slow worker's. */
_Static_assert((100 + MOE_LEASE_MARGIN_PERCENT) * (100 - MOE_LEASE_DRIFT_PERCENT) >
                   100 * (100 + MOE_LEASE_DRIFT_PERCENT),
               "the margin must cover the drift of both clocks");

/* The clock of leases: ns since the host booted. It goes on while the host is suspended, unlike
 * moe_clock_ns: a worker that slept must know that its lease is over. */
uint64_t moe_lease_clock_ns(void);

/* ------------------------------------------------------------------ the worker's belief */

struct moe_lease {
    uint64_t term_ns;      /* of the worker's lease; 0 = the coordinator has not sent it yet */
    uint64_t until_ns;     /* the lease ends; 0 = there was none */
    uint64_t answered_ns;  /* the last heartbeat that was answered was sent then; 0 = none */
    uint64_t all_until_ns; /* an estimate: by then the first member of the group loses its lease */
    uint64_t sequence;     /* of the last heartbeat */
    uint64_t sent_ns[MOE_LEASE_UNANSWERED]; /* of heartbeat n at [n % MOE_LEASE_UNANSWERED] */
};

/* A worker's lease, from the coordinator's and its margin (MOE_LEASE_MARGIN_PERCENT, except in the
 * simulation). */
uint64_t moe_lease_term_ns(uint64_t coordinator_ns, unsigned margin_percent);

/* A heartbeat is about to be sent; take `now_ns` before sending. Returns its sequence, from 1. */
uint64_t moe_lease_on_sent(struct moe_lease *l, uint64_t now_ns);
/* When this heartbeat was sent, if it is one of the last MOE_LEASE_UNANSWERED, else 0. */
uint64_t moe_lease_sent_ns(const struct moe_lease *l, uint64_t sequence);
/* The heartbeat was answered. `oldest_ns`: for how long the coordinator had received nothing of the
 * member that had been silent for longest. Answers of unknown heartbeats change nothing. */
void moe_lease_on_answered(struct moe_lease *l, uint64_t sequence, uint64_t oldest_ns);
/* The coordinator has given the slot away. */
void moe_lease_end(struct moe_lease *l);

/* ------------------------------------------------------------------ for other threads
 *
 * One thread writes, any thread reads. A reader with NULL for a gate needs no lease. */

struct moe_lease_gate {
    uint64_t (*clock)(void); /* moe_lease_clock_ns, except in tests */
    _Atomic uint64_t until_ns, all_until_ns, ticket_ns, slack_ns, answered_ns;
};

/* No lease is held until the first moe_lease_gate_set. */
void moe_lease_gate_init(struct moe_lease_gate *g, uint64_t (*clock)(void));
void moe_lease_gate_set(struct moe_lease_gate *g, const struct moe_lease *l);

/* This worker has a lease: it may answer. */
bool moe_lease_gate_held(const struct moe_lease_gate *g);
/* Its lease lasts for a change of training: it may begin one that the sequencer has issued. */
bool moe_lease_gate_covers_change(const struct moe_lease_gate *g);
/* The same; waits for it, at most as long as from one heartbeat to the next. When the coordinator
 * answers again after a pause, the sequencer may know a moment before this worker. */
bool moe_lease_gate_await_change(const struct moe_lease_gate *g);
/* The leases of all members last, as far as this worker can know: the sequencer may issue a change.
 * The slack keeps a change from reaching a slot with a lease that has become too short meanwhile.
 */
bool moe_lease_gate_covers_group(const struct moe_lease_gate *g);
/* Time left, for metrics; 0 = none. */
uint64_t moe_lease_gate_remaining_ns(const struct moe_lease_gate *g);
/* Time since the last heartbeat that was answered was sent, for metrics; 0 = none was. */
uint64_t moe_lease_gate_heartbeat_age_ns(const struct moe_lease_gate *g);

#endif
