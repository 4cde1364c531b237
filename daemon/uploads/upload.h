/* SPDX-License-Identifier: Apache-2.0 */
/* What the clients of a connection send: which message each stream has announced, and how much has
 * come in. The listener sees every byte before the core does and tells it here; a call asks here
 * before it reads. Pure: no I/O; time comes in as an argument.
 *
 * The listener names the stream to the call by a header field that it appends to the client's. The
 * field's name is a secret of the process, so that no client can write one. */
#ifndef MOE_UPLOADS_UPLOAD_H
#define MOE_UPLOADS_UPLOAD_H

#include "uploads/budget.h"

#include <stddef.h>

enum {
    MOE_RPC_UPLOAD_FIELD_BYTES = 96,
    MOE_RPC_UPLOAD_NAME_BYTES = 40,
    MOE_RPC_UPLOAD_SMALL = 64, /* a message of fewer bytes is small */
};

struct moe_rpc_uploads; /* of one connection */
struct moe_rpc_upload;  /* of one stream */

/* Chooses the name of the header field; the first call counts. Before all else here. Errors:
 * MOE_UNAVAILABLE/IO (the system has no random numbers). */
struct moe_status moe_rpc_upload_prepare(void) MOE_CHECKED;

/* ------------------------------------------------------------------ for the listener
 *
 * One thread at a time for one connection. */

/* A connection of `who` begins; `connection` is for the budget's `end`. Errors:
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_rpc_uploads_open(struct moe_rpc_budget *b, const struct moe_rpc_identity *who,
                                       void *connection, struct moe_rpc_uploads **out) MOE_CHECKED;
/* The connection is over. Its streams end; calls keep theirs until they release them. */
void moe_rpc_uploads_close(struct moe_rpc_uploads *u);
/* After close, or when no stream has begun. No call looks for its upload any more. */
void moe_rpc_uploads_free(struct moe_rpc_uploads *u);
/* The first HEADERS of a stream. Writes the field to append to the header block, in HPACK as a
 * literal that needs no table: `field` holds MOE_RPC_UPLOAD_FIELD_BYTES. Returns its length; 0 =
 * out of memory. */
size_t moe_rpc_upload_begin(struct moe_rpc_uploads *u, uint32_t stream, uint8_t *field);
/* Whether another stream may begin: the connection has fewer than `most` open ones, and the server
 * has one left. If it has none, the owner with the most streams loses its connection with the most,
 * unless this owner would have as many. An owner with fewer than MOE_RPC_STREAMS_LEAST may always.
 */
bool moe_rpc_uploads_admit(struct moe_rpc_uploads *u, uint32_t most);
/* Bytes of DATA frames without padding, in any pieces, before they go to the core. Returns how many
 * small messages begin in them. Streams that have not begun are ignored, here and below. */
uint32_t moe_rpc_upload_data(struct moe_rpc_uploads *u, uint32_t stream, const uint8_t *bytes,
                             size_t length, uint64_t now_ns);
/* The client has ended its side (END_STREAM). */
void moe_rpc_upload_half_close(struct moe_rpc_uploads *u, uint32_t stream);
/* The stream is over: RST_STREAM of either side, or END_STREAM of the server. */
void moe_rpc_upload_end(struct moe_rpc_uploads *u, uint32_t stream);

/* ------------------------------------------------------------------ for calls */

/* The name of the header field; a string. */
const char *moe_rpc_upload_field_name(void);
/* The upload that a field's value names, with a reference for the call: `waiter`. A message of it
 * has at most `largest` bytes. NULL if it is over or `value` names none. */
struct moe_rpc_upload *moe_rpc_upload_find(struct moe_rpc_uploads *u, const uint8_t *value,
                                           size_t length, void *waiter, uint64_t largest);
/* The call is over: gives the upload, and what is charged for it, back. */
void moe_rpc_upload_release(struct moe_rpc_upload *up);

/* The call wants its next message. *now: it may read it, or the end; this holds until
 * moe_rpc_upload_delivered. Else the budget's waiters answer later.
 * Errors: MOE_RESOURCE_EXHAUSTED with TOO_LARGE, or with QUEUE_FULL and a retry hint that grows
 * with the line. */
struct moe_status moe_rpc_upload_next(struct moe_rpc_upload *up, bool *now) MOE_CHECKED;
/* The call does not want it any more. False if it may be read already, and so `read` was or will be
 * called. */
bool moe_rpc_upload_forget(struct moe_rpc_upload *up);
/* True if a message was announced. */
bool moe_rpc_upload_has_begun(struct moe_rpc_upload *up);
/* The handler has the message, of `length` bytes. */
void moe_rpc_upload_delivered(struct moe_rpc_upload *up, uint64_t length);

#endif
