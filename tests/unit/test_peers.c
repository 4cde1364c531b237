/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the peers: real servers and streams over loopback, an engine that only reports, and a
 * hand-written caller that breaks the rules. */
#include "base/clock.h"
#include "base/mutex.h"
#include "base/wait.h"
#include "daemon/metrics.h"
#include "links/peers.h"
#include "moe/v1/worker.pb-c.h"
#include "rpc/control.h"
#include "support/check.h"
#include "support/random.h"

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 3, TICKETS_MAX = 4096, EPOCH = 5, WAIT_MS = 20000 };

static const char secret_text[] = "secret of epoch5";

/* The ways of messages in the tests below: each runs once in every way. */
enum way {
    STREAMS, /* no worker has an eventcount */
    SHARED,  /* all share memory */
    BOTH,    /* slot 1 does not */
};
static enum way way;
static uint64_t step_ns; /* length of each step */

/* A worker without an engine: its thread reports each ticket as run, in order. */
struct node {
    uint32_t slot;
    uint64_t incarnation;
    struct moe_peers *peers;
    struct moe_rpc_server *server;
    struct moe_rpc_client *client;
    char endpoint[32];
    struct moe_eventcount *eventcount; /* NULL: no shared memory */
    struct moe_metrics *metrics;
    pthread_t thread, listener;
    struct moe_mutex lock;
    pthread_cond_t changed;
    bool quit, silent; /* silent: the test reports */
    bool drained;      /* the server */
    struct moe_ticket tickets[TICKETS_MAX];
    size_t count, finished;
    uint64_t lost_slots;
    unsigned lost_count;
};

static void on_run(void *ctx, const struct moe_ticket *ticket)
{
    struct node *n = ctx;
    moe_mutex_lock(&n->lock);
    if (n->count < TICKETS_MAX)
        n->tickets[n->count++] = *ticket;
    pthread_cond_broadcast(&n->changed);
    moe_mutex_unlock(&n->lock);
}

static void on_lost(void *ctx, uint64_t epoch, uint64_t slots, struct moe_status why)
{
    struct node *n = ctx;
    print_message("  slot %u, epoch %llu, lost %llx: %s\n", n->slot, (unsigned long long)epoch,
                  (unsigned long long)slots, why.text);
    moe_mutex_lock(&n->lock);
    n->lost_slots |= slots;
    n->lost_count++;
    pthread_cond_broadcast(&n->changed);
    moe_mutex_unlock(&n->lock);
}

static unsigned times_lost(struct node *n)
{
    moe_mutex_lock(&n->lock);
    unsigned count = n->lost_count;
    moe_mutex_unlock(&n->lock);
    return count;
}

static void *report_tickets(void *arg)
{
    struct node *n = arg;
    const struct moe_status fine = moe_ok();
    moe_mutex_lock(&n->lock);
    while (!n->quit) {
        if (n->silent || n->finished == n->count) {
            moe_wait(&n->changed, &n->lock);
            continue;
        }
        struct moe_ticket t = n->tickets[n->finished++];
        moe_mutex_unlock(&n->lock);
        if (step_ns > 0)
            moe_sleep_until(moe_clock_ns() + step_ns);
        moe_peers_finished(n->peers, &t, &fine);
        moe_mutex_lock(&n->lock);
    }
    moe_mutex_unlock(&n->lock);
    return NULL;
}

static bool is_over(struct node *n)
{
    moe_mutex_lock(&n->lock);
    bool over = n->quit;
    moe_mutex_unlock(&n->lock);
    return over;
}

/* The engine's thread between tickets. */
static void *listen_for_mail(void *arg)
{
    struct node *n = arg;
    while (!is_over(n)) {
        uint32_t seen = moe_eventcount_prepare(n->eventcount);
        moe_peers_listen(n->peers);
        if (!is_over(n))
            moe_eventcount_wait(n->eventcount, seen, MOE_NEVER);
    }
    return NULL;
}

