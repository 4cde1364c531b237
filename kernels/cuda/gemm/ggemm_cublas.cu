/* SPDX-License-Identifier: Apache-2.0 */
/* See ggemm_cublas.h. One product is: the addresses of all blocks, then one batched call and the
 * epilogue for each wave of blocks. Waves bound the memory of fp32 results. */
#include "cuda/gemm/ggemm_cublas.h"
#include "cuda/plan/limits.h"

#include "base/size.h"
#include "common/activation_math.h"
#include "cuda/core/load.h"
#include "cuda/core/stamp.cuh"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <dlfcn.h>
#include <new>

namespace
{

constexpr uint32_t BLOCK_ROWS = MOE_ROW_ALIGN;
constexpr uint32_t WAVE_BLOCKS = 64;                 /* 8192 rows: enough tiles to fill a device */
constexpr size_t WORKSPACE_BYTES = size_t(32) << 20; /* cuBLAS's own size on Hopper */
constexpr size_t LINE = 256;
constexpr int THREADS = 256;
constexpr int32_t NOBODY = -1;

typedef decltype(&cublasCreate_v2) create_fn;
typedef decltype(&cublasDestroy_v2) destroy_fn;
typedef decltype(&cublasSetStream_v2) set_stream_fn;
typedef decltype(&cublasSetWorkspace_v2) set_workspace_fn;
typedef decltype(&cublasSetMathMode) set_math_mode_fn;
typedef cublasStatus_t (*gemm_fn)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int,
                                  int, const void *, const void *const[], cudaDataType, int,
                                  const void *const[], cudaDataType, int, const void *,
                                  void *const[], cudaDataType, int, int, cublasComputeType_t,
                                  cublasGemmAlgo_t);

/* Addresses of one product, by block of rows. In scratch. */
struct addresses {
    const void **weights, **rows;
    void **results;
    int32_t *owner; /* expert; negative: none */
};

/* Arguments of the kernels. */
struct task {
    moe_cuda_ggemm g;
    uint32_t weight_rows; /* of an expert */
    addresses at;
    float *products; /* [WAVE_BLOCKS * BLOCK_ROWS, weight_rows], or `out` itself */
    bool in_place;   /* products is out; else each wave reuses products */
};

} // namespace

struct moe_cuda_cublas {
    void *library;
    cublasHandle_t handle;
    destroy_fn destroy;
    set_stream_fn set_stream;
    set_workspace_fn set_workspace;
    gemm_fn gemm;
};

/* ---------------------------------------------------------------------- library */

namespace
{

moe_status answer(cublasStatus_t rc, const char *what)
{
    if (rc == CUBLAS_STATUS_SUCCESS)
        return moe_ok();
    return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "cuBLAS: %s: error %d", what, int(rc));
}

#define NAME_OF_VERSION(major) "libcublas.so." #major
#define NAME_OF_LIBRARY(major) NAME_OF_VERSION(major)

moe_status load(moe_cuda_cublas *c, create_fn *create, set_math_mode_fn *set_math_mode)
{
    const char *name = NAME_OF_LIBRARY(CUBLAS_VER_MAJOR);
    c->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (c->library == nullptr)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED, "%s cannot be loaded",
                         name);
    *create = reinterpret_cast<create_fn>(dlsym(c->library, "cublasCreate_v2"));
    *set_math_mode = reinterpret_cast<set_math_mode_fn>(dlsym(c->library, "cublasSetMathMode"));
    c->destroy = reinterpret_cast<destroy_fn>(dlsym(c->library, "cublasDestroy_v2"));
    c->set_stream = reinterpret_cast<set_stream_fn>(dlsym(c->library, "cublasSetStream_v2"));
    c->set_workspace =
        reinterpret_cast<set_workspace_fn>(dlsym(c->library, "cublasSetWorkspace_v2"));
    c->gemm = reinterpret_cast<gemm_fn>(dlsym(c->library, "cublasGemmBatchedEx"));
    if (*create == nullptr || *set_math_mode == nullptr || c->destroy == nullptr ||
        c->set_stream == nullptr || c->set_workspace == nullptr || c->gemm == nullptr)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "%s lacks a function that is needed", name);
    return moe_ok();
}

