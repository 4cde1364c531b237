/* SPDX-License-Identifier: Apache-2.0 */
/* Life of a listener, and what other threads ask of it. */
#include "listener/inside.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    CONNECTIONS = 16384,
    LIMIT_MS = 10000,
    DESCRIPTORS_MAX = 1 << 24,   /* of more, no limit is known */
    DESCRIPTORS_OF_OTHERS = 128, /* files, peers, libraries */
};

/* ------------------------------------------------------------------ metrics */

static struct moe_status add_counter(struct moe_listener *l, struct moe_metric_desc desc,
                                     const char *reason, struct moe_counter **out)
{
    desc.labels[0] = (struct moe_metric_label){"server", l->config.name};
    if (reason != NULL)
        desc.labels[1] = (struct moe_metric_label){"reason", reason};
    return moe_metrics_add_counter(l->config.metrics, &desc, out);
}

static struct moe_status add_handshake_metrics(struct moe_listener *l)
{
    static const char *const reasons[MOE_TLS_FAILURES] = {
        [MOE_TLS_NO_FAILURE] = "time",
        [MOE_TLS_PROTOCOL] = "protocol",
        [MOE_TLS_CERTIFICATE] = "certificate",
        [MOE_TLS_NAME] = "name",
        [MOE_TLS_LEFT] = "left",
    };
    const struct moe_metric_desc desc = {
        .name = "moe_rpc_handshakes_failed_total",
        .help = "TLS handshakes that did not come to an end, by reason."};
    for (size_t i = 0; i < MOE_TLS_FAILURES; i++)
        MOE_TRY(add_counter(l, desc, reasons[i], &l->handshakes_failed[i]));
    return moe_ok();
}

static struct moe_status add_metrics(struct moe_listener *l)
{
    static const char *const reasons[MOE_CLOSE_REASONS] = {
        [MOE_CLOSE_CLIENT] = "client",       [MOE_CLOSE_SERVER] = "server",
        [MOE_CLOSE_SHUTDOWN] = "shutdown",   [MOE_CLOSE_IDENTITY] = "identity",
        [MOE_CLOSE_LIMIT] = "limit",         [MOE_CLOSE_DESCRIPTORS] = "descriptors",
        [MOE_CLOSE_HANDSHAKE] = "handshake", [MOE_CLOSE_PREFACE] = "preface",
        [MOE_CLOSE_UNREAD] = "unread",       [MOE_CLOSE_MALFORMED] = "malformed",
        [MOE_CLOSE_FLOOD] = "flood",
    };
    struct moe_metric_desc open = {.name = "moe_rpc_connections", .help = "Open connections."};
    if (l->config.metrics == NULL)
        return moe_ok();
    struct moe_metric_desc parked = {.name = "moe_rpc_connections_parked",
                                     .help = "Connections that have made no request."};
    open.labels[0] = parked.labels[0] = (struct moe_metric_label){"server", l->config.name};
    MOE_TRY(moe_metrics_add_gauge(l->config.metrics, &open, &l->open));
    MOE_TRY(moe_metrics_add_gauge(l->config.metrics, &parked, &l->parked));
    MOE_TRY(add_counter(l,
                        (struct moe_metric_desc){.name = "moe_rpc_connections_accepted_total",
                                                 .help = "Connections that were accepted."},
                        NULL, &l->accepted));
    for (size_t i = 0; i < MOE_CLOSE_REASONS; i++)
        MOE_TRY(add_counter(
            l,
            (struct moe_metric_desc){.name = "moe_rpc_connections_closed_total",
                                     .help = "Connections that ended or were refused, by reason."},
            reasons[i], &l->closed[i]));
    return l->config.tls != NULL ? add_handshake_metrics(l) : moe_ok();
}

void moe_listener_count_closed(struct moe_listener *l, enum moe_close_reason reason)
{
    if (l->closed[reason] != NULL)
        moe_counter_add(l->closed[reason], 1);
}

/* ------------------------------------------------------------------ life */

static uint32_t or_default(uint32_t value, uint32_t otherwise)
{
    return value > 0 ? value : otherwise;
}

/* A connection that cannot get its descriptors would be accepted in vain. */
static uint32_t affordable(uint32_t percent)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur > DESCRIPTORS_MAX)
        return DESCRIPTORS_MAX;
    rlim_t spare =
        files.rlim_cur > DESCRIPTORS_OF_OTHERS ? files.rlim_cur - DESCRIPTORS_OF_OTHERS : 0;
    rlim_t most = spare / 100 * percent;
    return most < MOE_OPEN_DESCRIPTORS ? MOE_OPEN_DESCRIPTORS : (uint32_t)most;
}

static uint32_t three_quarters(uint32_t of)
{
    return of - of / 4;
}

