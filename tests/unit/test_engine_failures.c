/* SPDX-License-Identifier: Apache-2.0 */
/* The engine with steps that fail, hang or are refused. The backend here is a script: it decides
 * how each step ends, "computes" y = x + 1, and records its arguments. */
#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "engine_hooks.h"
#include "step_rows.h"
#include "worker_fixture.h"

#include <sched.h>
#include <stdatomic.h>

enum { HIDDEN = 4, BUCKET = 8, STEPS_MAX = 32, REQUESTS_MAX = 8 };

enum end {
    END_WELL,
    END_WHEN_NEXT_BEGINS, /* successfully, after the following step was enqueued */
    END_LOST,             /* slot 2 did not answer */
    END_NEVER,            /* until aborted */
    END_REFUSED,          /* at once, by step_enqueue */
    END_LACKING,          /* successfully, but tokens with an odd index lack an expert */
    END_LACKING_LATE,     /* the same, after the following step was enqueued */
    END_LOST_COMPLETED,   /* END_LOST, after the device has completed its requests */
};

struct moe_step {
    int number;
    struct moe_step_args args;
};

static struct {
    struct moe_mutex lock;
    pthread_cond_t changed;
    enum end script[STEPS_MAX];
    struct moe_step_args seen[STEPS_MAX]; /* arguments of each step that was enqueued */
    float first_x[STEPS_MAX];             /* its x[0], if it has tokens */
    int enqueued, unfinished;
    bool aborted;
    int aborts;
} backend;

/* A pause of step_enqueue. It orders no memory, so that ThreadSanitizer sees what only a lock would
 * order. */
enum { NO_PAUSE, PAUSE, PAUSED };
static _Atomic int pause_of_enqueue;

static void pause_if_asked(void)
{
    int asked = PAUSE;
    if (!atomic_compare_exchange_strong_explicit(&pause_of_enqueue, &asked, PAUSED,
                                                 memory_order_relaxed, memory_order_relaxed))
        return;
    while (atomic_load_explicit(&pause_of_enqueue, memory_order_relaxed) == PAUSED)
        (void)sched_yield();
}

/* The engine passes these through; only their addresses matter. */
static char device_memory, session_memory[8];

static struct moe_session *session_of(int view)
{
    return (struct moe_session *)(void *)&session_memory[view];
}

static struct moe_status script_alloc(struct moe_device *device, enum moe_mem kind, size_t bytes,
                                      void **out)
{
    (void)device;
    assert_int_equal(kind, MOE_MEM_HOST);
    *out = calloc(1, bytes);
    return moe_ok();
}

static void script_free(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes)
{
    (void)device;
    (void)kind;
    (void)bytes;
    free(p);
}

static struct moe_status script_enqueue(struct moe_session *session,
                                        const struct moe_step_args *args, struct moe_step **out)
{
    (void)session;
    pause_if_asked();
    moe_mutex_lock(&backend.lock);
    int number = backend.enqueued++;
    MOE_INVARIANT(number < STEPS_MAX && backend.unfinished < 2);
    backend.seen[number] = *args;
    if (args->tokens > 0)
        backend.first_x[number] = *(const float *)step_part(args, 0).x;
    bool refused = backend.script[number] == END_REFUSED;
    backend.unfinished += !refused;
    pthread_cond_broadcast(&backend.changed);
    moe_mutex_unlock(&backend.lock);
    if (refused)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "scripted");
    *out = malloc(sizeof **out);
    MOE_INVARIANT(*out != NULL);
    **out = (struct moe_step){number, *args};
    return moe_ok();
}

/* Lock held. */
static bool has_ended(const struct moe_step *step)
{
    switch (backend.script[step->number]) {
    case END_WHEN_NEXT_BEGINS:
    case END_LACKING_LATE: return backend.aborted || backend.enqueued > step->number + 1;
    case END_NEVER: return backend.aborted;
    default: return true;
    }
}

