/* Memory and row movement of one step; see worker/lane.h. Every tensor of a lane is sized for the
 * largest bucket and the widest layer at start-up, so that no step can fail for want of memory. */
#include "worker/lane.h"

#include "base/clock.h"
#include "base/size.h"

#include <stdlib.h>

/* ---------------------------------------------------------------------- memory */

struct tensor {
    void **at;
    size_t bytes;
};

enum { TENSORS = 8 };

/* Sizes cannot overflow: moe_lane_init has checked the largest. */
static void list_tensors(struct moe_lane *lane, struct tensor out[TENSORS])
{
    size_t rows = lane->shape.tokens;
    size_t wide = rows * lane->shape.hidden * sizeof(float);
    size_t pairs = rows * lane->shape.top_k * sizeof(float);
    out[0] = (struct tensor){&lane->x, wide};
    out[1] = (struct tensor){&lane->y, wide};
    out[2] = (struct tensor){(void **)&lane->ids_in, pairs};
    out[3] = (struct tensor){(void **)&lane->ids_out, pairs};
    out[4] = (struct tensor){(void **)&lane->weights_in, pairs};
    out[5] = (struct tensor){(void **)&lane->weights_out, pairs};
    out[6] = (struct tensor){(void **)&lane->mode, rows};
    out[7] = (struct tensor){(void **)&lane->token_state, rows};
}

struct moe_status moe_lane_init(struct moe_lane *lane, const struct moe_backend *backend,
                                struct moe_device *device, const struct moe_lane_shape *shape)
{
    size_t widest;
    if (!moe_size_mul3(shape->tokens, shape->hidden, sizeof(float), &widest) ||
        !moe_size_mul3(shape->tokens, shape->top_k, sizeof(float), &widest))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "a step would be too large");
    struct moe_status st = moe_ok();
    lane->backend = backend;
    lane->device = device;
    lane->shape = *shape;
    lane->segments = calloc(shape->tokens, sizeof *lane->segments);
    if (lane->segments == NULL) {
        st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a step");
        goto fail;
    }
    struct tensor tensors[TENSORS];
    list_tensors(lane, tensors);
    for (size_t i = 0; i < TENSORS; i++)
        MOE_TRY_GOTO(st, backend->mem_alloc(device, MOE_MEM_HOST, tensors[i].bytes, tensors[i].at),
                     fail);
    return st;
fail:
    moe_lane_free(lane);
    return moe_error_context(st, "step buffers of %u tokens", shape->tokens);
}

void moe_lane_free(struct moe_lane *lane)
{
    if (lane->backend == NULL)
        return;
    struct tensor tensors[TENSORS];
    list_tensors(lane, tensors);
    for (size_t i = 0; i < TENSORS; i++)
        lane->backend->mem_free(lane->device, MOE_MEM_HOST, *tensors[i].at, tensors[i].bytes);
    free(lane->segments);
    *lane = (struct moe_lane){0};
}

/* ------------------------------------------------------------------------ rows */

