/* SPDX-License-Identifier: Apache-2.0 */
/* Each message is built on the stack and packed at once. */
#include "group/report.h"

#include "daemon/log.h"
#include "moe/v1/coordinator.pb-c.h"
#include "rpc/control.h"

static void send_message(struct moe_rpc_stream *stream, const Moe__V1__SessionRequest *q)
{
    if (stream == NULL)
        return;
    struct moe_status st = moe_control_send(stream, &q->base);
    if (moe_failed(&st))
        moe_log_debug("coordinator: %s", st.text);
}

/* For a message's field: NULL unless it has failed. Fills in `to`. */
static Moe__V1__Error *error_of(const struct moe_status *status, Moe__V1__Error *to)
{
    if (!moe_failed(status))
        return NULL;
    moe_control_error(status, to);
    return to;
}

_Static_assert((int)MOE_ENC_F8E4M3 == (int)MOE__V1__WEIGHT_ENCODING__WEIGHT_ENCODING_F8E4M3 &&
                   (int)MOE_ENC_E2M1 == (int)MOE__V1__WEIGHT_ENCODING__WEIGHT_ENCODING_E2M1 &&
                   (int)MOE_ENC_INT4 == (int)MOE__V1__WEIGHT_ENCODING__WEIGHT_ENCODING_INT4,
               "encodings are sent as they are");
_Static_assert((int)MOE_ACTIVATIONS_F8 ==
                       (int)MOE__V1__ACTIVATION_ENCODING__ACTIVATION_ENCODING_F8E4M3 &&
                   (int)MOE_ACTIVATIONS_F8_POW2 ==
                       (int)MOE__V1__ACTIVATION_ENCODING__ACTIVATION_ENCODING_F8E4M3_POW2,
               "so are activations");

void moe_report_layer(const struct moe_layer_spec *spec, Moe__V1__LayerInfo *out)
{
    moe__v1__layer_info__init(out);
    out->layer = spec->layer;
    out->hidden = spec->hidden;
    out->experts = spec->experts;
    out->top_k = spec->router.top_k;
    out->intermediate = spec->intermediate;
    out->zero_experts = spec->router.zero_experts;
    out->routes_by_token_id = spec->router.by_token;
    out->vocabulary = spec->router.vocabulary;
    out->latent = spec->latent;
    out->shared_intermediate = spec->shared_intermediate;
    out->routed_encoding = (Moe__V1__WeightEncoding)spec->routed_format.encoding;
    out->shared_encoding = (Moe__V1__WeightEncoding)spec->shared_format.encoding;
    out->routed_activations = (Moe__V1__ActivationEncoding)spec->routed_format.activations;
    out->shared_activations = (Moe__V1__ActivationEncoding)spec->shared_format.activations;
}

void moe_report_register(struct moe_rpc_stream *stream, const struct moe_group_identity *id,
                         uint32_t wanted_slot_plus_one, const struct moe_group_session *session)
{
    Moe__V1__LayerInfo layers[MOE_MAX_LAYERS];
    Moe__V1__LayerInfo *pointers[MOE_MAX_LAYERS];
    for (size_t i = 0; i < id->layer_count; i++) {
        moe_report_layer(id->layers[i], &layers[i]);
        pointers[i] = &layers[i];
    }
    Moe__V1__Register r = MOE__V1__REGISTER__INIT;
    r.worker_id = (char *)id->worker_id; /* protobuf-c has no const strings; packing only reads */
    r.incarnation = id->incarnation;
    r.slot_token.data = (uint8_t *)id->slot_token;
    r.slot_token.len = sizeof id->slot_token;
    r.endpoint = (char *)id->endpoint;
    r.control_endpoint = (char *)id->control_endpoint;
    r.backend = (char *)id->backend;
    r.model = (char *)id->model;
    r.model_fingerprint = (char *)id->fingerprint;
    r.family = (char *)id->family;
    r.version = (char *)id->version;
    r.layers = pointers;
    r.n_layers = id->layer_count;
    r.max_tokens_per_step = id->max_tokens_per_step;
    r.wanted_slot_plus_one = wanted_slot_plus_one;
    r.trains_with_copies = id->trains_with_copies;
    r.trains = id->trains;
    r.partial = id->partial;
    r.moves_experts = id->moves_experts;
    Moe__V1__Host host = MOE__V1__HOST__INIT;
    if (id->host != NULL) {
        host.id = (char *)id->host->id;
        host.domain = (char *)id->host->domain;
        host.network_address = (char *)id->host->address;
        host.name = (char *)id->host_name;
        r.host = &host;
    }
    Moe__V1__KeptSession kept = MOE__V1__KEPT_SESSION__INIT;
    kept.epoch = session->epoch;
    kept.together = session->together;
    kept.max_tokens_per_step = session->max_tokens;
    if (session->epoch != 0)
        r.session = &kept;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_REGISTER;
    q.register_ = &r;
    send_message(stream, &q);
}

