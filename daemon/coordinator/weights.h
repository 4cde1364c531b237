/* SPDX-License-Identifier: Apache-2.0 */
/* Which bytes the weights of the group's model have: compares the digests that slots report
 * (model/digest_table.h) with each other and with the record of the group. Pure: no I/O, no clock;
 * one thread at a time.
 *
 * The record has the digests of a whole model. It begins when all slots have loaded and agree. From
 * then on it decides: a slot with other bytes is refused. The record belongs to a model fingerprint
 * (configuration, names and shapes); the slots of a model with another one begin a new record.
 * Digests are of the model's files, which training does not change.
 *
 * Until the record begins, one table for each slot is kept, with at most MOE_MAX_LAYERS *
 * MOE_MAX_EXPERTS units of 97 bytes, and only of layers of the placement. */
#ifndef MOE_COORDINATOR_WEIGHTS_H
#define MOE_COORDINATOR_WEIGHTS_H

#include "coordinator/placement.h"
#include "model/digest_table.h"

enum { MOE_WEIGHTS_IMAGE_MAX_BYTES = 64 << 20 }; /* of an encoded record */

struct moe_weights;

/* `remedy`: what an operator does who wants other weights than the record; borrowed. */
struct moe_status moe_weights_create(uint32_t slots, const char *remedy,
                                     struct moe_weights **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_weights_destroy(struct moe_weights *w);

/* Forgets what processes have reported that have no slot any more. incarnations[s] (of as many as
 * create got) is the process in slot s, 0 = none. */
void moe_weights_keep(struct moe_weights *w, const uint64_t *incarnations);

/* A part that the process in `slot` sent. Errors: MOE_INVALID_ARGUMENT/MALFORMED (also: a layer
 * that the placement does not have), OUT_OF_MEMORY. */
struct moe_status moe_weights_add_part(struct moe_weights *w, uint32_t slot, uint64_t incarnation,
                                       const struct moe_placement *p, const uint8_t *part,
                                       size_t length) MOE_CHECKED;

/* A process that was checked has loaded more, for the placement `p`: compares it with the record.
 * What it has reported since is forgotten, and it stays checked. Errors: MOE_FAILED_PRECONDITION/
 * MODEL_MISMATCH (it differs, digests are missing, or there is no record). */
struct moe_status moe_weights_check_more(struct moe_weights *w, uint32_t slot, uint64_t incarnation,
                                         const struct moe_placement *p) MOE_CHECKED;
/* The process in `slot` has loaded its share of the placement.
 *
 * begun   the last slot was missing for a record, and the record has begun
 * Errors: MOE_FAILED_PRECONDITION/MODEL_MISMATCH (other bytes than the record, or without one than
 * another slot; the text names the first tensor that differs. Or digests are missing),
 * OUT_OF_MEMORY. */
struct moe_status moe_weights_check(struct moe_weights *w, uint32_t slot, uint64_t incarnation,
                                    const char *fingerprint, const struct moe_placement *p,
                                    bool *begun) MOE_CHECKED;

/* Digest of the recorded model in hexadecimal; "" if there is no record, or it is of another
 * fingerprint. NULL: of any fingerprint. */
const char *moe_weights_digest(const struct moe_weights *w, const char *fingerprint);

/* Forgets the record. */
void moe_weights_forget(struct moe_weights *w);

/* The record as bytes of a file; the caller frees `*image`. There is a record. Errors:
 * OUT_OF_MEMORY. */
struct moe_status moe_weights_encode(const struct moe_weights *w, uint8_t **image,
                                     size_t *length) MOE_CHECKED;
/* Reads such a record. Errors: MOE_DATA_LOSS/MALFORMED, MOE_FAILED_PRECONDITION/VERSION_MISMATCH
 * (of a newer release), OUT_OF_MEMORY; there is no record then. */
struct moe_status moe_weights_decode(struct moe_weights *w, const uint8_t *image,
                                     size_t length) MOE_CHECKED;

#endif
