/* SPDX-License-Identifier: Apache-2.0 */
/* Names and widths of the number formats of safetensors. The loader decides which ones it supports.
 */
#include "model/safetensors.h"

static const struct {
    const char *name;
    uint32_t bits; /* of one element */
} dtypes[MOE_ST_DTYPE_COUNT] = {
    [MOE_ST_BOOL] = {"BOOL", 8},
    [MOE_ST_F4] = {"F4", 4},
    [MOE_ST_F6_E2M3] = {"F6_E2M3", 6},
    [MOE_ST_F6_E3M2] = {"F6_E3M2", 6},
    [MOE_ST_U8] = {"U8", 8},
    [MOE_ST_I8] = {"I8", 8},
    [MOE_ST_F8_E5M2] = {"F8_E5M2", 8},
    [MOE_ST_F8_E4M3] = {"F8_E4M3", 8},
    [MOE_ST_F8_E8M0] = {"F8_E8M0", 8},
    [MOE_ST_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [MOE_ST_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [MOE_ST_I16] = {"I16", 16},
    [MOE_ST_U16] = {"U16", 16},
    [MOE_ST_F16] = {"F16", 16},
    [MOE_ST_BF16] = {"BF16", 16},
    [MOE_ST_I32] = {"I32", 32},
    [MOE_ST_U32] = {"U32", 32},
    [MOE_ST_F32] = {"F32", 32},
    [MOE_ST_C64] = {"C64", 64},
    [MOE_ST_F64] = {"F64", 64},
    [MOE_ST_I64] = {"I64", 64},
    [MOE_ST_U64] = {"U64", 64},
};

const char *moe_st_dtype_name(enum moe_st_dtype d)
{
    return (unsigned)d < MOE_ST_DTYPE_COUNT ? dtypes[d].name : "?";
}

uint32_t moe_st_dtype_bits(enum moe_st_dtype d)
{
    return (unsigned)d < MOE_ST_DTYPE_COUNT ? dtypes[d].bits : 0;
}

bool moe_st_tensor_bytes(enum moe_st_dtype d, uint32_t rank, const uint64_t *shape, uint64_t *bytes)
{
    uint64_t bits = moe_st_dtype_bits(d);
    for (uint32_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(bits, shape[i], &bits))
            return false;
    if (bits % 8 != 0)
        return false;
    *bytes = bits / 8;
    return true;
}
