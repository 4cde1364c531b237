/* SPDX-License-Identifier: Apache-2.0 */
/* Creates and destroys a client: asks the server for its limits and its model, and opens the
 * connections. Keeps the unpacked answers, because moe_client_info points into them. */
#include "abi.h"
#include "base/clock.h"
#include "base/cores.h"
#include "base/random.h"
#include "base/wait.h"
#include "daemon/endpoint.h"
#include "daemon/local.h"
#include "internal.h"
#include "wire.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum {
    INFO_MAX = 256 * 1024, /* bytes of a GetModel answer: thousands of layers */
    RECONNECT_MS = 1000,   /* longest pause between two tries to connect */
    TARGET_BYTES = 512,    /* of an address with its scheme */
    /* With few processors, the threads of the connections wait for each other (serving.md). */
    CORES_FOR_PARTS = 8,
};

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "client: out of memory");
}

static struct moe_status broken(const char *what)
{
    return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "broken answer from the server: %s", what);
}

struct moe_status moe_client_ask(struct moe_rpc_channel *channel, const char *path,
                                 uint64_t deadline, const struct moe_rpc_out *request,
                                 const ProtobufCMessageDescriptor *type, ProtobufCMessage **out)
{
    struct moe_rpc_call_options options = {.deadline_ns = deadline};
    struct moe_rpc_msg *reply = NULL;
    MOE_TRY(moe_rpc_call_wait(channel, path, &options, request, &reply));

    size_t length = moe_rpc_msg_length(reply);
    uint8_t *bytes = length <= INFO_MAX ? malloc(length + 1) : NULL;
    struct moe_status st =
        bytes != NULL ? moe_rpc_msg_flatten(reply, bytes, length, &length) : broken("too large");
    moe_rpc_msg_free(reply);
    void *message = NULL;
    if (!moe_failed(&st))
        st = moe_client_wire_blame(moe_rpc_unpack(type, bytes, length, NULL, &message));
    if (!moe_failed(&st))
        *out = message;
    free(bytes);
    return st;
}

static struct moe_status read_layers(struct moe_client *c)
{
    size_t count = c->model->n_layers;
    c->layers = calloc(count + 1, sizeof *c->layers);
    if (c->layers == NULL)
        return out_of_memory();
    for (size_t i = 0; i < count; i++) {
        const Moe__V1__LayerInfo *l = c->model->layers[i];
        if (l->hidden == 0 || l->experts == 0 || l->top_k == 0 || l->top_k > l->experts)
            return broken("a layer of an impossible shape");
        c->layers[i] = (struct moe_client_layer){
            .layer = l->layer,
            .hidden = l->hidden,
            .experts = l->experts,
            .zero_experts = l->zero_experts,
            .top_k = l->top_k,
            .intermediate = l->intermediate,
            .shared_intermediate = l->shared_intermediate,
            .routes_by_token_id = l->routes_by_token_id != 0,
            .vocabulary = l->vocabulary,
        };
    }
    return moe_ok();
}

static struct moe_status check_workers(const struct moe_client *c)
{
    return c->server->n_workers <= MOE_MAX_SLOTS ? moe_ok() : broken("more workers than slots");
}

static void fill_info(struct moe_client *c)
{
    c->info = (struct moe_client_info){
        .size = sizeof c->info,
        .model = c->model->model,
        .family = c->model->family,
        .version = c->server->version,
        .backend = c->server->backend,
        .coordinator = c->server->coordinator,
        .epoch = c->server->epoch,
        .weights_version = c->model->weights_version,
        .max_message_bytes = c->server->max_message_bytes,
        .max_tokens_per_request = c->server->max_tokens_per_request,
        .max_tokens_per_step = c->server->max_tokens_per_step,
        .workers = (const char *const *)c->server->workers,
        .worker_count = c->server->n_workers,
        .layers = c->layers,
        .layer_count = c->model->n_layers,
        .model_digest = c->model->model_digest,
        .models = (const char *const *)c->server->models,
        .model_count = c->server->n_models,
    };
}

/* The endpoint's answer stands for all workers: those of a group have one release. */
static bool has_extension(const struct moe_client *c, const char *name)
{
    for (size_t i = 0; i < c->server->n_extensions; i++)
        if (strcmp(c->server->extensions[i], name) == 0)
            return true;
    return false;
}

/* A group that has not formed yet has no digest: then each forward is checked. */
static struct moe_status check_digest(const struct moe_client *c)
{
    const char *served = c->model->model_digest;
    if (c->wanted.digest[0] == '\0' || served[0] == '\0' || strcmp(c->wanted.digest, served) == 0)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                     "the group serves the model with digest %.64s", served);
}