static void start_node(struct node *n, uint32_t slot)
{
    *n = (struct node){.slot = slot, .incarnation = 1000 + slot};
    moe_mutex_init(&n->lock);
    pthread_cond_init(&n->changed, NULL);
    assert_ok(moe_rpc_client_create(&n->client));
    if (way == SHARED || (way == BOTH && slot != 1))
        assert_ok(moe_eventcount_create(&n->eventcount));
    const struct moe_metric_desc ticket = {.name = "ticket_seconds"};
    struct moe_histogram *ticket_seconds;
    assert_ok(moe_metrics_create(&n->metrics));
    assert_ok(moe_metrics_add_histogram(n->metrics, &ticket, moe_metrics_seconds_bounds,
                                        MOE_METRIC_SECONDS_BOUNDS, &ticket_seconds));
    const struct moe_peers_config peers = {
        .ticket_seconds = ticket_seconds,
        .eventcount = n->eventcount,
        .client = n->client,
        .incarnation = n->incarnation,
        .run = on_run,
        .lost = on_lost,
        .ctx = n,
    };
    assert_ok(moe_peers_create(&peers, &n->peers));
    struct moe_rpc_method method;
    moe_peers_method(n->peers, &method);
    const struct moe_rpc_server_config server = {
        .listen = "127.0.0.1:0",
        .shards = 1,
        .max_message_bytes = 1 << 20,
        .max_reading_bytes = 1 << 20,
        .max_waiting_reads = 4,
        .max_concurrent_streams = 16,
        .spin_ns = way == BOTH ? MOE_NS_PER_MS / 10 : 0,
        .methods = &method,
        .method_count = 1,
    };
    assert_ok(moe_rpc_server_start(&server, &n->server));
    (void)snprintf(n->endpoint, sizeof n->endpoint, "127.0.0.1:%u", moe_rpc_server_port(n->server));
    assert_int_equal(pthread_create(&n->thread, NULL, report_tickets, n), 0);
    if (n->eventcount != NULL)
        assert_int_equal(pthread_create(&n->listener, NULL, listen_for_mail, n), 0);
}

static void stop_node(struct node *n)
{
    moe_mutex_lock(&n->lock);
    n->quit = true;
    pthread_cond_broadcast(&n->changed);
    moe_mutex_unlock(&n->lock);
    pthread_join(n->thread, NULL);
    if (n->eventcount != NULL) {
        moe_eventcount_notify(n->eventcount);
        pthread_join(n->listener, NULL);
    }
    moe_peers_stop(n->peers);
    if (!n->drained)
        moe_rpc_server_drain(n->server, moe_clock_ns() + 100 * MOE_NS_PER_MS);
    moe_rpc_server_stop(n->server);
    moe_peers_destroy(n->peers);
    moe_rpc_client_destroy(n->client);
    moe_eventcount_destroy(n->eventcount);
    moe_metrics_destroy(n->metrics);
    pthread_cond_destroy(&n->changed);
    moe_mutex_destroy(&n->lock);
}

static void expect(struct node *nodes, uint32_t self, uint64_t epoch)
{
    struct moe_peers_view view = {
        .epoch = epoch, .live = (1u << SLOTS) - 1, .slot = self, .max_bucket = 16};
    memcpy(view.secret, secret_text, sizeof view.secret);
    for (uint32_t s = 0; s < SLOTS; s++)
        view.members[s] = (struct moe_peer){nodes[s].incarnation, nodes[s].endpoint, false};
    assert_ok(moe_peers_expect(nodes[self].peers, &view));
}

static void start_group(struct node *nodes)
{
    for (uint32_t s = 0; s < SLOTS; s++)
        start_node(&nodes[s], s);
    for (uint32_t s = 0; s < SLOTS; s++)
        expect(nodes, s, EPOCH);
}

