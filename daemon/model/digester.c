/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of one layer, from the bytes that are read for loading. No byte is read a second time, so
 * that a digest is of the very bytes that were delivered: the thread that reads some leaves hashes
 * them while its cache has them. Reads of a backend may begin or end inside a leaf. Then copies of
 * the leaf's parts are kept, and the thread that brings the last one hashes the leaf. */
#include "model/model_internal.h"

#include "base/mutex.h"
#include "base/thread_pool.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    RUN_LEAVES = 4, /* of one item for the thread pool: 256 KiB, which a second-level cache holds */
};

/* Bytes of a leaf that one read delivered. */
struct part {
    struct part *next;
    size_t first, bytes; /* in the leaf */
    char data[];
};

/* A leaf of a range that a backend reads. The digester's lock guards it. */
struct leaf {
    struct part *parts; /* so far, if no read delivered all of it */
    size_t has;         /* bytes of the parts */
    bool done;          /* it is hashed, and has no parts */
};

/* The bytes of one tensor, or of one expert's share of it. */
struct range {
    struct moe_digester *digester;
    uint32_t expert; /* MOE_DIGEST_COMMON: of no expert */
    struct moe_piece piece;
    struct moe_weight_source file; /* of a range that a backend reads; else read = NULL */
    uint64_t count;                /* leaves */
    struct leaf *state;            /* [count] of such a range, else NULL */
    struct moe_digest leaves[];
};

struct job {                        /* of the pool */
    const struct moe_st_file *file; /* NULL: the bytes are at `data` already */
    const struct moe_tensor *tensor;
    uint64_t first; /* of the bytes in the tensor */
    char *data;
    size_t bytes;
    struct moe_digest *leaves;
};

struct moe_digester {
    const struct moe_model *model;
    struct moe_thread_pool *pool;
    struct moe_thread_pool_batch batch;
    size_t layer;
    struct range **ranges; /* in the order of loading: units follow each other */
    size_t count, room;
    const atomic_bool *cancelled; /* NULL: never */
    struct moe_mutex lock;        /* of leaves */
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for digests");
}

static struct moe_status check_going_on(const struct moe_digester *d)
{
    if (d->cancelled != NULL && atomic_load(d->cancelled))
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "loading was cancelled");
    return moe_ok();
}

static struct moe_status do_run(void *ctx, uint32_t thread, const void *job, uint32_t item)
{
    (void)ctx;
    (void)thread;
    const struct job *j = job;
    const size_t run = (size_t)RUN_LEAVES * MOE_DIGEST_LEAF_BYTES, first = item * run;
    const size_t left = j->bytes - first, length = left < run ? left : run;
    if (j->file != NULL)
        MOE_TRY(moe_st_read(j->file, j->tensor, j->first + first, length, j->data + first));
    return moe_digest_leaves(j->data + first, length, j->leaves + (size_t)item * RUN_LEAVES);
}

/* ------------------------------------------------------------------ ranges */

static void free_parts(struct part *p)
{
    while (p != NULL) {
        struct part *next = p->next;
        free(p);
        p = next;
    }
}

static void drop_range(struct range *r)
{
    for (uint64_t i = 0; r->state != NULL && i < r->count; i++)
        free_parts(r->state[i].parts);
    free(r->state);
    free(r);
}

static void drop_ranges(struct moe_digester *d)
{
    for (size_t i = 0; i < d->count; i++)
        drop_range(d->ranges[i]);
    d->count = 0;
}

static struct moe_status grow(struct moe_digester *d)
{
    if (d->count < d->room)
        return moe_ok();
    size_t room = d->room > 0 ? 2 * d->room : 64;
    struct range **more = reallocarray(d->ranges, room, sizeof *more);
    if (more == NULL)
        return no_memory();
    d->ranges = more;
    d->room = room;
    return moe_ok();
}

static struct moe_status add_range(struct moe_digester *d, enum moe_weight weight, uint32_t expert,
                                   const struct moe_piece *p, struct range **out)
{
    MOE_TRY(grow(d));
    uint64_t count = moe_digest_leaf_count(p->bytes);
    struct range *r = malloc(sizeof *r + (size_t)count * sizeof r->leaves[0]);
    if (r == NULL)
        return no_memory();
    *r = (struct range){.digester = d,
                        .expert = moe_weight_is_expert(weight) ? expert : MOE_DIGEST_COMMON,
                        .piece = *p,
                        .count = count};
    d->ranges[d->count++] = r;
    *out = r;
    return moe_ok();
}

