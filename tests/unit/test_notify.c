/* SPDX-License-Identifier: Apache-2.0 */
/* What a service manager gets to read: a socket of the test stands for it. */
#include "daemon/notify.h"

#include "base/clock.h"
#include "support/check.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define PERIOD "40000"
enum { PERIOD_US = 40000 };

static int manager;
static char name[64]; /* for NOTIFY_SOCKET, in the abstract namespace */

static int make_manager(void **state)
{
    (void)state;
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int n = snprintf(name, sizeof name, "@moed-notify-%d", (int)getpid());
    memcpy(at.sun_path + 1, name + 1, (size_t)n - 1);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {.tv_sec = 20};
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n);
    return manager < 0 || setsockopt(manager, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0 ||
           bind(manager, (const struct sockaddr *)(const void *)&at, size) != 0;
}

static int close_manager(void **state)
{
    (void)state;
    moe_notify_close();
    return close(manager);
}

static void set(const char *socket_name, const char *period, const char *process)
{
    const char *const values[][2] = {
        {"NOTIFY_SOCKET", socket_name}, {"WATCHDOG_USEC", period}, {"WATCHDOG_PID", process}};
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(values[i][1] != NULL ? setenv(values[i][0], values[i][1], 1)
                                              : unsetenv(values[i][0]),
                         0);
}

static const char *received(void)
{
    static char text[512];
    ssize_t n = recv(manager, text, sizeof text - 1, 0);
    assert_true(n > 0);
    text[n] = '\0';
    return text;
}

