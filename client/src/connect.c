/* Birth and death of a client: asks the server who it is and what it serves, opens the lanes. The
 * unpacked answers stay as they are, and moe_client_info points into them. */
#include "base/clock.h"
#include "base/endpoint.h"
#include "base/random.h"
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum {
    INFO_MAX = 256 * 1024, /* bytes of a GetModel answer: thousands of layers */
    RECONNECT_MS = 1000,   /* longest pause between two tries to connect */
};

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "client: out of memory");
}

static struct moe_status broken(const char *what)
{
    return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "broken answer from the server: %s", what);
}

/* Calls a method without parameters and unpacks the answer with the descriptor; `*out` is freed
 * with protobuf_c_message_free_unpacked. */
static struct moe_status ask(struct moe_rpc_channel *channel, const char *path, uint64_t deadline,
                             const ProtobufCMessageDescriptor *type, ProtobufCMessage **out)
{
    struct moe_rpc_call_options options = {.deadline_ns = deadline};
    struct moe_rpc_out nothing = {0};
    struct moe_rpc_msg *reply = NULL;
    MOE_TRY(moe_rpc_call_wait(channel, path, &options, &nothing, &reply));

    size_t length = moe_rpc_msg_length(reply);
    uint8_t *bytes = length <= INFO_MAX ? malloc(length + 1) : NULL;
    struct moe_status st =
        bytes != NULL ? moe_rpc_msg_flatten(reply, bytes, length, &length) : broken("too large");
    moe_rpc_msg_free(reply);
    if (st.code == MOE_OK) {
        *out = protobuf_c_message_unpack(type, NULL, length, bytes);
        if (*out == NULL)
            st = broken(type->name);
    }
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
    };
}

void moe_client_close_lane(struct moe_client_lane *lane)
{
    moe_rpc_channel_close(lane->channel);
    moe_rpc_client_destroy(lane->rpc);
    free(lane->endpoint);
    *lane = (struct moe_client_lane){0};
}

struct moe_status moe_client_blame_lane(const struct moe_client_lane *lane, struct moe_status st)
{
    return st.code == MOE_UNAVAILABLE ? moe_error_context(st, "%s", lane->endpoint) : st;
}

struct moe_status moe_client_open_lane(const char *target, uint64_t max_message_bytes,
                                       struct moe_client_lane *lane)
{
    lane->endpoint = strdup(target);
    if (lane->endpoint == NULL)
        return out_of_memory();
    struct moe_status created = moe_rpc_client_create(&lane->rpc);
    if (created.code != MOE_OK) {
        moe_client_close_lane(lane);
        return created;
    }
    struct moe_rpc_channel_config config = {
        .target = target,
        .max_message_bytes =
            max_message_bytes <= INT32_MAX ? (uint32_t)max_message_bytes : INT32_MAX,
        .own_connection = true,
        /* Who waits for a worker to be started again, as training does, finds it soon. */
        .reconnect_ms = RECONNECT_MS,
    };
    struct moe_status st = moe_rpc_channel_open(lane->rpc, &config, &lane->channel);
    if (st.code != MOE_OK)
        moe_client_close_lane(lane);
    return st;
}

static struct moe_status learn(struct moe_client *c, const char *endpoint)
{
    uint64_t deadline = moe_client_deadline(c, 0);
    struct moe_client_lane lane = {0};
    MOE_TRY(moe_client_open_lane(endpoint, 0, &lane));
    ProtobufCMessage *answer = NULL;
    struct moe_status st = ask(lane.channel, "/moe.v1.ExpertService/GetServerInfo", deadline,
                               &moe__v1__get_server_info_response__descriptor, &answer);
    c->server = (Moe__V1__GetServerInfoResponse *)answer;
    answer = NULL;
    if (st.code == MOE_UNIMPLEMENTED)
        st = moe_error(MOE_UNIMPLEMENTED, MOE_REASON_NONE,
                       "this is no worker but, it seems, a coordinator; use a worker's endpoint");
    if (st.code == MOE_OK)
        st = ask(lane.channel, "/moe.v1.ExpertService/GetModel", deadline,
                 &moe__v1__get_model_response__descriptor, &answer);
    c->model = (Moe__V1__GetModelResponse *)answer;
    moe_client_close_lane(&lane);
    return st;
}

