/* SPDX-License-Identifier: Apache-2.0 */
/* Which messages a server reads: by what their prefixes announce, in shares, in order, at a rate.
 */
#include "base/clock.h"
#include "support/check.h"
#include "support/random.h"
#include "uploads/upload.h"

#include <string.h>

enum { MIB = 1 << 20, LINE = 16 };
#define BUDGET (UINT64_C(64) * MIB)

/* A call: how often it was kept alive for an answer, and which answers it got. */
struct waiter {
    unsigned held, woken, failed;
    struct moe_status why;
};

static void hold(void *waiter)
{
    ((struct waiter *)waiter)->held++;
}

static void read_now(void *waiter)
{
    struct waiter *w = waiter;
    w->woken++;
    assert_int_equal(w->woken + w->failed, w->held);
}

static void give_up(void *waiter, struct moe_status why)
{
    struct waiter *w = waiter;
    w->failed++;
    w->why = why;
    assert_int_equal(w->woken + w->failed, w->held);
}

static void never(void *connection)
{
    fail_msg("%p gives way", connection);
}

static struct moe_rpc_budget budget;
static uint64_t now_ns;
static const struct moe_rpc_identity anybody = {.link = MOE_RPC_LINK_TCP};

static int setup(void **unused)
{
    static const struct moe_rpc_waiters waiters = {hold, read_now, give_up, never};
    (void)unused;
    assert_ok(moe_rpc_upload_prepare());
    now_ns = 0;
    moe_rpc_budget_init(&budget, BUDGET, LINE, &waiters);
    return 0;
}

/* Whatever happened, nothing stays charged. */
static int teardown(void **unused)
{
    (void)unused;
    struct moe_rpc_budget_use use = moe_rpc_budget_use(&budget);
    assert_int_equal(use.bytes, 0);
    assert_int_equal(use.large, 0);
    assert_int_equal(use.waiting, 0);
    assert_int_equal(use.open, 0);
    assert_int_equal(use.oldest_ns, 0);
    assert_int_equal(use.connections, 0);
    moe_rpc_budget_destroy(&budget);
    return 0;
}

static struct moe_rpc_uploads *connect_as(const struct moe_rpc_identity *who)
{
    struct moe_rpc_uploads *u;
    assert_ok(moe_rpc_uploads_open(&budget, who, NULL, &u));
    return u;
}

/* A stream begins, and its call finds it by the value of the field. */
static struct moe_rpc_upload *begin_limited(struct moe_rpc_uploads *u, uint32_t stream,
                                            struct waiter *w, uint64_t largest)
{
    uint8_t field[MOE_RPC_UPLOAD_FIELD_BYTES];
    size_t length = moe_rpc_upload_begin(u, stream, field);
    size_t name = strlen(moe_rpc_upload_field_name());
    assert_true(length > 0 && length <= sizeof field);
    assert_int_equal(field[0], 0x10);
    assert_int_equal(field[1], name);
    assert_memory_equal(field + 2, moe_rpc_upload_field_name(), name);
    const uint8_t *value = field + 3 + name;
    assert_int_equal(field[2 + name], length - 3 - name);
    struct moe_rpc_upload *up = moe_rpc_upload_find(u, value, length - 3 - name, w, largest);
    assert_non_null(up);
    return up;
}

static struct moe_rpc_upload *begin(struct moe_rpc_uploads *u, uint32_t stream, struct waiter *w)
{
    return begin_limited(u, stream, w, UINT32_MAX);
}

static void disconnect(struct moe_rpc_uploads *u)
{
    moe_rpc_uploads_close(u);
    moe_rpc_uploads_free(u);
}

static void send_prefix(struct moe_rpc_uploads *u, uint32_t stream, uint32_t length)
{
    const uint8_t prefix[5] = {0, (uint8_t)(length >> 24), (uint8_t)(length >> 16),
                               (uint8_t)(length >> 8), (uint8_t)length};
    (void)moe_rpc_upload_data(u, stream, prefix, 2, ++now_ns);
    (void)moe_rpc_upload_data(u, stream, prefix + 2, 3, now_ns);
}

