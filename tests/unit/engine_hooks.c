/* SPDX-License-Identifier: Apache-2.0 */
/* See engine_hooks.h. */
#include "engine_hooks.h"

#include <stdlib.h>

_Atomic uint64_t announced_tokens;

void count_announced(void *ctx, uint32_t layer, enum moe_step_kind kind, enum moe_dtype dtype,
                     uint32_t tokens)
{
    (void)ctx;
    MOE_INVARIANT(layer == 7 && kind == MOE_STEP_FORWARD && dtype == MOE_DTYPE_F32);
    atomic_fetch_add(&announced_tokens, tokens);
}

uint64_t spin_of_test(void)
{
    const char *us = getenv("MOE_TEST_SPIN_US");
    return us == NULL ? 0 : strtoull(us, NULL, 10) * 1000;
}
