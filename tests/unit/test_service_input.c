/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of ExpertService's unary methods about bad input: each gets its error and harms nothing,
 * over loopback, with the CPU backend. */
#include "service_fixture.h"

#include <math.h>

static void server_routes(Ask *a)
{
    a->routing_mode = MOE__V1__ROUTING_MODE__ROUTING_MODE_SERVER;
    a->topk_ids.len = a->topk_weights.len = 0;
}

static void spoil_model(struct sample *b)
{
    b->ask.model = (char *)(uintptr_t) "other";
}
static void spoil_digest(struct sample *b)
{
    b->ask.model_digest = (char *)(uintptr_t) "ab";
}
static void spoil_layer(struct sample *b)
{
    b->ask.layer = 2;
}
static void spoil_dtype_none(struct sample *b)
{
    b->ask.dtype = 0;
}
static void spoil_dtype_ids(struct sample *b)
{
    b->ask.dtype = MOE__V1__DATA_TYPE__DATA_TYPE_U8;
}
static void spoil_dtype_high(struct sample *b)
{
    b->ask.dtype = 77;
}
static void spoil_hidden(struct sample *b)
{
    b->ask.hidden = 25;
}
static void spoil_tokens_none(struct sample *b)
{
    b->ask.tokens = 0;
}
static void spoil_tokens_many(struct sample *b)
{
    b->ask.tokens = SERVICE_TOKENS + 1;
}
static void spoil_tokens_max(struct sample *b)
{
    b->ask.tokens = UINT32_MAX;
}
static void spoil_x_short(struct sample *b)
{
    b->ask.x_data.len -= 4;
}
static void spoil_x_long(struct sample *b)
{
    b->ask.tokens--;
}
static void spoil_x_width(struct sample *b)
{
    b->ask.dtype = MOE__V1__DATA_TYPE__DATA_TYPE_BF16;
}
static void spoil_x_missing(struct sample *b)
{
    b->ask.x_data.len = 0;
}
static void spoil_mode(struct sample *b)
{
    b->ask.routing_mode = 9;
}
static void spoil_parts(struct sample *b)
{
    b->ask.parts = 4;
}
static void spoil_parts_given(struct sample *b)
{
    b->ask.parts = MOE__V1__LAYER_PARTS__LAYER_PARTS_SHARED;
}
static void spoil_parts_returned(struct sample *b)
{
    server_routes(&b->ask);
    b->ask.parts = MOE__V1__LAYER_PARTS__LAYER_PARTS_SHARED;
    b->ask.return_routing = true;
}
static void spoil_parts_retained(struct sample *b)
{
    b->ask.parts = MOE__V1__LAYER_PARTS__LAYER_PARTS_ROUTED;
    b->ask.retain = &b->retain;
}
static void spoil_batch_of_one(struct sample *b)
{
    moe__v1__batch_part__init(&b->batch_part);
    b->batch_part.parts = 1;
    b->ask.batch_part = &b->batch_part;
}
static void spoil_batch_of_many(struct sample *b)
{
    spoil_batch_of_one(b);
    b->batch_part.parts = 65;
}
static void spoil_ids_missing(struct sample *b)
{
    b->ask.topk_ids.len = 0;
}
static void spoil_weights_missing(struct sample *b)
{
    b->ask.topk_weights.len = 0;
}
static void spoil_ids_unwanted(struct sample *b)
{
    server_routes(&b->ask);
    b->ask.topk_ids.len = sizeof b->ids;
}
static void spoil_weights_unwanted(struct sample *b)
{
    b->ask.routing_mode = MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS;
}
static void spoil_ids_format(struct sample *b)
{
    b->ask.topk_ids_dtype = 0;
}
static void spoil_ids_float(struct sample *b)
{
    b->ask.topk_ids_dtype = MOE__V1__DATA_TYPE__DATA_TYPE_F32;
}
static void spoil_ids_length(struct sample *b)
{
    b->ask.topk_ids.len -= 4;
}
static void spoil_ids_high(struct sample *b)
{
    b->ids[7] = 8;
}
static void spoil_ids_low(struct sample *b)
{
    b->ids[0] = -2;
}
static void spoil_ids_huge(struct sample *b)
{
    b->ids[9] = INT32_MAX;
}
static void spoil_weights_length(struct sample *b)
{
    b->ask.topk_weights.len -= 4;
}
static void spoil_weights_nan(struct sample *b)
{
    b->weights[3] = NAN;
}
static void spoil_weights_infinite(struct sample *b)
{
    b->weights[9] = -INFINITY;
}
static void add_token_ids(struct sample *b)
{
    b->ask.token_ids =
        (ProtobufCBinaryData){.len = sizeof b->token_ids, .data = (uint8_t *)b->token_ids};
}
static void token_ids_route(struct sample *b)
{
    server_routes(&b->ask);
    add_token_ids(b);
}
static void spoil_token_ids_ids(struct sample *b)
{
    b->ask.routing_mode = MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS;
    b->ask.topk_weights.len = 0;
    add_token_ids(b);
}
static void spoil_token_ids_mode(struct sample *b)
{
    token_ids_route(b);
    b->ask.routing_mode = MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS;
}
static void spoil_token_ids_weights(struct sample *b)
{
    token_ids_route(b);
    b->ask.topk_weights.len = sizeof b->weights;
}
static void spoil_token_ids_parts(struct sample *b)
{
    token_ids_route(b);
    b->ask.parts = MOE__V1__LAYER_PARTS__LAYER_PARTS_SHARED;
}
static void spoil_token_ids_short(struct sample *b)
{
    token_ids_route(b);
    b->ask.token_ids.len -= sizeof b->token_ids[0];
}
static void spoil_token_ids_long(struct sample *b)
{
    token_ids_route(b);
    b->ask.token_ids = (ProtobufCBinaryData){.len = sizeof b->x, .data = (uint8_t *)b->x};
}
static void spoil_token_ids_high(struct sample *b)
{
    token_ids_route(b);
    b->token_ids[SAMPLE_TOKENS - 1] = SERVICE_VOCABULARY;
}
static void spoil_token_ids_low(struct sample *b)
{
    token_ids_route(b);
    b->token_ids[0] = -1;
}
static void spoil_token_ids_huge(struct sample *b)
{
    token_ids_route(b);
    b->token_ids[1] = INT64_C(1) << 32; /* 0 in 32 bits */
}
static void spoil_epoch(struct sample *b)
{
    b->ask.epoch = 1234;
}
static void spoil_version(struct sample *b)
{
    b->ask.weights_version = 2;
}
static void spoil_logits_nan(struct sample *b)
{
    server_routes(&b->ask);
    b->x[30] = NAN;
}
static void spoil_logits_infinite(struct sample *b)
{
    server_routes(&b->ask);
    b->x[4 * 24] = INFINITY;
}
static void spoil_logits_of_ids(struct sample *b)
{
    b->ask.routing_mode = MOE__V1__ROUTING_MODE__ROUTING_MODE_CLIENT_IDS;
    b->ask.topk_weights.len = 0;
    b->x[0] = NAN;
}

