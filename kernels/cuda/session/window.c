/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing the windows of a session; see window.h.
 *
 * NCCL is used without blocking: each collective call is begun and then polled under a deadline. So
 * a slot that never comes costs the others a bounded time. */
#include "cuda/session/window.h"

#include "base/clock.h"
#include "cuda/plan/limits.h"
#include "cuda/plan/process.h"

#include <string.h>
#include <unistd.h>

enum { POLL_US = 200 };

/* Waits until the call that answered `rc` has ended on this slot. */
static struct moe_status await(ncclComm_t comm, ncclResult_t rc, const char *call,
                               uint64_t deadline_ns)
{
    while (rc == ncclSuccess || rc == ncclInProgress) {
        ncclResult_t state = ncclInProgress;
        rc = ncclCommGetAsyncError(comm, &state);
        if (rc != ncclSuccess)
            break;
        if (state == ncclSuccess)
            return moe_ok();
        rc = state;
        if (moe_clock_ns() >= deadline_ns)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                             "the slots' GPUs did not find each other in time");
        usleep(POLL_US);
    }
    if (rc == ncclRemoteError || rc == ncclSystemError)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "%s: %s", call,
                         ncclGetErrorString(rc));
    return moe_cuda_nccl_status(rc, call);
}

struct moe_status moe_cuda_window_name_group(struct moe_cuda_group_id *out)
{
    return MOE_NCCL(ncclGetUniqueId(&out->id));
}

struct moe_status moe_cuda_window_form_group(struct moe_cuda_window *w, struct moe_device *device,
                                             uint64_t live, uint32_t slot,
                                             const struct moe_cuda_group_id *id,
                                             uint64_t deadline_ns)
{
    int ranks = __builtin_popcountll(live);
    *w = (struct moe_cuda_window){.device = device, .rank = moe_cuda_rank_of(live, slot)};
    MOE_TRY(moe_cuda_process_check());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t rc = ncclCommInitRankConfig(&w->comm, ranks, id->id, (int)w->rank, &config);
    if (w->comm == NULL)
        return moe_cuda_nccl_status(rc == ncclSuccess ? ncclInternalError : rc,
                                    "ncclCommInitRankConfig");
    return await(w->comm, rc, "ncclCommInitRankConfig", deadline_ns);
}

static struct moe_status take_memory(struct moe_cuda_window *w, size_t bytes, size_t cleared)
{
    MOE_TRY(moe_cuda_device_charge(w->device, bytes));
    w->bytes = bytes;
    MOE_TRY(MOE_NCCL(ncclMemAlloc(&w->memory, bytes)));
    return MOE_CUDA(cudaMemsetAsync(w->memory, 0, cleared, w->device->compute));
}

/* Memory is cleared, and blanks are laid, before it is registered. Registration ends when all slots
 * have begun it, so no peer can store into a window that is not cleared yet. If memory cannot be
 * mapped, registration gives no handle, or one for the GPUs of a part of the group. */
static struct moe_status share_memory(struct moe_cuda_window *w, struct moe_cuda_team *team,
                                      uint64_t deadline_ns)
{
    MOE_TRY(moe_cuda_device_finish(w->device));
    ncclResult_t rc =
        ncclCommWindowRegister(w->comm, w->memory, w->bytes, &w->handle, NCCL_WIN_COLL_SYMMETRIC);
    MOE_TRY(await(w->comm, rc, "ncclCommWindowRegister", deadline_ns));
    *team = w->handle != NULL ? moe_cuda_window_team(w->comm, w->rank)
                              : (struct moe_cuda_team){w->rank, 1};
    return moe_ok();
}

struct moe_status moe_cuda_window_lay_blanks(uint8_t *window,
                                             const struct moe_window_layout *layout,
                                             cudaStream_t stream)
{
    return MOE_CUDA(cudaMemsetAsync(window + layout->quick_rows, (int)(MOE_WINDOW_BLANK & 0xff),
                                    layout->quick_bytes - layout->quick_rows, stream));
}

struct moe_status moe_cuda_window_share(struct moe_cuda_window *w,
                                        const struct moe_window_layout *layout,
                                        struct moe_cuda_team *team, uint64_t deadline_ns)
{
    MOE_TRY(take_memory(w, layout->quick_bytes, layout->quick_rows));
    MOE_TRY(moe_cuda_window_lay_blanks(w->memory, layout, w->device->compute));
    return share_memory(w, team, deadline_ns);
}