static size_t row_bytes(const struct moe_lane *lane, const struct moe_layer_spec *spec)
{
    return spec->hidden * moe_dtype_bytes(lane->ticket.dtype);
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

/* The backend works on the request's own memory. Routing that the request does not want back goes
 * to the lane's. */
static void point_at_request(struct moe_lane *lane, const struct moe_layer_spec *spec,
                             struct moe_step_args *args)
{
    const struct moe_segment *s = &lane->segments[0];
    const struct moe_work *w = s->work;
    size_t wide = row_bytes(lane, spec), pairs = spec->router.top_k * sizeof(float);
    args->x = const_row_of(w->x, s->first, wide);
    args->y = row_of(w->y, s->first, wide);
    args->ids_in = const_row_of(w->ids_in, s->first, pairs);
    args->weights_in = const_row_of(w->weights_in, s->first, pairs);
    if (w->ids_out != NULL)
        args->ids_out = row_of(w->ids_out, s->first, pairs);
    if (w->weights_out != NULL)
        args->weights_out = row_of(w->weights_out, s->first, pairs);
}

static void copy_rows_in(struct moe_lane *lane, const struct moe_layer_spec *spec,
                         const struct moe_segment *s, uint32_t row)
{
    struct moe_work *w = s->work;
    uint64_t start = moe_clock_ns();
    size_t wide = row_bytes(lane, spec), pairs = spec->router.top_k * sizeof(float);
    memcpy(row_of(lane->x, row, wide), const_row_of(w->x, s->first, wide), s->count * wide);
    if (w->mode != MOE_ROUTE_SERVER)
        memcpy(row_of(lane->ids_in, row, pairs), const_row_of(w->ids_in, s->first, pairs),
               s->count * pairs);
    if (w->mode == MOE_ROUTE_IDS_WEIGHTS)
        memcpy(row_of(lane->weights_in, row, pairs), const_row_of(w->weights_in, s->first, pairs),
               s->count * pairs);
    w->copy_in_ns += moe_clock_ns() - start;
}

void moe_lane_gather(struct moe_lane *lane, const struct moe_layer_spec *spec,
                     struct moe_step_args *args)
{
    *args = (struct moe_step_args){
        .dtype = lane->ticket.dtype, .bucket = lane->ticket.bucket, .tokens = lane->tokens};
    if (lane->tokens == 0)
        return;
    args->ids_out = lane->ids_out;
    args->weights_out = lane->weights_out;
    args->token_state = lane->token_state;
    uint32_t row = 0;
    for (size_t i = 0; i < lane->segment_count; i++) {
        const struct moe_segment *s = &lane->segments[i];
        memset(lane->mode + row, (int)s->work->mode, s->count);
        if (s->work->mode != MOE_ROUTE_SERVER)
            args->mode = lane->mode;
        if (lane->segment_count > 1)
            copy_rows_in(lane, spec, s, row);
        row += s->count;
    }
    if (lane->segment_count == 1) {
        point_at_request(lane, spec, args);
        return;
    }
    args->x = lane->x;
    args->y = lane->y;
    args->ids_in = lane->ids_in;
    args->weights_in = lane->weights_in;
}

static void copy_rows_out(struct moe_lane *lane, const struct moe_layer_spec *spec,
                          const struct moe_segment *s, uint32_t row)
{
    struct moe_work *w = s->work;
    uint64_t start = moe_clock_ns();
    size_t wide = row_bytes(lane, spec), pairs = spec->router.top_k * sizeof(float);
    memcpy(row_of(w->y, s->first, wide), row_of(lane->y, row, wide), s->count * wide);
    if (w->ids_out != NULL)
        memcpy(row_of(w->ids_out, s->first, pairs), row_of(lane->ids_out, row, pairs),
               s->count * pairs);
    if (w->weights_out != NULL)
        memcpy(row_of(w->weights_out, s->first, pairs), row_of(lane->weights_out, row, pairs),
               s->count * pairs);
    w->copy_out_ns += moe_clock_ns() - start;
}

void moe_lane_scatter(struct moe_lane *lane, const struct moe_layer_spec *spec)
{
    uint32_t row = 0;
    for (size_t i = 0; lane->segment_count > 1 && i < lane->segment_count; i++) {
        copy_rows_out(lane, spec, &lane->segments[i], row);
        row += lane->segments[i].count;
    }
}

/* --------------------------------------------------------------------- verdict */

struct moe_status moe_lane_verdict(const struct moe_lane *lane, const struct moe_segment *segment,
                                   uint32_t row)
{
    for (uint32_t i = 0; i < segment->count; i++) {
        uint32_t token = segment->first + i;
        switch ((enum moe_token_state)lane->token_state[row + i]) {
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
                             "token %u: the backend gave an unknown verdict", token);
        }
    }
    return moe_ok();
}
