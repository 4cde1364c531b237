/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of the CPU backend's windows: the checks before mapping, the flags that satisfy a wait,
 * and slots that run different steps. */
#include "session_fixture.h"

#include "base/clock.h"
#include "cpu/exchange/session.h"

#include <setjmp.h>
#include <stdarg.h>
/* cmocka.h needs the headers above before it. */
#include <cmocka.h>

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* --------------------------------------------------------------- strangers */

static bool call_with_nonsense(const struct moe_cpu_endpoint *endpoint, bool speak)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, endpoint->name, sizeof endpoint->name);
    socklen_t length =
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + sizeof endpoint->name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    bool sent = fd >= 0 && connect(fd, (struct sockaddr *)&address, length) == 0 &&
                (!speak || send(fd, "let me in", 9, MSG_NOSIGNAL) == 9);
    if (speak)
        close(fd); /* the silent one stays until the process ends */
    return sent;
}

/* As a faulty or late peer: past moe_cpu_stores_flag. */
static void store_flag(uint64_t *flag, uint64_t stamp, uint32_t value)
{
    __atomic_store_n(flag, moe_window_flag(stamp, value), __ATOMIC_RELEASE);
}

/* All slots share their windows, or the call fails. */
static struct moe_status connect_all(const struct member *m, struct moe_cpu_peers *peers,
                                     const struct moe_cpu_endpoint *endpoints, int window,
                                     uint64_t deadline, int fds[MOE_MAX_SLOTS])
{
    return moe_cpu_peers_connect(peers, m->live, false, endpoints, window, deadline, fds);
}

static int connect_among_strangers(struct member *m)
{
    struct moe_cpu_peers *peers;
    struct moe_cpu_endpoint mine, endpoints[MOE_MAX_SLOTS];
    int fds[MOE_MAX_SLOTS], window = memfd_create("test", MFD_CLOEXEC);
    EXPECT(good(moe_cpu_peers_listen(m->slot, 1, m->live, &peers, &mine)));
    EXPECT(good(board_allgather(m, &mine, endpoints, sizeof mine)));
    if (m->slot == 1) {
        EXPECT(call_with_nonsense(&endpoints[0], true));
        EXPECT(call_with_nonsense(&endpoints[0], false));
    }
    uint64_t deadline = moe_clock_ns() + LONG_MS * MOE_NS_PER_MS;
    EXPECT(good(connect_all(m, peers, endpoints, window, deadline, fds)));
    EXPECT(fds[m->slot] == -1 && fds[1 - m->slot] >= 0);
    close(fds[1 - m->slot]);
    close(window);
    moe_cpu_peers_close(peers);
    return 0;
}

static int connect_without_the_secret(struct member *m)
{
    struct moe_cpu_peers *peers;
    struct moe_cpu_endpoint mine, endpoints[MOE_MAX_SLOTS];
    int fds[MOE_MAX_SLOTS], window = memfd_create("test", MFD_CLOEXEC);
    EXPECT(good(moe_cpu_peers_listen(m->slot, 1, m->live, &peers, &mine)));
    EXPECT(good(board_allgather(m, &mine, endpoints, sizeof mine)));
    endpoints[1 - m->slot].secret[5] ^= 1;
    uint64_t deadline = moe_clock_ns() + SHORT_MS * MOE_NS_PER_MS;
    struct moe_status st = connect_all(m, peers, endpoints, window, deadline, fds);
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(fds[1 - m->slot] == -1);
    close(window);
    moe_cpu_peers_close(peers);
    return 0;
}

static void strangers_are_refused_and_do_not_delay_the_join(void **state)
{
    (void)state;
    assert_true(run_group(2, connect_among_strangers));
    assert_true(run_group(2, connect_without_the_secret));
}

static void ignore(void *ctx)
{
    (void)ctx;
}

/* Slot 1 sends its last notice and closes with an unread message in its socket. The kernel reports
 * this to slot 0 before the notice. */
