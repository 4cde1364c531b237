/* SPDX-License-Identifier: Apache-2.0 */
/* Describes matrices in device memory to Hopper's copy engine, from the host. Maps are of bf16 in
 * boxes of 64 columns (128 bytes, one swizzled row of a stage) by some rows, or of fp32 in boxes of
 * 32 columns. Elements outside a matrix are read as zeros and never written. */
#ifndef MOE_CUDA_TENSOR_MAP_CUH
#define MOE_CUDA_TENSOR_MAP_CUH

#include "cuda/core/check.h"

#include <cuda.h>
#include <cuda_runtime.h>

namespace tensor_map
{

constexpr uint32_t BOX_COLUMNS = 64;

/* bf16 (of_fp32: fp32) [entries][rows][columns], 16-byte aligned; columns are a multiple of 8. */
struct matrix {
    const void *data;
    uint32_t rows, columns, entries;
    uint32_t stride = 0; /* elements from row to row, a multiple of 8; 0 = columns */
};

inline bool fits_stride(uint32_t stride, uint32_t columns)
{
    return stride == 0 || (stride >= columns && stride % 8 == 0);
}

inline cuuint64_t row_bytes(const matrix &m)
{
    return cuuint64_t(m.stride != 0 ? m.stride : m.columns) * 2;
}

typedef decltype(&cuTensorMapEncodeTiled) encode_fn;

inline moe_status look_up_encoder(encode_fn *out)
{
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    MOE_TRY(MOE_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                      cudaEnableDefault, &found)));
    if (found != cudaDriverEntryPointSuccess || entry == nullptr)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the CUDA driver is too old for tensor maps");
    *out = reinterpret_cast<encode_fn>(entry);
    return moe_ok();
}

/* Asks the driver once: the function is the same for all devices. */
inline moe_status find_encoder(encode_fn *out)
{
    static encode_fn encoder = nullptr;
    static const moe_status st = look_up_encoder(&encoder);
    *out = encoder;
    return st;
}

/* sizes[rank], strides[rank - 1] in bytes, box[rank]; the first dimension is contiguous. */
inline moe_status encode(CUtensorMap *map, const matrix &m, CUtensorMapDataType type, uint32_t rank,
                         const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                         CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B)
{
    const CUtensorMapL2promotion promotion = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                 ? CU_TENSOR_MAP_L2_PROMOTION_NONE
                                                 : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    encode_fn encoder = nullptr;
    MOE_TRY(find_encoder(&encoder));
    const CUresult rc = encoder(map, type, rank, const_cast<void *>(m.data), sizes, strides, box,
                                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (rc != CUDA_SUCCESS)
        return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                         "cuTensorMapEncodeTiled: error %d for %u x %u x %u", int(rc), m.entries,
                         m.rows, m.columns);
    return moe_ok();
}

/* Boxes of one entry, at (column, row, entry). Rank 2, for matrices of one entry: (column, row). */
inline moe_status of_rows(CUtensorMap *map, const matrix &m, uint32_t box_rows, uint32_t rank)
{
    const cuuint64_t row = row_bytes(m);
    const cuuint64_t sizes[3] = {m.columns, m.rows, m.entries};
    const cuuint64_t strides[2] = {row, row * m.rows};
    const cuuint32_t box[3] = {BOX_COLUMNS, box_rows, 1};
    return encode(map, m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, sizes, strides, box);
}

/* For fp32, otherwise as of_rows with rank 3: boxes of 32 columns at (column, row, entry). */
inline moe_status of_fp32(CUtensorMap *map, const matrix &m, uint32_t box_rows)
{
    const cuuint64_t row = cuuint64_t(m.stride != 0 ? m.stride : m.columns) * sizeof(float);
    const cuuint64_t sizes[3] = {m.columns, m.rows, m.entries};
    const cuuint64_t strides[2] = {row, row * m.rows};
    const cuuint32_t box[3] = {BOX_COLUMNS / 2, box_rows, 1};
    return encode(map, m, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, sizes, strides, box);
}

/* Bytes [rows][columns], `stride` (a multiple of 16) from row to row, in boxes of 128 columns at
 * (column, row). */
inline moe_status of_bytes(CUtensorMap *map, const void *data, uint32_t rows, uint32_t columns,
                           uint32_t stride, uint32_t box_rows)
{
    const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {stride};
    const cuuint32_t box[2] = {2 * BOX_COLUMNS, box_rows};
    return encode(map, {data, rows, columns, 1}, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, sizes, strides,
                  box);
}

/* fp32 [rows][columns], columns a multiple of 4, in boxes of a part of one row, not swizzled. */
inline moe_status of_pieces(CUtensorMap *map, const float *data, uint32_t rows, uint32_t columns,
                            uint32_t box_columns)
{
    const cuuint64_t sizes[2] = {columns, rows};
    const cuuint64_t strides[1] = {columns * sizeof(float)};
    const cuuint32_t box[2] = {box_columns, 1};
    return encode(map, {data, rows, columns, 1}, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, sizes, strides,
                  box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

/* Whether `of_slabs` can describe the matrix. */
inline bool has_whole_slabs(uint32_t columns)
{
    return columns % BOX_COLUMNS == 0;
}

/* Columns in slabs of 64, so that one instruction reads `slabs` of them; in shared memory the slabs
 * follow each other. Boxes at (0, row, slab, entry); rank 3, for one entry: (0, row, slab). */
inline moe_status of_slabs(CUtensorMap *map, const matrix &m, uint32_t box_rows, uint32_t slabs,
                           uint32_t rank)
{
    const cuuint64_t row = row_bytes(m);
    const cuuint64_t sizes[4] = {BOX_COLUMNS, m.rows, m.columns / BOX_COLUMNS, m.entries};
    const cuuint64_t strides[3] = {row, BOX_COLUMNS * 2, row * m.rows};
    const cuuint32_t box[4] = {BOX_COLUMNS, box_rows, slabs, 1};
    return encode(map, m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, sizes, strides, box);
}

/* For the current device of this thread. */
inline moe_status read_device(int *major, int *processors)
{
    int device;
    MOE_TRY(MOE_CUDA(cudaGetDevice(&device)));
    MOE_TRY(MOE_CUDA(cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device)));
    return MOE_CUDA(cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device));
}

} // namespace tensor_map

#endif
