/* Sessions of any backend under fault, from start to end of a step: a peer that dies, an abort,
 * slots that mean different steps, and many joins and leaves.
 *
 *     faults --backend cuda --slots 4 [--transport network]
 *
 * Uses the backend's table alone. Forks one process per slot, anew for each scenario. Nothing is
 * decided by how long something took; where a wait must run out, its budget is short. */
#include "group.h"

#include "base/clock.h"
#include "base/options.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    HIDDEN = 64,
    INNER = 16,
    TOP_K = 2,
    TOKENS = 5,
    BUCKET = 8,
    VICTIM = 1,
    SHORT_MS = 1500,
    LONG_MS = 60000,
    CYCLES = 8,
    PATIENCE_S = 100,
};

#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "slot %u, line %d: expected %s\n", m->slot, __LINE__, #cond);          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static const struct moe_backend *backend;

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

/* -------------------------------------------------------------------- seats */

/* A member with a device, a layer, tensors and a session. */
struct seat {
    struct moe_device *device;
    struct moe_layer *layer;
    struct moe_session *session;
    void *tensors;
    size_t bytes;
    struct moe_step_args args; /* a step that is right */
};

static struct moe_status upload(struct moe_layer *layer, const struct moe_layer_spec *spec,
                                enum moe_weight w, uint32_t expert)
{
    float data[2 * MOE_MAX_SLOTS * HIDDEN];
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    struct rng r = {.state = (uint64_t)w * 1000 + expert};
    MOE_INVARIANT(rows * columns <= sizeof data / sizeof *data);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = rng_float(&r);
    return backend->layer_upload(layer, w, expert, MOE_DTYPE_F32, data,
                                 rows * columns * sizeof *data);
}

/* Two experts on each slot of `holders`. */
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
    static const enum moe_weight each[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_UP, MOE_WEIGHT_DOWN};
    MOE_TRY(backend->layer_create(device, &spec, &placement, m->slot, out));
    MOE_TRY(upload(*out, &spec, MOE_WEIGHT_ROUTER, 0));
    for (uint32_t e = 0; e < n; e++)
        for (uint32_t i = 0; i < 3 && slot[e] == m->slot; i++)
            MOE_TRY(upload(*out, &spec, each[i], e));
    return backend->layer_finish(*out);
}

/* One block of host memory for all tensors of a step. */
static struct moe_status lay_table(struct seat *s, const struct member *m)
{
    size_t rows = TOKENS * HIDDEN * sizeof(float), pairs = TOKENS * TOP_K * sizeof(float);
    s->bytes = 2 * rows + 2 * pairs + TOKENS;
    MOE_TRY(backend->mem_alloc(s->device, MOE_MEM_HOST, s->bytes, &s->tensors));
    char *at = s->tensors;
    struct rng r = {.state = m->slot};
    for (uint32_t i = 0; i < TOKENS * HIDDEN; i++)
        ((float *)s->tensors)[i] = rng_float(&r);
    s->args = (struct moe_step_args){.layer = s->layer,
                                     .dtype = MOE_DTYPE_F32,
                                     .bucket = BUCKET,
                                     .tokens = TOKENS,
                                     .x = at,
                                     .y = at + rows,
                                     .ids_out = (void *)(at + 2 * rows),
                                     .weights_out = (void *)(at + 2 * rows + pairs),
                                     .token_state = (void *)(at + 2 * rows + 2 * pairs)};
    return moe_ok();
}

static struct moe_status sit_down(struct member *m, struct seat *s, uint32_t budget_ms)
{
    *s = (struct seat){0};
    struct moe_device_config device = {.ordinal = (int)m->slot, .threads = 1};
    struct moe_session_config session = member_session(m, 7, budget_ms);
    MOE_TRY(backend->device_open(&device, &s->device));
    MOE_TRY(small_layer(s->device, m, m->live, &s->layer));
    MOE_TRY(lay_table(s, m));
    return backend->session_join(s->device, &session, &s->session);
}

static int get_up(struct seat *s)
{
    backend->session_leave(s->session);
    backend->mem_free(s->device, MOE_MEM_HOST, s->tensors, s->bytes);
    backend->layer_destroy(s->layer);
    backend->device_close(s->device);
    return 0;
}

