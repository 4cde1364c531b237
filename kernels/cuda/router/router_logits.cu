/* SPDX-License-Identifier: Apache-2.0 */
/* Router logits: bf16 tokens on tensor cores, everything else in exact fp32.
 *
 * Tile      64 tokens x 64 experts over one slice of 512 columns, in steps of 64 columns.
 * Warps     4, each with 16 tokens (mma.m16n8k16, fp32 accumulate); all load.
 * Stages    3, loaded by cp.async.
 * Shared    48 KiB. 16-byte chunks are xor-swizzled by row, so ldmatrix has no bank conflicts.
 * Registers no limit below 255 per thread.
 *
 * The next kernel sums slices in order. So a token's logits depend neither on its batch nor on its
 * place there, and a few tokens still use the whole device.
 *
 * An F32 router is split into three bf16 parts with w = high + middle + low to 24 bits: three
 * products with the same tokens, accumulated together. */
#include "cuda/router/router.h"

#include "cuda/core/load.h"
#include "cuda/core/stamp.cuh"
#include "cuda/layer/simt.cuh"

static constexpr int TILE = 64; /* tokens, experts, and columns of a stage */
static constexpr int STAGES = 3, WARPS = 4, THREADS = 32 * WARPS;
static constexpr int CHUNKS = TILE / 8; /* 16-byte chunks in a row of a stage */
static constexpr int SLICE = MOE_CUDA_ROUTER_SLICE;
static_assert(SLICE % TILE == 0, "stages do not cross slices");

struct logits_args {
    const moe_cuda_step_params *params;
    const __nv_bfloat16 *x;   /* [T, H] */
    moe_cuda_matrices router; /* bf16 [parts][choices][H]: 1, or 3 for an F32 router */
    uint32_t choices, hidden, parts;
    float *logits; /* [slices][T][choices] */
    uint64_t *began;
};

struct stage {
    alignas(128) __nv_bfloat16 x[TILE][TILE], w[TILE][TILE];
};

static __device__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Address of chunk `c` of row `r` of a stage's tile. */
static __device__ uint32_t chunk_address(const __nv_bfloat16 (*tile)[TILE], uint32_t r, uint32_t c)
{
    return shared_address(&tile[r][(c ^ (r % CHUNKS)) * 8]);
}

/* Loads 64 rows x 64 columns from column `k`; zeros beyond the last row or column. */
static __device__ void load_tile(const __nv_bfloat16 (*tile)[TILE], const __nv_bfloat16 *from,
                                 uint32_t rows, uint32_t hidden, uint32_t k)
{
#pragma unroll
    for (int i = 0; i < TILE * CHUNKS / THREADS; i++) {
        uint32_t at = threadIdx.x + i * THREADS, r = at / CHUNKS, c = at % CHUNKS;
        bool there = r < rows && k + 8 * c < hidden;
        const __nv_bfloat16 *src = there ? from + (size_t)r * hidden + k + 8 * c : from;
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(chunk_address(tile, r, c)),
            "l"(src), "r"(there ? 16 : 0)
            : "memory");
    }
}

static __device__ void load_fragments(uint32_t address, uint32_t v[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
}

static __device__ void multiply_add(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* acc[n]: 16 tokens of this warp x experts 8n .. 8n + 7. */
static __device__ void multiply_stage(const stage &s, float acc[TILE / 8][4])
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row = lane % 8, matrix = lane / 8; /* one of the four that ldmatrix loads */
#pragma unroll
    for (int k = 0; k < CHUNKS; k += 2) {
        uint32_t a[4];
        load_fragments(chunk_address(s.x, 16 * warp + row + matrix % 2 * 8, k + matrix / 2), a);
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
            uint32_t b[4];
            load_fragments(chunk_address(s.w, 8 * n + row + matrix / 2 * 8, k + matrix % 2), b);
            multiply_add(acc[n], a, b[0], b[1]);
            multiply_add(acc[n + 1], a, b[2], b[3]);
        }
    }
}

/* The work of one CTA: `count` stages, one part of the weights after the other. */
struct walk {
    const __nv_bfloat16 *x, *w; /* first token and first expert of the tile */
    uint32_t tokens, experts;   /* that exist from there on */
    uint32_t begin, per_part, count;
};

static __device__ void load_stage(const logits_args &a, const walk &v, uint32_t i, stage *stages)
{
    if (i < v.count) {
        uint32_t k = v.begin + i % v.per_part * TILE;
        const __nv_bfloat16 *w = v.w + (size_t)(i / v.per_part) * a.choices * a.hidden;
        load_tile(stages[i % STAGES].x, v.x, v.tokens, a.hidden, k);
        load_tile(stages[i % STAGES].w, w, v.experts, a.hidden, k);
    }
    asm volatile("cp.async.commit_group;" ::: "memory"); /* empty groups keep the count */
}

