/* SPDX-License-Identifier: Apache-2.0 */
/* The exchange kernel: a few bytes from every slot to every slot, through the windows. One CTA, a
 * warp per slot in small groups; no shared memory. */
#include "cuda/core/load.h"
#include "cuda/exchange/flags.cuh"
#include "cuda/session/session.h"

constexpr uint32_t MAX_WARPS = 16;

static_assert(MOE_WINDOW_EXCHANGE_BYTES == 32 * 8, "a lane moves eight bytes");

__device__ static bool is_peer(const struct moe_cuda_control *c, uint32_t slot, uint32_t peer)
{
    return peer != slot && is_live(c->live, peer);
}

/* One warp. */
__device__ static void send_to(struct moe_window_exchange *to, const uint64_t *mine, uint64_t flag)
{
    const uint32_t lane = threadIdx.x % 32;
    reinterpret_cast<uint64_t *>(to->data)[lane] =
        *const_cast<const volatile uint64_t *>(&mine[lane]);
    __syncwarp();
    if (lane != 0)
        return;
    fence_system();
    store_relaxed(&to->flag, flag);
}

/* One warp. False if the wait failed. */
__device__ static bool receive_from(struct moe_cuda_control *c,
                                    struct moe_cuda_host_control *host_control,
                                    const struct moe_window_exchange *from, uint64_t stamp,
                                    uint32_t peer)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t came = 0;
    bool here = lane != 0 || wait_flag(c, &host_control->abort, &from->flag, stamp, peer, &came);
    if (!__all_sync(ALL_LANES, here))
        return false;
    __syncwarp(); /* a vote orders no memory */
    host_control->all[peer][lane] =
        __ldcg(reinterpret_cast<const unsigned long long *>(from->data) + lane);
    if (lane == 0)
        host_control->bytes_came[peer] = came;
    return true;
}

/* Two parities are enough: a peer is at most one exchange ahead, because it needs this slot's flag
 * to finish each exchange. A warp sends to all its peers before it waits for one. */
__global__ void __launch_bounds__(32 * MAX_WARPS)
    exchange_kernel(struct moe_window_layout layout, struct moe_cuda_control *c,
                    struct moe_cuda_host_control *host_control, uint32_t slot, uint32_t bytes)
{
    const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32, slots = layout.shape.slots;
    const uint32_t number = c->exchange + 1;
    const uint64_t stamp = moe_window_stamp(c->epoch, number);
    const bool stopped = load_volatile(&c->stop) != 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        c->exchange = number;
        if (!stopped)
            c->outcome = {MOE_CUDA_PASS_GOOD, 0, 0};
    }
    __syncthreads();
    for (uint32_t peer = warp; !stopped && peer < slots; peer += warps)
        if (is_peer(c, slot, peer))
            send_to(moe_window_exchange_of(&layout, c->window[peer], number & 1, slot),
                    host_control->mine, moe_window_flag(stamp, bytes));
    bool good = !stopped;
    for (uint32_t peer = warp; good && peer < slots; peer += warps)
        if (is_peer(c, slot, peer))
            good = receive_from(c, host_control,
                                moe_window_exchange_of(&layout, c->window[slot], number & 1, peer),
                                stamp, peer);
}

extern "C" struct moe_status moe_cuda_launch_exchange(const struct moe_session *s, uint32_t bytes,
                                                      cudaStream_t stream)
{
    const uint32_t warps = s->config.slots < MAX_WARPS ? s->config.slots : MAX_WARPS;
    exchange_kernel<<<1, 32 * warps, 0, stream>>>(s->layout, s->control, s->host_control_on_device,
                                                  s->config.slot, bytes);
    return MOE_LAUNCHED("exchange_kernel");
}

extern "C" struct moe_status moe_cuda_load_exchange(void)
{
    return moe_cuda_load(exchange_kernel);
}
