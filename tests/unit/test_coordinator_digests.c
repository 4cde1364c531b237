/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that workers report to a real coordinator over gRPC: others are refused, and a log keeps
 * them. */
#include "base/clock.h"
#include "coordinator_workers.h"
#include "support/check.h"
#include "support/random.h"

#include <stdio.h>
#include <string.h>

static size_t digest_length(void)
{
    Moe__V1__GetStatusResponse *r = get_status();
    size_t length = strlen(r->model_digest);
    moe__v1__get_status_response__free_unpacked(r, NULL);
    return length;
}

static struct moe_status accept_model(const char *reason, size_t *forgotten)
{
    uint8_t bytes[128];
    struct moe_status st;
    Moe__V1__AcceptModelRequest request = MOE__V1__ACCEPT_MODEL_REQUEST__INIT;
    request.reason = (char *)(uintptr_t)reason;
    size_t length =
        call_admin("/moe.v1.AdminService/AcceptModel", &request.base, bytes, sizeof bytes, &st);
    if (st.code != MOE_OK)
        return st;
    Moe__V1__AcceptModelResponse *r = moe__v1__accept_model_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    *forgotten = strlen(r->forgotten);
    moe__v1__accept_model_response__free_unpacked(r, NULL);
    return st;
}

/* Worker 2 leaves, and one with other bytes comes in its place. */
static void refuse_successor(struct worker *w, bool spoilt, bool silent)
{
    struct worker other;
    join(&other, 2, w->incarnation + 1);
    other.spoilt = spoilt;
    other.silent = silent;
    load(&other);
    expect_end(&other, MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH);
    if (spoilt)
        assert_non_null(strstr(other.end.text, "experts.7.up"));
    *w = other;
}

static void lose_worker(struct worker *w, uint32_t which)
{
    send_leaving(&w[which]);
    expect_end(&w[which], MOE_OK, MOE_REASON_NONE);
    for (uint32_t i = 0; i < SLOTS; i++)
        if (i != which)
            expect_and_free(&w[i], MOE__V1__SESSION_RESPONSE__BODY_ABORT);
}

static void a_worker_with_other_weights_is_refused_and_the_rest_goes_on(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    start_coordinator(SLOTS, 60000);
    assert_int_equal(digest_length(), 0);
    bring_up(w);
    assert_int_equal(digest_length(), 64);
    lose_worker(w, 2);
    refuse_successor(&w[2], true, false);
    refuse_successor(&w[2], false, true);
    /* No view was harmed. */
    check_metrics("\nmoe_group_reforms_total{reason=\"wrong_weights\"} 0\n");
    join(&w[2], 2, 990);
    send_digests(&w[2], 0, (const uint8_t *)"rubbish", 7);
    expect_and_free(&w[2], MOE__V1__SESSION_RESPONSE__BODY_ASSIGN);
    expect_end(&w[2], MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
    join(&w[2], 2, 991);
    load(&w[2]);
    form(w);
    shut_down(w);
}

/* It is about a share that the worker may hold no more. */
static void a_late_answer_to_an_earlier_order_is_not_compared(void **unused)
{
    (void)unused;
    struct worker w[SLOTS], early;
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    lose_worker(w, 2);
    join(&early, 2, 990);
    Moe__V1__SessionResponse *r = expect(&early, MOE__V1__SESSION_RESPONSE__BODY_ASSIGN);
    w[2] = early;
    send_register(&w[2], &honest); /* on a new stream: it is asked again */
    expect_and_free(&w[2], MOE__V1__SESSION_RESPONSE__BODY_REGISTERED);
    expect_end(&early, MOE_ABORTED, MOE_REASON_NONE);
    send_loaded(&w[2], r->assign->placement_version, r->assign->order); /* without digests */
    moe__v1__session_response__free_unpacked(r, NULL);
    load(&w[2]);
    form(w);
    shut_down(w);
}

static void the_record_survives_a_restart_until_an_operator_accepts_another_model(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    size_t forgotten = 0;
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    assert_int_equal(accept_model("new", &forgotten).code, MOE_FAILED_PRECONDITION);
    shut_down(w);

    start_coordinator(SLOTS, 60000);
    assert_int_equal(digest_length(), 64);
    for (uint32_t i = 0; i < SLOTS; i++)
        join(&w[i], i, 300 + i);
    w[2].spoilt = true;
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    expect_end(&w[2], MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH);
    for (uint32_t i = 0; i < 2; i++) {
        send_leaving(&w[i]);
        expect_end(&w[i], MOE_OK, MOE_REASON_NONE);
    }
    assert_int_equal(accept_model("", &forgotten).code, MOE_INVALID_ARGUMENT);
    assert_ok(accept_model("fine-tuned", &forgotten));
    assert_int_equal(forgotten, 64);
    assert_ok(accept_model("fine-tuned", &forgotten));
    assert_int_equal(forgotten, 0);
    assert_int_equal(digest_length(), 0);
    for (uint32_t i = 0; i < SLOTS; i++)
        join(&w[i], i, 400 + i);
    w[2].spoilt = true;
    for (uint32_t i = 0; i < SLOTS; i++)
        load(&w[i]);
    form(w);
    shut_down(w);
}

static void a_damaged_record_of_digests_is_a_clear_error(void **unused)
{
    (void)unused;
    struct worker w[SLOTS];
    char path[80];
    start_coordinator(SLOTS, 60000);
    bring_up(w);
    shut_down(w);
    snprintf(path, sizeof path, "%s/model.digests", directory);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, 40, SEEK_SET), 0);
    assert_int_equal(fputc('#', f), '#');
    assert_int_equal(fclose(f), 0);
    struct moe_coordinator_config config = {.listen = "127.0.0.1:0",
                                            .slots = SLOTS,
                                            .replicas = 1,
                                            .lease_ms = 1000,
                                            .form_timeout_ms = 1000,
                                            .state_dir = directory};
    struct moe_status st = moe_coordinator_create(&config, &coordinator);
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, MOE_DATA_LOSS);
    assert_non_null(strstr(st.text, "model.digests"));
}

/* A packed request of a random kind with random small numbers, and a few bytes changed. */

int main(void)
{
    seed_random();
#define SERVICE_TEST(f) cmocka_unit_test_setup_teardown(f, make_directory, remove_directory)
    const struct CMUnitTest tests[] = {
        SERVICE_TEST(a_worker_with_other_weights_is_refused_and_the_rest_goes_on),
        SERVICE_TEST(a_late_answer_to_an_earlier_order_is_not_compared),
        SERVICE_TEST(the_record_survives_a_restart_until_an_operator_accepts_another_model),
        SERVICE_TEST(a_damaged_record_of_digests_is_a_clear_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
