/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of every backend for sessions and steps: pure checks of plain data. So slots of any
 * backend refuse the same input with the same text. */
#ifndef MOE_SESSION_RULES_H
#define MOE_SESSION_RULES_H

#include "moe/backend.h"
#include "moe/window.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks slot, live mask, epoch and budget; lays out the session's windows.
 * Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_session_check(const struct moe_session_config *config,
                                    struct moe_window_layout *layout) MOE_CHECKED;

/* Largest bucket of steps of tokens of this dtype. */
static inline uint32_t moe_session_max_tokens(const struct moe_session_config *config,
                                              enum moe_dtype dtype)
{
    return dtype == MOE_DTYPE_F32 && config->max_tokens_f32 != 0 ? config->max_tokens_f32
                                                                 : config->max_tokens;
}

/* Globally unique id of a GPU. */
struct moe_gpu_uuid {
    uint8_t bytes[16];
};

/* No two live slots use the same GPU. gpu [slots]; entries of slots that are not live are ignored.
 * All slots pass the same arguments, so all refuse alike.
 * Errors: MOE_FAILED_PRECONDITION/CONFIG_INVALID; its text names the first two slots and the GPU.
 */
struct moe_status moe_session_check_gpus(uint64_t live, uint32_t slots,
                                         const struct moe_gpu_uuid *gpu) MOE_CHECKED;

/* A layer with this placement for `slot` can run in the session with this bucket. Each of its
 * experts has a copy on a live slot, or the session is partial. Apart from `tokens`, the result is
 * the same on all slots. Errors: MOE_INVALID_ARGUMENT with DTYPE_UNSUPPORTED, SHAPE_MISMATCH or
 * TOKEN_LIMIT, MOE_FAILED_PRECONDITION/SHAPE_MISMATCH, MOE_UNAVAILABLE/EXPERT_UNAVAILABLE. */
struct moe_status moe_session_check_step(const struct moe_session_config *config,
                                         const struct moe_layer_spec *spec,
                                         const struct moe_placement *placement, uint32_t slot,
                                         enum moe_dtype dtype, uint32_t bucket,
                                         uint32_t tokens) MOE_CHECKED;

/* The segments of a step (moe/backend.h) have its tokens and what their modes need; without
 * segments it is MOE_OK. `max_tokens` is the session's. `*modes`: some mode is not 0;
 * `*need_logits`: some do not bring weights. Both are false without segments.
 * Errors: MOE_INVALID_ARGUMENT with SHAPE_MISMATCH or ROUTING_INVALID. */
struct moe_status moe_session_check_segments(const struct moe_step_args *args, uint32_t max_tokens,
                                             bool *modes, bool *need_logits) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
