/* SPDX-License-Identifier: Apache-2.0 */
/* The store in etcd (API v3), for several coordinators of one group, of which one leads.
 *
 * Keys below the prefix:
 *   PREFIX/leader            "HOST:PORT HOST:PORT": addresses of the leader for operators and for
 *                            workers. It ends with the leader's lease
 *   PREFIX/state             the record, as a log of one record (store/records.h)
 *   PREFIX/images/N          image N: "GENERATION PIECES BYTES"
 *   PREFIX/images/N/GENERATION/PIECE   its bytes, in pieces of at most 512 KiB
 *
 * One thread, the owner's, calls all functions. The client's threads only leave answers, and call
 * `wake`. Functions that block say so; a call of etcd takes at most a second. */
#ifndef MOE_STORE_ETCD_H
#define MOE_STORE_ETCD_H

#include "daemon/endpoint.h"
#include "daemon/identity.h"
#include "store/store.h"

#include <stdbool.h>

enum {
    MOE_ETCD_LEASE_MIN_S = 2, /* etcd gives no shorter lease with its default settings */
    MOE_ETCD_LEASE_MAX_S = 60,
    MOE_ETCD_PREFIX_BYTES = 120,
};

struct moe_etcd;

struct moe_etcd_config {
    const char *endpoints;      /* "HOST:PORT,...": members of one cluster */
    const char *prefix;         /* of the group's keys; the same for all of its coordinators */
    struct moe_rpc_trust trust; /* with a CA the connections use TLS; borrowed strings */
    uint32_t lease_s;           /* of the leader */
    const struct moe_store_format *format; /* borrowed */
    void (*wake)(void *ctx);               /* call moe_etcd_run soon. Any thread; must not block */
    void *ctx;
};

/* Checks the settings alone. Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_etcd_check_settings(const char *endpoints, const char *prefix, bool tls,
                                          bool insecure) MOE_CHECKED;

/* Makes the client. Calls nothing yet. Errors: those of the settings and of moe_rpc_channel_open.
 */
struct moe_status moe_etcd_open(const struct moe_etcd_config *config,
                                struct moe_etcd **out) MOE_CHECKED;
/* Blocks. Gives the lease back if this process leads, so that another one leads at once. NULL is
 * ignored. */
void moe_etcd_close(struct moe_etcd *e);

/* Blocks. Reads the record; `found` as in store/file.h. Each endpoint is tried. Errors: those of
 * moe_records_read; MOE_DATA_LOSS for an incomplete record; MOE_UNAVAILABLE/IO. */
struct moe_status moe_etcd_read(struct moe_etcd *e, struct moe_store_found *found) MOE_CHECKED;

/* Takes part in the election from now on. `name`: the value of the leader's key. */
void moe_etcd_join(struct moe_etcd *e, const char *name);
/* While held, this process looks at the leader's key and does not propose itself. After
 * moe_etcd_join. */
void moe_etcd_hold(struct moe_etcd *e, bool held);
/* Does what is due, and takes answers. */
void moe_etcd_run(struct moe_etcd *e);
/* Nanoseconds until moe_etcd_run has something to do; MOE_NEVER = nothing. */
uint64_t moe_etcd_wait_ns(const struct moe_etcd *e);
/* This process leads now. True only after moe_etcd_join, and never once its lease may be over. */
bool moe_etcd_leads(const struct moe_etcd *e);
/* Ends the leadership of this process, or does nothing. It takes part again after `pause_ms`. */
void moe_etcd_resign(struct moe_etcd *e, uint32_t pause_ms);

/* The store of the leader; its functions block, and fail with NOT_LEADER when it does not lead.
 * moe_etcd_read comes first. Do not close it. */
struct moe_store *moe_etcd_store(struct moe_etcd *e);

struct moe_etcd_report {
    bool leads;
    uint64_t terms;        /* times that this process began to lead */
    uint64_t errors;       /* calls that failed, or had no answer in time */
    uint64_t remaining_ns; /* of the leader's lease, by its own count; 0 = does not lead */
    uint64_t age_ns;       /* since the request of the last answered renewal; 0 = does not lead */
    bool away;             /* no call was answered yet, or for a lease and longer */
    bool stray;            /* the leader's key has no lease: no coordinator has made it */
    char error[120];       /* the last failure; "" = the last call was answered */
    char leader[MOE_ENDPOINT_BYTES];         /* for operators; "" = not known */
    char leader_control[MOE_ENDPOINT_BYTES]; /* for workers; "" = not known */
};
void moe_etcd_report(const struct moe_etcd *e, struct moe_etcd_report *out);

#endif