struct moe_status moe_cuda_window_share_memory(struct moe_cuda_window *w, size_t bytes,
                                               size_t cleared, struct moe_cuda_team *team,
                                               uint64_t deadline_ns)
{
    MOE_TRY(take_memory(w, bytes, cleared));
    return share_memory(w, team, deadline_ns);
}

struct moe_status moe_cuda_window_read_bases(struct moe_cuda_window *w, uint64_t live,
                                             const struct moe_cuda_team *team)
{
    uint8_t *of_team[MOE_CUDA_MAX_SLOTS] = {0};
    uint8_t **table;
    MOE_TRY(moe_cuda_mem_alloc(w->device, MOE_MEM_DEVICE, sizeof of_team, (void **)&table));
    struct moe_status st =
        moe_cuda_window_read_peers(w->handle, team->count, table, w->device->compute);
    if (!moe_failed(&st))
        st = moe_cuda_device_finish(w->device);
    if (!moe_failed(&st))
        st = moe_cuda_mem_copy(w->device, of_team, table, sizeof of_team);
    moe_cuda_mem_free(w->device, MOE_MEM_DEVICE, table, sizeof of_team);
    for (uint32_t s = 0; s < MOE_CUDA_MAX_SLOTS; s++)
        if ((live >> s & 1) && moe_cuda_team_has(team, moe_cuda_rank_of(live, s)))
            w->base[s] = of_team[moe_cuda_rank_of(live, s) - team->first];
    return st;
}

struct moe_status moe_cuda_window_open_alone(struct moe_cuda_window *w, struct moe_device *device,
                                             const struct moe_window_layout *layout, uint32_t slot)
{
    *w = (struct moe_cuda_window){.device = device};
    MOE_TRY(moe_cuda_mem_alloc(device, MOE_MEM_DEVICE, layout->rows, &w->memory));
    w->bytes = layout->rows;
    w->base[slot] = w->memory;
    return moe_ok();
}

/* Frees memory that came from NCCL. */
static void drop_memory(struct moe_cuda_window *w)
{
    if (w->memory != NULL)
        (void)ncclMemFree(w->memory);
    moe_cuda_device_discharge(w->device, w->bytes);
    w->memory = NULL;
    w->bytes = 0;
}

/* True when NCCL was left in good order. */
static bool leave_group(struct moe_cuda_window *w, uint64_t deadline_ns)
{
    struct moe_status st = moe_ok();
    if (w->handle != NULL)
        st = await(w->comm, ncclCommWindowDeregister(w->comm, w->handle),
                   "ncclCommWindowDeregister", deadline_ns);
    if (!moe_failed(&st))
        st = await(w->comm, ncclCommFinalize(w->comm), "ncclCommFinalize", deadline_ns);
    return !moe_failed(&st) && ncclCommDestroy(w->comm) == ncclSuccess;
}

void moe_cuda_window_close(struct moe_cuda_window *w, bool together, uint64_t deadline_ns)
{
    if (w->device == NULL)
        return;
    if (w->comm == NULL) {
        moe_cuda_mem_free(w->device, MOE_MEM_DEVICE, w->memory, w->bytes);
        return;
    }
    /* Abort frees everything without waiting for peers; its errors leave nothing to do. */
    if (!together || !leave_group(w, deadline_ns))
        (void)ncclCommAbort(w->comm);
    w->comm = NULL;
    drop_memory(w);
}

void moe_cuda_window_unshare(struct moe_cuda_window *w, uint64_t deadline_ns)
{
    /* A failure appears again when the group is used. */
    if (w->handle != NULL)
        (void)await(w->comm, ncclCommWindowDeregister(w->comm, w->handle),
                    "ncclCommWindowDeregister", deadline_ns);
    w->handle = NULL;
    memset(w->base, 0, sizeof w->base);
    drop_memory(w);
}

ncclComm_t moe_cuda_window_give_group(struct moe_cuda_window *w, uint64_t deadline_ns)
{
    ncclComm_t comm = w->comm;
    moe_cuda_window_unshare(w, deadline_ns);
    w->comm = NULL;
    return comm;
}
