/* SPDX-License-Identifier: Apache-2.0 */
/* The exact fp32 product of grouped rows with a weight matrix: any dtypes, any shape, any device.
 *
 * Tile      64 rows x 64 weight rows x 16 columns, widened to fp32. One stage in shared memory; the
 *           next one loads into registers meanwhile.
 * Threads   256 per block, each with 4 x 4 outputs; all load and multiply.
 * Shared    2 x 4.25 KiB.
 * Registers no limit.
 *
 * Each output is one chain of multiply-adds in ascending k, so a row's bits depend on that row
 * alone. Blocks walk over the tiles; counts in device memory end the walk. */
#ifndef MOE_CUDA_SIMT_CUH
#define MOE_CUDA_SIMT_CUH

#include "cuda/gemm/packed_layout.cuh"
#include "cuda/layer/matrix.h"

#include <cuda_bf16.h>
#include <type_traits>

namespace moe_simt
{

constexpr int TILE = 64, DEPTH = 16, THREADS = 256, PER_THREAD = 4;
constexpr int PITCH = TILE + 4; /* keeps 16-byte alignment and spreads the banks */
static_assert(MOE_ROW_ALIGN % TILE == 0, "a tile holds rows of one expert only");

/* Rows in groups, one per expert. Without a table: one group of `rows` rows for entry 0. */
struct groups {
    const uint32_t *start, *count; /* as in struct moe_rows; group i uses entry i of the weights */
    uint32_t groups, rows;
};

struct tile {
    uint32_t entry;  /* of the weights */
    size_t row;      /* first row in x and out */
    uint32_t rows;   /* 1..TILE */
    uint32_t column; /* first weight row */
};

static __device__ inline uint32_t rows_in_use(const groups &g)
{
    return g.start != nullptr ? g.start[g.groups] : g.rows;
}

/* The group that owns `row`: the last one that starts at or before it and has rows. */
static __device__ inline uint32_t group_of(const groups &g, uint32_t row)
{
    uint32_t low = 0, high = g.groups;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (g.start[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* False if tile number `row_tile` is only padding. */
static __device__ inline bool find_rows(const groups &g, uint32_t row_tile, tile *t)
{
    uint32_t row = row_tile * TILE;
    t->row = row;
    t->entry = 0;
    uint32_t left = g.rows - row;
    if (g.start != nullptr) {
        uint32_t group = group_of(g, row), done = row - g.start[group];
        if (done >= g.count[group])
            return false;
        t->entry = group;
        left = g.count[group] - done;
    }
    t->rows = left < TILE ? left : TILE;
    return true;
}

/* Loads four consecutive elements of a row; zeros past its end. */
template <typename T>
static __device__ inline void load4(const T *row, uint32_t column, uint32_t columns, float *v)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = column + i < columns ? (float)row[column + i] : 0.0f;
}

/* Rows of a matrix, from `first` on. */
template <typename T> struct matrix_rows {
    const T *first;
    uint32_t columns;

    __device__ void load(uint32_t row, uint32_t column, uint32_t end, float *v) const
    {
        load4(first + (size_t)row * columns, column, end, v);
    }
};

struct packed_weights; /* as the type of weights: moe_cuda_matrix.packing tells */

template <> struct matrix_rows<packed_weights> {
    const uint8_t *entry;
    enum moe_cuda_packing packing;
    uint32_t first, columns;

    __device__ void load(uint32_t row, uint32_t column, uint32_t end, float *v) const
    {
        for (uint32_t i = 0; i < 4; i++)
            v[i] = column + i < end
                       ? packed::value(packing, entry, first + row, column + i, columns)
                       : 0.0f;
    }
};

template <typename W>
static __device__ inline matrix_rows<W> weight_rows(const moe_cuda_matrix &m, const tile &t)
{
    if constexpr (std::is_same<W, packed_weights>::value) {
        const size_t bytes = (size_t)((m.rows + packed::ROWS - 1) / packed::ROWS) *
                             ((m.columns + packed::COLUMNS - 1) / packed::COLUMNS) *
                             packed::block_bytes(m.packing);
        return {(const uint8_t *)m.data + t.entry * bytes, m.packing, t.column, m.columns};
    } else {
        return {(const W *)m.data + ((size_t)t.entry * m.rows + t.column) * m.columns, m.columns};
    }
}

struct shared {
    alignas(16) float x[DEPTH][PITCH], w[DEPTH][PITCH];
};

/* acc[i][j] += x[row + 4 ty + i] . w[column + 4 tx + j]. All threads of the block call it. */
template <typename X, typename W>
static __device__ inline void multiply(const X *x, uint32_t x_rows, W w, uint32_t w_rows,
                                       uint32_t columns, shared &s,
                                       float acc[PER_THREAD][PER_THREAD])
{
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const uint32_t r = threadIdx.x / 4, c = threadIdx.x % 4 * 4; /* this thread's loads */
    const X *x_row = x + (size_t)(r < x_rows ? r : 0) * columns;
    const uint32_t w_row = r < w_rows ? r : 0, w_columns = r < w_rows ? columns : 0;
    float xv[4], wv[4];
    load4(x_row, c, r < x_rows ? columns : 0, xv);
    w.load(w_row, c, w_columns, wv);
    for (uint32_t k = 0; k < columns; k += DEPTH) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s.x[c + i][r] = xv[i];
            s.w[c + i][r] = wv[i];
        }
        __syncthreads();
        load4(x_row, k + DEPTH + c, r < x_rows ? columns : 0, xv);
        w.load(w_row, k + DEPTH + c, w_columns, wv);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            float4 a = *(const float4 *)&s.x[d][4 * ty], b = *(const float4 *)&s.w[d][4 * tx];
            const float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    acc[i][j] = fmaf(av[i], bv[j], acc[i][j]);
        }
    }
}

