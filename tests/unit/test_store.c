/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's log: acknowledged records survive, others are dropped, damage is not read as
 * data, and reading a damaged file does not lower an epoch. */
#include "coordinator/saved.h"
#include "support/check.h"
#include "support/directory.h"
#include "support/random.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[MOE_TEST_DIRECTORY_BYTES];
static char log_path[MOE_TEST_DIRECTORY_BYTES + 16];
static struct moe_added_saved models; /* what the last open or decode has found */
static const struct moe_added_saved few_models = {
    .highest = 9,
    .count = 2,
    .models = {{.number = 3, .name = "mixtral", .directory = "/models/a b", .fingerprint = "f00d"},
               {.number = 9, .leaving = true, .name = "x", .directory = "/y"}}};

static int fresh_directory(void **unused)
{
    (void)unused;
    if (!moe_test_directory("store", directory))
        return -1;
    snprintf(log_path, sizeof log_path, "%s/group.log", directory);
    return 0;
}

static int remove_directory(void **unused)
{
    (void)unused;
    static const char *const names[] = {"group.log", "group.log.new", "lock"};
    char path[80];
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, names[i]);
        (void)unlink(path);
    }
    return rmdir(directory);
}

static struct moe_membership_saved state_of(uint64_t epoch, bool view)
{
    struct moe_membership_saved s = {.epoch = epoch,
                                     .placement_version = 3,
                                     .placement_hash = 0x123456789abcdef0,
                                     .slots = 2,
                                     .group_id = 0xfedcba9876543210,
                                     .lease_ms = 5000,
                                     .settled = !view,
                                     .cordoned = view ? 0 : 2,
                                     .places = 3,
                                     .view_version = view ? 2 : 0,
                                     .last_members = {41, view ? 42 : 0},
                                     .last_version = 4};
    if (!view)
        strcpy(s.cordon_reasons[1], "a fan is broken");
    if (!view)
        return s;
    s.view_epoch = epoch;
    strcpy(s.members[0].worker_id, "host-a/gpu0");
    s.members[0].incarnation = 77;
    strcpy(s.members[1].worker_id, "host-b/gpu0");
    s.members[1].incarnation = UINT64_MAX;
    return s;
}

static struct moe_store *open_store(struct moe_membership_saved *state)
{
    struct moe_store *s = NULL;
    struct moe_status st = moe_saved_open(directory, &s, state, &models);
    if (st.code != MOE_OK)
        fail_msg("cannot open: %s", st.text);
    return s;
}

static void append(struct moe_store *s, struct moe_membership_saved state)
{
    struct moe_status st = moe_saved_append(s, &state, &few_models);
    if (st.code != MOE_OK)
        fail_msg("cannot append: %s", st.text);
}

static size_t read_file(uint8_t *image, size_t capacity)
{
    int fd = open(log_path, O_RDONLY);
    assert_true(fd >= 0);
    ssize_t n = read(fd, image, capacity);
    assert_true(n >= 0);
    close(fd);
    return (size_t)n;
}

static void write_file(const uint8_t *image, size_t length)
{
    int fd = open(log_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, image, length), length);
    close(fd);
}

static void a_restart_finds_the_last_state(void **unused)
{
    (void)unused;
    struct moe_membership_saved found, want = state_of(2, true);
    struct moe_store *s = open_store(&found);
    assert_int_equal(found.epoch, 0);
    append(s, state_of(1, false));
    append(s, want);
    moe_store_close(s);
    for (int i = 0; i < 3; i++) {
        s = open_store(&found);
        assert_memory_equal(&found, &want, sizeof want);
        assert_memory_equal(&models, &few_models, sizeof models);
        moe_store_close(s);
    }
}

