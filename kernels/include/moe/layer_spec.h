/* SPDX-License-Identifier: Apache-2.0 */
/* What one MoE layer computes: plain data, no pointers into weights.
 *
 * For a token x [H], with E routed experts and Z zero (identity) experts:
 *
 *   logit  = W_r x + logit_bias                             [E+Z], fp32
 *   score  = score function of logit                        see enum moe_score
 *   key    = score + select_bias  (for the choice only)     [E+Z]
 *            Without select_bias, and without sums of keys (groups = 1 or group_best = 1), the key
 *            is the logit: the same order, but scores saturate in fp32 and would tie.
 *   S      = the K best by key, inside the `topk_group` best of `groups` groups;
 *            one total order: key descending, then expert id ascending; NaN refuses the token
 *   w_e    = renormalise(score_e, e in S) * scale
 *   y      = sum over e in S of  w_e * ffn_e(x)              weighting OUTPUT
 *            (early weighting multiplies the activation and the down bias instead: same value)
 *   y      = sum over e in S of  ffn_e(w_e * x)              weighting INPUT (Llama-4)
 *   y     += shared(x) [* sigmoid(shared_gate . x)]
 *   a zero expert is ffn_e(x) = x
 *
 *   ffn_e(x) = down_e( act(gate_e x + gate_bias_e, up_e x + up_bias_e) ) + down_bias_e
 *   ffn_e(x) = down_e( act(up_e x + up_bias_e) ) + down_bias_e    with an activation without a gate
 *
 * With a latent space of width L (LatentMoE), the routed experts have L inputs and outputs. Router
 * and shared expert still see x:
 *
 *   z      = W_to x                                          [L]
 *   u      = sum over e in S of  w_e * ffn_e(z)              [L]; or of ffn_e(w_e * z)
 *   y      = W_from u                                        [H], without latent_norm
 *   y      = W_from ( g * u / sqrt(mean(u^2) + latent_eps) ) with it; g is its weight [L]
 *   y     += shared(x), as above
 *
 * The family of a model decides which of these apply (daemon/model/README.md). The caller does the
 * residual add, norms and any outer factor. */
#ifndef MOE_LAYER_SPEC_H
#define MOE_LAYER_SPEC_H

#include "moe/types.h"
#include "moe/weight_format.h"

#include <stdbool.h>

enum moe_score {
    MOE_SCORE_SOFTMAX,      /* softmax over all E+Z, then choose (Mixtral, Qwen, DeepSeek-V2) */
    MOE_SCORE_SOFTMAX_TOPK, /* choose by logit, softmax over the K chosen (GPT-OSS) */
    MOE_SCORE_SIGMOID,      /* DeepSeek-V3, GLM-4.5, MiniMax-M2, Llama-4 */
    MOE_SCORE_SQRTSOFTPLUS, /* sqrt(softplus(logit)); softplus(z) = z for z > 20 (DeepSeek-V4) */
    MOE_SCORE_SPARSEMIXER,  /* two experts by logit, and a softmax over near logits for each
                               (Phi-3.5-MoE): w_e = 1 / sum of exp(z_j - z_e) over e itself and
                               each j that is no earlier choice and has
                               (z_e - z_j) / max(|z_j|, z_e) <= 2 jitter */
};

enum moe_renorm {
    MOE_RENORM_NONE,
    MOE_RENORM_SUM,     /* w = s / (sum_S s + renorm_eps); renorm_eps: 0 to 1e-6 */
    MOE_RENORM_CLAMPED, /* w = s / max(sum_S s, renorm_eps)   (ERNIE-4.5) */
};

enum moe_weighting {
    MOE_WEIGHT_OUTPUT_LATE,  /* multiply the expert's output, bias included */
    MOE_WEIGHT_OUTPUT_EARLY, /* multiply the activation and the down bias; the value is that of
                                LATE, and forward passes compute it as LATE */
    MOE_WEIGHT_INPUT,        /* multiply the expert's input */
};

/* g, u: gate and up halves after their biases; limit and alpha are fields of the spec. Sources of
 * SiTU and of the latent space: tests/golden/numpy/README.md. */
enum moe_activation {
    MOE_ACT_SWIGLU,         /* silu(g) * u */
    MOE_ACT_SWIGLU_CLAMPED, /* g = min(g, limit), u = clamp(u, +-limit), silu(g) * u */
    MOE_ACT_SWIGLU_OAI,     /* same clamps, g * sigmoid(alpha g) * (u + 1) */
    MOE_ACT_SITU,  /* alpha tanh(g / alpha) sigmoid(g) * limit tanh(u / limit): Kimi-K3 calls alpha
                      beta, and limit linear_beta. Forward passes only; see moe_layer_uncommon */
    MOE_ACT_RELU2, /* max(u, 0)^2: there is no gate (Nemotron-3). Forward passes only, too */
    MOE_ACT_COUNT,
    MOE_ACT_COMMON_COUNT = MOE_ACT_SITU /* those before it train */
};

