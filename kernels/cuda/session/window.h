/* SPDX-License-Identifier: Apache-2.0 */
/* The windows of a session on GPUs: one symmetric NCCL window per slot, of moe/window.h's layout,
 * reachable by plain loads and stores over NVLink. NCCL makes the memory and the mappings; after
 * that kernels know addresses only.
 *
 * Where GPUs cannot reach each other so, the group is given to the network (net.h), and the session
 * has no windows.
 *
 * A session of one live slot needs no NCCL: its window is plain memory, and ends where rows would
 * begin, because own rows never pass through a window. This holds for any number of seats, so no
 * kernel may touch rows, partials or quick regions of such a window, blanks included. */
#ifndef MOE_CUDA_WINDOW_H
#define MOE_CUDA_WINDOW_H

#include "cuda/core/device.h"

#include "moe/window.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_window {
    struct moe_device *device;
    ncclComm_t comm;     /* NULL with one live slot, and without windows */
    ncclWindow_t handle; /* set by another thread of NCCL's while registration is in progress */
    void *memory;
    size_t bytes;
    uint8_t *base[MOE_MAX_SLOTS]; /* device addresses by slot; NULL where not live */
};

/* Names the group to NCCL; made by one slot and carried to the others. */
struct moe_cuda_group_id {
    ncclUniqueId id;
};
struct moe_status moe_cuda_window_name_group(struct moe_cuda_group_id *out) MOE_CHECKED;

/* The window of a slot that is alone. Here and below: moe_cuda_window_close is to be called in the
 * end, also after a failure. */
struct moe_status moe_cuda_window_open_alone(struct moe_cuda_window *w, struct moe_device *device,
                                             const struct moe_window_layout *layout,
                                             uint32_t slot) MOE_CHECKED;

/* Several live slots open their windows in three parts. The first two are collective and end by
 * `deadline_ns` (monotonic).
 * Errors: MOE_UNAVAILABLE/PEER_LOST when the slots did not all come in time. */
struct moe_status moe_cuda_window_form_group(struct moe_cuda_window *w, struct moe_device *device,
                                             uint64_t live, uint32_t slot,
                                             const struct moe_cuda_group_id *id,
                                             uint64_t deadline_ns) MOE_CHECKED;
/* Makes the own window and shares it. *reach: whether this GPU and those of all others reach each
 * other's; it may differ between slots. */
struct moe_status moe_cuda_window_share(struct moe_cuda_window *w,
                                        const struct moe_window_layout *layout, bool *reach,
                                        uint64_t deadline_ns) MOE_CHECKED;
/* The peers' addresses, after all slots have found that they reach all others. */
struct moe_status moe_cuda_window_read_bases(struct moe_cuda_window *w, uint64_t live) MOE_CHECKED;

/* The communicator, which the caller ends. The window's memory is given back, as far as it had been
 * shared in vain; what is left can only be closed. */
ncclComm_t moe_cuda_window_give_group(struct moe_cuda_window *w, uint64_t deadline_ns);

/* No kernel may use the window any more. `together`: all slots are believed to leave in good order;
 * even then it waits for them until `deadline_ns` at most. */
void moe_cuda_window_close(struct moe_cuda_window *w, bool together, uint64_t deadline_ns);

/* window.cu. How many of the group's GPUs this one can load from and store to; equal on all. */
uint32_t moe_cuda_window_reach(ncclComm_t comm);
/* window.cu: base[rank] for `ranks` ranks, read on the device, into `table` (device memory). */
struct moe_status moe_cuda_window_read_peers(ncclWindow_t handle, uint32_t ranks, uint8_t **table,
                                             cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
