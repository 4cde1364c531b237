/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the batcher: single cases, then a seeded simulation against a model that records
 * every token. */
#include "base/clock.h"
#include "schedule/batcher.h"
#include "support/check.h"
#include "support/random.h"

#include <stdlib.h>

static const uint32_t layers[] = {0, 1, 5};
static const struct moe_step_key key_f32 = {1, MOE_STEP_FORWARD, MOE_DTYPE_F32};
static const struct moe_step_key key_bf16 = {1, MOE_STEP_FORWARD, MOE_DTYPE_BF16};

static struct moe_batcher *make(void)
{
    struct moe_batcher *b;
    struct moe_status st = moe_batcher_create(layers, 3, &b);
    assert_int_equal(st.code, MOE_OK);
    return b;
}

static struct moe_work request(uint32_t tokens)
{
    return (struct moe_work){.layer = 1, .tokens = tokens, .deadline_ns = MOE_NEVER};
}

static void requests_share_a_step_in_order_of_arrival(void **state)
{
    (void)state;
    struct moe_batcher *b = make();
    struct moe_work w[3] = {request(3), request(2), request(4)};
    struct moe_segment s[8];
    uint32_t tokens;
    for (int i = 0; i < 3; i++)
        moe_batcher_push(b, &key_f32, &w[i]);
    assert_int_equal(moe_batcher_tokens(b), 9);
    assert_int_equal(moe_batcher_take(b, &key_bf16, 8, s, &tokens), 0);
    assert_int_equal(tokens, 0);
    assert_int_equal(moe_batcher_take(b, &key_f32, 8, s, &tokens), 3);
    assert_int_equal(tokens, 8);
    for (int i = 0; i < 3; i++)
        assert_ptr_equal(s[i].work, &w[i]);
    assert_int_equal(s[2].first, 0);
    assert_int_equal(s[2].count, 3);
    assert_false(w[1].queued);
    assert_true(w[2].queued);
    assert_int_equal(moe_batcher_take(b, &key_f32, 8, s, &tokens), 1);
    assert_int_equal(s[0].first, 3);
    assert_int_equal(s[0].count, 1);
    assert_int_equal(moe_batcher_tokens(b), 0);
    moe_batcher_destroy(b);
}

static void unknown_layers_and_dtypes_have_no_queue(void **state)
{
    (void)state;
    struct moe_batcher *b = make();
    struct moe_step_key key = {5, MOE_STEP_FORWARD, MOE_DTYPE_BF16};
    assert_true(moe_batcher_has(b, &key));
    key.layer = 4;
    assert_false(moe_batcher_has(b, &key));
    key.layer = 6;
    assert_false(moe_batcher_has(b, &key));
    key = (struct moe_step_key){5, MOE_STEP_FORWARD, MOE_DTYPE_NONE};
    assert_false(moe_batcher_has(b, &key));
    key = (struct moe_step_key){5, (enum moe_step_kind)7, MOE_DTYPE_F32};
    assert_false(moe_batcher_has(b, &key));
    moe_batcher_destroy(b);

    const uint32_t unordered[] = {3, 3};
    struct moe_status st = moe_batcher_create(unordered, 2, &b);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
}

static void an_added_model_has_queues_until_it_is_removed(void **state)
{
    (void)state;
    struct moe_batcher *b = make();
    const uint32_t added[] = {moe_layer_key(7, 1), moe_layer_key(7, 2)},
                   mixed[] = {moe_layer_key(7, 1), moe_layer_key(8, 1)};
    const struct moe_step_key key = {moe_layer_key(7, 1), MOE_STEP_FORWARD, MOE_DTYPE_F32};
    struct moe_work w[2] = {request(3), request(2)};
    struct moe_segment s[8];
    uint32_t tokens;
    assert_false(moe_batcher_has(b, &key));
    assert_refused(moe_batcher_add_model(b, mixed, 2), MOE_INVALID_ARGUMENT, MOE_REASON_NONE);
    assert_ok(moe_batcher_add_model(b, added, 2));
    assert_refused(moe_batcher_add_model(b, added, 2), MOE_ALREADY_EXISTS, MOE_REASON_NONE);
    moe_batcher_push(b, &key_f32, &w[0]);
    moe_batcher_push(b, &key, &w[1]);
    assert_int_equal(moe_batcher_take(b, &key_f32, 8, s, &tokens), 1); /* the same layer index */
    assert_ptr_equal(s[0].work, &w[0]);
    moe_batcher_put_back(b, &s[0]);
    assert_int_equal(moe_batcher_take(b, &key, 8, s, &tokens), 1);
    assert_ptr_equal(s[0].work, &w[1]);
    moe_batcher_remove_model(b, 7);
    assert_false(moe_batcher_has(b, &key));
    moe_batcher_remove_model(b, 7);
    moe_batcher_remove_model(b, 0); /* that of create stays */
    assert_true(moe_batcher_has(b, &key_f32));
    assert_int_equal(moe_batcher_tokens(b), 3);
    assert_true(moe_batcher_remove(b, &w[0]));
    moe_batcher_destroy(b);
}

