/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of quantised activations (enum moe_activation_format) on the device. */
#ifndef MOE_CUDA_QUANTISE_MATH_CUH
#define MOE_CUDA_QUANTISE_MATH_CUH

#include <cuda_fp8.h>
#include <stdint.h>

namespace quantise
{

constexpr float LARGEST = 448.0f, LEAST = 1e-10f;

/* How a group is quantised. */
struct group_scale {
    float scale, inverse;
};

__device__ __forceinline__ group_scale scale_of(float largest, bool pow2)
{
    float s = __fdiv_rn(largest > LEAST ? largest : LEAST, LARGEST);
    if (pow2 && s < 0x1p127f)
        s = __uint_as_float((__float_as_uint(s) + 0x007fffffu) & 0x7f800000u);
    return {s, __frcp_rn(s)};
}

/* x / s as a division rounds it, by a product with 1 / s and a correction that fma makes exact. NaN
 * if s is infinite. */
__device__ __forceinline__ float divide(float x, group_scale s)
{
    const float q = x * s.inverse;
    return fmaf(fmaf(-q, s.scale, x), s.inverse, q);
}

/* The E4M3 codes of two values, the first in the low byte. */
__device__ __forceinline__ uint32_t codes_of(float first, float second, group_scale s)
{
    return __nv_cvt_float2_to_fp8x2(make_float2(divide(first, s), divide(second, s)),
                                    __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float value_of(uint8_t code)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

} // namespace quantise

#endif
