/* SPDX-License-Identifier: Apache-2.0 */
/* See trainer_fixture.h. */
#include "trainer_fixture.h"

#include "base/clock.h"

bool start_training(struct trainer_fixture *p)
{
    struct moe_trainer_config config = {.optimizer = MOE_OPTIMIZER_ADAMW};
    struct moe_step_result result;
    if (!good(run_step(p->base.session, &p->base.args, &result)) ||
        !good(backend->training->trainer_create(p->base.layer, &config, &p->trainer)))
        return false;
    p->args = (struct moe_backward_args){.trainer = p->trainer,
                                         .dtype = MOE_DTYPE_F32,
                                         .bucket = BUCKET,
                                         .tokens = TOKENS,
                                         .x = p->base.args.x,
                                         .dy = p->base.dy,
                                         .ids = p->base.args.ids_out,
                                         .accumulate = true,
                                         .aux_coeff = 0.01f,
                                         .dx = p->base.dx,
                                         .token_state = p->base.args.token_state};
    p->optimizer = (struct moe_optimizer_args){.learning_rate = 0.01,
                                               .beta1 = 0.9,
                                               .beta2 = 0.99,
                                               .epsilon = 1e-8,
                                               .grad_scale = 1,
                                               .number = 1};
    return true;
}

bool open_trainer_fixture(struct member *m, struct trainer_fixture *p, uint32_t budget_ms)
{
    *p = (struct trainer_fixture){0};
    p->experts = 2 * (uint32_t)__builtin_popcountll(m->live);
    return open_fixture(m, &p->base, budget_ms, true) && start_training(p);
}

int close_trainer_fixture(struct trainer_fixture *p)
{
    backend->training->trainer_destroy(p->trainer);
    return close_fixture(&p->base);
}

struct moe_status run_backward(struct trainer_fixture *p, struct moe_step_result *result)
{
    struct moe_step *step;
    MOE_TRY(backend->training->backward_enqueue(p->base.session, &p->args, &step));
    return backend->step_wait(step, MOE_NEVER, result);
}

struct moe_status run_optimizer(struct trainer_fixture *p)
{
    MOE_TRY(backend->training->optimizer_step(p->base.session, &p->trainer, 1, &p->optimizer,
                                              &p->taken));
    p->optimizer.number++;
    return moe_ok();
}

/* Does nothing if only other slots have the tensor. */
static bool add_tensor(struct trainer_fixture *p, enum moe_weight weight, uint32_t expert,
                       enum moe_train_tensor tensor, uint64_t *hash)
{
    float data[2 * MOE_MAX_SLOTS * HIDDEN];
    struct moe_train_key key = {weight, expert, MOE_PART_WEIGHT, tensor};
    bool router = weight == MOE_WEIGHT_ROUTER;
    size_t bytes = (router ? (size_t)p->experts : INNER) * HIDDEN * sizeof *data;
    struct moe_status st = backend->training->trainer_read(p->trainer, &key, data, bytes);
    if (st.code == MOE_NOT_FOUND && !router)
        return true;
    if (!good(st))
        return false;
    for (size_t i = 0; i < bytes; i++)
        *hash = (*hash ^ ((const uint8_t *)data)[i]) * UINT64_C(0x100000001b3);
    return true;
}

bool hash_tensor(struct trainer_fixture *p, enum moe_weight weight, uint32_t expert,
                 enum moe_train_tensor tensor, uint64_t *hash)
{
    const uint64_t start = UINT64_C(0xcbf29ce484222325);
    *hash = start;
    bool read = add_tensor(p, weight, expert, tensor, hash);
    *hash = *hash == start ? 0 : *hash;
    return read;
}

bool hash_of(struct trainer_fixture *p, enum moe_train_tensor tensor, uint64_t *hash)
{
    static const enum moe_weight weights[] = {MOE_WEIGHT_ROUTER, MOE_WEIGHT_GATE, MOE_WEIGHT_UP,
                                              MOE_WEIGHT_DOWN};
    *hash = UINT64_C(0xcbf29ce484222325);
    for (size_t w = 0; w < sizeof weights / sizeof *weights; w++)
        for (uint32_t e = 0; e < (w == 0 ? 1 : p->experts); e++)
            if (!add_tensor(p, weights[w], e, tensor, hash))
                return false;
    return true;
}

bool hash_state(struct trainer_fixture *p, uint64_t hash[3])
{
    return hash_of(p, MOE_TRAIN_VALUE, &hash[0]) && hash_of(p, MOE_TRAIN_MOMENT1, &hash[1]) &&
           hash_of(p, MOE_TRAIN_MOMENT2, &hash[2]);
}
