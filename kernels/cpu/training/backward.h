/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a backward pass on the CPU, for a finished layer and its trainer. If `accumulate` is
 * set, a part adds to the trainer's gradients. */
#ifndef MOE_CPU_BACKWARD_H
#define MOE_CPU_BACKWARD_H

#include "cpu/training/trainer.h"

/* The batch of a part. The part neither reads nor writes tokens that are not `active`. */
struct moe_cpu_tokens {
    enum moe_dtype dtype;
    uint32_t count;        /* T */
    const void *x;         /* [T, H] */
    const uint8_t *active; /* [T] 0: not active; NULL = all active */
};

/* backward_router.c: members of struct moe_training, for active tokens only. */
struct moe_status moe_cpu_router_backward(struct moe_trainer *trainer,
                                          const struct moe_cpu_tokens *tokens, const int32_t *ids,
                                          const float *dweights, float *dlogits) MOE_CHECKED;
struct moe_status moe_cpu_aux_backward(struct moe_trainer *trainer,
                                       const struct moe_cpu_tokens *tokens, const uint64_t *n,
                                       uint64_t group_tokens, float aux_coeff, float *dlogits,
                                       double *loss) MOE_CHECKED;
struct moe_status moe_cpu_logits_backward(struct moe_trainer *trainer,
                                          const struct moe_cpu_tokens *tokens, bool accumulate,
                                          const float *dlogits, float *dx) MOE_CHECKED;

/* backward_ffn.c: the same. `retained`: gate and up of the forward pass, by row, for the shared
 * expert by token; NULL = the part computes them again. */
struct moe_status moe_cpu_experts_backward(struct moe_trainer *trainer, enum moe_dtype dtype,
                                           bool accumulate, const struct moe_rows *rows,
                                           const void *dy_rows, const struct moe_cpu_pre *retained,
                                           float *dx_rows, float *dweight_rows) MOE_CHECKED;
struct moe_status moe_cpu_shared_backward(struct moe_trainer *trainer,
                                          const struct moe_cpu_tokens *tokens, bool accumulate,
                                          const void *dy, const struct moe_cpu_pre *retained,
                                          float *dx) MOE_CHECKED;

/* Lists the next active tokens from `*at` on, at most `max_tokens`; moves `*at` behind them. */
uint32_t moe_cpu_tokens_next(const struct moe_cpu_tokens *tokens, uint32_t *at, uint32_t max_tokens,
                             uint32_t *index);

#endif
