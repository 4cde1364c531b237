/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of one step, and where its rows are; see engine/step_slot.h. Every tensor of a step slot
 * is sized for the largest bucket and the widest layer at start-up, so that no step can fail for
 * want of memory. */
#include "engine/step_slot.h"

#include "base/size.h"
#include "schedule/completion.h"

#include <stdlib.h>

/* ---------------------------------------------------------------------- memory */

struct tensor {
    void **at;
    size_t bytes;
};

enum { TENSORS = 4 };

/* Sizes cannot overflow: moe_step_slot_init has checked the largest. */
static void list_tensors(struct moe_step_slot *step_slot, struct tensor out[TENSORS])
{
    size_t rows = step_slot->shape.tokens;
    size_t pairs = rows * step_slot->shape.top_k * sizeof(float);
    out[0] = (struct tensor){(void **)&step_slot->ids_out, pairs};
    out[1] = (struct tensor){(void **)&step_slot->weights_out, pairs};
    out[2] = (struct tensor){(void **)&step_slot->mode, rows};
    out[3] = (struct tensor){(void **)&step_slot->token_state, rows};
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
    step_slot->places = calloc(shape->tokens, sizeof *step_slot->places);
    step_slot->exec = calloc(1, shape->exec_bytes + 1);
    if (step_slot->segments == NULL || step_slot->places == NULL || step_slot->exec == NULL) {
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
    free(step_slot->places);
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

/* Runs without the engine's lock. While tokens of a request are in the batcher, other threads may
 * fail it. Once its last part is in a step, only the engine's thread does. */
static struct moe_step_completion completion_of(const struct moe_segment *s)
{
    const struct moe_work *w = s->work;
    const bool last = s->first + s->count == w->tokens;
    const struct moe_request_part part = {.first = s->first,
                                          .count = s->count,
                                          .tokens = w->tokens,
                                          .finished = w->finished,
                                          .failed = last && moe_failed(&w->failure)};
    return moe_part_completes(&part) ? w->completion : (struct moe_step_completion){0};
}

static struct moe_step_segment place_of(const struct moe_step_slot *step_slot,
                                        const struct moe_layer_spec *spec,
                                        const struct moe_segment *s)
{
    const struct moe_work *w = s->work;
    size_t wide = row_bytes(step_slot, spec), pairs = spec->router.top_k * sizeof(float);
    const uint8_t mode =
        (uint8_t)((int)w->mode | (w->without_shared ? MOE_ROUTE_WITHOUT_SHARED : 0));
    return (struct moe_step_segment){.tokens = s->count,
                                     .mode = mode,
                                     .x = const_row_of(w->x, s->first, wide),
                                     .ids_in = const_row_of(w->ids_in, s->first, pairs),
                                     .weights_in = const_row_of(w->weights_in, s->first, pairs),
                                     .y = row_of(w->y, s->first, wide),
                                     .ids_out = row_of(w->ids_out, s->first, pairs),
                                     .weights_out = row_of(w->weights_out, s->first, pairs),
                                     .token_state = row_of(w->token_state, s->first, 1),
                                     .completion = completion_of(s)};
}

/* A request that is alone in its step needs no copies, unless a client can write its memory, or
 * wants what is this step slot's. */
static bool works_in_place(const struct moe_step_slot *step_slot)
{
    const struct moe_work *w = step_slot->segments[0].work;
    return step_slot->segment_count == 1 && !w->by_copy && w->token_state == NULL;
}

/* The backend works on the request's memory. Routing that the request does not want back goes to
 * the step slot's. */
static void point_at_request(struct moe_step_slot *step_slot, const struct moe_step_segment *at,
                             struct moe_step_args *args)
{
    args->x = at->x;
    args->y = at->y;
    if (at->mode != MOE_ROUTE_SERVER) {
        memset(step_slot->mode, at->mode, at->tokens);
        args->mode = step_slot->mode;
    }
    args->ids_in = at->ids_in;
    args->weights_in = at->weights_in;
    if (at->ids_out != NULL)
        args->ids_out = at->ids_out;
    if (at->weights_out != NULL)
        args->weights_out = at->weights_out;
}

void moe_step_slot_args(struct moe_step_slot *step_slot, const struct moe_layer_spec *spec,
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
    for (size_t i = 0; i < step_slot->segment_count; i++)
        step_slot->places[i] = place_of(step_slot, spec, &step_slot->segments[i]);
    if (works_in_place(step_slot)) {
        point_at_request(step_slot, &step_slot->places[0], args);
        return;
    }
    args->segments = step_slot->places;
    args->segment_count = (uint32_t)step_slot->segment_count;
}

/* --------------------------------------------------------------------- outcome */

struct moe_status moe_step_slot_outcome(const struct moe_step_slot *step_slot,
                                        const struct moe_segment *segment, uint32_t row)
{
    const struct moe_work *work = segment->work; /* NULL: of a call, such as Backward */
    bool partial = work != NULL && work->on_unavailable == MOE_ON_UNAVAILABLE_PARTIAL;
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
        case MOE_TOKEN_UNAVAILABLE:
            if (partial)
                break;
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_EXPERT_UNAVAILABLE,
                             "token %u: one of its experts has no live copy", token);
        default:
            return moe_error(MOE_INTERNAL, MOE_REASON_NONE,
                             "token %u: the backend reported an unknown state", token);
        }
    }
    return moe_ok();
}