static void send_bytes(struct moe_rpc_uploads *u, uint32_t stream, size_t length)
{
    static const uint8_t zeros[65536];
    while (length > 0) {
        size_t some = length < sizeof zeros ? length : sizeof zeros;
        (void)moe_rpc_upload_data(u, stream, zeros, some, now_ns);
        length -= some;
    }
}

/* A large message has its turn when half of the look-ahead is here. */
static void announce(struct moe_rpc_uploads *u, uint32_t stream, uint32_t length)
{
    send_prefix(u, stream, length);
    if (length >= MIB)
        send_bytes(u, stream, MIB / 2);
}

static bool may_read(struct moe_rpc_upload *up)
{
    bool now;
    assert_ok(moe_rpc_upload_next(up, &now));
    return now;
}

static struct moe_status refusal(struct moe_rpc_upload *up)
{
    bool now;
    return moe_rpc_upload_next(up, &now);
}

/* ------------------------------------------------------------------ small and large */

static void stalled_large_messages_keep_no_small_one_waiting(void **unused)
{
    enum { STALLED = 12 };
    struct moe_rpc_uploads *u[STALLED + 1];
    struct moe_rpc_upload *up[STALLED + 1];
    struct waiter w[STALLED + 1] = {0};
    (void)unused;
    unsigned reading = 0;
    for (int i = 0; i < STALLED; i++) {
        u[i] = connect_as(&anybody);
        up[i] = begin(u[i], 1, &w[i]);
        announce(u[i], 1, 15 * MIB);
        reading += may_read(up[i]);
    }
    assert_int_equal(reading, 3); /* three quarters of 64 MiB */
    u[STALLED] = connect_as(&anybody);
    up[STALLED] = begin(u[STALLED], 1, &w[STALLED]);
    assert_false(may_read(up[STALLED])); /* nothing is announced */
    announce(u[STALLED], 1, 64 << 10);
    assert_int_equal(w[STALLED].woken, 1);
    moe_rpc_upload_delivered(up[STALLED], 64 << 10);
    for (int i = 0; i <= STALLED; i++) {
        moe_rpc_upload_release(up[i]);
        disconnect(u[i]);
    }
}

static void a_message_over_the_methods_limit_is_refused_before_its_bytes(void **unused)
{
    (void)unused;
    struct moe_rpc_uploads *u = connect_as(&anybody);
    struct waiter w = {0};
    struct moe_rpc_upload *up = begin_limited(u, 3, &w, 65536);
    announce(u, 3, 65537);
    struct moe_status st = refusal(up);
    print_message("  %s\n", st.text);
    assert_int_equal(st.code, MOE_RESOURCE_EXHAUSTED);
    assert_int_equal(st.reason, MOE_REASON_TOO_LARGE);
    assert_int_equal(st.retry_after_ms, 0);
    moe_rpc_upload_release(up);
    disconnect(u);
}

/* Those that begin, in the bytes that complete their prefix. */
static void small_messages_are_counted(void **unused)
{
    enum { SMALL = MOE_RPC_UPLOAD_SMALL, PREFIX = 5 };
    (void)unused;
    uint8_t bytes[5 * PREFIX + SMALL + SMALL - 1] = {0};
    struct moe_rpc_uploads *u = connect_as(&anybody);
    struct waiter w = {0};
    struct moe_rpc_upload *up = begin(u, 1, &w);
    bytes[2 * PREFIX + 4] = SMALL; /* behind two empty messages; then one below the limit */
    bytes[3 * PREFIX + SMALL + 4] = SMALL - 1;
    const size_t cut = 4 * PREFIX + SMALL - 1; /* before the last byte of a prefix */
    assert_int_equal(moe_rpc_upload_data(u, 1, bytes, cut, 1), 2);
    assert_int_equal(moe_rpc_upload_data(u, 1, bytes + cut, sizeof bytes - cut, 1), 2);
    assert_int_equal(moe_rpc_upload_data(u, 3, bytes, sizeof bytes, 1), 0); /* no such stream */
    moe_rpc_upload_release(up);
    disconnect(u);
}

