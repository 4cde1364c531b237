/* SPDX-License-Identifier: Apache-2.0 */
/* The client object, shared by the files of libmoeclient and by nobody else. */
#ifndef MOE_CLIENT_INTERNAL_H
#define MOE_CLIENT_INTERNAL_H

#include "base/mutex.h"
#include "base/status.h"
#include "moe/client.h"
#include "moe/v1/expert.pb-c.h"
#include "rpc/client.h"
#include "timers.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    MOE_CLIENT_DEFAULT_TIMEOUT_MS = 60000,
    MOE_CLIENT_DEFAULT_ATTEMPTS = 4,
    MOE_CLIENT_DEFAULT_SPREAD_TOKENS = 512,
    MOE_CLIENT_MAX_CONNECTIONS = 64, /* per worker */
    MOE_CLIENT_HOME = 0, /* connection of training calls, and of passes that are kept for them */
};

/* One connection to one worker, with the thread that reads it. */
struct moe_client_connection {
    struct moe_rpc_client *rpc;
    struct moe_rpc_channel *channel;
    char *endpoint; /* where it goes; owned */
};

struct moe_client {
    struct moe_client_config config;        /* defaults filled in; endpoint is NULL */
    Moe__V1__GetServerInfoResponse *server; /* these two own the strings of `info` */
    Moe__V1__GetModelResponse *model;
    struct moe_client_info info;
    struct moe_client_layer *layers;
    /* Connection i belongs to worker i % worker_count, so that successive connections are of
     * different workers: taking them in turn spreads requests, and the next connection is the other
     * worker to try. */
    struct moe_client_connection *connections;
    size_t connection_count, worker_count;
    _Atomic uint32_t next_connection;
    _Atomic uint64_t jitter; /* state of the generator that spreads retries in time */
    struct moe_client_timers *timers;
    char session[32]; /* of changes that name none; random */

    struct moe_mutex lock;
    pthread_cond_t idle;
    MOE_GUARDED_BY(lock) size_t in_flight; /* calls not yet finished */
};

/* A call begins and ends; moe_client_close waits for the ends. */
void moe_client_enter(struct moe_client *c);
void moe_client_leave(struct moe_client *c);

/* The connection whose turn it is. */
size_t moe_client_take_connection(struct moe_client *c);

/* A connection of its own to `target`. */
struct moe_status moe_client_open_connection(const char *target, uint64_t max_message_bytes,
                                             struct moe_client_connection *connection) MOE_CHECKED;
/* A connection that was never opened, all zero, is ignored. */
void moe_client_close_connection(struct moe_client_connection *connection);

/* A failure of a call on this connection as the caller is to see it: who could not be reached, or
 * could not serve, is named. */
struct moe_status moe_client_blame_connection(const struct moe_client_connection *connection,
                                              struct moe_status st);

/* The pause after the given attempt (1, 2, ...): doubling, between half and all of it at random,
 * and never shorter than what the server asked for. */
uint64_t moe_client_pause_ns(struct moe_client *c, uint32_t attempt, uint32_t retry_after_ms);

/* Now + timeout_ms, or + the client's default when that is 0. */
uint64_t moe_client_deadline(const struct moe_client *c, uint64_t timeout_ms);

#endif
