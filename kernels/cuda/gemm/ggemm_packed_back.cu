/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient of rows with weights that stay quantised: the product x W of rows with the packed
 * matrix W, not W^T.
 *
 * W^T is the instruction's 64-row operand. Packed blocks have W in the order of that operand; each
 * of its 8 x 8 pieces is transposed between the registers of a warp. So both products read the same
 * bytes. Two to four pieces share a word, and are transposed together before they are widened. Then
 * a register has elements of two rows of W, and two scales multiply them. Where scales are fp32,
 * the result is rounded to bf16: a weight decoded to bf16 has the same bits.
 *
 * Each output is one chain of sums in ascending rows of W, whatever the number of rows is.
 *
 * Tiles     256 columns of W x up to 96 rows x 128 rows of W. 3 or 4 stages in flight.
 * Warps     two warpgroups with 128 columns each: a warp has 32 of them, 16 for each of two
 *           instructions. All read the same rows. The first warp of the third warpgroup issues
 *           loads to the copy engine and lists the tiles.
 * Shared    up to 227 KB: one block per SM, persistent.
 * Registers per thread: 240 in two consumers and 24 in the last warpgroup. For 128 rows they do
 *           not suffice.
 *
 * Operands of 16 rows of W are in flight while the next 16 are converted. */
#include "cuda/core/load.h"
#include "cuda/gemm/ggemm_packed.cuh"

#include <cuda_fp16.h>

namespace ggemm
{

struct back {
    static constexpr uint32_t DEPTH = 16;                  /* rows of W of one instruction */
    static constexpr uint32_t APART = packed::COLUMNS / 4; /* columns from warp to warp */
    static constexpr uint32_t TILES = APART / STORE_ROWS;  /* instructions that share rows */
};

/* A kernel's elements and kind of scales (any packing that has them). */
template <moe_cuda_packing PACKING> struct back_form {
    static constexpr moe_cuda_packing P = PACKING;
    static constexpr uint32_t ROWS = 96, CONSUMERS = 2;
    static constexpr uint32_t THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr uint32_t BLOCKS = CONSUMERS, COLUMNS = BLOCKS * packed::COLUMNS;
    static constexpr uint32_t BLOCK =
        (packed::element_bytes(P) + packed::max_scale_bytes(P) + 127) / 128 * 128;
    static constexpr uint32_t CHUNK = 64; /* rows that are stored together */
    static constexpr uint32_t STAGING = CONSUMERS * CHUNK * CHUNK_ROW_BYTES;
    static constexpr uint32_t STAGE = PACKED_HALVES * ROWS * DEPTH_BYTES + BLOCKS * BLOCK;
    static constexpr uint32_t TABLES = 4 * (MOE_CUDA_MAX_EXPERTS + 1) + 1024;
    static constexpr uint32_t STAGES = (227 * 1024 - STAGING - TABLES) / (STAGE + 16);
    static constexpr uint32_t ROW_STEP = packed_row_step(ROWS);
    static constexpr int REGISTERS = 240, REGISTERS_LEFT = 24;
    static_assert(REGISTERS * CONSUMERS + REGISTERS_LEFT <=
                      65536 / THREADS / 8 * 8 * (CONSUMERS + 1),
                  "else a consumer waits for registers for ever");
    using walk = tile_walk<ROWS, COLUMNS, ROW_GRAIN>;
};

/* ---------------------------------------------------------------------- operands */

/* Rounds two products to bf16. */
__device__ __forceinline__ uint32_t round_two(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* The product of two bf16 with `by`, each rounded once. */
__device__ __forceinline__ uint32_t multiply_two(uint32_t pair, float2 by)
{
    return round_two(__uint_as_float(pair << 16) * by.x, __uint_as_float(pair & 0xffff0000) * by.y);
}

/* Two E4M3, the low byte first. */
__device__ __forceinline__ float2 two_e4m3(uint32_t bytes)
{
    __half2 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
        : "=r"(reinterpret_cast<uint32_t &>(halves))
        : "h"(uint16_t(bytes)));
    return __half22float2(halves);
}

/* Two E4M3 pairs of a word (packed_layout.cuh) times `by`, each product rounded once. */
__device__ __forceinline__ void multiply_e4m3(uint32_t word, float2 by, uint32_t &first,
                                              uint32_t &second)
{
    const float2 low = two_e4m3(word), high = two_e4m3(word >> 16); /* second pair, first pair */
    first = round_two(low.y * by.x, high.y * by.y);
    second = round_two(low.x * by.x, high.x * by.y);
}

/* A scale from bits 20 .. 27 of packed::join_bytes, with bits of its neighbours around. */
__device__ __forceinline__ float e4m3_scale(uint32_t joined)
{
    return __uint_as_float((joined & 0x0ff00000) + (118 << 23));
}

/* 8 x 8 elements of 16 bits of a warp, transposed: a thread's two columns of a row become two rows
 * of a column. */
__device__ __forceinline__ uint32_t transpose(uint32_t piece)
{
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(piece));
    return r;
}