static void lack_experts(const struct moe_step_args *a)
{
    uint32_t row = 0;
    for (uint32_t part = 0; part < step_parts(a); part++) {
        const struct moe_step_segment rows = step_part(a, part);
        for (uint32_t t = 0; t < rows.tokens; t++, row++) {
            bool odd = (int)((const float *)rows.x)[t * HIDDEN] / 10 % 2 == 1;
            if (odd)
                memset((float *)rows.y + t * HIDDEN, 0, HIDDEN * sizeof(float));
            if (odd)
                a->token_state[row] = MOE_TOKEN_UNAVAILABLE;
            if (rows.token_state != NULL)
                rows.token_state[t] = a->token_state[row];
        }
    }
}

static void add_one(const struct moe_step_args *a)
{
    for (uint32_t part = 0; part < step_parts(a); part++) {
        const struct moe_step_segment rows = step_part(a, part);
        for (uint32_t i = 0; i < rows.tokens * HIDDEN; i++)
            ((float *)rows.y)[i] = ((const float *)rows.x)[i] + 1;
    }
}

static void complete_segments(const struct moe_step_args *a)
{
    for (uint32_t part = 0; part < step_parts(a); part++) {
        const struct moe_step_completion *c = &a->segments[part].completion;
        if (c->word != NULL)
            *c->receipt = *c->word = c->value;
    }
}

static struct moe_status end_step(struct moe_step *step, struct moe_step_result *result)
{
    const struct moe_step_args *a = &step->args;
    const enum end how = backend.script[step->number];
    *result = (struct moe_step_result){.missing_slot = -1, .total_ns = 1};
    if (how == END_LOST_COMPLETED) {
        add_one(a);
        complete_segments(a);
    }
    if (how == END_LOST || how == END_LOST_COMPLETED) {
        result->missing_slot = 2;
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot 2 did not answer");
    }
    if (backend.aborted)
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "called off");
    add_one(a);
    if (a->tokens > 0)
        memset(a->token_state, MOE_TOKEN_OK, a->tokens);
    if (how == END_LACKING || how == END_LACKING_LATE)
        lack_experts(a);
    return moe_ok();
}

static struct moe_status script_wait(struct moe_step *step, uint64_t deadline_ns,
                                     struct moe_step_result *result)
{
    moe_mutex_lock(&backend.lock);
    while (!has_ended(step)) {
        if (!moe_wait_until(&backend.changed, &backend.lock, deadline_ns)) {
            moe_mutex_unlock(&backend.lock);
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "still running");
        }
    }
    struct moe_status st = end_step(step, result);
    backend.unfinished--;
    moe_mutex_unlock(&backend.lock);
    free(step);
    return st;
}

static void script_abort(struct moe_session *session)
{
    (void)session;
    moe_mutex_lock(&backend.lock);
    backend.aborted = true;
    backend.aborts++;
    pthread_cond_broadcast(&backend.changed);
    moe_mutex_unlock(&backend.lock);
}

static uint64_t script_lost(struct moe_session *session)
{
    (void)session;
    return 0;
}

static const struct moe_backend script = {
    .name = "script",
    .mem_alloc = script_alloc,
    .mem_free = script_free,
    .session_abort = script_abort,
    .session_lost = script_lost,
    .step_enqueue = script_enqueue,
    .step_wait = script_wait,
};

/* ------------------------------------------------------------------------ the engine */

struct report {
    uint64_t seq, lost;
    struct moe_status status;
};

static struct {
    struct moe_engine *engine;
    struct moe_mutex lock; /* of the rest */
    struct report reports[STEPS_MAX];
    int report_count;
    struct moe_work work[REQUESTS_MAX];
    float x[REQUESTS_MAX][64 * HIDDEN], y[REQUESTS_MAX][64 * HIDDEN];
    struct moe_status status[REQUESTS_MAX];
    int done[REQUESTS_MAX], order[REQUESTS_MAX], done_count;
    uint64_t live[8];                                    /* slots of each view */
    struct moe_placement *placements;                    /* of the layer; NULL = none */
    uint64_t deadline_ns;                                /* of the next request; 0 = MOE_NEVER */
    struct moe_step_completion completion[REQUESTS_MAX]; /* of requests */
    uint32_t rehomed[REQUESTS_MAX][4];                   /* of requests that ask for them */
    bool asks[REQUESTS_MAX];
} test;

