/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of domain maps (kernels/common/domains.h): each live slot has one place, domains have
 * one size, slots of one part are in one domain, and a gateway has the index of its source. */
#include "common/domains.h"
#include "support/check.h"
#include "support/random.h"

static void make(const uint32_t *domain, uint32_t slots, struct moe_domains *map)
{
    assert_ok(moe_domains_make(domain, slots, map));
}

/* Slot numbers of two hosts alternate, and slot 3 is not live. */
static void slots_of_one_domain_are_ordered_by_number(void **state)
{
    (void)state;
    const uint32_t domain[7] = {70, 3, 70, MOE_DOMAIN_NONE, 3, 3, 70};
    const uint16_t expected[2][3] = {{0, 2, 6}, {1, 4, 5}};
    struct moe_domains map;
    make(domain, 7, &map);
    assert_int_equal(map.domains, 2);
    assert_int_equal(map.size, 3);
    for (uint32_t d = 0; d < 2; d++)
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(moe_domains_slot(&map, d, i), expected[d][i]);
    assert_int_equal(moe_domains_gateway(&map, 5, 0), 6);
    assert_int_equal(moe_domains_gateway(&map, 2, 1), 4);
    assert_false(moe_domains_flat(&map));
}

/* Six and four slots: parts of two, so no slot serves two of another domain. */
static void uneven_domains_are_cut_into_equal_parts(void **state)
{
    (void)state;
    const uint32_t domain[10] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 2};
    struct moe_domains map;
    make(domain, 10, &map);
    assert_int_equal(map.size, 2);
    assert_int_equal(map.domains, 5);
    for (uint32_t s = 0; s < 10; s++) {
        assert_int_equal(map.domain_of[s], s / 2);
        assert_int_equal(map.index_of[s], s % 2);
    }
}

static void one_domain_and_domains_of_one_slot_are_flat(void **state)
{
    (void)state;
    const uint32_t one[4] = {9, 9, 9, 9}, single[4] = {4, 3, 2, 1}, odd[3] = {1, 1, 2};
    struct moe_domains map;
    make(one, 4, &map);
    assert_true(moe_domains_flat(&map) && map.domains == 1 && map.size == 4);
    make(single, 4, &map);
    assert_true(moe_domains_flat(&map) && map.domains == 4 && map.size == 1);
    make(odd, 3, &map);
    assert_true(moe_domains_flat(&map) && map.domains == 3);
}

static void refused(const uint32_t *domain, uint32_t slots)
{
    struct moe_domains map;
    assert_refused(moe_domains_make(domain, slots, &map), MOE_INVALID_ARGUMENT,
                   MOE_REASON_CONFIG_INVALID);
}

static void what_a_map_cannot_hold_is_refused(void **state)
{
    (void)state;
    static uint32_t domain[MOE_DOMAINS_MAX_SLOTS + 1];
    struct moe_domains map;
    for (uint32_t s = 0; s <= MOE_DOMAINS_MAX_SLOTS; s++)
        domain[s] = MOE_DOMAIN_NONE;
    refused(domain, 4); /* no slot is live */
    refused(domain, 0);
    for (uint32_t s = 0; s <= MOE_DOMAINS_MAX_SLOTS; s++)
        domain[s] = s;
    refused(domain, MOE_DOMAINS_MAX + 1);
    refused(domain, MOE_DOMAINS_MAX_SLOTS + 1);
    for (uint32_t s = 0; s <= MOE_DOMAINS_MAX_SLOTS; s++)
        domain[s] = 0;
    refused(domain, MOE_DOMAINS_MAX_SIZE + 1);
    make(domain, MOE_DOMAINS_MAX_SIZE, &map);
}

static void check_map(const struct moe_domains *map, const uint32_t *domain, uint32_t live)
{
    bool taken[64] = {false};
    assert_int_equal(map->domains * map->size, live);
    for (uint32_t d = 0; d < map->domains; d++)
        for (uint32_t i = 0; i < map->size; i++) {
            uint32_t s = moe_domains_slot(map, d, i);
            assert_true(s < map->slots && !taken[s] && domain[s] != MOE_DOMAIN_NONE);
            taken[s] = true;
            assert_int_equal(map->domain_of[s], d);
            assert_int_equal(map->index_of[s], i);
            assert_int_equal(domain[s], domain[moe_domains_slot(map, d, 0)]);
            assert_true(i == 0 || s > moe_domains_slot(map, d, i - 1));
            uint32_t g = moe_domains_gateway(map, s, random_below(map->domains));
            assert_int_equal(map->index_of[g], i);
        }
    for (uint32_t d = 1; d < map->domains; d++)
        assert_true(moe_domains_slot(map, d, 0) > moe_domains_slot(map, d - 1, 0));
}

