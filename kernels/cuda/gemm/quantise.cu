/* SPDX-License-Identifier: Apache-2.0 */
/* Quantises rows, and unpacks rows that came quantised; see quantise.h.
 *
 * Blocks   256 threads, walk over the experts' rows. A thread that quantises has 8 columns at once,
 *          so 16 threads have a group of 128. A warp that unpacks scales has 32 rows.
 * Shared   4 KB: the experts' first tiles.
 *
 * Reading rows decides the time, so each thread loads all that it has of a tile first. */
#include "cuda/gemm/quantise.h"

#include "cuda/core/load.h"
#include "cuda/core/stamp.cuh"
#include "cuda/gemm/ggemm_params.cuh"
#include "cuda/gemm/quantise_math.cuh"
#include "cuda/gemm/tensor_map.cuh"
#include "cuda/plan/limits.h"

#include <algorithm>
#include <cuda_bf16.h>

namespace
{

using namespace quantise;

constexpr uint32_t THREADS = 256, BLOCKS_PER_PROCESSOR = 4;
constexpr uint32_t TILE_ROWS = 8, TILE_GROUPS = 8;
constexpr uint32_t EACH = 8; /* columns of a thread */
constexpr uint32_t PASS = THREADS * EACH;
constexpr uint32_t GROUP = MOE_CUDA_PACKED_COLUMNS, GROUP_THREADS = GROUP / EACH;

struct quantise_params : ggemm::row_groups {
    moe_cuda_quantise q;
    uint8_t *codes;
    float *scales;
    size_t row_stride;            /* of codes, in bytes */
    uint32_t code_end;            /* columns of codes, with padding */
    uint32_t groups, scale_end;   /* scales of a row, and with padding */
    size_t row_scale, step_scale; /* scales from row to row, and from step to step */
};

__device__ void load_wide(const __nv_bfloat16 *from, float (&v)[EACH])
{
    const uint4 words = *reinterpret_cast<const uint4 *>(from);
    const uint32_t pair[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t i = 0; i < EACH / 2; i++) {
        v[2 * i] = __uint_as_float(pair[i] << 16);
        v[2 * i + 1] = __uint_as_float(pair[i] & 0xffff0000u);
    }
}

__device__ void load_wide(const float *from, float (&v)[EACH])
{
#pragma unroll
    for (uint32_t i = 0; i < EACH / 4; i++) {
        const float4 four = *reinterpret_cast<const float4 *>(from + 4 * i);
        v[4 * i] = four.x;
        v[4 * i + 1] = four.y;
        v[4 * i + 2] = four.z;
        v[4 * i + 3] = four.w;
    }
}

/* Columns [column, column + 8) of a row, times its weight; zeros from column `end` on. Returns the
 * largest magnitude. NaN does not count. */
template <class T>
__device__ float load(const moe_cuda_quantise &q, uint32_t row, uint32_t column, uint32_t end,
                      float weight, float (&v)[EACH])
{
    const T *from = static_cast<const T *>(q.x) + size_t(row) * q.columns + column;
    if (q.columns % EACH == 0 && column < end) {
        load_wide(from, v);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            v[i] = column + i < end ? float(from[i]) : 0.0f;
    }
    float largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        if (q.weight != nullptr)
            v[i] *= weight;
        largest = fmaxf(largest, fabsf(v[i]));
    }
    return largest;
}

__device__ void store_codes(const quantise_params &p, uint32_t row, uint32_t column,
                            const float (&v)[EACH], group_scale s)
{
    uint32_t word[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
        word[i] = codes_of(v[4 * i], v[4 * i + 1], s) | codes_of(v[4 * i + 2], v[4 * i + 3], s)
                                                            << 16;
    if (column < p.code_end)
        *reinterpret_cast<uint2 *>(p.codes + row * p.row_stride + column) =
            make_uint2(word[0], word[1]);
}

__device__ void store_values(const moe_cuda_quantise &q, uint32_t row, uint32_t column,
                             const float (&v)[EACH], group_scale s)
{
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint8_t code = uint8_t(codes_of(v[i], 0.0f, s));
        if (column + i < q.columns)
            q.values[size_t(row) * q.columns + column + i] = value_of(code) * s.scale;
    }
}

__device__ void store(const quantise_params &p, uint32_t row, uint32_t column,
                      const float (&v)[EACH], group_scale s)
{
    if (p.q.values != nullptr)
        store_values(p.q, row, column, v, s);
    else
        store_codes(p, row, column, v, s);
}

