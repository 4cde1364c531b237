/* SPDX-License-Identifier: Apache-2.0 */
/* The reference of the tests: an MoE layer in double precision and plain loops.
 *
 * It follows only the formulas of moe/layer_spec.h and moe/training.h, and shares no code with a
 * backend. Clarity counts more than speed. */
#ifndef MOE_ORACLE_H
#define MOE_ORACLE_H

#include "base/status.h"
#include "moe/backend.h"
#include "moe/training.h"

struct moe_oracle_layer;

struct moe_status moe_oracle_create(const struct moe_layer_spec *spec,
                                    struct moe_oracle_layer **out) MOE_CHECKED;
/* The arguments of moe_backend.layer_upload; every expert is local here. */
struct moe_status moe_oracle_upload(struct moe_oracle_layer *layer, enum moe_weight weight,
                                    uint32_t expert, enum moe_dtype dtype, const void *data,
                                    size_t bytes) MOE_CHECKED;
/* The same as moe_backend.layer_upload_packed: the layer has the values of the matrix. */
struct moe_status moe_oracle_upload_packed(struct moe_oracle_layer *layer, enum moe_weight weight,
                                           uint32_t expert,
                                           const struct moe_packed_matrix *m) MOE_CHECKED;
void moe_oracle_destroy(struct moe_oracle_layer *layer); /* NULL is ignored */

/* One gate/up pair after its biases. Without a gate, g has no effect. */
double moe_oracle_activate(enum moe_activation activation, double limit, double alpha, double g,
                           double u);

/* The values of a row x [n] that W8A8 multiplies (moe/weight_format.h): x is rounded to single
 * precision, then quantised; x becomes q * s. Does nothing for other formats. */
void moe_oracle_quantise(const struct moe_weight_format *format, size_t n, double *x);

/* Routes one token. `logit` [E+Z] is final (bias added) and may be NULL for MOE_ROUTE_IDS_WEIGHTS;
 * `select_bias` [E+Z] or NULL. The mode decides whether ids_in and weights_in [K] are read.
 *
 * margin  or NULL. The ids depend on the order of keys and of group scores. `margin` is the
 * smallest distance between two of these that differ, infinite if there is none. If it is as small
 *         as its rounding errors, an fp32 implementation may choose other ids. */
enum moe_token_state moe_oracle_route(const struct moe_layer_spec *spec, const double *logit,
                                      const double *select_bias, enum moe_routing_mode mode,
                                      const int32_t *ids_in, const float *weights_in, int32_t *ids,
                                      double *weights, double *margin);

/* W_r x + logit bias of one token: x [H], logit [E+Z]. */
struct moe_status moe_oracle_logits(const struct moe_oracle_layer *layer, const double *x,
                                    double *logit) MOE_CHECKED;

/* y [W] = ffn_e(x), unweighted; a zero expert returns x. W = moe_expert_width. */
struct moe_status moe_oracle_expert(const struct moe_oracle_layer *layer, uint32_t expert,
                                    const double *x, double *y) MOE_CHECKED;

/* y [H] = shared(x), gate included; zeros if the layer has no shared expert. */
struct moe_status moe_oracle_shared(const struct moe_oracle_layer *layer, const double *x,
                                    double *y) MOE_CHECKED;

/* The whole layer for T tokens, arguments as in struct moe_step_args; weights_out and y in double,
 * margin [T] (see moe_oracle_route). Any output but y may be NULL. To force a routing, pass it as
 * MOE_ROUTE_IDS_WEIGHTS. Errors: MOE_FAILED_PRECONDITION/TENSOR_MISSING if a needed weight was not
 * uploaded. */
struct moe_status moe_oracle_forward(const struct moe_oracle_layer *layer, enum moe_dtype dtype,
                                     uint32_t tokens, const void *x, const uint8_t *mode,
                                     const int32_t *ids_in, const float *weights_in,
                                     int32_t *ids_out, double *weights_out, uint8_t *token_state,
                                     double *margin, double *y) MOE_CHECKED;

/* ------------------------------------------------------------------------- backward */

/* Gradients have the shape of a layer: one double for each parameter, initially zero. Free them
 * with moe_oracle_destroy. */
struct moe_status moe_oracle_create_gradients(const struct moe_layer_spec *spec,
                                              struct moe_oracle_layer **out) MOE_CHECKED;
/* The doubles of a weight, [rows, columns]; the caller may change them. NULL if the layer has no
 * such weight, or it was not uploaded. `expert` is ignored for weights that are not an expert's. */
double *moe_oracle_weight(struct moe_oracle_layer *layer, enum moe_weight weight, uint32_t expert);

/* Simulated rounding: random errors on every partial sum, function value and stored row. A test
 * runs a backward pass with and without them. If terms cancel, an implementation of that precision
 * may be as far off as these two results are apart. Functions take NULL for exact results;
 * otherwise they advance `state`. */
struct moe_oracle_rounding {
    double arithmetic; /* relative size; errors are uniform in +- this */
    double stored;     /* the same for rows that a backend may store in the step's dtype */
    double kink;       /* distance from the limit of a clamp within which `lean` decides */
    int lean;          /* 1: values within count as clamped; -1: as not clamped; 0: exact */
    uint64_t state;    /* of the random numbers; any value */
};

