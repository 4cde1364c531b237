/* Host side of the weights' gradient: checks the shape, describes the operands to the copy engine
 * and launches ggemm_wgrad.cuh. */
#include "cuda/ggemm_wgrad.h"

#include "cuda/load.h"
#include "ggemm_wgrad.cuh"
#include "tensor_map.cuh"

namespace
{

constexpr uint64_t MAX_TILES = UINT64_C(1) << 31; /* tile numbers are 32 bits, with room to step */

moe_status check_shape(const moe_cuda_wgrad &w)
{
    const uint64_t tall = (uint64_t(w.n) + ggemm::WGRAD_TALL - 1) / ggemm::WGRAD_TALL;
    const uint64_t wide = (uint64_t(w.k) + ggemm::WGRAD_TILE - 1) / ggemm::WGRAD_TILE;
    if (w.experts == 0 || w.experts > MOE_MAX_EXPERTS || w.row_capacity == 0 || w.n == 0 ||
        w.k == 0 || w.n % 8 != 0 || w.k % 8 != 0 || w.row_capacity > UINT32_MAX / 2 ||
        tall * wide > MAX_TILES / w.experts || !tensor_map::fits_stride(w.dy_stride, w.n) ||
        !tensor_map::fits_stride(w.x_stride, w.k))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "weights' gradient: %u experts, %u rows, %u x %u is out of range",
                         w.experts, w.row_capacity, w.n, w.k);
    return moe_ok();
}

/* dY comes 64 rows x 128 columns at a time, in one box where its slabs are whole; X in slabs. */
moe_status describe_operands(const moe_cuda_wgrad &w, ggemm::wgrad_params *p)
{
    const tensor_map::matrix dy = {w.dy, w.row_capacity, w.n, 1, w.dy_stride};
    const tensor_map::matrix x = {w.x, w.row_capacity, w.k, 1, w.x_stride};
    p->whole_slabs = tensor_map::has_whole_slabs(w.n);
    MOE_TRY(p->whole_slabs ? tensor_map::of_slabs(&p->dy, dy, ggemm::DEPTH, ggemm::WGRAD_SLABS, 3)
                           : tensor_map::of_rows(&p->dy, dy, ggemm::DEPTH, 2));
    return tensor_map::of_rows(&p->x, x, ggemm::DEPTH, 2);
}

} // namespace

extern "C" moe_status moe_cuda_wgrad_enqueue(const moe_cuda_wgrad *w, CUstream_st *stream)
{
    int major, processors;
    MOE_TRY(tensor_map::device_facts(&major, &processors));
    if (major != 9)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the weights' gradient needs a Hopper GPU");
    MOE_TRY(check_shape(*w));
    ggemm::wgrad_params p = {};
    MOE_TRY(describe_operands(*w, &p));
    p.start = w->start;
    p.count = w->count;
    p.experts = w->experts;
    p.n = w->n;
    p.k = w->k;
    p.accumulate = w->accumulate;
    p.dw = w->dw;
    const size_t bytes = sizeof(ggemm::wgrad_shared);
    const auto run = w->accumulate ? ggemm::wgrad_kernel<true> : ggemm::wgrad_kernel<false>;
    const unsigned blocks = unsigned(processors) / ggemm::WGRAD_CLUSTER * ggemm::WGRAD_CLUSTER;
    MOE_TRY(
        MOE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(run),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes))));
    run<<<blocks, ggemm::WGRAD_THREADS, bytes, stream>>>(p);
    return MOE_LAUNCHED("weights' gradient");
}

extern "C" moe_status moe_cuda_load_ggemm_wgrad(void)
{
    return moe_cuda_load(ggemm::wgrad_kernel<false>, ggemm::wgrad_kernel<true>);
}
