/* SPDX-License-Identifier: Apache-2.0 */
/* Names, shapes and strides: finds each weight in the checkpoint and describes how to read it.
 * Reads no data. Refuses any shape that does not exactly match a known one. */
#include "model/layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 192, SHAPE_BYTES = 56 };

static const char *const prefixes[] = {
    "model.layers.",          "model.language_model.layers.",   "language_model.model.layers.",
    "language_model.layers.", "thinker.model.layers.",          "layers.",
    "backbone.layers.",       "language_model.backbone.layers."};

static struct moe_status missing(const char *name)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_MISSING,
                     "the checkpoint lacks tensor %.150s", name);
}

/* "[8, 64]" */
static void print_shape(char to[SHAPE_BYTES], const uint64_t *dims, uint32_t rank)
{
    size_t at = (size_t)snprintf(to, SHAPE_BYTES, "[");
    for (uint32_t i = 0; i < rank && at < SHAPE_BYTES; i++)
        at += (size_t)snprintf(to + at, SHAPE_BYTES - at, "%s%" PRIu64, i > 0 ? ", " : "", dims[i]);
    if (at < SHAPE_BYTES)
        snprintf(to + at, SHAPE_BYTES - at, "]");
}

static struct moe_status wrong_shape(const struct moe_tensor *t, const uint64_t *dims,
                                     uint32_t rank)
{
    char has[SHAPE_BYTES], wanted[SHAPE_BYTES];
    print_shape(has, t->shape, t->rank);
    print_shape(wanted, dims, rank);
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                     "tensor %.80s is %s; config.json implies %s", t->name, has, wanted);
}

/* prefix + layer + "." + pattern, with '*' replaced by the expert. */
static void build_name(char name[NAME_BYTES], const char *prefix, uint32_t layer,
                       const char *pattern, uint32_t expert)
{
    const char *star = strchr(pattern, '*');
    int head = star != NULL ? (int)(star - pattern) : (int)strlen(pattern);
    int n = snprintf(name, NAME_BYTES, "%s%u.%.*s", prefix, layer, head, pattern);
    if (star != NULL && n > 0 && n < NAME_BYTES)
        n += snprintf(name + n, (size_t)(NAME_BYTES - n), "%u%s", expert, star + 1);
    MOE_INVARIANT(n > 0 && n < NAME_BYTES);
}

static struct moe_status find_prefix(const struct moe_checkpoint *checkpoint,
                                     const struct moe_config *config, struct moe_layout *out)
{
    char name[NAME_BYTES];
    struct moe_checkpoint_tensor t;
    const char *router = config->family->naming->of[MOE_WEIGHT_ROUTER];
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        build_name(name, prefixes[i], config->layers[0].layer, router, 0);
        if (moe_checkpoint_find(checkpoint, name, &t)) {
            out->prefix = prefixes[i];
            return moe_ok();
        }
    }
    build_name(name, prefixes[0], config->layers[0].layer, router, 0);
    return missing(name);
}

/* `dtypes`: those that the tensor may have, for `scheme`, or NULL. */
static struct moe_status find_as(const struct moe_layout *l, const struct moe_layer_spec *spec,
                                 const char *pattern, uint32_t expert, const char *dtypes,
                                 const char *scheme, struct moe_checkpoint_tensor *out)
{
    char name[NAME_BYTES];
    build_name(name, l->prefix, spec->layer, pattern, expert);
    if (!moe_checkpoint_find(l->checkpoint, name, out))
        return missing(name);
    const char *dtype = moe_st_dtype_name(out->tensor->dtype);
    if (moe_word_in(dtype, dtypes))
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                     "tensor %.120s is %s; for %s these can be loaded: %s", name, dtype,
                     scheme != NULL ? scheme : "a weight that is not quantised", dtypes);
}

static struct moe_status find(const struct moe_layout *l, const struct moe_layer_spec *spec,
                              const char *pattern, uint32_t expert,
                              struct moe_checkpoint_tensor *out)
{
    return find_as(l, spec, pattern, expert, "F32 BF16 F16", NULL, out);
}

/* Compares shapes without dimensions of size 1: [1, E] equals [E]. */
static bool shape_is(const struct moe_tensor *t, const uint64_t *dims, uint32_t rank)
{
    uint32_t i = 0, k = 0;
    for (;;) {
        while (i < t->rank && t->shape[i] == 1)
            i++;
        while (k < rank && dims[k] == 1)
            k++;
        if (i == t->rank || k == rank)
            return i == t->rank && k == rank;
        if (t->shape[i++] != dims[k++])
            return false;
    }
}

