/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers: secrets, and those that identify a run, a writer or a view. */
#ifndef MOE_BASE_RANDOM_H
#define MOE_BASE_RANDOM_H

#include "base/status.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

/* `count` bytes, at most 256, from the system's generator; early in the boot it blocks until that
 * is ready. Fit for secrets. Any thread. Errors: MOE_UNAVAILABLE/IO (the system has no generator).
 */
static inline struct moe_status moe_random_bytes(void *out, size_t count)
{
    if (getrandom(out, count, 0) != (ssize_t)count)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no random numbers: %s",
                         strerrorname_np(errno));
    return moe_ok();
}

/* A number other than 0. Otherwise like moe_random_bytes. */
static inline struct moe_status moe_random_id(uint64_t *out)
{
    do {
        MOE_TRY(moe_random_bytes(out, sizeof *out));
    } while (*out == 0);
    return moe_ok();
}

#endif
