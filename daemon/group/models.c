/* SPDX-License-Identifier: Apache-2.0 */
/* Orders about added models, and reports of them. The group only carries them. A report is packed
 * on the thread that makes it, and sent by the group's, so that reports stay in order. */
#include "group/state.h"

#include "daemon/log.h"
#include "group/report.h"

#include <stdlib.h>

void moe_group__on_model_order(struct moe_group *g, const Moe__V1__ModelOrder *o)
{
    if (g->config.hooks.model_order == NULL || g->shutdown >= LEAVING)
        return;
    struct moe_group_layer *layers = calloc(o->n_layers + 1, sizeof *layers);
    if (layers == NULL) {
        moe_log_error("group: no memory for an order; the coordinator repeats it");
        return;
    }
    moe_group__read_layers(o->layers, o->n_layers, layers);
    const struct moe_group_model_order order = {
        .model = o->model,
        .step = (enum moe_model_step)o->step,
        .order = o->order,
        .epoch = o->epoch,
        .name = o->name,
        .directory = o->directory,
        .digest = o->digest,
        .if_idle = o->if_idle,
        .again = o->again,
        .resume = o->resume,
        .assignment = {.slot = g->slot,
                       .slots = o->slots != 0 ? o->slots : g->slots,
                       .placement_version = o->placement_version != 0 ? o->placement_version : 1,
                       .layers = layers,
                       .layer_count = o->n_layers},
    };
    g->config.hooks.model_order(g->config.hooks.ctx, &order);
    free(layers);
}

/* In an event of EVENT_SEND, because only the group's thread knows whether it is registered. */
void moe_group__on_send(struct moe_group *g, const struct event *e)
{
    const uint8_t *message;
    size_t at = 0, length;
    while (g->registered && moe_group__next_part(e, &at, &message, &length)) {
        const struct moe_rpc_out out = {.head = message, .head_length = length};
        struct moe_status st = moe_rpc_stream_send(g->stream, &out);
        if (moe_failed(&st)) {
            moe_log_debug("coordinator: %s", st.text);
            return;
        }
    }
}

static void post(struct moe_group *g, const struct parts *parts, const struct moe_status *packed)
{
    if (moe_failed(packed))
        moe_log_error("a report of a model is lost: %s", packed->text);
    else
        moe_group__post_parts(g, EVENT_SEND, 0, 0, moe_ok(), parts);
}

void moe_group_report_model(struct moe_group *g, const struct moe_group_model_report *report)
{
    struct parts parts = {0};
    struct moe_status st = moe_report_pack_model(report, moe_group__add_part, &parts);
    post(g, &parts, &st);
    free(parts.bytes);
}

void moe_group_report_rows(struct moe_group *g, uint64_t order, uint32_t layer,
                           const uint64_t *rows, size_t count)
{
    struct parts parts = {0};
    struct moe_status st =
        moe_report_pack_rows(order, layer, rows, count, moe_group__add_part, &parts);
    post(g, &parts, &st);
    free(parts.bytes);
}

void moe_group_report_model_progress(struct moe_group *g, uint32_t model, uint64_t loaded_bytes,
                                     uint64_t total_bytes)
{
    struct parts parts = {0};
    struct moe_status st =
        moe_report_pack_progress(model, loaded_bytes, total_bytes, moe_group__add_part, &parts);
    post(g, &parts, &st);
    free(parts.bytes);
}
