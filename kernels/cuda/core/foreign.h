/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of other processes: host memory that this process has mapped, and device memory that
 * another one has allocated and exported. */
#ifndef MOE_CUDA_FOREIGN_H
#define MOE_CUDA_FOREIGN_H

#include "cuda/core/device.h"

/* Members of struct moe_backend. */
struct moe_status moe_cuda_mem_register(struct moe_device *device, void *p,
                                        size_t bytes) MOE_CHECKED;
void moe_cuda_mem_unregister(struct moe_device *device, void *p, size_t bytes);
struct moe_status moe_cuda_mem_import(struct moe_device *device, int descriptor, size_t bytes,
                                      void **out, bool *same_gpu) MOE_CHECKED;
void moe_cuda_mem_release(struct moe_device *device, void *p, size_t bytes);

#endif