static void on_finished(void *ctx, const struct moe_ticket *ticket, struct moe_status status,
                        uint64_t lost_slots)
{
    (void)ctx;
    moe_mutex_lock(&test.lock);
    test.reports[test.report_count++] = (struct report){ticket->seq, lost_slots, status};
    moe_mutex_unlock(&test.lock);
}

static void on_done(struct moe_work *w, struct moe_status status)
{
    long i = w - test.work;
    moe_mutex_lock(&test.lock);
    test.status[i] = status;
    test.done[i]++;
    test.order[test.done_count++] = (int)i;
    moe_mutex_unlock(&test.lock);
}

/* Expert 0 is on slots 0 and 1, expert 1 on 1, expert 2 on 2 and 0, expert 3 on 0. */
static const uint32_t offset[] = {0, 2, 3, 5, 6};
static const uint16_t slot[] = {0, 1, 1, 2, 0, 0};
static struct moe_placement original = {
    .version = 1, .experts = 4, .slots = 3, .offset = offset, .slot = slot};
/* The same, but expert 1 is on slots 2 and 1. */
static const uint32_t offset_moved[] = {0, 2, 4, 6, 7};
static const uint16_t slot_moved[] = {0, 1, 2, 1, 2, 0, 0};
static struct moe_placement moved = {
    .version = 2, .experts = 4, .slots = 3, .offset = offset_moved, .slot = slot_moved};

static struct moe_status swap(void *ctx, uint32_t version)
{
    (void)ctx;
    assert_int_equal(version, moved.version);
    test.placements = &moved;
    return moe_ok();
}

static void on_swapped(void *ctx, uint32_t version, uint64_t epoch)
{
    (void)ctx;
    assert_int_equal(version, moved.version);
    assert_true(epoch > 0);
}

static int open_engine(void **state)
{
    (void)state;
    static const struct moe_layer_spec spec = {
        .layer = 7, .hidden = HIDDEN, .experts = 4, .router = {.top_k = 1}};
    static const struct moe_layer_spec *const specs[] = {&spec};
    static struct moe_layer *const layers[] = {NULL};
    memset(&backend, 0, sizeof backend);
    memset(&test, 0, sizeof test);
    test.placements = &original;
    announced_tokens = 0;
    moe_wait_init(&backend.changed);
    moe_mutex_init(&backend.lock);
    moe_mutex_init(&test.lock);
    const struct moe_engine_config config = {
        .backend = &script,
        .device = (struct moe_device *)(void *)&device_memory,
        .layers = layers,
        .specs = specs,
        .placements = &test.placements,
        .layer_count = 1,
        .max_tokens_per_step = BUCKET,
        .max_queued_tokens = 1000,
        .announce = count_announced,
        .finished = on_finished,
        .swap_placement = swap,
        .placement_swapped = on_swapped,
        .spin_ns = spin_of_test(),
    };
    assert_ok(moe_engine_create(&config, &test.engine));
    return 0;
}

static int close_engine(void **state)
{
    (void)state;
    moe_engine_destroy(test.engine);
    assert_int_equal(backend.unfinished, 0);
    for (int i = 0; i < REQUESTS_MAX; i++)
        assert_int_equal(test.done[i], test.work[i].tokens > 0);
    pthread_cond_destroy(&backend.changed);
    moe_mutex_destroy(&backend.lock);
    moe_mutex_destroy(&test.lock);
    return 0;
}

/* x of request i is i * 1000 + token * 10 + column. */
static void submit_with(int i, uint32_t tokens, enum moe_on_unavailable policy, uint8_t *states)
{
    for (uint32_t e = 0; e < tokens * HIDDEN; e++)
        test.x[i][e] = (float)(i * 1000) + (float)(e / HIDDEN * 10 + e % HIDDEN);
    test.work[i] = (struct moe_work){
        .layer = 7,
        .dtype = MOE_DTYPE_F32,
        .tokens = tokens,
        .x = test.x[i],
        .y = test.y[i],
        .deadline_ns = test.deadline_ns != 0 ? test.deadline_ns : MOE_NEVER,
        .on_unavailable = policy,
        .completion = test.completion[i],
        .by_copy = test.completion[i].word != NULL,
        .token_state = states,
        .rehomed = test.asks[i] ? test.rehomed[i] : NULL,
        .done = on_done,
    };
    assert_ok(moe_engine_submit(test.engine, &test.work[i]));
}

