/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that wait for a step, in one first-in-first-out queue per (layer, kind, dtype). `take`
 * cuts the head of a queue into the segments of one step; a request larger than the room left is
 * split and its remainder stays at the head. Requests of kind MOE_STEP_FORWARD_RETAIN are taken
 * whole, by number.
 *
 * Pure: no clock, no lock, no thread, and memory only for the queues of a model (requests are
 * linked through their own fields). The sequencer chooses the queue. */
#ifndef MOE_SCHEDULE_BATCHER_H
#define MOE_SCHEDULE_BATCHER_H

#include "schedule/work.h"

struct moe_batcher;

/* Tokens first .. first + count - 1 of a request, as part of one step. */
struct moe_segment {
    struct moe_work *work;
    uint32_t first, count;
};

/* `layers`: keys (moe_layer_key) of one model, strictly ascending. */
struct moe_status moe_batcher_create(const uint32_t *layers, size_t count,
                                     struct moe_batcher **out) MOE_CHECKED;
/* Queues for the layers of one more model; the same form. Errors: MOE_INVALID_ARGUMENT (order, not
 * one model), MOE_ALREADY_EXISTS (that model has queues), OUT_OF_MEMORY. */
struct moe_status moe_batcher_add_model(struct moe_batcher *b, const uint32_t *layers,
                                        size_t count) MOE_CHECKED;
/* Removes the queues of a model, not those of create. Nothing may be in them, or come back. Does
 * nothing without such queues. */
void moe_batcher_remove_model(struct moe_batcher *b, uint32_t model);
/* Requests that are still queued belong to the caller. NULL is ignored. */
void moe_batcher_destroy(struct moe_batcher *b);

/* False when there is no queue for such a key. */
bool moe_batcher_has(const struct moe_batcher *b, const struct moe_step_key *key);

/* Appends `w` (tokens >= 1) to its key's queue, which must exist. */
void moe_batcher_push(struct moe_batcher *b, const struct moe_step_key *key, struct moe_work *w);

/* Takes up to `capacity` tokens from the head of a queue; `segments` has room for `capacity`
 * entries. Returns the number of segments, `*tokens` their sum. A request leaves the queue with its
 * last token. */
size_t moe_batcher_take(struct moe_batcher *b, const struct moe_step_key *key, uint32_t capacity,
                        struct moe_segment *segments, uint32_t *tokens);

/* Takes the request of this number (not 0) out of a queue of kind MOE_STEP_FORWARD_RETAIN, whole;
 * false when it is not there. */
bool moe_batcher_take_whole(struct moe_batcher *b, const struct moe_step_key *key, uint64_t number,
                            struct moe_segment *segment);

/* Undoes a take. Segments go back in exactly the reverse order of taking; only segments of requests
 * that were not removed meanwhile may go back. */
void moe_batcher_put_back(struct moe_batcher *b, const struct moe_segment *segment);

/* Sets a request aside until moe_batcher_release, whole: none of its tokens is queued or in a step.
 * It is in no queue meanwhile, but evict, expire, remove and tokens see it. */
void moe_batcher_hold(struct moe_batcher *b, struct moe_work *w);
/* Appends every request that is held to the queue that it was in. */
void moe_batcher_release(struct moe_batcher *b);

/* Sets a part of a batch aside until moe_batcher_join: `w` as in moe_batcher_push. It is in no
 * queue meanwhile, but evict, expire, remove and tokens see it. */
void moe_batcher_gather(struct moe_batcher *b, const struct moe_step_key *key, struct moe_work *w);
/* Appends the parts of one batch (moe_work.batch) for this key to its queue; returns their tokens.
 */
uint32_t moe_batcher_join(struct moe_batcher *b, const struct moe_step_key *key, uint64_t batch);

/* Takes the remainder of `w` out of its queue. False when it was not queued. */
bool moe_batcher_remove(struct moe_batcher *b, struct moe_work *w);

/* Takes every request for which `match(w, arg)` holds out of its queue and returns them as a list
 * linked by `next`, in order within each key. */
typedef bool (*moe_batcher_match)(const struct moe_work *w, uint64_t arg);
struct moe_work *moe_batcher_evict(struct moe_batcher *b, moe_batcher_match match, uint64_t arg);

/* Evicts requests with a deadline at or before `now`; costs nothing when none can have expired. */
struct moe_work *moe_batcher_expire(struct moe_batcher *b, uint64_t now);
/* No queued request expires before this time (it may be early, never late). */
uint64_t moe_batcher_next_expiry(const struct moe_batcher *b);

/* Restarts the first request of the `i`-th queue if some of its tokens were taken; none may be in a
 * step. `*w`: that request, NULL if the queue is empty; `*tokens`: its tokens that wait again.
 * False past the last queue. */
bool moe_batcher_rewind(struct moe_batcher *b, size_t i, struct moe_step_key *key, uint32_t *tokens,
                        struct moe_work **w);

/* Tokens queued and not taken. */
uint64_t moe_batcher_tokens(const struct moe_batcher *b);

/* Calls `visit` for every request of kind MOE_STEP_FORWARD_RETAIN. It must not change queues. */
void moe_batcher_visit_retain(struct moe_batcher *b, void (*visit)(struct moe_work *w, void *arg),
                              void *arg);

/* The `i`-th queue that exists and its tokens (0 when empty); false past the last. */
bool moe_batcher_queue(const struct moe_batcher *b, size_t i, struct moe_step_key *key,
                       uint64_t *tokens);

#endif