/* A tensor with exactly one weight. */
static struct moe_status whole(const struct moe_layout *l, const struct moe_layer_spec *spec,
                               const char *pattern, uint32_t expert, struct moe_piece *p)
{
    MOE_TRY(find(l, spec, pattern, expert, &p->at));
    uint64_t dims[2] = {p->rows, p->columns};
    if (!shape_is(p->at.tensor, dims, 2))
        return wrong_shape(p->at.tensor, dims, 2);
    p->first = 0;
    p->bytes = p->at.tensor->bytes;
    p->base = 0;
    p->row_step = p->columns;
    p->column_step = 1;
    return moe_ok();
}

struct moe_status moe_layout_token_table(const struct moe_layout *l,
                                         const struct moe_layer_spec *spec, struct moe_piece *out)
{
    const char *pattern = l->family->naming->token_table;
    const uint64_t dims[2] = {spec->router.vocabulary, spec->router.top_k};
    MOE_INVARIANT(spec->router.by_token && pattern != NULL);
    *out = (struct moe_piece){.rows = (size_t)dims[0],
                              .columns = (size_t)dims[1],
                              .row_step = (size_t)dims[1],
                              .column_step = 1,
                              .part = MOE_QUANT_DATA};
    MOE_TRY(find_as(l, spec, pattern, 0, "I64 I32", "experts by token id", &out->at));
    if (!shape_is(out->at.tensor, dims, 2))
        return wrong_shape(out->at.tensor, dims, 2);
    out->bytes = out->at.tensor->bytes;
    return moe_ok();
}

/* Narrows `p` to the part of expert `e` of E: whole rows of a leading dimension, so whole bytes. */
static void take_expert(struct moe_piece *p, uint64_t experts, uint32_t e)
{
    p->bytes = p->at.tensor->bytes / experts;
    p->first = e * p->bytes;
}

/* Gate (which = 0) or up (1) out of [2I, columns]: a half that is contiguous, or every other row.
 */
static void split_rows(struct moe_piece *p, uint32_t which, bool interleaved)
{
    p->column_step = 1;
    if (interleaved) {
        p->base = which * p->columns;
        p->row_step = 2 * p->columns;
        return;
    }
    p->bytes /= 2;
    p->first += which * p->bytes;
    p->base = 0;
    p->row_step = p->columns;
}

/* The same out of [H, 2I]: stored columns become rows. */
static void split_columns(struct moe_piece *p, uint32_t which, bool interleaved)
{
    p->base = interleaved ? which : which * p->rows;
    p->row_step = interleaved ? 2 : 1;
    p->column_step = 2 * p->rows;
}

/* True for [E, H, 2I] and [E, I, H]. 2I = H and I = H cannot both hold, so the two shapes
 * together determine the orientation. */
static struct moe_status fused_is_transposed(const struct moe_layout *l,
                                             const struct moe_layer_spec *spec, const char *gate_up,
                                             const char *down, bool *transposed)
{
    struct moe_checkpoint_tensor g, d;
    uint64_t e = spec->experts, h = moe_expert_width(spec), i = spec->intermediate;
    MOE_TRY(find(l, spec, gate_up, 0, &g));
    MOE_TRY(find(l, spec, down, 0, &d));
    const uint64_t gate_up_dims[] = {e, 2 * i, h}, down_dims[] = {e, h, i};
    bool gate_up_straight = shape_is(g.tensor, gate_up_dims, 3);
    bool straight = gate_up_straight && shape_is(d.tensor, down_dims, 3);
    *transposed = shape_is(g.tensor, (uint64_t[]){e, h, 2 * i}, 3) &&
                  shape_is(d.tensor, (uint64_t[]){e, i, h}, 3);
    if (straight || *transposed)
        return moe_ok();
    return gate_up_straight ? wrong_shape(d.tensor, down_dims, 3)
                            : wrong_shape(g.tensor, gate_up_dims, 3);
}

struct fused_names {
    char gate_up[64], down[64], gate_up_bias[64], down_bias[64];
};

