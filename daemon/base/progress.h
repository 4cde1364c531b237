/* SPDX-License-Identifier: Apache-2.0 */
/* Progress: each loop of a daemon shows that it moves, and a judge concludes from that whether the
 * daemon is alive and ready.
 *
 *   alive   no loop is stuck in a way that a restart would mend
 *   ready   alive, no loop is stuck at all, and the daemon's conditions hold ("in the view")
 *
 * A loop has a counter, which its thread raises, and a place: what it works on. A judged loop is
 * stuck when nothing of it has moved for the limit. Loops that turn while idle are judged always,
 * the others while they are at a place. A long step, a load or a Save moves a counter all the time
 * (`more`): it is slow, not stuck.
 *
 * Not ready: stuck for `limit_ns`. Not alive: stuck for MOE_PROGRESS_DEAD limits, at a place inside
 * the process. A place outside of it, such as a disk, never costs the life.
 *
 * The judge measures time by its own looks, a long pause as a short one: after a stop of the whole
 * process (SIGSTOP, a suspended machine) no loop is blamed for it.
 *
 * Who asks: GET /livez and /readyz (metrics_http.h), grpc.health.v1 by moe_progress_watch, and
 * systemd's watchdog: "may I feed it" is moe_progress_is_alive. */
#ifndef MOE_DAEMON_PROGRESS_H
#define MOE_DAEMON_PROGRESS_H

#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct moe_progress;

/* The service of grpc.health.v1 that says whether a daemon is alive; "" says whether it is ready.
 */
#define MOE_HEALTH_LIVE "moed.live"

enum {
    MOE_PROGRESS_LOOPS = 16,
    MOE_PROGRESS_LINES = 24, /* of an answer */
    MOE_PROGRESS_DEAD = 4,   /* limits without progress until a loop costs the life */
    MOE_PROGRESS_LOOK_MS = 50,
};

/* ------------------------------------------------------------------------------- loops */

/* What a loop works on. Static. */
struct moe_loop_place {
    const char *what; /* "a step of the device" */
    const char *code; /* of the reason if it is stuck here; NULL: the loop's */
    bool outside;     /* the wait is for something outside the process: a restart does not help */
};

struct moe_loop_config {
    const char *name;  /* "engine"; static, as `code` */
    const char *code;  /* of the reason: "ENGINE_STUCK" */
    bool always;       /* turns while idle too, at least once in the limit */
    bool readies_only; /* stuck, it costs the readiness alone: a restart does not help */
    /* A loop that was added before and moves this one: while it is stuck itself, this one is not.
     * Or NULL. */
    const struct moe_loop *mover;
    /* A number that changes with each bit of progress within a turn: bytes, slices. Called by the
     * judge, on any thread, under its lock; reads atomics only. NULL: none. */
    uint64_t (*more)(const void *ctx);
    const void *ctx;
};

/* Written by one thread, the loop's. All functions take NULL, and then do nothing. */
struct moe_loop {
    _Alignas(64) _Atomic uint64_t turns;
    _Atomic(const struct moe_loop_place *) place; /* NULL: idle */
    struct moe_loop_config config;
    /* The judge's, under its lock. */
    uint64_t seen;     /* the sum of what moves, as last seen */
    uint64_t moved_ns; /* by the judge's time */
    bool was_judged, was_stuck;
    bool excused; /* its mover is stuck, or excused */
};

/* One turn, or any other bit of progress. */
static inline void moe_loop_turn(struct moe_loop *l)
{
    if (l != NULL)
        atomic_store_explicit(&l->turns, atomic_load_explicit(&l->turns, memory_order_relaxed) + 1,
                              memory_order_relaxed);
}

/* The loop begins to work on something; `place` is static. NULL: it is idle again. */
static inline void moe_loop_enter(struct moe_loop *l, const struct moe_loop_place *place)
{
    if (l == NULL)
        return;
    atomic_store_explicit(&l->place, place, memory_order_relaxed);
    moe_loop_turn(l);
}

static inline void moe_loop_leave(struct moe_loop *l)
{
    moe_loop_enter(l, NULL);
}

/* ----------------------------------------------------------------------------- health */

/* A loop or condition. */
struct moe_progress_line {
    const char *name;
    const char *code; /* why it is not well; NULL: it is */
    bool kills;       /* with a code: also not alive */
    char text[128];
};

struct moe_health {
    bool alive, ready;
    size_t count;
    struct moe_progress_line lines[MOE_PROGRESS_LINES];
};

/* Adds a line. With a code, the daemon is not ready; with `kills`, not alive either. A line beyond
 * MOE_PROGRESS_LINES counts and is not shown. */
void moe_health_add(struct moe_health *v, const char *name, const char *code, bool kills,
                    const char *fmt, ...) MOE_PRINTF(5, 6);
/* Writes it for people, as in Kubernetes: with `verbose` a line for each loop and
 * condition ("[+] engine: idle", "[-] device DEVICE_STUCK: ..."), else those that count against
 * it; at the end "ok" or "not alive" (`ready`: "not ready"). Cut to `size`. */
void moe_health_print(const struct moe_health *v, bool ready, bool verbose, char *out, size_t size);

/* ------------------------------------------------------------------------------- judge */

struct moe_progress_config {
    uint64_t step_ns;  /* longest time between two turns of a loop that is idle */
    uint64_t limit_ns; /* stuck; at least step_ns and what a loop may wait for others */
};

struct moe_status moe_progress_create(const struct moe_progress_config *config,
                                      struct moe_progress **out) MOE_CHECKED;
/* The loops have ended. NULL is ignored. */
void moe_progress_destroy(struct moe_progress *p);
/* The step_ns of the configuration; 0 for NULL: there is no progress to show. */
uint64_t moe_progress_step_ns(const struct moe_progress *p);

/* [any thread] A new loop, which lives as long as `p`. NULL gives NULL, and so does a full table,
 * which is logged. */
struct moe_loop *moe_progress_add(struct moe_progress *p, const struct moe_loop_config *config);
/* Conditions besides the loops: `add` calls moe_health_add, on any thread; it reads atomics only.
 */
void moe_progress_set_conditions(struct moe_progress *p,
                                 void (*add)(void *ctx, struct moe_health *v), void *ctx);

/* [any thread] Looks at all loops at `now_ns` (moe_clock_ns), which does not go back. The log gets
 * a line when a loop begins or ends to be stuck. */
void moe_progress_judge(struct moe_progress *p, uint64_t now_ns, struct moe_health *out);
/* [any thread] The judge's opinion now; true for NULL. */
bool moe_progress_is_alive(struct moe_progress *p);

/* Starts a thread that judges every MOE_PROGRESS_LOOK_MS, and calls `changed` at first, and when
 * `alive` or `ready` has changed. Errors: MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_progress_watch(struct moe_progress *p,
                                     void (*changed)(void *ctx, const struct moe_health *v),
                                     void *ctx) MOE_CHECKED;
/* The daemon ends: ends the thread if it runs, and calls no function of a loop or condition any
 * more. From now on the daemon is alive and not ready (STOPPING). NULL is ignored. */
void moe_progress_close(struct moe_progress *p);

#endif
