/* SPDX-License-Identifier: Apache-2.0 */
/* libmoeclient against fake workers: how it spreads requests, and parts of a batch, over workers
 * and connections. */
#include "client_fixture.h"

#include "base/cores.h"

#include <inttypes.h>
#include <string.h>

static struct moe_status forward(struct moe_client *c, struct request *r)
{
    return moe_client_forward(c, &r->f);
}

static void requests_go_round_the_workers(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .spread = true, .connections = 2};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(4, MOE_DTYPE_F32, false);
    for (int i = 0; i < 12; i++)
        assert_ok(forward(c, r));
    for (int i = 0; i < 3; i++)
        assert_int_equal(fake_calls(&fakes[i]), 4);
    end_call(c, r);
}

static void an_empty_slot_gets_no_requests(void **state)
{
    (void)state;
    char kept[sizeof fakes[1].endpoint];
    memcpy(kept, fakes[1].endpoint, sizeof kept);
    fakes[1].endpoint[0] = '\0';
    struct moe_client_config with = {
        .size = sizeof with, .spread = true, .spread_tokens = 4, .max_attempts = 1, .spin_us = 100};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(4, MOE_DTYPE_F32, false);
    struct request *batch = make_request(40, MOE_DTYPE_F32, false);
    for (int i = 0; i < 8; i++)
        assert_ok(forward(c, r));
    assert_int_equal(fake_calls(&fakes[0]), 4);
    assert_int_equal(fake_calls(&fakes[2]), 4);
    assert_ok(forward(c, batch));
    assert_answer(batch);
    assert_int_equal(fake_calls(&fakes[0]) + fake_calls(&fakes[2]), 10);
    free_request(batch);
    end_call(c, r);
    memcpy(fakes[1].endpoint, kept, sizeof kept);
}

static void a_large_batch_is_cut_and_joined_exactly(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .spread = true, .spread_tokens = 100};
    struct moe_client *c = connect_client(fakes, &with);
    for (int i = 0; i < 40; i++) {
        uint32_t tokens = 1 + random_below(1000);
        struct request *r = make_request(
            tokens, random_below(2) == 0 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16, random_below(2) == 1);
        for (int w = 0; w < 3; w++) {
            fakes[w].ids_dtype = 3 + random_below(3);
            fake_script(&fakes[w], FAKE_GOOD, 0, NULL);
        }
        assert_ok(forward(c, r));
        assert_answer(r);
        uint32_t pieces = 0, sum = 0, largest = 0;
        for (int w = 0; w < 3; w++) {
            assert_true(fake_calls(&fakes[w]) <= 1);
            if (fake_calls(&fakes[w]) == 0)
                continue;
            pieces++;
            sum += fakes[w].tokens[0];
            largest = fakes[w].tokens[0] > largest ? fakes[w].tokens[0] : largest;
        }
        print_message("    %" PRIu32 " tokens in %" PRIu32 " pieces\n", tokens, pieces);
        assert_int_equal(sum, tokens);
        assert_int_equal(pieces, tokens <= 100 ? 1 : tokens <= 200 ? 2 : 3);
        assert_int_equal(r->f.stages.server_ns, 1000 + largest); /* the slowest piece's */
        for (uint32_t k = 0; k < tokens * FAKE_TOP_K && r->f.topk_weights != NULL; k++)
            assert_true(r->f.topk_weights[k] == fake_weight(k % FAKE_TOP_K));
        free_request(r);
    }
    moe_client_close(c);
}

static void a_failed_piece_fails_the_batch(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .spread = true, .spread_tokens = 10};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(100, MOE_DTYPE_F32, false);
    fake_fail_with(&fakes[1], moe_error(MOE_INTERNAL, MOE_REASON_PEER_LOST, "as wished"));
    fake_script(&fakes[1], FAKE_FAIL, 0, NULL);
    assert_refused(forward(c, r), MOE_INTERNAL, MOE_REASON_PEER_LOST);
    end_call(c, r);
}

