/* SPDX-License-Identifier: Apache-2.0 */
/* How much room a forward step is to ask for that retains what it computes, where how many rows
 * come is known only when it has ended (moe/training.h, "Retained"). Numbers only. */
#ifndef MOE_ACTIVATION_SIZING_H
#define MOE_ACTIVATION_SIZING_H

#include "moe/types.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct moe_activation_sizing {
    double learnt; /* rows per token of the bucket, of steps before (moe_activation_sizing_learn);
                      0: none */
    double even;   /* the same of an even routing where all slots fill their buckets */
    uint32_t bucket;
    uint32_t local_experts; /* each of which fills its rows up to whole blocks */
    uint32_t most;          /* rows, padding included: more never come */
    uint64_t room;          /* rows that there can be room for */
};

/* Rows to take room for, padding included: those to be expected and some more, as far as there is
 * room. False where steps before say that not even their rows alone would find any. */
bool moe_activation_sizing_ask(const struct moe_activation_sizing *of, uint32_t *rows);

/* What to expect after a step of `rows` rows (without padding), whether it was kept or not, where
 * `before` was expected: more counts at once, fewer count slowly. */
double moe_activation_sizing_learn(double before, uint64_t rows, uint32_t bucket);

#ifdef __cplusplus
}
#endif

#endif