static const struct {
    void (*spoil)(struct sample *b);
    enum moe_code code;
    enum moe_reason reason;
} bad_cases[] = {
    {spoil_model, MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND},
    {spoil_digest, MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH},
    {spoil_layer, MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND},
    {spoil_dtype_none, MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED},
    {spoil_dtype_ids, MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED},
    {spoil_dtype_high, MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED},
    {spoil_hidden, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_tokens_none, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_tokens_many, MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT},
    {spoil_tokens_max, MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT},
    {spoil_x_short, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_x_long, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_x_width, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_x_missing, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_mode, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_parts, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID},
    {spoil_parts_given, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_parts_returned, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_parts_retained, MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED},
    {spoil_batch_of_one, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID},
    {spoil_batch_of_many, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID},
    {spoil_ids_missing, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_weights_missing, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_ids_unwanted, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_weights_unwanted, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_ids_format, MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED},
    {spoil_ids_float, MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED},
    {spoil_ids_length, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_ids_high, MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE},
    {spoil_ids_low, MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE},
    {spoil_ids_huge, MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE},
    {spoil_weights_length, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_weights_nan, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_weights_infinite, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_token_ids_ids, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_token_ids_mode, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_token_ids_weights, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_token_ids_parts, MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID},
    {spoil_token_ids_short, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_token_ids_long, MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH},
    {spoil_token_ids_high, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID},
    {spoil_token_ids_low, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID},
    {spoil_token_ids_huge, MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID},
    {spoil_epoch, MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH},
    {spoil_version, MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH},
    {spoil_logits_nan, MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS},
    {spoil_logits_infinite, MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS},
    {spoil_logits_of_ids, MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS},
};

static void each_bad_input_gets_its_error_and_the_next_good_request_its_answer(void **state)
{
    (void)state;
    struct sample b;
    Answer *answer;
    for (size_t i = 0; i < sizeof bad_cases / sizeof *bad_cases; i++) {
        sample_fill(&b, &service);
        bad_cases[i].spoil(&b);
        assert_refused(call_ask(&service, &b.ask, &answer), bad_cases[i].code, bad_cases[i].reason);
        assert_serves(&service);
    }
    sample_fill(&b, &service);
    assert_ok(call_ask(&service, &b.ask, &answer));
    answer_free(answer);
}

/* ------------------------------------------------------------------------ broken messages */

static struct bytes joined(const struct bytes *a, const struct bytes *b)
{
    struct bytes all = {.data = malloc(a->length + b->length + 1), .length = a->length + b->length};
    assert_non_null(all.data);
    memcpy(all.data, a->data, a->length);
    memcpy(all.data + a->length, b->data, b->length);
    return all;
}

