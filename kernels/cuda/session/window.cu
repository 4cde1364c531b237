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
    read_peers_kernel<<<1, 32, 0, stream>>>(handle, ranks, table);
    return MOE_LAUNCHED("read_peers_kernel");
}

extern "C" uint32_t moe_cuda_window_reach(ncclComm_t comm)
{
    return static_cast<uint32_t>(ncclTeamLsa(comm).nRanks);
}
