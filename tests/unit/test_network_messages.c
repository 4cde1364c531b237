/* SPDX-License-Identifier: Apache-2.0 */
/* Messages carry stores out in order, and never outside the window or into its header. */
#include "cpu/network/network_state.h"

#include "support/check.h"
#include "support/random.h"

#include <stdlib.h>
#include <string.h>

struct world {
    struct moe_window_layout layout;
    struct moe_cpu_network *network;
    struct moe_cpu_message *message;
};

static int set_up(void **state)
{
    static struct world w;
    const struct moe_window_shape shape = {
        .slots = 2, .max_tokens = 4, .max_hidden = 64, .max_top_k = 2, .max_experts = 8};
    assert_true(moe_window_layout_of(&shape, &w.layout));
    w.network = calloc(1, sizeof *w.network);
    w.message = calloc(1, sizeof *w.message);
    assert_non_null(w.network);
    assert_non_null(w.message);
    w.network->config.layout = &w.layout;
    w.network->config.window = calloc(1, w.layout.bytes);
    assert_non_null(w.network->config.window);
    *state = &w;
    return 0;
}

static int tear_down(void **state)
{
    struct world *w = *state;
    free(w->network->config.window);
    free(w->network);
    free(w->message);
    return 0;
}

static bool carry_out(const struct world *w)
{
    return moe_cpu_message_carry_out(w->network, w->message->body, w->message->used);
}

static uint64_t flag_at(const struct world *w, size_t offset)
{
    uint64_t flag;
    memcpy(&flag, w->network->config.window + offset, sizeof flag);
    return flag;
}

static void stores_arrive_where_they_belong(void **state)
{
    struct world *w = *state;
    const size_t row = w->layout.rows + 100, flags = w->layout.sent;
    memcpy(moe_cpu_message_store(w->message, row, 5), "12345", 5);
    for (uint32_t i = 0; i < 3; i++)
        assert_true(moe_cpu_message_flag(w->message, flags + 8 * i, 40 + i));
    assert_true(moe_cpu_message_flag(w->message, flags + 64, 50)); /* does not follow */
    memcpy(moe_cpu_message_store(w->message, row, 2), "ab", 2);
    assert_true(carry_out(w));
    assert_memory_equal(w->network->config.window + row, "ab345", 6);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(flag_at(w, flags + 8 * i), 40 + i);
    assert_int_equal(flag_at(w, flags + 64), 50);
}

static void a_full_message_takes_no_more(void **state)
{
    struct world *w = *state;
    size_t stores = 0, flags = 0;
    while (moe_cpu_message_store(w->message, w->layout.rows, 1000) != NULL)
        stores++;
    assert_int_equal(stores, MOE_CPU_MESSAGE_BYTES / 1016);
    while (moe_cpu_message_flag(w->message, w->layout.sent + 8 * flags, 1))
        flags++;
    assert_true(w->message->used <= MOE_CPU_MESSAGE_BYTES);
    assert_null(moe_cpu_message_store(w->message, w->layout.rows, SIZE_MAX - 6));
}

static void stores_outside_the_window_are_refused(void **state)
{
    struct world *w = *state;
    const size_t end = w->layout.bytes;
    const struct {
        size_t offset, bytes;
    } wrong[] = {{0, 8}, {4088, 8}, {end, 8}, {end - 7, 8}, {SIZE_MAX - 3, 8}, {end - 4, 5}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        w->message->used = 0;
        memset(moe_cpu_message_store(w->message, wrong[i].offset, wrong[i].bytes), 0xff,
               wrong[i].bytes);
        assert_false(carry_out(w));
    }
    w->message->used = 0;
    w->message->flags = NULL;
    assert_true(moe_cpu_message_flag(w->message, w->layout.sent + 4, 1)); /* not on a flag */
    assert_false(carry_out(w));
    for (size_t i = 0; i < w->layout.bytes; i++)
        assert_int_equal(w->network->config.window[i], 0);
}

static void any_bytes_are_safe(void **state)
{
    struct world *w = *state;
    seed_random();
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t words = random_below(40);
        for (uint32_t i = 0; i < words; i++)
            w->message->body[i] =
                random_below(3) == 0 ? random_bits() : random_below(2 * (uint32_t)w->layout.bytes);
        (void)moe_cpu_message_carry_out(w->network, w->message->body, random_below(words * 8 + 1));
    }
    for (size_t i = 0; i < w->layout.exchange; i++)
        assert_int_equal(w->network->config.window[i], 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(stores_arrive_where_they_belong),
        TEST(a_full_message_takes_no_more),
        TEST(stores_outside_the_window_are_refused),
        TEST(any_bytes_are_safe),
    };
#undef TEST
    return cmocka_run_group_tests(tests, NULL, NULL);
}
