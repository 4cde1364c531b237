/* SPDX-License-Identifier: Apache-2.0 */
/* Each bad region and each bad request gets one typed error and changes nothing; budgets and
 * references add up; memory without its seals is refused. */
#include "base/sealed.h"
#include "moe/types.h"
#include "regions/checks.h"
#include "regions/mapper.h"
#include "regions/memory.h"
#include "regions/registry.h"
#include "support/check.h"
#include "support/random.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { T = 4, H = 32, K = 2, REGION_BYTES = 8192 };
enum { IDENTITY_BYTES = 4 * REGION_BYTES };

static const struct moe_ring_layer layer = {.hidden = H, .top_k = K, .max_tokens = 1 << 20};
static const struct moe_regions_limits limits = {.bytes = 10 * REGION_BYTES,
                                                 .identity_bytes = IDENTITY_BYTES,
                                                 .identity_clients = 2,
                                                 .client_regions = 3};
static struct moe_regions *r;
static uint32_t client, region;
static char memory[REGION_BYTES];

static uint32_t add(uint32_t to, const char *name, uint64_t inode)
{
    struct moe_region_spec spec = {.name = name, .bytes = REGION_BYTES, .inode = inode};
    uint32_t number;
    assert_ok(moe_regions_reserve(r, to, &spec, &number));
    moe_regions_commit(r, number, memory);
    return number;
}

static int start(void **state)
{
    (void)state;
    r = calloc(1, sizeof *r);
    assert_non_null(r);
    moe_regions_init(r, &limits);
    assert_ok(moe_regions_join(r, "uid:1", &client));
    region = add(client, "data", 1);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    free(r);
    return 0;
}

static void place(struct moe_ring_request *q, enum moe_ring_role role, uint64_t offset,
                  uint64_t bytes)
{
    q->tensors[role] = (struct moe_ring_tensor){.region = region, .offset = offset, .bytes = bytes};
}

/* All seven tensors, one after the other. */
static struct moe_ring_request good_request(void)
{
    struct moe_ring_request q = {
        .tokens = T, .hidden = H, .dtype = MOE_DTYPE_BF16, .routing = 2, .timeout_ms = 100};
    place(&q, MOE_RING_X, 0, T * H * 2);
    place(&q, MOE_RING_IDS, 512, T * K * 4);
    place(&q, MOE_RING_WEIGHTS, 1024, T * K * 4);
    place(&q, MOE_RING_Y, 2048, T * H * 2);
    place(&q, MOE_RING_IDS_OUT, 4096, T * K * 4);
    place(&q, MOE_RING_WEIGHTS_OUT, 5120, T * K * 4);
    place(&q, MOE_RING_TOKEN_STATE, REGION_BYTES - 16, T);
    return q;
}

static void good_requests_pass(void **state)
{
    (void)state;
    struct moe_ring_request q = good_request(), none = {.hidden = H, .dtype = MOE_DTYPE_F32};
    void *at[MOE_RING_ROLES];
    uint32_t use;
    assert_ok(moe_ring_check(&q, &layer));
    assert_ok(moe_regions_take(r, client, q.tensors, at, &use));
    assert_ptr_equal(at[MOE_RING_Y], memory + 2048);
    moe_regions_put(r, client, use);
    assert_ok(moe_ring_check(&none, &layer)); /* T = 0 */
    q.routing = MOE_RING_ROUTE_TOKEN_IDS;
    memset(&q.tensors[MOE_RING_WEIGHTS], 0, sizeof q.tensors[0]);
    place(&q, MOE_RING_IDS, 512, T * 8);
    assert_ok(moe_ring_check(&q, &layer));
    assert_ok(moe_regions_take(r, client, none.tensors, at, &use));
    assert_null(at[MOE_RING_X]);
    moe_regions_put(r, client, use);
}

/* ------------------------------------------------------------- bad shapes and formats */

