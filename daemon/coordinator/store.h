/* The coordinator's durable memory: one file in the state directory to which the whole state
 * (struct moe_membership_saved) is appended at every change, checksummed and synced before append
 * returns. Opening it never makes an epoch fall: what cannot be trusted is skipped over, or
 * refused.
 *
 * File: header, then records. All numbers little-endian, checksums CRC-32C.
 *   header   8 bytes "moedlog\n", u32 format version, u32 checksum of the 12 bytes before
 *   record   u32 payload bytes, u32 kind, u32 checksum of payload, u32 checksum of the 12 bytes
 * before, payload */
#ifndef MOE_COORDINATOR_STORE_H
#define MOE_COORDINATOR_STORE_H

#include "coordinator/membership.h"

struct moe_store;

/* Opens or creates the store in `directory` (made, if its parent exists) and locks it.
 *
 * state  the last record; zeroes for a new store. Where the file ends in a torn record, that one is
 *        dropped, the epoch is raised past anything it may have announced, and no view is in force.
 * Errors: MOE_ALREADY_EXISTS (another process has it open), MOE_DATA_LOSS (damage that is no torn
 *         end of file), MOE_FAILED_PRECONDITION/VERSION_MISMATCH (written by another release),
 *         MOE_UNAVAILABLE/IO. */
struct moe_status moe_store_open(const char *directory, struct moe_store **out,
                                 struct moe_membership_saved *state) MOE_CHECKED;

/* Durable when it returns success. After a failure the file still holds what it held before, and
 * the next append starts with a fresh file. */
struct moe_status moe_store_append(struct moe_store *s,
                                   const struct moe_membership_saved *state) MOE_CHECKED;

/* NULL is ignored. */
void moe_store_close(struct moe_store *s);

/* ------------------------------------------------------------------ for tests */

/* Reads a whole file image; `*torn`: its end was dropped. Errors as moe_store_open. */
struct moe_status moe_store_decode(const uint8_t *image, size_t length,
                                   struct moe_membership_saved *state, bool *torn) MOE_CHECKED;
/* Size over which the file is replaced by one that holds the last record only. */
enum { MOE_STORE_COMPACT_BYTES = 65536 };

#endif
