/* SPDX-License-Identifier: Apache-2.0 */
/* Life of a server: checking the address, starting shards, draining, stopping. */
#include "rpc/server.h"

#include "base/clock.h"
#include "base/wait.h"
#include "rpc/serving.h"

#include <grpc/impl/codegen/grpc_types.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Defaults. */
enum { STREAMS = 128, STREAMS_MAX = 1 << 20, TIME_LIMIT_MS = 60000 };

/* ------------------------------------------------------------------ configuration */

static struct moe_status check_config(const struct moe_rpc_server_config *config)
{
    if (config->max_message_bytes == 0 || config->max_message_bytes > INT_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "largest message must be between 1 byte and 2 GiB - 1");
    return moe_ok();
}

static void set_core_args(struct moe_rpc_server *s, const struct moe_rpc_server_config *config)
{
    int largest = (int)config->max_message_bytes;
    int silence = config->silence_ms == 0 ? MOE_RPC_KEEPALIVE_WAIT_MS : (int)config->silence_ms;
    const grpc_arg args[] = {
        moe_rpc_int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, largest),
        moe_rpc_int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, largest),
        moe_rpc_int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, (int)s->max_streams),
        moe_rpc_int_arg(GRPC_ARG_MAX_METADATA_SIZE, MOE_RPC_METADATA_BYTES),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, MOE_RPC_FRAME_BYTES),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, MOE_RPC_LOOKAHEAD_BYTES),
        /* A small compressed message may inflate to any size before its length is checked. */
        moe_rpc_int_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1),
        moe_rpc_int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, MOE_RPC_KEEPALIVE_MS),
        moe_rpc_int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, silence),
        moe_rpc_int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                        MOE_RPC_KEEPALIVE_MS / 3),
        moe_rpc_int_arg(GRPC_ARG_ENABLE_CHANNELZ, 0),
        /* Windows would grow with the bandwidth-delay product. That helps on routed links only, and
         * would exceed the memory bound of the budget. */
        moe_rpc_int_arg(GRPC_ARG_HTTP2_BDP_PROBE, moe_listener_is_local(s->listener) ? 0 : 1),
        moe_rpc_memory_arg(&s->memory),
    };
    _Static_assert(sizeof args / sizeof *args <= MOE_RPC_CORE_ARGS_MAX, "too many arguments");
    s->arg_count = sizeof args / sizeof *args;
    memcpy(s->args, args, sizeof args);
}

/* ------------------------------------------------------------------ start */

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "out of memory while starting a server");
}

/* The configured methods, the built-in ones, and one entry for all unknown methods. */
static struct moe_status create_entries(struct moe_rpc_server *s,
                                        const struct moe_rpc_server_config *config)
{
    bool reflects = config->descriptors != NULL;
    size_t built_in = MOE_RPC_HEALTH_METHODS + (reflects ? MOE_RPC_REFLECTION_METHODS : 0);
    s->entries = calloc(config->method_count + built_in + 1, sizeof *s->entries);
    s->health = moe_rpc_health_create();
    if (s->entries == NULL || s->health == NULL)
        return no_memory();
    for (size_t i = 0; i < config->method_count; i++)
        s->entries[s->entry_count++] = (struct moe_rpc_entry){
            .method = config->methods[i], .endless = config->methods[i].endless};
    moe_rpc_health_methods(s->health, &s->entries[s->entry_count]);
    s->entry_count += MOE_RPC_HEALTH_METHODS;
    if (reflects) {
        MOE_TRY(moe_rpc_reflection_create(config->descriptors, config->descriptors_length,
                                          &s->reflection));
        moe_rpc_reflection_methods(s->reflection, &s->entries[s->entry_count]);
        s->entry_count += MOE_RPC_REFLECTION_METHODS;
        for (size_t i = 0; i < s->entry_count; i++)
            moe_rpc_reflection_add_method(s->reflection, s->entries[i].method.path);
    }
    s->entries[s->entry_count++].unknown = true;
    return moe_ok();
}

static struct moe_status create_shards(struct moe_rpc_server *s,
                                       const struct moe_rpc_server_config *config)
{
    const struct moe_loop_config loop = {
        .name = config->name != NULL ? config->name : "data", .code = "RPC_STUCK", .always = true};
    uint32_t count = config->shards > 0 ? config->shards : 1;
    s->shards = calloc(count, sizeof *s->shards);
    if (s->shards == NULL)
        return no_memory();
    s->shard_count = count;
    for (uint32_t i = 0; i < count; i++) {
        struct moe_rpc_shard *shard = &s->shards[i];
        shard->server = s;
        shard->queue = grpc_completion_queue_create_for_next(NULL);
        shard->loop = moe_progress_add(config->progress, &loop);
        shard->turn_ns = moe_progress_step_ns(config->progress);
        MOE_TRY(moe_rpc_shard_start(shard));
    }
    return moe_ok();
}

static struct moe_status open_listener(struct moe_rpc_server *s,
                                       const struct moe_rpc_server_config *config)
{
    return moe_listener_open(
        &(struct moe_listener_config){.addresses = config->listen,
                                      .tls = config->tls,
                                      .insecure = config->insecure,
                                      .relays = config->shards,
                                      .spin_ns = config->spin_ns,
                                      .max_connections = config->max_connections,
                                      .descriptors_percent = config->descriptors_percent,
                                      .max_per_peer = config->max_connections_per_peer,
                                      .silence_ms = config->silence_ms,
                                      .max_streams = s->max_streams,
                                      .max_header_bytes = MOE_RPC_METADATA_BYTES,
                                      .metrics = config->metrics,
                                      .name = config->name,
                                      .opened = moe_rpc_connection_opened,
                                      .keeps = moe_rpc_connection_keeps,
                                      .closed = moe_rpc_connection_closed,
                                      .streams = &moe_rpc_connection_streams,
                                      .ctx = s},
        &s->listener);
}

