/* SPDX-License-Identifier: Apache-2.0 */
/* The digests of a model's units, as far as they are known: what one slot has loaded, or what a
 * group has agreed on. Pure: no I/O, no clock; one thread at a time.
 *
 * Next to the digest of a unit stands a tag for each of its tensors, so that a difference has
 * the name of a tensor. Digests decide; tags only choose the name.
 *
 * A part is the packed form, for messages and files: units of one layer.
 *   u32 layer, u32 experts,
 *   u8 count of common names, u8 count of expert names, then each name: u8 length, bytes
 *   u32 units, then each: u32 expert (MOE_DIGEST_COMMON: the common one), 32 bytes digest,
 *   8 bytes for each tensor: its tag
 * All numbers little-endian. A name of an expert's tensor has '*' for the expert, unless the tensor
 * has all experts. */
#ifndef MOE_MODEL_DIGEST_TABLE_H
#define MOE_MODEL_DIGEST_TABLE_H

#include "model/digest.h"

enum {
    MOE_DIGEST_TAG_BYTES = 8,
    MOE_DIGEST_NAME_BYTES = 192,       /* of a tensor, with the final zero */
    MOE_DIGEST_PART_MIN_BYTES = 16384, /* a buffer of this size holds at least one unit */
};

struct moe_digest_names {
    uint32_t count; /* at most MOE_DIGEST_UNIT_TENSORS */
    char of[MOE_DIGEST_UNIT_TENSORS][MOE_DIGEST_NAME_BYTES];
};

struct moe_digest_unit {
    struct moe_digest digest;
    uint8_t tags[MOE_DIGEST_UNIT_TENSORS][MOE_DIGEST_TAG_BYTES]; /* first bytes of the tensors'
                                                                    digests, in their order */
};

struct moe_digest_table;

struct moe_status moe_digest_table_create(struct moe_digest_table **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_digest_table_destroy(struct moe_digest_table *t);
/* Forgets all layers. */
void moe_digest_table_clear(struct moe_digest_table *t);
bool moe_digest_table_is_empty(const struct moe_digest_table *t);

/* Adds a layer without units; nothing if the table has it with the same names.
 * Errors: MOE_INVALID_ARGUMENT/MALFORMED (impossible numbers, or the table has the layer with other
 * ones), OUT_OF_MEMORY. */
struct moe_status moe_digest_table_add_layer(struct moe_digest_table *t, uint32_t layer,
                                             uint32_t experts,
                                             const struct moe_digest_names *common,
                                             const struct moe_digest_names *expert) MOE_CHECKED;
/* Sets or replaces the unit of `expert` (or MOE_DIGEST_COMMON) of a layer that was added. */
void moe_digest_table_set(struct moe_digest_table *t, uint32_t layer, uint32_t expert,
                          const struct moe_digest_unit *unit);
/* NULL while it is not known. */
const struct moe_digest_unit *moe_digest_table_get(const struct moe_digest_table *t, uint32_t layer,
                                                   uint32_t expert);
/* Adds all layers and units of `from`; those of `t` are replaced. Errors as for add_layer; `t` is
 * then the union of a part. */
struct moe_status moe_digest_table_merge(struct moe_digest_table *t,
                                         const struct moe_digest_table *from) MOE_CHECKED;

/* Where two tables differ. */
struct moe_digest_difference {
    uint32_t layer, expert;                /* MOE_DIGEST_COMMON: no expert's */
    char name[MOE_DIGEST_NAME_BYTES + 24]; /* "model.layers.3.mlp.experts.17.down_proj.weight", or
                                          "model.layers.3.mlp.experts.down_proj, expert 17" */
};
/* Compares the units that both tables know. The first difference is that of the lowest layer, there
 * of the common unit before experts, ascending. A layer that has other names or another number of
 * experts differs in its first name. False if nothing differs. */
bool moe_digest_table_differs(const struct moe_digest_table *a, const struct moe_digest_table *b,
                              struct moe_digest_difference *out);
/* True if the table knows all units of its layers, and has any. */
bool moe_digest_table_is_complete(const struct moe_digest_table *t);
/* The digest of the model; the table is complete. Errors: OUT_OF_MEMORY. */
struct moe_status moe_digest_table_model(const struct moe_digest_table *t,
                                         struct moe_digest *out) MOE_CHECKED;

/* Walk over the known units, for moe_digest_table_pack; zeroed at the start. */
struct moe_digest_cursor {
    size_t layer;  /* index in the table */
    uint32_t unit; /* 0: the common one, then experts */
};
/* Packs the next units, as many as fit, into a part of at most `capacity` bytes
 * (>= MOE_DIGEST_PART_MIN_BYTES). Returns its length; 0 when nothing is left. */
size_t moe_digest_table_pack(const struct moe_digest_table *t, struct moe_digest_cursor *at,
                             uint8_t *part, size_t capacity);
/* The layer of a part from outside, and its number of experts. Errors:
 * MOE_INVALID_ARGUMENT/MALFORMED (the part is too short). */
struct moe_status moe_digest_part_layer(const uint8_t *part, size_t length, uint32_t *layer,
                                        uint32_t *experts) MOE_CHECKED;
/* Adds the units of a part from outside. Errors: MOE_INVALID_ARGUMENT/MALFORMED, as for add_layer,
 * OUT_OF_MEMORY; some units may have been added then. */
struct moe_status moe_digest_table_unpack(struct moe_digest_table *t, const uint8_t *part,
                                          size_t length) MOE_CHECKED;

#endif
