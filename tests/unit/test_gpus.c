/* SPDX-License-Identifier: Apache-2.0 */
/* What a group of GPUs asks before it is formed, of plain data: no GPU twice, and an environment in
 * which NCCL does what windows need. */
#include "common/session_rules.h"
#include "cuda/plan/process.h"
#include "support/check.h"

#include <stdlib.h>
#include <string.h>

enum { SLOTS = 4 };

/* `slot` has the GPU of that number. */
static void give(struct moe_gpu_uuid gpu[SLOTS], uint32_t slot, uint8_t number)
{
    for (uint8_t i = 0; i < sizeof gpu->bytes; i++)
        gpu[slot].bytes[i] = (uint8_t)(0x10 * i + 0xf);
    gpu[slot].bytes[15] = number;
}

static void slots_with_a_gpu_each_are_welcome(void **state)
{
    struct moe_gpu_uuid gpu[SLOTS];
    (void)state;
    for (uint32_t s = 0; s < SLOTS; s++)
        give(gpu, s, (uint8_t)s);
    assert_ok(moe_session_check_gpus(0xf, SLOTS, gpu));
    assert_ok(moe_session_check_gpus(0x1, 1, gpu));
}

static void the_first_two_with_the_same_gpu_are_named(void **state)
{
    struct moe_gpu_uuid gpu[SLOTS];
    (void)state;
    for (uint32_t s = 0; s < SLOTS; s++)
        give(gpu, s, s < 2 ? (uint8_t)s : 7);
    struct moe_status st = moe_session_check_gpus(0xf, SLOTS, gpu);
    assert_refused(st, MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID);
    assert_non_null(strstr(st.text, "slots 2 and 3 use the same GPU "
                                    "(GPU-0f1f2f3f-4f5f-6f7f-8f9f-afbfcfdfef07)"));
    give(gpu, 0, 7);
    st = moe_session_check_gpus(0xf, SLOTS, gpu);
    assert_non_null(strstr(st.text, "slots 0 and 2 use the same GPU"));
}

static void slots_that_are_not_live_do_not_count(void **state)
{
    struct moe_gpu_uuid gpu[SLOTS];
    (void)state;
    memset(gpu, 0, sizeof gpu); /* as it is for slots that are not there */
    give(gpu, 1, 7);
    give(gpu, 3, 7);
    assert_ok(moe_session_check_gpus(0x3, SLOTS, gpu));
    assert_ok(moe_session_check_gpus(0x9, SLOTS, gpu));
    assert_refused(moe_session_check_gpus(0xa, SLOTS, gpu), MOE_FAILED_PRECONDITION,
                   MOE_REASON_CONFIG_INVALID);
}

static void the_environment_is_prepared_once_and_only_checked_later(void **state)
{
    (void)state;
    assert_int_equal(unsetenv("NCCL_NVLS_ENABLE"), 0);
    struct moe_status st = moe_cuda_process_check();
    assert_refused(st, MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID);
    assert_non_null(strstr(st.text, "NCCL_NVLS_ENABLE not set"));
    assert_null(getenv("NCCL_NVLS_ENABLE"));
    assert_ok(moe_cuda_process_prepare(NULL));
    assert_string_equal(getenv("NCCL_NVLS_ENABLE"), "0");
    assert_ok(moe_cuda_process_check());
}

static void a_setting_of_the_user_is_not_overruled_but_refused(void **state)
{
    (void)state;
    assert_int_equal(setenv("NCCL_NVLS_ENABLE", "1", 1), 0);
    assert_ok(moe_cuda_process_prepare(NULL));
    assert_string_equal(getenv("NCCL_NVLS_ENABLE"), "1");
    struct moe_status st = moe_cuda_process_check();
    assert_refused(st, MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID);
    assert_non_null(strstr(st.text, "NCCL_NVLS_ENABLE = 1: a group of GPUs needs it to be 0"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_with_a_gpu_each_are_welcome),
        cmocka_unit_test(the_first_two_with_the_same_gpu_are_named),
        cmocka_unit_test(slots_that_are_not_live_do_not_count),
        cmocka_unit_test(the_environment_is_prepared_once_and_only_checked_later),
        cmocka_unit_test(a_setting_of_the_user_is_not_overruled_but_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
