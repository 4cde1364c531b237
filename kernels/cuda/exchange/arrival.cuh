/* SPDX-License-Identifier: Apache-2.0 */
/* What a CTA of dispatch keeps in shared memory, and the warps of it that do not send. */
#ifndef MOE_CUDA_ARRIVAL_CUH
#define MOE_CUDA_ARRIVAL_CUH

#include "cuda/exchange/rows.cuh"

/* How rows get from slot to slot. PLAIN: a word follows the row, which is moved in registers. BULK:
 * likewise, moved by the copy engine (bulk.cuh). QUICK: through the quick regions. PLAIN and BULK
 * understand each other. */
enum class way { PLAIN, BULK, QUICK };

struct alignas(16) arrival {
    uint32_t cta, ctas; /* this one's number in its team, and how many they are: BULK has a team
                           that sends and one that receives, else one does both */
    uint32_t step;
    uint32_t other;  /* who makes this step be refused, as in struct moe_cuda_step_outcome; the
                        lowest of  them, or NOWHERE */
    uint32_t failed; /* a wait failed, or counts are impossible */
    uint32_t tokens_of[MOE_MAX_SLOTS];
    /* Copies of what would else be a trip to memory each time. */
    uint64_t stamp;
    uint64_t live;
    uint8_t *window[MOE_MAX_SLOTS];
    struct moe_cuda_step_params params;
    /* Behind it: first[slots][local], the row of the source's first row for each expert;
     * count[slots][local]; before they are known, in their place, tally[entries]; then
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

/* Own choices of each entry of the placement, until counts are read. */
__device__ inline uint32_t *tallies(struct arrival *a)
{
    return first_rows(a);
}

/* Of a tally: whole units of four. */
__host__ __device__ static inline uint32_t tally_length(const struct moe_cuda_pass *p)
{
    return (p->entries + 3) / 4 * 4;
}

/* Numbers in the tables of rows, and of the tallies. */
__host__ __device__ constexpr size_t max_numbers(size_t slots, size_t local_experts,
                                                 size_t tally_length)
{
    return 2 * slots * local_experts > tally_length ? 2 * slots * local_experts : tally_length;
}

__host__ __device__ static inline size_t arrival_numbers(const struct moe_cuda_pass *p)
{
    return max_numbers(p->slots, p->local_experts, tally_length(p));
}

/* All of dispatch's tables: those, the local index of each expert, and its target. */
constexpr size_t bytes_of_tables(size_t numbers, size_t experts)
{
    return sizeof(struct arrival) + sizeof(uint32_t) * (numbers + experts) +
           sizeof(uint16_t) * experts;
}

/* The most that any pass asks for, every expert on every slot, fits on every GPU that kernels are
 * built for: the least that a CTA can have is 99 KiB (8.6, 8.9, 12.0; 163 on 8.0, 227 on 9.0).
 * Rings of rows take only what is left, and there are none where that is too little. Whoever raises
 * a limit has to refuse layers that do not fit, before a step runs. */
constexpr size_t LEAST_SHARED_BYTES = 99 * 1024;
static_assert(MOE_MAX_SLOTS * MOE_MAX_EXPERTS % 4 == 0, "the largest tally is whole");
static_assert(bytes_of_tables(max_numbers(MOE_MAX_SLOTS, MOE_MAX_EXPERTS,
                                          MOE_MAX_SLOTS *MOE_MAX_EXPERTS),
                              MOE_MAX_EXPERTS) <= LEAST_SHARED_BYTES,
              "what dispatch keeps of the largest layer fits into a CTA's shared memory");

__device__ inline int32_t *local_indices(const struct moe_cuda_pass &p, struct arrival *a)
{
    return reinterpret_cast<int32_t *>(first_rows(a) + arrival_numbers(&p));
}

/* The slot of each expert, or SEVERAL where it has more than one copy. */
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

/* The warps of a CTA that do not send: the last ones. They have barrier 1 for themselves. */
struct group {
    uint32_t warp, warps;     /* this one, and how many */
    uint32_t thread, threads; /* likewise */
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
