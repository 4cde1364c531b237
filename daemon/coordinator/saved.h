/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's durable state as a record of a store (store/store.h): the whole of struct
 * moe_membership_saved and struct moe_added_saved. Records of a model's digests are images of the
 * store: 0 is the default model's, others have the number of an added model; placements follow. All
 * numbers little-endian. Reading never lowers an epoch. */
#ifndef MOE_COORDINATOR_SAVED_H
#define MOE_COORDINATOR_SAVED_H

#include "coordinator/models.h"
#include "store/file.h"

extern const struct moe_store_format moe_saved_format;

/* Opens or creates the store in `directory`.
 *
 * state, models  the last record; zeroes for a new store. An incomplete record at the end of the
 * log is dropped. Then the epoch rises above any that the record may have announced, and no view
 * is in force. Errors: those of moe_store_file_open and append. */
struct moe_status moe_saved_open(const char *directory, struct moe_store **out,
                                 struct moe_membership_saved *state,
                                 struct moe_added_saved *models) MOE_CHECKED;

/* The same for a store that is open, and changes nothing there. Frees the record in `found`.
 * `*stale`: append what was read before anything is announced, as the store had none, in an older
 * format, or with an incomplete end. Errors: MOE_DATA_LOSS. */
struct moe_status moe_saved_read(const struct moe_store *s, struct moe_store_found *found,
                                 struct moe_membership_saved *state, struct moe_added_saved *models,
                                 bool *stale) MOE_CHECKED;

/* On success `state` and `models` are durable. Errors: those of moe_store_append. */
struct moe_status moe_saved_append(struct moe_store *s, const struct moe_membership_saved *state,
                                   const struct moe_added_saved *models) MOE_CHECKED;

/* The version for a move of experts: above all that workers may know, and with another image than
 * the present placement. */
uint32_t moe_saved_next_version(const struct moe_membership_saved *state);

/* A placement that is not linear is an image of the store: odd and even versions have one each, so
 * that the placement of the last record is there whatever happens to a write. Write it before the
 * record that has its version. Errors: those of moe_store_write, OUT_OF_MEMORY. */
struct moe_status moe_saved_write_placement(struct moe_store *s,
                                            const struct moe_placement *p) MOE_CHECKED;
/* The placement of `state`; the caller destroys it. NULL: it is a linear one. Errors: those of
 * moe_store_read, MOE_DATA_LOSS, OUT_OF_MEMORY. */
struct moe_status moe_saved_read_placement(struct moe_store *s,
                                           const struct moe_membership_saved *state,
                                           struct moe_placement **out) MOE_CHECKED;

/* Reads a whole image of a log; `*incomplete`: an incomplete record at its end was dropped. Errors:
 * those of moe_records_read, MOE_DATA_LOSS. */
struct moe_status moe_saved_decode(const uint8_t *image, size_t length,
                                   struct moe_membership_saved *state,
                                   struct moe_added_saved *models, bool *incomplete) MOE_CHECKED;

#endif
