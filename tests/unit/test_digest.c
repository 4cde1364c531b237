/* SPDX-License-Identifier: Apache-2.0 */
/* The digests of a model: they are the tree of model/digest.h, they do not depend on who loads
 * which part how, and one changed bit is found by the name of its tensor. */
#include "base/thread_pool.h"
#include "model/model_write.h"
#include "model_fixture.h"
#include "small_model.h"
#include "support/golden.h"
#include "support/random.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------------ loading */

/* A weight that is read in pieces; an item is one of them. */
struct pieces {
    struct moe_weight_source source;
    size_t bytes, piece, count;
};

static struct moe_status read_piece(void *ctx, uint32_t thread, const void *what, uint32_t item)
{
    const struct pieces *p = what;
    size_t first = (p->count - 1 - item) * p->piece, left = p->bytes - first;
    char *data = malloc(p->piece);
    (void)ctx;
    (void)thread;
    if (data == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory");
    struct moe_status st = p->source.read(p->source.ctx, p->source.at + first,
                                          left < p->piece ? left : p->piece, data);
    free(data);
    return st;
}

/* A backend that reads for itself, with three threads: pieces of `*ctx` bytes, the last ones first;
 * none if 0. */
static struct moe_status read_pieces(void *ctx, enum moe_weight weight, uint32_t expert,
                                     enum moe_dtype dtype, const struct moe_weight_source *source,
                                     size_t bytes)
{
    const size_t piece = *(const size_t *)ctx;
    struct moe_thread_pool_batch batch = {0};
    struct moe_thread_pool *pool;
    (void)weight;
    (void)expert;
    (void)dtype;
    if (piece == 0 || bytes == 0)
        return moe_ok();
    const struct pieces p = {*source, bytes, piece, (bytes + piece - 1) / piece};
    assert_ok(moe_thread_pool_create("readers", 3, read_piece, NULL, &pool));
    assert_ok(moe_thread_pool_submit(pool, &batch, &p, sizeof p, (uint32_t)p.count));
    assert_ok(moe_thread_pool_wait(pool, &batch));
    moe_thread_pool_destroy(pool);
    return moe_ok();
}

/* Adds the digests of layer `i` and some experts to `t`. `piece`: the backend reads so many bytes
 * at a time; NULL: the model room reads. */
static void add_digests(const struct moe_model *m, size_t i, const uint32_t *experts, size_t count,
                        size_t *piece, struct moe_digest_table *t)
{
    struct moe_digester *d;
    assert_ok(moe_digester_create(m, 2, &d));
    struct moe_model_sources sources = {0};
    const struct moe_model_sinks sinks = {.weight = fixture_ignore,
                                          .source = piece != NULL ? read_pieces : NULL,
                                          .ctx = piece,
                                          .sources = &sources};
    assert_ok(moe_model_stream_layer(m, i, experts, count, &sinks, d, NULL, NULL));
    assert_ok(moe_digester_finish(d, t));
    moe_digester_destroy(d);
    moe_model_sources_free(&sources);
}

/* Experts first, first + step, ... of all layers. */
static void add_share(const struct moe_model *m, uint32_t first, uint32_t step, size_t *piece,
                      struct moe_digest_table *t)
{
    for (size_t i = 0; i < moe_model_layer_count(m); i++) {
        uint32_t experts[MOE_MAX_EXPERTS];
        size_t count = 0;
        for (uint32_t e = first; e < moe_model_layer(m, i)->experts; e += step)
            experts[count++] = e;
        add_digests(m, i, experts, count, piece, t);
    }
}

static struct moe_digest_table *new_table(void)
{
    struct moe_digest_table *t;
    assert_ok(moe_digest_table_create(&t));
    return t;
}

static void model_hex(const struct moe_digest_table *t, char hex[MOE_SHA256_HEX])
{
    struct moe_digest d;
    assert_true(moe_digest_table_is_complete(t));
    assert_ok(moe_digest_table_model(t, &d));
    moe_sha256_to_hex(d.bytes, hex);
}

static void digest_of(const struct moe_model *m, size_t *piece, char hex[MOE_SHA256_HEX])
{
    struct moe_digest_table *t = new_table();
    add_share(m, 0, 1, piece, t);
    model_hex(t, hex);
    moe_digest_table_destroy(t);
}

/* ------------------------------------------------------------------ the tree by hand */

/* Text to hash. */
struct text {
    uint8_t bytes[65536 + 16];
    size_t length;
};

static void add(struct text *t, const void *data, size_t bytes)
{
    assert_true(bytes <= sizeof t->bytes - t->length);
    memcpy(t->bytes + t->length, data, bytes);
    t->length += bytes;
}

static void add_u32(struct text *t, uint32_t v)
{
    add(t, &v, 4); /* tests run on little-endian machines, as all of moed does */
}

static void add_u64(struct text *t, uint64_t v)
{
    add(t, &v, 8);
}

/* H(kind || text); the text becomes empty. */
static struct moe_digest node(uint8_t kind, struct text *t)
{
    struct moe_digest d;
    struct moe_sha256 s;
    moe_sha256_begin(&s);
    moe_sha256_update(&s, &kind, 1);
    moe_sha256_update(&s, t->bytes, t->length);
    assert_ok(moe_sha256_next(&s, d.bytes));
    moe_sha256_drop(&s);
    t->length = 0;
    return d;
}

static struct moe_digest tensor_by_hand(const struct moe_st_file *file, const char *name)
{
    static struct text text;
    struct moe_digest leaves[16];
    size_t count = 0;
    const struct moe_tensor *t = moe_st_find(file, name);
    assert_non_null(t);
    char *data = malloc((size_t)t->bytes);
    assert_non_null(data);
    assert_ok(moe_st_read(file, t, 0, t->bytes, data));
    for (size_t at = 0; at < t->bytes; at += 65536) {
        assert_true(count < sizeof leaves / sizeof leaves[0]);
        size_t left = (size_t)t->bytes - at;
        add(&text, data + at, left < 65536 ? left : 65536);
        leaves[count++] = node(0, &text);
    }
    free(data);
    add(&text, name, strlen(name) + 1);
    add(&text, "F32", 4);
    add_u32(&text, t->rank);
    for (uint32_t i = 0; i < t->rank; i++)
        add_u64(&text, t->shape[i]);
    add_u64(&text, 0);
    add_u64(&text, t->bytes);
    add(&text, leaves, count * sizeof leaves[0]);
    return node(1, &text);
}

static struct moe_digest unit_by_hand(const struct moe_st_file *file, uint32_t expert)
{
    static const char *const parts[] = {"down", "gate", "up"}; /* ascending */
    static struct text text;
    struct moe_digest tensors[3];
    uint32_t count = expert == MOE_DIGEST_COMMON ? 1 : 3;
    for (uint32_t i = 0; i < count; i++) {
        char name[80];
        if (expert == MOE_DIGEST_COMMON)
            snprintf(name, sizeof name, "model.layers.1.mlp.gate.weight");
        else
            snprintf(name, sizeof name, "model.layers.1.mlp.experts.%u.%s_proj.weight", expert,
                     parts[i]);
        tensors[i] = tensor_by_hand(file, name);
    }
    add_u32(&text, 1);
    add_u32(&text, expert);
    add_u32(&text, count);
    add(&text, tensors, count * sizeof tensors[0]);
    return node(2, &text);
}

/* A matrix has 716800 bytes: ten leaves and a part of one. A digester with threads reads it in
 * three items of the thread pool, of which the last has fewer leaves. */
#define ROUTER_FILE  "router.safetensors"
#define EXPERTS_FILE "experts.safetensors"
enum { WIDE_H = 256, WIDE_I = 700, WIDE_ITEM_BYTES = 4 * MOE_DIGEST_LEAF_BYTES };

/* A model with tensors of several leaves; the router is in a separate file. */
static void make_wide_model(const struct fixture *f)
{
    static const char *const parts[] = {"gate", "up", "down"};
    struct tensors t = {0};
    char index[4096];
    int n =
        snprintf(index, sizeof index, "{\"weight_map\":{\"model.layers.%d.mlp.gate.weight\":\"%s\"",
                 LAYER, ROUTER_FILE);
    add_router(&t, "model.layers.", WIDE_H);
    tensors_write(&t, f, ROUTER_FILE);
    tensors_free(&t);
    for (int e = 0; e < E; e++)
        for (int p = 0; p < 3; p++)
            tensors_add(&t, MOE_ST_F32, 2,
                        p < 2 ? (uint64_t[]){WIDE_I, WIDE_H} : (uint64_t[]){WIDE_H, WIDE_I},
                        "model.layers.%d.mlp.experts.%d.%s_proj.weight", LAYER, e, parts[p]);
    tensors_write(&t, f, EXPERTS_FILE);
    for (size_t i = 0; i < t.count; i++)
        n += snprintf(index + n, sizeof index - (size_t)n, ",\"%s\":\"%s\"", t.list[i].name,
                      EXPERTS_FILE);
    assert_true((size_t)n + 3 < sizeof index);
    fixture_write_text(f, "model.safetensors.index.json", strcat(index, "}}"));
    tensors_free(&t);
    fixture_write_text(f, "config.json", CONFIG("qwen3_moe", 256, 700, ""));
}

static void the_digest_is_the_tree_that_the_header_describes(void **state)
{
    struct fixture *f = *state;
    static struct text text;
    char want[MOE_SHA256_HEX], got[MOE_SHA256_HEX];
    make_wide_model(f);
    struct moe_model *m = open_model(f);
    struct moe_st_file *router, *experts;
    assert_ok(moe_st_open(fixture_path(f, ROUTER_FILE), &router));
    assert_ok(moe_st_open(fixture_path(f, EXPERTS_FILE), &experts));
    struct moe_digest units[E + 1] = {unit_by_hand(router, MOE_DIGEST_COMMON)};
    for (uint32_t e = 0; e < E; e++)
        units[e + 1] = unit_by_hand(experts, e);
    add_u32(&text, LAYER);
    add_u32(&text, E);
    add(&text, units, sizeof units);
    struct moe_digest layer = node(3, &text);
    add_u32(&text, 1);
    add(&text, &layer, sizeof layer);
    struct moe_digest model = node(4, &text);
    moe_sha256_to_hex(model.bytes, want);
    digest_of(m, NULL, got);
    print_message("  %s\n", got);
    assert_string_equal(got, want);
    moe_st_close(experts);
    moe_st_close(router);
    moe_model_close(m);
}

/* ------------------------------------------------------------------ threads */

/* Streams the wide model's layer to `got`; the model room reads. */
static struct moe_status stream_wide(const struct moe_model *m, struct moe_digester *d,
                                     struct deliveries *got)
{
    static const uint32_t experts[E] = {0, 1, 2, 3};
    const struct moe_model_sinks sinks = {.weight = deliveries_sink, .ctx = got};
    return moe_model_stream_layer(m, 0, experts, E, &sinks, d, NULL, NULL);
}

static void find_weight(const struct fixture *f, const struct moe_model *m, enum moe_weight weight,
                        uint32_t expert, struct moe_st_file **file, const struct moe_tensor **t)
{
    char name[MOE_MODEL_NAME_MAX];
    assert_ok(moe_model_weight_name(m, 0, weight, expert, name));
    assert_ok(moe_st_open(
        fixture_path(f, moe_weight_is_expert(weight) ? EXPERTS_FILE : ROUTER_FILE), file));
    *t = moe_st_find(*file, name);
    assert_non_null(*t);
}

/* Each delivery has the bytes of its tensor. */
static void check_deliveries(const struct fixture *f, const struct moe_model *m,
                             const struct deliveries *got)
{
    assert_int_equal(got->count, 1 + 3 * E);
    for (size_t i = 0; i < got->count; i++) {
        const struct delivery *one = &got->list[i];
        struct moe_st_file *file;
        const struct moe_tensor *t;
        find_weight(f, m, one->weight, one->expert, &file, &t);
        assert_int_equal(one->bytes, t->bytes);
        char *want = malloc(one->bytes);
        assert_non_null(want);
        assert_ok(moe_st_read(file, t, 0, t->bytes, want));
        assert_memory_equal(one->data, want, one->bytes);
        free(want);
        moe_st_close(file);
    }
}

static void threads_that_share_a_matrix_deliver_its_bytes(void **state)
{
    struct fixture *f = *state;
    make_wide_model(f);
    struct moe_model *m = open_model(f);
    for (uint32_t threads = 1; threads <= 8; threads *= 2) {
        struct deliveries got = {0};
        struct moe_digester *d;
        assert_ok(moe_digester_create(m, threads, &d));
        assert_ok(stream_wide(m, d, &got));
        check_deliveries(f, m, &got);
        moe_digester_destroy(d);
        deliveries_free(&got);
    }
    moe_model_close(m);
}

/* The file becomes `length` bytes long. Returns the bytes behind them, `*bytes` of them. */
static char *cut_file(const struct fixture *f, uint64_t length, size_t *bytes)
{
    int fd = open(fixture_path(f, EXPERTS_FILE), O_RDWR);
    assert_true(fd >= 0);
    off_t end = lseek(fd, 0, SEEK_END);
    assert_true(end > (off_t)length);
    *bytes = (size_t)end - (size_t)length;
    char *rest = malloc(*bytes);
    assert_non_null(rest);
    assert_int_equal(pread(fd, rest, *bytes, (off_t)length), *bytes);
    assert_int_equal(ftruncate(fd, (off_t)length), 0);
    assert_int_equal(close(fd), 0);
    return rest;
}

/* Frees `rest`. */
static void mend_file(const struct fixture *f, uint64_t length, char *rest, size_t bytes)
{
    int fd = open(fixture_path(f, EXPERTS_FILE), O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, rest, bytes, (off_t)length), bytes);
    assert_int_equal(close(fd), 0);
    free(rest);
}

