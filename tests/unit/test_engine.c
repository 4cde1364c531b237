/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the engine on the CPU backend, in a group of one. Failures of steps, which need a
 * backend that fails on demand, are in test_engine_failures.c. */
#include "base/clock.h"
#include "worker_fixture.h"

#include <math.h>

static struct worker worker;

static int open_worker(void **state)
{
    (void)state;
    worker_open(&worker);
    return 0;
}

static int close_worker(void **state)
{
    (void)state;
    worker_close(&worker);
    return 0;
}

static enum moe_dtype random_dtype(void)
{
    return random_below(2) == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
}

static void requests_of_all_kinds_share_steps_and_each_gets_its_own_answer(void **state)
{
    (void)state;
    enum { N = 120 };
    struct request *r = calloc(N, sizeof *r);
    assert_non_null(r);
    for (int i = 0; i < N; i++) {
        request_fill(&r[i], &worker, (int)random_below(WORKER_LAYERS), 1 + random_below(4),
                     random_dtype(), (enum moe_routing_mode)random_below(3));
        assert_ok(moe_engine_submit(worker.engine, &r[i].work));
    }
    worker_start_view(&worker);
    uint32_t shared = 0;
    for (int i = 0; i < N; i++) {
        request_wait(&r[i]);
        assert_ok(r[i].status);
        request_check(&r[i], &worker);
        assert_int_equal(r[i].work.answered_epoch, worker.epoch);
        assert_true(r[i].work.started_ns >= r[i].work.submitted_ns);
        assert_true(r[i].work.step.total_ns > 0);
        shared += r[i].work.step_tokens > r[i].work.tokens;
    }
    print_message("%d requests in %llu steps; %u shared theirs\n", N,
                  (unsigned long long)worker.tickets, shared);
    assert_true(worker.tickets < N / 2);
    for (int i = 0; i < N; i++) {
        assert_int_equal(r[i].done, 1);
        request_free(&r[i]);
    }
    free(r);
}

static void a_request_larger_than_the_bucket_is_split_and_joined(void **state)
{
    (void)state;
    struct request r;
    worker_start_view(&worker);
    for (uint32_t tokens = WORKER_BUCKET; tokens <= 5 * WORKER_BUCKET + 3; tokens += 9) {
        request_fill(&r, &worker, 0, tokens, random_dtype(), MOE_ROUTE_SERVER);
        assert_ok(request_run(&r, &worker));
        request_check(&r, &worker);
        assert_int_equal(r.work.steps, (tokens + WORKER_BUCKET - 1) / WORKER_BUCKET);
        assert_int_equal(r.work.copy_in_ns, 0); /* alone in its steps: used in place */
        request_free(&r);
    }
}

