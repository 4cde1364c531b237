/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions of the CPU backend under fault: peers that die, hang, never come; abort, join and leave.
 *
 * Every test forks its group before it starts a thread. Members report by their exit status: 0 if
 * all was right. Budgets are short if a wait must run out, else long. No result depends on time. */
#include "session_fixture.h"

#include "base/clock.h"
#include "cpu/exchange/session.h"

#include <setjmp.h>
#include <stdarg.h>
/* cmocka.h needs the headers above before it. */
#include <cmocka.h>

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* ------------------------------------------------------------- lost peers */

/* Runs steps until one fails; returns its result. */
static struct moe_status step_until_failure(struct member *m, struct session_fixture *s,
                                            struct moe_step_result *result)
{
    for (uint32_t n = 1;; n++) {
        struct moe_status st = run_step(s->session, &s->args, result);
        if (moe_failed(&st))
            return st;
        raise_flag(m, n);
    }
}

/* A survivor gets the error, and can go on: the same weights, in a session without the victim. */
static int survive(struct member *m, uint32_t budget_ms)
{
    struct session_fixture s;
    struct moe_step_result result;
    struct moe_layer *others = NULL;
    EXPECT(open_fixture(m, &s, budget_ms, false));
    struct moe_status st = step_until_failure(m, &s, &result);
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == VICTIM);
    EXPECT(moe_backend_cpu.session_lost(s.session) == 1u << VICTIM);
    EXPECT(is(run_step(s.session, &s.args, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == VICTIM);
    leave_session(&s);
    m->live &= ~(UINT64_C(1) << VICTIM);
    EXPECT(good(small_layer(s.device, m, m->live, &others)));
    EXPECT(good(join_session(m, &s, 8, LONG_MS, false)));
    EXPECT(
        is(run_step(s.session, &s.args, &result), MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE));
    s.args.layer = others;
    EXPECT(good(run_step(s.session, &s.args, &result)));
    EXPECT(result.missing_slot == -1);
    moe_backend_cpu.layer_destroy(others);
    return close_fixture(&s);
}

static int be_killed_or_survive(struct member *m)
{
    if (m->slot != VICTIM)
        return survive(m, LONG_MS); /* long: only the closed socket ends the wait in time */
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    (void)step_until_failure(m, &s, &result);
    return 1;
}

static void a_killed_peer_costs_the_survivors_one_step_and_no_weights(void **state)
{
    (void)state;
    assert_true(survive_a_kill(3, be_killed_or_survive, 20));
}

static int be_stopped_or_survive(struct member *m)
{
    if (m->slot != VICTIM)
        return survive(m, SHORT_MS);
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, SHORT_MS, false));
    /* When it is resumed, the others have gone. */
    EXPECT(is(step_until_failure(m, &s, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot != VICTIM);
    return close_fixture(&s);
}

static void a_stopped_peer_is_named_by_all_when_the_budget_is_used_up(void **state)
{
    (void)state;
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, 3, be_stopped_or_survive, NULL);
    bool stepping = await_flag(g.board, VICTIM, 20);
    kill(g.pid[VICTIM], SIGSTOP);
    for (uint32_t s = 0; s < 3; s++)
        if (s != VICTIM)
            (void)waitpid(g.pid[s], &status[s], 0);
    kill(g.pid[VICTIM], SIGCONT);
    (void)waitpid(g.pid[VICTIM], &status[VICTIM], 0);
    for (uint32_t s = 0; s < 3; s++) {
        g.pid[s] = 0;
        assert_true(WIFEXITED(status[s]));
        assert_int_equal(WEXITSTATUS(status[s]), 0);
    }
    assert_true(group_finish(&g, WATCHDOG_S, status));
    assert_true(stepping);
}

