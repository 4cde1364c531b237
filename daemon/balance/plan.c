/* SPDX-License-Identifier: Apache-2.0 */
/* See plan.h. The copies of one expert are placed one after another, so that a mask says which
 * slots have it. */
#include "balance/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Orders experts by rows per copy, as one number: in the upper half rows per copy as a float (the
 * bits of floats have the order of the values), then fewer copies, then the lower number. */
typedef uint64_t rank;

/* The work of one layer. */
struct layer {
    uint32_t slots, places, experts, least; /* least: copies of each expert */
    const uint64_t *rows;                   /* [E] */
    uint32_t *copies;                       /* [E] */
    double *weight;                         /* [E] rows per copy */
    rank *ranks;                            /* [E] a heap at first, at last ascending */
    double *load;                           /* [slots] rows so far */
    double *open;                           /* [slots] the same; INFINITY if all places are taken */
    uint32_t *used;                         /* [slots] places that are taken */
    uint16_t *expert;                       /* [slots, places] */
};

static rank rank_of(const struct layer *l, uint32_t expert)
{
    l->weight[expert] = (double)l->rows[expert] / l->copies[expert];
    float weight = (float)l->weight[expert];
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return (uint64_t)bits << 32 | (uint64_t)(0xffff - l->copies[expert]) << 16 | (0xffff - expert);
}

static uint32_t expert_of(rank r)
{
    return 0xffff - (uint32_t)(r & 0xffff);
}

/* ------------------------------------------------------------------ copies */

static void sift_down(rank *heap, uint32_t count, uint32_t at)
{
    rank moved = heap[at];
    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] > heap[child];
        if (heap[child] <= moved)
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static void make_heap(struct layer *l)
{
    for (uint32_t e = 0; e < l->experts; e++)
        l->ranks[e] = rank_of(l, e);
    for (uint32_t i = l->experts / 2; i-- > 0;)
        sift_down(l->ranks, l->experts, i);
}

/* Takes the largest out of the heap, to its end. */
static void take_largest(rank *heap, uint32_t *count)
{
    rank largest = heap[0];
    heap[0] = heap[--*count];
    heap[*count] = largest;
    sift_down(heap, *count, 0);
}

/* Gives out the places that are left when each expert has its least copies. An expert with a copy
 * on every slot leaves the heap. Then sorts all. */
static void give_copies(struct layer *l)
{
    uint32_t count = l->experts, spare = l->slots * l->places - l->experts * l->least;
    for (uint32_t e = 0; e < l->experts; e++)
        l->copies[e] = l->least;
    make_heap(l);
    while (spare > 0) {
        uint32_t top = expert_of(l->ranks[0]);
        if (l->copies[top] == l->slots) {
            take_largest(l->ranks, &count);
            continue;
        }
        l->copies[top]++;
        spare--;
        l->ranks[0] = rank_of(l, top);
        sift_down(l->ranks, count, 0);
    }
    make_heap(l);
    for (count = l->experts; count > 1;)
        take_largest(l->ranks, &count);
}

/* ------------------------------------------------------------------ packing */

static bool holds(const struct layer *l, uint32_t slot, uint16_t expert)
{
    const uint16_t *of = l->expert + (size_t)slot * l->places;
    for (uint32_t i = 0; i < l->used[slot]; i++)
        if (of[i] == expert)
            return true;
    return false;
}

static void note_load(struct layer *l, uint32_t slot, double change)
{
    l->load[slot] += change;
    l->open[slot] = l->used[slot] < l->places ? l->load[slot] : (double)INFINITY;
}

static void put(struct layer *l, uint32_t slot, uint16_t expert)
{
    l->expert[(size_t)slot * l->places + l->used[slot]++] = expert;
    note_load(l, slot, l->weight[expert]);
}

static void take(struct layer *l, uint32_t slot, uint32_t place)
{
    uint16_t *of = l->expert + (size_t)slot * l->places, expert = of[place];
    of[place] = of[--l->used[slot]];
    note_load(l, slot, -l->weight[expert]);
}