/* The client has sent a row of messages, and the handler takes one at a time. */
static void messages_of_a_stream_are_distinguished(void **unused)
{
    (void)unused;
    struct waiter w = {0};
    struct moe_rpc_uploads *u = connect_as(&anybody);
    struct moe_rpc_upload *up = begin(u, 5, &w);
    for (int i = 0; i < 3; i++) {
        announce(u, 5, 1000);
        send_bytes(u, 5, 1000);
    }
    announce(u, 5, 20 * MIB); /* more than the connection's quarter: it is its only one */
    assert_int_equal(moe_rpc_budget_use(&budget).bytes, 3 * 1005);
    assert_int_equal(moe_rpc_budget_use(&budget).connections, 1);
    for (int i = 0; i < 3; i++) {
        assert_true(may_read(up));
        moe_rpc_upload_delivered(up, 1000);
    }
    assert_int_equal(moe_rpc_budget_use(&budget).bytes, 0);
    assert_true(may_read(up));
    assert_int_equal(moe_rpc_budget_use(&budget).bytes, 20 * MIB + 5);
    send_bytes(u, 5, 20 * MIB - MIB / 2);
    moe_rpc_upload_delivered(up, 20 * MIB);
    assert_false(may_read(up));
    moe_rpc_upload_half_close(u, 5);
    assert_int_equal(w.woken, 1); /* the end */
    moe_rpc_upload_end(u, 5);
    moe_rpc_upload_release(up);
    disconnect(u);
}

/* ------------------------------------------------------------------ shares */

static void a_connection_has_a_quarter_and_lets_others_pass(void **unused)
{
    enum { GREEDY = 6 };
    struct moe_rpc_upload *up[GREEDY], *other;
    struct waiter w[GREEDY] = {0}, last = {0};
    (void)unused;
    struct moe_rpc_uploads *u = connect_as(&anybody), *v = connect_as(&anybody);
    unsigned reading = 0, refused = 0;
    for (unsigned i = 0; i < GREEDY; i++) {
        bool now = false;
        up[i] = begin(u, 2 * i + 1, &w[i]);
        announce(u, 2 * i + 1, 9 * MIB);
        struct moe_status st = moe_rpc_upload_next(up[i], &now);
        refused += moe_failed(&st);
        reading += now;
    }
    assert_int_equal(reading, 1); /* 9 of its 12 MiB */
    assert_int_equal(refused, GREEDY - 1 - LINE / 4);
    other = begin(v, 1, &last);
    announce(v, 1, 9 * MIB);
    assert_true(may_read(other));
    moe_rpc_upload_delivered(up[0], 9 * MIB); /* the next of the same connection */
    assert_int_equal(w[1].woken, 1);
    for (unsigned i = 0; i < GREEDY; i++)
        moe_rpc_upload_release(up[i]);
    moe_rpc_upload_release(other);
    disconnect(u);
    disconnect(v);
}

static void small_messages_of_one_connection_end_at_its_quarter(void **unused)
{
    enum { STREAMS = 6 };
    struct moe_rpc_upload *up[STREAMS];
    struct waiter w = {0};
    (void)unused;
    struct moe_rpc_uploads *u = connect_as(&anybody), *v = connect_as(&anybody);
    unsigned refused = 0;
    for (unsigned i = 0; i < STREAMS; i++) {
        up[i] = begin(u, 2 * i + 1, &w);
        announce(u, 2 * i + 1, MIB - 5);
        struct moe_status st = refusal(up[i]);
        refused += st.reason == MOE_REASON_QUEUE_FULL && st.retry_after_ms > 0;
    }
    assert_int_equal(refused, STREAMS - 4); /* a quarter of 16 MiB */
    struct moe_rpc_upload *other = begin(v, 1, &w);
    announce(v, 1, MIB - 5);
    assert_true(may_read(other));
    for (unsigned i = 0; i < STREAMS; i++)
        moe_rpc_upload_release(up[i]);
    moe_rpc_upload_release(other);
    disconnect(u);
    disconnect(v);
}

