/* SPDX-License-Identifier: Apache-2.0 */
/* What libraries below this backend read from the environment of the process. NCCL reads it when it
 * forms a group, while other threads run. So a variable must be set before the process has a second
 * thread: setenv at the same time as getenv is undefined. */
#ifndef MOE_CUDA_PROCESS_H
#define MOE_CUDA_PROCESS_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets what is not set, and the network interface of NCCL unless it is NULL. `main` calls this
 * before there is a second thread; see moe_backends_prepare.
 * Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_cuda_process_prepare(const char *interface) MOE_CHECKED;

/* Checks that the environment is as groups of GPUs need it. Changes nothing. Threads: any.
 * Errors: MOE_FAILED_PRECONDITION/CONFIG_INVALID, with the variable, its value and the needed one.
 */
struct moe_status moe_cuda_process_check(void) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