static void pieces_of_different_weights_are_not_joined(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .spread = true, .spread_tokens = 10};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(100, MOE_DTYPE_F32, false);
    fakes[2].weights_version = 2;
    assert_ok(forward(c, r)); /* the batch has gone to one worker */
    assert_answer(r);
    assert_int_equal(fake_calls(&fakes[0]) + fake_calls(&fakes[1]) + fake_calls(&fakes[2]), 4);
    free_request(r);
    r = make_request(FAKE_MAX_TOKENS + 1, MOE_DTYPE_F32, false); /* too many for one request */
    assert_refused(forward(c, r), MOE_ABORTED, MOE_REASON_VERSION_MISMATCH);
    end_call(c, r);
}

static uint32_t calls_of(int w)
{
    const uint32_t calls = fake_calls(&fakes[w]);
    fake_script(&fakes[w], FAKE_GOOD, 0, NULL);
    return calls;
}

/* A row of F32 has 96 bytes here, so 10,923 rows have a MiB. */
static void a_batch_of_many_bytes_takes_several_connections(void **state)
{
    (void)state;
    const struct {
        uint32_t connections, tokens, pieces;
    } cases[] = {{0, 10000, 1}, {0, 16384, 1}, {0, 21846, 2}, {0, 40000, 3},
                 {0, 60000, 4}, {1, 16000, 1}, {2, 32000, 2}, {6, 80000, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_client_config with = {.size = sizeof with, .connections = cases[i].connections};
        struct moe_client *c = connect_client(fakes, &with);
        struct request *r = make_request(cases[i].tokens, MOE_DTYPE_F32, i % 2 == 0);
        for (int again = 0; again < 2; again++) {
            poison_answer(r);
            (void)calls_of(0);
            assert_ok(forward(c, r));
            assert_int_equal(calls_of(0), cases[i].pieces);
        }
        if (i % 2 == 1)
            assert_answer(r);
        end_call(c, r);
    }
}

/* With `spread`, each worker's part is cut further. */
static void a_batch_takes_several_connections_to_each_worker(void **state)
{
    (void)state;
    struct moe_client_config with = {.size = sizeof with, .spread = true};
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(80000, MOE_DTYPE_F32, false);
    assert_ok(forward(c, r));
    assert_answer(r);
    for (int w = 0; w < 3; w++)
        assert_int_equal(calls_of(w), 2);
    end_call(c, r);
}

/* The calls of a fake are so many, and name the same batch of so many parts. Returns its number. */
static uint64_t assert_parts(int w, uint32_t count, uint32_t parts)
{
    assert_int_equal(fake_calls(&fakes[w]), count);
    const uint64_t batch = fakes[w].batch[0];
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(fakes[w].parts[i], parts);
        assert_true(fakes[w].batch[i] == batch);
    }
    (void)calls_of(w);
    return batch;
}

/* 2731 rows have 256 KiB. From 4 MiB on, that is 43,691 rows, parts have a step each. */
static void small_parts_name_their_batch(void **state)
{
    (void)state;
    const uint32_t by_default = moe_usable_cores() >= 8 ? 2 : 0;
    const struct {
        uint32_t connections, tokens, pieces, parts;
    } cases[] = {{4, 100, 1, 0},
                 {4, 5461, 1, 0},
                 {4, 5462, 2, 2},
                 {4, 10923, 4, 4},
                 {2, 16384, 2, 2},
                 {3, 16384, 3, 3},
                 {8, 16384, 6, 6},
                 {1, 16384, 1, 0},
                 {4, 43690, 4, 4},
                 {4, 43691, 4, 0},
                 {0, 5462, by_default == 0 ? 1 : 2, by_default}};
    uint64_t last = 0;
    for (int i = 0; i < FAKES; i++)
        fakes[i].joins_parts = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_client_config with = {.size = sizeof with, .connections = cases[i].connections};
        struct moe_client *c = connect_client(fakes, &with);
        struct request *r = make_request(cases[i].tokens, MOE_DTYPE_F32, i % 2 == 0);
        for (int again = 0; again < 2; again++) {
            poison_answer(r);
            assert_ok(forward(c, r));
            const uint64_t batch = assert_parts(0, cases[i].pieces, cases[i].parts);
            assert_true(cases[i].parts == 0 || batch != last); /* each has another number */
            last = batch;
        }
        if (i % 2 == 1)
            assert_answer(r);
        end_call(c, r);
    }
}

