/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/metrics_http.h"

#include "base/clock.h"

#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum {
    CONNECTIONS_KEPT = 192, /* one more, and the oldest is closed */
    CONNECTIONS_MAX = 256,  /* the library stops accepting here; room for some that are closing */
    HEADER_SECONDS = 2,     /* without a byte, until the first whole request */
    IDLE_SECONDS = 10,      /* the same between two requests */
    LIMIT_MS = 30000,       /* for a whole request, and for its answer to be taken */
    HOST_BYTES = 64,
    REQUEST_BYTES = 16384, /* memory that one connection may use for its request */
    PROBE_BYTES = 4096,    /* of the answer of a probe */
};

/* An open connection. At its limit the library accepts no connection, so a flood of incomplete
 * requests would lock out a scraper. (A limit for each address would lock out a scraper on the same
 * host.) So the oldest connection is closed for the newest. Only a complete request makes a
 * connection young again. A scraper sends its request at once and gets the answer before it is the
 * oldest. */
struct connection {
    struct connection *previous, *next;
    int fd;            /* of the library; -1: it has been shut down and is in no list */
    uint64_t since_ns; /* it came in, or its last complete request */
};

struct moe_metrics_http {
    struct MHD_Daemon *daemon;
    struct moe_metrics *metrics;
    struct moe_progress *progress;
    uint16_t port;
    /* Only on the HTTP thread: head of the ring of open connections. `next` is the oldest. */
    struct connection ring;
    size_t open; /* in the ring */
    uint64_t limit_ns;
};

/* ------------------------------------------------------------------- connections */

static void unlink_connection(struct moe_metrics_http *h, struct connection *c)
{
    c->previous->next = c->next;
    c->next->previous = c->previous;
    h->open--;
}

static void link_youngest(struct moe_metrics_http *h, struct connection *c)
{
    c->previous = h->ring.previous;
    c->next = &h->ring;
    c->previous->next = c;
    c->since_ns = moe_clock_ns();
    h->ring.previous = c;
    h->open++;
}

/* The library sees the end of the stream and closes the connection. */
static void shut_oldest(struct moe_metrics_http *h)
{
    struct connection *oldest = h->ring.next;
    unlink_connection(h, oldest);
    (void)shutdown(oldest->fd, SHUT_RDWR);
    oldest->fd = -1;
}

/* The library's time limits begin anew with each byte. So those who send or take a byte now and
 * then are found here, when others come. */
static void shut_slow(struct moe_metrics_http *h)
{
    uint64_t now = moe_clock_ns();
    while (h->open > 0 && now - h->ring.next->since_ns > h->limit_ns)
        shut_oldest(h);
}

static void on_opened(struct moe_metrics_http *h, struct MHD_Connection *from, void **place)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(from, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct connection *c = info != NULL ? calloc(1, sizeof *c) : NULL;
    *place = c;
    if (c == NULL) { /* without memory it cannot be counted, so close it */
        if (info != NULL)
            (void)shutdown(info->connect_fd, SHUT_RDWR);
        return;
    }
    c->fd = info->connect_fd;
    shut_slow(h);
    link_youngest(h, c);
    if (h->open > CONNECTIONS_KEPT)
        shut_oldest(h);
}

static void on_connection(void *ctx, struct MHD_Connection *from, void **place,
                          enum MHD_ConnectionNotificationCode what)
{
    struct moe_metrics_http *h = ctx;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        on_opened(h, from, place);
        return;
    }
    struct connection *c = *place;
    if (c != NULL && c->fd >= 0)
        unlink_connection(h, c);
    free(c);
    *place = NULL;
}

/* Called for each part of a request, the first time as soon as its header is whole. */
static void make_youngest(struct moe_metrics_http *h, struct MHD_Connection *from)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(from, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct connection *c = info != NULL ? info->socket_context : NULL;
    (void)MHD_set_connection_option(from, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)IDLE_SECONDS);
    if (c == NULL || c->fd < 0)
        return;
    unlink_connection(h, c);
    link_youngest(h, c);
}

/* ----------------------------------------------------------------------- answers */

static enum MHD_Result answer(struct MHD_Connection *to, unsigned status, const char *type,
                              char *text, size_t length, enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *r = MHD_create_response_from_buffer(length, text, mode);
    if (r == NULL) {
        if (mode == MHD_RESPMEM_MUST_FREE)
            free(text);
        return MHD_NO; /* closes the connection */
    }
    (void)MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    enum MHD_Result queued = MHD_queue_response(to, status, r);
    MHD_destroy_response(r);
    return queued;
}

static enum MHD_Result answer_text(struct MHD_Connection *to, unsigned status, const char *text)
{
    /* The library takes a non-const pointer and, in this mode, only copies from it. */
    return answer(to, status, "text/plain; charset=utf-8", (char *)(uintptr_t)text, strlen(text),
                  MHD_RESPMEM_MUST_COPY);
}

