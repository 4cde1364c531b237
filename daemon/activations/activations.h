/* SPDX-License-Identifier: Apache-2.0 */
/* What retained forward steps leave on this slot's device, from the step to the Backward that uses
 * it: whether a pass is worth retaining, which steps the device keeps, until when, and how much
 * there is. The backend owns the memory; this room alone decides when it is dropped.
 *
 * Slots keep and drop without asking each other: a pass that finds nothing computes it again, to
 * the same bits. So no decision here needs to be the same on two slots.
 *
 * Threads: the engine's, as trainers are, unless a function says otherwise. Owns one lock, taken
 * last, of what other threads read. */
#ifndef MOE_ACTIVATIONS_ACTIVATIONS_H
#define MOE_ACTIVATIONS_ACTIVATIONS_H

#include "daemon/name.h"
#include "moe/training.h"

struct moe_activations;

/* Tokens from which on a pass is worth a step of its own. Below that its Backward computes gate and
 * up again: with few rows an expert, passes take as long as the experts' weights take to be read
 * and their gradients to be written (tests/bench/results/cpu.md, CPU backward pass), a step alone
 * would take as long as the one that it no longer shares, and what could be retained is little of
 * it. */
enum { MOE_ACTIVATIONS_TOKENS_MIN = 256 };

struct moe_activations_config {
    const struct moe_backend *backend; /* with a training table */
    struct moe_device *device;
    const struct moe_layer_spec *const *specs; /* [layer_count]; borrowed */
    struct moe_trainer *const *trainers;       /* of the same; borrowed, entries may be NULL */
    size_t layer_count;
    uint64_t keep_ns; /* how long a step is kept at most */
    uint64_t limit;   /* bytes of the device; 0: nothing is kept */
};

struct moe_status moe_activations_create(const struct moe_activations_config *config,
                                         struct moe_activations **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_activations_destroy(struct moe_activations *a);

/* While no step runs: most bytes of the device from now on. Drops what is kept. */
void moe_activations_set_limit(struct moe_activations *a, uint64_t bytes);
/* [any thread] */
uint64_t moe_activations_limit(struct moe_activations *a);
/* [any thread] On the device now. */
uint64_t moe_activations_bytes(struct moe_activations *a);

/* [any thread] Whether a Forward of this dtype that is to be retained should have a step of its
 * own: not where nothing may be kept, not with few tokens, and only now and then where the last
 * ones that were asked of this slot have kept nothing here (a backend without a way to, or no room
 * for even one). */
bool moe_activations_are_worth(struct moe_activations *a, enum moe_dtype dtype, uint32_t tokens);

/* A retained step that has ended well. */
struct moe_retained_step {
    const char *session; /* of its Backward, as `id` */
    uint64_t id;
    uint64_t name;  /* of the step, for the backend */
    uint32_t layer; /* the model's layer index */
    enum moe_dtype dtype;
    bool retained;   /* the device keeps what it left */
    bool asked_here; /* this slot was asked for it */
    bool used;       /* the id is recorded: no Backward will come that could use it */
};
void moe_activations_note(struct moe_activations *a, const struct moe_retained_step *step);
/* One in which this slot had neither tokens nor rows: nothing of it is kept, and it says nothing
 * about whether keeping works. */
void moe_activations_note_empty(struct moe_activations *a, uint32_t layer, uint64_t name);

/* The pass of the Backward (session, id) begins: nothing that it may use is dropped until
 * moe_activations_end_use, where it was not recorded, or moe_activations_drop, where it was. */
void moe_activations_begin_use(struct moe_activations *a, const char *session, uint64_t id);
void moe_activations_end_use(struct moe_activations *a, const char *session, uint64_t id);
void moe_activations_drop(struct moe_activations *a, const char *session, uint64_t id);
/* Weights, or their trainers, are others now. No step runs. */
void moe_activations_drop_all(struct moe_activations *a);
/* The view is over: its session takes with it what is kept. */
void moe_activations_forget(struct moe_activations *a);

/* Drops what has been kept for long enough; costs nothing before moe_activations_next_expiry, which
 * is MOE_NEVER when nothing is kept. */
void moe_activations_expire(struct moe_activations *a, uint64_t now);
uint64_t moe_activations_next_expiry(const struct moe_activations *a);

#endif
