/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of backends' options: a setting is found or refused by name, and every build has the
 * options of every backend. */
#include "common/backend_options.h"
#include "cuda/plan/options.h"
#include "support/check.h"

#include <string.h>

static const struct moe_backend_option table[] = {
    {"colour", "red|green|greenish", "for tests", MOE_SCOPE_DEVICE},
    {"size", "small|large", "for tests", MOE_SCOPE_SESSION},
    {0},
};

static void values_are_found_by_name(void **state)
{
    (void)state;
    const struct moe_backend_setting settings[] = {{"size", "large"}, {"colour", "greenish"}, {0}};
    uint32_t chosen[2] = {9, 9};
    assert_ok(moe_backend_choose(table, settings, chosen));
    assert_int_equal(chosen[0], 2);
    assert_int_equal(chosen[1], 1);
}

static void an_option_that_is_not_set_has_the_first_value(void **state)
{
    (void)state;
    const struct moe_backend_setting unset[] = {{"size", NULL}, {"colour", "red"}, {0}};
    uint32_t chosen[2] = {9, 9};
    assert_ok(moe_backend_choose(table, NULL, chosen));
    assert_int_equal(chosen[0] + chosen[1], 0);
    chosen[0] = chosen[1] = 9;
    assert_ok(moe_backend_choose(table, unset, chosen));
    assert_int_equal(chosen[0] + chosen[1], 0);
}

static void the_later_of_two_settings_counts(void **state)
{
    (void)state;
    const struct moe_backend_setting twice[] = {{"size", "large"}, {"size", "small"}, {0}};
    uint32_t chosen[2];
    assert_ok(moe_backend_choose(table, twice, chosen));
    assert_int_equal(chosen[1], 0);
}

static void assert_refused_by_name(const struct moe_backend_option *options, const char *name,
                                   const char *value, enum moe_reason reason, const char *text)
{
    const struct moe_backend_setting settings[] = {{name, value}, {0}};
    uint32_t chosen[2];
    struct moe_status st = moe_backend_choose(options, settings, chosen);
    assert_int_equal(st.code, MOE_INVALID_ARGUMENT);
    assert_int_equal(st.reason, reason);
    assert_non_null(strstr(st.text, text));
}

static void an_unknown_option_is_refused_by_name(void **state)
{
    (void)state;
    assert_refused_by_name(table, "weight", "small", MOE_REASON_CONFIG_UNKNOWN_KEY, "weight");
    assert_refused_by_name(table, "siz", NULL, MOE_REASON_CONFIG_UNKNOWN_KEY, "siz");
    assert_refused_by_name(NULL, "size", "small", MOE_REASON_CONFIG_UNKNOWN_KEY, "size");
    static const char *const wrong[] = {"", "gree", "greenis", "greenish|", "red|green", "Red"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_refused_by_name(table, "colour", wrong[i], MOE_REASON_CONFIG_INVALID, "colour");
        assert_refused_by_name(table, "colour", wrong[i], MOE_REASON_CONFIG_INVALID,
                               "red|green|greenish");
    }
}

/* An enum of the backend gives an index in the table its meaning. */
static void values_of_cuda_are_where_its_enums_expect_them(void **state)
{
    (void)state;
    static const struct {
        const char *name, *value;
        uint32_t option, place;
    } want[] = {
        {"gemm", "auto", MOE_CUDA_OPTION_GEMM, MOE_CUDA_GEMM_AUTO},
        {"gemm", "hopper", MOE_CUDA_OPTION_GEMM, MOE_CUDA_GEMM_HOPPER},
        {"gemm", "cublas", MOE_CUDA_OPTION_GEMM, MOE_CUDA_GEMM_CUBLAS},
        {"transport", "auto", MOE_CUDA_OPTION_TRANSPORT, MOE_CUDA_TRANSPORT_AUTO},
        {"transport", "nvlink", MOE_CUDA_OPTION_TRANSPORT, MOE_CUDA_TRANSPORT_NVLINK},
        {"transport", "network", MOE_CUDA_OPTION_TRANSPORT, MOE_CUDA_TRANSPORT_NETWORK},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        const struct moe_backend_setting settings[] = {{want[i].name, want[i].value}, {0}};
        uint32_t chosen[MOE_CUDA_OPTION_COUNT];
        assert_ok(moe_backend_choose(moe_cuda_options, settings, chosen));
        assert_int_equal(chosen[want[i].option], want[i].place);
    }
}

/* A module has a copy of its table. */
static bool is_equal(const struct moe_backend_option *a, const struct moe_backend_option *b)
{
    while (a->name != NULL && b->name != NULL && strcmp(a->name, b->name) == 0 &&
           strcmp(a->values, b->values) == 0 && a->scope == b->scope)
        a++, b++;
    return a->name == NULL && b->name == NULL;
}

static bool is_listed(const struct moe_backend_option *options)
{
    size_t t = 0;
    while (moe_backend_option_tables[t] != NULL && !is_equal(moe_backend_option_tables[t], options))
        t++;
    return moe_backend_option_tables[t] != NULL;
}

static void every_build_lists_the_options_of_every_backend(void **state)
{
    (void)state;
    static const char *const names[] = {"cpu", "cuda"};
    assert_true(is_listed(moe_cuda_options));
    for (size_t i = 0; i < 2; i++) {
        const struct moe_backend *b;
        struct moe_status st = moe_backend_find(names[i], &b);
        assert_true(moe_failed(&st) || b->options == NULL || is_listed(b->options));
    }
}

/* The worker shows such options once. */
static void options_of_one_name_are_equal_in_all_tables(void **state)
{
    (void)state;
    const struct moe_backend_option *seen[64];
    size_t count = 0;
    for (size_t t = 0; moe_backend_option_tables[t] != NULL; t++)
        for (const struct moe_backend_option *o = moe_backend_option_tables[t]; o->name != NULL;
             o++) {
            for (size_t i = 0; i < count; i++)
                if (strcmp(seen[i]->name, o->name) == 0) {
                    assert_string_equal(seen[i]->values, o->values);
                    assert_string_equal(seen[i]->help, o->help);
                    assert_int_equal(seen[i]->scope, o->scope);
                }
            assert_true(count < 64);
            seen[count++] = o;
        }
}

static void the_cpu_refuses_settings_of_others(void **state)
{
    (void)state;
    const struct moe_backend_setting settings[] = {{"gemm", "auto"}, {0}};
    const struct moe_device_config refused = {.threads = 1, .settings = settings};
    const struct moe_device_config config = {.threads = 1};
    const struct moe_session_config session = {.settings = settings};
    struct moe_device *device;
    struct moe_session *s;
    struct moe_status st = moe_backend_cpu.device_open(&refused, &device);
    assert_int_equal(st.reason, MOE_REASON_CONFIG_UNKNOWN_KEY);
    assert_ok(moe_backend_cpu.device_open(&config, &device));
    st = moe_backend_cpu.session_join(device, &session, &s);
    assert_int_equal(st.reason, MOE_REASON_CONFIG_UNKNOWN_KEY);
    moe_backend_cpu.device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_found_by_name),
        cmocka_unit_test(an_option_that_is_not_set_has_the_first_value),
        cmocka_unit_test(the_later_of_two_settings_counts),
        cmocka_unit_test(an_unknown_option_is_refused_by_name),
        cmocka_unit_test(values_of_cuda_are_where_its_enums_expect_them),
        cmocka_unit_test(every_build_lists_the_options_of_every_backend),
        cmocka_unit_test(options_of_one_name_are_equal_in_all_tables),
        cmocka_unit_test(the_cpu_refuses_settings_of_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
