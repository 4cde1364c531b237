/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step over all layers and slots. */
#ifndef MOE_CPU_OPTIMIZER_H
#define MOE_CPU_OPTIMIZER_H

#include "cpu/training/trainer.h"

/* Members of struct moe_training. */
struct moe_status moe_cpu_optimizer_step(struct moe_session *session,
                                         struct moe_trainer *const *trainers, size_t count,
                                         const struct moe_optimizer_args *args,
                                         struct moe_optimizer_result *result) MOE_CHECKED;
struct moe_status moe_cpu_optimizer_finish(struct moe_trainer *const *trainers, size_t count,
                                           const struct moe_optimizer_args *args, double squares,
                                           struct moe_optimizer_result *result) MOE_CHECKED;

#endif
