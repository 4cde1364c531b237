/* SPDX-License-Identifier: Apache-2.0 */
/* Functions that a fuzz target defines; see driver.c. */
#ifndef MOE_FUZZ_DRIVER_H
#define MOE_FUZZ_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* Runs one input and returns 0. Aborts if the code under test breaks a promise. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Length of built-in seed `i`, with `*data` pointing at it until the next call; 0 = no more. A
 * target may leave this out. */
__attribute__((weak)) size_t moe_fuzz_seed(size_t i, const uint8_t **data);

#endif
