/* SPDX-License-Identifier: Apache-2.0 */
/* Activations of retained forward steps on this slot's device, from the step to its Backward:
 * whether a pass is worth retaining, which steps the device keeps, until when, and how many bytes.
 * The backend owns the memory; this room alone decides when it is dropped.
 *
 * Slots keep and drop independently: a pass without activations computes them again, to the same
 * bits. So decisions may differ between slots.
 *
 * Threads: the engine's, as trainers are, unless a function says otherwise. Owns one lock, taken
 * last, for figures that other threads read. */
#ifndef MOE_ACTIVATIONS_ACTIVATIONS_H
#define MOE_ACTIVATIONS_ACTIVATIONS_H

#include "daemon/name.h"
#include "moe/training.h"

struct moe_activations;

/* From this many tokens a pass is worth a separate step; below, its Backward computes gate and up
 * again. With few rows per expert, a pass takes as long as reading the experts' weights and writing
 * their gradients (tests/bench/results/cpu.md, CPU backward pass). A separate step would then take
 * as long as a shared one, and save little of the Backward. */
enum { MOE_ACTIVATIONS_TOKENS_MIN = 256 };

struct moe_activations_config {
    const struct moe_backend *backend; /* with a training table */
    struct moe_device *device;
    const struct moe_layer_spec *const *specs; /* [layer_count]; borrowed */
    struct moe_trainer *const *trainers;       /* of the same; borrowed, entries may be NULL */
    size_t layer_count;
    uint64_t keep_ns; /* longest time that a step is kept */
    uint64_t limit;   /* device bytes for retained activations; 0: none are retained */
};

struct moe_status moe_activations_create(const struct moe_activations_config *config,
                                         struct moe_activations **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_activations_destroy(struct moe_activations *a);

/* While no step runs: sets the limit of device bytes. Drops all steps. */
void moe_activations_set_limit(struct moe_activations *a, uint64_t bytes);
/* [any thread] */
uint64_t moe_activations_limit(struct moe_activations *a);
/* [any thread] On the device now. */
uint64_t moe_activations_bytes(struct moe_activations *a);

/* [any thread] Whether a retained Forward of this dtype should have a separate step: not with a
 * limit of 0, not with few tokens, and only one in 64 after eight requests of this slot in a row
 * left nothing on its device (a backend that cannot retain, or no room for one step). */
bool moe_activations_are_worth(struct moe_activations *a, enum moe_dtype dtype, uint32_t tokens);

/* A retained step that has succeeded. */
struct moe_retained_step {
    const char *session; /* of its Backward, as `id` */
    uint64_t id;
    uint64_t name;  /* of the step, for the backend */
    uint32_t layer; /* the model's layer index */
    enum moe_dtype dtype;
    bool retained;   /* the device keeps its activations */
    bool asked_here; /* this slot was asked for it */
    bool used;       /* its Backward is recorded already: no other will come */
};
void moe_activations_note(struct moe_activations *a, const struct moe_retained_step *step);
/* A step in which this slot had neither tokens nor rows: drops it; it counts neither as a miss nor
 * as a success. */
void moe_activations_note_empty(struct moe_activations *a, uint32_t layer, uint64_t name);

/* With `used`, the pass of the Backward (session, id) begins: its activations stay until a call
 * without (not recorded), or moe_activations_drop (recorded). */
void moe_activations_set_use(struct moe_activations *a, const char *session, uint64_t id,
                             bool used);
void moe_activations_drop(struct moe_activations *a, const char *session, uint64_t id);
/* Weights or trainers were replaced: drops all steps. No step runs. */
void moe_activations_drop_all(struct moe_activations *a);
/* The view is over; its session has freed the activations. */
void moe_activations_forget(struct moe_activations *a);

/* Drops expired steps; costs nothing before moe_activations_next_expiry, which is MOE_NEVER when
 * there is none. */
void moe_activations_expire(struct moe_activations *a, uint64_t now);
uint64_t moe_activations_next_expiry(const struct moe_activations *a);

#endif
