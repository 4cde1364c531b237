/* A member's seat in a session of the CPU backend, with a small layer to run: for the tests of
 * sessions and windows. */
#ifndef MOE_TEST_SEAT_H
#define MOE_TEST_SEAT_H

#include "small_layer.h"

#include "cpu/session.h"

enum {
    HIDDEN = 24,
    INNER = 10,
    TOP_K = 2,
    TOKENS = 5,
    BUCKET = 8,
    SHORT_MS = 1500,  /* budget where a wait is meant to run out */
    LONG_MS = 60000,  /* budget where it is not */
    PATIENCE_S = 100, /* watchdog of a group */
};

/* Two experts on each slot of `holders`; weights depend on the expert alone. */
struct moe_status small_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                              struct moe_layer **out) MOE_CHECKED;

/* One slot's tensors for the small layer. */
struct tensors {
    float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN], weights[TOKENS * TOP_K];
    int32_t ids[TOKENS * TOP_K];
    uint8_t state[TOKENS];
};

/* A member with a device, a layer over all live slots and a session of epoch 7. */
struct seat {
    struct moe_device *device;
    struct moe_layer *layer;
    struct moe_session *session;
    struct tensors tensors;
    struct moe_step_args args; /* a step that is right */
};

bool sit_down(struct member *m, struct seat *s, uint32_t budget_ms);
int get_up(struct seat *s); /* 0 */

/* One step from start to end. */
struct moe_status run_step(struct moe_session *s, const struct moe_step_args *a,
                           struct moe_step_result *result) MOE_CHECKED;

/* The board's flag of a slot, as a way to wait for one another outside the windows. */
void raise_flag(struct member *m, uint32_t value);
/* False when the group failed or a minute passed. */
bool await_flag(struct board *b, uint32_t slot, uint32_t at_least);

/* Runs fn in a group; false when a member found something wrong or did not end. */
bool run_group_with(uint32_t slots, int (*fn)(struct member *), void *ctx);
bool run_group(uint32_t slots, int (*fn)(struct member *));

#endif
