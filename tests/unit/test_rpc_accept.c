/* What accept4 says and does when no descriptor is left, called as the core calls it: nobody waits
 * in vain, and no crowd holds it up. */
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

struct door {
    int listener, crowd[CROWD];
    struct sockaddr_in at;
    struct rlimit before;
    int low[LOW_MAX], low_count; /* in nobody's use: room to give back */
};

/* Some room, a listening socket, and a crowd that has not come yet, in the order of descriptors. */
static void open_door(struct door *d)
{
    *d = (struct door){.at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}};
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

static void close_door(struct door *d)
{
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &d->before), 0);
    while (d->low_count > 0)
        close(d->low[--d->low_count]);
    for (int i = 0; i < CROWD; i++)
        close(d->crowd[i]);
    close(d->listener);
}

static void limit_to(struct door *d, int limit)
{
    struct rlimit files = d->before;
    files.rlim_cur = (rlim_t)limit;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
}

static void use_up_descriptors(struct door *d)
{
    int fd;
    while ((fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0) {
        assert_true(d->low_count < LOW_MAX);
        d->low[d->low_count++] = fd;
    }
    assert_int_equal(errno, EMFILE);
}

static void come(struct door *d, int who)
{
    assert_int_equal(connect(d->crowd[who], (struct sockaddr *)&d->at, sizeof d->at), 0);
    struct pollfd wait = {.fd = d->listener, .events = POLLIN};
    assert_int_equal(poll(&wait, 1, SOON_MS), 1);
}

static bool was_turned_away(struct door *d, int who)
{
    char byte;
    struct pollfd wait = {.fd = d->crowd[who], .events = POLLIN};
    return poll(&wait, 1, SOON_MS) == 1 && recv(d->crowd[who], &byte, 1, MSG_DONTWAIT) <= 0;
}

static int accept_error(struct door *d)
{
    errno = 0;
    assert_int_equal(accept4(d->listener, NULL, NULL, SOCK_CLOEXEC), -1);
    return errno;
}

static void a_crowd_is_turned_away_a_part_at_a_time(void **state)
{
    (void)state;
    struct door d;
    open_door(&d);
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
        assert_true(was_turned_away(&d, i));
    close_door(&d);
}

static bool is_left_alone(struct door *d, int who)
{
    enum { LONG_ENOUGH_MS = 200 };
    struct pollfd wait = {.fd = d->crowd[who], .events = POLLIN};
    return poll(&wait, 1, LONG_ENOUGH_MS) == 0;
}

/* Under a limit below its number the reserve cannot be had again once it is let go, as when another
 * thread has snatched it. Two wait, and the core has been told that nobody does. */
static void lose_reserve(struct door *d)
{
    moe_rpc_reserve_descriptor();
    limit_to(d, d->listener + 1);
    use_up_descriptors(d);
    come(d, 0);
    come(d, 1);
    assert_int_equal(accept_error(d), EAGAIN);
    assert_true(is_left_alone(d, 0));
}

static void who_waits_while_the_reserve_was_snatched_is_turned_away_when_there_is_room(void **state)
{
    (void)state;
    struct door d;
    open_door(&d);
    lose_reserve(&d);
    limit_to(&d, d.crowd[CROWD - 1] + 2);
    assert_true(was_turned_away(&d, 0)); /* without another call of the core */
    assert_true(was_turned_away(&d, 1));
    moe_rpc_reserve_descriptor(); /* and the reserve is back, by now */
    use_up_descriptors(&d);
    come(&d, 2);
    assert_int_equal(accept_error(&d), EAGAIN);
    assert_true(was_turned_away(&d, 2));
    close_door(&d);
}

/* The number of a listener that was closed meanwhile has become that of another. */
static void who_comes_to_another_door_is_not_turned_away(void **state)
{
    (void)state;
    struct door d, other;
    open_door(&d);
    open_door(&other);
    lose_reserve(&d);
    assert_int_equal(dup2(other.listener, d.listener), d.listener);
    come(&other, 0);
    limit_to(&d, other.crowd[CROWD - 1] + 2);
    assert_true(is_left_alone(&other, 0));
    close_door(&other);
    close_door(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            who_waits_while_the_reserve_was_snatched_is_turned_away_when_there_is_room),
        cmocka_unit_test(who_comes_to_another_door_is_not_turned_away),
        cmocka_unit_test(a_crowd_is_turned_away_a_part_at_a_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
