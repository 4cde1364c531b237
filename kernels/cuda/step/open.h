/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a GPU with all that computes on it: members of struct moe_backend. */
#ifndef MOE_CUDA_OPEN_H
#define MOE_CUDA_OPEN_H

#ifdef __cplusplus
extern "C" {
#endif

#include "moe/backend.h"

struct moe_status moe_cuda_device_open(const struct moe_device_config *config,
                                       struct moe_device **out) MOE_CHECKED;
void moe_cuda_device_close(struct moe_device *device); /* NULL is ignored */

#ifdef __cplusplus
}
#endif

#endif
