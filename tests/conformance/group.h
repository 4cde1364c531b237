/* SPDX-License-Identifier: Apache-2.0 */
/* A group of processes for tests, one per slot, and the board they share.
 *
 * A group forks its processes before the test starts a thread; so group_start also calls
 * moe_backends_prepare.
 * The board is an anonymous shared mapping. It has the all-gather for session_join, a barrier, and
 * room for data that members exchange without the windows under test. */
#ifndef MOE_TEST_GROUP_H
#define MOE_TEST_GROUP_H

#include "moe/backend.h"
#include "support/random.h"

#include <sys/types.h>

enum {
    BOARD_BLOB = 4096,
    BOARD_TOKENS = 1024,
    BOARD_PAIRS = BOARD_TOKENS * MOE_MAX_TOP_K, /* (token, k) of one slot */
};

struct board {
    uint32_t arrived, generation; /* atomic: the barrier */
    uint32_t failed;              /* atomic: a member gave up; all waits end */
    uint32_t flag[MOE_MAX_SLOTS]; /* atomic: free for the test */
    uint32_t gather_ms;           /* how long an all-gather waits; set before the fork */
    uint8_t blob[MOE_MAX_SLOTS][BOARD_BLOB];
    int32_t ids[MOE_MAX_SLOTS][BOARD_PAIRS];
    float weights[MOE_MAX_SLOTS][BOARD_PAIRS];
    uint8_t state[MOE_MAX_SLOTS][BOARD_TOKENS];
};

struct member {
    struct board *board;
    uint32_t slot, slots;
    uint64_t live; /* the slots in the all-gather and in barriers */
    void *ctx;
};

struct group {
    struct board *board;
    uint32_t slots;
    pid_t pid[MOE_MAX_SLOTS];
};

/* Starts `slots` processes; each runs fn and exits with its result.
 *
 * MOE_TEST_HOSTS="NAMESPACE=ADDRESS,..." puts them on several hosts: with n of these, process s
 * runs in network namespace number s * n / slots (/var/run/netns), and its rows come to that
 * address. */
void group_start(struct group *g, uint32_t slots, int (*fn)(struct member *), void *ctx);
/* Waits for all; kills those that still run after `seconds`. status[slot] as from waitpid. True if
 * every member returned 0. Frees the board. */
bool group_finish(struct group *g, uint32_t seconds, int status[MOE_MAX_SLOTS]);

/* False if a member failed or `ms` passed. */
bool board_barrier(struct member *m, uint32_t ms);
/* A moe_allgather_fn; ctx is a struct member. */
struct moe_status board_allgather(void *ctx, const void *mine, void *all, size_t bytes);

/* Settings of the backend under test, for devices, and in the sessions that member_session
 * describes. NULL ends them. */
extern struct moe_backend_setting group_settings[];
/* Adds one, before group_start; does nothing if the backend has no such option. */
void group_set(const struct moe_backend *backend, const char *option, const char *value);

/* Of the sessions that member_session describes: slots of other domains count as other hosts. 0 =
 * all slots are on one host. */
extern uint32_t group_domain_size;
/* True if its slots are on several hosts, or count so. Then a slot may get the rows of others on
 * its host, and pass them on. */
bool group_has_hosts(void);
/* Slots of the first host; 1 if all slots are on one. In a member. */
uint32_t group_slots_of_host(const struct member *m);

/* A session of the whole group with the smallest window that suits the tests. */
struct moe_session_config member_session(struct member *m, uint64_t epoch, uint32_t budget_ms);

#endif
