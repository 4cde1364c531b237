/* SPDX-License-Identifier: Apache-2.0 */
/* The formulas of the experts' activations, forward and backward, for all processors. Only the
 * oracle has formulas apart.
 *
 * Each activation is  g * s * (u + shift)  with s = sigmoid(z), z = alpha * g. Some clamp g and u
 * first; only moe_activate does that here. The derivatives:
 *
 *     d/dg = s * (1 + g z' (1 - s)) * (u + shift)       d/du = g * s
 *
 * The formulas stand here in two forms, because rounding and the sign of zeros depend on the form.
 * The first form branches: CPU, and exact forward passes on GPUs. The second form computes with
 * alpha = 1 and shift = 0 too: backward passes and fast forward passes on GPUs.
 *
 * SiTU and RELU2 are other formulas, in separate functions. They have no derivatives here, because
 * layers with them do not train.
 *
 * In CUDA the type is float. In C the user defines MOE_ACTIVATION_REAL, a vector of floats, and
 * MOE_ACTIVATION_AT_MOST(x, bound), MOE_ACTIVATION_WITHIN(x, bound), MOE_ACTIVATION_SIGMOID(x),
 * MOE_ACTIVATION_TANH(x) and MOE_ACTIVATION_POSITIVE(x) before the include. Without these C gets
 * moe_activation_clamps and the shape only. */
#ifndef MOE_ACTIVATION_MATH_H
#define MOE_ACTIVATION_MATH_H

#include "moe/layer_spec.h"

#ifdef __CUDACC__
#define MOE_ACTIVATION_BOTH   static __host__ __device__ inline
#define MOE_ACTIVATION_INLINE static __device__ inline
#define MOE_ACTIVATION_REAL   float
/* NaN stays NaN, as on the CPU; fminf and fmaxf would drop it. */
#define MOE_ACTIVATION_AT_MOST(x, bound) ((x) > (bound) ? (bound) : (x))
#define MOE_ACTIVATION_WITHIN(x, bound)  ((x) > (bound) ? (bound) : (x) < -(bound) ? -(bound) : (x))
#define MOE_ACTIVATION_SIGMOID(x)        (1.0f / (1.0f + expf(-(x))))
#define MOE_ACTIVATION_TANH(x)           tanhf(x)
#define MOE_ACTIVATION_POSITIVE(x)       ((x) < 0.0f ? 0.0f : (x))
#else
#define MOE_ACTIVATION_BOTH   static inline
#define MOE_ACTIVATION_INLINE static inline
#endif

/* Whether g is at most the limit, and u within +-limit. Where a clamp acts, a derivative is 0. */
MOE_ACTIVATION_BOTH bool moe_activation_clamps(enum moe_activation activation)
{
    return activation == MOE_ACT_SWIGLU_CLAMPED || activation == MOE_ACT_SWIGLU_OAI;
}

/* ------------------------------------------------------------------ first form */

#ifdef MOE_ACTIVATION_REAL
/* z */
MOE_ACTIVATION_INLINE MOE_ACTIVATION_REAL moe_activation_z(enum moe_activation activation,
                                                           float alpha, MOE_ACTIVATION_REAL g)
{
    return activation == MOE_ACT_SWIGLU_OAI ? alpha * g : g;
}

/* d/dg of g * s. */
MOE_ACTIVATION_INLINE MOE_ACTIVATION_REAL moe_activation_slope(enum moe_activation activation,
                                                               float alpha, MOE_ACTIVATION_REAL g,
                                                               MOE_ACTIVATION_REAL s)
{
    return s * (1.0f + moe_activation_z(activation, alpha, g) * (1.0f - s)); /* g z' = z */
}

/* u + shift */
MOE_ACTIVATION_INLINE MOE_ACTIVATION_REAL moe_activation_factor(enum moe_activation activation,
                                                                MOE_ACTIVATION_REAL u)
{
    return activation == MOE_ACT_SWIGLU_OAI ? u + 1.0f : u;
}

