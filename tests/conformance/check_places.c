/* SPDX-License-Identifier: Apache-2.0 */
/* The result for an element does not depend on its place in memory. Slots have different experts,
 * so copies of an expert are at different places. Experts with equal values and equal gradients
 * must keep equal bits, at every place and on every slot. Sizes are tiny and mostly odd, so experts
 * begin and end anywhere within a vector. */
#include "trained.h"

#include <stdio.h>

enum { PLACES_STEPS = 3, PLACES_EXPERTS = 8, PLACES_HIDDEN = 23, PLACES_INNER = 9 };

struct places {
    struct subject *s;
    const struct moe_training *table;
    struct moe_layer_spec spec;
    struct moe_placement placement;
    uint32_t offset[PLACES_EXPERTS + 1];
    uint16_t slot[2 * PLACES_EXPERTS];
    enum moe_optimizer optimizer;
    enum moe_dtype dtype; /* of the weights */
    struct moe_layer *layer;
    struct moe_trainer *trainer;
    uint64_t seed;
};

/* Expert e is on slots e and e + 1, modulo the slots, so all have the same number of copies. */
static void place(struct places *p)
{
    uint32_t slots = p->s->member->slots, n = 0;
    for (uint32_t e = 0; e < p->spec.experts; e++) {
        uint16_t a = (uint16_t)(e % slots), b = (uint16_t)((e + 1) % slots);
        p->offset[e] = n;
        p->slot[n++] = a < b ? a : b;
        if (slots > 1)
            p->slot[n++] = a < b ? b : a;
    }
    p->offset[p->spec.experts] = n;
    p->placement = (struct moe_placement){
        .experts = p->spec.experts, .slots = slots, .offset = p->offset, .slot = p->slot};
}

static void draw(struct places *p, uint64_t seed)
{
    struct rng r = {.state = seed};
    p->seed = rng_next(&r);
    p->optimizer = rng_chance(&r, 70) ? MOE_OPTIMIZER_ADAMW : MOE_OPTIMIZER_SGD;
    p->dtype = rng_chance(&r, 50) ? MOE_DTYPE_BF16 : MOE_DTYPE_F32;
    p->spec = (struct moe_layer_spec){
        .hidden = rng_range(&r, 1, PLACES_HIDDEN),
        .experts = rng_range(&r, 3, PLACES_EXPERTS),
        .intermediate = rng_range(&r, 1, PLACES_INNER),
        .router = {.top_k = 1, .groups = 1, .topk_group = 1, .group_best = 1, .scale = 1},
        .gate_up_bias = true,
        .down_bias = true};
    place(p);
}

static size_t size_of(const struct places *p, enum moe_weight w)
{
    size_t rows, columns;
    moe_weight_shape(&p->spec, w, &rows, &columns);
    return rows * columns;
}

static bool is_local(const struct places *p, uint32_t e)
{
    for (uint32_t i = p->offset[e]; i < p->offset[e + 1]; i++)
        if (p->slot[i] == p->s->member->slot)
            return true;
    return false;
}

/* The same for every expert and slot. */
static void random_values(const struct places *p, enum moe_weight w, uint32_t step, float *out)
{
    struct rng r = {.state = p->seed + 100 * step + w};
    for (size_t i = 0; i < size_of(p, w); i++)
        out[i] = rng_float(&r);
}

static bool upload(const struct places *p, enum moe_weight w, uint32_t e)
{
    float values[PLACES_HIDDEN * PLACES_HIDDEN];
    uint16_t halves[PLACES_HIDDEN * PLACES_HIDDEN];
    size_t n = size_of(p, w);
    random_values(p, w, 0, values);
    for (size_t i = 0; i < n; i++)
        halves[i] = moe_f32_to_bf16(values[i]);
    bool half = p->dtype == MOE_DTYPE_BF16;
    return went_well(p->s, "upload",
                     p->s->backend->layer_upload(p->layer, w, e, p->dtype,
                                                 half ? (void *)halves : (void *)values,
                                                 n * moe_dtype_bytes(p->dtype)));
}

static bool make_layer(struct places *p)
{
    const struct moe_backend *k = p->s->backend;
    struct moe_trainer_config config = {.optimizer = p->optimizer};
    bool good = went_well(p->s, "layer",
                          k->layer_create(p->s->device, &p->spec, &p->placement, p->s->member->slot,
                                          &p->layer)) &&
                upload(p, MOE_WEIGHT_ROUTER, 0);
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS; w++)
        for (uint32_t e = 0; e < p->spec.experts && good; e++)
            good = !is_local(p, e) || upload(p, w, e);
    return good && went_well(p->s, "finish", k->layer_finish(p->layer)) &&
           went_well(p->s, "trainer", p->table->trainer_create(p->layer, &config, &p->trainer));
}

