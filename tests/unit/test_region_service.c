/* SPDX-License-Identifier: Apache-2.0 */
/* Clients that break the rules of shared memory: each gets typed errors or loses its connection,
 * and the service serves on. The tear-down of each test checks that nothing stays mapped. */
#include "base/clock.h"
#include "base/wait.h"
#include "daemon/progress.h"
#include "regions/memory.h"
#include "regions/packet.h"
#include "regions/tickets.h"
#include "shared_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { H = 24, K = 2, REGION = 64 << 10 };

/* For what a busy machine may delay. */
#define LIMIT_NS (20 * MOE_NS_PER_S)

/* A good request of 3 tokens in a region of REGION bytes; ids and weights are returned. */
static struct moe_ring_request good(uint32_t region)
{
    const uint32_t tokens = 3;
    struct moe_ring_request q = {
        .layer = 1, .tokens = tokens, .hidden = H, .timeout_ms = 5000, .dtype = MOE_DTYPE_F32};
    const struct {
        enum moe_ring_role role;
        uint64_t offset, bytes;
    } tensors[] = {{MOE_RING_X, 0, tokens * H * 4},
                   {MOE_RING_Y, 4096, tokens * H * 4},
                   {MOE_RING_IDS_OUT, 8192, tokens * K * 4},
                   {MOE_RING_WEIGHTS_OUT, 12288, tokens * K * 4},
                   {MOE_RING_TOKEN_STATE, 16384, tokens}};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        q.tensors[tensors[i].role] = (struct moe_ring_tensor){
            .offset = tensors[i].offset, .bytes = tensors[i].bytes, .region = region};
    return q;
}

static void add_routing(struct moe_ring_request *q, uint32_t region)
{
    q->routing = MOE_ROUTE_IDS_WEIGHTS;
    q->tensors[MOE_RING_IDS] =
        (struct moe_ring_tensor){.offset = 20480, .bytes = q->tokens * K * 4, .region = region};
    q->tensors[MOE_RING_WEIGHTS] =
        (struct moe_ring_tensor){.offset = 24576, .bytes = q->tokens * K * 4, .region = region};
}

/* -------------------------------------------------------------------- connections */

static void only_a_fresh_ticket_lets_a_client_in(void **state)
{
    (void)state;
    struct raw r, again;
    uint8_t ticket[16], wrong[16] = {1};
    int ring;
    void *memory;
    assert_ok(moe_region_memory_create(sizeof(struct moe_ring), &ring, &memory));
    raw_connect(&r);
    assert_refused(raw_send_join(&r, wrong, sizeof wrong, ring), MOE_UNAUTHENTICATED,
                   MOE_REASON_NONE);
    assert_true(raw_has_ended(&r));
    close(r.socket);
    raw_connect(&r);
    raw_ticket(ticket);
    assert_ok(raw_send_join(&r, ticket, sizeof ticket, ring));
    raw_connect(&again);
    assert_refused(raw_send_join(&again, ticket, sizeof ticket, ring), MOE_UNAUTHENTICATED,
                   MOE_REASON_NONE);
    close(again.socket);
    raw_connect(&again); /* before it joins, a client may do nothing else */
    assert_int_equal(raw_add(&again, "data", ring, NULL).code, MOE_UNAVAILABLE);
    close(again.socket);
    close(r.socket);
    close(ring);
    moe_region_memory_unmap(memory, sizeof(struct moe_ring));
}

