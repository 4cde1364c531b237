/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device as a region of a session. */
#ifndef MOE_CLIENT_CUDA_DEVICE_REGION_H
#define MOE_CLIENT_CUDA_DEVICE_REGION_H

#include "driver.h"
#include "moe/regions_device.h"

/* Allocates, exports and registers the memory; see moe_region_alloc. `device` is the current one.
 */
struct moe_status moe_device_region_create(const struct moe_cuda_driver *driver, int device,
                                           struct moe_client_session *session, const char *name,
                                           size_t bytes,
                                           struct moe_client_region **out) MOE_CHECKED;

#endif
