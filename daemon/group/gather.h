/* SPDX-License-Identifier: Apache-2.0 */
/* The all-gather of a session that forms, through messages of the coordinator. One thread sends its
 * blob and waits for all blobs; another thread delivers those that arrive. Every wait ends by the
 * answer, an abort or a deadline. Blobs are secret and never logged. */
#ifndef MOE_GROUP_GATHER_H
#define MOE_GROUP_GATHER_H

#include "base/status.h"
#include "moe/types.h"

struct moe_gather;

enum { MOE_GATHER_BLOB_MAX = 1024 }; /* bytes of one slot in one round; longer ones take several */

/* Sends this slot's blob of a round to the coordinator. */
typedef struct moe_status (*moe_gather_send_fn)(void *ctx, uint64_t epoch, uint32_t round,
                                                const void *data, size_t length);

struct moe_status moe_gather_create(moe_gather_send_fn send, void *ctx,
                                    struct moe_gather **out) MOE_CHECKED;
/* No thread may be in moe_gather_exchange. NULL is ignored. */
void moe_gather_destroy(struct moe_gather *g);

/* Starts `epoch` at round 0. On the thread that exchanges; epochs rise. `live`, bit s: slot s takes
 * part. */
void moe_gather_begin(struct moe_gather *g, uint64_t epoch, uint32_t slots, uint64_t live);
/* Delivers one slot's blob. A blob of another epoch or round is ignored. */
void moe_gather_deliver(struct moe_gather *g, uint64_t epoch, uint32_t round, uint32_t slot,
                        const void *data, size_t length);
/* Ends waits of `epoch` and of earlier epochs with MOE_ABORTED, also waits that begin later. */
void moe_gather_abort(struct moe_gather *g, uint64_t epoch);

/* Writes the `bytes` bytes of each live slot, this one's from `mine`, to all[slot * bytes]. Zeroes
 * the rest of `all` [slots * bytes]. Errors: MOE_ABORTED, MOE_DEADLINE_EXCEEDED,
 * MOE_INTERNAL/MALFORMED (a blob has another length), or the error of `send`. */
struct moe_status moe_gather_exchange(struct moe_gather *g, const void *mine, void *all,
                                      size_t bytes, uint64_t deadline_ns) MOE_CHECKED;

#endif
