/* SPDX-License-Identifier: Apache-2.0 */
/* No string of a received message may contain a zero byte: protobuf-c would end it there, so a
 * check of the name would not see all of it. */
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "moe/v1/admin.pb-c.h"
#include "moe/v1/coordinator.pb-c.h"
#include "moe/v1/expert.pb-c.h"
#include "moe/v1/training.pb-c.h"
#include "moe/v1/worker.pb-c.h"
#include "rpc/msg.h"
#include "rpc_fixture.h"

#include <stdlib.h>
#include <string.h>

/* Messages that the product unpacks; their fields are found from here. */
static const ProtobufCMessageDescriptor *const types[] = {
    &moe__v1__get_status_request__descriptor,
    &moe__v1__get_status_response__descriptor,
    &moe__v1__get_placement_request__descriptor,
    &moe__v1__get_placement_response__descriptor,
    &moe__v1__drain_worker_request__descriptor,
    &moe__v1__drain_worker_response__descriptor,
    &moe__v1__shutdown_request__descriptor,
    &moe__v1__shutdown_response__descriptor,
    &moe__v1__forward_request__descriptor,
    &moe__v1__forward_response__descriptor,
    &moe__v1__forward_stream_request__descriptor,
    &moe__v1__forward_stream_response__descriptor,
    &moe__v1__get_server_info_response__descriptor,
    &moe__v1__get_model_request__descriptor,
    &moe__v1__get_model_response__descriptor,
    &moe__v1__backward_request__descriptor,
    &moe__v1__backward_response__descriptor,
    &moe__v1__optimizer_step_request__descriptor,
    &moe__v1__optimizer_step_response__descriptor,
    &moe__v1__zero_grad_request__descriptor,
    &moe__v1__set_frozen_request__descriptor,
    &moe__v1__get_train_state_response__descriptor,
    &moe__v1__save_checkpoint_request__descriptor,
    &moe__v1__save_checkpoint_response__descriptor,
    &moe__v1__load_checkpoint_request__descriptor,
    &moe__v1__load_checkpoint_response__descriptor,
    &moe__v1__list_checkpoints_request__descriptor,
    &moe__v1__list_checkpoints_response__descriptor,
    &moe__v1__recover_training_request__descriptor,
    &moe__v1__export_adapter_request__descriptor,
    &moe__v1__export_adapter_response__descriptor,
    &moe__v1__session_request__descriptor,
    &moe__v1__session_response__descriptor,
    &moe__v1__sequence_request__descriptor,
    &moe__v1__sequence_response__descriptor,
    &moe__v1__training_body__descriptor,
    &grpc__health__v1__health_check_request__descriptor,
    &grpc__health__v1__health_list_response__descriptor,
    &grpc__reflection__v1__server_reflection_request__descriptor,
};

enum { DEPTH_MAX = 8, BYTES_MAX = 256 };

/* Fields from a message down to one of its strings. */
struct path {
    const ProtobufCFieldDescriptor *fields[DEPTH_MAX];
    size_t depth;
};

static size_t put_varint(uint8_t *to, uint64_t value)
{
    size_t n = 0;
    for (; value >= 0x80; value >>= 7)
        to[n++] = (uint8_t)(value | 0x80);
    to[n++] = (uint8_t)value;
    return n;
}

/* A message with nothing but the string at the end of the path. */
static size_t build(const struct path *p, const char *text, size_t length, uint8_t *out)
{
    uint8_t inner[BYTES_MAX];
    memcpy(inner, text, length);
    for (size_t i = p->depth; i-- > 0;) {
        size_t n = put_varint(out, (uint64_t)p->fields[i]->id << 3 | 2);
        n += put_varint(out + n, length);
        assert_true(n + length <= BYTES_MAX);
        memcpy(out + n, inner, length);
        length += n;
        memcpy(inner, out, length);
    }
    return length;
}

