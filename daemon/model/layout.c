/* SPDX-License-Identifier: Apache-2.0 */
/* Names, shapes and strides: finds each weight in the checkpoint and describes how to read it.
 * Reads no data. Refuses any shape that does not exactly match a known one. */
#include "model/layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 192, SHAPE_BYTES = 56 };

static const char *const prefixes[] = {"model.layers.", "model.language_model.layers.",
                                       "language_model.model.layers.", "language_model.layers.",
                                       "layers."};

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

struct moe_status moe_layout_open(const struct moe_checkpoint *checkpoint,
                                  const struct moe_config *config, struct moe_layout *out)
{
    char name[NAME_BYTES];
    struct moe_checkpoint_tensor t;
    *out = (struct moe_layout){.checkpoint = checkpoint, .family = config->family};
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

static struct moe_status find(const struct moe_layout *l, const struct moe_layer_spec *spec,
                              const char *pattern, uint32_t expert,
                              struct moe_checkpoint_tensor *out)
{
    char name[NAME_BYTES];
    build_name(name, l->prefix, spec->layer, pattern, expert);
    if (!moe_checkpoint_find(l->checkpoint, name, out))
        return missing(name);
    enum moe_st_dtype d = out->tensor->dtype;
    if (d != MOE_ST_F32 && d != MOE_ST_BF16 && d != MOE_ST_F16)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                         "tensor %.120s is %s; F32, BF16 and F16 can be loaded", name,
                         moe_st_dtype_name(d));
    return moe_ok();
}

/* Compares shapes without dimensions of size 1 at either end: [1, E] equals [E]. */
static bool shape_is(const struct moe_tensor *t, const uint64_t *dims, uint32_t rank)
{
    const uint64_t *s = t->shape;
    uint32_t n = t->rank;
    for (; n > 0 && s[0] == 1; n--)
        s++;
    for (; n > 0 && s[n - 1] == 1;)
        n--;
    for (; rank > 0 && dims[0] == 1; rank--)
        dims++;
    for (; rank > 0 && dims[rank - 1] == 1;)
        rank--;
    return n == rank && memcmp(s, dims, n * sizeof *s) == 0;
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
    uint64_t e = spec->experts, h = spec->hidden, i = spec->intermediate;
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

static void name_fused(struct fused_names *n, const char *block)
{
    snprintf(n->gate_up, sizeof n->gate_up, "%s.experts.gate_up_proj", block);
    snprintf(n->down, sizeof n->down, "%s.experts.down_proj", block);
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
    build_name(name, l->prefix, spec->layer, names->gate_up, 0);
    return l->family->naming->of[MOE_WEIGHT_GATE] == NULL ||
           moe_checkpoint_find(l->checkpoint, name, &t);
}

bool moe_layout_is_fused(const struct moe_layout *l, const struct moe_layer_spec *spec)
{
    struct fused_names names;
    name_fused(&names, l->family->naming->block);
    return layer_is_fused(l, spec, &names);
}

struct moe_status moe_layout_locate(const struct moe_layout *l, const struct moe_layer_spec *spec,
                                    enum moe_weight weight, uint32_t expert, struct moe_piece *out)
{
    MOE_INVARIANT(weight < MOE_WEIGHT_COUNT);
    *out = (struct moe_piece){0};
    moe_weight_shape(spec, weight, &out->rows, &out->columns);
    const char *pattern = l->family->naming->of[weight];
    if (!moe_weight_is_expert(weight)) {
        MOE_INVARIANT(pattern != NULL);
        return whole(l, spec, pattern, 0, out);
    }
    struct fused_names names;
    name_fused(&names, l->family->naming->block);
    if (layer_is_fused(l, spec, &names))
        return fused(l, spec, &names, weight, expert, out);
    return whole(l, spec, pattern, expert, out);
}

void moe_layout_name_pattern(const struct moe_layout *l, const struct moe_layer_spec *spec,
                             enum moe_weight weight, const struct moe_piece *p, char *pattern,
                             size_t capacity)
{
    if (moe_weight_is_expert(weight) && !moe_layout_is_fused(l, spec))
        snprintf(pattern, capacity, "%s%u.%s", l->prefix, spec->layer,
                 l->family->naming->of[weight]);
    else
        snprintf(pattern, capacity, "%s", p->at.tensor->name);
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

static bool fused_reads(const struct moe_layer_spec *spec, const struct fused_names *names,
                        const char *name)
{
    return strcmp(name, names->gate_up) == 0 || strcmp(name, names->down) == 0 ||
           (spec->gate_up_bias && strcmp(name, names->gate_up_bias) == 0) ||
           (spec->down_bias && strcmp(name, names->down_bias) == 0);
}

/* `name` is the part after "{prefix}{layer}.". */
static bool layer_reads(const struct moe_layout *l, const struct moe_layer_spec *spec,
                        const char *name)
{
    struct fused_names names;
    name_fused(&names, l->family->naming->block);
    bool is_fused = layer_is_fused(l, spec, &names);
    if (is_fused && fused_reads(spec, &names, name))
        return true;
    for (unsigned w = 0; w < MOE_WEIGHT_COUNT; w++) {
        size_t rows, columns;
        const char *pattern = l->family->naming->of[w];
        moe_weight_shape(spec, (enum moe_weight)w, &rows, &columns);
        bool from_fused = is_fused && moe_weight_is_expert((enum moe_weight)w);
        if (rows != 0 && pattern != NULL && !from_fused && matches(name, pattern, spec->experts))
            return true;
    }
    return false;
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
        if (spec != NULL && !layer_reads(l, spec, rest))
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_INVALID,
                             "tensor %.120s belongs to a MoE layer and is not understood", name);
    }
    return moe_ok();
}

bool moe_piece_is_plain(const struct moe_piece *p)
{
    return p->base == 0 && (p->columns == 1 || p->column_step == 1) &&
           (p->rows == 1 || p->row_step == p->columns);
}

bool moe_piece_same_range(const struct moe_piece *a, const struct moe_piece *b)
{
    return a->at.tensor == b->at.tensor && a->first == b->first && a->bytes == b->bytes;
}
