/* What the scenarios of `faults` share: a member of a group with a device, a small layer and a
 * session, of whatever backend. */
#ifndef MOE_TEST_FAULTS_H
#define MOE_TEST_FAULTS_H

#include "moe/training.h"
#include "small_layer.h"

enum {
    HIDDEN = 64,
    INNER = 16,
    TOP_K = 2,
    TOKENS = 5,
    BUCKET = 8,
    VICTIM = 1,
    SHORT_MS = 1500,
    LONG_MS = 60000,
    CYCLES = 8,
    PATIENCE_S = 100,
};

extern const struct moe_backend *backend;

/* A member with a device, a layer, tensors and a session. */
struct seat {
    struct moe_device *device;
    struct moe_layer *layer; /* two experts on every live slot */
    struct moe_session *session;
    void *tensors; /* MOE_MEM_HOST */
    size_t bytes;
    float *dy, *dx;            /* [TOKENS, HIDDEN], in `tensors` */
    struct moe_step_args args; /* a step that is right */
};

/* Two experts on each slot of `holders`. */
struct moe_status small_layer(struct moe_device *device, const struct member *m, uint64_t holders,
                              struct moe_layer **out);
struct moe_status sit_down(struct member *m, struct seat *s, uint32_t budget_ms, bool training);
/* Joins anew, after session_leave. */
struct moe_status join(struct member *m, struct seat *s, uint64_t epoch, uint32_t budget_ms,
                       bool training);
int get_up(struct seat *s);
struct moe_status run_step(struct seat *s, struct moe_step_result *result);

/* Runs fn on `slots` slots and kills the victim when its flag has reached `after`. True when all
 * others returned 0. */
bool survive_a_kill(uint32_t slots, int (*fn)(struct member *), uint32_t after);
/* Runs fn on all slots; true when all returned 0. */
bool all_return_zero(uint32_t slots, int (*fn)(struct member *));

/* A scenario prints what is wrong and returns false. */
struct scenario {
    const char *name;
    bool (*run)(uint32_t slots);
};
#define SCENARIO(fn)                                                                               \
    {                                                                                              \
#fn, fn                                                                                    \
    }

/* Backward passes and optimizer steps under fault: faults_training.c. */
extern const struct scenario training_scenarios[];
extern const size_t training_scenario_count;

#endif