static void submit(int i, uint32_t tokens)
{
    submit_with(i, tokens, MOE_ON_UNAVAILABLE_WAIT, NULL);
}

static void begin_view(int view)
{
    moe_mutex_lock(&backend.lock);
    backend.aborted = false;
    moe_mutex_unlock(&backend.lock);
    moe_engine_start_view(test.engine, session_of(view), (uint64_t)view + 1, test.live[view],
                          BUCKET);
}

static void give_ticket(uint64_t epoch, uint64_t seq, uint32_t bucket)
{
    struct moe_ticket t = {.epoch = epoch,
                           .seq = seq,
                           .layer = 7,
                           .kind = MOE_STEP_FORWARD,
                           .dtype = MOE_DTYPE_F32,
                           .bucket = bucket};
    moe_engine_run(test.engine, &t);
}

static void give_swap(uint64_t epoch, uint64_t seq)
{
    struct moe_ticket t = {
        .epoch = epoch, .seq = seq, .layer = moved.version, .kind = MOE_STEP_SWAP_PLACEMENT};
    moe_engine_run(test.engine, &t);
}

static void wait_until(int *value, int wanted, struct moe_mutex *lock)
{
    uint64_t limit = moe_clock_ns() + 30 * MOE_NS_PER_S;
    struct timespec pause = {.tv_nsec = 100000};
    for (;;) {
        moe_mutex_lock(lock);
        int now = *value;
        moe_mutex_unlock(lock);
        if (now >= wanted)
            return;
        if (moe_clock_ns() > limit)
            fail_msg("%d of %d after half a minute", now, wanted);
        nanosleep(&pause, NULL);
    }
}

static void wait_reports(int n)
{
    wait_until(&test.report_count, n, &test.lock);
}

static void wait_done(int n)
{
    wait_until(&test.done_count, n, &test.lock);
}

static void assert_answered(int i)
{
    assert_ok(test.status[i]);
    for (uint32_t e = 0; e < test.work[i].tokens * HIDDEN; e++)
        assert_true(test.y[i][e] == test.x[i][e] + 1);
}

/* ------------------------------------------------------------------------- promises */

static void requests_of_a_failed_step_are_answered_under_the_next_view(void **state)
{
    (void)state;
    backend.script[0] = END_LOST;
    for (int i = 0; i < 3; i++)
        submit(i, 2);
    begin_view(0);
    assert_int_equal(announced_tokens, 6);
    give_ticket(1, 1, 8);
    wait_reports(1);
    assert_int_equal(test.reports[0].seq, 1);
    assert_int_equal(test.reports[0].status.reason, MOE_REASON_PEER_LOST);
    assert_int_equal(test.reports[0].lost, UINT64_C(1) << 2);
    assert_int_equal(test.done_count, 0);
    assert_int_equal(backend.aborts, 1);
    give_ticket(1, 2, 8); /* the view is over: ignored */
    begin_view(1);
    assert_int_equal(announced_tokens, 12); /* reported again */
    give_ticket(1, 2, 8);                   /* of the old epoch: ignored */
    give_ticket(2, 1, 8);
    wait_done(3);
    assert_int_equal(backend.enqueued, 2);
    for (int i = 0; i < 3; i++) {
        assert_answered(i);
        assert_int_equal(test.order[i], i);
        assert_int_equal(test.work[i].answered_epoch, 2);
        assert_int_equal(test.work[i].steps, 1);
    }
}

