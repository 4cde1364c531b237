/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes at every link, from the product's plan; see domain_model.h. */
#include "domain_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SLOTS = MOE_DOMAINS_MAX_SLOTS };

/* Rows that leave and enter a slot, by leg. A row of `forward` leaves the gateway. */
struct link {
    double out[MOE_LEG_COUNT], in[MOE_LEG_COUNT];
    double flat_out, flat_in; /* to and from other nodes with a row per slot */
    double pairs;
};

struct world {
    struct moe_domains map;
    uint32_t offset[MOE_MAX_EXPERTS + 1];
    uint16_t slot[MAX_SLOTS + MOE_MAX_EXPERTS];
    struct moe_placement placement;
    struct link link[MAX_SLOTS];
    uint32_t tokens_for[MAX_SLOTS], crossings[MOE_DOMAINS_MAX];
    uint32_t *count; /* [slots][E] */
    uint16_t *target;
};

/* Experts in blocks of consecutive ids; with fewer experts than slots, as many copies as fit. */
static bool place_experts(struct world *w, uint32_t experts, uint32_t slots)
{
    uint32_t copies = experts < slots ? slots / experts : 1, n = 0;
    if (experts < slots && slots % experts != 0) {
        fprintf(stderr, "%u slots are not a multiple of %u experts\n", slots, experts);
        return false;
    }
    for (uint32_t e = 0; e < experts; e++) {
        w->offset[e] = n;
        for (uint32_t c = 0; c < copies; c++)
            w->slot[n++] = (uint16_t)(copies > 1 ? e + c * experts : (uint64_t)e * slots / experts);
    }
    w->offset[experts] = n;
    w->placement = (struct moe_placement){
        .experts = experts, .slots = slots, .offset = w->offset, .slot = w->slot};
    return true;
}

static bool make_world(const struct model_group *g, struct world *w)
{
    uint32_t slots = g->nodes * g->per_node, domain[MAX_SLOTS];
    if (slots < 1 || slots > MAX_SLOTS) {
        fprintf(stderr, "%u slots: at most %d\n", slots, MAX_SLOTS);
        return false;
    }
    for (uint32_t s = 0; s < slots; s++)
        domain[s] = s / g->per_node;
    struct moe_status st = moe_domains_make(domain, slots, &w->map);
    if (moe_failed(&st)) {
        fprintf(stderr, "%s\n", st.text);
        return false;
    }
    w->count = calloc((size_t)slots * g->spec->experts, sizeof *w->count);
    w->target = calloc((size_t)g->tokens * g->spec->router.top_k, sizeof *w->target);
    return w->count != NULL && w->target != NULL && place_experts(w, g->spec->experts, slots);
}

/* Adds one source's rows to the links that they use. */
static void add_source(struct world *w, uint32_t source)
{
    const struct moe_domains *m = &w->map;
    uint32_t own = m->domain_of[source];
    for (uint32_t d = 0; d < m->domains; d++) {
        uint32_t gateway = moe_domains_gateway(m, source, d);
        enum moe_leg leg = d == own ? MOE_LEG_INSIDE : MOE_LEG_FORWARD;
        w->link[source].out[MOE_LEG_ACROSS] += w->crossings[d];
        w->link[gateway].in[MOE_LEG_ACROSS] += w->crossings[d];
        for (uint32_t i = 0; i < m->size; i++) {
            uint32_t slot = moe_domains_slot(m, d, i);
            if (slot != gateway) {
                w->link[gateway].out[leg] += w->tokens_for[slot];
                w->link[slot].in[leg] += w->tokens_for[slot];
            }
            if (d != own) {
                w->link[source].flat_out += w->tokens_for[slot];
                w->link[slot].flat_in += w->tokens_for[slot];
            }
        }
    }
}

