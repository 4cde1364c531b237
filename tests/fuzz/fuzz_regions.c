/* SPDX-License-Identifier: Apache-2.0 */
/* Any packets on the socket for shared memory, with any descriptors, and any bytes in the ring
 * behind it, against a real host with its two threads. Each message gets one reply, or its
 * connection ends. Each request that begins has tensors of the right sizes, and their memory can be
 * read and written. Behind each input nothing is left: no client, no byte, no request, no
 * descriptor. At times a good client is served next.
 *
 * An input is a list of steps; each begins with one byte:
 *
 *     0..5   a packet: number of bytes, bytes; a descriptor by that number: none, good memory, the
 *            same memory again, memory without seals, /dev/null, good memory of two pages. TICKET
 * in the bytes becomes a valid ticket 6      a request of the ring: entry, number of bytes, bytes
 * of the request. Regions 1, 2, 3
 *            ... become those that this connection has registered
 *     7      all requests in flight end
 *
 * Higher bits of the first byte: 8 = a request that begins later stays in flight until step 7 or
 * the end; 16 = wake the host. */
#include "base/clock.h"
#include "base/size.h"
#include "driver.h"
#include "moe/types.h"
#include "moe/v1/regions.pb-c.h"
#include "regions/caller.h"
#include "regions/host.h"
#include "regions/memory.h"
#include "regions/packet.h"
#include "rpc/msg.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { HIDDEN = 16, TOP_K = 2, TOKENS_MAX = 64, PAGE = 4096, REGIONS = 8, CALLS = 256 };
static const char ticket_text[] = "TICKET-TICKET-TI";
enum { LIMIT_S = 20 };

static struct moe_region_host *host;
static int good_memory[2], unsealed, null_device, first_free;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Of `lock`. `holds`: requests that begin stay in flight. */
static bool holds;
static struct moe_region_call *held[CALLS];
static size_t held_count;

/* ------------------------------------------------------------------ the owner of requests */

static struct moe_status find_layer(void *ctx, uint32_t layer, struct moe_ring_layer *out)
{
    (void)ctx;
    *out = (struct moe_ring_layer){.hidden = HIDDEN, .top_k = TOP_K, .max_tokens = TOKENS_MAX};
    return layer < 2 ? moe_ok()
                     : moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "no layer %u", layer);
}

static void end_call(struct moe_region_call *call)
{
    const struct moe_ring_details details = {.steps = 1};
    const struct moe_status ok = moe_ok();
    const struct moe_ring_request *q = &call->request;
    const size_t rows = (size_t)q->tokens * HIDDEN * moe_dtype_bytes((enum moe_dtype)q->dtype);
    if (q->tokens > 0)
        memcpy(call->at[MOE_RING_Y], call->at[MOE_RING_X], rows);
    moe_region_host_end_call(call, &ok, &details);
}

static void begin(void *ctx, struct moe_region_call *call)
{
    (void)ctx;
    unsigned sum = 0;
    for (size_t i = 0; i < MOE_RING_ROLES; i++) {
        MOE_INVARIANT((call->at[i] != NULL) == (call->request.tensors[i].region != 0));
        for (size_t b = 0; call->at[i] != NULL && b < call->request.tensors[i].bytes; b++)
            sum += ((volatile uint8_t *)call->at[i])[b];
        if (i >= MOE_RING_INPUTS && call->at[i] != NULL)
            memset(call->at[i], (int)sum, call->request.tensors[i].bytes);
    }
    pthread_mutex_lock(&lock);
    const bool stays = holds && held_count < CALLS;
    if (stays)
        held[held_count++] = call;
    pthread_mutex_unlock(&lock);
    if (!stays)
        end_call(call);
}

static void refused(void *ctx, const struct moe_region_call *call, const struct moe_status *why)
{
    (void)ctx;
    (void)call;
    MOE_INVARIANT(why->code != MOE_OK && why->reason != MOE_REASON_NONE);
}

/* end_all follows in any case. */
static void cancel(void *ctx, struct moe_region_call *call)
{
    (void)ctx;
    MOE_INVARIANT(call->running);
}

/* Ends all requests in flight. */
static void end_all(void)
{
    pthread_mutex_lock(&lock);
    const size_t count = held_count;
    struct moe_region_call *list[CALLS];
    memcpy(list, held, sizeof list);
    held_count = 0;
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < count; i++)
        end_call(list[i]);
}

