/* SPDX-License-Identifier: Apache-2.0 */
/* The NVLink domain of a GPU follows from the fabric's cluster and clique, and is empty whenever
 * the driver does not tell them. */
#include "cuda/plan/fabric.h"

#include "support/check.h"

#include <stdlib.h>
#include <string.h>

static uint8_t gpu[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static void assert_domain(const char *answer, const char *want)
{
    char domain[64] = "not written";
    assert_int_equal(
        answer != NULL ? setenv("MOE_FAKE_FABRIC", answer, 1) : unsetenv("MOE_FAKE_FABRIC"), 0);
    moe_cuda_fabric_domain(FAKE_NVML, gpu, domain);
    assert_string_equal(domain, want);
}

static void cluster_and_clique_name_a_domain(void **state)
{
    (void)state;
    assert_domain("3 0 7 143", "8f000000000000000000000000000000-7");
    assert_domain("3 0 8 143", "8f000000000000000000000000000000-8");
}

static void without_a_ready_fabric_there_is_no_domain(void **state)
{
    (void)state;
    assert_domain("2 0 7 143", ""); /* in progress */
    assert_domain("3 5 7 143", ""); /* the registration failed */
    assert_domain("3 0 0 0", "");   /* NVLink inside the host only */
}

static void a_driver_that_does_not_answer_is_no_error(void **state)
{
    (void)state;
    assert_domain(NULL, "");
    assert_domain("not supported", "");
    gpu[0] = 1;
    assert_domain("3 0 7 143", ""); /* another GPU */
    gpu[0] = 0;
    char domain[64] = "not written";
    moe_cuda_fabric_domain("libno-such-library.so.1", gpu, domain);
    assert_string_equal(domain, "");
    moe_cuda_fabric_domain("libc.so.6", gpu, domain); /* has none of the functions */
    assert_string_equal(domain, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cluster_and_clique_name_a_domain),
        cmocka_unit_test(without_a_ready_fabric_there_is_no_domain),
        cmocka_unit_test(a_driver_that_does_not_answer_is_no_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