static void all_connections_of_one_name_share_a_quarter(void **unused)
{
    (void)unused;
    static const struct moe_rpc_identity ann = {.link = MOE_RPC_LINK_TLS, .name = "spiffe://a/ann"},
                                         bob = {.link = MOE_RPC_LINK_TLS, .name = "spiffe://a/bob"};
    struct moe_rpc_uploads *u[3] = {connect_as(&ann), connect_as(&ann), connect_as(&bob)};
    struct moe_rpc_upload *up[3];
    struct waiter w[3] = {0};
    static const bool want[] = {true, false, true};
    for (int i = 0; i < 3; i++) {
        up[i] = begin(u[i], 1, &w[i]);
        announce(u[i], 1, 8 * MIB);
        assert_int_equal(may_read(up[i]), want[i]);
    }
    moe_rpc_upload_release(up[0]);
    assert_int_equal(w[1].woken, 1);
    for (int i = 0; i < 3; i++) {
        if (i > 0)
            moe_rpc_upload_release(up[i]);
        disconnect(u[i]);
    }
}

/* ------------------------------------------------------------------ the line */

static void the_line_is_served_in_order_and_its_hint_grows(void **unused)
{
    enum { CALLS = LINE + 5 };
    struct moe_rpc_uploads *u[CALLS];
    struct moe_rpc_upload *up[CALLS];
    struct waiter w[CALLS] = {0};
    uint32_t hint = 0;
    (void)unused;
    for (int i = 0; i < CALLS; i++) {
        bool now;
        u[i] = connect_as(&anybody);
        up[i] = begin(u[i], 1, &w[i]);
        announce(u[i], 1, 14 * MIB);
        struct moe_status st = moe_rpc_upload_next(up[i], &now);
        hint = st.retry_after_ms;
        assert_int_equal(moe_failed(&st), i >= LINE + 3);
    }
    print_message("  hint with %d in the line: %u ms\n", LINE, hint);
    assert_true(hint >= 4 * 50);
    assert_int_equal(moe_rpc_budget_use(&budget).oldest_ns, 4);
    for (int i = 0; i < LINE; i++) {
        assert_int_equal(w[i + 3].woken, 0);
        moe_rpc_upload_delivered(up[i], 14 * MIB);
        assert_int_equal(w[i + 3].woken, 1);
    }
    for (int i = 0; i < CALLS; i++) {
        moe_rpc_upload_release(up[i]);
        disconnect(u[i]);
    }
}

static void a_waiting_call_that_ends_makes_room_for_the_next(void **unused)
{
    struct moe_rpc_uploads *u[4];
    struct moe_rpc_upload *up[4];
    struct waiter w[4] = {0};
    static const uint32_t lengths[] = {30 * MIB, 15 * MIB, 10 * MIB, 2 * MIB};
    (void)unused;
    for (int i = 0; i < 4; i++) {
        u[i] = connect_as(&anybody);
        up[i] = begin(u[i], 1, &w[i]);
        announce(u[i], 1, lengths[i]);
        assert_int_equal(may_read(up[i]), i < 2);
    }
    moe_rpc_upload_end(u[2], 1);     /* the client resets it */
    assert_int_equal(w[2].woken, 1); /* reads the end */
    assert_int_equal(w[3].woken, 1);
    disconnect(u[1]); /* the connection is gone; its call still has the bytes */
    assert_int_equal(moe_rpc_budget_use(&budget).bytes, 47 * MIB + 15);
    for (int i = 0; i < 4; i++) {
        moe_rpc_upload_release(up[i]);
        if (i != 1)
            disconnect(u[i]);
    }
}

/* ------------------------------------------------------------------ rate */

/* Seconds until a sender of `rate` bytes a second is too slow, after `first` bytes at once. */
static unsigned seconds_of(uint32_t length, size_t first, size_t rate)
{
    enum { LONG = 60 };
    struct waiter w = {0};
    uint64_t now = MOE_NS_PER_S;
    unsigned s = 0;
    struct moe_rpc_uploads *u = connect_as(&anybody);
    struct moe_rpc_upload *up = begin(u, 1, &w);
    announce(u, 1, length);
    assert_true(may_read(up));
    moe_rpc_budget_check(&budget, now);
    send_bytes(u, 1, first);
    for (; w.failed == 0 && s < LONG; s++) {
        now += MOE_NS_PER_S;
        send_bytes(u, 1, rate);
        moe_rpc_budget_check(&budget, now);
    }
    if (w.failed > 0)
        assert_int_equal(w.why.code, MOE_DEADLINE_EXCEEDED);
    moe_rpc_budget_check(&budget, now + MOE_NS_PER_S);
    assert_true(w.failed <= 1);
    assert_false(moe_rpc_upload_forget(up)); /* its read goes on until the call is over */
    moe_rpc_upload_release(up);
    disconnect(u);
    return s;
}

