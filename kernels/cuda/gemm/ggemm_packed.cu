/* SPDX-License-Identifier: Apache-2.0 */
/* Instances and launches of the grouped GEMM with packed weights; see ggemm_packed.cuh. */
#include "cuda/gemm/ggemm_packed.cuh"

#include "cuda/core/load.h"
#include "cuda/gemm/ggemm_packed_launch.cuh"

namespace
{

typedef void (*kernel)(const ggemm::params);

struct instance {
    kernel run[4]; /* by enum class finish */
    uint32_t threads;
    size_t shared_bytes;
};

template <class F> constexpr instance make()
{
    static_assert(sizeof(ggemm::packed_shared<F>) <= 227 * 1024 && F::STAGES >= 3,
                  "a CTA of sm_90 can have no more");
    using ggemm::finish;
    return {{ggemm::packed_kernel<F, finish::PLAIN>, ggemm::packed_kernel<F, finish::GATED>,
             ggemm::packed_kernel<F, finish::SITU>, ggemm::packed_kernel<F, finish::UP>},
            F::THREADS,
            sizeof(ggemm::packed_shared<F>)};
}

struct heights {
    instance few, many;
};

template <moe_cuda_packing P> constexpr heights make_both()
{
    constexpr uint32_t CONSUMERS = packed::has_8_bits(P) ? 2 : 4; /* of few rows */
    return {make<ggemm::packed_form<P, ggemm::PACKED_FEW, CONSUMERS>>(),
            make<ggemm::packed_form<P, ggemm::PACKED_MANY, 2>>()};
}

/* Scales of rows and of 8 rows have the same kernels. */
const heights instances[MOE_CUDA_PACKING_COUNT] = {
    {},
    make_both<MOE_CUDA_PACKING_F8_BLOCK>(),
    make_both<MOE_CUDA_PACKING_F8_BLOCK>(),
    make_both<MOE_CUDA_PACKING_F8_E8M0>(),
    make_both<MOE_CUDA_PACKING_E2M1_E8M0>(),
    make_both<MOE_CUDA_PACKING_E2M1_E4M3>(),
    make_both<MOE_CUDA_PACKING_INT4_ROW>(),
    make_both<MOE_CUDA_PACKING_INT4_GROUP>(),
    make_both<MOE_CUDA_PACKING_INT4_GROUP_ZEROS>(),
};

} // namespace

moe_status ggemm::launch_packed(params &p, moe_cuda_packing packing, moe_cuda_gemm_tile tile,
                                finish end, uint32_t blocks, CUstream_st *stream)
{
    const heights &both = instances[packing];
    const instance &use = packed_tile_rows(tile) == PACKED_FEW ? both.few : both.many;
    const kernel run = use.run[int(end)];
    p.packed_scale_bytes = packed::scale_bytes(packing);
    p.packed_row_shift = packed::row_shift(packing);
    MOE_TRY(MOE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(run),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          int(use.shared_bytes))));
    run<<<blocks, use.threads, use.shared_bytes, stream>>>(p);
    return MOE_LAUNCHED("grouped GEMM with packed weights");
}

extern "C" moe_status moe_cuda_load_ggemm_packed(void)
{
    for (const heights &both : instances)
        for (int i = 0; i < 4 && both.few.run[i] != nullptr; i++)
            MOE_TRY(moe_cuda_load(both.few.run[i], both.many.run[i]));
    return ggemm::load_packed_back();
}
