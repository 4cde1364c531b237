/* SPDX-License-Identifier: Apache-2.0 */
/* See train_gemm.h. Tiles of 64 x 64 by 256 threads, 4 x 4 each, slices of 16 in shared memory, as
 * in simt.cuh; only the source of the operands differs. */
#include "cuda/training/train_gemm.h"

#include "cuda/core/load.h"
#include "cuda/layer/simt.cuh"

namespace
{

using moe_simt::DEPTH;
using moe_simt::PER_THREAD;
using moe_simt::THREADS;
using moe_simt::TILE;

constexpr unsigned MAX_BLOCKS = 132 * 16;

moe_simt::groups groups_of(const struct moe_cuda_row_groups &r)
{
    return {r.start, r.count, r.groups, r.rows};
}

/* One 16-deep slice of both operands: s.x[d][i] and s.w[d][j]. */
__device__ void multiply_slice(const moe_simt::shared &s, float acc[PER_THREAD][PER_THREAD])
{
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        float4 a = *reinterpret_cast<const float4 *>(&s.x[d][4 * ty]);
        float4 b = *reinterpret_cast<const float4 *>(&s.w[d][4 * tx]);
        const float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
            for (int j = 0; j < PER_THREAD; j++)
                acc[i][j] = fmaf(av[i], bv[j], acc[i][j]);
    }
}

/* to[d][i] = from[(first + d) * stride + column + i]: a slice with its depth over rows. Rows from
 * `rows` on, columns from `columns` on, and rows that `use` excludes are zeros. */
template <typename T>
__device__ void load_down(const T *from, size_t stride, uint32_t first, uint32_t rows,
                          uint32_t column, uint32_t columns, const uint8_t *use,
                          float (*to)[moe_simt::PITCH])
{
    const uint32_t d = threadIdx.x / 16, i = threadIdx.x % 16 * 4;
    const uint32_t row = first + d;
    const bool counts = row < rows && (use == nullptr || use[row] != 0);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t c = column + i + j;
        to[d][i + j] = counts && c < columns ? static_cast<float>(from[row * stride + c]) : 0.0f;
    }
}

/* to[d][i] = from[i * stride + column + d]: a slice with its depth along rows. */
template <typename T>
__device__ void load_along(const T *from, size_t stride, uint32_t rows, uint32_t column,
                           uint32_t columns, float (*to)[moe_simt::PITCH])
{
    const uint32_t i = threadIdx.x / 4, d = threadIdx.x % 4 * 4;
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t c = column + d + j;
        bool inside = i < rows && c < columns;
        to[d + j][i] = inside ? static_cast<float>(from[i * stride + c]) : 0.0f;
    }
}

/* ------------------------------------------------------------------- dgrad */

__device__ void store_dgrad(const struct moe_cuda_exact_dx &g, const moe_simt::tile &t,
                            const float acc[PER_THREAD][PER_THREAD])
{
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (int i = 0; i < PER_THREAD; i++) {
        uint32_t r = 4 * ty + i;
        if (r >= t.rows)
            continue;
        const bool counts = g.rows.use == nullptr || g.rows.use[t.row + r] != 0;
        for (int j = 0; j < PER_THREAD; j++) {
            uint32_t column = t.column + 4 * tx + j;
            if (column >= g.k)
                continue;
            float *out = g.out + (t.row + r) * g.out_stride + column;
            if (g.add && counts)
                *out += acc[i][j];
            else if (!g.add)
                *out = counts ? acc[i][j] : 0.0f;
        }
    }
}

/* g.w, as rows of n. */
template <class Product> moe_cuda_matrix matrix_of(const Product &g)
{
    moe_cuda_matrix m = {};
    m.data = const_cast<void *>(g.w);
    m.dtype = g.w_dtype;
    m.packing = g.packing;
    m.entries = g.rows.groups;
    m.rows = g.n;
    m.columns = g.k;
    return m;
}

/* to[d][i] = w[first + d][column + i]; zeros from `rows` and `columns` on. */
template <typename W>
__device__ void load_weights(const moe_simt::matrix_rows<W> &w, uint32_t first, uint32_t rows,
                             uint32_t column, uint32_t columns, float (*to)[moe_simt::PITCH])
{
    const uint32_t row = first + threadIdx.x / 16, i = threadIdx.x % 16 * 4;
    w.load(row < rows ? row : 0, column + i, row < rows ? columns : 0, &to[threadIdx.x / 16][i]);
}

