/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of a worker to the coordinator: one function per message of moe.v1.SessionRequest.
 *
 * A failed send is only logged, because the stream's end is a separate event. If `stream` is NULL
 * (not connected), nothing is sent. */
#ifndef MOE_GROUP_REPORT_H
#define MOE_GROUP_REPORT_H

#include "group/group.h"
#include "moe/v1/types.pb-c.h"

struct moe_rpc_stream;

/* Fills in a layer's description. */
void moe_report_layer(const struct moe_layer_spec *spec, Moe__V1__LayerInfo *out);

/* moe.v1.KeptSession; epoch 0 = none */
struct moe_group_session {
    uint64_t epoch, together;
    uint32_t max_tokens;
};

void moe_report_register(struct moe_rpc_stream *stream, const struct moe_group_identity *id,
                         uint32_t wanted_slot_plus_one, const struct moe_group_session *session);
/* `round_trip_ns`: 0 = not known. */
void moe_report_heartbeat(struct moe_rpc_stream *stream, uint64_t epoch, uint64_t sequence,
                          uint64_t round_trip_ns, const struct moe_group_numbers *numbers);
/* `part`: at most MOE_GROUP_PART_BYTES. */
void moe_report_digests(struct moe_rpc_stream *stream, const uint8_t *part, size_t length);
/* These three only pack: `add` gets each message of the report, digests before it. */
struct moe_status moe_report_pack_model(const struct moe_group_model_report *r,
                                        moe_group_part_fn add, void *ctx) MOE_CHECKED;
struct moe_status moe_report_pack_rows(uint64_t order, uint32_t layer, const uint64_t *rows,
                                       size_t count, moe_group_part_fn add, void *ctx) MOE_CHECKED;
struct moe_status moe_report_pack_progress(uint32_t model, uint64_t loaded_bytes,
                                           uint64_t total_bytes, moe_group_part_fn add,
                                           void *ctx) MOE_CHECKED;
void moe_report_loaded(struct moe_rpc_stream *stream, uint32_t version, uint64_t order,
                       const struct moe_status *status);
void moe_report_checkpoint_read(struct moe_rpc_stream *stream, uint64_t order,
                                const struct moe_status *status);
void moe_report_ready(struct moe_rpc_stream *stream, uint64_t epoch, uint64_t together,
                      const struct moe_status *status);
void moe_report_peer_lost(struct moe_rpc_stream *stream, uint64_t epoch, uint64_t slots);
void moe_report_drain_notice(struct moe_rpc_stream *stream, const char *reason);
void moe_report_leaving(struct moe_rpc_stream *stream, const char *reason);
void moe_report_try_again(struct moe_rpc_stream *stream);
/* `stream` is not NULL. Returns the error, because the all-gather must not wait after a failure. */
struct moe_status moe_report_blob(struct moe_rpc_stream *stream, uint64_t epoch, uint32_t round,
                                  const void *data, size_t length) MOE_CHECKED;

#endif
