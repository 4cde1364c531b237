/* SPDX-License-Identifier: Apache-2.0 */
/* The digest of a model's weights: a tree of SHA-256 over the bytes of the tensors in the files.
 *
 * It covers the tensors of MoE layers, as named and stored in the files. It does not depend on the
 * shards that hold them, on their places there, or on the slots that load them.
 *
 * The tree. || joins bytes, numbers are little-endian, texts end with a zero byte, H is SHA-256.
 * The first byte tells the kinds of nodes apart.
 *
 *   leaf    H(0 || bytes): MOE_DIGEST_LEAF_BYTES of a tensor; the last leaf has the rest
 *   tensor  H(1 || name || dtype || u32 rank || u64 shape[rank] || u64 first || u64 bytes ||
 *           leaves): bytes [first, first + bytes) of the tensor, which is all of it, or one
 * expert's share of a tensor with all experts (`first` counts from the start of the tensor) unit
 * H(2 || u32 layer || u32 expert || u32 count || tensors): the tensors of one expert, or with
 * expert = MOE_DIGEST_COMMON those of the layer that belong to no expert; ascending by name (byte
 * order), then by `first` layer   H(3 || u32 layer || u32 experts || common unit || units of
 * experts 0, 1, ...) model   H(4 || u32 layers || layers, ascending)
 *
 * A layer has the number that the model gives it. */
#ifndef MOE_MODEL_DIGEST_H
#define MOE_MODEL_DIGEST_H

#include "model/sha256.h"

enum {
    MOE_DIGEST_LEAF_BYTES = 64 << 10,
    MOE_DIGEST_UNIT_TENSORS = 24, /* largest number of tensors in a unit: a quantised matrix has up
                                     to 5 */
    MOE_DIGEST_RANK_MAX = 8,      /* of a tensor */
};

#define MOE_DIGEST_COMMON UINT32_MAX

struct moe_digest {
    uint8_t bytes[MOE_SHA256_BYTES];
};

/* All functions fail only with MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. Threads: any. */

static inline uint64_t moe_digest_leaf_count(uint64_t bytes)
{
    return bytes / MOE_DIGEST_LEAF_BYTES + (bytes % MOE_DIGEST_LEAF_BYTES != 0);
}

/* Leaves of `bytes` bytes that begin a leaf: leaves[moe_digest_leaf_count(bytes)]. */
struct moe_status moe_digest_leaves(const void *data, size_t bytes,
                                    struct moe_digest *leaves) MOE_CHECKED;

/* One leaf out of two pieces; `first` may be the whole leaf. */
struct moe_status moe_digest_leaf(const void *first, size_t first_bytes, const void *rest,
                                  size_t rest_bytes, struct moe_digest *leaf) MOE_CHECKED;

struct moe_digest_tensor {
    const char *name, *dtype; /* as in the header of the file */
    uint32_t rank;
    const uint64_t *shape; /* [rank] */
    uint64_t first, bytes;
};
struct moe_status moe_digest_tensor(const struct moe_digest_tensor *t,
                                    const struct moe_digest *leaves,
                                    struct moe_digest *out) MOE_CHECKED;

/* `tensors` in the order above. */
struct moe_status moe_digest_unit(uint32_t layer, uint32_t expert, const struct moe_digest *tensors,
                                  uint32_t count, struct moe_digest *out) MOE_CHECKED;

/* `units` [experts + 1]: the common one, then those of all experts, ascending. */
struct moe_status moe_digest_layer(uint32_t layer, uint32_t experts, const struct moe_digest *units,
                                   struct moe_digest *out) MOE_CHECKED;

/* `layers` [count], ascending. */
struct moe_status moe_digest_model(const struct moe_digest *layers, uint32_t count,
                                   struct moe_digest *out) MOE_CHECKED;

#endif
