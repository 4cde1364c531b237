/* SPDX-License-Identifier: Apache-2.0 */
/* Channels of a client: where its calls go, by which kind of link, and what they show there.
 *
 * The core cannot change the certificates of a channel. So each state of the files of TLS has a
 * channel of the core, a route. New calls take the newest; the others end with their last call. */
#include "base/clock.h"
#include "daemon/endpoint.h"
#include "daemon/local.h"
#include "daemon/log.h"
#include "rpc/calling.h"
#include "tls/pem.h"
#include "uploads/budget.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_NS MOE_NS_PER_S

enum { TARGET_BYTES = 512, FILES = 3 };

struct moe_rpc_tls {
    struct moe_rpc_tls_files files; /* owned strings */
    char *server_name;              /* NULL: the host of the target */
    /* Guarded by the channel's lock. */
    struct moe_trusted_mark marks[FILES];
    uint64_t looked_ns;
    bool failed; /* the files were refused at the last look */
};

/* ------------------------------------------------------------------ certificates */

static void tls_close(struct moe_rpc_tls *t)
{
    if (t == NULL)
        return;
    free((char *)(uintptr_t)t->files.certificate);
    free((char *)(uintptr_t)t->files.key);
    free((char *)(uintptr_t)t->files.ca);
    free(t->server_name);
    free(t);
}

static bool copy_string(const char *from, const char **to)
{
    *to = from != NULL ? strdup(from) : NULL;
    return (from == NULL) == (*to == NULL);
}

/* All files are looked at, so that each mark is fresh. */
static bool files_changed(struct moe_rpc_tls *t)
{
    const char *const paths[FILES] = {t->files.certificate, t->files.key, t->files.ca};
    bool changed = false;
    for (int i = 0; i < FILES; i++)
        if (paths[i] != NULL && moe_trusted_file_changed(paths[i], &t->marks[i]))
            changed = true;
    return changed;
}

static struct moe_status tls_open(const struct moe_rpc_trust *trust, struct moe_rpc_tls **out)
{
    struct moe_rpc_tls *t = calloc(1, sizeof *t);
    const char *name = NULL;
    bool copied = t != NULL && copy_string(trust->tls.certificate, &t->files.certificate) &&
                  copy_string(trust->tls.key, &t->files.key) &&
                  copy_string(trust->tls.ca, &t->files.ca) &&
                  copy_string(trust->server_name, &name);
    if (!copied) {
        tls_close(t);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for TLS");
    }
    t->server_name = (char *)(uintptr_t)name;
    t->looked_ns = moe_clock_ns();
    (void)files_changed(t);
    *out = t;
    return moe_ok();
}

/* Free it. NULL when out of memory. */
static char *name_files(const struct moe_rpc_tls_files *f)
{
    char *names;
    int n = asprintf(&names, "%s\n%s\n%s", f->certificate != NULL ? f->certificate : "",
                     f->key != NULL ? f->key : "", f->ca != NULL ? f->ca : "");
    return n >= 0 ? names : NULL;
}

static bool copy_pem(const struct moe_tls_pem *from, struct moe_tls_pem *to)
{
    const char *const texts[] = {from->certificate, from->key, from->ca};
    char **const copies[] = {&to->certificate, &to->key, &to->ca};
    bool copied = true;
    *to = (struct moe_tls_pem){0};
    for (int i = 0; i < FILES; i++) {
        *copies[i] = texts[i] != NULL ? strdup(texts[i]) : NULL;
        copied = copied && (texts[i] == NULL || *copies[i] != NULL);
    }
    if (!copied)
        moe_tls_pem_free(to);
    return copied;
}

/* Valid files stay with the client, for channels that it opens later. */
static void remember(struct moe_rpc_client *c, const struct moe_rpc_tls_files *files,
                     const struct moe_tls_pem *pem)
{
    struct moe_tls_pem copy;
    char *paths = name_files(files);
    if (paths == NULL || !copy_pem(pem, &copy)) {
        free(paths);
        return;
    }
    moe_mutex_lock(&c->lock);
    char *old_paths = c->pem_paths;
    struct moe_tls_pem old = c->pem;
    c->pem_paths = paths;
    c->pem = copy;
    moe_mutex_unlock(&c->lock);
    free(old_paths);
    moe_tls_pem_free(&old);
}

