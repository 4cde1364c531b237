/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the activation cache. A find returns the committed piece, and pieces never overlap.
 * The oldest name is evicted first and completely; open pieces stay. A steady cache allocates
 * nothing. The test provides the memory. */
#include "common/activation_cache.h"
#include "support/check.h"
#include "support/random.h"

#include <stdlib.h>

enum { LIMIT = 64 * MOE_ACTIVATION_ALIGN };

static uint32_t allocations;
static bool memory_is_out;
static struct moe_activation_cache store;
static const struct moe_layer *const layer_a = (const void *)&allocations;
static const struct moe_layer *const layer_b = (const void *)&memory_is_out;

static struct moe_status take_block(struct moe_device *device, enum moe_mem kind, size_t bytes,
                                    void **out)
{
    (void)device;
    (void)kind;
    if (memory_is_out)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "none");
    allocations++;
    *out = calloc(1, bytes);
    return moe_ok();
}

static void give_block(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes)
{
    (void)device;
    (void)kind;
    (void)bytes;
    free(p);
}

static void begin(size_t limit)
{
    allocations = 0;
    memory_is_out = false;
    moe_activation_cache_open(&store, NULL, take_block, give_block);
    moe_activation_cache_limit(&store, limit);
}

static struct moe_activation_key key_of(const struct moe_layer *layer, uint64_t name)
{
    return (struct moe_activation_key){
        .layer = layer, .name = name, .dtype = MOE_DTYPE_BF16, .bucket = 8, .tokens = 5};
}

/* A step that retains both parts, of so many units each; false if there is no room. */
static bool retain(const struct moe_layer *layer, uint64_t name, size_t routed, size_t shared)
{
    struct moe_activation_key key = key_of(layer, name);
    bool all = moe_activation_cache_take(&store, &key, MOE_ACTIVATION_SHARED,
                                         shared * MOE_ACTIVATION_ALIGN) != NULL &&
               moe_activation_cache_take(&store, &key, MOE_ACTIVATION_ROUTED,
                                         routed * MOE_ACTIVATION_ALIGN) != NULL;
    if (!all) {
        moe_activation_cache_forget(&store, &key);
        return false;
    }
    moe_activation_cache_fill(&store, &key, MOE_ACTIVATION_ROUTED, name, (uint32_t)routed,
                              routed * MOE_ACTIVATION_ALIGN);
    moe_activation_cache_commit(&store, &key);
    return true;
}

static bool has(const struct moe_layer *layer, uint64_t name)
{
    struct moe_activation_key key = key_of(layer, name);
    struct moe_activation_piece routed, shared;
    bool one = moe_activation_cache_find(&store, &key, MOE_ACTIVATION_ROUTED, &routed);
    bool other = moe_activation_cache_find(&store, &key, MOE_ACTIVATION_SHARED, &shared);
    assert_int_equal(one, other); /* a name goes whole */
    if (one)
        assert_int_equal(routed.rows, name);
    return one;
}

static bool has_block(void)
{
    moe_mutex_lock(&store.lock);
    bool has = store.block != NULL;
    moe_mutex_unlock(&store.lock);
    return has;
}

static void the_oldest_name_makes_room(void **state)
{
    (void)state;
    begin(LIMIT);
    assert_true(retain(layer_a, 1, 20, 4));
    assert_true(retain(layer_a, 2, 20, 4));
    assert_true(has(layer_a, 1) && has(layer_a, 2));
    assert_true(retain(layer_b, 1, 20, 4)); /* 16 units are left: the first name goes */
    assert_true(!has(layer_a, 1) && has(layer_a, 2) && has(layer_b, 1));
    assert_true(retain(layer_a, 3, 60, 4)); /* all of them */
    assert_true(has(layer_a, 3) && !has(layer_a, 2) && !has(layer_b, 1));
    assert_int_equal(moe_activation_cache_bytes(&store), LIMIT);
    assert_false(retain(layer_a, 4, 61, 4)); /* never fits */
    assert_int_equal(allocations, 1);
    moe_activation_cache_close(&store);
}

