/* Sums over rows by columns: what combine does with rows, whichever way they came. A lane holds N
 * neighbouring columns in fp32; all sums are made in one fixed order. */
#ifndef MOE_CUDA_COLUMNS_CUH
#define MOE_CUDA_COLUMNS_CUH

#include "cuda/rows.cuh"

#include <cuda_bf16.h>

constexpr uint32_t WIDE = 8; /* columns of a lane, where H is a multiple of it */

template <uint32_t N> struct columns {
    float v[N];
};

__device__ inline float widen(uint32_t bf16)
{
    return __uint_as_float(bf16 << 16);
}

__device__ inline columns<1> load(const float *row, columns<1>)
{
    return {{__ldcg(row)}};
}

__device__ inline columns<WIDE> load(const float *row, columns<WIDE>)
{
    float4 a = __ldcg(reinterpret_cast<const float4 *>(row));
    float4 b = __ldcg(reinterpret_cast<const float4 *>(row) + 1);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ inline columns<1> load(const __nv_bfloat16 *row, columns<1>)
{
    return {{widen(__ldcg(reinterpret_cast<const unsigned short *>(row)))}};
}

__device__ inline columns<WIDE> load(const __nv_bfloat16 *row, columns<WIDE>)
{
    uint4 u = __ldcg(reinterpret_cast<const uint4 *>(row));
    return {{widen(u.x), __uint_as_float(u.x & 0xffff0000u), widen(u.y),
             __uint_as_float(u.y & 0xffff0000u), widen(u.z), __uint_as_float(u.z & 0xffff0000u),
             widen(u.w), __uint_as_float(u.w & 0xffff0000u)}};
}

__device__ inline void store(float *row, const columns<1> &c)
{
    *row = c.v[0];
}

__device__ inline void store(float *row, const columns<WIDE> &c)
{
    float4 *to = reinterpret_cast<float4 *>(row);
    to[0] = {c.v[0], c.v[1], c.v[2], c.v[3]};
    to[1] = {c.v[4], c.v[5], c.v[6], c.v[7]};
}

__device__ inline void store(__nv_bfloat16 *row, const columns<1> &c)
{
    *row = __float2bfloat16_rn(c.v[0]);
}

__device__ inline void store(__nv_bfloat16 *row, const columns<WIDE> &c)
{
    union {
        __nv_bfloat162 pair[WIDE / 2];
        uint4 all;
    } u;
#pragma unroll
    for (uint32_t i = 0; i < WIDE / 2; i++)
        u.pair[i] = __floats2bfloat162_rn(c.v[2 * i], c.v[2 * i + 1]);
    *reinterpret_cast<uint4 *>(row) = u.all;
}

/* What is left of columns once they have been stored as Element. */
template <typename Element, uint32_t N> __device__ inline columns<N> rounded_to(columns<N> c)
{
    if constexpr (sizeof(Element) != sizeof(float))
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            c.v[i] = __bfloat162float(__float2bfloat16_rn(c.v[i]));
    return c;
}

/* sum += scale * from */
template <uint32_t N>
__device__ inline void add_scaled(columns<N> &sum, const columns<N> &from, float scale)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        sum.v[i] += scale * from.v[i];
}

constexpr uint32_t ROWS_AT_ONCE = 4; /* loads of different rows in flight */

/* Rows of the choices in `lanes`, added in k order, from column h on. Lane k holds row k. */
template <uint32_t N>
__device__ inline columns<N> sum_rows(const struct moe_cuda_pass &p, uint32_t lanes, uint32_t row,
                                      uint32_t h)
{
    columns<N> sum = {};
    for (uint32_t left = lanes; left != 0;) {
        columns<N> from[ROWS_AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < ROWS_AT_ONCE; i++) {
            from[i] = {};
            if (left == 0)
                continue;
            size_t at = __shfl_sync(ALL_LANES, row, __ffs(left) - 1);
            left &= left - 1;
            if (h < p.hidden)
                from[i] = load(p.expert_out + at * p.hidden + h, columns<N>{});
        }
#pragma unroll
        for (uint32_t i = 0; i < ROWS_AT_ONCE; i++)
            add_scaled(sum, from[i], 1.0f);
    }
    return sum;
}

/* Columns of a part of a row: rows are cut where there are fewer tokens than warps. */
template <uint32_t N>
__device__ inline void part_columns(uint32_t hidden, uint32_t parts, uint32_t part, uint32_t *begin,
                                    uint32_t *end)
{
    uint32_t chunks = (hidden + 32 * N - 1) / (32 * N);
    uint32_t width = (chunks + parts - 1) / parts * 32 * N;
    *begin = part * width;
    *end = min(*begin + width, hidden);
}

#endif
