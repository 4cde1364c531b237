/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as config.json. It is refused with a reason, or gives valid layer specs. */
#include "driver.h"
#include "model/config.h"
#include "model/json_file.h"

#include <math.h>

static void check_layer(const struct moe_layer_spec *s)
{
    const struct moe_router_spec *r = &s->router;
    MOE_INVARIANT(s->hidden >= 1 && s->hidden <= MOE_MAX_HIDDEN);
    MOE_INVARIANT(s->experts >= 1 && s->experts <= MOE_MAX_EXPERTS && s->intermediate >= 1);
    MOE_INVARIANT(r->top_k >= 1 && r->top_k <= MOE_MAX_TOP_K);
    MOE_INVARIANT(r->top_k <= s->experts + r->zero_experts);
    MOE_INVARIANT(r->groups >= 1 && s->experts % r->groups == 0);
    MOE_INVARIANT(r->topk_group >= 1 && r->topk_group <= r->groups);
    MOE_INVARIANT(r->groups == 1 || r->topk_group * (s->experts / r->groups) >= r->top_k);
    MOE_INVARIANT(r->group_best >= 1 && r->group_best <= s->experts / r->groups);
    MOE_INVARIANT(isfinite(r->scale) && isfinite(r->renorm_eps) && r->renorm_eps >= 0);
    MOE_INVARIANT(!s->shared_gated || s->shared_intermediate > 0);
}

static void check_quant(const struct moe_quant *q)
{
    uint64_t dims[2];
    uint32_t rank;
    if (q->scheme == NULL)
        return;
    MOE_INVARIANT(q->format.encoding == q->scheme->encoding && q->zero_offset <= 1);
    for (int part = 0; part < MOE_QUANT_PARTS; part++) {
        struct moe_status st =
            moe_quant_part_shape(q, (enum moe_quant_part)part, 4096, 7168, 8, dims, &rank);
        MOE_INVARIANT(moe_failed(&st) || (rank >= 1 && rank <= 2 && dims[0] > 0));
    }
}

static void check_reason(const struct moe_status *st)
{
    MOE_INVARIANT(st->reason == MOE_REASON_CONFIG_UNKNOWN_KEY ||
                  st->reason == MOE_REASON_CONFIG_INVALID);
}

/* How the weights are stored: refused with a reason, or schemes with possible settings. */
static void read_quant(const json_t *root, const struct moe_family *family)
{
    static const char *const modules[] = {"model.layers.3.mlp.experts.17.gate_proj",
                                          "backbone.layers.1.mixer.experts.3.up_proj",
                                          "backbone.layers.1.mixer.fc1_latent_proj"};
    struct moe_quant_config quant;
    struct moe_status st = moe_quant_config_read(root, family, &quant);
    if (moe_failed(&st))
        check_reason(&st);
    for (size_t i = 0; !moe_failed(&st) && i < 2 * sizeof modules / sizeof modules[0]; i++) {
        struct moe_quant found;
        struct moe_status one = moe_quant_config_find(&quant, modules[i / 2], i % 2 != 0, &found);
        if (moe_failed(&one))
            check_reason(&one);
        else
            check_quant(&found);
    }
    moe_quant_config_free(&quant);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct moe_config config;
    json_t *root = NULL;
    struct moe_status st = moe_json_parse((const char *)data, size, "config.json", &root);
    if (moe_failed(&st))
        return 0;
    st = moe_config_read(root, &config);
    if (!moe_failed(&st))
        read_quant(root, config.family);
    json_decref(root);
    if (moe_failed(&st)) {
        check_reason(&st);
        return 0;
    }
    MOE_INVARIANT(config.layer_count >= 1 && config.layer_count <= MOE_MAX_LAYERS);
    for (size_t i = 0; i < config.layer_count; i++) {
        check_layer(&config.layers[i]);
        MOE_INVARIANT(i == 0 || config.layers[i].layer > config.layers[i - 1].layer);
    }
    return 0;
}
