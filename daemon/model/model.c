/* SPDX-License-Identifier: Apache-2.0 */
/* Opens a model directory and checks that configuration and tensors match. After opening, every
 * weight of every MoE layer exists with the right shape and a readable dtype. Loading a layer can
 * then fail only on I/O or memory. */
#include "model/model.h"

#include "model/json_file.h"
#include "model/model_internal.h"
#include "quant/decode.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CONFIG_BYTES_MAX = 64 * 1024 * 1024 }; /* settings of each expert's modules take megabytes */

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for the model");
}

static void hash_text(struct moe_sha256 *sha, const char *text)
{
    moe_sha256_update(sha, text, strlen(text) + 1); /* the zero separates the parts */
}

static struct moe_status hash_config(struct moe_sha256 *sha, const json_t *root)
{
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    if (text == NULL)
        return no_memory();
    hash_text(sha, text);
    free(text);
    return moe_ok();
}

static void hash_piece(struct moe_sha256 *sha, const struct moe_piece *p)
{
    char line[128];
    const struct moe_tensor *t = p->at.tensor;
    hash_text(sha, t->name);
    hash_text(sha, moe_st_dtype_name(t->dtype));
    hash_text(sha, p->at.shard);
    for (uint32_t i = 0; i < t->rank; i++) {
        snprintf(line, sizeof line, "%llu", (unsigned long long)t->shape[i]);
        hash_text(sha, line);
    }
    snprintf(line, sizeof line, "%llu+%llu", (unsigned long long)(t->offset + p->first),
             (unsigned long long)p->bytes);
    hash_text(sha, line);
}

static struct moe_status hash_visited(void *ctx, enum moe_weight weight, uint32_t expert,
                                      const struct moe_piece *p)
{
    (void)weight;
    (void)expert;
    hash_piece(ctx, p);
    return moe_ok();
}

/* Locates every weight of one layer, which also checks it. */
static struct moe_status check_layer(const struct moe_layout *layout,
                                     const struct moe_layer_spec *spec, struct moe_sha256 *sha)
{
    for (unsigned w = 0; w < MOE_WEIGHT_COUNT; w++) {
        enum moe_weight weight = (enum moe_weight)w;
        uint32_t copies = moe_weight_is_expert(weight) ? spec->experts : 1;
        for (uint32_t e = 0; e < copies; e++)
            MOE_TRY(moe_layout_visit(layout, spec, weight, e, hash_visited, sha));
    }
    if (spec->router.by_token) {
        struct moe_piece table;
        MOE_TRY(moe_layout_token_table(layout, spec, &table));
        hash_piece(sha, &table);
    }
    return moe_ok();
}

static struct moe_status check_layers(struct moe_model *m, const json_t *root)
{
    struct moe_sha256 sha;
    moe_sha256_begin(&sha);
    hash_text(&sha, "moed model 1");
    struct moe_status st = hash_config(&sha, root);
    for (size_t i = 0; i < m->config.layer_count && !moe_failed(&st); i++)
        st = check_layer(&m->layout, &m->config.layers[i], &sha);
    if (!moe_failed(&st))
        st = moe_sha256_finish(&sha, m->fingerprint);
    moe_sha256_drop(&sha);
    return st;
}

static struct moe_status name_by_path(struct moe_model *m, const char *directory)
{
    char *full = realpath(directory, NULL);
    if (full == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_IO, "the model directory cannot be found: %s",
                         strerror(errno));
    const char *slash = strrchr(full, '/');
    m->name = strdup(slash != NULL ? slash + 1 : full);
    m->path = full;
    return m->name != NULL ? moe_ok() : no_memory();
}

static struct moe_status name_as_given(struct moe_model *m, const char *name)
{
    m->name = strdup(name);
    return m->name != NULL ? moe_ok() : no_memory();
}

/* True for a quantization_config that leaves the settings of its modules to ModelOpt's file. */
static bool lacks_modules(const json_t *quantisation)
{
    const char *algorithm = json_string_value(json_object_get(quantisation, "quant_algo"));
    return algorithm != NULL && strcmp(algorithm, "MIXED_PRECISION") == 0 &&
           json_object_get(quantisation, "quantized_layers") == NULL;
}