static void name_fused(struct fused_names *n, const struct moe_naming *naming)
{
    const char *block = naming->block;
    snprintf(n->gate_up, sizeof n->gate_up, "%s.experts.gate_up_proj", block);
    snprintf(n->down, sizeof n->down, "%s.experts.down_proj", block);
    if (naming->fused_gate_up != NULL) {
        snprintf(n->gate_up, sizeof n->gate_up, "%s", naming->fused_gate_up);
        snprintf(n->down, sizeof n->down, "%s", naming->fused_down);
    }
    snprintf(n->gate_up_bias, sizeof n->gate_up_bias, "%s.experts.gate_up_proj_bias", block);
    snprintf(n->down_bias, sizeof n->down_bias, "%s.experts.down_proj_bias", block);
}

static struct moe_status fused_bias(const struct moe_layout *l, const struct moe_layer_spec *spec,
                                    const struct fused_names *names, enum moe_weight weight,
                                    uint32_t expert, struct moe_piece *p)
{
    bool down = weight == MOE_WEIGHT_DOWN_BIAS;
    MOE_TRY(find(l, spec, down ? names->down_bias : names->gate_up_bias, 0, &p->at));
    uint64_t dims[2] = {spec->experts, down ? p->rows : 2 * p->rows};
    if (!shape_is(p->at.tensor, dims, 2))
        return wrong_shape(p->at.tensor, dims, 2);
    take_expert(p, spec->experts, expert);
    p->base = 0;
    p->row_step = p->column_step = 1;
    if (!down)
        split_rows(p, weight == MOE_WEIGHT_UP_BIAS, l->family->interleaved);
    return moe_ok();
}

static struct moe_status fused(const struct moe_layout *l, const struct moe_layer_spec *spec,
                               const struct fused_names *names, enum moe_weight weight,
                               uint32_t expert, struct moe_piece *p)
{
    bool transposed = false, down = weight == MOE_WEIGHT_DOWN;
    if (weight >= MOE_WEIGHT_GATE_BIAS && weight <= MOE_WEIGHT_DOWN_BIAS)
        return fused_bias(l, spec, names, weight, expert, p);
    MOE_TRY(fused_is_transposed(l, spec, names->gate_up, names->down, &transposed));
    MOE_TRY(find(l, spec, down ? names->down : names->gate_up, 0, &p->at));
    take_expert(p, spec->experts, expert);
    if (down) {
        p->base = 0;
        p->row_step = transposed ? 1 : p->columns;
        p->column_step = transposed ? p->rows : 1;
    } else if (transposed) {
        split_columns(p, weight == MOE_WEIGHT_UP, l->family->interleaved);
    } else {
        split_rows(p, weight == MOE_WEIGHT_UP, l->family->interleaved);
    }
    return moe_ok();
}

static bool layer_is_fused(const struct moe_layout *l, const struct moe_layer_spec *spec,
                           const struct fused_names *names)
{
    char name[NAME_BYTES];
    struct moe_checkpoint_tensor t;
    const struct moe_quant *quant = moe_layout_quant(l, spec, MOE_WEIGHT_UP);
    if (quant != NULL)
        return quant->scheme->fused;
    if (!moe_activation_has_gate(spec->activation))
        return false;
    build_name(name, l->prefix, spec->layer, names->gate_up, 0);
    return l->family->naming->of[MOE_WEIGHT_GATE] == NULL ||
           moe_checkpoint_find(l->checkpoint, name, &t);
}

bool moe_layout_is_fused(const struct moe_layout *l, const struct moe_layer_spec *spec)
{
    struct fused_names names;
    name_fused(&names, l->family->naming);
    return layer_is_fused(l, spec, &names);
}

/* A weight that is not quantised. */
static struct moe_status locate_plain(const struct moe_layout *l, const struct moe_layer_spec *spec,
                                      enum moe_weight weight, uint32_t expert,
                                      struct moe_piece *out)
{
    const char *pattern = l->family->naming->of[weight];
    if (!moe_weight_is_expert(weight)) {
        MOE_INVARIANT(pattern != NULL);
        return whole(l, spec, pattern, 0, out);
    }
    struct fused_names names;
    name_fused(&names, l->family->naming);
    if (layer_is_fused(l, spec, &names))
        return fused(l, spec, &names, weight, expert, out);
    return whole(l, spec, pattern, expert, out);
}

/* ---- quantised weights ---- */

