/* SPDX-License-Identifier: Apache-2.0 */
/* Number formats and the limits that every part of moed agrees on. */
#ifndef MOE_TYPES_H
#define MOE_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum moe_dtype {
    MOE_DTYPE_NONE = 0,
    MOE_DTYPE_F32 = 1,
    MOE_DTYPE_BF16 = 2,
};

/* Bytes of one element; 0 for MOE_DTYPE_NONE. */
static inline size_t moe_dtype_bytes(enum moe_dtype d)
{
    return d == MOE_DTYPE_F32 ? 4 : d == MOE_DTYPE_BF16 ? 2 : 0;
}

/* The summands of a layer's output. */
enum moe_parts {
    MOE_PARTS_BOTH = 0,   /* routed experts plus shared experts */
    MOE_PARTS_ROUTED = 1, /* routed experts alone, zero experts among them */
    MOE_PARTS_SHARED = 2, /* shared experts alone, their gate included; zeros without any */
};

/* What becomes of a forward pass when some of its tokens have an expert without a copy in the view
 * in force; see OnUnavailable of types.proto. */
enum moe_on_unavailable {
    MOE_ON_UNAVAILABLE_WAIT = 0,    /* it waits for these experts, until its deadline */
    MOE_ON_UNAVAILABLE_FAIL = 1,    /* it fails with UNAVAILABLE/EXPERT_UNAVAILABLE */
    MOE_ON_UNAVAILABLE_PARTIAL = 2, /* the other tokens have their results */
};

/* bf16 <-> f32; to bf16 rounds to nearest even and keeps NaN a (canonical, positive) NaN. */
static inline float moe_bf16_to_f32(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint16_t moe_f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000))
        return UINT16_C(0x7fff);
    u += UINT32_C(0x7fff) + ((u >> 16) & 1);
    return (uint16_t)(u >> 16);
}

enum {
    MOE_MAX_SLOTS = 64,     /* slots of one group: bits of a mask */
    MOE_MAX_EXPERTS = 1024, /* routed experts E of one layer (zero experts not counted) */
    MOE_MAX_TOP_K = 32,     /* experts per token K */
    MOE_COMMON_TOP_K = 16,  /* K of layers that train */
    MOE_MAX_HIDDEN = 16384, /* H; I is bounded by memory alone */
    MOE_MAX_LAYERS = 256,   /* MoE layers of one model */
    MOE_ROW_ALIGN = 128,    /* rows of one expert start at multiples of this */
};

#endif
