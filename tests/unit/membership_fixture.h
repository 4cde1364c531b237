/* SPDX-License-Identifier: Apache-2.0 */
/* A membership machine for single scenarios, and the world around it: what the machine saves is on
 * `disk` at once, its messages are counted, and time passes when a test says so. */
#ifndef MOE_TEST_MEMBERSHIP_FIXTURE_H
#define MOE_TEST_MEMBERSHIP_FIXTURE_H

#include "base/clock.h"
#include "coordinator/membership.h"
#include "support/check.h"

enum { SLOTS = 3, LEASE_MS = 1000, READ_MS = 5000, ATTEMPTS = 3 };

/* A story with a new machine. */
#define STORY(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int setup(void **unused);
int teardown(void **unused);

extern struct moe_membership *m;
extern struct moe_membership_saved disk;
extern uint64_t now;
/* Outputs since the last look (`forget`). */
extern size_t prepares, commits, aborts, drains, closes, assigns, saves, answers;
extern size_t heartbeat_answers;
extern size_t reads;                                                    /* READ_CHECKPOINTs */
extern uint64_t answered_released, read_order[MOE_PLACEMENT_SLOTS_MAX]; /* the last ones */
/* Of the last PREPARE, CLOSE, Register and answer to a heartbeat. */
extern uint64_t last_epoch, closed_stream, last_stream, answered_sequence;
extern struct moe_status closed_with;
extern uint32_t answered_oldest_ms;
extern bool answered_keep;
extern bool exited;
extern enum moe_log_level ended_level; /* of the last end of an epoch */
/* Of the next machine, write or Register. */
extern uint32_t replicas, experts;
extern bool disk_full, trains, trains_with_copies;
extern uint32_t domain;             /* of READYs: slots that masks have together; 0: no masks */
extern uint64_t last_session;       /* of the last PREPARE; 0 = a new one */
extern uint64_t registered_session; /* epoch of the session that Registers tell of; 0 = none */
extern uint32_t registered_tokens;  /* its max_tokens */
/* Of workers that register; NULL: their own. */
extern const char *given_endpoint, *given_control;

void carry_out(void);
void forget(void);
/* Another machine, from what is on the disk. */
void create_for(uint32_t slots);

/* Worker `id`'s process `incarnation` registers on a new stream under this identity, with a slot
 * token of bytes `token`; returns the stream's number. */
uint64_t join_as(uint32_t id, uint64_t incarnation, const char *identity, int token);
uint64_t join(uint32_t id, uint64_t incarnation);
/* The same, after the old process's stream has ended. */
uint64_t replace(uint64_t old_stream, uint32_t id, uint64_t incarnation);
void loaded(uint64_t stream);
void heartbeat(uint64_t stream, uint64_t epoch);
/* The member reports that a checkpoint has the state with these calls. */
void heartbeat_saved(uint64_t stream, uint64_t epoch, uint64_t calls);
/* The answer to the slot's last READ_CHECKPOINT; `error` NULL: none. */
void checkpoint_read(uint64_t stream, uint32_t slot, const char *error);
void checkpoint_read_as(uint64_t stream, uint32_t slot, struct moe_status st);
void ready(uint64_t stream, const char *error); /* NULL: none */
/* Time passes in small steps, with heartbeats of the streams given. */
void pass(uint64_t ms, uint64_t epoch, const uint64_t *streams, size_t count);
struct moe_membership_group group(void);
void expect_state(enum moe_group_state want);
/* All workers have registered and loaded; then they serve. */
void load_all(uint64_t s[SLOTS]);
void serve(uint64_t s[SLOTS]);

/* A new group, with two copies of each expert: any one slot may be lost. */
void create_with_copies(void);
void lose_stream(uint64_t stream);
/* The member reports that it misses these slots. */
void miss(uint64_t stream, uint64_t epoch, uint64_t slots);
/* The worker of `slot` dies in the view of `epoch`, and slot 0 misses it. */
void lose(const uint64_t s[SLOTS], uint32_t slot, uint64_t epoch);

#endif
