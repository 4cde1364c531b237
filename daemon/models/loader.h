/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the experts of this slot's placement: reads them through the model room, hands them to the
 * backend, and keeps the layers until another placement comes. Reads only rows of this slot's
 * experts, and the router and shared experts, which every slot needs. Computes digests of all that
 * it reads, by a few separate threads and those of the backend that read.
 *
 * If memory cannot suffice, loading is refused before it allocates any. */
#ifndef MOE_MODELS_LOADER_H
#define MOE_MODELS_LOADER_H

#include "group/group.h"
#include "model/model.h"

struct moe_loader;

/* Of the loads of an added model; those of the default model also tell the service manager. */
struct moe_loader_events {
    const char *name; /* in the log; borrowed */
    /* On the loading thread, at most once a second and at the end. */
    void (*progress)(void *ctx, uint64_t loaded_bytes, uint64_t total_bytes);
    void *ctx;
};

/* All borrowed; they outlive the loader. `events`: copied; NULL for the default model. */
struct moe_status moe_loader_create(const struct moe_backend *backend, struct moe_device *device,
                                    const struct moe_model *model,
                                    const struct moe_loader_events *events,
                                    struct moe_loader **out) MOE_CHECKED;
/* No step may use the layers. NULL is ignored. */
void moe_loader_destroy(struct moe_loader *l);

/* The model's MoE layers, ascending; the arrays live as long as the loader. Entries of `layers` are
 * NULL until they are loaded, and change only inside moe_loader_load. */
size_t moe_loader_layer_count(const struct moe_loader *l);
const struct moe_layer_spec *const *moe_loader_specs(const struct moe_loader *l);
struct moe_layer *const *moe_loader_layers(const struct moe_loader *l);

/* True if it has the layers of this assignment, also as the next ones: same slot, same experts. */
bool moe_loader_holds(const struct moe_loader *l, const struct moe_group_assignment *a);
/* Loads, unless moe_loader_holds. Frees the next layers, unless it needs them. No step may use
 * layers that are replaced. On failure no layer is left. Errors: MOE_INVALID_ARGUMENT (the
 * assignment does not fit the model), OUT_OF_MEMORY, those of the model room, MOE_ABORTED after
 * moe_loader_cancel. */
struct moe_status moe_loader_load(struct moe_loader *l,
                                  const struct moe_group_assignment *a) MOE_CHECKED;
/* Loads the next layers, in addition to the present ones, which steps may use meanwhile; so it does
 * it with a low priority. On failure
 * the present ones stay. Errors also: MOE_ABORTED while it is not allowed. */
struct moe_status moe_loader_load_next(struct moe_loader *l,
                                       const struct moe_group_assignment *a) MOE_CHECKED;
/* If the placement of the next layers has this hash, they become the present ones, and these the
 * next ones. No step may use layers. */
void moe_loader_take_next(struct moe_loader *l, uint64_t placement_hash);
/* Frees the next layers: two seconds later, on a thread with a low priority. */
void moe_loader_drop_next(struct moe_loader *l);
/* [any thread] Whether the next layers may be loaded; at first not. */
void moe_loader_allow_next(struct moe_loader *l, bool allowed);
/* Loads the same layers from the files again, which undoes all training. Layers must be loaded, no
 * view may be in force, and no trainer may use the layers. Errors as for moe_loader_load; and
 * MOE_DATA_LOSS/MODEL_MISMATCH with the name of a tensor that has other bytes than in the first
 * load. */
struct moe_status moe_loader_reload(struct moe_loader *l) MOE_CHECKED;
/* Checks that `bytes` more fit into memory. Errors: OUT_OF_MEMORY, with `what` needs them in the
 * text. */
struct moe_status moe_loader_check_room(const struct moe_loader *l, uint64_t bytes,
                                        const char *what) MOE_CHECKED;
/* Placements of the loaded layers, [layer_count]; NULL while none are. Change with the layers. */
const struct moe_placement *moe_loader_placements(const struct moe_loader *l);
/* [any thread] The present load, and every later one, ends soon with MOE_ABORTED. */
void moe_loader_cancel(struct moe_loader *l);

/* Hash of the loaded placement with its version, equal to the coordinator's: FNV-1a over slots,
 * layers, lists and version, each as 32 bits little-endian. */
uint64_t moe_loader_placement_hash(const struct moe_loader *l);
/* Digests of what the last assignment has loaded (model/digest.h): of every layer the common unit
 * and those of this slot's experts. Empty while nothing is loaded; changes inside loads only. */
const struct moe_digest_table *moe_loader_digests(const struct moe_loader *l);
/* Passes the same to `add`, in parts of at most MOE_GROUP_PART_BYTES, for the coordinator. Errors:
 * those of `add`. */
struct moe_status moe_loader_pass_digests(const struct moe_loader *l, moe_group_part_fn add,
                                          void *add_ctx) MOE_CHECKED;
/* [any thread] Bytes read so far, and in all. */
void moe_loader_progress(const struct moe_loader *l, uint64_t *loaded, uint64_t *total);

#endif
