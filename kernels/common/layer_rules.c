/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of layers; see layer_rules.h. */
#include "common/layer_rules.h"

#include "base/size.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const weight_names[MOE_WEIGHT_COUNT] = {
    [MOE_WEIGHT_ROUTER] = "router",
    [MOE_WEIGHT_LOGIT_BIAS] = "logit bias",
    [MOE_WEIGHT_SELECT_BIAS] = "selection bias",
    [MOE_WEIGHT_GATE] = "gate",
    [MOE_WEIGHT_UP] = "up",
    [MOE_WEIGHT_DOWN] = "down",
    [MOE_WEIGHT_GATE_BIAS] = "gate bias",
    [MOE_WEIGHT_UP_BIAS] = "up bias",
    [MOE_WEIGHT_DOWN_BIAS] = "down bias",
    [MOE_WEIGHT_SHARED_GATE] = "shared gate",
    [MOE_WEIGHT_SHARED_UP] = "shared up",
    [MOE_WEIGHT_SHARED_DOWN] = "shared down",
    [MOE_WEIGHT_SHARED_GATE_VECTOR] = "shared gate vector",
    [MOE_WEIGHT_TO_LATENT] = "projection to the latent space",
    [MOE_WEIGHT_FROM_LATENT] = "projection from the latent space",
    [MOE_WEIGHT_LATENT_NORM] = "norm of the latent space",
};

_Static_assert(MOE_COMMON_TOP_K == 16, "moe_layer_uncommon names the number");

#define REQUIRE(cond, ...)                                                                         \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, __VA_ARGS__);        \
    } while (0)

static struct moe_status check_router(const struct moe_layer_spec *spec)
{
    const struct moe_router_spec *r = &spec->router;
    REQUIRE(r->zero_experts <= MOE_MAX_EXPERTS, "%u zero experts: at most %d", r->zero_experts,
            MOE_MAX_EXPERTS);
    REQUIRE(r->score <= MOE_SCORE_SPARSEMIXER, "unknown score function %d", (int)r->score);
    REQUIRE(r->renorm <= MOE_RENORM_CLAMPED, "unknown renormalisation %d", (int)r->renorm);
    REQUIRE(r->top_k >= 1 && r->top_k <= MOE_MAX_TOP_K, "top_k is %u: 1 to %d", r->top_k,
            MOE_MAX_TOP_K);
    REQUIRE(r->groups >= 1 && spec->experts % r->groups == 0, "%u groups do not divide %u experts",
            r->groups, spec->experts);
    REQUIRE(r->topk_group >= 1 && r->topk_group <= r->groups, "%u of %u groups cannot be chosen",
            r->topk_group, r->groups);
    uint32_t group_size = spec->experts / r->groups;
    REQUIRE(r->groups == 1 || r->zero_experts == 0, "zero experts belong to no expert group");
    REQUIRE(r->groups == 1 || (r->group_best >= 1 && r->group_best <= group_size),
            "a group of %u experts has no %u best", group_size, r->group_best);
    REQUIRE(r->top_k <= r->topk_group * group_size + r->zero_experts,
            "top_k is %u, but only %u experts can be chosen", r->top_k,
            r->topk_group * group_size + r->zero_experts);
    REQUIRE(r->score != MOE_SCORE_SPARSEMIXER ||
                (r->top_k == 2 && isfinite(r->jitter) && r->jitter > 0),
            "SparseMixer chooses 2 experts, with a jitter that is finite and positive");
    REQUIRE(!r->by_token || (!r->select_bias && r->groups == 1),
            "a layer that routes by token id has no choice that a bias or groups could change");
    REQUIRE(isfinite(r->renorm_eps) && r->renorm_eps >= 0, "renorm_eps must be finite, >= 0");
    REQUIRE(isfinite(r->scale), "the router's scale must be finite");
    return moe_ok();
}

