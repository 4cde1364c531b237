/* SPDX-License-Identifier: Apache-2.0 */
/* Converts gradients from the layout of transformers to the canonical form of moe/layer_spec.h. */
#ifndef MOE_TEST_GOLDEN_GRADIENTS_H
#define MOE_TEST_GOLDEN_GRADIENTS_H

#include "model/model.h"
#include "model/safetensors.h"

/* For people: "down". */
const char *golden_weight_name(enum moe_weight w);

/* The gradient of a weight of this layer, for experts of all of them: [entries, rows, columns]; the
 * caller frees it. NULL if the file has none of the right size. */
float *golden_gradient(const struct moe_st_file *file, const char *family,
                       const struct moe_layer_spec *spec, enum moe_weight w);

#endif