static bool write_gradients(const struct places *p, uint32_t step)
{
    float values[PLACES_HIDDEN * PLACES_HIDDEN];
    bool good = true;
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS; w++) {
        random_values(p, w, step, values);
        for (uint32_t e = 0; e < p->spec.experts && good; e++) {
            struct moe_train_key key = {.weight = w, .expert = e, .tensor = MOE_TRAIN_GRAD};
            if (is_local(p, e))
                good = went_well(p->s, "write",
                                 p->table->trainer_write(p->trainer, &key, values,
                                                         size_of(p, w) * sizeof *values));
        }
    }
    return good;
}

/* FNV-1a of all tensors of an expert. */
static bool hash_expert(const struct places *p, uint32_t expert, uint64_t *hash)
{
    float values[PLACES_HIDDEN * PLACES_HIDDEN];
    *hash = UINT64_C(0xcbf29ce484222325);
    for (enum moe_weight w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS; w++)
        for (enum moe_train_tensor k = MOE_TRAIN_VALUE; k <= MOE_TRAIN_MOMENT2; k++) {
            struct moe_train_key key = {.weight = w, .expert = expert, .tensor = k};
            size_t bytes = size_of(p, w) * sizeof *values;
            if (k == MOE_TRAIN_MOMENT2 && p->optimizer == MOE_OPTIMIZER_SGD)
                continue;
            if (!went_well(p->s, "read", p->table->trainer_read(p->trainer, &key, values, bytes)))
                return false;
            const uint8_t *b = (const uint8_t *)values;
            for (size_t i = 0; i < bytes; i++)
                *hash = (*hash ^ b[i]) * UINT64_C(0x100000001b3);
        }
    return true;
}

static bool all_alike(const struct places *p, uint32_t step)
{
    uint64_t first = 0, hash, all[MOE_MAX_SLOTS];
    const struct member *m = p->s->member;
    for (uint32_t e = 0; e < p->spec.experts; e++) {
        if (!is_local(p, e))
            continue;
        if (!hash_expert(p, e, &hash))
            return false;
        if (first != 0 && hash != first)
            return wrong(p->s,
                         "places: expert %u of H %u I %u E %u is not like the first after "
                         "%u steps of optimizer %d",
                         e, p->spec.hidden, p->spec.intermediate, p->spec.experts, step,
                         (int)p->optimizer);
        first = hash;
    }
    if (!went_well(p->s, "exchange",
                   p->s->backend->session_exchange(p->s->session, &first, all, sizeof first)))
        return false;
    for (uint32_t i = 0; i < m->slots; i++)
        if (first != 0 && all[i] != 0 && all[i] != first)
            return wrong(p->s,
                         "places: slot %u has other bits, H %u I %u E %u, %u steps of "
                         "optimizer %d",
                         i, p->spec.hidden, p->spec.intermediate, p->spec.experts, step,
                         (int)p->optimizer);
    return true;
}

static bool take_steps(struct places *p)
{
    bool good = true;
    for (uint32_t step = 1; step <= PLACES_STEPS && good; step++) {
        struct moe_optimizer_args args = {.learning_rate = 0.05,
                                          .weight_decay = 0.1,
                                          .beta1 = 0.9,
                                          .beta2 = 0.98,
                                          .epsilon = 1e-6,
                                          .momentum = 0.9,
                                          .max_grad_norm = step == 2 ? 0.5 : 0,
                                          .grad_scale = 0.7,
                                          .number = step};
        struct moe_optimizer_result result;
        good = write_gradients(p, step) &&
               went_well(p->s, "optimizer",
                         p->table->optimizer_step(p->s->session, &p->trainer, 1, &args, &result)) &&
               all_alike(p, step);
    }
    return good;
}

bool check_places(struct subject *s, uint64_t seed)
{
    struct places p = {.s = s, .table = s->backend->training};
    draw(&p, seed);
    bool good = make_layer(&p) && take_steps(&p);
    if (p.trainer != NULL)
        p.table->trainer_destroy(p.trainer);
    s->backend->layer_destroy(p.layer);
    if (!good)
        fprintf(stderr, "slot %u: places of seed %llu are not alike\n", s->member->slot,
                (unsigned long long)seed);
    return good;
}
