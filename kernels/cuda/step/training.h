/* SPDX-License-Identifier: Apache-2.0 */
/* The table of what a GPU can do in training. */
#ifndef MOE_CUDA_TRAINING_H
#define MOE_CUDA_TRAINING_H

#include "moe/training.h"

extern const struct moe_training moe_cuda_training;

#endif
