/* SPDX-License-Identifier: Apache-2.0 */
/* Regions on a GPU for regions_schedules.c, by libmoeclient_cuda, which is opened at run time. A
 * failure ends the process with 1. */
#ifndef MOE_TEST_REGIONS_DEVICE_H
#define MOE_TEST_REGIONS_DEVICE_H

#include <moe/client_cuda.h>

/* For a session; `device` is CUDA's ordinal. */
void device_open(struct moe_client_session *session, int device);
/* The session is about to be closed. */
void device_close(void);

struct moe_status device_alloc(const char *name, size_t bytes, struct moe_client_region **out);
void device_copy_in(struct moe_client_region *to, uint64_t offset, const void *from, size_t bytes);
void device_copy_out(const struct moe_client_region *from, void *to, size_t bytes);

#endif
