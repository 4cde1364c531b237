/* SPDX-License-Identifier: Apache-2.0 */
/* What other modules may know of the CUDA backend: its table, and whether a device is available.
 * This header needs no CUDA header. */
#ifndef MOE_CUDA_BACKEND_H
#define MOE_CUDA_BACKEND_H

#include "moe/backend.h"

extern const struct moe_backend moe_backend_cuda;

/* Whether the driver and a device are available. Starts the driver in this process: a child that is
 * forked later cannot use CUDA. */
bool moe_cuda_available(void);

#endif
