/* SPDX-License-Identifier: Apache-2.0 */
/* A monotonic clock that a test moves ahead instead of waiting. A test program with moe_test_clock
 * in USES gets this clock in place of the system's: the linker replaces the calls in its code and
 * in this project's libraries. */
#ifndef MOE_SUPPORT_TEST_CLOCK_H
#define MOE_SUPPORT_TEST_CLOCK_H

#include <stdint.h>

/* [any thread] Moves the clock ahead by `ns` for all threads. Waits with a deadline end when this
 * clock has reached it. */
void moe_test_clock_advance(uint64_t ns);

#endif