/* Its client knows the result, and may use the memory for something else. */
static void a_request_that_its_device_has_completed_does_not_run_again(void **state)
{
    (void)state;
    uint64_t words[2] = {0}, receipts[2] = {0};
    uint32_t signal = 0;
    backend.script[0] = END_LOST_COMPLETED;
    for (int i = 0; i < 2; i++) {
        test.completion[i] = (struct moe_step_completion){
            .word = &words[i], .signal = &signal, .receipt = &receipts[i], .value = 3};
        submit(i, i == 0 ? 2 : 10); /* 6 tokens of the second one are in the step */
    }
    begin_view(0);
    give_ticket(1, 1, 8);
    wait_reports(1);
    assert_int_equal(test.reports[0].status.reason, MOE_REASON_PEER_LOST);
    wait_done(1);
    assert_int_equal(test.order[0], 0);
    assert_answered(0);
    assert_int_equal(test.work[0].answered_epoch, 1);
    assert_int_equal(receipts[1], 0); /* a part is still to come */
    memset(test.y[0], 0, sizeof test.y[0]);
    begin_view(1);
    give_ticket(2, 1, 8);
    give_ticket(2, 2, 8);
    wait_done(2);
    assert_answered(1);
    assert_true(test.y[0][0] == 0);
    assert_true(backend.first_x[1] == 1000);
}

/* Another thread fails it while the engine's thread, without the lock, decides who completes it. */
static void a_request_is_cancelled_while_its_first_part_begins(void **state)
{
    (void)state;
    uint64_t word = 0, receipt = 0;
    uint32_t signal = 0;
    test.completion[0] = (struct moe_step_completion){
        .word = &word, .signal = &signal, .receipt = &receipt, .value = 3};
    submit(0, 10);
    begin_view(0);
    atomic_store_explicit(&pause_of_enqueue, PAUSE, memory_order_relaxed);
    give_ticket(1, 1, 8);
    while (atomic_load_explicit(&pause_of_enqueue, memory_order_relaxed) != PAUSED)
        (void)sched_yield();
    moe_engine_cancel(test.engine, &test.work[0]); /* 2 tokens wait */
    atomic_store_explicit(&pause_of_enqueue, NO_PAUSE, memory_order_relaxed);
    wait_done(1);
    assert_int_equal(test.status[0].code, MOE_CANCELLED);
    assert_int_equal(backend.enqueued, 1);
    assert_null(backend.seen[0].segments[0].completion.word);
}

static void a_request_split_over_failing_steps_loses_no_token(void **state)
{
    (void)state;
    /* 30 tokens, 8 a step: the first step succeeds; two are in flight when the older of
     * them fails. */
    backend.script[1] = END_LOST;
    submit(0, 30);
    submit(1, 3);
    begin_view(0);
    give_ticket(1, 1, 8);
    wait_reports(1);
    give_ticket(1, 2, 8);
    give_ticket(1, 3, 8);
    wait_reports(2);
    assert_int_equal(test.reports[1].seq, 2);
    assert_int_equal(test.reports[1].status.reason, MOE_REASON_PEER_LOST);
    int before = backend.enqueued;
    begin_view(1);
    for (uint64_t seq = 1; seq <= 4; seq++)
        give_ticket(2, seq, 8);
    wait_done(2);
    assert_answered(0);
    assert_answered(1);
    assert_int_equal(test.order[0], 0);
    assert_true(backend.first_x[before] == 80); /* token 8 of request 0 comes first again */
}

/* Each view lacks another slot. A part of the request is computed in the first view, and its rest
 * in the second. */
static void rehomed_experts_are_those_of_the_last_step(void **state)
{
    (void)state;
    test.asks[0] = test.asks[1] = true;
    test.live[0] = 6;
    test.live[1] = 3;
    test.live[2] = 7;
    backend.script[1] = END_LOST;
    submit(0, 12);
    begin_view(0);
    give_ticket(1, 1, 8);
    wait_reports(1);
    assert_int_equal(test.work[0].rehomed_count, 2);
    assert_int_equal(test.rehomed[0][0], 0);
    assert_int_equal(test.rehomed[0][1], 2); /* and expert 3 has no copy left */
    give_ticket(1, 2, 8);
    wait_reports(2);
    begin_view(1);
    give_ticket(2, 1, 8);
    wait_done(1);
    assert_answered(0);
    assert_int_equal(test.work[0].answered_epoch, 2);
    assert_int_equal(test.work[0].rehomed_count, 1);
    assert_int_equal(test.rehomed[0][0], 2);
    moe_engine_stop_view(test.engine);
    begin_view(2);
    submit(1, 8);
    submit(2, 1);
    give_ticket(3, 1, 8);
    give_ticket(3, 2, 8);
    wait_done(3);
    assert_int_equal(test.work[1].rehomed_count, 0);
    assert_int_equal(test.work[2].rehomed_count, 0);
}

