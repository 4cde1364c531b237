/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels and host of a session tell each other: outcomes, the control block in device memory
 * and the host control in pinned memory. */
#ifndef MOE_CUDA_CONTROL_H
#define MOE_CUDA_CONTROL_H

#include "moe/window.h"

#include <stdint.h>

/* What became of a pass or an exchange. */
enum moe_cuda_step_outcome_code {
    MOE_CUDA_PASS_GOOD,
    /* All slots say so, and the session goes on: `slot` has no memory for this step, or, plus
     * MOE_CUDA_MEANS_OTHER, means another one. */
    MOE_CUDA_PASS_REFUSED,
    MOE_CUDA_PASS_LOST, /* `slot` did not answer in time */
    MOE_CUDA_PASS_ABORTED,
    MOE_CUDA_PASS_PROTOCOL_ERROR, /* `slot` sent something else than it announced */
    MOE_CUDA_PASS_BROKEN,         /* the network broke: moe_cuda_net_outcome knows more */
};

/* More than any slot, so that of several reasons want of memory is told. */
enum { MOE_CUDA_MEANS_OTHER = MOE_MAX_SLOTS };

struct moe_cuda_step_outcome {
    uint32_t code; /* enum moe_cuda_step_outcome_code */
    uint32_t slot;
    uint64_t rows; /* computed on this slot; 0 unless good */
};

/* In device memory, one per session. Kernels read the step's number from here, so a captured graph
 * goes on counting when it is replayed. */
struct moe_cuda_control {
    uint32_t step;      /* number of the last step whose dispatch has begun, from 1 */
    uint32_t refused;   /* number of the last step that was refused */
    uint32_t done_sent; /* number of the last step that `done` was stored for */
    uint32_t exchange;  /* number of the last exchange */
    uint32_t stop;      /* a wait failed: the session can only be left */
    uint32_t slot;      /* the own one */
    uint64_t live, epoch, budget_ns;
    uint8_t *window[MOE_MAX_SLOTS]; /* NULL where not live */
    struct moe_cuda_step_outcome outcome;
    uint32_t tokens_of[MOE_MAX_SLOTS]; /* of the current step */
    /* Work that warps take item by item. Those of dispatch by the step's parity: a dispatch clears
     * the ones that the next uses, and those of its combine. */
    uint32_t next_push[2], next_expand[2], next_return, next_home;
    uint32_t arrived; /* CTAs that have come to a point; zero between kernels */
    uint64_t looked;  /* when a thread that waits last looked at the host: ns of the GPU's clock */
};

/* Pinned memory, mapped into the device. */
struct moe_cuda_host_control {
    uint64_t mine[MOE_WINDOW_EXCHANGE_BYTES / 8];
    uint64_t all[MOE_MAX_SLOTS][MOE_WINDOW_EXCHANGE_BYTES / 8];
    uint32_t bytes_came[MOE_MAX_SLOTS];
    struct moe_cuda_step_outcome outcome; /* copy for synchronous calls */
    uint32_t rows_in_use;                 /* of the backward pass at work, padding included */
    uint32_t abort;                       /* host to device: waits end */
};

#endif
