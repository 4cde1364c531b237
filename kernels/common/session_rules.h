/* SPDX-License-Identifier: Apache-2.0 */
/* What every backend demands of a session and of the steps in it: pure checks of plain data, so
 * that slots of any backend refuse the same things in the same words. */
#ifndef MOE_SESSION_RULES_H
#define MOE_SESSION_RULES_H

#include "moe/backend.h"
#include "moe/window.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The seat, the live mask, the epoch and the budget are possible; lays out the session's windows.
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_session_check(const struct moe_session_config *config,
                                    struct moe_window_layout *layout) MOE_CHECKED;

/* Which GPU this is, wherever it is: no two in the world have the same. */
struct moe_gpu_uuid {
    uint8_t bytes[16];
};

/* No two live slots use the same GPU; gpu [slots], those of slots that are not live do not count.
 * All slots are to ask with the same arguments, so that all refuse alike.
 * Errors: MOE_FAILED_PRECONDITION/CONFIG_INVALID, with the first two slots and their GPU. */
struct moe_status moe_session_check_gpus(uint64_t live, uint32_t slots,
                                         const struct moe_gpu_uuid *gpu) MOE_CHECKED;

/* A layer placed like this for `slot` can run in the session with this bucket, and every copy of
 * its experts is on a live slot. Depends only on what is equal on all slots, but for `tokens`.
 * Errors: MOE_INVALID_ARGUMENT with DTYPE_UNSUPPORTED, SHAPE_MISMATCH or TOKEN_LIMIT,
 * MOE_FAILED_PRECONDITION/SHAPE_MISMATCH, MOE_UNAVAILABLE/EXPERT_UNAVAILABLE. */
struct moe_status moe_session_check_step(const struct moe_session_config *config,
                                         const struct moe_layer_spec *spec,
                                         const struct moe_placement *placement, uint32_t slot,
                                         enum moe_dtype dtype, uint32_t bucket,
                                         uint32_t tokens) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
