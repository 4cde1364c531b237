/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the plan of a pass (kernels/common/dispatch_plan.h), for whole groups: the legs bring
 * each row to exactly the slots that compute it, once; it enters another domain at most once, at
 * the slot of its source's index; counts and legs are those of a naive walk. */
#include "common/dispatch_plan.h"
#include "support/check.h"
#include "support/random.h"

enum { SLOTS = 24, EXPERTS = 40, TOKENS = 30, TOP_K = 8 };

/* A group and one source's tokens, all random. */
struct scene {
    uint32_t domain[SLOTS], live[SLOTS], lives;
    struct moe_domains map;
    uint32_t offset[EXPERTS + 1];
    uint16_t slot[EXPERTS * SLOTS];
    struct moe_placement placement;
    int32_t ids[TOKENS * TOP_K];
    uint8_t state[TOKENS];
    struct moe_dispatch_input in;
};

static void random_group(struct scene *s)
{
    uint32_t slots = random_between(1, SLOTS), hosts = random_between(1, 6);
    bool even = one_in(2);
    s->lives = 0;
    for (uint32_t p = 0; p < slots; p++) {
        s->domain[p] = even ? p / hosts : random_below(hosts);
        if (p > 0 && one_in(10))
            s->domain[p] = MOE_DOMAIN_NONE;
        if (s->domain[p] != MOE_DOMAIN_NONE)
            s->live[s->lives++] = p;
    }
    assert_ok(moe_domains_make(s->domain, slots, &s->map));
}

/* Copies on up to three different live slots, in ascending order. */
static void random_placement(struct scene *s)
{
    s->placement = (struct moe_placement){.experts = random_between(1, EXPERTS),
                                          .slots = s->map.slots,
                                          .offset = s->offset,
                                          .slot = s->slot};
    uint32_t n = 0;
    for (uint32_t e = 0; e < s->placement.experts; e++) {
        s->offset[e] = n;
        uint32_t copies = one_in(3) ? random_between(1, s->lives < 3 ? s->lives : 3) : 1;
        uint32_t first = random_below(s->lives - copies + 1);
        for (uint32_t i = 0; i < copies; i++)
            s->slot[n++] = (uint16_t)s->live[first + i];
    }
    s->offset[s->placement.experts] = n;
}

static void random_tokens(struct scene *s)
{
    uint32_t zero = one_in(3) ? 4 : 0, tokens = random_below(TOKENS + 1);
    uint32_t top_k = random_between(1, TOP_K);
    for (uint32_t i = 0; i < tokens * top_k; i++)
        s->ids[i] = one_in(12) ? -1 : (int32_t)random_below(s->placement.experts + zero);
    for (uint32_t t = 0; t < tokens; t++)
        s->state[t] = one_in(10) ? MOE_TOKEN_NONFINITE_LOGITS : MOE_TOKEN_OK;
    s->in = (struct moe_dispatch_input){.domains = &s->map,
                                        .placement = &s->placement,
                                        .slot = s->live[random_below(s->lives)],
                                        .tokens = tokens,
                                        .top_k = top_k,
                                        .zero_experts = zero,
                                        .ids = s->ids,
                                        .token_state = one_in(2) ? s->state : NULL};
}

/* The plan of a scene, with all its arrays. They start as garbage. */
struct planned {
    uint16_t target[TOKENS * TOP_K];
    uint64_t wanted[TOKENS], inside[TOKENS], across[TOKENS];
    uint32_t count[SLOTS * EXPERTS], tokens_for[SLOTS], crossings[MOE_DOMAINS_MAX];
};

static void plan(const struct scene *s, struct planned *p)
{
    memset(p, 0x5a, sizeof *p);
    struct moe_dispatch_plan out = {.target = p->target,
                                    .wanted = p->wanted,
                                    .inside = p->inside,
                                    .across = p->across,
                                    .count = p->count,
                                    .stride = EXPERTS,
                                    .tokens_for = p->tokens_for,
                                    .crossings = p->crossings};
    assert_ok(moe_dispatch_plan(&s->in, &out));
}

/* How often the source's row of each token arrives at each slot. */
struct arrivals {
    uint8_t rows[TOKENS][SLOTS];
    uint64_t sent[MOE_LEG_COUNT];
};