/* Begins a job for a range that was just added. */
static struct moe_status begin_job(struct moe_digester *d, const struct range *r,
                                   const struct job *job)
{
    uint64_t items = (r->count + RUN_LEAVES - 1) / RUN_LEAVES;
    if (items == 0)
        return moe_ok();
    return moe_thread_pool_submit(d->pool, &d->batch, job, sizeof *job, (uint32_t)items);
}

struct moe_status moe_digester__hash(struct moe_digester *d, enum moe_weight weight,
                                     uint32_t expert, const struct moe_piece *p, const void *data)
{
    struct range *r = NULL;
    MOE_TRY(add_range(d, weight, expert, p, &r));
    const struct job job = {
        .data = (char *)(uintptr_t)data, .bytes = (size_t)p->bytes, .leaves = r->leaves};
    return begin_job(d, r, &job);
}

struct moe_status moe_digester__wait(struct moe_digester *d)
{
    return moe_thread_pool_wait(d->pool, &d->batch);
}

struct moe_status moe_digester__read(struct moe_digester *d, enum moe_weight weight,
                                     uint32_t expert, const struct moe_piece *p, void *to)
{
    struct range *r = NULL;
    MOE_TRY(add_range(d, weight, expert, p, &r));
    const struct job job = {.file = p->at.file,
                            .tensor = p->at.tensor,
                            .first = p->first,
                            .data = to,
                            .bytes = (size_t)p->bytes,
                            .leaves = r->leaves};
    if (r->count <= RUN_LEAVES)
        return r->count == 0 ? moe_ok() : do_run(NULL, 0, &job, 0); /* not worth another thread */
    struct moe_status st = begin_job(d, r, &job);
    struct moe_status done = moe_digester__wait(d);
    return moe_failed(&st) ? st : done;
}

static struct moe_status hash_token_table(struct moe_digester *d, const struct moe_piece *p)
{
    char *data = malloc((size_t)p->bytes);
    if (data == NULL)
        return no_memory();
    struct moe_status st = moe_digester__read(d, MOE_WEIGHT_ROUTER, 0, p, data);
    free(data);
    return st;
}

struct moe_status moe_digester__begin(struct moe_digester *d, size_t layer, bool replicated)
{
    struct moe_piece table;
    const struct moe_layer_spec *spec = moe_model_layer(d->model, layer);
    drop_ranges(d);
    d->layer = layer;
    if (spec == NULL || !replicated || !spec->router.by_token)
        return moe_ok();
    MOE_TRY(moe_layout_token_table(&d->model->layout, spec, &table));
    return hash_token_table(d, &table);
}

/* ------------------------------------------------------------------ reads of a backend */

static struct moe_status read_file(const struct range *r, uint64_t at, size_t bytes, void *to)
{
    return r->file.read(r->file.ctx, r->file.at + at, bytes, to);
}

static size_t leaf_bytes(const struct range *r, uint64_t i)
{
    uint64_t left = r->piece.bytes - i * MOE_DIGEST_LEAF_BYTES;
    return left < MOE_DIGEST_LEAF_BYTES ? (size_t)left : MOE_DIGEST_LEAF_BYTES;
}

/* Leaf `i` has the bytes of `parts`, which are `has` bytes; the rest was not read yet. */
static struct moe_status hash_parts(struct range *r, uint64_t i, const struct part *parts,
                                    size_t has)
{
    size_t length = leaf_bytes(r, i);
    char *data = calloc(1, length);
    if (data == NULL)
        return no_memory();
    struct moe_status st =
        has < length ? read_file(r, i * MOE_DIGEST_LEAF_BYTES, length, data) : moe_ok();
    for (; parts != NULL; parts = parts->next)
        memcpy(data + parts->first, parts->data, parts->bytes);
    if (!moe_failed(&st))
        st = moe_digest_leaf(data, length, "", 0, &r->leaves[i]);
    free(data);
    return st;
}

/* `bytes` bytes at `from` were read, at `first` in leaf `i`. They are not the whole leaf. */
static struct moe_status add_part(struct range *r, uint64_t i, size_t first, const char *from,
                                  size_t bytes)
{
    struct leaf *leaf = &r->state[i];
    struct part *parts = NULL, *p = malloc(sizeof *p + bytes);
    if (p == NULL)
        return no_memory();
    *p = (struct part){.first = first, .bytes = bytes};
    memcpy(p->data, from, bytes);
    moe_mutex_lock(&r->digester->lock);
    p->next = leaf->parts;
    leaf->parts = p;
    leaf->has += bytes;
    leaf->done = leaf->has == leaf_bytes(r, i);
    if (leaf->done) {
        parts = leaf->parts;
        leaf->parts = NULL;
    }
    moe_mutex_unlock(&r->digester->lock);
    if (parts == NULL)
        return moe_ok();
    struct moe_status st = hash_parts(r, i, parts, leaf_bytes(r, i));
    free_parts(parts);
    return st;
}

