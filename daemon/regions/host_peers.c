/* SPDX-License-Identifier: Apache-2.0 */
/* Connections of clients: tickets, registration and its end. See regions/host.h. Every message is
 * answered once: at once, or when the mapper is done with the region. */
#include "base/clock.h"
#include "base/sealed.h"
#include "moe/v1/regions.pb-c.h"
#include "regions/host_state.h"
#include "rpc/msg.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define RING_NAME "-ring-"

enum {
    READS_MAX = 16, /* packets of one connection in a row */
    ACCEPT_PAUSE_MS = 100,
    WAITING_MAX = 16, /* connections without a ticket; beyond that the oldest ends */
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a client");
}

/* -------------------------------------------------------------------- replies */

static void send_reply(struct moe_region_peer *p, const Moe__V1__RegionsReply *reply)
{
    uint8_t bytes[MOE_PACKET_BYTES];
    size_t length = moe__v1__regions_reply__get_packed_size(reply);
    MOE_INVARIANT(length <= sizeof bytes);
    moe__v1__regions_reply__pack(reply, bytes);
    struct moe_status st = moe_packet_send(p->socket, bytes, length, -1);
    if (moe_failed(&st))
        moe_region_peer_end(p);
}

static void reply(struct moe_region_peer *p, uint64_t id, const struct moe_status *st,
                  uint32_t number)
{
    Moe__V1__RegionsReply r;
    Moe__V1__Error e;
    if (p->state == MOE_PEER_LEAVING || p->state == MOE_PEER_FREE)
        return;
    moe__v1__regions_reply__init(&r);
    moe__v1__error__init(&e);
    r.id = id;
    r.number = number;
    if (moe_failed(st)) {
        e.code = st->code;
        if (st->reason != MOE_REASON_NONE)
            e.reason = (char *)(uintptr_t)moe_reason_name(st->reason);
        e.message = (char *)(uintptr_t)st->text;
        e.retry_after_ms = st->retry_after_ms;
        r.error = &e;
    }
    send_reply(p, &r);
}

/* -------------------------------------------------------------------- the mapper */

static struct moe_region_answer *answer_of(struct moe_region_host *h, uint32_t number)
{
    return &h->answers[number % MOE_REGIONS_MAX];
}

/* Finds the size of the memory behind a descriptor, which may be -1. Of a device's memory it is
 * what the client says: the import fails if that is wrong. */
static struct moe_status measure(const struct moe_region_host *h, int descriptor,
                                 struct moe_region_spec *spec)
{
    struct moe_sealed_file file;
    if (descriptor < 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID,
                         "no descriptor came with the message");
    if (spec->in_device)
        return h->config.device.import != NULL
                   ? moe_ok()
                   : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                               "this worker's device shares no memory");
    MOE_TRY(moe_sealed_check(descriptor, &file));
    spec->bytes = file.bytes;
    spec->charge = file.charge;
    spec->device = file.device;
    spec->inode = file.inode;
    return moe_ok();
}

/* Takes the budget of a region and has it mapped. Takes the descriptor over. */
static struct moe_status begin_region(struct moe_region_peer *p, uint64_t id,
                                      struct moe_region_spec *spec, int descriptor)
{
    struct moe_region_host *h = p->host;
    uint32_t number;
    struct moe_status st = measure(h, descriptor, spec);
    if (!moe_failed(&st)) {
        moe_mutex_lock(&h->lock);
        st = moe_regions_reserve(h->registry, p->client, spec, &number);
        moe_mutex_unlock(&h->lock);
    }
    if (moe_failed(&st)) {
        if (descriptor >= 0)
            close(descriptor);
        return st;
    }
    *answer_of(h, number) =
        (struct moe_region_answer){.waits = true, .id = id, .peer = p, .is_ring = spec->is_ring};
    const struct moe_region_job job = {.number = number,
                                       .client = p->client,
                                       .in_device = spec->in_device,
                                       .descriptor = descriptor,
                                       .bytes = spec->bytes};
    moe_region_mapper_add(h->mapper, &job);
    return st;
}

/* The peer's ring is mapped: from now on it is polled. */
static void attach(struct moe_region_peer *p, void *base)
{
    moe_mutex_lock(&p->host->lock);
    moe_ring_server_init(&p->ring, base);
    p->attached = true;
    moe_mutex_unlock(&p->host->lock);
    p->state = MOE_PEER_JOINED;
}