/* dg, du of one gate/up pair after its biases. dh is the gradient of the value that
 * moe_oracle_activate returns. Zero outside the clamps. Not for SiTU and RELU2,
 * which do not train. */
void moe_oracle_activate_backward(enum moe_activation activation, double limit, double alpha,
                                  double g, double u, double dh, double *dg, double *du);

/* dlogit [E+Z] of one token, from the gradients of its weights: dweights [K]. Entries with id -1
 * are not read. */
void moe_oracle_router_backward(const struct moe_layer_spec *spec, const double *logit,
                                const int32_t *ids, const double *dweights, double *dlogit,
                                struct moe_oracle_rounding *rounding);

/* Returns the load-balance loss of one token and adds its gradient to dlogit [E+Z]. n [E],
 * group_tokens: n_e and Tg of moe/training.h. */
double moe_oracle_aux_backward(const struct moe_layer_spec *spec, double aux_coeff,
                               const uint32_t *n, uint64_t group_tokens, const double *logit,
                               double *dlogit, struct moe_oracle_rounding *rounding);

/* One token: adds W_r^T dlogit to dx [H], and to the gradients of router and logit bias. Here and
 * below, dx and gradients may be NULL. */
struct moe_status moe_oracle_logits_backward(const struct moe_oracle_layer *layer, const double *x,
                                             const double *dlogit, double *dx,
                                             struct moe_oracle_layer *gradients,
                                             struct moe_oracle_rounding *rounding) MOE_CHECKED;

/* One token at one expert, the zero experts included: adds to dx [H] and to the expert's
 * gradients; *dweight is the gradient of the routing weight. dy [H] is the token's cotangent. */
struct moe_status moe_oracle_expert_backward(const struct moe_oracle_layer *layer, uint32_t expert,
                                             double weight, const double *x, const double *dy,
                                             double *dx, double *dweight,
                                             struct moe_oracle_layer *gradients,
                                             struct moe_oracle_rounding *rounding) MOE_CHECKED;

/* One token at the shared expert, gate included; does nothing if the layer has none. */
struct moe_status moe_oracle_shared_backward(const struct moe_oracle_layer *layer, const double *x,
                                             const double *dy, double *dx,
                                             struct moe_oracle_layer *gradients,
                                             struct moe_oracle_rounding *rounding) MOE_CHECKED;

/* The whole layer for T tokens, as in struct moe_backward_args. */
struct moe_oracle_backward {
    enum moe_dtype dtype;
    uint32_t tokens;
    const void *x, *dy;    /* [T,H] */
    const uint8_t *mode;   /* [T], NULL = all MOE_ROUTE_IDS; MOE_ROUTE_SERVER is not allowed */
    const int32_t *ids;    /* [T,K] */
    const float *weights;  /* [T,K], read if mode == MOE_ROUTE_IDS_WEIGHTS */
    double aux_coeff;      /* 0: no load-balance loss */
    const uint32_t *loads; /* [E] n_e of the group; read if aux_coeff != 0 */
    uint64_t group_tokens; /* Tg; 0 adds no loss */
    double *dx;            /* [T,H], overwritten; may be NULL, as all outputs */
    double *dweights;      /* [T,K], overwritten */
    uint8_t *token_state;  /* [T] */
    double *aux_loss;      /* the loss of these tokens */
    struct moe_oracle_layer *gradients; /* added to */
    struct moe_oracle_rounding *rounding;
};
struct moe_status moe_oracle_backward(const struct moe_oracle_layer *layer,
                                      const struct moe_oracle_backward *args) MOE_CHECKED;

/* ------------------------------------------------------------------------ optimizer */

/* Adds the squares of grad [n] to *sum. */
void moe_oracle_add_squares(size_t n, const double *grad, double *sum);

/* The factor of every gradient: grad_scale, and the clipping if `squares` is too large. `squares`
 * is the sum over all gradients before any factor. *norm as in struct moe_optimizer_result. */
double moe_oracle_gradient_factor(const struct moe_optimizer_args *args, double squares,
                                  double *norm);

/* One step of n parameters; moment2 is NULL for SGD. `factor` as above. */
void moe_oracle_optimizer_step(enum moe_optimizer optimizer, const struct moe_optimizer_args *args,
                               double factor, size_t n, const double *grad, double *value,
                               double *moment1, double *moment2);

/* select_bias [E] after one step of the balance rule with these loads [E]. */
void moe_oracle_balance(uint32_t experts, const uint64_t *load, double rate, double *select_bias);

/* W [out,in] = W0 + (alpha / rank) B A; A [rank,in], B [out,rank]. */
void moe_oracle_lora_merge(size_t out, size_t in, size_t rank, double alpha, const double *base,
                           const double *a, const double *b, double *merged);
/* dA, dB from dW; overwritten. */
void moe_oracle_lora_backward(size_t out, size_t in, size_t rank, double alpha, const double *a,
                              const double *b, const double *dw, double *da, double *db);

#endif