static void open_pieces_stay(void **state)
{
    (void)state;
    struct moe_activation_key first = key_of(layer_a, 1), second = key_of(layer_a, 2);
    struct moe_activation_piece piece;
    begin(LIMIT);
    assert_non_null(moe_activation_cache_take(&store, &first, MOE_ACTIVATION_ROUTED,
                                              40 * MOE_ACTIVATION_ALIGN));
    assert_false(moe_activation_cache_find(&store, &first, MOE_ACTIVATION_ROUTED, &piece));
    assert_null(moe_activation_cache_take(&store, &second, MOE_ACTIVATION_ROUTED,
                                          40 * MOE_ACTIVATION_ALIGN));
    /* It needs less than it took. */
    moe_activation_cache_fill(&store, &first, MOE_ACTIVATION_ROUTED, 7, 8,
                              10 * MOE_ACTIVATION_ALIGN - 1);
    moe_activation_cache_commit(&store, &first);
    assert_true(moe_activation_cache_find(&store, &first, MOE_ACTIVATION_ROUTED, &piece));
    assert_int_equal(piece.rows, 7);
    assert_int_equal(piece.in_use, 8);
    assert_non_null(moe_activation_cache_take(&store, &second, MOE_ACTIVATION_ROUTED,
                                              54 * MOE_ACTIVATION_ALIGN));
    assert_true(moe_activation_cache_find(&store, &first, MOE_ACTIVATION_ROUTED, &piece));
    moe_activation_cache_forget(&store, &second);
    assert_int_equal(moe_activation_cache_bytes(&store), 10 * MOE_ACTIVATION_ALIGN - 1);
    moe_activation_cache_close(&store);
}

/* A piece that cannot fit even alone evicts nothing. */
static void nothing_goes_in_vain(void **state)
{
    (void)state;
    struct moe_activation_key open = key_of(layer_b, 1), more = key_of(layer_b, 2);
    begin(LIMIT);
    assert_true(retain(layer_a, 1, 16, 4));
    assert_non_null(
        moe_activation_cache_take(&store, &open, MOE_ACTIVATION_ROUTED, 20 * MOE_ACTIVATION_ALIGN));
    assert_true(retain(layer_a, 2, 16, 4));
    /* 64 units: 16 of the first name, 20 of the step, 20 of the second, 4 and 4 at the end. */
    assert_int_equal(moe_activation_cache_begin(&store, &more), 28 * MOE_ACTIVATION_ALIGN);
    assert_null(
        moe_activation_cache_take(&store, &more, MOE_ACTIVATION_ROUTED, 29 * MOE_ACTIVATION_ALIGN));
    assert_false(retain(layer_a, 3, 29, 0));
    assert_true(has(layer_a, 1) && has(layer_a, 2));
    assert_false(retain(layer_a, 2, 29, 4)); /* its own name may be of another batch */
    assert_true(has(layer_a, 1) && !has(layer_a, 2));
    assert_non_null(
        moe_activation_cache_take(&store, &more, MOE_ACTIVATION_ROUTED, 28 * MOE_ACTIVATION_ALIGN));
    moe_activation_cache_close(&store);
}

/* The second fails, the first is retained; then both succeed, and the later one counts. */
static void steps_of_one_name_have_their_own(void **state)
{
    (void)state;
    struct moe_activation_key first = key_of(layer_a, 1), second = first;
    struct moe_activation_piece piece;
    first.step = &first;
    second.step = &second;
    begin(LIMIT);
    assert_non_null(
        moe_activation_cache_take(&store, &first, MOE_ACTIVATION_ROUTED, 4 * MOE_ACTIVATION_ALIGN));
    assert_non_null(moe_activation_cache_take(&store, &second, MOE_ACTIVATION_ROUTED,
                                              4 * MOE_ACTIVATION_ALIGN));
    moe_activation_cache_forget(&store, &second);
    assert_false(moe_activation_cache_commit(&store, &second));
    moe_activation_cache_fill(&store, &first, MOE_ACTIVATION_ROUTED, 7, 8, MOE_ACTIVATION_ALIGN);
    assert_true(moe_activation_cache_commit(&store, &first));
    assert_true(moe_activation_cache_find(&store, &second, MOE_ACTIVATION_ROUTED, &piece));
    assert_int_equal(piece.rows, 7);
    assert_non_null(
        moe_activation_cache_take(&store, &first, MOE_ACTIVATION_ROUTED, 4 * MOE_ACTIVATION_ALIGN));
    assert_non_null(moe_activation_cache_take(&store, &second, MOE_ACTIVATION_ROUTED,
                                              4 * MOE_ACTIVATION_ALIGN));
    moe_activation_cache_fill(&store, &first, MOE_ACTIVATION_ROUTED, 1, 8, MOE_ACTIVATION_ALIGN);
    moe_activation_cache_fill(&store, &second, MOE_ACTIVATION_ROUTED, 2, 8, MOE_ACTIVATION_ALIGN);
    assert_true(moe_activation_cache_commit(&store, &first) &&
                moe_activation_cache_commit(&store, &second));
    assert_true(moe_activation_cache_find(&store, &first, MOE_ACTIVATION_ROUTED, &piece));
    assert_int_equal(piece.rows, 2);
    assert_int_equal(moe_activation_cache_bytes(&store), MOE_ACTIVATION_ALIGN);
    moe_activation_cache_close(&store);
}

