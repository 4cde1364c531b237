/* Sessions of the CPU backend under fault: peers that die, hang, never come or say something else.
 *
 * Every test forks its group before it makes a thread. Members report by their exit status: 0 when
 * all they saw was right. Budgets are short where a wait must run out and long where it must not;
 * nothing is decided by how long something took. */
#include "group.h"

#include "base/clock.h"
#include "cpu/session.h"

#include <setjmp.h>
#include <stdarg.h>
/* cmocka.h wants the headers above before it. */
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    HIDDEN = 24,
    INNER = 10,
    TOP_K = 2,
    TOKENS = 5,
    BUCKET = 8,
    SHORT_MS = 1500,  /* budget where a wait is meant to run out */
    LONG_MS = 60000,  /* budget where it is not */
    PATIENCE_S = 100, /* watchdog of a group */
};

/* In a member: ends it with a message when `cond` does not hold. */
#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "slot %u, line %d: expected %s\n", m->slot, __LINE__, #cond);          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static bool is(struct moe_status st, enum moe_code code, enum moe_reason reason)
{
    if (st.code == code && st.reason == reason)
        return true;
    fprintf(stderr, "got %s/%s: %s\n", moe_code_name(st.code), moe_reason_name(st.reason),
            st.code == MOE_OK ? "" : st.text);
    return false;
}

static bool good(struct moe_status st)
{
    return is(st, MOE_OK, MOE_REASON_NONE);
}

/* ------------------------------------------------------------- a small layer */

static struct moe_status upload(struct moe_layer *layer, const struct moe_layer_spec *spec,
                                enum moe_weight w, uint32_t expert)
{
    float data[32 * HIDDEN];
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    struct rng r = {.state = (uint64_t)w * 1000 + expert};
    MOE_INVARIANT(rows * columns <= sizeof data / sizeof *data);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = rng_float(&r);
    return moe_backend_cpu.layer_upload(layer, w, expert, MOE_DTYPE_F32, data,
                                        rows * columns * sizeof *data);
}

/* Two experts on each slot of `holders`; weights depend on the expert alone. */
static struct moe_status small_layer(struct moe_device *device, const struct member *m,
                                     uint64_t holders, struct moe_layer **out)
{
    uint32_t offset[2 * MOE_MAX_SLOTS + 1] = {0}, n = 0;
    uint16_t slot[2 * MOE_MAX_SLOTS];
    for (uint32_t s = 0; s < m->slots; s++)
        for (uint32_t i = 0; i < 2 && (holders >> s & 1); i++) {
            slot[n++] = (uint16_t)s;
            offset[n] = n;
        }
    struct moe_layer_spec spec = {
        .layer = 3,
        .hidden = HIDDEN,
        .experts = n,
        .intermediate = INNER,
        .router = {.score = MOE_SCORE_SIGMOID,
                   .top_k = TOP_K,
                   .groups = 1,
                   .topk_group = 1,
                   .group_best = 1,
                   .renorm = MOE_RENORM_SUM,
                   .scale = 1},
    };
    struct moe_placement placement = {
        .version = 1, .experts = n, .slots = m->slots, .offset = offset, .slot = slot};
    MOE_TRY(moe_backend_cpu.layer_create(device, &spec, &placement, m->slot, out));
    struct moe_status st = upload(*out, &spec, MOE_WEIGHT_ROUTER, 0);
    for (uint32_t e = 0; e < n && !moe_failed(&st); e++) {
        if (slot[e] != m->slot)
            continue;
        st = upload(*out, &spec, MOE_WEIGHT_GATE, e);
        if (!moe_failed(&st))
            st = upload(*out, &spec, MOE_WEIGHT_UP, e);
        if (!moe_failed(&st))
            st = upload(*out, &spec, MOE_WEIGHT_DOWN, e);
    }
    return moe_failed(&st) ? st : moe_backend_cpu.layer_finish(*out);
}

/* One slot's tensors for the small layer. */
struct tensors {
    float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN], weights[TOKENS * TOP_K];
    int32_t ids[TOKENS * TOP_K];
    uint8_t state[TOKENS];
};

static struct moe_step_args small_step(struct moe_layer *layer, const struct member *m,
                                       struct tensors *t)
{
    struct rng r = {.state = m->slot};
    for (size_t i = 0; i < TOKENS * HIDDEN; i++)
        t->x[i] = rng_float(&r);
    return (struct moe_step_args){.layer = layer,
                                  .dtype = MOE_DTYPE_F32,
                                  .bucket = BUCKET,
                                  .tokens = TOKENS,
                                  .x = t->x,
                                  .y = t->y,
                                  .ids_out = t->ids,
                                  .weights_out = t->weights,
                                  .token_state = t->state};
}