void moe_client_close_connection(struct moe_client_connection *connection)
{
    moe_rpc_channel_close(connection->channel);
    moe_rpc_client_destroy(connection->rpc);
    free(connection->endpoint);
    *connection = (struct moe_client_connection){0};
}

struct moe_status moe_client_blame_connection(const struct moe_client_connection *connection,
                                              struct moe_status st)
{
    return st.code == MOE_UNAVAILABLE ? moe_error_context(st, "%s", connection->endpoint) : st;
}

/* The transport's name of an endpoint. One without a scheme is any way. */
static struct moe_status find_way(enum moe_client_way way, const char *endpoint,
                                  char target[TARGET_BYTES])
{
    char path[MOE_LOCAL_PATH_BYTES];
    if (way == MOE_CLIENT_WAY_UNIX && !moe_local_find(endpoint, path))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "%.64s has no socket for this user on this host", endpoint);
    int n = way == MOE_CLIENT_WAY_UNIX
                ? snprintf(target, TARGET_BYTES, "unix:%s", path)
                : snprintf(target, TARGET_BYTES, "%s%s", way == MOE_CLIENT_WAY_TCP ? "dns:" : "",
                           endpoint);
    return n > 0 && n < TARGET_BYTES ? moe_ok()
                                     : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                                                 "the address is too long");
}

struct moe_status moe_client_open_connection(const struct moe_client *c, const char *target,
                                             uint64_t max_message_bytes,
                                             struct moe_client_connection *connection)
{
    char way[TARGET_BYTES];
    MOE_TRY(find_way(c->config.way, target, way));
    connection->endpoint = strdup(target);
    if (connection->endpoint == NULL)
        return out_of_memory();
    struct moe_status created = moe_rpc_client_create(&connection->rpc);
    if (created.code != MOE_OK) {
        moe_client_close_connection(connection);
        return created;
    }
    struct moe_rpc_channel_config config = {
        .target = way,
        .trust = c->trust,
        .max_message_bytes =
            max_message_bytes <= INT32_MAX ? (uint32_t)max_message_bytes : INT32_MAX,
        .own_connection = true,
        /* Training waits for a worker that is restarted; a short pause finds it soon. */
        .reconnect_ms = RECONNECT_MS,
    };
    struct moe_status st = moe_rpc_channel_open(connection->rpc, &config, &connection->channel);
    if (st.code != MOE_OK)
        moe_client_close_connection(connection);
    return st;
}

static struct moe_status learn(struct moe_client *c, const char *endpoint)
{
    uint64_t deadline = moe_client_deadline(c, 0);
    struct moe_client_connection connection = {0};
    Moe__V1__GetModelRequest model = MOE__V1__GET_MODEL_REQUEST__INIT;
    uint8_t head[sizeof c->wanted.model + 8];
    model.model = c->wanted.model;
    struct moe_rpc_out nothing = {0}, which = {.head = head};
    which.head_length = moe__v1__get_model_request__pack(&model, head);
    MOE_TRY(moe_client_open_connection(c, endpoint, 0, &connection));
    ProtobufCMessage *answer = NULL;
    struct moe_status st =
        moe_client_ask(connection.channel, "/moe.v1.ExpertService/GetServerInfo", deadline,
                       &nothing, &moe__v1__get_server_info_response__descriptor, &answer);
    c->server = (Moe__V1__GetServerInfoResponse *)answer;
    answer = NULL;
    if (st.code == MOE_UNIMPLEMENTED)
        st = moe_error(MOE_UNIMPLEMENTED, MOE_REASON_NONE,
                       "this is not a worker, perhaps a coordinator: use a worker's endpoint");
    if (st.code == MOE_OK)
        st = moe_client_ask(connection.channel, "/moe.v1.ExpertService/GetModel", deadline, &which,
                            &moe__v1__get_model_response__descriptor, &answer);
    c->model = (Moe__V1__GetModelResponse *)answer;
    moe_client_close_connection(&connection);
    return st;
}

/* Endpoints of the connections: with `spread` or `hedge` those of all workers (a slot may be
 * empty), else `endpoint` alone. The worker at `endpoint` keeps that address, even if it reports
 * another one. Without `spread` it is the first. */
static size_t list_targets(const struct moe_client *c, const char *endpoint,
                           const char *targets[MOE_MAX_SLOTS])
{
    size_t count = 0;
    bool all = c->config.spread || c->config.hedge;
    if (!c->config.spread)
        targets[count++] = endpoint;
    for (size_t i = 0; all && i < c->info.worker_count; i++)
        if (i == c->server->slot && c->config.spread)
            targets[count++] = endpoint;
        else if (i != c->server->slot && c->info.workers[i][0] != '\0')
            targets[count++] = c->info.workers[i];
    if (count == 0)
        targets[count++] = endpoint;
    return count;
}