/* Computes every tile of the product. All threads of the block call `epilogue(tile, acc)`. */
template <typename X, typename W, typename Epilogue>
static __device__ inline void product(const groups &g, const void *x, const moe_cuda_matrix &m,
                                      Epilogue epilogue)
{
    __shared__ shared s;
    const uint32_t row_tiles = (rows_in_use(g) + TILE - 1) / TILE;
    const uint32_t column_tiles = (m.rows + TILE - 1) / TILE;
    /* Adjacent blocks share weights. */
    for (size_t i = blockIdx.x; i < (size_t)row_tiles * column_tiles; i += gridDim.x) {
        tile t;
        if (!find_rows(g, (uint32_t)(i % row_tiles), &t))
            continue;
        t.column = (uint32_t)(i / row_tiles) * TILE;
        float acc[PER_THREAD][PER_THREAD] = {};
        uint32_t w_rows = m.rows - t.column;
        multiply((const X *)x + t.row * m.columns, t.rows, weight_rows<W>(m, t),
                 w_rows < TILE ? w_rows : TILE, m.columns, s, acc);
        epilogue(t, acc);
    }
}

} // namespace moe_simt

/* Calls `launch<X, W>(...)` for the dtypes of x and of a matrix. */
#define MOE_SIMT_DISPATCH(x_dtype, w_dtype, launch, ...)                                           \
    do {                                                                                           \
        if ((x_dtype) == MOE_DTYPE_F32 && (w_dtype) == MOE_DTYPE_F32)                              \
            launch<float, float>(__VA_ARGS__);                                                     \
        else if ((x_dtype) == MOE_DTYPE_F32)                                                       \
            launch<float, __nv_bfloat16>(__VA_ARGS__);                                             \
        else if ((w_dtype) == MOE_DTYPE_F32)                                                       \
            launch<__nv_bfloat16, float>(__VA_ARGS__);                                             \
        else                                                                                       \
            launch<__nv_bfloat16, __nv_bfloat16>(__VA_ARGS__);                                     \
    } while (0)

/* The same for packed weights. */
#define MOE_SIMT_DISPATCH_PACKED(x_dtype, launch, ...)                                             \
    do {                                                                                           \
        if ((x_dtype) == MOE_DTYPE_F32)                                                            \
            launch<float, moe_simt::packed_weights>(__VA_ARGS__);                                  \
        else                                                                                       \
            launch<__nv_bfloat16, moe_simt::packed_weights>(__VA_ARGS__);                          \
    } while (0)

#endif
