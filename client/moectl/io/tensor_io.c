/* SPDX-License-Identifier: Apache-2.0 */
/* See tensor_io.h. */
#include "moectl/io/tensor_io.h"

#include "base/size.h"
#include "model/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static enum moe_dtype to_dtype(enum moe_st_dtype d)
{
    return d == MOE_ST_F32 ? MOE_DTYPE_F32 : d == MOE_ST_BF16 ? MOE_DTYPE_BF16 : MOE_DTYPE_NONE;
}

static struct moe_status invalid(const char *name, const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID, "tensor %s %s", name, what);
}

/* The error for a tensor that cannot be x. */
static struct moe_status unfit(const struct moe_tensor *t)
{
    char shape[96] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < (uint32_t)t->rank && used < sizeof shape; i++)
        used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%" PRIu64, i > 0 ? "," : "",
                                 (uint64_t)t->shape[i]);
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                     "tensor %.100s is %s [%s]; a 2-D F32 or BF16 tensor is needed", t->name,
                     moe_st_dtype_name(t->dtype), shape);
}

static bool is_candidate(const struct moe_tensor *t)
{
    return t->rank == 2 && to_dtype(t->dtype) != MOE_DTYPE_NONE;
}

/* Finds the only candidate of the file; else the error lists as many as fit. */
static struct moe_status find_only(const struct moe_st_file *f, const struct moe_tensor **out)
{
    char names[80] = ""; /* so that sentence and path fit in MOE_STATUS_TEXT */
    size_t used = 0, found = 0;
    bool more = false;
    for (size_t i = 0; i < moe_st_count(f); i++) {
        const struct moe_tensor *t = moe_st_tensor(f, i);
        if (!is_candidate(t))
            continue;
        *out = t;
        found++;
        size_t length = strlen(t->name) + 1;
        more = more || used + length >= sizeof names; /* whole names only */
        if (!more)
            used += (size_t)snprintf(names + used, sizeof names - used, " %s", t->name);
    }
    if (found == 1)
        return moe_ok();
    if (found == 0 && moe_st_count(f) == 1)
        return unfit(moe_st_tensor(f, 0));
    if (found == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_MISSING,
                         "the file has no 2-D F32 or BF16 tensor");
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                     "the file has %zu 2-D F32 or BF16 tensors, choose one with --tensor:%s%s",
                     found, names, more ? " …" : "");
}

static struct moe_status find(const struct moe_st_file *f, const char *name,
                              const struct moe_tensor **out)
{
    *out = moe_st_find(f, name);
    if (*out == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_TENSOR_MISSING, "the file has no tensor %.100s",
                         name);
    return moe_ok();
}

static struct moe_status read_all(const struct moe_st_file *f, const struct moe_tensor *t,
                                  void **out)
{
    *out = malloc(t->bytes > 0 ? t->bytes : 1);
    if (*out == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "tensor %.100s",
                         t->name);
    return moe_st_read(f, t, 0, t->bytes, *out);
}

static struct moe_status read_x(const struct moe_st_file *f, const char *name,
                                struct moectl_tokens *out)
{
    const struct moe_tensor *t = NULL;
    if (name == NULL)
        MOE_TRY(find_only(f, &t));
    else
        MOE_TRY(find(f, name, &t));
    if (!is_candidate(t))
        return unfit(t);
    if (t->shape[0] == 0 || t->shape[0] > UINT32_MAX || t->shape[1] == 0 ||
        t->shape[1] > MOE_MAX_HIDDEN)
        return invalid(t->name, "has an invalid shape");
    out->tokens = (uint32_t)t->shape[0];
    out->width = (uint32_t)t->shape[1];
    out->dtype = to_dtype(t->dtype);
    return read_all(f, t, &out->data);
}

static struct moe_status read_routing(const struct moe_st_file *f, const char *name,
                                      enum moe_st_dtype dtype, struct moectl_tokens *x, void **out)
{
    const struct moe_tensor *t;
    if (name == NULL)
        return moe_ok();
    MOE_TRY(find(f, name, &t));
    if (t->dtype != dtype)
        return invalid(name, dtype == MOE_ST_I32 ? "is not I32" : "is not F32");
    if (t->rank != 2 || t->shape[0] != x->tokens || t->shape[1] == 0 ||
        t->shape[1] > MOE_MAX_TOP_K || (x->top_k != 0 && t->shape[1] != x->top_k))
        return invalid(name, "does not fit the tokens");
    x->top_k = (uint32_t)t->shape[1];
    return read_all(f, t, out);
}

