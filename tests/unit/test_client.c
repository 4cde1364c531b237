/* SPDX-License-Identifier: Apache-2.0 */
/* libmoeclient against fake workers: what it sends, what it makes of answers, what it tries again.
 */
#include "client_fixture.h"

#include "base/clock.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static struct moe_status forward(struct moe_client *c, struct request *r)
{
    return moe_client_forward(c, &r->f);
}

static void limits_and_layers_are_known_after_connecting(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    const struct moe_client_info *info = moe_client_get_info(c);
    assert_string_equal(info->model, "fake");
    assert_string_equal(info->version, "9.8.7");
    assert_int_equal(info->max_tokens_per_request, FAKE_MAX_TOKENS);
    assert_int_equal(info->worker_count, 3);
    assert_string_equal(info->workers[2], fakes[2].endpoint);
    assert_int_equal(info->layer_count, 1);
    assert_int_equal(info->layers[0].layer, FAKE_LAYER);
    assert_int_equal(info->layers[0].top_k, FAKE_TOP_K);
    moe_client_close(c);
}

/* The core of gRPC has an epoll that a child of fork shares: a client there would end this test. */
static void a_child_of_fork_is_refused_and_the_parent_goes_on(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL), *other = NULL;
    struct request *r = make_request(4, MOE_DTYPE_F32, false);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct moe_client_config config = {.size = sizeof config, .endpoint = fakes[0].endpoint};
        struct moe_status st = moe_client_connect(&config, &other);
        _exit(st.code == MOE_FAILED_PRECONDITION && st.reason == MOE_REASON_UNSUPPORTED ? 0 : 1);
    }
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    assert_ok(forward(c, r));
    assert_answer(r);
    end_call(c, r);
}

static bool was_added(struct fake *f, uint32_t call)
{
    moe_mutex_lock(&f->lock);
    bool added = f->added[call];
    moe_mutex_unlock(&f->lock);
    return added;
}

static void a_client_is_bound_to_one_model(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .model = FAKE_ADDED};
    struct moe_client *c = connect_client(fakes, &with);
    const struct moe_client_info *info = moe_client_get_info(c);
    assert_string_equal(info->model, FAKE_ADDED);
    assert_int_equal(info->model_count, 2);
    assert_string_equal(info->models[0], "fake");
    assert_string_equal(info->models[1], FAKE_ADDED);
    struct request *r = make_request(3, MOE_DTYPE_F32, false);
    fake_script(fakes, FAKE_GOOD, 0, NULL);
    assert_ok(forward(c, r));
    assert_true(was_added(&fakes[0], 0));
    struct moe_client_stream *s;
    assert_ok(moe_client_stream_open(c, &s));
    moe_client_stream_forward(s, &r->f, on_request_done, r);
    await_request(r);
    moe_client_stream_close(s);
    assert_ok(r->status);
    assert_true(was_added(&fakes[0], 1));
    moe_client_close(c);

    with.model = ""; /* the default model, as NULL */
    c = connect_client(fakes, &with);
    assert_string_equal(moe_client_get_info(c)->model, "fake");
    fake_script(fakes, FAKE_GOOD, 0, NULL);
    assert_ok(forward(c, r));
    assert_false(was_added(&fakes[0], 0));
    moe_client_close(c);
    free_request(r);
}