/* Hashes `bytes` bytes at `from`, which begin with leaf `i`; the last leaf may be a part of one. */
static struct moe_status hash_leaves(struct range *r, uint64_t i, const char *from, size_t bytes)
{
    size_t count = bytes / MOE_DIGEST_LEAF_BYTES, rest = bytes % MOE_DIGEST_LEAF_BYTES;
    if (rest != 0 && rest == leaf_bytes(r, i + count)) {
        count++;
        rest = 0;
    }
    MOE_TRY(moe_digest_leaves(from, bytes - rest, &r->leaves[i]));
    moe_mutex_lock(&r->digester->lock);
    for (size_t n = 0; n < count; n++)
        r->state[i + n].done = true;
    moe_mutex_unlock(&r->digester->lock);
    return rest == 0 ? moe_ok() : add_part(r, i + count, 0, from + bytes - rest, rest);
}

/* moe_weight_source.read: a run of leaves at a time. */
static struct moe_status read_and_hash(const void *ctx, uint64_t at, size_t bytes, void *to)
{
    const size_t leaf = MOE_DIGEST_LEAF_BYTES, inside = (size_t)(at % leaf);
    struct range *r = (struct range *)(uintptr_t)ctx; /* sources are const for their users */
    size_t head = (leaf - inside) % leaf, done = head < bytes ? head : bytes;
    MOE_TRY(check_going_on(r->digester));
    if (done > 0) {
        MOE_TRY(read_file(r, at, done, to));
        MOE_TRY(add_part(r, at / leaf, inside, to, done));
    }
    while (done < bytes) {
        char *from = (char *)to + done;
        size_t left = bytes - done, n = left < RUN_LEAVES * leaf ? left : RUN_LEAVES * leaf;
        MOE_TRY(read_file(r, at + done, n, from));
        MOE_TRY(hash_leaves(r, (at + done) / leaf, from, n));
        done += n;
    }
    return moe_ok();
}

struct moe_status moe_digester__watch(struct moe_digester *d, enum moe_weight weight,
                                      uint32_t expert, const struct moe_piece *p,
                                      struct moe_weight_source *source)
{
    struct range *r = NULL;
    MOE_TRY(add_range(d, weight, expert, p, &r));
    r->state = calloc((size_t)r->count + 1, sizeof *r->state);
    if (r->state == NULL)
        return no_memory();
    r->file = *source;
    *source = (struct moe_weight_source){.read = read_and_hash, .ctx = r};
    return moe_ok();
}

/* ------------------------------------------------------------------ units */

/* Ascending by name, then by place in the tensor. */
static int compare_ranges(const void *a, const void *b)
{
    const struct moe_piece *x = &(*(struct range *const *)a)->piece;
    const struct moe_piece *y = &(*(struct range *const *)b)->piece;
    int order = strcmp(x->at.tensor->name, y->at.tensor->name);
    return order != 0 ? order : (x->first > y->first) - (x->first < y->first);
}

static struct moe_status hash_tensor(struct range *r, struct moe_digest *out)
{
    const struct moe_tensor *t = r->piece.at.tensor;
    for (uint64_t i = 0; r->state != NULL && i < r->count; i++)
        if (!r->state[i].done) /* the backend had no use for all of its bytes */
            MOE_TRY(hash_parts(r, i, r->state[i].parts, r->state[i].has));
    const struct moe_digest_tensor tensor = {.name = t->name,
                                             .dtype = moe_st_dtype_name(t->dtype),
                                             .rank = t->rank,
                                             .shape = t->shape,
                                             .first = r->piece.first,
                                             .bytes = r->piece.bytes};
    return moe_digest_tensor(&tensor, r->leaves, out);
}