static struct moe_status check_latent(const struct moe_layer_spec *spec)
{
    REQUIRE(spec->latent <= spec->hidden, "the latent space is %u wide: at most %u", spec->latent,
            spec->hidden);
    REQUIRE(spec->latent == 0 || spec->router.zero_experts == 0, "zero experts in a latent space");
    REQUIRE(!spec->latent_norm || spec->latent != 0, "a norm of a latent space that is not there");
    REQUIRE(!spec->latent_norm || (isfinite(spec->latent_eps) && spec->latent_eps > 0),
            "the epsilon of the latent space's norm must be finite and positive");
    return moe_ok();
}

static struct moe_status check_spec(const struct moe_layer_spec *spec)
{
    REQUIRE(spec->hidden >= 1 && spec->hidden <= MOE_MAX_HIDDEN, "hidden width is %u: 1 to %d",
            spec->hidden, MOE_MAX_HIDDEN);
    REQUIRE(spec->experts >= 1 && spec->experts <= MOE_MAX_EXPERTS, "%u experts: 1 to %d",
            spec->experts, MOE_MAX_EXPERTS);
    REQUIRE(spec->intermediate >= 1, "the experts' inner width is 0");
    REQUIRE(spec->weighting <= MOE_WEIGHT_INPUT, "unknown weighting %d", (int)spec->weighting);
    REQUIRE(spec->activation < MOE_ACT_COUNT && spec->shared_activation < MOE_ACT_COUNT,
            "unknown activation");
    bool situ = moe_layer_uses(spec, MOE_ACT_SITU);
    bool limits = situ || moe_layer_uses(spec, MOE_ACT_SWIGLU_CLAMPED) ||
                  moe_layer_uses(spec, MOE_ACT_SWIGLU_OAI);
    REQUIRE(!limits || (isfinite(spec->swiglu_limit) && spec->swiglu_limit > 0),
            "the activation's limit must be finite and positive");
    REQUIRE(isfinite(spec->swiglu_alpha), "the activation's alpha must be finite");
    REQUIRE(!situ || spec->swiglu_alpha > 0, "the activation's alpha must be positive");
    MOE_TRY(check_latent(spec));
    REQUIRE(!spec->shared_gated || spec->shared_intermediate != 0,
            "a gate for a shared expert that does not exist");
    return check_router(spec);
}

static struct moe_status check_placement(const struct moe_layer_spec *spec,
                                         const struct moe_placement *p, uint32_t slot)
{
    REQUIRE(p->experts == spec->experts, "placement of %u experts for a layer of %u", p->experts,
            spec->experts);
    REQUIRE(p->slots >= 1 && p->slots <= MOE_MAX_SLOTS, "placement on %u slots: 1 to %d", p->slots,
            MOE_MAX_SLOTS);
    REQUIRE(slot < p->slots, "slot %u of %u", slot, p->slots);
    REQUIRE(p->offset[0] == 0, "placement offsets start at %u", p->offset[0]);
    for (uint32_t e = 0; e < p->experts; e++) {
        REQUIRE(p->offset[e + 1] >= p->offset[e] && p->offset[e + 1] - p->offset[e] <= p->slots,
                "placement offsets of expert %u", e);
        for (uint32_t i = p->offset[e]; i < p->offset[e + 1]; i++)
            REQUIRE(p->slot[i] < p->slots && (i == p->offset[e] || p->slot[i - 1] < p->slot[i]),
                    "slot list of expert %u", e);
    }
    return moe_ok();
}

struct moe_status moe_layer_check(const struct moe_layer_spec *spec,
                                  const struct moe_placement *placement, uint32_t slot)
{
    MOE_TRY(check_spec(spec));
    return check_placement(spec, placement, slot);
}

static struct moe_status check_format(const struct moe_weight_format *f, const char *whose,
                                      moe_computes_fn computes, const struct moe_device *device)
{
    if (f->encoding == MOE_ENC_NONE)
        return moe_ok();
    REQUIRE((unsigned)f->encoding < MOE_ENC_COUNT && (unsigned)f->scale < MOE_SCALE_COUNT,
            "unknown number format of %s experts", whose);
    REQUIRE(!f->zero_points || f->encoding == MOE_ENC_INT4, "zero points of %s experts in %s",
            whose, moe_encoding_traits(f->encoding).name);
    REQUIRE((unsigned)f->activations < MOE_ACTIVATIONS_COUNT, "unknown activations of %s experts",
            whose);
    REQUIRE(f->activations == MOE_ACTIVATIONS_PLAIN || f->encoding == MOE_ENC_F8E4M3,
            "FP8 activations for %s experts in %s", whose, moe_encoding_traits(f->encoding).name);
    if (computes(device, f))
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                     "this backend cannot compute with %s experts in %s as they are%s", whose,
                     moe_encoding_traits(f->encoding).name,
                     f->activations != MOE_ACTIVATIONS_PLAIN ? " and FP8 activations" : "");
}