static void assert_silent(void)
{
    char c;
    assert_true(recv(manager, &c, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
}

static void the_manager_reads_what_happens(void **state)
{
    (void)state;
    set(name, NULL, NULL);
    assert_ok(moe_notify_open());
    moe_notify_ready();
    assert_string_equal(received(), "READY=1");
    moe_notify_status("slot %d:\nloading %s", 3, "40 %");
    assert_string_equal(received(), "STATUS=slot 3: loading 40 %");
    moe_notify_extend(1500);
    assert_string_equal(received(), "EXTEND_TIMEOUT_USEC=1500000");
    moe_notify_stopping();
    assert_string_equal(received(), "STOPPING=1");
    assert_silent();
}

static void a_reload_carries_its_time(void **state)
{
    (void)state;
    unsigned long long at;
    set(name, NULL, NULL);
    assert_ok(moe_notify_open());
    uint64_t before = moe_clock_ns() / 1000;
    moe_notify_reloading();
    assert_int_equal(sscanf(received(), "RELOADING=1\nMONOTONIC_USEC=%llu", &at), 1);
    assert_true(at >= before && at <= moe_clock_ns() / 1000);
    moe_notify_ready();
    assert_string_equal(received(), "READY=1");
}

static void a_long_status_is_cut(void **state)
{
    (void)state;
    char text[1000];
    memset(text, 'a', sizeof text);
    text[sizeof text - 1] = '\0';
    set(name, NULL, NULL);
    assert_ok(moe_notify_open());
    moe_notify_status("%s", text);
    assert_int_equal(strlen(received()), 255);
}

static void no_child_inherits_the_manager(void **state)
{
    (void)state;
    set(name, "1000000", NULL);
    assert_ok(moe_notify_open());
    assert_null(getenv("NOTIFY_SOCKET"));
    assert_null(getenv("WATCHDOG_USEC"));
}

static void without_a_manager_nothing_is_sent(void **state)
{
    (void)state;
    set(NULL, "1000000", NULL);
    assert_ok(moe_notify_open());
    moe_notify_ready();
    moe_notify_stopping();
    assert_silent();
}

static void nothing_of(uv_handle_t *handle, void *arg)
{
    (void)arg;
    uv_close(handle, NULL);
}

static void the_watchdog_is_fed_only_while_the_judge_says_alive(void **state)
{
    (void)state;
    const struct moe_progress_config config = {.step_ns = MOE_NS_PER_MS, .limit_ns = MOE_NS_PER_MS};
    const struct moe_loop_config stuck = {.name = "test", .code = "TEST_STUCK", .always = true};
    struct moe_progress *p;
    uv_loop_t loop;
    uv_timer_t timer;
    set(name, PERIOD, NULL);
    assert_ok(moe_notify_open());
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_ok(moe_progress_create(&config, &p));
    struct moe_loop *l = moe_progress_add(p, &stuck);
    assert_ok(moe_notify_watch(p, &loop, &timer));
    while (moe_progress_is_alive(p)) /* the loop never turns */
        (void)uv_run(&loop, UV_RUN_ONCE);
    while (recv(manager, (char[16]){0}, 16, MSG_DONTWAIT) >= 0)
        ; /* from before */
    for (int i = 0; i < 8; i++)
        (void)uv_run(&loop, UV_RUN_ONCE);
    assert_silent();
    moe_loop_turn(l);
    bool fed = false;
    for (int i = 0; i < 1000 && !fed; i++) {
        moe_loop_turn(l);
        (void)uv_run(&loop, UV_RUN_ONCE);
        fed = recv(manager, (char[16]){0}, 16, MSG_DONTWAIT) >= 0;
    }
    assert_true(fed);
    uv_walk(&loop, nothing_of, NULL);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    moe_progress_destroy(p);
}

static void garbage_is_one_clear_error(void **state)
{
    (void)state;
    char longest[300];
    memset(longest, '/', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    const char *const names[] = {"", "@", "relative", "unix:/run/x", "vsock:2:1", longest};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        set(names[i], "1000000", NULL);
        struct moe_status st = moe_notify_open();
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_non_null(strstr(st.text, "NOTIFY_SOCKET"));
        moe_notify_ready(); /* the daemon goes on */
    }
    set("/nowhere/notify", NULL, NULL);
    struct moe_status st = moe_notify_open();
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    const char *const times[] = {"", "-1", "0", "10s", "99999999999999999999999"};
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        set(name, times[i], NULL);
        st = moe_notify_open();
        assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
        assert_non_null(strstr(st.text, "WATCHDOG_USEC"));
        moe_notify_ready(); /* the rest of the protocol goes on */
        assert_string_equal(received(), "READY=1");
    }
}

/* Turns a loop until the manager has `count` feeds; then stands still for two periods. */
static void await_feeds(int count)
{
    char c;
    uv_loop_t loop;
    uv_timer_t timer;
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_ok(moe_notify_watch(NULL, &loop, &timer));
    for (int i = 0; i < count; i++) {
        (void)uv_run(&loop, UV_RUN_ONCE);
        assert_string_equal(received(), "WATCHDOG=1");
    }
    while (recv(manager, &c, 1, MSG_DONTWAIT) > 0) /* one turn may feed twice */
        continue;
    (void)usleep(2 * PERIOD_US);
    assert_silent();
    uv_close((uv_handle_t *)&timer, NULL);
    (void)uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
}

static void the_watchdog_is_fed_by_the_loop(void **state)
{
    (void)state;
    char self[24];
    (void)snprintf(self, sizeof self, "%d", (int)getpid());
    set(name, PERIOD, self);
    assert_ok(moe_notify_open());
    await_feeds(3);
}

static void the_watchdog_of_another_process_is_not_fed(void **state)
{
    (void)state;
    set(name, PERIOD, "1");
    assert_ok(moe_notify_open());
    await_feeds(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_manager_reads_what_happens, make_manager,
                                        close_manager),
        cmocka_unit_test_setup_teardown(a_reload_carries_its_time, make_manager, close_manager),
        cmocka_unit_test_setup_teardown(a_long_status_is_cut, make_manager, close_manager),
        cmocka_unit_test_setup_teardown(no_child_inherits_the_manager, make_manager, close_manager),
        cmocka_unit_test_setup_teardown(without_a_manager_nothing_is_sent, make_manager,
                                        close_manager),
        cmocka_unit_test_setup_teardown(garbage_is_one_clear_error, make_manager, close_manager),
        cmocka_unit_test_setup_teardown(the_watchdog_is_fed_by_the_loop, make_manager,
                                        close_manager),
        cmocka_unit_test_setup_teardown(the_watchdog_is_fed_only_while_the_judge_says_alive,
                                        make_manager, close_manager),
        cmocka_unit_test_setup_teardown(the_watchdog_of_another_process_is_not_fed, make_manager,
                                        close_manager),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
