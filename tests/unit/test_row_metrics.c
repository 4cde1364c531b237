/* SPDX-License-Identifier: Apache-2.0 */
/* The load of experts and the rows between workers as series: exact numbers, a window that moves,
 * and a number of series that does not grow with the experts. */
#include "engine/row_metrics.h"
#include "support/check.h"

#include <stdio.h>
#include <stdlib.h>

enum { EXPERTS = 300 };

/* Rows of the first have the width of its latent space. */
static const struct moe_layer_spec third = {.layer = 3,
                                            .experts = EXPERTS,
                                            .hidden = 32,
                                            .latent = 16},
                                   fifth = {.layer = 5, .experts = 4, .hidden = 8};
static const struct moe_layer_spec *const specs[] = {&third, &fifth};

static struct moe_metrics *registry;
static struct moe_row_metrics *m;

static int create(void **state)
{
    (void)state;
    assert_ok(moe_metrics_create(&registry));
    assert_ok(moe_row_metrics_create(registry, "toy", specs, 2, NULL, &m));
    return 0;
}

static int destroy(void **state)
{
    (void)state;
    moe_row_metrics_destroy(m);
    moe_metrics_destroy(registry);
    return 0;
}

static uint64_t rows_of(uint32_t layer, uint32_t expert)
{
    static uint64_t rows[MOE_MAX_EXPERTS];
    assert_int_equal(moe_row_metrics_read(m, layer, rows), layer == 3 ? EXPERTS : 4);
    return rows[expert];
}

static char *render(void)
{
    char *text;
    size_t length;
    assert_ok(moe_metrics_render(registry, &text, &length));
    return text;
}

static void has(const char *line)
{
    char *text = render();
    if (strstr(text, line) == NULL)
        fail_msg("no line %s in\n%s", line, text);
    free(text);
}

static void lacks(const char *part)
{
    char *text = render();
    if (strstr(text, part) != NULL)
        fail_msg("%s is in\n%s", part, text);
    free(text);
}

static unsigned count_series(void)
{
    char *text = render();
    unsigned lines = 0;
    for (const char *at = text; *at != '\0'; at = strchr(at, '\n') + 1)
        lines += *at != '#';
    free(text);
    return lines;
}

/* A step of layer 5 that gives `rows` to its experts, of which this slot has four. */
static void step(const uint32_t rows[4])
{
    struct moe_step_counts n = {.by_expert = true, .local_experts = 4};
    uint64_t sum = 0;
    for (int e = 0; e < 4; e++)
        sum += n.expert_rows[e] = rows[e];
    moe_row_metrics_add(m, 1, MOE_DTYPE_F32, sum, &n);
}

static void a_backend_without_counts_has_the_sum_of_rows_only(void **state)
{
    (void)state;
    const struct moe_step_counts none = {0};
    moe_row_metrics_add(m, 0, MOE_DTYPE_BF16, 12, &none);
    moe_row_metrics_add(m, 0, MOE_DTYPE_BF16, 3, &none);
    has("moe_expert_rows_total{model=\"toy\",layer=\"3\"} 15\n");
    has("moe_expert_rows_total{model=\"toy\",layer=\"5\"} 0\n");
    lacks("balancedness");
    lacks("moe_expert_top");
    lacks("moe_peer");
    assert_int_equal(count_series(), 2);
}

static void experts_come_in_the_order_of_their_rows(void **state)
{
    (void)state;
    step((uint32_t[]){1, 0, 6, 1});
    step((uint32_t[]){1, 0, 2, 1});
    has("moe_expert_rows_total{model=\"toy\",layer=\"5\"} 12\n");
    has("moe_expert_mean_rows{model=\"toy\",layer=\"5\"} 3\n");
    has("moe_expert_balancedness{model=\"toy\",layer=\"5\"} 0.375\n");
    has("moe_expert_top_rows{model=\"toy\",layer=\"5\",rank=\"1\"} 8\n");
    has("moe_expert_top_id{model=\"toy\",layer=\"5\",rank=\"1\"} 2\n");
    has("moe_expert_top_rows{model=\"toy\",layer=\"5\",rank=\"2\"} 2\n"); /* of equal ones the lower
                                                                             id */
    has("moe_expert_top_id{model=\"toy\",layer=\"5\",rank=\"2\"} 0\n");
    has("moe_expert_top_id{model=\"toy\",layer=\"5\",rank=\"3\"} 3\n");
    has("moe_expert_top_rows{model=\"toy\",layer=\"5\",rank=\"4\"} 0\n");
    has("moe_expert_top_id{model=\"toy\",layer=\"5\",rank=\"4\"} -1\n"); /* the fourth had no row */
    lacks("rank=\"5\"");
    lacks("balancedness{model=\"toy\",layer=\"3\"}");
    assert_int_equal(rows_of(5, 2), 8); /* of each expert, not only the first eight */
    assert_int_equal(rows_of(5, 1), 0);
    assert_int_equal(rows_of(3, EXPERTS - 1), 0);
    assert_int_equal(moe_row_metrics_read(m, 4, (uint64_t[MOE_MAX_EXPERTS]){0}), 0);
    assert_int_equal(moe_row_metrics_read(NULL, 3, (uint64_t[MOE_MAX_EXPERTS]){0}), 0);
}