/* Moves all rows over their legs, as a source and its gateways do. */
static void move_rows(const struct scene *s, const struct planned *p, struct arrivals *a)
{
    const struct moe_domains *m = &s->map;
    uint32_t own = m->domain_of[s->in.slot], index = m->index_of[s->in.slot];
    memset(a, 0, sizeof *a);
    for (uint32_t t = 0; t < s->in.tokens; t++)
        for (uint32_t d = 0; d < m->domains; d++) {
            if (d != own && !(p->across[t] >> d & 1))
                continue;
            uint32_t gateway = moe_domains_gateway(m, s->in.slot, d);
            const uint16_t *target = p->target + t * s->in.top_k;
            uint64_t slots = moe_dispatch_slots_in(m, d, target, s->in.top_k);
            a->sent[MOE_LEG_ACROSS] += d != own;
            assert_int_equal(m->index_of[gateway], index);
            if (d == own)
                assert_int_equal(slots, p->inside[t]);
            assert_true(d == own || slots != 0); /* no row crosses in vain */
            for (uint32_t i = 0; i < m->size; i++)
                if (slots >> i & 1) {
                    a->rows[t][moe_domains_slot(m, d, i)]++;
                    a->sent[d == own ? MOE_LEG_INSIDE : MOE_LEG_FORWARD] += i != index;
                }
        }
}

/* The same from the definition: choice by choice, without masks or maps. */
struct naive {
    uint16_t target[TOKENS * TOP_K];
    bool wanted[TOKENS][SLOTS];
    uint32_t count[SLOTS * EXPERTS];
};

static void walk_naively(const struct scene *s, struct naive *n)
{
    memset(n, 0, sizeof *n);
    for (uint32_t i = 0; i < s->in.tokens * s->in.top_k; i++) {
        uint32_t t = i / s->in.top_k;
        int32_t e = s->ids[i];
        n->target[i] = MOE_PLAN_NO_SLOT;
        if (e < 0 || e >= (int32_t)s->placement.experts ||
            (s->in.token_state != NULL && s->state[t] != MOE_TOKEN_OK))
            continue;
        uint32_t copies = s->offset[e + 1] - s->offset[e];
        uint16_t slot = s->slot[s->offset[e] + t % copies];
        n->target[i] = slot;
        n->wanted[t][slot] = true;
        n->count[slot * EXPERTS + (uint32_t)e]++;
    }
}

static void compare(const struct scene *s, const struct planned *p)
{
    struct naive n;
    struct arrivals a;
    uint32_t tokens_for[SLOTS] = {0}, entered[MOE_DOMAINS_MAX] = {0};
    uint64_t legs[MOE_LEG_COUNT], total;
    walk_naively(s, &n);
    move_rows(s, p, &a);
    if (s->in.tokens > 0)
        assert_memory_equal(p->target, n.target, s->in.tokens * s->in.top_k * sizeof *p->target);
    for (uint32_t t = 0; t < s->in.tokens; t++) {
        bool enters[MOE_DOMAINS_MAX] = {false};
        for (uint32_t q = 0; q < s->map.slots; q++) {
            assert_int_equal(a.rows[t][q], n.wanted[t][q]);
            assert_int_equal(p->wanted[t] >> q & 1, n.wanted[t][q]);
            tokens_for[q] += n.wanted[t][q];
            if (n.wanted[t][q] && s->map.domain_of[q] != s->map.domain_of[s->in.slot])
                enters[s->map.domain_of[q]] = true;
        }
        for (uint32_t d = 0; d < s->map.domains; d++)
            entered[d] += enters[d];
    }
    assert_memory_equal(p->tokens_for, tokens_for, s->map.slots * sizeof *tokens_for);
    assert_memory_equal(p->crossings, entered, s->map.domains * sizeof *entered);
    for (uint32_t q = 0; q < s->map.slots; q++)
        assert_memory_equal(p->count + q * EXPERTS, n.count + q * EXPERTS,
                            EXPERTS * sizeof *n.count);
    total = moe_dispatch_legs(&s->map, s->in.slot, p->tokens_for, p->crossings, legs);
    assert_memory_equal(legs, a.sent, sizeof legs);
    assert_true(total == legs[0] + legs[1] + legs[2]);
    assert_true(s->map.domains > 1 || legs[MOE_LEG_ACROSS] + legs[MOE_LEG_FORWARD] == 0);
    assert_true(s->map.size > 1 || legs[MOE_LEG_INSIDE] + legs[MOE_LEG_FORWARD] == 0);
}

static void rows_reach_the_slots_that_compute_them_once(void **state)
{
    (void)state;
    static struct scene s;
    static struct planned p;
    seed_random();
    for (int run = 0; run < 5000; run++) {
        random_group(&s);
        random_placement(&s);
        random_tokens(&s);
        plan(&s, &p);
        compare(&s, &p);
    }
}

