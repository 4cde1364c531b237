/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device's count of progress (moe/backend.h): it stands while the device does nothing or
 * is held, and moves several times within one long step. The step is fp32 with large experts, so
 * its stages take milliseconds. Counts of rows are checked too, as tokens choose known experts.
 *
 * Without a GPU it prints a message and exits with 77. */
#include "cuda/session/session.h"
#include "cuda/step/backend.h"

#include "base/clock.h"
#include "base/thread.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum {
    SKIP_CODE = 77,
    HIDDEN = 4096,
    INNER = 4096,
    EXPERTS = 4,
    TOP_K = 2,
    TOKENS = 4096,
    PAIRS = TOKENS * TOP_K,
    HELD_MS = 300,
    FEWEST_MOVES = 3, /* in a long step: at least two stages, and its end */
};

static const struct moe_backend *const backend = &moe_backend_cuda;
static struct moe_device *device;
static struct moe_session *session;
static struct moe_layer *layer;
static struct moe_step_args args;
static struct moe_step_counts counts;

static void ok(struct moe_status st)
{
    if (moe_failed(&st))
        fprintf(stderr, "test_device_progress: %s\n", st.text);
    assert_false(moe_failed(&st));
}

static void sleep_ms(uint32_t ms)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)ms * 1000 * 1000}, NULL);
}

/* ------------------------------------------------------------------------ fixture */

static struct moe_status gather_alone(void *ctx, const void *mine, void *all, size_t bytes)
{
    (void)ctx;
    memcpy(all, mine, bytes);
    return moe_ok();
}

static void upload(const struct moe_layer_spec *spec, enum moe_weight w, uint32_t expert)
{
    size_t rows, columns;
    moe_weight_shape(spec, w, &rows, &columns);
    if (rows * columns == 0)
        return;
    float *data = malloc(rows * columns * sizeof *data);
    assert_non_null(data);
    for (size_t i = 0; i < rows * columns; i++)
        data[i] = (float)(i % 7) * 0.01f - 0.03f;
    ok(backend->layer_upload(layer, w, expert, MOE_DTYPE_F32, data, rows * columns * sizeof *data));
    free(data);
}

static void make_layer(void)
{
    static uint32_t offset[EXPERTS + 1];
    static uint16_t slot[EXPERTS];
    const struct moe_layer_spec spec = {.hidden = HIDDEN,
                                        .experts = EXPERTS,
                                        .intermediate = INNER,
                                        .router = {.score = MOE_SCORE_SIGMOID,
                                                   .top_k = TOP_K,
                                                   .groups = 1,
                                                   .topk_group = 1,
                                                   .group_best = 1,
                                                   .renorm = MOE_RENORM_SUM,
                                                   .scale = 1},
                                        .activation = MOE_ACT_SWIGLU};
    for (uint32_t e = 0; e < EXPERTS; e++)
        offset[e + 1] = e + 1;
    const struct moe_placement placement = {
        .version = 1, .experts = EXPERTS, .slots = 1, .offset = offset, .slot = slot};
    ok(backend->layer_create(device, &spec, &placement, 0, &layer));
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        for (uint32_t e = 0; e < (moe_weight_is_expert(w) ? EXPERTS : 1); e++)
            upload(&spec, w, e);
    ok(backend->layer_finish(layer));
}

static void *pinned(size_t bytes)
{
    void *p;
    ok(backend->mem_alloc(device, MOE_MEM_HOST, bytes, &p));
    return p;
}

/* Token t goes to the experts 0 and 1 + t % 3. */
static void make_tensors(void)
{
    float *x = pinned(sizeof *x * TOKENS * HIDDEN), *weights = pinned(sizeof *weights * PAIRS);
    int32_t *ids = pinned(sizeof *ids * PAIRS);
    uint8_t *mode = pinned(TOKENS);
    for (size_t i = 0; i < (size_t)TOKENS * HIDDEN; i++)
        x[i] = (float)(i % 5) * 0.1f;
    for (int32_t i = 0; i < PAIRS; i++) {
        ids[i] = i % TOP_K == 0 ? 0 : 1 + i / TOP_K % 3;
        weights[i] = 0.5f;
    }
    memset(mode, MOE_ROUTE_IDS_WEIGHTS, TOKENS);
    args = (struct moe_step_args){.layer = layer,
                                  .dtype = MOE_DTYPE_F32,
                                  .bucket = TOKENS,
                                  .tokens = TOKENS,
                                  .x = x,
                                  .y = pinned(sizeof *x * TOKENS * HIDDEN),
                                  .mode = mode,
                                  .ids_in = ids,
                                  .weights_in = weights,
                                  .ids_out = pinned(sizeof *ids * PAIRS),
                                  .weights_out = pinned(sizeof *weights * PAIRS),
                                  .token_state = pinned(TOKENS),
                                  .counts = &counts};
}