__device__ void store_scale(const quantise_params &p, uint32_t row, uint32_t step, float scale)
{
    if (p.q.values == nullptr && step < p.scale_end)
        p.scales[row * p.row_scale + step * p.step_scale] = scale;
}

/* The largest of `width` neighbouring threads. */
template <uint32_t width> __device__ float largest_of(float v)
{
#pragma unroll
    for (uint32_t d = width / 2; d > 0; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

/* Groups of 128 columns, in tiles of 8 rows and 8 groups: 16 threads have a row of two groups. */
template <class T>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_PROCESSOR)
    quantise_groups(const __grid_constant__ quantise_params p)
{
    constexpr uint32_t UNITS = THREADS / GROUP_THREADS, APART = UNITS / TILE_ROWS;
    __shared__ uint32_t first[MOE_CUDA_MAX_EXPERTS + 1];
    stamp_begin(p.q.began);
    if (threadIdx.x < ggemm::WARP)
        ggemm::list_tiles<TILE_ROWS, TILE_GROUPS>(p, first);
    __syncthreads();
    const uint32_t unit = threadIdx.x / GROUP_THREADS, r = unit % TILE_ROWS;
    ggemm::tile_walk<TILE_ROWS, TILE_GROUPS> tile(p, first);
    while (tile.next()) {
        const uint32_t row = tile.row + r, columns = r < tile.rows ? p.q.columns : 0;
        const uint32_t column =
            (tile.weight_row + unit / TILE_ROWS) * GROUP + threadIdx.x % GROUP_THREADS * EACH;
        const float weight = columns > 0 && p.q.weight != nullptr ? __ldg(p.q.weight + row) : 1.0f;
        float v[TILE_GROUPS / APART][EACH], largest[TILE_GROUPS / APART];
#pragma unroll
        for (uint32_t i = 0; i < TILE_GROUPS / APART; i++)
            largest[i] = load<T>(p.q, row, column + i * APART * GROUP, columns, weight, v[i]);
#pragma unroll
        for (uint32_t i = 0; i < TILE_GROUPS / APART; i++) {
            const uint32_t at = column + i * APART * GROUP;
            const group_scale s = scale_of(largest_of<GROUP_THREADS>(largest[i]), p.q.pow2);
            if (columns > 0)
                store(p, row, at, v[i], s);
            if (threadIdx.x % GROUP_THREADS == 0 && columns > 0)
                store_scale(p, row, at / GROUP, at < columns ? s.scale : 0.0f);
        }
    }
}

template <class T>
__device__ void quantise_row(const quantise_params &p, uint32_t row, float weight,
                             float (&warps)[THREADS / ggemm::WARP])
{
    float v[EACH], largest = 0;
    for (uint32_t first = 0; first < p.q.columns; first += PASS)
        largest =
            fmaxf(largest, load<T>(p.q, row, first + threadIdx.x * EACH, p.q.columns, weight, v));
    largest = largest_of<ggemm::WARP>(largest);
    __syncthreads(); /* all have read the previous row's */
    if (threadIdx.x % ggemm::WARP == 0)
        warps[threadIdx.x / ggemm::WARP] = largest;
    __syncthreads();
    for (uint32_t w = 0; w < THREADS / ggemm::WARP; w++)
        largest = fmaxf(largest, warps[w]);
    const group_scale s = scale_of(largest, p.q.pow2);
    for (uint32_t first = 0; first < p.q.columns; first += PASS) {
        load<T>(p.q, row, first + threadIdx.x * EACH, p.q.columns, weight, v);
        store(p, row, first + threadIdx.x * EACH, v, s);
    }
    for (uint32_t step = threadIdx.x; step < p.scale_end; step += THREADS)
        store_scale(p, row, step, step < p.groups ? s.scale : 0.0f);
}

/* Whole rows, one after the other. */
template <class T>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_PROCESSOR)
    quantise_rows(const __grid_constant__ quantise_params p)
{
    __shared__ uint32_t first[MOE_CUDA_MAX_EXPERTS + 1];
    __shared__ float warps[THREADS / ggemm::WARP];
    stamp_begin(p.q.began);
    if (threadIdx.x < ggemm::WARP)
        ggemm::list_tiles<1, TILE_GROUPS>(p, first);
    __syncthreads();
    ggemm::tile_walk<1, TILE_GROUPS> tile(p, first);
    while (tile.next())
        quantise_row<T>(p, tile.row, p.q.weight != nullptr ? __ldg(p.q.weight + tile.row) : 1.0f,
                        warps);
}