static struct moe_status read_token_ids(const struct moe_st_file *f, const char *name,
                                        const struct moectl_tokens *x, void **out)
{
    const struct moe_tensor *t;
    if (name == NULL)
        return moe_ok();
    MOE_TRY(find(f, name, &t));
    if (t->dtype != MOE_ST_I64)
        return invalid(name, "is not I64");
    if (t->rank != 1 || t->shape[0] != x->tokens)
        return invalid(name, "does not fit the tokens");
    return read_all(f, t, out);
}

struct moe_status moectl_tokens_read(const char *path, const struct moectl_tensor_names *names,
                                     struct moectl_tokens *out)
{
    struct moe_st_file *f = NULL;
    void *ids = NULL, *weights = NULL, *token_ids = NULL;
    *out = (struct moectl_tokens){0};
    struct moe_status st = moe_st_open(path, &f);
    if (st.code == MOE_OK)
        st = read_x(f, names->x, out);
    if (st.code == MOE_OK)
        st = read_routing(f, names->topk_ids, MOE_ST_I32, out, &ids);
    if (st.code == MOE_OK)
        st = read_routing(f, names->topk_weights, MOE_ST_F32, out, &weights);
    if (st.code == MOE_OK)
        st = read_token_ids(f, names->token_ids, out, &token_ids);
    out->topk_ids = ids;
    out->topk_weights = weights;
    out->token_ids = token_ids;
    moe_st_close(f);
    if (st.code != MOE_OK)
        moectl_tokens_free(out);
    return moe_error_context(st, "%s", path);
}

struct moe_status moectl_tokens_convert(struct moectl_tokens *t, enum moe_dtype dtype)
{
    size_t count = (size_t)t->tokens * t->width, bytes;
    if (t->dtype == dtype)
        return moe_ok();
    void *data = moe_size_mul(count, moe_dtype_bytes(dtype), &bytes) ? malloc(bytes) : NULL;
    if (data == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "conversion");
    for (size_t i = 0; i < count; i++) {
        if (dtype == MOE_DTYPE_BF16)
            ((uint16_t *)data)[i] = moe_f32_to_bf16(((const float *)t->data)[i]);
        else
            ((float *)data)[i] = moe_bf16_to_f32(((const uint16_t *)t->data)[i]);
    }
    free(t->data);
    t->data = data;
    t->dtype = dtype;
    return moe_ok();
}

void moectl_tokens_free(struct moectl_tokens *t)
{
    free(t->data);
    free(t->topk_ids);
    free(t->topk_weights);
    free(t->token_ids);
    *t = (struct moectl_tokens){0};
}

/* Whether the directory of `path` exists. */
static bool has_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *directory =
        slash == NULL || slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
    bool there = directory != NULL && access(directory, F_OK) == 0;
    free(directory);
    return there;
}

struct moe_status moectl_tokens_write(const char *path, const struct moectl_tokens *y)
{
    struct moe_st_out tensors[3] = {
        {.name = "y",
         .dtype = y->dtype == MOE_DTYPE_F32 ? MOE_ST_F32 : MOE_ST_BF16,
         .rank = 2,
         .shape = {y->tokens, y->width},
         .data = y->data},
        {.name = "topk_ids",
         .dtype = MOE_ST_I32,
         .rank = 2,
         .shape = {y->tokens, y->top_k},
         .data = y->topk_ids},
        {.name = "topk_weights",
         .dtype = MOE_ST_F32,
         .rank = 2,
         .shape = {y->tokens, y->top_k},
         .data = y->topk_weights},
    };
    size_t count = y->topk_ids != NULL ? 3 : 1;
    struct moe_status st = moe_st_write(path, tensors, count, NULL);
    /* For the exit code: a missing directory is "not found", and a full disk is not a conflict. */
    if (st.code == MOE_FAILED_PRECONDITION)
        st.code = has_directory(path) ? MOE_UNKNOWN : MOE_NOT_FOUND;
    return moe_error_context(st, "%s", path);
}