/* Two domains of two slots; expert e is on slot e. Every number can be checked by eye. */
static void the_legs_of_a_small_group(void **state)
{
    (void)state;
    static struct scene s;
    static struct planned p;
    const int32_t ids[4 * 2] = {0,  1, /* inside only */
                                2,  3, /* one crossing, one forward */
                                0,  2, /* one crossing, to the gateway itself */
                                -1, 1};
    uint64_t legs[MOE_LEG_COUNT];
    for (uint32_t i = 0; i < 4; i++) {
        s.domain[i] = i / 2;
        s.offset[i + 1] = i + 1;
        s.slot[i] = (uint16_t)i;
    }
    assert_ok(moe_domains_make(s.domain, 4, &s.map));
    s.placement =
        (struct moe_placement){.experts = 4, .slots = 4, .offset = s.offset, .slot = s.slot};
    s.in = (struct moe_dispatch_input){
        .domains = &s.map, .placement = &s.placement, .tokens = 4, .top_k = 2, .ids = ids};
    plan(&s, &p);
    assert_int_equal(moe_dispatch_legs(&s.map, 0, p.tokens_for, p.crossings, legs), 5);
    assert_int_equal(legs[MOE_LEG_INSIDE], 2);
    assert_int_equal(legs[MOE_LEG_ACROSS], 2);
    assert_int_equal(legs[MOE_LEG_FORWARD], 1);
    assert_int_equal(p.inside[0], 3);
    assert_int_equal(p.across[1], 2);
    assert_int_equal(p.across[3], 0);
}

static void an_id_out_of_range_is_refused(void **state)
{
    (void)state;
    static struct scene s;
    static struct planned p;
    seed_random();
    random_group(&s);
    random_placement(&s);
    random_tokens(&s);
    struct moe_dispatch_plan out = {.target = p.target, .count = p.count, .stride = EXPERTS};
    s.in.tokens = 1;
    s.in.token_state = s.state;
    for (uint32_t k = 0; k < s.in.top_k; k++)
        s.ids[k] = 0;
    s.ids[0] = (int32_t)(s.placement.experts + s.in.zero_experts);
    s.state[0] = MOE_TOKEN_OK;
    assert_refused(moe_dispatch_plan(&s.in, &out), MOE_INVALID_ARGUMENT,
                   MOE_REASON_EXPERT_INDEX_RANGE);
    s.state[0] = MOE_TOKEN_BAD_EXPERT; /* its ids are not read */
    assert_ok(moe_dispatch_plan(&s.in, &out));
    assert_int_equal(p.target[0], MOE_PLAN_NO_SLOT);
}

static void an_expert_without_a_copy_is_refused(void **state)
{
    (void)state;
    static struct scene s;
    static struct planned p;
    seed_random();
    random_group(&s);
    random_placement(&s);
    random_tokens(&s);
    for (uint32_t e = 0; e <= s.placement.experts; e++)
        s.offset[e] = 0;
    s.in.tokens = s.in.top_k = 1;
    s.ids[0] = 0;
    s.in.token_state = s.state;
    s.state[0] = MOE_TOKEN_OK;
    struct moe_dispatch_plan out = {.target = p.target, .count = p.count, .stride = EXPERTS};
    assert_refused(moe_dispatch_plan(&s.in, &out), MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE);
    s.state[0] = MOE_TOKEN_UNAVAILABLE;
    assert_ok(moe_dispatch_plan(&s.in, &out));
    assert_int_equal(p.target[0], MOE_PLAN_NO_SLOT);
}

/* DeepSeek-V3: 7168 columns of bf16, eight routes. */
static void bytes_of_rows_and_sums(void **state)
{
    (void)state;
    struct moe_pass_shape forward = {.hidden = 7168, .top_k = 8, .dtype = MOE_DTYPE_BF16};
    struct moe_pass_shape backward = forward;
    backward.backward = true;
    assert_int_equal(moe_dispatch_row_bytes(&forward, MOE_LEG_ACROSS), 14336 + 16 + 96);
    assert_int_equal(moe_dispatch_row_bytes(&forward, MOE_LEG_FORWARD), 14336 + 8 * 16);
    assert_int_equal(moe_dispatch_sum_bytes(&forward), 14336);
    assert_int_equal(moe_dispatch_row_bytes(&backward, MOE_LEG_ACROSS), 2 * 14336 + 16 + 96);
    assert_int_equal(moe_dispatch_sum_bytes(&backward), 7168 * 4 + 8 * 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_legs_of_a_small_group),
        cmocka_unit_test(rows_reach_the_slots_that_compute_them_once),
        cmocka_unit_test(an_id_out_of_range_is_refused),
        cmocka_unit_test(an_expert_without_a_copy_is_refused),
        cmocka_unit_test(bytes_of_rows_and_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