static void an_unknown_model_ends_the_connecting(void **state)
{
    (void)state;
    char longest[257];
    struct moe_client_config config = {
        .size = sizeof config, .endpoint = fakes[0].endpoint, .model = "another"};
    struct moe_client *c = NULL;
    assert_refused(moe_client_connect(&config, &c), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    memset(longest, 'm', sizeof longest);
    longest[256] = '\0';
    config.model = longest;
    assert_refused(moe_client_connect(&config, &c), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    longest[255] = '\0'; /* can be sent, and is not known */
    assert_refused(moe_client_connect(&config, &c), MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND);
    assert_null(c);
}

/* A program of the release before has a config without the field. */
static void a_shorter_config_means_the_default_model(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = offsetof(struct moe_client_config, model),
                                     .endpoint = fakes[0].endpoint,
                                     .model = "another"};
    struct moe_client *c = NULL;
    assert_ok(moe_client_connect(&with, &c));
    assert_string_equal(moe_client_get_info(c)->model, "fake");
    moe_client_close(c);
}

static void nobody_there_is_unavailable(void **state)
{
    (void)state;
    struct moe_client_config config = {
        .size = sizeof config, .endpoint = "127.0.0.1:1", .timeout_ms = 5000};
    struct moe_client *c = NULL;
    assert_refused(moe_client_connect(&config, &c), MOE_UNAVAILABLE, MOE_REASON_NONE);
    assert_null(c);
    config.endpoint = "";
    assert_refused(moe_client_connect(&config, &c), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    config.endpoint = "127.0.0.1:99999"; /* the core would go to port 34463 */
    assert_refused(moe_client_connect(&config, &c), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
}

static void rows_come_back_where_they_belong(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    for (int i = 0; i < 60; i++) {
        bool routing = random_below(2) == 1;
        struct request *r = make_request(
            1 + random_below(300), random_below(2) == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, routing);
        fakes[0].ids_dtype = 3 + random_below(3);
        assert_ok(forward(c, r));
        assert_answer(r);
        for (uint32_t row = 0; routing && row < r->f.tokens; row++) {
            for (uint32_t k = 0; k < FAKE_TOP_K; k++) {
                assert_int_equal(r->f.topk_ids[row * FAKE_TOP_K + k], fake_id(row, k));
                assert_true(r->f.topk_weights[row * FAKE_TOP_K + k] == fake_weight(k));
            }
        }
        free_request(r);
    }
    moe_client_close(c);
}

/* The fake returns the routing that it was sent. */
static void routing_of_the_caller_is_sent(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(37, MOE_DTYPE_F32, true);
    int32_t *ids = malloc(37 * FAKE_TOP_K * sizeof *ids);
    float *weights = malloc(37 * FAKE_TOP_K * sizeof *weights);
    assert_true(ids != NULL && weights != NULL);
    for (int i = 0; i < 37 * FAKE_TOP_K; i++) {
        ids[i] = (int32_t)random_below(FAKE_EXPERTS + 1) - 1;
        weights[i] = (float)random_below(1000);
    }
    r->f.topk_ids_in = ids;
    r->f.topk_weights_in = weights;
    fakes[0].ids_dtype = 5;
    assert_ok(forward(c, r));
    assert_answer(r);
    assert_memory_equal(r->f.topk_ids, ids, 37 * FAKE_TOP_K * sizeof *ids);
    assert_memory_equal(r->f.topk_weights, weights, 37 * FAKE_TOP_K * sizeof *weights);
    end_call(c, r);
}

/* The fake returns the routing of its table. Parts of a batch get their own token ids. */
static void token_ids_of_the_caller_are_sent(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct moe_client_config spread = {
            .size = sizeof spread, .spread = true, .spread_tokens = 16};
        struct moe_client *c = connect_client(fakes, i == 0 ? NULL : &spread);
        struct request *r = make_request(37, MOE_DTYPE_F32, true);
        int64_t token_ids[37];
        assert_int_equal(moe_client_get_info(c)->layers[0].vocabulary, FAKE_VOCABULARY);
        for (int t = 0; t < 37; t++)
            token_ids[t] = random_below(FAKE_VOCABULARY);
        r->f.token_ids_in = token_ids;
        assert_ok(forward(c, r));
        assert_answer(r);
        for (int t = 0; t < 37; t++)
            for (int k = 0; k < FAKE_TOP_K; k++)
                assert_int_equal(r->f.topk_ids[t * FAKE_TOP_K + k],
                                 (token_ids[t] + k) % FAKE_EXPERTS);
        end_call(c, r);
    }
}

static void token_ids_for_a_layer_without_a_table_are_not_sent(void **state)
{
    (void)state;
    const struct moe_client_config added = {.size = sizeof added, .model = FAKE_ADDED};
    static const int64_t token_ids[3];
    struct moe_client *c = connect_client(fakes, &added);
    struct request *r = make_request(3, MOE_DTYPE_F32, false);
    r->f.token_ids_in = token_ids;
    assert_refused(moe_client_forward(c, &r->f), MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    assert_int_equal(fake_calls(fakes), 0);
    end_call(c, r);
}

/* ------------------------------------------------------------------ trying again */

static void unavailable_is_tried_again_until_it_works(void **state)
{
    (void)state;
    const enum fake_mood script[] = {FAKE_FAIL, FAKE_FAIL};
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(5, MOE_DTYPE_F32, false);
    fake_script(fakes, FAKE_GOOD, 2, script);
    assert_ok(forward(c, r));
    assert_answer(r);
    assert_int_equal(fake_calls(fakes), 3);
    end_call(c, r);
}

static void attempts_are_bounded(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .max_attempts = 3};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(5, MOE_DTYPE_F32, false);
    fake_script(fakes, FAKE_FAIL, 0, NULL);
    assert_refused(forward(c, r), MOE_UNAVAILABLE, MOE_REASON_DRAINING);
    assert_int_equal(fake_calls(fakes), 3);
    assert_true(is_poisoned(r));
    end_call(c, r);
}

static void the_servers_wish_for_a_pause_is_heeded(void **state)
{
    (void)state;
    const enum fake_mood script[] = {FAKE_FAIL};
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(1, MOE_DTYPE_F32, false);
    fake_fail_with(&fakes[0], moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 300, "soon"));
    fake_script(fakes, FAKE_GOOD, 1, script);
    uint64_t begin = moe_clock_ns();
    assert_ok(forward(c, r));
    assert_true(moe_clock_ns() - begin >= 300 * MOE_NS_PER_MS);
    assert_int_equal(fake_calls(fakes), 2);
    end_call(c, r);
}

/* The time counts, and not the number of attempts. */
static void retries_end_with_their_budget(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .max_attempts = 1, .retry_ms = 400};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(5, MOE_DTYPE_F32, false);
    fake_script(fakes, FAKE_FAIL, 0, NULL);
    uint64_t begin = moe_clock_ns();
    assert_refused(forward(c, r), MOE_UNAVAILABLE, MOE_REASON_DRAINING);
    assert_true(fake_calls(fakes) > 1);
    assert_true(moe_clock_ns() - begin < 30 * MOE_NS_PER_S); /* the call's time is a minute */
    const enum fake_mood script[] = {FAKE_FAIL, FAKE_FAIL};
    fake_script(fakes, FAKE_GOOD, 2, script);
    assert_ok(forward(c, r));
    assert_answer(r);
    end_call(c, r);
}

