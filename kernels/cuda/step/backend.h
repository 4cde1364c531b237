/* SPDX-License-Identifier: Apache-2.0 */
/* What the rest of the house may know of the CUDA backend: its table, and whether a device answers.
 * No CUDA header is needed to include this one. */
#ifndef MOE_CUDA_BACKEND_H
#define MOE_CUDA_BACKEND_H

#include "moe/backend.h"

extern const struct moe_backend moe_backend_cuda;

/* Whether the driver is there and offers a device. Starts the driver in this process: a child that
 * is forked afterwards cannot use CUDA. */
bool moe_cuda_available(void);

#endif