static struct moe_status run_step(struct moe_session *s, const struct moe_step_args *a,
                                  struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(moe_backend_cpu.step_enqueue(s, a, &step));
    return moe_backend_cpu.step_wait(step, MOE_NEVER, result);
}

/* A member with a device, a layer over all live slots and a session. */
struct seat {
    struct moe_device *device;
    struct moe_layer *layer;
    struct moe_session *session;
    struct tensors tensors;
    struct moe_step_args args;
};

static bool sit_down(struct member *m, struct seat *s, uint32_t budget_ms)
{
    struct moe_device_config device = {.threads = 1};
    struct moe_session_config config = member_session(m, 7, budget_ms);
    *s = (struct seat){0};
    if (!good(moe_backend_cpu.device_open(&device, &s->device)) ||
        !good(small_layer(s->device, m, m->live, &s->layer)) ||
        !good(moe_backend_cpu.session_join(s->device, &config, &s->session)))
        return false;
    s->args = small_step(s->layer, m, &s->tensors);
    return true;
}

static int get_up(struct seat *s)
{
    moe_backend_cpu.session_leave(s->session);
    moe_backend_cpu.layer_destroy(s->layer);
    moe_backend_cpu.device_close(s->device);
    return 0;
}

static bool raise_flag(struct member *m, uint32_t value)
{
    __atomic_store_n(&m->board->flag[m->slot], value, __ATOMIC_RELEASE);
    return true;
}

/* False when the group failed or a minute passed. */
static bool await_flag(struct board *b, uint32_t slot, uint32_t at_least)
{
    for (uint32_t turn = 0; turn < 60000; turn++) {
        if (__atomic_load_n(&b->flag[slot], __ATOMIC_ACQUIRE) >= at_least)
            return true;
        if (__atomic_load_n(&b->failed, __ATOMIC_ACQUIRE))
            return false;
        usleep(1000);
    }
    return false;
}

static void run_group_with(uint32_t slots, int (*fn)(struct member *), void *ctx)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, fn, ctx);
    assert_true(group_finish(&g, PATIENCE_S, status));
}

static void run_group(uint32_t slots, int (*fn)(struct member *))
{
    run_group_with(slots, fn, NULL);
}

/* ------------------------------------------------------------- lost peers */

/* Steps until one fails; the answer of that one. */
static struct moe_status step_until_failure(struct member *m, struct seat *s,
                                            struct moe_step_result *result)
{
    for (uint32_t n = 1;; n++) {
        struct moe_status st = run_step(s->session, &s->args, result);
        if (moe_failed(&st))
            return st;
        raise_flag(m, n);
    }
}

enum { VICTIM = 1 };

/* What a survivor sees, and what it still can do: the same weights, in a session without the
 * victim. */
static int survive(struct member *m, uint32_t budget_ms)
{
    struct seat s;
    struct moe_step_result result;
    struct moe_layer *rest = NULL;
    EXPECT(sit_down(m, &s, budget_ms));
    struct moe_status st = step_until_failure(m, &s, &result);
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == VICTIM);
    EXPECT(moe_backend_cpu.session_lost(s.session) == 1u << VICTIM);
    EXPECT(is(run_step(s.session, &s.args, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == VICTIM);
    moe_backend_cpu.session_leave(s.session);
    m->live &= ~(UINT64_C(1) << VICTIM);
    EXPECT(good(small_layer(s.device, m, m->live, &rest)));
    struct moe_session_config config = member_session(m, 8, LONG_MS);
    EXPECT(good(moe_backend_cpu.session_join(s.device, &config, &s.session)));
    EXPECT(
        is(run_step(s.session, &s.args, &result), MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE));
    s.args.layer = rest;
    EXPECT(good(run_step(s.session, &s.args, &result)));
    EXPECT(result.missing_slot == -1);
    moe_backend_cpu.layer_destroy(rest);
    return get_up(&s);
}

static int be_killed_or_survive(struct member *m)
{
    if (m->slot != VICTIM)
        return survive(m, LONG_MS); /* long: only the closed socket can tell in time */
    struct seat s;
    struct moe_step_result result;
    EXPECT(sit_down(m, &s, LONG_MS));
    (void)step_until_failure(m, &s, &result);
    return 1;
}

static void a_killed_peer_costs_the_survivors_one_step_and_no_weights(void **state)
{
    (void)state;
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, 3, be_killed_or_survive, NULL);
    bool stepping = await_flag(g.board, VICTIM, 20);
    kill(g.pid[VICTIM], SIGKILL);
    (void)group_finish(&g, PATIENCE_S, status);
    assert_true(stepping);
    for (uint32_t s = 0; s < 3; s++)
        assert_true(s == VICTIM ? WIFSIGNALED(status[s])
                                : WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == 0);
}