/* The file ends inside each item of its last matrix in turn: items before it are read, items behind
 * it fail or are skipped. */
static void a_digester_is_usable_after_a_file_that_was_cut(void **state)
{
    struct fixture *f = *state;
    char want[MOE_SHA256_HEX], hex[MOE_SHA256_HEX];
    struct moe_st_file *file;
    const struct moe_tensor *t;
    struct moe_digester *d;
    make_wide_model(f);
    struct moe_model *m = open_model(f);
    digest_of(m, NULL, want);
    find_weight(f, m, MOE_WEIGHT_UP, E - 1, &file, &t); /* the last in the file */
    const uint64_t begin = t->offset, bytes = t->bytes;
    moe_st_close(file);
    assert_ok(moe_digester_create(m, 3, &d));
    for (uint64_t at = 100; at < bytes; at += WIDE_ITEM_BYTES) {
        struct deliveries cut = {0}, whole = {0};
        struct moe_digest_table *table = new_table();
        size_t left;
        char *rest = cut_file(f, begin + at, &left);
        struct moe_status st = stream_wide(m, d, &cut);
        print_message("  cut at %llu of %llu: %s\n", (unsigned long long)at,
                      (unsigned long long)bytes, st.text);
        mend_file(f, begin + at, rest, left);
        check_reason(st, MOE_REASON_TRUNCATED);
        assert_int_equal(cut.count, 1 + 3 * E - 2); /* all before this matrix */

        assert_ok(stream_wide(m, d, &whole));
        assert_ok(moe_digester_finish(d, table));
        model_hex(table, hex);
        assert_string_equal(hex, want);
        check_deliveries(f, m, &whole);
        moe_digest_table_destroy(table);
        deliveries_free(&whole);
        deliveries_free(&cut);
    }
    moe_digester_destroy(d);
    moe_model_close(m);
}