/* The lightest slot with a free place, but none of `holders`; `slots` if there is none. */
static uint32_t lightest(const struct layer *l, uint64_t holders)
{
    uint32_t best = l->slots;
    double least = (double)INFINITY;
    for (uint32_t s = 0; s < l->slots; s++) {
        bool lighter = l->open[s] < least && (holders >> s & 1) == 0;
        least = lighter ? l->open[s] : least;
        best = lighter ? s : best;
    }
    return best;
}

/* All slots with a free place hold the expert. Another slot passes on a copy that the free one
 * lacks, and takes this one. There is such a slot, because the expert has at most one copy for
 * each; and such a copy, because that slot is full and the other one is not. Returns the slot. */
static uint32_t exchange(struct layer *l, uint64_t holders)
{
    uint32_t free = 0, place = 0, full = (uint32_t)__builtin_ctzll(~holders);
    while (l->used[free] == l->places)
        free++;
    const uint16_t *of = l->expert + (size_t)full * l->places;
    while (holds(l, free, of[place]))
        place++;
    put(l, free, of[place]);
    take(l, full, place);
    return full;
}

static void place_copies(struct layer *l, uint16_t expert)
{
    uint64_t holders = 0;
    for (uint32_t c = 0; c < l->copies[expert]; c++) {
        uint32_t slot = lightest(l, holders);
        if (slot == l->slots)
            slot = exchange(l, holders);
        put(l, slot, expert);
        holders |= UINT64_C(1) << slot;
    }
}

/* Puts the experts of a slot into ascending order. */
static void sort_slot(const struct layer *l, uint16_t *of)
{
    uint64_t held[MOE_MAX_EXPERTS / 64] = {0};
    for (uint32_t p = 0; p < l->places; p++)
        held[of[p] / 64] |= UINT64_C(1) << of[p] % 64;
    for (uint32_t word = 0; word * 64 < l->experts; word++)
        for (uint64_t left = held[word]; left != 0; left &= left - 1)
            *of++ = (uint16_t)(word * 64 + (uint32_t)__builtin_ctzll(left));
}

static void plan_layer(struct layer *l)
{
    give_copies(l);
    memset(l->load, 0, l->slots * sizeof *l->load);
    memset(l->open, 0, l->slots * sizeof *l->open);
    memset(l->used, 0, l->slots * sizeof *l->used);
    for (uint32_t i = l->experts; i-- > 0;)
        place_copies(l, (uint16_t)expert_of(l->ranks[i]));
    for (uint32_t s = 0; s < l->slots; s++)
        sort_slot(l, l->expert + (size_t)s * l->places);
}

/* ------------------------------------------------------------------ calls */

static struct moe_status check(const struct moe_placement_plan_input *in)
{
    if (in->slots < 1 || in->slots > MOE_MAX_SLOTS || in->experts < 1 ||
        in->experts > MOE_MAX_EXPERTS)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a plan is for 1 to %d slots and 1 to %d experts", MOE_MAX_SLOTS,
                         MOE_MAX_EXPERTS);
    if (in->copies < 1 || in->copies > in->slots || in->places > in->experts ||
        (uint64_t)in->slots * in->places < (uint64_t)in->experts * in->copies)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%u places on each of %u slots do not fit %u experts with %u copies",
                         in->places, in->slots, in->experts, in->copies);
    return moe_ok();
}

struct moe_status moe_placement_plan(const struct moe_placement_plan_input *in, uint16_t *expert)
{
    MOE_TRY(check(in));
    struct layer l = {
        .slots = in->slots, .places = in->places, .experts = in->experts, .least = in->copies};
    l.ranks = calloc(in->experts, sizeof *l.ranks);
    l.copies = calloc(in->experts, sizeof *l.copies);
    l.weight = calloc(in->experts, sizeof *l.weight);
    l.load = calloc(in->slots, sizeof *l.load);
    l.open = calloc(in->slots, sizeof *l.open);
    l.used = calloc(in->slots, sizeof *l.used);
    struct moe_status st = moe_ok();
    if (l.ranks == NULL || l.copies == NULL || l.weight == NULL || l.open == NULL ||
        l.load == NULL || l.used == NULL)
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "a plan");
    for (uint32_t i = 0; !moe_failed(&st) && i < in->layers; i++) {
        l.expert = expert + (size_t)i * in->slots * in->places;
        l.rows = in->rows + (size_t)i * in->experts;
        plan_layer(&l);
    }
    free(l.ranks);
    free(l.copies);
    free(l.weight);
    free(l.load);
    free(l.open);
    free(l.used);
    return st;
}

