/* SPDX-License-Identifier: Apache-2.0 */
/* The main function of a simulation with small worlds, random interleavings and guards. Its file
 * includes this at the end, and has before: `guards` and `guard_off`, `verbose`, the table `seen`
 * of 2^SEEN_BITS states, the world `w`, run_seed(seed), and run_all(quiet) for all small worlds. */
#ifndef MOE_TEST_SIMULATION_MAIN_H
#define MOE_TEST_SIMULATION_MAIN_H

static bool run_seeds(uint64_t first, uint64_t count)
{
    for (uint64_t s = first; s < first + count; s++)
        if (!run_seed(s))
            return false;
    return true;
}

/* Every guard, switched off, breaks a promise; says where. */
static bool run_guards(uint64_t seeds)
{
    bool good = true;
    for (size_t i = 0; i < sizeof guards / sizeof guards[0]; i++) {
        guard_off = (enum moe_guard)i;
        printf("without %s (%s)\n", guards[i].name, guards[i].promise);
        if (run_seeds(1, seeds)) {
            printf("  NOT FOUND in %llu seeds\n", (unsigned long long)seeds);
            good = false;
        }
        if (run_all(true)) {
            printf("  NOT FOUND in the small worlds\n");
            good = false;
        }
    }
    guard_off = MOE_GUARD_COUNT;
    return good;
}

int main(int argc, char **argv)
{
    bool good = true;
    seen = calloc((size_t)1 << SEEN_BITS, sizeof *seen);
    MOE_INVARIANT(seen != NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc && good; i++) {
        uint64_t n = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
        if (strcmp(argv[i], "--all") == 0) {
            good = run_all(false);
        } else if (strcmp(argv[i], "--seeds") == 0) {
            good = run_seeds(1, n);
        } else if (strcmp(argv[i], "--seed") == 0) {
            verbose = true;
            good = run_seed(n);
        } else if (strcmp(argv[i], "--guards") == 0) {
            good = run_guards(n);
        }
    }
    printf("%s; a state has %zu bytes\n", good ? "all promises hold" : "FAILED", sizeof w);
    free(seen);
    return good ? 0 : 1;
}

#endif
