/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/moves/move_plan.h"

#include "balance/plan.h"

#include <stdlib.h>
#include <string.h>

_Static_assert((int)MOE_PLACEMENT_SLOTS_MAX <= (int)MOE_MAX_SLOTS &&
                   (int)MOE_PLACEMENT_EXPERTS_MAX <= (int)MOE_MAX_EXPERTS,
               "every placement can be planned");

/* Slots without experts may lie between others, and a plan knows none: slots are numbered without
 * them meanwhile. */
static uint64_t pack(uint64_t slots, uint64_t places)
{
    uint64_t packed = 0;
    for (unsigned at = 0; places != 0; at++, places &= places - 1)
        packed |= (slots >> __builtin_ctzll(places) & 1) << at;
    return packed;
}

static uint64_t unpack(uint64_t packed, uint64_t places)
{
    uint64_t slots = 0;
    for (; places != 0; packed >>= 1, places &= places - 1)
        slots |= (packed & 1) << __builtin_ctzll(places);
    return slots;
}

/* One layer: who has the experts now, and with the plan; packed. */
struct masks {
    uint32_t experts;
    uint64_t now[MOE_PLACEMENT_EXPERTS_MAX], planned[MOE_PLACEMENT_EXPERTS_MAX];
};

static void read_lists(const struct moe_placement_plan_input *in, const uint16_t *expert,
                       uint64_t *masks)
{
    memset(masks, 0, in->experts * sizeof *masks);
    for (uint32_t s = 0; s < in->slots; s++)
        for (uint32_t p = 0; p < in->places; p++)
            masks[*expert++] |= UINT64_C(1) << s;
}

static bool has_rows(const uint64_t *rows, uint32_t experts)
{
    for (uint32_t e = 0; e < experts; e++)
        if (rows[e] > 0)
            return true;
    return false;
}

/* `expert` has room for the lists. */
static struct moe_status plan_layer(const struct moe_move_input *in, size_t index,
                                    const uint64_t *rows, uint16_t *expert, struct masks *m)
{
    uint32_t slots = (uint32_t)__builtin_popcountll(in->places);
    m->experts = moe_placement_layer_at(in->now, index).experts;
    for (uint32_t e = 0; e < m->experts; e++)
        m->now[e] = pack(moe_placement_mask(in->now, index, e), in->places);
    memcpy(m->planned, m->now, m->experts * sizeof *m->now);
    if (!has_rows(rows, m->experts))
        return moe_ok();
    const struct moe_placement_plan_input plan = {
        .slots = slots,
        .layers = 1,
        .experts = m->experts,
        .places = moe_placement_places(slots, m->experts, in->replicas, in->spare),
        .copies = in->replicas,
        .rows = rows};
    MOE_TRY(moe_placement_plan(&plan, expert));
    MOE_TRY(moe_placement_match(&plan, m->now, expert));
    read_lists(&plan, expert, m->planned);
    return moe_ok();
}

static struct moe_status add_layer(struct moe_placement *out, uint32_t layer, uint64_t places,
                                   const struct masks *m)
{
    uint8_t copies[MOE_PLACEMENT_EXPERTS_MAX];
    uint8_t holders[MOE_PLACEMENT_EXPERTS_MAX * MOE_PLACEMENT_SLOTS_MAX];
    size_t count = 0;
    for (uint32_t e = 0; e < m->experts; e++) {
        copies[e] = (uint8_t)__builtin_popcountll(m->planned[e]);
        for (uint64_t left = unpack(m->planned[e], places); left != 0; left &= left - 1)
            holders[count++] = (uint8_t)__builtin_ctzll(left);
    }
    const struct moe_placement_layer l = {layer, m->experts};
    return moe_placement_add_layer(out, &l, copies, holders, count);
}

static void judge(const struct moe_move_input *in, const uint64_t *rows, const struct masks *m,
                  struct moe_move_layer *out, struct moe_move_gain *gain)
{
    uint32_t slots = (uint32_t)__builtin_popcountll(in->places);
    out->now = moe_placement_busiest(slots, m->experts, rows, m->now, &out->mean);
    out->planned = moe_placement_busiest(slots, m->experts, rows, m->planned, &out->mean);
    for (uint32_t e = 0; e < m->experts; e++)
        out->added += (uint32_t)__builtin_popcountll(m->planned[e] & ~m->now[e]);
    gain->mean += out->mean;
    gain->now += out->now;
    gain->planned += out->planned;
    gain->added += out->added;
}

struct moe_status moe_move_plan(const struct moe_move_input *in, struct moe_placement *out,
                                struct moe_move_gain *gain)
{
    uint32_t slots = moe_placement_slots(in->now);
    const uint64_t *rows = in->rows;
    struct masks *m = calloc(1, sizeof *m);
    uint16_t *expert = calloc((size_t)slots * MOE_PLACEMENT_EXPERTS_MAX, sizeof *expert);
    struct moe_status st =
        m != NULL && expert != NULL
            ? moe_placement_begin(out, 0, slots)
            : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a plan");
    memset(gain, 0, sizeof *gain);
    for (size_t i = 0; i < moe_placement_layer_count(in->now) && !moe_failed(&st); i++) {
        st = plan_layer(in, i, rows, expert, m);
        if (!moe_failed(&st))
            st = add_layer(out, moe_placement_layer_at(in->now, i).layer, in->places, m);
        if (!moe_failed(&st))
            judge(in, rows, m, &gain->layers[i], gain);
        rows += moe_placement_layer_at(in->now, i).experts;
    }
    free(expert);
    free(m);
    return st;
}
