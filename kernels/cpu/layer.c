/* Creates layers: checks spec and placement once and for all, so that the compute parts need no
 * checks of their own, and takes the weights in. A layer that lacks a weight never becomes
 * runnable. */
#include "cpu/layer.h"

#include "base/size.h"

#include <math.h>
#include <stdlib.h>

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
};

static bool is_bias(enum moe_weight w)
{
    return w == MOE_WEIGHT_LOGIT_BIAS || w == MOE_WEIGHT_SELECT_BIAS || w == MOE_WEIGHT_GATE_BIAS ||
           w == MOE_WEIGHT_UP_BIAS || w == MOE_WEIGHT_DOWN_BIAS;
}

static uint32_t entries_of(const struct moe_layer *layer, enum moe_weight w)
{
    return moe_weight_is_expert(w) ? layer->local_experts : 1;
}

/* ------------------------------------------------------------- spec, placement */

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
    REQUIRE(r->score <= MOE_SCORE_SQRTSOFTPLUS, "unknown score function %d", (int)r->score);
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
    REQUIRE(isfinite(r->renorm_eps) && r->renorm_eps >= 0, "renorm_eps must be finite, >= 0");
    REQUIRE(isfinite(r->scale), "the router's scale must be finite");
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
    REQUIRE(spec->activation <= MOE_ACT_SWIGLU_OAI && spec->shared_activation <= MOE_ACT_SWIGLU_OAI,
            "unknown activation");
    bool clamps = spec->activation != MOE_ACT_SWIGLU ||
                  (spec->shared_intermediate != 0 && spec->shared_activation != MOE_ACT_SWIGLU);
    REQUIRE(!clamps || (isfinite(spec->swiglu_limit) && spec->swiglu_limit > 0),
            "the activation's limit must be finite and positive");
    REQUIRE(isfinite(spec->swiglu_alpha), "the activation's alpha must be finite");
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

/* ------------------------------------------------------------- create, destroy */

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a layer");
}

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(bytes != 0 ? bytes : 1);
    if (copy != NULL && bytes != 0)
        memcpy(copy, data, bytes);
    return copy;
}

static bool expert_is_on(const struct moe_placement *p, uint32_t expert, uint32_t slot)
{
    for (uint32_t i = p->offset[expert]; i < p->offset[expert + 1]; i++)
        if (p->slot[i] == slot)
            return true;
    return false;
}

static struct moe_status copy_placement(struct moe_layer *layer, const struct moe_placement *p)
{
    size_t copies = p->offset[p->experts];
    layer->placement = *p;
    layer->placement.offset = copy_of(p->offset, (p->experts + (size_t)1) * sizeof *p->offset);
    layer->placement.slot = copy_of(p->slot, copies * sizeof *p->slot);
    layer->local = calloc(p->experts, sizeof *layer->local);
    layer->local_index = calloc(p->experts, sizeof *layer->local_index);
    if (layer->placement.offset == NULL || layer->placement.slot == NULL || layer->local == NULL ||
        layer->local_index == NULL)
        return out_of_memory();
    for (uint32_t e = 0; e < p->experts; e++) {
        layer->local_index[e] = -1;
        if (!expert_is_on(p, e, layer->slot))
            continue;
        layer->local_index[e] = (int32_t)layer->local_experts;
        layer->local[layer->local_experts++] = e;
    }
    return moe_ok();
}

static struct moe_status bias_bytes(const struct moe_layer *layer, enum moe_weight w, size_t *bytes)
{
    size_t n, columns;
    moe_weight_shape(&layer->spec, w, &n, &columns);
    if (!moe_size_mul3(entries_of(layer, w), n, sizeof(float), bytes))
        return out_of_memory();
    return moe_ok();
}

static struct moe_status make_room(struct moe_layer *layer, enum moe_weight w)
{
    size_t rows, columns;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    uint32_t entries = entries_of(layer, w);
    if (rows == 0 || entries == 0)
        return moe_ok();
    layer->uploaded[w] = calloc(entries, sizeof *layer->uploaded[w]);
    if (layer->uploaded[w] == NULL)
        return out_of_memory();
    if (!is_bias(w)) {
        layer->matrix[w] = calloc(entries, sizeof *layer->matrix[w]);
        return layer->matrix[w] == NULL ? out_of_memory() : moe_ok();
    }
    size_t bytes;
    void *p;
    MOE_TRY(bias_bytes(layer, w, &bytes));
    MOE_TRY(moe_cpu_mem_alloc(layer->device, MOE_MEM_DEVICE, bytes, &p));
    layer->bias[w] = p;
    return moe_ok();
}

struct moe_status moe_cpu_layer_create(struct moe_device *device, const struct moe_layer_spec *spec,
                                       const struct moe_placement *placement, uint32_t slot,
                                       struct moe_layer **out)
{
    MOE_TRY(check_spec(spec));
    MOE_TRY(check_placement(spec, placement, slot));
    struct moe_layer *layer = calloc(1, sizeof *layer);
    if (layer == NULL)
        return out_of_memory();
    layer->device = device;
    layer->spec = *spec;
    layer->slot = slot;
    struct moe_status st;
    MOE_TRY_GOTO(st, copy_placement(layer, placement), fail);
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        MOE_TRY_GOTO(st, make_room(layer, w), fail);
    *out = layer;
    return st;
fail:
    moe_cpu_layer_destroy(layer);
    return st;
}