static void bad_requests_are_refused(void **state)
{
    (void)state;
    struct moe_ring_request q;
#define refused(change, why)                                                                       \
    q = good_request();                                                                            \
    change;                                                                                        \
    assert_refused(moe_ring_check(&q, &layer), MOE_INVALID_ARGUMENT, MOE_REASON_##why)
    refused(q.dtype = 0, DTYPE_UNSUPPORTED);
    refused(q.dtype = 7, DTYPE_UNSUPPORTED);
    refused(q.routing = 4, ROUTING_INVALID);
    refused(q.routing = 3, ROUTING_INVALID); /* with weights */
    refused((q.routing = 3, memset(&q.tensors[MOE_RING_WEIGHTS], 0, sizeof q.tensors[0]),
             place(&q, MOE_RING_IDS, 512, T * 8 - 8)),
            SHAPE_MISMATCH);
    refused(q.routing = 0, ROUTING_INVALID);
    refused(q.routing = 1, ROUTING_INVALID);
    refused(q.reserved[1] = 1, VALUE_INVALID);
    refused(q.parts = 3, VALUE_INVALID);
    refused(q.parts = MOE_PARTS_SHARED, ROUTING_INVALID);
    refused((q.parts = MOE_PARTS_SHARED, q.routing = 0), ROUTING_INVALID); /* with ids_out */
    refused(q.tensors[MOE_RING_Y].reserved = 1, VALUE_INVALID);
    refused(q.tensors[MOE_RING_X].region = 0, VALUE_INVALID); /* absent, but with bytes */
    refused(q.tensors[MOE_RING_TOKEN_STATE].region = 0, VALUE_INVALID);
    refused(q.hidden = H + 1, SHAPE_MISMATCH);
    refused(q.tokens = T + 1, SHAPE_MISMATCH);
    refused(q.tokens = 0, SHAPE_MISMATCH);
    refused(q.tokens = UINT32_MAX, TOKEN_LIMIT);
    refused(q.dtype = MOE_DTYPE_F32, SHAPE_MISMATCH); /* bf16 rows sent as f32 */
    refused(q.tensors[MOE_RING_X].bytes = 2 * T * H * 2, SHAPE_MISMATCH); /* rows with a stride */
    refused(q.tensors[MOE_RING_WEIGHTS].bytes -= 4, SHAPE_MISMATCH);
    refused(memset(&q.tensors[MOE_RING_X], 0, sizeof q.tensors[0]), SHAPE_MISMATCH);
    refused(memset(&q.tensors[MOE_RING_Y], 0, sizeof q.tensors[0]), SHAPE_MISMATCH);
    refused(memset(&q.tensors[MOE_RING_IDS_OUT], 0, sizeof q.tensors[0]), ROUTING_INVALID);
#undef refused
}

/* A size that does not fit 64 bits is not computed. */
static void sizes_do_not_wrap(void **state)
{
    (void)state;
    const struct moe_ring_layer huge = {.hidden = UINT32_MAX, .top_k = K, .max_tokens = UINT32_MAX};
    struct moe_ring_request q = good_request();
    q.hidden = q.tokens = UINT32_MAX;
    assert_refused(moe_ring_check(&q, &huge), MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE);
}

/* ------------------------------------------------------------------------ bad tensors */

static void take_refuses(const struct moe_ring_request *q, enum moe_code code,
                         enum moe_reason reason)
{
    void *at[MOE_RING_ROLES];
    uint32_t use, cursor = 0;
    struct moe_region_info info;
    assert_refused(moe_regions_take(r, client, q->tensors, at, &use), code, reason);
    while (moe_regions_next(r, client, &cursor, &info))
        assert_int_equal(info.references, 0);
}

static void tensors_outside_of_a_region_are_refused(void **state)
{
    (void)state;
    const uint64_t offsets[] = {REGION_BYTES, REGION_BYTES - T * H * 2 + 16, UINT64_MAX - 15,
                                UINT64_MAX - T * H * 2 + 1, (uint64_t)1 << 63};
    for (size_t i = 0; i < sizeof offsets / sizeof offsets[0]; i++) {
        struct moe_ring_request q = good_request();
        q.tensors[MOE_RING_Y].offset = offsets[i];
        take_refuses(&q, MOE_OUT_OF_RANGE, MOE_REASON_REGION_RANGE);
    }
    struct moe_ring_request q = good_request();
    q.tensors[MOE_RING_X].offset = 8;
    take_refuses(&q, MOE_OUT_OF_RANGE, MOE_REASON_REGION_RANGE);
}

static void regions_of_others_are_refused(void **state)
{
    (void)state;
    uint32_t other, ring;
    struct moe_region_spec spec = {
        .name = "ring", .bytes = sizeof(struct moe_ring), .inode = 7, .is_ring = true};
    r->limits.identity_bytes = r->limits.bytes;
    assert_ok(moe_regions_join(r, "uid:2", &other));
    uint32_t foreign = add(other, "data", 1);
    assert_ok(moe_regions_reserve(r, other, &spec, &ring));
    const uint32_t numbers[] = {foreign, ring, region + MOE_REGIONS_MAX, region + 1, UINT32_MAX, 1};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        struct moe_ring_request q = good_request();
        q.tensors[MOE_RING_IDS_OUT].region = numbers[i];
        take_refuses(&q, MOE_NOT_FOUND, MOE_REASON_REGION_NOT_FOUND);
    }
}

