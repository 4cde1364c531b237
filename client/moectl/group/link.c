/* SPDX-License-Identifier: Apache-2.0 */
/* Control calls: small messages, blocking. */
#include "moectl/group/link.h"

#include "base/clock.h"
#include "daemon/endpoint.h"
#include "rpc/client.h"

#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    REQUEST_MAX = 8192,       /* the path of a directory has at most 4096 */
    PROBE_MS = 500,           /* for one of several workers to answer */
    LIMIT_MS = 1000,          /* for one of several coordinators, in the first round */
    ROUND_PAUSE_MS = 250,     /* another coordinator may lead soon */
    ROUNDS_DOUBLED = 4,       /* each round doubles the limit, so a slow host answers */
    CALL_LIMIT_MS = 5000,     /* for one of many calls */
    ANSWER_MAX = 1024 * 1024, /* bytes; a full status is some tens of KiB */
};

struct moectl_link {
    struct moe_rpc_client *rpc;
    struct moe_rpc_channel *channel;
    char endpoint[MOECTL_ENDPOINT_MAX];
};

struct moe_status moectl_link_open(const char *endpoint, struct moectl_link **out)
{
    struct moectl_link *link = calloc(1, sizeof *link);
    if (link == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    struct moe_rpc_channel_config config = {.target = endpoint, .max_message_bytes = ANSWER_MAX};
    (void)snprintf(link->endpoint, sizeof link->endpoint, "%s", endpoint);
    moe_rpc_trust_from_environment(&config.trust); /* moectl_parse has put the options there */
    struct moe_status st = moe_rpc_client_create(&link->rpc);
    if (st.code == MOE_OK)
        st = moe_rpc_channel_open(link->rpc, &config, &link->channel);
    if (st.code != MOE_OK) {
        moectl_link_close(link);
        return st;
    }
    *out = link;
    return st;
}

static bool is_loopback(const struct sockaddr *address)
{
    const struct sockaddr_in *v4 = (const void *)address;
    const struct sockaddr_in6 *v6 = (const void *)address;
    if (address->sa_family == AF_INET)
        return ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

/* Its host is a loopback address, or a name for nothing else: often that of this host. */
static bool is_here(const char *endpoint)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char host[MOECTL_ENDPOINT_MAX];
    struct moe_status st = moe_endpoint_check_loopback(endpoint);
    if (!moe_failed(&st))
        return true;
    if (moe_endpoint_is_wildcard(endpoint) ||
        moe_endpoint_split(endpoint, host, sizeof host) == NULL ||
        getaddrinfo(host, NULL, &hints, &found) != 0)
        return false;
    bool here = true;
    for (const struct addrinfo *a = found; a != NULL; a = a->ai_next)
        here = here && is_loopback(a->ai_addr);
    freeaddrinfo(found);
    return here;
}

/* A daemon of another host cannot mean a loopback address of this one: another group may be there.
 * A wildcard leads to this host, too. */
static bool names_own_host(const char *by, const char *named)
{
    struct moe_status there = moe_endpoint_check_loopback(named);
    return (!moe_failed(&there) || moe_endpoint_is_wildcard(named)) && !is_here(by);
}

struct moe_status moectl_link_check_worker(const char *by, const char *worker)
{
    if (!names_own_host(by, worker))
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                     "%.100s lists a worker on its own host (%.100s): run moectl there with a "
                     "loopback address, or start the worker with --advertise",
                     by, worker);
}

struct moe_status moectl_link_open_worker(const char *by, const char *worker,
                                          struct moectl_link **out)
{
    MOE_TRY(moectl_link_check_worker(by, worker));
    return moectl_link_open(worker, out);
}

const char *moectl_link_endpoint(const struct moectl_link *link)
{
    return link->endpoint;
}

void moectl_link_close(struct moectl_link *link)
{
    if (link == NULL)
        return;
    moe_rpc_channel_close(link->channel);
    moe_rpc_client_destroy(link->rpc);
    free(link);
}

