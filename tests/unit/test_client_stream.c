/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of libmoeclient against a fake worker: answers in any order, errors and deadlines of
 * single requests, broken answers, and the stream's end. */
#include "client_fixture.h"

static struct moe_client_stream *open_stream(struct moe_client *c)
{
    struct moe_client_stream *s = NULL;
    struct moe_status st = moe_client_stream_open(c, &s);
    if (moe_failed(&st))
        fail_msg("stream: %s", st.text);
    return s;
}

static struct request *send_on(struct moe_client_stream *s, uint32_t tokens)
{
    struct request *r = make_request(tokens, random_below(2) == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16,
                                     random_below(2) == 1);
    moe_client_stream_forward(s, &r->f, on_request_done, r);
    return r;
}

static void answers_find_their_requests_in_any_order(void **state)
{
    (void)state;
    enum { COUNT = 60 };
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    struct request *all[COUNT];
    for (int round = 0; round < 3; round++) {
        enum fake_mood script[FAKE_SCRIPT_MAX];
        for (int i = 0; i < FAKE_SCRIPT_MAX; i++)
            script[i] = random_below(2) == 0 ? FAKE_HELD : FAKE_GOOD;
        fake_script(fakes, FAKE_GOOD, FAKE_SCRIPT_MAX, script);
        for (int i = 0; i < COUNT; i++)
            all[i] = send_on(s, 1 + random_below(50));
        for (int i = 0; i < COUNT; i++) {
            await_request(all[i]);
            assert_true(all[i]->status.code == MOE_OK);
            assert_answer(all[i]);
            assert_int_equal(all[i]->done_count, 1);
            free_request(all[i]);
        }
    }
    moe_client_stream_close(s);
    moe_client_close(c);
}

/* In protobuf a field may come after the tensors; y has to find its place all the same. */
static void the_id_may_come_last(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    struct request *r = make_request(7, MOE_DTYPE_F32, false);
    fake_script(fakes, FAKE_LAST_ID, 0, NULL);
    moe_client_stream_forward(s, &r->f, on_request_done, r);
    await_request(r);
    assert_ok(r->status);
    assert_answer(r);
    moe_client_stream_close(s);
    moe_client_close(c);
    free_request(r);
}

static void one_failure_does_not_end_the_stream(void **state)
{
    (void)state;
    const enum fake_mood script[] = {FAKE_GOOD, FAKE_FAIL, FAKE_GOOD};
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    fake_fail_with(&fakes[0],
                   moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL, 40, "full"));
    fake_script(fakes, FAKE_GOOD, 3, script);
    for (int i = 0; i < 3; i++) {
        struct request *r = send_on(s, 4);
        await_request(r);
        if (i == 1) {
            assert_refused(r->status, MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL);
            assert_int_equal(r->status.retry_after_ms, 40);
            assert_true(is_poisoned(r));
        } else {
            assert_ok(r->status);
            assert_answer(r);
        }
        free_request(r);
    }
    moe_client_stream_close(s);
    moe_client_close(c);
}

static void a_late_answer_touches_nothing(void **state)
{
    (void)state;
    const enum fake_mood script[] = {FAKE_HELD, FAKE_GOOD};
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    fake_script(fakes, FAKE_GOOD, 2, script);
    struct request *late = make_request(6, MOE_DTYPE_F32, false);
    late->f.timeout_ms = 50;
    moe_client_stream_forward(s, &late->f, on_request_done, late);
    await_request(late);
    assert_refused(late->status, MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE);
    struct request *next = send_on(s, 6); /* the late answer comes right behind this one's */
    await_request(next);
    struct request *after = send_on(s, 6);
    await_request(after);
    assert_ok(next->status);
    assert_ok(after->status);
    assert_answer(next);
    assert_answer(after);
    assert_true(is_poisoned(late));
    assert_int_equal(late->done_count, 1);
    free_request(late);
    free_request(next);
    free_request(after);
    moe_client_stream_close(s);
    moe_client_close(c);
}

static void an_answer_to_nobody_is_ignored(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    fake_script(fakes, FAKE_UNKNOWN_ID, 0, NULL);
    for (int i = 0; i < 5; i++) {
        struct request *r = send_on(s, 3);
        await_request(r);
        assert_ok(r->status);
        assert_answer(r);
        free_request(r);
    }
    moe_client_stream_close(s);
    moe_client_close(c);
}

