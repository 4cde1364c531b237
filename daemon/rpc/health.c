/* SPDX-License-Identifier: Apache-2.0 */
/* grpc.health.v1: Check, List and Watch over a small table of services. The owner sets the status
 * of each service. */
#include "base/mutex.h"
#include "daemon/log.h"
#include "grpc/health/v1/health.pb-c.h"
#include "rpc/serving.h"

#include <stdlib.h>
#include <string.h>

enum { SERVICES_MAX = 64, NAME_BYTES = 128, ANSWER_BYTES = 64 };

struct service {
    char name[NAME_BYTES];
    bool serving;
};

/* One Watch stream. */
struct watcher {
    struct moe_rpc_call *call;
    char name[NAME_BYTES];
    Grpc__Health__V1__HealthCheckResponse__ServingStatus last;
    TAILQ_ENTRY(watcher) link;
};

struct moe_rpc_health {
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct service services[SERVICES_MAX];
        size_t service_count;
        bool shut;
        TAILQ_HEAD(, watcher) watchers;
    };
};

struct moe_rpc_health *moe_rpc_health_create(void)
{
    struct moe_rpc_health *h = calloc(1, sizeof *h);
    if (h == NULL)
        return NULL;
    moe_mutex_init(&h->lock);
    TAILQ_INIT(&h->watchers);
    return h;
}

void moe_rpc_health_destroy(struct moe_rpc_health *h)
{
    if (h == NULL)
        return;
    moe_mutex_destroy(&h->lock);
    free(h);
}

/* ------------------------------------------------------------------ table (under the lock) */

static struct service *find(struct moe_rpc_health *h, const char *name) MOE_REQUIRES(h->lock)
{
    for (size_t i = 0; i < h->service_count; i++) {
        if (strcmp(h->services[i].name, name) == 0)
            return &h->services[i];
    }
    return NULL;
}

static Grpc__Health__V1__HealthCheckResponse__ServingStatus status_of(const struct service *s)
{
    if (s == NULL)
        return GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN;
    return s->serving ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                      : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
}

static struct moe_rpc_out pack_answer(Grpc__Health__V1__HealthCheckResponse__ServingStatus status,
                                      uint8_t buffer[ANSWER_BYTES])
{
    Grpc__Health__V1__HealthCheckResponse r = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    r.status = status;
    size_t length = grpc__health__v1__health_check_response__pack(&r, buffer);
    return (struct moe_rpc_out){.head = buffer, .head_length = length};
}

static void notify(struct moe_rpc_health *h, struct watcher *w) MOE_REQUIRES(h->lock)
{
    uint8_t buffer[ANSWER_BYTES];
    w->last = status_of(find(h, w->name));
    struct moe_rpc_out out = pack_answer(w->last, buffer);
    moe_rpc_send(w->call, &out);
}

static void notify_changes(struct moe_rpc_health *h) MOE_REQUIRES(h->lock)
{
    struct watcher *w;
    TAILQ_FOREACH(w, &h->watchers, link)
    {
        if (w->last != status_of(find(h, w->name)))
            notify(h, w);
    }
}

void moe_rpc_health_set(struct moe_rpc_health *h, const char *name, bool serving)
{
    bool full = false;
    moe_mutex_lock(&h->lock);
    struct service *s = find(h, name);
    if (s == NULL) {
        full = h->service_count == SERVICES_MAX || strlen(name) >= NAME_BYTES;
        s = full ? NULL : &h->services[h->service_count++];
        if (s != NULL)
            memcpy(s->name, name, strlen(name) + 1);
    }
    if (s != NULL)
        s->serving = serving && !h->shut;
    notify_changes(h);
    moe_mutex_unlock(&h->lock);
    if (full)
        moe_log_error("health: no room for service %.127s", name);
}

void moe_rpc_health_shut(struct moe_rpc_health *h)
{
    moe_mutex_lock(&h->lock);
    h->shut = true;
    for (size_t i = 0; i < h->service_count; i++)
        h->services[i].serving = false;
    notify_changes(h);
    moe_mutex_unlock(&h->lock);
}

/* ------------------------------------------------------------------ methods */

/* The service that a request names; frees the message. */
static struct moe_status parse(struct moe_rpc_msg *m, char name[NAME_BYTES])
{
    struct moe_rpc_arena arena;
    void *message;
    struct moe_status st = moe_rpc_msg_unpack(
        m, &grpc__health__v1__health_check_request__descriptor, &arena, &message);
    moe_rpc_msg_free(m);
    MOE_TRY(st);
    const Grpc__Health__V1__HealthCheckRequest *q = message;
    if (strlen(q->service) >= NAME_BYTES)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "the name of a service must have fewer than %d bytes", NAME_BYTES);
    memcpy(name, q->service, strlen(q->service) + 1);
    return moe_ok();
}

