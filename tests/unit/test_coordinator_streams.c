/* SPDX-License-Identifier: Apache-2.0 */
/* Streams that break the rules of a coordinator, over gRPC: silent ones, too many, rubbish. */
#include "base/clock.h"
#include "coordinator_workers.h"
#include "support/check.h"
#include "support/random.h"

#include <stdio.h>
#include <string.h>

static size_t rubbish(const struct worker *w, uint8_t *bytes)
{
    size_t length = 0;
    if (random_below(3) == 0) {
        length = pack_register(w, &honest, bytes);
    } else {
        uint32_t parts = random_below(4);
        bytes[0] = (uint8_t)(random_below(12) << 3 | 2);
        length = 2;
        for (uint32_t i = 0; i < parts; i++) {
            bytes[length++] = (uint8_t)(random_below(5) << 3 | (random_below(4) == 0 ? 2 : 0));
            bytes[length++] = (uint8_t)random_below(random_below(2) == 0 ? 4 : 256);
        }
        bytes[1] = (uint8_t)(length - 2);
    }
    for (uint32_t i = random_below(4); i > 0; i--)
        bytes[random_below((uint32_t)length)] ^= (uint8_t)(1 + random_below(255));
    return random_below(8) == 0 ? random_below((uint32_t)length) : length;
}

static void a_silent_stream_ends_soon(void **unused)
{
    (void)unused;
    start_coordinator(SLOTS, 2000);
    struct worker w = {.id = 1, .incarnation = 1};
    uint64_t began = moe_clock_ns();
    open_stream(&w);
    assert_ptr_equal(queue_pop(w.inbox, time_limit()), &the_end);
    print_message("  after %.1f s\n", (double)(moe_clock_ns() - began) / (double)MOE_NS_PER_S);
    assert_int_equal(w.end.code, MOE_DEADLINE_EXCEEDED);
    assert_true(moe_clock_ns() - began < 5 * MOE_NS_PER_S);
    free_stream(&w);
    quit_coordinator();
}

/* Takes `channel` and gives a new one with its own connection. */
static struct moe_rpc_channel *swap_channel(struct moe_rpc_channel *with)
{
    struct moe_rpc_channel *before = channel;
    channel = with;
    return before;
}

static void silent_streams_keep_no_worker_out(void **unused)
{
    (void)unused;
    enum { CONNECTIONS = 45, EACH = 7 }; /* more than there are places */
    static struct worker silent[CONNECTIONS][EACH];
    struct moe_rpc_channel *own = NULL, *channels[CONNECTIONS];
    start_coordinator(SLOTS, 5000);
    struct worker first, second;
    join(&first, 1, 1);
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%u", moe_coordinator_port(coordinator));
    struct moe_rpc_channel_config to = {.target = target, .own_connection = true};
    for (int i = 0; i < CONNECTIONS; i++) {
        assert_ok(moe_rpc_channel_open(client, &to, &channels[i]));
        own = swap_channel(channels[i]);
        for (int k = 0; k < EACH; k++) {
            silent[i][k] = (struct worker){.id = 5};
            open_stream(&silent[i][k]);
        }
        (void)swap_channel(own);
    }
    uint64_t began = moe_clock_ns();
    join(&second, 2, 1);
    print_message("  joined after %.0f ms\n", (double)(moe_clock_ns() - began) / 1e6);
    unsigned replaced = 0, too_late = 0;
    for (int i = 0; i < CONNECTIONS; i++) {
        for (int k = 0; k < EACH; k++) {
            assert_ptr_equal(queue_pop(silent[i][k].inbox, time_limit()), &the_end);
            replaced += silent[i][k].end.code == MOE_RESOURCE_EXHAUSTED;
            too_late += silent[i][k].end.code == MOE_DEADLINE_EXCEEDED;
            free_stream(&silent[i][k]);
        }
        moe_rpc_channel_close(channels[i]);
    }
    print_message("  %u made room, %u were silent for too long\n", replaced, too_late);
    assert_int_equal(replaced + too_late, CONNECTIONS * EACH);
    Moe__V1__GetStatusResponse *r = get_status();
    assert_true(r->workers[first.slot]->connected && r->workers[second.slot]->connected);
    moe__v1__get_status_response__free_unpacked(r, NULL);
    free_stream(&first);
    free_stream(&second);
    quit_coordinator();
}

static void a_connection_has_eight_sessions(void **unused)
{
    (void)unused;
    enum { STREAMS = 12, MOST = 8 };
    struct worker w[STREAMS];
    unsigned refused = 0;
    start_coordinator(SLOTS, 2000);
    for (int i = 0; i < STREAMS; i++) {
        w[i] = (struct worker){.id = 1, .incarnation = 1};
        open_stream(&w[i]);
    }
    for (int i = 0; i < STREAMS; i++) {
        assert_ptr_equal(queue_pop(w[i].inbox, time_limit()), &the_end);
        refused += w[i].end.code == MOE_RESOURCE_EXHAUSTED;
        free_stream(&w[i]);
    }
    assert_int_equal(refused, STREAMS - MOST);
    quit_coordinator();
}

static void rubbish_costs_the_stream_and_nothing_else(void **unused)
{
    (void)unused;
    enum { ROUNDS = 200, STREAMS = 8, MESSAGES = 4 };
    start_coordinator(SLOTS, 2000);
    size_t ends[MOE_UNAUTHENTICATED + 1] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        struct worker w[STREAMS];
        for (uint32_t i = 0; i < STREAMS; i++) {
            w[i] =
                (struct worker){.id = 10 + random_below(20), .incarnation = 1 + random_below(1000)};
            if (random_below(2) == 0)
                send_register(&w[i], &honest);
            else
                open_stream(&w[i]);
            for (int k = 0; k < MESSAGES; k++) {
                uint8_t bytes[1024];
                send_bytes(&w[i], bytes, rubbish(&w[i], bytes));
            }
            moe_rpc_stream_close_send(w[i].stream);
        }
        for (uint32_t i = 0; i < STREAMS; i++) {
            void *item;
            while ((item = queue_pop(w[i].inbox, time_limit())) != NULL && item != &the_end)
                moe__v1__session_response__free_unpacked(item, NULL);
            assert_ptr_equal(item, &the_end);
            ends[w[i].end.code]++;
            free_stream(&w[i]);
        }
    }
    print_message("  %d messages; streams ended", ROUNDS * STREAMS * MESSAGES);
    for (size_t code = 0; code <= MOE_UNAUTHENTICATED; code++)
        if (ends[code] > 0)
            print_message(" %s %zu", moe_code_name((enum moe_code)code), ends[code]);
    print_message("\n");
    assert_true(ends[MOE_INVALID_ARGUMENT] > 0 && ends[MOE_UNAVAILABLE] == 0);
    moe__v1__get_status_response__free_unpacked(get_status(), NULL);
    check_metrics("moe_session_malformed_total");
    quit_coordinator();

    start_coordinator(SLOTS, 60000); /* the log is intact after the rubbish, too */
    struct worker w[SLOTS];
    bring_up(w);
    shut_down(w);
}

int main(void)
{
    seed_random();
#define SERVICE_TEST(f) cmocka_unit_test_setup_teardown(f, make_directory, remove_directory)
    const struct CMUnitTest tests[] = {
        SERVICE_TEST(a_silent_stream_ends_soon),
        SERVICE_TEST(silent_streams_keep_no_worker_out),
        SERVICE_TEST(a_connection_has_eight_sessions),
        SERVICE_TEST(rubbish_costs_the_stream_and_nothing_else),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
