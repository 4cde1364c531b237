/* SPDX-License-Identifier: Apache-2.0 */
/* Life of a server: checking the address, starting shards, draining, stopping. */
#include "rpc/server.h"

#include "base/clock.h"
#include "base/wait.h"
#include "daemon/endpoint.h"
#include "rpc/serving.h"
#include "uploads/budget.h"

#include <arpa/inet.h>
#include <errno.h>
#include <grpc/impl/codegen/grpc_types.h>
#include <limits.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Defaults. */
enum { STREAMS = 128, TIME_LIMIT_MS = 60000 };

/* ------------------------------------------------------------------ configuration */

/* "host:port", "[v6]:port"; the host without brackets goes to `host`. */
static struct moe_status split_address(const char *listen, char *host, size_t capacity)
{
    const char *colon = strrchr(listen, ':');
    size_t length = colon == NULL ? 0 : (size_t)(colon - listen);
    const char *from = listen;
    if (length >= 2 && from[0] == '[' && from[length - 1] == ']') {
        from++;
        length -= 2;
    } else if (memchr(from, ':', length) != NULL) {
        length = 0; /* an IPv6 address needs brackets */
    }
    if (length == 0 || length >= capacity)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "listen address is not host:port");
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end != '\0' || port > UINT16_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "listen address has no port between 0 and 65535");
    memcpy(host, from, length);
    host[length] = '\0';
    return moe_ok();
}

static struct moe_status check_config(const struct moe_rpc_server_config *config, bool *loopback)
{
    char host[256];
    MOE_TRY(split_address(config->listen, host, sizeof host));
    struct moe_status st = moe_endpoint_check_loopback(config->listen);
    *loopback = !moe_failed(&st);
    if (!*loopback && !config->insecure)
        return st;
    if (config->max_message_bytes == 0 || config->max_message_bytes > INT_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "largest message must be between 1 byte and 2 GiB - 1");
    return moe_ok();
}

static grpc_server *core_create(const struct moe_rpc_server_config *config, bool loopback)
{
    int largest = (int)config->max_message_bytes;
    uint32_t streams = config->max_concurrent_streams;
    streams = streams == 0 ? STREAMS : streams > INT_MAX ? INT_MAX : streams;
    int silence = config->silence_ms == 0 ? MOE_RPC_KEEPALIVE_WAIT_MS : (int)config->silence_ms;
    grpc_arg args[] = {
        moe_rpc_int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, largest),
        moe_rpc_int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, largest),
        moe_rpc_int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, (int)streams),
        moe_rpc_int_arg(GRPC_ARG_MAX_METADATA_SIZE, MOE_RPC_METADATA_BYTES),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, MOE_RPC_FRAME_BYTES),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, MOE_RPC_LOOKAHEAD_BYTES),
        moe_rpc_int_arg(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, MOE_RPC_KEEPALIVE_WAIT_MS),
        /* A second server on the same port must fail to bind. */
        moe_rpc_int_arg(GRPC_ARG_ALLOW_REUSEPORT, 0),
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
         * would exceed the memory bound of the permits. */
        moe_rpc_int_arg(GRPC_ARG_HTTP2_BDP_PROBE, loopback ? 0 : 1),
    };
    return grpc_server_create(
        &(grpc_channel_args){.num_args = sizeof args / sizeof *args, .args = args}, NULL);
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
    for (size_t i = 0; i < s->entry_count; i++) {
        struct moe_rpc_entry *e = &s->entries[i];
        /* No payload: a handler sees the call before any message is read. */
        e->registered =
            grpc_server_register_method(s->core, e->method.path, NULL, GRPC_SRM_PAYLOAD_NONE, 0);
        if (e->registered == NULL)
            return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "method %s is registered twice",
                             e->method.path);
    }
    s->entry_count++;
    return moe_ok();
}

static struct moe_status create_shards(struct moe_rpc_server *s, uint32_t count)
{
    s->shards = calloc(count, sizeof *s->shards);
    if (s->shards == NULL)
        return no_memory();
    s->shard_count = count;
    for (uint32_t i = 0; i < count; i++) {
        struct moe_rpc_shard *shard = &s->shards[i];
        shard->server = s;
        shard->accepting = calloc(s->entry_count, sizeof *shard->accepting);
        if (shard->accepting == NULL)
            return no_memory();
        shard->queue = grpc_completion_queue_create_for_next(NULL);
        grpc_server_register_completion_queue(s->core, shard->queue, NULL);
        MOE_TRY(moe_rpc_shard_start(shard));
    }
    return moe_ok();
}

/* The core does not report why it cannot listen, so this binds once more without it. Empty if the
 * address is free again, or needs a name server. */
static const char *why_not_listening(const char *listen)
{
    char host[256];
    struct moe_status st = split_address(listen, host, sizeof host);
    const char *name = strcmp(host, "localhost") == 0 ? "127.0.0.1" : host;
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                             .ai_socktype = SOCK_STREAM};
    struct addrinfo *at = NULL;
    if (moe_failed(&st) || getaddrinfo(name, strrchr(listen, ':') + 1, &hints, &at) != 0)
        return "";
    int error = 0, yes = 1;
    int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
        bind(fd, at->ai_addr, at->ai_addrlen) != 0)
        error = errno;
    if (fd >= 0)
        close(fd);
    freeaddrinfo(at);
    return error != 0 ? strerror(error) : "";
}

static struct moe_status bind_port(struct moe_rpc_server *s, const char *listen)
{
    grpc_server_credentials *plain = grpc_insecure_server_credentials_create();
    int port = grpc_server_add_http2_port(s->core, listen, plain);
    grpc_server_credentials_release(plain);
    if (port <= 0) {
        const char *why = why_not_listening(listen);
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot listen on %.120s%s%s", listen,
                         why[0] != '\0' ? ": " : "", why);
    }
    s->port = (uint16_t)port;
    return moe_ok();
}