/* The same, and those that begin from now on. */
static void let_all_end(void)
{
    pthread_mutex_lock(&lock);
    holds = false;
    pthread_mutex_unlock(&lock);
    end_all();
}

/* ------------------------------------------------------------------ the world */

static int memory_of(size_t bytes, int seals)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    MOE_INVARIANT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 &&
                  (seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0));
    return fd;
}

/* The lowest free descriptor: equal before and after if none is left open. */
static int next_descriptor(void)
{
    int fd = dup(null_device);
    MOE_INVARIANT(fd >= 0 && close(fd) == 0);
    return fd;
}

static void open_world(void)
{
    static char path[64];
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    (void)snprintf(path, sizeof path, "/tmp/fuzz-regions-%d", (int)getpid());
    const struct moe_region_host_config config = {
        .socket = path,
        .limits = {.bytes = 64 * sizeof(struct moe_ring),
                   .identity_bytes = sizeof(struct moe_ring) + 8 * PAGE,
                   .identity_clients = 2,
                   .client_regions = REGIONS},
        .state_bytes = 16,
        .find_layer = find_layer,
        .begin = begin,
        .refused = refused,
        .cancel = cancel,
    };
    struct moe_status st = moe_region_host_start(&config, &host);
    if (moe_failed(&st))
        fprintf(stderr, "%s\n", st.text);
    MOE_INVARIANT(!moe_failed(&st));
    good_memory[0] = memory_of(PAGE, seals);
    good_memory[1] = memory_of(2 * PAGE, seals);
    unsealed = memory_of(PAGE, 0);
    null_device = open("/dev/null", O_RDWR | O_CLOEXEC);
    MOE_INVARIANT(null_device >= 0);
    first_free = next_descriptor();
}

static void close_world(void)
{
    moe_region_host_stop(host);
    moe_region_host_destroy(host);
    close(good_memory[0]);
    close(good_memory[1]);
    close(unsealed);
    close(null_device);
}

struct connection {
    int socket;
    bool ended;
    uint32_t numbers[REGIONS], count; /* of its regions */
    struct moe_ring_caller caller;    /* `ring` NULL: it has not joined */
};

static void connect_to_host(struct connection *c)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    (void)snprintf(at.sun_path, sizeof at.sun_path, "%s", moe_region_host_socket(host));
    *c = (struct connection){.socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
    MOE_INVARIANT(c->socket >= 0 && connect(c->socket, (struct sockaddr *)&at, sizeof at) == 0);
}

/* The reply to a message, or the end of the connection; one of the two must come. */
static void await_reply(struct connection *c, uint64_t id, bool adds)
{
    uint8_t bytes[MOE_PACKET_BYTES];
    struct moe_rpc_arena arena;
    struct pollfd p = {.fd = c->socket, .events = POLLIN};
    size_t length;
    int descriptor;
    void *message;
    MOE_INVARIANT(poll(&p, 1, LIMIT_S * 1000) == 1);
    if (moe_packet_receive(c->socket, bytes, &length, &descriptor) == MOE_PACKET_END) {
        c->ended = true;
        return;
    }
    MOE_INVARIANT(descriptor < 0);
    struct moe_status st =
        moe_rpc_unpack(&moe__v1__regions_reply__descriptor, bytes, length, &arena, &message);
    MOE_INVARIANT(!moe_failed(&st));
    const Moe__V1__RegionsReply *reply = message;
    MOE_INVARIANT(reply->id == id && (!adds || (reply->error == NULL) == (reply->number != 0)));
    if (reply->number != 0 && c->count < REGIONS)
        c->numbers[c->count++] = reply->number;
}

/* Joins with a new ring. */
static void join(struct connection *c)
{
    const struct moe_region_owner owner = {.identity = "uid:1"};
    uint8_t ticket[MOE_REGION_TICKET], bytes[64];
    Moe__V1__JoinRegions action = MOE__V1__JOIN_REGIONS__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    void *ring;
    int descriptor;
    struct moe_status st = moe_region_host_invite(host, &owner, ticket);
    MOE_INVARIANT(!moe_failed(&st));
    st = moe_region_memory_create(sizeof(struct moe_ring), &descriptor, &ring);
    MOE_INVARIANT(!moe_failed(&st));
    action.ticket = (ProtobufCBinaryData){.len = sizeof ticket, .data = ticket};
    q.id = 1;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_JOIN;
    q.join = &action;
    st = moe_packet_send(c->socket, bytes, moe__v1__regions_request__pack(&q, bytes), descriptor);
    close(descriptor);
    MOE_INVARIANT(!moe_failed(&st));
    await_reply(c, 1, false);
    MOE_INVARIANT(!c->ended);
    moe_ring_caller_init(&c->caller, ring);
}