static enum moe_layout_group group_of(enum moe_weight w)
{
    switch (w) {
    case MOE_WEIGHT_GATE:
    case MOE_WEIGHT_UP:
    case MOE_WEIGHT_DOWN: return MOE_LAYOUT_ROUTED;
    case MOE_WEIGHT_SHARED_GATE:
    case MOE_WEIGHT_SHARED_UP:
    case MOE_WEIGHT_SHARED_DOWN: return MOE_LAYOUT_SHARED;
    case MOE_WEIGHT_TO_LATENT: return MOE_LAYOUT_TO_LATENT;
    case MOE_WEIGHT_FROM_LATENT: return MOE_LAYOUT_FROM_LATENT;
    default: return MOE_LAYOUT_GROUPS; /* never quantised */
    }
}

const struct moe_quant *moe_layout_quant(const struct moe_layout *l,
                                         const struct moe_layer_spec *spec, enum moe_weight weight)
{
    enum moe_layout_group group = group_of(weight);
    uint8_t number = group < MOE_LAYOUT_GROUPS ? l->scheme_of[spec->layer][group] : 0;
    return number != 0 ? &l->schemes[number - 1] : NULL;
}

/* The pattern of a matrix without the part of its name that a scheme replaces: that of the module,
 * or of the fused tensor. */
static void stem_of(const struct moe_layout *l, enum moe_weight weight, bool is_fused,
                    char stem[NAME_BYTES])
{
    if (is_fused) {
        struct fused_names names;
        name_fused(&names, l->family->naming);
        snprintf(stem, NAME_BYTES, "%s",
                 weight == MOE_WEIGHT_DOWN               ? names.down
                 : weight == MOE_WEIGHT_DOWN_BIAS        ? names.down_bias
                 : group_of(weight) == MOE_LAYOUT_ROUTED ? names.gate_up
                                                         : names.gate_up_bias);
        return;
    }
    const char *pattern = l->family->naming->of[weight];
    size_t n = strlen(pattern), end = strlen(".weight");
    MOE_INVARIANT(n > end && strcmp(pattern + n - end, ".weight") == 0);
    snprintf(stem, NAME_BYTES, "%.*s", (int)(n - end), pattern);
}

static void append_suffix(char pattern[NAME_BYTES], const char *stem, const char *suffix)
{
    int n = snprintf(pattern, NAME_BYTES, "%s%.*s", stem, (int)strcspn(suffix, " "), suffix);
    MOE_INVARIANT(n > 0 && n < NAME_BYTES);
}

/* The suffix after `at` in a list, or NULL. A list of one empty suffix is the stem itself. */
static const char *next_suffix(const char *at)
{
    at += strcspn(at, " ");
    return *at == ' ' ? at + 1 : NULL;
}

/* The one suffix of a part that exists, or the first one. Errors: TENSOR_INVALID (several). */
static struct moe_status choose_suffix(const struct moe_layout *l,
                                       const struct moe_layer_spec *spec, const char *stem,
                                       uint32_t expert, const char *suffixes,
                                       char pattern[NAME_BYTES], bool *exists)
{
    char name[NAME_BYTES], other[NAME_BYTES];
    struct moe_checkpoint_tensor t;
    *exists = false;
    append_suffix(pattern, stem, suffixes);
    for (const char *at = suffixes; at != NULL; at = next_suffix(at)) {
        append_suffix(other, stem, at);
        build_name(name, l->prefix, spec->layer, other, expert);
        if (!moe_checkpoint_find(l->checkpoint, name, &t))
            continue;
        if (*exists)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                             "tensor %.120s is a second scale of its matrix", name);
        memcpy(pattern, other, NAME_BYTES);
        *exists = true;
    }
    return moe_ok();
}

/* The shape of a fused tensor: [E, N, K / block, block] or, in columns, [E, K, N]. Scales lack the
 * last dimension or, in columns, K. Turns that of a matrix into it. */
static uint32_t fused_shape(const struct moe_piece *p, uint64_t experts, uint64_t matrices,
                            uint64_t dims[4])
{
    bool data = p->part == MOE_QUANT_DATA;
    if (p->quant->scheme->packing == MOE_PACKED_COLUMNS) {
        dims[2] = matrices * dims[1];
        dims[1] = dims[0];
        dims[0] = experts;
        return 3;
    }
    uint64_t groups = p->columns / p->quant->format.block_columns;
    dims[3] = dims[1] / groups;
    dims[2] = groups;
    dims[1] = matrices * dims[0];
    dims[0] = experts;
    return data ? 4 : 3;
}