moe_status open_handle(moe_cuda_cublas *c)
{
    create_fn create = nullptr;
    set_math_mode_fn set_math_mode = nullptr;
    MOE_TRY(load(c, &create, &set_math_mode));
    MOE_TRY(answer(create(&c->handle), "making a handle"));
    /* Partial sums stay fp32 even if K is split. */
    const int mode = CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    return answer(set_math_mode(c->handle, static_cast<cublasMath_t>(mode)), "choosing precision");
}

} // namespace

extern "C" moe_status moe_cuda_cublas_open(moe_cuda_cublas **out)
{
    auto *c = new (std::nothrow) moe_cuda_cublas();
    if (c == nullptr)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for cuBLAS");
    const moe_status st = open_handle(c);
    if (moe_failed(&st)) {
        moe_cuda_cublas_close(c);
        return st;
    }
    *out = c;
    return st;
}

extern "C" void moe_cuda_cublas_close(moe_cuda_cublas *c)
{
    if (c == nullptr)
        return;
    if (c->handle != nullptr)
        (void)c->destroy(c->handle);
    if (c->library != nullptr)
        (void)dlclose(c->library);
    delete c;
}

extern "C" bool moe_cuda_cublas_serves(uint32_t n, uint32_t k)
{
    return n % 8 == 0 && k % 8 == 0 && n > 0 && k > 0 && n <= INT32_MAX / 2 && k <= INT32_MAX;
}

/* ---------------------------------------------------------------------- scratch */

namespace
{

uint32_t blocks_of(uint32_t rows)
{
    return rows / BLOCK_ROWS + (rows % BLOCK_ROWS != 0);
}

/* Offsets in scratch. */
struct layout {
    size_t weights, rows, results, owner, products, bytes;
};

bool place(size_t *at, size_t *offset, size_t count, size_t each)
{
    size_t bytes;
    *offset = *at;
    return moe_size_mul(count, each, &bytes) && moe_size_add(*at, bytes, at) &&
           moe_size_round_up(*at, LINE, at);
}

/* The workspace is at offset 0. */
bool lay_out(uint32_t row_capacity, uint32_t weight_rows, bool in_place, layout *l)
{
    const size_t blocks = blocks_of(row_capacity);
    const size_t wave = blocks < WAVE_BLOCKS ? blocks : WAVE_BLOCKS;
    size_t at = WORKSPACE_BYTES, floats;
    if (!moe_size_mul(in_place ? 0 : wave * BLOCK_ROWS, weight_rows, &floats))
        return false;
    return place(&at, &l->weights, blocks, sizeof(void *)) &&
           place(&at, &l->rows, blocks, sizeof(void *)) &&
           place(&at, &l->results, blocks, sizeof(void *)) &&
           place(&at, &l->owner, blocks, sizeof(int32_t)) &&
           place(&at, &l->products, floats, sizeof(float)) && ((l->bytes = at), true);
}

bool is_in_place(bool gated, moe_dtype out_dtype)
{
    return !gated && out_dtype == MOE_DTYPE_F32;
}

} // namespace

extern "C" size_t moe_cuda_cublas_scratch_bytes(bool gated, moe_dtype out_dtype,
                                                uint32_t row_capacity, uint32_t n)
{
    layout l;
    const uint32_t weight_rows = gated ? 2 * n : n;
    return lay_out(row_capacity, weight_rows, is_in_place(gated, out_dtype), &l) ? l.bytes : 0;
}

/* ---------------------------------------------------------------------- kernels */

