/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the experts that a placement puts on this slot resident: reads them through the model room,
 * hands them to the backend, and keeps the layers until another placement comes. Only rows of own
 * experts are read; what every slot needs (router, shared experts) is read by all.
 *
 * Loading is refused before anything is taken when the memory cannot suffice. */
#ifndef MOE_WORKER_LOADER_H
#define MOE_WORKER_LOADER_H

#include "group/group.h"
#include "model/model.h"

struct moe_loader;

/* All borrowed; they outlive the loader. */
struct moe_status moe_loader_create(const struct moe_backend *backend, struct moe_device *device,
                                    const struct moe_model *model,
                                    struct moe_loader **out) MOE_CHECKED;
/* No step may use the layers any more. NULL is ignored. */
void moe_loader_destroy(struct moe_loader *l);

/* The model's MoE layers, ascending; the arrays live as long as the loader. Entries of `layers` are
 * NULL until they are loaded, and change only inside moe_loader_load. */
size_t moe_loader_layer_count(const struct moe_loader *l);
const struct moe_layer_spec *const *moe_loader_specs(const struct moe_loader *l);
struct moe_layer *const *moe_loader_layers(const struct moe_loader *l);

/* The layers are those of this assignment already: same seat, same experts. */
bool moe_loader_holds(const struct moe_loader *l, const struct moe_group_assignment *a);
/* Loads unless it holds. No view may be in force if it does not hold. On failure no layer is left.
 * Errors: MOE_INVALID_ARGUMENT (the assignment does not fit the model), OUT_OF_MEMORY, what the
 * model room says, MOE_ABORTED after moe_loader_cancel. */
struct moe_status moe_loader_load(struct moe_loader *l,
                                  const struct moe_group_assignment *a) MOE_CHECKED;
/* The same layers again, from the files, as if nothing had changed them. Something must be loaded,
 * no view may be in force, and nothing may hold on to the layers. Errors as for moe_loader_load. */
struct moe_status moe_loader_reload(struct moe_loader *l) MOE_CHECKED;
/* Whether `bytes` more would fit. Errors: OUT_OF_MEMORY, which says that `what` needs them. */
struct moe_status moe_loader_check_room(const struct moe_loader *l, uint64_t bytes,
                                        const char *what) MOE_CHECKED;
/* Who holds what, [layer_count]; NULL while nothing is loaded. Changes with the layers. */
const struct moe_placement *moe_loader_placements(const struct moe_loader *l);
/* [any thread] Loading now and later ends soon with MOE_ABORTED. */
void moe_loader_cancel(struct moe_loader *l);

/* Hash of what is loaded, version included, as the coordinator makes it: FNV-1a over slots, layers,
 * lists and version, each as 32 bits little-endian. */
uint64_t moe_loader_placement_hash(const struct moe_loader *l);
/* [any thread] Bytes read so far, and to read in all. */
void moe_loader_progress(const struct moe_loader *l, uint64_t *loaded, uint64_t *total);

#endif
