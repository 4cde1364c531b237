/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions: the connection to a worker's socket, its calls, and the watchdog. The watchdog is the
 * only thread that reads the socket. It also gives up requests that have been under way for too
 * long, and all of them when the connection ends. */
#include "session.h"

#include "abi.h"
#include "base/clock.h"
#include "base/thread.h"
#include "base/wait.h"
#include "regions/memory.h"
#include "regions/packet.h"
#include "regions/wait.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    WATCH_MS = 10,    /* between two looks of the watchdog while requests are in flight */
    DEVICE_MS = 1,    /* the same while a device may submit: the worker may have to be woken */
    QUIET_LOOKS = 50, /* looks without requests until it sleeps without a limit */
    MARGIN_MS = 20,   /* for the worker's own answer to a request that is too late */
};

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "session: out of memory");
}

static struct moe_status ended(void)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "the connection to the worker has ended");
}

/* -------------------------------------------------------------------- the watchdog */

static struct moe_status status_of(const Moe__V1__Error *e)
{
    if (e == NULL || e->code == MOE_OK)
        return moe_ok();
    enum moe_code code = e->code <= MOE_UNAUTHENTICATED ? (enum moe_code)e->code : MOE_UNKNOWN;
    return moe_error_retry(code, moe_reason_from_name(e->reason), e->retry_after_ms, "%s",
                           e->message);
}

static void on_reply(struct moe_client_session *s, const uint8_t *bytes, size_t length)
{
    struct moe_rpc_arena arena;
    void *message;
    struct moe_status st =
        moe_rpc_unpack(&moe__v1__regions_reply__descriptor, bytes, length, &arena, &message);
    if (moe_failed(&st))
        return; /* its call ends by its deadline */
    const Moe__V1__RegionsReply *r = message;
    moe_mutex_lock(&s->lock);
    if (s->asking && !s->replied && r->id == s->id) {
        s->replied = true;
        s->reply = status_of(r->error);
        s->number = r->number;
        pthread_cond_broadcast(&s->change);
    }
    moe_mutex_unlock(&s->lock);
}

/* Reads what has arrived. False: the connection has ended. */
static bool read_socket(struct moe_client_session *s)
{
    uint8_t bytes[MOE_PACKET_BYTES];
    size_t length;
    int descriptor;
    for (;;) {
        switch (moe_packet_receive(s->socket, bytes, &length, &descriptor)) {
        case MOE_PACKET_NONE: return true;
        case MOE_PACKET_END: return false;
        case MOE_PACKET_WAKE: break;
        case MOE_PACKET_MESSAGE: on_reply(s, bytes, length); break;
        }
        if (descriptor >= 0) /* workers send none */
            close(descriptor);
    }
}

static void end(struct moe_client_session *s)
{
    moe_ring_caller_end(&s->caller);
    for (uint32_t i = 0; i < MOE_RING_ENTRIES; i++)
        moe_ring_wake(s->caller.ring, i);
    moe_mutex_lock(&s->lock);
    s->ended = true;
    pthread_cond_broadcast(&s->change);
    moe_mutex_unlock(&s->lock);
}

/* A device submits without a word to this process. */
static bool has_work(struct moe_client_session *s)
{
    return atomic_load(&s->in_flight) > 0 || atomic_load(&s->lent) > 0;
}

/* True if the watchdog may sleep until it is woken. */
static bool may_sleep(struct moe_client_session *s, uint32_t *quiet)
{
    *quiet = has_work(s) ? 0 : *quiet + 1;
    if (*quiet < QUIET_LOOKS)
        return false;
    atomic_store(&s->idle, true);
    if (!has_work(s))
        return true;
    atomic_store(&s->idle, false);
    return false;
}

static void wake_for_device(struct moe_client_session *s)
{
    if (moe_ring_caller_must_wake(&s->caller) && moe_ring_caller_is_busy(&s->caller))
        moe_packet_wake(s->socket);
}

