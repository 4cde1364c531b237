/* SPDX-License-Identifier: Apache-2.0 */
/* The segments of a step: one copy of all input, from which the step computes, and one of all
 * output (moe/backend.h). Large segments are copied by the pool. */
#ifndef MOE_CPU_SEGMENTS_H
#define MOE_CPU_SEGMENTS_H

#include "cpu/compute/device.h"

/* A step's copy of its input, and room for its output. */
struct moe_cpu_snapshot {
    void *memory;              /* NULL: the step has no segments */
    struct moe_step_args args; /* the same step, on this memory */
};

/* Copies the input; out->args is then what the step computes. Without segments it is `args`. Call
 * moe_cpu_snapshot_free in every case. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_cpu_snapshot_take(struct moe_device *device, const struct moe_step_args *args,
                                        struct moe_cpu_snapshot *out) MOE_CHECKED;
/* Copies the output to the segments. */
void moe_cpu_snapshot_put(struct moe_device *device, const struct moe_cpu_snapshot *snapshot);
void moe_cpu_snapshot_free(struct moe_device *device, struct moe_cpu_snapshot *snapshot);

#endif
