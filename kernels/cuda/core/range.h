/* SPDX-License-Identifier: Apache-2.0 */
/* Named ranges of the host's time for profilers (NVTX). Without a profiler a call costs a few
 * nanoseconds. */
#ifndef MOE_CUDA_RANGE_H
#define MOE_CUDA_RANGE_H

#include <nvtx3/nvToolsExt.h>

/* Ranges of a thread nest; each begin needs an end. */
static inline void moe_cuda_range_begin(const char *name)
{
    (void)nvtxRangePushA(name);
}

static inline void moe_cuda_range_end(void)
{
    (void)nvtxRangePop();
}

#endif