static void set_phase(struct moe_rpc_server *s, enum moe_rpc_phase phase)
{
    moe_mutex_lock(&s->lock);
    s->phase = phase;
    pthread_cond_broadcast(&s->changed);
    while (phase == MOE_RPC_SERVING && s->shards_ready < s->shard_count)
        moe_wait(&s->changed, &s->lock);
    moe_mutex_unlock(&s->lock);
}

static void server_free(struct moe_rpc_server *s)
{
    if (s->core != NULL)
        grpc_server_destroy(s->core);
    for (uint32_t i = 0; i < s->shard_count; i++) {
        moe_rpc_shard_stop(&s->shards[i]);
        free(s->shards[i].accepting);
    }
    free(s->shards);
    free(s->entries);
    moe_rpc_health_destroy(s->health);
    moe_rpc_reflection_destroy(s->reflection);
    moe_rpc_admission_destroy(&s->admission);
    pthread_cond_destroy(&s->changed);
    moe_mutex_destroy(&s->lock);
    free(s);
    moe_rpc_library_unref();
}

static void on_shutdown(struct moe_rpc_tag *tag, bool ok)
{
    struct moe_rpc_server *s = MOE_RPC_OWNER(struct moe_rpc_server, on_shutdown, tag);
    (void)ok;
    moe_mutex_lock(&s->lock);
    s->shut_down = true;
    pthread_cond_broadcast(&s->changed);
    moe_mutex_unlock(&s->lock);
}

static uint64_t time_limit(uint32_t ms)
{
    return (ms > 0 ? ms : TIME_LIMIT_MS) * MOE_NS_PER_MS;
}

static struct moe_rpc_server *server_create(const struct moe_rpc_server_config *config)
{
    struct moe_rpc_server *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    uint64_t permits = config->max_reading_bytes / config->max_message_bytes;
    permits = permits < 1 ? 1 : permits > UINT32_MAX ? UINT32_MAX : permits;
    moe_rpc_admission_init(&s->admission, (uint32_t)permits, config->max_waiting_reads);
    s->read_limit_ns = time_limit(config->max_read_ms);
    s->send_limit_ns = time_limit(config->max_send_ms);
    s->spin_ns = config->spin_ns;
    s->on_shutdown.fn = on_shutdown;
    TAILQ_INIT(&s->endless);
    moe_wait_init(&s->changed);
    moe_mutex_init(&s->lock);
    moe_rpc_library_ref();
    return s;
}

struct moe_status moe_rpc_server_start(const struct moe_rpc_server_config *config,
                                       struct moe_rpc_server **out)
{
    bool loopback;
    struct moe_status st;
    *out = NULL;
    MOE_TRY(check_config(config, &loopback));
    struct moe_rpc_server *s = server_create(config);
    if (s == NULL)
        return no_memory();
    moe_rpc_reserve_descriptor();
    s->core = core_create(config, loopback);
    MOE_TRY_GOTO(st, create_entries(s, config), fail);
    MOE_TRY_GOTO(st, create_shards(s, config->shards > 0 ? config->shards : 1), fail);
    MOE_TRY_GOTO(st, bind_port(s, config->listen), fail);
    grpc_server_start(s->core);
    set_phase(s, MOE_RPC_SERVING);
    *out = s;
    return moe_ok();
fail:
    set_phase(s, MOE_RPC_ABANDONED);
    server_free(s);
    return st;
}

uint16_t moe_rpc_server_port(const struct moe_rpc_server *s)
{
    return s->port;
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

/* `shut_down` alone is not enough: handlers may still run then. */
static bool all_over(const struct moe_rpc_server *s) MOE_REQUIRES(s->lock)
{
    return s->shut_down && s->unfinished == 0;
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

/* Closes all connections and refuses new ones. (In this core, grpc_server_cancel_all_calls closes
 * all connections. Its header asks for a shutdown first, but the code does not need one.) */
static void close_connections(struct moe_rpc_server *s)
{
    enum { SETTLED_MS = 2 }; /* by then the core knows all accepted connections */
    moe_rpc_listener_gate_close(&s->gate, s->port);
    moe_sleep_until(moe_clock_ns() + SETTLED_MS * MOE_NS_PER_MS);
    grpc_server_cancel_all_calls(s->core);
}

/* A core that shuts down answers new calls with CANCELLED, which most clients do not retry. So
 * drain first refuses calls with a reason and a retry hint. Then it closes all connections before
 * the core shuts down: calls on a closed connection end with UNAVAILABLE, which clients retry. */
void moe_rpc_server_drain(struct moe_rpc_server *s, uint64_t deadline_ns)
{
    begin_draining(s);
    (void)wait_until(s, nothing_active, deadline_ns);
    close_connections(s);
    MOE_RPC_HAND_OVER(&s->on_shutdown);
    grpc_server_shutdown_and_notify(s->core, s->shards[0].queue, &s->on_shutdown);
    if (!wait_until(s, all_over, deadline_ns)) {
        grpc_server_cancel_all_calls(s->core); /* connections that were starting */
        (void)wait_until(s, all_over, MOE_NEVER);
    }
    moe_rpc_listener_gate_remove(&s->gate); /* the port has no listener */
}

void moe_rpc_server_stop(struct moe_rpc_server *s)
{
    if (s == NULL)
        return;
    moe_mutex_lock(&s->lock);
    MOE_INVARIANT(s->shut_down);
    while (s->allocated > 0)
        moe_wait(&s->changed, &s->lock);
    moe_mutex_unlock(&s->lock);
    server_free(s);
}