static bool recall(struct moe_rpc_client *c, const struct moe_rpc_tls_files *files,
                   struct moe_tls_pem *out)
{
    char *paths = name_files(files);
    moe_mutex_lock(&c->lock);
    bool known = paths != NULL && c->pem_paths != NULL && strcmp(paths, c->pem_paths) == 0 &&
                 copy_pem(&c->pem, out);
    moe_mutex_unlock(&c->lock);
    free(paths);
    return known;
}

/* What a channel uses when it opens. Files that are not valid now leave those in use that the
 * client has read before. */
static struct moe_status read_files(struct moe_rpc_channel *ch, bool first, struct moe_tls_pem *pem)
{
    const struct moe_rpc_tls_files *files = &ch->tls->files;
    struct moe_status st = moe_tls_pem_read(files, pem);
    ch->tls->failed = moe_failed(&st);
    if (!moe_failed(&st)) {
        remember(ch->client, files, pem);
    } else if (first && recall(ch->client, files, pem)) {
        moe_log_warn("%s; connections to %s go on with the certificates read before", st.text,
                     ch->target);
        st = moe_ok();
    }
    return st;
}

struct moe_status moe_rpc_trust_check(struct moe_rpc_client *c, const struct moe_rpc_trust *trust)
{
    struct moe_tls_pem pem;
    if (trust->tls.ca == NULL)
        return moe_ok();
    MOE_TRY(moe_tls_pem_read(&trust->tls, &pem));
    remember(c, &trust->tls, &pem);
    moe_tls_pem_free(&pem);
    return moe_ok();
}

/* What the core shows and believes. Without `tls`, a plain connection. */
static struct moe_status make_credentials(struct moe_rpc_channel *ch, bool first,
                                          grpc_channel_credentials **out)
{
    if (ch->tls == NULL) {
        *out = grpc_insecure_credentials_create();
        return moe_ok();
    }
    struct moe_tls_pem pem;
    MOE_TRY(read_files(ch, first, &pem));
    grpc_ssl_pem_key_cert_pair pair = {.private_key = pem.key, .cert_chain = pem.certificate};
    *out =
        grpc_ssl_credentials_create_ex(pem.ca, pem.certificate != NULL ? &pair : NULL, NULL, NULL);
    moe_tls_pem_free(&pem);
    return moe_ok();
}

/* ------------------------------------------------------------------ routes */

static grpc_arg string_arg(const char *key, const char *value)
{
    grpc_arg arg = {.type = GRPC_ARG_STRING, .key = (char *)(uintptr_t)key};
    arg.value.string = (char *)(uintptr_t)value;
    return arg;
}

