/* Promises of bells and mailboxes: no ring and no message is lost, between threads and between
 * processes; nothing that a peer writes or names can break the reader. */
#include "base/clock.h"
#include "moe/types.h"
#include "support/check.h"
#include "support/random.h"
#include "worker/mailbox.h"
#include "worker/shared.h"

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

/* --------------------------------------------------------------------------- bells */

static void a_ring_that_came_before_ends_a_wait_at_once(void **state)
{
    (void)state;
    struct moe_bell *bell;
    assert_ok(moe_bell_create(&bell));
    uint32_t heard = moe_bell_count(bell);
    moe_bell_ring(bell);
    uint64_t begin = moe_clock_ns();
    moe_bell_wait(bell, heard, soon(LONG_MS));
    moe_bell_watch(bell, heard, soon(LONG_MS));
    assert_true(moe_clock_ns() - begin < LONG_MS / 2 * MOE_NS_PER_MS);
    assert_int_equal(moe_bell_count(bell), heard + 1);
    moe_bell_destroy(bell);
}

static void a_wait_ends_at_its_deadline(void **state)
{
    (void)state;
    struct moe_bell *bell;
    assert_ok(moe_bell_create(&bell));
    uint32_t heard = moe_bell_count(bell);
    uint64_t deadline = soon(20);
    while (moe_clock_ns() < deadline) /* it may end early without a reason */
        moe_bell_wait(bell, heard, deadline);
    moe_bell_watch(bell, heard, soon(5));
    assert_int_equal(moe_bell_count(bell), heard);
    moe_bell_destroy(bell);
}

struct ringer {
    struct moe_bell *bell;
    atomic_uint asked, rung;
};

static void *ring_when_asked(void *arg)
{
    struct ringer *r = arg;
    for (uint32_t i = 1; i <= MESSAGES; i++) {
        while (atomic_load(&r->asked) < i)
            sched_yield();
        atomic_store(&r->rung, i);
        moe_bell_ring(r->bell);
    }
    return NULL;
}

/* One ring for each wait: a lost one would let a wait run into its deadline. */
static void no_ring_is_lost(void **state)
{
    (void)state;
    struct ringer r = {0};
    pthread_t thread;
    assert_ok(moe_bell_create(&r.bell));
    assert_int_equal(pthread_create(&thread, NULL, ring_when_asked, &r), 0);
    for (uint32_t i = 1; i <= MESSAGES; i++) {
        uint32_t heard = moe_bell_count(r.bell);
        uint64_t deadline = soon(LONG_MS);
        atomic_store(&r.asked, i);
        while (moe_bell_count(r.bell) == heard && moe_clock_ns() < deadline)
            moe_bell_wait(r.bell, heard, deadline);
        assert_true(moe_clock_ns() < deadline);
        assert_int_equal(moe_bell_count(r.bell), heard + 1);
        assert_int_equal(atomic_load(&r.rung), i);
    }
    pthread_join(thread, NULL);
    moe_bell_destroy(r.bell);
}

/* ----------------------------------------------------------------------- mailboxes */

struct pair {
    struct moe_bell *bell;
    struct moe_mailbox *box;
};

static void make_pair(struct pair *p)
{
    assert_ok(moe_bell_create(&p->bell));
    assert_ok(moe_mailbox_create(p->bell, &p->box));
}

static void free_pair(struct pair *p)
{
    moe_mailbox_destroy(p->box);
    moe_bell_destroy(p->bell);
}

static struct moe_post *open_as(const struct pair *p, uint32_t slot)
{
    struct moe_post *post;
    const struct moe_mail_address at = moe_mailbox_address(p->box);
    assert_ok(moe_post_open(&at, slot, &post));
    return post;
}

/* A message whose content and length follow from its number. */
static size_t write_message(uint32_t number, uint8_t *to)
{
    size_t length = sizeof number + number * UINT32_C(2654435761) % (MOE_MAIL_MAX - 3);
    memset(to, (int)(number % 251), length);
    memcpy(to, &number, sizeof number);
    return length;
}

static void expect_message(struct moe_mailbox *box, uint32_t slot, uint32_t number)
{
    uint8_t want[MOE_MAIL_MAX], got[MOE_MAIL_MAX];
    size_t length = 0, right = write_message(number, want);
    assert_int_equal(moe_mailbox_take(box, slot, got, &length), MOE_MAIL_TAKEN);
    assert_int_equal(length, right);
    assert_memory_equal(got, want, right);
}

static void messages_come_in_order_and_by_slot(void **state)
{
    (void)state;
    struct pair p;
    uint8_t bytes[MOE_MAIL_MAX];
    size_t length;
    make_pair(&p);
    struct moe_post *low = open_as(&p, 0), *high = open_as(&p, MOE_MAX_SLOTS - 1);
    for (uint32_t round = 0; round < 5; round++) { /* more than once around the ring */
        uint32_t heard = moe_bell_count(p.bell);
        for (uint32_t i = 0; i < MOE_MAIL_CELLS; i++) {
            assert_int_equal(moe_post_room(low), MOE_MAIL_CELLS - i);
            moe_post_send(low, bytes, write_message(round * 1000 + i, bytes));
        }
        assert_int_equal(moe_post_room(low), 0);
        moe_post_send(high, bytes, write_message(7, bytes));
        assert_int_equal(moe_bell_count(p.bell) - heard, MOE_MAIL_CELLS + 1);
        expect_message(p.box, MOE_MAX_SLOTS - 1, 7);
        for (uint32_t i = 0; i < MOE_MAIL_CELLS; i++)
            expect_message(p.box, 0, round * 1000 + i);
        for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
            assert_int_equal(moe_mailbox_take(p.box, s, bytes, &length), MOE_MAIL_NONE);
    }
    moe_post_close(low);
    moe_post_close(high);
    free_pair(&p);
}