static void returned_segments_are_taken_first_again(void **state)
{
    (void)state;
    struct moe_batcher *b = make();
    struct moe_work w[3] = {request(3), request(6), request(1)};
    struct moe_segment one[4], two[4];
    uint32_t tokens;
    for (int i = 0; i < 3; i++)
        moe_batcher_push(b, &key_f32, &w[i]);
    assert_int_equal(moe_batcher_take(b, &key_f32, 4, one, &tokens), 2);
    assert_int_equal(moe_batcher_take(b, &key_f32, 4, two, &tokens), 1);
    moe_batcher_put_back(b, &two[0]);
    moe_batcher_put_back(b, &one[1]);
    moe_batcher_put_back(b, &one[0]);
    assert_int_equal(moe_batcher_tokens(b), 10);
    struct moe_segment s[16];
    assert_int_equal(moe_batcher_take(b, &key_f32, 16, s, &tokens), 3);
    assert_int_equal(tokens, 10);
    for (int i = 0; i < 3; i++) {
        assert_ptr_equal(s[i].work, &w[i]);
        assert_int_equal(s[i].first, 0);
        assert_int_equal(s[i].count, w[i].tokens);
    }
    moe_batcher_destroy(b);
}

static void removed_and_expired_requests_are_not_taken(void **state)
{
    (void)state;
    struct moe_batcher *b = make();
    struct moe_work w[4] = {request(2), request(2), request(2), request(2)};
    struct moe_segment s[8];
    uint32_t tokens;
    w[0].deadline_ns = 100;
    w[2].deadline_ns = 50;
    for (int i = 0; i < 4; i++)
        moe_batcher_push(b, i == 2 ? &key_bf16 : &key_f32, &w[i]);
    assert_int_equal(moe_batcher_next_expiry(b), 50);
    assert_null(moe_batcher_expire(b, 49));
    struct moe_work *late = moe_batcher_expire(b, 50);
    assert_ptr_equal(late, &w[2]);
    assert_null(late->next);
    assert_int_equal(moe_batcher_next_expiry(b), 100);
    assert_true(moe_batcher_remove(b, &w[1]));
    assert_false(moe_batcher_remove(b, &w[1]));
    assert_ptr_equal(moe_batcher_expire(b, 1000), &w[0]);
    assert_int_equal(moe_batcher_next_expiry(b), MOE_NEVER);
    assert_int_equal(moe_batcher_take(b, &key_f32, 8, s, &tokens), 1);
    assert_ptr_equal(s[0].work, &w[3]);
    assert_int_equal(moe_batcher_tokens(b), 0);
    moe_batcher_destroy(b);
}

/* ------------------------------------------------------------------- simulation */

enum {
    SIM_KEYS = 6,
    SIM_WORKS = 400,
    SIM_OPS = 3000,
    SIM_STEPS = 2,
    SIM_CAPACITY = 16,
    SIM_BATCHES = 4,
    SIM_RUNS = 200
};

/* One simulated step that has been taken and not ended. */
struct sim_step {
    struct moe_segment segments[SIM_CAPACITY];
    size_t count;
};

struct sim_work {
    struct moe_work work;
    int key, arrival; /* in its queue */
    bool waits;       /* for the other parts of its batch: no token may be taken */
    bool dropped;     /* removed or expired: the same */
    uint32_t done;    /* tokens of successful steps */
};

struct sim {
    struct rng random;
    struct moe_batcher *b;
    struct moe_step_key keys[SIM_KEYS];
    struct sim_work works[SIM_WORKS];
    int pushed, arrivals;
    int order[SIM_KEYS]; /* per key: arrival that finished tokens last; does not fall */
    struct sim_step steps[SIM_STEPS];
    unsigned first, in_flight;
    uint64_t now, queued;
};