static void as_many_models_as_a_group_may_have_are_found_again(void **unused)
{
    (void)unused;
    struct moe_membership_saved found, want = state_of(2, true);
    struct moe_added_saved many = {.highest = MOE_ADDED_NUMBER_MAX, .count = MOE_ADDED_MAX};
    for (uint32_t i = 0; i < many.count; i++) {
        struct moe_added_entry *e = &many.models[i];
        e->number = 1000 * (i + 1);
        memset(e->name, 'n', sizeof e->name - 1);
        memset(e->directory, '/', sizeof e->directory - 1);
        memset(e->fingerprint, 'f', sizeof e->fingerprint - 1);
    }
    struct moe_store *s = open_store(&found);
    for (int i = 0; i < 12; i++) /* the file is replaced in between */
        assert_int_equal(moe_saved_append(s, &want, &many).code, MOE_OK);
    moe_store_close(s);
    moe_store_close(open_store(&found));
    assert_memory_equal(&found, &want, sizeof want);
    assert_memory_equal(&models, &many, sizeof many);
}

static uint32_t crc(const uint8_t *data, size_t length)
{
    uint32_t sum = UINT32_MAX;
    for (size_t i = 0; i < length; i++) {
        sum ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            sum = (sum >> 1) ^ (UINT32_C(0x82f63b78) & (0 - (sum & 1)));
    }
    return ~sum;
}

static void put_sum(uint8_t *at, uint32_t sum)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(sum >> (8 * i));
}

/* Writes a log of an older format: its records end `less` bytes earlier. */
static void write_older(const struct moe_membership_saved *state, uint8_t format, size_t less)
{
    uint8_t image[4096];
    struct moe_membership_saved found;
    struct moe_store *s = open_store(&found);
    assert_int_equal(unlink(log_path), 0); /* the next append writes a file with one record */
    append(s, *state);
    moe_store_close(s);
    size_t length = read_file(image, sizeof image) - less;
    assert_int_equal(image[8], 7); /* so older releases refuse it by its format */
    image[8] = format;
    put_sum(image + 12, crc(image, 12));
    image[16] = (uint8_t)(image[16] - less);
    put_sum(image + 24, crc(image + 32, length - 32));
    put_sum(image + 28, crc(image + 16, 12));
    write_file(image, length);
}

static void a_log_of_an_older_release_is_read(void **unused)
{
    (void)unused;
    enum { VERSION_BYTES = 4, PLACES_BYTES = 8 + 4, LAST_MEMBERS_BYTES = 2 * 8 };
    struct moe_membership_saved found, want = state_of(7, false);
    want.last_members[0] = 71;
    want.last_members[1] = 72;
    write_older(&want, 6, LAST_MEMBERS_BYTES);
    memset(want.last_members, 0, sizeof want.last_members);
    moe_store_close(open_store(&found));
    assert_memory_equal(&found, &want, sizeof want);
    write_older(&want, 5, VERSION_BYTES + LAST_MEMBERS_BYTES);
    want.last_version = 0; /* not known */
    moe_store_close(open_store(&found));
    assert_memory_equal(&found, &want, sizeof want);
    write_older(&want, 4, PLACES_BYTES + VERSION_BYTES + LAST_MEMBERS_BYTES);
    want.places = 0;
    want.view_version = 0;
    for (int i = 0; i < 2; i++) { /* the second time, in the format of this release */
        moe_store_close(open_store(&found));
        assert_memory_equal(&found, &want, sizeof want);
    }
}

static void refuse_open(enum moe_code code, const char *what)
{
    struct moe_membership_saved found;
    struct moe_store *s = NULL;
    struct moe_status st = moe_saved_open(directory, &s, &found, &models);
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, code);
    assert_null(s);
    assert_non_null(strstr(st.text, what));
    assert_non_null(strstr(st.text, directory));
}

/* Others could replace the log, and with it the epoch. */
static void a_directory_that_others_may_write_to_is_refused(void **unused)
{
    (void)unused;
    static const mode_t shared[] = {0777, 0770, 0702, 01777};
    struct moe_membership_saved found;
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        assert_int_equal(chmod(directory, shared[i]), 0);
        refuse_open(MOE_PERMISSION_DENIED, "chmod go-w");
    }
    if (geteuid() == 0) {
        assert_int_equal(chmod(directory, 0700), 0);
        assert_int_equal(chown(directory, 12345, 0), 0);
        refuse_open(MOE_PERMISSION_DENIED, "belongs to another user (12345)");
        assert_int_equal(chown(directory, 0, 0), 0);
    }
    assert_int_equal(access(log_path, F_OK), -1);
    assert_int_equal(chmod(directory, 0755), 0);
    moe_store_close(open_store(&found));
}

