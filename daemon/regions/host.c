/* SPDX-License-Identifier: Apache-2.0 */
/* The host's socket and its thread: polls rings while there is work, else sleeps in poll. See
 * regions/host.h. */
#include "regions/host.h"

#include "base/clock.h"
#include "base/random.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/local.h"
#include "regions/host_state.h"
#include "regions/wait.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    TURN = 8,         /* requests of one ring in a row */
    LOOK_US = 100,    /* while the rings are polled: time between two looks at the sockets */
    FAILED_MS = 10,   /* pause after a failed poll */
    BACKLOG = 16,     /* connections that wait to be accepted */
    NAMES_TRIED = 16, /* random names of a socket */
};

/* -------------------------------------------------------------------- requests */

/* Whether a device has completed the entry's last request. The receipt tells it, which the client
 * cannot write. */
static bool is_completed(const struct moe_region_call *call)
{
    return call->receipt != NULL &&
           __atomic_load_n(call->receipt, __ATOMIC_ACQUIRE) == call->good.value;
}

/* Ends the request of an entry. If the client has left, there is no ring any more. */
static void complete(struct moe_region_host *h, const struct moe_region_call *call,
                     const struct moe_status *status, struct moe_ring_details *d)
    MOE_REQUIRES(h->lock)
{
    struct moe_region_peer *p = call->peer;
    (void)h;
    if (!p->attached)
        return;
    d->reason = (uint32_t)status->reason;
    d->retry_after_ms = status->retry_after_ms;
    if (moe_failed(status))
        (void)snprintf(d->text, sizeof d->text, "%s", status->text);
    const bool waits = is_completed(call)
                           ? moe_ring_server_add_details(&p->ring, call->entry, d)
                           : moe_ring_server_complete(&p->ring, call->entry, status->code, d);
    if (waits)
        moe_ring_wake(p->ring.ring, call->entry);
}

void moe_region_host_end_call(struct moe_region_call *call, const struct moe_status *status,
                              const struct moe_ring_details *details)
{
    struct moe_region_peer *p = call->peer;
    struct moe_region_host *h = p->host;
    struct moe_ring_details d = *details;
    moe_mutex_lock(&h->lock);
    moe_regions_put(h->registry, p->client, call->use);
    call->running = false;
    p->in_flight--;
    complete(h, call, status, &d);
    /* After a device's completion, the entry's next request may be there already. */
    const bool looks = h->config.spin_ns > 0 || is_completed(call);
    moe_mutex_unlock(&h->lock);
    if (looks)
        atomic_store(&h->ended, true);
    if (atomic_load(&h->frees) || (looks && atomic_load(&h->asleep)))
        (void)eventfd_write(h->wake, 1);
}

/* Fills what a device may store for the call. The last receipt of the entry may have any value: the
 * client chose it. */
static void offer_completion(struct moe_region_call *call)
{
    const struct moe_region_peer *p = call->peer;
    const struct moe_region_host *h = p->host;
    if (h->config.receipts == NULL)
        return;
    call->receipt = &h->config.receipts[(p - h->peers) * MOE_RING_ENTRIES + call->entry];
    call->good = moe_ring_server_good(&p->ring, call->entry);
    __atomic_store_n(call->receipt, 0, __ATOMIC_RELAXED);
}

/* Takes the next request of a ring into the call of its entry. */
static struct moe_region_call *take(struct moe_region_peer *p)
{
    struct moe_region_host *h = p->host;
    struct moe_ring_request request;
    struct moe_region_call *call = NULL;
    uint32_t entry;
    moe_mutex_lock(&h->lock);
    if (p->attached && moe_ring_server_take(&p->ring, &entry, &request)) {
        call = &p->calls[entry];
        *call = (struct moe_region_call){.request = request,
                                         .received_ns = moe_clock_ns(),
                                         .state = p->states + entry * h->config.state_bytes,
                                         .peer = p,
                                         .entry = entry};
        offer_completion(call);
    }
    moe_mutex_unlock(&h->lock);
    return call;
}