static unsigned draw(struct sim *s, unsigned below)
{
    return rng_below(&s->random, below);
}

static struct sim_work *sim_of(struct moe_work *w)
{
    return (struct sim_work *)((char *)w - offsetof(struct sim_work, work));
}

static void sim_push(struct sim *s)
{
    if (s->pushed == SIM_WORKS)
        return;
    struct sim_work *w = &s->works[s->pushed++];
    w->key = (int)draw(s, SIM_KEYS);
    w->work = request(1 + (draw(s, 4) == 0 ? draw(s, 60) : draw(s, 6)));
    w->work.layer = s->keys[w->key].layer;
    w->work.number = (uint64_t)s->pushed;
    if (draw(s, 3) == 0)
        w->work.deadline_ns = s->now + draw(s, 200);
    w->work.batch = draw(s, SIM_BATCHES);
    w->waits = s->keys[w->key].kind == MOE_STEP_FORWARD && draw(s, 3) == 0;
    if (w->waits)
        moe_batcher_gather(s->b, &s->keys[w->key], &w->work);
    else
        moe_batcher_push(s->b, &s->keys[w->key], &w->work);
    w->arrival = s->arrivals++;
    s->queued += w->work.tokens;
}

/* The parts of one batch go to the end of their queue, in order. */
static void sim_join(struct sim *s, int key, uint64_t batch)
{
    uint32_t tokens = 0;
    for (int i = 0; i < s->pushed; i++) {
        struct sim_work *w = &s->works[i];
        if (w->key != key || w->work.batch != batch || !w->waits || w->dropped)
            continue;
        assert_true(w->work.gathers);
        w->waits = false;
        w->arrival = s->arrivals++;
        tokens += w->work.tokens;
    }
    assert_int_equal(moe_batcher_join(s->b, &s->keys[key], batch), tokens);
}

/* Any request that was pushed under this key: a waiting one is taken whole, others are not found.
 */
static size_t sim_take_whole(struct sim *s, int key, struct moe_segment *segment, uint32_t *tokens)
{
    if (s->pushed == 0)
        return 0;
    struct sim_work *w = &s->works[draw(s, (unsigned)s->pushed)];
    bool there = w->key == key && w->work.queued;
    assert_int_equal(moe_batcher_take_whole(s->b, &s->keys[key], w->work.number, segment), there);
    if (!there)
        return 0;
    assert_ptr_equal(segment->work, &w->work);
    assert_int_equal(segment->first, 0);
    *tokens = segment->count;
    return 1;
}

static void sim_take(struct sim *s)
{
    if (s->in_flight == SIM_STEPS)
        return;
    struct sim_step *step = &s->steps[(s->first + s->in_flight++) % SIM_STEPS];
    int key = (int)draw(s, SIM_KEYS);
    uint32_t capacity = 1u << draw(s, 5), tokens = 0, sum = 0;
    if (s->keys[key].kind == MOE_STEP_FORWARD) {
        step->count = moe_batcher_take(s->b, &s->keys[key], capacity, step->segments, &tokens);
    } else {
        capacity = UINT32_MAX;
        step->count = sim_take_whole(s, key, &step->segments[0], &tokens);
    }
    for (size_t i = 0; i < step->count; i++) {
        struct sim_work *w = sim_of(step->segments[i].work);
        assert_int_equal(w->key, key);
        assert_false(w->dropped || w->waits);
        assert_true(step->segments[i].count > 0);
        sum += step->segments[i].count;
    }
    assert_int_equal(sum, tokens);
    assert_true(tokens <= capacity);
    s->queued -= tokens;
}

/* The oldest step succeeds: its tokens must come in order, each once. */
static void sim_finish(struct sim *s)
{
    if (s->in_flight == 0)
        return;
    struct sim_step *step = &s->steps[s->first];
    s->first = (s->first + 1) % SIM_STEPS;
    s->in_flight--;
    for (size_t i = 0; i < step->count; i++) {
        struct moe_segment *g = &step->segments[i];
        struct sim_work *w = sim_of(g->work);
        assert_int_equal(g->first, w->done);
        if (s->keys[w->key].kind == MOE_STEP_FORWARD)
            assert_true(w->arrival >= s->order[w->key]);
        s->order[w->key] = w->arrival;
        w->done += g->count;
        w->work.finished = w->done;
        assert_true(w->done <= w->work.tokens);
    }
}

