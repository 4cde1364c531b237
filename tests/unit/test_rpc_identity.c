/* SPDX-License-Identifier: Apache-2.0 */
/* Every call carries the identity of its connection, and the server's owner decides by it. */
#include "rpc_fixture.h"
#include "support/directory.h"

#include <string.h>
#include <unistd.h>

/* Allows Unix sockets everything, others the unary method only. */
struct policy {
    atomic_uint answered, denied, failed; /* ends of calls */
    atomic_uint asked, local, remote;
    struct moe_mutex lock;
    char paths[8][128]; /* of refused calls */
    unsigned refused;
};

static struct moe_status decide(void *ctx, const struct moe_rpc_identity *who, const char *path,
                                const char *token, struct moe_rpc_grant *grant)
{
    struct policy *p = ctx;
    char name[32];
    assert_int_equal(grant->roles, 0);
    grant->roles = who->link == MOE_RPC_LINK_UNIX ? 2 : 1;
    snprintf(grant->who, sizeof grant->who, "%s", path);
    atomic_fetch_add(&p->asked, 1);
    assert_string_equal(token, "");
    if (who->link == MOE_RPC_LINK_UNIX) {
        snprintf(name, sizeof name, "uid:%u", getuid());
        assert_string_equal(who->name, name);
        assert_int_equal(who->uid, getuid());
        atomic_fetch_add(&p->local, 1);
        return moe_ok();
    }
    assert_int_equal(who->link, MOE_RPC_LINK_TCP);
    assert_string_equal(who->name, "");
    assert_string_equal(who->address, "127.0.0.1");
    atomic_fetch_add(&p->remote, 1);
    if (strcmp(path, UNARY_PATH) == 0)
        return moe_ok();
    moe_mutex_lock(&p->lock);
    snprintf(p->paths[p->refused++ % 8], sizeof p->paths[0], "%s", path);
    moe_mutex_unlock(&p->lock);
    return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_NONE, "not for everybody");
}

struct outcome {
    atomic_uint over;
    struct moe_status status;
};

static void closed(void *ctx, struct moe_status status)
{
    struct outcome *o = ctx;
    o->status = status;
    atomic_fetch_add(&o->over, 1);
}

static void ignore(void *ctx, struct moe_rpc_msg *m)
{
    (void)ctx;
    moe_rpc_msg_free(m);
}

/* Of each call of a known method, with what `decide` has granted. */
static void record(void *ctx, const struct moe_rpc_identity *who, const struct moe_rpc_grant *grant,
                   const char *path, const struct moe_status *answer)
{
    struct policy *p = ctx;
    assert_string_equal(grant->who, path);
    assert_int_equal(grant->roles, who->link == MOE_RPC_LINK_UNIX ? 2 : 1);
    atomic_fetch_add(answer->code == MOE_OK                  ? &p->answered
                     : answer->code == MOE_PERMISSION_DENIED ? &p->denied
                                                             : &p->failed,
                     1);
}

/* How a stream on `path` ends that sends nothing. */
static struct moe_status try_stream(struct moe_rpc_channel *ch, const char *path)
{
    static const struct moe_rpc_stream_events events = {.message = ignore, .closed = closed};
    struct moe_rpc_stream *stream;
    struct outcome o = {.over = 0};
    struct moe_rpc_call_options options = fixture_options(20000);
    assert_ok(moe_rpc_stream_open(ch, path, &options, &events, &o, &stream));
    moe_rpc_stream_close_send(stream);
    fixture_await("the end of a stream", &o.over, 1);
    moe_rpc_stream_free(stream);
    return o.status;
}

static struct moe_rpc_channel *dial(struct fixture *f, const char *target)
{
    struct moe_rpc_channel *ch;
    assert_ok(moe_rpc_channel_open(
        f->client, &(struct moe_rpc_channel_config){.target = target, .own_connection = true},
        &ch));
    return ch;
}

static bool is_local(void *ctx, const struct moe_rpc_identity *who)
{
    (void)ctx;
    return who->link == MOE_RPC_LINK_UNIX;
}

