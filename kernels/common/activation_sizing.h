/* SPDX-License-Identifier: Apache-2.0 */
/* How much room a forward step asks for to retain activations (moe/training.h, "Retained"). For
 * steps with a number of rows that is known only at their end. Pure arithmetic. */
#ifndef MOE_ACTIVATION_SIZING_H
#define MOE_ACTIVATION_SIZING_H

#include "moe/types.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct moe_activation_sizing {
    double learnt; /* rows per token of the bucket in earlier steps (moe_activation_sizing_learn);
                      0: no earlier step */
    double even;   /* the same for an even routing with full buckets on all slots */
    uint32_t bucket;
    uint32_t local_experts; /* the rows of each are padded to whole blocks */
    uint32_t max_rows;      /* a bound on the step's rows, padding included */
    uint64_t room;          /* rows that fit */
};

/* Rows to take room for, padding included: the expected rows and some slack, limited by the room.
 * False if the rows of earlier steps would not fit, even without slack. */
bool moe_activation_sizing_ask(const struct moe_activation_sizing *of, uint32_t *rows);

/* The new expectation after a step of `rows` rows (without padding), retained or not. `before` is
 * the old one. It rises at once and falls slowly. */
double moe_activation_sizing_learn(double before, uint64_t rows, uint32_t bucket);

#ifdef __cplusplus
}
#endif

#endif