/* The view is lost: all tokens in flight go back. */
static void sim_lose_view(struct sim *s)
{
    while (s->in_flight > 0) {
        struct sim_step *step = &s->steps[(s->first + --s->in_flight) % SIM_STEPS];
        for (size_t i = step->count; i-- > 0;) {
            struct sim_work *w = sim_of(step->segments[i].work);
            if (w->dropped)
                continue;
            moe_batcher_put_back(s->b, &step->segments[i]);
            s->queued += step->segments[i].count;
        }
    }
}

static void sim_drop(struct sim *s, struct sim_work *w)
{
    assert_false(w->dropped);
    assert_false(w->work.queued);
    w->dropped = true;
    s->queued -= w->work.tokens - w->work.taken;
}

static void sim_cancel(struct sim *s)
{
    if (s->pushed == 0)
        return;
    struct sim_work *w = &s->works[draw(s, (unsigned)s->pushed)];
    bool was_queued = w->work.queued;
    assert_int_equal(moe_batcher_remove(s->b, &w->work), was_queued);
    if (was_queued)
        sim_drop(s, w);
}

static void sim_expire(struct sim *s)
{
    s->now += draw(s, 40);
    bool due = false;
    for (int i = 0; i < s->pushed; i++)
        due |= s->works[i].work.queued && s->works[i].work.deadline_ns <= s->now;
    struct moe_work *late = moe_batcher_expire(s->b, s->now);
    assert_int_equal(late != NULL, due);
    for (struct moe_work *next; late != NULL; late = next) {
        next = late->next;
        assert_true(late->deadline_ns <= s->now);
        sim_drop(s, sim_of(late));
    }
    assert_true(moe_batcher_next_expiry(s->b) > s->now);
}

static void sim_check_sums(struct sim *s)
{
    struct moe_step_key key;
    uint64_t tokens, sum = 0;
    for (size_t i = 0; moe_batcher_queue(s->b, i, &key, &tokens); i++)
        sum += tokens;
    for (int i = 0; i < s->pushed; i++)
        if (s->works[i].waits && !s->works[i].dropped)
            sum += s->works[i].work.tokens;
    assert_int_equal(sum, moe_batcher_tokens(s->b));
    assert_int_equal(sum, s->queued);
}

static void simulate(uint64_t seed, uint64_t *tokens, uint64_t *dropped)
{
    struct sim *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->random.state = seed;
    s->b = make();
    for (size_t i = 0; i < SIM_KEYS; i++) {
        uint64_t none;
        assert_true(moe_batcher_queue(s->b, i, &s->keys[i], &none));
    }
    for (int op = 0; op < SIM_OPS; op++) {
        unsigned kind = draw(s, 22);
        if (kind < 7)
            sim_push(s);
        else if (kind < 12)
            sim_take(s);
        else if (kind < 16)
            sim_finish(s);
        else if (kind < 17)
            sim_lose_view(s);
        else if (kind < 18)
            sim_cancel(s);
        else if (kind < 20)
            sim_join(s, (int)draw(s, SIM_KEYS), draw(s, SIM_BATCHES));
        else
            sim_expire(s);
        sim_check_sums(s);
    }
    for (int i = 0; i < SIM_KEYS * SIM_BATCHES; i++)
        sim_join(s, i / SIM_BATCHES, (uint64_t)(i % SIM_BATCHES));
    while (moe_batcher_tokens(s->b) > 0 || s->in_flight > 0) {
        if (moe_batcher_tokens(s->b) > 0)
            sim_take(s);
        sim_finish(s);
    }
    for (int i = 0; i < s->pushed; i++) {
        if (!s->works[i].dropped)
            assert_int_equal(s->works[i].done, s->works[i].work.tokens);
        *tokens += s->works[i].done;
        *dropped += s->works[i].dropped;
    }
    moe_batcher_destroy(s->b);
    free(s);
}

static void no_token_is_lost_doubled_or_reordered(void **state)
{
    (void)state;
    uint64_t seed = choose_seed();
    uint64_t tokens = 0, dropped = 0;
    for (unsigned i = 0; i < SIM_RUNS; i++)
        simulate(seed + i, &tokens, &dropped);
    print_message("%d schedules: %llu tokens finished, %llu requests dropped\n", SIM_RUNS,
                  (unsigned long long)tokens, (unsigned long long)dropped);
    assert_true(tokens > 0);
}