/* Whether experts with this activation have a gate, with its weights and biases. */
static inline bool moe_activation_has_gate(enum moe_activation activation)
{
    return activation != MOE_ACT_RELU2;
}

struct moe_router_spec {
    enum moe_score score;
    uint32_t top_k;   /* K, 1..MOE_MAX_TOP_K */
    bool logit_bias;  /* the router's linear layer has a bias, which changes weights */
    bool select_bias; /* the score has a bias that changes only the choice */
    bool by_token; /* a table of the model chooses by token id (DeepSeek-V4): a pass has given ids,
                      scores only weight them. Not with select_bias or groups */
    uint32_t vocabulary; /* with by_token: rows of that table, one for each token id; else 0 */
    uint32_t groups;     /* 1 = no groups; divides E */
    uint32_t topk_group; /* groups to choose from, 1..groups */
    uint32_t group_best; /* group score = sum of this many best keys (1 = max, 2 = DeepSeek-V3) */
    enum moe_renorm renorm;
    float renorm_eps;
    float scale;           /* applied last */
    float jitter;          /* SPARSEMIXER */
    uint32_t zero_experts; /* Z: ids E..E+Z-1 are the identity (LongCat); 0 otherwise */
};

struct moe_layer_spec {
    uint32_t layer;        /* the model's layer index, as clients name it */
    uint32_t hidden;       /* H */
    uint32_t experts;      /* E */
    uint32_t intermediate; /* I of one routed expert */
    struct moe_router_spec router;
    enum moe_weighting weighting;
    enum moe_activation activation;
    float swiglu_limit; /* CLAMPED, OAI and SITU */
    float swiglu_alpha; /* OAI and SITU */
    bool gate_up_bias;  /* gate_bias, up_bias [I] exist; gate_bias only with a gate */
    bool down_bias;     /* down_bias [H] exists; [L] with a latent space */
    bool latent_norm;   /* the experts' sum is normalised before it leaves the latent space */
    uint32_t latent;    /* L, 1..H: width of the latent space; 0 = none. Not with zero experts */
    float latent_eps;   /* of that norm */
    uint32_t
        shared_intermediate; /* I of the shared expert, 0 = none; several count as a wide one */
    bool shared_gated;       /* its output is multiplied by sigmoid(shared_gate . x) */
    enum moe_activation shared_activation; /* with the same limit and alpha */
    /* Of gate, up and down. MOE_ENC_NONE: F32 or BF16, as they are uploaded. Other formats:
     * quantised matrices, which the backend keeps and computes with as they are
     * (moe/packed_matrix.h). */
    struct moe_weight_format routed_format, shared_format;
};

/* Expert -> slots with a copy. Slot lists are ascending; the first is the primary. A row of an
 * expert with n copies on live slots goes to live copy number (source token id) % n, or with
 * `by_content` (hash of the token's row) % n. */
struct moe_placement {
    uint32_t version;       /* increases with every change */
    uint32_t experts;       /* E */
    uint32_t slots;         /* N */
    const uint32_t *offset; /* [E+1] into `slot` */
    const uint16_t *slot;   /* [offset[E]] */
    /* The sums of a token depend on which of its experts share a slot. With this, its bits do not
     * depend on its place in a step, whatever the placement. Only with a backend that has
     * layer_succeed; others ignore it. */
    bool by_content;
};

/* Weights of a layer, each in its canonical form: row-major [out, in], C order. */
enum moe_weight {
    MOE_WEIGHT_ROUTER,             /* [E+Z, H] */
    MOE_WEIGHT_LOGIT_BIAS,         /* [E+Z] */
    MOE_WEIGHT_SELECT_BIAS,        /* [E+Z] */
    MOE_WEIGHT_GATE,               /* expert e: [I, H]; here and in the next five, with a latent
                                      space L instead of H */
    MOE_WEIGHT_UP,                 /* expert e: [I, H] */
    MOE_WEIGHT_DOWN,               /* expert e: [H, I] */
    MOE_WEIGHT_GATE_BIAS,          /* expert e: [I] */
    MOE_WEIGHT_UP_BIAS,            /* expert e: [I] */
    MOE_WEIGHT_DOWN_BIAS,          /* expert e: [H] */
    MOE_WEIGHT_SHARED_GATE,        /* [Is, H] */
    MOE_WEIGHT_SHARED_UP,          /* [Is, H] */
    MOE_WEIGHT_SHARED_DOWN,        /* [H, Is] */
    MOE_WEIGHT_SHARED_GATE_VECTOR, /* [1, H] */
    MOE_WEIGHT_TO_LATENT,          /* [L, H] */
    MOE_WEIGHT_FROM_LATENT,        /* [H, L] */
    MOE_WEIGHT_LATENT_NORM,        /* [L] */
    MOE_WEIGHT_COUNT
};

