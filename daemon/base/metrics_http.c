#include "base/metrics_http.h"

#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    CONNECTIONS_MAX = 32,
    IDLE_SECONDS = 10,
    HOST_BYTES = 64,
    REQUEST_BYTES = 16384, /* memory that one connection may use for its request */
};

struct moe_metrics_http {
    struct MHD_Daemon *daemon;
    struct moe_metrics *metrics;
    bool (*healthy)(void *ctx);
    void *ctx;
    uint16_t port;
};

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

static enum MHD_Result on_request(void *ctx, struct MHD_Connection *to, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_size, void **state)
{
    struct moe_metrics_http *h = ctx;
    (void)version;
    (void)upload;
    (void)state;
    *upload_size = 0; /* bodies are read and ignored */
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return answer_text(to, MHD_HTTP_METHOD_NOT_ALLOWED, "GET only\n");
    if (strcmp(url, "/metrics") == 0)
        return answer_metrics(h, to);
    if (strcmp(url, "/healthz") != 0)
        return answer_text(to, MHD_HTTP_NOT_FOUND, "try /metrics or /healthz\n");
    bool well = h->healthy == NULL || h->healthy(h->ctx);
    return answer_text(to, well ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE,
                       well ? "ok\n" : "not healthy\n");
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
    if (strcmp(host, "localhost") == 0)
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
        .metrics = config->metrics, .healthy = config->healthy, .ctx = config->ctx};
    unsigned flags = MHD_USE_AUTO_INTERNAL_THREAD;
    if (address->ai_family == AF_INET6)
        flags |= MHD_USE_IPv6;
    errno = 0;
    h->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, h, MHD_OPTION_SOCK_ADDR, address->ai_addr,
        MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT, IDLE_SECONDS,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)REQUEST_BYTES, MHD_OPTION_END);
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