/* Slot 1 fails; slot 0 waits for it with a budget longer than the group's watchdog. */
static int get_notice_of_a_failure(struct member *m)
{
    struct session_fixture s;
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, 1000 * WATCHDOG_S * 2, false));
    if (m->slot == 1) {
        struct moe_status broken =
            moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "made up");
        EXPECT(await_flag(m->board, 0, 1));
        moe_cpu_session_fail(s.session, &broken);
        EXPECT(await_flag(m->board, 0, 2)); /* the socket stays open until slot 0 has ended */
        return close_fixture(&s);
    }
    raise_flag(m, 1);
    EXPECT(is(run_step(s.session, &s.args, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == 1);
    raise_flag(m, 2);
    return close_fixture(&s);
}

static void a_failed_slot_ends_the_waits_of_the_others(void **state)
{
    (void)state;
    assert_true(run_group(2, get_notice_of_a_failure));
}

/* Slot 2 waits for slot 0, which waits for slot 1: the error must name slot 1. ctx: budget in ms of
 * each slot. */
static int wait_in_a_chain(struct member *m)
{
    const uint32_t *budget_ms = m->ctx;
    struct session_fixture s;
    uint32_t value;
    EXPECT(open_fixture(m, &s, budget_ms[m->slot], false));
    if (m->slot != 1) {
        uint32_t slot = m->slot == 2 ? 0 : 1;
        raise_flag(m, 1);
        EXPECT(await_flag(m->board, 0, 1) && await_flag(m->board, 2, 1)); /* both wait from now */
        const uint64_t *flag =
            moe_window_done_of(&s.session->layout, moe_cpu_session_own(s.session), slot);
        EXPECT(is(moe_cpu_session_wait(s.session, flag, moe_window_stamp(7, 1), slot, &value),
                  MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
        EXPECT(s.session->missing == 1);
        raise_flag(m, 2);
    }
    EXPECT(await_flag(m->board, 0, 2) && await_flag(m->board, 2, 2));
    return close_fixture(&s);
}

static void a_slot_that_waits_for_another_is_not_reported_lost(void **state)
{
    (void)state;
    uint32_t one_waits_on[3] = {LONG_MS, LONG_MS, SHORT_MS};
    uint32_t both_give_up[3] = {SHORT_MS, SHORT_MS, SHORT_MS};
    assert_true(run_group_with(3, wait_in_a_chain, one_waits_on));
    assert_true(run_group_with(3, wait_in_a_chain, both_give_up));
}

/* ------------------------------------------------------------------- abort */

static void *abort_soon(void *session)
{
    usleep(50000);
    moe_backend_cpu.session_abort(session);
    return NULL;
}

static int abort_a_step(struct member *m)
{
    struct session_fixture s;
    struct moe_step *step[2];
    struct moe_step_result result;
    EXPECT(open_fixture(m, &s, 1000 * WATCHDOG_S * 2, false));
    if (m->slot == 1) {
        EXPECT(await_flag(m->board, 0, 1)); /* takes part in no step */
        return close_fixture(&s);
    }
    pthread_t thread;
    for (int i = 0; i < 2; i++)
        EXPECT(good(moe_backend_cpu.step_enqueue(s.session, &s.args, &step[i])));
    EXPECT(is(moe_backend_cpu.step_wait(step[0], moe_clock_ns(), &result), MOE_DEADLINE_EXCEEDED,
              MOE_REASON_NONE));
    EXPECT(pthread_create(&thread, NULL, abort_soon, s.session) == 0);
    for (int i = 0; i < 2; i++) {
        EXPECT(is(moe_backend_cpu.step_wait(step[i], MOE_NEVER, &result), MOE_ABORTED,
                  MOE_REASON_ABORTED));
        EXPECT(result.missing_slot == -1);
    }
    pthread_join(thread, NULL);
    EXPECT(is(moe_backend_cpu.session_exchange(s.session, NULL, NULL, 0), MOE_ABORTED,
              MOE_REASON_ABORTED));
    EXPECT(moe_backend_cpu.session_lost(s.session) == 0);
    raise_flag(m, 1);
    return close_fixture(&s);
}

static void abort_ends_present_and_later_waits(void **state)
{
    (void)state;
    assert_true(run_group(2, abort_a_step));
}

/* -------------------------------------------------------------------- join */

/* Joins with members missing; 0 if the status is `code`. A late member counts as a missing one, so
 * the budget may be shorter than a step's. */
static int join_fails(struct member *m, moe_allgather_fn gather, enum moe_code code,
                      enum moe_reason reason)
{
    struct moe_device_config device_config = {.threads = 1};
    struct moe_session_config config = member_session(m, 7, SHORT_MS / 5);
    struct moe_device *device;
    struct moe_session *session = NULL;
    struct moe_device_info info;
    config.allgather = gather;
    EXPECT(good(moe_backend_cpu.device_open(&device_config, &device)));
    EXPECT(is(moe_backend_cpu.session_join(device, &config, &session), code, reason));
    EXPECT(session == NULL);
    moe_backend_cpu.device_info(device, &info);
    EXPECT(info.used_bytes == 0);
    moe_backend_cpu.device_close(device);
    return 0;
}

static struct moe_status gather_and_vanish(void *ctx, const void *mine, void *all, size_t bytes)
{
    struct moe_status st = board_allgather(ctx, mine, all, bytes);
    _exit(moe_failed(&st) ? 1 : 0);
}

static int the_lower_vanishes(struct member *m)
{
    return join_fails(m, m->slot == 0 ? gather_and_vanish : board_allgather, MOE_UNAVAILABLE,
                      MOE_REASON_PEER_LOST);
}

static int the_higher_vanishes(struct member *m)
{
    return join_fails(m, m->slot == 1 ? gather_and_vanish : board_allgather, MOE_UNAVAILABLE,
                      MOE_REASON_PEER_LOST);
}

/* An all-gather of a caller with missing members: their entries are zero. */
static struct moe_status gather_alone(void *ctx, const void *mine, void *all, size_t bytes)
{
    struct member *m = ctx;
    memset(all, 0, bytes * m->slots);
    memcpy((uint8_t *)all + m->slot * bytes, mine, bytes);
    return moe_ok();
}

static int nobody_else_comes(struct member *m)
{
    return m->slot == 1 ? 0 : join_fails(m, gather_alone, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST);
}

static void a_member_that_never_shows_up_fails_the_join_in_bounded_time(void **state)
{
    (void)state;
    assert_true(run_group(2, nobody_else_comes));
    assert_true(run_group(2, the_lower_vanishes));
    assert_true(run_group(2, the_higher_vanishes));
}

static int join_with_another_epoch(struct member *m)
{
    struct moe_device_config device_config = {.threads = 1};
    struct moe_session_config config = member_session(m, 7 + m->slot, LONG_MS);
    struct moe_device *device;
    struct moe_session *session;
    EXPECT(good(moe_backend_cpu.device_open(&device_config, &device)));
    EXPECT(is(moe_backend_cpu.session_join(device, &config, &session), MOE_FAILED_PRECONDITION,
              MOE_REASON_VERSION_MISMATCH));
    config.slot = m->slots;
    EXPECT(is(moe_backend_cpu.session_join(device, &config, &session), MOE_INVALID_ARGUMENT,
              MOE_REASON_CONFIG_INVALID));
    moe_backend_cpu.device_close(device);
    return 0;
}

static void slots_of_different_views_do_not_join(void **state)
{
    (void)state;
    assert_true(run_group(3, join_with_another_epoch));
}

static uint32_t entries_in(const char *folder)
{
    uint32_t n = 0;
    DIR *d = opendir(folder);
    MOE_INVARIANT(d != NULL);
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

static uint32_t window_mappings(void)
{
    char line[512];
    uint32_t n = 0;
    FILE *f = fopen("/proc/self/maps", "re");
    MOE_INVARIANT(f != NULL);
    while (fgets(line, sizeof line, f) != NULL)
        n += strstr(line, "moe-window") != NULL;
    fclose(f);
    return n;
}

/* Joins, steps and leaves `times`; numbers epochs from `epoch`. */
static bool cycle(struct member *m, struct session_fixture *s, uint64_t epoch, uint32_t times)
{
    struct moe_step_result result;
    for (uint32_t i = 0; i < times; i++) {
        if (!good(join_session(m, s, epoch + i, LONG_MS, false)) ||
            !good(run_step(s->session, &s->args, &result)) || window_mappings() != m->slots)
            return false;
        leave_session(s);
    }
    return true;
}

static int join_and_leave(struct member *m)
{
    struct session_fixture s;
    struct moe_device_info before, after;
    EXPECT(open_fixture(m, &s, LONG_MS, false));
    leave_session(&s);
    EXPECT(cycle(m, &s, 100, 10)); /* the device caches scratch: it grows to the size of a step */
    uint32_t fds = entries_in("/proc/self/fd"), threads = entries_in("/proc/self/task");
    moe_backend_cpu.device_info(s.device, &before);
    EXPECT(cycle(m, &s, 200, 50));
    moe_backend_cpu.device_info(s.device, &after);
    EXPECT(entries_in("/proc/self/fd") == fds);
    EXPECT(entries_in("/proc/self/task") == threads);
    EXPECT(window_mappings() == 0);
    EXPECT(after.used_bytes == before.used_bytes);
    return close_fixture(&s);
}

static void fifty_joins_and_leaves_leak_nothing(void **state)
{
    (void)state;
    assert_true(run_group(3, join_and_leave));
}

/* ------------------------------------------------------------------------- masks */

#ifdef MOE_HAVE_UCX
enum { CONNECTED = 1, STOPPED = 2, MASKED = 3 }; /* flags */

/* Sends to the victim, which has stopped, until no message is free. */
static bool use_all_messages(const struct moe_session *s)
{
    const size_t bytes = s->layout.row_region < 4096 ? s->layout.row_region : 4096;
    struct moe_cpu_message *m = NULL;
    for (uint32_t i = 0; i < 2 * MOE_CPU_MAX_MESSAGES; i++) {
        m = moe_cpu_network_take(s->network, VICTIM);
        if (m == NULL)
            return true;
        void *to;
        while ((to = moe_cpu_message_store(m, s->layout.rows, bytes)) != NULL)
            memset(to, 0, bytes);
        moe_cpu_network_send(s->network, m);
    }
    return false;
}

static int lose_a_stopped_slot(struct member *m)
{
    struct session_fixture s;
    EXPECT(open_fixture(m, &s, SHORT_MS, false));
    EXPECT(good(backend->session_exchange(s.session, NULL, NULL, 0)));
    raise_flag(m, CONNECTED);
    if (m->slot == VICTIM) {
        for (uint32_t p = 0; p < m->slots; p++)
            EXPECT(p == VICTIM || await_flag(m->board, p, MASKED));
        return close_fixture(&s);
    }
    EXPECT(await_flag(m->board, VICTIM, STOPPED));
    EXPECT(use_all_messages(s.session));
    EXPECT(good(backend->session_mask(s.session, 9, m->live & ~(UINT64_C(1) << VICTIM))));
    for (int i = 0; i < 3; i++)
        EXPECT(good(backend->session_exchange(s.session, NULL, NULL, 0)));
    raise_flag(m, MASKED);
    return close_fixture(&s);
}

static void a_stopped_slot_holds_no_message_that_others_need(void **state)
{
    (void)state;
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_domain_size = 1; /* all over the network */
    group_start(&g, 3, lose_a_stopped_slot, NULL);
    assert_true(await_flag(g.board, VICTIM, CONNECTED));
    kill(g.pid[VICTIM], SIGSTOP);
    __atomic_store_n(&g.board->flag[VICTIM], STOPPED, __ATOMIC_RELEASE);
    for (uint32_t s = 0; s < 3; s++)
        assert_true(s == VICTIM || await_flag(g.board, s, MASKED));
    kill(g.pid[VICTIM], SIGCONT);
    assert_true(group_finish(&g, WATCHDOG_S, status));
    group_domain_size = 0;
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_peer_costs_the_survivors_one_step_and_no_weights),
        cmocka_unit_test(a_stopped_peer_is_named_by_all_when_the_budget_is_used_up),
        cmocka_unit_test(a_failed_slot_ends_the_waits_of_the_others),
        cmocka_unit_test(a_slot_that_waits_for_another_is_not_reported_lost),
        cmocka_unit_test(abort_ends_present_and_later_waits),
        cmocka_unit_test(a_member_that_never_shows_up_fails_the_join_in_bounded_time),
        cmocka_unit_test(slots_of_different_views_do_not_join),
        cmocka_unit_test(fifty_joins_and_leaves_leak_nothing),
#ifdef MOE_HAVE_UCX
        cmocka_unit_test(a_stopped_slot_holds_no_message_that_others_need),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
