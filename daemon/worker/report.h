/* What a worker says to the coordinator: one function per message of moe.v1.SessionRequest.
 *
 * A failed send is not reported where the stream's end, which is an event of its own, says it all;
 * a `stream` of NULL (not connected) is a message not sent. */
#ifndef MOE_WORKER_REPORT_H
#define MOE_WORKER_REPORT_H

#include "worker/group.h"

void moe_report_register(struct moe_rpc_stream *stream, const struct moe_group_identity *id,
                         uint32_t wanted_slot_plus_one);
void moe_report_heartbeat(struct moe_rpc_stream *stream, uint64_t epoch,
                          const struct moe_group_numbers *numbers);
void moe_report_loaded(struct moe_rpc_stream *stream, uint32_t version,
                       const struct moe_status *status);
void moe_report_ready(struct moe_rpc_stream *stream, uint64_t epoch,
                      const struct moe_status *status);
void moe_report_peer_lost(struct moe_rpc_stream *stream, uint64_t epoch, uint64_t slots);
void moe_report_drain_notice(struct moe_rpc_stream *stream, const char *reason);
void moe_report_leaving(struct moe_rpc_stream *stream, const char *reason);
void moe_report_try_again(struct moe_rpc_stream *stream);
/* `stream` is not NULL: the all-gather must know whether its blob is on the way. */
struct moe_status moe_report_blob(struct moe_rpc_stream *stream, uint64_t epoch, uint32_t round,
                                  const void *data, size_t length) MOE_CHECKED;

#endif
