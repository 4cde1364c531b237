/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers for the tests of the grouped products on one GPU. Functions fail the running test. */
#ifndef MOE_TESTS_GGEMM_FIXTURE_H
#define MOE_TESTS_GGEMM_FIXTURE_H

#include "base/status.h"
#include "moe/weight_format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { SKIP_CODE = 77, GUARD = 4096 /* bytes after a result that must not be written */ };

/* Prints the seed, or takes it from MOE_SEED. An argument selects tests by name ("nan*"), for tools
 * that make all tests take too long. False without a Hopper GPU, after a message. */
bool ggemm_test_begin(int argc, char **argv);
extern uint64_t random_state;
uint32_t random_below(uint32_t n);

void ok(struct moe_status st);
/* Device memory with all bytes set to `byte`; free it with cudaFree. */
void *device_alloc(size_t bytes, int byte);
void finish(void); /* waits for the device */

/* Lays out groups of at most `most` rows, each at a multiple of 128 or, if `tight`, without gaps. A
 * third are empty or have one row. Returns the number of rows that they use, at least 1. */
uint32_t random_groups(uint32_t experts, uint32_t most, bool tight, uint32_t *start,
                       uint32_t *count);

/* Reference for W8A8: x [n] becomes what a product with matrices of this format multiplies, value
 * times scale, by moe/numbers.h on the host. codes [n] and scales (one for each group) get the
 * parts, if not NULL. */
void quantise_row(const struct moe_weight_format *f, uint32_t n, float *x, float *codes,
                  float *scales);

#endif
