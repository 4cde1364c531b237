/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of training; see training_rules.h. */
#include "common/training_rules.h"

#include "common/layer_rules.h"

#define REQUIRE(cond, ...)                                                                         \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, __VA_ARGS__);        \
    } while (0)

enum {
    ALL_GROUPS = (1 << MOE_PARAMS_COUNT) - 1,
    ALL_TARGETS = MOE_LORA_GATE | MOE_LORA_UP | MOE_LORA_DOWN,
};

/* ------------------------------------------------------------------ parameters */

bool moe_train_is_adapted(const struct moe_trainer_config *config, enum moe_weight weight)
{
    uint32_t target = weight == MOE_WEIGHT_GATE   ? MOE_LORA_GATE
                      : weight == MOE_WEIGHT_UP   ? MOE_LORA_UP
                      : weight == MOE_WEIGHT_DOWN ? MOE_LORA_DOWN
                                                  : 0;
    return config->lora_rank > 0 && (config->lora_targets & target) != 0;
}

static bool is_w8a8(const struct moe_weight_format *f)
{
    return f->encoding != MOE_ENC_NONE && f->activations != MOE_ACTIVATIONS_PLAIN;
}

/* Quantised matrices cannot learn: only their adapters can. Adapters see the rows as they are. */
static struct moe_status check_formats(const struct moe_layer_spec *spec,
                                       const struct moe_trainer_config *c)
{
    bool experts = c->lora_rank == 0 && !(c->frozen >> MOE_PARAMS_EXPERTS & 1);
    bool shared = !(c->frozen >> MOE_PARAMS_SHARED & 1);
    REQUIRE(!experts || moe_weight_format_of(spec, MOE_WEIGHT_GATE) == NULL,
            "quantised experts train adapters only");
    REQUIRE(!shared || moe_weight_format_of(spec, MOE_WEIGHT_SHARED_GATE) == NULL,
            "a quantised shared expert does not train");
    REQUIRE(!is_w8a8(&spec->routed_format) && !is_w8a8(&spec->shared_format),
            "layers with FP8 activations do not train");
    return moe_ok();
}

struct moe_status moe_trainer_check(const struct moe_layer_spec *spec,
                                    const struct moe_trainer_config *c)
{
    REQUIRE(c->optimizer == MOE_OPTIMIZER_ADAMW || c->optimizer == MOE_OPTIMIZER_SGD,
            "unknown optimizer %d", (int)c->optimizer);
    REQUIRE((c->frozen & ~(uint32_t)ALL_GROUPS) == 0, "unknown parameter groups to freeze");
    REQUIRE((c->lora_targets & ~(uint32_t)ALL_TARGETS) == 0, "unknown targets of adapters");
    const char *uncommon = moe_layer_uncommon(spec);
    REQUIRE(uncommon == NULL, "layer %u has %s; such layers do not train", spec->layer, uncommon);
    MOE_TRY(check_formats(spec, c));
    if (c->lora_rank == 0)
        return moe_ok();
    uint32_t max_rank = spec->hidden < spec->intermediate ? spec->hidden : spec->intermediate;
    if (max_rank > MOE_TRAIN_MAX_RANK)
        max_rank = MOE_TRAIN_MAX_RANK;
    REQUIRE(c->lora_rank <= max_rank, "adapters of rank %u: at most %u", c->lora_rank, max_rank);
    REQUIRE(c->lora_targets != 0, "adapters without a target");
    REQUIRE(isfinite(c->lora_alpha), "the adapters' alpha must be finite");
    return moe_ok();
}

/* An adapter that is trained; a trainer stores no W0 of frozen experts. */
static bool has_adapter(const struct moe_trainer_config *c, enum moe_weight weight)
{
    return moe_train_is_adapted(c, weight) && !(c->frozen >> MOE_PARAMS_EXPERTS & 1);
}

static bool is_trained(const struct moe_trainer_config *c, enum moe_weight w)
{
    if (w == MOE_WEIGHT_SELECT_BIAS || (c->frozen >> moe_weight_group(w) & 1))
        return false;
    return c->lora_rank == 0 || !moe_weight_is_expert(w);
}

uint32_t moe_train_params(const struct moe_layer_spec *spec, const struct moe_trainer_config *c,
                          struct moe_train_param params[MOE_TRAIN_MAX_PARAMS])
{
    uint32_t n = 0;
    for (enum moe_weight w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        moe_weight_shape(spec, w, &rows, &columns);
        if (rows == 0)
            continue;
        uint32_t out = (uint32_t)rows, in = (uint32_t)columns;
        if (is_trained(c, w))
            params[n++] = (struct moe_train_param){w, MOE_PART_WEIGHT, out, in};
        if (has_adapter(c, w)) {
            params[n++] = (struct moe_train_param){w, MOE_PART_LORA_A, c->lora_rank, in};
            params[n++] = (struct moe_train_param){w, MOE_PART_LORA_B, out, c->lora_rank};
        }
    }
    return n;
}

static struct moe_status not_held(const struct moe_train_key *key)
{
    return moe_error(MOE_NOT_FOUND, MOE_REASON_TENSOR_INVALID,
                     "%s: this trainer does not hold that tensor", moe_weight_name(key->weight));
}