static struct moe_status run_step(struct seat *s, struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(backend->step_enqueue(s->session, &s->args, &step));
    return backend->step_wait(step, MOE_NEVER, result);
}

static struct moe_status step_until_failure(struct member *m, struct seat *s,
                                            struct moe_step_result *result)
{
    for (uint32_t n = 1;; n++) {
        struct moe_status st = run_step(s, result);
        if (moe_failed(&st))
            return st;
        __atomic_store_n(&m->board->flag[m->slot], n, __ATOMIC_RELEASE);
    }
}

/* ---------------------------------------------------------------- scenarios */

/* The same weights, in a session without the victim. */
static int go_on_without_victim(struct member *m, struct seat *s)
{
    struct moe_step_result result;
    struct moe_layer *rest = NULL;
    m->live &= ~(UINT64_C(1) << VICTIM);
    EXPECT(good(small_layer(s->device, m, m->live, &rest)));
    struct moe_session_config config = member_session(m, 8, LONG_MS);
    EXPECT(good(backend->session_join(s->device, &config, &s->session)));
    EXPECT(is(run_step(s, &result), MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE));
    s->args.layer = rest;
    for (int i = 0; i < 20; i++)
        EXPECT(good(run_step(s, &result)));
    EXPECT(result.missing_slot == -1);
    backend->layer_destroy(rest);
    return 0;
}

static int be_killed_or_survive(struct member *m)
{
    struct seat s;
    struct moe_step_result result;
    EXPECT(good(sit_down(m, &s, SHORT_MS)));
    struct moe_status st = step_until_failure(m, &s, &result);
    if (m->slot == VICTIM)
        return 1;
    EXPECT(is(st, MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    EXPECT(result.missing_slot == VICTIM);
    EXPECT(backend->session_lost(s.session) == 1u << VICTIM);
    EXPECT(is(run_step(&s, &result), MOE_UNAVAILABLE, MOE_REASON_PEER_LOST));
    backend->session_leave(s.session);
    s.session = NULL;
    EXPECT(go_on_without_victim(m, &s) == 0);
    return get_up(&s);
}

static bool a_killed_peer_costs_the_survivors_one_step_and_no_weights(uint32_t slots)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, be_killed_or_survive, NULL);
    uint64_t deadline = moe_clock_ns() + PATIENCE_S * MOE_NS_PER_S;
    while (__atomic_load_n(&g.board->flag[VICTIM], __ATOMIC_ACQUIRE) < 50 &&
           __atomic_load_n(&g.board->failed, __ATOMIC_ACQUIRE) == 0 && moe_clock_ns() < deadline)
        usleep(1000);
    kill(g.pid[VICTIM], SIGKILL);
    (void)group_finish(&g, PATIENCE_S, status);
    bool right = true;
    for (uint32_t s = 0; s < slots; s++)
        right = right && (s == VICTIM ? WIFSIGNALED(status[s])
                                      : WIFEXITED(status[s]) && WEXITSTATUS(status[s]) == 0);
    return right;
}

/* Slot 1 takes part in no more steps; the others wait for it with a budget longer than the
 * watchdog. They have run steps before: the first ones of a process may wait for its device to load
 * code. */
static int abort_a_step(struct member *m)
{
    struct seat s;
    struct moe_step *step[2];
    struct moe_step_result result;
    EXPECT(good(sit_down(m, &s, 2 * 1000 * PATIENCE_S)));
    for (int i = 0; i < 2; i++)
        EXPECT(good(run_step(&s, &result)));
    for (int i = 0; i < 2 && m->slot != VICTIM; i++)
        EXPECT(good(backend->step_enqueue(s.session, &s.args, &step[i])));
    for (int i = 0; i < 2 && m->slot != VICTIM; i++) {
        EXPECT(is(backend->step_wait(step[0], moe_clock_ns() + 50 * MOE_NS_PER_MS, &result),
                  MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE));
    }
    backend->session_abort(s.session);
    for (int i = 0; i < 2 && m->slot != VICTIM; i++)
        EXPECT(
            is(backend->step_wait(step[i], MOE_NEVER, &result), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(
        is(backend->session_exchange(s.session, NULL, NULL, 0), MOE_ABORTED, MOE_REASON_ABORTED));
    EXPECT(backend->session_lost(s.session) == 0);
    EXPECT(board_barrier(m, LONG_MS)); /* nobody leaves before all have seen this */
    return get_up(&s);
}

static bool abort_ends_present_and_later_waits(uint32_t slots)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, abort_a_step, NULL);
    return group_finish(&g, PATIENCE_S, status);
}