static int part_in_a_hurry(struct member *m)
{
    struct moe_cpu_peers *peers;
    struct moe_cpu_endpoint mine, endpoints[MOE_MAX_SLOTS];
    int fds[MOE_MAX_SLOTS], window = memfd_create("test", MFD_CLOEXEC);
    EXPECT(good(moe_cpu_peers_listen(m->slot, 1, m->live, &peers, &mine)));
    EXPECT(good(board_allgather(m, &mine, endpoints, sizeof mine)));
    uint64_t deadline = moe_clock_ns() + LONG_MS * MOE_NS_PER_MS;
    EXPECT(good(connect_all(m, peers, endpoints, window, deadline, fds)));
    close(window);
    close(fds[1 - m->slot]);
    if (m->slot == 0) {
        moe_cpu_peers_report_lost(peers, 0); /* never read */
        raise_flag(m, 1);
        EXPECT(await_flag(m->board, 1, 1));
        EXPECT(good(moe_cpu_peers_watch(peers, ignore, NULL)));
        while (moe_cpu_peers_left(peers) == 0 && moe_cpu_peers_lost(peers) == 0)
            usleep(1000);
        EXPECT(moe_cpu_peers_lost(peers) == 0);
        moe_cpu_peers_close(peers);
        return 0;
    }
    EXPECT(await_flag(m->board, 0, 1));
    moe_cpu_peers_leave(peers);
    moe_cpu_peers_close(peers);
    raise_flag(m, 1);
    return 0;
}

static void a_slot_that_leaves_in_order_is_not_lost(void **state)
{
    (void)state;
    assert_true(run_group(2, part_in_a_hurry));
}

static void a_window_that_could_shrink_is_not_mapped(void **state)
{
    (void)state;
    struct moe_window_shape shape = {2, 64, 32, 4, 8, false, 0};
    struct moe_window_layout layout, larger;
    struct moe_cpu_window window, mapped;
    int fd;
    assert_true(moe_window_layout_of(&shape, &layout));
    shape.max_tokens = 128;
    assert_true(moe_window_layout_of(&shape, &larger));
    assert_true(good(moe_cpu_window_create(&layout, 1, 9, &window, &fd)));
    assert_int_equal(ftruncate(fd, 4096), -1);
    assert_true(good(moe_cpu_window_map(&layout, 1, 9, fd, &mapped)));
    moe_cpu_window_unmap(&mapped);
    const enum moe_code refused = MOE_FAILED_PRECONDITION;
    const enum moe_reason why = MOE_REASON_VERSION_MISMATCH;
    assert_true(is(moe_cpu_window_map(&layout, 0, 9, fd, &mapped), refused, why));
    assert_true(is(moe_cpu_window_map(&layout, 1, 8, fd, &mapped), refused, why));
    assert_true(is(moe_cpu_window_map(&larger, 1, 9, fd, &mapped), refused, why));
    int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(unsealed, (off_t)layout.bytes), 0);
    assert_int_equal(pwrite(unsealed, window.base, 4096, 0), 4096); /* a perfect header */
    assert_true(is(moe_cpu_window_map(&layout, 1, 9, unsealed, &mapped), refused, why));
    close(unsealed);
    char name[] = "not-memory-XXXXXX"; /* on a disk: it has no seals to ask for */
    int file = mkstemp(name);
    assert_true(file >= 0);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(ftruncate(file, (off_t)layout.bytes), 0);
    assert_int_equal(pwrite(file, window.base, 4096, 0), 4096);
    assert_true(is(moe_cpu_window_map(&layout, 1, 9, file, &mapped), refused, why));
    close(file);
    close(fd);
    moe_cpu_window_unmap(&window);
}

static void windows_of_impossible_shapes_are_refused(void **state)
{
    (void)state;
    struct moe_window_layout l;
    const struct moe_window_shape fits = {
        MOE_MAX_SLOTS, MOE_WINDOW_MAX_TOKENS, MOE_MAX_HIDDEN, MOE_COMMON_TOP_K, MOE_MAX_EXPERTS,
        true,          MOE_WINDOW_MAX_TOKENS};
    struct moe_window_shape most = fits; /* of experts per token, with half of the tokens */
    most.max_tokens = most.max_tokens_f32 = MOE_WINDOW_MAX_TOKENS / 2;
    most.max_top_k = MOE_MAX_TOP_K;
    assert_true(moe_window_layout_of(&most, &l));
    most.max_top_k++;
    assert_false(moe_window_layout_of(&most, &l));
    assert_true(moe_window_layout_of(&fits, &l));
    assert_true(l.bytes >= MOE_MAX_SLOTS * (l.row_region + l.partial_region) &&
                l.bytes % MOE_WINDOW_PAGE == 0);
    for (int field = 0; field < 6; field++)
        for (int zero = 0; zero < 2; zero++) {
            struct moe_window_shape s = fits;
            uint32_t *each[] = {&s.slots,     &s.max_tokens,  &s.max_hidden,
                                &s.max_top_k, &s.max_experts, &s.max_tokens_f32};
            if (zero && each[field] == &s.max_tokens_f32)
                continue; /* means max_tokens */
            *each[field] = zero ? 0 : *each[field] + 1;
            assert_false(moe_window_layout_of(&s, &l));
        }
}

/* ------------------------------------------------------------ flags and steps */