static void *watch(void *arg)
{
    struct moe_client_session *s = arg;
    const uint64_t limit_ns = s->timeout_ns + MARGIN_MS * MOE_NS_PER_MS;
    uint32_t quiet = 0;
    struct pollfd list[2] = {{.fd = s->socket, .events = POLLIN},
                             {.fd = s->wake, .events = POLLIN}};
    while (!atomic_load(&s->closing)) {
        eventfd_t count;
        const int look_ms = atomic_load(&s->lent) > 0 ? DEVICE_MS : WATCH_MS;
        (void)poll(list, 2, may_sleep(s, &quiet) ? -1 : look_ms);
        if (atomic_exchange(&s->idle, false))
            quiet = 0;
        (void)eventfd_read(s->wake, &count);
        if (list[0].fd >= 0 && !read_socket(s)) {
            end(s);
            list[0].fd = -1;
        }
        moe_ring_caller_watch(&s->caller, moe_clock_ns(), limit_ns);
        if (atomic_load(&s->lent) > 0 && list[0].fd >= 0)
            wake_for_device(s);
    }
    return NULL;
}

void moe_client_session_watch(struct moe_client_session *s)
{
    if (atomic_exchange(&s->idle, false))
        (void)eventfd_write(s->wake, 1);
}

/* -------------------------------------------------------------------- calls */

/* Waits until no other call is on the socket. False: the connection has ended, or time is over. */
static bool wait_for_turn(struct moe_client_session *s, uint64_t deadline_ns) MOE_REQUIRES(s->lock)
{
    while (s->asking && !s->ended)
        if (!moe_wait_until(&s->change, &s->lock, deadline_ns))
            break;
    return !s->asking && !s->ended;
}

static struct moe_status send_request(struct moe_client_session *s, Moe__V1__RegionsRequest *q,
                                      int descriptor) MOE_REQUIRES(s->lock)
{
    uint8_t bytes[512]; /* a name of 64 characters, or a ticket */
    s->replied = false;
    q->id = ++s->id;
    size_t length = moe__v1__regions_request__get_packed_size(q);
    if (length > sizeof bytes)
        return moe_error(MOE_INTERNAL, MOE_REASON_TOO_LARGE, "a broken ticket");
    moe__v1__regions_request__pack(q, bytes);
    return moe_packet_send(s->socket, bytes, length, descriptor);
}

struct moe_status moe_client_session_ask(struct moe_client_session *s, Moe__V1__RegionsRequest *q,
                                         int descriptor, uint32_t *number)
{
    const uint64_t deadline_ns = moe_clock_ns() + s->timeout_ns;
    struct moe_status late =
        moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "the worker has not answered in time");
    moe_mutex_lock(&s->lock);
    struct moe_status st = wait_for_turn(s, deadline_ns) ? moe_ok() : s->ended ? ended() : late;
    if (!moe_failed(&st)) {
        s->asking = true;
        st = send_request(s, q, descriptor);
        while (!moe_failed(&st) && !s->replied)
            if (s->ended)
                st = ended();
            else if (!moe_wait_until(&s->change, &s->lock, deadline_ns) && !s->replied)
                st = late;
        if (s->replied)
            st = s->reply;
        if (number != NULL)
            *number = s->number;
        s->asking = false;
        pthread_cond_broadcast(&s->change);
    }
    moe_mutex_unlock(&s->lock);
    return st;
}

/* -------------------------------------------------------------------- opening */

static struct moe_status connect_socket(struct moe_client_session *s, const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (path[0] != '/' || strlen(path) >= sizeof at.sun_path)
        return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED,
                         "the worker's socket has no good path");
    strcpy(at.sun_path, path);
    s->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (s->socket >= 0 && connect(s->socket, (struct sockaddr *)&at, sizeof at) == 0)
        return moe_ok();
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO,
                     "the worker's socket for shared memory cannot be reached: it runs on another "
                     "host, or as another user");
}

/* Makes the ring, and has the worker map it. */
static struct moe_status join(struct moe_client_session *s, const ProtobufCBinaryData *ticket)
{
    Moe__V1__JoinRegions action = MOE__V1__JOIN_REGIONS__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    void *ring;
    int descriptor;
    MOE_TRY(moe_region_memory_create(sizeof(struct moe_ring), &descriptor, &ring));
    moe_ring_caller_init(&s->caller, ring);
    int error = moe_thread_create(&s->watchdog, "moe-session", watch, s);
    s->watched = error == 0;
    action.ticket = *ticket;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_JOIN;
    q.join = &action;
    struct moe_status st = s->watched ? moe_client_session_ask(s, &q, descriptor, NULL)
                                      : moe_thread_failure("moe-session", error);
    close(descriptor);
    return st;
}

