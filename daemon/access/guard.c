/* SPDX-License-Identifier: Apache-2.0 */
#include "access/guard.h"
#include "access/expiry.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/endpoint.h"
#include "daemon/hangup.h"
#include "daemon/local.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "rpc/server.h"
#include "tls/tls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS    (3 * MOE_NS_PER_S)
#define REFUSED_NS (10 * MOE_NS_PER_S)

enum {
    REFUSED_LINES = 10, /* about single refused calls, in each REFUSED_NS */
    LINE_BYTES = 768,
};

/* Lines about refused calls. A caller without rights can make any number of calls, but must not
 * fill the disk: beyond some lines, calls are counted, and one line tells the number. */
struct refusals {
    uint64_t since_ns;
    unsigned lines;
    uint64_t counted;      /* without a line */
    char last[LINE_BYTES]; /* of the last one that was counted */
};

/* Files of trust that are read again when they change. The certificate of a server, its key and the
 * roots of its clients are one: they are checked together. */
enum { FILE_CERTIFICATE, FILE_CA, FILE_RULES, FILE_TOKEN, FILES };
static const char *const file_options[FILES] = {"tls-certificate", "tls-ca", "access-file",
                                                "token-file"};

struct moe_guard {
    const struct moe_daemon_settings *config;
    struct moe_access *access;
    struct moe_tls *tls; /* NULL = plain TCP */
    pthread_t thread;
    bool running;
    bool warned;              /* of an address without TLS; the thread that starts servers */
    struct moe_expiry expiry; /* of the guard's thread */

    struct moe_mutex lock;
    pthread_cond_t changed;
    MOE_GUARDED_BY(lock) struct {
        struct moe_rpc_server *servers[MOE_GUARD_SERVERS_MAX];
        bool look_now, looking, quit;
        struct refusals refusals;
        struct moe_expiry_metrics dates;
        bool refused[FILES]; /* at the last look */
        struct moe_gauge *refused_gauges[FILES];
        bool has_metrics;
    };
};

/* ------------------------------------------------------------------ addresses */

static bool is_open(const struct moe_daemon_settings *c)
{
    return c->insecure && c->tls_certificate == NULL && c->access_file == NULL &&
           c->token_file == NULL;
}

/* An address at which this host's processes reach the daemon by 127.0.0.1. */
static bool is_near(const char *listen)
{
    struct moe_status st = moe_endpoint_check_loopback(listen);
    return !moe_failed(&st) || moe_endpoint_is_wildcard(listen);
}

/* `listen` and, where they make sense, the local sockets. Free `*addresses`. */
static struct moe_status list_addresses(const struct moe_guard *g, const char *listen,
                                        char **addresses)
{
    char path[MOE_LOCAL_PATH_BYTES], shared[MOE_LOCAL_PATH_BYTES];
    bool local = !is_open(g->config) && is_near(listen);
    bool operators = local && g->config->admin_socket_dir != NULL;
    if (operators)
        MOE_TRY(moe_local_admin_path(g->config->admin_socket_dir, shared));
    bool other_way = g->config->access_file != NULL || g->config->token_file != NULL;
    if (local) {
        struct moe_status st = moe_local_listen_path(path);
        if (moe_failed(&st) && !other_way)
            return st;
        if (moe_failed(&st))
            moe_log_warn("%s; processes of this host need a token or a certificate, too", st.text);
        local = !moe_failed(&st);
    }
    int n = asprintf(addresses, "%s%s%s%s%s", listen, local ? ",unix:" : "", local ? path : "",
                     operators ? ",unix-group:" : "", operators ? shared : "");
    return n >= 0 ? moe_ok()
                  : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory");
}

/* ------------------------------------------------------------------ calls */

static struct moe_access_caller caller_of(const struct moe_rpc_identity *who)
{
    return (struct moe_access_caller){
        .link = who->link == MOE_RPC_LINK_UNIX  ? MOE_ACCESS_UNIX
                : who->link == MOE_RPC_LINK_TLS ? MOE_ACCESS_TLS
                                                : MOE_ACCESS_TCP,
        .name = who->link == MOE_RPC_LINK_TLS ? who->name : "",
        .uid = who->uid,
        .is_operator = who->is_operator,
    };
}

_Static_assert(sizeof((struct moe_rpc_grant *)0)->who == sizeof((struct moe_access_grant *)0)->who,
               "a name fits into both");