static int mean_another_step(struct member *m)
{
    struct seat s;
    struct moe_step_result result;
    EXPECT(good(sit_down(m, &s, LONG_MS)));
    for (uint32_t i = 0; i < 12; i++) {
        bool odd = i % 3 == 1;
        s.args.bucket = odd && m->slot == i / 3 % m->slots ? 2 * BUCKET : BUCKET;
        struct moe_status st = run_step(&s, &result);
        EXPECT(odd ? is(st, MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH) : good(st));
    }
    EXPECT(backend->session_lost(s.session) == 0);
    return get_up(&s);
}

static bool slots_that_mean_different_steps_all_refuse_and_go_on(uint32_t slots)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, mean_another_step, NULL);
    return group_finish(&g, PATIENCE_S, status);
}

static int join_and_leave(struct member *m)
{
    struct seat s;
    struct moe_step_result result;
    struct moe_device_info before, after;
    EXPECT(good(sit_down(m, &s, LONG_MS)));
    backend->session_leave(s.session);
    s.session = NULL;
    backend->device_info(s.device, &before);
    for (uint32_t i = 0; i < CYCLES; i++) {
        struct moe_session_config config = member_session(m, 100 + i, LONG_MS);
        EXPECT(good(backend->session_join(s.device, &config, &s.session)));
        EXPECT(good(run_step(&s, &result)));
        backend->session_leave(s.session);
        s.session = NULL;
    }
    backend->device_info(s.device, &after);
    /* A device may keep what one step needed, but not once per session. */
    EXPECT(after.used_bytes <= before.used_bytes + (1 << 20));
    return get_up(&s);
}

static bool joining_and_leaving_leaks_nothing(uint32_t slots)
{
    struct group g;
    int status[MOE_MAX_SLOTS] = {0};
    group_start(&g, slots, join_and_leave, NULL);
    return group_finish(&g, PATIENCE_S, status);
}

int main(int argc, char **argv)
{
    const char *name = "cpu", *transport = "auto";
    uint64_t slots = 3;
    const struct moe_option options[] = {
        {"backend", 'b', MOE_OPTION_STRING, &name, 0, 0, "NAME", "backend to test"},
        {"slots", 'n', MOE_OPTION_UINT, &slots, 2, MOE_MAX_SLOTS, "N", "processes"},
        {"transport", 0, MOE_OPTION_STRING, &transport, 0, 0, "NAME",
         "how rows travel between GPUs: auto, nvlink or network"},
    };
    static const struct {
        const char *name;
        bool (*run)(uint32_t slots);
    } scenarios[] = {
#define SCENARIO(fn) {#fn, fn}
        SCENARIO(slots_that_mean_different_steps_all_refuse_and_go_on),
        SCENARIO(abort_ends_present_and_later_waits),
        SCENARIO(a_killed_peer_costs_the_survivors_one_step_and_no_weights),
        SCENARIO(joining_and_leaving_leaks_nothing),
    };
    size_t count = sizeof options / sizeof *options;
    struct moe_options parsed;
    int first;
    struct moe_status st = moe_options_parse(options, count, NULL, argc, argv, &first, &parsed);
    if (moe_failed(&st) || (backend = moe_backend_find(name)) == NULL) {
        fprintf(stderr, "%s\n", moe_failed(&st) ? st.text : "this build has no such backend");
        moe_options_print(stderr, options, count);
        return 2;
    }
    if (!moe_transport_find(transport, &group_transport)) {
        fprintf(stderr, "there is no transport %s\n", transport);
        return 2;
    }
    bool all = true;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        uint64_t start = moe_clock_ns();
        bool right = scenarios[i].run((uint32_t)slots);
        printf("%-6s %s, %s, %.1f s\n", right ? "right" : "WRONG", scenarios[i].name, name,
               (double)(moe_clock_ns() - start) / 1e9);
        fflush(stdout);
        all = all && right;
    }
    moe_options_free(&parsed);
    return all ? 0 : 1;
}
