/* SPDX-License-Identifier: Apache-2.0 */
/* Copies plain arguments into the structs of the products; see ggemm_entry.h. */
#include "ggemm_entry.h"

#include "cuda/gemm/ggemm.h"
#include "cuda/gemm/ggemm_cublas.h"
#include "cuda/gemm/ggemm_wgrad.h"
#include "cuda/gemm/quantise.h"

#include <assert.h>
#include <string.h>

#define LINE_ARGUMENT(type, name) #type " " #name ", "
#define LINE_LAST(type, name)     #type " " #name "\n"
#define LINE(result, name, list)  #result " " #name " " list(LINE_ARGUMENT, LINE_LAST)

text moe_entry_signatures(void)
{
    return MOE_ENTRIES(LINE);
}

static text text_of(struct moe_status st)
{
    static _Thread_local struct moe_status last;
    last = st;
    return moe_failed(&st) ? last.text : NULL;
}

/* ------------------------------------------------------------------- products */

/* The lists name every field in order: a field that only the struct has does not compile. */
#define AS_FIELD(type, name) type name;
struct listed_ggemm {
    MOE_GGEMM_FIELDS(AS_FIELD)
};
struct listed_wgrad {
    MOE_WGRAD_FIELDS(AS_FIELD)
};
struct listed_quantise {
    MOE_QUANTISE_FIELDS(AS_FIELD)
};
#define SAME_PLACE(listed, product, name)                                                          \
    static_assert(offsetof(struct listed, name) == offsetof(struct product, name), #name);
#define SAME_IN_GGEMM(type, name)    SAME_PLACE(listed_ggemm, moe_cuda_ggemm, name)
#define SAME_IN_WGRAD(type, name)    SAME_PLACE(listed_wgrad, moe_cuda_wgrad, name)
#define SAME_IN_QUANTISE(type, name) SAME_PLACE(listed_quantise, moe_cuda_quantise, name)
MOE_GGEMM_FIELDS(SAME_IN_GGEMM)
MOE_WGRAD_FIELDS(SAME_IN_WGRAD)
MOE_QUANTISE_FIELDS(SAME_IN_QUANTISE)
static_assert(sizeof(struct listed_ggemm) == sizeof(struct moe_cuda_ggemm), "a field is missing");
static_assert(sizeof(struct listed_wgrad) == sizeof(struct moe_cuda_wgrad), "a field is missing");
static_assert(sizeof(struct listed_quantise) == sizeof(struct moe_cuda_quantise),
              "a field is missing");

#define SET(type, name) product.name = (__typeof__(product.name))name;

MOE_ENTRY_PROTOTYPE(text, ggemm, MOE_ENTRY_GGEMM)
{
    struct moe_cuda_ggemm product = {0};
    MOE_GGEMM_FIELDS(SET)
    return text_of(moe_cuda_ggemm_enqueue(&product, stream));
}

/* One handle per process, for the device that is current at the first call. */
static struct moe_status enqueue_cublas(const struct moe_cuda_ggemm *g, void *scratch, void *stream)
{
    static struct moe_cuda_cublas *handle;
    if (handle == NULL)
        MOE_TRY(moe_cuda_cublas_open(&handle));
    return moe_cuda_cublas_enqueue(handle, g, scratch, stream);
}

MOE_ENTRY_PROTOTYPE(text, cublas, MOE_ENTRY_CUBLAS)
{
    struct moe_cuda_ggemm product = {0};
    MOE_GGEMM_FIELDS(SET)
    return text_of(enqueue_cublas(&product, scratch, stream));
}

MOE_ENTRY_PROTOTYPE(size_t, cublas_bytes, MOE_ENTRY_CUBLAS_BYTES)
{
    return moe_cuda_cublas_scratch_bytes(gated, (enum moe_dtype)out_dtype, row_capacity, n);
}

MOE_ENTRY_PROTOTYPE(text, wgrad, MOE_ENTRY_WGRAD)
{
    struct moe_cuda_wgrad product = {0};
    MOE_WGRAD_FIELDS(SET)
    return text_of(moe_cuda_wgrad_enqueue(&product, stream));
}

MOE_ENTRY_PROTOTYPE(text, quantise, MOE_ENTRY_QUANTISE)
{
    struct moe_cuda_quantise product = {0};
    MOE_QUANTISE_FIELDS(SET)
    return text_of(moe_cuda_quantise_enqueue(&product, stream));
}

MOE_ENTRY_PROTOTYPE(size_t, quantised_bytes, MOE_ENTRY_QUANTISED_BYTES)
{
    return moe_cuda_quantised_bytes(rows, columns);
}

MOE_ENTRY_PROTOTYPE(size_t, quantised_offset, MOE_ENTRY_QUANTISED_OFFSET)
{
    return moe_cuda_quantised_offset(rows, columns);
}

/* -------------------------------------------------------------------- weights */

MOE_ENTRY_PROTOTYPE(text, describe, MOE_ENTRY_DESCRIBE)
{
    struct moe_cuda_ggemm_weights described = {.data = NULL};
    struct moe_status st = moe_cuda_ggemm_describe(data, experts, rows, columns, &described);
    if (!moe_failed(&st))
        memcpy(out, &described, sizeof described);
    return text_of(st);
}

/* The struct from the arguments of the same names. */
#define PACKED_WEIGHT                                                                              \
    {                                                                                              \
        .packing = (enum moe_cuda_packing)packing, .entry = entry, .rows = rows,                   \
        .columns = columns, .interleaved = interleaved, .offset = offset, .global = global,        \
        .wrong = wrong                                                                             \
    }
#define FORMAT                                                                                     \
    {                                                                                              \
        .encoding = (enum moe_encoding)encoding, .block_rows = block_rows,                         \
        .block_columns = block_columns, .scale = (enum moe_scale_type)scale,                       \
        .zero_points = zero_points                                                                 \
    }

MOE_ENTRY_PROTOTYPE(text, packed_place, MOE_ENTRY_PACKED_PLACE)
{
    struct moe_cuda_packed_weight w = PACKED_WEIGHT;
    return text_of(moe_cuda_packed_place(&w, src, 0, rows, stream));
}

MOE_ENTRY_PROTOTYPE(text, packed_scale, MOE_ENTRY_PACKED_SCALE)
{
    struct moe_cuda_packed_weight w = PACKED_WEIGHT;
    struct moe_weight_format format = FORMAT;
    return text_of(moe_cuda_packed_scale(&w, &format, src, 0, block_rows == 0 ? 1 : rows, stream));
}

MOE_ENTRY_PROTOTYPE(text, packed_zeros, MOE_ENTRY_PACKED_ZEROS)
{
    struct moe_cuda_packed_weight w = PACKED_WEIGHT;
    struct moe_weight_format format = FORMAT;
    return text_of(moe_cuda_packed_zeros(&w, &format, src, 0, block_rows == 0 ? 1 : rows, stream));
}

MOE_ENTRY_PROTOTYPE(int, packing_of, MOE_ENTRY_PACKING_OF)
{
    struct moe_weight_format format = FORMAT;
    format.activations = (enum moe_activation_format)activations;
    return (int)moe_cuda_packing_of(&format);
}

MOE_ENTRY_PROTOTYPE(size_t, packed_bytes, MOE_ENTRY_PACKED_BYTES)
{
    return moe_cuda_packed_bytes((enum moe_cuda_packing)packing, rows, columns);
}

/* -------------------------------------------------------------------- choices */

#define CHOICE                                                                                     \
    {                                                                                              \
        .bucket = bucket, .slots = slots, .top_k = top_k, .experts = experts, .n = n, .k = k,      \
        .processors = processors                                                                   \
    }

MOE_ENTRY_PROTOTYPE(int, choose_tile, MOE_ENTRY_CHOOSE_TILE)
{
    struct moe_cuda_gemm_params params = CHOICE;
    return (int)moe_cuda_choose_tile(&params);
}

MOE_ENTRY_PROTOTYPE(int, choose_packed_tile, MOE_ENTRY_CHOOSE_TILE)
{
    struct moe_cuda_gemm_params params = CHOICE;
    return (int)moe_cuda_choose_packed_tile(&params);
}

MOE_ENTRY_PROTOTYPE(text, tile_name, MOE_ENTRY_TILE_NAME)
{
    static const text name[MOE_CUDA_TILE_COUNT] = {
        [MOE_CUDA_TILE_DECODE] = "decode",       [MOE_CUDA_TILE_EVEN] = "even",
        [MOE_CUDA_TILE_PINGPONG] = "pingpong",   [MOE_CUDA_TILE_DECODE_64] = "decode_64",
        [MOE_CUDA_TILE_DECODE_32] = "decode_32", [MOE_CUDA_TILE_EVEN_64] = "even_64"};
    return tile >= 0 && tile < MOE_CUDA_TILE_COUNT ? name[tile] : NULL;
}

MOE_ENTRY_PROTOTYPE(int, constant, MOE_ENTRY_CONSTANT)
{
    static const struct {
        text name;
        int value;
    } known[] = {{"F32", MOE_DTYPE_F32},
                 {"BF16", MOE_DTYPE_BF16},
                 {"SWIGLU", MOE_ACT_SWIGLU},
                 {"LATE", MOE_WEIGHT_OUTPUT_LATE},
                 {"F8E4M3", MOE_ENC_F8E4M3},
                 {"E2M1", MOE_ENC_E2M1},
                 {"INT4", MOE_ENC_INT4},
                 {"SCALE_F32", MOE_SCALE_F32},
                 {"SCALE_BF16", MOE_SCALE_BF16},
                 {"SCALE_F16", MOE_SCALE_F16},
                 {"SCALE_E8M0", MOE_SCALE_E8M0},
                 {"SCALE_E4M3", MOE_SCALE_E4M3},
                 {"PLAIN", MOE_ACTIVATIONS_PLAIN},
                 {"F8", MOE_ACTIVATIONS_F8},
                 {"WEIGHTS_BYTES", sizeof(struct moe_cuda_ggemm_weights)},
                 {"WEIGHTS_DATA", offsetof(struct moe_cuda_ggemm_weights, data)}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0)
            return known[i].value;
    return -1;
}