static struct moe_status unpack(const struct moe_rpc_msg *reply,
                                const ProtobufCMessageDescriptor *type, ProtobufCMessage **out)
{
    size_t length = moe_rpc_msg_length(reply);
    uint8_t *bytes = malloc(length + 1);
    if (bytes == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    struct moe_status st = moe_rpc_msg_flatten(reply, bytes, length, &length);
    void *message = NULL;
    if (st.code == MOE_OK)
        st = moe_rpc_unpack(type, bytes, length, NULL, &message);
    *out = message;
    free(bytes);
    if (st.reason == MOE_REASON_MALFORMED)
        st = moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "broken answer from %s: %s", type->name,
                       st.text);
    return st;
}

struct moe_status moectl_link_call(struct moectl_link *link, const char *path,
                                   const ProtobufCMessage *request, uint64_t deadline_ns,
                                   const ProtobufCMessageDescriptor *type, ProtobufCMessage **out)
{
    uint8_t head[REQUEST_MAX];
    *out = NULL;
    size_t length = protobuf_c_message_get_packed_size(request);
    if (length > sizeof head)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "the request is too long");
    protobuf_c_message_pack(request, head);
    struct moe_rpc_call_options options = {.deadline_ns = deadline_ns};
    struct moe_rpc_out message = {.head = head, .head_length = length};
    struct moe_rpc_msg *reply = NULL;
    MOE_TRY(moe_rpc_call_wait(link->channel, path, &options, &message, &reply));
    struct moe_status st = unpack(reply, type, out);
    moe_rpc_msg_free(reply);
    return st;
}

struct moe_status moectl_link_server_info(struct moectl_link *link, uint64_t deadline_ns,
                                          Moe__V1__GetServerInfoResponse **out)
{
    Moe__V1__GetServerInfoRequest request = MOE__V1__GET_SERVER_INFO_REQUEST__INIT;
    ProtobufCMessage *answer;
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.ExpertService/GetServerInfo", &request.base, deadline_ns,
                         &moe__v1__get_server_info_response__descriptor, &answer);
    *out = (Moe__V1__GetServerInfoResponse *)answer;
    return st;
}

struct moe_status moectl_link_status(struct moectl_link *link, uint64_t deadline_ns,
                                     Moe__V1__GetStatusResponse **out)
{
    Moe__V1__GetStatusRequest request = MOE__V1__GET_STATUS_REQUEST__INIT;
    ProtobufCMessage *answer;
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.AdminService/GetStatus", &request.base, deadline_ns,
                         &moe__v1__get_status_response__descriptor, &answer);
    *out = (Moe__V1__GetStatusResponse *)answer;
    return st;
}

struct moe_status moectl_link_placement(struct moectl_link *link, const char *model, uint32_t layer,
                                        uint64_t deadline_ns, Moe__V1__GetPlacementResponse **out)
{
    Moe__V1__GetPlacementRequest request = MOE__V1__GET_PLACEMENT_REQUEST__INIT;
    ProtobufCMessage *answer;
    request.model = (char *)(uintptr_t)model; /* packing only reads */
    request.layer = layer;
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.AdminService/GetPlacement", &request.base, deadline_ns,
                         &moe__v1__get_placement_response__descriptor, &answer);
    *out = (Moe__V1__GetPlacementResponse *)answer;
    return st;
}

struct moe_status moectl_link_metrics(struct moectl_link *link, uint64_t deadline_ns, char **page)
{
    Moe__V1__GetMetricsRequest request = MOE__V1__GET_METRICS_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    *page = NULL;
    MOE_TRY(moectl_link_call(link, "/moe.v1.AdminService/GetMetrics", &request.base, deadline_ns,
                             &moe__v1__get_metrics_response__descriptor, &answer));
    *page = strdup(((Moe__V1__GetMetricsResponse *)answer)->text);
    protobuf_c_message_free_unpacked(answer, NULL);
    return *page != NULL
               ? moe_ok()
               : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

struct moe_status moectl_link_add_expert_rows(struct moectl_link *link, uint32_t layer,
                                              uint64_t deadline_ns, uint64_t *rows, size_t count)
{
    Moe__V1__GetMetricsRequest request = MOE__V1__GET_METRICS_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    request.expert_rows_of_layer_plus_one = layer + 1;
    MOE_TRY(moectl_link_call(link, "/moe.v1.AdminService/GetMetrics", &request.base, deadline_ns,
                             &moe__v1__get_metrics_response__descriptor, &answer));
    const Moe__V1__GetMetricsResponse *r = (Moe__V1__GetMetricsResponse *)answer;
    bool fits = r->n_expert_rows == count; /* an older release answers with the page */
    for (size_t i = 0; fits && i < count; i++)
        rows[i] += r->expert_rows[i];
    protobuf_c_message_free_unpacked(answer, NULL);
    return fits ? moe_ok()
                : moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                            "the worker does not count the rows of experts");
}

