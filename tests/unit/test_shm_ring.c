/* SPDX-License-Identifier: Apache-2.0 */
/* Eventcounts and shared-memory rings lose no notification and no message, between threads and
 * between processes. A peer's writes or names cannot break the reader. */
#include "base/clock.h"
#include "links/shared.h"
#include "links/shm_ring.h"
#include "moe/types.h"
#include "support/check.h"
#include "support/random.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MESSAGES = 20000, LONG_MS = 20000 };

static uint64_t soon(uint64_t ms)
{
    return moe_clock_ns() + ms * MOE_NS_PER_MS;
}

/* --------------------------------------------------------------------------- eventcounts */

static void an_earlier_notification_ends_a_wait_at_once(void **state)
{
    (void)state;
    struct moe_eventcount *eventcount;
    assert_ok(moe_eventcount_create(&eventcount));
    uint32_t seen = moe_eventcount_prepare(eventcount);
    moe_eventcount_notify(eventcount);
    moe_eventcount_wait(eventcount, seen, MOE_NEVER);
    moe_eventcount_poll(eventcount, seen, MOE_NEVER);
    assert_int_equal(moe_eventcount_prepare(eventcount), seen + 1);
    moe_eventcount_destroy(eventcount);
}

static void a_wait_ends_at_its_deadline(void **state)
{
    (void)state;
    struct moe_eventcount *eventcount;
    assert_ok(moe_eventcount_create(&eventcount));
    uint32_t seen = moe_eventcount_prepare(eventcount);
    uint64_t deadline = soon(20);
    while (moe_clock_ns() < deadline) /* a wait may end spuriously */
        moe_eventcount_wait(eventcount, seen, deadline);
    moe_eventcount_poll(eventcount, seen, soon(5));
    assert_int_equal(moe_eventcount_prepare(eventcount), seen);
    moe_eventcount_destroy(eventcount);
}

struct notifier {
    struct moe_eventcount *eventcount;
    atomic_uint asked, notified;
};

static void *notify_when_asked(void *arg)
{
    struct notifier *r = arg;
    for (uint32_t i = 1; i <= MESSAGES; i++) {
        while (atomic_load(&r->asked) < i)
            sched_yield();
        atomic_store(&r->notified, i);
        moe_eventcount_notify(r->eventcount);
    }
    return NULL;
}

/* One notification for each wait: if one is lost, a wait runs into its deadline. */
static void no_notification_is_lost(void **state)
{
    (void)state;
    struct notifier r = {0};
    pthread_t thread;
    assert_ok(moe_eventcount_create(&r.eventcount));
    assert_int_equal(pthread_create(&thread, NULL, notify_when_asked, &r), 0);
    for (uint32_t i = 1; i <= MESSAGES; i++) {
        uint32_t seen = moe_eventcount_prepare(r.eventcount);
        uint64_t deadline = soon(LONG_MS);
        atomic_store(&r.asked, i);
        while (moe_eventcount_prepare(r.eventcount) == seen && moe_clock_ns() < deadline)
            moe_eventcount_wait(r.eventcount, seen, deadline);
        assert_true(moe_clock_ns() < deadline);
        assert_int_equal(moe_eventcount_prepare(r.eventcount), seen + 1);
        assert_int_equal(atomic_load(&r.notified), i);
    }
    pthread_join(thread, NULL);
    moe_eventcount_destroy(r.eventcount);
}

/* -------------------------------------------------------------------------- rings */

struct pair {
    struct moe_eventcount *eventcount;
    struct moe_shm_reader *reader;
};

static void make_pair(struct pair *p)
{
    assert_ok(moe_eventcount_create(&p->eventcount));
    assert_ok(moe_shm_reader_create(p->eventcount, &p->reader));
}

static void free_pair(struct pair *p)
{
    moe_shm_reader_destroy(p->reader);
    moe_eventcount_destroy(p->eventcount);
}

static struct moe_shm_writer *open_as(const struct pair *p, uint32_t slot)
{
    struct moe_shm_writer *writer;
    const struct moe_shm_address at = moe_shm_reader_address(p->reader);
    assert_ok(moe_shm_writer_open(&at, slot, &writer));
    return writer;
}