namespace
{

__device__ int32_t owner_of(const moe_cuda_ggemm &g, uint32_t row)
{
    for (uint32_t e = 0; e < g.experts; e++)
        if (row >= g.start[e] && row - g.start[e] < g.count[e])
            return int32_t(e);
    return NOBODY;
}

/* One thread per block of rows. Blocks without an owner use the first expert's weights. */
__global__ void write_addresses(const task t, uint32_t blocks)
{
    const uint32_t block = blockIdx.x * THREADS + threadIdx.x;
    stamp_begin(t.g.began);
    if (block >= blocks)
        return;
    const moe_cuda_ggemm &g = t.g;
    const int32_t owner = owner_of(g, block * BLOCK_ROWS);
    const size_t expert = owner == NOBODY ? 0 : size_t(owner);
    const size_t row = size_t(block) * BLOCK_ROWS;
    const size_t result = t.in_place ? row : row % (WAVE_BLOCKS * BLOCK_ROWS);
    const auto *weights = static_cast<const __nv_bfloat16 *>((*g.weights)->data);
    t.at.owner[block] = owner;
    t.at.weights[block] = weights + expert * t.weight_rows * g.k;
    t.at.rows[block] = static_cast<const __nv_bfloat16 *>(g.x) + row * g.k;
    t.at.results[block] = t.products + result * t.weight_rows;
}

__device__ void store(const moe_cuda_ggemm &g, size_t at, float v)
{
    if (g.out_dtype == MOE_DTYPE_BF16)
        static_cast<__nv_bfloat16 *>(g.out)[at] = __float2bfloat16_rn(v);
    else
        static_cast<float *>(g.out)[at] = v;
}

__device__ float activate(const moe_cuda_ggemm &g, float gate, float up)
{
    return g.activation == MOE_ACT_SITU ? moe_activate_situ(g.alpha, g.limit, gate, up)
                                        : moe_activate(g.activation, g.limit, g.alpha, gate, up);
}

/* Finishes one row: product -> row of out. */
__device__ void finish_gated(const task &t, size_t expert, const float *product, size_t row,
                             float w)
{
    const moe_cuda_ggemm &g = t.g;
    const float *bias = g.has_bias ? (*g.weights)->bias + expert * g.n : nullptr;
    const float *up_bias = g.has_bias ? (*g.weights)->up_bias + expert * g.n : nullptr;
    for (uint32_t c = threadIdx.x; c < g.n; c += THREADS) {
        float gate = w * product[c / 8 * 16 + c % 8];
        float up = w * product[c / 8 * 16 + c % 8 + 8];
        if (bias != nullptr) {
            gate += bias[c];
            up += up_bias[c];
        }
        store(g, row * g.n + c, activate(g, gate, up));
    }
}

__device__ void finish_plain(const task &t, size_t expert, const float *product, size_t row,
                             float w)
{
    const moe_cuda_ggemm &g = t.g;
    const float *bias = g.has_bias ? (*g.weights)->bias + expert * g.n : nullptr;
    for (uint32_t c = threadIdx.x; c < g.n; c += THREADS)
        store(g, row * g.n + c, w * (product[c] + (bias != nullptr ? bias[c] : 0.0f)));
}

__device__ void finish_up(const task &t, size_t expert, const float *product, size_t row, float w)
{
    const moe_cuda_ggemm &g = t.g;
    const float *bias = g.has_bias ? (*g.weights)->bias + expert * g.n : nullptr;
    for (uint32_t c = threadIdx.x; c < g.n; c += THREADS)
        store(g, row * g.n + c,
              moe_activate_relu2(w * product[c] + (bias != nullptr ? bias[c] : 0.0f)));
}

/* One CTA per row of a wave that begins at `first_row`. */
__global__ void __launch_bounds__(THREADS) finish_rows(const task t, uint32_t first_row)
{
    const moe_cuda_ggemm &g = t.g;
    const uint32_t row = first_row + blockIdx.x;
    const int32_t expert = t.at.owner[row / BLOCK_ROWS];
    if (expert == NOBODY || row - g.start[expert] >= g.count[expert])
        return;
    const bool weighs =
        g.row_weight != nullptr && (g.weighting == MOE_WEIGHT_INPUT) == (g.gated || g.relu2);
    const float w = weighs ? g.row_weight[row] : 1.0f;
    const float *product = t.products + size_t(t.in_place ? row : row - first_row) * t.weight_rows;
    if (g.gated)
        finish_gated(t, size_t(expert), product, row, w);
    else if (g.relu2)
        finish_up(t, size_t(expert), product, row, w);
    else
        finish_plain(t, size_t(expert), product, row, w);
}

/* ----------------------------------------------------------------------- launch */

moe_status check_shape(const moe_cuda_ggemm &g)
{
    if (g.experts == 0 || g.experts > MOE_CUDA_MAX_EXPERTS || g.row_capacity == 0 ||
        !moe_cuda_cublas_serves(g.n, g.k) || g.back || g.x_stride != 0 || g.out_stride != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "cuBLAS product: %u experts, %u rows, %u x %u is out of range", g.experts,
                         g.row_capacity, g.n, g.k);
    if (g.out_dtype != MOE_DTYPE_BF16 && g.out_dtype != MOE_DTYPE_F32)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_DTYPE_UNSUPPORTED,
                         "cuBLAS product: output dtype %d", int(g.out_dtype));
    return moe_ok();
}

/* Multiplies `count` blocks of `rows` rows each, from block `first`. cuBLAS is column-major: its
 * result [weight_rows] x [rows] is our row-major one, transposed. */