struct moe_status moectl_link_samples(struct moectl_link *link, uint64_t deadline_ns,
                                      struct moectl_samples *out)
{
    char *page;
    *out = (struct moectl_samples){0};
    MOE_TRY(moectl_link_metrics(link, deadline_ns, &page));
    bool parsed = moectl_samples_parse(page, out);
    free(page);
    return parsed ? moe_ok()
                  : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
}

/* Asks for the info of a worker, and drops it. A coordinator answers MOE_UNIMPLEMENTED. */
static struct moe_status probe_worker(const char *endpoint, uint64_t deadline_ns)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    struct moe_status st = moectl_link_open(endpoint, &link);
    if (st.code == MOE_OK)
        st = moectl_link_server_info(link, deadline_ns, &info);
    if (info != NULL)
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
    moectl_link_close(link);
    return st;
}

bool moectl_link_answers(const char *endpoint, uint64_t deadline_ns)
{
    return probe_worker(endpoint, deadline_ns).code != MOE_UNAVAILABLE;
}

/* A daemon without AdminService and ExpertService at this address. */
static struct moe_status explain(struct moe_status st)
{
    if (st.code != MOE_UNIMPLEMENTED)
        return st;
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                     "this address is for daemons alone (--control-listen): use that of --listen");
}

static struct moe_status open_and_ask(const char *endpoint, uint64_t deadline_ns,
                                      struct moectl_link **out, Moe__V1__GetStatusResponse **status)
{
    struct moe_status st = moectl_link_open(endpoint, out);
    if (st.code == MOE_OK)
        st = moectl_link_status(*out, deadline_ns, status);
    return st;
}

static bool is_silence(const struct moe_status *st)
{
    return st->code == MOE_UNAVAILABLE || st->code == MOE_DEADLINE_EXCEEDED;
}

/* `*by_worker`: another coordinator was asked, which the worker at `endpoint` names. */
static struct moe_status open_one(const char *endpoint, uint64_t deadline_ns,
                                  struct moectl_link **out, Moe__V1__GetStatusResponse **status,
                                  bool *by_worker)
{
    *by_worker = false;
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    struct moe_status st = open_and_ask(endpoint, deadline_ns, &link, status);
    if (st.code == MOE_UNIMPLEMENTED) { /* `endpoint` is a worker's: ask it for its coordinator */
        st = explain(moectl_link_server_info(link, deadline_ns, &info));
        moectl_link_close(link);
        link = NULL;
        if (st.code == MOE_OK && names_own_host(endpoint, info->coordinator))
            st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                           "this worker names a coordinator on its own host: give --endpoint the "
                           "coordinator's address");
        *by_worker = st.code == MOE_OK;
        if (*by_worker)
            st = open_and_ask(info->coordinator, deadline_ns, &link, status);
        if (st.code != MOE_OK && info != NULL)
            st = moe_error_context(st, "coordinator %s", info->coordinator);
        if (info != NULL)
            moe__v1__get_server_info_response__free_unpacked(info, NULL);
    }
    if (st.code != MOE_OK) {
        moectl_link_close(link);
        return moe_error_context(st, "%s", endpoint);
    }
    *out = link;
    return st;
}

uint64_t moectl_share(uint64_t deadline_ns, size_t left)
{
    uint64_t now = moe_clock_ns();
    if (left == 1 || deadline_ns == MOE_NEVER || deadline_ns <= now)
        return deadline_ns;
    return now + (deadline_ns - now) / left;
}

uint64_t moectl_call_deadline(uint64_t deadline_ns)
{
    return moe_earlier(moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS, deadline_ns);
}

/* One round over the coordinators of a group: the last answer of each kind; code OK = none. */
struct round {
    uint64_t limit_ns;        /* of each of several */
    struct moe_status waits;  /* it does not lead, and names the one that does */
    struct moe_status lacks;  /* it knows of none that leads */
    struct moe_status silent; /* there is no answer */
    bool by_worker;           /* a worker names one that does not lead, and another one soon */
    bool again;               /* another one may lead soon */
};