/* Columns of the rows that routed experts get and give: L, or H without a latent space. */
static inline uint32_t moe_expert_width(const struct moe_layer_spec *s)
{
    return s->latent != 0 ? s->latent : s->hidden;
}

/* Whether routed or shared experts of the layer have this activation. */
static inline bool moe_layer_uses(const struct moe_layer_spec *s, enum moe_activation activation)
{
    return s->activation == activation ||
           (s->shared_intermediate != 0 && s->shared_activation == activation);
}

/* What the layer has that does not train, for messages; NULL if there is nothing. Backends
 * compute such layers forward as any other. */
static inline const char *moe_layer_uncommon(const struct moe_layer_spec *s)
{
    if (s->latent != 0)
        return "a latent space (LatentMoE)";
    if (moe_layer_uses(s, MOE_ACT_SITU))
        return "the activation SiTU";
    if (moe_layer_uses(s, MOE_ACT_RELU2))
        return "experts without a gate";
    if (s->router.score == MOE_SCORE_SPARSEMIXER)
        return "the router SparseMixer";
    return s->router.top_k > MOE_COMMON_TOP_K ? "more than 16 experts per token" : NULL;
}

static inline bool moe_weight_is_expert(enum moe_weight w)
{
    return w >= MOE_WEIGHT_GATE && w <= MOE_WEIGHT_DOWN_BIAS;
}

/* The format of a quantised matrix of this layer; NULL for weights that are F32 or BF16. */
static inline const struct moe_weight_format *moe_weight_format_of(const struct moe_layer_spec *s,
                                                                   enum moe_weight w)
{
    const struct moe_weight_format *f = NULL;
    if (w >= MOE_WEIGHT_GATE && w <= MOE_WEIGHT_DOWN)
        f = &s->routed_format;
    else if (w >= MOE_WEIGHT_SHARED_GATE && w <= MOE_WEIGHT_SHARED_DOWN)
        f = &s->shared_format;
    return f != NULL && f->encoding != MOE_ENC_NONE ? f : NULL;
}

/* Rows and columns of a weight of this layer (columns = 1 for a vector of `rows`); rows = 0 if the
 * layer has no such weight. */
static inline void moe_weight_shape(const struct moe_layer_spec *s, enum moe_weight w, size_t *rows,
                                    size_t *columns)
{
    size_t all = (size_t)s->experts + s->router.zero_experts;
    *rows = 0;
    *columns = 1;
    switch (w) {
    case MOE_WEIGHT_ROUTER:
        *rows = all;
        *columns = s->hidden;
        break;
    case MOE_WEIGHT_LOGIT_BIAS: *rows = s->router.logit_bias ? all : 0; break;
    case MOE_WEIGHT_SELECT_BIAS: *rows = s->router.select_bias ? all : 0; break;
    case MOE_WEIGHT_GATE:
    case MOE_WEIGHT_UP:
        if (w == MOE_WEIGHT_UP || moe_activation_has_gate(s->activation))
            *rows = s->intermediate;
        *columns = moe_expert_width(s);
        break;
    case MOE_WEIGHT_DOWN:
        *rows = moe_expert_width(s);
        *columns = s->intermediate;
        break;
    case MOE_WEIGHT_GATE_BIAS:
    case MOE_WEIGHT_UP_BIAS:
        if (s->gate_up_bias && (w == MOE_WEIGHT_UP_BIAS || moe_activation_has_gate(s->activation)))
            *rows = s->intermediate;
        break;
    case MOE_WEIGHT_DOWN_BIAS: *rows = s->down_bias ? moe_expert_width(s) : 0; break;
    case MOE_WEIGHT_SHARED_GATE:
    case MOE_WEIGHT_SHARED_UP:
        if (w == MOE_WEIGHT_SHARED_UP || moe_activation_has_gate(s->shared_activation))
            *rows = s->shared_intermediate;
        *columns = s->hidden;
        break;
    case MOE_WEIGHT_SHARED_DOWN:
        *rows = s->shared_intermediate != 0 ? s->hidden : 0;
        *columns = s->shared_intermediate;
        break;
    case MOE_WEIGHT_SHARED_GATE_VECTOR:
        *rows = s->shared_gated ? 1 : 0;
        *columns = s->hidden;
        break;
    case MOE_WEIGHT_TO_LATENT:
        *rows = s->latent;
        *columns = s->hidden;
        break;
    case MOE_WEIGHT_FROM_LATENT:
        *rows = s->latent != 0 ? s->hidden : 0;
        *columns = s->latent;
        break;
    case MOE_WEIGHT_LATENT_NORM: *rows = s->latent_norm ? s->latent : 0; break;
    case MOE_WEIGHT_COUNT: break;
    }
}

#endif