/* A stream of another GPU waits for y there. A thread of a host would wait for the details too; and
 * on the worker's own GPU, each early completion would cost a turn of the two processes. */
static bool device_completes(const struct moe_region_call *call)
{
    const uint32_t region = call->request.tensors[MOE_RING_Y].region;
    return call->in_device[MOE_RING_Y] && !call->peer->host->same_gpu[region % MOE_REGIONS_MAX];
}

/* A device has completed a request of the client, which may use its tensors again; the engine's
 * thread has not ended it yet. */
static bool ends_soon(const struct moe_region_peer *p)
{
    bool found = false;
    for (uint32_t i = 0; i < MOE_RING_ENTRIES; i++)
        found = found || (p->calls[i].running && is_completed(&p->calls[i]));
    return found;
}

/* Checks the daemon's copy, and finds its memory. `*later`: it was given back, because memory of a
 * request that ends soon overlaps. */
static struct moe_status admit(struct moe_region_call *call, bool *later)
{
    struct moe_region_peer *p = call->peer;
    struct moe_region_host *h = p->host;
    struct moe_ring_layer layer;
    MOE_TRY(h->config.find_layer(h->config.ctx, call->request.layer, &layer));
    MOE_TRY(moe_ring_check(&call->request, &layer));
    moe_mutex_lock(&h->lock);
    struct moe_status st =
        moe_regions_take(h->registry, p->client, call->request.tensors, call->at, &call->use);
    for (size_t i = 0; i < MOE_RING_ROLES && !moe_failed(&st); i++)
        call->in_device[i] = call->at[i] != NULL &&
                             moe_regions_in_device(h->registry, call->request.tensors[i].region);
    if (!moe_failed(&st)) {
        call->running = true;
        p->in_flight++;
        if (!device_completes(call))
            call->receipt = NULL;
    }
    *later = st.reason == MOE_REASON_REGION_OVERLAP && ends_soon(p);
    if (*later)
        moe_ring_server_give_back(&p->ring, call->entry);
    moe_mutex_unlock(&h->lock);
    return st;
}

static void serve(struct moe_region_call *call)
{
    struct moe_region_host *h = call->peer->host;
    struct moe_ring_details details = {0};
    bool later = false;
    struct moe_status st = admit(call, &later);
    if (later)
        return;
    if (!moe_failed(&st)) {
        memset(call->state, 0, h->config.state_bytes);
        h->config.begin(h->config.ctx, call);
        return;
    }
    h->config.refused(h->config.ctx, call, &st);
    moe_mutex_lock(&h->lock);
    complete(h, call, &st, &details);
    moe_mutex_unlock(&h->lock);
}

/* True if a ring had a request. */
static bool serve_rings(struct moe_region_host *h)
{
    bool found = false;
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++) {
        struct moe_region_call *call;
        for (int n = 0; n < TURN && h->peers[i].state == MOE_PEER_JOINED &&
                        (call = take(&h->peers[i])) != NULL;
             n++) {
            serve(call);
            found = true;
        }
    }
    return found;
}

static void set_sleeps(struct moe_region_host *h, bool sleeps)
{
    moe_mutex_lock(&h->lock);
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++)
        if (h->peers[i].attached)
            moe_ring_server_set_sleeps(&h->peers[i].ring, sleeps);
    moe_mutex_unlock(&h->lock);
}

/* -------------------------------------------------------------------- the thread */

enum { WAKE, LISTENER, FIRST_PEER, POLLED = FIRST_PEER + MOE_REGION_CLIENTS };

/* What poll watches: only what is open, because it refuses more entries than this process may have
 * descriptors. */
struct watched {
    nfds_t count;
    struct pollfd list[POLLED];
    struct moe_region_peer *peers[POLLED]; /* NULL below FIRST_PEER */
};