struct moe_status moe_layer_check_formats(const struct moe_layer_spec *spec,
                                          moe_computes_fn computes, const struct moe_device *device)
{
    MOE_TRY(check_format(&spec->routed_format, "routed", computes, device));
    return check_format(&spec->shared_format, "shared", computes, device);
}

/* `*format` is that of a weight that the layer has quantised. */
static struct moe_status find_format(const struct moe_layer_spec *spec, enum moe_weight weight,
                                     const struct moe_weight_format **format)
{
    size_t rows, columns;
    *format = weight < MOE_WEIGHT_COUNT ? moe_weight_format_of(spec, weight) : NULL;
    if (*format == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: this layer has none that is quantised", moe_weight_name(weight));
    moe_weight_shape(spec, weight, &rows, &columns);
    if (rows == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "%s: this layer has none",
                         weight_names[weight]);
    return moe_ok();
}

struct moe_status moe_layer_check_packed(const struct moe_layer_spec *spec, enum moe_weight weight,
                                         const struct moe_packed_matrix *m)
{
    const struct moe_weight_format *f;
    MOE_TRY(find_format(spec, weight, &f));
    if (m->elements == NULL || m->scales == NULL || (m->zeros != NULL) != f->zero_points)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: elements, scales or zero points are missing or unexpected",
                         weight_names[weight]);
    return moe_ok();
}

struct moe_status moe_layer_check_packed_source(const struct moe_layer_spec *spec,
                                                enum moe_weight weight,
                                                const struct moe_packed_source *source)
{
    const struct moe_weight_format *f;
    MOE_TRY(find_format(spec, weight, &f));
    if (source->elements.read == NULL || source->scales.read == NULL || f->zero_points)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: a source has elements and scales, and no zero points",
                         weight_names[weight]);
    if (source->by_turns && (weight != MOE_WEIGHT_GATE || f->block_rows != 1))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: only rows of gate and up with separate scales take turns",
                         weight_names[weight]);
    return moe_ok();
}

struct moe_status moe_layer_check_tensor(const struct moe_layer_spec *spec, enum moe_weight weight,
                                         enum moe_dtype dtype, size_t bytes)
{
    if (weight >= MOE_WEIGHT_COUNT)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "unknown weight %d",
                         (int)weight);
    if (dtype != MOE_DTYPE_F32 && dtype != MOE_DTYPE_BF16)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "%s: neither F32 nor BF16", weight_names[weight]);
    if (moe_weight_format_of(spec, weight) != NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: quantised in this layer's spec", weight_names[weight]);
    size_t rows, columns, want;
    moe_weight_shape(spec, weight, &rows, &columns);
    if (rows == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "%s: this layer has none",
                         weight_names[weight]);
    if (!moe_size_mul3(rows, columns, moe_dtype_bytes(dtype), &want) || bytes != want)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: %zu bytes for a %zu x %zu tensor", weight_names[weight], bytes, rows,
                         columns);
    return moe_ok();
}

bool moe_weight_is_bias(enum moe_weight w)
{
    return w == MOE_WEIGHT_LOGIT_BIAS || w == MOE_WEIGHT_SELECT_BIAS || w == MOE_WEIGHT_GATE_BIAS ||
           w == MOE_WEIGHT_UP_BIAS || w == MOE_WEIGHT_DOWN_BIAS || w == MOE_WEIGHT_LATENT_NORM;
}

const char *moe_weight_name(enum moe_weight weight)
{
    return weight < MOE_WEIGHT_COUNT ? weight_names[weight] : "unknown weight";
}

