/* SPDX-License-Identifier: Apache-2.0 */
/* A copy of an assignment, for a thread that comes to it later. */
#ifndef MOE_MODELS_ASSIGNMENT_H
#define MOE_MODELS_ASSIGNMENT_H

#include "group/group.h"

struct moe_assignment_copy {
    struct moe_group_assignment assignment; /* points into the next two */
    struct moe_group_layer *layers;
    uint32_t *numbers;
};

/* Free it also after an error. Errors: OUT_OF_MEMORY. */
struct moe_status moe_assignment_copy(const struct moe_group_assignment *from,
                                      struct moe_assignment_copy *out) MOE_CHECKED;
void moe_assignment_free(struct moe_assignment_copy *copy);

#endif
