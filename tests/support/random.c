/* SPDX-License-Identifier: Apache-2.0 */
#include "support/random.h"

#include "base/clock.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t seed_from_environment(uint64_t otherwise)
{
    const char *text = getenv("MOE_SEED");
    return text != NULL ? strtoull(text, NULL, 0) : otherwise;
}

uint64_t choose_seed(void)
{
    uint64_t seed = seed_from_environment(moe_clock_ns());
    printf("MOE_SEED=%" PRIu64 "\n", seed);
    fflush(stdout); /* also when the test crashes */
    return seed;
}

/* ------------------------------------------------------------ separate sequences */

uint64_t rng_next(struct rng *r) /* splitmix64 (Steele, Lea, Flood 2014) */
{
    uint64_t z = r->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint32_t rng_below(struct rng *r, uint32_t n)
{
    return (uint32_t)((rng_next(r) >> 32) * n >> 32);
}

uint32_t rng_range(struct rng *r, uint32_t low, uint32_t high)
{
    return low + rng_below(r, high - low + 1);
}

bool rng_chance(struct rng *r, uint32_t percent)
{
    return rng_below(r, 100) < percent;
}

float rng_float(struct rng *r)
{
    return (float)(int32_t)(rng_next(r) >> 32) * 0x1p-31f;
}

/* -------------------------------------------------------- the sequence of the process */

static struct rng of_process;

void seed_random(void)
{
    of_process.state = choose_seed();
}

uint64_t random_bits(void)
{
    return rng_next(&of_process);
}

uint32_t random_below(uint32_t n)
{
    return rng_below(&of_process, n);
}

uint32_t random_between(uint32_t low, uint32_t high)
{
    return rng_range(&of_process, low, high);
}

bool one_in(uint32_t n)
{
    return random_below(n) == 0;
}

float random_normal(void) /* Box and Muller */
{
    double u = ((double)(random_bits() >> 11) + 1) * 0x1p-53;
    double v = (double)(random_bits() >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

void fill_random(void *to, size_t length)
{
    uint8_t *out = to;
    for (size_t i = 0; i < length; i += 8) {
        uint64_t bits = random_bits();
        memcpy(out + i, &bits, length - i < 8 ? length - i : 8);
    }
}