/* The list and the slot, of those that are left (bits), with the most experts in common. */
static void find_pair(const struct moe_placement_plan_input *in, const uint64_t *holders,
                      const uint16_t *expert, uint64_t lists, uint64_t slots, uint32_t *list,
                      uint32_t *slot)
{
    uint32_t best = 0;
    *list = (uint32_t)__builtin_ctzll(lists);
    *slot = (uint32_t)__builtin_ctzll(slots);
    for (uint64_t left = lists; left != 0; left &= left - 1) {
        uint32_t common[MOE_MAX_SLOTS] = {0}, i = (uint32_t)__builtin_ctzll(left);
        for (uint32_t p = 0; p < in->places; p++)
            for (uint64_t of = holders[expert[i * in->places + p]] & slots; of != 0; of &= of - 1)
                common[__builtin_ctzll(of)]++;
        for (uint64_t of = slots; of != 0; of &= of - 1) {
            uint32_t s = (uint32_t)__builtin_ctzll(of);
            if (common[s] <= best)
                continue;
            best = common[s];
            *list = i;
            *slot = s;
        }
    }
}

struct moe_status moe_placement_match(const struct moe_placement_plan_input *in,
                                      const uint64_t *holders, uint16_t *expert)
{
    const size_t size = (size_t)in->slots * in->places, bytes = in->places * sizeof *expert;
    uint16_t *lists = calloc(size + 1, sizeof *lists);
    if (lists == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "a plan");
    for (uint32_t l = 0; l < in->layers; l++, expert += size, holders += in->experts) {
        uint64_t left = UINT64_MAX >> (64 - in->slots), slots = left;
        memcpy(lists, expert, size * sizeof *expert);
        while (left != 0) {
            uint32_t list, slot;
            find_pair(in, holders, lists, left, slots, &list, &slot);
            memcpy(expert + (size_t)slot * in->places, lists + (size_t)list * in->places, bytes);
            left &= ~(UINT64_C(1) << list);
            slots &= ~(UINT64_C(1) << slot);
        }
    }
    free(lists);
    return moe_ok();
}

double moe_placement_busiest(uint32_t slots, uint32_t experts, const uint64_t *rows,
                             const uint64_t *holders, double *mean)
{
    double load[MOE_MAX_SLOTS] = {0}, most = 0;
    *mean = 0;
    for (uint32_t e = 0; e < experts; e++) {
        double each = (double)rows[e] / __builtin_popcountll(holders[e]);
        *mean += (double)rows[e] / slots;
        for (uint64_t of = holders[e]; of != 0; of &= of - 1)
            load[__builtin_ctzll(of)] += each;
    }
    for (uint32_t s = 0; s < slots; s++)
        most = load[s] > most ? load[s] : most;
    return most;
}

double moe_placement_imbalance(const struct moe_placement_plan_input *in, const uint64_t *rows,
                               const uint16_t *expert)
{
    uint32_t copies[MOE_MAX_EXPERTS] = {0};
    double most = 0, sum = 0;
    for (size_t i = 0; i < (size_t)in->slots * in->places; i++)
        copies[expert[i]]++;
    for (uint32_t s = 0; s < in->slots; s++) {
        double load = 0;
        for (uint32_t p = 0; p < in->places; p++, expert++)
            load += (double)rows[*expert] / copies[*expert];
        most = load > most ? load : most;
        sum += load;
    }
    return sum > 0 ? most * in->slots / sum : 1;
}
