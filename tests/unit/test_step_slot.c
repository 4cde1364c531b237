/* SPDX-License-Identifier: Apache-2.0 */
/* Which memory a step gives to the backend: that of one request in place, or segments. */
#include "engine/step_slot.h"
#include "support/check.h"

#include <string.h>

enum { T = 3, H = 4, K = 2 };

static const struct moe_layer_spec spec = {.hidden = H, .experts = 8, .router = {.top_k = K}};
static struct moe_device *device;
static struct moe_step_slot slot;
static float x[T * H], y[T * H], weights_in[T * K], weights_out[T * K];
static int32_t ids_in[T * K], ids_out[T * K];

static int start(void **state)
{
    (void)state;
    const struct moe_device_config config = {.threads = 1};
    const struct moe_step_slot_shape shape = {.tokens = 8, .hidden = H, .top_k = K};
    memset(&slot, 0, sizeof slot);
    assert_ok(moe_backend_cpu.device_open(&config, &device));
    assert_ok(moe_step_slot_init(&slot, &moe_backend_cpu, device, &shape));
    slot.ticket.dtype = MOE_DTYPE_F32;
    for (int i = 0; i < T * H; i++)
        x[i] = (float)i;
    for (int i = 0; i < T * K; i++) {
        ids_in[i] = i % 8;
        weights_in[i] = (float)i / 8;
    }
    memset(y, 0, sizeof y);
    memset(ids_out, 0, sizeof ids_out);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    moe_step_slot_free(&slot);
    moe_backend_cpu.device_close(device);
    return 0;
}

/* The arguments of a step of the one request. */
static struct moe_step_args args_of(struct moe_work *w, bool by_copy)
{
    struct moe_step_args args;
    *w = (struct moe_work){.dtype = MOE_DTYPE_F32,
                           .tokens = T,
                           .mode = MOE_ROUTE_IDS_WEIGHTS,
                           .x = x,
                           .ids_in = ids_in,
                           .weights_in = weights_in,
                           .by_copy = by_copy,
                           .y = y,
                           .ids_out = ids_out,
                           .weights_out = weights_out};
    slot.segments[0] = (struct moe_segment){.work = w, .count = T};
    slot.segment_count = 1;
    slot.tokens = T;
    moe_step_slot_args(&slot, &spec, &args);
    return args;
}

static void a_request_that_is_alone_is_computed_in_place(void **state)
{
    (void)state;
    struct moe_work w;
    struct moe_step_args args = args_of(&w, false);
    assert_null(args.segments);
    assert_ptr_equal(args.x, x);
    assert_ptr_equal(args.y, y);
    assert_ptr_equal(args.ids_in, ids_in);
    assert_ptr_equal(args.ids_out, ids_out);
    assert_int_equal(args.mode[T - 1], MOE_ROUTE_IDS_WEIGHTS);
}

/* In memory that a client can write, the backend could read other ids than it has written. */
static void a_request_by_copy_is_a_segment(void **state)
{
    (void)state;
    struct moe_work w;
    struct moe_step_args args = args_of(&w, true);
    assert_int_equal(args.segment_count, 1);
    assert_null(args.x);
    assert_null(args.y);
    assert_ptr_equal(args.segments[0].x, x);
    assert_ptr_equal(args.segments[0].y, y);
    assert_ptr_equal(args.segments[0].ids_in, ids_in);
    assert_ptr_equal(args.segments[0].weights_in, weights_in);
    assert_ptr_equal(args.segments[0].ids_out, ids_out);
    assert_ptr_equal(args.segments[0].weights_out, weights_out);
    assert_ptr_equal(args.ids_out, slot.ids_out);
    assert_ptr_equal(args.weights_out, slot.weights_out);
    assert_ptr_equal(args.token_state, slot.token_state);
}

/* The rows of each part of a request, and NULL for what it has not. */
static void parts_of_requests_are_where_their_tokens_are(void **state)
{
    (void)state;
    struct moe_work a, b;
    struct moe_step_args args = args_of(&a, false);
    (void)args_of(&b, false);
    b.mode = MOE_ROUTE_SERVER;
    b.ids_in = NULL;
    b.weights_in = NULL;
    b.ids_out = NULL;
    b.weights_out = NULL;
    slot.segments[0] = (struct moe_segment){.work = &a, .first = 2, .count = 1};
    slot.segments[1] = (struct moe_segment){.work = &b, .first = 1, .count = 2};
    slot.segment_count = 2;
    moe_step_slot_args(&slot, &spec, &args);
    const struct moe_step_segment *s = args.segments;
    assert_int_equal(args.segment_count, 2);
    assert_ptr_equal(s[0].x, x + 2 * H);
    assert_ptr_equal(s[0].y, y + 2 * H);
    assert_ptr_equal(s[0].ids_in, ids_in + 2 * K);
    assert_ptr_equal(s[0].weights_out, weights_out + 2 * K);
    assert_int_equal(s[1].tokens, 2);
    assert_int_equal(s[1].mode, MOE_ROUTE_SERVER);
    assert_ptr_equal(s[1].x, x + H);
    assert_null(s[1].ids_in);
    assert_null(s[1].ids_out);
    assert_null(s[1].token_state);
}

/* The device completes a request at its last part, if all earlier parts have ended well. */
static void the_last_part_carries_the_completion(void **state)
{
    (void)state;
    struct moe_work w;
    uint64_t word, receipt;
    uint32_t signal;
    struct moe_step_args args = args_of(&w, true);
    assert_null(args.segments[0].completion.word); /* the request has none */
    w.completion = (struct moe_step_completion){
        .word = &word, .signal = &signal, .receipt = &receipt, .value = 5};
    moe_step_slot_args(&slot, &spec, &args);
    assert_memory_equal(&args.segments[0].completion, &w.completion, sizeof w.completion);
    slot.segments[0].count = slot.tokens = 2;
    moe_step_slot_args(&slot, &spec, &args); /* a part is still to come */
    assert_null(args.segments[0].completion.word);
    slot.segments[0] = (struct moe_segment){.work = &w, .first = 2, .count = 1};
    slot.tokens = 1;
    moe_step_slot_args(&slot, &spec, &args); /* an earlier part is in another step */
    assert_null(args.segments[0].completion.word);
    w.finished = 2;
    moe_step_slot_args(&slot, &spec, &args);
    assert_ptr_equal(args.segments[0].completion.word, &word);
    w.failure = moe_error(MOE_CANCELLED, MOE_REASON_NONE, "scripted");
    moe_step_slot_args(&slot, &spec, &args);
    assert_null(args.segments[0].completion.word);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_request_that_is_alone_is_computed_in_place, start, stop),
        cmocka_unit_test_setup_teardown(a_request_by_copy_is_a_segment, start, stop),
        cmocka_unit_test_setup_teardown(parts_of_requests_are_where_their_tokens_are, start, stop),
        cmocka_unit_test_setup_teardown(the_last_part_carries_the_completion, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
