/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in services as clients see them: health with the server's settings, and reflection with
 * complete answers. */
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "proto/descriptors.h"
#include "rpc_fixture.h"

#include <string.h>
#include <unistd.h>

enum { ANSWERS_MAX = 64, ANSWER_BYTES = 1 << 20 };

/* Answers of a stream, in order. */
struct answers {
    struct moe_rpc_stream *stream;
    atomic_uint count, closed;
    struct {
        uint8_t *bytes;
        size_t length;
    } list[ANSWERS_MAX];
    struct moe_status status;
};

static void on_message(void *ctx, struct moe_rpc_msg *m)
{
    struct answers *a = ctx;
    unsigned i = a->count;
    assert_true(i < ANSWERS_MAX);
    a->list[i].bytes = malloc(ANSWER_BYTES);
    assert_ok(moe_rpc_msg_flatten(m, a->list[i].bytes, ANSWER_BYTES, &a->list[i].length));
    moe_rpc_msg_free(m);
    atomic_fetch_add(&a->count, 1);
}

static void on_closed(void *ctx, struct moe_status status)
{
    struct answers *a = ctx;
    a->status = status;
    atomic_fetch_add(&a->closed, 1);
}

static void open_stream(struct fixture *f, const char *path, struct answers *a)
{
    static const struct moe_rpc_stream_events events = {.message = on_message, .closed = on_closed};
    struct moe_rpc_call_options options = fixture_options(0);
    memset(a, 0, sizeof *a);
    assert_ok(moe_rpc_stream_open(f->channel, path, &options, &events, a, &a->stream));
}

static void answers_free(struct answers *a)
{
    moe_rpc_stream_free(a->stream);
    for (unsigned i = 0; i < a->count; i++)
        free(a->list[i].bytes);
}

/* ------------------------------------------------------------------ health */

enum { SERVING = 1, NOT_SERVING = 2, SERVICE_UNKNOWN = 3 };

static struct moe_rpc_out health_request(const char *service, uint8_t head[256])
{
    Grpc__Health__V1__HealthCheckRequest q = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    q.service = (char *)(uintptr_t)service;
    return (struct moe_rpc_out){
        .head = head, .head_length = grpc__health__v1__health_check_request__pack(&q, head)};
}

static int status_in(const uint8_t *bytes, size_t length)
{
    Grpc__Health__V1__HealthCheckResponse *r =
        grpc__health__v1__health_check_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    int status = (int)r->status;
    grpc__health__v1__health_check_response__free_unpacked(r, NULL);
    return status;
}

static struct moe_status check(struct fixture *f, const char *service, int *status)
{
    uint8_t head[256], answer[256];
    size_t length;
    struct moe_rpc_msg *m;
    struct moe_rpc_call_options options = fixture_options(20000);
    struct moe_rpc_out out = health_request(service, head);
    MOE_TRY(moe_rpc_call_wait(f->channel, "/grpc.health.v1.Health/Check", &options, &out, &m));
    assert_ok(moe_rpc_msg_flatten(m, answer, sizeof answer, &length));
    moe_rpc_msg_free(m);
    *status = status_in(answer, length);
    return moe_ok();
}

static void health_is_the_last_setting_of_the_server(void **state)
{
    struct fixture f;
    int status;
    char long_name[200];
    (void)state;
    fixture_start(&f, NULL);
    assert_refused(check(&f, "", &status), MOE_NOT_FOUND, MOE_REASON_NONE);
    moe_rpc_server_set_health(f.server, "", true);
    moe_rpc_server_set_health(f.server, "moe.v1.ExpertService", false);
    assert_ok(check(&f, "", &status));
    assert_int_equal(status, SERVING);
    assert_ok(check(&f, "moe.v1.ExpertService", &status));
    assert_int_equal(status, NOT_SERVING);
    moe_rpc_server_set_health(f.server, "moe.v1.ExpertService", true);
    assert_ok(check(&f, "moe.v1.ExpertService", &status));
    assert_int_equal(status, SERVING);
    assert_refused(check(&f, "moe.v1", &status), MOE_NOT_FOUND, MOE_REASON_NONE);
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    assert_refused(check(&f, long_name, &status), MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED);
    fixture_stop(&f);
}