template <typename Y, typename W>
__global__ void __launch_bounds__(THREADS)
    dgrad_kernel(const struct moe_cuda_exact_dx g, const moe_simt::groups groups,
                 const moe_cuda_matrix m)
{
    __shared__ moe_simt::shared s;
    const uint32_t row_tiles = (moe_simt::rows_in_use(groups) + TILE - 1) / TILE;
    const uint32_t column_tiles = (g.k + TILE - 1) / TILE;
    for (size_t i = blockIdx.x; i < static_cast<size_t>(row_tiles) * column_tiles; i += gridDim.x) {
        moe_simt::tile t;
        if (!moe_simt::find_rows(groups, static_cast<uint32_t>(i % row_tiles), &t))
            continue;
        t.column = 0; /* of the weights: all of their rows */
        const auto w = moe_simt::weight_rows<W>(m, t);
        t.column = static_cast<uint32_t>(i / row_tiles) * TILE;
        const Y *y = static_cast<const Y *>(g.y) + t.row * g.n;
        float acc[PER_THREAD][PER_THREAD] = {};
        for (uint32_t n = 0; n < g.n; n += DEPTH) {
            __syncthreads();
            load_along(y, g.n, t.rows, n, g.n, s.x);
            load_weights<W>(w, n, g.n, t.column, g.k, s.w);
            __syncthreads();
            multiply_slice(s, acc);
        }
        store_dgrad(g, t, acc);
    }
}

unsigned blocks_for(uint32_t rows, uint32_t columns, uint32_t entries)
{
    size_t tiles =
        (static_cast<size_t>(rows + TILE - 1) / TILE) * ((columns + TILE - 1) / TILE) * entries;
    return static_cast<unsigned>(tiles < MAX_BLOCKS ? tiles : MAX_BLOCKS);
}

template <typename Y, typename W>
void launch_dgrad(const struct moe_cuda_exact_dx &g, cudaStream_t stream)
{
    dgrad_kernel<Y, W><<<blocks_for(g.rows.rows, g.k, 1), THREADS, 0, stream>>>(
        g, groups_of(g.rows), matrix_of(g));
}

/* ------------------------------------------------------------------- wgrad */

template <typename Y, typename X>
__global__ void __launch_bounds__(THREADS) wgrad_kernel(const struct moe_cuda_exact_dw g)
{
    __shared__ moe_simt::shared s;
    const uint32_t n_tiles = (g.n + TILE - 1) / TILE, k_tiles = (g.k + TILE - 1) / TILE;
    const size_t tiles = static_cast<size_t>(n_tiles) * k_tiles * g.rows.groups;
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (size_t i = blockIdx.x; i < tiles; i += gridDim.x) {
        const uint32_t k0 = static_cast<uint32_t>(i % k_tiles) * TILE;
        const uint32_t n0 = static_cast<uint32_t>(i / k_tiles % n_tiles) * TILE;
        const size_t entry = i / k_tiles / n_tiles;
        const uint32_t first = g.rows.start != nullptr ? g.rows.start[entry] : 0;
        const uint32_t count = g.rows.start != nullptr ? g.rows.count[entry] : g.rows.rows;
        const Y *y = static_cast<const Y *>(g.y) + static_cast<size_t>(first) * g.n;
        const X *x = static_cast<const X *>(g.x) + static_cast<size_t>(first) * g.k;
        float acc[PER_THREAD][PER_THREAD] = {};
        for (uint32_t row = 0; row < count; row += DEPTH) {
            __syncthreads();
            load_down(y, g.n, row, count, n0, g.n, g.rows.use, s.x);
            load_down(x, g.k, row, count, k0, g.k, g.rows.use, s.w);
            __syncthreads();
            multiply_slice(s, acc);
        }
        if (count == 0)
            continue;
        for (int a = 0; a < PER_THREAD; a++)
            for (int b = 0; b < PER_THREAD; b++) {
                uint32_t n = n0 + 4 * ty + a, k = k0 + 4 * tx + b;
                if (n < g.n && k < g.k)
                    g.out[(entry * g.n + n) * g.k + k] += g.scale * acc[a][b];
            }
    }
}

template <typename Y, typename X>
void launch_wgrad(const struct moe_cuda_exact_dw &g, cudaStream_t stream)
{
    wgrad_kernel<Y, X><<<blocks_for(g.n, g.k, g.rows.groups), THREADS, 0, stream>>>(g);
}

/* ----------------------------------------------------------------- product */

template <typename X, typename W>
__global__ void __launch_bounds__(THREADS)
    product_kernel(const struct moe_cuda_exact_xw g, const moe_simt::groups groups,
                   const moe_cuda_matrix m)
{
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    moe_simt::product<X, W>(groups, g.x, m, [&](const moe_simt::tile &t, const auto &acc) {
        for (int i = 0; i < PER_THREAD; i++)
            for (int j = 0; j < PER_THREAD; j++) {
                uint32_t r = 4 * ty + i, n = t.column + 4 * tx + j;
                if (r < t.rows && n < g.n)
                    g.out[(t.row + r) * g.n + n] = acc[i][j];
            }
    });
}

