/* SPDX-License-Identifier: Apache-2.0 */
/* The windows of a session on GPUs: one symmetric NCCL window per slot, with moe/window.h's layout,
 * for plain loads and stores over NVLink. NCCL makes the memory and the mappings; after that
 * kernels use addresses only.
 *
 * If GPUs cannot reach each other this way, the network gets the group (net.h), and the session has
 * no windows.
 *
 * A session of one live slot needs no NCCL. Its window is plain memory and ends where rows would
 * begin, because own rows never pass through a window. This holds for any number of slots. So no
 * kernel may touch rows, partials or quick regions of such a window, blanks included. */
#ifndef MOE_CUDA_WINDOW_H
#define MOE_CUDA_WINDOW_H

#include "cuda/core/device.h"
#include "cuda/plan/limits.h"

#include "moe/window.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_window {
    struct moe_device *device;
    ncclComm_t comm;     /* NULL with one live slot, and without windows */
    ncclWindow_t handle; /* another thread of NCCL sets it while registration is in progress */
    void *memory;
    size_t bytes;
    uint32_t rank;                     /* of this slot among the live ones */
    uint8_t *base[MOE_CUDA_MAX_SLOTS]; /* device addresses by slot; NULL where not live */
};

/* Names the group to NCCL; one slot makes it and the others receive it. */
struct moe_cuda_group_id {
    ncclUniqueId id;
};
struct moe_status moe_cuda_window_name_group(struct moe_cuda_group_id *out) MOE_CHECKED;

/* NCCL's number of a live slot: live slots in order. */
static inline uint32_t moe_cuda_rank_of(uint64_t live, uint32_t slot)
{
    return (uint32_t)__builtin_popcountll(live & ((UINT64_C(1) << slot) - 1));
}

/* The window of a slot that is alone. Here and below: call moe_cuda_window_close in the end, also
 * after a failure. */
struct moe_status moe_cuda_window_open_alone(struct moe_cuda_window *w, struct moe_device *device,
                                             const struct moe_window_layout *layout,
                                             uint32_t slot) MOE_CHECKED;

/* Several live slots open their windows in three parts. The first two are collective and end by
 * `deadline_ns` (monotonic).
 * Errors: MOE_UNAVAILABLE/PEER_LOST when not all slots came in time. */
struct moe_status moe_cuda_window_form_group(struct moe_cuda_window *w, struct moe_device *device,
                                             uint64_t live, uint32_t slot,
                                             const struct moe_cuda_group_id *id,
                                             uint64_t deadline_ns) MOE_CHECKED;
/* Live slots that a GPU can load from and store to: `count` ranks from `first` on. Ranks number the
 * live slots. */
struct moe_cuda_team {
    uint32_t first, count;
};
static inline bool moe_cuda_team_has(const struct moe_cuda_team *team, uint32_t rank)
{
    return rank >= team->first && rank - team->first < team->count;
}
/* Makes the own window and shares it. *team: the slots that reach each other's windows, the own one
 * included; it may differ between slots. */
struct moe_status moe_cuda_window_share(struct moe_cuda_window *w,
                                        const struct moe_window_layout *layout,
                                        struct moe_cuda_team *team,
                                        uint64_t deadline_ns) MOE_CHECKED;
/* The same with `bytes` of memory, of which the first `cleared` are cleared, in the place of a
 * window. */
struct moe_status moe_cuda_window_share_memory(struct moe_cuda_window *w, size_t bytes,
                                               size_t cleared, struct moe_cuda_team *team,
                                               uint64_t deadline_ns) MOE_CHECKED;
/* Fills the quick regions of a window from moe_cuda_window_share with blanks. */
struct moe_status moe_cuda_window_lay_blanks(uint8_t *window,
                                             const struct moe_window_layout *layout,
                                             cudaStream_t stream) MOE_CHECKED;
/* Ends the sharing on all slots and frees the memory. */
void moe_cuda_window_unshare(struct moe_cuda_window *w, uint64_t deadline_ns);
/* Reads the addresses of the team's slots. */
struct moe_status moe_cuda_window_read_bases(struct moe_cuda_window *w, uint64_t live,
                                             const struct moe_cuda_team *team) MOE_CHECKED;

/* Returns the communicator, which the caller ends. Frees the window's memory if it was shared in
 * vain; afterwards the window can only be closed. */
ncclComm_t moe_cuda_window_give_group(struct moe_cuda_window *w, uint64_t deadline_ns);

/* No kernel may use the window any more. `together`: all slots are believed to leave in good order;
 * even then this waits for them until `deadline_ns` at most. */
void moe_cuda_window_close(struct moe_cuda_window *w, bool together, uint64_t deadline_ns);

/* window.cu. The GPUs that this one can load from and store to; `rank` is its own in `comm`. */
struct moe_cuda_team moe_cuda_window_team(ncclComm_t comm, uint32_t rank);
/* window.cu: base[rank] for `ranks` ranks, read on the device, into `table` (device memory). */
struct moe_status moe_cuda_window_read_peers(ncclWindow_t handle, uint32_t ranks, uint8_t **table,
                                             cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