static void damage_is_reported_with_the_name_of_the_file(void **unused)
{
    (void)unused;
    char link[MOE_TEST_DIRECTORY_BYTES + 16];
    write_file((const uint8_t *)"no log at all, but long enough", 30);
    refuse_open(MOE_DATA_LOSS, "/group.log: damaged: not a group log; move it away");
    write_file(NULL, 0);
    refuse_open(MOE_DATA_LOSS, "/group.log: damaged: not a group log");
    snprintf(link, sizeof link, "%s/lock", directory);
    assert_int_equal(unlink(log_path), 0);
    assert_int_equal(symlink(link, log_path), 0); /* what a link names is never read or written */
    refuse_open(MOE_UNAVAILABLE, "/group.log");
    assert_int_equal(unlink(log_path), 0);
    assert_int_equal(mkfifo(log_path, 0600), 0); /* an open waits for no writer */
    refuse_open(MOE_DATA_LOSS, "not a regular file");
}

static void only_one_process_has_it_open(void **unused)
{
    (void)unused;
    struct moe_membership_saved found;
    struct moe_store *s = open_store(&found), *second = NULL;
    struct moe_status st = moe_saved_open(directory, &second, &found, &models);
    assert_int_equal(st.code, MOE_ALREADY_EXISTS);
    assert_null(second);
    moe_store_close(s);
}

static void a_directory_that_cannot_be_is_named(void **unused)
{
    (void)unused;
    struct moe_membership_saved found;
    struct moe_store *s = NULL;
    struct moe_status st = moe_saved_open("/no/such/folder", &s, &found, &models);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_non_null(strstr(st.text, "/no/such/folder: "));
    assert_null(s);
}

static void the_file_stays_small(void **unused)
{
    (void)unused;
    struct moe_membership_saved found;
    struct moe_store *s = open_store(&found);
    off_t largest = 0;
    for (uint64_t e = 1; e <= 3000; e++) {
        append(s, state_of(e, e % 2 == 0));
        struct stat info;
        assert_int_equal(stat(log_path, &info), 0);
        largest = info.st_size > largest ? info.st_size : largest;
    }
    moe_store_close(s);
    print_message("  largest file %ld bytes\n", (long)largest);
    assert_true(largest > MOE_STORE_COMPACT_BYTES / 2 && largest < MOE_STORE_COMPACT_BYTES + 4096);
    moe_store_close(open_store(&found));
    assert_int_equal(found.epoch, 3000);
}

/* A file with three records, epochs 10, 11 and 12; `ends[i]` is where record i ends. */
static size_t make_log(uint8_t *image, size_t capacity, size_t ends[3])
{
    struct moe_membership_saved found;
    struct moe_store *s = open_store(&found);
    size_t length = read_file(image, capacity);
    for (size_t i = 0; i < 3; i++) {
        append(s, state_of(10 + i, i == 1));
        ends[i] = length = read_file(image, capacity);
    }
    moe_store_close(s);
    return length;
}

/* Truncated anywhere: complete records count, and the epoch is above all acknowledged ones. */
static void an_incomplete_tail_loses_no_acknowledged_epoch(void **unused)
{
    (void)unused;
    uint8_t image[4096];
    size_t ends[3], length = make_log(image, sizeof image, ends), refused = 0;
    for (size_t cut = 0; cut <= length; cut++) {
        write_file(image, cut);
        struct moe_membership_saved found;
        struct moe_store *s = NULL;
        struct moe_status st = moe_saved_open(directory, &s, &found, &models);
        if (st.code != MOE_OK) {
            /* A new log has a header and a record: less than that is not an incomplete append. */
            assert_int_equal(st.code, MOE_DATA_LOSS);
            assert_true(cut < ends[0]);
            refused++;
            continue;
        }
        uint64_t whole = cut >= ends[2] ? 12 : cut >= ends[1] ? 11 : cut >= ends[0] ? 10 : 0;
        bool clean = cut == ends[2] || cut == ends[1] || cut == ends[0] || found.epoch == 0;
        assert_true(clean ? found.epoch == whole : found.epoch > whole);
        assert_true(clean || cut < ends[0] || models.highest > few_models.highest);
        assert_true(clean || found.view_epoch == 0);
        /* The store goes on from there, and the next start finds a clean file. */
        append(s, state_of(found.epoch + 1, true));
        moe_store_close(s);
        struct moe_membership_saved again;
        moe_store_close(open_store(&again));
        assert_int_equal(again.epoch, found.epoch + 1);
        assert_int_equal(again.view_epoch, found.epoch + 1);
    }
    print_message("  %zu cuts, %zu refused\n", length + 1, refused);
}