static void all_services_are_listed(void **state)
{
    struct fixture f;
    uint8_t answer[8192];
    size_t length;
    struct moe_rpc_msg *m;
    struct moe_rpc_call_options options = fixture_options(20000);
    (void)state;
    fixture_start(&f, NULL);
    moe_rpc_server_set_health(f.server, "", true);
    moe_rpc_server_set_health(f.server, "a.b", false);
    assert_ok(moe_rpc_call_wait(f.channel, "/grpc.health.v1.Health/List", &options,
                                &(struct moe_rpc_out){.head = NULL}, &m));
    assert_ok(moe_rpc_msg_flatten(m, answer, sizeof answer, &length));
    moe_rpc_msg_free(m);
    Grpc__Health__V1__HealthListResponse *r =
        grpc__health__v1__health_list_response__unpack(NULL, length, answer);
    assert_non_null(r);
    assert_int_equal(r->n_statuses, 2);
    assert_string_equal(r->statuses[0]->key, "");
    assert_int_equal(r->statuses[0]->value->status, SERVING);
    assert_string_equal(r->statuses[1]->key, "a.b");
    assert_int_equal(r->statuses[1]->value->status, NOT_SERVING);
    grpc__health__v1__health_list_response__free_unpacked(r, NULL);
    /* More names than the table has room for are refused and do not break it. */
    for (int i = 0; i < 64; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        moe_rpc_server_set_health(f.server, name, true);
    }
    int status;
    assert_ok(check(&f, "s61", &status));
    assert_refused(check(&f, "s62", &status), MOE_NOT_FOUND, MOE_REASON_NONE);
    fixture_stop(&f);
}

static void watchers_see_every_change_and_the_end(void **state)
{
    static const int want[] = {SERVICE_UNKNOWN, SERVING, NOT_SERVING, SERVING, NOT_SERVING};
    struct fixture f;
    struct answers a, other;
    uint8_t head[256];
    (void)state;
    fixture_start(&f, NULL);
    moe_rpc_server_set_health(f.server, "", true);
    open_stream(&f, "/grpc.health.v1.Health/Watch", &a);
    open_stream(&f, "/grpc.health.v1.Health/Watch", &other);
    struct moe_rpc_out out = health_request("moe.v1.ExpertService", head);
    assert_ok(moe_rpc_stream_send(a.stream, &out));
    out = health_request("", head);
    assert_ok(moe_rpc_stream_send(other.stream, &out));
    moe_rpc_stream_close_send(other.stream); /* as generated clients do */
    fixture_await("the first answer", &a.count, 1);
    fixture_await("the other's first answer", &other.count, 1);
    moe_rpc_server_set_health(f.server, "moe.v1.ExpertService", true);
    moe_rpc_server_set_health(f.server, "moe.v1.ExpertService", true); /* not a change */
    moe_rpc_server_set_health(f.server, "moe.v1.ExpertService", false);
    moe_rpc_server_set_health(f.server, "moe.v1.ExpertService", true);
    fixture_await("the changes", &a.count, 4);
    assert_int_equal(other.count, 1);

    moe_rpc_server_drain(f.server, moe_clock_ns() + 20 * MOE_NS_PER_S);
    moe_rpc_server_stop(f.server);
    f.server = NULL;
    fixture_await("the end of the stream", &a.closed, 1);
    fixture_await("the end of the other stream", &other.closed, 1);
    assert_int_equal(a.count, 5);
    for (unsigned i = 0; i < a.count; i++)
        assert_int_equal(status_in(a.list[i].bytes, a.list[i].length), want[i]);
    assert_int_equal(other.count, 2);
    assert_int_equal(status_in(other.list[1].bytes, other.list[1].length), NOT_SERVING);
    assert_int_equal(a.status.code, MOE_UNAVAILABLE);
    assert_int_equal(a.status.reason, MOE_REASON_DRAINING);
    answers_free(&a);
    answers_free(&other);
    fixture_stop(&f);
}