static int be_stopped_or_survive(struct member *m)
{
    if (m->slot != VICTIM)
        return survive(m, SHORT_MS);
    struct seat s;
    struct moe_step_result result;
    EXPECT(sit_down(m, &s, SHORT_MS));
    /* When it is woken up again, the others are gone. */
    EXPECT(is(step_until_failure(m, &s, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot != VICTIM);
    return get_up(&s);
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
    assert_true(group_finish(&g, PATIENCE_S, status));
    assert_true(stepping);
}

/* Slot 1 breaks; slot 0 waits for it with a budget longer than the group's watchdog. */
static int hear_of_a_failure(struct member *m)
{
    struct seat s;
    struct moe_step_result result;
    EXPECT(sit_down(m, &s, 1000 * PATIENCE_S * 2));
    if (m->slot == 1) {
        struct moe_status broken =
            moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "made up");
        EXPECT(await_flag(m->board, 0, 1));
        moe_cpu_session_fail(s.session, &broken);
        EXPECT(await_flag(m->board, 0, 2)); /* the socket stays open until slot 0 has ended */
        return get_up(&s);
    }
    raise_flag(m, 1);
    EXPECT(is(run_step(s.session, &s.args, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == 1);
    raise_flag(m, 2);
    return get_up(&s);
}

static void a_slot_that_breaks_ends_the_waits_of_the_others(void **state)
{
    (void)state;
    run_group(2, hear_of_a_failure);
}

/* Slot 2 waits for slot 0, which waits for slot 1: slot 1 is the one to name. ctx: budget in ms of
 * each slot. */
static int wait_in_a_chain(struct member *m)
{
    const uint32_t *budget_ms = m->ctx;
    struct seat s;
    uint32_t value;
    EXPECT(sit_down(m, &s, budget_ms[m->slot]));
    if (m->slot != 1) {
        uint32_t slot = m->slot == 2 ? 0 : 1;
        const uint64_t *word =
            moe_window_done_of(&s.session->layout, moe_cpu_session_own(s.session), slot);
        EXPECT(is(moe_cpu_session_wait(s.session, word, moe_window_stamp(7, 1), slot, &value),
                  MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
        EXPECT(s.session->missing == 1);
        raise_flag(m, 1);
    }
    EXPECT(await_flag(m->board, 0, 1) && await_flag(m->board, 2, 1));
    return get_up(&s);
}

static void who_only_waits_for_another_is_not_blamed(void **state)
{
    (void)state;
    uint32_t one_waits_on[3] = {LONG_MS, LONG_MS, 3 * SHORT_MS};
    uint32_t both_give_up[3] = {SHORT_MS, SHORT_MS, SHORT_MS};
    run_group_with(3, wait_in_a_chain, one_waits_on);
    run_group_with(3, wait_in_a_chain, both_give_up);
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
    struct seat s;
    struct moe_step *step[2];
    struct moe_step_result result;
    EXPECT(sit_down(m, &s, 1000 * PATIENCE_S * 2));
    if (m->slot == 1) {
        EXPECT(await_flag(m->board, 0, 1)); /* takes part in no step */
        return get_up(&s);
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
    return get_up(&s);
}

static void abort_ends_present_and_later_waits(void **state)
{
    (void)state;
    run_group(2, abort_a_step);
}

/* -------------------------------------------------------------------- join */

/* The status of a join that nothing is expected of but an end; 0 when it is `code`. */
static int join_fails(struct member *m, moe_allgather_fn gather, enum moe_code code,
                      enum moe_reason reason)
{
    struct moe_device_config device_config = {.threads = 1};
    struct moe_session_config config = member_session(m, 7, SHORT_MS);
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

/* A gather that does not find everybody, as a caller would write it: zeros for who is not there. */
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
    run_group(2, nobody_else_comes);
    run_group(2, the_lower_vanishes);
    run_group(2, the_higher_vanishes);
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
    run_group(3, join_with_another_epoch);
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
static bool cycle(struct member *m, struct seat *s, uint64_t epoch, uint32_t times)
{
    struct moe_step_result result;
    for (uint32_t i = 0; i < times; i++) {
        struct moe_session_config config = member_session(m, epoch + i, LONG_MS);
        if (!good(moe_backend_cpu.session_join(s->device, &config, &s->session)) ||
            !good(run_step(s->session, &s->args, &result)) || window_mappings() != m->slots)
            return false;
        moe_backend_cpu.session_leave(s->session);
        s->session = NULL;
    }
    return true;
}

static int join_and_leave(struct member *m)
{
    struct seat s;
    struct moe_device_info before, after;
    EXPECT(sit_down(m, &s, LONG_MS));
    moe_backend_cpu.session_leave(s.session);
    EXPECT(cycle(m, &s, 100, 10)); /* the device keeps scratch: it grows to what a step needs */
    uint32_t fds = entries_in("/proc/self/fd"), threads = entries_in("/proc/self/task");
    moe_backend_cpu.device_info(s.device, &before);
    EXPECT(cycle(m, &s, 200, 50));
    moe_backend_cpu.device_info(s.device, &after);
    EXPECT(entries_in("/proc/self/fd") == fds);
    EXPECT(entries_in("/proc/self/task") == threads);
    EXPECT(window_mappings() == 0);
    EXPECT(after.used_bytes == before.used_bytes);
    return get_up(&s);
}

static void fifty_joins_and_leaves_leak_nothing(void **state)
{
    (void)state;
    run_group(3, join_and_leave);
}

/* --------------------------------------------------------------- strangers */

static bool call_with_nonsense(const struct moe_cpu_card *card, bool speak)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, card->name, sizeof card->name);
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + sizeof card->name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    bool sent = fd >= 0 && connect(fd, (struct sockaddr *)&address, length) == 0 &&
                (!speak || send(fd, "let me in", 9, MSG_NOSIGNAL) == 9);
    if (speak)
        close(fd); /* the silent one stays until the process ends */
    return sent;
}

static int meet_among_strangers(struct member *m)
{
    struct moe_cpu_peers *peers;
    struct moe_cpu_card mine, cards[MOE_MAX_SLOTS];
    int fds[MOE_MAX_SLOTS], window = memfd_create("test", MFD_CLOEXEC);
    EXPECT(good(moe_cpu_peers_listen(m->slot, m->live, &peers, &mine)));
    EXPECT(good(board_allgather(m, &mine, cards, sizeof mine)));
    if (m->slot == 1) {
        EXPECT(call_with_nonsense(&cards[0], true));
        EXPECT(call_with_nonsense(&cards[0], false));
    }
    uint64_t deadline = moe_clock_ns() + LONG_MS * MOE_NS_PER_MS;
    EXPECT(good(moe_cpu_peers_meet(peers, cards, window, deadline, fds)));
    EXPECT(fds[m->slot] == -1 && fds[1 - m->slot] >= 0);
    close(fds[1 - m->slot]);
    close(window);
    moe_cpu_peers_close(peers);
    return 0;
}

static int meet_a_liar(struct member *m)
{
    struct moe_cpu_peers *peers;
    struct moe_cpu_card mine, cards[MOE_MAX_SLOTS];
    int fds[MOE_MAX_SLOTS], window = memfd_create("test", MFD_CLOEXEC);
    EXPECT(good(moe_cpu_peers_listen(m->slot, m->live, &peers, &mine)));
    EXPECT(good(board_allgather(m, &mine, cards, sizeof mine)));
    cards[1 - m->slot].secret[5] ^= 1;
    uint64_t deadline = moe_clock_ns() + SHORT_MS * MOE_NS_PER_MS;
    struct moe_status st = moe_cpu_peers_meet(peers, cards, window, deadline, fds);
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(fds[1 - m->slot] == -1);
    close(window);
    moe_cpu_peers_close(peers);
    return 0;
}

static void strangers_are_turned_away_and_do_not_hold_up_the_meeting(void **state)
{
    (void)state;
    run_group(2, meet_among_strangers);
    run_group(2, meet_a_liar);
}

static void ignore(void *ctx)
{
    (void)ctx;
}

/* Slot 1 says goodbye and closes with an unread message in its socket: the kernel reports that to
 * slot 0 before the goodbye. */
static int part_in_a_hurry(struct member *m)
{
    struct moe_cpu_peers *peers;
    struct moe_cpu_card mine, cards[MOE_MAX_SLOTS];
    int fds[MOE_MAX_SLOTS], window = memfd_create("test", MFD_CLOEXEC);
    EXPECT(good(moe_cpu_peers_listen(m->slot, m->live, &peers, &mine)));
    EXPECT(good(board_allgather(m, &mine, cards, sizeof mine)));
    uint64_t deadline = moe_clock_ns() + LONG_MS * MOE_NS_PER_MS;
    EXPECT(good(moe_cpu_peers_meet(peers, cards, window, deadline, fds)));
    close(window);
    close(fds[1 - m->slot]);
    if (m->slot == 0) {
        moe_cpu_peers_blame(peers, 0); /* never read */
        raise_flag(m, 1);
        EXPECT(await_flag(m->board, 1, 1));
        EXPECT(good(moe_cpu_peers_watch(peers, ignore, NULL)));
        while (moe_cpu_peers_gone(peers) == 0 && moe_cpu_peers_lost(peers) == 0)
            usleep(1000);
        EXPECT(moe_cpu_peers_lost(peers) == 0);
        moe_cpu_peers_close(peers);
        return 0;
    }
    EXPECT(await_flag(m->board, 0, 1));
    moe_cpu_peers_blame(peers, 0); /* a goodbye */
    moe_cpu_peers_close(peers);
    raise_flag(m, 1);
    return 0;
}

static void who_leaves_in_good_order_is_not_lost(void **state)
{
    (void)state;
    run_group(2, part_in_a_hurry);
}

static void a_window_that_could_shrink_is_not_mapped(void **state)
{
    (void)state;
    struct moe_window_shape shape = {2, 64, 32, 4, 8};
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
    close(fd);
    moe_cpu_window_unmap(&window);
}

static void windows_of_impossible_shapes_are_refused(void **state)
{
    (void)state;
    struct moe_window_layout l;
    const struct moe_window_shape fits = {MOE_MAX_SLOTS, MOE_WINDOW_MAX_TOKENS, MOE_MAX_HIDDEN,
                                          MOE_MAX_TOP_K, MOE_MAX_EXPERTS};
    assert_true(moe_window_layout_of(&fits, &l));
    assert_true(l.bytes >= 2 * (size_t)MOE_MAX_SLOTS * l.region && l.bytes % MOE_WINDOW_PAGE == 0);
    for (int field = 0; field < 5; field++)
        for (int zero = 0; zero < 2; zero++) {
            struct moe_window_shape s = fits;
            uint32_t *each[] = {&s.slots, &s.max_tokens, &s.max_hidden, &s.max_top_k,
                                &s.max_experts};
            *each[field] = zero ? 0 : *each[field] + 1;
            assert_false(moe_window_layout_of(&s, &l));
        }
}

/* ------------------------------------------------------------ words and steps */

static uint64_t *exchange_word(struct moe_session *s, uint32_t window, uint32_t number)
{
    return &moe_window_exchange_of(&s->layout, s->window[window].base, number & 1, 1)->word;
}

/* Slot 1 writes words of other views and steps where slot 0 waits for exchange 1 of view 7. */
static int write_late(struct member *m)
{
    struct seat s;
    EXPECT(sit_down(m, &s, SHORT_MS));
    if (m->slot == 1) {
        const uint64_t stale[] = {moe_window_stamp(6, 1), moe_window_stamp(7, 0),
                                  moe_window_stamp(7, 2), moe_window_stamp(8, 1)};
        for (size_t i = 0; i < sizeof stale / sizeof *stale; i++) {
            moe_cpu_session_store(exchange_word(s.session, 0, 1), stale[i], 8);
            moe_cpu_session_ring(s.session, 0);
            usleep(20000);
        }
        EXPECT(await_flag(m->board, 0, 1));
        return get_up(&s);
    }
    uint64_t mine = 1, all[2];
    struct moe_status st = moe_backend_cpu.session_exchange(s.session, &mine, all, sizeof mine);
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    raise_flag(m, 1);
    return get_up(&s);
}

/* The same with the one word that is right. */
static int write_in_time(struct member *m)
{
    struct seat s;
    EXPECT(sit_down(m, &s, LONG_MS));
    if (m->slot == 1) {
        moe_cpu_session_store(exchange_word(s.session, 0, 1), moe_window_stamp(7, 1), 8);
        moe_cpu_session_ring(s.session, 0);
        EXPECT(await_flag(m->board, 0, 1));
        return get_up(&s);
    }
    uint64_t mine = 1, all[2];
    EXPECT(good(moe_backend_cpu.session_exchange(s.session, &mine, all, sizeof mine)));
    raise_flag(m, 1);
    return get_up(&s);
}

static void words_of_another_view_or_step_satisfy_no_wait(void **state)
{
    (void)state;
    run_group(2, write_late);
    run_group(2, write_in_time);
}

/* Slot 2 means another step than the others: nobody runs it, and all can go on. */
static int disagree(struct member *m)
{
    struct seat s;
    struct moe_step_result result;
    EXPECT(sit_down(m, &s, LONG_MS));
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
        other.dtype = MOE_DTYPE_BF16; /* x is read as half its bytes: legal, if meaningless */
    EXPECT(is(run_step(s.session, &other, &result), MOE_FAILED_PRECONDITION,
              MOE_REASON_SHAPE_MISMATCH));
    EXPECT(good(run_step(s.session, &s.args, &result)));
    return get_up(&s);
}

static void slots_that_mean_different_steps_all_refuse_and_go_on(void **state)
{
    (void)state;
    run_group(3, disagree);
}

static int bad_arguments(struct member *m)
{
    struct seat s;
    struct moe_step_result result;
    EXPECT(sit_down(m, &s, LONG_MS));
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
    return get_up(&s);
}

static void bad_arguments_are_refused_before_anything_is_run(void **state)
{
    (void)state;
    run_group(2, bad_arguments);
}

/* The number of a step has 28 bits; what comes after its largest value must not look old. */
static int run_through_the_last_step_number(struct member *m)
{
    struct seat s;
    struct moe_step_result result;
    float first[TOKENS * HIDDEN];
    EXPECT(sit_down(m, &s, LONG_MS));
    EXPECT(good(run_step(s.session, &s.args, &result)));
    memcpy(first, s.tensors.y, sizeof first);
    s.session->step = (1u << MOE_WINDOW_STEP_BITS) - 4;
    /* A word of an early step that no later one happened to overwrite. */
    uint64_t *old = moe_window_sent_of(&s.session->layout, moe_cpu_session_own(s.session),
                                       (m->slot + 1) % m->slots, 200);
    moe_cpu_session_store(old, moe_window_stamp(7, 2), 1);
    for (int i = 0; i < 8; i++) {
        memset(s.tensors.y, 0xff, sizeof s.tensors.y);
        EXPECT(good(run_step(s.session, &s.args, &result)));
        EXPECT(memcmp(first, s.tensors.y, sizeof first) == 0);
    }
    EXPECT(s.session->step == 5);
    EXPECT(*old == 0);
    return get_up(&s);
}

static void steps_go_on_when_their_number_runs_out_of_bits(void **state)
{
    (void)state;
    run_group(3, run_through_the_last_step_number);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_peer_costs_the_survivors_one_step_and_no_weights),
        cmocka_unit_test(a_stopped_peer_is_named_by_all_when_the_budget_is_used_up),
        cmocka_unit_test(a_slot_that_breaks_ends_the_waits_of_the_others),
        cmocka_unit_test(who_only_waits_for_another_is_not_blamed),
        cmocka_unit_test(abort_ends_present_and_later_waits),
        cmocka_unit_test(a_member_that_never_shows_up_fails_the_join_in_bounded_time),
        cmocka_unit_test(slots_of_different_views_do_not_join),
        cmocka_unit_test(fifty_joins_and_leaves_leak_nothing),
        cmocka_unit_test(strangers_are_turned_away_and_do_not_hold_up_the_meeting),
        cmocka_unit_test(who_leaves_in_good_order_is_not_lost),
        cmocka_unit_test(a_window_that_could_shrink_is_not_mapped),
        cmocka_unit_test(windows_of_impossible_shapes_are_refused),
        cmocka_unit_test(words_of_another_view_or_step_satisfy_no_wait),
        cmocka_unit_test(slots_that_mean_different_steps_all_refuse_and_go_on),
        cmocka_unit_test(bad_arguments_are_refused_before_anything_is_run),
        cmocka_unit_test(steps_go_on_when_their_number_runs_out_of_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
