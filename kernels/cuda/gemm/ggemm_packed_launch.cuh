/* SPDX-License-Identifier: Apache-2.0 */
/* What the host side of the grouped GEMM knows of its kernels for packed weights
 * (ggemm_packed.cuh, ggemm_w8a8.cuh), which are compiled on their own. */
#ifndef MOE_CUDA_GGEMM_PACKED_LAUNCH_CUH
#define MOE_CUDA_GGEMM_PACKED_LAUNCH_CUH

#include "cuda/gemm/ggemm_params.cuh"

namespace ggemm
{

/* Rows of a tile. */
constexpr uint32_t PACKED_FEW = 32, PACKED_MANY = 128;

constexpr uint32_t packed_tile_rows(moe_cuda_gemm_tile tile)
{
    return tile == MOE_CUDA_TILE_DECODE ? PACKED_FEW : PACKED_MANY;
}

/* Heights of boxes that read rows: 8, 16, ... of few rows, 32, 64, ... of many. */
constexpr uint32_t packed_row_step(uint32_t rows)
{
    return rows == PACKED_FEW ? 8 : 32;
}

constexpr uint32_t packed_boxes(uint32_t rows)
{
    return rows / packed_row_step(rows);
}

/* Fills the packed fields of `p`. */
moe_status launch_packed(params &p, moe_cuda_packing packing, moe_cuda_gemm_tile tile, finish end,
                         uint32_t blocks, CUstream_st *stream);

/* The same for the product with W. */
moe_status launch_packed_back(params &p, moe_cuda_packing packing, uint32_t blocks,
                              CUstream_st *stream);
moe_status load_packed_back(); /* its kernels, for moe_cuda_load_ggemm_packed */

/* The same for W8A8. `common` lacks maps of rows. */
moe_status launch_w8a8(const params &common, const moe_cuda_ggemm &g, finish end, uint32_t blocks,
                       CUstream_st *stream);

} // namespace ggemm

#endif
