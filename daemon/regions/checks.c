/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/checks.h. */
#include "regions/checks.h"

#include "base/size.h"
#include "moe/types.h"

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

static const char *const names[MOE_RING_ROLES] = {
    "x", "ids", "topk_weights", "y", "topk_ids_out", "topk_weights_out", "token_state",
};

static bool is_absent(const struct moe_ring_tensor *t)
{
    return t->region == 0;
}

static struct moe_status check_head(const struct moe_ring_request *q,
                                    const struct moe_ring_layer *layer)
{
    uint64_t reserved = 0;
    for (size_t i = 0; i < sizeof q->reserved / sizeof q->reserved[0]; i++)
        reserved |= q->reserved[i];
    for (size_t i = 0; i < MOE_RING_ROLES; i++) {
        const struct moe_ring_tensor *t = &q->tensors[i];
        reserved |= t->reserved;
        if (is_absent(t))
            reserved |= t->offset | t->bytes;
    }
    if (reserved != 0)
        return invalid(VALUE_INVALID, "a reserved field, or one of an absent tensor, is not 0");
    if (q->dtype != MOE_DTYPE_F32 && q->dtype != MOE_DTYPE_BF16)
        return invalid(DTYPE_UNSUPPORTED, "dtype must be F32 or BF16");
    if (q->routing >= MOE_RING_ROUTES)
        return invalid(ROUTING_INVALID, "there is no routing mode %u", q->routing);
    if (q->parts > MOE_PARTS_SHARED)
        return invalid(VALUE_INVALID, "there are no parts %u", q->parts);
    if (q->parts == MOE_PARTS_SHARED &&
        (q->routing != MOE_RING_ROUTE_SERVER || !is_absent(&q->tensors[MOE_RING_IDS_OUT])))
        return invalid(ROUTING_INVALID, "parts: shared experts have no routing");
    if (q->hidden != layer->hidden)
        return invalid(SHAPE_MISMATCH, "hidden is %u; layer %u has %u", q->hidden, q->layer,
                       layer->hidden);
    if (q->tokens > layer->max_tokens)
        return invalid(TOKEN_LIMIT, "%u tokens; a request may have %u", q->tokens,
                       layer->max_tokens);
    return moe_ok();
}

/* Bytes of each tensor for the request's shape. False: they do not fit a size. */
static bool sizes_of(const struct moe_ring_request *q, const struct moe_ring_layer *layer,
                     size_t sizes[MOE_RING_ROLES])
{
    size_t rows, pairs, token_ids;
    if (!moe_size_mul3(q->tokens, q->hidden, moe_dtype_bytes((enum moe_dtype)q->dtype), &rows) ||
        !moe_size_mul3(q->tokens, layer->top_k, sizeof(float), &pairs) ||
        !moe_size_mul(q->tokens, sizeof(int64_t), &token_ids))
        return false;
    const size_t all[MOE_RING_ROLES] = {
        [MOE_RING_X] = rows,
        [MOE_RING_IDS] = q->routing == MOE_RING_ROUTE_TOKEN_IDS ? token_ids : pairs,
        [MOE_RING_WEIGHTS] = pairs,
        [MOE_RING_Y] = rows,
        [MOE_RING_IDS_OUT] = pairs,
        [MOE_RING_WEIGHTS_OUT] = pairs,
        [MOE_RING_TOKEN_STATE] = q->tokens,
    };
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        sizes[i] = all[i];
    return true;
}

/* Whether the request must have, may have, or must not have a tensor. */
static struct moe_status check_presence(const struct moe_ring_request *q)
{
    bool here[MOE_RING_ROLES];
    for (size_t i = 0; i < MOE_RING_ROLES; i++) {
        here[i] = !is_absent(&q->tensors[i]);
        if (here[i] && q->tokens == 0)
            return invalid(SHAPE_MISMATCH, "a request without tokens has no %s", names[i]);
    }
    if (q->tokens == 0)
        return moe_ok();
    if (!here[MOE_RING_X] || !here[MOE_RING_Y])
        return invalid(SHAPE_MISMATCH, "a request with tokens needs x and y");
    if (here[MOE_RING_IDS] != (q->routing != MOE_RING_ROUTE_SERVER) ||
        here[MOE_RING_WEIGHTS] != (q->routing == MOE_RING_ROUTE_IDS_WEIGHTS))
        return invalid(ROUTING_INVALID, "ids or topk_weights do not fit the routing mode");
    if (here[MOE_RING_IDS_OUT] != here[MOE_RING_WEIGHTS_OUT])
        return invalid(ROUTING_INVALID, "topk_ids_out and topk_weights_out come together");
    return moe_ok();
}

struct moe_status moe_ring_check(const struct moe_ring_request *q,
                                 const struct moe_ring_layer *layer)
{
    size_t sizes[MOE_RING_ROLES];
    MOE_TRY(check_head(q, layer));
    MOE_TRY(check_presence(q));
    if (!sizes_of(q, layer, sizes))
        return invalid(TOO_LARGE, "%u tokens would be too large", q->tokens);
    for (size_t i = 0; i < MOE_RING_ROLES; i++)
        if (!is_absent(&q->tensors[i]) && q->tensors[i].bytes != sizes[i])
            return invalid(SHAPE_MISMATCH, "%s has %llu bytes; its shape has %zu", names[i],
                           (unsigned long long)q->tensors[i].bytes, sizes[i]);
    return moe_ok();
}