/* Fills the list for poll, and returns how long it may wait in ms; -1 = for ever. */
static int list_sockets(struct moe_region_host *h, struct watched *w, uint64_t now_ns)
{
    uint64_t until = MOE_NEVER;
    bool accepts = now_ns >= h->accept_at_ns;
    if (!accepts)
        until = h->accept_at_ns;
    w->list[WAKE] = (struct pollfd){.fd = h->wake, .events = POLLIN};
    w->list[LISTENER] = (struct pollfd){.fd = accepts ? h->listener : -1, .events = POLLIN};
    w->count = FIRST_PEER;
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++) {
        struct moe_region_peer *p = &h->peers[i];
        if (p->state == MOE_PEER_FREE || p->state == MOE_PEER_LEAVING)
            continue;
        w->list[w->count] = (struct pollfd){.fd = p->socket, .events = POLLIN};
        w->peers[w->count++] = p;
        if (p->state == MOE_PEER_WAITS)
            until = moe_earlier(until, p->until_ns);
    }
    if (until == MOE_NEVER)
        return -1;
    return until <= now_ns ? 0 : (int)((until - now_ns) / MOE_NS_PER_MS) + 1;
}

static const struct moe_loop_place serving = {.what = "clients that share memory"};

/* Handles what has arrived at the sockets. */
static void look(struct moe_region_host *h, bool sleeps)
{
    struct watched w;
    uint64_t now = moe_clock_ns();
    int wait_ms = list_sockets(h, &w, now);
    if (sleeps)
        moe_loop_leave(h->loop);
    int found = poll(w.list, w.count, sleeps ? wait_ms : 0);
    if (found < 0 && errno != EINTR) /* no memory, or a limit of descriptors was lowered */
        moe_sleep_until(now + FAILED_MS * MOE_NS_PER_MS);
    moe_loop_enter(h->loop, &serving);
    if (found < 0)
        return;
    if (w.list[WAKE].revents != 0) {
        eventfd_t count;
        (void)eventfd_read(h->wake, &count);
    }
    now = moe_clock_ns();
    for (nfds_t i = FIRST_PEER; i < w.count; i++) {
        struct moe_region_peer *p = w.peers[i];
        if (w.list[i].revents != 0)
            moe_region_peer_read(p);
        if (p->state == MOE_PEER_WAITS && now >= p->until_ns)
            moe_region_peer_end(p);
    }
    if (w.list[LISTENER].revents != 0)
        moe_region_peers_accept(h);
    moe_region_peers_advance(h);
}

static void sleep_until_woken(struct moe_region_host *h)
{
    set_sleeps(h, true);
    atomic_store(&h->asleep, true);
    /* A client that did not see the first store has a request in its ring; an engine that did not
     * see the second one has ended one. */
    if (!serve_rings(h) && !atomic_load(&h->ended))
        look(h, true);
    atomic_store(&h->asleep, false);
    set_sleeps(h, false);
}

static void *run(void *arg)
{
    struct moe_region_host *h = arg;
    uint64_t busy_until = 0, look_at = 0;
    moe_loop_enter(h->loop, &serving);
    while (!atomic_load(&h->stopping)) {
        bool found = serve_rings(h);
        moe_loop_turn(h->loop);
        uint64_t now = moe_clock_ns();
        /* Who got an answer often has the next request. A device cannot wake this thread. */
        if (atomic_load(&h->ended)) {
            atomic_store(&h->ended, false);
            found = true;
        }
        if (found)
            busy_until = now + h->config.spin_ns;
        if (!found && now >= busy_until) {
            sleep_until_woken(h);
        } else if (now >= look_at) {
            look(h, false);
            look_at = now + LOOK_US * (MOE_NS_PER_MS / 1000);
        }
    }
    moe_loop_leave(h->loop);
    return NULL;
}

/* -------------------------------------------------------------------- the socket */

static struct moe_status bad_path(const char *why)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "the socket for shared memory: %s", why);
}