static bool plan_source(const struct model_group *g, const struct routing *r, uint32_t source,
                        struct world *w)
{
    uint32_t experts = g->spec->experts, slots = w->map.slots;
    /* Every slot reads another stretch of the recording. */
    size_t room = r->tokens - g->tokens + 1, first = (size_t)source * 7919 * 64 % room;
    struct moe_dispatch_input in = {.domains = &w->map,
                                    .placement = &w->placement,
                                    .slot = source,
                                    .tokens = g->tokens,
                                    .top_k = r->top_k,
                                    .ids = r->ids + first * r->top_k};
    struct moe_dispatch_plan out = {.target = w->target,
                                    .count = w->count,
                                    .stride = experts,
                                    .tokens_for = w->tokens_for,
                                    .crossings = w->crossings};
    struct moe_status st = moe_dispatch_plan(&in, &out);
    if (moe_failed(&st)) {
        fprintf(stderr, "%s\n", st.text);
        return false;
    }
    for (uint32_t s = 0; s < slots; s++)
        for (uint32_t e = 0; e < experts; e++)
            w->link[s].pairs += w->count[(size_t)s * experts + e];
    add_source(w, source);
    return true;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* The busiest slot's bytes. What leaves a slot in dispatch enters it in combine. */
static void add_up(const struct model_group *g, const struct world *w, struct model_traffic *t)
{
    double row[MOE_LEG_COUNT], sum = (double)moe_dispatch_sum_bytes(&g->pass);
    uint32_t slots = w->map.slots;
    memset(t, 0, sizeof *t);
    for (int leg = 0; leg < MOE_LEG_COUNT; leg++)
        row[leg] = (double)moe_dispatch_row_bytes(&g->pass, (enum moe_leg)leg);
    for (uint32_t s = 0; s < slots; s++) {
        const struct link *l = &w->link[s];
        double out = 0, in = 0;
        for (int leg = 0; leg < MOE_LEG_COUNT; leg++) {
            double most = larger(l->out[leg], l->in[leg]);
            t->rows[leg] += l->out[leg] / slots;
            t->leg[leg] = larger(t->leg[leg], most * row[leg]);
            t->leg_back[leg] = larger(t->leg_back[leg], most * sum);
            out += leg == MOE_LEG_ACROSS ? 0 : l->out[leg];
            in += leg == MOE_LEG_ACROSS ? 0 : l->in[leg];
        }
        t->nvlink = larger(t->nvlink, larger(out, in) * row[MOE_LEG_INSIDE]);
        t->nvlink_back = larger(t->nvlink_back, larger(out, in) * sum);
        t->flat_rows += l->flat_out / slots;
        t->flat_nic = larger(t->flat_nic, larger(l->flat_out, l->flat_in) * row[MOE_LEG_ACROSS]);
        t->flat_nic_back = larger(t->flat_nic_back, larger(l->flat_out, l->flat_in) * sum);
        t->max_pairs = larger(t->max_pairs, l->pairs);
    }
}

bool model_traffic_of(const struct model_group *g, const struct routing *r,
                      struct model_traffic *out)
{
    struct world *w = calloc(1, sizeof *w);
    bool good = w != NULL && make_world(g, w);
    if (good && r->tokens < g->tokens) {
        fprintf(stderr, "the recording has %u tokens, a slot needs %u\n", r->tokens, g->tokens);
        good = false;
    }
    for (uint32_t s = 0; good && s < w->map.slots; s++)
        good = plan_source(g, r, s, w);
    if (good)
        add_up(g, w, out);
    if (w != NULL) {
        free(w->count);
        free(w->target);
    }
    free(w);
    return good;
}

/* Three products of each pair and of the shared expert; or reading all weights once. */
static double products_of(const struct model_group *g, const struct model_traffic *t,
                          const struct model_rates *rates)
{
    double per_row = 6.0 * g->spec->hidden * g->spec->intermediate;
    double shared = 6.0 * g->spec->hidden * g->spec->shared_intermediate;
    double slots = (double)g->nodes * g->per_node;
    double local = larger(g->spec->experts / slots, 1);
    double flops = (t->max_pairs * per_row + g->tokens * shared) / rates->flops;
    return larger(flops, (local * per_row + shared) / rates->hbm); /* 3 matrices x 2 bytes */
}

struct model_times model_times_of(const struct model_group *g, const struct model_traffic *t,
                                  const struct model_rates *r)
{
    const double *leg = t->leg, *back = t->leg_back;
    double fixed = r->windows_dispatch, fixed_back = r->windows_combine;
    if (g->nodes > 1) {
        fixed += r->network_dispatch;
        fixed_back += r->network_combine;
    }
    struct model_times m = {
        .dispatch = larger(t->nvlink / r->nvlink, leg[MOE_LEG_ACROSS] / r->nic),
        .combine = larger(t->nvlink_back / r->nvlink, back[MOE_LEG_ACROSS] / r->nic),
        .dispatch_legs =
            (leg[MOE_LEG_INSIDE] + leg[MOE_LEG_FORWARD]) / r->nvlink + leg[MOE_LEG_ACROSS] / r->nic,
        .combine_legs = (back[MOE_LEG_INSIDE] + back[MOE_LEG_FORWARD]) / r->nvlink +
                        back[MOE_LEG_ACROSS] / r->nic,
        .flat_dispatch = larger(leg[MOE_LEG_INSIDE] / r->nvlink, t->flat_nic / r->nic),
        .flat_combine = larger(back[MOE_LEG_INSIDE] / r->nvlink, t->flat_nic_back / r->nic),
        .products = products_of(g, t, r)};
    m.dispatch += fixed;
    m.dispatch_legs += fixed;
    m.flat_dispatch += fixed;
    m.combine += fixed_back;
    m.combine_legs += fixed_back;
    m.flat_combine += fixed_back;
    return m;
}
