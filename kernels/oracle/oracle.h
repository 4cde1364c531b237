/* What a MoE layer should compute, in double precision and plain loops: the yardstick of the tests.
 *
 * Written from the formulas of moe/layer_spec.h and of nothing else; it shares no code with any
 * backend, and its only merit is to be obviously right. */
#ifndef MOE_ORACLE_H
#define MOE_ORACLE_H

#include "base/status.h"
#include "moe/backend.h"

struct moe_oracle_layer;

struct moe_status moe_oracle_create(const struct moe_layer_spec *spec,
                                    struct moe_oracle_layer **out) MOE_CHECKED;
/* The arguments of moe_backend.layer_upload; every expert is local here. */
struct moe_status moe_oracle_upload(struct moe_oracle_layer *layer, enum moe_weight weight,
                                    uint32_t expert, enum moe_dtype dtype, const void *data,
                                    size_t bytes) MOE_CHECKED;
void moe_oracle_destroy(struct moe_oracle_layer *layer); /* NULL is ignored */

/* One gate/up pair after its biases. */
double moe_oracle_activate(enum moe_activation activation, double limit, double alpha, double g,
                           double u);

/* Routes one token. `logit` [E+Z] is final (bias added) and may be NULL for MOE_ROUTE_IDS_WEIGHTS;
 * `select_bias` [E+Z] or NULL. ids_in and weights_in [K] are read as the mode says.
 *
 * margin  NULL, or: the smallest distance between two different keys, or two group scores, on whose
 *         order the chosen ids depend; infinite when there is none. An implementation in fp32 may
 *         choose otherwise where this is of the size of its rounding errors. */
enum moe_token_state moe_oracle_route(const struct moe_layer_spec *spec, const double *logit,
                                      const double *select_bias, enum moe_routing_mode mode,
                                      const int32_t *ids_in, const float *weights_in, int32_t *ids,
                                      double *weights, double *margin);

/* W_r x + logit bias of one token: x [H], logit [E+Z]. */
struct moe_status moe_oracle_logits(const struct moe_oracle_layer *layer, const double *x,
                                    double *logit) MOE_CHECKED;

/* y [H] = ffn_e(x), unweighted; a zero expert returns x. */
struct moe_status moe_oracle_expert(const struct moe_oracle_layer *layer, uint32_t expert,
                                    const double *x, double *y) MOE_CHECKED;

/* y [H] = shared(x), gate included; zeros when the layer has no shared expert. */
struct moe_status moe_oracle_shared(const struct moe_oracle_layer *layer, const double *x,
                                    double *y) MOE_CHECKED;

/* The whole layer for T tokens, arguments as in struct moe_step_args; weights_out and y in double,
 * margin [T] (see moe_oracle_route), any output but y may be NULL. To force a routing, pass it as
 * MOE_ROUTE_IDS_WEIGHTS. Errors: MOE_FAILED_PRECONDITION/TENSOR_MISSING for a weight that is needed
 * and was not uploaded. */
struct moe_status moe_oracle_forward(const struct moe_oracle_layer *layer, enum moe_dtype dtype,
                                     uint32_t tokens, const void *x, const uint8_t *mode,
                                     const int32_t *ids_in, const float *weights_in,
                                     int32_t *ids_out, double *weights_out, uint8_t *token_state,
                                     double *margin, double *y) MOE_CHECKED;

#endif
