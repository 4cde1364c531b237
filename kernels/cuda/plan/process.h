/* SPDX-License-Identifier: Apache-2.0 */
/* What libraries below this backend read from the environment of the process. NCCL does so when it
 * forms a group, at a time when other threads run. A variable must therefore stand before the
 * process has a second thread: setenv beside any getenv is undefined. */
#ifndef MOE_CUDA_PROCESS_H
#define MOE_CUDA_PROCESS_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets what is not set. To be called by main before there is a second thread; see
 * moe_backends_prepare.
 * Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_cuda_process_prepare(void) MOE_CHECKED;

/* Whether the environment is as groups of GPUs need it. Changes nothing. Threads: any.
 * Errors: MOE_FAILED_PRECONDITION/CONFIG_INVALID, with the variable, its value and the needed one.
 */
struct moe_status moe_cuda_process_check(void) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