/* The unit of `count` ranges at `ranges`, which are sorted here. */
static struct moe_status add_unit(struct range **ranges, uint32_t count, uint32_t layer,
                                  struct moe_digest_table *table)
{
    struct moe_digest tensors[MOE_DIGEST_UNIT_TENSORS];
    struct moe_digest_unit unit = {0};
    MOE_INVARIANT(count <= MOE_DIGEST_UNIT_TENSORS);
    qsort(ranges, count, sizeof(struct range *), compare_ranges);
    for (uint32_t i = 0; i < count; i++) {
        MOE_TRY(hash_tensor(ranges[i], &tensors[i]));
        memcpy(unit.tags[i], tensors[i].bytes, MOE_DIGEST_TAG_BYTES);
    }
    MOE_TRY(moe_digest_unit(layer, ranges[0]->expert, tensors, count, &unit.digest));
    moe_digest_table_set(table, layer, ranges[0]->expert, &unit);
    return moe_ok();
}

/* Collects the ranges of the common unit and of expert 0, for their names. */
struct names {
    const struct moe_model *model;
    const struct moe_layer_spec *spec;
    struct name {
        const char *name;
        uint64_t first;
        enum moe_weight weight;
        struct moe_piece piece;
    } of[2][MOE_DIGEST_UNIT_TENSORS]; /* common, expert's */
    uint32_t count[2];
};

static struct moe_status add_name(void *ctx, enum moe_weight weight, uint32_t expert,
                                  const struct moe_piece *p)
{
    struct names *n = ctx;
    size_t kind = moe_weight_is_expert(weight);
    (void)expert;
    if (p->again)
        return moe_ok();
    MOE_INVARIANT(n->count[kind] < MOE_DIGEST_UNIT_TENSORS);
    n->of[kind][n->count[kind]++] = (struct name){p->at.tensor->name, p->first, weight, *p};
    return moe_ok();
}

static int compare_names(const void *a, const void *b)
{
    const struct name *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : (x->first > y->first) - (x->first < y->first);
}

static void sort_names(struct names *n, size_t kind, struct moe_digest_names *out)
{
    qsort(n->of[kind], n->count[kind], sizeof n->of[kind][0], compare_names);
    out->count = n->count[kind];
    for (uint32_t i = 0; i < out->count; i++)
        moe_layout_name_pattern(&n->model->layout, n->spec, n->of[kind][i].weight,
                                &n->of[kind][i].piece, out->of[i], sizeof out->of[i]);
}

static struct moe_status add_layer(const struct moe_digester *d, struct moe_digest_table *table)
{
    const uint32_t first = 0;
    struct names n = {.model = d->model, .spec = moe_model_layer(d->model, d->layer)};
    struct moe_digest_names common, expert;
    struct moe_piece ids;
    if (n.spec->router.by_token) {
        MOE_TRY(moe_layout_token_table(&d->model->layout, n.spec, &ids));
        MOE_TRY(add_name(&n, MOE_WEIGHT_ROUTER, 0, &ids));
    }
    MOE_TRY(moe_model__visit_layer(d->model, d->layer, true, &first, 1, add_name, &n));
    sort_names(&n, 0, &common);
    sort_names(&n, 1, &expert);
    return moe_digest_table_add_layer(table, n.spec->layer, n.spec->experts, &common, &expert);
}

struct moe_status moe_digester_finish(struct moe_digester *d, struct moe_digest_table *table)
{
    const uint32_t layer = moe_model_layer(d->model, d->layer)->layer;
    MOE_TRY(add_layer(d, table));
    for (size_t i = 0, next; i < d->count; i = next) {
        for (next = i + 1; next < d->count && d->ranges[next]->expert == d->ranges[i]->expert;)
            next++;
        MOE_TRY(add_unit(d->ranges + i, (uint32_t)(next - i), layer, table));
    }
    drop_ranges(d);
    return moe_ok();
}

/* ------------------------------------------------------------------ lifetime */

struct moe_status moe_digester_create(const struct moe_model *m, uint32_t threads,
                                      struct moe_digester **out)
{
    struct moe_digester *d = calloc(1, sizeof *d);
    if (d == NULL)
        return no_memory();
    d->model = m;
    moe_mutex_init(&d->lock);
    struct moe_status st = moe_thread_pool_create("moe-digest", threads, do_run, NULL, &d->pool);
    if (moe_failed(&st)) {
        moe_mutex_destroy(&d->lock);
        free(d);
        return st;
    }
    *out = d;
    return moe_ok();
}

void moe_digester_destroy(struct moe_digester *d)
{
    if (d == NULL)
        return;
    moe_thread_pool_destroy(d->pool);
    drop_ranges(d);
    free(d->ranges);
    moe_mutex_destroy(&d->lock);
    free(d);
}

void moe_digester_heed(struct moe_digester *d, const atomic_bool *cancelled)
{
    d->cancelled = cancelled;
}
