/* SPDX-License-Identifier: Apache-2.0 */
/* The store in a real etcd: what a leader has written another one finds, images of many pieces are
 * whole, and a process without the leader's key changes nothing. Exits with 77 where etcd is
 * missing. */
#include "base/clock.h"
#include "store/etcd.h"
#include "support/check.h"
#include "support/directory.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { SKIPPED = 77, LEASE_S = 2, WAIT_S = 40, IMAGE_MAX = 4 << 20 };

static const struct moe_store_format format = {
    .version = 1, .record_least = 1, .record_most = 1 << 16};
static char directory[MOE_TEST_DIRECTORY_BYTES], endpoint[32];
static pid_t server;

/* ------------------------------------------------------------------ etcd */

static uint16_t free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &length), 0);
    close(fd);
    return ntohs(a.sin_port);
}

static void start_etcd(void)
{
    char client[64], peer[64], cluster[80];
    uint16_t port = free_port();
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", port);
    snprintf(client, sizeof client, "http://%s", endpoint);
    snprintf(peer, sizeof peer, "http://127.0.0.1:%u", free_port());
    snprintf(cluster, sizeof cluster, "default=%s", peer);
    char *arguments[] = {"etcd",    "--data-dir",
                         directory, "--listen-client-urls",
                         client,    "--advertise-client-urls",
                         client,    "--listen-peer-urls",
                         peer,      "--initial-advertise-peer-urls",
                         peer,      "--initial-cluster",
                         cluster,   "--log-level",
                         "fatal",   NULL};
    int rc = posix_spawnp(&server, "etcd", NULL, NULL, arguments, environ);
    if (rc != 0) {
        printf("skipped: etcd (Debian: etcd-server): %s\n", strerror(rc));
        exit(SKIPPED);
    }
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

static int set_up(void **unused)
{
    (void)unused;
    if (!moe_test_directory("etcd", directory))
        return -1;
    start_etcd();
    return 0;
}

static int tear_down(void **unused)
{
    (void)unused;
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    return nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* ------------------------------------------------------------------ processes */

struct owner {
    struct moe_etcd *etcd;
    sem_t woken;
};

static void wake(void *ctx)
{
    (void)sem_post(ctx);
}

static void open_owner(struct owner *o, const char *prefix)
{
    const struct moe_etcd_config config = {.endpoints = endpoint,
                                           .prefix = prefix,
                                           .lease_s = LEASE_S,
                                           .format = &format,
                                           .wake = wake,
                                           .ctx = &o->woken};
    sem_init(&o->woken, 0, 0);
    assert_int_equal(moe_etcd_open(&config, &o->etcd).code, MOE_OK);
}

static void close_owner(struct owner *o)
{
    moe_etcd_close(o->etcd);
    sem_destroy(&o->woken);
}

/* Runs the election until the process leads, or does not. */
static void run_until(struct owner *o, bool leads)
{
    uint64_t end = moe_clock_ns() + WAIT_S * MOE_NS_PER_S;
    while (moe_etcd_leads(o->etcd) != leads) {
        struct timespec until;
        moe_etcd_run(o->etcd);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 20 * 1000 * 1000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        (void)sem_timedwait(&o->woken, &until);
        assert_true(moe_clock_ns() < end);
    }
}

/* Reads the record as a new leader does. */
static void expect_record(struct owner *o, const char *text)
{
    struct moe_store_found found;
    struct moe_status st = moe_etcd_read(o->etcd, &found);
    if (moe_failed(&st))
        fail_msg("%s", st.text);
    if (text == NULL) {
        assert_null(found.record);
        return;
    }
    assert_int_equal(found.length, strlen(text));
    assert_memory_equal(found.record, text, found.length);
    free(found.record);
}

static void lead(struct owner *o, const char *prefix, const char *record)
{
    open_owner(o, prefix);
    moe_etcd_join(o->etcd, "127.0.0.1:1 127.0.0.1:2");
    run_until(o, true);
    expect_record(o, record);
}

static void append(struct owner *o, const char *text)
{
    struct moe_status st =
        moe_store_append(moe_etcd_store(o->etcd), (const uint8_t *)text, strlen(text));
    if (moe_failed(&st))
        fail_msg("%s", st.text);
}

static uint8_t *make_image(size_t length, uint8_t seed)
{
    uint8_t *image = malloc(length + 1);
    assert_non_null(image);
    for (size_t i = 0; i < length; i++)
        image[i] = (uint8_t)(i * 31 + i / 4099 + seed);
    return image;
}

static void write_image(struct owner *o, uint32_t number, size_t length, uint8_t seed)
{
    uint8_t *image = make_image(length, seed);
    struct moe_status st = moe_store_write(moe_etcd_store(o->etcd), number, image, length);
    if (moe_failed(&st))
        fail_msg("%s", st.text);
    free(image);
}

static void expect_image(struct owner *o, uint32_t number, size_t length, uint8_t seed)
{
    uint8_t *want = make_image(length, seed), *image;
    size_t found;
    struct moe_status st =
        moe_store_read(moe_etcd_store(o->etcd), number, IMAGE_MAX, &image, &found);
    if (moe_failed(&st))
        fail_msg("%s", st.text);
    assert_int_equal(found, length);
    assert_non_null(image);
    assert_memory_equal(image, want, length);
    free(image);
    free(want);
}

static void expect_no_image(struct owner *o, uint32_t number)
{
    uint8_t *image;
    size_t length;
    assert_int_equal(
        moe_store_read(moe_etcd_store(o->etcd), number, IMAGE_MAX, &image, &length).code, MOE_OK);
    assert_null(image);
}

/* ------------------------------------------------------------------ tests */

static void the_next_leader_finds_what_the_last_one_has_written(void **unused)
{
    (void)unused;
    struct owner first, second;
    lead(&first, "/a/group", NULL);
    append(&first, "one");
    append(&first, "two");
    write_image(&first, 0, 100, 1);
    struct moe_etcd_report r;
    moe_etcd_report(first.etcd, &r);
    assert_true(r.leads && r.remaining_ns > 0 && r.remaining_ns < LEASE_S * MOE_NS_PER_S);
    assert_string_equal(r.leader, "127.0.0.1:1");
    assert_string_equal(r.leader_control, "127.0.0.1:2");
    close_owner(&first);
    lead(&second, "/a/group", "two");
    append(&second, "three");
    expect_image(&second, 0, 100, 1);
    close_owner(&second);
}

static void images_of_many_pieces_are_whole(void **unused)
{
    (void)unused;
    static const size_t lengths[] = {0, 1, 512 << 10, (512 << 10) + 1, 3 << 20};
    struct owner o;
    lead(&o, "/b", NULL);
    for (uint8_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        write_image(&o, 1, lengths[i], i);
        write_image(&o, 10, lengths[i], (uint8_t)(i + 100)); /* its keys begin with those of 1 */
        expect_image(&o, 1, lengths[i], i);
    }
    uint8_t *image;
    size_t length;
    struct moe_status st = moe_store_read(moe_etcd_store(o.etcd), 1, 1000, &image, &length);
    assert_int_equal(st.code, MOE_DATA_LOSS);
    assert_int_equal(moe_store_write(moe_etcd_store(o.etcd), 1, NULL, 0).code, MOE_OK);
    expect_no_image(&o, 1);
    expect_image(&o, 10, 3 << 20, 104);
    close_owner(&o);
}

static void a_process_that_does_not_lead_changes_nothing(void **unused)
{
    (void)unused;
    struct owner leader, other;
    lead(&leader, "/c", NULL);
    append(&leader, "of the leader");
    open_owner(&other, "/c");
    moe_etcd_join(other.etcd, "127.0.0.1:3 127.0.0.1:4");
    for (int i = 0; i < 20; i++) {
        moe_etcd_run(other.etcd);
        usleep(20000);
        moe_etcd_run(leader.etcd);
    }
    assert_false(moe_etcd_leads(other.etcd));
    struct moe_store *s = moe_etcd_store(other.etcd);
    struct moe_status st = moe_store_append(s, (const uint8_t *)"x", 1);
    assert_int_equal(st.reason, MOE_REASON_NOT_LEADER);
    assert_int_equal(moe_store_write(s, 0, (const uint8_t *)"x", 1).reason, MOE_REASON_NOT_LEADER);
    struct moe_etcd_report r;
    moe_etcd_report(other.etcd, &r);
    assert_string_equal(r.leader, "127.0.0.1:1");
    expect_record(&other, "of the leader");
    close_owner(&other);
    close_owner(&leader);
}

/* Its thread is stopped meanwhile. */
static void a_leader_that_was_stopped_for_a_lease_knows_it(void **unused)
{
    (void)unused;
    struct owner old, next;
    lead(&old, "/d", NULL);
    append(&old, "old");
    lead(&next, "/d", "old"); /* the old one renews nothing meanwhile */
    assert_false(moe_etcd_leads(old.etcd));
    struct moe_status st = moe_store_append(moe_etcd_store(old.etcd), (const uint8_t *)"late", 4);
    assert_int_equal(st.reason, MOE_REASON_NOT_LEADER);
    close_owner(&old);
    append(&next, "next");
    close_owner(&next);
}

static void remove_key(const char *key)
{
    pid_t pid;
    int status;
    char *arguments[] = {"etcdctl", "--endpoints", endpoint, "del", (char *)(uintptr_t)key, NULL};
    assert_int_equal(setenv("ETCDCTL_API", "3", 1), 0);
    assert_int_equal(posix_spawnp(&pid, "etcdctl", NULL, NULL, arguments, environ), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

/* By its own count it leads: someone has removed its key, and another process leads. */
static void etcd_refuses_a_leader_without_the_key(void **unused)
{
    (void)unused;
    struct owner old, next;
    lead(&old, "/e", NULL);
    append(&old, "old");
    for (int i = 0; i < 3; i++) {
        remove_key("/e/leader");
        assert_true(moe_etcd_leads(old.etcd));
        bool image = i == 1;
        struct moe_store *s = moe_etcd_store(old.etcd);
        if (i == 2) {
            lead(&next, "/e", "old");
            assert_true(moe_etcd_leads(old.etcd));
        }
        struct moe_status st = image ? moe_store_write(s, 0, (const uint8_t *)"late", 4)
                                     : moe_store_append(s, (const uint8_t *)"late", 4);
        assert_int_equal(st.reason, MOE_REASON_NOT_LEADER);
        assert_false(moe_etcd_leads(old.etcd));
        if (i == 2)
            break;
        run_until(&old, true);
        expect_record(&old, "old");
        expect_no_image(&old, 0);
    }
    expect_record(&next, "old");
    append(&next, "next");
    append(&next, "again");
    close_owner(&old);
    close_owner(&next);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_next_leader_finds_what_the_last_one_has_written),
        cmocka_unit_test(images_of_many_pieces_are_whole),
        cmocka_unit_test(a_process_that_does_not_lead_changes_nothing),
        cmocka_unit_test(a_leader_that_was_stopped_for_a_lease_knows_it),
        cmocka_unit_test(etcd_refuses_a_leader_without_the_key),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