static void a_broken_answer_fails_its_request_alone(void **state)
{
    (void)state;
    static const struct {
        enum fake_mood mood;
        enum moe_reason reason;
    } cases[] = {
        {FAKE_SHORT_Y, MOE_REASON_SHAPE_MISMATCH},   {FAKE_NO_Y, MOE_REASON_MALFORMED},
        {FAKE_TWO_Y, MOE_REASON_DUPLICATE_TENSOR},   {FAKE_OTHER_TOKENS, MOE_REASON_SHAPE_MISMATCH},
        {FAKE_SHORT_IDS, MOE_REASON_SHAPE_MISMATCH},
    };
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const enum fake_mood script[] = {cases[i].mood};
        fake_script(fakes, FAKE_GOOD, 1, script);
        struct request *broken = make_request(5, MOE_DTYPE_F32, true);
        moe_client_stream_forward(s, &broken->f, on_request_done, broken);
        struct request *good = send_on(s, 5);
        await_request(broken);
        await_request(good);
        assert_refused(broken->status, MOE_INTERNAL, cases[i].reason);
        assert_ok(good->status);
        assert_answer(good);
        free_request(broken);
        free_request(good);
    }
    moe_client_stream_close(s);
    moe_client_close(c);
}

/* What follows the end of a stream is refused with the same reason, and closing still works. */
static void check_end(enum fake_mood mood, enum moe_code code, enum moe_reason reason)
{
    const enum fake_mood script[] = {FAKE_SILENT, FAKE_SILENT, mood};
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    struct request *all[4];
    fake_script(fakes, FAKE_GOOD, 3, script);
    for (int i = 0; i < 3; i++)
        all[i] = send_on(s, 2);
    await_request(all[2]);
    all[3] = send_on(s, 2);
    for (int i = 0; i < 4; i++) {
        await_request(all[i]);
        assert_refused(all[i]->status, code, reason);
        assert_int_equal(all[i]->done_count, 1);
        free_request(all[i]);
    }
    moe_client_stream_close(s);
    moe_client_close(c);
}

static void the_end_of_the_stream_fails_what_is_in_flight(void **state)
{
    (void)state;
    check_end(FAKE_END, MOE_UNAVAILABLE, MOE_REASON_NONE);
}

static void an_answer_without_a_readable_id_ends_the_stream(void **state)
{
    (void)state;
    check_end(FAKE_NOT_PROTOBUF, MOE_INTERNAL, MOE_REASON_MALFORMED);
}

static void the_end_of_the_server_fails_what_is_in_flight(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    fake_script(fakes, FAKE_SILENT, 0, NULL);
    struct request *r = send_on(s, 2);
    while (fake_calls(fakes) == 0) /* the watchdog bounds this */
        ;
    fake_stop(fakes, FAKES);
    await_request(r);
    print_message("    %s: %s\n", moe_code_name(r->status.code), r->status.text);
    assert_int_equal(r->status.code, MOE_UNAVAILABLE);
    moe_client_stream_close(s);
    moe_client_close(c);
    free_request(r);
    fake_start(fakes, FAKES);
}

static void wrong_arguments_are_refused_before_anything_is_sent(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s = open_stream(c);
    struct request *r = make_request(2, MOE_DTYPE_F32, false);
    r->f.hidden++;
    moe_client_stream_forward(s, &r->f, on_request_done, r);
    await_request(r);
    assert_refused(r->status, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH);
    assert_int_equal(fake_calls(fakes), 0);
    moe_client_stream_close(s);
    moe_client_close(c);
    free_request(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_fakes(answers_find_their_requests_in_any_order),
        with_fakes(the_id_may_come_last),
        with_fakes(one_failure_does_not_end_the_stream),
        with_fakes(a_late_answer_touches_nothing),
        with_fakes(an_answer_to_nobody_is_ignored),
        with_fakes(a_broken_answer_fails_its_request_alone),
        with_fakes(the_end_of_the_stream_fails_what_is_in_flight),
        with_fakes(an_answer_without_a_readable_id_ends_the_stream),
        with_fakes(the_end_of_the_server_fails_what_is_in_flight),
        with_fakes(wrong_arguments_are_refused_before_anything_is_sent),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