static void a_tensor_given_twice_is_refused(void **state)
{
    (void)state;
    Answer *answer;
    for (uint32_t field = 12; field <= 15; field++) {
        uint8_t raw[2] = {(uint8_t)(field << 3 | 2), 0}; /* an empty second one is one too many */
        struct bytes extra = {raw, sizeof raw}, twice = {0}, message = random_message(&service);
        twice = joined(&message, &extra);
        struct bytes thrice = joined(&twice, &extra);
        assert_refused(call_forward(&service, &thrice, &answer), MOE_INVALID_ARGUMENT,
                       MOE_REASON_DUPLICATE_TENSOR);
        free(message.data);
        free(twice.data);
        free(thrice.data);
        assert_serves(&service);
    }
}

static void a_message_cut_anywhere_is_refused(void **state)
{
    (void)state;
    struct bytes message = random_message(&service);
    unsigned truncated = 0;
    for (size_t length = 0; length < message.length; length += 1 + message.length / 97) {
        struct bytes cut = {message.data, length};
        Answer *answer;
        struct moe_status st = call_forward(&service, &cut, &answer);
        if (!moe_failed(&st))
            fail_msg("%zu of %zu bytes were accepted", length, message.length);
        truncated += st.reason == MOE_REASON_TRUNCATED;
    }
    print_message("%u cuts were inside a field\n", truncated);
    assert_true(truncated > 0);
    free(message.data);
    assert_serves(&service);
}

static void broken_protobuf_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t length;
        enum moe_reason reason;
    } cases[] = {
        {"\x07", 1, MOE_REASON_MALFORMED},                     /* wire type 7 */
        {"\x00\x01", 2, MOE_REASON_MALFORMED},                 /* field 0 */
        {"\x0b", 1, MOE_REASON_MALFORMED},                     /* group */
        {"\xff\xff\xff\xff\xff\xff", 6, MOE_REASON_MALFORMED}, /* over-long tag */
        {"\x78\x01", 2, MOE_REASON_MALFORMED},                 /* x_data as a varint */
        {"\x10", 1, MOE_REASON_TRUNCATED},
        {"\x0a\x05"
         "ab",
         4, MOE_REASON_TRUNCATED},
    };
    Answer *answer;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bytes b = {(uint8_t *)(uintptr_t)cases[i].bytes, cases[i].length};
        assert_refused(call_forward(&service, &b, &answer), MOE_INVALID_ARGUMENT, cases[i].reason);
    }
    uint8_t *head = calloc(1, 6000);
    assert_non_null(head);
    memcpy(head, "\x0a\xec\x2e", 3); /* a model name of 5996 bytes */
    struct bytes b = {head, 5999};
    assert_refused(call_forward(&service, &b, &answer), MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE);
    free(head);
    assert_serves(&service);
}

static void mutate(struct bytes *b)
{
    unsigned changes = 1 + random_below(4);
    for (unsigned i = 0; i < changes && b->length > 0; i++) {
        size_t at = random_below((uint32_t)(random_below(2) == 0 ? b->length
                                            : b->length < 40     ? b->length
                                                                 : 40));
        switch (random_below(5)) {
        case 0: b->data[at] ^= (uint8_t)(1u << random_below(8)); break;
        case 1: b->data[at] = (uint8_t)random_bits(); break;
        case 2: b->length = at; break;
        case 3:
            memmove(b->data + at, b->data + at + 1, b->length - at - 1);
            b->length--;
            break;
        default: b->data[at] = random_below(2) == 0 ? 0xff : 0x80; break;
        }
    }
}

static void ten_thousand_mutated_messages_are_answered_without_harm(void **state)
{
    (void)state;
    unsigned codes[17] = {0};
    for (int i = 0; i < 10000; i++) {
        struct bytes b = random_message(&service);
        Answer *answer;
        mutate(&b);
        struct moe_status st = call_forward(&service, &b, &answer);
        if (!moe_failed(&st))
            answer_free(answer);
        codes[st.code]++;
        free(b.data);
        if (st.code != MOE_OK && st.code != MOE_INVALID_ARGUMENT && st.code != MOE_NOT_FOUND &&
            st.code != MOE_FAILED_PRECONDITION && st.code != MOE_UNIMPLEMENTED)
            fail_msg("message %d: %s %s", i, moe_code_name(st.code), st.text);
        if (i % 1000 == 999)
            assert_serves(&service);
    }
    for (int c = 0; c < 17; c++)
        if (codes[c] > 0)
            print_message("  %-20s %u\n", moe_code_name((enum moe_code)c), codes[c]);
    assert_true(codes[MOE_INVALID_ARGUMENT] > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        with_service(each_bad_input_gets_its_error_and_the_next_good_request_its_answer),
        with_service(a_tensor_given_twice_is_refused),
        with_service(a_message_cut_anywhere_is_refused),
        with_service(broken_protobuf_is_refused),
        with_service(ten_thousand_mutated_messages_are_answered_without_harm),
    };
    seed_random();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