static void end_mapping(struct moe_region_host *h, const struct moe_region_job *job)
{
    struct moe_region_answer a = *answer_of(h, job->number);
    answer_of(h, job->number)->waits = false;
    h->same_gpu[job->number % MOE_REGIONS_MAX] = job->same_gpu;
    moe_mutex_lock(&h->lock);
    if (moe_failed(&job->status))
        moe_regions_free(h->registry, job->number);
    else
        moe_regions_commit(h->registry, job->number, job->base);
    moe_mutex_unlock(&h->lock);
    if (a.is_ring && !moe_failed(&job->status) && a.peer->state == MOE_PEER_JOINS)
        attach(a.peer, job->base);
    reply(a.peer, a.id, &job->status, a.is_ring ? 0 : job->number);
    if (a.is_ring && a.peer->state == MOE_PEER_JOINS)
        moe_region_peer_end(a.peer);
}

static void end_unmapping(struct moe_region_host *h, const struct moe_region_job *job)
{
    const struct moe_status ok = moe_ok();
    struct moe_region_answer *a = answer_of(h, job->number);
    moe_mutex_lock(&h->lock);
    moe_regions_free(h->registry, job->number);
    moe_mutex_unlock(&h->lock);
    if (a->waits)
        reply(a->peer, a->id, &ok, 0);
    a->waits = false;
}

/* Has closed regions unmapped that no request uses. */
static void unmap_unused(struct moe_region_host *h)
{
    struct moe_region_job job = {.unmaps = true, .descriptor = -1};
    bool found = true;
    while (found) {
        moe_mutex_lock(&h->lock);
        found = moe_regions_unused(h->registry, &job.number, &job.client, &job.base, &job.bytes);
        if (found)
            job.in_device = moe_regions_in_device(h->registry, job.number);
        moe_mutex_unlock(&h->lock);
        if (found)
            moe_region_mapper_add(h->mapper, &job);
    }
}

/* Closes the socket of a peer of which nothing is left. */
static bool forget(struct moe_region_peer *p)
{
    struct moe_region_host *h = p->host;
    moe_mutex_lock(&h->lock);
    bool gone = !p->has_client || moe_regions_forget(h->registry, p->client);
    struct moe_region_peer old = *p;
    if (gone)
        *p = (struct moe_region_peer){.host = h, .socket = -1};
    moe_mutex_unlock(&h->lock);
    if (!gone)
        return false;
    close(old.socket);
    free(old.calls);
    free(old.states);
    return true;
}

void moe_region_peers_advance(struct moe_region_host *h)
{
    struct moe_region_job job;
    bool waits = false;
    while (moe_region_mapper_take_done(h->mapper, &job)) {
        if (job.unmaps)
            end_unmapping(h, &job);
        else
            end_mapping(h, &job);
    }
    unmap_unused(h);
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++)
        if (h->peers[i].state == MOE_PEER_LEAVING && !forget(&h->peers[i]))
            waits = true;
    for (size_t i = 0; i < MOE_REGIONS_MAX && !waits; i++)
        waits = h->answers[i].waits;
    /* A request that ended before the store below has not woken this thread. */
    if (!waits && atomic_exchange(&h->frees, false))
        unmap_unused(h);
}

/* -------------------------------------------------------------------- the end */

void moe_region_peer_end(struct moe_region_peer *p)
{
    struct moe_region_host *h = p->host;
    if (p->state == MOE_PEER_FREE || p->state == MOE_PEER_LEAVING)
        return;
    p->state = MOE_PEER_LEAVING;
    atomic_store(&h->frees, true);
    moe_mutex_lock(&h->lock);
    p->attached = false;
    if (p->has_client)
        moe_regions_leave(h->registry, p->client);
    for (uint32_t i = 0; p->in_flight > 0 && i < MOE_RING_ENTRIES; i++)
        if (p->calls[i].running)
            h->config.cancel(h->config.ctx, &p->calls[i]);
    moe_mutex_unlock(&h->lock);
    (void)eventfd_write(h->wake, 1);
}

/* -------------------------------------------------------------------- messages */

static struct moe_status check_ticket(struct moe_region_peer *p, const ProtobufCBinaryData *ticket,
                                      struct moe_region_owner *owner)
{
    struct moe_region_host *h = p->host;
    moe_mutex_lock(&h->lock);
    struct moe_status st =
        moe_region_tickets_take(&h->tickets, ticket->data, ticket->len, moe_clock_ns(), owner);
    moe_mutex_unlock(&h->lock);
    if (!moe_failed(&st) && owner->has_uid && owner->uid != p->uid)
        return moe_error(MOE_UNAUTHENTICATED, MOE_REASON_NONE,
                         "another user has asked for this ticket");
    return st;
}

