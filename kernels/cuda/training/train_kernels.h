/* SPDX-License-Identifier: Apache-2.0 */
/* The small kernels of a backward pass: everything that is not a product. Calls enqueue and do not
 * wait; all pointers are to device memory; sums have a fixed order. Formulas: moe/training.h. */
#ifndef MOE_CUDA_TRAIN_KERNELS_H
#define MOE_CUDA_TRAIN_KERNELS_H

#include "cuda/session/session.h"
#include "cuda/training/train_gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Floats after the H of a gradient row: each row's weight gradient, at the place of its k. */
enum { MOE_CUDA_WEIGHT_COLUMNS = MOE_COMMON_TOP_K };

/* ------------------------------------------------------------------ experts */

struct moe_cuda_activation_backward {
    struct moe_cuda_row_groups rows;
    enum moe_activation activation;
    float limit, alpha;
    uint32_t hidden, inner;           /* H, I */
    bool input_weighting;             /* else the weight multiplies the output */
    const float *weight;              /* [rows], NULL = 1 */
    const float *gate_bias, *up_bias; /* [groups][I] or NULL */
    const float *down_bias;           /* [groups][H] or NULL */
    enum moe_dtype dtype;             /* of dy */
    const void *dy;                   /* [rows, dy_stride], read only with a down bias */
    uint32_t dy_stride;
    float *pre; /* [rows, 2 * round_up(I, 8)] interleaved: x W^T before biases */
    void *dh;   /* [rows, I]: dy W_d; becomes the activation, times the weight of the output */
    void *dgu;  /* as pre, of dh's dtype: gets dg and du. With F32 it is `pre` */
    enum moe_dtype row_dtype; /* of dh and dgu; BF16: I is a multiple of 8 */
    float *dweight;           /* [rows] or NULL; not written when weighting the input */
};
struct moe_status moe_cuda_activation_backward(const struct moe_cuda_activation_backward *a,
                                               cudaStream_t stream) MOE_CHECKED;

/* Weighting the input, after dgrad: dweight = dx . x, dx *= weight, and dgu *= weight for wgrad. */
struct moe_cuda_input_backward {
    struct moe_cuda_row_groups rows;
    uint32_t hidden, x_stride, dx_stride, dgu_columns;
    enum moe_dtype dtype;     /* of x */
    const void *x;            /* [rows, x_stride] */
    const float *weight;      /* [rows] */
    float *dx;                /* [rows, dx_stride] */
    enum moe_dtype dgu_dtype; /* F32, or BF16 where x is */
    void *dgu;                /* [rows, dgu_columns] */
    float *dweight;           /* [rows] */
};
struct moe_status moe_cuda_input_backward(const struct moe_cuda_input_backward *a,
                                          cudaStream_t stream) MOE_CHECKED;

/* out [rows, I] f32 = dg alone (du with `up`) of the interleaved dgu. */
struct moe_status moe_cuda_take_half(const struct moe_cuda_row_groups *rows, uint32_t inner,
                                     enum moe_dtype dgu_dtype, const void *dgu, bool up, float *out,
                                     cudaStream_t stream) MOE_CHECKED;

/* ------------------------------------------------------------------- router */

struct moe_cuda_router_backward {
    struct moe_router_spec spec;
    uint32_t tokens, experts, slices;
    const float *logits;     /* [slices, T, E+Z] partial sums, as the router left them */
    const float *logit_bias; /* [E+Z] or NULL */
    const uint8_t *use;      /* [T]: routed tokens; rows of others become zeros. NULL = all */
    const int32_t *ids;      /* [T,K] */
    const float *dweights;   /* [T,K] */
    float *dlogits;          /* [T, E+Z] */
};
struct moe_status moe_cuda_router_backward(const struct moe_cuda_router_backward *a,
                                           cudaStream_t stream) MOE_CHECKED;

/* Adds to the dlogits of the same router; loss [T] double = each token's share. */
struct moe_cuda_aux_backward {
    struct moe_cuda_router_backward router;
    const uint32_t *loads; /* [E] of the group */
    double factor;         /* aux_coeff * E / (K * Tg^2) */
    double *loss;          /* [T]; 0 for tokens that did not go through the router */
};
struct moe_status moe_cuda_aux_backward(const struct moe_cuda_aux_backward *a,
                                        cudaStream_t stream) MOE_CHECKED;

/* Operands of tensor cores in place of F32 dlogits and router weights: bf16 parts of them next to
 * each other, so that one product adds all pairs of parts that matter. With a BF16 router the parts
 * of dlogits are high, low. With an F32 router they are high, low, high, which are multiplied by
 * the router's parts high, high, middle. high + low has 16 bits, and so has the part that a product
 * leaves out. */
enum { MOE_CUDA_LOGIT_PARTS_BF16 = 2, MOE_CUDA_LOGIT_PARTS_F32 = 3 };