/* pair: four pairs of a word with 4-bit elements, transposed. The halves of a word have the first
 * and the second elements of all pairs, so few transpositions suffice. */
template <moe_cuda_packing P>
__device__ __forceinline__ void transpose_4_bits(uint32_t word, uint32_t (&pair)[4])
{
    if constexpr (packed::is_int4(P)) {
        widen_int4(transpose(word), pair);
    } else { /* bits of the last two pairs are in both halves */
        uint32_t own[4];
        packed::widen_e2m1(word, own);
        const uint32_t first = transpose(word), last = transpose(own[2] | own[3] >> 4);
        pair[0] = first & packed::E2M1_BITS;
        pair[1] = first << 4 & packed::E2M1_BITS;
        pair[2] = last & packed::E2M1_BITS;
        pair[3] = last << 4 & packed::E2M1_BITS;
    }
}

/* a[0], a[1], a[4], a[5]: 8 columns each, `warp` counts 32, of rows `row` (even) and row + 1.
 * Multiplies them by their scales. */
template <moe_cuda_packing P>
__device__ __forceinline__ void apply_row_scales(const uint8_t *scales, uint32_t row, uint32_t warp,
                                                 uint32_t *a)
{
    const auto *words = reinterpret_cast<const uint32_t *>(scales);
    if constexpr (P == MOE_CUDA_PACKING_E2M1_E4M3) {
        constexpr uint32_t E2M1_BIAS = 0x7e807e80; /* 2^126 */
        const float global = *reinterpret_cast<const float *>(scales + packed::global_offset(row));
        const uint32_t *word = words + row * 2 + warp / 2;
        const uint32_t turn = warp % 2 * 8;
        const uint32_t one = __funnelshift_l(word[0], word[0], turn);
        const uint32_t two = __funnelshift_l(word[2], word[2], turn);
        const float2 by = {global * e4m3_scale(one << 16), global * e4m3_scale(two << 16)};
        const float2 then = {global * e4m3_scale(one), global * e4m3_scale(two)};
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            a[i] = multiply_two(scale_pair(a[i], E2M1_BIAS), by);
            a[4 + i] = multiply_two(scale_pair(a[4 + i], E2M1_BIAS), then);
        }
    } else if constexpr (packed::joins_scales(P)) {
        const uint2 word = *reinterpret_cast<const uint2 *>(words + row);
        const uint32_t turn = warp / 2 * 8, shift = warp % 2 * 16;
        const uint32_t one = __funnelshift_l(word.x, word.x, turn) >> shift;
        const uint32_t two = __funnelshift_l(word.y, word.y, turn) >> shift;
        const uint32_t by = __byte_perm(one, two, 0x5410) & 0x7f807f80;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            a[i] = scale_pair(a[i], by);
            a[4 + i] = scale_pair(a[4 + i], by);
        }
    } else { /* INT4: the second and the fourth pair are 16 times as large */
        uint32_t by;
        if constexpr (P == MOE_CUDA_PACKING_INT4_ROW) {
            const float2 fp32 = *reinterpret_cast<const float2 *>(words + row);
            by = scale_pair(round_two(fp32.x, fp32.y), INT4_SCALE);
        } else {
            const auto *bf16 = reinterpret_cast<const uint16_t *>(scales) + row * 4 + warp;
            by = bf16[0] | uint32_t(bf16[4]) << 16;
        }
        const uint32_t sixteenth = scale_pair(by, INT4_SIXTEENTH);
        if constexpr (P == MOE_CUDA_PACKING_INT4_GROUP) {
            const uint32_t minus = scale_pair(by, INT4_ZERO);
#pragma unroll
            for (uint32_t i = 0; i < 8; i += 4) {
                a[i] = scale_add_pair(a[i], by, minus);
                a[i + 1] = scale_add_pair(a[i + 1], sixteenth, minus);
            }
        } else {
            const uint32_t zeros = scales[packed::zero_offset(P, row, 32 * warp)] |
                                   scales[packed::zero_offset(P, row + 1, 32 * warp)] << 16;
#pragma unroll
            for (uint32_t i = 0; i < 8; i += 4) {
                a[i] = scale_pair(subtract_pair(a[i], zeros), by);
                a[i + 1] = scale_pair(subtract_pair(a[i + 1], zeros * 16), sixteenth);
            }
        }
    }
}

