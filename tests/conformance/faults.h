/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to the files of `faults`. */
#ifndef MOE_TEST_FAULTS_H
#define MOE_TEST_FAULTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A scenario prints its failure and returns false. */
struct scenario {
    const char *name;
    bool (*run)(uint32_t slots);
};
#define SCENARIO(fn)                                                                               \
    {                                                                                              \
#fn, fn                                                                                    \
    }

/* Backward passes and optimizer steps under fault: faults_training.c. */
extern const struct scenario training_scenarios[];
extern const size_t training_scenario_count;

/* Two steps in flight, of each kind: faults_enqueue.c. */
extern const struct scenario enqueue_scenarios[];
extern const size_t enqueue_scenario_count;

#endif