static struct moe_status enter(struct moe_region_peer *p, const struct moe_region_owner *owner)
{
    struct moe_region_host *h = p->host;
    p->calls = calloc(MOE_RING_ENTRIES, sizeof *p->calls);
    p->states = calloc(MOE_RING_ENTRIES, h->config.state_bytes + 1);
    if (p->calls == NULL || p->states == NULL)
        return no_memory();
    moe_mutex_lock(&h->lock);
    struct moe_status st = moe_regions_join(h->registry, owner->identity, &p->client);
    p->has_client = !moe_failed(&st);
    moe_mutex_unlock(&h->lock);
    return st;
}

/* Takes the descriptor over. */
static void join(struct moe_region_peer *p, uint64_t id, const ProtobufCBinaryData *ticket,
                 int descriptor)
{
    struct moe_region_owner owner;
    struct moe_region_spec ring = {.name = RING_NAME, .is_ring = true};
    struct moe_status st = check_ticket(p, ticket, &owner);
    if (!moe_failed(&st))
        st = enter(p, &owner);
    if (moe_failed(&st)) {
        if (descriptor >= 0)
            close(descriptor);
    } else {
        st = begin_region(p, id, &ring, descriptor);
    }
    if (moe_failed(&st)) {
        reply(p, id, &st, 0);
        moe_region_peer_end(p);
        return;
    }
    p->state = MOE_PEER_JOINS;
}

static void remove_region(struct moe_region_peer *p, uint64_t id, const char *name)
{
    struct moe_region_host *h = p->host;
    uint32_t number;
    moe_mutex_lock(&h->lock);
    struct moe_status st =
        strcmp(name, RING_NAME) == 0
            ? moe_error(MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND, "there is no such region")
            : moe_regions_close(h->registry, p->client, name, &number);
    moe_mutex_unlock(&h->lock);
    if (moe_failed(&st)) {
        reply(p, id, &st, 0);
        return;
    }
    *answer_of(h, number) = (struct moe_region_answer){.waits = true, .id = id, .peer = p};
    atomic_store(&h->frees, true);
    (void)eventfd_write(h->wake, 1);
}

enum { SHOWN_MAX = 64 };
_Static_assert(SHOWN_MAX *(MOE_REGION_NAME + 48) < MOE_PACKET_BYTES, "a reply fits a packet");

static void show(struct moe_region_peer *p, uint64_t id)
{
    struct moe_region_host *h = p->host;
    struct moe_region_info infos[SHOWN_MAX];
    Moe__V1__RegionInfo regions[SHOWN_MAX], *list[SHOWN_MAX];
    Moe__V1__RegionsReply r;
    uint32_t cursor = 0;
    size_t count = 0;
    moe_mutex_lock(&h->lock);
    while (count < SHOWN_MAX && moe_regions_next(h->registry, p->client, &cursor, &infos[count]))
        count++;
    moe_mutex_unlock(&h->lock);
    for (size_t i = 0; i < count; i++) {
        moe__v1__region_info__init(&regions[i]);
        regions[i].name = infos[i].name;
        regions[i].number = infos[i].number;
        regions[i].bytes = infos[i].bytes;
        regions[i].references = infos[i].references;
        regions[i].kind = infos[i].in_device ? MOE__V1__REGION_KIND__REGION_KIND_DEVICE
                                             : MOE__V1__REGION_KIND__REGION_KIND_HOST;
        regions[i].status = infos[i].mapping   ? MOE__V1__REGION_STATUS__REGION_STATUS_MAPPING
                            : infos[i].closing ? MOE__V1__REGION_STATUS__REGION_STATUS_CLOSING
                                               : MOE__V1__REGION_STATUS__REGION_STATUS_OPEN;
        list[i] = &regions[i];
    }
    moe__v1__regions_reply__init(&r);
    r.id = id;
    r.n_regions = count;
    r.regions = list;
    send_reply(p, &r);
}

/* Takes the descriptor over. */
static struct moe_status add_region(struct moe_region_peer *p, uint64_t id,
                                    const Moe__V1__AddRegion *add, int descriptor)
{
    struct moe_region_spec spec = {.name = add->name,
                                   .in_device =
                                       add->kind == MOE__V1__REGION_KIND__REGION_KIND_DEVICE,
                                   .bytes = add->bytes};
    bool known = spec.in_device || add->kind == MOE__V1__REGION_KIND__REGION_KIND_HOST ||
                 add->kind == MOE__V1__REGION_KIND__REGION_KIND_UNSPECIFIED;
    if (known && strcmp(add->name, RING_NAME) != 0)
        return begin_region(p, id, &spec, descriptor);
    if (descriptor >= 0)
        close(descriptor);
    return known ? moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID,
                             "the name is that of the ring")
                 : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID,
                             "there is no kind of regions %d", (int)add->kind);
}

