/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator as a running service: gRPC and HTTP on one side, the membership machine and its
 * log on the other. The thread in moe_coordinator_run owns the machine. gRPC threads only put
 * events into its inbox, so inputs run one at a time. */
#ifndef MOE_COORDINATOR_SERVICE_H
#define MOE_COORDINATOR_SERVICE_H

#include "balance/rebalancer.h"
#include "store/etcd.h"

struct moe_coordinator;
struct moe_guard;

struct moe_coordinator_config {
    const char *listen; /* "host:port"; port 0 = any */
    /* "host:port" for sessions of workers alone, with a separate listener and thread: what clients
     * of `listen` do delays no heartbeat. NULL: sessions use `listen`. */
    const char *control_listen;
    bool insecure;           /* allow an address that is not loopback */
    struct moe_guard *guard; /* who may do what; borrowed. NULL: every caller may do everything */
    uint32_t slots;          /* workers that the group can have */
    uint32_t size;     /* 0 = all of them hold experts, else those of a new group: membership.h */
    uint32_t replicas; /* copies of each expert, 1..size */
    bool partial;      /* views may lack experts */
    uint32_t spare;    /* places of each layer on a slot for copies that move */
    struct moe_rebalancer_policy rebalance; /* moves without an operator; every_ns 0: none */
    uint32_t lease_ms;
    uint32_t form_timeout_ms;
    uint32_t join_wait_s; /* training waits for a worker that reads: see read_ns of membership.h */
    /* The file store: NULL = no durable state; epochs start at 1. With `etcd`: remembers the group
     * of the prefix; may be NULL. */
    const char *state_dir;
    /* Keeps the state in etcd, of several coordinators of which one leads; `wake`, `ctx` and
     * `format` are not used. NULL: the file store. A signal then ends this process and not the
     * group. */
    const struct moe_etcd_config *etcd;
    const char *metrics_listen; /* NULL: no metrics endpoint */
    uint64_t health_step_ms;    /* see struct moe_progress_config; 0 = 500 */
    /* SIGTERM, SIGINT: the first shuts the group down, the second quits. SIGHUP opens the log file
     * again; call moe_hangup_hold before. */
    bool handle_signals;
};

/* Starts to listen. Errors: those of the store, the server and the metrics endpoint. */
struct moe_status moe_coordinator_create(const struct moe_coordinator_config *config,
                                         struct moe_coordinator **out) MOE_CHECKED;
uint16_t moe_coordinator_port(const struct moe_coordinator *c);
/* 0 without control_listen. */
uint16_t moe_coordinator_control_port(const struct moe_coordinator *c);
/* 0 without a metrics endpoint. */
uint16_t moe_coordinator_metrics_port(const struct moe_coordinator *c);
/* Serves until a shutdown is complete (MOE_OK) or is cut short (MOE_CANCELLED). */
struct moe_status moe_coordinator_run(struct moe_coordinator *c) MOE_CHECKED;
/* [any thread] Like a signal: the first call begins the shutdown of the group, the second ends run.
 */
void moe_coordinator_request_stop(struct moe_coordinator *c);
/* Not while moe_coordinator_run runs. NULL is ignored. */
void moe_coordinator_destroy(struct moe_coordinator *c);

#endif
