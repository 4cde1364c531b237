/* SPDX-License-Identifier: Apache-2.0 */
/* The exchange kernel: a few bytes from every slot to every slot, through the windows. One CTA, one
 * warp per slot; no shared memory. */
#include "cuda/core/load.h"
#include "cuda/exchange/flags.cuh"
#include "cuda/session/session.h"

/* Two parities are enough: a peer is at most one exchange ahead, because it needs this slot's flag
 * to finish each exchange. */
__global__ void exchange_kernel(struct moe_window_layout layout, struct moe_cuda_control *c,
                                struct moe_cuda_host_control *host_control, uint32_t slot,
                                uint32_t bytes)
{
    const uint32_t lane = threadIdx.x % 32, peer = threadIdx.x / 32;
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
    if (stopped || peer == slot || !is_live(c->live, peer))
        return;
    struct moe_window_exchange *to =
        moe_window_exchange_of(&layout, c->window[peer], number & 1, slot);
    reinterpret_cast<uint64_t *>(to->data)[lane] =
        *const_cast<const volatile uint64_t *>(&host_control->mine[lane]);
    __syncwarp();
    if (lane == 0) {
        fence_system();
        store_relaxed(&to->flag, moe_window_flag(stamp, bytes));
    }
    const struct moe_window_exchange *from =
        moe_window_exchange_of(&layout, c->window[slot], number & 1, peer);
    uint32_t came = 0;
    bool here = lane != 0 || wait_flag(c, &host_control->abort, &from->flag, stamp, peer, &came);
    if (!__all_sync(ALL_LANES, here))
        return;
    __syncwarp(); /* a vote orders no memory */
    host_control->all[peer][lane] =
        __ldcg(reinterpret_cast<const unsigned long long *>(from->data) + lane);
    if (lane == 0)
        host_control->bytes_came[peer] = came;
}
static_assert(MOE_WINDOW_EXCHANGE_BYTES == 32 * 8, "a lane moves eight bytes");

extern "C" struct moe_status moe_cuda_launch_exchange(const struct moe_session *s, uint32_t bytes,
                                                      cudaStream_t stream)
{
    exchange_kernel<<<1, 32 * s->config.slots, 0, stream>>>(
        s->layout, s->control, s->host_control_on_device, s->config.slot, bytes);
    return MOE_LAUNCHED("exchange_kernel");
}

extern "C" struct moe_status moe_cuda_load_exchange(void)
{
    return moe_cuda_load(exchange_kernel);
}