/* Operands of W^T: rows 16 part .. + 15 of a block, as columns. The warp's first 16 columns of W
 * are in a[0..3], the next 16 in a[4..7]. */
template <moe_cuda_packing P>
__device__ __forceinline__ void back_operands(const uint8_t *block, uint32_t part,
                                              uint32_t row_shift, uint32_t (&a)[8])
{
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x % WARPGROUP / WARP, 0);
    const uint32_t slab = part / 4, thread = part % 4 * WARP + lane;
    const uint32_t from = hopper::shared_address(block);
    const uint32_t row = part * back::DEPTH + lane % 4 * 2; /* after the transposition */
    const uint8_t *scales = block + packed::element_bytes(P);
    if constexpr (packed::has_8_bits(P)) {
        const uint4 word =
            hopper::load_shared16(from + ((slab * 4 + warp) * WARPGROUP + thread) * 16);
        if constexpr (packed::scales_product(P)) {
            const auto *fp32 = reinterpret_cast<const float *>(scales);
            const auto two = [&](uint32_t r) {
                return make_float2(fp32[r >> row_shift], fp32[(r + 1) >> row_shift]);
            };
            const float2 upper = two(row), lower = two(row + 8);
            multiply_e4m3(transpose(word.x), upper, a[0], a[1]);
            multiply_e4m3(transpose(word.y), lower, a[2], a[3]);
            multiply_e4m3(transpose(word.z), upper, a[4], a[5]);
            multiply_e4m3(transpose(word.w), lower, a[6], a[7]);
        } else {
            widen_e4m3(transpose(word.x), a[0], a[1]);
            widen_e4m3(transpose(word.y), a[2], a[3]);
            widen_e4m3(transpose(word.z), a[4], a[5]);
            widen_e4m3(transpose(word.w), a[6], a[7]);
        }
    } else {
        const float2 word = hopper::load_shared8(
            from + ((slab * 2 + warp / 2) * WARPGROUP + thread) * 16 + warp % 2 * 8);
        uint32_t upper[4], lower[4];
        transpose_4_bits<P>(__float_as_uint(word.x), upper);
        transpose_4_bits<P>(__float_as_uint(word.y), lower);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            a[i] = upper[i];
            a[2 + i] = lower[i];
            a[4 + i] = upper[2 + i];
            a[6 + i] = lower[2 + i];
        }
    }
    if constexpr (!packed::scales_product(P)) {
        apply_row_scales<P>(scales, row, warp, a);
        apply_row_scales<P>(scales, row + 8, warp, a + 2);
    }
}

/* Multiplies the sums by what the scales above lack. In place: with other registers for the result,
 * the compiler would move accumulators in the main loop. */
template <uint32_t N, moe_cuda_packing P, uint32_t SIZE>
__device__ __forceinline__ void back_scale(float (&sum)[back::TILES][SIZE])
{
    if constexpr (!packed::scales_product(P) && P != MOE_CUDA_PACKING_E2M1_E4M3)
#pragma unroll
        for (uint32_t i = 0; i < back::TILES; i++)
#pragma unroll
            for (uint32_t j = 0; j < N / 2; j++)
                asm volatile("mul.f32 %0, %0, %1;" : "+f"(sum[i][j]) : "f"(packed::sum_scale(P)));
}

/* ---------------------------------------------------------------------- products */

