/* SPDX-License-Identifier: Apache-2.0 */
/* Adjacent columns of rows: N per lane, as stored and as fp32. */
#ifndef MOE_CUDA_COLUMNS_CUH
#define MOE_CUDA_COLUMNS_CUH

#include "cuda/exchange/flags.cuh"

#include <cuda_bf16.h>

constexpr uint32_t WIDE = 8; /* columns per lane if H is a multiple of it */

template <uint32_t N> struct columns {
    float v[N];
};

template <typename T, uint32_t N> struct packed;
template <> struct packed<float, 1> {
    float one;
};
template <> struct packed<__nv_bfloat16, 1> {
    unsigned short one;
};
template <> struct packed<float, WIDE> {
    uint4 unit[2];
};
template <> struct packed<__nv_bfloat16, WIDE> {
    uint4 unit[1];
};

/* -------------------------------------------------------------- arithmetic */

__device__ inline float low_half(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

__device__ inline float high_half(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ inline columns<1> unpack(const packed<float, 1> &from)
{
    return {{from.one}};
}

__device__ inline columns<1> unpack(const packed<__nv_bfloat16, 1> &from)
{
    return {{low_half(from.one)}};
}

__device__ inline columns<WIDE> unpack(const packed<float, WIDE> &from)
{
    const uint4 a = from.unit[0], b = from.unit[1];
    return {{__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
             __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z),
             __uint_as_float(b.w)}};
}

__device__ inline columns<WIDE> unpack(const packed<__nv_bfloat16, WIDE> &from)
{
    const uint4 u = from.unit[0];
    return {{low_half(u.x), high_half(u.x), low_half(u.y), high_half(u.y), low_half(u.z),
             high_half(u.z), low_half(u.w), high_half(u.w)}};
}

__device__ inline uint32_t pair_of(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ inline void pack(const columns<1> &from, packed<float, 1> *to)
{
    to->one = from.v[0];
}

__device__ inline void pack(const columns<1> &from, packed<__nv_bfloat16, 1> *to)
{
    to->one = __bfloat16_as_ushort(__float2bfloat16_rn(from.v[0]));
}

__device__ inline void pack(const columns<WIDE> &from, packed<float, WIDE> *to)
{
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
        to->unit[i] = {__float_as_uint(from.v[4 * i]), __float_as_uint(from.v[4 * i + 1]),
                       __float_as_uint(from.v[4 * i + 2]), __float_as_uint(from.v[4 * i + 3])};
}

__device__ inline void pack(const columns<WIDE> &from, packed<__nv_bfloat16, WIDE> *to)
{
    to->unit[0] = {pair_of(from.v[0], from.v[1]), pair_of(from.v[2], from.v[3]),
                   pair_of(from.v[4], from.v[5]), pair_of(from.v[6], from.v[7])};
}

/* Rounds the columns to T and back. */
template <typename T, uint32_t N> __device__ inline columns<N> rounded_to(const columns<N> &from)
{
    packed<T, N> stored;
    pack(from, &stored);
    return unpack(stored);
}

/* sum += scale * from */
template <uint32_t N>
__device__ inline void add_scaled(columns<N> &sum, const columns<N> &from, float scale)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        sum.v[i] += scale * from.v[i];
}

/* ------------------------------------------------------------------ memory */

/* Bypasses the first level cache, which may hold lines of an earlier step. */
template <typename T> __device__ inline void fetch(const T *from, packed<T, WIDE> *to)
{
#pragma unroll
    for (uint32_t i = 0; i < sizeof(to->unit) / sizeof(uint4); i++)
        to->unit[i] = __ldcg(reinterpret_cast<const uint4 *>(from) + i);
}

__device__ inline void fetch(const float *from, packed<float, 1> *to)
{
    to->one = __ldcg(from);
}

__device__ inline void fetch(const __nv_bfloat16 *from, packed<__nv_bfloat16, 1> *to)
{
    to->one = __ldcg(reinterpret_cast<const unsigned short *>(from));
}

template <typename T> __device__ inline void put(T *to, const packed<T, WIDE> &from)
{
#pragma unroll
    for (uint32_t i = 0; i < sizeof(from.unit) / sizeof(uint4); i++)
        reinterpret_cast<uint4 *>(to)[i] = from.unit[i];
}

__device__ inline void put(float *to, const packed<float, 1> &from)
{
    *to = from.one;
}

__device__ inline void put(__nv_bfloat16 *to, const packed<__nv_bfloat16, 1> &from)
{
    *reinterpret_cast<unsigned short *>(to) = from.one;
}

/* Prefetches bytes that are fetched soon into L2; both arguments are multiples of 16. */
__device__ inline void bring_nearer(const void *from, uint32_t bytes)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

/* ----------------------------------------------------------- quick regions */

template <typename T> __device__ inline void peek(const T *from, packed<T, WIDE> *to)
{
#pragma unroll
    for (uint32_t i = 0; i < sizeof(to->unit) / sizeof(uint4); i++)
        to->unit[i] = load_relaxed(reinterpret_cast<const uint4 *>(from) + i);
}

template <typename T> __device__ inline bool has_blank(const packed<T, WIDE> &from)
{
    bool blank = false;
#pragma unroll
    for (uint32_t i = 0; i < sizeof(from.unit) / sizeof(uint4); i++)
        blank = blank || has_blank(from.unit[i]);
    return blank;
}

template <typename T> __device__ inline void put_quick(T *to, const packed<T, WIDE> &from)
{
#pragma unroll
    for (uint32_t i = 0; i < sizeof(from.unit) / sizeof(uint4); i++)
        store_relaxed(reinterpret_cast<uint4 *>(to) + i, without_blanks(from.unit[i]));
}

/* Waits until the peeked values are data, and writes blanks back. False if the wait failed. */
template <typename T>
__device__ inline bool take(struct moe_cuda_control *c, const uint32_t *abort, uint32_t slot,
                            T *from, packed<T, WIDE> *value)
{
    uint64_t since = 0, looked = 0;
    for (uint32_t tries = 1; has_blank(*value); tries++) {
        if (tries % TRIES_BETWEEN_LOOKS == 0 && wait_failed(c, abort, slot, &since, &looked))
            return false;
        peek(from, value);
    }
#pragma unroll
    for (uint32_t i = 0; i < sizeof(value->unit) / sizeof(uint4); i++)
        store_relaxed(reinterpret_cast<uint4 *>(from) + i, all_blank());
    return true;
}

#endif