/* --------------------------------------------------------------------- unpacking */

constexpr uint32_t UNPACK_ROWS = ggemm::WARP, UNPACK_STEPS = THREADS / ggemm::WARP * 4;

struct unpack_params : ggemm::row_groups {
    moe_cuda_unpack u;
    uint32_t scales_at;  /* bytes of a row before its scales */
    uint32_t step_scale; /* scales of the result from step to step */
};

__device__ const float *scales_of(const unpack_params &p, uint32_t row)
{
    return reinterpret_cast<const float *>(static_cast<const uint8_t *>(p.u.rows) +
                                           size_t(row) * p.u.row_bytes + p.scales_at);
}

/* Lanes have 32 rows, warps four steps each. */
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_PROCESSOR)
    unpack_scales(const __grid_constant__ unpack_params p)
{
    __shared__ uint32_t first[MOE_CUDA_MAX_EXPERTS + 1];
    stamp_begin(p.u.began);
    if (threadIdx.x < ggemm::WARP)
        ggemm::list_tiles<UNPACK_ROWS, UNPACK_STEPS>(p, first);
    __syncthreads();
    const uint32_t r = threadIdx.x % ggemm::WARP, warp = threadIdx.x / ggemm::WARP;
    ggemm::tile_walk<UNPACK_ROWS, UNPACK_STEPS> tile(p, first);
    while (tile.next()) {
        const uint32_t row = tile.row + r, step = tile.weight_row + warp * 4;
        if (r >= tile.rows || step >= p.n)
            continue;
        const float4 four =
            *reinterpret_cast<const float4 *>(scales_of(p, row) + (p.u.whole_rows ? 0 : step));
        const float scale[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (step + i < p.n)
                p.u.scales[size_t(step + i) * p.step_scale + row] =
                    p.u.whole_rows ? scale[0] : scale[i];
    }
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_PROCESSOR)
    unpack_values(const __grid_constant__ unpack_params p)
{
    __shared__ uint32_t first[MOE_CUDA_MAX_EXPERTS + 1];
    stamp_begin(p.u.began);
    if (threadIdx.x < ggemm::WARP)
        ggemm::list_tiles<1, UNPACK_STEPS>(p, first);
    __syncthreads();
    ggemm::tile_walk<1, UNPACK_STEPS> tile(p, first);
    while (tile.next()) {
        const uint8_t *codes =
            static_cast<const uint8_t *>(p.u.rows) + size_t(tile.row) * p.u.row_bytes;
        const float *scales = scales_of(p, tile.row);
        const uint32_t end = min(p.u.columns, (tile.weight_row + UNPACK_STEPS) * GROUP);
        for (uint32_t c = tile.weight_row * GROUP + threadIdx.x; c < end; c += THREADS)
            p.u.values[size_t(tile.row) * p.u.columns + c] =
                value_of(codes[c]) * scales[p.u.whole_rows ? 0 : c / GROUP];
    }
}

/* --------------------------------------------------------------------- launches */

typedef void (*kernel)(const quantise_params);

/* [of F32][whole rows] */
const kernel kernels[2][2] = {{quantise_groups<__nv_bfloat16>, quantise_rows<__nv_bfloat16>},
                              {quantise_groups<float>, quantise_rows<float>}};

/* Where codes and scales go: into the buffer, or each row's together. */
void place_codes(const moe_cuda_quantise &q, quantise_params *p)
{
    const bool rows = q.row_bytes != 0;
    p->codes = static_cast<uint8_t *>(q.quantised);
    p->code_end = moe_cuda_quantised_stride(q.columns);
    p->row_stride = rows ? q.row_bytes : p->code_end;
    p->groups = rows && q.whole_rows ? 1 : moe_cuda_quantised_steps(q.columns);
    p->scale_end = rows ? (q.row_bytes - p->code_end) / uint32_t(sizeof(float)) : p->groups;
    p->row_scale = rows ? q.row_bytes / sizeof(float) : 1;
    p->step_scale = rows ? 1 : moe_cuda_quantised_scales(q.row_capacity);
    if (p->codes != nullptr)
        p->scales = reinterpret_cast<float *>(
            p->codes + (rows ? p->code_end : moe_cuda_quantised_offset(q.row_capacity, q.columns)));
}

moe_status check_range(uint32_t experts, uint32_t row_capacity, uint32_t columns)
{
    if (experts == 0 || experts > MOE_CUDA_MAX_EXPERTS || row_capacity == 0 || columns == 0 ||
        columns > UINT32_MAX / 4)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "quantised: %u rows of %u columns, %u experts: out of range", row_capacity,
                         columns, experts);
    return moe_ok();
}

