/* Numbers that tell one from another: of a run, a writer, a view. */
#ifndef MOE_BASE_RANDOM_H
#define MOE_BASE_RANDOM_H

#include "base/status.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

/* Any number but 0, from the system's generator, for which it waits early in the boot. Any thread.
 * MOE_UNAVAILABLE/IO where the system has none. */
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