/* ------------------------------------------------------------------ steps */

static void put_ticket(uint8_t *bytes, size_t length)
{
    const struct moe_region_owner owner = {.identity = "uid:2"}; /* many stay unused */
    uint8_t *at = memmem(bytes, length, ticket_text, MOE_REGION_TICKET);
    if (at == NULL)
        return;
    struct moe_status st = moe_region_host_invite(host, &owner, at);
    MOE_INVARIANT(!moe_failed(&st) || st.reason == MOE_REASON_QUEUE_FULL);
}

static void send_packet(struct connection *c, unsigned kind, uint8_t *bytes, size_t length)
{
    const int descriptors[] = {-1,       good_memory[0], good_memory[0],
                               unsealed, null_device,    good_memory[1]};
    struct moe_rpc_arena arena;
    void *message;
    if (c->ended || length == 0)
        return;
    put_ticket(bytes, length);
    struct moe_status st = moe_packet_send(c->socket, bytes, length, descriptors[kind]);
    if (moe_failed(&st) || (length == 1 && descriptors[kind] < 0))
        return;
    st = moe_rpc_unpack(&moe__v1__regions_request__descriptor, bytes, length, &arena, &message);
    const Moe__V1__RegionsRequest *q = moe_failed(&st) ? NULL : message;
    const bool adds =
        q != NULL && q->id != 0 && q->action_case == MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    /* Others may end a region, or the connection: behind the last request that uses it. */
    if (!adds)
        let_all_end();
    await_reply(c, q != NULL ? q->id : 0, adds);
}

static void write_ring(struct connection *c, uint32_t entry, const uint8_t *bytes, size_t length,
                       bool wakes)
{
    struct moe_ring_request q = {0};
    if (c->caller.ring == NULL)
        return;
    memcpy(&q, bytes, length < sizeof q ? length : sizeof q);
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        if (q.tensors[i].region != 0 && q.tensors[i].region <= c->count)
            q.tensors[i].region = c->numbers[q.tensors[i].region - 1];
    (void)moe_ring_caller_submit(&c->caller, entry % MOE_RING_ENTRIES, &q);
    if (wakes && !c->ended)
        moe_packet_wake(c->socket);
}

/* The end of a connection frees all. */
static void leave(struct connection *c)
{
    const uint64_t limit = moe_clock_ns() + LIMIT_S * MOE_NS_PER_S;
    struct moe_region_counters n;
    close(c->socket);
    let_all_end();
    do {
        MOE_INVARIANT(moe_clock_ns() < limit);
        moe_region_host_read_counters(host, &n);
    } while (n.clients > 0 || n.bytes > 0 || n.in_flight > 0 || next_descriptor() != first_free);
    if (c->caller.ring != NULL)
        munmap(c->caller.ring, sizeof(struct moe_ring));
}