/* A message with content and length derived from its number. */
static size_t write_message(uint32_t number, uint8_t *to)
{
    size_t length = sizeof number + number * UINT32_C(2654435761) % (MOE_SHM_MESSAGE_MAX - 3);
    memset(to, (int)(number % 251), length);
    memcpy(to, &number, sizeof number);
    return length;
}

static void expect_message(struct moe_shm_reader *reader, uint32_t slot, uint32_t number)
{
    uint8_t want[MOE_SHM_MESSAGE_MAX], got[MOE_SHM_MESSAGE_MAX];
    size_t length = 0, right = write_message(number, want);
    assert_int_equal(moe_shm_reader_read(reader, slot, got, &length), MOE_SHM_READ_MESSAGE);
    assert_int_equal(length, right);
    assert_memory_equal(got, want, right);
}

static void messages_come_in_order_and_by_slot(void **state)
{
    (void)state;
    struct pair p;
    uint8_t bytes[MOE_SHM_MESSAGE_MAX];
    size_t length;
    make_pair(&p);
    struct moe_shm_writer *low = open_as(&p, 0), *high = open_as(&p, MOE_MAX_SLOTS - 1);
    for (uint32_t round = 0; round < 5; round++) { /* more than once around the ring */
        uint32_t seen = moe_eventcount_prepare(p.eventcount);
        for (uint32_t i = 0; i < MOE_SHM_RING_CELLS; i++) {
            assert_int_equal(moe_shm_writer_room(low), MOE_SHM_RING_CELLS - i);
            moe_shm_writer_write(low, bytes, write_message(round * 1000 + i, bytes));
        }
        assert_int_equal(moe_shm_writer_room(low), 0);
        moe_shm_writer_write(high, bytes, write_message(7, bytes));
        assert_int_equal(moe_eventcount_prepare(p.eventcount) - seen, MOE_SHM_RING_CELLS + 1);
        expect_message(p.reader, MOE_MAX_SLOTS - 1, 7);
        for (uint32_t i = 0; i < MOE_SHM_RING_CELLS; i++)
            expect_message(p.reader, 0, round * 1000 + i);
        for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
            assert_int_equal(moe_shm_reader_read(p.reader, s, bytes, &length), MOE_SHM_READ_NONE);
    }
    moe_shm_writer_close(low);
    moe_shm_writer_close(high);
    free_pair(&p);
}

/* The writer is another process, and the reader sleeps between messages. */
static void another_process_writes_and_every_message_arrives(void **state)
{
    (void)state;
    struct pair p;
    make_pair(&p);
    const struct moe_shm_address at = moe_shm_reader_address(p.reader);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct moe_shm_writer *writer;
        uint8_t bytes[MOE_SHM_MESSAGE_MAX];
        struct moe_status st = moe_shm_writer_open(&at, 3, &writer);
        for (uint32_t i = 0; !moe_failed(&st) && i < MESSAGES; i++) {
            while (moe_shm_writer_room(writer) == 0)
                sched_yield();
            moe_shm_writer_write(writer, bytes, write_message(i, bytes));
        }
        _exit(moe_failed(&st));
    }
    for (uint32_t i = 0; i < MESSAGES;) {
        uint32_t seen = moe_eventcount_prepare(p.eventcount);
        uint8_t want[MOE_SHM_MESSAGE_MAX], got[MOE_SHM_MESSAGE_MAX];
        size_t length = 0;
        enum moe_shm_read result;
        while ((result = moe_shm_reader_read(p.reader, 3, got, &length)) == MOE_SHM_READ_MESSAGE) {
            assert_int_equal(length, write_message(i++, want));
            assert_memory_equal(got, want, length);
        }
        assert_int_equal(result, MOE_SHM_READ_NONE);
        uint64_t deadline = soon(LONG_MS);
        if (i < MESSAGES)
            moe_eventcount_wait(p.eventcount, seen, deadline);
        assert_true(moe_clock_ns() < deadline);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    free_pair(&p);
}

/* ------------------------------------------------------------------------- refusals */

static void refused(const struct moe_shm_address *at)
{
    struct moe_shm_writer *writer;
    struct moe_status st = moe_shm_writer_open(at, 1, &writer);
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
}

