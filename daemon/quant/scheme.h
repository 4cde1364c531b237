/* SPDX-License-Identifier: Apache-2.0 */
/* The schemes of quantised checkpoints: one row of data each.
 *
 * A quantised matrix [N, K] (out, in) is stored as several tensors, its parts. A row says how the
 * parts are named, which dtypes they have and how elements are packed. Pure data and sizes. */
#ifndef MOE_QUANT_SCHEME_H
#define MOE_QUANT_SCHEME_H

#include "base/status.h"
#include "moe/weight_format.h"

enum moe_quant_part {
    MOE_QUANT_DATA,   /* the elements */
    MOE_QUANT_SCALE,  /* one for each block */
    MOE_QUANT_GLOBAL, /* one F32 of the matrix */
    MOE_QUANT_ZERO,   /* zero points, four bits each */
    MOE_QUANT_GROUPS, /* GPTQ's g_idx: the group of each column, which must be column / group */
    MOE_QUANT_SHAPE,  /* compressed-tensors' weight_shape: I64 [2], which must be N, K */
    MOE_QUANT_PARTS
};

/* Where elements and scales are. Four-bit elements in words of more bits are counted from the
 * lowest bits up: in a file they are the same as bytes with the even element low. */
enum moe_quant_packing {
    MOE_PACKED_ROWS, /* elements [N, K]; scales [N / block, K / block]; zero points, packed along
                        rows, [N / 8, K / block] */
    MOE_PACKED_GPTQ, /* I32: elements [K / 8, N], packed along K; scales [K / block, N]; zero points
                        [K / block, N / 8], packed along N */
    MOE_PACKED_AWQ,  /* I32: elements [K, N / 8] packed along N, as zero points; both in the order
                        0 2 4 6 1 3 5 7 from the lowest bits up. Scales as GPTQ */
    MOE_PACKED_COLUMNS, /* bytes: elements [K, N], one scale for each row [N] */
};

struct moe_quant_scheme {
    const char *name; /* for errors and logs */
    enum moe_encoding encoding;
    enum moe_quant_packing packing;
    bool fused; /* the experts of a layer are one tensor [E, rows, ...]; suffixes follow the name of
                   the matrix. Else they follow that of the module */
    /* Suffixes of the parts, separated by spaces: exactly one must exist. NULL: no such part. */
    const char *suffix[MOE_QUANT_PARTS];
    const char *dtypes[MOE_QUANT_PARTS]; /* those that safetensors may have, separated by spaces */
    uint32_t optional;                   /* bits of enum moe_quant_part */
    const char *unused;                  /* suffixes of known tensors that are not read, or NULL */
    bool global_divides;                 /* the scale is scale / global, not scale * global */
};

/* A scheme with the settings of a checkpoint. */
struct moe_quant {
    const struct moe_quant_scheme *scheme; /* NULL: not quantised */
    struct moe_weight_format format;       /* `scale` is that of the file: see below */
    uint32_t zero_offset; /* added to stored zero points: 1 for GPTQ's first format */
    uint32_t needed;      /* bits of enum moe_quant_part: optional ones that must be there */
    /* FP8: the W8A8 arithmetic that the checkpoint asks for. PLAIN: none, or one that is not
     * computed (static scales, scales of a whole batch, groups that are not the blocks). The
     * format gets it only where W8A8 is chosen. */
    enum moe_activation_format activations;
};

/* The schemes. */
enum moe_quant_scheme_id {
    MOE_QUANT_FP8_BLOCK,       /* weight_scale_inv for each block */
    MOE_QUANT_FP8_SCALE,       /* weight_scale of a matrix, row or group */
    MOE_QUANT_FP8_DEEPSEEK_V4, /* scale for each block */
    MOE_QUANT_FP8_LLAMA4,      /* fused and transposed, with a scale for each row */
    MOE_QUANT_MXFP4_GPT_OSS,   /* fused blocks and scales */
    MOE_QUANT_MXFP4_PACKED,    /* compressed-tensors */
    MOE_QUANT_MXFP4_DEEPSEEK_V4,
    MOE_QUANT_INT4_PACKED, /* compressed-tensors */
    MOE_QUANT_GPTQ,
    MOE_QUANT_AWQ,
    MOE_QUANT_NVFP4_MODELOPT,
    MOE_QUANT_NVFP4_PACKED, /* compressed-tensors */
    MOE_QUANT_SCHEME_COUNT
};
const struct moe_quant_scheme *moe_quant_scheme(enum moe_quant_scheme_id id);

/* The scale type of a tensor with this dtype in the file: U8 is E8M0. False for another dtype. */
bool moe_quant_scale_type(const char *dtype, enum moe_scale_type *out);

/* True if this matrix has the part; an optional part may be missing. */
bool moe_quant_has_part(const struct moe_quant *q, enum moe_quant_part part);

/* The shape of a part of a matrix [rows, columns]: dims [*rank], at most 2. `dtype_bits` are those
 * of an element of the tensor, in which several of the matrix may be packed.
 * Errors: MOE_INVALID_ARGUMENT/TENSOR_INVALID (the matrix cannot be packed so). */
struct moe_status moe_quant_part_shape(const struct moe_quant *q, enum moe_quant_part part,
                                       uint64_t rows, uint64_t columns, uint32_t dtype_bits,
                                       uint64_t dims[2], uint32_t *rank) MOE_CHECKED;

#endif