static void check(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct moe_rpc_health *h = ctx;
    char name[NAME_BYTES];
    uint8_t buffer[ANSWER_BYTES];
    struct moe_status st = parse(m, name);
    if (moe_failed(&st)) {
        moe_rpc_fail(call, st);
        return;
    }
    moe_mutex_lock(&h->lock);
    const struct service *s = find(h, name);
    struct moe_rpc_out out = pack_answer(status_of(s), buffer);
    moe_mutex_unlock(&h->lock);
    if (s == NULL)
        moe_rpc_fail(call, moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "unknown service"));
    else
        moe_rpc_reply(call, &out);
}

static void list(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct moe_rpc_health *h = ctx;
    Grpc__Health__V1__HealthCheckResponse status[SERVICES_MAX];
    Grpc__Health__V1__HealthListResponse__StatusesEntry entries[SERVICES_MAX];
    Grpc__Health__V1__HealthListResponse__StatusesEntry *pointers[SERVICES_MAX];
    uint8_t buffer[SERVICES_MAX * (NAME_BYTES + 16)];
    moe_rpc_msg_free(m); /* has no fields */
    moe_mutex_lock(&h->lock);
    size_t count = h->service_count;
    for (size_t i = 0; i < count; i++) {
        grpc__health__v1__health_check_response__init(&status[i]);
        grpc__health__v1__health_list_response__statuses_entry__init(&entries[i]);
        status[i].status = status_of(&h->services[i]);
        entries[i].key = h->services[i].name; /* names never change */
        entries[i].value = &status[i];
        pointers[i] = &entries[i];
    }
    moe_mutex_unlock(&h->lock);
    Grpc__Health__V1__HealthListResponse r = GRPC__HEALTH__V1__HEALTH_LIST_RESPONSE__INIT;
    r.n_statuses = count;
    r.statuses = pointers;
    size_t length = grpc__health__v1__health_list_response__pack(&r, buffer);
    moe_rpc_reply(call, &(struct moe_rpc_out){.head = buffer, .head_length = length});
}

static void watch(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct moe_rpc_health *h = ctx;
    if (m == NULL) {
        moe_rpc_fail(call, moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TRUNCATED,
                                     "the request has no message"));
        return;
    }
    struct watcher *w = calloc(1, sizeof *w);
    if (w == NULL) {
        moe_rpc_msg_free(m);
        moe_rpc_fail(call, moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                     "out of memory for a watcher"));
        return;
    }
    struct moe_status st = parse(m, w->name);
    if (moe_failed(&st)) {
        free(w);
        moe_rpc_fail(call, st);
        return;
    }
    w->call = call;
    moe_rpc_call_set_user(call, w);
    moe_mutex_lock(&h->lock);
    TAILQ_INSERT_TAIL(&h->watchers, w, link);
    notify(h, w);
    moe_mutex_unlock(&h->lock);
}

static void watch_done(struct moe_rpc_call *call, void *ctx)
{
    struct moe_rpc_health *h = ctx;
    struct watcher *w = moe_rpc_call_user(call);
    if (w == NULL)
        return;
    moe_mutex_lock(&h->lock);
    TAILQ_REMOVE(&h->watchers, w, link);
    moe_mutex_unlock(&h->lock);
    free(w);
}

void moe_rpc_health_methods(struct moe_rpc_health *h, struct moe_rpc_entry *out)
{
    out[0] = (struct moe_rpc_entry){.method = {.path = "/grpc.health.v1.Health/Check",
                                               .kind = MOE_RPC_UNARY,
                                               .message = check,
                                               .ctx = h},
                                    .built_in = true};
    out[1] = (struct moe_rpc_entry){.method = {.path = "/grpc.health.v1.Health/List",
                                               .kind = MOE_RPC_UNARY,
                                               .message = list,
                                               .ctx = h},
                                    .built_in = true};
    out[2] = (struct moe_rpc_entry){.method = {.path = "/grpc.health.v1.Health/Watch",
                                               .kind = MOE_RPC_STREAM,
                                               .message = watch,
                                               .done = watch_done,
                                               .ctx = h},
                                    .built_in = true,
                                    .endless = true};
}