static struct moe_status cannot_listen(int error)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "the socket for shared memory: %s",
                     strerror(error));
}

/* 0, or an error number. The mode is that of the file from its first instant. */
static int bind_at(int fd, const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    memcpy(at.sun_path, path, strlen(path) + 1);
    if (fchmod(fd, S_IRUSR | S_IWUSR) != 0 || bind(fd, (struct sockaddr *)&at, sizeof at) != 0)
        return errno;
    return 0;
}

/* True if the path is a socket that a killed daemon has left behind. */
static bool is_left_behind(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    struct stat file;
    if (lstat(path, &file) != 0 || !S_ISSOCK(file.st_mode) || file.st_uid != geteuid())
        return false;
    memcpy(at.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool gone =
        fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof at) != 0 && errno == ECONNREFUSED;
    if (fd >= 0)
        close(fd);
    return gone;
}

static struct moe_status bind_given(struct moe_region_host *h, const char *path)
{
    if (path[0] != '/' || strlen(path) >= sizeof h->path)
        return bad_path("its path must be absolute, and have at most 107 bytes");
    (void)snprintf(h->path, sizeof h->path, "%s", path);
    int error = bind_at(h->listener, h->path);
    if (error == EADDRINUSE && is_left_behind(h->path) && unlink(h->path) == 0)
        error = bind_at(h->listener, h->path);
    h->bound = error == 0;
    return error == 0 ? moe_ok() : cannot_listen(error);
}

/* A name with a random part, as long as the longest name there. */
static struct moe_status bind_anywhere(struct moe_region_host *h)
{
    char directory[MOE_LOCAL_PATH_BYTES];
    int error = EADDRINUSE;
    MOE_TRY(moe_local_listen_path(directory));
    *strrchr(directory, '/') = '\0';
    for (int i = 0; i < NAMES_TRIED && error == EADDRINUSE; i++) {
        uint32_t id;
        MOE_TRY(moe_random_bytes(&id, sizeof id));
        int n = snprintf(h->path, sizeof h->path, "%s/regions-%08x.sock", directory, id);
        if (n < 0 || (size_t)n >= sizeof h->path)
            return bad_path("the directory of this user's sockets has a name that is too long");
        error = bind_at(h->listener, h->path);
    }
    h->bound = error == 0;
    return error == 0 ? moe_ok() : cannot_listen(error);
}

static struct moe_status listen_there(struct moe_region_host *h)
{
    h->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    h->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (h->listener < 0 || h->wake < 0)
        return cannot_listen(errno);
    if (h->config.socket != NULL)
        MOE_TRY(bind_given(h, h->config.socket));
    else
        MOE_TRY(bind_anywhere(h));
    return listen(h->listener, BACKLOG) == 0 ? moe_ok() : cannot_listen(errno);
}

/* -------------------------------------------------------------------- the host */