/* For moe_rpc_server_config.authorise. */
static struct moe_status authorise(void *guard, const struct moe_rpc_identity *who,
                                   const char *path, const char *token, struct moe_rpc_grant *grant)
{
    struct moe_guard *g = guard;
    struct moe_access_caller caller = caller_of(who);
    struct moe_access_grant found;
    struct moe_status st = moe_access_decide(g->access, &caller, path, token, &found);
    grant->roles = found.roles;
    memcpy(grant->who, found.who, sizeof grant->who);
    return st;
}

/* Logs how many refused calls had no line, if any, once their time is over. */
static void report_refusals(struct moe_guard *g, uint64_t now_ns, bool at_end)
{
    char last[LINE_BYTES];
    moe_mutex_lock(&g->lock);
    bool over = at_end || now_ns - g->refusals.since_ns >= REFUSED_NS;
    uint64_t counted = over ? g->refusals.counted : 0;
    memcpy(last, g->refusals.last, sizeof last);
    if (over)
        g->refusals = (struct refusals){.since_ns = now_ns};
    moe_mutex_unlock(&g->lock);
    if (counted > 0)
        moe_log_warn("audit: %llu more calls were refused in %d s; the last one: %s",
                     (unsigned long long)counted, (int)(REFUSED_NS / MOE_NS_PER_S), last);
}

/* True if the call is to have a line. */
static bool count_refusal(struct moe_guard *g, const char *line)
{
    report_refusals(g, moe_clock_ns(), false);
    moe_mutex_lock(&g->lock);
    bool has_line = g->refusals.lines < REFUSED_LINES;
    if (has_line) {
        g->refusals.lines++;
    } else {
        g->refusals.counted++;
        (void)snprintf(g->refusals.last, sizeof g->refusals.last, "%s", line);
    }
    moe_mutex_unlock(&g->lock);
    return has_line;
}

/* For moe_rpc_server_config.finished. */
static void record(void *guard, const struct moe_rpc_identity *who,
                   const struct moe_rpc_grant *grant, const char *path,
                   const struct moe_status *answer)
{
    const struct moe_access_policy *policy = moe_access_policy_find(path);
    struct moe_guard *g = guard;
    char line[LINE_BYTES];
    if (policy == NULL || !policy->audited)
        return;
    const char *reason = answer->reason != MOE_REASON_NONE ? moe_reason_name(answer->reason) : "";
    (void)snprintf(line, sizeof line, "%s by %s%s%s: %s%s%s", path + 1, grant->who,
                   who->address[0] != '\0' ? " at " : "", who->address, moe_code_name(answer->code),
                   reason[0] != '\0' ? "/" : "", reason);
    bool refused = answer->code == MOE_UNAUTHENTICATED || answer->code == MOE_PERMISSION_DENIED;
    if (!refused || count_refusal(g, line))
        moe_log_info("audit: %s", line);
}

struct moe_status moe_guard_may_call(struct moe_guard *g, const struct moe_rpc_call *call,
                                     const char *path)
{
    if (g == NULL)
        return moe_ok();
    const struct moe_rpc_grant *grant = moe_rpc_call_grant(call);
    const struct moe_access_caller caller = caller_of(moe_rpc_call_identity(call));
    struct moe_access_grant found = {.roles = grant->roles};
    memcpy(found.who, grant->who, sizeof found.who);
    return moe_access_may_call(&caller, &found, path);
}

bool moe_guard_speaks_for(struct moe_guard *g, const struct moe_rpc_grant *grant,
                          const char *worker_id)
{
    struct moe_access_grant found = {.roles = grant->roles};
    if (g == NULL)
        return true;
    memcpy(found.who, grant->who, sizeof found.who);
    return moe_access_speaks_for(g->access, &found, worker_id);
}

/* ------------------------------------------------------------------ files */

static bool has_lost(void *ctx, const struct moe_rpc_identity *who)
{
    struct moe_guard *g = ctx;
    struct moe_access_caller caller = caller_of(who);
    return moe_access_has_lost(g->access, &caller);
}

static void look(struct moe_guard *g, struct moe_rpc_server *const *servers)
{
    if (g->tls != NULL)
        (void)moe_tls_refresh(g->tls);
    moe_expiry_look(&g->expiry, g->tls, (int64_t)time(NULL));
    if (!moe_access_refresh(g->access, moe_clock_ns()))
        return;
    for (size_t i = 0; i < MOE_GUARD_SERVERS_MAX; i++)
        if (servers[i] != NULL)
            moe_rpc_server_disconnect(servers[i], has_lost, g);
}

