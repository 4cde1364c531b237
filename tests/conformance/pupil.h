/* SPDX-License-Identifier: Apache-2.0 */
/* A seat in a session to train in, with a trainer: for the tests of training under fault. */
#ifndef MOE_TEST_PUPIL_H
#define MOE_TEST_PUPIL_H

#include "moe/training.h"
#include "seat.h"

struct pupil {
    struct seat seat;
    struct moe_trainer *trainer;
    struct moe_backward_args args;  /* a pass that is right */
    struct moe_optimizer_args move; /* a step that is right */
};

bool go_to_school(struct member *m, struct pupil *p, uint32_t budget_ms);
int go_home(struct pupil *p); /* 0 */
/* What a pupil that has a seat still needs: a forward pass for its routing, and a trainer. */
bool open_books(struct pupil *p);

/* One pass, and one optimizer step, from start to end. */
struct moe_status learn(struct pupil *p, struct moe_step_result *result) MOE_CHECKED;
struct moe_status move(struct pupil *p) MOE_CHECKED;

/* FNV-1a of one kind of tensor, of everything that this slot holds. */
bool hash_of(struct pupil *p, const struct member *m, enum moe_train_tensor tensor, uint64_t *hash);
/* Of masters and both moments. */
bool hash_state(struct pupil *p, const struct member *m, uint64_t hash[3]);

#endif
