/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the peers' heads and counts, and lays out rows by expert. Values from a window are checked
 * before they are used as an index. */
#ifndef MOE_CUDA_EP_RECEIVE_CUH
#define MOE_CUDA_EP_RECEIVE_CUH

#include "cuda/exchange/arrival.cuh"
#include "cuda/plan/limits.h"

__device__ static void read_heads(const struct moe_cuda_pass &p, struct arrival *a,
                                  const struct group &group)
{
    struct moe_cuda_control *c = p.control;
#pragma unroll 1
    for (uint32_t i = group.thread; i < p.slots * MOE_HEAD_COUNT; i += group.threads) {
        uint32_t source = i / MOE_HEAD_COUNT, word = i % MOE_HEAD_COUNT, value = 0;
        if (!is_live(a->live, source)) {
            if (word == MOE_HEAD_TOKENS)
                a->tokens_of[source] = 0;
            continue;
        }
        const uint64_t *at = moe_window_head_of(&p.layout, own_window(p, a), a->step & 1, source);
        if (!wait_flag(c, p.abort, at + word, a->stamp, source, &value)) {
            a->failed = 1;
            continue;
        }
        bool differs = word == MOE_HEAD_TOKENS ? value > p.bucket : value != a->params.head[word];
        if (differs)
            atomicMin(&a->other, source + MOE_CUDA_MEANS_OTHER);
        if (word == MOE_HEAD_BUCKET && (value & MOE_HEAD_NO_MEMORY) != 0)
            atomicMin(&a->other, source);
        if (word == MOE_HEAD_TOKENS)
            a->tokens_of[source] = value;
    }
}

/* The flag of count i, with i < slots * local; `expert` is the one with local index i % local. */
__device__ static const uint64_t *count_flag(const struct moe_cuda_pass &p, const struct arrival *a,
                                             uint32_t i, uint32_t expert)
{
    return moe_window_counts_of(&p.layout, own_window(p, a), a->step & 1, i / p.local_experts) +
           expert;
}

__device__ static void read_counts(const struct moe_cuda_pass &p, struct arrival *a,
                                   const struct group &group)
{
    struct moe_cuda_control *c = p.control;
    uint32_t *count = row_counts(p, a);
#pragma unroll 1
    for (uint32_t i = group.thread; i < p.slots * p.local_experts; i += group.threads) {
        uint32_t source = i / p.local_experts;
        uint32_t expert = a->params.placement.local[i % p.local_experts];
        count[i] = 0;
        if (!is_live(a->live, source))
            continue;
        if (!wait_flag(c, p.abort, count_flag(p, a, i, expert), a->stamp, source, &count[i])) {
            a->failed = 1;
        } else if (count[i] > a->tokens_of[source] * p.top_k) {
            give_up(c, MOE_CUDA_PASS_PROTOCOL_ERROR, source);
            a->failed = 1;
        }
    }
}

static_assert(MOE_CUDA_MAX_SLOTS * (UINT64_C(1) << MOE_WINDOW_VALUE_BITS) + MOE_ROW_ALIGN <=
                      UINT32_MAX &&
                  MOE_CUDA_MAX_CELLS * (UINT64_C(1) << MOE_WINDOW_VALUE_BITS) / MOE_ROW_ALIGN +
                          MOE_CUDA_MAX_EXPERTS <=
                      UINT32_MAX,
              "sums of counts, and of blocks of rows");

/* Lays out rows: experts in ascending order, each from an aligned row; within an expert, sources in
 * slot order. One warp. */
__device__ static void lay_out_rows(const struct moe_cuda_pass &p, struct arrival *a, bool writer)
{
    const uint32_t lane = threadIdx.x % 32, local = p.local_experts;
    uint32_t *first = first_rows(a), *count = row_counts(p, a);
    const uint32_t capacity = p.row_capacity / MOE_ROW_ALIGN;
    uint32_t at = 0; /* in blocks of MOE_ROW_ALIGN rows: false counts cannot make this overflow */
    uint64_t rows = 0;
#pragma unroll 1
    for (uint32_t l0 = 0; l0 < local; l0 += 32) {
        uint32_t l = l0 + lane, sum = 0;
#pragma unroll 1
        for (uint32_t s = 0; l < local && s < p.slots; s++)
            sum += count[s * local + l];
        const uint32_t blocks = (sum + MOE_ROW_ALIGN - 1) / MOE_ROW_ALIGN;
        uint32_t end = blocks;
#pragma unroll 1
        for (uint32_t d = 1; d < 32; d *= 2) {
            uint32_t before = __shfl_up_sync(ALL_LANES, end, d);
            end += lane >= d ? before : 0;
        }
        uint32_t row = (at + end - blocks) * MOE_ROW_ALIGN;
        at += __shfl_sync(ALL_LANES, end, 31);
        rows += sum;
        if (l >= local)
            continue;
#pragma unroll 1
        for (uint32_t s = 0; s < p.slots; s++) {
            first[s * local + l] = row;
            row += count[s * local + l];
        }
        if (writer && at <= capacity) {
            p.start[l] = first[l];
            p.count[l] = sum;
            if (p.counts != nullptr)
                p.counts->local_rows[l] = sum;
        }
    }
    bool fits = at <= capacity;
#pragma unroll 1
    for (uint32_t d = 1; d < 32; d *= 2)
        rows += __shfl_xor_sync(ALL_LANES, rows, static_cast<int>(d));
    if (lane != 0)
        return;
    if (!fits) {
        /* More rows than all slots' tokens have choices: some slot's counts are false. */
        give_up(p.control, MOE_CUDA_PASS_PROTOCOL_ERROR, p.slot);
        a->failed = 1;
    } else if (writer) {
        p.start[local] = at * MOE_ROW_ALIGN;
        p.control->outcome.rows = rows;
    }
}

/* Stores the results for combine and the host. */
__device__ static void publish(const struct moe_cuda_pass &p, const struct arrival *a,
                               const struct group &group)
{
    struct moe_cuda_control *c = p.control;
    if (group.thread == 0 && a->failed == 0 && a->other != NOWHERE) {
        c->refused = a->step;
        if (atomicCAS(&c->outcome.code, MOE_CUDA_PASS_GOOD, MOE_CUDA_PASS_REFUSED) ==
            MOE_CUDA_PASS_GOOD)
            c->outcome.slot = a->other;
    }
    if (group.thread < p.slots)
        c->tokens_of[group.thread] = a->failed == 0 ? a->tokens_of[group.thread] : 0;
}

/* Reads heads and counts and lays out rows. `writer`: this CTA also stores a refused step's
 * outcome. */
__device__ static void learn_what_comes(const struct moe_cuda_pass &p, struct arrival *a,
                                        const struct group &group, bool writer)
{
    read_heads(p, a, group);
    group_sync(group);
    bool go_on = a->failed == 0 && a->other == NOWHERE;
    if (go_on)
        read_counts(p, a, group);
    group_sync(group);
    if (go_on && a->failed == 0 && group.warp == 0)
        lay_out_rows(p, a, writer);
    group_sync(group);
    if (writer)
        publish(p, a, group);
}

#endif