/* ------------------------------------------------------------------ independence */

static void a_backend_that_reads_for_itself_gives_the_same_digest(void **state)
{
    struct fixture *f = *state;
    char want[MOE_SHA256_HEX], got[MOE_SHA256_HEX];
    make_wide_model(f);
    struct moe_model *m = open_model(f);
    digest_of(m, NULL, want);
    size_t pieces[] = {0, 1000, 65536, 65537, 100000, 1 << 20};
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        digest_of(m, &pieces[i], got);
        assert_string_equal(got, want);
    }
    moe_model_close(m);
}

/* A backend that reads pieces of the last matrix, while a byte of the file changes. */
struct changing {
    const struct fixture *f;
    uint64_t byte;        /* in the file: the one that changes after the first read */
    size_t first, pieces; /* the first piece that it reads; how many */
    bool down;            /* the next piece is the one before */
};
enum { CHANGING_PIECE = 100000 };

static void flip_byte(const struct fixture *f, uint64_t at)
{
    char byte;
    int fd = open(fixture_path(f, EXPERTS_FILE), O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    assert_int_equal(close(fd), 0);
}

static struct moe_status read_while_it_changes(void *ctx, enum moe_weight weight, uint32_t expert,
                                               enum moe_dtype dtype,
                                               const struct moe_weight_source *source, size_t bytes)
{
    static char data[CHANGING_PIECE];
    const struct changing *c = ctx;
    (void)dtype;
    if (weight != MOE_WEIGHT_UP || expert != E - 1)
        return moe_ok();
    for (size_t i = 0; i < c->pieces; i++) {
        size_t first = (c->down ? c->first - i : c->first + i) * CHANGING_PIECE;
        size_t left = bytes - first, n = left < sizeof data ? left : sizeof data;
        assert_ok(source->read(source->ctx, source->at + first, n, data));
        if (i == 0)
            flip_byte(c->f, c->byte);
    }
    flip_byte(c->f, c->byte);
    return moe_ok();
}

/* The byte is at the beginning of piece 1, inside a leaf that begins in piece 0. */
static void the_digest_is_of_the_bytes_that_the_backend_got(void **state)
{
    static const uint32_t experts[E] = {0, 1, 2, 3};
    static const struct {
        size_t first, pieces;
        bool down, changed; /* the backend got the changed byte */
    } cases[] = {
        {0, 8, false, true}, /* piece 1 after the change */
        {1, 2, true, false}, /* piece 1, then, after the change, piece 0 */
        {1, 1, true, false}, /* piece 1 alone */
        {2, 2, true, true},  /* pieces 2 and 1: the rest of the leaf is read at the end */
    };
    struct fixture *f = *state;
    struct moe_st_file *file;
    const struct moe_tensor *t;
    make_wide_model(f);
    struct moe_model *m = open_model(f);
    struct moe_digest_table *want = new_table();
    find_weight(f, m, MOE_WEIGHT_UP, E - 1, &file, &t);
    const uint64_t byte = t->offset + CHANGING_PIECE + 5;
    add_share(m, 0, 1, NULL, want);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct changing c = {f, byte, cases[i].first, cases[i].pieces, cases[i].down};
        struct moe_digest_table *got = new_table();
        struct moe_model_sources sources = {0};
        struct moe_digest_difference difference;
        struct moe_digester *d;
        const struct moe_model_sinks sinks = {.weight = fixture_ignore,
                                              .source = read_while_it_changes,
                                              .ctx = &c,
                                              .sources = &sources};
        assert_ok(moe_digester_create(m, 2, &d));
        assert_ok(moe_model_stream_layer(m, 0, experts, E, &sinks, d, NULL, NULL));
        assert_ok(moe_digester_finish(d, got));
        bool differs = moe_digest_table_differs(got, want, &difference);
        print_message("  case %zu: %s\n", i, differs ? difference.name : "the same");
        assert_int_equal(differs, cases[i].changed);
        if (differs)
            assert_string_equal(difference.name, t->name);
        moe_digester_destroy(d);
        moe_digest_table_destroy(got);
        moe_model_sources_free(&sources);
    }
    moe_digest_table_destroy(want);
    moe_st_close(file);
    moe_model_close(m);
}