static bool is_listed(const struct moe_endpoints *list, const char *endpoint)
{
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->all[i], endpoint) == 0)
            return true;
    return false;
}

static void note_answer(struct round *r, const struct moe_status *st, bool by_worker)
{
    r->by_worker |= by_worker && st->reason == MOE_REASON_NOT_LEADER;
    if (st->reason != MOE_REASON_NOT_LEADER)
        r->silent = *st;
    else if (moe_endpoint_of_leader(st)[0] != '\0')
        r->waits = *st;
    else
        r->lacks = *st;
}

/* What the round says, if none leads. No other address than those of the list is asked: a
 * coordinator that waits may name one that is of another group by now. The one that leads may say
 * nothing: a stopped process leads until its lease ends. */
static struct moe_status judge_round(const struct moe_endpoints *list, struct round *r)
{
    bool waits = moe_failed(&r->waits), silent = moe_failed(&r->silent);
    if (moe_failed(&r->lacks)) {
        r->again = silent || r->by_worker;
        return r->lacks;
    }
    r->again = r->by_worker || r->silent.code == MOE_DEADLINE_EXCEEDED ||
               (waits && (silent || is_listed(list, moe_endpoint_of_leader(&r->waits))));
    if (waits && silent)
        return moe_error_context(r->silent, "%s", r->waits.text);
    if (waits && !r->again)
        return moe_error_context(r->waits, "--endpoint does not name the leader");
    return waits ? r->waits : r->silent;
}

/* Asks each endpoint for a part of the time that is left. */
static struct moe_status ask_round(const struct moe_endpoints *list, uint64_t deadline_ns,
                                   struct round *r, struct moectl_link **out,
                                   Moe__V1__GetStatusResponse **status)
{
    for (size_t i = 0; i < list->count; i++) {
        uint64_t limit = moectl_share(deadline_ns, list->count - i);
        if (list->count > 1)
            limit = moe_earlier(limit, moe_clock_ns() + r->limit_ns);
        bool by_worker;
        struct moe_status st = open_one(list->all[i], limit, out, status, &by_worker);
        if (!is_silence(&st))
            return st;
        note_answer(r, &st, by_worker);
    }
    return judge_round(list, r);
}

struct moe_status moectl_admin_open(const char *endpoint, uint64_t deadline_ns,
                                    struct moectl_link **out, Moe__V1__GetStatusResponse **status)
{
    const struct timespec pause = {.tv_nsec = ROUND_PAUSE_MS * (long)MOE_NS_PER_MS};
    struct moe_endpoints list;
    *out = NULL;
    *status = NULL;
    MOE_TRY(moe_endpoints_parse("--endpoint", endpoint, &list));
    for (unsigned n = 0;; n += n < ROUNDS_DOUBLED) {
        struct round r = {.limit_ns = (LIMIT_MS * MOE_NS_PER_MS) << n};
        struct moe_status st = ask_round(&list, deadline_ns, &r, out, status);
        if (!is_silence(&st) || !r.again ||
            moe_clock_ns() + ROUND_PAUSE_MS * MOE_NS_PER_MS >= deadline_ns)
            return st;
        (void)nanosleep(&pause, NULL);
    }
}

struct moe_status moectl_admin_find(const struct moectl_common *common, uint64_t deadline_ns,
                                    struct moectl_link **out, Moe__V1__GetStatusResponse **status)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    *out = NULL;
    *status = NULL;
    MOE_TRY(moectl_state_endpoint(common, endpoint));
    return moectl_admin_open(endpoint, deadline_ns, out, status);
}

static const char *any_worker(const Moe__V1__GetStatusResponse *status)
{
    for (size_t i = 0; i < status->n_workers; i++)
        if (status->workers[i]->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE)
            return status->workers[i]->endpoint;
    return NULL;
}

static bool is_worker(const char *endpoint, uint64_t deadline_ns)
{
    uint64_t limit = moe_clock_ns() + PROBE_MS * MOE_NS_PER_MS;
    return probe_worker(endpoint, limit < deadline_ns ? limit : deadline_ns).code == MOE_OK;
}

