/* SPDX-License-Identifier: Apache-2.0 */
/* See cpu/step/segments.h. */
#include "cpu/step/segments.h"

#include "base/size.h"
#include "cpu/compute/layer.h"

#include <string.h>

enum { PIECE = 256 << 10 /* bytes that one thread copies at a time */ };

struct copy {
    char *to;
    const char *from;
    size_t bytes;
};

static void copy_piece(void *ctx, uint32_t item)
{
    const struct copy *c = ctx;
    size_t first = (size_t)item * PIECE, left = c->bytes - first;
    memcpy(c->to + first, c->from + first, left < PIECE ? left : PIECE);
}

/* Does nothing if one of the two is NULL. */
static void copy_rows(struct moe_device *device, void *to, const void *from, size_t bytes)
{
    struct copy c = {to, from, bytes};
    if (to != NULL && from != NULL && bytes > 0)
        moe_cpu_parallel(device, (uint32_t)((bytes + PIECE - 1) / PIECE), copy_piece, &c);
}

/* Bytes of a row, and the places of the snapshot's tensors in its memory. */
struct layout {
    size_t row, pairs, x, y, ids, weights, mode, bytes;
};

static bool place(struct layout *l, size_t *at, size_t rows, size_t each)
{
    enum { LINE = 64 };
    size_t bytes;
    *at = l->bytes;
    return moe_size_mul(rows, each, &bytes) && moe_size_add(l->bytes, bytes, &l->bytes) &&
           moe_size_round_up(l->bytes, LINE, &l->bytes);
}

static bool lay_out(const struct moe_step_args *a, struct layout *l)
{
    const struct moe_layer_spec *spec = &a->layer->spec;
    *l = (struct layout){.row = spec->hidden * moe_dtype_bytes(a->dtype),
                         .pairs = spec->router.top_k * sizeof(float)};
    return place(l, &l->x, a->tokens, l->row) && place(l, &l->y, a->tokens, l->row) &&
           place(l, &l->ids, a->tokens, l->pairs) && place(l, &l->weights, a->tokens, l->pairs) &&
           place(l, &l->mode, a->tokens, 1);
}

static void copy_in(struct moe_device *device, const struct moe_step_segment *s,
                    const struct layout *l, char *memory, size_t first)
{
    const enum moe_routing_mode mode = moe_routing_of(s->mode);
    memset(memory + l->mode + first, s->mode, s->tokens);
    copy_rows(device, memory + l->x + first * l->row, s->x, s->tokens * l->row);
    if (mode != MOE_ROUTE_SERVER)
        copy_rows(device, memory + l->ids + first * l->pairs, s->ids_in, s->tokens * l->pairs);
    if (mode == MOE_ROUTE_IDS_WEIGHTS)
        copy_rows(device, memory + l->weights + first * l->pairs, s->weights_in,
                  s->tokens * l->pairs);
}

struct moe_status moe_cpu_snapshot_take(struct moe_device *device, const struct moe_step_args *args,
                                        struct moe_cpu_snapshot *out)
{
    struct layout l;
    *out = (struct moe_cpu_snapshot){.args = *args};
    if (args->segments == NULL || args->tokens == 0)
        return moe_ok();
    if (!lay_out(args, &l))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "%u tokens do not fit in memory", args->tokens);
    MOE_TRY(moe_cpu_scratch_take(device, l.bytes, &out->memory));
    char *memory = out->memory;
    size_t first = 0;
    for (uint32_t i = 0; i < args->segment_count; i++) {
        copy_in(device, &args->segments[i], &l, memory, first);
        first += args->segments[i].tokens;
    }
    out->args.x = memory + l.x;
    out->args.y = memory + l.y;
    out->args.mode = (const uint8_t *)memory + l.mode;
    out->args.ids_in = (const int32_t *)(const void *)(memory + l.ids);
    out->args.weights_in = (const float *)(const void *)(memory + l.weights);
    return moe_ok();
}

void moe_cpu_snapshot_put(struct moe_device *device, const struct moe_cpu_snapshot *snapshot)
{
    const struct moe_step_args *a = &snapshot->args;
    const size_t k = a->layer->spec.router.top_k;
    const size_t row = a->layer->spec.hidden * moe_dtype_bytes(a->dtype);
    size_t first = 0;
    if (snapshot->memory == NULL)
        return;
    for (uint32_t i = 0; i < a->segment_count; i++) {
        const struct moe_step_segment *s = &a->segments[i];
        size_t pairs = first * k, bytes = s->tokens * k * sizeof(float);
        copy_rows(device, s->y, (const char *)a->y + first * row, s->tokens * row);
        copy_rows(device, s->ids_out, a->ids_out + pairs, bytes);
        copy_rows(device, s->weights_out, a->weights_out + pairs, bytes);
        copy_rows(device, s->token_state, a->token_state + first, s->tokens);
        first += s->tokens;
    }
}

void moe_cpu_snapshot_free(struct moe_device *device, struct moe_cpu_snapshot *snapshot)
{
    moe_cpu_scratch_give(device, snapshot->memory);
    snapshot->memory = NULL;
}