/* On the thread that looks. */
static void find_refused(struct moe_guard *g, bool refused[FILES])
{
    const struct moe_access_refused access = moe_access_refused(g->access);
    refused[FILE_CERTIFICATE] = g->tls != NULL && moe_tls_refused(g->tls);
    refused[FILE_CA] = g->expiry.ca_refused;
    refused[FILE_RULES] = access.rules;
    refused[FILE_TOKEN] = access.token;
}

/* Passes what the last look has found on to the metrics. */
static void show(struct moe_guard *g, const bool refused[FILES]) MOE_REQUIRES(g->lock)
{
    moe_expiry_show(&g->expiry, &g->dates);
    for (size_t i = 0; i < FILES; i++) {
        g->refused[i] = refused[i];
        if (g->refused_gauges[i] != NULL)
            moe_gauge_set(g->refused_gauges[i], refused[i] ? 1 : 0);
    }
}

static void *guard_main(void *arg)
{
    struct moe_guard *g = arg;
    bool refused[FILES];
    moe_mutex_lock(&g->lock);
    while (!g->quit) {
        if (!g->look_now)
            (void)moe_wait_until(&g->changed, &g->lock, moe_clock_ns() + LOOK_NS);
        if (g->quit)
            break;
        struct moe_rpc_server *servers[MOE_GUARD_SERVERS_MAX];
        memcpy(servers, g->servers, sizeof servers);
        g->look_now = false;
        g->looking = true;
        moe_mutex_unlock(&g->lock);
        look(g, servers);
        find_refused(g, refused);
        report_refusals(g, moe_clock_ns(), false);
        moe_mutex_lock(&g->lock);
        show(g, refused);
        g->looking = false;
        pthread_cond_broadcast(&g->changed);
    }
    moe_mutex_unlock(&g->lock);
    return NULL;
}

/* Of the files that are given. */
static struct moe_status add_refused(struct moe_guard *g, struct moe_metrics *metrics)
    MOE_REQUIRES(g->lock)
{
    const struct moe_daemon_settings *c = g->config;
    const char *const paths[FILES] = {c->tls_certificate, c->tls_ca, c->access_file, c->token_file};
    for (size_t i = 0; i < FILES; i++) {
        const struct moe_metric_desc d = {
            .name = "moe_trust_file_refused",
            .help = "1 if a file of trust is not valid; what was read before is in use.",
            .labels = {{"file", file_options[i]}}};
        if (paths[i] == NULL)
            continue;
        MOE_TRY(moe_metrics_add_gauge(metrics, &d, &g->refused_gauges[i]));
        moe_gauge_set(g->refused_gauges[i], g->refused[i] ? 1 : 0);
    }
    return moe_ok();
}

/* The registry of the first server is that of the daemon. */
static void add_metrics(struct moe_guard *g, struct moe_metrics *metrics)
{
    struct moe_status st = moe_ok();
    moe_mutex_lock(&g->lock);
    if (metrics != NULL && !g->has_metrics) {
        st = moe_expiry_add_metrics(&g->dates, g->config, metrics);
        if (!moe_failed(&st))
            st = add_refused(g, metrics);
        g->has_metrics = true;
    }
    moe_mutex_unlock(&g->lock);
    if (moe_failed(&st))
        moe_log_warn("metrics of files of trust: %s", st.text);
}

static void add(struct moe_guard *g, struct moe_rpc_server *server)
{
    size_t i = 0;
    moe_mutex_lock(&g->lock);
    while (i < MOE_GUARD_SERVERS_MAX && g->servers[i] != NULL)
        i++;
    MOE_INVARIANT(i < MOE_GUARD_SERVERS_MAX);
    g->servers[i] = server;
    moe_mutex_unlock(&g->lock);
}

/* Once, for the first such address. */
static void warn_if_readable(struct moe_guard *g, const char *listen)
{
    struct moe_status st = moe_endpoint_check_loopback(listen);
    if (g->tls != NULL || !moe_failed(&st) || g->warned)
        return;
    g->warned = true;
    moe_log_warn("%s has no TLS and is not loopback: tokens, session secrets and NCCL ids can be "
                 "read on the network",
                 listen);
}

