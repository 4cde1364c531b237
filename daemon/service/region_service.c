/* SPDX-License-Identifier: Apache-2.0 */
/* See service/region_service.h. */
#include "service/region_service.h"

#include "moe/v1/expert.pb-c.h"
#include "service/region_request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    IDENTITY_CLIENTS = 8, /* connections of one identity */
    CLIENT_REGIONS = 32,  /* regions of one connection, its ring included */
};
_Static_assert(4 * IDENTITY_CLIENTS * CLIENT_REGIONS <= MOE_REGIONS_MAX,
               "an identity has at most a quarter of all places");

struct moe_region_service {
    struct moe_region_requests requests;
    struct moe_regions_limits limits;
    struct moe_region_host *host; /* NULL: clients may not share memory */
    struct moe_metrics *metrics;
    struct moe_gauge *bytes, *clients, *in_flight;
    const struct moe_backend *backend;
    struct moe_device *device;
    uint64_t *receipts; /* see moe_region_host_config; memory of the device */
};

/* -------------------------------------------------------------------- methods */

static struct moe_status check_on(const struct moe_region_service *s)
{
    return s->host != NULL ? moe_ok()
                           : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                                       "this worker shares no memory with clients; start it with "
                                       "--allow-client-memory");
}

/* The one that budgets count, and for Unix sockets the user that must use the ticket. */
static struct moe_region_owner owner_of(const struct moe_rpc_call *call)
{
    const struct moe_rpc_identity *who = moe_rpc_call_identity(call);
    const char *granted = moe_rpc_call_grant(call)->who;
    struct moe_region_owner owner = {.connection = moe_rpc_call_connection(call),
                                     .has_uid = who->link == MOE_RPC_LINK_UNIX,
                                     .uid = who->uid};
    (void)snprintf(owner.identity, sizeof owner.identity, "%s",
                   granted[0] != '\0' ? granted : who->name);
    return owner;
}

static struct moe_status open_regions(struct moe_region_service *s, struct moe_rpc_call *call)
{
    uint8_t ticket[MOE_REGION_TICKET];
    Moe__V1__OpenRegionsResponse answer;
    MOE_TRY(check_on(s));
    struct moe_region_owner owner = owner_of(call);
    MOE_TRY(moe_region_host_invite(s->host, &owner, ticket));
    moe__v1__open_regions_response__init(&answer);
    answer.socket = (char *)(uintptr_t)moe_region_host_socket(s->host);
    answer.ticket = (ProtobufCBinaryData){.len = sizeof ticket, .data = ticket};
    answer.max_bytes = s->limits.bytes;
    answer.max_identity_bytes = s->limits.identity_bytes;
    answer.max_regions = s->limits.client_regions;
    moe_service_reply(call, &answer.base);
    return moe_ok();
}

static void open_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    moe_rpc_msg_free(m);
    struct moe_status st = open_regions(ctx, call);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
}

/* Copies of what the host shows. */
struct listing {
    size_t count;
    Moe__V1__RegionInfo *list[MOE_REGIONS_MAX];
    struct listed {
        Moe__V1__RegionInfo message;
        char name[MOE_REGION_NAME + 1], owner[256];
    } all[MOE_REGIONS_MAX];
};

static void add_region(void *ctx, const struct moe_region_shown *shown)
{
    struct listing *l = ctx;
    struct listed *each = &l->all[l->count];
    Moe__V1__RegionInfo *m = &each->message;
    moe__v1__region_info__init(m);
    (void)snprintf(each->name, sizeof each->name, "%s", shown->info.name);
    (void)snprintf(each->owner, sizeof each->owner, "%s", shown->owner);
    m->name = each->name;
    m->owner = each->owner;
    m->number = shown->info.number;
    m->bytes = shown->info.bytes;
    m->references = shown->info.references;
    m->is_ring = shown->is_ring;
    m->kind = shown->info.in_device ? MOE__V1__REGION_KIND__REGION_KIND_DEVICE
                                    : MOE__V1__REGION_KIND__REGION_KIND_HOST;
    m->status = shown->info.mapping   ? MOE__V1__REGION_STATUS__REGION_STATUS_MAPPING
                : shown->info.closing ? MOE__V1__REGION_STATUS__REGION_STATUS_CLOSING
                                      : MOE__V1__REGION_STATUS__REGION_STATUS_OPEN;
    l->list[l->count++] = m;
}

static struct moe_status list_regions(struct moe_region_service *s, struct moe_rpc_call *call)
{
    Moe__V1__ListRegionsResponse answer;
    MOE_TRY(check_on(s));
    struct listing *l = calloc(1, sizeof *l);
    if (l == NULL)
        return moe_service_out_of_memory();
    moe_region_host_show(s->host, add_region, l);
    moe__v1__list_regions_response__init(&answer);
    answer.n_regions = l->count;
    answer.regions = l->list;
    moe_service_reply(call, &answer.base);
    free(l);
    return moe_ok();
}

static void list_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    moe_rpc_msg_free(m);
    struct moe_status st = list_regions(ctx, call);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
}

void moe_region_service_methods(struct moe_region_service *s,
                                struct moe_rpc_method out[MOE_REGION_SERVICE_METHODS])
{
    out[0] = (struct moe_rpc_method){.path = "/moe.v1.ExpertService/OpenRegions",
                                     .kind = MOE_RPC_UNARY,
                                     .message = open_message,
                                     .ctx = s};
    out[1] = (struct moe_rpc_method){.path = "/moe.v1.ExpertService/ListRegions",
                                     .kind = MOE_RPC_UNARY,
                                     .message = list_message,
                                     .ctx = s};
}