/* Where the lanes go: to all workers that there are (a seat may be empty) with `spread`, else to
 * `endpoint` alone. The worker that was asked is always reached as the user named it, whatever it
 * calls itself. */
static size_t list_targets(const struct moe_client *c, const char *endpoint,
                           const char *targets[MOE_MAX_SLOTS])
{
    size_t count = 0;
    for (size_t i = 0; c->config.spread && i < c->info.worker_count; i++)
        if (i == c->server->slot)
            targets[count++] = endpoint;
        else if (c->info.workers[i][0] != '\0')
            targets[count++] = c->info.workers[i];
    if (count == 0)
        targets[count++] = endpoint;
    return count;
}

static struct moe_status open_lanes(struct moe_client *c, const char *endpoint)
{
    const char *targets[MOE_MAX_SLOTS];
    c->worker_count = list_targets(c, endpoint, targets);
    size_t wanted = c->worker_count * c->config.connections;
    c->lanes = calloc(wanted, sizeof *c->lanes);
    if (c->lanes == NULL)
        return out_of_memory();
    for (; c->lane_count < wanted; c->lane_count++) {
        struct moe_client_lane *lane = &c->lanes[c->lane_count];
        MOE_TRY(moe_client_open_lane(targets[c->lane_count % c->worker_count],
                                     c->info.max_message_bytes, lane));
        moe_rpc_client_stay_awake(lane->rpc, c->config.spin_us * MOE_NS_PER_S / 1000000);
    }
    return moe_ok();
}

static struct moe_status check_config(const struct moe_client_config *config)
{
    if (config->endpoint == NULL || config->endpoint[0] == '\0')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "no endpoint was given");
    MOE_TRY(moe_endpoint_check("endpoint", config->endpoint));
    if (config->connections > MOE_CLIENT_MAX_CONNECTIONS)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "at most %d connections per worker", MOE_CLIENT_MAX_CONNECTIONS);
    return moe_ok();
}

static void fill_defaults(struct moe_client *c, const struct moe_client_config *config)
{
    c->config = *config;
    c->config.endpoint = NULL;
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
    /* Clients that start together should not all begin with the same worker. */
    atomic_init(&c->next_lane, (uint32_t)(seed >> 32) & 0xffff);
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
    struct moe_client *c = calloc(1, sizeof *c);
    if (c == NULL)
        return out_of_memory();
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->idle, NULL);
    fill_defaults(c, config);
    struct moe_status st;
    MOE_TRY_GOTO(st, name_session(c), failed);
    MOE_TRY_GOTO(st, moe_client_timers_create(&c->timers), failed);
    MOE_TRY_GOTO(st, learn(c, config->endpoint), failed);
    MOE_TRY_GOTO(st, read_layers(c), failed);
    MOE_TRY_GOTO(st, check_workers(c), failed);
    fill_info(c);
    MOE_TRY_GOTO(st, open_lanes(c, config->endpoint), failed);
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
    pthread_mutex_lock(&c->lock);
    while (c->in_flight > 0)
        pthread_cond_wait(&c->idle, &c->lock);
    pthread_mutex_unlock(&c->lock);

    for (size_t i = 0; i < c->lane_count; i++)
        moe_client_close_lane(&c->lanes[i]);
    moe_client_timers_destroy(c->timers);
    if (c->server != NULL)
        moe__v1__get_server_info_response__free_unpacked(c->server, NULL);
    if (c->model != NULL)
        moe__v1__get_model_response__free_unpacked(c->model, NULL);
    free(c->lanes);
    free(c->layers);
    pthread_cond_destroy(&c->idle);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

const struct moe_client_info *moe_client_get_info(const struct moe_client *c)
{
    return &c->info;
}

void moe_client_enter(struct moe_client *c)
{
    pthread_mutex_lock(&c->lock);
    c->in_flight++;
    pthread_mutex_unlock(&c->lock);
}

void moe_client_leave(struct moe_client *c)
{
    pthread_mutex_lock(&c->lock);
    if (--c->in_flight == 0)
        pthread_cond_broadcast(&c->idle);
    pthread_mutex_unlock(&c->lock);
}

size_t moe_client_take_lane(struct moe_client *c)
{
    return atomic_fetch_add_explicit(&c->next_lane, 1, memory_order_relaxed) % c->lane_count;
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
