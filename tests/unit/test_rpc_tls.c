/* SPDX-License-Identifier: Apache-2.0 */
/* Client and server over TLS: who the server sees, whom the client believes, and certificates that
 * change while calls go on. test_tls_pem has bad files, test_tls the server's sessions. */
#include "certificates.h"
#include "rpc_fixture.h"
#include "support/directory.h"
#include "tls/tls.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { DAY = 24 * 3600, CALL_MS = 20000, NAMES_MAX = 16 };

#define ANSWERS_TO "DNS:localhost,IP:127.0.0.1"
#define W1         "spiffe://moed/worker/w1"
#define W2         "spiffe://moed/worker/w2"

/* Names of the callers that the server has seen. */
struct seen {
    struct moe_mutex lock;
    char names[NAMES_MAX][64];
    unsigned count;
};

struct scene {
    char at[CERTIFICATES_PATH];
    char files[3][CERTIFICATES_PATH + 64]; /* of the server */
    struct moe_tls *tls;
    struct seen seen;
    struct fixture f;
};

static struct moe_status note(void *ctx, const struct moe_rpc_identity *who, const char *path,
                              const char *token, struct moe_rpc_grant *grant)
{
    struct seen *s = ctx;
    bool known = false;
    (void)path, (void)token, (void)grant;
    assert_int_equal(who->link, MOE_RPC_LINK_TLS);
    moe_mutex_lock(&s->lock);
    for (unsigned i = 0; i < s->count; i++)
        known = known || strcmp(s->names[i], who->name) == 0;
    if (!known && s->count < NAMES_MAX)
        snprintf(s->names[s->count++], sizeof s->names[0], "%s", who->name);
    moe_mutex_unlock(&s->lock);
    return moe_ok();
}

static bool has_seen(struct scene *s, const char *name)
{
    bool found = false;
    moe_mutex_lock(&s->seen.lock);
    for (unsigned i = 0; i < s->seen.count; i++)
        found = found || strcmp(s->seen.names[i], name) == 0;
    moe_mutex_unlock(&s->seen.lock);
    return found;
}

static const char *file(const struct scene *s, const char *name, const char *what)
{
    return certificates_file(s->at, name, what);
}

/* A server that asks for certificates. */
static void open_scene(struct scene *s)
{
    memset(s, 0, sizeof *s);
    moe_mutex_init(&s->seen.lock);
    certificates_directory(s->at);
    certificates_make(s->at, "ca", NULL, NULL, -60, DAY);
    certificates_make(s->at, "server", "ca", ANSWERS_TO, -60, DAY);
    certificates_make(s->at, "me", "ca", "URI:" W1, -60, DAY);
    strcpy(s->files[0], file(s, "server", "pem"));
    strcpy(s->files[1], file(s, "server", "key"));
    strcpy(s->files[2], file(s, "ca", "pem"));
    const struct moe_rpc_tls_files files = {s->files[0], s->files[1], s->files[2]};
    assert_ok(moe_tls_create(&files, &s->tls));
    struct moe_rpc_server_config config = fixture_config();
    config.tls = s->tls;
    config.authorise = note;
    config.authorise_ctx = &s->seen;
    fixture_start(&s->f, &config);
}

static void close_scene(struct scene *s)
{
    fixture_stop(&s->f);
    moe_tls_destroy(s->tls);
    moe_mutex_destroy(&s->seen.lock);
    certificates_remove(s->at);
}

static struct moe_rpc_channel *dial(struct scene *s, const char *ca, const char *own,
                                    const char *server_name)
{
    struct moe_rpc_channel *ch;
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%u", moe_rpc_server_port(s->f.server));
    struct moe_rpc_channel_config config = {.target = target, .own_connection = true};
    config.trust.server_name = server_name;
    config.trust.tls.ca = file(s, ca, "pem");
    if (own != NULL) {
        config.trust.tls.certificate = file(s, own, "pem");
        config.trust.tls.key = file(s, own, "key");
    }
    assert_ok(moe_rpc_channel_open(s->f.client, &config, &ch));
    return ch;
}

static struct moe_status echo(struct scene *s, struct moe_rpc_channel *ch)
{
    return fixture_call(&s->f, ch, "", "abc", 3, CALL_MS, "abc", 3);
}

static void a_server_sees_the_name_in_the_certificate(void **state)
{
    struct scene s;
    (void)state;
    open_scene(&s);
    struct moe_rpc_channel *me = dial(&s, "ca", "me", NULL), *nameless = dial(&s, "ca", NULL, NULL);
    assert_ok(echo(&s, me));
    assert_true(has_seen(&s, W1));
    assert_false(has_seen(&s, ""));
    assert_ok(echo(&s, nameless));
    assert_true(has_seen(&s, ""));
    moe_rpc_channel_close(me);
    moe_rpc_channel_close(nameless);
    close_scene(&s);
}

static void expect(struct scene *s, struct moe_rpc_channel *ch, const char *why)
{
    struct moe_status st = echo(s, ch);
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, MOE_UNAVAILABLE);
    assert_non_null(strstr(st.text, why));
    moe_rpc_channel_close(ch);
}

static void a_client_believes_its_ca_and_the_name_only(void **state)
{
    struct scene s;
    (void)state;
    open_scene(&s);
    certificates_make(s.at, "other", NULL, NULL, -60, DAY);
    certificates_make(s.at, "stranger", "other", "URI:" W2, -60, DAY);
    expect(&s, dial(&s, "other", "me", NULL), "does not lead to the CA");
    expect(&s, dial(&s, "ca", "me", "elsewhere.example"), "not for the host of the endpoint");
    expect(&s, dial(&s, "ca", "stranger", NULL), "may not accept the certificate");
    expect(&s, fixture_channel(&s.f, 0), "may expect TLS");
    assert_int_equal(s.seen.count, 0);
    struct moe_rpc_channel *right = dial(&s, "ca", "me", "localhost");
    assert_ok(echo(&s, right));
    moe_rpc_channel_close(right);
    close_scene(&s);
}