void moe_report_heartbeat(struct moe_rpc_stream *stream, uint64_t epoch, uint64_t sequence,
                          uint64_t round_trip_ns, const struct moe_group_numbers *numbers)
{
    uint64_t round_trip_us = (round_trip_ns + 999) / 1000;
    Moe__V1__Heartbeat h = MOE__V1__HEARTBEAT__INIT;
    h.epoch = epoch;
    h.sequence = sequence;
    h.loaded_bytes = numbers->loaded_bytes;
    h.total_bytes = numbers->total_bytes;
    h.tokens = numbers->tokens;
    h.steps = numbers->steps;
    Moe__V1__SavedTraining saved = MOE__V1__SAVED_TRAINING__INIT;
    saved.checkpoint = (char *)numbers->training_saved.checkpoint;
    saved.lineage = numbers->training_saved.lineage;
    saved.weights_version = numbers->training_saved.weights_version;
    saved.calls = numbers->training_saved.calls;
    saved.record = numbers->training_saved.record;
    if (saved.calls != 0)
        h.training_saved = &saved;
    h.round_trip_us = round_trip_us < UINT32_MAX ? (uint32_t)round_trip_us : UINT32_MAX;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_HEARTBEAT;
    q.heartbeat = &h;
    send_message(stream, &q);
}

void moe_report_digests(struct moe_rpc_stream *stream, const uint8_t *part, size_t length)
{
    Moe__V1__Digests digests = MOE__V1__DIGESTS__INIT;
    digests.part.data = (uint8_t *)part;
    digests.part.len = length;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_DIGESTS;
    q.digests = &digests;
    send_message(stream, &q);
}

/* -------------------------------------------------------------------- added models */

static struct moe_status pack(const Moe__V1__SessionRequest *q, moe_group_part_fn add, void *ctx)
{
    struct moe_control_out packed;
    MOE_TRY(moe_control_pack(&q->base, &packed));
    struct moe_status st = add(ctx, packed.out.head, packed.out.head_length);
    moe_control_free(&packed);
    return st;
}

/* Where the digests of one report go. */
struct digest_sink {
    uint32_t model;
    moe_group_part_fn add;
    void *ctx;
};

static struct moe_status add_digests(void *ctx, const uint8_t *part, size_t length)
{
    const struct digest_sink *to = ctx;
    Moe__V1__Digests digests = MOE__V1__DIGESTS__INIT;
    digests.part.data = (uint8_t *)part;
    digests.part.len = length;
    digests.model = to->model;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_DIGESTS;
    q.digests = &digests;
    return pack(&q, to->add, to->ctx);
}

static void fill_memory(const struct moe_group_layer_memory *from, Moe__V1__LayerInfo *info,
                        Moe__V1__LayerMemory *to)
{
    moe_report_layer(from->spec, info);
    moe__v1__layer_memory__init(to);
    to->info = info;
    to->common_file_bytes = from->common_file_bytes;
    to->common_resident_bytes = from->common_resident_bytes;
    to->expert_file_bytes = from->expert_file_bytes;
    to->expert_resident_bytes = from->expert_resident_bytes;
}

struct moe_status moe_report_pack_model(const struct moe_group_model_report *r,
                                        moe_group_part_fn add, void *ctx)
{
    Moe__V1__LayerInfo info[MOE_MAX_LAYERS];
    Moe__V1__LayerMemory layers[MOE_MAX_LAYERS];
    Moe__V1__LayerMemory *pointers[MOE_MAX_LAYERS];
    Moe__V1__Error error;
    MOE_INVARIANT(r->layer_count <= MOE_MAX_LAYERS);
    struct digest_sink sink = {r->model, add, ctx};
    if (r->digests != NULL)
        MOE_TRY(r->digests(r->digests_ctx, add_digests, &sink));
    Moe__V1__ModelReport report = MOE__V1__MODEL_REPORT__INIT;
    report.model = r->model;
    report.step = (Moe__V1__ModelStep)r->step;
    report.order = r->order;
    report.epoch = r->epoch;
    report.free_bytes = r->free_bytes;
    if (r->fingerprint != NULL)
        report.fingerprint = (char *)r->fingerprint;
    if (r->family != NULL)
        report.family = (char *)r->family;
    for (size_t i = 0; i < r->layer_count; i++) {
        fill_memory(&r->layers[i], &info[i], &layers[i]);
        pointers[i] = &layers[i];
    }
    report.n_layers = r->layer_count;
    report.layers = pointers;
    report.error = error_of(&r->status, &error);
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_MODEL_REPORT;
    q.model_report = &report;
    return pack(&q, add, ctx);
}