static void figures_cover_one_to_two_windows(void **state)
{
    (void)state;
    uint64_t now = moe_clock_ns();
    step((uint32_t[]){9, 0, 0, 0});
    moe_row_metrics_show(m, now);
    has("moe_expert_top_rows{model=\"toy\",layer=\"5\",rank=\"1\"} 9\n");
    moe_row_metrics_show(m, now += MOE_ROW_WINDOW_NS); /* the first window ends */
    step((uint32_t[]){0, 5, 0, 0});
    has("moe_expert_top_rows{model=\"toy\",layer=\"5\",rank=\"1\"} 9\n"); /* still in sight */
    moe_row_metrics_show(m, now += MOE_ROW_WINDOW_NS);                    /* the second one ends */
    has("moe_expert_top_id{model=\"toy\",layer=\"5\",rank=\"1\"} 1\n");
    has("moe_expert_top_rows{model=\"toy\",layer=\"5\",rank=\"1\"} 5\n");
    has("moe_expert_mean_rows{model=\"toy\",layer=\"5\"} 1.25\n");
    moe_row_metrics_show(m, now + MOE_ROW_WINDOW_NS);
    has("moe_expert_top_rows{model=\"toy\",layer=\"5\",rank=\"1\"} 0\n");
    has("moe_expert_balancedness{model=\"toy\",layer=\"5\"} 1\n"); /* nothing is uneven */
    has("moe_expert_rows_total{model=\"toy\",layer=\"5\"} 14\n");
}

static void many_experts_do_not_make_many_series(void **state)
{
    (void)state;
    struct moe_step_counts n = {.by_expert = true, .local_experts = EXPERTS};
    uint64_t sum = 0;
    for (uint32_t e = 0; e < EXPERTS; e++)
        sum += n.expert_rows[e] = 1 + e * 7 % EXPERTS; /* all different */
    moe_row_metrics_add(m, 0, MOE_DTYPE_F32, sum, &n);
    assert_int_equal(count_series(), 2 + 2 + 2 * MOE_ROW_TOP);
    has("moe_expert_top_rows{model=\"toy\",layer=\"3\",rank=\"1\"} 300\n");
    has("moe_expert_top_rows{model=\"toy\",layer=\"3\",rank=\"8\"} 293\n");
    has("moe_expert_mean_rows{model=\"toy\",layer=\"3\"} 150.5\n");
    lacks("rank=\"9\"");
}

static void rows_to_peers_are_counted_with_their_bytes(void **state)
{
    (void)state;
    struct moe_step_counts n = {.to_slots = true, .slots = 3, .sent_rows = {0, 4, 1}};
    moe_row_metrics_add(m, 0, MOE_DTYPE_BF16, 0, &n);
    moe_row_metrics_add(m, 1, MOE_DTYPE_F32, 0, &n);
    has("# TYPE moe_peer_rows_total counter\n");
    has("moe_peer_rows_total{peer=\"0\"} 0\n");
    has("moe_peer_rows_total{peer=\"1\"} 8\n");
    has("moe_peer_bytes_total{peer=\"1\"} 256\n"); /* 4 * 16 * 2 + 4 * 8 * 4 */
    has("moe_peer_bytes_total{peer=\"2\"} 64\n");
    lacks("peer=\"3\"");
}

static void the_series_of_a_model_go_with_it(void **state)
{
    (void)state;
    struct moe_row_metrics *added;
    struct moe_step_counts n = {.by_expert = true,
                                .local_experts = 4,
                                .expert_rows = {3, 1},
                                .to_slots = true,
                                .slots = 2,
                                .sent_rows = {0, 5}};
    has("moe_expert_rows_total{model=\"toy\",layer=\"5\"} 0\n");
    const unsigned before = count_series();
    assert_ok(moe_row_metrics_create(registry, "toys", specs, 2, m, &added));
    moe_row_metrics_add(added, 1, MOE_DTYPE_F32, 4, &n);
    has("moe_expert_rows_total{model=\"toys\",layer=\"5\"} 4\n");
    has("moe_expert_top_rows{model=\"toys\",layer=\"5\",rank=\"1\"} 3\n");
    has("moe_peer_rows_total{peer=\"1\"} 5\n"); /* of all models */
    moe_row_metrics_destroy(added);
    lacks("toys");
    has("moe_peer_rows_total{peer=\"1\"} 5\n");
    has("moe_expert_rows_total{model=\"toy\",layer=\"5\"} 0\n");
    assert_int_equal(count_series(), before + 4); /* rows and bytes to two slots */
    assert_ok(moe_row_metrics_create(registry, "toys", specs, 2, m, &added)); /* loaded again */
    has("moe_expert_rows_total{model=\"toys\",layer=\"5\"} 0\n");
    moe_row_metrics_destroy(added);
}

static void without_a_registry_nothing_is_counted(void **state)
{
    (void)state;
    struct moe_row_metrics *none;
    const struct moe_step_counts n = {0};
    assert_ok(moe_row_metrics_create(NULL, "toy", specs, 2, NULL, &none));
    assert_null(none);
    moe_row_metrics_add(none, 0, MOE_DTYPE_F32, 1, &n);
    moe_row_metrics_destroy(none);
}

#define ROW_TEST(f) cmocka_unit_test_setup_teardown(f, create, destroy)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ROW_TEST(a_backend_without_counts_has_the_sum_of_rows_only),
        ROW_TEST(experts_come_in_the_order_of_their_rows),
        ROW_TEST(figures_cover_one_to_two_windows),
        ROW_TEST(many_experts_do_not_make_many_series),
        ROW_TEST(rows_to_peers_are_counted_with_their_bytes),
        ROW_TEST(the_series_of_a_model_go_with_it),
        cmocka_unit_test(without_a_registry_nothing_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