static void the_block_goes_back_where_nobody_is_at_it(void **state)
{
    (void)state;
    struct moe_activation_key key = key_of(layer_a, 2);
    begin(LIMIT);
    assert_false(moe_activation_cache_give_back(&store)); /* there is none */
    assert_true(retain(layer_a, 1, 4, 4));
    assert_non_null(
        moe_activation_cache_take(&store, &key, MOE_ACTIVATION_ROUTED, MOE_ACTIVATION_ALIGN));
    assert_false(moe_activation_cache_give_back(&store));
    assert_true(has(layer_a, 1));
    moe_activation_cache_forget(&store, &key);
    moe_activation_cache_read_begin(&store);
    moe_activation_cache_read_begin(&store);
    moe_activation_cache_read_end(&store);
    assert_false(moe_activation_cache_give_back(&store));
    moe_activation_cache_read_end(&store);
    assert_true(moe_activation_cache_give_back(&store));
    assert_false(has_block());
    assert_false(has(layer_a, 1));
    assert_int_equal(moe_activation_cache_bytes(&store), 0);
    assert_true(retain(layer_a, 1, 4, 4));
    assert_int_equal(allocations, 2);
    moe_activation_cache_close(&store);
}

static void another_batch_is_not_found(void **state)
{
    (void)state;
    struct moe_activation_piece piece;
    begin(LIMIT);
    assert_true(retain(layer_a, 1, 1, 1));
    struct moe_activation_key other[5];
    for (int i = 0; i < 5; i++)
        other[i] = key_of(layer_a, 1);
    other[0].dtype = MOE_DTYPE_F32;
    other[1].bucket = 16;
    other[2].tokens = 4;
    other[3].session = (const void *)&store;
    other[4].name = 2;
    for (int i = 0; i < 5; i++)
        assert_false(moe_activation_cache_find(&store, &other[i], MOE_ACTIVATION_ROUTED, &piece));
    moe_activation_cache_close(&store);
}

static void dropped_pieces_are_gone(void **state)
{
    (void)state;
    begin(LIMIT);
    for (uint64_t name = 1; name <= 3; name++)
        assert_true(retain(layer_a, name, 2, 2) && retain(layer_b, name, 2, 2));
    moe_activation_cache_drop(&store, layer_a, 2);
    assert_true(has(layer_a, 1) && !has(layer_a, 2) && has(layer_a, 3) && has(layer_b, 2));
    moe_activation_cache_drop(&store, layer_a, 0);
    assert_true(!has(layer_a, 1) && !has(layer_a, 3) && has(layer_b, 1));
    moe_activation_cache_drop_session(&store, NULL);
    assert_int_equal(moe_activation_cache_bytes(&store), 0);
    assert_true(retain(layer_a, 1, 2, 2));
    moe_activation_cache_limit(&store, 0);
    assert_false(has(layer_a, 1) || retain(layer_a, 1, 0, 0));
    moe_activation_cache_close(&store);
}

static void no_memory_means_that_nothing_is_kept(void **state)
{
    (void)state;
    begin(LIMIT);
    memory_is_out = true;
    assert_false(retain(layer_a, 1, 1, 1));
    memory_is_out = false;
    assert_true(retain(layer_a, 1, 1, 1));
    moe_activation_cache_close(&store);
}

/* Steps of random sizes, two at a time: pieces do not overlap, stay inside the block, and are
 * intact.
 */
/* Pieces are in order and do not overlap. */
static void check_apart(size_t limit)
{
    size_t at = 0;
    moe_mutex_not_shared(&store.lock);
    for (uint32_t i = 0; i < store.count; i++) {
        assert_true(store.piece[i].offset >= at);
        at = store.piece[i].offset + store.piece[i].bytes;
    }
    assert_true(at <= limit);
}

static void random_steps_keep_apart(void **state)
{
    (void)state;
    uint32_t retained = 0, found = 0;
    begin(LIMIT + 17);
    for (uint64_t name = 1; name < 5000; name++) {
        retained += retain(one_in(2) ? layer_a : layer_b, name, random_below(20), random_below(6));
        uint64_t some = name > 3 ? name - random_below(3) : name;
        found += has(layer_a, some) || has(layer_b, some);
        if (one_in(7))
            moe_activation_cache_drop(&store, layer_a, some);
        check_apart(LIMIT + 17);
    }
    print_message("%u retained, %u found\n", retained, found);
    assert_true(retained > 4990 && found > 3000);
    assert_int_equal(allocations, 1);
    moe_activation_cache_close(&store);
}

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oldest_name_makes_room),
        cmocka_unit_test(open_pieces_stay),
        cmocka_unit_test(nothing_goes_in_vain),
        cmocka_unit_test(steps_of_one_name_have_their_own),
        cmocka_unit_test(the_block_goes_back_where_nobody_is_at_it),
        cmocka_unit_test(another_batch_is_not_found),
        cmocka_unit_test(dropped_pieces_are_gone),
        cmocka_unit_test(no_memory_means_that_nothing_is_kept),
        cmocka_unit_test(random_steps_keep_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
