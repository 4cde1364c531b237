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
    const uint64_t tall = (uint64_t(w.n) + ggemm::WGRAD_TILE - 1) / ggemm::WGRAD_TILE;
    const uint64_t wide = (uint64_t(w.k) + ggemm::WGRAD_TILE - 1) / ggemm::WGRAD_TILE;
    if (w.experts == 0 || w.experts > MOE_MAX_EXPERTS || w.row_capacity == 0 || w.n == 0 ||
        w.k == 0 || w.n % 8 != 0 || w.k % 8 != 0 || w.row_capacity > UINT32_MAX / 2 ||
        tall * wide > MAX_TILES / w.experts)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "weights' gradient: %u experts, %u rows, %u x %u is out of range",
                         w.experts, w.row_capacity, w.n, w.k);
    return moe_ok();
}

/* 64 rows x 128 columns of an operand, in one box where its slabs are whole. */
moe_status describe(CUtensorMap *map, const void *data, uint32_t rows, uint32_t columns,
                    bool *whole)
{
    const tensor_map::matrix m = {data, rows, columns, 1};
    *whole = tensor_map::has_whole_slabs(columns);
    return *whole ? tensor_map::of_slabs(map, m, ggemm::DEPTH, ggemm::WGRAD_SLABS, 3)
                  : tensor_map::of_rows(map, m, ggemm::DEPTH, 2);
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
    MOE_TRY(describe(&p.dy, w->dy, w->row_capacity, w->n, &p.whole_slabs[0]));
    MOE_TRY(describe(&p.x, w->x, w->row_capacity, w->k, &p.whole_slabs[1]));
    p.start = w->start;
    p.count = w->count;
    p.experts = w->experts;
    p.n = w->n;
    p.k = w->k;
    p.accumulate = w->accumulate;
    p.dw = w->dw;
    const size_t bytes = sizeof(ggemm::wgrad_shared);
    MOE_TRY(
        MOE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(ggemm::wgrad_kernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes))));
    ggemm::wgrad_kernel<<<unsigned(processors), ggemm::WGRAD_THREADS, bytes, stream>>>(p);
    return MOE_LAUNCHED("weights' gradient");
}

extern "C" moe_status moe_cuda_load_ggemm_wgrad(void)
{
    return moe_cuda_load(ggemm::wgrad_kernel);
}
