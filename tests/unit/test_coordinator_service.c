/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator over real gRPC, with workers that the test plays: a group's whole life,
 * refusals, and a restart in the middle. */
#include "base/clock.h"
#include "coordinator/placement.h"
#include "coordinator_workers.h"
#include "support/check.h"
#include "support/random.h"

#include <stdio.h>
#include <string.h>

static void check_placement(void)
{
    uint8_t bytes[1024];
    struct moe_status st;
    Moe__V1__GetPlacementRequest request = MOE__V1__GET_PLACEMENT_REQUEST__INIT;
    request.layer = 2;
    size_t length =
        call_admin("/moe.v1.AdminService/GetPlacement", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__GetPlacementResponse *r = moe__v1__get_placement_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    assert_int_equal(r->n_experts, 8);
    assert_int_equal(r->experts[7]->n_slots, 1);
    assert_int_equal(r->experts[7]->slots[0], 2);
    moe__v1__get_placement_response__free_unpacked(r, NULL);
    request.layer = 3;
    call_admin("/moe.v1.AdminService/GetPlacement", &request.base, bytes, sizeof bytes, &st);
    assert_int_equal(st.code, MOE_NOT_FOUND);
    assert_int_equal(st.reason, MOE_REASON_LAYER_NOT_FOUND);
}

/* The events after `after` are of these kinds, the last one about `slot`. */
static void check_events(uint64_t after, const Moe__V1__EventKind *kinds, size_t count,
                         int32_t slot)
{
    uint8_t bytes[8192];
    struct moe_status st;
    Moe__V1__ListEventsRequest request = MOE__V1__LIST_EVENTS_REQUEST__INIT;
    request.after = after;
    size_t length =
        call_admin("/moe.v1.AdminService/ListEvents", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__ListEventsResponse *r = moe__v1__list_events_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    assert_int_equal(r->n_events, count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(r->events[i]->kind, kinds[i]);
        assert_int_equal(r->events[i]->sequence, after + i + 1);
        assert_true(r->events[i]->unix_ms >= r->started_unix_ms);
    }
    assert_int_equal(r->events[count - 1]->slot, slot);
    moe__v1__list_events_response__free_unpacked(r, NULL);
}

/* GetMetrics has the page of the HTTP endpoint. */
static void check_answered_metrics(const char *want)
{
    static uint8_t bytes[65536];
    struct moe_status st;
    Moe__V1__GetMetricsRequest request = MOE__V1__GET_METRICS_REQUEST__INIT;
    size_t length =
        call_admin("/moe.v1.AdminService/GetMetrics", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__GetMetricsResponse *r = moe__v1__get_metrics_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    assert_non_null(strstr(r->text, want));
    moe__v1__get_metrics_response__free_unpacked(r, NULL);
}

static void a_group_lives_from_register_to_shutdown(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_WAITING);
    assert_int_equal(bring_up(w), 1);
    check_serving(1);
    check_placement();
    const Moe__V1__EventKind formed[] = {MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_JOINED,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_JOINED,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_JOINED,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_PREPARING,
                                         MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_SERVING};
    check_events(0, formed, 5, -1);
    check_metrics("\nmoe_group_epoch 1\n");
    check_answered_metrics("\nmoe_group_epoch 1\n");
    check_metrics("\nmoe_group_state{state=\"serving\"} 1\n");
    check_metrics("\nmoe_group_slots 3\n");
    check_metrics("\nmoe_group_recovery_seconds_count 0\n"); /* there was nothing to recover */
    send_try_again(&w[1]); /* no attempt is possible, and the request is answered */
    expect_and_free(&w[1], MOE__V1__SESSION_RESPONSE__BODY_TRYING_AGAIN);

    assert_int_equal(drain(1, "").code, MOE_INVALID_ARGUMENT);
    assert_int_equal(drain(9, "because").code, MOE_NOT_FOUND);
    assert_ok(drain(1, "because"));
    assert_ok(drain(1, "because")); /* repeating it changes nothing */
    expect_and_free(&w[1], MOE__V1__SESSION_RESPONSE__BODY_DRAIN);
    send_leaving(&w[1]);
    expect_end(&w[1], MOE_OK, MOE_REASON_NONE);
    expect_and_free(&w[0], MOE__V1__SESSION_RESPONSE__BODY_ABORT);
    expect_and_free(&w[2], MOE__V1__SESSION_RESPONSE__BODY_ABORT);
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_DEGRADED);
    const Moe__V1__EventKind left[] = {MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_DRAINING,
                                       MOE__V1__EVENT_KIND__EVENT_KIND_WORKER_LEFT,
                                       MOE__V1__EVENT_KIND__EVENT_KIND_EPOCH_ENDED};
    check_events(5, left, 3, -1);

    join(&w[1], 1, 555); /* another process takes the slot */
    assert_int_equal(w[1].slot, 1);
    load(&w[1]);
    assert_int_equal(form(w), 2);
    check_serving(2);
    check_metrics("\nmoe_group_reforms_total{reason=\"left\"} 1\n");
    check_metrics("\nmoe_group_recovery_seconds_count 1\n");
    shut_down(w);
}

static void workers_that_do_not_fit_are_refused(void **unused)
{
    (void)unused;
    static const struct identity other_model = {"beef", "0.2.0", "cpu", LAYERS, 0},
                                 other_backend = {"f00d", "0.2.0", "cuda", LAYERS, 0},
                                 other_release = {"f00d", "99.0.0", "cpu", LAYERS, 0},
                                 other_arithmetic = {
                                     "f00d", "0.2.0", "cpu", LAYERS,
                                     MOE__V1__ACTIVATION_ENCODING__ACTIVATION_ENCODING_F8E4M3};
    struct worker w[SLOTS], x = {.id = 7, .incarnation = 1};
    start_coordinator(SLOTS, 60000);
    for (uint32_t i = 0; i < 2; i++)
        join(&w[i], i, 100 + i);
    send_register(&x, &other_model);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    send_register(&x, &other_backend);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    send_register(&x, &other_release);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    send_register(&x, &other_arithmetic);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH);
    open_stream(&x);
    send_heartbeat(&x, 0);
    expect_end(&x, MOE_FAILED_PRECONDITION, MOE_REASON_NONE);
    x.incarnation = 0;
    send_register(&x, &honest);
    expect_end(&x, MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
    x.incarnation = 1;

    join(&w[2], 2, 102);
    send_register(&x, &honest);
    expect_end(&x, MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN);
    /* A new process of worker 2 replaces the old one when that is gone, and a late message of the
     * old one has no effect. */
    struct worker successor = {.id = 2, .incarnation = 202};
    send_register(&successor, &honest);
    expect_end(&successor, MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN);
    disconnect(&w[2]);
    join(&successor, 2, 202);
    assert_int_equal(successor.slot, w[2].slot);
    send_register(&w[2], &honest);
    expect_end(&w[2], MOE_ABORTED, MOE_REASON_STALE_EPOCH);
    w[2] = successor;
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    form(w);
    shut_down(w);
}

static void a_model_may_have_as_many_layers_as_the_limit_says(void **unused)
{
    (void)unused;
    static const struct identity deep = {"deep", "0.2.0", "cpu", MOE_PLACEMENT_LAYERS_MAX, 0};
    struct worker w = {.id = 1, .incarnation = 1};
    start_coordinator(1, 60000);
    send_register(&w, &deep);
    expect_and_free(&w, MOE__V1__SESSION_RESPONSE__BODY_REGISTERED);
    Moe__V1__SessionResponse *r = expect(&w, MOE__V1__SESSION_RESPONSE__BODY_ASSIGN);
    print_message("  %zu layers assigned\n", r->assign->n_layers);
    assert_int_equal(r->assign->n_layers, MOE_PLACEMENT_LAYERS_MAX);
    moe__v1__session_response__free_unpacked(r, NULL);
    quit_coordinator();
    expect_and_free(&w, MOE__V1__SESSION_RESPONSE__BODY_DRAIN);
    expect_end(&w, MOE_UNAVAILABLE, MOE_REASON_DRAINING);
}

static void a_lost_lease_ends_the_view(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 1000);
    bring_up(w);
    crash_coordinator();
    for (uint32_t i = 0; i < SLOTS; i++)
        free_stream(&w[i]);
    uint64_t restarted_ns = moe_clock_ns();
    start_coordinator(SLOTS, 300); /* no worker comes back within the lease */
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_DEGRADED);
    /* They may still count on the longer lease that they got before the restart. */
    assert_true(moe_clock_ns() - restarted_ns >= 1000 * MOE_NS_PER_MS);
    quit_coordinator();
}

