/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers of all tests: splitmix64, seeded so that a run can be replayed.
 *
 * A test prints its seed; MOE_SEED=n replays that run. Most tests draw from one sequence of the
 * process. A test with many worlds, processes or threads gives each a separate sequence. */
#ifndef MOE_TEST_SUPPORT_RANDOM_H
#define MOE_TEST_SUPPORT_RANDOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* MOE_SEED, or `otherwise` without it. Prints nothing. */
uint64_t seed_from_environment(uint64_t otherwise);
/* MOE_SEED, else a seed from the clock. Prints it. */
uint64_t choose_seed(void);

/* A separate sequence; any state is a valid start. One thread at a time. */
struct rng {
    uint64_t state;
};
uint64_t rng_next(struct rng *r);
uint32_t rng_below(struct rng *r, uint32_t n);                  /* 0 .. n-1; 0 for n = 0 */
uint32_t rng_range(struct rng *r, uint32_t low, uint32_t high); /* both included */
bool rng_chance(struct rng *r, uint32_t percent);
float rng_float(struct rng *r); /* -1 .. 1 */

/* The sequence of the process. One thread at a time. */
void seed_random(void); /* from choose_seed */
uint64_t random_bits(void);
uint32_t random_below(uint32_t n);                    /* 0 .. n-1; 0 for n = 0 */
uint32_t random_between(uint32_t low, uint32_t high); /* both included */
bool one_in(uint32_t n);
float random_normal(void);
void fill_random(void *to, size_t length);

#endif
