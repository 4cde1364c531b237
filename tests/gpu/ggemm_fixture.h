/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the grouped products on one GPU share. Functions fail the running test. */
#ifndef MOE_TESTS_GGEMM_FIXTURE_H
#define MOE_TESTS_GGEMM_FIXTURE_H

#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { SKIP_CODE = 77, GUARD = 4096 /* bytes behind a result that nobody may write */ };

/* Prints the seed, or takes MOE_SEED, and lets an argument select tests by name ("nan*"), for tools
 * that make all of them take too long. False without a Hopper GPU, after saying so. */
bool ggemm_test_begin(int argc, char **argv);
extern uint64_t random_state;
uint32_t random_below(uint32_t n);

void ok(struct moe_status st);
/* Device memory whose bytes are all `byte`; cudaFree. */
void *device_alloc(size_t bytes, int byte);
void finish(void); /* waits for the device */

/* Lays groups of at most `most` rows behind each other, at multiples of 128 or, if `tight`, without
 * a gap. A third are empty or have one row. Returns the rows that they take, at least 1. */
uint32_t random_groups(uint32_t experts, uint32_t most, bool tight, uint32_t *start,
                       uint32_t *count);

#endif