/* The ticket between two steps of a request changes the placement. */
static void rehomed_experts_follow_a_move(void **state)
{
    (void)state;
    test.asks[0] = test.asks[1] = true;
    test.live[0] = 3;
    submit(0, 8);
    submit(1, 12);
    begin_view(0);
    give_ticket(1, 1, 8);
    give_ticket(1, 2, 8);
    give_swap(1, 3);
    give_ticket(1, 4, 8);
    wait_done(2);
    assert_int_equal(test.work[0].rehomed_count, 1);
    assert_int_equal(test.rehomed[0][0], 2);
    assert_int_equal(test.work[1].rehomed_count, 2);
    assert_int_equal(test.rehomed[1][0], 1);
    assert_int_equal(test.rehomed[1][1], 2);
}

static void the_next_step_is_enqueued_while_one_runs(void **state)
{
    (void)state;
    backend.script[0] = END_WHEN_NEXT_BEGINS;
    submit(0, 8);
    submit(1, 8);
    begin_view(0);
    give_ticket(1, 1, 8);
    give_ticket(1, 2, 8);
    wait_done(2); /* would not come if the second waited for the first */
    assert_answered(0);
    assert_answered(1);
    assert_int_equal(test.reports[0].seq, 1);
    assert_int_equal(test.reports[1].seq, 2);
}

static void a_request_alone_in_its_step_is_computed_in_place(void **state)
{
    (void)state;
    submit(0, 8);
    submit(1, 3);
    submit(2, 4);
    begin_view(0);
    give_ticket(1, 1, 8);
    give_ticket(1, 2, 8);
    give_ticket(1, 3, 8); /* no token is left: the slot takes part without tokens */
    wait_done(3);
    wait_reports(3);
    assert_ptr_equal(backend.seen[0].x, test.x[0]);
    assert_ptr_equal(backend.seen[0].y, test.y[0]);
    assert_int_equal(backend.seen[1].tokens, 7);
    assert_ptr_not_equal(backend.seen[1].x, test.x[1]);
    assert_int_equal(backend.seen[2].tokens, 0);
    assert_int_equal(backend.seen[2].bucket, 8);
    for (int i = 0; i < 3; i++)
        assert_answered(i);
}

static void a_step_that_cannot_begin_ends_the_view(void **state)
{
    (void)state;
    backend.script[1] = END_REFUSED;
    submit(0, 8);
    submit(1, 8);
    begin_view(0);
    give_ticket(1, 1, 8);
    give_ticket(1, 2, 8);
    wait_reports(2);
    wait_done(1);
    assert_answered(0);
    assert_ok(test.reports[0].status);
    assert_int_equal(test.reports[1].seq, 2);
    assert_int_equal(test.reports[1].status.reason, MOE_REASON_OUT_OF_MEMORY);
    begin_view(1);
    give_ticket(2, 1, 8);
    wait_done(2);
    assert_answered(1);
}

static void impossible_tickets_end_the_view(void **state)
{
    (void)state;
    static const struct moe_ticket bad[] = {
        {0, 2, 7, MOE_STEP_FORWARD, MOE_DTYPE_F32, 2 * BUCKET, {0}},
        {0, 2, 7, MOE_STEP_FORWARD, MOE_DTYPE_F32, 3, {0}},
        {0, 2, 7, MOE_STEP_FORWARD, MOE_DTYPE_F32, 0, {0}},
        {0, 2, 8, MOE_STEP_FORWARD, MOE_DTYPE_F32, 8, {0}},
        {0, 2, 7, MOE_STEP_FORWARD, MOE_DTYPE_NONE, 8, {0}},
        {0, 3, 7, MOE_STEP_FORWARD, MOE_DTYPE_F32, 8, {0}}, /* leaves 2 out */
        {0, 1, 7, MOE_STEP_FORWARD, MOE_DTYPE_F32, 8, {0}}, /* again */
    };
    int views = sizeof bad / sizeof *bad, reports = 0;
    submit(0, 20);
    for (int v = 0; v < views; v++) {
        struct moe_ticket t = bad[v];
        begin_view(v);
        give_ticket((uint64_t)v + 1, 1, 1); /* a good one first, of one token */
        wait_reports(++reports);
        assert_ok(test.reports[reports - 1].status);
        t.epoch = (uint64_t)v + 1;
        moe_engine_run(test.engine, &t);
        wait_reports(++reports);
        assert_refused(test.reports[reports - 1].status, MOE_INTERNAL, MOE_REASON_NONE);
    }
    begin_view(views);
    for (uint64_t seq = 1; seq <= 2; seq++)
        give_ticket((uint64_t)views + 1, seq, 8);
    wait_done(1);
    assert_answered(0);
}

