/* SPDX-License-Identifier: Apache-2.0 */
/* From packed words in shared memory to bf16 operands in registers (packed_layout.cuh says which
 * elements a word has).
 *
 * Floats: exponent and mantissa move to their place in a bf16, with the exponent's bias still that
 * of the small format; a multiplication by a power of two mends the bias, also of subnormals. Where
 * scales multiply operands, they are part of it (packed_layout.cuh). It is exact.
 *
 * Integers are subnormals of bf16, and become (element - zero) * scale by bf16 arithmetic, rounded
 * once.
 *
 * Shifts and masks run at half the rate of other instructions, so words of 4-bit elements have
 * their bits where few of them are needed. */
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

__device__ __forceinline__ uint32_t scale_add_pair(uint32_t pair, uint32_t by, uint32_t add)
{
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(by), "r"(add));
    return r;
}

__device__ __forceinline__ uint32_t subtract_pair(uint32_t pair, uint32_t by)
{
    uint32_t r;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(by));
    return r;
}

/* `v` as bf16 in both halves. */
__device__ __forceinline__ uint32_t round_pair(float v)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(r) : "f"(v));
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

/* Four INT4 pairs, times 2^-133; the second and the fourth 16 times that. The low eight bits of a
 * bf16 are a multiple of 2^-133. */
__device__ __forceinline__ void widen_int4(uint32_t word, uint32_t (&pair)[4])
{
    const uint32_t high = word >> 8;
    pair[0] = word & 0x000f000f;
    pair[1] = word & 0x00f000f0;
    pair[2] = high & 0x000f000f;
    pair[3] = high & 0x00f000f0;
}
constexpr uint32_t INT4_SCALE = 0x71807180;     /* 2^100 */
constexpr uint32_t INT4_SIXTEENTH = 0x3d803d80; /* 1/16 */
constexpr uint32_t INT4_ZERO = 0x80088008;      /* -8 times 2^-133 */

/* One instruction, where the compiler would make two. */
__device__ __forceinline__ uint32_t mask_or(uint32_t v, uint32_t mask, uint32_t bits)
{
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
    return r;
}

/* Byte number `i` (a constant) in both halves. */
template <uint32_t i> __device__ __forceinline__ uint32_t byte_pair(uint32_t bytes)
{
    return __byte_perm(bytes, 0, 0x4040 | i << 8 | i);
}

/* Half number `i` (a constant) in both halves. bf16 instructions can read their operands so:
 * it costs nothing. */
template <uint32_t i> __device__ __forceinline__ uint32_t half_pair(uint32_t halves)
{
    uint32_t r;
    if constexpr (i == 0)
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}"
            : "=r"(r)
            : "r"(halves));
    else
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}"
            : "=r"(r)
            : "r"(halves));
    return r;
}

/* The first, or the second, two of the bytes that packed::join_bytes joined, before the mask. */
template <bool SECOND> __device__ __forceinline__ uint32_t joined_pair(uint32_t word)
{
    return SECOND ? __byte_perm(word, 0, 0x2103) : word;
}

/* A thread's scales of one step of 128 columns, for its two rows. `apply` multiplies the operands
 * of 32 columns: a[2 p + r] has pair p of row r. `upper` and `lower` multiply the sums of both
 * rows. This one is for scales of products. */
template <moe_cuda_packing P> struct packed_scales {
    uint32_t scale[2]; /* fp32 */

    __device__ __forceinline__ void load(const uint8_t *scales, uint32_t row, uint32_t row_shift)
    {
        const auto *words = reinterpret_cast<const uint32_t *>(scales);
        scale[0] = words[row >> row_shift];
        scale[1] = words[(row + 8) >> row_shift];
    }

    __device__ __forceinline__ float upper() const { return __uint_as_float(scale[0]); }
    __device__ __forceinline__ float lower() const { return __uint_as_float(scale[1]); }

    template <uint32_t i> __device__ __forceinline__ void apply(uint32_t *a) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            a[j] = scale_pair(a[j], E4M3_BIAS);
    }
};

/* For scales that multiply operands: the sums are multiplied by a constant. */
template <moe_cuda_packing P> struct operand_scales {
    __device__ __forceinline__ float upper() const { return packed::sum_scale(P); }
    __device__ __forceinline__ float lower() const { return packed::sum_scale(P); }
};