/* Rows of moe/row_format.h have these bytes. */
moe_status check_row_bytes(uint32_t row_bytes, uint32_t columns, bool whole_rows)
{
    const uint32_t groups = whole_rows ? 1 : moe_cuda_quantised_steps(columns);
    const uint32_t want = moe_cuda_quantised_stride(columns) +
                          moe_cuda_quantised_stride(groups * uint32_t(sizeof(float)));
    if (row_bytes != want)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "quantised rows of %u columns have %u bytes, not %u", columns, want,
                         row_bytes);
    return moe_ok();
}

/* Blocks for `row_capacity` rows in tiles of `tile_rows`, each in `columns` tiles. */
uint32_t blocks_for(const ggemm::row_groups &p, uint32_t row_capacity, uint32_t tile_rows,
                    uint32_t columns, uint32_t processors)
{
    const uint64_t tiles = (uint64_t(row_capacity) / tile_rows + p.experts) * columns;
    return uint32_t(std::min<uint64_t>(tiles, processors * BLOCKS_PER_PROCESSOR));
}

} // namespace

extern "C" moe_status moe_cuda_quantise_enqueue(const moe_cuda_quantise *q, CUstream_st *stream)
{
    int major, processors;
    if (q->dtype != MOE_DTYPE_BF16 && q->dtype != MOE_DTYPE_F32)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "quantising rows of dtype %d", int(q->dtype));
    MOE_TRY(check_range(q->experts, q->row_capacity, q->columns));
    if (q->row_bytes != 0)
        MOE_TRY(check_row_bytes(q->row_bytes, q->columns, q->whole_rows));
    MOE_TRY(tensor_map::read_device(&major, &processors));
    quantise_params p = {};
    p.start = q->start;
    p.count = q->count;
    p.experts = q->experts;
    p.n = q->whole_rows ? 1 : moe_cuda_quantised_steps(q->columns);
    p.q = *q;
    place_codes(*q, &p);
    const kernel run = kernels[q->dtype == MOE_DTYPE_F32][q->whole_rows];
    const uint32_t all = uint32_t(processors);
    const uint32_t used = q->processors == 0 || q->processors > all ? all : q->processors;
    run<<<blocks_for(p, q->row_capacity, q->whole_rows ? 1 : TILE_ROWS,
                     (p.n + TILE_GROUPS - 1) / TILE_GROUPS, used),
          THREADS, 0, stream>>>(p);
    return MOE_LAUNCHED("quantising rows");
}

extern "C" moe_status moe_cuda_unpack_enqueue(const moe_cuda_unpack *u, CUstream_st *stream)
{
    int major, processors;
    MOE_TRY(check_range(u->experts, u->row_capacity, u->columns));
    MOE_TRY(check_row_bytes(u->row_bytes, u->columns, u->whole_rows));
    MOE_TRY(tensor_map::read_device(&major, &processors));
    unpack_params p = {};
    p.start = u->start;
    p.count = u->count;
    p.experts = u->experts;
    p.n = moe_cuda_quantised_steps(u->columns);
    p.u = *u;
    p.scales_at = moe_cuda_quantised_stride(u->columns);
    p.step_scale = moe_cuda_quantised_scales(u->row_capacity);
    const uint32_t blocks =
        blocks_for(p, u->row_capacity, u->values != nullptr ? 1 : UNPACK_ROWS,
                   (p.n + UNPACK_STEPS - 1) / UNPACK_STEPS, uint32_t(processors));
    if (u->values != nullptr)
        unpack_values<<<blocks, THREADS, 0, stream>>>(p);
    else
        unpack_scales<<<blocks, THREADS, 0, stream>>>(p);
    return MOE_LAUNCHED("unpacking rows");
}

extern "C" moe_status moe_cuda_load_quantise(void)
{
    return moe_cuda_load(kernels[0][0], kernels[0][1], kernels[1][0], kernels[1][1], unpack_scales,
                         unpack_values);
}