/* The first worker asks for a pause that the call's time does not have, so the others answer. */
static void another_worker_is_asked_at_once(void **state)
{
    (void)state;
    const struct moe_status later =
        moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 60000, "later");
    struct moe_client_config with = {.size = sizeof with, .hedge = true, .timeout_ms = 30000};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(5, MOE_DTYPE_F32, false);
    assert_ok(forward(c, r));
    assert_int_equal(fake_calls(&fakes[0]), 1); /* without spread */
    fake_fail_with(&fakes[0], later);
    fake_fail_with(&fakes[1], later);
    for (int w = 0; w < 3; w++)
        fake_script(&fakes[w], w < 2 ? FAKE_FAIL : FAKE_GOOD, 0, NULL);
    assert_ok(forward(c, r));
    assert_answer(r);
    for (int w = 0; w < 3; w++)
        assert_int_equal(fake_calls(&fakes[w]), 1);
    fake_fail_with(&fakes[2], later);
    for (int w = 0; w < 3; w++) /* and never more than all of them before a pause */
        fake_script(&fakes[w], FAKE_FAIL, 0, NULL);
    assert_refused(forward(c, r), MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    for (int w = 0; w < 3; w++)
        assert_int_equal(fake_calls(&fakes[w]), 1);
    end_call(c, r);
}

/* It keeps its connection, so only its silence tells. */
static void a_worker_that_says_nothing_counts_as_one_that_refuses(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with,
                                     .hedge = true,
                                     .retry_ms = 30000,
                                     .timeout_ms = 30000,
                                     .attempt_ms = 100};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(5, MOE_DTYPE_F32, false);
    fake_script(&fakes[0], FAKE_SILENT, 0, NULL);
    for (int w = 1; w < 3; w++)
        fake_script(&fakes[w], FAKE_GOOD, 0, NULL);
    assert_ok(forward(c, r));
    assert_answer(r);
    for (int w = 0; w < 3; w++)
        assert_int_equal(fake_calls(&fakes[w]), w < 2 ? 1 : 0);
    const enum fake_mood script[] = {FAKE_SILENT, FAKE_SILENT};
    for (int w = 0; w < 3; w++) /* all are slow: 100, 200, 400 ms each */
        fake_script(&fakes[w], FAKE_GOOD, 2, script);
    poison_answer(r);
    uint64_t begin = moe_clock_ns();
    assert_ok(forward(c, r));
    assert_answer(r);
    assert_true(moe_clock_ns() - begin >= 900 * MOE_NS_PER_MS);
    assert_int_equal(fake_calls(&fakes[0]), 3);
    assert_int_equal(fake_calls(&fakes[1]) + fake_calls(&fakes[2]), 4);
    moe_client_close(c);
    free_request(r);
}

