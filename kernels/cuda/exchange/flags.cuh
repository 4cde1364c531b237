/* SPDX-License-Identifier: Apache-2.0 */
/* Flags between GPUs: how a kernel stores one in a peer's window, and the only way to wait for one
 * in its window; and the same for data that carry their own validity (quick regions, moe/window.h).
 *
 * A writer's lanes store data and meet in __syncwarp. Then one lane fences at system scope and
 * stores the flag; the fence covers the other lanes' stores. A reader's lane loads the flag with
 * acquire and meets the other lanes before they load the data. These loads bypass the first level
 * cache, which may hold lines of an earlier step.
 *
 * Waits are bounded by the session's budget. All waiting threads often read the stop flag in device
 * memory. Only one of them reads the abort flag in host memory, once a millisecond: reads over PCIe
 * by thousands of threads would delay the step for longer than that. */
#ifndef MOE_CUDA_FLAGS_CUH
#define MOE_CUDA_FLAGS_CUH

#include "cuda/core/stamp.cuh"
#include "cuda/core/warp.cuh"
#include "cuda/exchange/pass.h"
#include "cuda/plan/limits.h"

constexpr uint64_t LOOK_AT_HOST_NS = 1000000;
constexpr uint32_t TRIES_BETWEEN_LOOKS = 64;

__device__ inline uint64_t load_acquire(const uint64_t *word)
{
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline uint64_t load_relaxed(const uint64_t *word)
{
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline void store_relaxed(uint64_t *word, uint64_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

/* Loads sixteen bytes atomically: all or none are seen. */
__device__ inline uint4 load_at_once(const void *from)
{
    unsigned __int128 v;
    asm volatile("ld.relaxed.sys.global.b128 %0, [%1];" : "=q"(v) : "l"(from) : "memory");
    return {static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32),
            static_cast<uint32_t>(v >> 64), static_cast<uint32_t>(v >> 96)};
}

__device__ inline void store_at_once(void *to, uint4 u)
{
    unsigned __int128 v = static_cast<unsigned __int128>(u.w) << 96 |
                          static_cast<unsigned __int128>(u.z) << 64 |
                          static_cast<unsigned __int128>(u.y) << 32 | u.x;
    asm volatile("st.relaxed.sys.global.b128 [%0], %1;" ::"l"(to), "q"(v) : "memory");
}

/* Loads four values; each is seen or not. */
__device__ inline uint4 load_relaxed(const uint4 *from)
{
    uint4 u;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w)
                 : "l"(from)
                 : "memory");
    return u;
}

__device__ inline void store_relaxed(uint4 *to, uint4 u)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(u.x),
                 "r"(u.y), "r"(u.z), "r"(u.w)
                 : "memory");
}

__device__ inline bool has_blank(uint4 u)
{
    return u.x == MOE_WINDOW_BLANK || u.y == MOE_WINDOW_BLANK || u.z == MOE_WINDOW_BLANK ||
           u.w == MOE_WINDOW_BLANK;
}

__device__ inline uint4 all_blank()
{
    return {MOE_WINDOW_BLANK, MOE_WINDOW_BLANK, MOE_WINDOW_BLANK, MOE_WINDOW_BLANK};
}

__device__ inline uint4 without_blanks(uint4 u)
{
    u.x = u.x == MOE_WINDOW_BLANK ? MOE_WINDOW_NOT_BLANK : u.x;
    u.y = u.y == MOE_WINDOW_BLANK ? MOE_WINDOW_NOT_BLANK : u.y;
    u.z = u.z == MOE_WINDOW_BLANK ? MOE_WINDOW_NOT_BLANK : u.z;
    u.w = u.w == MOE_WINDOW_BLANK ? MOE_WINDOW_NOT_BLANK : u.w;
    return u;
}

__device__ inline void fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ inline uint32_t load_volatile(const uint32_t *p)
{
    return *(const volatile uint32_t *)p;
}

__device__ inline bool is_live(uint64_t live, uint32_t slot)
{
    return live >> slot & 1;
}

/* Whether no other slot is live. Such a slot's window ends before rows and blanks (window.h). */
__device__ inline bool is_alone(uint64_t live, uint32_t slot)
{
    return live == UINT64_C(1) << slot;
}

/* ----------------------------------------------------------------- giving up */

/* The window's `waiting` flag on CUDA: {ns:55, gave up:1, slot + 1:8}. A waiting slot stores how
 * long it has waited; a reader that sees two values knows that it is alive. A slot that gave up
 * sets the bit and leaves the slot that it missed. */
constexpr uint64_t GAVE_UP = 1 << 8;
constexpr uint64_t ONE_NS = 1 << 9;

__device__ inline uint64_t *waiting_flag(const struct moe_cuda_control *c, uint32_t slot)
{
    return &reinterpret_cast<struct moe_window_header *>(c->window[slot])->waiting;
}

/* The slot that really blocks `slot`: follows through the windows which slot waits for which, while
 * the waiting slots are seen alive. */
__device__ inline uint32_t blocking_slot(const struct moe_cuda_control *c, uint32_t slot)
{
    for (uint32_t hops = 0; hops < MOE_CUDA_MAX_SLOTS; hops++) {
        uint64_t first = load_acquire(waiting_flag(c, slot));
        for (uint64_t until = clock_ns() + 4 * LOOK_AT_HOST_NS; clock_ns() < until;)
            __nanosleep(1000);
        uint64_t later = load_acquire(waiting_flag(c, slot));
        uint32_t next = static_cast<uint32_t>(later & 0xff) - 1;
        bool alive = later != first || (later & GAVE_UP) != 0;
        if (!alive || next >= MOE_CUDA_MAX_SLOTS || next == c->slot || !is_live(c->live, next))
            break;
        slot = next;
    }
    return slot;
}

