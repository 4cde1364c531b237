/* SPDX-License-Identifier: Apache-2.0 */
/* A model of a group over several nodes: which bytes cross which link, and how long that takes at
 * given rates. It calls the product's plan (common/dispatch_plan.h) for every slot; only rates and
 * fixed times are assumed. Its output is a model, never a measurement.
 *
 * domain_model.c     options and output
 * domain_traffic.c   plans every slot, adds up the bytes at every link, turns them into times
 * domain_routing.c   ids from a recording, or drawn; makes recordings with the CPU's router */
#ifndef MOE_DOMAIN_MODEL_H
#define MOE_DOMAIN_MODEL_H

#include "common/dispatch_plan.h"
#include "shapes.h"

#include <stdbool.h>

/* Ids of `tokens` tokens, in the order of a batch. */
struct routing {
    uint32_t tokens, top_k;
    int32_t *ids; /* [tokens, K] */
};

/* Reads a recording: int32 [tokens, K], little-endian, nothing else, as `topk_ids` of a client's
 * Forward. False, with a line on stderr, if it is missing, is no multiple of K, or has an id >= E.
 */
bool routing_read(const char *path, const struct moe_layer_spec *spec, struct routing *out);
/* Draws K different experts per token, expert e with weight (e + 1)^-skew; skew 0: uniform. */
bool routing_draw(const struct moe_layer_spec *spec, double skew, uint32_t tokens, uint64_t seed,
                  struct routing *out);
/* The choices of the CPU backend's router for random rows and weights, written to `path`. */
bool routing_record(const struct moe_layer_spec *spec, uint32_t tokens, uint64_t seed,
                    const char *path);
void routing_free(struct routing *r);

/* Rates in bytes and operations per second, fixed times in seconds. */
struct model_rates {
    double nvlink, nic, hbm, flops;
    double windows_dispatch, windows_combine; /* added to an exchange through windows */
    double network_dispatch, network_combine; /* added when messages cross a network */
};

/* A group, and what each slot computes. */
struct model_group {
    uint32_t nodes, per_node;
    uint32_t tokens; /* of each slot */
    struct moe_pass_shape pass;
    const struct moe_layer_spec *spec;
};

/* Bytes at the busiest slot's link, the larger of both directions; means over slots for rows. */
struct model_traffic {
    double rows[MOE_LEG_COUNT];     /* per slot; rows out. As many sums come back */
    double flat_rows;               /* per slot, to other nodes, with a row per slot */
    double leg[MOE_LEG_COUNT];      /* dispatch */
    double leg_back[MOE_LEG_COUNT]; /* combine */
    double nvlink, nvlink_back;     /* inside and forward together */
    double flat_nic, flat_nic_back; /* the flat exchange */
    double max_pairs;               /* (token, expert) pairs at the busiest slot */
};

struct model_times {
    double dispatch, combine;           /* legs overlap: the slowest link decides */
    double dispatch_legs, combine_legs; /* legs follow each other */
    double flat_dispatch, flat_combine; /* a row per slot, over the network between nodes */
    double products;
};

bool model_traffic_of(const struct model_group *group, const struct routing *routing,
                      struct model_traffic *out);
struct model_times model_times_of(const struct model_group *group, const struct model_traffic *t,
                                  const struct model_rates *rates);

#endif
