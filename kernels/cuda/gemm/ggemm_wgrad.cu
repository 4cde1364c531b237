/* SPDX-License-Identifier: Apache-2.0 */
/* Host side of the weights' gradient: checks the shape, describes the operands to the copy engine
 * and launches ggemm_wgrad.cuh. */
#include "cuda/gemm/ggemm_wgrad.h"
#include "cuda/plan/limits.h"

#include "cuda/core/load.h"
#include "cuda/gemm/ggemm_wgrad.cuh"
#include "cuda/gemm/tensor_map.cuh"

#include <algorithm>

namespace
{

constexpr uint64_t MAX_TILES = UINT64_C(1) << 31; /* tile numbers are 32 bits; one grid step beyond
                                                     fits */
constexpr uint32_t WIDE = 192, NARROW = 128;      /* columns of X in a tile */

moe_status check_shape(const moe_cuda_wgrad &w)
{
    const uint64_t tall = (uint64_t(w.n) + ggemm::WGRAD_TALL - 1) / ggemm::WGRAD_TALL;
    const uint64_t wide = (uint64_t(w.k) + NARROW - 1) / NARROW;
    if (w.experts == 0 || w.experts > MOE_CUDA_MAX_EXPERTS || w.row_capacity == 0 || w.n == 0 ||
        w.k == 0 || w.n % 8 != 0 || w.k % 8 != 0 || w.row_capacity > UINT32_MAX / 2 ||
        tall * wide > MAX_TILES / w.experts || w.processors % ggemm::WGRAD_CLUSTER != 0 ||
        !tensor_map::fits_stride(w.dy_stride, w.n) || !tensor_map::fits_stride(w.x_stride, w.k))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "weights' gradient: %u experts, %u rows, %u x %u is out of range",
                         w.experts, w.row_capacity, w.n, w.k);
    return moe_ok();
}

/* A box of dY has 64 rows x 128 columns; a box of X 32 rows x a tile's columns. If slabs are not
 * whole, one box per slab. */
moe_status describe(const moe_cuda_wgrad &w, uint32_t columns, ggemm::wgrad_params *p)
{
    const tensor_map::matrix dy = {w.dy, w.row_capacity, w.n, 1, w.dy_stride};
    const tensor_map::matrix x = {w.x, w.row_capacity, w.k, 1, w.x_stride};
    const tensor_map::matrix dw = {w.dw, w.n, w.k, w.experts};
    const uint32_t slabs = columns / ggemm::DEPTH;
    p->whole_dy = tensor_map::has_whole_slabs(w.n);
    p->whole_x = tensor_map::has_whole_slabs(w.k);
    MOE_TRY(p->whole_dy ? tensor_map::of_slabs(&p->dy, dy, ggemm::DEPTH, ggemm::WGRAD_SLABS, 3)
                        : tensor_map::of_rows(&p->dy, dy, ggemm::DEPTH, 2));
    MOE_TRY(p->whole_x ? tensor_map::of_slabs(&p->x, x, ggemm::WGRAD_HALF, slabs, 3)
                       : tensor_map::of_rows(&p->x, x, ggemm::WGRAD_HALF, 2));
    return tensor_map::of_fp32(&p->dw, dw, ggemm::PIECE_ROWS);
}

uint64_t tiled(uint32_t k, uint32_t columns)
{
    return (uint64_t(k) + columns - 1) / columns * columns;
}

/* Per column, wide tiles take some 5 % less time, counting the columns past the end. With
 * accumulation, they would leave too little space for old values. */
bool takes_wide_tiles(const moe_cuda_wgrad &w)
{
    return !w.accumulate && tiled(w.k, WIDE) * 19 <= tiled(w.k, NARROW) * 20;
}

template <uint32_t COLUMNS, bool ADD>
moe_status launch(const ggemm::wgrad_params &p, int processors, CUstream_st *stream)
{
    const size_t bytes = sizeof(ggemm::wgrad_shared<COLUMNS>);
    const auto run = ggemm::wgrad_kernel<COLUMNS, ADD>;
    const unsigned blocks = unsigned(processors) / ggemm::WGRAD_CLUSTER * ggemm::WGRAD_CLUSTER;
    MOE_TRY(
        MOE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(run),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes))));
    run<<<blocks, ggemm::WGRAD_THREADS, bytes, stream>>>(p);
    return MOE_LAUNCHED("weights' gradient");
}

/* Experts first .. first + WGRAD_EXPERTS - 1, as far as there are some. */
moe_status enqueue_part(const moe_cuda_wgrad &all, uint32_t first, int processors,
                        CUstream_st *stream)
{
    moe_cuda_wgrad w = all;
    w.experts = std::min(all.experts - first, ggemm::WGRAD_EXPERTS);
    w.start += first;
    w.count += first;
    w.dw += size_t(first) * w.n * w.k;
    ggemm::wgrad_params p = {};
    const bool wide = takes_wide_tiles(w);
    MOE_TRY(describe(w, wide ? WIDE : NARROW, &p));
    p.start = w.start;
    p.count = w.count;
    p.experts = w.experts;
    p.n = w.n;
    p.k = w.k;
    if (w.accumulate)
        return launch<NARROW, true>(p, processors, stream);
    return wide ? launch<WIDE, false>(p, processors, stream)
                : launch<NARROW, false>(p, processors, stream);
}

} // namespace

extern "C" moe_status moe_cuda_wgrad_enqueue(const moe_cuda_wgrad *w, CUstream_st *stream)
{
    int major, processors;
    MOE_TRY(tensor_map::read_device(&major, &processors));
    if (major != 9)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the weights' gradient needs a Hopper GPU");
    MOE_TRY(check_shape(*w));
    if (w->processors != 0 && w->processors < uint32_t(processors))
        processors = int(w->processors);
    for (uint32_t first = 0; first < w->experts; first += ggemm::WGRAD_EXPERTS)
        MOE_TRY(enqueue_part(*w, first, processors, stream));
    return moe_ok();
}

extern "C" moe_status moe_cuda_load_ggemm_wgrad(void)
{
    return moe_cuda_load(ggemm::wgrad_kernel<WIDE, false>, ggemm::wgrad_kernel<NARROW, false>,
                         ggemm::wgrad_kernel<NARROW, true>);
}