/* The dtype is known: the shape follows. */
static struct moe_status check_part(const struct moe_layer_spec *spec, enum moe_weight weight,
                                    struct moe_piece *p)
{
    uint64_t dims[4] = {0};
    uint32_t rank, bits = moe_st_dtype_bits(p->at.tensor->dtype);
    bool matches_shape, in_columns = p->quant->scheme->packing == MOE_PACKED_COLUMNS;
    MOE_TRY(moe_error_context(
        moe_quant_part_shape(p->quant, p->part, p->rows, p->columns, bits, dims, &rank),
        "tensor %.120s", p->at.tensor->name));
    if (p->quant->scheme->fused)
        rank = fused_shape(p, spec->experts, weight == MOE_WEIGHT_DOWN ? 1 : 2, dims);
    matches_shape = shape_is(p->at.tensor, dims, rank);
    if (in_columns && p->part == MOE_QUANT_SCALE) /* Llama-4's down has [E, N, 1] */
        matches_shape |= shape_is(p->at.tensor, (uint64_t[]){dims[0], dims[2]}, 2);
    return matches_shape ? moe_ok() : wrong_shape(p->at.tensor, dims, rank);
}

/* `*exists` is false for an optional part that the checkpoint lacks. */
static struct moe_status locate_part(const struct moe_layout *l, const struct moe_layer_spec *spec,
                                     enum moe_weight weight, uint32_t expert, struct moe_piece *p,
                                     bool *exists)
{
    char stem[NAME_BYTES], pattern[NAME_BYTES];
    const struct moe_quant_scheme *scheme = p->quant->scheme;
    uint32_t named = scheme->fused ? 0 : expert;
    stem_of(l, weight, scheme->fused, stem);
    MOE_TRY(choose_suffix(l, spec, stem, named, scheme->suffix[p->part], pattern, exists));
    if (!*exists && ((scheme->optional & ~p->quant->needed) >> p->part & 1) != 0)
        return moe_ok();
    MOE_TRY(find_as(l, spec, pattern, named, scheme->dtypes[p->part], scheme->name, &p->at));
    MOE_TRY(check_part(spec, weight, p));
    p->first = 0;
    p->bytes = p->at.tensor->bytes;
    p->base = 0;
    p->row_step = 1;
    if (!scheme->fused)
        return moe_ok();
    take_expert(p, spec->experts, expert);
    if (weight == MOE_WEIGHT_DOWN)
        return moe_ok();
    if (scheme->packing == MOE_PACKED_COLUMNS && !l->family->interleaved) {
        p->base = weight == MOE_WEIGHT_UP ? p->rows : 0;
    } else if (l->family->interleaved) {
        p->base = weight == MOE_WEIGHT_UP;
        p->row_step = 2;
    } else {
        p->bytes /= 2;
        p->first += weight == MOE_WEIGHT_UP ? p->bytes : 0;
    }
    return moe_ok();
}

struct moe_status moe_layout_visit(const struct moe_layout *l, const struct moe_layer_spec *spec,
                                   enum moe_weight weight, uint32_t expert, moe_piece_visitor visit,
                                   void *ctx)
{
    MOE_INVARIANT(weight < MOE_WEIGHT_COUNT);
    const struct moe_quant *quant = moe_layout_quant(l, spec, weight);
    for (int part = MOE_QUANT_PARTS - 1; part >= MOE_QUANT_DATA; part--) {
        struct moe_piece p = {.quant = quant, .part = (enum moe_quant_part)part};
        bool exists = part == MOE_QUANT_DATA;
        moe_weight_shape(spec, weight, &p.rows, &p.columns);
        if (p.rows == 0)
            return moe_ok();
        if (quant == NULL ? !exists : !moe_quant_has_part(quant, p.part))
            continue;
        if (quant == NULL)
            MOE_TRY(locate_plain(l, spec, weight, expert, &p));
        else
            MOE_TRY(locate_part(l, spec, weight, expert, &p, &exists));
        if (quant == NULL || exists)
            MOE_TRY(visit(ctx, weight, expert, &p));
    }
    return moe_ok();
}

/* ---- how matrices are stored ---- */

