/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels and host of a session communicate: outcomes, the control block in device memory, and
 * the host control in pinned memory. */
#ifndef MOE_CUDA_CONTROL_H
#define MOE_CUDA_CONTROL_H

#include "cuda/plan/limits.h"

#include "moe/window.h"

#include <stdint.h>

/* How a pass or an exchange ended. */
enum moe_cuda_step_outcome_code {
    MOE_CUDA_PASS_GOOD,
    /* All slots agree on it, and the session goes on. `slot` has no memory for this step; if
     * MOE_CUDA_MEANS_OTHER is added, `slot` means another step. */
    MOE_CUDA_PASS_REFUSED,
    MOE_CUDA_PASS_LOST, /* `slot` did not answer in time */
    MOE_CUDA_PASS_ABORTED,
    MOE_CUDA_PASS_PROTOCOL_ERROR, /* `slot` sent something other than it announced */
    MOE_CUDA_PASS_BROKEN,         /* the network broke: moe_cuda_net_outcome has the reason */
};

/* Larger than any slot, so that lack of memory is reported when there are several reasons. */
enum { MOE_CUDA_MEANS_OTHER = MOE_CUDA_MAX_SLOTS };

struct moe_cuda_step_outcome {
    uint32_t code; /* enum moe_cuda_step_outcome_code */
    uint32_t slot;
    uint64_t rows; /* computed on this slot; 0 unless good */
};

/* Exact numbers of rows of a forward step on this slot; in pinned memory. Valid if the step
 * succeeds. */
struct moe_cuda_step_counts {
    uint32_t
        local_rows[MOE_CUDA_MAX_EXPERTS];   /* [local_experts] computed here, as moe_rows.count */
    uint32_t sent_rows[MOE_CUDA_MAX_SLOTS]; /* tokens that each other slot got; 0 for this one */
};

/* In device memory, one per session. Kernels read the step's number from here, so a captured graph
 * keeps counting when it is replayed. */
struct moe_cuda_control {
    uint32_t step;      /* number of the last step with a dispatch that has begun, from 1 */
    uint32_t refused;   /* number of the last step that was refused */
    uint32_t done_sent; /* number of the last step that `done` was stored for */
    uint32_t exchange;  /* number of the last exchange */
    uint32_t stop;      /* a wait failed: the session can only be left */
    uint32_t slot;      /* this process's slot */
    uint64_t live, epoch, budget_ns;
    uint8_t *window[MOE_CUDA_MAX_SLOTS]; /* NULL where not live */
    struct moe_cuda_step_outcome outcome;
    uint32_t tokens_of[MOE_CUDA_MAX_SLOTS]; /* of the current step */
    /* Of the current step, so far: as in struct moe_cuda_step_counts. Dispatch clears it, combine
     * adds. */
    uint32_t sent_rows[MOE_CUDA_MAX_SLOTS];
    /* Counters from which warps take work items. Those of dispatch exist once per parity of the
     * step: a dispatch clears the counters of the next dispatch and of the combine that follows it.
     */
    uint32_t next_push[2], next_expand[2], next_return, next_home;
    uint32_t arrived; /* CTAs that have reached a point in the kernel; zero between kernels */
    uint64_t looked;  /* when a waiting thread last looked at the host: ns of the GPU's clock */
};

/* Pinned memory, mapped into the device. */
struct moe_cuda_host_control {
    uint64_t mine[MOE_WINDOW_EXCHANGE_BYTES / 8];
    uint64_t all[MOE_CUDA_MAX_SLOTS][MOE_WINDOW_EXCHANGE_BYTES / 8];
    uint32_t bytes_came[MOE_CUDA_MAX_SLOTS];
    struct moe_cuda_step_outcome outcome; /* copy for synchronous calls */
    uint32_t rows_in_use;                 /* of the running backward pass, padding included */
    uint32_t abort;                       /* host to device: all waits end */
};

#endif