struct moe_status moe_layer_find_entry(const struct moe_layer_spec *spec, uint32_t slot,
                                       const int32_t *local_index, enum moe_weight weight,
                                       uint32_t expert, uint32_t *entry)
{
    *entry = 0;
    if (!moe_weight_is_expert(weight))
        return moe_ok();
    if (expert >= spec->experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                         "expert %u of a layer of %u", expert, spec->experts);
    if (local_index[expert] < 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "expert %u is not placed on slot %u", expert, slot);
    *entry = (uint32_t)local_index[expert];
    return moe_ok();
}

struct moe_status moe_layer_check_complete(const struct moe_layer_spec *spec, const uint32_t *local,
                                           uint32_t locals, bool *const uploaded[MOE_WEIGHT_COUNT])
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        uint32_t entries = moe_weight_is_expert(w) ? locals : 1;
        for (uint32_t i = 0; uploaded[w] != NULL && i < entries; i++) {
            if (uploaded[w][i])
                continue;
            if (!moe_weight_is_expert(w))
                return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                                 "layer %u: %s is missing", spec->layer, moe_weight_name(w));
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                             "layer %u: %s of expert %u is missing", spec->layer,
                             moe_weight_name(w), local[i]);
        }
    }
    return moe_ok();
}

uint64_t moe_placement_slots_of(const struct moe_placement *p, uint32_t expert)
{
    uint64_t slots = 0;
    for (uint32_t i = p->offset[expert]; i < p->offset[expert + 1]; i++)
        slots |= UINT64_C(1) << p->slot[i];
    return slots;
}

struct moe_status moe_placement_check_live(const struct moe_placement *p, uint64_t live)
{
    for (uint32_t e = 0; e < p->experts; e++)
        if ((moe_placement_slots_of(p, e) & live) == 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE,
                             "expert %u has no copy on a live slot", e);
    return moe_ok();
}

bool moe_placement_has(const struct moe_placement *p, uint32_t expert, uint32_t slot)
{
    for (uint32_t i = p->offset[expert]; i < p->offset[expert + 1]; i++)
        if (p->slot[i] == slot)
            return true;
    return false;
}

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(bytes != 0 ? bytes : 1);
    if (copy != NULL && bytes != 0)
        memcpy(copy, data, bytes);
    return copy;
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a layer");
}

struct moe_status moe_placement_copy(const struct moe_placement *p, struct moe_placement *copy)
{
    *copy = *p;
    copy->offset = copy_of(p->offset, (p->experts + (size_t)1) * sizeof *p->offset);
    copy->slot = copy_of(p->slot, p->offset[p->experts] * sizeof *p->slot);
    return copy->offset == NULL || copy->slot == NULL ? no_memory() : moe_ok();
}

void moe_placement_free(struct moe_placement *copy)
{
    free((void *)copy->offset);
    free((void *)copy->slot);
}

void moe_placement_activate(const struct moe_placement *all, uint64_t live,
                            struct moe_placement *active)
{
    uint32_t *offset = (uint32_t *)active->offset, n = 0;
    uint16_t *slot = (uint16_t *)active->slot;
    for (uint32_t e = 0; e < all->experts; e++) {
        offset[e] = n;
        for (uint32_t i = all->offset[e]; i < all->offset[e + 1]; i++)
            if (live >> all->slot[i] & 1)
                slot[n++] = all->slot[i];
    }
    offset[all->experts] = n;
}

struct moe_status moe_placement_list_local(const struct moe_placement *p, uint32_t slot,
                                           uint32_t **local, uint32_t *locals,
                                           int32_t **local_index)
{
    *locals = 0;
    *local = calloc(p->experts, sizeof **local);
    *local_index = calloc(p->experts, sizeof **local_index);
    if (*local == NULL || *local_index == NULL)
        return no_memory();
    for (uint32_t e = 0; e < p->experts; e++) {
        (*local_index)[e] = -1;
        if (!moe_placement_has(p, e, slot))
            continue;
        (*local_index)[e] = (int32_t)*locals;
        (*local)[(*locals)++] = e;
    }
    return moe_ok();
}