static void no_flipped_bit_makes_an_epoch_fall(void **unused)
{
    (void)unused;
    uint8_t image[4096], bad[4096];
    size_t ends[3], length = make_log(image, sizeof image, ends), refused = 0, repaired = 0;
    for (size_t bit = 0; bit < 8 * length; bit++) {
        memcpy(bad, image, length);
        bad[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        struct moe_membership_saved found;
        bool incomplete;
        struct moe_status st = moe_saved_decode(bad, length, &found, &models, &incomplete);
        if (st.code != MOE_OK) {
            refused++;
            continue;
        }
        assert_true(incomplete);
        assert_true(found.epoch > 12);
        assert_true(models.highest > few_models.highest);
        assert_int_equal(found.view_epoch, 0);
        repaired++;
    }
    print_message("  %zu flips refused, %zu repaired\n", refused, repaired);
    assert_true(refused > 0 && repaired > 0);
}

static void garbage_behind_the_last_record_is_dropped(void **unused)
{
    (void)unused;
    uint8_t image[8192] = {0};
    size_t ends[3], length = make_log(image, 4096, ends);
    write_file(image, length + 512); /* a file system may extend a file before it writes */
    struct moe_membership_saved found;
    moe_store_close(open_store(&found));
    assert_true(found.epoch > 12);
}

static void files_of_other_releases_are_refused_by_name(void **unused)
{
    (void)unused;
    uint8_t image[4096];
    size_t ends[3], length = make_log(image, sizeof image, ends);
    struct moe_membership_saved found;
    bool incomplete;
    image[0] ^= 1;
    struct moe_status st = moe_saved_decode(image, length, &found, &models, &incomplete);
    assert_int_equal(st.code, MOE_DATA_LOSS);
    print_message("  %s\n", st.text);
    /* Format 8, and record kind 2, with good checksums. The kind of the first record is at 20. */
    static const uint8_t format_8[16] = {'m', 'o', 'e', 'd', 'l', 'o', 'g', '\n', 8, 0, 0, 0};
    uint8_t kind_2[32];
    memcpy(kind_2, "moedlog\n\7\0\0\0", 12);
    image[0] ^= 1;
    memcpy(kind_2 + 12, image + 12, 4);
    const uint8_t head[12] = {0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0};
    memcpy(kind_2 + 16, head, 12);
    uint8_t newer[16];
    memcpy(newer, format_8, 16);
    put_sum(newer + 12, crc(newer, 12));
    put_sum(kind_2 + 28, crc(kind_2 + 16, 12));
    st = moe_saved_decode(newer, sizeof newer, &found, &models, &incomplete);
    assert_int_equal(st.reason, MOE_REASON_VERSION_MISMATCH);
    print_message("  %s\n", st.text);
    st = moe_saved_decode(kind_2, sizeof kind_2, &found, &models, &incomplete);
    assert_int_equal(st.reason, MOE_REASON_VERSION_MISMATCH);
    print_message("  %s\n", st.text);
}

/* A full disk, as a file size limit: the failed append leaves nothing behind, and the store goes on
 * when there is room again. */
static void a_failed_write_changes_nothing(void **unused)
{
    (void)unused;
    struct moe_membership_saved found, state = state_of(5, true), next = state_of(6, false);
    struct moe_store *s = open_store(&found);
    append(s, state);
    struct rlimit old, small;
    struct stat info;
    assert_int_equal(stat(log_path, &info), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){.rlim_cur = (rlim_t)info.st_size + 10, .rlim_max = old.rlim_max};
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    struct moe_status st = moe_saved_append(s, &next, &few_models);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, before);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    print_message("  %s\n", st.text);
    uint8_t image[4096];
    bool incomplete;
    size_t length = read_file(image, sizeof image);
    st = moe_saved_decode(image, length, &found, &models, &incomplete);
    assert_int_equal(st.code, MOE_OK);
    assert_false(incomplete);
    assert_memory_equal(&found, &state, sizeof state);
    append(s, next);
    moe_store_close(s);
    moe_store_close(open_store(&found));
    assert_memory_equal(&found, &next, sizeof next);
}

