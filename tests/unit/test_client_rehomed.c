/* SPDX-License-Identifier: Apache-2.0 */
/* Re-homed experts in libmoeclient, against fake workers: alone, on a stream, and of a batch that
 * goes to three workers in different views. */
#include "client_fixture.h"

static uint32_t ids[3][4] = {{1, 6}, {0, 3, 6, 7}, {0}};
static const Moe__V1__RehomedExperts lists[3] = {
    {.base = {.descriptor = &moe__v1__rehomed_experts__descriptor},
     .n_experts = 2,
     .experts = ids[0]},
    {.base = {.descriptor = &moe__v1__rehomed_experts__descriptor},
     .n_experts = 4,
     .experts = ids[1]},
    {.base = {.descriptor = &moe__v1__rehomed_experts__descriptor}, .n_experts = 0},
};

/* A request that asks, with a place of FAKE_EXPERTS ids for the answer. */
static struct request *make_asking(uint32_t tokens, uint32_t *experts)
{
    struct request *r = make_request(tokens, MOE_DTYPE_F32, false);
    r->f.rehomed_experts = experts;
    r->f.rehomed_count = 99;
    memset(experts, 0xab, FAKE_EXPERTS * sizeof *experts);
    return r;
}

static void assert_listed(const struct request *r, size_t count, const uint32_t *expected)
{
    assert_int_equal(r->f.rehomed_count, count);
    for (size_t i = 0; i < FAKE_EXPERTS; i++)
        assert_int_equal(r->f.rehomed_experts[i], i < count ? expected[i] : 0xabababab);
}

static void a_request_that_asks_gets_the_list(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    for (int i = 0; i < 3; i++) {
        uint32_t experts[FAKE_EXPERTS];
        struct request *r = make_asking(5, experts);
        fakes[0].rehomed = &lists[i];
        assert_ok(moe_client_forward(c, &r->f));
        assert_answer(r);
        assert_listed(r, lists[i].n_experts, ids[i]);
        free_request(r);
    }
    moe_client_close(c);
}

static void a_request_on_a_stream_gets_it_too(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    struct moe_client_stream *s;
    uint32_t experts[FAKE_EXPERTS];
    struct request *asks = make_asking(5, experts),
                   *does_not = make_request(5, MOE_DTYPE_F32, false);
    fakes[0].rehomed = &lists[1];
    assert_ok(moe_client_stream_open(c, &s));
    moe_client_stream_forward(s, &does_not->f, on_request_done, does_not);
    moe_client_stream_forward(s, &asks->f, on_request_done, asks);
    await_request(does_not);
    await_request(asks);
    assert_ok(asks->status);
    assert_ok(does_not->status);
    assert_answer(asks);
    assert_listed(asks, 4, ids[1]);
    assert_int_equal(does_not->f.rehomed_count, 0);
    moe_client_stream_close(s);
    free_request(asks);
    free_request(does_not);
    moe_client_close(c);
}

/* The second worker has seen a newer view. */
static void a_batch_in_parts_gets_the_union(void **state)
{
    (void)state;
    static const uint32_t all[] = {0, 1, 3, 6, 7};
    struct moe_client_config with = {.size = sizeof with, .spread = true, .spread_tokens = 10};
    struct moe_client *c = connect_client(fakes, &with);
    uint32_t experts[FAKE_EXPERTS];
    struct request *r = make_asking(30, experts);
    for (int i = 0; i < 3; i++)
        fakes[i].rehomed = &lists[i];
    fakes[1].epoch = 8;
    assert_ok(moe_client_forward(c, &r->f));
    for (int i = 0; i < 3; i++)
        assert_int_equal(fake_calls(&fakes[i]), 1);
    assert_int_equal(r->f.answered_epoch, 8);
    assert_listed(r, 5, all);
    end_call(c, r);
}

static void a_worker_that_does_not_know_them_is_named(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    uint32_t experts[FAKE_EXPERTS];
    struct request *r = make_asking(5, experts);
    fakes[0].rehomed = NULL;
    assert_refused(moe_client_forward(c, &r->f), MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED);
    end_call(c, r);
}

static void an_expert_that_does_not_exist_is_a_broken_answer(void **state)
{
    (void)state;
    static uint32_t beyond[] = {FAKE_EXPERTS, UINT32_MAX};
    struct moe_client *c = connect_client(fakes, NULL);
    for (int i = 0; i < 2; i++) {
        Moe__V1__RehomedExperts list = lists[0];
        list.n_experts = 1;
        list.experts = &beyond[i];
        uint32_t experts[FAKE_EXPERTS];
        struct request *r = make_asking(5, experts);
        fakes[0].rehomed = &list;
        assert_refused(moe_client_forward(c, &r->f), MOE_INTERNAL, MOE_REASON_EXPERT_INDEX_RANGE);
        free_request(r);
    }
    moe_client_close(c);
}

/* A struct of the release before, in memory where the fields would be. */
static void a_smaller_struct_does_not_ask(void **state)
{
    (void)state;
    struct moe_client *c = connect_client(fakes, NULL);
    uint32_t experts[FAKE_EXPERTS];
    struct request *r = make_asking(5, experts);
    fakes[0].rehomed = &lists[0];
    r->f.size = offsetof(struct moe_client_forward, rehomed_experts);
    assert_ok(moe_client_forward(c, &r->f));
    assert_int_equal(r->f.rehomed_count, 99);
    assert_int_equal(experts[0], 0xabababab);
    end_call(c, r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_fakes(a_request_that_asks_gets_the_list),
        with_fakes(a_request_on_a_stream_gets_it_too),
        with_fakes(a_batch_in_parts_gets_the_union),
        with_fakes(a_worker_that_does_not_know_them_is_named),
        with_fakes(an_expert_that_does_not_exist_is_a_broken_answer),
        with_fakes(a_smaller_struct_does_not_ask),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