/* A message of a client that has joined. Takes the descriptor over. */
static void serve(struct moe_region_peer *p, const Moe__V1__RegionsRequest *q, int descriptor)
{
    struct moe_status st = moe_ok();
    if (q->action_case == MOE__V1__REGIONS_REQUEST__ACTION_ADD) {
        st = add_region(p, q->id, q->add, descriptor);
        if (moe_failed(&st))
            reply(p, q->id, &st, 0);
        return;
    }
    if (descriptor >= 0) {
        close(descriptor);
        moe_region_peer_end(p);
        return;
    }
    switch (q->action_case) {
    case MOE__V1__REGIONS_REQUEST__ACTION_REMOVE: remove_region(p, q->id, q->remove->name); return;
    case MOE__V1__REGIONS_REQUEST__ACTION_SHOW: show(p, q->id); return;
    default: moe_region_peer_end(p);
    }
}

/* Takes the descriptor over. */
static void handle(struct moe_region_peer *p, const uint8_t *bytes, size_t length, int descriptor)
{
    struct moe_rpc_arena arena;
    void *message;
    struct moe_status st =
        moe_rpc_unpack(&moe__v1__regions_request__descriptor, bytes, length, &arena, &message);
    const Moe__V1__RegionsRequest *q = moe_failed(&st) ? NULL : message;
    if (q != NULL && q->id == 0)
        q = NULL; /* its reply could be empty, which is no packet */
    if (q != NULL && p->state == MOE_PEER_WAITS &&
        q->action_case == MOE__V1__REGIONS_REQUEST__ACTION_JOIN) {
        join(p, q->id, &q->join->ticket, descriptor);
    } else if (q != NULL && p->state == MOE_PEER_JOINED) {
        serve(p, q, descriptor);
    } else {
        if (descriptor >= 0)
            close(descriptor);
        moe_region_peer_end(p);
    }
}

void moe_region_peer_read(struct moe_region_peer *p)
{
    uint8_t bytes[MOE_PACKET_BYTES];
    for (int i = 0; i < READS_MAX; i++) {
        size_t length;
        int descriptor;
        if (p->state == MOE_PEER_FREE || p->state == MOE_PEER_LEAVING)
            return;
        switch (moe_packet_receive(p->socket, bytes, &length, &descriptor)) {
        case MOE_PACKET_NONE: return;
        case MOE_PACKET_WAKE: break; /* the loop looks at the rings anyway */
        case MOE_PACKET_MESSAGE: handle(p, bytes, length, descriptor); break;
        case MOE_PACKET_END: moe_region_peer_end(p); return;
        }
    }
}

/* -------------------------------------------------------------------- accepting */

static struct moe_region_peer *free_peer(struct moe_region_host *h)
{
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++)
        if (h->peers[i].state == MOE_PEER_FREE)
            return &h->peers[i];
    return NULL;
}

/* Connections without a ticket must not keep out those that have one. */
static void end_oldest_waiting(struct moe_region_host *h)
{
    struct moe_region_peer *oldest = NULL;
    size_t count = 0;
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++) {
        struct moe_region_peer *p = &h->peers[i];
        if (p->state != MOE_PEER_WAITS)
            continue;
        count++;
        if (oldest == NULL || p->until_ns < oldest->until_ns)
            oldest = p;
    }
    if (count >= WAITING_MAX)
        moe_region_peer_end(oldest);
}

/* The mode of the socket lets only these connect; the kernel confirms it. */
static bool may_connect(int socket, uint32_t *uid)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        return false;
    *uid = peer.uid;
    return peer.uid == geteuid() || peer.uid == 0;
}

void moe_region_peers_accept(struct moe_region_host *h)
{
    for (int i = 0; i < READS_MAX; i++) {
        uint32_t uid;
        int socket = accept4(h->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (socket < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) /* without descriptors, for example */
                h->accept_at_ns = moe_clock_ns() + ACCEPT_PAUSE_MS * MOE_NS_PER_MS;
            return;
        }
        struct moe_region_peer *p = may_connect(socket, &uid) ? free_peer(h) : NULL;
        if (p == NULL) {
            close(socket);
            continue;
        }
        end_oldest_waiting(h);
        moe_mutex_lock(&h->lock);
        *p = (struct moe_region_peer){.host = h,
                                      .state = MOE_PEER_WAITS,
                                      .socket = socket,
                                      .uid = uid,
                                      .until_ns =
                                          moe_clock_ns() + MOE_REGION_TICKET_S * MOE_NS_PER_S};
        moe_mutex_unlock(&h->lock);
    }
}
