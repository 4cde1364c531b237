/* SPDX-License-Identifier: Apache-2.0 */
/* accept4 without a free descriptor, called as the core calls it: no connection waits for ever, and
 * a crowd does not block the caller. */
#include "rpc/serving.h"
#include "support/check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CROWD = 200, ROOM = 4, LOW_MAX = 1024, SOON_MS = 10000 };

struct listener {
    int listener, crowd[CROWD];
    struct sockaddr_in at;
    struct rlimit before;
    int low[LOW_MAX], low_count; /* unused descriptors to give back */
};

/* Opens spare descriptors, a listener and the sockets of clients, in this order of numbers. */
static void open_listener(struct listener *d)
{
    *d =
        (struct listener){.at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof d->at;
    while (d->low_count < ROOM) {
        int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        assert_true(fd >= 0);
        d->low[d->low_count++] = fd;
    }
    d->listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    assert_int_equal(bind(d->listener, (struct sockaddr *)&d->at, length), 0);
    assert_int_equal(listen(d->listener, CROWD), 0);
    assert_int_equal(getsockname(d->listener, (struct sockaddr *)&d->at, &length), 0);
    for (int i = 0; i < CROWD; i++)
        assert_true((d->crowd[i] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &d->before), 0);
}

static void close_listener(struct listener *d)
{
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &d->before), 0);
    while (d->low_count > 0)
        close(d->low[--d->low_count]);
    for (int i = 0; i < CROWD; i++)
        close(d->crowd[i]);
    close(d->listener);
}

static void limit_to(struct listener *d, int limit)
{
    struct rlimit files = d->before;
    files.rlim_cur = (rlim_t)limit;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
}

static void use_up_descriptors(struct listener *d)
{
    int fd;
    while ((fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0) {
        assert_true(d->low_count < LOW_MAX);
        d->low[d->low_count++] = fd;
    }
    assert_int_equal(errno, EMFILE);
}

static void come(struct listener *d, int who)
{
    assert_int_equal(connect(d->crowd[who], (struct sockaddr *)&d->at, sizeof d->at), 0);
    struct pollfd wait = {.fd = d->listener, .events = POLLIN};
    assert_int_equal(poll(&wait, 1, SOON_MS), 1);
}

static bool was_refused(struct listener *d, int who)
{
    char byte;
    struct pollfd wait = {.fd = d->crowd[who], .events = POLLIN};
    return poll(&wait, 1, SOON_MS) == 1 && recv(d->crowd[who], &byte, 1, MSG_DONTWAIT) <= 0;
}

static int accept_error(struct listener *d)
{
    errno = 0;
    assert_int_equal(accept4(d->listener, NULL, NULL, SOCK_CLOEXEC), -1);
    return errno;
}

static void a_crowd_is_refused_a_part_at_a_time(void **state)
{
    (void)state;
    struct listener d;
    open_listener(&d);
    moe_rpc_reserve_descriptor();
    limit_to(&d, d.crowd[CROWD - 1] + 2);
    use_up_descriptors(&d);
    for (int i = 0; i < CROWD; i++)
        come(&d, i);
    unsigned parts = 0;
    int error;
    while ((error = accept_error(&d)) == EINTR && parts <= CROWD)
        parts++;
    print_message("  %d in %u parts and the rest\n", CROWD, parts);
    assert_int_equal(error, EAGAIN);
    assert_in_range(parts, 2, CROWD / 10);
    for (int i = 0; i < CROWD; i++)
        assert_true(was_refused(&d, i));
    close_listener(&d);
}

static bool is_still_waiting(struct listener *d, int who)
{
    enum { LONG_ENOUGH_MS = 200 };
    struct pollfd wait = {.fd = d->crowd[who], .events = POLLIN};
    return poll(&wait, 1, LONG_ENOUGH_MS) == 0;
}

/* The limit is below the reserve's number, so the reserve cannot be opened again once it is closed:
 * the same as when another thread took it. Two connections wait, and the core saw EAGAIN. */
static void lose_reserve(struct listener *d)
{
    moe_rpc_reserve_descriptor();
    limit_to(d, d->listener + 1);
    use_up_descriptors(d);
    come(d, 0);
    come(d, 1);
    assert_int_equal(accept_error(d), EAGAIN);
    assert_true(is_still_waiting(d, 0));
}

static void connections_that_missed_the_reserve_are_refused_when_there_is_a_descriptor(void **state)
{
    (void)state;
    struct listener d;
    open_listener(&d);
    lose_reserve(&d);
    limit_to(&d, d.crowd[CROWD - 1] + 2);
    assert_true(was_refused(&d, 0)); /* without another call of the core */
    assert_true(was_refused(&d, 1));
    moe_rpc_reserve_descriptor(); /* the reserve is open again */
    use_up_descriptors(&d);
    come(&d, 2);
    assert_int_equal(accept_error(&d), EAGAIN);
    assert_true(was_refused(&d, 2));
    close_listener(&d);
}

/* Another listener gets the descriptor number of one that was closed. */
static void connections_to_another_listener_are_not_refused(void **state)
{
    (void)state;
    struct listener d, other;
    open_listener(&d);
    open_listener(&other);
    lose_reserve(&d);
    assert_int_equal(dup2(other.listener, d.listener), d.listener);
    come(&other, 0);
    limit_to(&d, other.crowd[CROWD - 1] + 2);
    assert_true(is_still_waiting(&other, 0));
    close_listener(&other);
    close_listener(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            connections_that_missed_the_reserve_are_refused_when_there_is_a_descriptor),
        cmocka_unit_test(connections_to_another_listener_are_not_refused),
        cmocka_unit_test(a_crowd_is_refused_a_part_at_a_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