/* Takes over what config.json lacks, and so into the fingerprint. */
static struct moe_status take_modelopt(json_t *root, json_t *settings)
{
    json_t *own = json_object_get(root, "quantization_config");
    json_t *modules = json_object_get(settings, "quantized_layers");
    json_t *algorithm = json_object_get(settings, "quant_algo");
    if (!json_is_object(settings) || algorithm == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "hf_quant_config.json: quantization.quant_algo is missing");
    if (json_is_object(own))
        return modules == NULL || json_object_set(own, "quantized_layers", modules) == 0
                   ? moe_ok()
                   : no_memory();
    if (json_is_null(algorithm)) /* only the KV cache is quantised */
        return moe_ok();
    return json_object_set_new(settings, "quant_method", json_string("modelopt")) == 0 &&
                   json_object_set(root, "quantization_config", settings) == 0
               ? moe_ok()
               : no_memory();
}

/* ModelOpt has a separate file for the settings of quantisation. Where config.json has none,
 * these become its quantization_config; where it has none of modules, these do. */
static struct moe_status add_modelopt(int directory, json_t *root)
{
    json_t *file = NULL, *own = json_object_get(root, "quantization_config");
    if ((json_is_object(own) && !lacks_modules(own)) ||
        json_is_object(json_object_get(root, "compression_config")))
        return moe_ok();
    struct moe_status st =
        moe_json_read_at(directory, "hf_quant_config.json", CONFIG_BYTES_MAX, &file);
    if (st.code == MOE_NOT_FOUND)
        return moe_ok();
    MOE_TRY(st);
    st = take_modelopt(root, json_object_get(file, "quantization"));
    json_decref(file);
    return st;
}

/* Several schemes have a name in common, if only their settings differ. */
static void name_schemes(struct moe_model *m)
{
    const struct moe_layout *l = &m->layout;
    size_t n = 0;
    for (size_t i = 0; i < l->scheme_count && n < sizeof m->quantisation; i++) {
        size_t k = 0;
        while (l->schemes[k].scheme != l->schemes[i].scheme)
            k++;
        if (k == i)
            n += (size_t)snprintf(m->quantisation + n, sizeof m->quantisation - n, "%s%s",
                                  n > 0 ? ", " : "", l->schemes[i].scheme->name);
    }
}

static struct moe_status read_headers(struct moe_model *m)
{
    struct moe_status st;
    int directory = m->directory;
    json_t *root = NULL;
    struct moe_quant_config quant = {0};
    MOE_TRY_GOTO(st, moe_json_read_at(directory, "config.json", CONFIG_BYTES_MAX, &root), done);
    MOE_TRY_GOTO(st, add_modelopt(directory, root), done);
    MOE_TRY_GOTO(st, moe_config_read(root, &m->config), done);
    MOE_TRY_GOTO(st, moe_quant_config_read(root, m->config.family, &quant), done);
    MOE_TRY_GOTO(st, moe_checkpoint_open(directory, &m->checkpoint), done);
    MOE_TRY_GOTO(st, moe_layout_open(m->checkpoint, &m->config, &quant, &m->layout), done);
    MOE_TRY_GOTO(st, check_layers(m, root), done);
    MOE_TRY_GOTO(st, moe_layout_refuse_unread(&m->layout, &m->config), done);
    name_schemes(m);
done:
    moe_quant_config_free(&quant);
    json_decref(root);
    return st;
}