struct moe_status moe_train_find(const struct moe_layer_spec *spec,
                                 const struct moe_trainer_config *c,
                                 const struct moe_train_key *key, size_t bytes,
                                 struct moe_train_place *place)
{
    if (key->weight >= MOE_WEIGHT_COUNT || key->part > MOE_PART_LORA_B ||
        key->tensor > MOE_TRAIN_BASE)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "weight %d, part %d, tensor %d: unknown", (int)key->weight, (int)key->part,
                         (int)key->tensor);
    struct moe_train_param params[MOE_TRAIN_MAX_PARAMS];
    uint32_t n = moe_train_params(spec, c, params);
    size_t rows, columns;
    moe_weight_shape(spec, key->weight, &rows, &columns);
    *place = (struct moe_train_place){-1, (uint32_t)rows, (uint32_t)columns};
    for (uint32_t i = 0; i < n; i++)
        if (params[i].weight == key->weight && params[i].part == key->part)
            *place = (struct moe_train_place){(int)i, params[i].rows, params[i].columns};
    bool resident = key->part == MOE_PART_WEIGHT && key->tensor == MOE_TRAIN_VALUE;
    bool base = key->part == MOE_PART_WEIGHT && key->tensor == MOE_TRAIN_BASE &&
                has_adapter(c, key->weight);
    if (rows == 0 || (place->param < 0 && !resident && !base) ||
        (key->tensor == MOE_TRAIN_BASE && !base) ||
        (key->tensor == MOE_TRAIN_MOMENT2 && c->optimizer != MOE_OPTIMIZER_ADAMW))
        return not_held(key);
    if (bytes != (size_t)place->rows * place->columns * sizeof(float))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: %zu bytes for a %u x %u fp32 tensor", moe_weight_name(key->weight),
                         bytes, place->rows, place->columns);
    return moe_ok();
}

struct moe_status moe_train_check_writable(const struct moe_train_key *key)
{
    if (key->tensor == MOE_TRAIN_BASE)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "%s: what is under an adapter is written as the weight's value",
                         moe_weight_name(key->weight));
    return moe_ok();
}

struct moe_status moe_train_check_frozen(const struct moe_trainer_config *c, uint32_t frozen)
{
    REQUIRE((frozen & ~(uint32_t)ALL_GROUPS) == 0, "unknown parameter groups to freeze");
    if ((c->frozen & ~frozen) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "what was frozen from the beginning cannot be thawed");
    return moe_ok();
}

/* ------------------------------------------------------------------- arguments */

static bool has_tensors(const struct moe_backward_args *a)
{
    return a->x != NULL && a->dy != NULL && a->ids != NULL && a->dx != NULL &&
           a->token_state != NULL;
}

struct moe_status moe_backward_check(const struct moe_session_config *session,
                                     const struct moe_backward_args *a)
{
    if (!session->training)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the session was not joined for training");
    if (!isfinite(a->aux_coeff))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the coefficient of the load-balance loss must be finite");
    if (a->tokens > 0 && !has_tensors(a))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "a backward pass with tokens needs x, dy, ids, dx and token states");
    for (uint32_t t = 0; a->mode != NULL && t < a->tokens; t++)
        if ((a->mode[t] != MOE_ROUTE_IDS && a->mode[t] != MOE_ROUTE_IDS_WEIGHTS) ||
            (a->mode[t] == MOE_ROUTE_IDS_WEIGHTS && a->weights == NULL))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID,
                             "token %u: routing mode %u lacks its ids or weights", t, a->mode[t]);
    return moe_ok();
}

struct moe_status moe_optimizer_check(enum moe_optimizer optimizer,
                                      const struct moe_optimizer_args *a)
{
    REQUIRE(isfinite(a->learning_rate) && a->learning_rate >= 0,
            "the learning rate must be finite, >= 0");
    REQUIRE(isfinite(a->weight_decay) && a->weight_decay >= 0,
            "the weight decay must be finite, >= 0");
    REQUIRE(isfinite(a->max_grad_norm) && a->max_grad_norm >= 0,
            "the largest gradient norm must be finite, >= 0");
    REQUIRE(isfinite(a->grad_scale) && a->grad_scale != 0,
            "the scale of gradients must be finite, not 0");
    REQUIRE(isfinite(a->balance_rate) && a->balance_rate >= 0,
            "the balance rate must be finite, >= 0");
    if (optimizer == MOE_OPTIMIZER_SGD) {
        REQUIRE(a->momentum >= 0 && a->momentum < 1, "the momentum must be in [0, 1)");
        return moe_ok();
    }
    REQUIRE(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1,
            "betas must be in [0, 1)");
    REQUIRE(isfinite(a->epsilon) && a->epsilon >= 0, "epsilon must be finite, >= 0");
    REQUIRE(a->number >= 1, "optimizer steps count from 1");
    return moe_ok();
}

/* -------------------------------------------------------------------- agreement */

/* FNV-1a. */
static void mix_bytes(uint64_t *hash, const void *data, size_t bytes)
{
    const uint8_t *b = data;
    for (size_t i = 0; i < bytes; i++)
        *hash = (*hash ^ b[i]) * UINT64_C(0x100000001b3);
}

