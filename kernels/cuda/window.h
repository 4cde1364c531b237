/* The windows of a session on GPUs: one symmetric NCCL window per slot, of moe/window.h's layout,
 * reachable by plain loads and stores over NVLink. NCCL makes the memory and the mappings; after
 * that kernels know addresses only.
 *
 * A session of one live slot needs no NCCL: its window is plain memory, and has no room for rows,
 * because own rows never pass through a window. */
#ifndef MOE_CUDA_WINDOW_H
#define MOE_CUDA_WINDOW_H

#include "cuda/device.h"

#include "moe/window.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_window {
    struct moe_device *device;
    ncclComm_t comm;     /* NULL with one live slot */
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

/* Collective over the live slots, unless only one is. Ends by `deadline_ns` (monotonic).
 * Errors: MOE_UNAVAILABLE/PEER_LOST when the slots did not all come in time;
 * MOE_FAILED_PRECONDITION/UNSUPPORTED when the GPUs cannot reach each other's memory. On failure
 * moe_cuda_window_close is still to be called. */
struct moe_status moe_cuda_window_open(struct moe_cuda_window *w, struct moe_device *device,
                                       const struct moe_window_layout *layout, uint64_t live,
                                       uint32_t slot, const struct moe_cuda_group_id *id,
                                       uint64_t deadline_ns) MOE_CHECKED;

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
