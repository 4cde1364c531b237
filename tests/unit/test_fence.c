/* SPDX-License-Identifier: Apache-2.0 */
/* The fence of a training directory: the latest view alone publishes, also when several processes
 * write at the same time. With a fence file that is damaged or cannot be written, no view passes.
 */
#include "base/clock.h"
#include "base/wait.h"
#include "checkpoint/internal.h" /* from within: passing the fence, publishing */
#include "support/check.h"
#include "support/directory.h"
#include "support/random.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const uint64_t GROUP = 0xabc;
static char directory[MOE_TEST_DIRECTORY_BYTES];
static char fence_path[MOE_TEST_DIRECTORY_BYTES + 32];

static int fresh_directory(void **unused)
{
    (void)unused;
    if (!moe_test_directory("fence", directory))
        return -1;
    snprintf(fence_path, sizeof fence_path, "%s/.0000000000000abc.fence", directory);
    return 0;
}

static int remove_directory(void **unused)
{
    (void)unused;
    int root = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *names;
    struct moe_status st = moe_ckpt__open_names(root, &names);
    for (struct dirent *e; !moe_failed(&st) && (e = readdir(names)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            st = moe_ckpt__remove_tree(root, e->d_name);
    closedir(names);
    close(root);
    return moe_failed(&st) ? -1 : rmdir(directory);
}

static struct moe_status raise_to(uint64_t epoch)
{
    return moe_checkpoint_raise_fence(directory, GROUP, epoch);
}

static struct moe_checkpoint_context view(uint64_t epoch, const struct moe_lease_gate *lease)
{
    return (struct moe_checkpoint_context){
        .root = directory, .writer = epoch, .fence = {GROUP, epoch, lease}};
}

/* May a view of this epoch act now? */
static struct moe_status pass(uint64_t epoch, const struct moe_lease_gate *lease)
{
    struct moe_checkpoint_context c = view(epoch, lease);
    int root = -1, fence = -1;
    MOE_TRY(moe_ckpt__open_root(directory, &root));
    struct moe_status st = moe_ckpt__pass_fence(&c, root, &fence);
    if (!moe_failed(&st))
        moe_ckpt__leave_fence(fence);
    close(root);
    return st;
}

static void write_file(const char *text, size_t length)
{
    int fd = open(fence_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, length), (ssize_t)length);
    close(fd);
}

/* ------------------------------------------------------------------ epochs and leases */

static void an_earlier_epoch_is_refused_and_the_latest_passes(void **state)
{
    (void)state;
    assert_ok(raise_to(7));
    assert_ok(raise_to(7)); /* the same view again */
    assert_refused(raise_to(6), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    assert_ok(pass(7, NULL));
    assert_refused(pass(6, NULL), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    assert_ok(raise_to(10)); /* the number gets longer */
    assert_refused(pass(7, NULL), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    assert_ok(raise_to(UINT64_MAX));
    assert_ok(pass(UINT64_MAX, NULL));
    assert_refused(raise_to(UINT64_MAX - 1), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
}

static void each_group_has_a_fence_of_its_own(void **state)
{
    (void)state;
    assert_ok(raise_to(9));
    assert_ok(moe_checkpoint_raise_fence(directory, GROUP + 1, 2));
    assert_ok(pass(9, NULL));
}

static uint64_t now_ns;

static uint64_t test_clock(void)
{
    return now_ns;
}

static void nothing_passes_without_a_lease(void **state)
{
    struct moe_lease_gate gate;
    struct moe_lease lease = {.term_ns = 100, .until_ns = 1000, .all_until_ns = 1000};
    (void)state;
    assert_ok(raise_to(3));
    moe_lease_gate_init(&gate, test_clock);
    assert_refused(pass(3, &gate), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    moe_lease_gate_set(&gate, &lease);
    now_ns = 999;
    assert_ok(pass(3, &gate));
    now_ns = 1000;
    assert_refused(pass(3, &gate), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    assert_ok(raise_to(4)); /* the refusal has left the fence */
}

/* ------------------------------------------------------------------ the file */

static void no_view_passes_a_damaged_fence(void **state)
{
    static const struct {
        const char *text;
        size_t length;
    } damaged[] = {
        {"00000000000000000005", 20},    /* no end of line */
        {"0000000005\n", 11},            /* cut */
        {"\n", 1},                       /* only the end */
        {"-0000000000000000001\n", 21},  /* no digit */
        {" 0000000000000000001\n", 21},  /* no digit */
        {"0000000000000000x001\n", 21},  /* no digit */
        {"99999999999999999999\n", 21},  /* above 64 bits */
        {"00000000000000000005\n\n", 22} /* too long */
    };
    static const char zeros[21];
    (void)state;
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
        write_file(damaged[i].text, damaged[i].length);
        assert_refused(raise_to(100), MOE_DATA_LOSS, MOE_REASON_MALFORMED);
        assert_refused(pass(100, NULL), MOE_DATA_LOSS, MOE_REASON_MALFORMED);
    }
    write_file(zeros, sizeof zeros); /* a lost block */
    assert_refused(pass(100, NULL), MOE_DATA_LOSS, MOE_REASON_MALFORMED);
    write_file("", 0); /* its process ended before it could write */
    assert_ok(raise_to(1));
    assert_ok(pass(1, NULL));
}

static void a_fence_is_a_file_in_the_directory(void **state)
{
    char target[MOE_TEST_DIRECTORY_BYTES + 16];
    (void)state;
    snprintf(target, sizeof target, "%s/elsewhere", directory);
    assert_int_equal(symlink(target, fence_path), 0);
    assert_refused(raise_to(1), MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_int_equal(access(target, F_OK), -1);
    assert_int_equal(unlink(fence_path), 0);
    assert_int_equal(mkdir(fence_path, 0777), 0);
    assert_refused(raise_to(1), MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_refused(moe_checkpoint_raise_fence("/does/not/exist", GROUP, 1), MOE_FAILED_PRECONDITION,
                   MOE_REASON_IO);
}

static struct moe_status raise_with_room_for(rlim_t bytes, uint64_t epoch)
{
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    struct moe_status st = raise_to(epoch);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    return st;
}

/* The first fence of a group needs room; a later one is written over it. */
static void a_full_disk_refuses_and_leaves_no_damage(void **state)
{
    (void)state;
    signal(SIGXFSZ, SIG_IGN); /* as daemons do */
    assert_refused(raise_with_room_for(0, 5), MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO);
    assert_refused(raise_with_room_for(10, 5), MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO);
    assert_ok(raise_to(5)); /* there is room again */
    assert_refused(raise_with_room_for(10, 6), MOE_RESOURCE_EXHAUSTED, MOE_REASON_IO);
    assert_ok(pass(5, NULL)); /* as before */
    assert_refused(pass(4, NULL), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    assert_ok(raise_to(6));
    assert_refused(pass(5, NULL), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
}

/* ------------------------------------------------------------------ several writers */

enum { WRITERS = 4, RAISES = 300 };

/* A process raises the fence to numbers that only grow; exits with 1 if a raise went down. */
static void raise_often(uint64_t seed)
{
    struct rng random = {.state = seed};
    uint64_t epoch = 0;
    for (int i = 0; i < RAISES; i++) {
        epoch += 1 + rng_next(&random) % WRITERS;
        struct moe_status st = raise_to(epoch), mine = moe_ok();
        if (!moe_failed(&st))
            mine = pass(epoch, NULL); /* refused if another has raised it since */
        else if (st.reason != MOE_REASON_LEASE_LOST)
            _exit(1);
        if (moe_failed(&mine) && mine.reason != MOE_REASON_LEASE_LOST)
            _exit(2);
        mine = pass(epoch - 1, NULL);
        if (!moe_failed(&mine))
            _exit(3); /* below a fence that this process has seen */
    }
    struct moe_status last = raise_to(10 * RAISES * WRITERS + seed % 7);
    _exit(moe_failed(&last) && last.reason != MOE_REASON_LEASE_LOST ? 4 : 0);
}

static void several_processes_only_raise_it(void **state)
{
    pid_t children[WRITERS];
    int status;
    (void)state;
    for (int i = 0; i < WRITERS; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0)
            raise_often((uint64_t)i + 1);
    }
    for (int i = 0; i < WRITERS; i++) {
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_ok(pass(10 * RAISES * WRITERS + WRITERS, NULL));
    assert_refused(pass(10 * RAISES * WRITERS + WRITERS - 1, NULL), MOE_UNAVAILABLE,
                   MOE_REASON_LEASE_LOST);
}

/* A process that hangs while it acts keeps a later view from the directory: for a second, then the
 * view is refused. When the process is killed, the view gets it. */
static void an_act_under_way_holds_the_fence(void **state)
{
    int ready[2];
    char byte;
    (void)state;
    assert_ok(raise_to(1));
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct moe_checkpoint_context c = view(1, NULL);
        int root = -1, fence = -1;
        struct moe_status st = moe_ckpt__open_root(directory, &root);
        if (!moe_failed(&st))
            st = moe_ckpt__pass_fence(&c, root, &fence);
        _exit(moe_failed(&st) || write(ready[1], "x", 1) != 1 || pause() == 0);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    assert_refused(raise_to(2), MOE_UNAVAILABLE, MOE_REASON_IO);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_ok(raise_to(2));
    assert_refused(pass(1, NULL), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
}

/* ------------------------------------------------------------------ publishing */

static void publishing_needs_the_latest_epoch(void **state)
{
    struct moe_checkpoint_context old = view(1, NULL), new = view(2, NULL);
    int hidden = -1, root = -1;
    (void)state;
    assert_ok(raise_to(1));
    assert_ok(moe_ckpt__begin(&old, "k", &hidden));
    close(hidden);
    assert_ok(raise_to(2));
    assert_refused(moe_ckpt__publish(&old, "k"), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    assert_ok(moe_ckpt__open_root(directory, &root));
    assert_int_equal(faccessat(root, "k", F_OK, 0), -1);
    assert_ok(moe_ckpt__begin(&new, "k", &hidden)); /* and sweeps what is left of the other */
    close(hidden);
    assert_ok(moe_ckpt__publish(&new, "k"));
    assert_int_equal(faccessat(root, "k", F_OK, 0), 0);
    assert_refused(moe_ckpt__begin(&new, "k", &hidden), MOE_ALREADY_EXISTS,
                   MOE_REASON_CHECKPOINT_EXISTS);
    close(root);
}

struct race {
    uint64_t epoch;
    char name[16];
    struct moe_status published;
};

static void *publish(void *arg)
{
    struct race *r = arg;
    struct moe_checkpoint_context c = view(r->epoch, NULL);
    r->published = moe_ckpt__publish(&c, r->name);
    return NULL;
}

/* Whichever comes first: a checkpoint that is not there when the fence has risen never comes. */
static void a_rename_is_over_when_the_fence_has_risen(void **state)
{
    enum { RACES = 400 };
    int root = -1, published = 0;
    (void)state;
    assert_ok(moe_ckpt__open_root(directory, &root));
    for (uint64_t epoch = 1; epoch <= RACES; epoch++) {
        struct race r = {.epoch = epoch};
        struct moe_checkpoint_context c = view(epoch, NULL);
        pthread_t thread;
        int hidden = -1;
        snprintf(r.name, sizeof r.name, "k%d", (int)epoch);
        assert_ok(raise_to(epoch));
        assert_ok(moe_ckpt__begin(&c, r.name, &hidden));
        close(hidden);
        assert_int_equal(pthread_create(&thread, NULL, publish, &r), 0);
        moe_sleep_until(moe_clock_ns() + random_below(100) * 1000);
        assert_ok(raise_to(epoch + 1));
        bool there = faccessat(root, r.name, F_OK, 0) == 0;
        pthread_join(thread, NULL);
        assert_int_equal(faccessat(root, r.name, F_OK, 0) == 0, there);
        assert_int_equal(!moe_failed(&r.published), there);
        assert_true(there || r.published.reason == MOE_REASON_LEASE_LOST);
        published += there;
    }
    print_message("  %d of %d were published before the fence rose\n", published, RACES);
    close(root);
}

int main(void)
{
    seed_random();
#define CASE(name) cmocka_unit_test_setup_teardown(name, fresh_directory, remove_directory)
    const struct CMUnitTest tests[] = {
        CASE(an_earlier_epoch_is_refused_and_the_latest_passes),
        CASE(each_group_has_a_fence_of_its_own),
        CASE(nothing_passes_without_a_lease),
        CASE(no_view_passes_a_damaged_fence),
        CASE(a_fence_is_a_file_in_the_directory),
        CASE(a_full_disk_refuses_and_leaves_no_damage),
        CASE(several_processes_only_raise_it),
        CASE(an_act_under_way_holds_the_fence),
        CASE(publishing_needs_the_latest_epoch),
        CASE(a_rename_is_over_when_the_fence_has_risen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
