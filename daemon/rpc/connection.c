/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: the part of the core behind each client that the listener has let in. */
#include "base/clock.h"
#include "rpc/serving.h"

#include <grpc/grpc_posix.h>
#include <stdlib.h>
#include <unistd.h>

void moe_rpc_connection_unref(struct moe_rpc_connection *c)
{
    if (atomic_fetch_sub_explicit(&c->references, 1, memory_order_acq_rel) != 1)
        return;
    moe_rpc_uploads_free(c->uploads);
    moe_mutex_destroy(&c->requesting);
    free(c);
}

/* [shard thread] Its channel is closed. Calls may still be in the hands of handlers. */
static void on_shut_down(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_connection *c = MOE_RPC_OWNER(struct moe_rpc_connection, on_shut_down, tag);
    struct moe_rpc_server *server = c->shard->server;
    (void)ok;
    /* This event may come before the call in shut_down returns. That still uses the server. */
    moe_mutex_lock(&c->requesting);
    moe_mutex_unlock(&c->requesting);
    grpc_server_destroy(c->core);
    moe_rpc_connection_unref(c);
    moe_mutex_lock(&server->lock);
    server->connections--;
    pthread_cond_broadcast(&server->changed);
    moe_mutex_unlock(&server->lock);
}

static void shut_down(struct moe_rpc_connection *c)
{
    moe_mutex_lock(&c->requesting);
    c->shutting = true;
    MOE_RPC_HAND_OVER(&c->on_shut_down);
    grpc_server_shutdown_and_notify(c->core, c->shard->queue, &c->on_shut_down);
    moe_mutex_unlock(&c->requesting);
}

void *moe_rpc_connection_opened(void *ctx, const struct moe_rpc_identity *who,
                                struct moe_connection *connection, int fd)
{
    struct moe_rpc_server *server = ctx;
    struct moe_rpc_connection *c = calloc(1, sizeof *c);
    struct moe_status st =
        c != NULL ? moe_rpc_uploads_open(&server->memory.budget, who, connection, &c->uploads)
                  : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, " ");
    if (moe_failed(&st)) {
        free(c);
        close(fd);
        return NULL;
    }
    unsigned turn = atomic_fetch_add(&server->next_shard, 1);
    c->shard = &server->shards[turn % server->shard_count];
    c->who = *who;
    c->number = turn;
    c->on_shut_down.fn = on_shut_down;
    moe_mutex_init(&c->requesting);
    atomic_init(&c->references, 1);
    atomic_init(&c->keepers, 0);
    c->core = grpc_server_create(
        &(grpc_channel_args){.num_args = server->arg_count, .args = server->args}, NULL);
    grpc_server_register_completion_queue(c->core, c->shard->queue, NULL);
    grpc_server_start(c->core);
    moe_mutex_lock(&server->lock);
    server->connections++;
    moe_mutex_unlock(&server->lock);
    moe_rpc_accept(c);
    if (atomic_load(&c->accepting) == 0) { /* out of memory */
        close(fd);
        shut_down(c);
        return NULL;
    }
    grpc_server_credentials *plain = grpc_insecure_server_credentials_create();
    grpc_server_add_channel_from_fd(c->core, fd, plain);
    grpc_server_credentials_release(plain);
    return c;
}

bool moe_rpc_connection_keeps(void *ctx, void *connection)
{
    struct moe_rpc_connection *c = connection;
    (void)ctx;
    return atomic_load(&c->keepers) > 0;
}

void moe_rpc_connection_closed(void *ctx, void *connection)
{
    struct moe_rpc_connection *c = connection;
    (void)ctx;
    moe_rpc_uploads_close(c->uploads);
    shut_down(c);
}

/* ------------------------------------------------------------------ streams */

/* The core bounds a client's streams only once the client has acknowledged the server's SETTINGS.
 * Until these have come, an honest client opens 100 at most. */
enum { EARLY_STREAMS = 100 };

static size_t stream_began(void *ctx, uint32_t stream, uint8_t *field)
{
    struct moe_rpc_connection *c = ctx;
    if (!moe_rpc_uploads_admit(c->uploads, c->shard->server->max_streams + EARLY_STREAMS))
        return MOE_FRAMES_TOO_MANY;
    return moe_rpc_upload_begin(c->uploads, stream, field);
}

static uint32_t stream_data(void *ctx, uint32_t stream, const uint8_t *bytes, size_t length)
{
    struct moe_rpc_connection *c = ctx;
    return moe_rpc_upload_data(c->uploads, stream, bytes, length, moe_clock_ns());
}

static void stream_half_closed(void *ctx, uint32_t stream)
{
    struct moe_rpc_connection *c = ctx;
    moe_rpc_upload_half_close(c->uploads, stream);
}

static void stream_ended(void *ctx, uint32_t stream)
{
    struct moe_rpc_connection *c = ctx;
    moe_rpc_upload_end(c->uploads, stream);
}

_Static_assert((int)MOE_FRAMES_FIELD_BYTES >= (int)MOE_RPC_UPLOAD_FIELD_BYTES,
               "the field of an upload finds no room");
const struct moe_frames_events moe_rpc_connection_streams = {.began = stream_began,
                                                             .data = stream_data,
                                                             .half_closed = stream_half_closed,
                                                             .ended = stream_ended};
