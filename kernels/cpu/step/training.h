/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend's table of training. */
#ifndef MOE_CPU_TRAINING_H
#define MOE_CPU_TRAINING_H

#include "moe/training.h"

extern const struct moe_training moe_cpu_training;

#endif