static void stopping_a_view_aborts_its_steps_without_reporting_them(void **state)
{
    (void)state;
    backend.script[0] = backend.script[1] = END_NEVER;
    submit(0, 12);
    begin_view(0);
    give_ticket(1, 1, 8);
    give_ticket(1, 2, 8);
    wait_until(&backend.enqueued, 2, &backend.lock);
    moe_engine_stop_view(test.engine);
    assert_int_equal(backend.unfinished, 0);
    moe_engine_stop_view(test.engine);
    assert_int_equal(test.report_count, 0);
    begin_view(1);
    assert_int_equal(announced_tokens, 24);
    give_ticket(2, 1, 8);
    give_ticket(2, 2, 8);
    wait_done(1);
    assert_answered(0);
    assert_int_equal(test.work[0].steps, 2);
}

static void a_request_cancelled_in_a_step_ends_with_the_step(void **state)
{
    (void)state;
    backend.script[0] = END_NEVER;
    backend.script[1] = END_WHEN_NEXT_BEGINS;
    submit(0, 4);  /* wholly in the failing step */
    submit(1, 10); /* half in it, half queued */
    submit(2, 2);
    begin_view(0);
    give_ticket(1, 1, 8);
    wait_until(&backend.enqueued, 1, &backend.lock);
    moe_engine_cancel(test.engine, &test.work[0]);
    moe_engine_cancel(test.engine, &test.work[1]);
    moe_engine_cancel(test.engine, &test.work[1]);
    assert_int_equal(test.done_count, 0); /* the step still uses their memory */
    moe_engine_stop_view(test.engine);
    wait_done(2);
    assert_refused(test.status[0], MOE_CANCELLED, MOE_REASON_NONE);
    assert_refused(test.status[1], MOE_CANCELLED, MOE_REASON_NONE);
    begin_view(1);
    give_ticket(2, 1, 8);
    wait_until(&backend.enqueued, 2, &backend.lock);
    moe_engine_cancel(test.engine, &test.work[2]); /* wholly in a successful step */
    give_ticket(2, 2, 8);
    wait_done(3);
    assert_answered(2);
    assert_int_equal(backend.seen[1].tokens, 2);
}

static void destroying_the_engine_ends_a_hanging_step(void **state)
{
    (void)state;
    backend.script[0] = END_NEVER;
    submit(0, 2);
    submit(1, 9);
    begin_view(0);
    give_ticket(1, 1, 8);
    wait_until(&backend.enqueued, 1, &backend.lock);
    moe_engine_destroy(test.engine);
    test.engine = NULL;
    for (int i = 0; i < 2; i++)
        assert_refused(test.status[i], MOE_UNAVAILABLE, MOE_REASON_DRAINING);
}

