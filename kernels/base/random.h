/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers that identify a run, a writer or a view. */
#ifndef MOE_BASE_RANDOM_H
#define MOE_BASE_RANDOM_H

#include "base/status.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

/* A number other than 0 from the system's generator; early in the boot it blocks until that is
 * ready. Any thread. Errors: MOE_UNAVAILABLE/IO (the system has no generator). */
static inline struct moe_status moe_random_id(uint64_t *out)
{
    do {
        if (getrandom(out, sizeof *out, 0) != (ssize_t)sizeof *out)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no random numbers: %s",
                             strerrorname_np(errno));
    } while (*out == 0);
    return moe_ok();
}

#endif