static struct moe_status open_directory(struct moe_model *m, int at, const char *path, int flags)
{
    m->directory = openat(at, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
    if (m->directory < 0)
        return moe_error(errno == ENOENT ? MOE_NOT_FOUND : MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "the model directory cannot be opened: %s", strerror(errno));
    return moe_ok();
}

typedef struct moe_status name_fn(struct moe_model *m, const char *directory);

static struct moe_status open_model(int at, const char *path, int flags, name_fn *name,
                                    struct moe_model **out)
{
    struct moe_status st;
    struct moe_model *m = calloc(1, sizeof *m);
    if (m == NULL)
        return no_memory();
    m->directory = -1;
    MOE_TRY_GOTO(st, name(m, path), fail);
    MOE_TRY_GOTO(st, open_directory(m, at, path, flags), fail);
    MOE_TRY_GOTO(st, read_headers(m), fail);
    *out = m;
    return st;
fail:
    moe_model_close(m);
    return st;
}

struct moe_status moe_model_open(const char *directory, struct moe_model **out)
{
    return open_model(AT_FDCWD, directory, 0, name_by_path, out);
}

struct moe_status moe_model_open_at(int at, const char *name, struct moe_model **out)
{
    return open_model(at, name, O_NOFOLLOW, name_as_given, out);
}

void moe_model_close(struct moe_model *m)
{
    if (m == NULL)
        return;
    moe_checkpoint_close(m->checkpoint);
    if (m->directory >= 0)
        close(m->directory);
    free(m->name);
    free(m->path);
    free(m);
}

const char *moe_model_name(const struct moe_model *m)
{
    return m->name;
}

const char *moe_model_path(const struct moe_model *m)
{
    return m->path != NULL ? m->path : m->name;
}

const char *moe_model_family(const struct moe_model *m)
{
    return m->config.model_type;
}

const char *moe_model_fingerprint(const struct moe_model *m)
{
    return m->fingerprint;
}

size_t moe_model_layer_count(const struct moe_model *m)
{
    return m->config.layer_count;
}

const struct moe_layer_spec *moe_model_layer(const struct moe_model *m, size_t i)
{
    return i < m->config.layer_count ? &m->config.layers[i] : NULL;
}

/* ---- experts by token id ---- */

static int64_t stored_id(const struct moe_tensor *t, const char *data, size_t i)
{
    int64_t wide;
    int32_t narrow;
    if (t->dtype == MOE_ST_I64) {
        memcpy(&wide, data + i * sizeof wide, sizeof wide);
        return wide;
    }
    memcpy(&narrow, data + i * sizeof narrow, sizeof narrow);
    return narrow;
}

/* Takes over K ids of a token, from `data` on. An id may occur more than once: each counts. */
static struct moe_status take_row(const struct moe_layer_spec *spec, const struct moe_tensor *t,
                                  const char *data, size_t token, uint16_t *row)
{
    for (size_t k = 0; k < spec->router.top_k; k++) {
        int64_t id = stored_id(t, data, token * spec->router.top_k + k);
        if (id < 0 || id >= (int64_t)spec->experts)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                             "tensor %.120s: token %zu: expert %lld is not in 0 to %u", t->name,
                             token, (long long)id, spec->experts - 1);
        row[k] = (uint16_t)id;
    }
    return moe_ok();
}

static struct moe_status take_rows(const struct moe_layer_spec *spec, const struct moe_piece *p,
                                   const char *data, uint16_t *ids)
{
    for (size_t token = 0; token < p->rows; token++)
        MOE_TRY(take_row(spec, p->at.tensor, data, token, ids + token * p->columns));
    return moe_ok();
}

static struct moe_status read_table(const struct moe_model *m, const struct moe_layer_spec *spec,
                                    struct moe_token_table *out)
{
    struct moe_piece p;
    MOE_TRY(moe_layout_token_table(&m->layout, spec, &p));
    char *data = malloc((size_t)p.bytes);
    uint16_t *ids = calloc(p.rows * p.columns, sizeof *ids);
    *out = (struct moe_token_table){.layer = spec->layer,
                                    .vocabulary = spec->router.vocabulary,
                                    .top_k = spec->router.top_k,
                                    .ids = ids};
    struct moe_status st = data == NULL || ids == NULL
                               ? no_memory()
                               : moe_st_read(p.at.file, p.at.tensor, 0, p.bytes, data);
    if (!moe_failed(&st))
        st = take_rows(spec, &p, data, ids);
    free(data);
    return st;
}

struct moe_status moe_model_read_token_tables(const struct moe_model *m,
                                              struct moe_token_tables *out)
{
    struct moe_status st = moe_ok();
    *out = (struct moe_token_tables){.of = calloc(m->config.layer_count, sizeof *out->of)};
    if (out->of == NULL)
        return no_memory();
    for (size_t i = 0; i < m->config.layer_count && !moe_failed(&st); i++)
        if (m->config.layers[i].router.by_token)
            st = read_table(m, &m->config.layers[i], &out->of[out->count++]);
    if (moe_failed(&st))
        moe_token_tables_free(out);
    return st;
}

void moe_token_tables_free(struct moe_token_tables *t)
{
    for (size_t i = 0; i < t->count; i++)
        free(t->of[i].ids);
    free(t->of);
    *t = (struct moe_token_tables){0};
}

const struct moe_token_table *moe_token_tables_find(const struct moe_token_tables *t,
                                                    uint32_t layer)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->of[i].layer == layer)
            return &t->of[i];
    return NULL;
}

const char *moe_model_quantisation(const struct moe_model *m)
{
    return m->quantisation[0] != '\0' ? m->quantisation : NULL;
}

/* ---- quantised matrices that stay as they are ---- */

/* The types of scales in the files of some matrices. */
struct scales {
    bool any, several;
    enum moe_scale_type type;
};