static void run_step(void)
{
    struct moe_step *step;
    ok(backend->step_enqueue(session, &args, &step));
    ok(backend->step_wait(step, UINT64_MAX, NULL));
}

/* Also warms up: the first step of a shape takes memory and captures. */
static int setup(void **state)
{
    (void)state;
    const struct moe_session_config config = {.slots = 1,
                                              .live = 1,
                                              .epoch = 1,
                                              .max_tokens = TOKENS,
                                              .max_hidden = HIDDEN,
                                              .max_top_k = TOP_K,
                                              .max_experts = EXPERTS,
                                              .wait_budget_ms = 5000,
                                              .allgather = gather_alone};
    make_layer();
    make_tensors();
    ok(backend->session_join(device, &config, &session));
    run_step();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    backend->session_leave(session);
    backend->layer_destroy(layer);
    return 0; /* the process ends: its pinned memory goes with it */
}

/* ------------------------------------------------------------------------ sampling */

/* A thread that looks at the device's count, as the judge of health does. */
struct sampler {
    pthread_t thread;
    atomic_bool quit;
    uint32_t moves;
};

static void *sample(void *arg)
{
    struct sampler *s = arg;
    uint64_t seen = backend->device_progress(device);
    while (!atomic_load(&s->quit)) {
        uint64_t now = backend->device_progress(device);
        s->moves += now != seen;
        seen = now;
        nanosleep(&(struct timespec){.tv_nsec = 20 * 1000}, NULL);
    }
    s->moves += backend->device_progress(device) != seen;
    return NULL;
}

static void start_sampling(struct sampler *s)
{
    *s = (struct sampler){0};
    assert_int_equal(moe_thread_create(&s->thread, "sampler", sample, s), 0);
}

static uint32_t moves_of(struct sampler *s)
{
    atomic_store(&s->quit, true);
    pthread_join(s->thread, NULL);
    return s->moves;
}

/* ------------------------------------------------------------------------ tests */

static void an_idle_device_does_not_move(void **state)
{
    (void)state;
    uint64_t before = backend->device_progress(device);
    sleep_ms(100);
    assert_true(backend->device_progress(device) == before);
}

static void a_long_step_moves_by_stages(void **state)
{
    (void)state;
    struct sampler s;
    struct moe_step *step;
    struct moe_step_result result;
    start_sampling(&s);
    ok(backend->step_enqueue(session, &args, &step));
    ok(backend->step_wait(step, UINT64_MAX, &result));
    uint32_t moves = moves_of(&s);
    printf("%u moves in a step of %.1f ms\n", moves, (double)result.total_ns / 1e6);
    assert_true(moves >= FEWEST_MOVES);
}

static void CUDART_CB hold(void *ctx)
{
    while (!atomic_load((atomic_bool *)ctx))
        sleep_ms(1);
}

/* The engine polls a step that does not begin. */
static void a_held_device_does_not_move(void **state)
{
    (void)state;
    static atomic_bool go_on;
    struct moe_step *step;
    ok(moe_cuda_device_use(device));
    assert_int_equal(cudaLaunchHostFunc(device->compute, hold, &go_on), cudaSuccess);
    ok(backend->step_enqueue(session, &args, &step));
    uint64_t before = backend->device_progress(device);
    uint64_t until = moe_clock_ns() + HELD_MS * MOE_NS_PER_MS;
    struct moe_status st = backend->step_wait(step, until, NULL);
    assert_int_equal(st.code, MOE_DEADLINE_EXCEEDED);
    assert_true(backend->device_progress(device) == before);
    atomic_store(&go_on, true);
    ok(backend->step_wait(step, UINT64_MAX, NULL));
    assert_true(backend->device_progress(device) != before);
}

static void a_step_reports_its_rows(void **state)
{
    (void)state;
    memset(&counts, 0xff, sizeof counts);
    counts.by_expert = counts.to_slots = false;
    run_step();
    assert_true(counts.by_expert && counts.to_slots);
    assert_int_equal(counts.local_experts, EXPERTS);
    assert_int_equal(counts.slots, 1);
    assert_int_equal(counts.sent_rows[0], 0);
    assert_int_equal(counts.expert_rows[0], TOKENS);
    for (uint32_t e = 1; e < EXPERTS; e++) {
        uint32_t want = 0;
        for (uint32_t t = 0; t < TOKENS; t++)
            want += 1 + t % 3 == e;
        assert_int_equal(counts.expert_rows[e], want);
    }
}

int main(void)
{
    const struct moe_device_config config = {0};
    struct moe_status st = backend->device_open(&config, &device);
    if (moe_failed(&st)) {
        printf("skipped: %s\n", st.text);
        return SKIP_CODE;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_idle_device_does_not_move),
        cmocka_unit_test(a_long_step_moves_by_stages),
        cmocka_unit_test(a_held_device_does_not_move),
        cmocka_unit_test(a_step_reports_its_rows),
    };
    int failed = cmocka_run_group_tests(tests, setup, teardown);
    backend->device_close(device);
    return failed;
}