static void watchers_may_leave_while_health_changes(void **state)
{
    struct fixture f;
    (void)state;
    fixture_start(&f, NULL);
    for (int i = 0; i < 200; i++) {
        struct answers a;
        uint8_t head[256];
        open_stream(&f, "/grpc.health.v1.Health/Watch", &a);
        struct moe_rpc_out out = health_request("x", head);
        assert_ok(moe_rpc_stream_send(a.stream, &out));
        moe_rpc_server_set_health(f.server, "x", i % 2);
        if (one_in(2))
            usleep(random_below(500));
        answers_free(&a);
    }
    fixture_stop(&f);
}

/* ------------------------------------------------------------------ reflection */

typedef Grpc__Reflection__V1__ServerReflectionRequest question_t;
typedef Grpc__Reflection__V1__ServerReflectionResponse answer_t;

static const char *const reflection_paths[] = {
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};

#define CASE(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##name

/* The answer to the next question on the stream; free with free_unpacked. */
static answer_t *ask(struct answers *a, int what, const char *text)
{
    uint8_t head[1024];
    question_t q = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    Grpc__Reflection__V1__ExtensionRequest extension =
        GRPC__REFLECTION__V1__EXTENSION_REQUEST__INIT;
    unsigned before = a->count;
    q.host = (char *)(uintptr_t) "somewhere";
    q.message_request_case = (unsigned)what;
    if (what == CASE(FILE_CONTAINING_EXTENSION))
        q.file_containing_extension = &extension;
    else
        q.file_by_filename = (char *)(uintptr_t)text; /* every other case is a string */
    struct moe_rpc_out out = {.head = head,
                              .head_length =
                                  grpc__reflection__v1__server_reflection_request__pack(&q, head)};
    assert_ok(moe_rpc_stream_send(a->stream, &out));
    fixture_await("an answer", &a->count, before + 1);
    answer_t *r = grpc__reflection__v1__server_reflection_response__unpack(
        NULL, a->list[before].length, a->list[before].bytes);
    assert_non_null(r);
    assert_string_equal(r->valid_host, "somewhere");
    assert_int_equal(r->original_request->message_request_case, what);
    return r;
}

static void answer_free(answer_t *r)
{
    grpc__reflection__v1__server_reflection_response__free_unpacked(r, NULL);
}

static void assert_files(struct answers *a, int what, const char *text, size_t count)
{
    answer_t *r = ask(a, what, text);
    assert_non_null(r->file_descriptor_response);
    size_t n = r->file_descriptor_response->n_file_descriptor_proto;
    print_message("  %-40s %zu files\n", text, n);
    assert_int_equal(n, count);
    for (size_t i = 0; i < n; i++) {
        /* Every file is in the embedded set, byte for byte. */
        ProtobufCBinaryData file = r->file_descriptor_response->file_descriptor_proto[i];
        assert_non_null(memmem(moe_proto_descriptors,
                               (size_t)(moe_proto_descriptors_end - moe_proto_descriptors),
                               file.data, file.len));
    }
    answer_free(r);
}

static void assert_error(struct answers *a, int what, const char *text, enum moe_code code)
{
    answer_t *r = ask(a, what, text);
    assert_int_equal(
        r->message_response_case,
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE);
    assert_int_equal(r->error_response->error_code, code);
    answer_free(r);
}