static void stop_group(struct node *nodes)
{
    for (uint32_t s = 0; s < SLOTS; s++)
        stop_node(&nodes[s]);
}

/* Waits until `*value` >= at_least, under the node's lock; a hang fails the test. */
static void await(struct node *n, const size_t *value, size_t at_least)
{
    uint64_t deadline = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS;
    for (;;) {
        moe_mutex_lock(&n->lock);
        bool there = *value >= at_least;
        moe_mutex_unlock(&n->lock);
        if (there)
            return;
        if (moe_clock_ns() > deadline)
            fail_msg("slot %u waited too long", n->slot);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

static void await_lost(struct node *n, uint64_t slots)
{
    uint64_t deadline = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS;
    for (;;) {
        moe_mutex_lock(&n->lock);
        bool there = n->lost_count > 0 && n->lost_slots == slots;
        moe_mutex_unlock(&n->lock);
        if (there)
            return;
        if (moe_clock_ns() > deadline)
            fail_msg("slot %u never lost %llx", n->slot, (unsigned long long)slots);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

/* ----------------------------------------------------------------------- tickets */

static void announce_at_random(struct node *nodes, uint64_t announced[SLOTS])
{
    for (int i = 0; i < 300; i++) {
        uint32_t slot = random_below(SLOTS);
        uint32_t tokens = 1 + random_below(20);
        announced[slot] += tokens;
        moe_peers_announce(nodes[slot].peers, 2, MOE_STEP_FORWARD, MOE_DTYPE_F32, tokens);
        if (one_in(8))
            nanosleep(&(struct timespec){0, 200000}, NULL);
    }
}

/* The sum of the buckets is the number of tokens that the tickets carry for one slot. */
static uint64_t covered(const struct node *n, size_t tickets)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < tickets; i++)
        sum += n->tickets[i].bucket;
    return sum;
}

static void all_slots_get_the_same_tickets_for_all_announced_work(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    uint64_t announced[SLOTS] = {0};
    seed_random();
    start_group(nodes);
    /* The members' view is committed before the sequencer's. */
    for (uint32_t s = SLOTS; s-- > 0;)
        assert_ok(moe_peers_start(nodes[s].peers));
    announce_at_random(nodes, announced);

    uint64_t most = 0;
    for (uint32_t s = 0; s < SLOTS; s++)
        most = announced[s] > most ? announced[s] : most;
    size_t count = 0;
    while (covered(&nodes[0], count) < most)
        await(&nodes[0], &nodes[0].count, ++count);
    for (uint32_t s = 1; s < SLOTS; s++)
        await(&nodes[s], &nodes[s].count, count);
    print_message("%zu tickets for %llu tokens\n", count, (unsigned long long)most);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(nodes[0].tickets[i].seq, i + 1);
        assert_int_equal(nodes[0].tickets[i].epoch, EPOCH);
        assert_int_equal(nodes[0].tickets[i].layer, 2);
        for (uint32_t s = 1; s < SLOTS; s++)
            assert_memory_equal(&nodes[s].tickets[i], &nodes[0].tickets[i],
                                sizeof nodes[0].tickets[i]);
    }
    for (uint32_t s = 0; s < SLOTS; s++)
        assert_int_equal(times_lost(&nodes[s]), 0);
    for (uint32_t s = 0; s < SLOTS; s++) /* each ticket and report notified its reader */
        if (nodes[s].eventcount != NULL)
            assert_true(moe_eventcount_prepare(nodes[s].eventcount) >= count);
    stop_group(nodes);
}

/* The value behind `name` in a node's metrics. */
static double metric(const struct node *n, const char *name)
{
    char *text;
    size_t length;
    assert_ok(moe_metrics_render(n->metrics, &text, &length));
    const char *at = strstr(text, name);
    assert_non_null(at);
    double value = strtod(at + strlen(name), NULL);
    free(text);
    return value;
}

static void the_sequencer_measures_the_way_of_tickets_without_the_steps(void **state)
{
    (void)state;
    enum { TICKETS = 5 };
    static struct node nodes[SLOTS];
    step_ns = 50 * MOE_NS_PER_MS;
    start_group(nodes);
    for (uint32_t s = SLOTS; s-- > 0;)
        assert_ok(moe_peers_start(nodes[s].peers));
    for (size_t i = 1; i <= TICKETS; i++) { /* one after the other: none waits for a step */
        moe_peers_announce(nodes[0].peers, 2, MOE_STEP_FORWARD, MOE_DTYPE_F32, 1);
        for (uint32_t s = 0; s < SLOTS; s++)
            await(&nodes[s], &nodes[s].finished, i);
        moe_sleep_until(moe_clock_ns() + 2 * step_ns);
    }
    uint64_t deadline = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS;
    while (metric(&nodes[0], "ticket_seconds_count ") < TICKETS * (SLOTS - 1) &&
           moe_clock_ns() < deadline)
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    double count = metric(&nodes[0], "ticket_seconds_count ");
    double sum = metric(&nodes[0], "ticket_seconds_sum ");
    double fast = metric(&nodes[0], "ticket_seconds_bucket{le=\"0.025\"} ");
    print_message("  %.0f answers, %.0f in less than half of a step\n", count, fast);
    assert_int_equal((int)count, TICKETS * (SLOTS - 1));
    assert_true(sum > 0 && fast > 0); /* with the step, none is; on a busy machine, not all are */
    assert_int_equal((int)metric(&nodes[1], "ticket_seconds_count "), 0);
    stop_group(nodes);
    step_ns = 0;
}

static void no_ticket_comes_before_all_have_joined(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    start_group(nodes);
    assert_ok(moe_peers_start(nodes[0].peers));
    assert_ok(moe_peers_start(nodes[1].peers));
    moe_peers_announce(nodes[0].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_BF16, 3);
    moe_peers_announce(nodes[2].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_BF16, 9);
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    assert_int_equal(nodes[0].count, 0);
    assert_ok(moe_peers_start(nodes[2].peers));
    for (uint32_t s = 0; s < SLOTS; s++)
        await(&nodes[s], &nodes[s].count, 1);
    assert_int_equal(nodes[0].tickets[0].dtype, MOE_DTYPE_BF16);
    stop_group(nodes);
}

static void a_new_view_begins_at_the_first_ticket(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    start_group(nodes);
    for (uint64_t epoch = EPOCH + 1; epoch < EPOCH + 4; epoch++) {
        for (uint32_t s = 0; s < SLOTS; s++)
            expect(nodes, s, epoch);
        for (uint32_t s = 0; s < SLOTS; s++)
            assert_ok(moe_peers_start(nodes[s].peers));
        size_t before = nodes[1].count;
        moe_peers_announce(nodes[1].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_F32, 4);
        for (uint32_t s = 0; s < SLOTS; s++)
            await(&nodes[s], &nodes[s].count, before + 1);
        assert_int_equal(nodes[2].tickets[before].epoch, epoch);
        assert_int_equal(nodes[2].tickets[before].seq, 1);
        for (uint32_t s = 0; s < SLOTS; s++)
            moe_peers_stop(nodes[s].peers);
    }
    stop_group(nodes);
}

/* ------------------------------------------------------------------------ losses */

/* A view in which slot `at` has seen a ticket. */
static void start_view(struct node nodes[SLOTS], uint32_t at)
{
    start_group(nodes);
    for (uint32_t s = 0; s < SLOTS; s++)
        assert_ok(moe_peers_start(nodes[s].peers));
    moe_peers_announce(nodes[1].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_F32, 4);
    await(&nodes[at], &nodes[at].count, 1);
}

static void a_member_that_goes_away_is_reported_by_the_sequencer(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    start_view(nodes, 1);
    moe_peers_stop(nodes[1].peers);
    await_lost(&nodes[0], 1 << 1);
    assert_int_equal(nodes[1].lost_count, 0); /* it left by itself */
    stop_group(nodes);
}

/* It reports itself whom it misses, if any: who names it would accuse the wrong one. */
static void a_sequencer_that_leaves_the_view_is_not_missed(void **state)
{
    (void)state;
    enum { RUNS = 10, NOTICES = 50 };
    static struct node nodes[SLOTS];
    for (int run = 0; run < RUNS; run++) {
        start_view(nodes, 2);
        for (int i = 0; i < NOTICES; i++) /* some are on their way when it leaves */
            moe_peers_announce(nodes[1].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_F32, 1);
        moe_peers_stop(nodes[0].peers);
        await_lost(&nodes[1], 0);
        await_lost(&nodes[2], 0);
        stop_group(nodes);
    }
}

static void a_sequencer_whose_stream_breaks_is_reported_by_all_members(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    start_view(nodes, 2);
    nodes[0].drained = true;
    moe_rpc_server_drain(nodes[0].server, moe_clock_ns());
    await_lost(&nodes[1], 1 << 0);
    await_lost(&nodes[2], 1 << 0);
    stop_group(nodes);
}

static void a_missing_sequencer_is_reported(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    start_group(nodes);
    struct moe_peers_view view = {.epoch = EPOCH + 1, .live = 0x3, .slot = 1, .max_bucket = 16};
    view.members[0] = (struct moe_peer){1, "127.0.0.1:1", false}; /* no server listens */
    view.members[1] = (struct moe_peer){nodes[1].incarnation, nodes[1].endpoint, false};
    assert_ok(moe_peers_expect(nodes[1].peers, &view));
    assert_ok(moe_peers_start(nodes[1].peers));
    await_lost(&nodes[1], 1 << 0);
    stop_group(nodes);
}

/* So the connection is there when the view is committed. */
static void a_member_connects_while_the_view_forms(void **state)
{
    (void)state;
    static struct node member;
    char endpoint[32];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, length), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &length), 0);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", ntohs(address.sin_port));
    start_node(&member, 1);
    struct moe_peers_view view = {.epoch = EPOCH, .live = 0x3, .slot = 1, .max_bucket = 16};
    view.members[0] = (struct moe_peer){1, endpoint, false};
    view.members[1] = (struct moe_peer){member.incarnation, member.endpoint, false};
    assert_ok(moe_peers_expect(member.peers, &view));
    struct pollfd waits = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&waits, 1, WAIT_MS), 1);
    moe_peers_stop(member.peers);
    stop_node(&member);
    close(listener);
}

