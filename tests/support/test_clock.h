/* SPDX-License-Identifier: Apache-2.0 */
/* The monotonic clock of a test program, which the test moves ahead instead of waiting. The program
 * names moe_test_clock among what it uses: the linker then gives it this clock in place of the
 * system's, in its own code and in the libraries of this project. */
#ifndef MOE_SUPPORT_TEST_CLOCK_H
#define MOE_SUPPORT_TEST_CLOCK_H

#include <stdint.h>

/* [any thread] Moves the clock ahead by `ns`, for all threads. Waits with a deadline end when it
 * has come by this clock. */
void moe_test_clock_advance(uint64_t ns);

#endif