/* One thread keeps the ring full: blocks of weights and two boxes of rows per stage. */
template <class F>
__device__ __forceinline__ void back_produce(const params &p, packed_shared<F> &s)
{
    const uint32_t block_bytes = packed::element_bytes(F::P) + p.packed_scale_bytes;
    const uint32_t steps = (p.k + packed::ROWS - 1) / packed::ROWS;
    const uint32_t across = (p.n + packed::COLUMNS - 1) / packed::COLUMNS;
    const size_t below = size_t(across) * block_bytes;
    const auto *weights = static_cast<const uint8_t *>((*p.weights)->data);
    typename F::walk tile(p, s.first);
    ring<F::STAGES> at;
    while (tile.next()) {
        const uint32_t box = (tile.rows - 1) / F::ROW_STEP;
        const uint32_t column = tile.weight_row / packed::COLUMNS;
        const uint32_t blocks = min(F::BLOCKS, across - column);
        const uint32_t bytes =
            (box + 1) * F::ROW_STEP * DEPTH_BYTES * PACKED_HALVES + blocks * block_bytes;
        const uint8_t *block =
            weights + size_t(tile.expert) * steps * below + size_t(column) * block_bytes;
        for (uint32_t step = 0; step < steps; step++, block += below) {
            uint64_t *full = &s.full[at.stage];
            hopper::barrier_wait(&s.empty[at.stage], at.phase ^ 1);
            hopper::barrier_expect(full, bytes);
            for (uint32_t b = 0; b < blocks; b++)
                hopper::load_bytes(s.weights[at.stage][b], block + b * block_bytes, full,
                                   block_bytes);
#pragma unroll
            for (uint32_t half = 0; half < PACKED_HALVES; half++)
                hopper::load_box(s.x[at.stage][half], &p.rows[box], full,
                                 step * packed::ROWS + half * DEPTH, tile.row);
            at.advance();
        }
    }
}

/* Starts the products of rows 16 part .. + 15 of W. */
template <uint32_t N, uint32_t BYTES, uint32_t SIZE>
__device__ __forceinline__ void back_start(const uint8_t (&x)[PACKED_HALVES][BYTES], uint32_t part,
                                           const uint32_t (&a)[8], float (&sum)[back::TILES][SIZE])
{
    const uint64_t rows = hopper::operand(hopper::shared_address(x[part / 4])) + part % 4 * 2;
    hopper::multiply_fence();
    hopper::multiply_registers<N>::start(sum[0], a, rows, true);
    hopper::multiply_registers<N>::start(sum[1], a + 4, rows, true);
    hopper::multiply_commit();
}

/* sum = the product of one tile of N rows, for one consumer. */
template <uint32_t N, class F>
__device__ __forceinline__ void back_multiply(packed_shared<F> &s, ring<F::STAGES> &at,
                                              uint32_t steps, uint32_t row_shift, uint32_t group,
                                              float (&sum)[back::TILES][F::ROWS / 2])
{
    constexpr uint32_t PARTS = packed::ROWS / back::DEPTH;
    uint32_t a[2][8], stage = 0;
#pragma unroll
    for (uint32_t j = 0; j < N / 2; j++)
        sum[0][j] = sum[1][j] = 0;
    hopper::barrier_wait(&s.full[at.stage], at.phase);
    back_operands<F::P>(s.weights[at.stage][group], 0, row_shift, a[0]);
    for (uint32_t step = 0; step < steps; step++) {
        const uint32_t now = __shfl_sync(~0u, at.stage, 0); /* the same in all lanes */
        const auto &x = s.x[now];
#pragma unroll
        for (uint32_t part = 0; part < PARTS; part++) {
            back_start<N>(x, part, a[part % 2], sum);
            if (part + 1 < PARTS) {
                hopper::multiply_wait<1>();
                if (part == 0 && step > 0)
                    packed_release(s.empty, stage);
                back_operands<F::P>(s.weights[now][group], part + 1, row_shift, a[(part + 1) % 2]);
            }
        }
        stage = at.stage;
        at.advance();
        if (step + 1 == steps)
            break;
        hopper::barrier_wait(&s.full[at.stage], at.phase);
        hopper::multiply_wait<1>();
        back_operands<F::P>(s.weights[at.stage][group], 0, row_shift, a[0]);
    }
    hopper::multiply_wait<0>();
    hopper::multiply_done(sum[0]);
    hopper::multiply_done(sum[1]);
    packed_release(s.empty, stage);
    back_scale<N, F::P>(sum);
}

/* Uses the smallest N that holds `rows`. */
template <class F, uint32_t N = F::ROWS>
__device__ __forceinline__ void
back_multiply_rows(packed_shared<F> &s, ring<F::STAGES> &at, uint32_t steps, uint32_t row_shift,
                   uint32_t group, uint32_t rows, float (&sum)[back::TILES][F::ROWS / 2])
{
    constexpr uint32_t NEXT = N > 32 ? N - 32 : N / 2;
    if constexpr (N > 8)
        if (rows <= NEXT)
            return back_multiply_rows<F, NEXT>(s, at, steps, row_shift, group, rows, sum);
    back_multiply<N, F>(s, at, steps, row_shift, group, sum);
}

