/* SPDX-License-Identifier: Apache-2.0 */
/* See graph_key.h. */
#include "cuda/plan/graph_key.h"

#include "base/status.h"

#include <string.h>

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct writer {
    struct moe_cuda_graph_key *key;
    uint32_t at;
};

static void put(struct writer *w, uint32_t value)
{
    MOE_INVARIANT(w->at < MOE_CUDA_KEY_WORDS);
    w->key->word[w->at++] = value;
}

static void put_router(struct writer *w, const struct moe_router_spec *r)
{
    put(w, r->score);
    put(w, r->top_k);
    put(w, (uint32_t)r->logit_bias | (uint32_t)r->select_bias << 1 | (uint32_t)r->by_token << 2);
    put(w, r->groups);
    put(w, r->topk_group);
    put(w, r->group_best);
    put(w, r->renorm);
    put(w, bits_of(r->renorm_eps));
    put(w, bits_of(r->scale));
    put(w, bits_of(r->jitter));
    put(w, r->zero_experts);
    put(w, r->vocabulary);
}

static void put_format(struct writer *w, const struct moe_weight_format *f)
{
    put(w, f->encoding);
    put(w, f->block_rows);
    put(w, f->block_columns);
    put(w, f->scale);
    put(w, (uint32_t)f->zero_points | (uint32_t)f->global_divides << 1 |
               (uint32_t)f->activations << 2);
}

static void put_spec(struct writer *w, const struct moe_layer_spec *s)
{
    put(w, s->hidden);
    put(w, s->experts);
    put(w, s->intermediate);
    put_router(w, &s->router);
    put(w, s->weighting);
    put(w, s->activation);
    put(w, bits_of(s->swiglu_limit));
    put(w, bits_of(s->swiglu_alpha));
    put(w, (uint32_t)s->gate_up_bias | (uint32_t)s->down_bias << 1 |
               (uint32_t)s->shared_gated << 2 | (uint32_t)s->latent_norm << 3);
    put(w, s->latent);
    put(w, bits_of(s->latent_eps));
    put(w, s->shared_intermediate);
    put(w, s->shared_activation);
    put_format(w, &s->routed_format);
    put_format(w, &s->shared_format);
}
_Static_assert(sizeof(struct moe_layer_spec) == 152,
               "a new field of the spec belongs into the key");

void moe_cuda_graph_key_of(const struct moe_cuda_graph_shape *shape, struct moe_cuda_graph_key *out)
{
    struct writer w = {.key = out};
    put(&w, shape->bucket);
    put(&w, shape->dtype);
    put(&w, shape->retains);
    put(&w, shape->local_experts);
    put(&w, shape->copies);
    put_spec(&w, shape->spec);
    for (uint32_t m = 0; m < MOE_CUDA_KEY_MATRICES; m++)
        put(&w, shape->matrix[m]);
    MOE_INVARIANT(w.at == MOE_CUDA_KEY_WORDS);
}