template <typename X, typename W>
void launch_product(const struct moe_cuda_exact_xw &g, cudaStream_t stream)
{
    product_kernel<X, W><<<blocks_for(g.rows.rows, g.n, 1), THREADS, 0, stream>>>(
        g, groups_of(g.rows), matrix_of(g));
}

/* -------------------------------------------------------------- column sum */

constexpr uint32_t SUM_THREADS = 128;

template <typename Y> __global__ void column_sum_kernel(const struct moe_cuda_column_sum g)
{
    const uint32_t n = blockIdx.x * SUM_THREADS + threadIdx.x, entry = blockIdx.y;
    const uint32_t first = g.rows.start != nullptr ? g.rows.start[entry] : 0;
    const uint32_t count = g.rows.start != nullptr ? g.rows.count[entry] : g.rows.rows;
    if (n >= g.n || count == 0)
        return;
    const Y *y =
        static_cast<const Y *>(g.y) + n / MOE_CUDA_INTERLEAVE * g.step + n % MOE_CUDA_INTERLEAVE;
    float sum = 0;
    for (size_t row = first; row < static_cast<size_t>(first) + count; row++)
        if (g.rows.use == nullptr || g.rows.use[row] != 0)
            sum = fmaf(g.weight != nullptr ? g.weight[row] : 1.0f,
                       static_cast<float>(y[row * g.stride]), sum);
    g.out[static_cast<size_t>(entry) * g.n + n] += sum;
}

} // namespace

struct moe_status moe_cuda_exact_dgrad(const struct moe_cuda_exact_dx *g, cudaStream_t stream)
{
    if (g->rows.rows == 0 || g->rows.groups == 0 || g->k == 0)
        return moe_ok();
    if (g->packing != MOE_CUDA_PACKING_NONE)
        MOE_SIMT_DISPATCH_PACKED(g->y_dtype, launch_dgrad, *g, stream);
    else
        MOE_SIMT_DISPATCH(g->y_dtype, g->w_dtype, launch_dgrad, *g, stream);
    return MOE_LAUNCHED("dgrad");
}

struct moe_status moe_cuda_exact_wgrad(const struct moe_cuda_exact_dw *g, cudaStream_t stream)
{
    if (g->rows.rows == 0 || g->rows.groups == 0 || g->n == 0 || g->k == 0)
        return moe_ok();
    MOE_SIMT_DISPATCH(g->y_dtype, g->x_dtype, launch_wgrad, *g, stream);
    return MOE_LAUNCHED("wgrad");
}

struct moe_status moe_cuda_exact_product(const struct moe_cuda_exact_xw *g, cudaStream_t stream)
{
    if (g->rows.rows == 0 || g->rows.groups == 0 || g->n == 0)
        return moe_ok();
    if (g->packing != MOE_CUDA_PACKING_NONE)
        MOE_SIMT_DISPATCH_PACKED(g->x_dtype, launch_product, *g, stream);
    else
        MOE_SIMT_DISPATCH(g->x_dtype, g->w_dtype, launch_product, *g, stream);
    return MOE_LAUNCHED("a product");
}

struct moe_status moe_cuda_exact_column_sum(const struct moe_cuda_column_sum *g,
                                            cudaStream_t stream)
{
    if (g->rows.rows == 0 || g->rows.groups == 0 || g->n == 0)
        return moe_ok();
    dim3 grid((g->n + SUM_THREADS - 1) / SUM_THREADS, g->rows.groups);
    if (g->y_dtype == MOE_DTYPE_BF16)
        column_sum_kernel<__nv_bfloat16><<<grid, SUM_THREADS, 0, stream>>>(*g);
    else
        column_sum_kernel<float><<<grid, SUM_THREADS, 0, stream>>>(*g);
    return MOE_LAUNCHED("column sums");
}

template <typename A, typename B> static struct moe_status load_pair()
{
    return moe_cuda_load(dgrad_kernel<A, B>, wgrad_kernel<A, B>, product_kernel<A, B>);
}

template <typename A> static struct moe_status load_packed()
{
    return moe_cuda_load(dgrad_kernel<A, moe_simt::packed_weights>,
                         product_kernel<A, moe_simt::packed_weights>);
}

struct moe_status moe_cuda_load_train_gemm(void)
{
    MOE_TRY((load_pair<float, float>()));
    MOE_TRY((load_pair<float, __nv_bfloat16>()));
    MOE_TRY((load_pair<__nv_bfloat16, float>()));
    MOE_TRY((load_pair<__nv_bfloat16, __nv_bfloat16>()));
    MOE_TRY((load_packed<float>()));
    MOE_TRY((load_packed<__nv_bfloat16>()));
    return moe_cuda_load(column_sum_kernel<float>, column_sum_kernel<__nv_bfloat16>);
}