/* Ends the session; the first call stores its outcome. Not inlined, like the next functions: there
 * are many waits, and a kernel with few tokens is limited by loading its instructions. */
__device__ __noinline__ inline void give_up(struct moe_cuda_control *c, uint32_t code,
                                            uint32_t slot)
{
    if (atomicCAS(&c->stop, 0u, 1u) != 0)
        return;
    if (code == MOE_CUDA_PASS_LOST) {
        /* Store it at once: a peer's budget may end at the same moment. */
        store_relaxed(waiting_flag(c, c->slot), GAVE_UP | (slot + 1));
        slot = blocking_slot(c, slot);
        store_relaxed(waiting_flag(c, c->slot), GAVE_UP | (slot + 1));
    }
    c->outcome.rows = 0;
    c->outcome.slot = slot;
    c->outcome.code = code;
}

/* Whether this thread, of all that wait on this GPU, checks the host now. */
__device__ inline bool polls_host(struct moe_cuda_control *c, uint64_t now)
{
    unsigned long long *looked = reinterpret_cast<unsigned long long *>(&c->looked);
    unsigned long long last = *const_cast<volatile unsigned long long *>(looked);
    /* Clocks of multiprocessors may differ slightly. */
    return static_cast<int64_t>(now - last) >= static_cast<int64_t>(LOOK_AT_HOST_NS) &&
           atomicCAS(looked, last, now) == last;
}

/* True if the wait has failed. `since` and `looked` start at 0. */
__device__ __noinline__ inline bool wait_failed(struct moe_cuda_control *c, const uint32_t *abort,
                                                uint32_t slot, uint64_t *since, uint64_t *looked)
{
    __nanosleep(40);
    if (load_volatile(&c->stop) != 0)
        return true;
    uint64_t now = clock_ns();
    if (*since == 0)
        *since = *looked = now;
    if (now - *looked < LOOK_AT_HOST_NS)
        return false;
    *looked = now;
    const bool polls = polls_host(c, now);
    if (polls)
        store_relaxed(waiting_flag(c, c->slot), (now - *since) * ONE_NS | (slot + 1));
    if (polls && load_volatile(abort) != 0)
        give_up(c, MOE_CUDA_PASS_ABORTED, slot);
    else if (now - *since > c->budget_ns)
        give_up(c, MOE_CUDA_PASS_LOST, slot);
    else
        return false;
    return true;
}

/* Waits until `flag` carries `stamp`, which `slot` will store. False if it failed. */
__device__ inline bool wait_flag(struct moe_cuda_control *c, const uint32_t *abort,
                                 const uint64_t *word, uint64_t stamp, uint32_t slot,
                                 uint32_t *value)
{
    uint64_t since = 0, looked = 0;
    for (uint32_t tries = 1;; tries++) {
        uint64_t w = load_acquire(word);
        if (moe_window_flag_stamp(w) == stamp) {
            *value = moe_window_flag_value(w);
            return true;
        }
        if (tries % TRIES_BETWEEN_LOOKS == 0 && wait_failed(c, abort, slot, &since, &looked))
            return false;
    }
}

/* Whether a loaded route belongs to this step. */
__device__ inline bool has_stamp(uint4 route, uint64_t stamp)
{
    return moe_window_flag_stamp(static_cast<uint64_t>(route.y) << 32 | route.x) == stamp;
}

/* Waits until `route` carries `stamp`, which `slot` will store, and reads all of it. False if it
 * failed. */
__device__ inline bool wait_route(struct moe_cuda_control *c, const uint32_t *abort,
                                  const struct moe_window_route *route, uint64_t stamp,
                                  uint32_t slot, uint4 *value)
{
    uint64_t since = 0, looked = 0;
    for (uint32_t tries = 1;; tries++) {
        *value = load_at_once(route);
        if (has_stamp(*value, stamp))
            return true;
        if (tries % TRIES_BETWEEN_LOOKS == 0 && wait_failed(c, abort, slot, &since, &looked))
            return false;
    }
}

/* Waits until `flag` carries `stamp` or that of a later step of the same view. False if it
 * failed. */
__device__ inline bool wait_flag_reached(struct moe_cuda_control *c, const uint32_t *abort,
                                         const uint64_t *word, uint64_t stamp, uint32_t slot)
{
    uint64_t since = 0, looked = 0;
    for (uint32_t tries = 1;; tries++) {
        uint64_t seen = moe_window_flag_stamp(load_acquire(word));
        if (seen >> MOE_WINDOW_STEP_BITS == stamp >> MOE_WINDOW_STEP_BITS && seen >= stamp)
            return true;
        if (tries % TRIES_BETWEEN_LOOKS == 0 && wait_failed(c, abort, slot, &since, &looked))
            return false;
    }
}

/* True in exactly one warp, of the last CTA of the grid to call this. It sees all earlier work of
 * all CTAs. All threads of a CTA must call it. */
__device__ inline bool last_of_grid(struct moe_cuda_control *c)
{
    uint32_t before = 0;
    __syncthreads();
    if (threadIdx.x / 32 != 0)
        return false;
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(&c->arrived, 1u);
    }
    if (__shfl_sync(ALL_LANES, before, 0) != gridDim.x - 1)
        return false;
    __threadfence();
    if (threadIdx.x == 0)
        c->arrived = 0;
    return true;
}

#endif