static struct moe_model *open_golden(const char *family)
{
    char path[512];
    struct moe_model *m;
    snprintf(path, sizeof path, MOE_GOLDEN_DIR "/%s", family);
    assert_ok(moe_model_open(path, &m));
    return m;
}

static void the_split_over_slots_does_not_change_the_digest(void **state)
{
    (void)state;
    struct golden_models models;
    golden_models_list(MOE_GOLDEN_DIR, &models);
    for (size_t f = 0; f < models.count; f++) {
        struct moe_model *m = open_golden(models.names[f]);
        struct moe_digest_table *all = new_table();
        char whole[MOE_SHA256_HEX], split[MOE_SHA256_HEX];
        size_t piece = 5000;
        digest_of(m, NULL, whole);
        for (uint32_t slot = 0; slot < 3; slot++) {
            struct moe_digest_table *part = new_table();
            struct moe_digest_difference d;
            add_share(m, slot, 3, slot == 1 ? &piece : NULL, part);
            assert_false(moe_digest_table_is_complete(part));
            assert_false(moe_digest_table_differs(part, all, &d));
            assert_ok(moe_digest_table_merge(all, part));
            moe_digest_table_destroy(part);
        }
        model_hex(all, split);
        assert_string_equal(split, whole);
        print_message("  %s %s\n", whole, models.names[f]);
        moe_digest_table_destroy(all);
        moe_model_close(m);
    }
}