static struct moe_status open_at(struct moe_client_session *s,
                                 const struct moe_client_connection *connection)
{
    ProtobufCMessage *message = NULL;
    const struct moe_rpc_out nothing = {0};
    struct moe_status st = moe_client_ask(connection->channel, "/moe.v1.ExpertService/OpenRegions",
                                          moe_clock_ns() + s->timeout_ns, &nothing,
                                          &moe__v1__open_regions_response__descriptor, &message);
    if (moe_failed(&st))
        return moe_client_blame_connection(connection, st);
    Moe__V1__OpenRegionsResponse *answer = (Moe__V1__OpenRegionsResponse *)message;
    st = connect_socket(s, answer->socket);
    if (!moe_failed(&st))
        st = join(s, &answer->ticket);
    protobuf_c_message_free_unpacked(message, NULL);
    return st;
}

static struct moe_status new_session(struct moe_client *c,
                                     const struct moe_client_session_config *config,
                                     struct moe_client_session **out)
{
    uint64_t timeout_ms = config->timeout_ms != 0 ? config->timeout_ms : c->config.timeout_ms;
    struct moe_client_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return out_of_memory();
    s->client = c;
    s->socket = -1;
    s->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    s->timeout_ns = (timeout_ms < UINT32_MAX ? timeout_ms : UINT32_MAX) * MOE_NS_PER_MS;
    s->spin_ns = config->spin_us * (MOE_NS_PER_MS / 1000);
    moe_mutex_init(&s->lock);
    moe_wait_init(&s->change);
    *out = s;
    if (s->wake >= 0)
        return moe_ok();
    moe_session_close(s);
    return out_of_memory();
}

static struct moe_status check_config(const struct moe_client *c,
                                      const struct moe_client_session_config *config)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(config, session_config, SESSION_CONFIG));
    if (config->reserved_flags != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                         "moe_client_session_config: reserved fields must be 0");
    bool added = c->wanted.model[0] != '\0' && c->info.model_count > 0 &&
                 strcmp(c->wanted.model, c->info.models[0]) != 0;
    return added ? moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                             "requests through shared memory go to the default model alone")
                 : moe_ok();
}

/* The connections of all workers come first in the client's list. */
struct moe_status moe_session_open(struct moe_client *c,
                                   const struct moe_client_session_config *config,
                                   struct moe_client_session **out)
{
    const struct moe_client_session_config defaults = {.size = sizeof defaults};
    struct moe_status first = moe_ok();
    if (config == NULL)
        config = &defaults;
    MOE_TRY(check_config(c, config));
    for (size_t i = 0; i < c->worker_count; i++) {
        struct moe_client_session *s = NULL;
        MOE_TRY(new_session(c, config, &s));
        struct moe_status st = open_at(s, &c->connections[i]);
        if (!moe_failed(&st)) {
            *out = s;
            return st;
        }
        moe_session_close(s);
        if (i == 0)
            first = st;
    }
    return first;
}

void moe_session_close(struct moe_client_session *s)
{
    if (s == NULL)
        return;
    atomic_store(&s->closing, true);
    if (s->watched) {
        (void)eventfd_write(s->wake, 1);
        (void)pthread_join(s->watchdog, NULL);
    }
    moe_mutex_not_shared(&s->lock);
    if (s->socket >= 0)
        close(s->socket);
    if (s->wake >= 0)
        close(s->wake);
    while (s->regions != NULL) {
        struct moe_client_region *r = s->regions;
        s->regions = r->next;
        moe_client_region_free(r);
    }
    moe_region_memory_unmap(s->caller.ring, sizeof(struct moe_ring));
    pthread_cond_destroy(&s->change);
    moe_mutex_destroy(&s->lock);
    free(s);
}