uint64_t moe_optimizer_hash(const struct moe_optimizer_args *a, size_t trainers)
{
    const double scalars[] = {a->learning_rate, a->weight_decay, a->beta1,
                              a->beta2,         a->epsilon,      a->momentum,
                              a->max_grad_norm, a->grad_scale,   a->balance_rate};
    const uint64_t counts[] = {a->number, trainers};
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    mix_bytes(&hash, scalars, sizeof scalars);
    mix_bytes(&hash, counts, sizeof counts);
    return hash;
}

void moe_optimizer_mix_trainer(uint64_t *hash, const struct moe_layer_spec *s,
                               const struct moe_placement *p, const struct moe_trainer_config *c,
                               uint32_t frozen)
{
    const uint64_t values[] = {
        s->layer,     s->hidden,    s->experts,      s->intermediate, s->shared_intermediate,
        c->optimizer, c->lora_rank, c->lora_targets, c->frozen,       frozen,
        p->version};
    mix_bytes(hash, values, sizeof values);
    mix_bytes(hash, &c->lora_alpha, sizeof c->lora_alpha);
    mix_bytes(hash, p->offset, (p->experts + (size_t)1) * sizeof *p->offset);
    mix_bytes(hash, p->slot, p->offset[p->experts] * sizeof *p->slot);
}

static struct moe_status check_slot(const struct moe_session_config *session,
                                    const struct moe_layer_spec *spec,
                                    const struct moe_placement *p, uint32_t slot)
{
    if (p->slots != session->slots || slot != session->slot)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                         "layer %u was placed for slot %u of %u, the session has slot %u of %u",
                         spec->layer, slot, p->slots, session->slot, session->slots);
    return moe_ok();
}

struct moe_status moe_optimizer_check_live(const struct moe_session_config *session,
                                           const struct moe_layer_spec *spec,
                                           const struct moe_placement *p, uint32_t slot)
{
    MOE_TRY(check_slot(session, spec, p, slot));
    return moe_placement_check_live(p, session->live);
}

struct moe_status moe_optimizer_check_votes(const struct moe_session_config *session,
                                            const struct moe_optimizer_vote *all,
                                            const struct moe_status *own)
{
    if (moe_failed(own))
        return *own;
    for (uint32_t p = 0; p < session->slots; p++) {
        if (!(session->live >> p & 1))
            continue;
        if (all[p].refuses != 0 || all[p].hash != all[session->slot].hash)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH, "slot %u %s", p,
                             all[p].refuses != 0 ? "refuses the optimizer step"
                                                 : "takes another optimizer step");
    }
    return moe_ok();
}

/* --------------------------------------------------------------------- formulas */

/* A bijection that mixes all bits (the finaliser of splitmix64). */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

float moe_lora_initial(uint64_t seed, uint32_t layer, uint32_t expert, enum moe_weight weight,
                       uint64_t element, uint32_t in)
{
    const uint64_t golden = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t which = (uint64_t)layer << 32 | (uint64_t)expert << 8 | (uint64_t)weight;
    uint64_t bits = mix(mix(mix(seed + golden) + which + golden) + element + golden);
    double unit = (double)(bits >> 11) * 0x1p-53; /* [0, 1) */
    return (float)((2 * unit - 1) / sqrt((double)in));
}

double moe_clip_factor(double norm, double max_grad_norm)
{
    double factor = max_grad_norm / (norm + 1e-6);
    return max_grad_norm > 0 && factor < 1 ? factor : 1;
}

double moe_aux_constant(const struct moe_layer_spec *spec, float aux_coeff, uint64_t group_tokens)
{
    if (group_tokens == 0)
        return 0;
    double tokens = (double)group_tokens;
    return (double)aux_coeff * spec->experts / (spec->router.top_k * tokens * tokens);
}

double moe_balance_change(double rate, uint64_t load, uint64_t total, uint32_t experts)
{
    uint64_t scaled = load * experts; /* compares with the mean without rounding */
    return scaled < total ? rate : scaled > total ? -rate : 0;
}

struct moe_train_update moe_train_update_of(enum moe_optimizer optimizer,
                                            const struct moe_optimizer_args *a, double clip)
{
    struct moe_train_update u = {.optimizer = optimizer,
                                 .scale = (float)(a->grad_scale * clip),
                                 .decay = (float)(1 - a->learning_rate * a->weight_decay)};
    if (optimizer == MOE_OPTIMIZER_SGD) {
        u.momentum = (float)a->momentum;
        u.step = (float)a->learning_rate;
        return u;
    }
    u.beta1 = (float)a->beta1;
    u.one_minus_beta1 = (float)(1 - a->beta1);
    u.beta2 = (float)a->beta2;
    u.one_minus_beta2 = (float)(1 - a->beta2);
    u.step = (float)(a->learning_rate / (1 - pow(a->beta1, (double)a->number)));
    u.root = (float)sqrt(1 - pow(a->beta2, (double)a->number));
    u.epsilon = (float)a->epsilon;
    return u;
}