static void shards_do_not_change_the_digest(void **state)
{
    struct fixture *f = *state;
    char one[MOE_SHA256_HEX], two[MOE_SHA256_HEX];
    make_plain_model(f, MOE_ST_F32);
    struct moe_model *m = open_model(f);
    digest_of(m, NULL, one);
    moe_model_close(m);
    assert_int_equal(unlink(fixture_path(f, "model.safetensors")), 0);
    make_sharded_model(f, "");
    m = open_model(f);
    digest_of(m, NULL, two);
    moe_model_close(m);
    assert_string_equal(one, two);
}

/* ------------------------------------------------------------------ damage */

static void copy_file(const struct fixture *f, const char *family, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, MOE_GOLDEN_DIR "/%s/%s", family, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    static char data[4 << 20];
    size_t bytes = fread(data, 1, sizeof data, file);
    assert_true(bytes < sizeof data);
    fclose(file);
    fixture_write(f, name, data, bytes);
}

static void flip_bit(const struct fixture *f, uint64_t at, unsigned bit)
{
    unsigned char byte;
    int fd = open(fixture_path(f, "model.safetensors"), O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= (unsigned char)(1u << bit);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    assert_int_equal(close(fd), 0);
}

/* Flips a random bit of one weight of the copy, and expects its name. */
static void damage_weight(const struct fixture *f, const struct moe_model *m, size_t layer,
                          enum moe_weight weight, uint32_t expert,
                          const struct moe_digest_table *good)
{
    const struct moe_layer_spec *spec = moe_model_layer(m, layer);
    bool is_expert = moe_weight_is_expert(weight);
    char name[MOE_MODEL_NAME_MAX], shown[MOE_MODEL_NAME_MAX + 24];
    struct moe_st_file *file;
    assert_ok(moe_model_weight_name(m, layer, weight, expert, name));
    assert_ok(moe_st_open(fixture_path(f, "model.safetensors"), &file));
    const struct moe_tensor *t = moe_st_find(file, name);
    assert_non_null(t);
    bool fused = is_expert && moe_model_layer_fusion(m, layer).fused;
    uint64_t share = fused ? t->bytes / spec->experts : t->bytes;
    uint64_t at = t->offset + (fused ? expert * share : 0) + random_bits() % share;
    moe_st_close(file);
    snprintf(shown, sizeof shown, fused ? "%s, expert %u" : "%s", name, expert);

    unsigned bit = random_below(8);
    flip_bit(f, at, bit);
    struct moe_digest_table *bad = new_table();
    struct moe_digest_difference d;
    add_digests(m, layer, &expert, is_expert ? 1 : 0, NULL, bad);
    assert_true(moe_digest_table_differs(bad, good, &d));
    assert_string_equal(d.name, shown);
    assert_int_equal(d.layer, spec->layer);
    assert_int_equal(d.expert, is_expert ? expert : MOE_DIGEST_COMMON);
    moe_digest_table_destroy(bad);
    flip_bit(f, at, bit);
}

static size_t damage_model(const struct fixture *f, const struct moe_model *m,
                           const struct moe_digest_table *good)
{
    size_t found = 0;
    for (size_t i = 0; i < moe_model_layer_count(m); i++) {
        const struct moe_layer_spec *spec = moe_model_layer(m, i);
        for (unsigned w = 0; w < MOE_WEIGHT_COUNT; w++) {
            size_t rows, columns;
            moe_weight_shape(spec, (enum moe_weight)w, &rows, &columns);
            uint32_t copies = moe_weight_is_expert((enum moe_weight)w) ? spec->experts : 1;
            for (uint32_t e = 0; rows > 0 && e < copies; e++, found++)
                damage_weight(f, m, i, (enum moe_weight)w, e, good);
        }
    }
    return found;
}

static void a_flipped_bit_in_any_expert_of_any_family_is_found_by_name(void **state)
{
    struct fixture *f = *state;
    struct golden_models models;
    golden_models_list(MOE_GOLDEN_DIR, &models);
    seed_random();
    for (size_t i = 0; i < models.count; i++) {
        copy_file(f, models.names[i], "config.json");
        copy_file(f, models.names[i], "model.safetensors");
        struct moe_model *m = open_model(f);
        struct moe_digest_table *good = new_table();
        struct moe_digest_table *again = new_table();
        struct moe_digest_difference d;
        add_share(m, 0, 1, NULL, good);
        print_message("  %s: %zu weights\n", models.names[i], damage_model(f, m, good));
        add_share(m, 0, 1, NULL, again);
        assert_false(moe_digest_table_differs(again, good, &d)); /* all bits are back */
        moe_digest_table_destroy(again);
        moe_digest_table_destroy(good);
        moe_model_close(m);
    }
}

/* ------------------------------------------------------------------ tables and parts */

static void add_name(struct moe_digest_names *n, const char *text)
{
    snprintf(n->of[n->count++], MOE_DIGEST_NAME_BYTES, "%s", text);
}

/* Two layers with random units; unit `without` of each is not known (0: the common one). */
static struct moe_digest_table *random_table(uint32_t experts, uint32_t without)
{
    struct moe_digest_table *t = new_table();
    struct moe_digest_names common = {0}, expert = {0};
    add_name(&common, "mlp.gate.weight");
    add_name(&expert, "mlp.experts.*.down.weight");
    add_name(&expert, "mlp.experts.*.up.weight");
    for (uint32_t layer = 3; layer <= 7; layer += 4) {
        assert_ok(moe_digest_table_add_layer(t, layer, experts, &common, &expert));
        for (uint32_t u = 0; u <= experts; u++) {
            struct moe_digest_unit unit = {0};
            fill_random(&unit.digest, sizeof unit.digest);
            fill_random(unit.tags, u == 0 ? MOE_DIGEST_TAG_BYTES : 2 * MOE_DIGEST_TAG_BYTES);
            if (u != without)
                moe_digest_table_set(t, layer, u == 0 ? MOE_DIGEST_COMMON : u - 1, &unit);
        }
    }
    return t;
}

static void a_table_in_parts_arrives_whole(void **state)
{
    (void)state;
    seed_random();
    struct moe_digest_table *t = random_table(MOE_MAX_EXPERTS, 5), *copy = new_table();
    static uint8_t part[MOE_DIGEST_PART_MIN_BYTES];
    struct moe_digest_cursor at = {0};
    struct moe_digest_difference d;
    size_t length, parts = 0;
    while ((length = moe_digest_table_pack(t, &at, part, sizeof part)) > 0) {
        assert_true(length <= sizeof part);
        assert_ok(moe_digest_table_unpack(copy, part, length));
        parts++;
    }
    assert_true(parts > 2);
    assert_false(moe_digest_table_differs(t, copy, &d));
    for (uint32_t e = 0; e < MOE_MAX_EXPERTS; e++) {
        const struct moe_digest_unit *a = moe_digest_table_get(t, 3, e);
        const struct moe_digest_unit *b = moe_digest_table_get(copy, 3, e);
        assert_true(e == 4 ? a == NULL && b == NULL : memcmp(a, b, sizeof *a) == 0);
    }
    assert_false(moe_digest_table_is_complete(copy));
    moe_digest_table_destroy(copy);
    moe_digest_table_destroy(t);
}

static void a_part_that_is_cut_or_senseless_is_refused(void **state)
{
    (void)state;
    seed_random();
    struct moe_digest_table *t = random_table(2, UINT32_MAX), *copy = new_table();
    uint8_t part[MOE_DIGEST_PART_MIN_BYTES];
    struct moe_digest_cursor at = {0};
    size_t length = moe_digest_table_pack(t, &at, part, sizeof part);
    for (size_t cut = 0; cut < length; cut++)
        check_reason(moe_digest_table_unpack(copy, part, cut), MOE_REASON_MALFORMED);
    part[length] = 0;
    check_reason(moe_digest_table_unpack(copy, part, length + 1), MOE_REASON_MALFORMED);
    for (int i = 0; i < 20000; i++) { /* no crash, and no more than a part's units */
        uint8_t spoilt[sizeof part];
        memcpy(spoilt, part, length);
        for (uint32_t n = random_between(1, 4); n > 0; n--)
            spoilt[random_below((uint32_t)length)] = (uint8_t)random_bits();
        struct moe_status st = moe_digest_table_unpack(copy, spoilt, length);
        assert_true(!moe_failed(&st) || st.reason == MOE_REASON_MALFORMED);
    }
    moe_digest_table_clear(copy);
    assert_ok(moe_digest_table_unpack(copy, part, length));
    part[4] = 3; /* experts */
    check_reason(moe_digest_table_unpack(copy, part, length), MOE_REASON_MALFORMED);
    moe_digest_table_destroy(copy);
    moe_digest_table_destroy(t);
}

static void the_first_difference_has_the_lowest_layer_and_expert(void **state)
{
    (void)state;
    seed_random();
    struct moe_digest_table *t = random_table(4, UINT32_MAX), *copy = new_table();
    struct moe_digest_difference d;
    assert_ok(moe_digest_table_merge(copy, t));
    assert_false(moe_digest_table_differs(t, copy, &d));
    static const struct {
        uint32_t layer, expert, tag;
        const char *name;
    } steps[] = {
        {7, 3, 1, "mlp.experts.3.up.weight"},
        {7, 1, 0, "mlp.experts.1.down.weight"},
        {3, 2, 2, "mlp.experts.2.down.weight"}, /* no tag differs: the first tensor */
        {3, MOE_DIGEST_COMMON, 0, "mlp.gate.weight"},
    };
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        struct moe_digest_unit unit = *moe_digest_table_get(t, steps[i].layer, steps[i].expert);
        unit.digest.bytes[31] ^= 1;
        unit.tags[steps[i].tag][0] ^= steps[i].tag < 2;
        moe_digest_table_set(copy, steps[i].layer, steps[i].expert, &unit);
        assert_true(moe_digest_table_differs(t, copy, &d));
        assert_string_equal(d.name, steps[i].name);
        assert_int_equal(d.layer, steps[i].layer);
        assert_int_equal(d.expert, steps[i].expert);
    }
    moe_digest_table_destroy(copy);
    moe_digest_table_destroy(t);
}

