/* SPDX-License-Identifier: Apache-2.0 */
#include "models/assignment.h"

#include <stdlib.h>
#include <string.h>

struct moe_status moe_assignment_copy(const struct moe_group_assignment *from,
                                      struct moe_assignment_copy *out)
{
    size_t numbers = 0;
    for (size_t i = 0; i < from->layer_count; i++)
        numbers += from->layers[i].experts + from->layers[i].slot_count;
    out->layers = calloc(from->layer_count + 1, sizeof *out->layers);
    out->numbers = calloc(numbers + 1, sizeof *out->numbers);
    if (out->layers == NULL || out->numbers == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for an assignment");
    out->assignment = *from;
    out->assignment.layers = out->layers;
    uint32_t *at = out->numbers;
    for (size_t i = 0; i < from->layer_count; i++) {
        const struct moe_group_layer *l = &from->layers[i];
        struct moe_group_layer *copy = &out->layers[i];
        *copy = *l;
        copy->copies = at;
        if (l->experts > 0)
            memcpy(at, l->copies, l->experts * sizeof *at);
        at += l->experts;
        copy->slots = at;
        if (l->slot_count > 0)
            memcpy(at, l->slots, l->slot_count * sizeof *at);
        at += l->slot_count;
    }
    return moe_ok();
}

void moe_assignment_free(struct moe_assignment_copy *copy)
{
    free(copy->layers);
    free(copy->numbers);
}
