/* SPDX-License-Identifier: Apache-2.0 */
/* The small exchange of a session: a few bytes from every slot to every slot, and a barrier. */
#ifndef MOE_CUDA_EXCHANGE_H
#define MOE_CUDA_EXCHANGE_H

#include "cuda/session/session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Like session_exchange of struct moe_backend, inside a pass that all slots make. The device is
 * current. */
struct moe_status moe_cuda_session_exchange_inside(struct moe_session *s, const void *mine,
                                                   void *all, size_t bytes) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