template <moe_cuda_packing P> struct exponent_scales : operand_scales<P> {
    uint32_t bytes[2];

    __device__ __forceinline__ void load(const uint8_t *scales, uint32_t row, uint32_t)
    {
        const auto *words = reinterpret_cast<const uint32_t *>(scales);
        bytes[0] = words[row];
        bytes[1] = words[row + 8];
    }

    template <uint32_t i> __device__ __forceinline__ void apply(uint32_t *a) const
    {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            const uint32_t by = half_pair<i % 2>(joined_pair<(i >= 2)>(bytes[r]) & 0x7f807f80);
#pragma unroll
            for (uint32_t pair = 0; pair < 4; pair++)
                a[2 * pair + r] = scale_pair(a[2 * pair + r], by);
        }
    }
};
template <>
struct packed_scales<MOE_CUDA_PACKING_F8_E8M0> : exponent_scales<MOE_CUDA_PACKING_F8_E8M0> {
};
template <>
struct packed_scales<MOE_CUDA_PACKING_E2M1_E8M0> : exponent_scales<MOE_CUDA_PACKING_E2M1_E8M0> {
};

template <> struct packed_scales<MOE_CUDA_PACKING_E2M1_E4M3> {
    static constexpr float SUM_SCALE = packed::sum_scale(MOE_CUDA_PACKING_E2M1_E4M3);
    uint2 bytes[2];
    float global[2];

    __device__ __forceinline__ void load(const uint8_t *scales, uint32_t row, uint32_t)
    {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            bytes[r] = reinterpret_cast<const uint2 *>(scales)[row + 8 * r];
            global[r] =
                *reinterpret_cast<const float *>(scales + packed::global_offset(row + 8 * r));
        }
    }

    __device__ __forceinline__ float upper() const
    {
        return global[0] * SUM_SCALE;
    }
    __device__ __forceinline__ float lower() const
    {
        return global[1] * SUM_SCALE;
    }

    template <uint32_t i> __device__ __forceinline__ void apply(uint32_t *a) const
    {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            const uint32_t word = joined_pair<i % 2 == 1>(i < 2 ? bytes[r].x : bytes[r].y);
            /* The exponent is at most 224 + 17. */
            const uint32_t both = mask_or(word, 0x0ff00ff0, 0x70007000);
            const uint32_t by[2] = {half_pair<0>(both), half_pair<1>(both)};
#pragma unroll
            for (uint32_t pair = 0; pair < 4; pair++)
                a[2 * pair + r] = scale_pair(a[2 * pair + r], by[pair / 2]);
        }
    }
};

/* (element - zero) * scale of one row. `one` multiplies the first and the third pair, `sixteenth`
 * the others; `zero` is that of the first and the third. */
__device__ __forceinline__ void scale_int4(uint32_t *a, uint32_t one, uint32_t sixteenth,
                                           uint32_t zero)
{
    const uint32_t by[2] = {one, sixteenth}, zeros[2] = {zero, zero * 16};
#pragma unroll
    for (uint32_t pair = 0; pair < 4; pair++)
        a[2 * pair] = scale_pair(subtract_pair(a[2 * pair], zeros[pair % 2]), by[pair % 2]);
}

template <>
struct packed_scales<MOE_CUDA_PACKING_INT4_ROW> : operand_scales<MOE_CUDA_PACKING_INT4_ROW> {
    uint32_t one[2], sixteenth[2], zero[2];

    __device__ __forceinline__ void load(const uint8_t *scales, uint32_t row, uint32_t)
    {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++, row += 8) {
            one[r] =
                scale_pair(round_pair(reinterpret_cast<const float *>(scales)[row]), INT4_SCALE);
            sixteenth[r] = scale_pair(one[r], INT4_SIXTEENTH);
            zero[r] = scales[packed::zero_offset(MOE_CUDA_PACKING_INT4_ROW, row, 0)] * 0x00010001u;
        }
    }

    template <uint32_t i> __device__ __forceinline__ void apply(uint32_t *a) const
    {
        scale_int4(a, one[0], sixteenth[0], zero[0]);
        scale_int4(a + 1, one[1], sixteenth[1], zero[1]);
    }
};

