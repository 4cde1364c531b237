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
 *          message waits in line until its bytes are free. It takes its place when it is announced,
 *          also if its call does not ask for it yet: so the places bound the look-aheads.
 *
 * Bounds: three quarters of the bytes are for large messages and one quarter for small ones, so
 * that neither keeps the other out. Of each part, and of the places in line, one connection may
 * have a quarter, and so may all connections of one identity. Of the small part, a connection may
 * also have no more than half of what is left: many greedy ones leave room for the next. Each of
 * these may always have one large message, whatever its length. A message that waits for the share
 * of its connection or identity, or for its call to ask, lets others pass.
 *
 * Open streams, and places in line, are shared by owners: an identity with all its connections, or
 * one connection without a name. When all are taken, the owner that has most of them gives way to
 * one that has fewer: it loses a connection, or a place. So an owner at or below its equal share is
 * never refused, and loses nothing, because of one that is above. */
#ifndef MOE_UPLOADS_BUDGET_H
#define MOE_UPLOADS_BUDGET_H

#include "base/mutex.h"
#include "base/status.h"
#include "daemon/identity.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

/* Open streams of all connections, and those that an owner may always have. Each costs the core
 * about 13 KiB, also before it brings a message. */
enum { MOE_RPC_STREAMS_MAX = 16384, MOE_RPC_STREAMS_LEAST = 8 };

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

/* An owner: one named identity, or a connection that pays for itself alone. */
struct moe_rpc_payer {
    bool named;
    LIST_ENTRY(moe_rpc_payer) link; /* in `payers`, if it is named */
    struct moe_rpc_account account;
    uint32_t connections;
    LIST_HEAD(, moe_rpc_uploads) members; /* these connections */
    uint32_t open;                        /* their streams */
    LIST_ENTRY(moe_rpc_payer) by_open;    /* if `open` is not 0 */
    enum moe_rpc_link kind;
    char name[256];
};

/* Why a message is not read. */
enum moe_rpc_refusal {
    MOE_RPC_QUEUE_FULL, /* no room for it, or no place in line */
    MOE_RPC_TOO_LARGE,  /* announced as longer than its method allows */
    MOE_RPC_TOO_SLOW,   /* it comes in below the least rate */
    MOE_RPC_REFUSALS
};

/* How the budget answers a call that has asked for its next message: exactly once, by `read` or
 * `fail`. `hold` comes before, under the budget's lock, while the call cannot go: it keeps the call
 * alive until then. These two are called without the lock, from any thread. `fail` may also come
 * after `read`: then the message is too slow.
 *
 * `end` ends a connection that must give way; it is what moe_rpc_uploads_open was given. Once for a
 * connection, before its moe_rpc_uploads_close has returned; under the budget's lock, from any
 * thread that lets a stream begin. */
struct moe_rpc_waiters {
    void (*hold)(void *waiter);
    void (*read)(void *waiter); /* the next message, or the end, may be read now */
    void (*fail)(void *waiter, struct moe_status why);
    void (*end)(void *connection);
};

struct moe_rpc_budget {
    struct moe_rpc_waiters waiters;
    uint64_t limit[MOE_RPC_SORTS];
    uint32_t max_waiting;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct moe_rpc_account all;
        uint64_t peak; /* the most bytes since the last check */
        uint32_t connections;
        uint32_t open; /* streams of all connections without those that end */
        uint32_t most; /* no owner has more than this */
        LIST_HEAD(, moe_rpc_payer) by_open[MOE_RPC_STREAMS_MAX + 1]; /* the last one: or more */
        uint32_t large; /* messages that are charged as large */
        uint64_t refused[MOE_RPC_REFUSALS];
        struct moe_rpc_line line;    /* the oldest first */
        struct moe_rpc_line reading; /* messages that may be read and were not delivered */
        LIST_HEAD(, moe_rpc_payer) payers;
    };
};

/* What a budget is used for at the moment. */
struct moe_rpc_budget_use {
    uint64_t bytes;                     /* charged */
    uint64_t peak;                      /* the most since the last check */
    uint32_t connections;               /* with those that calls still refer to */
    uint32_t open;                      /* streams that have begun and do not end */
    uint32_t large, waiting;            /* large messages that are read, that wait */
    uint64_t oldest_ns;                 /* since when the oldest waits; 0 = none does */
    uint64_t refused[MOE_RPC_REFUSALS]; /* since the beginning */
};

/* `bytes` is raised to sixteen look-aheads, so that each connection may fill one. */
void moe_rpc_budget_init(struct moe_rpc_budget *b, uint64_t bytes, uint32_t max_waiting,
                         const struct moe_rpc_waiters *waiters);
/* No connection is left. */
void moe_rpc_budget_destroy(struct moe_rpc_budget *b);
struct moe_rpc_budget_use moe_rpc_budget_use(struct moe_rpc_budget *b);

/* The least rate of a message that is being read: 64 KiB a second, from one second on. A faster
 * sender collects credit for up to five seconds without a byte. */
enum { MOE_RPC_LEAST_RATE = 64 << 10 };
/* Fails calls with messages that come in too slowly. Call it about once a second. */
void moe_rpc_budget_check(struct moe_rpc_budget *b, uint64_t now_ns);

#endif