/* The kernel does not say which memory of a device it is. So two regions may be the same; both
 * count in budgets. */
static void memory_of_a_device_has_no_identity(void **state)
{
    (void)state;
    const char *const names[] = {"first", "second"};
    uint32_t numbers[2];
    const uint64_t before = moe_regions_bytes(r, NULL);
    for (size_t i = 0; i < 2; i++) {
        const struct moe_region_spec spec = {
            .name = names[i], .bytes = REGION_BYTES, .in_device = true};
        assert_ok(moe_regions_reserve(r, client, &spec, &numbers[i]));
        moe_regions_commit(r, numbers[i], memory);
        assert_true(moe_regions_in_device(r, numbers[i]));
    }
    assert_false(moe_regions_in_device(r, region));
    assert_true(moe_regions_bytes(r, NULL) == before + 2 * REGION_BYTES);
    struct moe_ring_request q = good_request();
    q.tensors[MOE_RING_X].region = numbers[0];
    q.tensors[MOE_RING_Y].region = numbers[1];
    void *at[MOE_RING_ROLES];
    uint32_t use;
    assert_ok(moe_regions_take(r, client, q.tensors, at, &use));
    moe_regions_put(r, client, use);
    q.tensors[MOE_RING_Y] = q.tensors[MOE_RING_X];
    take_refuses(&q, MOE_FAILED_PRECONDITION, MOE_REASON_REGION_OVERLAP);
}

static void outputs_that_overlap_are_refused(void **state)
{
    (void)state;
    struct moe_ring_request q = good_request(), later;
    void *at[MOE_RING_ROLES];
    uint32_t use, second;
    q.tensors[MOE_RING_Y].offset = q.tensors[MOE_RING_X].offset; /* in place */
    take_refuses(&q, MOE_FAILED_PRECONDITION, MOE_REASON_REGION_OVERLAP);
    q = good_request();
    q.tensors[MOE_RING_TOKEN_STATE].offset = 2048 + T * H * 2 - 16;
    take_refuses(&q, MOE_FAILED_PRECONDITION, MOE_REASON_REGION_OVERLAP);

    q = good_request();
    assert_ok(moe_regions_take(r, client, q.tensors, at, &use));
    for (size_t role = 0; role < MOE_RING_ROLES; role++) { /* alone against y in flight */
        later = (struct moe_ring_request){0};
        place(&later, (enum moe_ring_role)role, 2048 + 16, 16);
        assert_refused(moe_regions_take(r, client, later.tensors, at, &second),
                       MOE_FAILED_PRECONDITION, MOE_REASON_REGION_OVERLAP);
    }
    later = (struct moe_ring_request){0};
    place(&later, MOE_RING_X, 0, T * H * 2); /* two may read the same rows */
    place(&later, MOE_RING_Y, 2048 + T * H * 2, T * H * 2);
    assert_ok(moe_regions_take(r, client, later.tensors, at, &second));
    moe_regions_put(r, client, use);
    assert_ok(moe_regions_take(r, client, (struct moe_ring_tensor[MOE_RING_ROLES]){0}, at, &use));
    moe_regions_put(r, client, use);
    moe_regions_put(r, client, second);
}

