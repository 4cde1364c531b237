/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by tests of sessions on any backend: a member of a group with a device, a small layer,
 * tensors and a session, and checks of results. */
#ifndef MOE_TEST_SESSION_FIXTURE_H
#define MOE_TEST_SESSION_FIXTURE_H

#include "group.h"

#include <stdio.h>

/* Steps of a sanitized build may take longer while other tests run. */
#ifdef __has_feature /* clang */
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ || defined SANITIZED
enum { BUDGETS_TIMES = 4 };
#else
enum { BUDGETS_TIMES = 1 };
#endif

enum {
    HIDDEN = 64,
    INNER = 16,
    TOP_K = 2,
    TOKENS = 5,
    BUCKET = 8,
    VICTIM = 1,                      /* the slot that is killed, or stays away */
    SHORT_MS = 1500 * BUDGETS_TIMES, /* budget if a wait must run out */
    LONG_MS = 60000,                 /* budget if it must not */
    WATCHDOG_S = 100,                /* watchdog of a group */
};

/* The backend of all fixtures; the CPU backend unless set before a group starts. */
extern const struct moe_backend *backend;
/* Whether layers of fixtures have a shared expert; set it before a group starts. */
extern bool with_shared_expert;

/* In a member: ends it with a message if `cond` is false. */
#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "slot %u, line %d: expected %s\n", m->slot, __LINE__, #cond);          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

/* Whether the status of a call has this code and reason; prints it otherwise. */
bool is(struct moe_status st, enum moe_code code, enum moe_reason reason);
bool good(struct moe_status st);

/* --------------------------------------------------------------------- fixtures */

/* A member with a device, a layer over all live slots and a session of epoch 7. */
struct session_fixture {
    struct moe_device *device;
    struct moe_layer *layer;
    struct moe_session *session;
    bool partial;  /* of sessions that are joined from now on */
    void *tensors; /* MOE_MEM_HOST; those of `args`, and the two below */
    size_t bytes;
    float *dy, *dx;            /* [TOKENS, HIDDEN] */
    struct moe_step_args args; /* a valid step */
};

/* Layer 3 with two experts on each slot of `holders`, two experts a token; weights depend only on
 * the expert. The caller destroys it, also after a failure if *out was set. */
struct moe_status small_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                              struct moe_layer **out) MOE_CHECKED;
/* The same with two experts for each slot of the group: a copy on that slot, and one on the next
 * slot, or on the next host. Slots out of `holders` have none. */
struct moe_status copied_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                               struct moe_layer **out) MOE_CHECKED;

/* `training`: of the session's config. */
bool open_fixture(struct member *m, struct session_fixture *s, uint32_t budget_ms, bool training);
/* Frees everything; the session may have been left. Returns 0. */
int close_fixture(struct session_fixture *s);
/* Joins another session, after leave_session. */
struct moe_status join_session(struct member *m, struct session_fixture *s, uint64_t epoch,
                               uint32_t budget_ms, bool training) MOE_CHECKED;
/* Leaves the session. */
void leave_session(struct session_fixture *s);

/* One step from start to end. */
struct moe_status run_step(struct moe_session *s, const struct moe_step_args *a,
                           struct moe_step_result *result) MOE_CHECKED;

/* ----------------------------------------------------------------------- memory */

/* Device memory that the test has taken, piece by piece. */
struct memory_hog {
    void *piece[4096];
    size_t bytes[4096];
    uint32_t count;
};

/* Takes all memory of a device but `left` bytes, in pieces of at least `least`. */
void exhaust_memory(struct moe_device *device, size_t left, size_t least, struct memory_hog *h);
/* Frees all of it. */
void release_memory(struct moe_device *device, struct memory_hog *h);

/* Until release_memory, the device refuses every allocation. In a program with full_device.c, a GPU
 * only reports that no memory is free; on other devices this is exhaust_memory. */
void deny_memory(struct moe_device *device, struct memory_hog *h);
/* Read by full_device.c. */
extern bool device_is_full;

/* Device memory that no code may write to. */
struct canaries {
    void *piece[16];
};
bool lay_canaries(struct moe_device *device, struct canaries *c);
/* Frees them; false if one was written to. */
bool check_canaries(struct moe_device *device, struct canaries *c);

/* ----------------------------------------------------------------------- groups */

/* Sets the board's flag of this slot, so members can wait for each other without windows. */
void raise_flag(struct member *m, uint32_t value);
/* False if the group failed or WATCHDOG_S passed. */
bool await_flag(struct board *b, uint32_t slot, uint32_t at_least);

/* Runs fn in a group; false if a member failed or did not end. */
bool run_group_with(uint32_t slots, int (*fn)(struct member *), void *ctx);
bool run_group(uint32_t slots, int (*fn)(struct member *));
/* Runs fn in a group and kills the victim when its flag has reached `after`. True if it was killed
 * and all others returned 0. */
bool survive_a_kill(uint32_t slots, int (*fn)(struct member *), uint32_t after);
/* The same with a ctx, and `later_us` microseconds later. */
bool survive_a_kill_with(uint32_t slots, int (*fn)(struct member *), void *ctx, uint32_t after,
                         uint32_t later_us);

#endif
