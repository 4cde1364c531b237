/* The all-gather that a forming session uses, over messages: one thread brings its blob and waits
 * for everyone's, another delivers what the coordinator sends. Every wait ends: by the answer, by
 * an abort, or by a deadline. What the blobs hold is secret and never logged. */
#ifndef MOE_WORKER_GATHER_H
#define MOE_WORKER_GATHER_H

#include "base/status.h"
#include "moe/types.h"

struct moe_gather;

enum { MOE_GATHER_BLOB_MAX = 1024 }; /* bytes of one slot in one round; longer ones take several */

/* Sends the own blob of a round to the coordinator. */
typedef struct moe_status (*moe_gather_send_fn)(void *ctx, uint64_t epoch, uint32_t round,
                                                const void *data, size_t length);

struct moe_status moe_gather_create(moe_gather_send_fn send, void *ctx,
                                    struct moe_gather **out) MOE_CHECKED;
/* Nobody may be waiting. NULL is ignored. */
void moe_gather_destroy(struct moe_gather *g);

/* Rounds of `epoch` begin, from 0. By the thread that exchanges; epochs rise. `live`: bit s: slot s
 * takes part. */
void moe_gather_begin(struct moe_gather *g, uint64_t epoch, uint32_t slots, uint64_t live);
/* One slot's blob of a round; those of another epoch or round are ignored. */
void moe_gather_deliver(struct moe_gather *g, uint64_t epoch, uint32_t round, uint32_t slot,
                        const void *data, size_t length);
/* Ends the wait of `epoch` and of all before it with MOE_ABORTED, even if it has not begun. */
void moe_gather_abort(struct moe_gather *g, uint64_t epoch);

/* Puts `bytes` of `mine` and of every other live slot at all[slot * bytes]; the rest of `all`
 * [slots * bytes] is zeroed. Errors: MOE_ABORTED, MOE_DEADLINE_EXCEEDED, MOE_INTERNAL/MALFORMED
 * (a blob has another length), or that of sending. */
struct moe_status moe_gather_exchange(struct moe_gather *g, const void *mine, void *all,
                                      size_t bytes, uint64_t deadline_ns) MOE_CHECKED;

#endif