/* With 8 as zero point, minus zero times scale has no more bits than the scale: one instruction
 * multiplies and adds, and rounds once. */
template <>
struct packed_scales<MOE_CUDA_PACKING_INT4_GROUP> : operand_scales<MOE_CUDA_PACKING_INT4_GROUP> {
    uint2 scale[2];

    __device__ __forceinline__ void load(const uint8_t *scales, uint32_t row, uint32_t)
    {
        scale[0] = reinterpret_cast<const uint2 *>(scales)[row];
        scale[1] = reinterpret_cast<const uint2 *>(scales)[row + 8];
    }

    template <uint32_t i> __device__ __forceinline__ void apply(uint32_t *a) const
    {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            const uint32_t two = i < 2 ? scale[r].x : scale[r].y; /* for this and another i */
            const uint32_t by[2] = {half_pair<i % 2>(two),
                                    half_pair<i % 2>(scale_pair(two, INT4_SIXTEENTH))};
            const uint32_t minus = half_pair<i % 2>(scale_pair(two, INT4_ZERO));
#pragma unroll
            for (uint32_t pair = 0; pair < 4; pair++)
                a[2 * pair + r] = scale_add_pair(a[2 * pair + r], by[pair % 2], minus);
        }
    }
};

template <>
struct packed_scales<MOE_CUDA_PACKING_INT4_GROUP_ZEROS>
    : operand_scales<MOE_CUDA_PACKING_INT4_GROUP_ZEROS> {
    uint2 scale[2];
    uint32_t zeros[2];

    __device__ __forceinline__ void load(const uint8_t *scales, uint32_t row, uint32_t)
    {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++, row += 8) {
            scale[r] = reinterpret_cast<const uint2 *>(scales)[row];
            zeros[r] = *reinterpret_cast<const uint32_t *>(
                scales + packed::zero_offset(MOE_CUDA_PACKING_INT4_GROUP_ZEROS, row, 0));
        }
    }

    template <uint32_t i> __device__ __forceinline__ void apply(uint32_t *a) const
    {
#pragma unroll
        for (uint32_t r = 0; r < 2; r++) {
            const uint32_t two = i < 2 ? scale[r].x : scale[r].y;
            scale_int4(a + r, half_pair<i % 2>(two),
                       half_pair<i % 2>(scale_pair(two, INT4_SIXTEENTH)), byte_pair<i>(zeros[r]));
        }
    }
};

/* What a thread holds of one step of 128 columns, and how it becomes operands of 32 columns. P: any
 * packing of its elements and kind of scales. row_shift: of the packing (packed_layout.cuh). */
template <moe_cuda_packing P> struct packed_step {
    static constexpr uint32_t LOADS = packed::has_8_bits(P) ? 4 : 2;
    uint4 words[LOADS];
    packed_scales<P> scales;

    __device__ __forceinline__ void load(const uint8_t *block, uint32_t slab, uint32_t row_shift)
    {
        const uint32_t thread = threadIdx.x % 128, from = hopper::shared_address(block);
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            words[i] = hopper::load_shared16(from + ((slab * LOADS + i) * 128 + thread) * 16);
        const uint32_t row = slab * 64 + thread / 32 * 16 + thread % 32 / 4;
        scales.load(block + packed::element_bytes(P), row, row_shift);
    }

    /* What the sums of both rows have to be multiplied by. */
    __device__ __forceinline__ float upper() const
    {
        return scales.upper();
    }
    __device__ __forceinline__ float lower() const
    {
        return scales.lower();
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
            widen_4_bits(i % 2 == 0 ? word.x : word.z, upper);
            widen_4_bits(i % 2 == 0 ? word.y : word.w, lower);
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                a[2 * j] = upper[j];
                a[2 * j + 1] = lower[j];
            }
        }
        scales.template apply<i>(a);
    }

  private:
    static __device__ __forceinline__ void widen_4_bits(uint32_t word, uint32_t (&pair)[4])
    {
        if constexpr (packed::is_int4(P))
            widen_int4(word, pair);
        else
            packed::widen_e2m1(word, pair);
    }
};

} // namespace ggemm

#endif
