/* SPDX-License-Identifier: Apache-2.0 */
/* From packed words in shared memory to bf16 operands in registers (packed_layout.cuh says which
 * elements a word has).
 *
 * Exponent and mantissa move to their place in a bf16, with the exponent's bias still that of the
 * small format; a multiplication by a power of two mends the bias, also of subnormals. Where scales
 * are powers of two, they are part of it (packed_layout.cuh). It is exact. Shifts and masks run at
 * half the rate of other instructions, so words of 4-bit elements have their bits where few of them
 * are needed. */
#ifndef MOE_CUDA_GGEMM_PACKED_CONVERT_CUH
#define MOE_CUDA_GGEMM_PACKED_CONVERT_CUH

#include "cuda/core/hopper.cuh"
#include "cuda/gemm/packed_layout.cuh"

namespace ggemm
{

__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, uint32_t by)
{
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(by));
    return r;
}

constexpr uint32_t SIGNS = 0x80008000;

/* Two E4M3 pairs, times 2^-120. */
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t &first, uint32_t &second)
{
    first = (word & SIGNS) | (word >> 4 & 0x07f007f0);
    second = (word << 8 & SIGNS) | (word << 4 & 0x07f007f0);
}
constexpr uint32_t E4M3_BIAS = 0x7b807b80; /* 2^120 */

/* Four E2M1 pairs, times 2^-126. */
__device__ __forceinline__ void widen_e2m1(uint32_t word, uint32_t (&pair)[4])
{
    constexpr uint32_t MAGNITUDES = 0x01c001c0;
    pair[0] = word & (SIGNS | MAGNITUDES);
    pair[1] = word << 3 & (SIGNS | MAGNITUDES);
    pair[2] = (word << 1 & SIGNS) | (word >> 3 & MAGNITUDES);
    pair[3] = (word << 2 & SIGNS) | (word << 6 & MAGNITUDES);
}

/* Byte number `i` (a constant) twice, as the exponent of a bf16. */
template <uint32_t i> __device__ __forceinline__ uint32_t exponent_pair(uint32_t bytes)
{
    return __byte_perm(bytes, 0, 0x4040 | i << 8 | i) * 128;
}

/* What a thread holds of one step of 128 columns, and how it becomes operands of 32 columns. P: any
 * packing of its elements and kind of scales. row_shift: of the packing (packed_layout.cuh). */
template <moe_cuda_packing P> struct packed_step {
    static constexpr uint32_t LOADS = packed::has_8_bits(P) ? 4 : 2;
    uint4 words[LOADS];
    uint32_t scale[2]; /* of both rows: fp32, or four bytes */

    __device__ __forceinline__ void load(const uint8_t *block, uint32_t slab, uint32_t row_shift)
    {
        const uint32_t thread = threadIdx.x % 128, from = hopper::shared_address(block);
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            words[i] = hopper::load_shared16(from + ((slab * LOADS + i) * 128 + thread) * 16);
        const uint32_t row = slab * 64 + thread / 32 * 16 + thread % 32 / 4;
        const auto *scales = reinterpret_cast<const uint32_t *>(block + packed::element_bytes(P));
        scale[0] = scales[row >> row_shift];
        scale[1] = scales[(row + 8) >> row_shift];
    }

    /* What the sums of both rows have to be multiplied by. */
    __device__ __forceinline__ float upper() const
    {
        return packed::scales_product(P) ? __uint_as_float(scale[0]) : packed::sum_scale(P);
    }

    __device__ __forceinline__ float lower() const
    {
        return packed::scales_product(P) ? __uint_as_float(scale[1]) : packed::sum_scale(P);
    }

    /* a: the operands of columns [32 i, 32 i + 16), then those of the next 16. */
    template <uint32_t i> __device__ __forceinline__ void convert(uint32_t *a) const
    {
        const uint4 word = words[packed::has_8_bits(P) ? i : i / 2];
        if constexpr (packed::has_8_bits(P)) {
            widen_e4m3(word.x, a[0], a[2]);
            widen_e4m3(word.y, a[1], a[3]);
            widen_e4m3(word.z, a[4], a[6]);
            widen_e4m3(word.w, a[5], a[7]);
        } else {
            uint32_t upper[4], lower[4];
            widen_e2m1(i % 2 == 0 ? word.x : word.z, upper);
            widen_e2m1(i % 2 == 0 ? word.y : word.w, lower);
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                a[2 * j] = upper[j];
                a[2 * j + 1] = lower[j];
            }
        }
        constexpr bool BY_STEP = packed::scales_product(P);
        const uint32_t by[2] = {BY_STEP ? E4M3_BIAS : exponent_pair<i>(scale[0]),
                                BY_STEP ? E4M3_BIAS : exponent_pair<i>(scale[1])};
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            a[j] = scale_pair(a[j], by[j % 2]);
    }
};

} // namespace ggemm

#endif