template <class F>
__device__ __forceinline__ void back_consume(const params &p, packed_shared<F> &s, uint32_t group)
{
    const uint32_t steps = (p.k + packed::ROWS - 1) / packed::ROWS;
    const uint32_t chunk = hopper::shared_address(s.staging) + group * F::CHUNK * CHUNK_ROW_BYTES;
    const int own = PACKED_OWN + int(group);
    typename F::walk tile(p, s.first);
    ring<F::STAGES> at;
    while (tile.next()) {
        float sum[back::TILES][F::ROWS / 2];
        back_multiply_rows<F>(s, at, steps, p.packed_row_shift, group, tile.rows, sum);
        const uint32_t column = tile.weight_row + group * packed::COLUMNS;
#pragma unroll
        for (uint32_t i = 0; i < back::TILES; i++)
            if (p.out_f32)
                store_transposed_tile<finish::PLAIN, true, false, F::CHUNK, F::ROWS, back::APART>(
                    p, tile, column + i * STORE_ROWS, sum[i], chunk, own);
            else
                store_transposed_tile<finish::PLAIN, false, false, F::CHUNK, F::ROWS, back::APART>(
                    p, tile, column + i * STORE_ROWS, sum[i], chunk, own);
    }
}

template <class F>
__global__ void __launch_bounds__(F::THREADS, 1) back_kernel(const __grid_constant__ params p)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    stamp_begin(p.began);
    auto &s = *reinterpret_cast<packed_shared<F> *>(memory);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0)
        init_barriers(s.full, s.empty, F::CONSUMERS * WARPGROUP / WARP);
    if (threadIdx.x / WARP == F::CONSUMERS * WARPGROUP / WARP)
        list_tiles<F::ROWS, F::COLUMNS>(p, s.first);
    __syncthreads();
    if (group == F::CONSUMERS) {
        hopper::registers_give_back<F::REGISTERS_LEFT>();
        if (threadIdx.x == F::CONSUMERS * WARPGROUP)
            back_produce<F>(p, s);
    } else {
        hopper::registers_take<F::REGISTERS>();
        back_consume<F>(p, s, group);
    }
#endif
}

} // namespace ggemm

namespace
{

struct instance {
    void (*run)(const ggemm::params);
    size_t shared_bytes;
};

template <moe_cuda_packing P> constexpr instance make()
{
    using F = ggemm::back_form<P>;
    static_assert(sizeof(ggemm::packed_shared<F>) <= 227 * 1024 && F::STAGES >= 3,
                  "a CTA of sm_90 can have no more");
    return {ggemm::back_kernel<F>, sizeof(ggemm::packed_shared<F>)};
}

constexpr uint32_t THREADS = ggemm::back_form<MOE_CUDA_PACKING_F8_BLOCK>::THREADS;

/* Scales of rows and of 8 rows have the same kernel. */
const instance instances[MOE_CUDA_PACKING_COUNT] = {
    {},
    make<MOE_CUDA_PACKING_F8_BLOCK>(),
    make<MOE_CUDA_PACKING_F8_BLOCK>(),
    make<MOE_CUDA_PACKING_F8_E8M0>(),
    make<MOE_CUDA_PACKING_E2M1_E8M0>(),
    make<MOE_CUDA_PACKING_E2M1_E4M3>(),
    make<MOE_CUDA_PACKING_INT4_ROW>(),
    make<MOE_CUDA_PACKING_INT4_GROUP>(),
    make<MOE_CUDA_PACKING_INT4_GROUP_ZEROS>(),
};

} // namespace

moe_status ggemm::launch_packed_back(params &p, moe_cuda_packing packing, uint32_t blocks,
                                     CUstream_st *stream)
{
    const instance &use = instances[packing];
    p.packed_scale_bytes = packed::scale_bytes(packing);
    p.packed_row_shift = packed::row_shift(packing);
    MOE_TRY(MOE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(use.run),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          int(use.shared_bytes))));
    use.run<<<blocks, THREADS, use.shared_bytes, stream>>>(p);
    return MOE_LAUNCHED("gradient of rows with packed weights");
}

moe_status ggemm::load_packed_back()
{
    for (const instance &use : instances)
        if (use.run != nullptr)
            MOE_TRY(moe_cuda_load(use.run));
    return moe_ok();
}