/* -------------------------------------------------------------------- metrics */

static void collect(void *ctx)
{
    const struct moe_region_service *s = ctx;
    struct moe_region_counters c;
    moe_region_host_read_counters(s->host, &c);
    moe_gauge_set(s->bytes, (double)c.bytes);
    moe_gauge_set(s->clients, c.clients);
    moe_gauge_set(s->in_flight, c.in_flight);
}

static struct moe_status add_metrics(struct moe_region_service *s, struct moe_metrics *registry)
{
    const struct moe_metric_desc bytes = {.name = "moe_regions_bytes",
                                          .help = "Memory that clients share with this worker."};
    const struct moe_metric_desc clients = {.name = "moe_regions_clients",
                                            .help = "Clients that share memory."};
    const struct moe_metric_desc in_flight = {.name = "moe_regions_in_flight",
                                              .help = "Requests of rings that have not ended."};
    MOE_TRY(moe_metrics_add_gauge(registry, &bytes, &s->bytes));
    MOE_TRY(moe_metrics_add_gauge(registry, &clients, &s->clients));
    MOE_TRY(moe_metrics_add_gauge(registry, &in_flight, &s->in_flight));
    MOE_TRY(moe_metrics_add_collector(registry, collect, s));
    s->metrics = registry;
    return moe_ok();
}

/* -------------------------------------------------------------------- the device */

static struct moe_status pin(void *ctx, void *base, size_t bytes)
{
    const struct moe_region_service *s = ctx;
    return s->backend->mem_register(s->device, base, bytes);
}

static void unpin(void *ctx, void *base, size_t bytes)
{
    const struct moe_region_service *s = ctx;
    s->backend->mem_unregister(s->device, base, bytes);
}

static struct moe_status import(void *ctx, int descriptor, size_t bytes, void **base,
                                bool *same_gpu)
{
    const struct moe_region_service *s = ctx;
    return s->backend->mem_import(s->device, descriptor, bytes, base, same_gpu);
}

static void release(void *ctx, void *base, size_t bytes)
{
    const struct moe_region_service *s = ctx;
    s->backend->mem_release(s->device, base, bytes);
}

/* -------------------------------------------------------------------- the service */

enum { RECEIPTS_BYTES = MOE_REGION_CLIENTS * MOE_RING_ENTRIES * sizeof(uint64_t) };

/* Devices complete requests if they can and no answer needs a lease: they cannot look at that. */
static struct moe_status make_receipts(struct moe_region_service *s)
{
    void *p = NULL;
    if (!s->backend->stores_completions || moe_service_needs_lease(s->requests.service))
        return moe_ok();
    MOE_TRY(s->backend->mem_alloc(s->device, MOE_MEM_HOST, RECEIPTS_BYTES, &p));
    s->receipts = p;
    return moe_ok();
}

static struct moe_status start_host(struct moe_region_service *s,
                                    const struct moe_region_service_config *c)
{
    s->limits = (struct moe_regions_limits){
        .bytes = c->bytes,
        .identity_bytes = c->identity_bytes != 0 ? c->identity_bytes : c->bytes,
        .identity_clients = IDENTITY_CLIENTS,
        .client_regions = CLIENT_REGIONS,
    };
    MOE_TRY(make_receipts(s));
    const struct moe_region_host_config host = {
        .socket = c->socket,
        .limits = s->limits,
        .device = {.pin = pin, .unpin = unpin, .import = import, .release = release, .ctx = s},
        .progress = c->progress,
        .receipts = s->receipts,
        .spin_ns = c->spin_ns,
        .state_bytes = sizeof(struct moe_region_request),
        .find_layer = moe_region_request_layer,
        .begin = moe_region_request_begin,
        .refused = moe_region_request_refused,
        .cancel = moe_region_request_cancel,
        .ctx = &s->requests,
    };
    MOE_TRY(moe_region_host_start(&host, &s->host));
    return c->metrics != NULL ? add_metrics(s, c->metrics) : moe_ok();
}

struct moe_status moe_region_service_create(const struct moe_region_service_config *config,
                                            struct moe_region_service **out)
{
    struct moe_region_service *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_service_out_of_memory();
    s->requests = (struct moe_region_requests){.info = config->info,
                                               .service = config->service,
                                               .engine = config->engine,
                                               .staging = config->staging,
                                               .tracer = config->tracer};
    s->backend = config->backend;
    s->device = config->device;
    struct moe_status st = config->bytes != 0 ? start_host(s, config) : moe_ok();
    if (moe_failed(&st)) {
        moe_region_service_destroy(s);
        return st;
    }
    *out = s;
    return st;
}

void moe_region_service_stop(struct moe_region_service *s)
{
    if (s != NULL)
        moe_region_host_stop(s->host);
}

void moe_region_service_destroy(struct moe_region_service *s)
{
    if (s == NULL)
        return;
    if (s->metrics != NULL)
        moe_metrics_remove_collector(s->metrics, collect, s);
    moe_region_host_destroy(s->host);
    if (s->receipts != NULL)
        s->backend->mem_free(s->device, MOE_MEM_HOST, s->receipts, RECEIPTS_BYTES);
    free(s);
}