/* A clean-up of /tmp removes the directory while the coordinator lives. */
static void a_log_that_was_removed_is_written_anew(void **unused)
{
    (void)unused;
    struct moe_membership_saved found, want = state_of(7, true);
    for (int with_directory = 0; with_directory < 2; with_directory++) {
        struct moe_store *s = open_store(&found), *second = NULL;
        append(s, state_of(5, false));
        if (with_directory)
            assert_int_equal(remove_directory(NULL), 0);
        else
            assert_int_equal(unlink(log_path), 0);
        append(s, want);
        append(s, want);
        struct moe_status st = moe_saved_open(directory, &second, &found, &models);
        assert_int_equal(st.code, MOE_ALREADY_EXISTS); /* it has the lock */
        moe_store_close(s);
        moe_store_close(open_store(&found));
        assert_memory_equal(&found, &want, sizeof want);
    }
}

static void a_directory_that_cannot_be_made_again_is_an_error_until_it_can(void **unused)
{
    (void)unused;
    struct moe_membership_saved found, want = state_of(7, true);
    struct moe_store *s = open_store(&found);
    assert_int_equal(remove_directory(NULL), 0);
    int fd = open(directory, O_WRONLY | O_CREAT, 0600); /* a file has its name */
    assert_true(fd >= 0);
    close(fd);
    for (int i = 0; i < 2; i++) {
        struct moe_status st = moe_saved_append(s, &want, &few_models);
        assert_int_equal(st.code, MOE_UNAVAILABLE);
    }
    assert_int_equal(unlink(directory), 0);
    append(s, want);
    moe_store_close(s);
    moe_store_close(open_store(&found));
    assert_memory_equal(&found, &want, sizeof want);
}

static void random_bytes_are_never_good_data(void **unused)
{
    (void)unused;
    uint8_t image[4096];
    size_t ends[3], length = make_log(image, sizeof image, ends);
    struct rng random = {.state = 1};
    for (int i = 0; i < 20000; i++) {
        uint8_t bad[4096];
        memcpy(bad, image, length);
        for (int k = 0; k < 4; k++) {
            bad[rng_below(&random, (uint32_t)length)] = (uint8_t)rng_next(&random);
        }
        struct moe_membership_saved found;
        bool incomplete;
        struct moe_status st = moe_saved_decode(bad, rng_below(&random, (uint32_t)length + 1),
                                                &found, &models, &incomplete);
        if (st.code == MOE_OK)
            assert_true(found.epoch <= 12 + 64);
    }
}

int main(void)
{
#define STORE_TEST(f) cmocka_unit_test_setup_teardown(f, fresh_directory, remove_directory)
    const struct CMUnitTest tests[] = {
        STORE_TEST(a_restart_finds_the_last_state),
        STORE_TEST(as_many_models_as_a_group_may_have_are_found_again),
        STORE_TEST(a_log_of_an_older_release_is_read),
        STORE_TEST(only_one_process_has_it_open),
        STORE_TEST(a_directory_that_others_may_write_to_is_refused),
        STORE_TEST(damage_is_reported_with_the_name_of_the_file),
        STORE_TEST(a_directory_that_cannot_be_is_named),
        STORE_TEST(the_file_stays_small),
        STORE_TEST(an_incomplete_tail_loses_no_acknowledged_epoch),
        STORE_TEST(no_flipped_bit_makes_an_epoch_fall),
        STORE_TEST(garbage_behind_the_last_record_is_dropped),
        STORE_TEST(files_of_other_releases_are_refused_by_name),
        STORE_TEST(a_failed_write_changes_nothing),
        STORE_TEST(a_log_that_was_removed_is_written_anew),
        STORE_TEST(a_directory_that_cannot_be_made_again_is_an_error_until_it_can),
        STORE_TEST(random_bytes_are_never_good_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