/* The last attempt has the rest of the call's time; a retained pass has one worker. */
static void the_last_attempt_is_not_cut_short(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with,
                                     .hedge = true,
                                     .max_attempts = 2,
                                     .timeout_ms = 1000,
                                     .attempt_ms = 50};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(5, MOE_DTYPE_F32, false);
    for (int retained = 0; retained < 2; retained++) {
        for (int w = 0; w < 3; w++)
            fake_script(&fakes[w], FAKE_SILENT, 0, NULL);
        r->f.retain_session = retained ? "s" : NULL;
        r->f.retain_micro_batch_id = retained ? 1 : 0;
        uint64_t begin = moe_clock_ns();
        struct moe_status st = forward(c, r);
        assert_int_equal(st.code, MOE_DEADLINE_EXCEEDED);
        assert_true(moe_clock_ns() - begin >= 900 * MOE_NS_PER_MS);
        assert_int_equal(fake_calls(&fakes[0]), 1);
        assert_int_equal(fake_calls(&fakes[1]), retained ? 0 : 1);
    }
    end_call(c, r);
    with.hedge = false;
    with.endpoint = "127.0.0.1:1";
    assert_refused(moe_client_connect(&with, &c), MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID);
}

/* A pass that is retained stays with its worker. */
static void a_retained_pass_goes_to_no_other_worker(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .hedge = true};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(5, MOE_DTYPE_F32, false);
    const enum fake_mood script[] = {FAKE_FAIL, FAKE_FAIL};
    r->f.retain_session = "s";
    r->f.retain_micro_batch_id = 1;
    fake_script(fakes, FAKE_GOOD, 2, script);
    for (int w = 1; w < 3; w++)
        fake_script(&fakes[w], FAKE_GOOD, 0, NULL);
    assert_ok(forward(c, r));
    assert_int_equal(fake_calls(&fakes[0]), 3);
    assert_int_equal(fake_calls(&fakes[1]) + fake_calls(&fakes[2]), 0);
    end_call(c, r);
}

/* The pause would end after the deadline: the failure is reported at once instead. */
static void no_pause_outlasts_the_deadline(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(1, MOE_DTYPE_F32, false);
    r->f.timeout_ms = 5000;
    fake_fail_with(&fakes[0],
                   moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 60000, "later"));
    fake_script(fakes, FAKE_FAIL, 0, NULL);
    struct moe_status st = forward(c, r);
    assert_refused(st, MOE_UNAVAILABLE, MOE_REASON_REFORMING);
    assert_int_equal(st.retry_after_ms, 60000);
    assert_int_equal(fake_calls(fakes), 1);
    end_call(c, r);
}

static void nothing_else_is_tried_again(void **state)
{
    (void)state;
    static const struct {
        enum moe_code code;
        enum moe_reason reason;
    } cases[] = {
        {MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
        {MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL},
        {MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH},
        {MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND},
        {MOE_INTERNAL, MOE_REASON_NONE},
        {MOE_ABORTED, MOE_REASON_ABORTED},
    };
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(2, MOE_DTYPE_BF16, false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake_fail_with(&fakes[0], moe_error_retry(cases[i].code, cases[i].reason, 1, "as wished"));
        fake_script(fakes, FAKE_FAIL, 0, NULL);
        assert_refused(forward(c, r), cases[i].code, cases[i].reason);
        assert_int_equal(fake_calls(fakes), 1);
    }
    end_call(c, r);
}

static void the_next_attempt_goes_to_another_worker(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .spread = true};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(4, MOE_DTYPE_F32, false);
    fake_script(&fakes[0], FAKE_FAIL, 0, NULL);
    fake_script(&fakes[1], FAKE_FAIL, 0, NULL);
    fake_script(&fakes[2], FAKE_GOOD, 0, NULL);
    for (int i = 0; i < 9; i++) {
        poison_answer(r);
        assert_ok(forward(c, r));
        assert_answer(r);
    }
    print_message("    calls: %u, %u, %u\n", fake_calls(&fakes[0]), fake_calls(&fakes[1]),
                  fake_calls(&fakes[2]));
    assert_int_equal(fake_calls(&fakes[0]), 3); /* 3 requests began here */
    assert_int_equal(fake_calls(&fakes[1]), 6); /* 3 began here, 3 came from the first */
    assert_int_equal(fake_calls(&fakes[2]), 9);
    end_call(c, r);
}