static void reflection_tells_services_files_and_symbols(void **state)
{
    static const char *const services[] = {
        "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection", "moe.v1.ExpertService"};
    enum { SERVICES = sizeof services / sizeof *services };
    struct fixture f;
    (void)state;
    fixture_start(&f, NULL);
    for (size_t path = 0; path < 2; path++) {
        struct answers a;
        open_stream(&f, reflection_paths[path], &a);
        answer_t *r = ask(&a, CASE(LIST_SERVICES), "");
        assert_non_null(r->list_services_response);
        assert_int_equal(r->list_services_response->n_service, SERVICES);
        for (size_t i = 0; i < SERVICES; i++)
            assert_string_equal(r->list_services_response->service[i]->name, services[i]);
        answer_free(r);
        assert_files(&a, CASE(FILE_BY_FILENAME), "moe/v1/types.proto", 1);
        assert_files(&a, CASE(FILE_BY_FILENAME), "moe/v1/expert.proto", 2);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1.ExpertService", 2);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1.ExpertService.Forward", 2);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1.ForwardRequest", 2);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1.ForwardRequest.x_data", 2);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1.DATA_TYPE_BF16", 1);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1.DataType", 1);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1.AdminService", 2);
        assert_files(&a, CASE(FILE_CONTAINING_SYMBOL),
                     "grpc.health.v1.HealthCheckResponse.ServingStatus", 1);
        assert_error(&a, CASE(FILE_BY_FILENAME), "types.proto", MOE_NOT_FOUND);
        assert_error(&a, CASE(FILE_CONTAINING_SYMBOL), "moe.v1", MOE_NOT_FOUND);
        assert_error(&a, CASE(FILE_CONTAINING_SYMBOL), "", MOE_NOT_FOUND);
        assert_error(&a, CASE(FILE_CONTAINING_EXTENSION), "", MOE_NOT_FOUND);
        assert_error(&a, CASE(ALL_EXTENSION_NUMBERS_OF_TYPE), "moe.v1.Error", MOE_NOT_FOUND);
        moe_rpc_stream_close_send(a.stream);
        fixture_await("the end", &a.closed, 1);
        assert_ok(a.status);
        answers_free(&a);
    }
    fixture_stop(&f);
}

static void reflection_survives_bad_questions(void **state)
{
    struct fixture f;
    struct answers a;
    static uint8_t big[5000] = {0x22, 0x84, 0x27}; /* file_containing_symbol of 4996 bytes */
    (void)state;
    fixture_start(&f, NULL);
    open_stream(&f, reflection_paths[0], &a);
    assert_ok(moe_rpc_stream_send(a.stream, &(struct moe_rpc_out){.head = NULL}));
    fixture_await("an answer to no question", &a.count, 1);
    assert_ok(moe_rpc_stream_send(
        a.stream, &(struct moe_rpc_out){.head = (const uint8_t *)"\x0b", .head_length = 1}));
    fixture_await("the refusal", &a.closed, 1);
    assert_int_equal(a.status.reason, MOE_REASON_MALFORMED);
    answers_free(&a);
    open_stream(&f, reflection_paths[0], &a);
    assert_ok(
        moe_rpc_stream_send(a.stream, &(struct moe_rpc_out){.head = big, .head_length = 4999}));
    fixture_await("the refusal", &a.closed, 1);
    assert_int_equal(a.status.reason, MOE_REASON_TOO_LARGE);
    answers_free(&a);
    open_stream(&f, reflection_paths[1], &a); /* idle: must not delay the drain of fixture_stop */
    assert_error(&a, CASE(FILE_BY_FILENAME), "none", MOE_NOT_FOUND);
    moe_rpc_server_drain(f.server, MOE_NEVER);
    moe_rpc_server_stop(f.server);
    f.server = NULL;
    answers_free(&a);
    fixture_stop(&f);
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(health_is_the_last_setting_of_the_server),
        cmocka_unit_test(all_services_are_listed),
        cmocka_unit_test(watchers_see_every_change_and_the_end),
        cmocka_unit_test(watchers_may_leave_while_health_changes),
        cmocka_unit_test(reflection_tells_services_files_and_symbols),
        cmocka_unit_test(reflection_survives_bad_questions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
