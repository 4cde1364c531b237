/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets of local daemons: where they are, and which ones do not count. */
#include "daemon/local.h"
#include "support/check.h"
#include "support/directory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

static char root[MOE_TEST_DIRECTORY_BYTES], runtime[96];

/* What a listener does: a socket at the path, with the port in place of the '*'. */
static int put_socket(const char *port, char path[MOE_LOCAL_PATH_BYTES])
{
    char pattern[MOE_LOCAL_PATH_BYTES];
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    assert_ok(moe_local_listen_path(pattern));
    const char *star = strchr(pattern, '*');
    assert_non_null(star);
    int n = snprintf(path, MOE_LOCAL_PATH_BYTES, "%.*s%s%s", (int)(star - pattern), pattern, port,
                     star + 1);
    assert_in_range(n, 1, MOE_LOCAL_PATH_BYTES - 1);
    memcpy(at.sun_path, path, (size_t)n + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(fd, 16), 0);
    return fd;
}

static void a_client_finds_the_socket_of_a_loopback_port(void **state)
{
    static const char *const found[] = {"127.0.0.1:7700", "localhost:7700", "[::1]:7700"};
    static const char *const missed[] = {"127.0.0.1:7701", "10.0.0.1:7700",    "node7:7700",
                                         "7700",           "127.0.0.1:07700x", ""};
    char made[MOE_LOCAL_PATH_BYTES], path[MOE_LOCAL_PATH_BYTES];
    (void)state;
    int listener = put_socket("7700", made);
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) {
        assert_true(moe_local_find(found[i], path));
        assert_string_equal(path, made);
    }
    for (size_t i = 0; i < sizeof missed / sizeof *missed; i++)
        assert_false(moe_local_find(missed[i], path));
    close(listener); /* the daemon was killed: its socket stays */
    assert_int_equal(access(made, F_OK), 0);
    assert_false(moe_local_find("127.0.0.1:7700", path));
    assert_int_equal(unlink(made), 0);
    assert_false(moe_local_find("127.0.0.1:7700", path));
}

