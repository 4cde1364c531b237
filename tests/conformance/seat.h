/* SPDX-License-Identifier: Apache-2.0 */
/* What tests of sessions share, whatever the backend: a member of a group with a device, a small
 * layer, tensors and a session, and ways to say what was expected of it. */
#ifndef MOE_TEST_SEAT_H
#define MOE_TEST_SEAT_H

#include "group.h"

#include <stdio.h>

enum {
    HIDDEN = 64,
    INNER = 16,
    TOP_K = 2,
    TOKENS = 5,
    BUCKET = 8,
    VICTIM = 1,       /* the slot that is killed, or stays away */
    SHORT_MS = 1500,  /* budget where a wait is meant to run out */
    LONG_MS = 60000,  /* budget where it is not */
    PATIENCE_S = 100, /* watchdog of a group */
};

/* Where seats are; the CPU backend unless set before a group starts. */
extern const struct moe_backend *backend;
/* Whether layers of seats have a shared expert; not unless set before a group starts. */
extern bool with_shared_expert;

/* In a member: ends it with a message when `cond` does not hold. */
#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "slot %u, line %d: expected %s\n", m->slot, __LINE__, #cond);          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

/* Whether a call ended like this; prints what it said otherwise. */
bool is(struct moe_status st, enum moe_code code, enum moe_reason reason);
bool good(struct moe_status st);

/* ------------------------------------------------------------------------ seats */

/* A member with a device, a layer over all live slots and a session of epoch 7. */
struct seat {
    struct moe_device *device;
    struct moe_layer *layer;
    struct moe_session *session;
    void *tensors; /* MOE_MEM_HOST; those of `args`, and the two below */
    size_t bytes;
    float *dy, *dx;            /* [TOKENS, HIDDEN] */
    struct moe_step_args args; /* a step that is right */
};

/* Layer 3 with two experts on each slot of `holders`, two experts a token; weights depend on the
 * expert alone. The caller destroys it, also after a failure if *out was set. */
struct moe_status small_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                              struct moe_layer **out) MOE_CHECKED;

/* `training`: whether the session is one to train in. */
bool sit_down(struct member *m, struct seat *s, uint32_t budget_ms, bool training);
/* Frees everything; the session may have been left. Returns 0. */
int get_up(struct seat *s);
/* Another session for the seat, after `part`. */
struct moe_status join(struct member *m, struct seat *s, uint64_t epoch, uint32_t budget_ms,
                       bool training) MOE_CHECKED;
/* Leaves the session. */
void part(struct seat *s);

/* One step from start to end. */
struct moe_status run_step(struct moe_session *s, const struct moe_step_args *a,
                           struct moe_step_result *result) MOE_CHECKED;

/* ----------------------------------------------------------------------- memory */

/* What was taken of a device, piece by piece. */
struct hunger {
    void *piece[4096];
    size_t bytes[4096];
    uint32_t count;
};

/* Takes what a device has but for `left` bytes and less than `least`. */
void starve(struct moe_device *device, size_t left, size_t least, struct hunger *h);
/* Gives all of it back. */
void feed(struct moe_device *device, struct hunger *h);

/* Until feed, the device refuses all memory that is asked for. A GPU keeps its memory and only says
 * that none is free, where the program links full_device.c; other devices starve. */
void deny(struct moe_device *device, struct hunger *h);
/* Read by full_device.c. */
extern bool device_is_full;

/* Device memory that nobody may write to. */
struct canaries {
    void *piece[16];
};
bool lay_canaries(struct moe_device *device, struct canaries *c);
/* Gives them back; false when one was written to. */
bool check_canaries(struct moe_device *device, struct canaries *c);

/* ----------------------------------------------------------------------- groups */

/* The board's flag of a slot, as a way to wait for one another outside the windows. */
void raise_flag(struct member *m, uint32_t value);
/* False when the group failed or PATIENCE_S passed. */
bool await_flag(struct board *b, uint32_t slot, uint32_t at_least);

/* Runs fn in a group; false when a member found something wrong or did not end. */
bool run_group_with(uint32_t slots, int (*fn)(struct member *), void *ctx);
bool run_group(uint32_t slots, int (*fn)(struct member *));
/* Runs fn in a group and kills the victim when its flag has reached `after`. True when it did and
 * all others returned 0. */
bool survive_a_kill(uint32_t slots, int (*fn)(struct member *), uint32_t after);

#endif