static struct moe_status open_there(const struct moe_client *c, const char *target,
                                    struct moe_client_connection *connection)
{
    MOE_TRY(moe_client_open_connection(c, target, c->info.max_message_bytes, connection));
    moe_rpc_client_set_spin(connection->rpc, c->config.spin_us * MOE_NS_PER_S / 1000000);
    return moe_ok();
}

static struct moe_status open_connections(struct moe_client *c, const char *endpoint)
{
    const char *targets[MOE_MAX_SLOTS];
    c->worker_count = list_targets(c, endpoint, targets);
    size_t wanted = c->worker_count * c->config.connections;
    c->connections = calloc(c->worker_count * c->lanes, sizeof *c->connections);
    if (c->connections == NULL)
        return out_of_memory();
    for (; c->connection_count < wanted; c->connection_count++)
        MOE_TRY(open_there(c, targets[c->connection_count % c->worker_count],
                           &c->connections[c->connection_count]));
    return moe_ok();
}

size_t moe_client_take_lane(struct moe_client *c, size_t worker, size_t lane)
{
    const size_t i = lane * c->worker_count + worker;
    struct moe_status st = moe_ok();
    if (i < c->connection_count)
        return i;
    moe_mutex_lock(&c->lock);
    if (c->connections[i].channel == NULL)
        st = open_there(c, c->connections[worker].endpoint, &c->connections[i]);
    moe_mutex_unlock(&c->lock);
    return moe_failed(&st) ? worker : i;
}

/* Copies the wanted digest. */
static struct moe_status read_digest(struct moe_client *c)
{
    const char *digest = c->config.model_digest;
    c->config.model_digest = NULL;
    if (digest == NULL)
        return moe_ok();
    if (strlen(digest) != sizeof c->wanted.digest - 1 ||
        strspn(digest, "0123456789abcdef") != sizeof c->wanted.digest - 1)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a model_digest has 64 digits of 0-9 a-f");
    strcpy(c->wanted.digest, digest);
    return moe_ok();
}

/* Copies the name of the model. */
static struct moe_status read_model_name(struct moe_client *c)
{
    const char *name = c->config.model;
    c->config.model = NULL;
    if (name == NULL)
        return moe_ok();
    if (strlen(name) >= sizeof c->wanted.model)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the name of a model has at most %d bytes",
                         (int)sizeof c->wanted.model - 1);
    strcpy(c->wanted.model, name);
    return moe_ok();
}

static struct moe_status check_config(const struct moe_client_config *config)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(config, config, CONFIG));
    if (config->endpoint == NULL || config->endpoint[0] == '\0')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "no endpoint was given");
    MOE_TRY(moe_endpoint_check("endpoint", config->endpoint));
    if (MOE_CLIENT_HAS(config, way) && config->way > MOE_CLIENT_WAY_UNIX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "there is no such way");
    if (MOE_CLIENT_HAS(config, attempt_ms) && config->attempt_ms != 0 && !config->hedge)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "attempt_ms is for clients with hedge");
    if (config->connections > MOE_CLIENT_MAX_CONNECTIONS)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "at most %d connections per worker", MOE_CLIENT_MAX_CONNECTIONS);
    return moe_ok();
}

static void fill_defaults(struct moe_client *c, const struct moe_client_config *config)
{
    memcpy(&c->config, config, config->size < sizeof c->config ? config->size : sizeof c->config);
    c->config.endpoint = NULL;
    c->lanes = c->config.connections != 0 ? c->config.connections : MOE_CLIENT_DEFAULT_LANES;
    if (c->config.connections == 0)
        c->config.connections = 1;
    if (c->config.timeout_ms == 0)
        c->config.timeout_ms = MOE_CLIENT_DEFAULT_TIMEOUT_MS;
    if (c->config.max_attempts == 0)
        c->config.max_attempts = MOE_CLIENT_DEFAULT_ATTEMPTS;
    if (c->config.spread_tokens == 0)
        c->config.spread_tokens = MOE_CLIENT_DEFAULT_SPREAD_TOKENS;
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != sizeof seed)
        seed = moe_clock_ns();
    atomic_init(&c->jitter, seed);
    /* Clients that start at the same time begin with different workers. */
    atomic_init(&c->next_connection, (uint32_t)(seed >> 32) & 0xffff);
}

/* The fields of the caller's struct, which may be shorter, then the environment. */
static struct moe_status read_trust(struct moe_client *c)
{
    struct moe_client_config *f = &c->config;
    struct moe_rpc_trust *t = &c->trust;
    *t = (struct moe_rpc_trust){
        .tls = {.certificate = f->tls_certificate, .key = f->tls_key, .ca = f->tls_ca},
        .server_name = f->tls_server_name,
        .token_file = f->token_file,
        .insecure = f->insecure,
    };
    f->tls_certificate = f->tls_key = f->tls_ca = f->tls_server_name = f->token_file = NULL;
    moe_rpc_trust_from_environment(t);
    const char **const strings[] = {&t->tls.certificate, &t->tls.key, &t->tls.ca, &t->server_name,
                                    &t->token_file};
    bool copied = true;
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        const char *from = *strings[i];
        *strings[i] = from != NULL ? strdup(from) : NULL;
        copied = copied && (from == NULL || *strings[i] != NULL);
    }
    return copied ? moe_ok() : out_of_memory();
}