static void every_live_slot_has_one_place(void **state)
{
    (void)state;
    seed_random();
    for (int run = 0; run < 20000; run++) {
        uint32_t domain[64], slots = random_between(1, 64), live = 0;
        uint32_t hosts = random_between(1, 9);
        for (uint32_t s = 0; s < slots; s++) {
            domain[s] = one_in(8) ? MOE_DOMAIN_NONE : 1000 + random_below(hosts);
            live += domain[s] != MOE_DOMAIN_NONE;
        }
        struct moe_domains map;
        if (live == 0)
            continue;
        make(domain, slots, &map);
        check_map(&map, domain, live);
    }
}

/* Decision 0009: who stores into the regions of `source` in the window of `slot`. */
static uint32_t writer(const struct moe_domains *m, uint32_t source, uint32_t slot)
{
    bool direct = moe_domains_flat(m) || m->domain_of[source] == m->domain_of[slot] ||
                  m->index_of[source] == m->index_of[slot];
    return direct ? source : moe_domains_gateway(m, source, m->domain_of[slot]);
}

static void check_writers(const struct moe_domains *before, const struct moe_domains *after,
                          uint64_t live)
{
    assert_int_equal(after->domains * after->size, __builtin_popcountll(live));
    for (uint32_t a = 0; a < before->slots; a++)
        for (uint32_t b = 0; b < before->slots; b++)
            if (a != b && (live >> a & 1) && (live >> b & 1))
                assert_int_equal(writer(before, a, b), writer(after, a, b));
}

/* And if the domains were made anew without a part of one, some region would have another. */
static void a_map_with_fewer_domains_keeps_the_writer_of_every_region(void **state)
{
    (void)state;
    uint32_t whole = 0, parts = 0;
    for (int run = 0; run < 20000; run++) {
        uint32_t domain[64], slots = random_between(4, 24), hosts = random_between(2, 4);
        for (uint32_t s = 0; s < slots; s++)
            domain[s] = s != 0 && one_in(16) ? MOE_DOMAIN_NONE : s * hosts / slots;
        struct moe_domains before, after;
        uint64_t live = 0;
        make(domain, slots, &before);
        if (moe_domains_flat(&before))
            continue;
        for (uint32_t d = 0; d < before.domains; d++)
            for (uint32_t i = 0; i < before.size && !one_in(2); i++)
                live |= moe_domains_together(&before, moe_domains_slot(&before, d, 0));
        bool part = one_in(2) && live != 0;
        if (part)
            live &= live - 1; /* without one slot */
        bool good = moe_domains_without(&before, live, &after);
        assert_true(good == !part);
        whole += good && after.domains < before.domains;
        parts += part;
        if (good)
            check_writers(&before, &after, live);
    }
    print_message("%u maps lost domains, %u would have lost a part\n", whole, parts);
    assert_true(whole > 1000 && parts > 1000);
}

static void slots_of_a_flat_map_are_lost_alone(void **state)
{
    (void)state;
    const uint32_t one[4] = {9, 9, 9, 9}, odd[3] = {1, 1, 2}, pairs[4] = {1, 2, 1, 2};
    struct moe_domains map;
    make(one, 4, &map);
    assert_int_equal(moe_domains_together(&map, 2), 1 << 2);
    make(odd, 3, &map);
    assert_int_equal(moe_domains_together(&map, 0), 1 << 0);
    make(pairs, 4, &map);
    assert_int_equal(moe_domains_together(&map, 3), 1 << 1 | 1 << 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_of_one_domain_are_ordered_by_number),
        cmocka_unit_test(uneven_domains_are_cut_into_equal_parts),
        cmocka_unit_test(one_domain_and_domains_of_one_slot_are_flat),
        cmocka_unit_test(what_a_map_cannot_hold_is_refused),
        cmocka_unit_test(every_live_slot_has_one_place),
        cmocka_unit_test(a_map_with_fewer_domains_keeps_the_writer_of_every_region),
        cmocka_unit_test(slots_of_a_flat_map_are_lost_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