/* Finds a worker of the local group that answers, even without its coordinator. False if none
 * answers, or if --endpoint names another group or one of its workers. */
static bool living_worker(const struct moectl_common *common, uint64_t deadline_ns,
                          char endpoint[MOECTL_ENDPOINT_MAX])
{
    struct moectl_group group;
    struct moe_status st = moectl_state_group(common, &group);
    if (st.code != MOE_OK)
        return false;
    bool found = false, any = common->endpoint == NULL ||
                              strcmp(common->endpoint, group.processes[0].endpoint) == 0;
    for (size_t i = 1; i < group.count && any && !found; i++) {
        found = is_worker(group.processes[i].endpoint, deadline_ns);
        if (found)
            memcpy(endpoint, group.processes[i].endpoint, MOECTL_ENDPOINT_MAX);
    }
    moectl_group_free(&group);
    return found;
}

struct moe_status moectl_worker_endpoint(const struct moectl_common *common, uint64_t deadline_ns,
                                         char endpoint[MOECTL_ENDPOINT_MAX])
{
    MOE_TRY(moectl_state_worker(common, endpoint));
    if (living_worker(common, deadline_ns, endpoint))
        return moe_ok();
    /* A worker first: clients may ask for its info, and not for the coordinator's status. */
    bool one = strchr(endpoint, ',') == NULL;
    struct moe_status st = one ? probe_worker(endpoint, deadline_ns)
                               : moe_error(MOE_UNIMPLEMENTED, MOE_REASON_NONE, "several");
    if (st.code == MOE_OK)
        return st;
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    if (st.code == MOE_UNIMPLEMENTED) { /* `endpoint` is the coordinator's */
        st = moectl_admin_open(endpoint, deadline_ns, &link, &status);
        MOE_TRY(st);
    }
    if (st.code != MOE_OK)
        return moe_error_context(st, "%s", endpoint);
    const char *worker = any_worker(status);
    if (worker != NULL)
        st = moectl_link_check_worker(link->endpoint, worker);
    moectl_link_close(link);
    if (worker == NULL)
        st = moe_error(MOE_UNAVAILABLE, MOE_REASON_NONE, "coordinator %.200s has no workers",
                       endpoint);
    else if (!moe_failed(&st) &&
             snprintf(endpoint, MOECTL_ENDPOINT_MAX, "%s", worker) >= MOECTL_ENDPOINT_MAX)
        st = moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "the worker's endpoint is too long");
    moe__v1__get_status_response__free_unpacked(status, NULL);
    return st;
}

/* Calls to it may carry a token. */
static struct moe_status check_trainer_endpoint(const char *worker, const char *named)
{
    struct moe_status st = moe_endpoint_check("its endpoint for training", named);
    if (!moe_failed(&st) && strlen(named) >= MOECTL_ENDPOINT_MAX)
        st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                       "its endpoint for training is too long");
    if (!moe_failed(&st) && names_own_host(worker, named))
        st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                       "its endpoint for training is on its own host (%.100s): run moectl there "
                       "with that endpoint",
                       named);
    return moe_error_context(st, "%.100s", worker);
}

struct moe_status moectl_trainer_endpoint(const char *worker, uint64_t deadline_ns,
                                          char endpoint[MOECTL_ENDPOINT_MAX])
{
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    struct moe_status st = moectl_link_open(worker, &link);
    if (st.code == MOE_OK)
        st = moectl_link_server_info(link, deadline_ns, &info);
    bool other = st.code == MOE_OK && info->training_endpoint[0] != '\0';
    st = other ? check_trainer_endpoint(worker, info->training_endpoint) : moe_ok();
    if (!moe_failed(&st))
        (void)snprintf(endpoint, MOECTL_ENDPOINT_MAX, "%s",
                       other ? info->training_endpoint : worker);
    if (info != NULL)
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
    moectl_link_close(link);
    return st;
}

struct moe_status moectl_training_endpoint(const struct moectl_common *common, uint64_t deadline_ns,
                                           char endpoint[MOECTL_ENDPOINT_MAX])
{
    char worker[MOECTL_ENDPOINT_MAX];
    MOE_TRY(moectl_worker_endpoint(common, deadline_ns, worker));
    return moectl_trainer_endpoint(worker, deadline_ns, endpoint);
}
