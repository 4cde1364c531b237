/* SPDX-License-Identifier: Apache-2.0 */
/* See all_experts.h. */
#include "all_experts.h"

#include "model/model.h"
#include "support/check.h"

#include <stdlib.h>

struct moe_group_assignment assign_all_experts(const char *directory)
{
    struct moe_model *model;
    assert_ok(moe_model_open(directory, &model));
    size_t count = moe_model_layer_count(model);
    struct moe_group_layer *layers = calloc(count, sizeof *layers);
    assert_non_null(layers);
    for (size_t i = 0; i < count; i++) {
        const struct moe_layer_spec *spec = moe_model_layer(model, i);
        uint32_t *numbers = calloc(2 * (size_t)spec->experts, sizeof *numbers);
        assert_non_null(numbers);
        for (uint32_t e = 0; e < spec->experts; e++)
            numbers[e] = 1;
        layers[i] = (struct moe_group_layer){spec->layer, numbers, spec->experts,
                                             numbers + spec->experts, spec->experts};
    }
    moe_model_close(model);
    return (struct moe_group_assignment){
        .slots = 1, .placement_version = 1, .layers = layers, .layer_count = count};
}

void free_assignment(const struct moe_group_assignment *a)
{
    for (size_t i = 0; i < a->layer_count; i++)
        free((void *)(uintptr_t)a->layers[i].copies);
    free((void *)(uintptr_t)a->layers);
}