/* ------------------------------------------------------------------ limits and errors */

static void a_deadline_ends_a_call(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(1, MOE_DTYPE_F32, false);
    r->f.timeout_ms = 50;
    fake_script(fakes, FAKE_SILENT, 0, NULL);
    assert_refused(forward(c, r), MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE);
    assert_int_equal(fake_calls(fakes), 1);
    end_call(c, r);
}

static void broken_answers_are_typed_errors(void **state)
{
    (void)state;
    static const struct {
        enum fake_mood mood;
        enum moe_reason reason;
    } cases[] = {
        {FAKE_SHORT_Y, MOE_REASON_SHAPE_MISMATCH},
        {FAKE_LONG_Y, MOE_REASON_SHAPE_MISMATCH},
        {FAKE_NO_Y, MOE_REASON_MALFORMED},
        {FAKE_TWO_Y, MOE_REASON_DUPLICATE_TENSOR},
        {FAKE_OTHER_TOKENS, MOE_REASON_SHAPE_MISMATCH},
        {FAKE_OTHER_DTYPE, MOE_REASON_DTYPE_UNSUPPORTED},
        {FAKE_NOT_PROTOBUF, MOE_REASON_MALFORMED},
        {FAKE_TRUNCATED, MOE_REASON_TRUNCATED},
        {FAKE_UNASKED_ROUTING, MOE_REASON_ROUTING_INVALID},
        {FAKE_SHORT_IDS, MOE_REASON_SHAPE_MISMATCH},
        {FAKE_NO_WEIGHTS, MOE_REASON_SHAPE_MISMATCH},
        {FAKE_OTHER_K, MOE_REASON_SHAPE_MISMATCH},
        {FAKE_ODD_IDS_DTYPE, MOE_REASON_DTYPE_UNSUPPORTED},
    };
    struct moe_client *c = connect_client(fakes, NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct request *r = make_request(9, MOE_DTYPE_F32, cases[i].mood != FAKE_UNASKED_ROUTING);
        fake_script(fakes, cases[i].mood, 0, NULL);
        assert_refused(forward(c, r), MOE_INTERNAL, cases[i].reason);
        assert_int_equal(fake_calls(fakes), 1);
        fake_script(fakes, FAKE_GOOD, 0, NULL);
        assert_ok(forward(c, r));
        assert_answer(r);
        free_request(r);
    }
    moe_client_close(c);
}