static bool is_same(const struct moe_quant *a, const struct moe_quant *b)
{
    const struct moe_weight_format *f = &a->format, *g = &b->format;
    return a->scheme == b->scheme && f->block_rows == g->block_rows &&
           f->block_columns == g->block_columns && f->zero_points == g->zero_points &&
           a->zero_offset == b->zero_offset && a->needed == b->needed &&
           a->activations == b->activations;
}

/* The number of a scheme in `scheme_of`. Adds it to the others, if it is new. */
static uint8_t number_of(struct moe_layout *l, const struct moe_quant *q)
{
    uint8_t i = 0;
    if (q->scheme == NULL)
        return 0;
    while (i < l->scheme_count && !is_same(&l->schemes[i], q))
        i++;
    if (i == l->scheme_count) {
        MOE_INVARIANT(i < MOE_LAYOUT_SCHEMES_MAX);
        l->schemes[l->scheme_count++] = *q;
    }
    return (uint8_t)(i + 1);
}

static const char *name_of(const struct moe_layout *l, uint8_t number)
{
    return number != 0 ? l->schemes[number - 1].scheme->name : "not quantised";
}

/* The path of a matrix' module. */
static void module_path(const struct moe_layout *l, const struct moe_layer_spec *spec,
                        enum moe_weight weight, uint32_t expert, bool is_fused,
                        char path[NAME_BYTES])
{
    char stem[NAME_BYTES];
    stem_of(l, weight, is_fused, stem);
    if (is_fused) /* the module is that of all experts */
        *strrchr(stem, '.') = '\0';
    build_name(path, l->module_prefix, spec->layer, stem, expert);
}

/* Finds the scheme of the matrices from `first` to `last`, a group, of all `copies`. */
static struct moe_status resolve(struct moe_layout *l, const struct moe_layer_spec *spec,
                                 const struct moe_quant_config *q, enum moe_weight first,
                                 enum moe_weight last, uint32_t copies, bool is_fused)
{
    enum moe_layout_group group = group_of(first);
    uint8_t *number = &l->scheme_of[spec->layer][group];
    bool any = false;
    for (uint32_t e = 0; e < copies; e++)
        for (unsigned w = first; w <= (unsigned)last; w++) {
            char path[NAME_BYTES];
            size_t rows, columns;
            struct moe_quant quant;
            moe_weight_shape(spec, (enum moe_weight)w, &rows, &columns);
            if (rows == 0)
                continue;
            module_path(l, spec, (enum moe_weight)w, e, is_fused, path);
            MOE_TRY(moe_quant_config_find(q, path, group == MOE_LAYOUT_ROUTED, &quant));
            uint8_t own = number_of(l, &quant);
            if (any && own != *number)
                return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                                 "config.json: quantization_config: by its lists of modules "
                                 "%.100s is %s, others of these experts of layer %u: %s",
                                 path, name_of(l, own), spec->layer, name_of(l, *number));
            *number = own;
            any = true;
        }
    return moe_ok();
}

static struct moe_status resolve_routed(struct moe_layout *l, const struct moe_layer_spec *spec,
                                        const struct moe_quant_config *q)
{
    bool has_names = l->family->naming->of[MOE_WEIGHT_UP] != NULL;
    bool gated = moe_activation_has_gate(spec->activation);
    bool is_fused = !has_names || (q->routed.scheme != NULL && q->routed.scheme->fused);
    MOE_TRY(resolve(l, spec, q, MOE_WEIGHT_GATE, MOE_WEIGHT_DOWN, is_fused ? 1 : spec->experts,
                    is_fused));
    const struct moe_quant *quant = moe_layout_quant(l, spec, MOE_WEIGHT_UP);
    if (quant != NULL && (quant->scheme->fused ? !gated : !has_names))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                         "config.json: quantization_config: %s is not understood for a family "
                         "with %s experts",
                         quant->scheme->name, gated ? "fused" : "ungated");
    return moe_ok();
}

static bool is_stored_plain(const struct moe_layout *l, const struct moe_layer_spec *spec,
                            enum moe_weight weight)
{
    struct moe_checkpoint_tensor t;
    struct moe_status st = find(l, spec, l->family->naming->of[weight], 0, &t);
    return !moe_failed(&st);
}