static void set_age(const char *path, time_t seconds)
{
    const struct timespec then = {.tv_sec = time(NULL) - seconds}, times[] = {then, then};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void only_old_sockets_of_killed_daemons_are_removed(void **state)
{
    char live[MOE_LOCAL_PATH_BYTES], killed[MOE_LOCAL_PATH_BYTES], young[MOE_LOCAL_PATH_BYTES];
    char path[MOE_LOCAL_PATH_BYTES], other[sizeof runtime + 16];
    (void)state;
    int listener = put_socket("7700", live);
    close(put_socket("7701", killed));
    close(put_socket("7702", young));
    (void)snprintf(other, sizeof other, "%s/other.sock", runtime); /* no socket */
    FILE *file = fopen(other, "w");
    assert_non_null(file);
    assert_int_equal(fclose(file), 0);
    set_age(live, 3600);
    set_age(killed, 3600);
    set_age(other, 3600);
    assert_ok(moe_local_listen_path(path));
    assert_true(moe_local_find("127.0.0.1:7700", path));
    assert_int_equal(access(killed, F_OK), -1);
    assert_int_equal(access(young, F_OK), 0);
    assert_int_equal(access(other, F_OK), 0);
    close(listener);
    assert_int_equal(unlink(live), 0);
    assert_int_equal(unlink(young), 0);
    assert_int_equal(unlink(other), 0);
}

static void a_directory_that_others_can_use_does_not_count(void **state)
{
    char made[MOE_LOCAL_PATH_BYTES], path[MOE_LOCAL_PATH_BYTES];
    (void)state;
    int listener = put_socket("7700", made);
    assert_int_equal(chmod(runtime, 0755), 0);
    assert_false(moe_local_find("127.0.0.1:7700", path));
    assert_refused(moe_local_listen_path(path), MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_int_equal(chmod(runtime, 0700), 0);
    assert_true(moe_local_find("127.0.0.1:7700", path));
    close(listener);
    assert_int_equal(unlink(made), 0);
    assert_int_equal(rmdir(runtime), 0);
    assert_int_equal(symlink(root, runtime), 0);
    assert_refused(moe_local_listen_path(path), MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_int_equal(unlink(runtime), 0);
}

static void a_session_directory_that_cannot_be_used_gives_way(void **state)
{
    char path[MOE_LOCAL_PATH_BYTES], want[64], session[64];
    (void)state;
    assert_int_equal(unsetenv("MOED_RUNTIME_DIR"), 0);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", root, 1), 0);
    assert_ok(moe_local_listen_path(path));
    assert_ptr_equal(strstr(path, root), path);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", "/nowhere/at/all", 1), 0);
    assert_ok(moe_local_listen_path(path));
    /* The usual place of sessions if there is one, else a place that always exists. */
    (void)snprintf(session, sizeof session, "/run/user/%u/moed/*-", geteuid());
    (void)snprintf(want, sizeof want, "/tmp/moed-%u/*-", geteuid());
    assert_true(strstr(path, want) == path || strstr(path, session) == path);
    assert_int_equal(setenv("MOED_RUNTIME_DIR", runtime, 1), 0);
}

/* Some build systems and containers have such names. */
static void a_session_directory_of_a_long_name_gives_way(void **state)
{
    char name[MOE_LOCAL_PATH_BYTES + 40], path[MOE_LOCAL_PATH_BYTES];
    (void)state;
    assert_int_equal(unsetenv("MOED_RUNTIME_DIR"), 0);
    for (size_t length = 60; length < sizeof name; length++) {
        int n = snprintf(name, sizeof name, "%s/", root);
        memset(name + n, 'x', length - (size_t)n);
        name[length] = '\0';
        assert_int_equal(mkdir(name, 0700), 0);
        assert_int_equal(setenv("XDG_RUNTIME_DIR", name, 1), 0);
        assert_ok(moe_local_listen_path(path));
        bool taken = strstr(path, name) == path;
        assert_int_equal(taken, length <= 80);
        /* A listener puts a port in place of the '*'. */
        assert_true(!taken || strlen(path) + strlen("65535") - 1 < sizeof path);
        (void)snprintf(path, sizeof path, "%.*s/moed", (int)sizeof path - 8, name);
        assert_int_equal(taken ? rmdir(path) : 0, 0);
        assert_int_equal(rmdir(name), 0);
    }
    assert_int_equal(setenv("XDG_RUNTIME_DIR", root, 1), 0);
    assert_int_equal(setenv("MOED_RUNTIME_DIR", runtime, 1), 0);
}

static void a_directory_of_a_long_name_is_refused(void **state)
{
    char name[200], path[MOE_LOCAL_PATH_BYTES];
    (void)state;
    memset(name, 'x', sizeof name);
    name[0] = '/';
    name[sizeof name - 1] = '\0';
    assert_int_equal(setenv("MOED_RUNTIME_DIR", name, 1), 0);
    assert_refused(moe_local_listen_path(path), MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID);
    assert_false(moe_local_find("127.0.0.1:7700", path));
    assert_int_equal(setenv("MOED_RUNTIME_DIR", runtime, 1), 0);
}

/* What a listener does for operators. */
static int put_admin_socket(const char *directory, char path[MOE_LOCAL_PATH_BYTES])
{
    char pattern[MOE_LOCAL_PATH_BYTES];
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    assert_ok(moe_local_admin_path(directory, pattern));
    const char *star = strchr(pattern, '*');
    assert_non_null(star);
    (void)snprintf(path, MOE_LOCAL_PATH_BYTES, "%.*s7700%s", (int)(star - pattern), pattern,
                   star + 1);
    memcpy(at.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(fd, 16), 0);
    return fd;
}

static void operators_find_their_socket_where_only_the_owner_writes(void **state)
{
    char admin[96], made[MOE_LOCAL_PATH_BYTES], path[MOE_LOCAL_PATH_BYTES];
    (void)state;
    (void)snprintf(admin, sizeof admin, "%s/admin", root);
    assert_refused(moe_local_admin_path(admin, path), MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    assert_refused(moe_local_admin_path("run/admin", path), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    assert_refused(moe_local_admin_path("/run/*", path), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID); /* a listener would take it for its port's place */
    char deep[87];
    memset(deep, 'd', sizeof deep - 1);
    deep[0] = '/';
    deep[sizeof deep - 1] = '\0';
    assert_refused(moe_local_admin_path(deep, path), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    assert_int_equal(mkdir(admin, 0750), 0);
    assert_int_equal(setenv("MOED_ADMIN_DIR", admin, 1), 0);
    assert_false(moe_local_find_admin("127.0.0.1:7700", path));
    int listener = put_admin_socket(admin, made);
    assert_true(moe_local_find_admin("127.0.0.1:7700", path));
    assert_string_equal(path, made);
    assert_false(moe_local_find_admin("10.0.0.1:7700", path));
    assert_false(moe_local_find("127.0.0.1:7700", path)); /* it is not the user's */
    const mode_t open_to[] = {0770, 0757};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(chmod(admin, open_to[i]), 0);
        assert_false(moe_local_find_admin("127.0.0.1:7700", path));
        assert_refused(moe_local_admin_path(admin, path), MOE_FAILED_PRECONDITION, MOE_REASON_IO);
    }
    assert_int_equal(chmod(admin, 0750), 0);
    close(listener);
    assert_false(moe_local_find_admin("127.0.0.1:7700", path));
    assert_int_equal(unlink(made), 0);
    assert_int_equal(rmdir(admin), 0);
    assert_int_equal(unsetenv("MOED_ADMIN_DIR"), 0);
}

static int make_root(void **state)
{
    (void)state;
    if (!moe_test_directory("local", root))
        return -1;
    (void)snprintf(runtime, sizeof runtime, "%s/run", root);
    return setenv("MOED_RUNTIME_DIR", runtime, 1);
}

static int remove_root(void **state)
{
    char moed[96];
    (void)state;
    (void)snprintf(moed, sizeof moed, "%s/moed", root);
    (void)rmdir(moed);
    (void)rmdir(runtime);
    return rmdir(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_client_finds_the_socket_of_a_loopback_port),
        cmocka_unit_test(only_old_sockets_of_killed_daemons_are_removed),
        cmocka_unit_test(a_directory_that_others_can_use_does_not_count),
        cmocka_unit_test(a_session_directory_that_cannot_be_used_gives_way),
        cmocka_unit_test(a_session_directory_of_a_long_name_gives_way),
        cmocka_unit_test(a_directory_of_a_long_name_is_refused),
        cmocka_unit_test(operators_find_their_socket_where_only_the_owner_writes),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
