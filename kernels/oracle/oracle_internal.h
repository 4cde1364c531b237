/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to the oracle: the layer, and functions for both forward and backward. */
#ifndef MOE_ORACLE_INTERNAL_H
#define MOE_ORACLE_INTERNAL_H

#include "oracle/oracle.h"

struct moe_oracle_layer {
    struct moe_layer_spec spec;
    /* [experts] for expert weights, else one entry; each NULL until uploaded. */
    double **weight[MOE_WEIGHT_COUNT];
};

struct moe_status moe_oracle_out_of_memory(void) MOE_CHECKED;
/* Succeeds for a weight that the layer does not have, or that was uploaded. */
struct moe_status moe_oracle_require(const struct moe_oracle_layer *layer, enum moe_weight w,
                                     uint32_t entry) MOE_CHECKED;
double moe_oracle_element(enum moe_dtype dtype, const void *data, size_t i);
double moe_oracle_sigmoid(double z);
/* p [n] = softmax(z [n]); p may be z. */
void moe_oracle_softmax(uint32_t n, const double *z, double *p);
/* score [n] of logit [n]; SOFTMAX_TOPK gives the logits. */
void moe_oracle_scores(enum moe_score kind, uint32_t n, const double *logit, double *score);

#endif