/* Who only announces holds a place for a second, and no bytes. */
static void a_large_message_without_bytes_has_no_turn(void **unused)
{
    struct waiter w[2] = {0};
    (void)unused;
    struct moe_rpc_uploads *u = connect_as(&anybody);
    struct moe_rpc_upload *stalled = begin(u, 1, &w[0]), *other = begin(u, 3, &w[1]);
    send_prefix(u, 1, 40 * MIB);
    assert_false(may_read(stalled));
    assert_int_equal(moe_rpc_budget_use(&budget).bytes, 0);
    announce(u, 3, 40 * MIB);
    assert_true(may_read(other));
    moe_rpc_upload_delivered(other, 40 * MIB);
    for (uint64_t now = 1; now <= 3; now++)
        moe_rpc_budget_check(&budget, now * MOE_NS_PER_S);
    assert_int_equal(w[0].woken, 0);
    assert_int_equal(w[0].failed, 1);
    assert_int_equal(w[0].why.code, MOE_DEADLINE_EXCEEDED);
    assert_true(moe_rpc_upload_forget(stalled));
    moe_rpc_upload_release(stalled);
    moe_rpc_upload_release(other);
    disconnect(u);
}

static void a_slow_sender_is_given_up(void **unused)
{
    (void)unused;
    assert_int_equal(seconds_of(100 * MIB, 0, 0), 2);
    assert_int_equal(seconds_of(100 * MIB, 0, 1), 2);
    assert_int_equal(seconds_of(1000, 0, 1), 2);
    assert_int_equal(seconds_of(1000, 1000, 0), 60); /* it is whole */
    assert_in_range(seconds_of(100 * MIB, 0, 60 << 10), 3, 20);
    assert_int_equal(seconds_of(100 * MIB, 0, 64 << 10), 60);
    assert_int_equal(seconds_of(100 * MIB, 50 * MIB, 0), 7); /* it was fast, and then stalls */
}

/* ------------------------------------------------------------------ anything */

struct random_call {
    struct moe_rpc_upload *up;
    struct waiter w;
    unsigned answers; /* that it must have at most */
    bool reading, waits;
};

/* The call does one thing. False when it is over. */
static bool step_call(struct random_call *c, uint32_t what)
{
    bool now = false;
    assert_true(c->w.woken <= c->answers && c->w.failed <= 1);
    if (c->w.failed > 0)
        return false;
    if (c->waits && c->w.woken == c->answers) {
        c->waits = false;
        c->reading = true;
    }
    if (what < 60 && !c->reading && !c->waits) {
        struct moe_status st = moe_rpc_upload_next(c->up, &now);
        if (moe_failed(&st))
            return false;
        c->reading = now;
        c->waits = !now;
        c->answers += !now;
    } else if (what < 85 && c->reading) {
        moe_rpc_upload_delivered(c->up, random_below(2 * MIB));
        c->reading = false;
    } else if (what >= 95) {
        assert_int_equal(moe_rpc_upload_forget(c->up), !c->reading);
        return false; /* it is over */
    }
    return true;
}