/* The activation, clamps included; neither SiTU nor RELU2. */
MOE_ACTIVATION_INLINE MOE_ACTIVATION_REAL moe_activate(enum moe_activation activation, float limit,
                                                       float alpha, MOE_ACTIVATION_REAL g,
                                                       MOE_ACTIVATION_REAL u)
{
    if (moe_activation_clamps(activation)) {
        g = MOE_ACTIVATION_AT_MOST(g, limit);
        u = MOE_ACTIVATION_WITHIN(u, limit);
    }
    const MOE_ACTIVATION_REAL s = MOE_ACTIVATION_SIGMOID(moe_activation_z(activation, alpha, g));
    return g * s * moe_activation_factor(activation, u);
}
#endif

#ifdef MOE_ACTIVATION_TANH
/* SiTU: a gate that ends at +-beta, and an up that ends at +-linear_beta. */
MOE_ACTIVATION_INLINE MOE_ACTIVATION_REAL moe_activate_situ(float beta, float linear_beta,
                                                            MOE_ACTIVATION_REAL g,
                                                            MOE_ACTIVATION_REAL u)
{
    const MOE_ACTIVATION_REAL gate = beta * MOE_ACTIVATION_TANH(g / beta);
    const MOE_ACTIVATION_REAL up = linear_beta * MOE_ACTIVATION_TANH(u / linear_beta);
    return gate * MOE_ACTIVATION_SIGMOID(g) * up;
}
#endif

#ifdef MOE_ACTIVATION_POSITIVE
MOE_ACTIVATION_INLINE MOE_ACTIVATION_REAL moe_activate_relu2(MOE_ACTIVATION_REAL u)
{
    const MOE_ACTIVATION_REAL positive = MOE_ACTIVATION_POSITIVE(u);
    return positive * positive;
}
#endif

/* ------------------------------------------------------------------ second form */

struct moe_activation_shape {
    float alpha, shift;
};

MOE_ACTIVATION_BOTH struct moe_activation_shape
moe_activation_shape_of(enum moe_activation activation, float alpha)
{
    const bool oai = activation == MOE_ACT_SWIGLU_OAI;
    struct moe_activation_shape shape;
    shape.alpha = oai ? alpha : 1.0f;
    shape.shift = oai ? 1.0f : 0.0f;
    return shape;
}

#ifdef __CUDACC__
/* In fast arithmetic, for results that are rounded to bf16. */
MOE_ACTIVATION_INLINE float moe_activate_fast(struct moe_activation_shape shape, float g, float u)
{
    return __fdividef(g, 1.0f + __expf(-shape.alpha * g)) * (u + shape.shift);
}

/* The same for tanh: a polynomial near zero, where the quotient would lose digits. */
MOE_ACTIVATION_INLINE float moe_tanh_fast(float x)
{
    const float t = __expf(-2.0f * fabsf(x)), square = x * x;
    const float near = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15)));
    return fabsf(x) < 0.05f ? near : copysignf(__fdividef(1.0f - t, 1.0f + t), x);
}

MOE_ACTIVATION_INLINE float moe_activate_situ_fast(float beta, float linear_beta, float g, float u)
{
    const float gate = beta * moe_tanh_fast(__fdividef(g, beta));
    const float up = linear_beta * moe_tanh_fast(__fdividef(u, linear_beta));
    return __fdividef(gate, 1.0f + __expf(-g)) * up;
}

struct moe_activation_slopes {
    float value, gate, up; /* h, dh/dg, dh/du */
};

/* dg, du: 0 where a clamp acts, else 1. */
MOE_ACTIVATION_INLINE struct moe_activation_slopes
moe_activation_slopes_of(struct moe_activation_shape shape, float g, float u, float dg, float du)
{
    const float s = 1.0f / (1.0f + expf(-shape.alpha * g));
    return {g * s * (u + shape.shift),
            dg * (u + shape.shift) * s * (1.0f + shape.alpha * g * (1.0f - s)), du * g * s};
}
#endif

#endif