struct moe_status moe_guard_start_server(struct moe_guard *g,
                                         const struct moe_rpc_server_config *config,
                                         struct moe_rpc_server **out)
{
    char *addresses = NULL;
    if (g == NULL)
        return moe_rpc_server_start(config, out);
    MOE_TRY(list_addresses(g, config->listen, &addresses));
    struct moe_rpc_server_config guarded = *config;
    guarded.listen = addresses;
    guarded.tls = g->tls;
    guarded.authorise = authorise;
    guarded.finished = record;
    guarded.authorise_ctx = g;
    struct moe_status st = moe_rpc_server_start(&guarded, out);
    free(addresses);
    if (!moe_failed(&st)) {
        warn_if_readable(g, config->listen);
        add(g, *out);
        add_metrics(g, config->metrics);
    }
    return st;
}

void moe_guard_remove(struct moe_guard *g, struct moe_rpc_server *server)
{
    if (g == NULL)
        return;
    moe_mutex_lock(&g->lock);
    for (size_t i = 0; i < MOE_GUARD_SERVERS_MAX; i++)
        if (g->servers[i] == server)
            g->servers[i] = NULL;
    bool others = false;
    for (size_t i = 0; i < MOE_GUARD_SERVERS_MAX; i++)
        others = others || g->servers[i] != NULL;
    if (!others) { /* the registry may end with its last server */
        memset(g->dates.gauges, 0, sizeof g->dates.gauges);
        memset(g->refused_gauges, 0, sizeof g->refused_gauges);
    }
    while (g->looking)
        moe_wait(&g->changed, &g->lock);
    moe_mutex_unlock(&g->lock);
}

/* At SIGHUP, on the daemon's loop. */
static void reload(void *guard)
{
    struct moe_guard *g = guard;
    moe_mutex_lock(&g->lock);
    g->look_now = true;
    pthread_cond_broadcast(&g->changed);
    moe_mutex_unlock(&g->lock);
}

/* ------------------------------------------------------------------ lifetime */

struct moe_status moe_guard_create(const struct moe_daemon_settings *config, struct moe_guard **out)
{
    struct moe_guard *g = calloc(1, sizeof *g);
    if (g == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory");
    moe_mutex_init(&g->lock);
    moe_wait_init(&g->changed);
    g->config = config;
    /* A connection of this host is a client's; one from elsewhere is nothing until the access file
     * says so. */
    const bool plain = !config->insecure && config->tls_certificate == NULL;
    const struct moe_rpc_tls_files files = {.certificate = config->tls_certificate,
                                            .key = config->tls_key,
                                            .ca = config->tls_client_ca};
    const struct moe_access_config access = {.open = is_open(config),
                                             .anonymous_roles = plain ? MOE_ROLE_CLIENT : 0,
                                             .access_file = config->access_file,
                                             .token_file = config->token_file,
                                             .own_uid = geteuid()};
    struct moe_status st = moe_access_create(&access, &g->access);
    if (!moe_failed(&st) && files.certificate != NULL)
        st = moe_tls_create(&files, &g->tls);
    if (!moe_failed(&st)) {
        moe_expiry_init(&g->expiry, config);
        moe_expiry_look(&g->expiry, g->tls, (int64_t)time(NULL));
        moe_mutex_lock(&g->lock);
        moe_expiry_show(&g->expiry, &g->dates);
        moe_mutex_unlock(&g->lock);
        int rc = moe_thread_create(&g->thread, "moe-guard", guard_main, g);
        g->running = rc == 0;
        if (rc != 0)
            st = moe_thread_failure("moe-guard", rc);
    }
    if (moe_failed(&st)) {
        moe_guard_destroy(g);
        return st;
    }
    moe_hangup_call(MOE_HANGUP_TRUST, reload, g);
    *out = g;
    return st;
}

void moe_guard_destroy(struct moe_guard *g)
{
    if (g == NULL)
        return;
    moe_hangup_call(MOE_HANGUP_TRUST, NULL, NULL);
    moe_mutex_lock(&g->lock);
    g->quit = true;
    pthread_cond_broadcast(&g->changed);
    moe_mutex_unlock(&g->lock);
    if (g->running)
        pthread_join(g->thread, NULL);
    report_refusals(g, moe_clock_ns(), true);
    moe_tls_destroy(g->tls);
    moe_access_destroy(g->access);
    pthread_cond_destroy(&g->changed);
    moe_mutex_destroy(&g->lock);
    free(g);
}

struct moe_status moe_guard_check(const struct moe_daemon_settings *settings)
{
    struct moe_guard *g;
    MOE_TRY(moe_guard_create(settings, &g));
    moe_guard_destroy(g);
    return moe_ok();
}