static void a_step_that_failed_on_a_member_stops_the_tickets(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    start_group(nodes);
    for (uint32_t s = 0; s < SLOTS; s++)
        assert_ok(moe_peers_start(nodes[s].peers));
    moe_mutex_lock(&nodes[2].lock);
    nodes[2].silent = true;
    moe_mutex_unlock(&nodes[2].lock);
    moe_peers_announce(nodes[0].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_F32, 4);
    await(&nodes[2], &nodes[2].count, 1);
    struct moe_status failure =
        moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot 1 did not answer");
    moe_peers_finished(nodes[2].peers, &nodes[2].tickets[0], &failure);
    await_lost(&nodes[0], 0);
    moe_peers_announce(nodes[0].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_F32, 4);
    nanosleep(&(struct timespec){0, 20000000}, NULL);
    assert_int_equal(nodes[0].count, 1);
    stop_group(nodes);
}

/* -------------------------------------------------------- a caller without manners */

struct caller {
    struct moe_mutex lock;
    pthread_cond_t changed;
    bool closed;
    struct moe_status status;
};

static void caller_message(void *ctx, struct moe_rpc_msg *m)
{
    (void)ctx;
    moe_rpc_msg_free(m);
}

static void caller_closed(void *ctx, struct moe_status status)
{
    struct caller *c = ctx;
    moe_mutex_lock(&c->lock);
    c->closed = true;
    c->status = status;
    pthread_cond_signal(&c->changed);
    moe_mutex_unlock(&c->lock);
}

