/* SPDX-License-Identifier: Apache-2.0 */
/* Joining a group, leaving it, and the small exchange: members of struct moe_backend. */
#ifndef MOE_CPU_JOIN_H
#define MOE_CPU_JOIN_H

#include "cpu/exchange/session.h"

struct moe_status moe_cpu_session_join(struct moe_device *device,
                                       const struct moe_session_config *config,
                                       struct moe_session **out) MOE_CHECKED;
uint64_t moe_cpu_session_together(const struct moe_session *s);
struct moe_status moe_cpu_session_mask(struct moe_session *s, uint64_t epoch,
                                       uint64_t live) MOE_CHECKED;
void moe_cpu_session_leave(struct moe_session *s); /* NULL is ignored */
struct moe_status moe_cpu_session_exchange(struct moe_session *s, const void *mine, void *all,
                                           size_t bytes) MOE_CHECKED;

#endif