/* The writer is another process, and the reader sleeps between messages. */
static void another_process_writes_and_every_message_arrives(void **state)
{
    (void)state;
    struct pair p;
    make_pair(&p);
    const struct moe_mail_address at = moe_mailbox_address(p.box);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct moe_post *post;
        uint8_t bytes[MOE_MAIL_MAX];
        struct moe_status st = moe_post_open(&at, 3, &post);
        for (uint32_t i = 0; !moe_failed(&st) && i < MESSAGES; i++) {
            while (moe_post_room(post) == 0)
                sched_yield();
            moe_post_send(post, bytes, write_message(i, bytes));
        }
        _exit(moe_failed(&st));
    }
    for (uint32_t i = 0; i < MESSAGES;) {
        uint32_t heard = moe_bell_count(p.bell);
        uint8_t want[MOE_MAIL_MAX], got[MOE_MAIL_MAX];
        size_t length = 0;
        enum moe_mail mail;
        while ((mail = moe_mailbox_take(p.box, 3, got, &length)) == MOE_MAIL_TAKEN) {
            assert_int_equal(length, write_message(i++, want));
            assert_memory_equal(got, want, length);
        }
        assert_int_equal(mail, MOE_MAIL_NONE);
        uint64_t deadline = soon(LONG_MS);
        if (i < MESSAGES)
            moe_bell_wait(p.bell, heard, deadline);
        assert_true(moe_clock_ns() < deadline);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    free_pair(&p);
}

/* ------------------------------------------------------------------------- refusals */

static void refused(const struct moe_mail_address *at)
{
    struct moe_post *post;
    struct moe_status st = moe_post_open(at, 1, &post);
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
}

static void what_is_not_the_mailbox_is_refused(void **state)
{
    (void)state;
    struct pair p, other;
    make_pair(&p);
    make_pair(&other);
    const struct moe_mail_address right = moe_mailbox_address(p.box);
    struct moe_mail_address at = right;
    at.key++; /* another process has the same numbers */
    refused(&at);
    at = right;
    at.mailbox = moe_mailbox_address(other.box).mailbox;
    refused(&at);
    at = right;
    at.bell = right.mailbox;
    refused(&at);
    at = right;
    at.mailbox = right.bell;
    refused(&at);
    at = right;
    at.process = UINT32_MAX;
    refused(&at);
    at = right;
    at.mailbox = 1 << 20;
    refused(&at);
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    at = right;
    at.mailbox = (uint32_t)ends[0];
    refused(&at);
    close(ends[0]);
    close(ends[1]);
    free_pair(&other);
    free_pair(&p);
}

/* On a disk: what has no seals at all is not taken for what has them all. */
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

/* Memory of the right size that could be cut off under its reader. */
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

/* Bytes at random all over the memory, as a peer that has gone mad might leave them. */
static void nonsense_breaks_its_own_ring_at_most(void **state)
{
    (void)state;
    seed_random();
    for (int round = 0; round < 50; round++) {
        struct pair p;
        uint8_t bytes[MOE_MAIL_MAX];
        size_t length = 0;
        struct moe_shared memory;
        make_pair(&p);
        const struct moe_mail_address at = moe_mailbox_address(p.box);
        const size_t all = (size_t)lseek((int)at.mailbox, 0, SEEK_END);
        assert_ok(moe_shared_open(at.process, at.mailbox, all, &memory));
        for (size_t i = 0; i < all; i++)
            if (round % 2 == 0 || one_in(1000))
                ((uint8_t *)memory.base)[i] = (uint8_t)random_below(256);
        for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
            int taken = 0;
            enum moe_mail mail;
            while ((mail = moe_mailbox_take(p.box, s, bytes, &length)) == MOE_MAIL_TAKEN) {
                assert_in_range(length, 1, MOE_MAIL_MAX);
                assert_true(++taken <= MOE_MAIL_CELLS);
            }
            if (mail == MOE_MAIL_BROKEN) /* and is told once */
                assert_int_equal(moe_mailbox_take(p.box, s, bytes, &length), MOE_MAIL_NONE);
        }
        moe_shared_close(&memory);
        free_pair(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_ring_that_came_before_ends_a_wait_at_once),
        cmocka_unit_test(a_wait_ends_at_its_deadline),
        cmocka_unit_test(no_ring_is_lost),
        cmocka_unit_test(messages_come_in_order_and_by_slot),
        cmocka_unit_test(another_process_writes_and_every_message_arrives),
        cmocka_unit_test(what_is_not_the_mailbox_is_refused),
        cmocka_unit_test(memory_without_seals_is_refused),
        cmocka_unit_test(nonsense_breaks_its_own_ring_at_most),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
