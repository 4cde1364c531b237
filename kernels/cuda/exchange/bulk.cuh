/* SPDX-License-Identifier: Apache-2.0 */
/* Rows through shared memory by Hopper's copy engine: a warp's lane 0 says what goes where, and
 * neither registers nor the load and store units see the bytes. So a fence that follows a row waits
 * for this row alone, and not for what other warps of the multiprocessor have stored. */
#ifndef MOE_CUDA_BULK_CUH
#define MOE_CUDA_BULK_CUH

#include "cuda/core/hopper.cuh"
#include "cuda/exchange/rows.cuh"

constexpr uint32_t RING_ROWS = 3; /* of a warp: one comes, one waits, one leaves */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MOE_BULK 0 /* the host never launches these there */
#else
#define MOE_BULK 1
#endif

/* Of one warp; all of it is lane 0's business. */
struct row_ring {
    uint8_t *rows;    /* [RING_ROWS][bytes], 16-byte aligned */
    uint64_t *landed; /* [RING_ROWS] barriers */
    uint32_t bytes;
    uint32_t begun, taken; /* rows so far */
};

__device__ inline void init_ring(const struct row_ring &ring)
{
#if MOE_BULK
    for (uint32_t i = 0; i < RING_ROWS; i++)
        hopper::barrier_init(&ring.landed[i], 1);
    hopper::barrier_init_done();
#endif
}

/* Begins to load a row. At most one that was begun before may not have been stored from yet. */
__device__ inline void begin_row(struct row_ring *ring, const void *from)
{
#if MOE_BULK
    const uint32_t i = ring->begun++ % RING_ROWS;
    hopper::store_wait_read<RING_ROWS - 2>(); /* the place is free */
    hopper::barrier_expect(&ring->landed[i], ring->bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(
                     hopper::shared_address(ring->rows + static_cast<size_t>(i) * ring->bytes)),
                 "l"(from), "r"(ring->bytes), "r"(hopper::shared_address(&ring->landed[i]))
                 : "memory");
#endif
}

/* Waits for the oldest row; stores of it may follow, and then end_row. */
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

/* Until all rows that were stored from have arrived. */
__device__ inline void await_stores()
{
#if MOE_BULK
    hopper::store_wait_all();
#endif
}

/* What was seen before by ordinary loads is seen by the copy engine too. */
__device__ inline void loads_before_copies()
{
#if MOE_BULK
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

#endif