static void free_trust(struct moe_rpc_trust *t)
{
    const char *const strings[] = {t->tls.certificate, t->tls.key, t->tls.ca, t->server_name,
                                   t->token_file};
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++)
        free((char *)(uintptr_t)strings[i]);
}

static struct moe_status name_session(struct moe_client *c)
{
    uint64_t id;
    MOE_TRY(moe_random_id(&id));
    snprintf(c->session, sizeof c->session, "client-%016" PRIx64, id);
    return moe_ok();
}

struct moe_status moe_client_connect(const struct moe_client_config *config,
                                     struct moe_client **out)
{
    MOE_TRY(check_config(config));
    /* First, so that a child of fork is refused before it takes a lock or starts a thread. */
    MOE_TRY(moe_error_context(moe_rpc_library_ref(), "%s", config->endpoint));
    struct moe_client *c = calloc(1, sizeof *c);
    if (c == NULL) {
        moe_rpc_library_unref();
        return out_of_memory();
    }
    moe_mutex_init(&c->lock);
    pthread_cond_init(&c->idle, NULL);
    fill_defaults(c, config);
    struct moe_status st;
    MOE_TRY_GOTO(st, read_trust(c), failed);
    MOE_TRY_GOTO(st, read_digest(c), failed);
    MOE_TRY_GOTO(st, read_model_name(c), failed);
    MOE_TRY_GOTO(st, name_session(c), failed);
    MOE_TRY_GOTO(st, moe_client_timers_create(&c->timers), failed);
    MOE_TRY_GOTO(st, learn(c, config->endpoint), failed);
    MOE_TRY_GOTO(st, read_layers(c), failed);
    MOE_TRY_GOTO(st, check_workers(c), failed);
    fill_info(c);
    c->joins_parts = has_extension(c, "batch_parts") &&
                     (c->config.connections > 1 || moe_usable_cores() >= CORES_FOR_PARTS);
    MOE_TRY_GOTO(st, check_digest(c), failed);
    MOE_TRY_GOTO(st, open_connections(c, config->endpoint), failed);
    *out = c;
    return st;

failed:
    moe_client_close(c);
    return moe_error_context(st, "%s", config->endpoint);
}

void moe_client_close(struct moe_client *c)
{
    if (c == NULL)
        return;
    moe_mutex_lock(&c->lock);
    while (c->in_flight > 0)
        moe_wait(&c->idle, &c->lock);
    moe_mutex_unlock(&c->lock);

    for (size_t i = 0; c->connections != NULL && i < c->worker_count * c->lanes; i++)
        moe_client_close_connection(&c->connections[i]);
    moe_client_timers_destroy(c->timers);
    if (c->server != NULL)
        moe__v1__get_server_info_response__free_unpacked(c->server, NULL);
    if (c->model != NULL)
        moe__v1__get_model_response__free_unpacked(c->model, NULL);
    free(c->connections);
    free(c->layers);
    free_trust(&c->trust);
    pthread_cond_destroy(&c->idle);
    moe_mutex_destroy(&c->lock);
    free(c);
    moe_rpc_library_unref();
}

const struct moe_client_info *moe_client_get_info(const struct moe_client *c)
{
    return &c->info;
}

void moe_client_enter(struct moe_client *c)
{
    moe_mutex_lock(&c->lock);
    c->in_flight++;
    moe_mutex_unlock(&c->lock);
}

void moe_client_leave(struct moe_client *c)
{
    moe_mutex_lock(&c->lock);
    if (--c->in_flight == 0)
        pthread_cond_broadcast(&c->idle);
    moe_mutex_unlock(&c->lock);
}

size_t moe_client_take_connection(struct moe_client *c)
{
    size_t next = atomic_fetch_add_explicit(&c->next_connection, 1, memory_order_relaxed);
    return c->config.spread ? next % c->connection_count
                            : next % c->config.connections * c->worker_count;
}

uint64_t moe_client_deadline(const struct moe_client *c, uint64_t timeout_ms)
{
    uint64_t ms = timeout_ms != 0 ? timeout_ms : c->config.timeout_ms;
    uint64_t ns, at;
    if (__builtin_mul_overflow(ms, MOE_NS_PER_MS, &ns) ||
        __builtin_add_overflow(ns, moe_clock_ns(), &at))
        return MOE_NEVER;
    return at;
}