/* Sends one message on a separate stream to slot 0, and returns the stream's status. */
static struct moe_status say(struct node *nodes, const uint8_t *bytes, size_t length)
{
    struct caller c = {.closed = false};
    moe_mutex_init(&c.lock);
    pthread_cond_init(&c.changed, NULL);
    struct moe_rpc_channel *channel;
    struct moe_rpc_stream *stream;
    const struct moe_rpc_channel_config config = {.target = nodes[0].endpoint};
    const struct moe_rpc_call_options options = {
        .deadline_ns = moe_clock_ns() + WAIT_MS * MOE_NS_PER_MS, .wait_for_ready = true};
    const struct moe_rpc_stream_events events = {caller_message, caller_closed};
    assert_ok(moe_rpc_channel_open(nodes[1].client, &config, &channel));
    assert_ok(moe_rpc_stream_open(channel, "/moe.v1.WorkerService/Sequence", &options, &events, &c,
                                  &stream));
    const struct moe_rpc_out out = {.head = bytes, .head_length = length};
    assert_ok(moe_rpc_stream_send(stream, &out));
    moe_mutex_lock(&c.lock);
    while (!c.closed)
        moe_wait(&c.changed, &c.lock);
    moe_mutex_unlock(&c.lock);
    moe_rpc_stream_free(stream);
    moe_rpc_channel_close(channel);
    pthread_cond_destroy(&c.changed);
    moe_mutex_destroy(&c.lock);
    print_message("  %s/%s: %s\n", moe_code_name(c.status.code), moe_reason_name(c.status.reason),
                  c.status.text);
    return c.status;
}

