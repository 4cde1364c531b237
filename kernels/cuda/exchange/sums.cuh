/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over rows by columns, for combine through windows and over a network. A lane has N adjacent
 * columns in fp32; 32 * N columns are a warp's step. All sums use one fixed order. */
#ifndef MOE_CUDA_SUMS_CUH
#define MOE_CUDA_SUMS_CUH

#include "cuda/exchange/columns.cuh"
#include "cuda/exchange/rows.cuh"

/* Adds the rows of the choices in `lanes` in k order: `STEPS` steps from column h on, with loads of
 * `ROWS` different rows in flight. Lane k has row k's index. Columns from `end` on are not
 * touched. */
template <typename Out, uint32_t N, uint32_t ROWS, uint32_t STEPS>
__device__ inline void sum_rows(const struct moe_cuda_pass &p, uint32_t lanes, uint32_t row,
                                uint32_t h, uint32_t end, columns<N> (&sum)[STEPS])
{
#pragma unroll
    for (uint32_t u = 0; u < STEPS; u++)
        sum[u] = {};
    for (uint32_t left = lanes; left != 0;) {
        packed<Out, N> from[ROWS][STEPS];
        const uint32_t n = min(ROWS, static_cast<uint32_t>(__popc(left)));
#pragma unroll
        for (uint32_t i = 0; i < ROWS; i++) {
            if (i >= n)
                continue;
            size_t at = __shfl_sync(ALL_LANES, row, __ffs(left) - 1);
            const Out *out = static_cast<const Out *>(p.expert_out) + at * p.hidden;
            left &= left - 1;
#pragma unroll
            for (uint32_t u = 0; u < STEPS; u++)
                if (h + u * 32 * N < end)
                    fetch(out + h + u * 32 * N, &from[i][u]);
        }
#pragma unroll
        for (uint32_t i = 0; i < ROWS; i++)
#pragma unroll
            for (uint32_t u = 0; u < STEPS; u++)
                if (i < n && h + u * 32 * N < end)
                    add_scaled(sum[u], unpack(from[i][u]), 1.0f);
    }
}

/* Columns of a part of a row. Rows are cut if there are fewer tokens than warps. */
template <uint32_t N>
__device__ inline void part_columns(uint32_t hidden, uint32_t parts, uint32_t part, uint32_t *begin,
                                    uint32_t *end)
{
    uint32_t steps = (hidden + 32 * N - 1) / (32 * N);
    uint32_t width = (steps + parts - 1) / parts * 32 * N;
    *begin = min(part * width, hidden);
    *end = min(*begin + width, hidden);
}

#endif
