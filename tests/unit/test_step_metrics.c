/* SPDX-License-Identifier: Apache-2.0 */
/* Times of steps as histograms: the registered series, and the observations of a step. */
#include "engine/step_metrics.h"
#include "support/check.h"

#include <stdlib.h>

static char *render(struct moe_metrics *registry)
{
    char *text;
    size_t length;
    assert_ok(moe_metrics_render(registry, &text, &length));
    return text;
}

static void has(const char *text, const char *line)
{
    if (strstr(text, line) == NULL)
        fail_msg("no line %s in\n%s", line, text);
}

static void stages_of_both_kinds_fall_into_their_buckets(void **state)
{
    (void)state;
    struct moe_metrics *registry;
    struct moe_step_metrics *m;
    assert_ok(moe_metrics_create(&registry));
    assert_ok(moe_step_metrics_create(registry, true, &m));
    struct moe_step_result r = {.total_ns = 250000000};
    r.stage_ns[MOE_STAGE_ROUTER] = 2000; /* the bound itself is in its bucket */
    r.stage_ns[MOE_STAGE_COMBINE] = 1500000000;
    moe_step_metrics_forward(m, &r);
    r.stage_ns[MOE_STAGE_ROUTER] = 2001;
    moe_step_metrics_forward(m, &r);
    r.backward_ns[MOE_BACKWARD_DX] = 125000000;
    moe_step_metrics_backward(m, &r);
    r.backward_ns[MOE_BACKWARD_DX] = 0; /* a backend that does not measure */
    moe_step_metrics_backward(m, &r);

    char *text = render(registry);
    has(text, "moe_step_seconds_bucket{kind=\"forward\",le=\"0.2\"} 0\n");
    has(text, "moe_step_seconds_bucket{kind=\"forward\",le=\"0.5\"} 2\n");
    has(text, "moe_step_seconds_sum{kind=\"forward\"} 0.5\n");
    has(text, "{kind=\"forward\",stage=\"router\",le=\"2e-06\"} 1\n");
    has(text, "{kind=\"forward\",stage=\"router\",le=\"5e-06\"} 2\n");
    has(text, "{kind=\"forward\",stage=\"combine\",le=\"1\"} 0\n");
    has(text, "{kind=\"forward\",stage=\"combine\",le=\"+Inf\"} 2\n");
    has(text, "moe_step_stage_seconds_count{kind=\"forward\",stage=\"shared\"} 2\n");
    has(text, "moe_step_seconds_count{kind=\"backward\"} 2\n");
    has(text, "moe_step_stage_seconds_count{kind=\"backward\",stage=\"dx\"} 1\n");
    has(text, "moe_step_stage_seconds_sum{kind=\"backward\",stage=\"dx\"} 0.125\n");
    free(text);
    moe_step_metrics_destroy(m);
    moe_metrics_destroy(registry);
}

static void without_training_there_are_no_backward_series(void **state)
{
    (void)state;
    struct moe_metrics *registry;
    struct moe_step_metrics *m;
    struct moe_step_result r = {.total_ns = 1};
    assert_ok(moe_metrics_create(&registry));
    assert_ok(moe_step_metrics_create(registry, false, &m));
    moe_step_metrics_backward(m, &r);
    char *text = render(registry);
    assert_null(strstr(text, "backward"));
    has(text, "moe_step_seconds_count{kind=\"forward\"} 0\n");
    free(text);
    moe_step_metrics_destroy(m);
    moe_metrics_destroy(registry);
}

static void without_a_registry_no_step_is_counted(void **state)
{
    (void)state;
    struct moe_step_metrics *m;
    struct moe_step_result r = {.total_ns = 1};
    assert_ok(moe_step_metrics_create(NULL, true, &m));
    assert_null(m);
    moe_step_metrics_forward(m, &r);
    moe_step_metrics_backward(m, &r);
    moe_step_metrics_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_of_both_kinds_fall_into_their_buckets),
        cmocka_unit_test(without_training_there_are_no_backward_series),
        cmocka_unit_test(without_a_registry_no_step_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
