/* SPDX-License-Identifier: Apache-2.0 */
/* Memory and row movement of one step; see engine/step_slot.h. Every tensor of a step slot is sized
 * for the largest bucket and the widest layer at start-up, so that no step can fail for want of
 * memory. */
#include "engine/step_slot.h"

#include "base/clock.h"
#include "base/size.h"

#include <stdlib.h>

/* ---------------------------------------------------------------------- memory */

struct tensor {
    void **at;
    size_t bytes;
};

enum { TENSORS = 8 };

/* Sizes cannot overflow: moe_step_slot_init has checked the largest. */
static void list_tensors(struct moe_step_slot *step_slot, struct tensor out[TENSORS])
{
    size_t rows = step_slot->shape.tokens;
    size_t wide = rows * step_slot->shape.hidden * sizeof(float);
    size_t pairs = rows * step_slot->shape.top_k * sizeof(float);
    out[0] = (struct tensor){&step_slot->x, wide};
    out[1] = (struct tensor){&step_slot->y, wide};
    out[2] = (struct tensor){(void **)&step_slot->ids_in, pairs};
    out[3] = (struct tensor){(void **)&step_slot->ids_out, pairs};
    out[4] = (struct tensor){(void **)&step_slot->weights_in, pairs};
    out[5] = (struct tensor){(void **)&step_slot->weights_out, pairs};
    out[6] = (struct tensor){(void **)&step_slot->mode, rows};
    out[7] = (struct tensor){(void **)&step_slot->token_state, rows};
}

struct moe_status moe_step_slot_init(struct moe_step_slot *step_slot,
                                     const struct moe_backend *backend, struct moe_device *device,
                                     const struct moe_step_slot_shape *shape)
{
    size_t widest;
    if (!moe_size_mul3(shape->tokens, shape->hidden, sizeof(float), &widest) ||
        !moe_size_mul3(shape->tokens, shape->top_k, sizeof(float), &widest))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "a step would be too large");
    struct moe_status st = moe_ok();
    step_slot->backend = backend;
    step_slot->device = device;
    step_slot->shape = *shape;
    step_slot->segments = calloc(shape->tokens, sizeof *step_slot->segments);
    step_slot->exec = calloc(1, shape->exec_bytes + 1);
    if (step_slot->segments == NULL || step_slot->exec == NULL) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a step");
        goto fail;
    }
    struct tensor tensors[TENSORS];
    list_tensors(step_slot, tensors);
    for (size_t i = 0; i < TENSORS; i++)
        MOE_TRY_GOTO(st, backend->mem_alloc(device, MOE_MEM_HOST, tensors[i].bytes, tensors[i].at),
                     fail);
    return st;
fail:
    moe_step_slot_free(step_slot);
    return moe_error_context(st, "step buffers of %u tokens", shape->tokens);
}

void moe_step_slot_free(struct moe_step_slot *step_slot)
{
    if (step_slot->backend == NULL)
        return;
    struct tensor tensors[TENSORS];
    list_tensors(step_slot, tensors);
    for (size_t i = 0; i < TENSORS; i++)
        step_slot->backend->mem_free(step_slot->device, MOE_MEM_HOST, *tensors[i].at,
                                     tensors[i].bytes);
    free(step_slot->segments);
    free(step_slot->exec);
    *step_slot = (struct moe_step_slot){0};
}

/* ------------------------------------------------------------------------ rows */

static size_t row_bytes(const struct moe_step_slot *step_slot, const struct moe_layer_spec *spec)
{
    return spec->hidden * moe_dtype_bytes(step_slot->ticket.dtype);
}

/* Where row `first` starts; NULL stays NULL. */
static void *row_of(void *tensor, uint32_t first, size_t bytes)
{
    return tensor == NULL ? NULL : (uint8_t *)tensor + first * bytes;
}

static const void *const_row_of(const void *tensor, uint32_t first, size_t bytes)
{
    return tensor == NULL ? NULL : (const uint8_t *)tensor + first * bytes;
}

/* The backend works on the request's memory. Routing that the request does not want back goes to
 * the step slot's. */
static void point_at_request(struct moe_step_slot *step_slot, const struct moe_layer_spec *spec,
                             struct moe_step_args *args)
{
    const struct moe_segment *s = &step_slot->segments[0];
    const struct moe_work *w = s->work;
    size_t wide = row_bytes(step_slot, spec), pairs = spec->router.top_k * sizeof(float);
    args->x = const_row_of(w->x, s->first, wide);
    args->y = row_of(w->y, s->first, wide);
    args->ids_in = const_row_of(w->ids_in, s->first, pairs);
    args->weights_in = const_row_of(w->weights_in, s->first, pairs);
    if (w->ids_out != NULL)
        args->ids_out = row_of(w->ids_out, s->first, pairs);
    if (w->weights_out != NULL)
        args->weights_out = row_of(w->weights_out, s->first, pairs);
}

