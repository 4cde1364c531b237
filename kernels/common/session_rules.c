/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of sessions and steps; see session_rules.h. */
#include "common/session_rules.h"

#include "common/layer_rules.h"

struct moe_status moe_session_check(const struct moe_session_config *c,
                                    struct moe_window_layout *layout)
{
    struct moe_window_shape shape = {.slots = c->slots,
                                     .max_tokens = c->max_tokens,
                                     .max_hidden = c->max_hidden,
                                     .max_top_k = c->max_top_k,
                                     .max_experts = c->max_experts,
                                     .training = c->training,
                                     .max_tokens_f32 = c->max_tokens_f32};
    if (!moe_window_layout_of(&shape, layout))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "no window can be laid out for %u slots, %u tokens (%u in F32), hidden "
                         "%u, top-k %u, %u experts",
                         c->slots, c->max_tokens, c->max_tokens_f32, c->max_hidden, c->max_top_k,
                         c->max_experts);
    uint64_t slots = UINT64_MAX >> (64 - c->slots); /* the layout has 1 to 64 */
    if (c->slot >= c->slots || !(c->live >> c->slot & 1) || (c->live & ~slots) != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "slot %u of %u does not fit the live slots", c->slot, c->slots);
    if (c->partial && c->training)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a session that trains needs all experts");
    if (c->epoch < 1 || c->epoch > (UINT64_C(1) << 40) - 2 || c->wait_budget_ms < 1 ||
        c->allgather == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a session needs an epoch, a wait budget and an all-gather");
    return moe_ok();
}

/* Prints the id like nvidia-smi -L: GPU-8-4-4-4-12 hexadecimal digits. */
static struct moe_status same_gpu(uint32_t a, uint32_t b, const struct moe_gpu_uuid *gpu)
{
    const uint8_t *u = gpu->bytes;
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                     "slots %u and %u use the same GPU "
                     "(GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x): "
                     "each slot needs another GPU (--device)",
                     a, b, u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11],
                     u[12], u[13], u[14], u[15]);
}

struct moe_status moe_session_check_gpus(uint64_t live, uint32_t slots,
                                         const struct moe_gpu_uuid *gpu)
{
    for (uint32_t a = 0; a < slots; a++)
        for (uint32_t b = a + 1; b < slots; b++)
            if ((live >> a & 1) && (live >> b & 1) && memcmp(&gpu[a], &gpu[b], sizeof gpu[a]) == 0)
                return same_gpu(a, b, &gpu[a]);
    return moe_ok();
}

/* Every expert needs a copy on a live slot, unless the session is partial. */
static struct moe_status check_placement(const struct moe_session_config *c,
                                         const struct moe_placement *p, uint32_t slot)
{
    if (p->slots != c->slots || slot != c->slot)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                         "the layer was placed for slot %u of %u, the session has slot %u of %u",
                         slot, p->slots, c->slot, c->slots);
    return c->partial ? moe_ok() : moe_placement_check_live(p, c->live);
}

struct moe_status moe_session_check_step(const struct moe_session_config *c,
                                         const struct moe_layer_spec *spec,
                                         const struct moe_placement *p, uint32_t slot,
                                         enum moe_dtype dtype, uint32_t bucket, uint32_t tokens)
{
    if (moe_dtype_bytes(dtype) == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED, "unknown dtype %d",
                         (int)dtype);
    if (spec->hidden > c->max_hidden || spec->router.top_k > c->max_top_k ||
        spec->experts > c->max_experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "hidden %u, top-k %u, %u experts exceed the session's %u, %u, %u",
                         spec->hidden, spec->router.top_k, spec->experts, c->max_hidden,
                         c->max_top_k, c->max_experts);
    uint32_t most = moe_session_max_tokens(c, dtype);
    if (bucket == 0 || (bucket & (bucket - 1)) != 0 || bucket > most || tokens > bucket)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOKEN_LIMIT,
                         "%u tokens in a bucket of %u: a bucket is a power of two, at most %u",
                         tokens, bucket, most);
    return check_placement(c, p, slot);
}

static struct moe_status check_segment(const struct moe_step_segment *s, uint32_t number)
{
    const enum moe_routing_mode mode = moe_routing_of(s->mode);
    bool routed = mode <= MOE_ROUTE_IDS_WEIGHTS &&
                  (mode == MOE_ROUTE_SERVER || s->ids_in != NULL) &&
                  (mode != MOE_ROUTE_IDS_WEIGHTS || s->weights_in != NULL);
    if (!routed)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID,
                         "segment %u: routing mode %d lacks its ids or weights", number,
                         (int)s->mode);
    return s->x != NULL && s->y != NULL ? moe_ok()
                                        : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                                                    "segment %u has no x or no y", number);
}

struct moe_status moe_session_check_segments(const struct moe_step_args *a, uint32_t max_tokens,
                                             bool *modes, bool *need_logits)
{
    uint64_t tokens = 0;
    *modes = *need_logits = false;
    if (a->segments == NULL)
        return moe_ok();
    if (a->segment_count > max_tokens || a->x != NULL || a->y != NULL || a->mode != NULL ||
        a->ids_in != NULL || a->weights_in != NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "a step has too many segments, or also rows without one");
    for (uint32_t i = 0; i < a->segment_count; i++) {
        const struct moe_step_segment *s = &a->segments[i];
        if (s->tokens == 0)
            continue;
        MOE_TRY(check_segment(s, i));
        tokens += s->tokens;
        *modes = *modes || s->mode != MOE_ROUTE_SERVER;
        *need_logits = *need_logits || moe_routing_of(s->mode) != MOE_ROUTE_IDS_WEIGHTS;
    }
    if (tokens != a->tokens)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "the segments have %llu tokens, the step has %u",
                         (unsigned long long)tokens, a->tokens);
    return moe_ok();
}