/* A list for all modules may forget the projections (Kimi-K3's does): then the file decides. */
static struct moe_status resolve_projection(struct moe_layout *l, const struct moe_layer_spec *spec,
                                            const struct moe_quant_config *q, enum moe_weight w)
{
    if (spec->latent == 0 || (q->by_module == NULL && is_stored_plain(l, spec, w)))
        return moe_ok();
    return resolve(l, spec, q, w, w, 1, false);
}

static struct moe_status resolve_layer(struct moe_layout *l, const struct moe_layer_spec *spec,
                                       const struct moe_quant_config *q)
{
    MOE_TRY(resolve_routed(l, spec, q));
    if (spec->shared_intermediate != 0)
        MOE_TRY(resolve(l, spec, q, MOE_WEIGHT_SHARED_GATE, MOE_WEIGHT_SHARED_DOWN, 1, false));
    MOE_TRY(resolve_projection(l, spec, q, MOE_WEIGHT_TO_LATENT));
    return resolve_projection(l, spec, q, MOE_WEIGHT_FROM_LATENT);
}

/* The prefix of modules' names is that of the tensors. If no name begins with it, it is another
 * known one: wrappers of the same model have other prefixes. */
static const char *find_module_prefix(const struct moe_quant_config *q, const char *prefix)
{
    if (moe_quant_config_names(q, prefix))
        return prefix;
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
        if (moe_quant_config_names(q, prefixes[i]))
            return prefixes[i];
    return prefix;
}

struct moe_status moe_layout_open(const struct moe_checkpoint *checkpoint,
                                  const struct moe_config *config,
                                  const struct moe_quant_config *quant, struct moe_layout *out)
{
    *out = (struct moe_layout){.checkpoint = checkpoint, .family = config->family};
    MOE_TRY(find_prefix(checkpoint, config, out));
    out->module_prefix = find_module_prefix(quant, out->prefix);
    for (size_t i = 0; i < config->layer_count; i++)
        MOE_TRY(resolve_layer(out, &config->layers[i], quant));
    return moe_ok();
}

/* ---- names ---- */

void moe_layout_plain_name(const struct moe_layout *l, const struct moe_layer_spec *spec,
                           enum moe_weight weight, uint32_t expert, char *name, size_t capacity)
{
    char full[NAME_BYTES], stem[NAME_BYTES];
    bool is_fused = moe_weight_is_expert(weight) && moe_layout_is_fused(l, spec);
    if (is_fused)
        stem_of(l, weight, true, stem);
    else
        snprintf(stem, sizeof stem, "%s", l->family->naming->of[weight]);
    build_name(full, l->prefix, spec->layer, stem, expert);
    snprintf(name, capacity, "%s", full);
}

void moe_layout_name_pattern(const struct moe_layout *l, const struct moe_layer_spec *spec,
                             enum moe_weight weight, const struct moe_piece *p, char *pattern,
                             size_t capacity)
{
    const char *name = p->at.tensor->name, *star;
    if (!moe_weight_is_expert(weight) || moe_layout_is_fused(l, spec)) {
        snprintf(pattern, capacity, "%s", name);
        return;
    }
    /* As the name, with the star of the family's pattern for the digits of the expert. */
    star = strchr(l->family->naming->of[weight], '*');
    char start[NAME_BYTES];
    size_t head = (size_t)snprintf(start, sizeof start, "%s%u.%.*s", l->prefix, spec->layer,
                                   (int)(star - l->family->naming->of[weight]),
                                   l->family->naming->of[weight]);
    size_t tail = head + strspn(name + head, "0123456789");
    snprintf(pattern, capacity, "%s*%s", start, name + tail);
}

/* True when `name` is `pattern` with the number of one of the layer's experts for '*'. */
static bool matches(const char *name, const char *pattern, uint32_t experts)
{
    const char *star = strchr(pattern, '*');
    if (star == NULL)
        return strcmp(name, pattern) == 0;
    if (strncmp(name, pattern, (size_t)(star - pattern)) != 0)
        return false;
    char *end;
    const char *digits = name + (star - pattern);
    unsigned long e = strtoul(digits, &end, 10);
    return *digits >= '0' && *digits <= '9' && e < experts && strcmp(end, star + 1) == 0;
}

