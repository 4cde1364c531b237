/* SPDX-License-Identifier: Apache-2.0 */
/* Layers of released models, by name, for the benchmarks. */
#ifndef MOE_BENCH_SHAPES_H
#define MOE_BENCH_SHAPES_H

#include "moe/layer_spec.h"

struct bench_shape {
    const char *name;
    struct moe_layer_spec spec;
};
extern const struct bench_shape bench_shapes[];
extern const uint32_t bench_shape_count;

#endif