static void copy_rows_in(struct moe_step_slot *step_slot, const struct moe_layer_spec *spec,
                         const struct moe_segment *s, uint32_t row)
{
    struct moe_work *w = s->work;
    uint64_t start = moe_clock_ns();
    size_t wide = row_bytes(step_slot, spec), pairs = spec->router.top_k * sizeof(float);
    memcpy(row_of(step_slot->x, row, wide), const_row_of(w->x, s->first, wide), s->count * wide);
    if (w->mode != MOE_ROUTE_SERVER)
        memcpy(row_of(step_slot->ids_in, row, pairs), const_row_of(w->ids_in, s->first, pairs),
               s->count * pairs);
    if (w->mode == MOE_ROUTE_IDS_WEIGHTS)
        memcpy(row_of(step_slot->weights_in, row, pairs),
               const_row_of(w->weights_in, s->first, pairs), s->count * pairs);
    w->copy_in_ns += moe_clock_ns() - start;
}

void moe_step_slot_gather(struct moe_step_slot *step_slot, const struct moe_layer_spec *spec,
                          struct moe_step_args *args)
{
    *args = (struct moe_step_args){.dtype = step_slot->ticket.dtype,
                                   .bucket = step_slot->ticket.bucket,
                                   .tokens = step_slot->tokens,
                                   .counts = &step_slot->counts};
    step_slot->counts.by_expert = false;
    step_slot->counts.to_slots = false;
    if (step_slot->tokens == 0)
        return;
    args->ids_out = step_slot->ids_out;
    args->weights_out = step_slot->weights_out;
    args->token_state = step_slot->token_state;
    uint32_t row = 0;
    for (size_t i = 0; i < step_slot->segment_count; i++) {
        const struct moe_segment *s = &step_slot->segments[i];
        memset(step_slot->mode + row, (int)s->work->mode, s->count);
        if (s->work->mode != MOE_ROUTE_SERVER)
            args->mode = step_slot->mode;
        if (step_slot->segment_count > 1)
            copy_rows_in(step_slot, spec, s, row);
        row += s->count;
    }
    if (step_slot->segment_count == 1) {
        point_at_request(step_slot, spec, args);
        return;
    }
    args->x = step_slot->x;
    args->y = step_slot->y;
    args->ids_in = step_slot->ids_in;
    args->weights_in = step_slot->weights_in;
}

static void copy_rows_out(struct moe_step_slot *step_slot, const struct moe_layer_spec *spec,
                          const struct moe_segment *s, uint32_t row)
{
    struct moe_work *w = s->work;
    uint64_t start = moe_clock_ns();
    size_t wide = row_bytes(step_slot, spec), pairs = spec->router.top_k * sizeof(float);
    memcpy(row_of(w->y, s->first, wide), row_of(step_slot->y, row, wide), s->count * wide);
    if (w->ids_out != NULL)
        memcpy(row_of(w->ids_out, s->first, pairs), row_of(step_slot->ids_out, row, pairs),
               s->count * pairs);
    if (w->weights_out != NULL)
        memcpy(row_of(w->weights_out, s->first, pairs), row_of(step_slot->weights_out, row, pairs),
               s->count * pairs);
    w->copy_out_ns += moe_clock_ns() - start;
}

void moe_step_slot_scatter(struct moe_step_slot *step_slot, const struct moe_layer_spec *spec)
{
    uint32_t row = 0;
    for (size_t i = 0; step_slot->segment_count > 1 && i < step_slot->segment_count; i++) {
        copy_rows_out(step_slot, spec, &step_slot->segments[i], row);
        row += step_slot->segments[i].count;
    }
}

/* --------------------------------------------------------------------- outcome */

struct moe_status moe_step_slot_outcome(const struct moe_step_slot *step_slot,
                                        const struct moe_segment *segment, uint32_t row)
{
    for (uint32_t i = 0; i < segment->count; i++) {
        uint32_t token = segment->first + i;
        switch ((enum moe_token_state)step_slot->token_state[row + i]) {
        case MOE_TOKEN_OK: break;
        case MOE_TOKEN_NONFINITE_LOGITS:
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONFINITE_LOGITS,
                             "token %u: its router logits are not all finite", token);
        case MOE_TOKEN_BAD_EXPERT:
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_EXPERT_INDEX_RANGE,
                             "token %u: an expert id is out of range", token);
        case MOE_TOKEN_BAD_WEIGHT:
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_ROUTING_INVALID,
                             "token %u: a routing weight is not finite", token);
        default:
            return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                             "token %u: the backend reported an unknown state", token);
        }
    }
    return moe_ok();
}