/* True for a tensor of a quantised matrix, also if it has no use here. */
static bool quant_reads(const struct moe_layout *l, const struct moe_quant *q,
                        const struct moe_layer_spec *spec, enum moe_weight weight, const char *name)
{
    char stem[NAME_BYTES], pattern[NAME_BYTES];
    stem_of(l, weight, q->scheme->fused, stem);
    for (int part = MOE_QUANT_DATA; part <= MOE_QUANT_PARTS; part++) {
        const char *at = part == MOE_QUANT_PARTS ? q->scheme->unused
                         : moe_quant_has_part(q, (enum moe_quant_part)part)
                             ? q->scheme->suffix[part]
                             : NULL;
        for (; at != NULL; at = next_suffix(at)) {
            append_suffix(pattern, stem, at);
            if (matches(name, pattern, spec->experts))
                return true;
        }
    }
    return false;
}

static bool fused_reads(const struct moe_layout *l, const struct moe_layer_spec *spec,
                        const struct fused_names *names, const char *name)
{
    bool plain = moe_layout_quant(l, spec, MOE_WEIGHT_GATE) == NULL;
    return (plain && (strcmp(name, names->gate_up) == 0 || strcmp(name, names->down) == 0)) ||
           (spec->gate_up_bias && strcmp(name, names->gate_up_bias) == 0) ||
           (spec->down_bias && strcmp(name, names->down_bias) == 0);
}

/* `name` is the part after "{prefix}{layer}.". */
static bool layer_reads(const struct moe_layout *l, const struct moe_layer_spec *spec,
                        const char *name)
{
    struct fused_names names;
    name_fused(&names, l->family->naming);
    bool is_fused = layer_is_fused(l, spec, &names);
    if (is_fused && fused_reads(l, spec, &names, name))
        return true;
    for (unsigned w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        const char *pattern = l->family->naming->of[w];
        moe_weight_shape(spec, (enum moe_weight)w, &rows, &columns);
        if (rows == 0)
            continue;
        bool from_fused = is_fused && moe_weight_is_expert((enum moe_weight)w);
        const struct moe_quant *quant = moe_layout_quant(l, spec, (enum moe_weight)w);
        if (quant != NULL) {
            if (quant_reads(l, quant, spec, (enum moe_weight)w, name))
                return true;
            continue;
        }
        /* transformers writes gate and up of LongCat's zero experts, which nothing uses. */
        uint32_t named = spec->experts + spec->router.zero_experts;
        if (pattern != NULL && !from_fused && matches(name, pattern, named))
            return true;
    }
    return false;
}

static bool is_token_table(const struct moe_layout *l, const struct moe_layer_spec *spec,
                           const char *name)
{
    const char *table = l->family->naming->token_table;
    return spec->router.by_token && table != NULL && strcmp(name, table) == 0;
}

/* The spec of the MoE layer with tensor `name` in its block, and the rest of the name; or NULL. */
static const struct moe_layer_spec *owner(const struct moe_layout *l,
                                          const struct moe_config *config, const char *name,
                                          const char **rest)
{
    char *end;
    size_t n = strlen(l->prefix), block = strlen(l->family->naming->block);
    if (strncmp(name, l->prefix, n) != 0 || name[n] < '0' || name[n] > '9')
        return NULL;
    unsigned long layer = strtoul(name + n, &end, 10);
    if (*end != '.' || strncmp(end + 1, l->family->naming->block, block) != 0 ||
        end[1 + block] != '.')
        return NULL;
    *rest = end + 1;
    for (size_t i = 0; i < config->layer_count; i++)
        if (config->layers[i].layer == layer)
            return &config->layers[i];
    return NULL;
}

struct moe_status moe_layout_refuse_unread(const struct moe_layout *l,
                                           const struct moe_config *config)
{
    for (size_t i = 0; i < moe_checkpoint_count(l->checkpoint); i++) {
        const char *rest, *name = moe_checkpoint_tensor(l->checkpoint, i)->name;
        const struct moe_layer_spec *spec = owner(l, config, name, &rest);
        if (spec != NULL && !layer_reads(l, spec, rest) && !is_token_table(l, spec, rest))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                             "tensor %.120s belongs to a MoE layer and is not understood", name);
    }
    return moe_ok();
}

bool moe_piece_is_plain(const struct moe_piece *p)
{
    return p->quant == NULL && p->base == 0 && (p->columns == 1 || p->column_step == 1) &&
           (p->rows == 1 || p->row_step == p->columns);
}

bool moe_piece_same_range(const struct moe_piece *a, const struct moe_piece *b)
{
    return a->at.tensor == b->at.tensor && a->first == b->first && a->bytes == b->bytes;
}