static void a_bad_ring_is_refused(void **state)
{
    (void)state;
    struct raw r;
    uint8_t ticket[16];
    int small;
    void *memory;
    assert_ok(moe_region_memory_create(4096, &small, &memory));
    raw_connect(&r);
    raw_ticket(ticket);
    assert_refused(raw_send_join(&r, ticket, sizeof ticket, small), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    close(r.socket);
    raw_connect(&r);
    raw_ticket(ticket);
    assert_refused(raw_send_join(&r, ticket, sizeof ticket, -1), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    close(r.socket);
    close(small);
    moe_region_memory_unmap(memory, 4096);
}

/* A packet that is no message ends its connection, and no other. */
static void garbage_ends_its_own_connection(void **state)
{
    (void)state;
    struct raw bystander;
    uint32_t region;
    raw_join(&bystander);
    void *data = raw_region(&bystander, "data", REGION, &region);
    for (int i = 0; i < 200; i++) {
        struct raw r;
        uint8_t bytes[64];
        size_t length = 2 + random_below(sizeof bytes - 2);
        for (size_t b = 0; b < length; b++)
            bytes[b] = (uint8_t)random_bits();
        if (i % 2 == 0) {
            raw_join(&r);
        } else {
            raw_connect(&r);
        }
        struct moe_status st = moe_packet_send(r.socket, bytes, length, -1);
        bytes[0] = 0; /* no field has this tag */
        for (int more = 0; more < 2 && !moe_failed(&st); more++)
            st = moe_packet_send(r.socket, bytes, length, i % 3 == 0 ? 0 : -1);
        assert_true(raw_has_ended(&r));
        close(r.socket);
        if (i % 2 == 0)
            moe_region_memory_unmap(r.caller.ring, sizeof(struct moe_ring));
    }
    struct moe_ring_request q = good(region);
    assert_ok(raw_forward(&bystander, &q));
    raw_leave(&bystander);
    munmap(data, REGION);
}

/* Both clients have the identity of raw TCP. The first one asks again and again and does not come.
 */
static void tickets_of_one_connection_keep_no_other_out(void **state)
{
    (void)state;
    struct moe_rpc_client *client;
    struct moe_rpc_channel *channel;
    struct raw r;
    uint8_t ticket[16], unused[16];
    int ring;
    void *memory;
    service_connect(&shared, &client, &channel);
    assert_ok(moe_region_memory_create(sizeof(struct moe_ring), &ring, &memory));
    for (int i = 0; i < MOE_REGION_TICKETS_EACH; i++)
        raw_ticket(unused);
    raw_ticket_over(channel, ticket);
    for (int i = 0; i < 2 * MOE_REGION_TICKETS; i++)
        raw_ticket(unused);
    raw_connect(&r);
    assert_ok(raw_send_join(&r, ticket, sizeof ticket, ring));
    close(r.socket);
    close(ring);
    moe_region_memory_unmap(memory, sizeof(struct moe_ring));
    moe_rpc_channel_close(channel);
    moe_rpc_client_destroy(client);
}

static void connections_have_a_limit(void **state)
{
    (void)state;
    enum { LIMIT = 8 };
    struct raw all[LIMIT + 1];
    uint8_t ticket[16];
    int ring;
    void *memory;
    assert_ok(moe_region_memory_create(sizeof(struct moe_ring), &ring, &memory));
    for (int i = 0; i < LIMIT; i++)
        raw_join(&all[i]);
    raw_connect(&all[LIMIT]);
    raw_ticket(ticket);
    assert_refused(raw_send_join(&all[LIMIT], ticket, sizeof ticket, ring), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_REGION_LIMIT);
    close(all[LIMIT].socket);
    for (int i = 0; i < LIMIT; i++)
        raw_leave(&all[i]);
    close(ring);
    moe_region_memory_unmap(memory, sizeof(struct moe_ring));
}

/* -------------------------------------------------------------------- regions */

static int sealed(size_t bytes, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void bad_memory_is_refused(void **state)
{
    (void)state;
    struct raw r;
    uint32_t number;
    raw_join(&r);
#define refused(open, code, reason)                                                                \
    do {                                                                                           \
        int fd = open;                                                                             \
        assert_refused(raw_add(&r, "data", fd, &number), MOE_##code, MOE_REASON_##reason);         \
        if (fd >= 0)                                                                               \
            close(fd);                                                                             \
    } while (0)
    refused(-1, INVALID_ARGUMENT, REGION_INVALID);
    refused(open("/dev/null", O_RDWR | O_CLOEXEC), INVALID_ARGUMENT, REGION_INVALID);
    refused(sealed(4096, 0), INVALID_ARGUMENT, REGION_INVALID);
    refused(sealed(4096, F_SEAL_SHRINK | F_SEAL_GROW), INVALID_ARGUMENT, REGION_INVALID);
    refused(sealed(4096, F_SEAL_GROW | F_SEAL_SEAL), INVALID_ARGUMENT, REGION_INVALID);
    refused(sealed(0, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), INVALID_ARGUMENT, REGION_INVALID);
    refused(sealed(4096, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_WRITE),
            INVALID_ARGUMENT, REGION_INVALID);
    refused(sealed(SHARED_IDENTITY_BYTES, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
            RESOURCE_EXHAUSTED, REGION_LIMIT);
#undef refused
    int fd = sealed(4096, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    assert_ok(raw_add(&r, "data", fd, &number));
    assert_refused(raw_add(&r, "other", fd, &number), MOE_ALREADY_EXISTS,
                   MOE_REASON_REGION_EXISTS); /* the same memory */
    close(fd);
    fd = sealed(4096, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    assert_refused(raw_add(&r, "data", fd, &number), MOE_ALREADY_EXISTS, MOE_REASON_REGION_EXISTS);
    assert_refused(raw_add(&r, "-ring-", fd, &number), MOE_INVALID_ARGUMENT,
                   MOE_REASON_NAME_INVALID);
    assert_refused(raw_add(&r, ".data", fd, &number), MOE_INVALID_ARGUMENT,
                   MOE_REASON_NAME_INVALID);
    close(fd);
    assert_refused(raw_remove(&r, "none"), MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND);
    assert_refused(raw_remove(&r, "-ring-"), MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND);
    assert_ok(raw_remove(&r, "data"));
    raw_leave(&r);
}

static size_t open_descriptors(void)
{
    size_t count = 0;
    DIR *list = opendir("/proc/self/fd");
    assert_non_null(list);
    while (readdir(list) != NULL)
        count++;
    closedir(list);
    return count;
}

/* The service is in this process. */
static void the_descriptor_of_a_refused_region_is_closed(void **state)
{
    (void)state;
    struct raw r;
    uint32_t number;
    Moe__V1__AddRegion add = MOE__V1__ADD_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    add.name = (char *)(uintptr_t) "next";
    add.kind = (Moe__V1__RegionKind)99; /* of a later release, perhaps */
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    q.add = &add;
    raw_join(&r);
    int fd = sealed(4096, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    size_t before = open_descriptors();
    for (int i = 0; i < 20; i++) {
        assert_refused(raw_ask(&r, &q, fd, &number), MOE_INVALID_ARGUMENT,
                       MOE_REASON_REGION_INVALID);
        assert_refused(raw_add(&r, "-ring-", fd, &number), MOE_INVALID_ARGUMENT,
                       MOE_REASON_NAME_INVALID);
        assert_refused(raw_add(&r, "a/b", fd, &number), MOE_INVALID_ARGUMENT,
                       MOE_REASON_NAME_INVALID);
    }
    assert_int_equal(open_descriptors(), before);
    close(fd);
    raw_leave(&r);
}

static void a_client_cannot_use_a_region_of_another(void **state)
{
    (void)state;
    struct raw owner, thief;
    uint32_t theirs, own;
    raw_join(&owner);
    raw_join(&thief);
    void *a = raw_region(&owner, "data", REGION, &theirs);
    void *b = raw_region(&thief, "data", REGION, &own);
    struct moe_ring_request q = good(own);
    assert_ok(raw_forward(&thief, &q));
    q.tensors[MOE_RING_Y].region = theirs;
    assert_refused(raw_forward(&thief, &q), MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND);
    assert_ok(raw_remove(&thief, "data")); /* its own, not the owner's */
    q = good(own);
    assert_refused(raw_forward(&thief, &q), MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND);
    q = good(theirs);
    assert_ok(raw_forward(&owner, &q));
    raw_leave(&owner);
    raw_leave(&thief);
    munmap(a, REGION);
    munmap(b, REGION);
}

/* -------------------------------------------------------------------- memory that changes */

struct scribbler {
    pthread_t thread;
    uint32_t *at;
    size_t words;
    uint32_t value; /* 0 = random */
    _Atomic bool stop;
};

static void *scribble(void *arg)
{
    struct scribbler *s = arg;
    struct rng rng = {.state = 7};
    while (!atomic_load(&s->stop))
        for (size_t i = 0; i < s->words; i++)
            __atomic_store_n(&s->at[i], s->value != 0 ? s->value : (uint32_t)rng_next(&rng),
                             __ATOMIC_RELAXED);
    return NULL;
}

static void start_scribbling(struct scribbler *s, void *at, size_t bytes, uint32_t value)
{
    *s = (struct scribbler){.at = at, .words = bytes / 4, .value = value};
    assert_int_equal(pthread_create(&s->thread, NULL, scribble, s), 0);
}

static void stop_scribbling(struct scribbler *s)
{
    atomic_store(&s->stop, true);
    pthread_join(s->thread, NULL);
}

/* Ids in the client's memory change between check and use, and while a step computes: an id that is
 * no expert would be an index far outside of the experts' memory. */
static void ids_that_change_after_their_check_do_no_harm(void **state)
{
    (void)state;
    struct raw r;
    uint32_t region, good_ones = 0, refused = 0;
    struct scribbler in, out;
    raw_join(&r);
    char *data = raw_region(&r, "data", REGION, &region);
    struct moe_ring_request q = good(region);
    add_routing(&q, region);
    start_scribbling(&out, data + 8192, 3 * K * 4, 0x7ffffff0); /* ids_out */
    for (int i = 0; i < 2000; i++)
        assert_ok(raw_forward(&r, &q));
    start_scribbling(&in, data + 20480, 4, 0x7ffffff0);
    const uint64_t begin = moe_clock_ns(), enough = begin + 500 * MOE_NS_PER_MS;
    while (moe_clock_ns() < enough || (refused == 0 && moe_clock_ns() < begin + LIMIT_NS)) {
        __atomic_store_n((uint32_t *)(void *)(data + 20480), 0, __ATOMIC_RELAXED);
        struct moe_status st = raw_forward(&r, &q);
        if (moe_failed(&st)) {
            assert_int_equal(st.reason, MOE_REASON_EXPERT_INDEX_RANGE);
            refused++;
        } else {
            good_ones++;
        }
    }
    print_message("  %u answered, %u refused\n", good_ones, refused);
    assert_true(refused > 0);
    stop_scribbling(&in);
    stop_scribbling(&out);
    raw_leave(&r);
    munmap(data, REGION);
}

/* The requests in the ring change while the worker reads them. Whatever it reads is answered. */
static void a_ring_that_changes_while_it_is_read_does_no_harm(void **state)
{
    (void)state;
    struct raw r;
    uint32_t region, by_code[MOE_UNAUTHENTICATED + 1] = {0};
    struct scribbler s;
    raw_join(&r);
    void *data = raw_region(&r, "data", REGION, &region);
    struct moe_ring_request q = good(region);
    start_scribbling(&s, &r.caller.ring->requests[0].tokens, 8, 0); /* tokens and hidden */
    const uint64_t end = moe_clock_ns() + LIMIT_NS;
    for (int i = 0; i < 2000 || (by_code[MOE_INVALID_ARGUMENT] == 0 && moe_clock_ns() < end); i++)
        by_code[raw_forward(&r, &q).code]++;
    stop_scribbling(&s);
    start_scribbling(&s, r.caller.ring->requests, sizeof r.caller.ring->requests, 0);
    for (int i = 0; i < 2000; i++)
        by_code[raw_forward(&r, &q).code]++;
    stop_scribbling(&s);
    for (int code = 0; code <= MOE_UNAUTHENTICATED; code++)
        if (by_code[code] > 0)
            print_message("  %u %s\n", by_code[code], moe_code_name((enum moe_code)code));
    assert_true(by_code[MOE_INVALID_ARGUMENT] > 0);
    assert_ok(raw_forward(&r, &q));
    raw_leave(&r);
    munmap(data, REGION);
}

struct puncher {
    int descriptor;
    _Atomic bool stop;
};

/* Memory that a client cannot shrink can have holes all the same: pages that it gives back to the
 * system while requests read and write them. They read as zeros, and no access is a signal. */
static void *punch(void *arg)
{
    const struct puncher *p = arg;
    while (!atomic_load(&p->stop))
        (void)fallocate(p->descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, REGION);
    return NULL;
}

static void memory_that_is_punched_under_a_request_does_no_harm(void **state)
{
    (void)state;
    struct raw r, quiet;
    struct puncher p = {.stop = false};
    pthread_t thread;
    uint32_t region, other;
    void *data;
    raw_join(&r);
    raw_join(&quiet);
    void *calm = raw_region(&quiet, "data", REGION, &other);
    assert_ok(moe_region_memory_create(REGION, &p.descriptor, &data));
    assert_ok(raw_add(&r, "data", p.descriptor, &region));
    assert_int_not_equal(ftruncate(p.descriptor, 0), 0); /* the seals hold */
    const struct moe_ring_request q = good(region), next = good(other);
    assert_int_equal(pthread_create(&thread, NULL, punch, &p), 0);
    for (int i = 0; i < 500; i++) {
        assert_ok(raw_forward(&r, &q));
        assert_ok(raw_forward(&quiet, &next));
    }
    atomic_store(&p.stop, true);
    pthread_join(thread, NULL);
    close(p.descriptor);
    raw_leave(&r);
    raw_leave(&quiet);
    munmap(data, REGION);
    munmap(calm, REGION);
}

/* All of the ring is random, sequence numbers too; another client is served meanwhile. */
static void a_ring_of_noise_costs_its_own_client(void **state)
{
    (void)state;
    struct raw noisy, quiet;
    uint32_t region;
    struct scribbler s;
    raw_join(&noisy);
    raw_join(&quiet);
    void *data = raw_region(&quiet, "data", REGION, &region);
    struct moe_ring_request q = good(region);
    start_scribbling(&s, noisy.caller.ring, sizeof *noisy.caller.ring, 0);
    for (int i = 0; i < 200; i++) {
        moe_packet_wake(noisy.socket);
        assert_ok(raw_forward(&quiet, &q));
    }
    stop_scribbling(&s);
    raw_leave(&noisy);
    raw_leave(&quiet);
    munmap(data, REGION);
}

/* -------------------------------------------------------------------- leaving */

/* The tear-down checks that all is freed. */
static void a_client_may_leave_at_any_time(void **state)
{
    (void)state;
    struct raw r;
    uint32_t region;
    raw_connect(&r); /* without a ticket */
    close(r.socket);
    raw_join(&r); /* without a region */
    raw_leave(&r);
    raw_join(&r); /* with a region */
    munmap(raw_region(&r, "data", REGION, &region), REGION);
    shared_await_status("data", MOE__V1__REGION_STATUS__REGION_STATUS_OPEN);
    raw_leave(&r);
    shared_await_metric("moe_regions_bytes", 0);
    raw_join(&r); /* while a large one is being mapped */
    int fd = sealed(8 << 20, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    Moe__V1__AddRegion add = MOE__V1__ADD_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    uint8_t bytes[64];
    add.name = (char *)(uintptr_t) "large";
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    q.add = &add;
    assert_ok(moe_packet_send(r.socket, bytes, moe__v1__regions_request__pack(&q, bytes), fd));
    close(fd);
    raw_leave(&r);
    shared_await_metric("moe_regions_bytes", 0);
}

/* Queued requests of a client that leaves are cancelled; then its memory is freed. */
static void a_client_may_leave_with_requests_in_flight(void **state)
{
    (void)state;
    struct raw r;
    uint32_t region;
    raw_join(&r);
    void *data = raw_region(&r, "data", REGION, &region);
    struct moe_ring_request q = good(region);
    shared_pause_view();
    raw_submit(&r, 5, &q);
    shared_await_metric("moe_regions_in_flight", 1);
    raw_leave(&r);
    munmap(data, REGION);
    shared_await_metric("moe_regions_in_flight", 0);
    shared_await_metric("moe_regions_bytes", 0);
    shared_resume_view();
}

/* The budget of an identity counts all of its connections, and is given back. */
static void budgets_are_given_back(void **state)
{
    (void)state;
    struct raw a, b;
    uint32_t number;
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    for (int i = 0; i < 20; i++) {
        raw_join(&a);
        raw_join(&b);
        int first = sealed(SHARED_IDENTITY_BYTES - (1 << 20), seals),
            second = sealed(1 << 20, seals);
        assert_ok(raw_add(&a, "data", first, &number));
        struct moe_status st = raw_add(&b, "data", second, &number);
        assert_int_equal(st.reason, MOE_REASON_REGION_LIMIT);
        raw_leave(&a);
        raw_leave(&b);
        close(first);
        close(second);
        shared_await_metric("moe_regions_bytes", 0);
    }
}

/* The thread is at a place while it works, and idle while it sleeps: then it is not stuck, however
 * long that takes. */
static void the_thread_is_judged_while_it_works(void **state)
{
    (void)state;
    struct raw r;
    struct moe_health v;
    uint32_t region;
    uint64_t now = moe_clock_ns();
    raw_join(&r);
    void *data = raw_region(&r, "data", REGION, &region);
    struct moe_ring_request q = good(region);
    assert_ok(raw_forward(&r, &q));
    moe_progress_judge(shared_progress, now, &v);
    assert_int_equal(v.count, 1);
    assert_string_equal(v.lines[0].name, "regions");
    while (!__atomic_load_n(&r.caller.ring->sleeps, __ATOMIC_SEQ_CST))
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    moe_sleep_until(moe_clock_ns() + 50 * MOE_NS_PER_MS); /* from the flag to the sleep */
    for (int i = 0; i < 100; i++)
        moe_progress_judge(shared_progress, now += MOE_NS_PER_S, &v);
    assert_true(v.alive && v.ready);
    assert_null(v.lines[0].code);
    raw_leave(&r);
    munmap(data, REGION);
}

#define shared_test(f) cmocka_unit_test_setup_teardown(f, shared_open, shared_close)

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        shared_test(only_a_fresh_ticket_lets_a_client_in),
        shared_test(a_bad_ring_is_refused),
        shared_test(garbage_ends_its_own_connection),
        shared_test(tickets_of_one_connection_keep_no_other_out),
        shared_test(connections_have_a_limit),
        shared_test(bad_memory_is_refused),
        shared_test(the_descriptor_of_a_refused_region_is_closed),
        shared_test(a_client_cannot_use_a_region_of_another),
        shared_test(ids_that_change_after_their_check_do_no_harm),
        shared_test(a_ring_that_changes_while_it_is_read_does_no_harm),
        shared_test(memory_that_is_punched_under_a_request_does_no_harm),
        shared_test(a_ring_of_noise_costs_its_own_client),
        shared_test(a_client_may_leave_at_any_time),
        shared_test(a_client_may_leave_with_requests_in_flight),
        shared_test(budgets_are_given_back),
        shared_test(the_thread_is_judged_while_it_works),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