static void other_memory_is_refused(void **state)
{
    (void)state;
    struct pair p, other;
    make_pair(&p);
    make_pair(&other);
    const struct moe_shm_address right = moe_shm_reader_address(p.reader);
    struct moe_shm_address at = right;
    at.key++; /* another process has the same numbers */
    refused(&at);
    at = right;
    at.memory = moe_shm_reader_address(other.reader).memory;
    refused(&at);
    at = right;
    at.eventcount = right.memory;
    refused(&at);
    at = right;
    at.memory = right.eventcount;
    refused(&at);
    at = right;
    at.process = UINT32_MAX;
    refused(&at);
    at = right;
    at.memory = 1 << 20;
    refused(&at);
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    at = right;
    at.memory = (uint32_t)ends[0];
    refused(&at);
    close(ends[0]);
    close(ends[1]);
    free_pair(&other);
    free_pair(&p);
}

/* A file on a disk has no seals. */
static void refuse_a_file(size_t bytes)
{
    char name[] = "not-memory-XXXXXX";
    struct moe_shared m;
    int fd = mkstemp(name);
    assert_true(fd >= 0);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    struct moe_status st = moe_shared_open((uint32_t)getpid(), (uint32_t)fd, bytes, &m);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    close(fd);
}

/* Memory of the right size that its owner could truncate while a peer reads it. */
static void memory_without_seals_is_refused(void **state)
{
    (void)state;
    enum { BYTES = 8192 };
    struct moe_shared m;
    int fd = memfd_create("unsealed", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, BYTES), 0);
    struct moe_status st = moe_shared_open((uint32_t)getpid(), (uint32_t)fd, BYTES, &m);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_int_equal(st.reason, MOE_REASON_VERSION_MISMATCH);
    close(fd);
    refuse_a_file(BYTES);
    assert_ok(moe_shared_create("sealed", BYTES, &m));
    assert_int_not_equal(ftruncate(m.fd, 0), 0);
    struct moe_shared again;
    assert_ok(moe_shared_open((uint32_t)getpid(), (uint32_t)m.fd, BYTES, &again));
    ((uint8_t *)m.base)[BYTES - 1] = 7;
    assert_int_equal(((uint8_t *)again.base)[BYTES - 1], 7);
    moe_shared_close(&again);
    moe_shared_close(&m);
}

/* Random bytes in all of the memory. */
static void nonsense_breaks_its_writers_ring_at_most(void **state)
{
    (void)state;
    seed_random();
    for (int round = 0; round < 50; round++) {
        struct pair p;
        uint8_t bytes[MOE_SHM_MESSAGE_MAX];
        size_t length = 0;
        struct moe_shared memory;
        make_pair(&p);
        const struct moe_shm_address at = moe_shm_reader_address(p.reader);
        const size_t all = (size_t)lseek((int)at.memory, 0, SEEK_END);
        assert_ok(moe_shared_open(at.process, at.memory, all, &memory));
        for (size_t i = 0; i < all; i++)
            if (round % 2 == 0 || one_in(1000))
                ((uint8_t *)memory.base)[i] = (uint8_t)random_below(256);
        for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
            int taken = 0;
            enum moe_shm_read result;
            while ((result = moe_shm_reader_read(p.reader, s, bytes, &length)) ==
                   MOE_SHM_READ_MESSAGE) {
                assert_in_range(length, 1, MOE_SHM_MESSAGE_MAX);
                assert_true(++taken <= MOE_SHM_RING_CELLS);
            }
            if (result == MOE_SHM_READ_BROKEN) /* reported once */
                assert_int_equal(moe_shm_reader_read(p.reader, s, bytes, &length),
                                 MOE_SHM_READ_NONE);
        }
        moe_shared_close(&memory);
        free_pair(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_earlier_notification_ends_a_wait_at_once),
        cmocka_unit_test(a_wait_ends_at_its_deadline),
        cmocka_unit_test(no_notification_is_lost),
        cmocka_unit_test(messages_come_in_order_and_by_slot),
        cmocka_unit_test(another_process_writes_and_every_message_arrives),
        cmocka_unit_test(other_memory_is_refused),
        cmocka_unit_test(memory_without_seals_is_refused),
        cmocka_unit_test(nonsense_breaks_its_writers_ring_at_most),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