static enum MHD_Result answer_metrics(struct moe_metrics_http *h, struct MHD_Connection *to)
{
    char *text;
    size_t length;
    struct moe_status st = moe_metrics_render(h->metrics, &text, &length);
    if (st.code != MOE_OK)
        return answer_text(to, MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory\n");
    return answer(to, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", text, length,
                  MHD_RESPMEM_MUST_FREE);
}

/* ?verbose, with any value or none, asks for all lines. */
static enum MHD_Result is_verbose(void *ctx, enum MHD_ValueKind kind, const char *key,
                                  const char *value)
{
    bool *verbose = ctx;
    (void)kind;
    (void)value;
    *verbose = *verbose || strcmp(key, "verbose") == 0;
    return MHD_YES;
}

static enum MHD_Result answer_probe(struct moe_metrics_http *h, struct MHD_Connection *to,
                                    bool ready)
{
    struct moe_health v = {.alive = true, .ready = true};
    char text[PROBE_BYTES];
    bool verbose = false;
    if (h->progress != NULL)
        moe_progress_judge(h->progress, moe_clock_ns(), &v);
    (void)MHD_get_connection_values(to, MHD_GET_ARGUMENT_KIND, is_verbose, &verbose);
    moe_health_print(&v, ready, verbose, text, sizeof text);
    return answer_text(to, (ready ? v.ready : v.alive) ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE,
                       text);
}

static enum MHD_Result on_request(void *ctx, struct MHD_Connection *to, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_size, void **state)
{
    struct moe_metrics_http *h = ctx;
    (void)version;
    (void)upload;
    if (*state == NULL) /* not for the parts of a body: they can be as small as one byte */
        make_youngest(h, to);
    *state = h;
    *upload_size = 0; /* bodies are read and ignored */
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return answer_text(to, MHD_HTTP_METHOD_NOT_ALLOWED, "GET only\n");
    if (strcmp(url, "/metrics") == 0)
        return answer_metrics(h, to);
    bool ready = strcmp(url, "/readyz") == 0 || strcmp(url, "/healthz") == 0;
    if (!ready && strcmp(url, "/livez") != 0)
        return answer_text(to, MHD_HTTP_NOT_FOUND, "try /metrics, /livez or /readyz\n");
    return answer_probe(h, to, ready);
}

/* getaddrinfo takes any number for a port, cut to 16 bits. */
static bool is_port(const char *s)
{
    unsigned value = 0;
    size_t n = 0;
    for (; s[n] >= '0' && s[n] <= '9' && n < 6; n++)
        value = 10 * value + (unsigned)(s[n] - '0');
    return n > 0 && s[n] == '\0' && value <= UINT16_MAX;
}

/* Splits "host:port" or "[v6]:port" and resolves it without asking a name server. */
static struct moe_status resolve(const char *listen, struct addrinfo **out)
{
    struct moe_status bad = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                                      "'%.64s' is not an address like 127.0.0.1:9090", listen);
    char host[HOST_BYTES];
    const char *colon = strrchr(listen, ':');
    bool bracket = listen[0] == '[' && colon != NULL && colon > listen + 1 && colon[-1] == ']';
    size_t skip = bracket ? 1 : 0;
    size_t length = colon != NULL ? (size_t)(colon - listen) - 2 * skip : 0;
    if (length == 0 || length >= sizeof host || !is_port(colon + 1))
        return bad;
    memcpy(host, listen + skip, length);
    host[length] = '\0';
    if (strcasecmp(host, "localhost") == 0)
        strcpy(host, "127.0.0.1");
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE,
                             .ai_socktype = SOCK_STREAM};
    return getaddrinfo(host, colon + 1, &hints, out) == 0 ? moe_ok() : bad;
}

struct moe_status moe_metrics_http_start(const struct moe_metrics_http_config *config,
                                         struct moe_metrics_http **out)
{
    struct addrinfo *address;
    MOE_TRY(resolve(config->listen, &address));
    struct moe_metrics_http *h = calloc(1, sizeof *h);
    if (h == NULL) {
        freeaddrinfo(address);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "metrics endpoint");
    }
    *h = (struct moe_metrics_http){
        .metrics = config->metrics,
        .progress = config->progress,
        .limit_ns = (config->limit_ms > 0 ? config->limit_ms : LIMIT_MS) * MOE_NS_PER_MS};
    h->ring.previous = h->ring.next = &h->ring;
    unsigned flags = MHD_USE_AUTO_INTERNAL_THREAD | MHD_USE_ITC; /* wakes it up to be stopped */
    if (address->ai_family == AF_INET6)
        flags |= MHD_USE_IPv6;
    errno = 0;
    h->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, h, MHD_OPTION_SOCK_ADDR, address->ai_addr,
        MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT, HEADER_SECONDS,
        MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)REQUEST_BYTES, MHD_OPTION_END);
    freeaddrinfo(address);
    const union MHD_DaemonInfo *info =
        h->daemon != NULL ? MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_BIND_PORT) : NULL;
    if (info == NULL) {
        const char *why = errno != 0 ? strerror(errno) : "no reason given";
        struct moe_status st =
            moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot listen on %.64s for metrics: %.80s",
                      config->listen, why);
        moe_metrics_http_stop(h);
        return st;
    }
    h->port = info->port;
    *out = h;
    return moe_ok();
}

uint16_t moe_metrics_http_port(const struct moe_metrics_http *h)
{
    return h->port;
}

void moe_metrics_http_stop(struct moe_metrics_http *h)
{
    if (h == NULL)
        return;
    if (h->daemon != NULL)
        MHD_stop_daemon(h->daemon);
    free(h);
}