/* One step has a request of each policy, and one that needs no lost expert. */
static void each_policy_gets_its_answer_from_one_step(void **state)
{
    (void)state;
    uint8_t states[3] = {9, 9, 9};
    backend.script[0] = END_LACKING;
    submit_with(0, 2, MOE_ON_UNAVAILABLE_WAIT, NULL);
    submit_with(1, 2, MOE_ON_UNAVAILABLE_FAIL, NULL);
    submit_with(2, 3, MOE_ON_UNAVAILABLE_PARTIAL, states);
    submit_with(3, 1, MOE_ON_UNAVAILABLE_WAIT, NULL);
    begin_view(0);
    give_ticket(1, 1, 8);
    wait_done(3);
    assert_int_equal(test.done[0], 0);
    assert_refused(test.status[1], MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE);
    assert_ok(test.status[2]);
    for (uint32_t t = 0; t < 3; t++) {
        assert_int_equal(states[t], t == 1 ? MOE_TOKEN_UNAVAILABLE : MOE_TOKEN_OK);
        for (uint32_t c = 0; c < HIDDEN; c++) {
            const uint32_t e = t * HIDDEN + c;
            assert_true(test.y[2][e] == (t == 1 ? 0 : test.x[2][e] + 1));
        }
    }
    assert_answered(3);
    give_ticket(1, 2, 8); /* what waits is in no queue of this view */
    wait_reports(2);
    assert_int_equal(backend.seen[1].tokens, 0);
    moe_engine_stop_view(test.engine);
    announced_tokens = 0;
    begin_view(1);
    assert_int_equal(announced_tokens, 2);
    give_ticket(2, 1, 8);
    wait_done(4);
    assert_answered(0);
    assert_int_equal(test.work[0].steps, 1);
}

/* Its rest is not begun under a view without its experts, whichever of its steps ends first, and
 * then it runs as a whole. */
static void a_split_request_waits_as_a_whole(void **state)
{
    (void)state;
    backend.script[0] = END_LACKING_LATE;
    backend.script[1] = END_NEVER;
    submit(0, 20);
    begin_view(0);
    give_ticket(1, 1, 8);
    give_ticket(1, 2, 8);
    wait_until(&backend.enqueued, 2, &backend.lock);
    wait_reports(1);
    moe_engine_stop_view(test.engine);
    assert_int_equal(test.done_count, 0);
    announced_tokens = 0;
    begin_view(1);
    assert_int_equal(announced_tokens, 20);
    for (uint64_t seq = 1; seq <= 3; seq++)
        give_ticket(2, seq, 8);
    wait_done(1);
    assert_answered(0);
    assert_int_equal(backend.enqueued, 5);
}

static void a_request_that_waits_for_experts_can_end(void **state)
{
    (void)state;
    backend.script[0] = END_LACKING;
    test.deadline_ns = moe_clock_ns() + 50 * MOE_NS_PER_MS;
    submit(0, 2);
    test.deadline_ns = 0;
    submit(1, 2);
    submit(2, 2);
    begin_view(0);
    give_ticket(1, 1, 8);
    wait_done(1);
    assert_refused(test.status[0], MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE);
    struct moe_engine_counters c;
    moe_engine_read_counters(test.engine, &c);
    assert_int_equal(c.queued_tokens, 4); /* they count as waiting */
    moe_engine_cancel(test.engine, &test.work[1]);
    wait_done(2);
    assert_refused(test.status[1], MOE_CANCELLED, MOE_REASON_NONE);
    assert_true(moe_engine_drain(test.engine, MOE_NEVER));
    assert_refused(test.status[2], MOE_UNAVAILABLE, MOE_REASON_DRAINING);
}

#define with_engine(name) cmocka_unit_test_setup_teardown(name, open_engine, close_engine)

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_engine(requests_of_a_failed_step_are_answered_under_the_next_view),
        with_engine(a_request_that_its_device_has_completed_does_not_run_again),
        with_engine(a_request_is_cancelled_while_its_first_part_begins),
        with_engine(a_request_split_over_failing_steps_loses_no_token),
        with_engine(rehomed_experts_are_those_of_the_last_step),
        with_engine(rehomed_experts_follow_a_move),
        with_engine(the_next_step_is_enqueued_while_one_runs),
        with_engine(a_request_alone_in_its_step_is_computed_in_place),
        with_engine(a_step_that_cannot_begin_ends_the_view),
        with_engine(impossible_tickets_end_the_view),
        with_engine(stopping_a_view_aborts_its_steps_without_reporting_them),
        with_engine(a_request_cancelled_in_a_step_ends_with_the_step),
        with_engine(destroying_the_engine_ends_a_hanging_step),
        with_engine(each_policy_gets_its_answer_from_one_step),
        with_engine(a_split_request_waits_as_a_whole),
        with_engine(a_request_that_waits_for_experts_can_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
