/* SPDX-License-Identifier: Apache-2.0 */
/* For backends of tests: the rows of a step, with or without segments. */
#ifndef MOE_TESTS_STEP_ROWS_H
#define MOE_TESTS_STEP_ROWS_H

#include "moe/backend.h"

/* Parts of a step with tokens. */
static inline uint32_t step_parts(const struct moe_step_args *a)
{
    return a->tokens == 0 ? 0 : a->segments != NULL ? a->segment_count : 1;
}

/* Tokens, x and y of part `i`. */
static inline struct moe_step_segment step_part(const struct moe_step_args *a, uint32_t i)
{
    return a->segments != NULL
               ? a->segments[i]
               : (struct moe_step_segment){.tokens = a->tokens, .x = a->x, .y = a->y};
}

#endif
