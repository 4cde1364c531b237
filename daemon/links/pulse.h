/* SPDX-License-Identifier: Apache-2.0 */
/* Which peers of this host have stopped. Every worker stores a beat into the memory of its rings
 * (shm_ring.h), every 10 ms, from a thread that calls no device. The same thread reads the beats of
 * the peers that this worker watches, and judges them.
 *
 * A busy machine must not look like a stopped peer. So silence is counted in turns of the judging
 * thread: time in which this process does not run either counts as one turn at most. After a few
 * silent turns the judge asks the kernel what the peer's thread does (/proc). A thread that wants a
 * processor is never judged; the budget for waits remains for it. */
#ifndef MOE_LINKS_PULSE_H
#define MOE_LINKS_PULSE_H

#include "base/status.h"
#include "links/shm_ring.h"

enum {
    MOE_PULSE_TURN_MS = 10,
    MOE_PULSE_SUSPECT_TURNS = 5,  /* silent for so long: the kernel is asked */
    MOE_PULSE_ASLEEP_TURNS = 100, /* a thread that sleeps for so long will not beat again */
};

/* What the kernel says of a thread. */
enum moe_pulse_thread {
    MOE_PULSE_RUNS,    /* or wants to */
    MOE_PULSE_SLEEPS,  /* or waits for a disk, or is frozen */
    MOE_PULSE_STOPPED, /* by a signal or a debugger */
    MOE_PULSE_GONE,
};

/* Any thread. `process` and `thread` as /proc has them. */
enum moe_pulse_thread moe_pulse_look(uint32_t process, uint32_t thread);

/* One peer as the judge knows it. Zeroed: nothing is known. Pure. */
struct moe_pulse_peer {
    uint32_t beat;   /* the last one seen */
    uint32_t silent; /* turns since */
    bool judged;     /* it has stopped: said once */
};

/* One turn of the judge, which sees `beat`. `look` is called after MOE_PULSE_SUSPECT_TURNS. Returns
 * true once, when the peer has stopped. MOE_SHM_BEAT_ENDED: the peer has left, and is not judged.
 */
bool moe_pulse_judge(struct moe_pulse_peer *peer, uint32_t beat,
                     enum moe_pulse_thread (*look)(void *ctx), void *ctx);

/* Another peer has stopped in this turn: whether this one has, too, although it has been silent for
 * less. The view ends once, and the next one should lack both. */
bool moe_pulse_judge_too(struct moe_pulse_peer *peer, enum moe_pulse_thread (*look)(void *ctx),
                         void *ctx);

struct moe_pulse;

/* Starts the thread. `stopped`: watched slots of `epoch` (bit s: slot s) have stopped; `why` says
 * how that was seen. `turn`: called in each turn of a view, or NULL. Both are called by the thread,
 * without a lock of this file; they must not end the view. */
struct moe_status
moe_pulse_create(void (*stopped)(void *ctx, uint64_t epoch, uint64_t slots, const char *why),
                 void (*turn)(void *ctx), void *ctx, struct moe_pulse **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_pulse_destroy(struct moe_pulse *p);

/* [any thread] A view begins: beats into the memory of `reader` from now on. NULL: no peer sees
 * this worker. Borrowed until moe_pulse_end. */
void moe_pulse_begin(struct moe_pulse *p, uint64_t epoch, struct moe_shm_reader *reader);
/* [any thread] Judges the peer in `slot` by the memory that `writer` has mapped; borrowed in the
 * same way. NULL is ignored. */
void moe_pulse_watch(struct moe_pulse *p, uint32_t slot, const struct moe_shm_writer *writer);
/* [any thread] The view is over: its memory is not touched any more once this returns. A call of
 * `stopped` may still be under way. */
void moe_pulse_end(struct moe_pulse *p);

#endif
