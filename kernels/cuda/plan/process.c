/* SPDX-License-Identifier: Apache-2.0 */
/* See process.h. Calls no function of CUDA, so it is tested everywhere. */
#include "cuda/plan/process.h"

#include <stdlib.h>
#include <string.h>

/* Windows never use NVLink's multicast. Without this NCCL sets up multicast for each window, which
 * takes memory and may be forbidden on shared hosts. */
static const char multicast[] = "NCCL_NVLS_ENABLE", off[] = "0";

struct moe_status moe_cuda_process_prepare(void)
{
    enum { KEEP_WHAT_IS_SET = 0 };
    if (setenv(multicast, off, KEEP_WHAT_IS_SET) == 0)
        return moe_ok();
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for the variable %s", multicast);
}

struct moe_status moe_cuda_process_check(void)
{
    const char *value = getenv(multicast);
    if (value != NULL && strcmp(value, off) == 0)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                     "the environment has %s %s%.20s: a group of GPUs needs it to be %s from the "
                     "start of the process",
                     multicast, value == NULL ? "not set" : "= ", value == NULL ? "" : value, off);
}