static void a_bad_token_fails_its_own_request_only(void **state)
{
    (void)state;
    struct request r[6];
    for (int i = 0; i < 6; i++)
        request_fill(&r[i], &worker, 0, i == 4 ? 40 : 3, MOE_DTYPE_F32,
                     i == 1 || i == 5 ? MOE_ROUTE_IDS_WEIGHTS : MOE_ROUTE_SERVER);
    ((float *)r[0].x)[2 * 24 + 7] = NAN;
    r[1].ids_in[3] = 8;
    ((float *)r[4].x)[25 * 24] = INFINITY;
    r[5].ids_in[1] = 0;
    r[5].weights_in[1] = NAN;
    for (int i = 0; i < 6; i++)
        assert_ok(moe_engine_submit(worker.engine, &r[i].work));
    worker_start_view(&worker);
    for (int i = 0; i < 6; i++)
        request_wait(&r[i]);
    assert_refused(r[0].status, MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS);
    assert_refused(r[1].status, MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE);
    assert_refused(r[4].status, MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS);
    assert_refused(r[5].status, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    for (int i = 2; i <= 3; i++) {
        assert_ok(r[i].status);
        request_check(&r[i], &worker);
    }
    struct moe_engine_counters counters;
    assert_true(moe_engine_drain(worker.engine, moe_clock_ns() + 10 * MOE_NS_PER_S));
    moe_engine_read_counters(worker.engine, &counters);
    assert_int_equal(counters.requests, 6);
    assert_int_equal(counters.failed_requests, 4);
    assert_int_equal(counters.queued_tokens, 0);
    for (int i = 0; i < 6; i++)
        request_free(&r[i]);
}

/* Clients that pad their routing give one expert several times. */
static void an_expert_given_twice_counts_twice(void **state)
{
    (void)state;
    struct request r;
    worker_start_view(&worker);
    for (int layer = 0; layer < WORKER_LAYERS; layer++) {
        request_fill(&r, &worker, layer, 3 * WORKER_BUCKET, MOE_DTYPE_F32, MOE_ROUTE_IDS_WEIGHTS);
        for (uint32_t i = 0; i < r.work.tokens * worker.spec[layer].router.top_k; i++)
            r.ids_in[i] = (int32_t)(i < 60 ? 3 : random_below(2));
        assert_ok(request_run(&r, &worker));
        request_check(&r, &worker);
        request_free(&r);
    }
}

static void a_cancelled_or_late_request_is_not_computed(void **state)
{
    (void)state;
    struct request cancelled, late, good;
    request_fill(&cancelled, &worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    request_fill(&late, &worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    request_fill(&good, &worker, 0, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    late.work.deadline_ns = moe_clock_ns() + 5 * MOE_NS_PER_MS;
    assert_ok(moe_engine_submit(worker.engine, &cancelled.work));
    assert_ok(moe_engine_submit(worker.engine, &late.work));
    assert_ok(moe_engine_submit(worker.engine, &good.work));
    moe_engine_cancel(worker.engine, &cancelled.work);
    request_wait(&cancelled);
    request_wait(&late); /* there is no view: only its deadline can end it */
    assert_refused(cancelled.status, MOE_CANCELLED, MOE_REASON_NONE);
    assert_refused(late.status, MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE);
    worker_start_view(&worker);
    request_wait(&good);
    assert_ok(good.status);
    request_check(&good, &worker);
    moe_engine_cancel(worker.engine, &good.work); /* too late: nothing happens */
    assert_int_equal(good.work.step_tokens, 3);
    assert_int_equal(good.done, 1);
    struct moe_engine_counters counters;
    moe_engine_read_counters(worker.engine, &counters);
    assert_int_equal(counters.tokens, 3);
    request_free(&cancelled);
    request_free(&late);
    request_free(&good);
}

static void a_full_queue_an_unknown_layer_and_a_stale_epoch_are_refused(void **state)
{
    (void)state;
    struct request big, more, pinned;
    request_fill(&big, &worker, 0, WORKER_QUEUE - 2, MOE_DTYPE_BF16, MOE_ROUTE_SERVER);
    request_fill(&more, &worker, 1, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    request_fill(&pinned, &worker, 1, 1, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    assert_ok(moe_engine_submit(worker.engine, &big.work));
    assert_refused(moe_engine_submit(worker.engine, &more.work), MOE_RESOURCE_EXHAUSTED,
                   MOE_REASON_QUEUE_FULL);
    more.work.layer = 2;
    assert_refused(moe_engine_submit(worker.engine, &more.work), MOE_NOT_FOUND,
                   MOE_REASON_LAYER_NOT_FOUND);
    more.work.layer = 4;
    pinned.work.epoch = 99;
    assert_ok(moe_engine_submit(worker.engine, &pinned.work)); /* the next epoch is unknown */
    worker_start_view(&worker);
    request_wait(&pinned);
    assert_refused(pinned.status, MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH);
    assert_refused(moe_engine_submit(worker.engine, &pinned.work), MOE_FAILED_PRECONDITION,
                   MOE_REASON_STALE_EPOCH);
    request_wait(&big);
    assert_ok(request_run(&more, &worker));
    request_check(&more, &worker);
    pinned.work.epoch = worker.epoch;
    pinned.done = 0;
    assert_ok(request_run(&pinned, &worker));
    assert_int_equal(big.done + more.done + pinned.done, 3);
    request_free(&big);
    request_free(&more);
    request_free(&pinned);
}

static void draining_finishes_accepted_requests_and_refuses_new_ones(void **state)
{
    (void)state;
    struct request first, second;
    request_fill(&first, &worker, 1, 50, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    request_fill(&second, &worker, 1, 1, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    assert_ok(moe_engine_submit(worker.engine, &first.work));
    assert_false(moe_engine_drain(worker.engine, moe_clock_ns() + MOE_NS_PER_MS));
    assert_refused(moe_engine_submit(worker.engine, &second.work), MOE_UNAVAILABLE,
                   MOE_REASON_DRAINING);
    worker_start_view(&worker);
    assert_true(moe_engine_drain(worker.engine, moe_clock_ns() + 30 * MOE_NS_PER_S));
    assert_int_equal(first.done, 1);
    assert_ok(first.status);
    request_check(&first, &worker);
    request_free(&first);
    request_free(&second);
}

static void destroying_the_engine_answers_waiting_requests(void **state)
{
    (void)state;
    struct worker w;
    struct request r[3];
    worker_open(&w);
    for (int i = 0; i < 3; i++) {
        request_fill(&r[i], &w, 0, 2, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
        assert_ok(moe_engine_submit(w.engine, &r[i].work));
        if (i == 0) {
            moe_engine_fail_queued(
                w.engine, moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "the group gave up"));
            request_wait(&r[0]);
            assert_refused(r[0].status, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
        }
    }
    worker_close(&w);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(r[i].done, 1);
        if (i > 0)
            assert_refused(r[i].status, MOE_UNAVAILABLE, MOE_REASON_DRAINING);
        request_free(&r[i]);
    }
}

static void a_suspended_engine_refuses_what_waits_and_what_comes(void **state)
{
    (void)state;
    struct worker w;
    struct request r[3];
    worker_open(&w);
    for (int i = 0; i < 3; i++)
        request_fill(&r[i], &w, 0, 2, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    assert_ok(moe_engine_submit(w.engine, &r[0].work)); /* no view: it waits */
    moe_engine_suspend(w.engine, moe_error(MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST, "no lease"));
    request_wait(&r[0]);
    assert_refused(r[0].status, MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    assert_refused(moe_engine_submit(w.engine, &r[1].work), MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST);
    moe_engine_suspend(w.engine, moe_ok());
    assert_ok(moe_engine_submit(w.engine, &r[2].work));
    assert_int_equal(r[2].done, 0);
    worker_close(&w);
    assert_refused(r[2].status, MOE_UNAVAILABLE, MOE_REASON_DRAINING);
    for (int i = 0; i < 3; i++)
        request_free(&r[i]);
}

/* ------------------------------------------------------------------- parts of a batch */

enum { PARTS = 4 };

static int open_patient_worker(void **state)
{
    (void)state;
    worker_parts_wait_ns = 3600 * MOE_NS_PER_S;
    worker_open(&worker);
    worker_parts_wait_ns = MOE_NS_PER_MS;
    return 0;
}

static void fill_part(struct request *r, uint32_t tokens, uint64_t batch, uint32_t parts)
{
    request_fill(r, &worker, 0, tokens, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    r->work.batch = batch;
    r->work.batch_parts = parts;
}

/* Tokens 1, 2, 3 ... of a batch of so many parts. */
static void fill_parts(struct request *r, uint32_t count, uint64_t batch, uint32_t parts)
{
    for (uint32_t i = 0; i < count; i++)
        fill_part(&r[i], i + 1, batch, parts);
}

static void end_parts(struct request *r, uint32_t count, uint32_t step_tokens)
{
    for (uint32_t i = 0; i < count; i++) {
        request_wait(&r[i]);
        assert_ok(r[i].status);
        request_check(&r[i], &worker);
        assert_int_equal(r[i].work.step_tokens, step_tokens);
        assert_int_equal(r[i].done, 1);
        request_free(&r[i]);
    }
}

/* A request without a batch: its step takes all that waits for its layer. */
static void run_another(void)
{
    struct request other;
    request_fill(&other, &worker, 0, 2, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    assert_ok(request_run(&other, &worker));
    assert_int_equal(other.work.step_tokens, 2);
    request_free(&other);
}

static void parts_of_a_batch_share_a_step(void **state)
{
    (void)state;
    struct request a[PARTS], b[PARTS];
    worker_start_view(&worker);
    fill_parts(a, PARTS, 7, PARTS);
    fill_parts(b, PARTS, 8, PARTS);
    for (int i = 0; i + 1 < PARTS; i++) {
        assert_ok(moe_engine_submit(worker.engine, &a[i].work));
        assert_ok(moe_engine_submit(worker.engine, &b[PARTS - 1 - i].work));
    }
    run_another();
    for (int i = 0; i < PARTS; i++)
        assert_true(a[i].done == 0 && b[i].done == 0);
    assert_ok(moe_engine_submit(worker.engine, &a[PARTS - 1].work));
    end_parts(a, PARTS, 1 + 2 + 3 + 4);
    for (int i = 0; i < PARTS; i++)
        assert_int_equal(b[i].done, 0);
    assert_ok(moe_engine_submit(worker.engine, &b[0].work));
    end_parts(b, PARTS, 1 + 2 + 3 + 4);
}

static void a_part_does_not_wait_for_long(void **state)
{
    (void)state;
    struct request r[2];
    worker_start_view(&worker);
    fill_parts(r, 2, 7, PARTS);
    for (int i = 0; i < 2; i++) {
        assert_ok(request_run(&r[i], &worker));
        request_check(&r[i], &worker);
        assert_true(r[i].work.started_ns - r[i].work.submitted_ns >= MOE_NS_PER_MS);
        assert_int_equal(r[i].work.step_tokens, r[i].work.tokens);
        request_free(&r[i]);
    }
}

static void a_part_that_is_cancelled_does_not_hold_the_others(void **state)
{
    (void)state;
    struct request r[PARTS];
    worker_start_view(&worker);
    fill_parts(r, PARTS, 7, PARTS);
    for (int i = 0; i < 2; i++)
        assert_ok(moe_engine_submit(worker.engine, &r[i].work));
    moe_engine_cancel(worker.engine, &r[0].work);
    request_wait(&r[0]);
    assert_int_equal(r[0].status.code, MOE_CANCELLED);
    request_free(&r[0]);
    for (int i = 2; i < PARTS; i++)
        assert_ok(moe_engine_submit(worker.engine, &r[i].work));
    end_parts(r + 1, PARTS - 1, 2 + 3 + 4);
}

/* Those of another layer or dtype are another batch. */
static void a_view_that_begins_takes_the_parts_that_wait(void **state)
{
    (void)state;
    struct request r[3];
    worker_start_view(&worker);
    fill_parts(r, 2, 7, 3);
    request_fill(&r[2], &worker, 1, 3, MOE_DTYPE_F32, MOE_ROUTE_SERVER);
    r[2].work.batch = 7;
    r[2].work.batch_parts = 3;
    for (int i = 0; i < 3; i++)
        assert_ok(moe_engine_submit(worker.engine, &r[i].work));
    worker_stop_view(&worker);
    assert_true(r[0].done == 0 && r[1].done == 0 && r[2].done == 0);
    worker_start_view(&worker);
    end_parts(r, 2, 3);
    end_parts(r + 2, 1, 3);
}

/* Batches beyond the room for them are computed at once, part by part. */
static void too_many_batches_do_not_wait(void **state)
{
    (void)state;
    enum { BATCHES = 80, ROOM = 64 };
    struct request *r = calloc(BATCHES, sizeof *r);
    assert_non_null(r);
    worker_start_view(&worker);
    for (int i = 0; i < BATCHES; i++) {
        fill_part(&r[i], 1, (uint64_t)i, 2);
        assert_ok(moe_engine_submit(worker.engine, &r[i].work));
        if (i == ROOM - 1) {
            run_another();
        }
    }
    for (int i = ROOM; i < BATCHES; i++)
        request_wait(&r[i]);
    assert_int_equal(r[0].done, 0);
    worker_stop_view(&worker);
    worker_start_view(&worker);
    for (int i = 0; i < BATCHES; i++) {
        request_wait(&r[i]);
        assert_ok(r[i].status);
        request_check(&r[i], &worker);
        request_free(&r[i]);
    }
    free(r);
}

/* ---------------------------------------------------------------- many threads at once */

enum { CLIENTS = 3, REQUESTS_EACH = 60 };

static void *client_thread(void *arg)
{
    struct request *r = arg;
    for (int i = 0; i < REQUESTS_EACH; i++) {
        struct moe_status st = moe_engine_submit(worker.engine, &r[i].work);
        MOE_INVARIANT(!moe_failed(&st));
        if (i % 7 == 3)
            moe_engine_cancel(worker.engine, &r[i / 2].work);
    }
    return NULL;
}

static void every_request_ends_once_and_rightly_while_views_come_and_go(void **state)
{
    (void)state;
    static struct request r[CLIENTS][REQUESTS_EACH];
    pthread_t threads[CLIENTS];
    for (int c = 0; c < CLIENTS; c++)
        for (int i = 0; i < REQUESTS_EACH; i++)
            request_fill(&r[c][i], &worker, (int)random_below(2), 1 + random_below(20),
                         random_dtype(), (enum moe_routing_mode)random_below(3));
    for (int c = 0; c < CLIENTS; c++)
        for (int i = 0; i < REQUESTS_EACH; i++) {
            r[c][i].work.batch = random_below(20);
            r[c][i].work.batch_parts = random_below(4);
        }
    for (int c = 0; c < CLIENTS; c++)
        assert_int_equal(pthread_create(&threads[c], NULL, client_thread, r[c]), 0);
    for (int view = 0; view < 25; view++) {
        struct timespec pause = {.tv_nsec = random_below(3000000)};
        worker_start_view(&worker);
        nanosleep(&pause, NULL);
        worker_stop_view(&worker);
    }
    worker_start_view(&worker);
    uint32_t cancelled = 0;
    for (int c = 0; c < CLIENTS; c++) {
        pthread_join(threads[c], NULL);
        for (int i = 0; i < REQUESTS_EACH; i++) {
            request_wait(&r[c][i]);
            cancelled += r[c][i].status.code == MOE_CANCELLED;
            if (r[c][i].status.code == MOE_CANCELLED)
                continue;
            assert_ok(r[c][i].status);
            request_check(&r[c][i], &worker);
        }
    }
    print_message("%d requests over %llu views, %u cancelled, %llu tickets\n",
                  CLIENTS * REQUESTS_EACH, (unsigned long long)worker.epoch, cancelled,
                  (unsigned long long)worker.tickets);
    assert_true(moe_engine_drain(worker.engine, moe_clock_ns() + 30 * MOE_NS_PER_S));
    for (int c = 0; c < CLIENTS; c++) {
        for (int i = 0; i < REQUESTS_EACH; i++) {
            assert_int_equal(r[c][i].done, 1);
            request_free(&r[c][i]);
        }
    }
}

#define with_worker(test) cmocka_unit_test_setup_teardown(test, open_worker, close_worker)
#define with_patient_worker(test)                                                                  \
    cmocka_unit_test_setup_teardown(test, open_patient_worker, close_worker)

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_worker(requests_of_all_kinds_share_steps_and_each_gets_its_own_answer),
        with_worker(a_request_larger_than_the_bucket_is_split_and_joined),
        with_worker(a_bad_token_fails_its_own_request_only),
        with_worker(an_expert_given_twice_counts_twice),
        with_worker(a_cancelled_or_late_request_is_not_computed),
        with_worker(a_full_queue_an_unknown_layer_and_a_stale_epoch_are_refused),
        with_worker(draining_finishes_accepted_requests_and_refuses_new_ones),
        cmocka_unit_test(destroying_the_engine_answers_waiting_requests),
        cmocka_unit_test(a_suspended_engine_refuses_what_waits_and_what_comes),
        with_patient_worker(parts_of_a_batch_share_a_step),
        with_worker(a_part_does_not_wait_for_long),
        with_patient_worker(a_part_that_is_cancelled_does_not_hold_the_others),
        with_patient_worker(a_view_that_begins_takes_the_parts_that_wait),
        with_patient_worker(too_many_batches_do_not_wait),
        with_worker(every_request_ends_once_and_rightly_while_views_come_and_go),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