static void free_weight(struct moe_layer *layer, enum moe_weight w)
{
    for (uint32_t i = 0; layer->matrix[w] != NULL && i < entries_of(layer, w); i++)
        moe_cpu_matrix_free(layer->device, &layer->matrix[w][i]);
    free(layer->matrix[w]);
    free(layer->uploaded[w]);
    size_t bytes = 0;
    struct moe_status st = bias_bytes(layer, w, &bytes);
    MOE_INVARIANT(layer->bias[w] == NULL || !moe_failed(&st));
    moe_cpu_mem_free(layer->device, MOE_MEM_DEVICE, layer->bias[w], bytes);
}

void moe_cpu_layer_destroy(struct moe_layer *layer)
{
    if (layer == NULL)
        return;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++)
        free_weight(layer, w);
    free((void *)layer->placement.offset);
    free((void *)layer->placement.slot);
    free(layer->local);
    free(layer->local_index);
    free(layer);
}

/* --------------------------------------------------------------------- weights */

/* The entry that an upload is for. */
static struct moe_status find_entry(const struct moe_layer *layer, enum moe_weight w,
                                    uint32_t expert, uint32_t *entry)
{
    *entry = 0;
    if (!moe_weight_is_expert(w))
        return moe_ok();
    if (expert >= layer->spec.experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                         "expert %u of a layer of %u", expert, layer->spec.experts);
    if (layer->local_index[expert] < 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "expert %u is not placed on slot %u", expert, layer->slot);
    *entry = (uint32_t)layer->local_index[expert];
    return moe_ok();
}

static struct moe_status check_upload(const struct moe_layer *layer, enum moe_weight w,
                                      enum moe_dtype dtype, size_t bytes)
{
    if (layer->finished)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_INVALID,
                         "%s: the layer is finished", weight_names[w]);
    if (dtype != MOE_DTYPE_F32 && dtype != MOE_DTYPE_BF16)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "%s: neither F32 nor BF16", weight_names[w]);
    size_t rows, columns, want;
    moe_weight_shape(&layer->spec, w, &rows, &columns);
    if (rows == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "%s: this layer has none",
                         weight_names[w]);
    if (!moe_size_mul3(rows, columns, moe_dtype_bytes(dtype), &want) || bytes != want)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: %zu bytes for a %zu x %zu tensor", weight_names[w], bytes, rows,
                         columns);
    return moe_ok();
}

static void take_bias(float *to, size_t n, enum moe_dtype dtype, const void *data)
{
    if (dtype == MOE_DTYPE_F32) {
        memcpy(to, data, n * sizeof *to);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t b;
        memcpy(&b, (const char *)data + i * sizeof b, sizeof b);
        to[i] = moe_bf16_to_f32(b);
    }
}

struct moe_status moe_cpu_layer_upload(struct moe_layer *layer, enum moe_weight weight,
                                       uint32_t expert, enum moe_dtype dtype, const void *data,
                                       size_t bytes)
{
    if (weight >= MOE_WEIGHT_COUNT)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "unknown weight %d",
                         (int)weight);
    uint32_t entry;
    MOE_TRY(check_upload(layer, weight, dtype, bytes));
    MOE_TRY(find_entry(layer, weight, expert, &entry));
    if (layer->uploaded[weight][entry])
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_TENSOR_INVALID, "%s: uploaded twice",
                         weight_names[weight]);
    size_t rows, columns;
    moe_weight_shape(&layer->spec, weight, &rows, &columns);
    if (is_bias(weight)) {
        take_bias(layer->bias[weight] + entry * rows, rows, dtype, data);
    } else {
        /* Everything that decides between experts or scales a whole token stays fp32. */
        bool exact = weight == MOE_WEIGHT_ROUTER || weight == MOE_WEIGHT_SHARED_GATE_VECTOR;
        MOE_TRY(moe_cpu_matrix_pack(layer->device, (uint32_t)rows, (uint32_t)columns, dtype,
                                    exact ? MOE_DTYPE_F32 : dtype, data,
                                    &layer->matrix[weight][entry]));
    }
    layer->uploaded[weight][entry] = true;
    return moe_ok();
}

struct moe_status moe_cpu_layer_finish(struct moe_layer *layer)
{
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        for (uint32_t i = 0; layer->uploaded[w] != NULL && i < entries_of(layer, w); i++) {
            if (layer->uploaded[w][i])
                continue;
            if (!moe_weight_is_expert(w))
                return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                                 "layer %u: %s is missing", layer->spec.layer, weight_names[w]);
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_TENSOR_MISSING,
                             "layer %u: %s of expert %u is missing", layer->spec.layer,
                             weight_names[w], layer->local[i]);
        }
    }
    layer->finished = true;
    return moe_ok();
}