static void each_worker_gets_its_own_parts(void **state)
{
    (void)state;
    struct moe_client_config with = {
        .size = sizeof with, .spread = true, .spread_tokens = 1000, .connections = 2};
    for (int i = 0; i < FAKES; i++)
        fakes[i].joins_parts = true;
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(18000, MOE_DTYPE_F32, false);
    assert_ok(forward(c, r));
    assert_answer(r);
    for (int w = 0; w < FAKES; w++)
        assert_parts(w, 2, 2);
    end_call(c, r);
}

static void a_part_that_is_sent_again_has_no_batch(void **state)
{
    (void)state;
    static const enum fake_mood script[] = {FAKE_FAIL};
    struct moe_client_config with = {.size = sizeof with, .connections = 2};
    fakes[0].joins_parts = true;
    struct moe_client *c = connect_client(fakes, &with);
    struct request *r = make_request(6000, MOE_DTYPE_F32, false);
    fake_script(&fakes[0], FAKE_GOOD, 1, script);
    assert_ok(forward(c, r));
    assert_answer(r);
    assert_int_equal(fake_calls(&fakes[0]), 3);
    uint32_t again = 0; /* it may come before the other part */
    for (int i = 0; i < 3; i++) {
        again += fakes[0].parts[i] == 0;
        assert_true(fakes[0].parts[i] == 0 || fakes[0].parts[i] == 2);
    }
    assert_int_equal(again, 1);
    end_call(c, r);
}

/* Also if the client knows more workers than the batch goes to. */
static void all_parts_of_a_piece_go_to_one_worker(void **state)
{
    (void)state;
    static const struct {
        bool spread, hedge;
        uint32_t connections, workers;
    } cases[] = {{false, true, 4, 1}, {true, false, 2, 2}, {true, true, 2, 2}};
    for (int i = 0; i < FAKES; i++)
        fakes[i].joins_parts = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_client_config with = {.size = sizeof with,
                                         .spread = cases[i].spread,
                                         .spread_tokens = 9000,
                                         .hedge = cases[i].hedge,
                                         .connections = cases[i].connections};
        struct moe_client *c = connect_client(fakes, &with);
        struct request *r = make_request(16384, MOE_DTYPE_F32, false);
        assert_ok(forward(c, r));
        assert_answer(r);
        uint32_t workers = 0;
        for (int w = 0; w < FAKES; w++) {
            if (fake_calls(&fakes[w]) == 0)
                continue;
            workers++;
            assert_parts(w, cases[i].connections, cases[i].connections);
        }
        assert_int_equal(workers, cases[i].workers);
        end_call(c, r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_fakes(requests_go_round_the_workers),
        with_fakes(an_empty_slot_gets_no_requests),
        with_fakes(a_large_batch_is_cut_and_joined_exactly),
        with_fakes(a_failed_piece_fails_the_batch),
        with_fakes(pieces_of_different_weights_are_not_joined),
        with_fakes(a_batch_of_many_bytes_takes_several_connections),
        with_fakes(a_batch_takes_several_connections_to_each_worker),
        with_fakes(small_parts_name_their_batch),
        with_fakes(each_worker_gets_its_own_parts),
        with_fakes(a_part_that_is_sent_again_has_no_batch),
        with_fakes(all_parts_of_a_piece_go_to_one_worker),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
