/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint_copy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void copy_open(struct copy *c, const char *folder)
{
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    assert_ok(moe_st_open(path, &c->file));
    c->count = moe_st_count(c->file);
    assert_true(c->count + 1 < sizeof c->list / sizeof c->list[0]);
    for (size_t i = 0; i < c->count; i++) {
        const struct moe_tensor *t = moe_st_tensor(c->file, i);
        char *data = calloc(1, (size_t)t->bytes + 64); /* room for one element more */
        assert_non_null(data);
        assert_ok(moe_st_read(c->file, t, 0, t->bytes, data));
        c->list[i] = (struct moe_st_out){t->name, t->dtype, t->rank, {0}, data};
        memcpy(c->list[i].shape, t->shape, sizeof t->shape);
    }
}

void copy_close(struct copy *c)
{
    for (size_t i = 0; i < c->count; i++)
        free((void *)(uintptr_t)c->list[i].data);
    moe_st_close(c->file);
}

struct moe_st_out *copy_find(struct copy *c, const char *name)
{
    for (size_t i = 0; i < c->count; i++)
        if (strcmp(c->list[i].name, name) == 0)
            return &c->list[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

void *copy_data(struct copy *c, const char *name)
{
    return (void *)(uintptr_t)copy_find(c, name)->data;
}

void copy_add(struct copy *c, const char *from, const char *name)
{
    struct moe_st_out t = *copy_find(c, from);
    uint64_t bytes;
    assert_true(moe_st_tensor_bytes(t.dtype, t.rank, t.shape, &bytes));
    void *data = malloc((size_t)bytes + 1);
    assert_non_null(data);
    memcpy(data, t.data, (size_t)bytes);
    t.name = name;
    t.data = data;
    c->list[c->count++] = t;
}

void copy_drop(struct copy *c, const char *name)
{
    struct moe_st_out *t = copy_find(c, name);
    free((void *)(uintptr_t)t->data);
    *t = c->list[--c->count];
}

void copy_write(const struct copy *c, const struct fixture *f)
{
    assert_ok(moe_st_write(fixture_path(f, "model.safetensors"), c->list, c->count, NULL));
}

json_t *read_config(const char *folder)
{
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", folder);
    json_t *root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    return root;
}

void write_config(const struct fixture *f, json_t *root)
{
    assert_int_equal(json_dump_file(root, fixture_path(f, "config.json"), 0), 0);
    json_decref(root);
}

struct moe_status try_model(const struct fixture *f)
{
    struct moe_model *m = NULL;
    struct moe_status st = moe_model_open(f->directory, &m);
    for (size_t i = 0; !moe_failed(&st) && i < moe_model_layer_count(m); i++) {
        uint32_t experts[MOE_MAX_EXPERTS], n = moe_model_layer(m, i)->experts;
        for (uint32_t e = 0; e < n; e++)
            experts[e] = e;
        st = moe_model_load_layer(m, i, experts, n, fixture_ignore, NULL, NULL, NULL);
    }
    moe_model_close(m);
    return st;
}

static bool every_format(const struct moe_device *device, const struct moe_weight_format *f)
{
    (void)device;
    (void)f;
    return true;
}

static struct moe_status ignore_packed(void *ctx, enum moe_weight weight, uint32_t expert,
                                       const struct moe_packed_matrix *matrix)
{
    (void)ctx;
    (void)weight;
    (void)expert;
    (void)matrix;
    return moe_ok();
}

static struct moe_status read_source(void *spec, enum moe_weight weight, uint32_t expert,
                                     enum moe_dtype dtype, const struct moe_weight_source *source,
                                     size_t bytes)
{
    char *data = malloc(bytes + 1);
    assert_non_null(data);
    (void)spec;
    (void)weight;
    (void)expert;
    (void)dtype;
    struct moe_status st = source->read(source->ctx, source->at, bytes, data);
    free(data);
    return st;
}

static struct moe_status read_packed_source(void *spec, enum moe_weight weight, uint32_t expert,
                                            const struct moe_packed_source *source)
{
    uint8_t *elements, *scales;
    (void)expert;
    MOE_TRY(fixture_read_packed(spec, weight, source, &elements, &scales));
    free(elements);
    free(scales);
    return moe_ok();
}

/* As try_model, as a backend reads that keeps quantised weights. */
static struct moe_status try_sources(const struct fixture *f)
{
    struct moe_model *m = NULL;
    struct moe_model_sources sources = {0};
    struct moe_status st = moe_model_open(f->directory, &m);
    if (!moe_failed(&st))
        st = moe_model_keep_quantised(m, every_format, NULL, false);
    for (size_t i = 0; !moe_failed(&st) && i < moe_model_layer_count(m); i++) {
        uint32_t experts[MOE_MAX_EXPERTS], n = moe_model_layer(m, i)->experts;
        const struct moe_model_sinks sinks = {.weight = fixture_ignore,
                                              .packed = ignore_packed,
                                              .source = read_source,
                                              .packed_source = read_packed_source,
                                              .ctx = (void *)(uintptr_t)moe_model_layer(m, i),
                                              .sources = &sources};
        for (uint32_t e = 0; e < n; e++)
            experts[e] = e;
        st = moe_model_stream_layer(m, i, experts, n, &sinks, NULL, NULL, NULL);
        moe_model_sources_free(&sources);
    }
    moe_model_close(m);
    return st;
}

static void check_text(struct moe_status st, enum moe_reason reason, const char *named,
                       const char *why)
{
    check_reason(st, reason);
    if (strstr(st.text, named) == NULL || strstr(st.text, why) == NULL)
        fail_msg("%s: names neither %s nor %s", st.text, named, why);
}

void check_refused(const struct fixture *f, enum moe_reason reason, const char *named,
                   const char *why)
{
    check_text(try_model(f), reason, named, why);
    check_text(try_sources(f), reason, named, why);
}

struct moe_digest_table *digests(const struct fixture *f)
{
    struct moe_digest_table *t = NULL;
    struct moe_model *m = open_model(f);
    assert_ok(moe_digest_table_create(&t));
    fixture_digest(m, 2, t);
    assert_true(moe_digest_table_is_complete(t));
    moe_model_close(m);
    return t;
}

void check_flip(const struct fixture *f, struct copy *c, size_t i,
                const struct moe_digest_table *good)
{
    struct moe_digest_difference d;
    uint8_t *data = (void *)(uintptr_t)c->list[i].data;
    bool unused = strstr(c->list[i].name, ".input_") != NULL;
    if (strstr(c->list[i].name, "weight_shape") != NULL || strstr(c->list[i].name, "g_idx") != NULL)
        return; /* a change is refused */
    *data ^= 1;
    copy_write(c, f);
    struct moe_digest_table *bad = digests(f);
    assert_int_equal(moe_digest_table_differs(bad, good, &d), !unused);
    if (!unused && strncmp(d.name, c->list[i].name, strlen(c->list[i].name)) != 0)
        fail_msg("%s was changed, and %s is named", c->list[i].name, d.name);
    moe_digest_table_destroy(bad);
    *data ^= 1;
}