/* Lengths around one, two and three leaves, at any alignment; libcrypto hashes one leaf at a time.
 */
static void leaves_in_pairs_have_the_hashes_that_they_have_alone(void **state)
{
    enum { LEAVES = 4, LEAF = MOE_DIGEST_LEAF_BYTES };
    (void)state;
    seed_random();
    char *data = malloc((size_t)LEAVES * LEAF + 64);
    assert_non_null(data);
    fill_random(data, (size_t)LEAVES * LEAF + 64);
    for (uint32_t c = 0; c < 40; c++) {
        struct moe_digest got[LEAVES + 1] = {{{0}}}, want;
        size_t bytes = (1 + random_below(LEAVES)) * LEAF;
        if (!one_in(3))
            bytes -= one_in(2) ? random_below(LEAF) : random_below(3);
        const char *from = data + random_below(64);
        assert_ok(moe_digest_leaves(from, bytes, got));
        for (size_t i = 0, at = 0; at < bytes; i++, at += LEAF) {
            size_t n = bytes - at < LEAF ? bytes - at : LEAF;
            assert_ok(moe_digest_leaf(from + at, n, "", 0, &want));
            assert_memory_equal(&got[i], &want, sizeof want);
        }
    }
    free(data);
}

/* Every length up to some blocks: the end of a message takes one block or two. */
static void two_messages_have_the_hashes_that_they_have_alone(void **state)
{
    enum { LENGTH_MAX = 400 };
    (void)state;
    seed_random();
    size_t pairs = 0;
    uint8_t message[2][1 + LENGTH_MAX], raw[2][MOE_SHA256_BYTES], want[MOE_SHA256_BYTES];
    fill_random(message, sizeof message);
    for (size_t n = 0; n < LENGTH_MAX; n++) {
        message[0][0] = message[1][0] = (uint8_t)random_below(256);
        if (!moe_sha256_pair(message[0][0], (const void *const[2]){message[0] + 1, message[1] + 1},
                             n, (uint8_t *const[2]){raw[0], raw[1]}))
            continue; /* too short, or no such instructions */
        pairs++;
        for (int m = 0; m < 2; m++) {
            struct moe_sha256 s;
            moe_sha256_begin(&s);
            moe_sha256_update(&s, message[m], 1 + n);
            assert_ok(moe_sha256_next(&s, want));
            moe_sha256_drop(&s);
            assert_memory_equal(raw[m], want, sizeof want);
        }
    }
    print_message("  %zu pairs\n", pairs);
    if (pairs == 0)
        skip();
}

int main(void)
{
#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        WITH_FILES(the_digest_is_the_tree_that_the_header_describes),
        WITH_FILES(threads_that_share_a_matrix_deliver_its_bytes),
        WITH_FILES(a_digester_is_usable_after_a_file_that_was_cut),
        WITH_FILES(a_backend_that_reads_for_itself_gives_the_same_digest),
        WITH_FILES(the_digest_is_of_the_bytes_that_the_backend_got),
        cmocka_unit_test(the_split_over_slots_does_not_change_the_digest),
        WITH_FILES(shards_do_not_change_the_digest),
        WITH_FILES(a_flipped_bit_in_any_expert_of_any_family_is_found_by_name),
        cmocka_unit_test(leaves_in_pairs_have_the_hashes_that_they_have_alone),
        cmocka_unit_test(two_messages_have_the_hashes_that_they_have_alone),
        cmocka_unit_test(a_table_in_parts_arrives_whole),
        cmocka_unit_test(a_part_that_is_cut_or_senseless_is_refused),
        cmocka_unit_test(the_first_difference_has_the_lowest_layer_and_expert),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