static struct moe_status start(struct moe_region_host *h)
{
    moe_mutex_not_shared(&h->lock);
    h->registry = calloc(1, sizeof *h->registry);
    if (h->registry == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for shared memory");
    moe_regions_init(h->registry, &h->config.limits);
    MOE_TRY(listen_there(h));
    MOE_TRY(moe_region_mapper_create(h->wake, &h->config.device, &h->mapper));
    const struct moe_loop_config loop = {.name = "regions", .code = "REGIONS_STUCK"};
    h->loop = moe_progress_add(h->config.progress, &loop);
    int error = moe_thread_create(&h->thread, "moe-regions", run, h);
    h->thread_runs = error == 0;
    return error == 0 ? moe_ok() : moe_thread_failure("moe-regions", error);
}

struct moe_status moe_region_host_start(const struct moe_region_host_config *config,
                                        struct moe_region_host **out)
{
    struct moe_region_host *h = calloc(1, sizeof *h);
    if (h == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for shared memory");
    h->config = *config;
    h->listener = h->wake = -1;
    moe_mutex_init(&h->lock);
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++)
        h->peers[i] = (struct moe_region_peer){.host = h, .socket = -1};
    struct moe_status st = start(h);
    if (moe_failed(&st)) {
        moe_region_host_destroy(h);
        return st;
    }
    *out = h;
    return st;
}

void moe_region_host_stop(struct moe_region_host *h)
{
    if (h == NULL || !h->thread_runs)
        return;
    atomic_store(&h->stopping, true);
    (void)eventfd_write(h->wake, 1);
    (void)pthread_join(h->thread, NULL);
    h->thread_runs = false;
}

/* Frees what clients have: no thread of the host runs, and no request is in flight. */
static void free_clients(struct moe_region_host *h)
{
    struct moe_region_job job;
    moe_region_mapper_finish(h->mapper);
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++)
        moe_region_peer_end(&h->peers[i]);
    while (moe_region_mapper_take_done(h->mapper, &job)) {
        moe_mutex_lock(&h->lock);
        if (!job.unmaps && !moe_failed(&job.status))
            moe_regions_commit(h->registry, job.number, job.base);
        else
            moe_regions_free(h->registry, job.number);
        moe_mutex_unlock(&h->lock);
    }
    moe_mutex_not_shared(&h->lock);
    while (moe_regions_unused(h->registry, &job.number, &job.client, &job.base, &job.bytes)) {
        job.in_device = moe_regions_in_device(h->registry, job.number);
        moe_region_mapper_drop(h->mapper, &job);
        moe_regions_free(h->registry, job.number);
    }
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++) {
        struct moe_region_peer *p = &h->peers[i];
        MOE_INVARIANT(!p->has_client || moe_regions_forget(h->registry, p->client));
        if (p->socket >= 0)
            close(p->socket);
        free(p->calls);
        free(p->states);
    }
}

void moe_region_host_destroy(struct moe_region_host *h)
{
    if (h == NULL)
        return;
    moe_region_host_stop(h);
    if (h->mapper != NULL)
        free_clients(h);
    moe_region_mapper_destroy(h->mapper);
    if (h->bound)
        (void)unlink(h->path);
    if (h->listener >= 0)
        close(h->listener);
    if (h->wake >= 0)
        close(h->wake);
    moe_mutex_not_shared(&h->lock);
    free(h->registry);
    moe_mutex_destroy(&h->lock);
    free(h);
}

struct moe_status moe_region_host_invite(struct moe_region_host *h,
                                         const struct moe_region_owner *owner,
                                         uint8_t ticket[MOE_REGION_TICKET])
{
    MOE_TRY(moe_random_bytes(ticket, MOE_REGION_TICKET));
    moe_mutex_lock(&h->lock);
    struct moe_status st = moe_region_tickets_add(&h->tickets, ticket, owner, moe_clock_ns());
    moe_mutex_unlock(&h->lock);
    return st;
}

const char *moe_region_host_socket(const struct moe_region_host *h)
{
    return h->path;
}

void moe_region_host_show(struct moe_region_host *h,
                          void (*show)(void *ctx, const struct moe_region_shown *region), void *ctx)
{
    struct moe_region_shown shown;
    uint32_t cursor = 0;
    moe_mutex_lock(&h->lock);
    while (moe_regions_next_of_all(h->registry, &cursor, &shown))
        show(ctx, &shown);
    moe_mutex_unlock(&h->lock);
}

void moe_region_host_read_counters(struct moe_region_host *h, struct moe_region_counters *out)
{
    *out = (struct moe_region_counters){0};
    moe_mutex_lock(&h->lock);
    out->bytes = moe_regions_bytes(h->registry, NULL);
    for (size_t i = 0; i < MOE_REGION_CLIENTS; i++) {
        out->clients += h->peers[i].has_client;
        out->in_flight += h->peers[i].in_flight;
    }
    moe_mutex_unlock(&h->lock);
}
