/* SPDX-License-Identifier: Apache-2.0 */
/* Instances and launches of the grouped GEMM with W8A8 weights; see ggemm_w8a8.cuh. */
#include "cuda/gemm/ggemm_w8a8.cuh"

#include "cuda/core/load.h"
#include "cuda/gemm/quantise.h"
#include "cuda/gemm/tensor_map.cuh"

namespace
{

typedef void (*kernel)(const ggemm::w8a8_params);

/* [by enum class finish][quantises the results] */
const kernel kernels[4][2] = {
    {ggemm::w8a8_kernel<ggemm::finish::PLAIN, false>, nullptr},
    {ggemm::w8a8_kernel<ggemm::finish::GATED, false>,
     ggemm::w8a8_kernel<ggemm::finish::GATED, true>},
    {ggemm::w8a8_kernel<ggemm::finish::SITU, false>, ggemm::w8a8_kernel<ggemm::finish::SITU, true>},
    {ggemm::w8a8_kernel<ggemm::finish::UP, false>, ggemm::w8a8_kernel<ggemm::finish::UP, true>},
};

moe_status describe_rows(const moe_cuda_ggemm &g, ggemm::w8a8_params *p)
{
    const uint32_t stride = g.x_stride != 0 ? g.x_stride : moe_cuda_quantised_stride(g.k);
    const float *scales = g.x_scales;
    if (scales == nullptr)
        scales = reinterpret_cast<const float *>(static_cast<const uint8_t *>(g.x) +
                                                 moe_cuda_quantised_offset(g.row_capacity, g.k));
    for (uint32_t i = 0; i < ggemm::W8A8_ROWS / ggemm::W8A8_ROW_STEP; i++)
        MOE_TRY(tensor_map::of_bytes(&p->rows[i], g.x, g.row_capacity, g.k, stride,
                                     (i + 1) * ggemm::W8A8_ROW_STEP));
    return tensor_map::of_pieces(&p->row_scales, scales, moe_cuda_quantised_steps(g.k),
                                 moe_cuda_quantised_scales(g.row_capacity), ggemm::W8A8_ROWS);
}

/* Where the codes and scales of hidden rows go. */
void describe_hidden(const moe_cuda_ggemm &g, ggemm::w8a8_params *p)
{
    p->out_stride = moe_cuda_quantised_stride(g.n);
    p->out_scales = reinterpret_cast<float *>(static_cast<uint8_t *>(g.out) +
                                              moe_cuda_quantised_offset(g.row_capacity, g.n));
    p->out_scale_stride = moe_cuda_quantised_scales(g.row_capacity);
    p->pow2 = g.out_activations == MOE_ACTIVATIONS_F8_POW2;
}

} // namespace

moe_status ggemm::launch_w8a8(const params &common, const moe_cuda_ggemm &g, finish end,
                              uint32_t blocks, CUstream_st *stream)
{
    const bool quantises = g.out_activations != MOE_ACTIVATIONS_PLAIN;
    const kernel run = kernels[int(end)][quantises];
    w8a8_params p = {};
    static_cast<params &>(p) = common;
    p.packed_scale_bytes = packed::scale_bytes(g.packing);
    p.packed_row_shift = packed::row_shift(g.packing);
    if (quantises)
        describe_hidden(g, &p);
    MOE_TRY(describe_rows(g, &p));
    MOE_TRY(MOE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(run),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          int(sizeof(w8a8_shared)))));
    run<<<blocks, W8A8_THREADS, sizeof(w8a8_shared), stream>>>(p);
    return MOE_LAUNCHED("grouped GEMM in W8A8");
}

extern "C" moe_status moe_cuda_load_ggemm_w8a8(void)
{
    for (const auto &both : kernels)
        for (const kernel run : both)
            if (run != nullptr)
                MOE_TRY(moe_cuda_load(run));
    return moe_ok();
}