static __device__ void store_tile(const logits_args &a, uint32_t tokens, uint32_t token,
                                  uint32_t expert, const float acc[TILE / 8][4])
{
    const uint32_t lane = threadIdx.x % 32;
    float *out = a.logits + (size_t)blockIdx.z * tokens * a.choices;
    token += threadIdx.x / 32 * 16 + lane / 4;
    expert += lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t t = token + i / 2 * 8, e = expert + 8 * n + i % 2;
            if (t < tokens && e < a.choices)
                out[(size_t)t * a.choices + e] = acc[n][i];
        }
}

static __global__ void __launch_bounds__(THREADS) tensor_logits_kernel(const logits_args a)
{
    extern __shared__ stage stages[];
    const uint32_t token = blockIdx.y * TILE, expert = blockIdx.x * TILE;
    const uint32_t tokens = a.params->tokens;
    stamp_begin(a.began);
    if (token >= tokens || !a.params->need_logits)
        return;
    walk v;
    v.x = a.x + (size_t)token * a.hidden;
    v.w = (const __nv_bfloat16 *)a.params->layer->matrix[a.router].data + (size_t)expert * a.hidden;
    v.tokens = tokens - token;
    v.experts = a.choices - expert;
    v.begin = blockIdx.z * SLICE;
    uint32_t columns = a.hidden - v.begin < SLICE ? a.hidden - v.begin : SLICE;
    v.per_part = (columns + TILE - 1) / TILE;
    v.count = v.per_part * a.parts;

    float acc[TILE / 8][4] = {};
    for (uint32_t i = 0; i < STAGES - 1; i++)
        load_stage(a, v, i, stages);
    for (uint32_t i = 0; i < v.count; i++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load_stage(a, v, i + STAGES - 1, stages); /* reuses the stage read before */
        multiply_stage(stages[i % STAGES], acc);
    }
    store_tile(a, tokens, token, expert, acc);
}

static struct moe_status launch_tensor_logits(const struct moe_layer *layer,
                                              const struct moe_cuda_routing *r, cudaStream_t stream)
{
    const bool in_parts = layer->desc.matrix[MOE_CUDA_ROUTER_PARTS].data != nullptr;
    const moe_cuda_matrices router = in_parts ? MOE_CUDA_ROUTER_PARTS : MOE_CUDA_ROUTER;
    const moe_cuda_matrix &m = layer->desc.matrix[router];
    logits_args a = {
        r->params, (const __nv_bfloat16 *)r->x, router, m.rows, m.columns, m.entries, r->logits,
        r->began};
    dim3 grid((m.rows + TILE - 1) / TILE, (r->capacity + TILE - 1) / TILE,
              moe_cuda_router_slices(layer, r->dtype));
    tensor_logits_kernel<<<grid, THREADS, STAGES * sizeof(stage), stream>>>(a);
    return MOE_LAUNCHED("router logits");
}

/* ----------------------------------------------------------------------- exact */

template <typename X, typename W>
static __global__ void __launch_bounds__(moe_simt::THREADS)
    logits_kernel(const moe_cuda_step_params *params, const void *x, float *logits, uint64_t *began)
{
    using moe_simt::PER_THREAD;
    stamp_begin(began);
    if (!params->need_logits)
        return;
    moe_simt::groups g = {};
    g.rows = params->tokens;
    const moe_cuda_matrix m = params->layer->matrix[MOE_CUDA_ROUTER];
    moe_simt::product<X, W>(g, x, m, [&](const moe_simt::tile &t, float acc[][PER_THREAD]) {
        const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
        for (uint32_t i = 0; i < PER_THREAD && 4 * ty + i < t.rows; i++)
            for (uint32_t j = 0; j < PER_THREAD; j++) {
                uint32_t column = t.column + 4 * tx + j;
                if (column < m.rows)
                    logits[(t.row + 4 * ty + i) * m.rows + column] = acc[i][j];
            }
    });
}

template <typename X, typename W>
static void launch_logits(const moe_cuda_routing *r, unsigned blocks, cudaStream_t stream)
{
    logits_kernel<X, W>
        <<<blocks, moe_simt::THREADS, 0, stream>>>(r->params, r->x, r->logits, r->began);
}

struct moe_status moe_cuda_router_logits(const struct moe_layer *layer,
                                         const struct moe_cuda_routing *r, cudaStream_t stream)
{
    if (moe_cuda_router_on_tensor_cores(layer, r->dtype))
        return launch_tensor_logits(layer, r, stream);
    MOE_SIMT_DISPATCH(r->dtype, layer->desc.matrix[MOE_CUDA_ROUTER].dtype, launch_logits, r,
                      2 * (unsigned)layer->device->multiprocessors, stream);
    return MOE_LAUNCHED("router logits");
}

struct moe_status moe_cuda_load_router_logits(void)
{
    return moe_cuda_load(tensor_logits_kernel, logits_kernel<float, float>,
                         logits_kernel<float, __nv_bfloat16>, logits_kernel<__nv_bfloat16, float>,
                         logits_kernel<__nv_bfloat16, __nv_bfloat16>);
}
