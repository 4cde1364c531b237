/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory of a CTA of dispatch, and the group of its warps that receive. */
#ifndef MOE_CUDA_ARRIVAL_CUH
#define MOE_CUDA_ARRIVAL_CUH

#include "cuda/exchange/rows.cuh"
#include "cuda/plan/limits.h"

/* How rows move between slots. PLAIN: in registers; a flag follows the row. BULK: by the copy
 * engine (bulk.cuh); a flag follows. QUICK: through the quick regions. A PLAIN and a BULK slot work
 * together. */
enum class way { PLAIN, BULK, QUICK };

struct alignas(16) arrival {
    uint32_t cta, ctas; /* this CTA's number in its group, and their count. BULK has one group that
                           sends and one that receives; else one group does both */
    uint32_t step;
    uint32_t other;  /* cause of a refused step, as in struct moe_cuda_step_outcome; the lowest, or
                        NOWHERE */
    uint32_t failed; /* a wait failed, or counts are impossible */
    uint32_t tokens_of[MOE_CUDA_MAX_SLOTS];
    /* Copies that save a load from memory each. */
    uint64_t stamp;
    uint64_t live;
    uint8_t *window[MOE_CUDA_MAX_SLOTS];
    struct moe_cuda_step_params params;
    /* Followed by: first[slots][local], the first row of each source for each expert;
     * count[slots][local]; in place of both, until they are known, tally[entries]; then
     * local_index[E], a copy; target[E]. */
};

__device__ inline uint32_t *first_rows(struct arrival *a)
{
    return reinterpret_cast<uint32_t *>(a + 1);
}

__device__ inline uint32_t *row_counts(const struct moe_cuda_pass &p, struct arrival *a)
{
    return first_rows(a) + p.slots * p.local_experts;
}

/* This slot's choices for each entry of the placement, until counts are read. */
__device__ inline uint32_t *tallies(struct arrival *a)
{
    return first_rows(a);
}

/* Length of a tally, rounded up to four. */
__host__ __device__ static inline uint32_t tally_length(const struct moe_cuda_pass *p)
{
    return (p->entries + 3) / 4 * 4;
}

/* Number of values in the tables of rows, or in the tallies. */
__host__ __device__ constexpr size_t max_numbers(size_t slots, size_t local_experts,
                                                 size_t tally_length)
{
    return 2 * slots * local_experts > tally_length ? 2 * slots * local_experts : tally_length;
}

__host__ __device__ static inline size_t arrival_numbers(const struct moe_cuda_pass *p)
{
    return max_numbers(p->slots, p->local_experts, tally_length(p));
}

/* All tables of dispatch: those, each expert's local index, and its target. */
constexpr size_t bytes_of_tables(size_t numbers, size_t experts)
{
    return sizeof(struct arrival) + sizeof(uint32_t) * (numbers + experts) +
           sizeof(uint16_t) * experts;
}

/* The largest need of any layer that layer_create takes (moe_cuda_tables_fit). Rings of rows take
 * only the rest; if it is too small, there are none. */
static_assert(MOE_CUDA_MAX_COPIES % 4 == 0, "the largest tally is whole");
static_assert(bytes_of_tables(max_numbers(1, MOE_CUDA_MAX_CELLS, MOE_CUDA_MAX_COPIES),
                              MOE_CUDA_MAX_EXPERTS) <= MOE_CUDA_LEAST_SHARED,
              "what dispatch keeps of the largest layer fits into a CTA's shared memory");

__device__ inline int32_t *local_indices(const struct moe_cuda_pass &p, struct arrival *a)
{
    return reinterpret_cast<int32_t *>(first_rows(a) + arrival_numbers(&p));
}

/* The slot of each expert, or SEVERAL if it has more than one copy. */
constexpr uint16_t SEVERAL = 0xffff;

__device__ inline uint16_t *targets(const struct moe_cuda_pass &p, struct arrival *a)
{
    return reinterpret_cast<uint16_t *>(local_indices(p, a) + p.experts);
}

__device__ inline uint8_t *own_window(const struct moe_cuda_pass &p, const struct arrival *a)
{
    return a->window[p.slot];
}

static inline size_t arrival_bytes(const struct moe_cuda_pass *p)
{
    return bytes_of_tables(arrival_numbers(p), p->experts);
}

/* The receiving warps of a CTA: the last ones. Only they use barrier 1. */
struct group {
    uint32_t warp, warps;     /* index of this warp, and number of warps */
    uint32_t thread, threads; /* the same for threads */
};

__device__ inline struct group group_behind(uint32_t senders)
{
    return {threadIdx.x / 32 - senders, CTA_WARPS - senders, threadIdx.x - 32 * senders,
            CTA_THREADS - 32 * senders};
}

__device__ inline void group_sync(const struct group &group)
{
    asm volatile("bar.sync 1, %0;" ::"r"(group.threads) : "memory");
}

#endif