static void server_free(struct moe_rpc_server *s)
{
    moe_listener_destroy(s->listener);
    for (uint32_t i = 0; i < s->shard_count; i++)
        moe_rpc_shard_stop(&s->shards[i]);
    free(s->shards);
    free(s->entries);
    moe_rpc_health_destroy(s->health);
    moe_rpc_reflection_destroy(s->reflection);
    moe_rpc_memory_end(&s->memory);
    pthread_cond_destroy(&s->changed);
    moe_mutex_destroy(&s->lock);
    free(s);
    moe_rpc_library_unref();
}

static uint64_t time_limit(uint32_t ms)
{
    return (ms > 0 ? ms : TIME_LIMIT_MS) * MOE_NS_PER_MS;
}

static struct moe_status server_create(const struct moe_rpc_server_config *config,
                                       struct moe_rpc_server **out)
{
    struct moe_rpc_server *s = calloc(1, sizeof *s);
    if (s == NULL)
        return no_memory();
    struct moe_status st = moe_rpc_library_ref();
    if (moe_failed(&st)) {
        free(s);
        return st;
    }
    s->max_message_bytes = config->max_message_bytes;
    const uint32_t streams = config->max_concurrent_streams;
    s->max_streams = streams == 0 ? STREAMS : streams > STREAMS_MAX ? STREAMS_MAX : streams;
    s->read_limit_ns = time_limit(config->max_read_ms);
    s->send_limit_ns = time_limit(config->max_send_ms);
    s->spin_ns = config->spin_ns;
    s->authorise = config->authorise;
    s->finished = config->finished;
    s->authorise_ctx = config->authorise_ctx;
    TAILQ_INIT(&s->endless);
    moe_wait_init(&s->changed);
    moe_mutex_init(&s->lock);
    moe_rpc_memory_init(&s->memory, config);
    *out = s;
    return moe_ok();
}

struct moe_status moe_rpc_server_start(const struct moe_rpc_server_config *config,
                                       struct moe_rpc_server **out)
{
    struct moe_status st;
    struct moe_rpc_server *s = NULL;
    *out = NULL;
    MOE_TRY(check_config(config));
    MOE_TRY(server_create(config, &s));
    MOE_TRY_GOTO(st, moe_rpc_upload_prepare(), fail);
    MOE_TRY_GOTO(st, moe_rpc_memory_add_metrics(&s->memory, config), fail);
    MOE_TRY_GOTO(st, open_listener(s, config), fail);
    set_core_args(s, config);
    MOE_TRY_GOTO(st, create_entries(s, config), fail);
    MOE_TRY_GOTO(st, create_shards(s, config), fail);
    MOE_TRY_GOTO(st, moe_listener_run(s->listener), fail);
    *out = s;
    return moe_ok();
fail:
    server_free(s);
    return st;
}

uint16_t moe_rpc_server_port(const struct moe_rpc_server *s)
{
    return moe_listener_port(s->listener);
}

void moe_rpc_server_disconnect(struct moe_rpc_server *s,
                               bool (*which)(void *ctx, const struct moe_rpc_identity *who),
                               void *ctx)
{
    moe_listener_disconnect(s->listener, which, ctx);
}

void moe_rpc_server_set_health(struct moe_rpc_server *s, const char *service, bool serving)
{
    moe_rpc_health_set(s->health, service, serving);
}

/* ------------------------------------------------------------------ drain and stop */

static void begin_draining(struct moe_rpc_server *s)
{
    struct moe_rpc_call *c;
    moe_rpc_health_shut(s->health); /* notifies watchers before their streams end */
    moe_mutex_lock(&s->lock);
    s->draining = true;
    TAILQ_FOREACH(c, &s->endless, endless)
    moe_rpc_fail(c, moe_rpc_draining());
    moe_mutex_unlock(&s->lock);
}

static bool nothing_active(const struct moe_rpc_server *s) MOE_REQUIRES(s->lock)
{
    return s->active == 0;
}

static bool all_over(const struct moe_rpc_server *s) MOE_REQUIRES(s->lock)
{
    return s->connections == 0 && s->unfinished == 0;
}

/* False when `deadline_ns` came first. */
static bool wait_until(struct moe_rpc_server *s, bool (*reached)(const struct moe_rpc_server *s),
                       uint64_t deadline_ns)
{
    moe_mutex_lock(&s->lock);
    bool in_time = true;
    while (!reached(s) && in_time)
        in_time = moe_wait_until(&s->changed, &s->lock, deadline_ns);
    bool yes = reached(s);
    moe_mutex_unlock(&s->lock);
    return yes;
}

/* Drain first refuses calls with a reason and a retry hint. Then it closes all connections: calls
 * on a closed connection end with UNAVAILABLE, which clients retry. */
void moe_rpc_server_drain(struct moe_rpc_server *s, uint64_t deadline_ns)
{
    begin_draining(s);
    (void)wait_until(s, nothing_active, deadline_ns);
    moe_listener_close(s->listener);
    (void)wait_until(s, all_over, MOE_NEVER);
    moe_mutex_lock(&s->lock);
    s->closed = true;
    moe_mutex_unlock(&s->lock);
}

void moe_rpc_server_stop(struct moe_rpc_server *s)
{
    if (s == NULL)
        return;
    moe_mutex_lock(&s->lock);
    MOE_INVARIANT(s->closed);
    while (s->allocated > 0)
        moe_wait(&s->changed, &s->lock);
    moe_mutex_unlock(&s->lock);
    server_free(s);
}
