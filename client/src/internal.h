/* SPDX-License-Identifier: Apache-2.0 */
/* The client object; only the files of libmoeclient use it. */
#ifndef MOE_CLIENT_INTERNAL_H
#define MOE_CLIENT_INTERNAL_H

#include "base/mutex.h"
#include "base/status.h"
#include "moe/client.h"
#include "moe/v1/expert.pb-c.h"
#include "rpc/client.h"
#include "timers.h"
#include "wire.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    MOE_CLIENT_DEFAULT_TIMEOUT_MS = 60000,
    MOE_CLIENT_DEFAULT_ATTEMPTS = 4,
    MOE_CLIENT_DEFAULT_SPREAD_TOKENS = 512,
    MOE_CLIENT_MAX_CONNECTIONS = 64, /* per worker */
    MOE_CLIENT_DEFAULT_LANES = 4,    /* connections per worker for the parts of a batch */
    MOE_CLIENT_HOME = 0,             /* connection of training calls and of retained passes */
};

/* One connection to one worker, with the thread that reads it. */
struct moe_client_connection {
    struct moe_rpc_client *rpc;
    struct moe_rpc_channel *channel;
    char *endpoint; /* owned */
};

struct moe_client {
    struct moe_client_config config;        /* defaults filled in; endpoint is NULL, and so is what
                                               `trust` has */
    struct moe_rpc_trust trust;             /* owned strings */
    Moe__V1__GetServerInfoResponse *server; /* these two own the strings of `info` */
    Moe__V1__GetModelResponse *model;
    struct moe_client_info info;
    struct moe_client_layer *layers;
    /* Connection i goes to worker i % worker_count. Round robin over connections therefore spreads
     * requests over workers, and a retry on the next connection reaches another worker. A worker
     * has `lanes` connections. The first `connection_count` of all are open and carry calls; the
     * others only carry parts of large batches, and open when one needs them. */
    struct moe_client_connection *connections; /* [worker_count * lanes] */
    size_t connection_count, worker_count, lanes;
    bool joins_parts; /* the worker waits for all parts of a batch */
    _Atomic uint32_t next_connection;
    _Atomic uint64_t jitter; /* state of the random generator for pauses between retries */
    struct moe_client_timers *timers;
    char session[32]; /* of changes without a session; random */
    struct moe_client_wanted wanted;

    struct moe_mutex lock;
    pthread_cond_t idle;
    MOE_GUARDED_BY(lock) size_t in_flight; /* calls not yet finished */
};

/* moe_client_close waits until each call that has entered leaves. */
void moe_client_enter(struct moe_client *c);
void moe_client_leave(struct moe_client *c);

/* The next connection, round robin; without `spread`, of those to the first worker. */
size_t moe_client_take_connection(struct moe_client *c);
/* A connection to the worker, below `lanes`; the first one if this one cannot open. */
size_t moe_client_take_lane(struct moe_client *c, size_t worker, size_t lane);

/* Opens a connection to `target`. */
struct moe_status moe_client_open_connection(const struct moe_client *c, const char *target,
                                             uint64_t max_message_bytes,
                                             struct moe_client_connection *connection) MOE_CHECKED;
/* Ignores a connection that is all zero (never opened). */
void moe_client_close_connection(struct moe_client_connection *connection);

/* `st` of a call on this connection, for the caller: the text of UNAVAILABLE gets the endpoint. */
struct moe_status moe_client_blame_connection(const struct moe_client_connection *connection,
                                              struct moe_status st);

/* The pause after the given attempt (1, 2, ...). It doubles with each attempt; a random part is
 * between half and all of it. It is never shorter than `retry_after_ms`. */
uint64_t moe_client_pause_ns(struct moe_client *c, uint32_t attempt, uint32_t retry_after_ms);

/* Calls a unary method and unpacks its answer. Free `*out` with protobuf_c_message_free_unpacked.
 */
struct moe_status moe_client_ask(struct moe_rpc_channel *channel, const char *path,
                                 uint64_t deadline, const struct moe_rpc_out *request,
                                 const ProtobufCMessageDescriptor *type,
                                 ProtobufCMessage **out) MOE_CHECKED;

/* Now + timeout_ms; 0 = the client's default. */
uint64_t moe_client_deadline(const struct moe_client *c, uint64_t timeout_ms);

#endif
