/* SPDX-License-Identifier: Apache-2.0 */
/* Rows through shared memory by Hopper's copy engine. A warp's lane 0 issues the copies; registers
 * and the load and store units never see the bytes. So a fence after a row waits for this row
 * alone, not for other warps' stores.
 *
 * Stages    RING_ROWS rows per warp in shared memory.
 * Warps     each has a separate ring. */
#ifndef MOE_CUDA_BULK_CUH
#define MOE_CUDA_BULK_CUH

#include "cuda/core/hopper.cuh"
#include "cuda/exchange/rows.cuh"

constexpr uint32_t RING_ROWS = 3; /* per warp: one loads, one waits, one is stored */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MOE_BULK 0 /* the host never launches these kernels there */
#else
#define MOE_BULK 1
#endif

/* One warp's ring. Only lane 0 uses it. */
struct row_ring {
    uint8_t *rows;    /* [RING_ROWS][bytes], 16-byte aligned */
    uint64_t *landed; /* [RING_ROWS] barriers */
    uint32_t bytes;
    uint32_t begun, taken; /* number of rows so far */
};

__device__ inline void init_ring(const struct row_ring &ring)
{
#if MOE_BULK
    for (uint32_t i = 0; i < RING_ROWS; i++)
        hopper::barrier_init(&ring.landed[i], 1);
    hopper::barrier_init_done();
#endif
}

/* Begins to load a row. At most one earlier row may still be unstored. */
__device__ inline void begin_row(struct row_ring *ring, const void *from)
{
#if MOE_BULK
    const uint32_t i = ring->begun++ % RING_ROWS;
    hopper::store_wait_read<RING_ROWS - 2>(); /* the ring has a free place */
    hopper::barrier_expect(&ring->landed[i], ring->bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(
                     hopper::shared_address(ring->rows + static_cast<size_t>(i) * ring->bytes)),
                 "l"(from), "r"(ring->bytes), "r"(hopper::shared_address(&ring->landed[i]))
                 : "memory");
#endif
}

/* Waits for the oldest row and returns its place. Call store_row for it, then end_row. */
__device__ inline uint32_t await_row(struct row_ring *ring)
{
    const uint32_t i = ring->taken % RING_ROWS;
#if MOE_BULK
    hopper::barrier_wait(&ring->landed[i], ring->taken / RING_ROWS & 1);
#endif
    ring->taken++;
    return i;
}

__device__ inline void store_row(const struct row_ring &ring, uint32_t i, void *to)
{
#if MOE_BULK
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(hopper::shared_address(ring.rows + static_cast<size_t>(i) * ring.bytes)),
                 "r"(ring.bytes)
                 : "memory");
#endif
}

__device__ inline void end_row()
{
#if MOE_BULK
    hopper::store_commit();
#endif
}

/* Waits until all stores have arrived. */
__device__ inline void await_stores()
{
#if MOE_BULK
    hopper::store_wait_all();
#endif
}

/* Makes earlier ordinary loads visible to the copy engine. */
__device__ inline void loads_before_copies()
{
#if MOE_BULK
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

#endif