static void nothing_leaks_whatever_clients_do(void **unused)
{
    enum { CONNECTIONS = 6, STREAMS = 12, STEPS = 20000 };
    static struct moe_rpc_uploads *u[CONNECTIONS];
    static struct random_call calls[CONNECTIONS][STREAMS];
    (void)unused;
    uint64_t most = 0, now = MOE_NS_PER_S;
    unsigned answers = 0, ended = 0;
    for (int step = 0; step < STEPS; step++) {
        uint32_t c = random_below(CONNECTIONS), s = random_below(STREAMS);
        struct random_call *call = &calls[c][s];
        if (u[c] == NULL)
            u[c] = connect_as(&anybody);
        if (call->up == NULL) {
            *call = (struct random_call){.up = NULL};
            call->up = begin_limited(u[c], 2 * s + 1, &call->w, 25 * MIB);
        }
        uint32_t what = random_below(100);
        bool over = false;
        if (what < 30) {
            announce(u[c], 2 * s + 1, random_below(one_in(3) ? 30 * MIB : 2 * MIB));
        } else if (what < 55) {
            send_bytes(u[c], 2 * s + 1, random_below(one_in(10) ? 4 * MIB : 20000));
        } else if (what < 95) {
            over = !step_call(call, random_below(100));
        } else if (what < 97) {
            moe_rpc_upload_end(u[c], 2 * s + 1);
        } else if (what == 97) {
            moe_rpc_upload_half_close(u[c], 2 * s + 1);
        } else if (what == 98) {
            now += MOE_NS_PER_S / 2;
            moe_rpc_budget_check(&budget, now);
        } else {
            disconnect(u[c]);
            u[c] = NULL;
            for (s = 0; s < STREAMS; s++) {
                if (calls[c][s].up != NULL)
                    moe_rpc_upload_release(calls[c][s].up);
                calls[c][s].up = NULL;
            }
        }
        if (over) {
            answers += call->w.woken;
            ended++;
            moe_rpc_upload_end(u[c], 2 * s + 1);
            moe_rpc_upload_release(call->up);
            call->up = NULL;
        }
        uint64_t bytes = moe_rpc_budget_use(&budget).bytes;
        most = bytes > most ? bytes : most;
        assert_true(bytes <= BUDGET);
    }
    print_message("  at most %.1f MiB of %d; %u calls ended, which had waited %u times\n",
                  (double)most / (double)MIB, (int)(BUDGET / MIB), ended, answers);
    assert_true(answers > 100);
    for (uint32_t c = 0; c < CONNECTIONS; c++) {
        for (uint32_t s = 0; s < STREAMS; s++)
            if (calls[c][s].up != NULL)
                moe_rpc_upload_release(calls[c][s].up);
        if (u[c] != NULL)
            disconnect(u[c]);
    }
}

static void many_greedy_connections_leave_room_for_a_light_one(void **unused)
{
    enum { GREEDY = 60, STREAMS = 4 };
    static struct moe_rpc_uploads *u[GREEDY];
    static struct moe_rpc_upload *up[GREEDY][STREAMS];
    struct waiter w = {0};
    (void)unused;
    for (int i = 0; i < GREEDY; i++)
        u[i] = connect_as(&anybody);
    for (unsigned s = 0; s < STREAMS; s++) {
        for (int i = 0; i < GREEDY; i++) {
            up[i][s] = begin(u[i], 2 * s + 1, &w);
            announce(u[i], 2 * s + 1, one_in(2) ? MIB - 5 : 16384);
        }
    }
    struct moe_rpc_uploads *v = connect_as(&anybody);
    struct moe_rpc_upload *light = begin(v, 1, &w);
    announce(v, 1, 16384);
    print_message("  in use: %.1f MiB\n", (double)moe_rpc_budget_use(&budget).bytes / (double)MIB);
    assert_true(may_read(light));
    moe_rpc_upload_release(light);
    disconnect(v);
    for (int i = 0; i < GREEDY; i++) {
        for (unsigned s = 0; s < STREAMS; s++)
            moe_rpc_upload_release(up[i][s]);
        disconnect(u[i]);
    }
}

/* No handler asks yet: an announced large message takes a place all the same. */
static void a_large_message_takes_its_place_when_it_is_announced(void **unused)
{
    struct moe_rpc_uploads *u[LINE + 1];
    struct moe_rpc_upload *up[LINE + 1];
    struct waiter w[LINE + 1] = {0};
    (void)unused;
    for (int i = 0; i <= LINE; i++) {
        u[i] = connect_as(&anybody);
        up[i] = begin(u[i], 1, &w[i]);
        announce(u[i], 1, 2 * MIB);
    }
    assert_int_equal(moe_rpc_budget_use(&budget).waiting, LINE);
    assert_int_equal(refusal(up[LINE]).reason, MOE_REASON_QUEUE_FULL);
    assert_true(may_read(up[LINE - 1])); /* the others do not ask: it passes them */
    assert_int_equal(moe_rpc_budget_use(&budget).refused[MOE_RPC_QUEUE_FULL], 1);
    for (int i = 0; i <= LINE; i++) {
        moe_rpc_upload_release(up[i]);
        disconnect(u[i]);
    }
}