moe_status multiply(moe_cuda_cublas *c, const task &t, uint32_t first, uint32_t count,
                    uint32_t rows)
{
    const float one = 1.0f, zero = 0.0f;
    const int weight_rows = int(t.weight_rows), k = int(t.g.k);
    if (count == 0 || rows == 0)
        return moe_ok();
    /* The library may load its kernel here. Stricter capture modes forbid that, although the load
     * is not captured. */
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    MOE_TRY(MOE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode)));
    const cublasStatus_t rc = c->gemm(
        c->handle, CUBLAS_OP_T, CUBLAS_OP_N, weight_rows, int(rows), k, &one, t.at.weights + first,
        CUDA_R_16BF, k, t.at.rows + first, CUDA_R_16BF, k, &zero, t.at.results + first, CUDA_R_32F,
        weight_rows, int(count), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    MOE_TRY(MOE_CUDA(cudaThreadExchangeStreamCaptureMode(&mode)));
    return answer(rc, "grouped product");
}

bool needs_finish(const task &t)
{
    return !t.in_place || t.g.has_bias || t.g.relu2 ||
           (t.g.row_weight != nullptr && t.g.weighting != MOE_WEIGHT_INPUT);
}

/* Blocks [first, first + count); only the last of all may be short. */
moe_status run_wave(moe_cuda_cublas *c, const task &t, uint32_t first, uint32_t count,
                    cudaStream_t stream)
{
    const uint32_t first_row = first * BLOCK_ROWS;
    const uint32_t left = t.g.row_capacity - first_row;
    const uint32_t rows = left < count * BLOCK_ROWS ? left : count * BLOCK_ROWS;
    const uint32_t whole = rows / BLOCK_ROWS;
    MOE_TRY(multiply(c, t, first, whole, BLOCK_ROWS));
    MOE_TRY(multiply(c, t, first + whole, count - whole, rows % BLOCK_ROWS));
    if (!needs_finish(t))
        return moe_ok();
    finish_rows<<<rows, THREADS, 0, stream>>>(t, first_row);
    return MOE_LAUNCHED("finishing a product");
}

task make_task(const moe_cuda_ggemm &g, const layout &l, void *scratch)
{
    auto *base = static_cast<char *>(scratch);
    task t = {};
    t.g = g;
    t.weight_rows = g.gated ? 2 * g.n : g.n;
    t.in_place = is_in_place(g.gated, g.out_dtype);
    t.at.weights = reinterpret_cast<const void **>(base + l.weights);
    t.at.rows = reinterpret_cast<const void **>(base + l.rows);
    t.at.results = reinterpret_cast<void **>(base + l.results);
    t.at.owner = reinterpret_cast<int32_t *>(base + l.owner);
    t.products = static_cast<float *>(t.in_place ? g.out : base + l.products);
    return t;
}

} // namespace

extern "C" moe_status moe_cuda_cublas_enqueue(moe_cuda_cublas *c, const moe_cuda_ggemm *g,
                                              void *scratch, CUstream_st *stream)
{
    MOE_TRY(check_shape(*g));
    layout l;
    if (!lay_out(g->row_capacity, g->gated ? 2 * g->n : g->n, is_in_place(g->gated, g->out_dtype),
                 &l))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "cuBLAS product: %u rows do not fit in memory", g->row_capacity);
    const task t = make_task(*g, l, scratch);
    const uint32_t blocks = blocks_of(g->row_capacity);
    const uint32_t wave = t.in_place ? blocks : WAVE_BLOCKS;
    /* A new stream resets the handle's workspace. */
    MOE_TRY(answer(c->set_stream(c->handle, stream), "choosing a stream"));
    MOE_TRY(answer(c->set_workspace(c->handle, scratch, WORKSPACE_BYTES), "giving workspace"));
    write_addresses<<<(blocks + THREADS - 1) / THREADS, THREADS, 0, stream>>>(t, blocks);
    MOE_TRY(MOE_LAUNCHED("addresses of a product"));
    for (uint32_t at = 0; at < blocks; at += wave)
        MOE_TRY(run_wave(c, t, at, blocks - at < wave ? blocks - at : wave, stream));
    return moe_ok();
}

extern "C" moe_status moe_cuda_load_ggemm_cublas(void)
{
    return moe_cuda_load(write_addresses, finish_rows);
}
