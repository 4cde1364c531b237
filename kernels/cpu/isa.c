/* Which of the compiled kernel tables this processor can run. */
#include "cpu/isa.h"

extern const struct moe_cpu_isa moe_cpu_isa_baseline;
#if defined(__x86_64__)
extern const struct moe_cpu_isa moe_cpu_isa_avx2;
extern const struct moe_cpu_isa moe_cpu_isa_avx512;
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
    if (__builtin_cpu_supports("x86-64-v3"))
        *count = 2;
    if (__builtin_cpu_supports("x86-64-v4"))
        *count = 3;
#endif
    return all;
}
