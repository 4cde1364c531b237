/* SPDX-License-Identifier: Apache-2.0 */
/* A session fixture with a trainer, for tests of training under fault. */
#ifndef MOE_TEST_TRAINER_FIXTURE_H
#define MOE_TEST_TRAINER_FIXTURE_H

#include "moe/training.h"
#include "session_fixture.h"

struct trainer_fixture {
    struct session_fixture base;
    struct moe_trainer *trainer;
    struct moe_backward_args args;       /* a valid pass */
    struct moe_optimizer_args optimizer; /* a valid step */
    struct moe_optimizer_result taken;   /* of the last one */
    uint32_t experts;                    /* of the layer; set it with another layer */
};

bool open_trainer_fixture(struct member *m, struct trainer_fixture *p, uint32_t budget_ms);
int close_trainer_fixture(struct trainer_fixture *p); /* 0 */
/* After open_fixture: runs a forward pass for the routing, and creates the trainer. */
bool start_training(struct trainer_fixture *p);

/* One pass, and one optimizer step, from start to end. */
struct moe_status run_backward(struct trainer_fixture *p,
                               struct moe_step_result *result) MOE_CHECKED;
struct moe_status run_optimizer(struct trainer_fixture *p) MOE_CHECKED;

/* FNV-1a of one tensor; 0 if only other slots have it. */
bool hash_tensor(struct trainer_fixture *p, enum moe_weight weight, uint32_t expert,
                 enum moe_train_tensor tensor, uint64_t *hash);
/* FNV-1a of one kind of tensor, over all parameters of this slot. */
bool hash_of(struct trainer_fixture *p, enum moe_train_tensor tensor, uint64_t *hash);
/* Of masters and both moments. */
bool hash_state(struct trainer_fixture *p, uint64_t hash[3]);

#endif
