/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens from and to safetensors files. */
#ifndef MOECTL_TENSOR_IO_H
#define MOECTL_TENSOR_IO_H

#include "base/status.h"
#include "moe/types.h"

struct moectl_tokens {
    uint32_t tokens, width;
    enum moe_dtype dtype;
    void *data;          /* [tokens, width]; free with free() */
    int32_t *topk_ids;   /* [tokens, k] or NULL; free with free() */
    float *topk_weights; /* [tokens, k] or NULL; free with free() */
    uint32_t top_k;      /* of topk_ids; 0 without */
    int64_t *token_ids;  /* [tokens] or NULL; free with free() */
};

/* Which tensors of a file to read; NULL = see below. */
struct moectl_tensor_names {
    const char *x;            /* NULL = the only 2-D F32 or BF16 tensor */
    const char *topk_ids;     /* I32; NULL = none */
    const char *topk_weights; /* F32; NULL = none */
    const char *token_ids;    /* I64; NULL = none */
};

/* Errors: MOE_NOT_FOUND (file, tensor), MOE_INVALID_ARGUMENT (no or several candidates, shapes). */
struct moe_status moectl_tokens_read(const char *path, const struct moectl_tensor_names *names,
                                     struct moectl_tokens *out) MOE_CHECKED;
/* To F32 or BF16 (rounded to nearest even). */
struct moe_status moectl_tokens_convert(struct moectl_tokens *t, enum moe_dtype dtype) MOE_CHECKED;
void moectl_tokens_free(struct moectl_tokens *t);

/* Writes tensor `y` and, where `y` has routing, `topk_ids` and `topk_weights`. */
struct moe_status moectl_tokens_write(const char *path, const struct moectl_tokens *y) MOE_CHECKED;

#endif