/* Reads the files of TLS. `first`: there is no other route that could stay. */
static struct moe_status make_route(struct moe_rpc_channel *ch, bool first,
                                    struct moe_rpc_route **out)
{
    /* Reconnect within seconds after a restart of the group; the core's default is two minutes. A
     * restarted daemon may have another address, so each attempt may look at the name again; the
     * core's default is once in 30 s. */
    enum { FIRST_BACKOFF_MS = 100, RESOLVE_MS = 1000 };
    const char *server_name = ch->tls != NULL ? ch->tls->server_name : NULL;
    grpc_arg args[] = {
        moe_rpc_int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)ch->max_message_bytes),
        moe_rpc_int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, (int)ch->max_message_bytes),
        moe_rpc_int_arg(GRPC_ARG_MAX_METADATA_SIZE, MOE_RPC_METADATA_BYTES),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, MOE_RPC_FRAME_BYTES),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, MOE_RPC_LOOKAHEAD_BYTES),
        moe_rpc_int_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, ch->own_connection),
        moe_rpc_int_arg(GRPC_ARG_ENABLE_RETRIES, 0),
        moe_rpc_int_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
        moe_rpc_int_arg(GRPC_ARG_ENABLE_CHANNELZ, 0),
        moe_rpc_int_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1),
        moe_rpc_int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, MOE_RPC_KEEPALIVE_MS),
        moe_rpc_int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, MOE_RPC_KEEPALIVE_WAIT_MS),
        moe_rpc_int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        moe_rpc_int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        moe_rpc_int_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, FIRST_BACKOFF_MS),
        moe_rpc_int_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, (int)ch->reconnect_ms),
        moe_rpc_int_arg(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, RESOLVE_MS),
        string_arg(GRPC_SSL_TARGET_NAME_OVERRIDE_ARG, server_name), /* the last: may be absent */
    };
    size_t count = sizeof args / sizeof *args - (server_name == NULL);
    grpc_channel_credentials *credentials;
    MOE_TRY(make_credentials(ch, first, &credentials));
    struct moe_rpc_route *route = malloc(sizeof *route);
    if (route == NULL) {
        grpc_channel_credentials_release(credentials);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a channel");
    }
    atomic_init(&route->references, 1);
    route->link = ch->local         ? MOE_RPC_LINK_UNIX
                  : ch->tls != NULL ? MOE_RPC_LINK_TLS
                                    : MOE_RPC_LINK_TCP;
    route->core = grpc_channel_create(ch->target, credentials,
                                      &(grpc_channel_args){.num_args = count, .args = args});
    grpc_channel_credentials_release(credentials);
    *out = route;
    return moe_ok();
}

void moe_rpc_route_drop(struct moe_rpc_route *route)
{
    if (atomic_fetch_sub(&route->references, 1) != 1)
        return;
    grpc_channel_destroy(route->core);
    free(route);
}

/* Replaces the route if the files of TLS have changed. Files that do not validate are logged once
 * and leave the old route in use; they are read again at each look, as the rest may follow. */
static void look(struct moe_rpc_channel *ch) MOE_REQUIRES(ch->lock)
{
    struct moe_rpc_tls *t = ch->tls;
    uint64_t now = moe_clock_ns();
    if (t == NULL || now - t->looked_ns < LOOK_NS)
        return;
    t->looked_ns = now;
    bool changed = files_changed(t);
    if (!changed && !t->failed)
        return;
    struct moe_rpc_route *newer;
    struct moe_status st = make_route(ch, false, &newer);
    if (moe_failed(&st) && changed)
        moe_log_warn("%s; connections to %s go on with the certificates read before", st.text,
                     ch->target);
    if (moe_failed(&st))
        return;
    moe_rpc_route_drop(ch->route);
    ch->route = newer;
    moe_log_info("the certificates for connections to %s were read anew", ch->target);
}

struct moe_rpc_route *moe_rpc_channel_route(struct moe_rpc_channel *ch)
{
    moe_mutex_lock(&ch->lock);
    look(ch);
    struct moe_rpc_route *route = ch->route;
    atomic_fetch_add(&route->references, 1);
    moe_mutex_unlock(&ch->lock);
    return route;
}

/* ------------------------------------------------------------------ channels */

/* A daemon of this user is reached by its socket, where it knows the user. An operator without a
 * token or a certificate uses the socket for operators. */
static struct moe_status find_target(const char *endpoint, bool has_identity,
                                     char target[TARGET_BYTES], bool *local)
{
    static const char scheme[] = "unix:";
    char path[MOE_LOCAL_PATH_BYTES];
    bool found =
        moe_local_find(endpoint, path) || (!has_identity && moe_local_find_admin(endpoint, path));
    int n = found ? snprintf(target, TARGET_BYTES, "%s%s", scheme, path)
                  : snprintf(target, TARGET_BYTES, "%s", endpoint);
    *local = strncmp(target, scheme, sizeof scheme - 1) == 0;
    return n > 0 && n < TARGET_BYTES ? moe_ok()
                                     : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                                                 "the address is too long");
}