static void incomplete_files_are_refused(void **state)
{
    struct scene s;
    struct moe_rpc_channel *ch;
    (void)state;
    open_scene(&s);
    struct moe_rpc_channel_config config = {.target = "127.0.0.1:1"};
    config.trust.tls.certificate = file(&s, "me", "pem");
    config.trust.tls.ca = file(&s, "ca", "pem");
    assert_refused(moe_rpc_channel_open(s.f.client, &config, &ch), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    config.trust.tls.key = file(&s, "me", "key");
    config.trust.tls.ca = NULL;
    assert_refused(moe_rpc_channel_open(s.f.client, &config, &ch), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
    close_scene(&s);
}

/* ------------------------------------------------------------------ changes */

struct talk {
    struct moe_rpc_stream *stream;
    atomic_uint answers, over;
};

static void answered(void *ctx, struct moe_rpc_msg *m)
{
    struct talk *t = ctx;
    moe_rpc_msg_free(m);
    atomic_fetch_add(&t->answers, 1);
}

static void ended(void *ctx, struct moe_status status)
{
    struct talk *t = ctx;
    (void)status;
    atomic_fetch_add(&t->over, 1);
}

static void say(struct scene *s, struct talk *t, unsigned answers)
{
    uint8_t head[256];
    struct moe_rpc_out out = fixture_request(&s->f, "", "abc", 3, head);
    assert_ok(moe_rpc_stream_send(t->stream, &out));
    fixture_await("an answer on the stream", &t->answers, answers);
}

/* Calls until the server sees `name`, for at most 10 s. Each call succeeds. */
static unsigned call_until(struct scene *s, struct moe_rpc_channel *ch, const char *name)
{
    const uint64_t end = moe_clock_ns() + 10 * MOE_NS_PER_S;
    unsigned calls = 0;
    while (!has_seen(s, name)) {
        assert_true(moe_clock_ns() < end);
        assert_ok(echo(s, ch));
        calls++;
    }
    return calls;
}

/* Opens a stream and gets its first answer. */
static void begin_talk(struct scene *s, struct moe_rpc_channel *ch, struct talk *t)
{
    static const struct moe_rpc_stream_events events = {.message = answered, .closed = ended};
    struct moe_rpc_call_options options = fixture_options(0);
    assert_ok(moe_rpc_stream_open(ch, STREAM_PATH, &options, &events, t, &t->stream));
    say(s, t, 1);
}

static void new_files_count_and_break_no_stream(void **state)
{
    struct talk t = {.answers = 0};
    struct scene s;
    (void)state;
    open_scene(&s);
    struct moe_rpc_channel *ch = dial(&s, "ca", "me", NULL);
    begin_talk(&s, ch, &t);
    assert_true(has_seen(&s, W1));

    certificates_write(s.at, "me", "pem", "rubbish", 0644); /* changes nothing */
    const uint64_t later = moe_clock_ns() + 5 * MOE_NS_PER_S / 2;
    while (moe_clock_ns() < later)
        assert_ok(echo(&s, ch));
    assert_int_equal(s.seen.count, 1);

    certificates_make(s.at, "me", "ca", "URI:" W2, -60, DAY);
    print_message("  %u calls before the new one counted\n", call_until(&s, ch, W2));
    say(&s, &t, 2); /* on the old connection */
    assert_int_equal(t.over, 0);

    /* The CA changes with an overlap: both roots, then the server, then the client. */
    certificates_make(s.at, "next", NULL, NULL, -60, DAY);
    certificates_join(s.at, "ca", "ca", "next");
    certificates_make(s.at, "server", "next", ANSWERS_TO, -60, DAY);
    assert_true(moe_tls_refresh(s.tls));
    certificates_make(s.at, "me", "next", "URI:spiffe://moed/worker/w3", -60, DAY);
    print_message("  %u calls before the new root counted\n",
                  call_until(&s, ch, "spiffe://moed/worker/w3"));
    say(&s, &t, 3);
    assert_int_equal(t.over, 0);
    moe_rpc_stream_close_send(t.stream);
    fixture_await("the end of the stream", &t.over, 1);
    moe_rpc_stream_free(t.stream);
    moe_rpc_channel_close(ch);
    close_scene(&s);
}

/* The last call of a replaced channel may end after the channel is closed. */
static void a_closed_channel_does_not_end_its_calls(void **state)
{
    struct talk t = {.answers = 0};
    struct scene s;
    (void)state;
    open_scene(&s);
    struct moe_rpc_channel *ch = dial(&s, "ca", "me", NULL);
    begin_talk(&s, ch, &t);
    certificates_make(s.at, "me", "ca", "URI:" W2, -60, DAY);
    (void)call_until(&s, ch, W2);
    moe_rpc_channel_close(ch);
    say(&s, &t, 2);
    moe_rpc_stream_free(t.stream);
    close_scene(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_server_sees_the_name_in_the_certificate),
        cmocka_unit_test(a_client_believes_its_ca_and_the_name_only),
        cmocka_unit_test(incomplete_files_are_refused),
        cmocka_unit_test(new_files_count_and_break_no_stream),
        cmocka_unit_test(a_closed_channel_does_not_end_its_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
