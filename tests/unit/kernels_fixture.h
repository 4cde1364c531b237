/* SPDX-License-Identifier: Apache-2.0 */
/* Random layers, tensors and comparisons for the tests of the compute kernels. */
#ifndef MOE_TEST_KERNELS_FIXTURE_H
#define MOE_TEST_KERNELS_FIXTURE_H

#include "cpu/compute/layer.h"
#include "oracle/oracle.h"
#include "support/check.h"
#include "support/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A tensor of n elements of `dtype`: normal values times `scale`. The caller frees it. */
void *random_tensor(enum moe_dtype dtype, size_t n, float scale);
double element_of(enum moe_dtype dtype, const void *tensor, size_t i);

/* ||got - want|| / ||want||; 0 if both are zero, infinite if `got` has a NaN. */
double relative_error(size_t n, const float *got, const double *want);

struct moe_device *open_device(const struct moe_cpu_isa *isa, uint32_t threads); /* NULL: best */

/* Small valid layer: hidden 4, one expert, top-1 softmax. Tests change the fields that they need.
 */
struct moe_layer_spec plain_spec(void);

/* A layer with random weights and all experts local, or none if `holds_experts` is false. If
 * `dtype` is MOE_DTYPE_NONE, the dtype of each expert weight is random. Weights with a format are
 * quantised. `oracle` gets the same
 * weights, unless it is NULL. */
struct moe_layer *random_layer(struct moe_device *device, const struct moe_layer_spec *spec,
                               enum moe_dtype dtype, bool holds_experts,
                               struct moe_oracle_layer **oracle);

/* A layer with hidden = E + Z and the identity as router matrix, so x are the logits. Biases may be
 * NULL if the spec has none. */
struct moe_layer *identity_router(struct moe_device *device, const struct moe_layer_spec *spec,
                                  const float *logit_bias, const float *select_bias);

#endif
