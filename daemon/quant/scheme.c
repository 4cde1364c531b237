/* SPDX-License-Identifier: Apache-2.0 */
/* The table of schemes. Sources: the loaders of Hugging Face transformers, vLLM,
 * compressed-tensors, GPTQModel, AutoAWQ and ModelOpt. */
#include "quant/scheme.h"

#include <string.h>

enum { WORD = 8 }; /* four-bit elements in 32 bits */

#define E8M0_BYTES "U8 F8_E8M0"

/* clang-format off */
static const struct moe_quant_scheme schemes[MOE_QUANT_SCHEME_COUNT] = {
    [MOE_QUANT_FP8_BLOCK] = {
        .name = "FP8 in blocks", .encoding = MOE_ENC_F8E4M3,
        .suffix = {[MOE_QUANT_DATA] = ".weight",
                   [MOE_QUANT_SCALE] = ".weight_scale_inv .weight_scale"},
        .dtypes = {[MOE_QUANT_DATA] = "F8_E4M3", [MOE_QUANT_SCALE] = "F32 BF16 " E8M0_BYTES},
        .unused = ".input_scale .activation_scale",
    },
    [MOE_QUANT_FP8_SCALE] = {
        .name = "FP8", .encoding = MOE_ENC_F8E4M3,
        .suffix = {[MOE_QUANT_DATA] = ".weight",
                   [MOE_QUANT_SCALE] = ".weight_scale .weight_scale_inv"},
        .dtypes = {[MOE_QUANT_DATA] = "F8_E4M3", [MOE_QUANT_SCALE] = "F32 BF16 F16"},
        .unused = ".input_scale .activation_scale",
    },
    [MOE_QUANT_FP8_DEEPSEEK_V4] = {
        .name = "FP8 of DeepSeek-V4", .encoding = MOE_ENC_F8E4M3,
        .suffix = {[MOE_QUANT_DATA] = ".weight", [MOE_QUANT_SCALE] = ".scale"},
        .dtypes = {[MOE_QUANT_DATA] = "F8_E4M3", [MOE_QUANT_SCALE] = "F32 " E8M0_BYTES},
    },
    [MOE_QUANT_FP8_LLAMA4] = {
        .name = "FP8 of Llama-4", .encoding = MOE_ENC_F8E4M3, .packing = MOE_PACKED_COLUMNS,
        .fused = true,
        .suffix = {[MOE_QUANT_DATA] = "", [MOE_QUANT_SCALE] = "_scale"},
        .dtypes = {[MOE_QUANT_DATA] = "F8_E4M3", [MOE_QUANT_SCALE] = "F32 BF16"},
    },
    [MOE_QUANT_MXFP4_GPT_OSS] = {
        .name = "MXFP4 of GPT-OSS", .encoding = MOE_ENC_E2M1, .fused = true,
        .suffix = {[MOE_QUANT_DATA] = "_blocks", [MOE_QUANT_SCALE] = "_scales"},
        .dtypes = {[MOE_QUANT_DATA] = "U8", [MOE_QUANT_SCALE] = E8M0_BYTES},
    },
    [MOE_QUANT_MXFP4_PACKED] = {
        .name = "MXFP4 of compressed-tensors", .encoding = MOE_ENC_E2M1,
        .suffix = {[MOE_QUANT_DATA] = ".weight_packed", [MOE_QUANT_SCALE] = ".weight_scale",
                   [MOE_QUANT_SHAPE] = ".weight_shape"},
        .dtypes = {[MOE_QUANT_DATA] = "U8", [MOE_QUANT_SCALE] = E8M0_BYTES,
                   [MOE_QUANT_SHAPE] = "I64"},
        .optional = 1 << MOE_QUANT_SHAPE,
        .unused = ".input_scale",
    },
    [MOE_QUANT_MXFP4_DEEPSEEK_V4] = {
        .name = "MXFP4 of DeepSeek-V4", .encoding = MOE_ENC_E2M1,
        .suffix = {[MOE_QUANT_DATA] = ".weight", [MOE_QUANT_SCALE] = ".scale"},
        .dtypes = {[MOE_QUANT_DATA] = "I8 U8", [MOE_QUANT_SCALE] = E8M0_BYTES},
    },
    [MOE_QUANT_INT4_PACKED] = {
        .name = "INT4 of compressed-tensors", .encoding = MOE_ENC_INT4,
        .suffix = {[MOE_QUANT_DATA] = ".weight_packed", [MOE_QUANT_SCALE] = ".weight_scale",
                   [MOE_QUANT_ZERO] = ".weight_zero_point", [MOE_QUANT_SHAPE] = ".weight_shape"},
        .dtypes = {[MOE_QUANT_DATA] = "I32", [MOE_QUANT_SCALE] = "BF16 F16 F32",
                   [MOE_QUANT_ZERO] = "I32", [MOE_QUANT_SHAPE] = "I64"},
        .optional = 1 << MOE_QUANT_SHAPE,
    },
    [MOE_QUANT_GPTQ] = {
        .name = "GPTQ", .encoding = MOE_ENC_INT4, .packing = MOE_PACKED_GPTQ,
        .suffix = {[MOE_QUANT_DATA] = ".qweight", [MOE_QUANT_SCALE] = ".scales",
                   [MOE_QUANT_ZERO] = ".qzeros", [MOE_QUANT_GROUPS] = ".g_idx"},
        .dtypes = {[MOE_QUANT_DATA] = "I32", [MOE_QUANT_SCALE] = "F16 BF16 F32",
                   [MOE_QUANT_ZERO] = "I32", [MOE_QUANT_GROUPS] = "I32"},
        .optional = 1 << MOE_QUANT_GROUPS,
    },
    [MOE_QUANT_AWQ] = {
        .name = "AWQ", .encoding = MOE_ENC_INT4, .packing = MOE_PACKED_AWQ,
        .suffix = {[MOE_QUANT_DATA] = ".qweight", [MOE_QUANT_SCALE] = ".scales",
                   [MOE_QUANT_ZERO] = ".qzeros"},
        .dtypes = {[MOE_QUANT_DATA] = "I32", [MOE_QUANT_SCALE] = "F16 BF16 F32",
                   [MOE_QUANT_ZERO] = "I32"},
    },
    [MOE_QUANT_NVFP4_MODELOPT] = {
        .name = "NVFP4 of ModelOpt", .encoding = MOE_ENC_E2M1,
        .suffix = {[MOE_QUANT_DATA] = ".weight", [MOE_QUANT_SCALE] = ".weight_scale",
                   [MOE_QUANT_GLOBAL] = ".weight_scale_2"},
        .dtypes = {[MOE_QUANT_DATA] = "U8", [MOE_QUANT_SCALE] = "F8_E4M3",
                   [MOE_QUANT_GLOBAL] = "F32"},
        .unused = ".input_scale",
    },
    [MOE_QUANT_NVFP4_PACKED] = {
        .name = "NVFP4 of compressed-tensors", .encoding = MOE_ENC_E2M1,
        .suffix = {[MOE_QUANT_DATA] = ".weight_packed", [MOE_QUANT_SCALE] = ".weight_scale",
                   [MOE_QUANT_GLOBAL] = ".weight_global_scale",
                   [MOE_QUANT_SHAPE] = ".weight_shape"},
        .dtypes = {[MOE_QUANT_DATA] = "U8", [MOE_QUANT_SCALE] = "F8_E4M3",
                   [MOE_QUANT_GLOBAL] = "F32", [MOE_QUANT_SHAPE] = "I64"},
        .optional = 1 << MOE_QUANT_SHAPE,
        .unused = ".input_global_scale", .global_divides = true,
    },
};
/* clang-format on */