/* The owner with the most places gives up its newest one; equal owners keep theirs. */
static void a_full_line_makes_a_place_for_an_owner_with_fewer(void **unused)
{
    enum { HEAVY = 4, EACH = LINE / HEAVY };
    struct moe_rpc_uploads *u[HEAVY + 1];
    struct moe_rpc_upload *up[HEAVY][EACH], *light[EACH];
    struct waiter w[HEAVY][EACH] = {0}, v[EACH] = {0};
    (void)unused;
    /* The first one takes all bytes of large messages, and the line fills up behind it. */
    struct moe_rpc_uploads *first = connect_as(&anybody);
    struct waiter reader = {0};
    struct moe_rpc_upload *reading = begin(first, 1, &reader);
    announce(first, 1, 48 * MIB - 5);
    assert_true(may_read(reading));
    for (unsigned i = 0; i <= HEAVY; i++)
        u[i] = connect_as(&anybody);
    for (unsigned k = 0; k < EACH; k++) {
        for (unsigned i = 0; i < HEAVY; i++) {
            up[i][k] = begin(u[i], 2 * k + 1, &w[i][k]);
            announce(u[i], 2 * k + 1, 2 * MIB);
            assert_false(may_read(up[i][k]));
        }
    }
    unsigned lost = 0;
    for (unsigned k = 0; k < EACH; k++) {
        light[k] = begin(u[HEAVY], 2 * k + 1, &v[k]);
        announce(u[HEAVY], 2 * k + 1, 2 * MIB);
        if (k < EACH - 1)
            assert_false(may_read(light[k]));
        else
            assert_int_equal(refusal(light[k]).reason, MOE_REASON_QUEUE_FULL);
    }
    for (unsigned i = 0; i < HEAVY; i++) {
        assert_int_equal(w[i][0].failed, 0);
        lost += w[i][EACH - 1].failed;
        if (w[i][EACH - 1].failed)
            assert_int_equal(w[i][EACH - 1].why.reason, MOE_REASON_QUEUE_FULL);
    }
    assert_int_equal(lost, EACH - 1);
    assert_int_equal(moe_rpc_budget_use(&budget).waiting, LINE);
    assert_int_equal(moe_rpc_budget_use(&budget).refused[MOE_RPC_QUEUE_FULL], EACH);
    for (unsigned k = 0; k < EACH; k++) {
        for (unsigned i = 0; i < HEAVY; i++)
            moe_rpc_upload_release(up[i][k]);
        moe_rpc_upload_release(light[k]);
    }
    moe_rpc_upload_release(reading);
    disconnect(first);
    for (unsigned i = 0; i <= HEAVY; i++)
        disconnect(u[i]);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        CASE(stalled_large_messages_keep_no_small_one_waiting),
        CASE(a_message_over_the_methods_limit_is_refused_before_its_bytes),
        CASE(small_messages_are_counted),
        CASE(messages_of_a_stream_are_distinguished),
        CASE(a_connection_has_a_quarter_and_lets_others_pass),
        CASE(small_messages_of_one_connection_end_at_its_quarter),
        CASE(all_connections_of_one_name_share_a_quarter),
        CASE(the_line_is_served_in_order_and_its_hint_grows),
        CASE(a_waiting_call_that_ends_makes_room_for_the_next),
        CASE(a_slow_sender_is_given_up),
        CASE(a_large_message_without_bytes_has_no_turn),
        CASE(many_greedy_connections_leave_room_for_a_light_one),
        CASE(a_large_message_takes_its_place_when_it_is_announced),
        CASE(a_full_line_makes_a_place_for_an_owner_with_fewer),
        CASE(nothing_leaks_whatever_clients_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