static void check_string(const ProtobufCMessageDescriptor *type, const struct path *p)
{
    static const struct {
        const char *text;
        size_t length;
    } holding[] = {{"a\0b", 3}, {"\0ab", 3}, {"ab\0", 3}, {"\0", 1}};
    static struct moe_rpc_arena arena;
    uint8_t bytes[BYTES_MAX];
    void *message = NULL;
    size_t length = build(p, "ab", 2, bytes);
    assert_ok(moe_rpc_unpack(type, bytes, length, &arena, &message));
    assert_ok(moe_rpc_unpack(type, bytes, length, NULL, &message));
    protobuf_c_message_free_unpacked(message, NULL);
    const char *name = p->fields[p->depth - 1]->name;
    for (size_t i = 0; i < sizeof holding / sizeof *holding; i++) {
        length = build(p, holding[i].text, holding[i].length, bytes);
        for (int heap = 0; heap < 2; heap++) {
            message = NULL;
            struct moe_status st =
                moe_rpc_unpack(type, bytes, length, heap ? NULL : &arena, &message);
            if (st.code != MOE_INVALID_ARGUMENT || strstr(st.text, name) == NULL)
                fail_msg("%s ... %s, case %zu: code %d %s", type->name, name, i, st.code, st.text);
            assert_int_equal(st.reason, MOE_REASON_MALFORMED);
            assert_null(message);
        }
    }
}

/* Checks all strings in `type` and its fields; returns their number. */
static size_t check_below(const ProtobufCMessageDescriptor *root,
                          const ProtobufCMessageDescriptor *type, struct path *p)
{
    size_t count = 0;
    assert_true(p->depth < DEPTH_MAX);
    for (unsigned i = 0; i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &type->fields[i];
        p->fields[p->depth++] = f;
        if (f->type == PROTOBUF_C_TYPE_STRING) {
            check_string(root, p);
            count++;
        } else if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
            count += check_below(root, f->descriptor, p);
        }
        p->depth--;
    }
    return count;
}

static void no_string_of_any_message_holds_a_zero_byte(void **state)
{
    (void)state;
    size_t count = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct path p = {.depth = 0};
        count += check_below(types[i], types[i], &p);
    }
    print_message("  %zu strings in %zu messages\n", count, sizeof types / sizeof *types);
    assert_true(count > 50);
}

static void the_first_of_two_counts_as_well(void **state)
{
    (void)state;
    static const uint8_t twice[] = {0x0a, 3, 'a', 0, 'b', 0x0a, 1, 'x'};
    static struct moe_rpc_arena arena;
    void *message;
    assert_refused(moe_rpc_unpack(&moe__v1__get_model_request__descriptor, twice, sizeof twice,
                                  &arena, &message),
                   MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
}

static void zero_bytes_elsewhere_are_data(void **state)
{
    (void)state;
    static const uint8_t unknown[] = {0xa2, 0x06, 3, 'a', 0, 'b', 0x0a, 1, 'x'}; /* field 100 */
    static struct moe_rpc_arena arena;
    void *message;
    Moe__V1__TrainingBody body = MOE__V1__TRAINING_BODY__INIT;
    uint8_t packed[64];
    uint64_t content[] = {0, 0, 0, 0}; /* packed fixed64 */
    body.content = content;
    body.n_content = 4;
    size_t length = moe__v1__training_body__pack(&body, packed);
    assert_ok(moe_rpc_unpack(&moe__v1__get_model_request__descriptor, unknown, sizeof unknown,
                             &arena, &message));
    assert_string_equal(((Moe__V1__GetModelRequest *)message)->model, "x");
    assert_ok(
        moe_rpc_unpack(&moe__v1__training_body__descriptor, packed, length, &arena, &message));
    assert_int_equal(((Moe__V1__TrainingBody *)message)->n_content, 4);
    assert_ok(moe_rpc_unpack(&moe__v1__training_body__descriptor, packed, 0, NULL, &message));
    protobuf_c_message_free_unpacked(message, NULL);
}

static void another_polling_strategy_is_refused_by_name(void **state)
{
    (void)state;
    assert_int_equal(unsetenv("GRPC_POLL_STRATEGY"), 0);
    assert_ok(moe_rpc_force_polling());
    assert_string_equal(getenv("GRPC_POLL_STRATEGY"), "poll");
    assert_ok(moe_rpc_force_polling());
    assert_int_equal(setenv("GRPC_POLL_STRATEGY", "epoll1", 1), 0);
    struct moe_status st = moe_rpc_force_polling();
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_non_null(strstr(st.text, "GRPC_POLL_STRATEGY=epoll1"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_polling_strategy_is_refused_by_name),
        cmocka_unit_test(no_string_of_any_message_holds_a_zero_byte),
        cmocka_unit_test(the_first_of_two_counts_as_well),
        cmocka_unit_test(zero_bytes_elsewhere_are_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
