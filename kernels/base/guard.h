/* SPDX-License-Identifier: Apache-2.0 */
/* Guards: the conditions that the safety of a pure room hangs on. In the product a guard is its
 * condition and nothing else. A simulation is built with MOE_SIMULATION; there each guard can be
 * switched off, which makes its condition true, and some promise of the simulation has to break.
 * tests/simulation/guards.h lists them; MOE_GUARD_LIST names another list. */
#ifndef MOE_BASE_GUARD_H
#define MOE_BASE_GUARD_H

#ifdef MOE_SIMULATION
#include <stdbool.h>
#ifndef MOE_GUARD_LIST
#define MOE_GUARD_LIST "simulation/guards.h"
#endif
#define X(name, promise) MOE_GUARD_##name,
enum moe_guard {
#include MOE_GUARD_LIST
    MOE_GUARD_COUNT
};
#undef X
/* The simulation's: true while the guard is switched off. */
bool moe_guard_is_off(enum moe_guard guard);
#define MOE_GUARD(name, condition) (moe_guard_is_off(MOE_GUARD_##name) || (condition))
#else
#define MOE_GUARD(name, condition) (condition)
#endif

#endif