static void a_restarted_coordinator_goes_on_under_the_same_epoch(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    uint64_t epoch = bring_up(w);
    crash_coordinator();
    for (uint32_t i = 0; i < SLOTS; i++)
        free_stream(&w[i]);
    start_coordinator(SLOTS, 60000);
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_WAITING);
    for (uint32_t i = SLOTS; i-- > 0;) { /* in another order, and each in its slot again */
        join(&w[i], i, 100 + i);
        assert_int_equal(w[i].slot, i);
        send_heartbeat(&w[i], epoch);
    }
    wait_for_state(MOE__V1__GROUP_STATE__GROUP_STATE_SERVING);
    check_serving(epoch);
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]); /* ASSIGN, and no PREPARE after it */
    shut_down(w);
}

int main(void)
{
    seed_random();
#define SERVICE_TEST(f) cmocka_unit_test_setup_teardown(f, make_directory, remove_directory)
    const struct CMUnitTest tests[] = {
        SERVICE_TEST(a_group_lives_from_register_to_shutdown),
        SERVICE_TEST(workers_that_do_not_fit_are_refused),
        SERVICE_TEST(a_model_may_have_as_many_layers_as_the_limit_says),
        SERVICE_TEST(a_lost_lease_ends_the_view),
        SERVICE_TEST(a_restarted_coordinator_goes_on_under_the_same_epoch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