static struct moe_status say_secret(struct node *nodes, uint32_t slot, uint64_t epoch,
                                    uint64_t incarnation, const char *secret, size_t length)
{
    Moe__V1__SequenceHello hello = MOE__V1__SEQUENCE_HELLO__INIT;
    hello.slot = slot;
    hello.epoch = epoch;
    hello.incarnation = incarnation;
    Moe__V1__SequenceRequest q = MOE__V1__SEQUENCE_REQUEST__INIT;
    q.body_case = MOE__V1__SEQUENCE_REQUEST__BODY_HELLO;
    q.hello = &hello;
    hello.secret.data = (uint8_t *)(uintptr_t)secret;
    hello.secret.len = length;
    uint8_t bytes[128];
    return say(nodes, bytes, moe__v1__sequence_request__pack(&q, bytes));
}

static struct moe_status say_hello(struct node *nodes, uint32_t slot, uint64_t epoch,
                                   uint64_t incarnation)
{
    return say_secret(nodes, slot, epoch, incarnation, secret_text, 16);
}

/* Before the peers themselves join: the first hello would get the slot. */
static void a_caller_without_the_secret_of_the_epoch_is_refused(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    static const struct {
        const char *secret;
        size_t length;
    } wrong[] = {
        {"", 0}, {"secret of epoch", 15}, {"Secret of epoch5", 16}, {"secret of epoch4", 16}};
    start_group(nodes);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(
            say_secret(nodes, 1, EPOCH, nodes[1].incarnation, wrong[i].secret, wrong[i].length)
                .code,
            MOE_PERMISSION_DENIED);
    for (uint32_t s = 0; s < SLOTS; s++)
        assert_ok(moe_peers_start(nodes[s].peers));
    moe_peers_announce(nodes[1].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_F32, 1);
    await(&nodes[2], &nodes[2].count, 1);
    assert_int_equal(nodes[0].lost_count, 0);
    stop_group(nodes);
}

