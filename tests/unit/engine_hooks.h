/* SPDX-License-Identifier: Apache-2.0 */
/* What tests that make an engine by themselves give it: a hook that counts, and the spin that the
 * environment asks for. */
#ifndef MOE_TEST_ENGINE_HOOKS_H
#define MOE_TEST_ENGINE_HOOKS_H

#include "engine/engine.h"

#include <stdatomic.h>

/* Tokens of Forward requests that are not retained, since a test set it to 0. */
extern _Atomic uint64_t announced_tokens;

/* moe_engine_config.announce, for engines of one layer, number 7, that tests give F32. */
void count_announced(void *ctx, uint32_t layer, enum moe_step_kind kind, enum moe_dtype dtype,
                     uint32_t tokens);

/* Nanoseconds of MOE_TEST_SPIN_US, for further runs of a test with a spinning engine thread;
 * 0 where it is not set. */
uint64_t spin_of_test(void);

#endif
