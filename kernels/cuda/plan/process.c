/* SPDX-License-Identifier: Apache-2.0 */
/* See process.h. Calls no function of CUDA, so it is tested everywhere. */
#include "cuda/plan/process.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Windows never use NVLink's multicast. Without this NCCL sets up multicast for each window, which
 * takes memory and may be forbidden on shared hosts. */
static const char multicast[] = "NCCL_NVLS_ENABLE", off[] = "0";
static const char sockets[] = "NCCL_SOCKET_IFNAME";

static struct moe_status set(const char *variable, const char *value, int override)
{
    if (setenv(variable, value, override) == 0)
        return moe_ok();
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for the variable %s", variable);
}

struct moe_status moe_cuda_process_prepare(const char *interface)
{
    char exactly[64]; /* without the sign, NCCL takes every interface with this prefix */
    if (interface != NULL) {
        (void)snprintf(exactly, sizeof exactly, "=%.60s", interface);
        MOE_TRY(set(sockets, exactly, 1));
    }
    return set(multicast, off, 0);
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
