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

/* All borrowed; they outlive the loader. `events`: copied; NULL for the default model. Errors:
 * UNSUPPORTED, for a layer that the backend does not compute; OUT_OF_MEMORY. */
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

/* True if the layers, or those that were fetched, are of this assignment: same slot, same version,
 * same experts. */
bool moe_loader_holds(struct moe_loader *l, const struct moe_group_assignment *a);
/* The same; then frees what was fetched for another one, if the assignment has no spare experts. */
bool moe_loader_accept(struct moe_loader *l, const struct moe_group_assignment *a);
/* Loads, unless moe_loader_accept. Frees what was fetched and is not of this assignment, if that
 * has no spare experts. No step may use layers that are replaced. On failure no layer is left.
 * Errors: MOE_INVALID_ARGUMENT (the assignment does not fit the model), OUT_OF_MEMORY, those of the
 * model room, MOE_ABORTED after moe_loader_cancel. */
struct moe_status moe_loader_load(struct moe_loader *l,
                                  const struct moe_group_assignment *a) MOE_CHECKED;
/* Loads the same layers from the files again, which undoes all training. Layers must be loaded, no
 * view may be in force, and no trainer may use the layers. Errors as for moe_loader_load; and
 * MOE_DATA_LOSS/MODEL_MISMATCH with the name of a tensor that has other bytes than in the first
 * load. */
struct moe_status moe_loader_reload(struct moe_loader *l) MOE_CHECKED;
/* Checks that `bytes` more fit into memory. Errors: OUT_OF_MEMORY, with `what` needs them in the
 * text. */
struct moe_status moe_loader_check_room(const struct moe_loader *l, uint64_t bytes,
                                        const char *what) MOE_CHECKED;
/* Points to the placements of the loaded layers, [layer_count]; to NULL while none are. They change
 * with the layers, and so does where they are. */
struct moe_placement *const *moe_loader_placements(const struct moe_loader *l);
/* [any thread] The present load, and every later one, ends soon with MOE_ABORTED. */
void moe_loader_cancel(struct moe_loader *l);

/* ------------------------------------------------------------------ another placement
 *
 * Other experts of the same model, while steps go on: for a move, or for the next view. Fetch, drop
 * and settle: one thread at a time, which may be another one than that of loads; a load waits for
 * it. What they read and free is read and freed by threads of low priority: steps come first. */

/* True if the backend can change the placement of a view: a layer shares the weights of experts
 * that stay with its successor. Where it cannot, a fetch loads all experts of the slot. */
bool moe_loader_moves(const struct moe_loader *l);
/* Loads the experts that this slot lacks for the placement, next to those in use, unless
 * moe_loader_holds. What was fetched before is freed. `share`: percent of the time in which it
 * works, 1..100, so that steps have the rest. `progress`: bytes read, at most once a second; or
 * NULL. An assignment with `keep` is fetched only while moe_loader_allow_next says so. Errors:
 * MOE_FAILED_PRECONDITION/UNSUPPORTED (nothing is loaded, or for another slot), OUT_OF_MEMORY
 * (before anything is read), MOE_DATA_LOSS/MODEL_MISMATCH (the files have changed), MOE_ABORTED, as
 * for moe_loader_load. Nothing is fetched then. */
struct moe_status moe_loader_fetch(struct moe_loader *l, const struct moe_group_assignment *a,
                                   uint64_t order, uint32_t share,
                                   void (*progress)(void *ctx, uint64_t read_bytes),
                                   void *ctx) MOE_CHECKED;
/* [any thread] For `order` of a fetch: it ends if moe_loader_cancel_fetch comes after this call. */
uint64_t moe_loader_order_fetch(const struct moe_loader *l);
/* [any thread] Whether assignments with `keep` may be fetched; at first not. False ends a running
 * fetch of one. */
void moe_loader_allow_next(struct moe_loader *l, bool allowed);
/* [any thread] A fetch that was ordered ends soon, also one that has not begun. */
void moe_loader_cancel_fetch(struct moe_loader *l);
/* Frees what was fetched, unless it is of version `except`; 0 = any. */
void moe_loader_drop_fetched(struct moe_loader *l, uint32_t except);
/* [engine's thread, between two steps; or where no step runs] Takes what was fetched into use.
 * Layers in use before stay until settle. Nothing if `version` is in use. Errors:
 * MOE_FAILED_PRECONDITION/VERSION_MISMATCH (it was not fetched). */
struct moe_status moe_loader_swap(struct moe_loader *l, uint32_t version) MOE_CHECKED;
/* No step uses the layers that the last swap replaced: frees them. */
void moe_loader_settle(struct moe_loader *l);
/* The same, in two seconds, by a thread. A view that begins touches new memory, and threads that
 * free much meanwhile would delay it. The thread of loads. */
void moe_loader_settle_later(struct moe_loader *l);
/* No view is in force. If what was fetched is of a placement with this hash, takes it into use;
 * frees it otherwise. Layers in use before stay until settle. */
void moe_loader_adopt(struct moe_loader *l, uint64_t placement_hash);
/* [any thread] Version of the placement in use; 0 = nothing is loaded. */
uint32_t moe_loader_version(struct moe_loader *l);
/* [any thread] Of the placement that was fetched; 0 = none. */
uint32_t moe_loader_fetched_version(struct moe_loader *l);

/* ------------------------------------------------------------------ digests, progress */

/* Hash of the loaded placement with its version, equal to the coordinator's: FNV-1a over slots,
 * layers, lists and version, each as 32 bits little-endian. */
uint64_t moe_loader_placement_hash(struct moe_loader *l);
/* Compares the digests of what was loaded or fetched (model/digest.h) with others: of every layer
 * the common unit, and those of experts that this slot has or had. See moe_digest_table_differs. */
bool moe_loader_differs(struct moe_loader *l, const struct moe_digest_table *want,
                        struct moe_digest_difference *out);
/* Passes the digests to `add`, in parts of at most MOE_GROUP_PART_BYTES, for the coordinator.
 * Errors: those of `add`. */
struct moe_status moe_loader_pass_digests(struct moe_loader *l, moe_group_part_fn add,
                                          void *add_ctx) MOE_CHECKED;
/* [any thread] Bytes read so far, and in all. */
void moe_loader_progress(const struct moe_loader *l, uint64_t *loaded, uint64_t *total);

#endif
