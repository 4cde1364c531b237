/* SPDX-License-Identifier: Apache-2.0 */
/* When a device may complete a request by itself (struct moe_step_completion): which part of it
 * carries the completion. Pure. */
#ifndef MOE_SCHEDULE_COMPLETION_H
#define MOE_SCHEDULE_COMPLETION_H

#include "base/guard.h"

#include <stdbool.h>
#include <stdint.h>

/* Tokens `first` to `first + count` of a request, which a step is about to take. */
struct moe_request_part {
    uint32_t first, count;
    uint32_t tokens;   /* of the request */
    uint32_t finished; /* of them, in steps that have ended */
    bool failed;       /* the request has failed already */
};

/* True if the request succeeds once this part does: then the part carries the completion. While an
 * earlier part is in another step, that is not known; then the host completes the request. */
static inline bool moe_part_completes(const struct moe_request_part *p)
{
    return MOE_GUARD(GOOD_NEEDS_EARLIER_PARTS, p->finished == p->first && !p->failed) &&
           MOE_GUARD(GOOD_NEEDS_THE_LAST_PART, p->first + p->count == p->tokens);
}

#endif