/* Anybody on the way could read a token. */
static struct moe_status check_trust(const struct moe_rpc_trust *t, const char *target)
{
    const struct moe_rpc_tls_files *f = &t->tls;
    if ((f->certificate == NULL) != (f->key == NULL))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a TLS certificate needs its key, and a key its certificate");
    if (f->certificate != NULL && f->ca == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a TLS certificate needs a CA that the server's certificate leads to");
    if (t->token_file == NULL || f->ca != NULL || t->insecure)
        return moe_ok();
    struct moe_status st = moe_endpoint_check_loopback(target);
    return !moe_failed(&st) ? moe_ok()
                            : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                                        "a token would be sent without encryption; use TLS "
                                        "(--tls-ca), or allow it by --insecure or MOED_INSECURE=1");
}

/* Certificates and token. A local socket takes none. */
static struct moe_status open_trust(struct moe_rpc_channel *ch, const struct moe_rpc_trust *trust)
{
    MOE_TRY(check_trust(trust, ch->target));
    if (trust->tls.ca != NULL)
        MOE_TRY(tls_open(trust, &ch->tls));
    return trust->token_file != NULL ? moe_rpc_token_open(trust->token_file, &ch->token) : moe_ok();
}

struct moe_status moe_rpc_channel_open(struct moe_rpc_client *c,
                                       const struct moe_rpc_channel_config *config,
                                       struct moe_rpc_channel **out)
{
    enum { LONGEST_BACKOFF_MS = 5000 };
    uint32_t largest = config->max_message_bytes, longest = config->reconnect_ms;
    *out = NULL;
    if (largest > INT_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "largest message must be below 2 GiB");
    char target[TARGET_BYTES];
    bool local;
    const struct moe_rpc_trust *trust = &config->trust;
    MOE_TRY(find_target(config->target, trust->token_file != NULL || trust->tls.ca != NULL, target,
                        &local));
    struct moe_rpc_channel *ch = calloc(1, sizeof *ch);
    if (ch == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a channel");
    moe_mutex_init(&ch->lock);
    moe_mutex_not_shared(&ch->lock);
    ch->client = c;
    ch->target = strdup(target);
    ch->max_message_bytes = largest != 0 ? largest : MOE_RPC_DEFAULT_MESSAGE_BYTES;
    ch->reconnect_ms = longest != 0 && longest < LONGEST_BACKOFF_MS ? longest : LONGEST_BACKOFF_MS;
    ch->own_connection = config->own_connection;
    ch->local = local;
    struct moe_status st = ch->target != NULL
                               ? moe_ok()
                               : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                           "out of memory for a channel");
    if (!moe_failed(&st) && !local)
        st = open_trust(ch, &config->trust);
    if (!moe_failed(&st))
        st = make_route(ch, true, &ch->route);
    if (moe_failed(&st)) {
        moe_rpc_channel_close(ch);
        return st;
    }
    *out = ch;
    return st;
}

void moe_rpc_channel_connect(struct moe_rpc_channel *ch)
{
    struct moe_rpc_route *route = moe_rpc_channel_route(ch);
    (void)grpc_channel_check_connectivity_state(route->core, 1);
    moe_rpc_route_drop(route);
}

void moe_rpc_channel_close(struct moe_rpc_channel *ch)
{
    if (ch == NULL)
        return;
    moe_mutex_not_shared(&ch->lock);
    if (ch->route != NULL)
        moe_rpc_route_drop(ch->route);
    tls_close(ch->tls);
    moe_rpc_token_close(ch->token);
    moe_mutex_destroy(&ch->lock);
    free(ch->target);
    free(ch);
}

/* ------------------------------------------------------------------ environment */

static void take_variable(const char *name, const char **value)
{
    const char *found = *value == NULL ? getenv(name) : NULL;
    if (found != NULL && found[0] != '\0')
        *value = found;
}

void moe_rpc_trust_from_environment(struct moe_rpc_trust *t)
{
    const char *insecure = getenv("MOED_INSECURE");
    take_variable("MOED_TLS_CA", &t->tls.ca);
    take_variable("MOED_TLS_CERTIFICATE", &t->tls.certificate);
    take_variable("MOED_TLS_KEY", &t->tls.key);
    take_variable("MOED_TLS_SERVER_NAME", &t->server_name);
    take_variable("MOED_TOKEN_FILE", &t->token_file);
    t->insecure = t->insecure || (insecure != NULL && strcmp(insecure, "1") == 0);
}
