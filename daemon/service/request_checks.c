/* SPDX-License-Identifier: Apache-2.0 */
/* See service/request_checks.h. No number of a client is used as a size before it has been compared
 * with the layer's. */
#include "service/request_checks.h"

#include "base/size.h"
#include "daemon/name.h"
#include "service/places.h"

#include <math.h>

enum { REFORMING_RETRY_MS = 100, DRAINING_RETRY_MS = 100, LEASE_RETRY_MS = 200 };

#define invalid(reason, ...) moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_##reason, __VA_ARGS__)

struct moe_status moe_request_take(const struct moe_service_info *info, struct moe_staging *staging,
                                   size_t length, struct moe_buffer **buffer, void **dst)
{
    if (length == 0)
        return moe_ok();
    if (length > info->max_message_bytes)
        return invalid(TOO_LARGE, "a tensor of %zu bytes; a message may have %u", length,
                       info->max_message_bytes);
    MOE_TRY(moe_staging_take(staging, length, buffer));
    *dst = moe_buffer_data(*buffer);
    return moe_ok();
}

bool moe_request_wants_default(const struct moe_served_model *served, const char *name)
{
    return name[0] == '\0' || strcmp(name, served->name) == 0;
}

struct moe_status moe_request_check_digest(const struct moe_standing *worker,
                                           const struct moe_served_model *model, const char *digest)
{
    const char *served = model->digest;
    if (digest[0] == '\0' || strcmp(digest, served) == 0 ||
        (served[0] == '\0' && worker->epoch == 0))
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                     "the request wants another model than the one with digest %s",
                     served[0] != '\0' ? served : "(not known)");
}

struct moe_status moe_request_find_layer(const struct moe_layer_spec *const *layers, size_t count,
                                         uint32_t layer, int dtype,
                                         const struct moe_layer_spec **spec, enum moe_dtype *rows)
{
    *spec = NULL;
    for (size_t i = 0; i < count && *spec == NULL; i++)
        if (layers[i]->layer == layer)
            *spec = layers[i];
    if (*spec == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND, "the model has no MoE layer %u",
                         layer);
    if (dtype != MOE__V1__DATA_TYPE__DATA_TYPE_F32 && dtype != MOE__V1__DATA_TYPE__DATA_TYPE_BF16)
        return invalid(DTYPE_UNSUPPORTED, "dtype must be F32 or BF16");
    *rows = dtype == MOE__V1__DATA_TYPE__DATA_TYPE_F32 ? MOE_DTYPE_F32 : MOE_DTYPE_BF16;
    return moe_ok();
}

struct moe_status moe_request_check_rows(const struct moe_layer_spec *spec, uint32_t hidden,
                                         uint32_t tokens)
{
    if (hidden != spec->hidden)
        return invalid(SHAPE_MISMATCH, "hidden is %u; layer %u has %u", hidden, spec->layer,
                       spec->hidden);
    if (tokens == 0)
        return invalid(SHAPE_MISMATCH, "a request needs at least one token");
    return moe_ok();
}

struct moe_status moe_request_check_tensor(const char *what, size_t bytes,
                                           const struct moe_layer_spec *spec, uint32_t tokens,
                                           enum moe_dtype dtype)
{
    size_t want;
    if (!moe_size_mul3(tokens, spec->hidden, moe_dtype_bytes(dtype), &want))
        return invalid(TOO_LARGE, "%s would be too large", what);
    if (bytes != want)
        return invalid(SHAPE_MISMATCH, "%s has %zu bytes; %u tokens of %u elements have %zu", what,
                       bytes, tokens, spec->hidden, want);
    return moe_ok();
}

struct moe_status moe_request_check_pass(const char *session, uint64_t micro_batch_id)
{
    if (!moe_training_name_ok(session))
        return invalid(NAME_INVALID, "a session has 1 to 64 characters of A-Z a-z 0-9 . _ - and "
                                     "begins with no dot");
    if (micro_batch_id == 0 || micro_batch_id > INT64_MAX)
        return invalid(VALUE_INVALID, "micro_batch_id must be from 1 to 2^63 - 1");
    return moe_ok();
}

/* --------------------------------------------------------------------------- routing */

size_t moe_request_id_bytes(int dtype)
{
    switch (dtype) {
    case MOE__V1__DATA_TYPE__DATA_TYPE_U8: return 1;
    case MOE__V1__DATA_TYPE__DATA_TYPE_U16: return 2;
    case MOE__V1__DATA_TYPE__DATA_TYPE_I32: return 4;
    default: return 0;
    }
}

struct moe_status moe_request_check_routed(const struct moe_layer_spec *spec,
                                           enum moe_routing_mode mode)
{
    return mode != MOE_ROUTE_SERVER || !spec->router.by_token
               ? moe_ok()
               : invalid(ROUTING_INVALID,
                         "layer %u routes by token id: give token_ids, or topk_ids", spec->layer);
}

struct moe_status moe_request_check_token_ids(const struct moe_layer_spec *spec,
                                              const struct moe_token_table *table, uint32_t tokens,
                                              const struct moe_buffer *token_ids, size_t bytes)
{
    if (table == NULL)
        return invalid(ROUTING_INVALID,
                       "layer %u does not route by token id: it takes no token_ids", spec->layer);
    size_t want = tokens * sizeof(int64_t);
    if (bytes != want)
        return invalid(SHAPE_MISMATCH, "token_ids has %zu bytes; those of %u tokens have %zu",
                       bytes, tokens, want);
    const int64_t *data = moe_buffer_data(token_ids);
    for (size_t t = 0; t < tokens; t++)
        if (data[t] < 0 || data[t] >= (int64_t)table->vocabulary)
            return invalid(VALUE_INVALID, "token %zu: token id %lld is not in 0 to %u", t,
                           (long long)data[t], table->vocabulary - 1);
    return moe_ok();
}

