/* SPDX-License-Identifier: Apache-2.0 */
/* Forming a group, going on without some of its slots, leaving it, and exchanging bytes in it:
 * members of struct moe_backend. */
#ifndef MOE_CUDA_JOIN_H
#define MOE_CUDA_JOIN_H

#include "cuda/session/session.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_status moe_cuda_session_join(struct moe_device *device,
                                        const struct moe_session_config *config,
                                        struct moe_session **out) MOE_CHECKED;
uint64_t moe_cuda_session_together(const struct moe_session *s);
struct moe_status moe_cuda_session_mask(struct moe_session *s, uint64_t epoch,
                                        uint64_t live) MOE_CHECKED;
void moe_cuda_session_leave(struct moe_session *s);
struct moe_status moe_cuda_session_exchange(struct moe_session *s, const void *mine, void *all,
                                            size_t bytes) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
