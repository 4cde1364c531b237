/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's durable state: a log in the state directory, and next to it the record of the
 * model's digests, which is replaced as a whole. Every change of the log appends the whole
 * state (struct moe_membership_saved) with a checksum, and syncs before append returns. Opening it
 * never lowers an epoch: a bad end of the file is skipped, and other damage is refused.
 *
 * Log: header, then records. All numbers little-endian, checksums CRC-32C.
 *   header   8 bytes "moedlog\n", u32 format version, u32 checksum of the 12 bytes before
 *   record   u32 payload bytes, u32 kind, u32 checksum of payload, u32 checksum of the 12 bytes
 * before, payload */
#ifndef MOE_COORDINATOR_STORE_H
#define MOE_COORDINATOR_STORE_H

#include "coordinator/membership.h"

struct moe_store;

/* Opens or creates the store in `directory` (made, if its parent exists) and locks it.
 *
 * state  the last record; zeroes for a new store. An incomplete record at the end of the file is
 * dropped. Then the epoch rises above any that the record may have announced, and no view is in
 * force. Errors: MOE_ALREADY_EXISTS (another process has it open), MOE_DATA_LOSS (damage before the
 *         end of the file), MOE_FAILED_PRECONDITION/VERSION_MISMATCH (written by another release),
 *         MOE_UNAVAILABLE/IO. */
struct moe_status moe_store_open(const char *directory, struct moe_store **out,
                                 struct moe_membership_saved *state) MOE_CHECKED;

/* On success `state` is durable. If the log was removed, also with its directory, append creates it
 * again and logs a warning. After a failure the old content stays, and the next append starts a new
 * file. */
struct moe_status moe_store_append(struct moe_store *s,
                                   const struct moe_membership_saved *state) MOE_CHECKED;

/* The record of the model's digests (coordinator/weights.h), MOE_STORE_WEIGHTS. The caller frees
 * `*image`, which is NULL without a record. Errors: MOE_DATA_LOSS (too large),
 * MOE_UNAVAILABLE/IO, OUT_OF_MEMORY. */
#define MOE_STORE_WEIGHTS "model.digests"
struct moe_status moe_store_read_weights(struct moe_store *s, uint8_t **image,
                                         size_t *length) MOE_CHECKED;
/* Replaces the record, durably; at any moment the whole old or the whole new one exists. NULL
 * removes it. Errors: MOE_UNAVAILABLE/IO. */
struct moe_status moe_store_write_weights(struct moe_store *s, const uint8_t *image,
                                          size_t length) MOE_CHECKED;

/* NULL is ignored. */
void moe_store_close(struct moe_store *s);

/* ------------------------------------------------------------------ for tests */

/* Reads a whole file image; `*incomplete`: an incomplete record at its end was dropped. Errors as
 * moe_store_open. */
struct moe_status moe_store_decode(const uint8_t *image, size_t length,
                                   struct moe_membership_saved *state,
                                   bool *incomplete) MOE_CHECKED;
/* Above this size, a file with only the last record replaces the file. */
enum { MOE_STORE_COMPACT_BYTES = 65536 };

#endif
