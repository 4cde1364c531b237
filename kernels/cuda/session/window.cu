/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the addresses of the peers' windows, once per session: the only code that knows the device
 * side of NCCL. */
#include "cuda/session/window.h"

#include <nccl_device.h>

__global__ void read_peers_kernel(ncclWindow_t handle, uint32_t ranks, uint8_t **table)
{
    if (threadIdx.x < ranks)
        table[threadIdx.x] =
            static_cast<uint8_t *>(ncclGetLsaPointer(handle, 0, static_cast<int>(threadIdx.x)));
}

extern "C" struct moe_status moe_cuda_window_read_peers(ncclWindow_t handle, uint32_t ranks,
                                                        uint8_t **table, cudaStream_t stream)
{
    read_peers_kernel<<<1, ranks, 0, stream>>>(handle, ranks, table);
    return MOE_LAUNCHED("read_peers_kernel");
}

extern "C" struct moe_cuda_team moe_cuda_window_team(ncclComm_t comm, uint32_t rank)
{
    const ncclTeam team = ncclTeamLsa(comm);
    return {rank - static_cast<uint32_t>(team.rank), static_cast<uint32_t>(team.nRanks)};
}