static void set_defaults(struct moe_listener *l)
{
    struct moe_listener_config *config = &l->config;
    config->relays = or_default(config->relays, 1);
    config->descriptors_percent = or_default(config->descriptors_percent, 100);
    l->descriptors = affordable(config->descriptors_percent);
    l->max_open_per_peer = three_quarters(l->descriptors / MOE_OPEN_DESCRIPTORS);
    config->max_connections = or_default(config->max_connections, CONNECTIONS);
    if (config->max_connections > l->descriptors)
        config->max_connections = l->descriptors;
    config->max_per_peer =
        or_default(config->max_per_peer, three_quarters(config->max_connections));
    config->preface_ms = or_default(config->preface_ms, LIMIT_MS);
    config->silence_ms = or_default(config->silence_ms, LIMIT_MS);
    if (config->name == NULL)
        config->name = "data";
}

struct moe_status moe_listener_open(const struct moe_listener_config *config,
                                    struct moe_listener **out)
{
    struct moe_status st;
    *out = NULL;
    struct moe_listener *l = calloc(1, sizeof *l);
    if (l == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a listener");
    l->config = *config;
    l->retry_ns = MOE_NEVER;
    l->reserve = -1;
    moe_mutex_init(&l->lock);
    moe_mutex_not_shared(&l->lock);
    TAILQ_INIT(&l->idle);
    TAILQ_INIT(&l->busy);
    set_defaults(l);
    MOE_TRY_GOTO(st, add_metrics(l), fail);
    MOE_TRY_GOTO(st,
                 moe_listen_open(config->addresses, config->insecure || config->tls != NULL,
                                 l->sockets, &l->socket_count, &l->port, &l->local),
                 fail);
    l->reserve = moe_accept_reserve();
    *out = l;
    return moe_ok();
fail:
    moe_listener_destroy(l);
    return st;
}

/* Relays from number `first` on learn that the listener closes. */
static void ask_to_close(struct moe_listener *l, uint32_t first)
{
    moe_mutex_lock(&l->lock);
    l->closing = true;
    moe_mutex_unlock(&l->lock);
    for (uint32_t i = first; i < l->relay_count; i++)
        moe_relay_wake(&l->relays[i]);
}

struct moe_status moe_listener_run(struct moe_listener *l)
{
    struct moe_status st = moe_ok();
    l->relays = calloc(l->config.relays, sizeof *l->relays);
    if (l->relays == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a listener");
    /* The first one accepts, and may hand connections to all others: it starts last. */
    l->relay_count = l->config.relays;
    for (uint32_t i = l->config.relays; i-- > 0;) {
        st = moe_relay_start(l, &l->relays[i]);
        if (!moe_failed(&st))
            continue;
        ask_to_close(l, i + 1);
        for (uint32_t k = i + 1; k < l->config.relays; k++)
            moe_relay_stop(&l->relays[k]);
        l->relay_count = 0;
        break;
    }
    return st;
}

uint16_t moe_listener_port(const struct moe_listener *l)
{
    return l->port;
}

bool moe_listener_is_local(const struct moe_listener *l)
{
    return l->local;
}

static void doom_chosen(struct moe_connections *list,
                        bool (*which)(void *ctx, const struct moe_rpc_identity *who), void *ctx)
{
    struct moe_connection *c;
    TAILQ_FOREACH(c, list, link)
    if (which(ctx, &c->who))
        moe_relay_doom(c);
}

void moe_listener_disconnect(struct moe_listener *l,
                             bool (*which)(void *ctx, const struct moe_rpc_identity *who),
                             void *ctx)
{
    for (uint32_t i = 0; i < l->relay_count; i++) {
        struct moe_relay *r = &l->relays[i];
        moe_mutex_lock(&l->lock);
        doom_chosen(&r->arrivals, which, ctx);
        doom_chosen(&r->connections, which, ctx);
        moe_mutex_unlock(&l->lock);
        moe_relay_wake(r);
    }
}

void moe_listener_end(struct moe_connection *c)
{
    struct moe_relay *r = c->relay;
    moe_mutex_lock(&r->listener->lock);
    c->flooded = true;
    moe_relay_doom(c);
    moe_mutex_unlock(&r->listener->lock);
    moe_relay_wake(r);
}

void moe_listener_close(struct moe_listener *l)
{
    ask_to_close(l, 0);
    for (uint32_t i = 0; i < l->relay_count; i++)
        moe_relay_stop(&l->relays[i]);
    l->relay_count = 0;
}

void moe_listener_destroy(struct moe_listener *l)
{
    if (l == NULL)
        return;
    MOE_INVARIANT(l->relay_count == 0);
    moe_accept_stop(l);
    free(l->relays);
    moe_mutex_destroy(&l->lock);
    free(l);
}