void moe_request_look_up(const struct moe_token_table *table, uint32_t tokens,
                         const struct moe_buffer *token_ids, int32_t *to)
{
    const int64_t *data = moe_buffer_data(token_ids);
    size_t k = table->top_k;
    for (size_t t = 0; t < tokens; t++)
        for (size_t i = 0; i < k; i++)
            to[t * k + i] = table->ids[(size_t)data[t] * k + i];
}

static int32_t read_id(const void *ids, size_t i, size_t size)
{
    if (size == 1)
        return ((const uint8_t *)ids)[i];
    return size == 2 ? ((const uint16_t *)ids)[i] : ((const int32_t *)ids)[i];
}

void moe_request_widen_ids(int32_t *to, const void *from, size_t size, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = read_id(from, i, size);
}

struct moe_status moe_request_check_ids(const struct moe_layer_spec *spec, uint32_t tokens,
                                        int dtype, const struct moe_buffer *ids, size_t bytes)
{
    size_t size = moe_request_id_bytes(dtype), k = spec->router.top_k, pairs = tokens * k;
    int32_t all = (int32_t)(spec->experts + spec->router.zero_experts);
    if (size == 0)
        return invalid(DTYPE_UNSUPPORTED, "topk_ids_dtype must be U8, U16 or I32");
    if (bytes != pairs * size)
        return invalid(SHAPE_MISMATCH, "topk_ids has %zu bytes; %u tokens of %zu ids have %zu",
                       bytes, tokens, k, pairs * size);
    const void *data = moe_buffer_data(ids);
    for (size_t i = 0; i < pairs; i++) {
        int32_t id = read_id(data, i, size);
        if (id < -1 || id >= all)
            return invalid(EXPERT_INDEX_RANGE, "token %zu: expert %d is not in 0 to %d", i / k, id,
                           all - 1);
    }
    return moe_ok();
}

struct moe_status moe_request_check_weights(const struct moe_layer_spec *spec, uint32_t tokens,
                                            const struct moe_buffer *weights, size_t bytes)
{
    size_t k = spec->router.top_k, pairs = tokens * k;
    if (bytes != pairs * sizeof(float))
        return invalid(SHAPE_MISMATCH, "topk_weights has %zu bytes; %u tokens of %zu have %zu",
                       bytes, tokens, k, pairs * sizeof(float));
    const float *data = moe_buffer_data(weights);
    for (size_t i = 0; i < pairs; i++)
        if (!isfinite(data[i]))
            return invalid(ROUTING_INVALID, "token %zu: a routing weight is not finite", i / k);
    return moe_ok();
}

struct moe_status moe_request_route_nowhere(struct moe_staging *staging,
                                            const struct moe_layer_spec *spec, uint32_t tokens,
                                            struct moe_buffer **ids, struct moe_buffer **weights)
{
    size_t bytes = (size_t)tokens * spec->router.top_k * sizeof(int32_t);
    MOE_TRY(moe_staging_take(staging, bytes, ids));
    MOE_TRY(moe_staging_take(staging, bytes, weights));
    memset(moe_buffer_data(*ids), 0xff, bytes); /* -1 */
    memset(moe_buffer_data(*weights), 0, bytes);
    return moe_ok();
}

struct moe_status moe_request_lease_lost(void)
{
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_LEASE_LOST, LEASE_RETRY_MS,
                           "the coordinator does not answer this worker: the group trains, and may "
                           "have gone on without it");
}

struct moe_status moe_request_check_epoch(const struct moe_standing *worker, uint64_t epoch)
{
    if (epoch != 0 && worker->epoch != 0 && epoch != worker->epoch)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STALE_EPOCH,
                         "the request wants epoch %llu; the epoch is %llu",
                         (unsigned long long)epoch, (unsigned long long)worker->epoch);
    return moe_ok();
}

struct moe_status moe_request_check_version(uint64_t present, uint64_t wanted)
{
    if (wanted != 0 && wanted != present)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "the request wants weights version %llu; it is %llu",
                         (unsigned long long)wanted, (unsigned long long)present);
    return moe_ok();
}

static struct moe_status no_view(const struct moe_standing *worker)
{
    char places[MOE_PLACES_BYTES] = "";
    if (worker->places != NULL)
        moe_places_read(worker->places, places);
    if (places[0] != '\0')
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, REFORMING_RETRY_MS,
                               "this worker is a spare, without experts: call %s", places);
    return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, REFORMING_RETRY_MS,
                           "no view is in force here: the group is forming, or a slot is empty");
}

struct moe_status moe_request_check_worker(const struct moe_standing *worker)
{
    if (worker->draining)
        return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_DRAINING, DRAINING_RETRY_MS,
                               "this worker is leaving");
    if (worker->lease_lost)
        return moe_request_lease_lost();
    if (worker->epoch == 0 && !worker->awaited)
        return no_view(worker);
    return moe_ok();
}

void moe_request_fill_stages(const struct moe_step_result *step, Moe__V1__StageTimes *to)
{
    const uint64_t *ns = step->stage_ns;
    to->router_ns = ns[MOE_STAGE_ROUTER];
    to->prepare_ns = ns[MOE_STAGE_PREPARE];
    to->dispatch_ns = ns[MOE_STAGE_DISPATCH];
    to->gemm1_ns = ns[MOE_STAGE_GEMM1];
    to->gemm2_ns = ns[MOE_STAGE_GEMM2];
    to->shared_ns = ns[MOE_STAGE_SHARED];
    to->combine_ns = ns[MOE_STAGE_COMBINE];
    to->step_ns = step->total_ns;
}
