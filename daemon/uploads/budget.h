/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for messages that come in, and who may have how much of it. Pure: no I/O, no clock; all
 * functions from any thread.
 *
 * A message is charged by its announced length from the moment its 5-byte prefix has come in, until
 * its handler has it. There are two sorts:
 *
 *   small  up to MOE_RPC_LOOKAHEAD_BYTES. The core takes these bytes whether the call is read or
 *          not. So a small message never waits: it is charged at once, or its call is refused.
 *   large  Flow control stops its sender after the look-ahead, until the call is read. So a large
 *          message waits in line until its bytes are free.
 *
 * Bounds: three quarters of the bytes are for large messages and one quarter for small ones, so
 * that neither keeps the other out. Of each part, and of the places in line, one connection may
 * have a quarter, and so may all connections of one identity. Each of these may always have one
 * message, whatever its length. A message that waits for the share of its connection or identity
 * lets others pass. */
#ifndef MOE_UPLOADS_BUDGET_H
#define MOE_UPLOADS_BUDGET_H

#include "base/mutex.h"
#include "base/status.h"
#include "daemon/identity.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

/* Bytes that a peer may send before the message is read. Most messages fit, and so need no window
 * update. */
enum { MOE_RPC_LOOKAHEAD_BYTES = 1 << 20 };

struct moe_rpc_upload;
TAILQ_HEAD(moe_rpc_line, moe_rpc_upload);

enum moe_rpc_sort { MOE_RPC_SMALL, MOE_RPC_LARGE, MOE_RPC_SORTS };

/* What is charged: to one connection, to one identity, or in all. */
struct moe_rpc_account {
    uint64_t bytes[MOE_RPC_SORTS];
    uint32_t waiting; /* places in line */
};

/* All connections of one named identity. */
struct moe_rpc_payer {
    LIST_ENTRY(moe_rpc_payer) link;
    struct moe_rpc_account account;
    uint32_t connections;
    enum moe_rpc_link kind;
    char name[256];
};

/* How an upload that waits reaches its call. `hold` is called under the budget's lock, while the
 * waiter cannot go: it keeps the waiter alive. `wake` follows without the lock; the waiter then
 * asks moe_rpc_upload_next again. */
struct moe_rpc_waiters {
    void (*hold)(void *waiter);
    void (*wake)(void *waiter);
};

struct moe_rpc_budget {
    struct moe_rpc_waiters waiters;
    uint64_t limit[MOE_RPC_SORTS];
    uint32_t max_waiting;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct moe_rpc_account all;
        uint32_t large;           /* messages that are charged as large */
        struct moe_rpc_line line; /* the oldest first */
        LIST_HEAD(, moe_rpc_payer) payers;
    };
};

/* What a budget is used for at the moment. */
struct moe_rpc_budget_use {
    uint64_t bytes;          /* charged */
    uint32_t large, waiting; /* large messages that are read, that wait */
    uint64_t oldest_ns;      /* since when the oldest waits; 0 = none does */
};

/* `bytes` is raised to sixteen look-aheads, so that each connection may fill one. */
void moe_rpc_budget_init(struct moe_rpc_budget *b, uint64_t bytes, uint32_t max_waiting,
                         const struct moe_rpc_waiters *waiters);
/* No connection is left. */
void moe_rpc_budget_destroy(struct moe_rpc_budget *b);
struct moe_rpc_budget_use moe_rpc_budget_use(struct moe_rpc_budget *b);

#endif