static struct moe_status note_scale(void *ctx, enum moe_weight weight, uint32_t expert,
                                    const struct moe_piece *p)
{
    struct scales *s = ctx;
    enum moe_scale_type type;
    (void)weight;
    (void)expert;
    if (p->part != MOE_QUANT_SCALE)
        return moe_ok();
    MOE_INVARIANT(moe_quant_scale_type(moe_st_dtype_name(p->at.tensor->dtype), &type));
    s->several |= s->any && s->type != type;
    s->any = true;
    s->type = type;
    return moe_ok();
}

static struct moe_status no_w8a8(const struct moe_layer_spec *spec, enum moe_weight first,
                                 const char *why)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                     "layer %u: %s experts in FP8 cannot have FP8 activations (W8A8): %s",
                     spec->layer, first == MOE_WEIGHT_GATE ? "routed" : "shared", why);
}

/* Whom to ask whether matrices stay as they are. */
struct keeper {
    moe_computes_fn computes;
    const struct moe_device *device;
    bool w8a8;
};

/* Chooses W8A8 for the format `f` of FP8 matrices. */
static struct moe_status choose_w8a8(const struct moe_layer_spec *spec, enum moe_weight first,
                                     const struct moe_quant *quant, const struct keeper *k,
                                     struct moe_weight_format *f)
{
    if (f->encoding != MOE_ENC_F8E4M3)
        return moe_ok();
    f->activations = quant->activations;
    if (f->activations == MOE_ACTIVATIONS_PLAIN)
        return no_w8a8(spec, first, "config.json asks for no dynamic ones that are known here");
    return k->computes(k->device, f)
               ? moe_ok()
               : no_w8a8(spec, first, "this backend does not compute with them");
}

/* The format of the matrices from `first` on, of all experts: gate (if there is one), up, down. */
static struct moe_status find_format(const struct moe_model *m, const struct moe_layer_spec *spec,
                                     enum moe_weight first, const struct keeper *k,
                                     struct moe_weight_format *out)
{
    const struct moe_quant *quant = moe_layout_quant(&m->layout, spec, first);
    struct scales scales = {0};
    *out = (struct moe_weight_format){.encoding = MOE_ENC_NONE};
    if (quant == NULL)
        return moe_ok();
    if (k->computes == NULL)
        return k->w8a8 && quant->format.encoding == MOE_ENC_F8E4M3
                   ? no_w8a8(spec, first, "they are decoded to BF16")
                   : moe_ok();
    for (unsigned w = first; w < first + 3u; w++)
        for (uint32_t e = 0; e < (moe_weight_is_expert(first) ? spec->experts : 1); e++)
            MOE_TRY(moe_layout_visit(&m->layout, spec, (enum moe_weight)w, e, note_scale, &scales));
    struct moe_weight_format f = moe_quant_packed_format(quant, scales.type, scales.several);
    if (k->w8a8)
        MOE_TRY(choose_w8a8(spec, first, quant, k, &f));
    if (k->computes(k->device, &f))
        *out = f;
    return moe_ok();
}

struct moe_status moe_model_keep_quantised(struct moe_model *m, moe_computes_fn computes,
                                           const struct moe_device *device, bool w8a8)
{
    const struct keeper k = {.computes = computes, .device = device, .w8a8 = w8a8};
    for (size_t i = 0; i < m->config.layer_count; i++) {
        struct moe_layer_spec *spec = &m->config.layers[i];
        MOE_TRY(find_format(m, spec, MOE_WEIGHT_GATE, &k, &spec->routed_format));
        if (spec->shared_intermediate != 0)
            MOE_TRY(find_format(m, spec, MOE_WEIGHT_SHARED_GATE, &k, &spec->shared_format));
    }
    return moe_ok();
}

bool moe_model_decodes(const struct moe_model *m)
{
    static const enum moe_weight of[] = {MOE_WEIGHT_GATE, MOE_WEIGHT_SHARED_GATE};
    for (size_t i = 0; i < m->config.layer_count; i++) {
        const struct moe_layer_spec *spec = &m->config.layers[i];
        for (size_t w = 0; w < (spec->shared_intermediate != 0 ? 2 : 1); w++)
            if (moe_layout_quant(&m->layout, spec, of[w]) != NULL &&
                moe_weight_format_of(spec, of[w]) == NULL)
                return true;
    }
    return false;
}

bool moe_model_decodes_projections(const struct moe_model *m)
{
    for (size_t i = 0; i < m->config.layer_count; i++) {
        const struct moe_layer_spec *spec = &m->config.layers[i];
        if (moe_layout_quant(&m->layout, spec, MOE_WEIGHT_TO_LATENT) != NULL ||
            moe_layout_quant(&m->layout, spec, MOE_WEIGHT_FROM_LATENT) != NULL)
            return true;
    }
    return false;
}