/* A client that keeps the rules is served. */
static void serve_good(void)
{
    uint8_t bytes[64];
    struct connection c;
    enum moe_code code = MOE_UNKNOWN;
    Moe__V1__AddRegion action = MOE__V1__ADD_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    struct moe_ring_request request = {.tokens = 2, .hidden = HIDDEN, .dtype = MOE_DTYPE_F32};
    const uint64_t limit = moe_clock_ns() + LIMIT_S * MOE_NS_PER_S;
    connect_to_host(&c);
    join(&c);
    action.name = (char *)(uintptr_t) "good";
    q.id = 2;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    q.add = &action;
    send_packet(&c, 1, bytes, moe__v1__regions_request__pack(&q, bytes));
    MOE_INVARIANT(!c.ended && c.count == 1);
    request.tensors[MOE_RING_X] = (struct moe_ring_tensor){0, 2 * HIDDEN * 4, 1, 0};
    request.tensors[MOE_RING_Y] = (struct moe_ring_tensor){1024, 2 * HIDDEN * 4, 1, 0};
    write_ring(&c, 7, (const uint8_t *)&request, sizeof request, true);
    while (!moe_ring_caller_poll(&c.caller, 7, &code))
        MOE_INVARIANT(moe_clock_ns() < limit);
    MOE_INVARIANT(code == MOE_OK);
    leave(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned inputs;
    struct connection c;
    if (host == NULL) {
        open_world();
        atexit(close_world);
    }
    connect_to_host(&c);
    if (size > 0 && data[0] % 4 != 0) /* a quarter does not join */
        join(&c);
    for (size_t at = 1; at < size;) {
        const unsigned step = data[at] & 7;
        const bool wakes = data[at] & 16;
        pthread_mutex_lock(&lock);
        holds = (data[at] & 8) != 0;
        pthread_mutex_unlock(&lock);
        at++;
        if (step == 7) {
            end_all();
            continue;
        }
        const uint32_t entry = step == 6 && at < size ? data[at++] : 0;
        size_t length = at < size ? data[at++] : 0;
        uint8_t bytes[256];
        length = length < size - at ? length : size - at;
        memcpy(bytes, data + at, length);
        at += length;
        if (step == 6)
            write_ring(&c, entry, bytes, length, wakes);
        else
            send_packet(&c, step, bytes, length);
    }
    leave(&c);
    if (inputs++ % 64 == 0)
        serve_good();
    return 0;
}

/* ------------------------------------------------------------------ seeds */

static uint8_t seed[4096];
static size_t seed_length;

static void add_packet(uint8_t step, Moe__V1__RegionsRequest *q)
{
    q->id = seed_length;
    seed[seed_length++] = step;
    seed[seed_length] = (uint8_t)moe__v1__regions_request__get_packed_size(q);
    seed_length += 1 + moe__v1__regions_request__pack(q, seed + seed_length + 1);
}

static void add_region(uint8_t step, const char *name)
{
    Moe__V1__AddRegion action = MOE__V1__ADD_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.name = (char *)(uintptr_t)name;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    q.add = &action;
    add_packet(step, &q);
}

static void add_remove(const char *name)
{
    Moe__V1__RemoveRegion action = MOE__V1__REMOVE_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.name = (char *)(uintptr_t)name;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_REMOVE;
    q.remove = &action;
    add_packet(0, &q);
}

static void add_show(void)
{
    Moe__V1__ShowRegions action = MOE__V1__SHOW_REGIONS__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_SHOW;
    q.show = &action;
    add_packet(0, &q);
}

static void add_join(void)
{
    Moe__V1__JoinRegions action = MOE__V1__JOIN_REGIONS__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.ticket =
        (ProtobufCBinaryData){.len = MOE_REGION_TICKET, .data = (uint8_t *)(uintptr_t)ticket_text};
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_JOIN;
    q.join = &action;
    add_packet(5, &q);
}

static void add_request(uint8_t flags, uint8_t entry, uint32_t y_region, uint64_t y_at)
{
    struct moe_ring_request q = {.tokens = 4, .hidden = HIDDEN, .dtype = MOE_DTYPE_F32};
    q.tensors[MOE_RING_X] = (struct moe_ring_tensor){0, 4 * HIDDEN * 4, 1, 0};
    q.tensors[MOE_RING_Y] = (struct moe_ring_tensor){y_at, 4 * HIDDEN * 4, y_region, 0};
    const size_t length = offsetof(struct moe_ring_request, tensors[MOE_RING_Y + 1]);
    seed[seed_length++] = 6 | flags;
    seed[seed_length++] = entry;
    seed[seed_length++] = (uint8_t)length;
    memcpy(seed + seed_length, &q, length);
    seed_length += length;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    seed_length = 0;
    seed[seed_length++] = i != 0;
    switch (i) {
    case 0: add_join(); break;
    case 1:
        add_region(1, "a");
        add_region(2, "b"); /* the same memory */
        add_region(5, "b");
        add_region(3, "c");
        add_show();
        break;
    case 2: /* two in flight that overlap; then one is removed */
        add_region(1, "a");
        add_region(5, "b");
        add_request(8 | 16, 0, 2, 0);
        add_request(8 | 16, 1, 2, 64);
        add_request(16, 2, 2, 4096);
        add_remove("b");
        add_request(16, 3, 2, 0);
        break;
    case 3:
        add_region(5, "a");
        for (uint8_t n = 0; n < 6; n++)
            add_request(n % 2 ? 8 | 16 : 16, n, 1, 512 + UINT64_C(256) * n);
        seed[seed_length++] = 7;
        add_show();
        break;
    default: return 0;
    }
    *data = seed;
    return seed_length;
}