static void a_client_has_so_many_requests_in_flight(void **state)
{
    (void)state;
    struct moe_ring_tensor none[MOE_RING_ROLES] = {0};
    void *at[MOE_RING_ROLES];
    uint32_t use;
    for (int i = 0; i < MOE_REGION_USES; i++)
        assert_ok(moe_regions_take(r, client, none, at, &use));
    assert_refused(moe_regions_take(r, client, none, at, &use), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    moe_regions_put(r, client, use == 0 ? 1 : 0);
    assert_ok(moe_regions_take(r, client, none, at, &use));
}

/* ------------------------------------------------------------------ life of a region */

static bool unmap_one(uint32_t *number)
{
    void *base;
    uint64_t bytes;
    uint32_t owner;
    if (!moe_regions_unused(r, number, &owner, &base, &bytes))
        return false;
    assert_int_equal(owner, client);
    assert_ptr_equal(base, memory);
    assert_int_equal(bytes, REGION_BYTES);
    return true;
}

static void unregistration_waits_for_requests(void **state)
{
    (void)state;
    struct moe_ring_request q = good_request();
    void *at[MOE_RING_ROLES];
    uint32_t use, closed, number;
    assert_ok(moe_regions_take(r, client, q.tensors, at, &use));
    assert_ok(moe_regions_close(r, client, "data", &closed));
    assert_int_equal(closed, region);
    assert_refused(moe_regions_close(r, client, "data", &closed), MOE_NOT_FOUND,
                   MOE_REASON_REGION_NOT_FOUND);
    assert_refused(moe_regions_take(r, client, q.tensors, at, &number), MOE_NOT_FOUND,
                   MOE_REASON_REGION_NOT_FOUND);
    assert_false(unmap_one(&number));
    moe_regions_put(r, client, use);
    assert_true(unmap_one(&number));
    assert_int_equal(number, region);
    assert_true(moe_regions_has(r, region)); /* the answer waits for this */
    assert_int_equal(moe_regions_bytes(r, NULL), REGION_BYTES);
    moe_regions_free(r, region);
    assert_false(moe_regions_has(r, region));
    assert_int_equal(moe_regions_bytes(r, NULL), 0);
    assert_int_not_equal(add(client, "data", 1), region); /* the same place, another number */
    assert_refused(moe_regions_take(r, client, q.tensors, at, &use), MOE_NOT_FOUND,
                   MOE_REASON_REGION_NOT_FOUND);
}

static void all_is_freed_when_a_client_leaves(void **state)
{
    (void)state;
    struct moe_region_spec late = {.name = "late", .bytes = REGION_BYTES, .inode = 2};
    struct moe_ring_request q = good_request();
    void *at[MOE_RING_ROLES];
    uint32_t use, number, reserved;
    assert_ok(moe_regions_take(r, client, q.tensors, at, &use));
    assert_ok(moe_regions_reserve(r, client, &late, &reserved)); /* being mapped */
    moe_regions_leave(r, client);
    assert_refused(moe_regions_reserve(r, client, &late, &number), MOE_UNAVAILABLE,
                   MOE_REASON_ABORTED);
    assert_refused(moe_regions_take(r, client, q.tensors, at, &number), MOE_UNAVAILABLE,
                   MOE_REASON_ABORTED);
    assert_false(unmap_one(&number));
    moe_regions_commit(r, reserved, memory);
    assert_true(unmap_one(&number));
    assert_int_equal(number, reserved);
    moe_regions_free(r, number);
    assert_false(moe_regions_forget(r, client));
    moe_regions_put(r, client, use);
    assert_true(unmap_one(&number));
    assert_false(moe_regions_forget(r, client));
    moe_regions_free(r, number);
    assert_true(moe_regions_forget(r, client));
    assert_int_equal(moe_regions_bytes(r, NULL), 0);
    assert_ok(moe_regions_join(r, "uid:1", &client));
}

/* A device may store completions there. */
static void a_ring_stays_while_a_request_is_in_flight(void **state)
{
    (void)state;
    const struct moe_region_spec ring = {
        .name = "ring", .bytes = sizeof(struct moe_ring), .charge = 1, .is_ring = true};
    const struct moe_ring_tensor none[MOE_RING_ROLES] = {0};
    void *at[MOE_RING_ROLES], *base;
    uint32_t number, use, unused, owner;
    uint64_t bytes;
    assert_ok(moe_regions_reserve(r, client, &ring, &number));
    moe_regions_commit(r, number, memory);
    assert_ok(moe_regions_take(r, client, none, at, &use));
    moe_regions_leave(r, client);
    assert_true(moe_regions_unused(r, &unused, &owner, &base, &bytes));
    assert_int_equal(unused, region);
    assert_false(moe_regions_unused(r, &unused, &owner, &base, &bytes));
    moe_regions_put(r, client, use);
    assert_true(moe_regions_unused(r, &unused, &owner, &base, &bytes));
    assert_int_equal(unused, number);
}

static void bad_registrations_are_refused(void **state)
{
    (void)state;
    uint32_t number, other;
    struct moe_region_spec spec;
#define refused(who, code, why, ...)                                                               \
    spec = (struct moe_region_spec){.name = "b", .bytes = REGION_BYTES, .inode = 99, __VA_ARGS__}; \
    assert_refused(moe_regions_reserve(r, who, &spec, &number), code, MOE_REASON_##why)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverride-init"
    refused(client, MOE_INVALID_ARGUMENT, NAME_INVALID, .name = "");
    refused(client, MOE_INVALID_ARGUMENT, NAME_INVALID, .name = "../x");
    refused(client, MOE_INVALID_ARGUMENT, NAME_INVALID, .name = ".x");
    refused(client, MOE_INVALID_ARGUMENT, REGION_INVALID, .bytes = 0);
    refused(client, MOE_INVALID_ARGUMENT, REGION_INVALID, .is_ring = true, .bytes = 64);
    refused(client, MOE_ALREADY_EXISTS, REGION_EXISTS, .name = "data");
    refused(client, MOE_ALREADY_EXISTS, REGION_EXISTS, .inode = 1);
    refused(client, MOE_RESOURCE_EXHAUSTED, REGION_LIMIT, .bytes = 4 * REGION_BYTES);
    refused(client, MOE_RESOURCE_EXHAUSTED, REGION_LIMIT, .bytes = UINT64_MAX);
    add(client, "two", 2);
    add(client, "three", 3);
    refused(client, MOE_RESOURCE_EXHAUSTED, REGION_LIMIT, .inode = 98);
    assert_ok(moe_regions_join(r, "uid:1", &other)); /* one budget for both connections */
    add(other, "data", 1);
    refused(other, MOE_RESOURCE_EXHAUSTED, REGION_LIMIT, .inode = 98);
#pragma GCC diagnostic pop
#undef refused
    assert_refused(moe_regions_join(r, "uid:1", &other), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_REGION_LIMIT);
    assert_int_equal(moe_regions_bytes(r, "uid:1"), 4 * REGION_BYTES);
    assert_int_equal(moe_regions_bytes(r, "uid:2"), 0);
}

/* ---------------------------------------------------------------------------- memory */

static void refuse_memory(int fd)
{
    struct moe_sealed_file file;
    assert_refused(moe_sealed_check(fd, &file), MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID);
    if (fd >= 0)
        close(fd);
}

static int memfd(unsigned flags, int seals, off_t bytes)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (fd >= 0 && (ftruncate(fd, bytes) != 0 || fcntl(fd, F_ADD_SEALS, seals) != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

static void memory_that_could_change_is_refused(void **state)
{
    (void)state;
    enum { ALL = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
    int ends[2];
    refuse_memory(-1);
    refuse_memory(memfd(0, 0, 4096));
    refuse_memory(memfd(0, F_SEAL_SHRINK | F_SEAL_GROW, 4096));
    refuse_memory(memfd(0, F_SEAL_SHRINK | F_SEAL_SEAL, 4096));
    refuse_memory(memfd(0, F_SEAL_GROW | F_SEAL_SEAL, 4096));
    refuse_memory(memfd(0, ALL, 0));
    refuse_memory(open("/dev/zero", O_RDWR | O_CLOEXEC));
    FILE *file = tmpfile();
    assert_non_null(file);
    refuse_memory(dup(fileno(file)));
    fclose(file);
    assert_int_equal(pipe(ends), 0);
    refuse_memory(ends[0]);
    close(ends[1]);
    int huge = memfd(MFD_HUGETLB, ALL, 2 << 20);
    if (huge >= 0)
        refuse_memory(huge);
    else
        print_message("  this host makes no memfd of huge pages\n");
}

static void read_only_memory_is_refused(void **state)
{
    (void)state;
    enum { ALL = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
    struct moe_sealed_file file;
    void *base;
    int fd = memfd(0, ALL | F_SEAL_WRITE, 4096);
    assert_ok(moe_sealed_check(fd, &file));
    assert_refused(moe_sealed_map(fd, file.bytes, &base), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    close(fd);
}

static void memory_is_shared_and_stays_when_its_maker_goes(void **state)
{
    (void)state;
    struct moe_sealed_file file, again;
    void *mine, *theirs;
    int fd;
    assert_ok(moe_region_memory_create(10000, &fd, &mine));
    assert_ok(moe_sealed_check(fd, &file));
    assert_int_equal(file.bytes, 10000);
    assert_ok(moe_sealed_map(fd, file.bytes, &theirs));
    assert_int_not_equal(ftruncate(fd, 0), 0);
    memset(mine, 7, 10000);
    int copy = dup(fd); /* another descriptor is the same file */
    assert_ok(moe_sealed_check(copy, &again));
    assert_int_equal(file.inode, again.inode);
    assert_int_equal(file.device, again.device);
    close(copy);
    close(fd);
    moe_region_memory_unmap(mine, 10000);
    assert_int_equal(((char *)theirs)[9999], 7);
    moe_region_memory_unmap(theirs, 10000);
    assert_refused(moe_region_memory_create(0, &fd, &mine), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
    assert_refused(moe_region_memory_create(SIZE_MAX, &fd, &mine), MOE_INVALID_ARGUMENT,
                   MOE_REASON_REGION_INVALID);
}

/* A client that touches no page and keeps the descriptor: who maps it pays, once. */
static void freed_memory_costs_nobody(void **state)
{
    (void)state;
    struct moe_sealed_file file;
    struct stat now;
    void *mine, *theirs;
    int fd;
    assert_ok(moe_region_memory_create(3 * 4096 + 1, &fd, &mine));
    assert_ok(moe_sealed_check(fd, &file));
    assert_int_equal(file.bytes, 3 * 4096 + 1);
    assert_int_equal(file.charge, 4 * 4096);
    assert_ok(moe_sealed_map(fd, file.bytes, &theirs));
    moe_sealed_populate(theirs, file.bytes);
    assert_int_equal(fstat(fd, &now), 0);
    assert_int_equal(now.st_blocks * 512, file.charge);
    moe_sealed_release(theirs, file.bytes);
    assert_int_equal(fstat(fd, &now), 0);
    assert_int_equal(now.st_blocks, 0);
    moe_region_memory_unmap(mine, file.bytes);
    close(fd);
}

/* -------------------------------------------------------------------- the mapper */

enum { LARGE = 64 << 20, SMALL = 4096 };

static struct moe_region_job job_of(uint32_t of, size_t bytes)
{
    struct moe_region_job job = {.number = of, .client = of, .bytes = bytes};
    void *mine;
    assert_ok(moe_region_memory_create(bytes, &job.descriptor, &mine));
    moe_region_memory_unmap(mine, bytes);
    return job;
}

static struct moe_region_job await_job(struct moe_region_mapper *m, int done)
{
    struct moe_region_job job;
    while (!moe_region_mapper_take_done(m, &job)) {
        eventfd_t count;
        assert_int_equal(eventfd_read(done, &count), 0);
    }
    assert_ok(job.status);
    return job;
}

/* The memory of client 1 comes first and is large. Maps both, then unmaps both; true if client 2
 * was done first each time. */
static bool small_memory_overtakes(struct moe_region_mapper *m, int done)
{
    bool first = true;
    struct moe_region_job jobs[2] = {job_of(1, LARGE), job_of(2, SMALL)};
    for (int unmaps = 0; unmaps < 2; unmaps++) {
        moe_region_mapper_add(m, &jobs[0]);
        moe_region_mapper_add(m, &jobs[1]);
        for (int i = 0; i < 2; i++) {
            struct moe_region_job job = await_job(m, done);
            first = first && job.client == (i == 0 ? 2 : 1);
            if (!unmaps)
                memset(job.base, 7, job.bytes);
            job.unmaps = true;
            jobs[job.client - 1] = job;
        }
    }
    return first;
}

/* In at most one of many tries, the thread is done with all before it gets the second job. */
static void large_memory_delays_no_other_client(void **state)
{
    const struct moe_region_device no_device = {0};
    (void)state;
    struct moe_region_mapper *m;
    int tries = 0, done = eventfd(0, EFD_CLOEXEC);
    assert_true(done >= 0);
    assert_ok(moe_region_mapper_create(done, &no_device, &m));
    while (!small_memory_overtakes(m, done))
        assert_true(++tries < 20);
    moe_region_mapper_finish(m);
    moe_region_mapper_destroy(m);
    close(done);
}

static void budgets_count_whole_pages(void **state)
{
    (void)state;
    uint32_t number;
    struct moe_region_spec spec = {
        .name = "page", .bytes = 1, .charge = 3 * REGION_BYTES + 1, .inode = 9};
    assert_refused(moe_regions_reserve(r, client, &spec, &number), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_REGION_LIMIT);
    spec.charge--;
    assert_ok(moe_regions_reserve(r, client, &spec, &number));
    assert_int_equal(moe_regions_bytes(r, "uid:1"), 4 * REGION_BYTES);
}

int main(void)
{
#define test(name) cmocka_unit_test_setup_teardown(name, start, stop)
    const struct CMUnitTest tests[] = {
        test(good_requests_pass),
        cmocka_unit_test(bad_requests_are_refused),
        cmocka_unit_test(sizes_do_not_wrap),
        test(tensors_outside_of_a_region_are_refused),
        test(regions_of_others_are_refused),
        test(memory_of_a_device_has_no_identity),
        test(outputs_that_overlap_are_refused),
        test(a_client_has_so_many_requests_in_flight),
        test(unregistration_waits_for_requests),
        test(all_is_freed_when_a_client_leaves),
        test(a_ring_stays_while_a_request_is_in_flight),
        test(bad_registrations_are_refused),
        test(budgets_count_whole_pages),
        cmocka_unit_test(freed_memory_costs_nobody),
        cmocka_unit_test(large_memory_delays_no_other_client),
        cmocka_unit_test(memory_that_could_change_is_refused),
        cmocka_unit_test(read_only_memory_is_refused),
        cmocka_unit_test(memory_is_shared_and_stays_when_its_maker_goes),
    };
#undef test
    return cmocka_run_group_tests(tests, NULL, NULL);
}