const struct moe_quant_scheme *moe_quant_scheme(enum moe_quant_scheme_id id)
{
    MOE_INVARIANT((unsigned)id < MOE_QUANT_SCHEME_COUNT);
    return &schemes[id];
}

bool moe_quant_scale_type(const char *dtype, enum moe_scale_type *out)
{
    static const struct {
        const char *dtype;
        enum moe_scale_type type;
    } names[] = {{"F32", MOE_SCALE_F32}, {"BF16", MOE_SCALE_BF16},    {"F16", MOE_SCALE_F16},
                 {"U8", MOE_SCALE_E8M0}, {"F8_E8M0", MOE_SCALE_E8M0}, {"F8_E4M3", MOE_SCALE_E4M3}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(dtype, names[i].dtype) == 0) {
            *out = names[i].type;
            return true;
        }
    return false;
}

bool moe_quant_has_part(const struct moe_quant *q, enum moe_quant_part part)
{
    return q->scheme->suffix[part] != NULL && (part != MOE_QUANT_ZERO || q->format.zero_points);
}

static uint64_t blocks(uint64_t elements, uint32_t block)
{
    return block == 0 ? 1 : elements / block + (elements % block != 0);
}

/* Packed elements, and blocks of them, have no rest; FP8 in blocks may have one. */
static struct moe_status check_fit(const struct moe_quant *q, uint64_t rows, uint64_t columns)
{
    const struct moe_weight_format *f = &q->format;
    bool four = moe_encoding_traits(f->encoding).bits == 4;
    uint64_t step = q->scheme->packing == MOE_PACKED_AWQ  ? 1
                    : q->scheme->encoding == MOE_ENC_INT4 ? WORD
                    : four                                ? 2
                                                          : 1;
    uint64_t row_step =
        four && q->scheme->packing != MOE_PACKED_ROWS ? WORD : 1; /* four bits, in words */
    bool fits = columns % step == 0 && rows % row_step == 0 &&
                (!four || f->block_columns == 0 || columns % f->block_columns == 0);
    if (fits)
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                     "a matrix [%llu, %llu] cannot be packed as %s with %u elements for each scale",
                     (unsigned long long)rows, (unsigned long long)columns, q->scheme->name,
                     f->block_columns);
}