static uint64_t *exchange_flag(struct moe_session *s, uint32_t window, uint32_t number)
{
    return &moe_window_exchange_of(&s->layout, s->window[window].base, number & 1, 1)->flag;
}

/* Slot 1 writes flags of other views and steps while slot 0 waits for exchange 1 of view 7. */
static int write_late(struct member *m)
{
    struct session_fixture s;
    EXPECT(open_fixture(m, &s, SHORT_MS, false));
    if (m->slot == 1) {
        const uint64_t stale[] = {moe_window_stamp(6, 1), moe_window_stamp(7, 0),
                                  moe_window_stamp(7, 2), moe_window_stamp(8, 1)};
        for (size_t i = 0; i < sizeof stale / sizeof *stale; i++) {
            store_flag(exchange_flag(s.session, 0, 1), stale[i], 8);
            moe_cpu_session_wake(s.session, 0);
            usleep(20000);
        }
        EXPECT(await_flag(m->board, 0, 1));
        return close_fixture(&s);
    }
    uint64_t mine = 1, all[2];
    struct moe_status st = moe_backend_cpu.session_exchange(s.session, &mine, all, sizeof mine);
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    raise_flag(m, 1);
    return close_fixture(&s);
}

/* The same with the right flag. */
static int write_in_time(struct member *m)
{
    struct session_fixture s;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    if (m->slot == 1) {
        store_flag(exchange_flag(s.session, 0, 1), moe_window_stamp(7, 1), 8);
        moe_cpu_session_wake(s.session, 0);
        EXPECT(await_flag(m->board, 0, 1));
        return close_fixture(&s);
    }
    uint64_t mine = 1, all[2];
    EXPECT(good(moe_backend_cpu.session_exchange(s.session, &mine, all, sizeof mine)));
    raise_flag(m, 1);
    return close_fixture(&s);
}

static void flags_of_another_view_or_step_satisfy_no_wait(void **state)
{
    (void)state;
    assert_true(run_group(2, write_late));
    assert_true(run_group(2, write_in_time));
}

/* Slot 2 runs a different step: all refuse it, and all can go on. */
static int disagree(struct member *m)
{
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    struct moe_step_args other = s.args;
    if (m->slot == 2)
        other.bucket *= 2;
    for (int i = 0; i < 3; i++) {
        EXPECT(is(run_step(s.session, &other, &result), MOE_FAILED_PRECONDITION,
                  MOE_REASON_SHAPE_MISMATCH));
        EXPECT(good(run_step(s.session, &s.args, &result)));
    }
    other = s.args;
    if (m->slot == 2)
        other.dtype = MOE_DTYPE_BF16; /* reads half the bytes of x: legal, but meaningless */
    EXPECT(is(run_step(s.session, &other, &result), MOE_FAILED_PRECONDITION,
              MOE_REASON_SHAPE_MISMATCH));
    EXPECT(good(run_step(s.session, &s.args, &result)));
    return close_fixture(&s);
}

static void slots_with_different_steps_all_refuse_and_go_on(void **state)
{
    (void)state;
    assert_true(run_group(3, disagree));
}

/* Slot 1 simulates a step with false flags. ctx: which ones. */
enum lie {
    HONEST,
    TOO_MANY_ROWS,
    TOO_MANY_ROUTES,
    FOREIGN_EXPERT,
    NO_EXPERT,
    STALE_ROUTE,
    TOO_FEW
};

struct forged_step {
    uint32_t count, routes, expert;
    uint64_t route_stamp;
};

static void forge_step(struct session_fixture *s, const struct forged_step *f)
{
    const struct moe_window_layout *l = &s->session->layout;
    uint8_t *window = s->session->window[0].base;
    const uint64_t stamp = moe_window_stamp(7, 1);
    const uint32_t head[MOE_HEAD_COUNT] = {1, 3, HIDDEN, 4, TOP_K, MOE_DTYPE_F32, 3, 1};
    for (uint32_t e = 0; e < 4; e++)
        store_flag(moe_window_counts_of(l, window, 1, 1) + e, stamp, e == 0 ? f->count : 0);
    struct moe_window_route *routes = moe_window_routes_of(l, window, 1, 1, 0);
    routes[0] = (struct moe_window_route){.key = moe_window_flag(f->route_stamp, f->expert)};
    store_flag(moe_window_sent_of(l, window, 1, 0), stamp, f->routes);
    for (uint32_t i = 0; i < MOE_HEAD_COUNT; i++)
        store_flag(moe_window_head_of(l, window, 1, 1) + i, stamp, head[i]);
    store_flag(moe_window_done_of(l, window, 1), stamp, 0);
    moe_cpu_session_wake(s->session, 0);
}

