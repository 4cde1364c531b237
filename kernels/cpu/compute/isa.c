/* SPDX-License-Identifier: Apache-2.0 */
/* Which of the compiled kernel tables this processor can run. */
#include "cpu/compute/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

extern const struct moe_cpu_isa moe_cpu_isa_baseline;
#if defined(__x86_64__)
extern const struct moe_cpu_isa moe_cpu_isa_avx2;
extern const struct moe_cpu_isa moe_cpu_isa_avx512;
#endif

#if defined(__x86_64__)
/* __builtin_cpu_supports does not know it in every compiler. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

const struct moe_cpu_isa *const *moe_cpu_isa_list(uint32_t *count)
{
    static const struct moe_cpu_isa *const all[] = {
        &moe_cpu_isa_baseline,
#if defined(__x86_64__)
        &moe_cpu_isa_avx2,
        &moe_cpu_isa_avx512,
#endif
    };
    *count = 1;
#if defined(__x86_64__)
    /* The same features that CMakeLists.txt compiles the tables for. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        *count = 2;
    if (*count == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
        *count = 3;
#endif
    return all;
}