static void wrong_arguments_are_refused_before_anything_is_sent(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(3, MOE_DTYPE_F32, true);
    int32_t ids[3 * FAKE_TOP_K] = {0, 1, 2, -1, 3, 4};
    float weights[3 * FAKE_TOP_K] = {0};
    const struct moe_client_forward good = r->f;
    static const int32_t beyond[3 * FAKE_TOP_K] = {0, 1, 2, FAKE_EXPERTS, 3, 4};
    static const int32_t below[3 * FAKE_TOP_K] = {0, 1, 2, 3, -2, 4};
    static uint8_t states[FAKE_MAX_TOKENS];
    static const int64_t tokens[3], tokens_beyond[3] = {0, FAKE_VOCABULARY, 1};
    static const int64_t tokens_below[3] = {0, 1, -1};

#define REFUSED(change, code, reason)                                                              \
    do {                                                                                           \
        r->f = good;                                                                               \
        change;                                                                                    \
        assert_refused(moe_client_forward(c, &r->f), code, reason);                                \
    } while (0)
    REFUSED(r->f.layer = 4, MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND);
    REFUSED(r->f.hidden = 25, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH);
    REFUSED(r->f.tokens = 0, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH);
    REFUSED(r->f.tokens = FAKE_MAX_TOKENS + 1, MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT);
    REFUSED(r->f.tokens = UINT32_MAX, MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT);
    REFUSED(r->f.dtype = MOE_DTYPE_NONE, MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED);
    REFUSED(r->f.x = NULL, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH);
    REFUSED(r->f.y = NULL, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH);
    REFUSED(r->f.topk_ids = NULL, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    REFUSED(r->f.topk_weights_in = weights, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    REFUSED(r->f.topk_ids_in = beyond, MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE);
    REFUSED(r->f.topk_ids_in = below, MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE);
    REFUSED((r->f.token_ids_in = tokens, r->f.topk_ids_in = ids), MOE_INVALID_ARGUMENT,
            MOE_REASON_ROUTING_INVALID);
    REFUSED((r->f.token_ids_in = tokens, r->f.topk_weights_in = weights), MOE_INVALID_ARGUMENT,
            MOE_REASON_ROUTING_INVALID);
    REFUSED((r->f.token_ids_in = tokens, r->f.parts = MOE_PARTS_SHARED, r->f.topk_ids = NULL,
             r->f.topk_weights = NULL),
            MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    REFUSED(r->f.token_ids_in = tokens_beyond, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
    REFUSED(r->f.token_ids_in = tokens_below, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
    REFUSED(r->f.parts = (enum moe_parts)3, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
    REFUSED(r->f.on_unavailable = (enum moe_on_unavailable)3, MOE_INVALID_ARGUMENT,
            MOE_REASON_VALUE_INVALID);
    REFUSED(r->f.on_unavailable = MOE_ON_UNAVAILABLE_PARTIAL, MOE_INVALID_ARGUMENT,
            MOE_REASON_SHAPE_MISMATCH);
    REFUSED((r->f.on_unavailable = MOE_ON_UNAVAILABLE_PARTIAL, r->f.token_states = states,
             r->f.retain_session = "s", r->f.retain_micro_batch_id = 1),
            MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
    REFUSED(r->f.parts = MOE_PARTS_SHARED, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID);
    REFUSED((r->f.parts = MOE_PARTS_ROUTED, r->f.retain_session = "s"), MOE_UNIMPLEMENTED,
            MOE_REASON_UNSUPPORTED);
    assert_int_equal(fake_calls(fakes), 0);
    /* The fake worker is of a release that knows neither parts nor token states. */
    REFUSED(r->f.parts = MOE_PARTS_ROUTED, MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
    REFUSED((r->f.on_unavailable = MOE_ON_UNAVAILABLE_PARTIAL, r->f.token_states = states),
            MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
    assert_int_equal(fake_calls(fakes), 2);
#undef REFUSED

    r->f = good;
    r->f.topk_ids_in = ids;
    fakes[0].ids_dtype = 5;
    assert_ok(moe_client_forward(c, &r->f));
    r->f = good;
    end_call(c, r);
}

/* A program of a later release: its struct has a field that this library does not know. */
struct later_forward {
    struct moe_client_forward now;
    uint64_t later;
    unsigned char canary[16];
};

static void a_struct_is_read_and_written_as_far_as_its_size_says(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct request *r = make_request(3, MOE_DTYPE_F32, false);
    struct later_forward f = {.now = r->f, .later = 0};
    memset(f.canary, 0xa5, sizeof f.canary);
    const size_t before_parts = offsetof(struct moe_client_forward, parts);
    const size_t wrong[] = {0, 8, before_parts - 1, sizeof f.now + 8192, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        f.now.size = wrong[i];
        struct moe_status st = moe_client_forward(c, &f.now);
        print_message("  %s\n", st.text);
        assert_refused(st, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
        assert_non_null(strstr(st.text, "moe_client_forward: size is"));
    }
    f.now.size = offsetof(struct later_forward, canary);
    f.later = 1;
    assert_refused(moe_client_forward(c, &f.now), MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
    assert_int_equal(fake_calls(fakes), 0);
    f.later = 0;
    assert_ok(moe_client_forward(c, &f.now));
    assert_int_equal(f.later, 0);
    f.now.size = before_parts; /* of the release before: later fields are not read */
    f.now.parts = (enum moe_parts)7;
    assert_ok(moe_client_forward(c, &f.now));
    for (size_t i = 0; i < sizeof f.canary; i++)
        assert_int_equal(f.canary[i], 0xa5);
    assert_int_equal(moe_client_get_info(c)->size, sizeof(struct moe_client_info));
    end_call(c, r);

    struct moe_client_config config = {.endpoint = "127.0.0.1:1"};
    assert_refused(moe_client_connect(&config, &c), MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID);
}

/* ------------------------------------------------------------------ many at once */

enum { CHAIN_LENGTH = 200 };

struct chain {
    struct moe_client *client;
    struct request *request;
    uint32_t left;
};

static void on_link(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct chain *chain = ctx;
    if (st.code == MOE_OK && --chain->left > 0)
        moe_client_forward_async(chain->client, f, on_link, chain);
    else
        on_request_done(chain->request, f, st);
}

static void a_callback_may_start_the_next_call(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct chain chain = {.client = c, .left = CHAIN_LENGTH};
    chain.request = make_request(2, MOE_DTYPE_BF16, false);
    moe_client_forward_async(c, &chain.request->f, on_link, &chain);
    await_request(chain.request);
    assert_ok(chain.request->status);
    assert_int_equal(chain.left, 0);
    assert_int_equal(fake_calls(fakes), CHAIN_LENGTH);
    moe_client_close(c);
    free_request(chain.request);
}

static void closing_waits_for_what_is_in_flight(void **state)
{
    (void)state;
    enum { COUNT = 100 };
    struct moe_client_config with = {.size = sizeof with, .spread = true, .spread_tokens = 8};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *all[COUNT];
    for (int i = 0; i < COUNT; i++) {
        all[i] = make_request(1 + random_below(30), MOE_DTYPE_F32, false);
        moe_client_forward_async(c, &all[i]->f, on_request_done, all[i]);
    }
    moe_client_close(c);
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(all[i]->done_count, 1);
        assert_true(all[i]->status.code == MOE_OK);
        assert_answer(all[i]);
        free_request(all[i]);
    }
}

struct caller {
    pthread_t thread;
    struct moe_client *client;
    struct request *request;
    uint32_t failures;
};

static void *call_often(void *arg)
{
    struct caller *caller = arg;
    for (int i = 0; i < 40; i++) {
        struct moe_status st = moe_client_forward(caller->client, &caller->request->f);
        caller->failures += st.code != MOE_OK;
    }
    return NULL;
}

static void threads_may_share_a_client(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    struct moe_client_config with = {.size = sizeof with, .spread = true};
    struct moe_client *c = connect_client(fakes, &with);
    struct caller callers[THREADS] = {0};
    for (int i = 0; i < THREADS; i++) {
        callers[i].client = c;
        callers[i].request = make_request(3, MOE_DTYPE_F32, true);
        assert_int_equal(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(callers[i].thread, NULL), 0);
        assert_int_equal(callers[i].failures, 0);
        assert_answer(callers[i].request);
        free_request(callers[i].request);
    }
    assert_int_equal(fake_calls(&fakes[0]) + fake_calls(&fakes[1]) + fake_calls(&fakes[2]),
                     THREADS * 40);
    moe_client_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_fakes(limits_and_layers_are_known_after_connecting),
        with_fakes(a_child_of_fork_is_refused_and_the_parent_goes_on),
        with_fakes(a_client_is_bound_to_one_model),
        with_fakes(an_unknown_model_ends_the_connecting),
        with_fakes(a_shorter_config_means_the_default_model),
        with_fakes(nobody_there_is_unavailable),
        with_fakes(rows_come_back_where_they_belong),
        with_fakes(routing_of_the_caller_is_sent),
        with_fakes(token_ids_of_the_caller_are_sent),
        with_fakes(token_ids_for_a_layer_without_a_table_are_not_sent),
        with_fakes(unavailable_is_tried_again_until_it_works),
        with_fakes(attempts_are_bounded),
        with_fakes(retries_end_with_their_budget),
        with_fakes(another_worker_is_asked_at_once),
        with_fakes(a_worker_that_says_nothing_counts_as_one_that_refuses),
        with_fakes(the_last_attempt_is_not_cut_short),
        with_fakes(a_retained_pass_goes_to_no_other_worker),
        with_fakes(the_servers_wish_for_a_pause_is_heeded),
        with_fakes(no_pause_outlasts_the_deadline),
        with_fakes(nothing_else_is_tried_again),
        with_fakes(the_next_attempt_goes_to_another_worker),
        with_fakes(a_deadline_ends_a_call),
        with_fakes(broken_answers_are_typed_errors),
        with_fakes(wrong_arguments_are_refused_before_anything_is_sent),
        with_fakes(a_struct_is_read_and_written_as_far_as_its_size_says),
        with_fakes(a_callback_may_start_the_next_call),
        with_fakes(closing_waits_for_what_is_in_flight),
        with_fakes(threads_may_share_a_client),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
