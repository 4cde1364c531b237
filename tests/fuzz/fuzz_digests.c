/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a part of digests, and as the file of a group's record. A part is refused, or it
 * packs again to units that a second table reads as the same ones. */
#include "coordinator/weights.h"
#include "driver.h"

#include <string.h>

static uint8_t seed[MOE_DIGEST_PART_MIN_BYTES];

static void check_part(const uint8_t *data, size_t size)
{
    struct moe_digest_table *t, *copy;
    struct moe_digest_difference d;
    struct moe_status made = moe_digest_table_create(&t);
    MOE_INVARIANT(!moe_failed(&made));
    made = moe_digest_table_create(&copy);
    MOE_INVARIANT(!moe_failed(&made));
    struct moe_status st = moe_digest_table_unpack(t, data, size);
    if (!moe_failed(&st)) {
        static uint8_t part[MOE_DIGEST_PART_MIN_BYTES];
        struct moe_digest_cursor at = {0};
        size_t length;
        while ((length = moe_digest_table_pack(t, &at, part, sizeof part)) > 0) {
            st = moe_digest_table_unpack(copy, part, length);
            MOE_INVARIANT(!moe_failed(&st));
        }
        MOE_INVARIANT(!moe_digest_table_differs(t, copy, &d));
    }
    moe_digest_table_destroy(copy);
    moe_digest_table_destroy(t);
}

static void check_record(const uint8_t *data, size_t size)
{
    struct moe_weights *w;
    struct moe_status st = moe_weights_create(1, "accept", &w);
    MOE_INVARIANT(!moe_failed(&st));
    st = moe_weights_decode(w, data, size);
    MOE_INVARIANT((moe_weights_digest(w, NULL)[0] == '\0') == moe_failed(&st));
    moe_weights_destroy(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    check_part(data, size);
    check_record(data, size);
    return 0;
}

/* Seed 0: one layer of two experts, all units known. */
size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static const struct moe_digest_names common = {1, {"gate"}}, expert = {2, {"e.*.a", "e.*.b"}};
    const struct moe_digest_unit unit = {.digest.bytes = {1, 2, 3}};
    struct moe_digest_table *t;
    struct moe_digest_cursor at = {0};
    if (i > 0)
        return 0;
    struct moe_status st = moe_digest_table_create(&t);
    MOE_INVARIANT(!moe_failed(&st));
    st = moe_digest_table_add_layer(t, 1, 2, &common, &expert);
    MOE_INVARIANT(!moe_failed(&st));
    moe_digest_table_set(t, 1, MOE_DIGEST_COMMON, &unit);
    moe_digest_table_set(t, 1, 0, &unit);
    moe_digest_table_set(t, 1, 1, &unit);
    *data = seed;
    size_t length = moe_digest_table_pack(t, &at, seed, sizeof seed);
    moe_digest_table_destroy(t);
    return length;
}