static void count_tokens(struct moe_work *w, void *arg)
{
    *(uint32_t *)arg += w->tokens;
}

static void a_retained_request_is_taken_whole_by_its_number(void **state)
{
    (void)state;
    static const struct moe_step_key own = {1, MOE_STEP_FORWARD_RETAIN, MOE_DTYPE_F32};
    struct moe_batcher *b = make();
    struct moe_work w[4] = {request(300), request(5), request(70), request(9)};
    struct moe_segment s;
    uint32_t sum = 0;
    for (int i = 0; i < 3; i++) {
        w[i].number = 10 + (uint64_t)i;
        moe_batcher_push(b, &own, &w[i]);
    }
    moe_batcher_push(b, &key_f32, &w[3]); /* waits elsewhere */
    moe_batcher_visit_retain(b, count_tokens, &sum);
    assert_int_equal(sum, 375);
    assert_false(moe_batcher_take_whole(b, &own, 9, &s));
    assert_true(moe_batcher_take_whole(b, &own, 11, &s));
    assert_ptr_equal(s.work, &w[1]);
    assert_true(moe_batcher_take_whole(b, &own, 10, &s));
    assert_int_equal(s.count, 300);
    assert_false(moe_batcher_take_whole(b, &own, 10, &s)); /* once */
    assert_int_equal(moe_batcher_tokens(b), 79);
    moe_batcher_put_back(b, &s);
    assert_int_equal(moe_batcher_tokens(b), 379);
    assert_true(moe_batcher_remove(b, &w[2]));
    assert_false(moe_batcher_take_whole(b, &own, 12, &s)); /* cancelled */
    assert_true(moe_batcher_take_whole(b, &own, 10, &s));
    assert_int_equal(moe_batcher_tokens(b), 9);
    assert_true(moe_batcher_remove(b, &w[3]));
    moe_batcher_destroy(b);
}

static bool is_second(const struct moe_work *w, uint64_t arg)
{
    return w->tokens == arg;
}

static void held_requests_are_in_no_queue_until_they_are_released(void **state)
{
    (void)state;
    struct moe_batcher *b = make();
    struct moe_work w[4] = {request(3), request(2), request(4), request(1)};
    struct moe_segment s[16];
    uint32_t tokens;
    w[2].deadline_ns = 50;
    for (int i = 0; i < 3; i++)
        moe_batcher_push(b, &key_f32, &w[i]);
    assert_int_equal(moe_batcher_take(b, &key_f32, 16, s, &tokens), 3);
    for (int i = 0; i < 3; i++)
        moe_batcher_hold(b, &w[i]);
    moe_batcher_push(b, &key_f32, &w[3]);
    assert_int_equal(moe_batcher_tokens(b), 10);
    assert_int_equal(moe_batcher_take(b, &key_f32, 16, s, &tokens), 1);
    assert_ptr_equal(s[0].work, &w[3]);
    assert_int_equal(moe_batcher_next_expiry(b), 50);
    assert_ptr_equal(moe_batcher_expire(b, 50), &w[2]);
    assert_ptr_equal(moe_batcher_evict(b, is_second, 2), &w[1]);
    assert_false(moe_batcher_remove(b, &w[1]));
    moe_batcher_release(b);
    assert_int_equal(moe_batcher_take(b, &key_f32, 16, s, &tokens), 1);
    assert_ptr_equal(s[0].work, &w[0]);
    assert_int_equal(s[0].count, 3);
    assert_int_equal(moe_batcher_tokens(b), 0);
    moe_batcher_destroy(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_share_a_step_in_order_of_arrival),
        cmocka_unit_test(unknown_layers_and_dtypes_have_no_queue),
        cmocka_unit_test(an_added_model_has_queues_until_it_is_removed),
        cmocka_unit_test(returned_segments_are_taken_first_again),
        cmocka_unit_test(removed_and_expired_requests_are_not_taken),
        cmocka_unit_test(a_retained_request_is_taken_whole_by_its_number),
        cmocka_unit_test(held_requests_are_in_no_queue_until_they_are_released),
        cmocka_unit_test(no_token_is_lost_doubled_or_reordered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