static void a_call_has_the_rights_of_its_connection(void **state)
{
    struct fixture f;
    struct policy p = {.asked = 0};
    char directory[MOE_TEST_DIRECTORY_BYTES], listen[128], target[128];
    (void)state;
    moe_mutex_init(&p.lock);
    assert_true(moe_test_directory("identity", directory));
    snprintf(listen, sizeof listen, "127.0.0.1:0,unix:%s/s", directory);
    snprintf(target, sizeof target, "unix:%s/s", directory);
    struct moe_rpc_server_config config = fixture_config();
    config.listen = listen;
    config.authorise = decide;
    config.finished = record;
    config.authorise_ctx = &p;
    fixture_start(&f, &config);
    struct moe_rpc_channel *local = dial(&f, target);
    for (int i = 0; i < 50; i++) {
        assert_ok(fixture_call(&f, f.channel, "", "abc", 3, 20000, "abc", 3));
        assert_ok(fixture_call(&f, local, "thread", "abc", 3, 20000, "abc", 3));
    }
    assert_int_equal(p.local, 50);
    assert_int_equal(p.remote, 50);
    assert_ok(try_stream(local, STREAM_PATH));
    /* A client can receive the end first. */
    fixture_await("the ends of all calls", &f.done, 101);
    /* Refused before a handler sees it; a method that does not exist is no exception. */
    assert_int_equal(try_stream(f.channel, STREAM_PATH).code, MOE_PERMISSION_DENIED);
    assert_int_equal(try_stream(f.channel, "/grpc.health.v1.Health/Watch").code,
                     MOE_PERMISSION_DENIED);
    assert_int_equal(try_stream(f.channel, "/no.such/Method").code, MOE_PERMISSION_DENIED);
    assert_int_equal(try_stream(local, "/no.such/Method").code, MOE_UNIMPLEMENTED);
    assert_int_equal(f.done, 101);
    assert_string_equal(p.paths[0], STREAM_PATH);
    assert_string_equal(p.paths[1], "/grpc.health.v1.Health/Watch");
    assert_string_equal(p.paths[2], "/no.such/Method");
    moe_rpc_channel_close(local);
    fixture_stop(&f);
    assert_int_equal(p.answered, 101);
    assert_int_equal(p.denied, 2);
    assert_int_equal(p.failed, 0);
    assert_int_equal(rmdir(directory), 0);
    moe_mutex_destroy(&p.lock);
}

static void keep_outcome(void *ctx, struct moe_status status, struct moe_rpc_msg *reply)
{
    struct outcome *o = ctx;
    o->status = status;
    moe_rpc_msg_free(reply);
    atomic_fetch_add(&o->over, 1);
}

static void an_identity_that_is_disconnected_loses_its_calls(void **state)
{
    struct fixture f;
    char directory[MOE_TEST_DIRECTORY_BYTES], listen[128], target[128];
    struct outcome o[2] = {0};
    (void)state;
    assert_true(moe_test_directory("identity", directory));
    snprintf(listen, sizeof listen, "127.0.0.1:0,unix:%s/s", directory);
    snprintf(target, sizeof target, "unix:%s/s", directory);
    struct moe_rpc_server_config config = fixture_config();
    config.listen = listen;
    fixture_start(&f, &config);
    struct moe_rpc_channel *local = dial(&f, target);
    for (int i = 0; i < 2; i++) {
        uint8_t head[256];
        struct moe_rpc_call_options options = fixture_options(20000);
        struct moe_rpc_out out = fixture_request(&f, "hang", "x", 1, head);
        moe_rpc_call_unary(i == 0 ? local : f.channel, UNARY_PATH, &options, &out, keep_outcome,
                           &o[i]);
    }
    fixture_await_hanging(&f, 2);
    moe_rpc_server_disconnect(f.server, is_local, NULL);
    fixture_await("the end of a call", &o[0].over, 1);
    assert_int_equal(o[0].status.code, MOE_UNAVAILABLE);
    fixture_await("its handler to notice", &f.cancelled, 1);
    assert_int_equal(o[1].over, 0);
    fixture_answer_hanging(&f);
    fixture_await("the other call", &o[1].over, 1);
    assert_ok(o[1].status);
    moe_rpc_channel_close(local);
    fixture_stop(&f);
    assert_int_equal(rmdir(directory), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_has_the_rights_of_its_connection),
        cmocka_unit_test(an_identity_that_is_disconnected_loses_its_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
