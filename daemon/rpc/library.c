/* SPDX-License-Identifier: Apache-2.0 */
/* The core as a library: its life, clock, log and allocator. */
#include "base/clock.h"
#include "daemon/log.h"
#include "rpc/core.h"

#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static void forward_log(gpr_log_func_args *line)
{
    /* A peer causes most of the core's errors (refused connections, broken handshakes). They also
     * arrive as statuses. */
    moe_log_debug("grpc: %s", line->message);
}

static void install_log(void)
{
    gpr_set_log_function(forward_log);
}

void moe_rpc_library_ref(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install_log);
    grpc_init();
}

void moe_rpc_library_unref(void)
{
    grpc_shutdown_blocking();
}

gpr_timespec moe_rpc_time_to_core(uint64_t deadline_ns)
{
    if (deadline_ns == MOE_NEVER)
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    uint64_t now = moe_clock_ns();
    uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    left = left < INT64_MAX ? left : INT64_MAX;
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_nanos((int64_t)left, GPR_TIMESPAN));
}

uint64_t moe_rpc_time_from_core(gpr_timespec deadline)
{
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0)
        return MOE_NEVER;
    gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
    if (left.tv_sec < 0)
        return moe_clock_ns();
    uint64_t seconds = (uint64_t)left.tv_sec;
    if (seconds > UINT32_MAX)
        return MOE_NEVER;
    return moe_clock_ns() + seconds * MOE_NS_PER_S + (uint64_t)left.tv_nsec;
}

void moe_rpc_tune_allocator(void)
{
    /* Set all three: to set only one of them freezes the dynamic mmap threshold at 128 KiB. glibc
     * accepts at most 32 MiB. */
    enum { KEEP_BYTES = 1 << 30, GROW_BYTES = 64 << 20, MMAP_BYTES = 32 << 20 };
    if (mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) == 0 || mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) == 0 ||
        mallopt(M_TOP_PAD, GROW_BYTES) == 0)
        moe_log_debug("malloc is not glibc's and stays as it is");
}

struct moe_status moe_rpc_force_polling(void)
{
    static const char name[] = "GRPC_POLL_STRATEGY";
    const char *strategy = getenv(name);
    if (strategy != NULL && strcmp(strategy, "poll") != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "%s=%.64s: with it, clients can delay heartbeats; unset it or set it to "
                         "\"poll\"",
                         name, strategy);
    if (setenv(name, "poll", 1) != 0)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for %s",
                         name);
    return moe_ok();
}