/* to [T, parts * choices] bf16; rows that `use` excludes are zeros. */
struct moe_status moe_cuda_split_logits(uint32_t tokens, uint32_t choices, uint32_t parts,
                                        const uint8_t *use, const float *dlogits, void *to,
                                        cudaStream_t stream) MOE_CHECKED;
/* to [parts * choices, H] bf16, from the router or, for three parts, its parts in the layer. */
struct moe_status moe_cuda_stack_router(uint32_t choices, uint32_t hidden, uint32_t parts,
                                        const void *router, void *to,
                                        cudaStream_t stream) MOE_CHECKED;
/* grad [n] += sums[0 .. n) + sums[n .. 2n): of the high and the low parts. */
struct moe_status moe_cuda_add_parts(size_t n, const float *sums, float *grad,
                                     cudaStream_t stream) MOE_CHECKED;

/* loads[e] += choices of tokens in use; *routed += such tokens. */
struct moe_status moe_cuda_count_loads(uint32_t tokens, uint32_t top_k, uint32_t experts,
                                       const uint8_t *use, const int32_t *ids, uint32_t *loads,
                                       uint32_t *routed, cudaStream_t stream) MOE_CHECKED;

/* ------------------------------------------------------------------- tokens */

/* Sorts what the router returned for T tokens: ok [T] and routed [T] are 0 or 1, ids_sent [T,K] are
 * the ids with -1 for zero experts. */
struct moe_cuda_sorted_tokens {
    uint32_t tokens, top_k, experts;
    const uint8_t *mode, *token_state; /* mode NULL = all MOE_ROUTE_IDS */
    const int32_t *ids;
    uint8_t *ok, *routed;
    int32_t *ids_sent;
};
struct moe_status moe_cuda_sort_tokens(const struct moe_cuda_sorted_tokens *a,
                                       cudaStream_t stream) MOE_CHECKED;

/* Rows [tokens, H] of both tensors that `use` excludes become zeros; dy may be NULL. x is copied
 * from `from`, which may be x itself. row_bytes is even. */
struct moe_status moe_cuda_clear_rows(uint32_t tokens, size_t row_bytes, const uint8_t *use,
                                      const void *from, void *x, void *dy,
                                      cudaStream_t stream) MOE_CHECKED;

/* Separates the rows of a pass, as many as its counts say: x_dy [rows, 2H] becomes x and dy [rows,
 * H]. */
struct moe_status moe_cuda_split_x_dy_rows(const uint32_t *rows_in_use, size_t row_bytes,
                                           const void *pairs, void *x, void *dy,
                                           cudaStream_t stream) MOE_CHECKED;

/* Writes the last MOE_CUDA_WEIGHT_COLUMNS of every row of gradients [rows, H + columns]: the row's
 * dweight at its k, else zeros. row_of [slots][max_tokens][max_top_k] and tokens_of [slots] as the
 * pass left them. */
struct moe_cuda_label_rows {
    uint32_t slots, max_tokens, max_top_k, top_k, hidden;
    const uint32_t *row_of, *tokens_of;
    const float *dweight;
    float *rows;
};
struct moe_status moe_cuda_label_rows(const struct moe_cuda_label_rows *a,
                                      cudaStream_t stream) MOE_CHECKED;

/* From the combined rows, [T, H + columns]: dx [T,H] and dweights [T,K], zero experts included;
 * zeros for tokens that are not ok. */
struct moe_cuda_home_gradients {
    uint32_t tokens, hidden, top_k, experts;
    enum moe_dtype dtype; /* of x and dy */
    const void *x, *dy;
    const uint8_t *ok;
    const int32_t *ids;
    const float *weights;
    const float *combined;
    float *dx, *dweights;
};
struct moe_status moe_cuda_home_gradients(const struct moe_cuda_home_gradients *a,
                                          cudaStream_t stream) MOE_CHECKED;

/* gate[t] = sigmoid(v . x[t]) for the shared expert's gate. */
struct moe_status moe_cuda_shared_gate(uint32_t tokens, uint32_t hidden, enum moe_dtype dtype,
                                       const void *x, const float *v, float *gate,
                                       cudaStream_t stream) MOE_CHECKED;
/* From d gate (in place): the gradient of its logit; rows that are not ok become 0; dx[t] += that *
 * v. */
struct moe_status moe_cuda_shared_gate_backward(uint32_t tokens, uint32_t hidden, const uint8_t *ok,
                                                const float *gate, const float *v, float *dgate,
                                                float *dx, cudaStream_t stream) MOE_CHECKED;

/* dx in the step's dtype: the sum of the parts of experts, router and shared expert (NULL: the
 * layer has none), rounded once; zeros for tokens that are not ok. */
struct moe_cuda_dx_parts {
    const float *experts, *router, *shared; /* [T, H] */
};
struct moe_status moe_cuda_finish_dx(uint32_t tokens, uint32_t hidden, enum moe_dtype dtype,
                                     const uint8_t *ok, const struct moe_cuda_dx_parts *parts,
                                     void *to, cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