static int lie_about_rows(struct member *m)
{
    enum lie lie = *(const enum lie *)m->ctx;
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    if (m->slot == 1) {
        struct forged_step f = {
            .count = 1, .routes = 1, .expert = 0, .route_stamp = moe_window_stamp(7, 1)};
        f.count = lie == TOO_MANY_ROWS ? 0xffffff : lie == TOO_FEW ? 2 : 1;
        f.routes = lie == TOO_MANY_ROUTES ? 0xffffff : 1;
        f.expert = lie == FOREIGN_EXPERT ? 2 : lie == NO_EXPERT ? 0xfffff : 0;
        f.route_stamp -= lie == STALE_ROUTE;
        forge_step(&s, &f);
        EXPECT(await_flag(m->board, 0, 1));
        return close_fixture(&s);
    }
    s.args.tokens = 0; /* slot 1 has nothing to return */
    struct moe_status st = run_step(s.session, &s.args, &result);
    EXPECT(lie == HONEST ? good(st) : is(st, MOE_INTERNAL, MOE_REASON_NONE));
    raise_flag(m, 1);
    return close_fixture(&s);
}

static void false_flags_of_a_peer_fail_a_step_and_not_the_process(void **state)
{
    (void)state;
    for (enum lie lie = HONEST; lie <= TOO_FEW; lie++) {
        print_message("lie %d\n", (int)lie);
        assert_true(run_group_with(2, lie_about_rows, &lie));
    }
}

static int bad_arguments(struct member *m)
{
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    struct moe_step_args a = s.args;
    a.bucket = 24;
    EXPECT(is(run_step(s.session, &a, &result), MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT));
    a.bucket = 1024;
    EXPECT(is(run_step(s.session, &a, &result), MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT));
    a.bucket = TOKENS - 1;
    EXPECT(is(run_step(s.session, &a, &result), MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT));
    a = s.args;
    a.dtype = MOE_DTYPE_NONE;
    EXPECT(
        is(run_step(s.session, &a, &result), MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED));
    a = s.args;
    a.y = NULL;
    EXPECT(is(run_step(s.session, &a, &result), MOE_INVALID_ARGUMENT, MOE_REASON_NONE));
    uint8_t mode[TOKENS] = {MOE_ROUTE_SERVER, MOE_ROUTE_IDS};
    a = s.args;
    a.mode = mode;
    EXPECT(is(run_step(s.session, &a, &result), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID));
    EXPECT(good(run_step(s.session, &s.args, &result)));
    return close_fixture(&s);
}

static void bad_arguments_are_refused_before_anything_is_run(void **state)
{
    (void)state;
    assert_true(run_group(2, bad_arguments));
}

/* The number of a step has 28 bits; steps after the largest value must not match old flags. */
static int run_through_the_last_step_number(struct member *m)
{
    struct session_fixture s;
    struct moe_step_result result;
    float first[TOKENS * HIDDEN];
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    EXPECT(good(run_step(s.session, &s.args, &result)));
    memcpy(first, s.args.y, sizeof first);
    s.session->step = (1u << MOE_WINDOW_STEP_BITS) - 4;
    /* A flag of an early step that no later step has overwritten. */
    uint64_t *old = moe_window_sent_of(&s.session->layout, moe_cpu_session_own(s.session),
                                       (m->slot + 1) % m->slots, 200);
    store_flag(old, moe_window_stamp(7, 2), 1);
    for (int i = 0; i < 8; i++) {
        memset(s.args.y, 0xff, sizeof first);
        EXPECT(good(run_step(s.session, &s.args, &result)));
        EXPECT(memcmp(first, s.args.y, sizeof first) == 0);
    }
    EXPECT(s.session->step == 5);
    EXPECT(*old == 0);
    return close_fixture(&s);
}

static void steps_go_on_when_their_number_runs_out_of_bits(void **state)
{
    (void)state;
    assert_true(run_group(3, run_through_the_last_step_number));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_are_refused_and_do_not_delay_the_join),
        cmocka_unit_test(a_slot_that_leaves_in_order_is_not_lost),
        cmocka_unit_test(a_window_that_could_shrink_is_not_mapped),
        cmocka_unit_test(windows_of_impossible_shapes_are_refused),
        cmocka_unit_test(flags_of_another_view_or_step_satisfy_no_wait),
        cmocka_unit_test(slots_with_different_steps_all_refuse_and_go_on),
        cmocka_unit_test(false_flags_of_a_peer_fail_a_step_and_not_the_process),
        cmocka_unit_test(bad_arguments_are_refused_before_anything_is_run),
        cmocka_unit_test(steps_go_on_when_their_number_runs_out_of_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