struct moe_status moe_report_pack_rows(uint64_t order, uint32_t layer, const uint64_t *rows,
                                       size_t count, moe_group_part_fn add, void *ctx)
{
    Moe__V1__ExpertRows body = MOE__V1__EXPERT_ROWS__INIT;
    body.order = order;
    body.layer = layer;
    body.n_rows = count;
    body.rows = (uint64_t *)(uintptr_t)rows; /* packing only reads */
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_EXPERT_ROWS;
    q.expert_rows = &body;
    return pack(&q, add, ctx);
}

struct moe_status moe_report_pack_progress(uint32_t model, uint64_t loaded_bytes,
                                           uint64_t total_bytes, moe_group_part_fn add, void *ctx)
{
    Moe__V1__ModelProgress progress = MOE__V1__MODEL_PROGRESS__INIT;
    progress.model = model;
    progress.loaded_bytes = loaded_bytes;
    progress.total_bytes = total_bytes;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_MODEL_PROGRESS;
    q.model_progress = &progress;
    return pack(&q, add, ctx);
}

void moe_report_loaded(struct moe_rpc_stream *stream, uint32_t version, uint64_t order,
                       const struct moe_status *status)
{
    Moe__V1__Error error;
    Moe__V1__Loaded loaded = MOE__V1__LOADED__INIT;
    loaded.placement_version = version;
    loaded.order = order;
    loaded.error = error_of(status, &error);
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_LOADED;
    q.loaded = &loaded;
    send_message(stream, &q);
}

void moe_report_checkpoint_read(struct moe_rpc_stream *stream, uint64_t order,
                                const struct moe_status *status)
{
    Moe__V1__Error error;
    Moe__V1__CheckpointRead read = MOE__V1__CHECKPOINT_READ__INIT;
    read.order = order;
    read.error = error_of(status, &error);
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_CHECKPOINT_READ;
    q.checkpoint_read = &read;
    send_message(stream, &q);
}

void moe_report_ready(struct moe_rpc_stream *stream, uint64_t epoch, uint64_t slots,
                      const struct moe_status *status)
{
    Moe__V1__Error error;
    Moe__V1__Ready ready = MOE__V1__READY__INIT;
    ready.epoch = epoch;
    ready.together = moe_failed(status) ? 0 : slots;
    ready.without = moe_failed(status) ? slots : 0;
    ready.error = error_of(status, &error);
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_READY;
    q.ready = &ready;
    send_message(stream, &q);
}

void moe_report_peer_lost(struct moe_rpc_stream *stream, uint64_t epoch, uint64_t slots)
{
    Moe__V1__PeerLost lost = MOE__V1__PEER_LOST__INIT;
    lost.epoch = epoch;
    lost.slots = slots;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_PEER_LOST;
    q.peer_lost = &lost;
    send_message(stream, &q);
}

void moe_report_drain_notice(struct moe_rpc_stream *stream, const char *reason)
{
    Moe__V1__DrainNotice notice = MOE__V1__DRAIN_NOTICE__INIT;
    notice.reason = (char *)reason;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_DRAIN_NOTICE;
    q.drain_notice = &notice;
    send_message(stream, &q);
}

void moe_report_leaving(struct moe_rpc_stream *stream, const char *reason)
{
    Moe__V1__Leaving leaving = MOE__V1__LEAVING__INIT;
    leaving.reason = (char *)reason;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_LEAVING;
    q.leaving = &leaving;
    send_message(stream, &q);
}

void moe_report_try_again(struct moe_rpc_stream *stream)
{
    Moe__V1__TryAgain again = MOE__V1__TRY_AGAIN__INIT;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_TRY_AGAIN;
    q.try_again = &again;
    send_message(stream, &q);
}

struct moe_status moe_report_blob(struct moe_rpc_stream *stream, uint64_t epoch, uint32_t round,
                                  const void *data, size_t length)
{
    Moe__V1__Blob blob = MOE__V1__BLOB__INIT;
    blob.epoch = epoch;
    blob.round = round;
    blob.data.data = (uint8_t *)data;
    blob.data.len = length;
    Moe__V1__SessionRequest q = MOE__V1__SESSION_REQUEST__INIT;
    q.body_case = MOE__V1__SESSION_REQUEST__BODY_BLOB;
    q.blob = &blob;
    return moe_control_send(stream, &q.base);
}