static void a_caller_of_another_epoch_or_process_is_refused(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    start_group(nodes);
    struct moe_status st = say_hello(nodes, 1, EPOCH - 1, nodes[1].incarnation);
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_int_equal(st.reason, MOE_REASON_STALE_EPOCH);
    st = say_hello(nodes, 1, EPOCH + 1, nodes[1].incarnation);
    assert_int_equal(st.reason, MOE_REASON_STALE_EPOCH);
    st = say_hello(nodes, 1, EPOCH, nodes[1].incarnation + 1);
    assert_int_equal(st.reason, MOE_REASON_STALE_EPOCH);
    st = say_hello(nodes, 0, EPOCH, nodes[0].incarnation); /* the sequencer itself */
    assert_int_equal(st.reason, MOE_REASON_STALE_EPOCH);
    st = say_hello(nodes, 77, EPOCH, nodes[1].incarnation);
    assert_int_equal(st.reason, MOE_REASON_STALE_EPOCH);
    /* No node has lost the view. */
    for (uint32_t s = 0; s < SLOTS; s++)
        assert_ok(moe_peers_start(nodes[s].peers));
    moe_peers_announce(nodes[1].peers, 0, MOE_STEP_FORWARD, MOE_DTYPE_F32, 1);
    await(&nodes[2], &nodes[2].count, 1);
    assert_int_equal(nodes[0].lost_count, 0);
    moe_peers_stop(nodes[0].peers);
    st = say_hello(nodes, 1, EPOCH, nodes[1].incarnation); /* the view is over */
    assert_int_equal(st.reason, MOE_REASON_STALE_EPOCH);
    stop_group(nodes);
}

static void a_malformed_message_ends_its_stream_only(void **state)
{
    (void)state;
    static struct node nodes[SLOTS];
    static const uint8_t garbage[] = {0xff, 0xff, 0xff, 0xff, 0x01, 0x02};
    static const uint8_t long_one[4096];
    start_group(nodes);
    struct moe_status st = say(nodes, garbage, sizeof garbage);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = say(nodes, long_one, sizeof long_one);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    st = say(nodes, garbage, 0); /* an empty message is no hello */
    assert_int_equal(st.code, MOE_FAILED_PRECONDITION);
    assert_int_equal(nodes[0].lost_count, 0);
    stop_group(nodes);
}

static int set_way(void **state)
{
    way = *(const enum way *)*state;
    print_message("  over %s\n", way == STREAMS  ? "streams"
                                 : way == SHARED ? "shared memory"
                                                 : "both");
    return 0;
}

#define EACH_WAY(test)                                                                             \
    cmocka_unit_test_prestate_setup_teardown(test, set_way, NULL, &ways[0]),                       \
        cmocka_unit_test_prestate_setup_teardown(test, set_way, NULL, &ways[1]),                   \
        cmocka_unit_test_prestate_setup_teardown(test, set_way, NULL, &ways[2])

int main(void)
{
    static enum way ways[] = {STREAMS, SHARED, BOTH};
    const struct CMUnitTest tests[] = {
        EACH_WAY(all_slots_get_the_same_tickets_for_all_announced_work),
        EACH_WAY(the_sequencer_measures_the_way_of_tickets_without_the_steps),
        EACH_WAY(no_ticket_comes_before_all_have_joined),
        EACH_WAY(a_new_view_begins_at_the_first_ticket),
        EACH_WAY(a_member_that_goes_away_is_reported_by_the_sequencer),
        EACH_WAY(a_sequencer_that_leaves_the_view_is_not_missed),
        EACH_WAY(a_sequencer_whose_stream_breaks_is_reported_by_all_members),
        EACH_WAY(a_missing_sequencer_is_reported),
        EACH_WAY(a_member_connects_while_the_view_forms),
        EACH_WAY(a_step_that_failed_on_a_member_stops_the_tickets),
        EACH_WAY(a_caller_without_the_secret_of_the_epoch_is_refused),
        EACH_WAY(a_caller_of_another_epoch_or_process_is_refused),
        EACH_WAY(a_malformed_message_ends_its_stream_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