static void set(uint64_t dims[2], uint64_t first, uint64_t second)
{
    dims[0] = first;
    dims[1] = second;
}

static void shape_of_rows(const struct moe_quant *q, enum moe_quant_part part, uint64_t n,
                          uint64_t k, uint32_t dtype_bits, uint64_t dims[2])
{
    const struct moe_weight_format *f = &q->format;
    if (part == MOE_QUANT_DATA)
        set(dims, n, k * moe_encoding_traits(f->encoding).bits / dtype_bits);
    else if (part == MOE_QUANT_SCALE)
        set(dims, blocks(n, f->block_rows), blocks(k, f->block_columns));
    else
        set(dims, blocks(n, WORD), blocks(k, f->block_columns));
}

static void shape_of_columns(const struct moe_quant *q, enum moe_quant_part part, uint64_t n,
                             uint64_t k, uint64_t dims[2])
{
    uint64_t groups = blocks(k, q->format.block_columns);
    if (part == MOE_QUANT_SCALE)
        set(dims, groups, n);
    else if (part == MOE_QUANT_ZERO)
        set(dims, groups, n / WORD);
    else if (q->scheme->packing == MOE_PACKED_COLUMNS)
        set(dims, k, n);
    else if (q->scheme->packing == MOE_PACKED_GPTQ)
        set(dims, k / WORD, n);
    else
        set(dims, k, n / WORD);
}

struct moe_status moe_quant_part_shape(const struct moe_quant *q, enum moe_quant_part part,
                                       uint64_t rows, uint64_t columns, uint32_t dtype_bits,
                                       uint64_t dims[2], uint32_t *rank)
{
    MOE_TRY(check_fit(q, rows, columns));
    *rank = 2;
    switch (part) {
    case MOE_QUANT_GLOBAL:
        *rank = 1;
        set(dims, 1, 1);
        break;
    case MOE_QUANT_GROUPS:
        *rank = 1;
        set(dims, columns, 1);
        break;
    case MOE_QUANT_SHAPE:
        *rank = 1;
        set(dims, 2, 1);
        break;
    default:
        if (q->scheme->packing == MOE_PACKED_ROWS)
            shape_of_rows(q, part, rows, columns, dtype_bits, dims);
        else
            shape_of_columns(q, part, rows, columns, dims);
    }
    return moe_ok();
}
