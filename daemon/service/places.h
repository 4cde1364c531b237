/* SPDX-License-Identifier: Apache-2.0 */
/* Where clients of a spare find the experts: the text of its refusals. A worker that is no spare
 * has none. Threads: any. */
#ifndef MOE_SERVICE_PLACES_H
#define MOE_SERVICE_PLACES_H

#include "base/mutex.h"

#include <stddef.h>

enum { MOE_PLACES_BYTES = 180 }; /* a refusal has room for them, and for its own words */

struct moe_places {
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) char text[MOE_PLACES_BYTES];
};

/* `p` is zeroed. */
void moe_places_init(struct moe_places *p);
void moe_places_destroy(struct moe_places *p);
/* `endpoints` [count] are copied, as many as fit; count = 0: this worker is no spare. */
void moe_places_set(struct moe_places *p, const char *const *endpoints, size_t count);
/* "host:port, host:port"; "" = this worker is no spare. */
void moe_places_read(struct moe_places *p, char out[MOE_PLACES_BYTES]);

#endif
