/* SPDX-License-Identifier: Apache-2.0 */
/* Common parts of Forward and Backward requests: memory for received tensors, the times of stages,
 * and the checks of layer, routing and worker. */
#ifndef MOE_SERVICE_REQUEST_CHECKS_H
#define MOE_SERVICE_REQUEST_CHECKS_H

#include "moe/v1/types.pb-c.h"
#include "service/info.h"
#include "service/staging.h"

/* Takes memory for a tensor of `length` bytes, a client's figure: *buffer, and the address of its
 * data. Takes none for 0 bytes. Errors: MOE_INVALID_ARGUMENT/TOO_LARGE, those of moe_staging_take.
 */
struct moe_status moe_request_take(const struct moe_service_info *info, struct moe_staging *staging,
                                   size_t length, struct moe_buffer **buffer,
                                   void **dst) MOE_CHECKED;

/* True for the default model, and for no name. */
bool moe_request_wants_default(const struct moe_served_model *served, const char *name);
/* Finds the requested layer, and the dtype of its rows; `dtype` is a moe.v1.DataType. Errors:
 * LAYER_NOT_FOUND, DTYPE_UNSUPPORTED. */
struct moe_status moe_request_find_layer(const struct moe_layer_spec *const *layers, size_t count,
                                         uint32_t layer, int dtype,
                                         const struct moe_layer_spec **spec,
                                         enum moe_dtype *rows) MOE_CHECKED;

/* Checks for at least one row, of the layer's width. Errors: MOE_INVALID_ARGUMENT/SHAPE_MISMATCH.
 */
struct moe_status moe_request_check_rows(const struct moe_layer_spec *spec, uint32_t hidden,
                                         uint32_t tokens) MOE_CHECKED;
/* Checks that the tensor `what` has the bytes of `tokens` rows of the layer's width. Errors:
 * MOE_INVALID_ARGUMENT/SHAPE_MISMATCH, TOO_LARGE. */
struct moe_status moe_request_check_tensor(const char *what, size_t bytes,
                                           const struct moe_layer_spec *spec, uint32_t tokens,
                                           enum moe_dtype dtype) MOE_CHECKED;

/* Checks the name under which training retains a pass. Errors: MOE_INVALID_ARGUMENT/NAME_INVALID,
 * VALUE_INVALID. */
struct moe_status moe_request_check_pass(const char *session, uint64_t micro_batch_id) MOE_CHECKED;

/* The layer's router can choose experts, or the request brings ids.
 * Errors: MOE_INVALID_ARGUMENT/ROUTING_INVALID. */
struct moe_status moe_request_check_routed(const struct moe_layer_spec *spec,
                                           enum moe_routing_mode mode) MOE_CHECKED;

/* `bytes` of token ids [T] int64, each in the vocabulary of the layer's table (NULL: the layer has
 * none). Errors: MOE_INVALID_ARGUMENT with ROUTING_INVALID (no table), SHAPE_MISMATCH (bytes),
 * VALUE_INVALID (an id). */
struct moe_status moe_request_check_token_ids(const struct moe_layer_spec *spec,
                                              const struct moe_token_table *table, uint32_t tokens,
                                              const struct moe_buffer *token_ids,
                                              size_t bytes) MOE_CHECKED;
/* The experts [T,K] of T token ids that were checked. */
void moe_request_look_up(const struct moe_token_table *table, uint32_t tokens,
                         const struct moe_buffer *token_ids, int32_t *to);

/* Bytes of one expert id on the wire; `dtype` is a moe.v1.DataType; 0 if ids cannot have it. */
size_t moe_request_id_bytes(int dtype);
/* n ids of `size` bytes each. */
void moe_request_widen_ids(int32_t *to, const void *from, size_t size, size_t n);

/* `bytes` of ids [T,K] in the format `dtype`, each an expert of the layer or -1. */
struct moe_status moe_request_check_ids(const struct moe_layer_spec *spec, uint32_t tokens,
                                        int dtype, const struct moe_buffer *ids,
                                        size_t bytes) MOE_CHECKED;
/* `bytes` of weights [T,K], all finite. */
struct moe_status moe_request_check_weights(const struct moe_layer_spec *spec, uint32_t tokens,
                                            const struct moe_buffer *weights,
                                            size_t bytes) MOE_CHECKED;

/* Routes T tokens nowhere: ids [T,K] of -1 and weights of 0, for MOE_ROUTE_IDS_WEIGHTS. On a
 * failure *ids may be taken already. Errors: those of moe_staging_take. */
struct moe_status moe_request_route_nowhere(struct moe_staging *staging,
                                            const struct moe_layer_spec *spec, uint32_t tokens,
                                            struct moe_buffer **ids,
                                            struct moe_buffer **weights) MOE_CHECKED;

/* The step's stages and their sum. */
void moe_request_fill_stages(const struct moe_step_result *step, Moe__V1__StageTimes *to);

/* What decides whether this worker takes requests now. */
struct moe_standing {
    struct moe_places *places; /* for the text of a refusal; borrowed. NULL: none */
    uint64_t epoch;            /* of the committed view; 0 = there is none */
    bool draining;
    bool awaited;    /* a view has ended a short while ago: requests may wait for the next one */
    bool lease_lost; /* the group trains, and this worker has no lease */
    const struct moe_served_model *model;
};

/* Checks that the worker takes requests: it is not leaving, has a lease where one is needed, and
 * serves a view or waits for the next. The same rule for all requests: those in flight when a view
 * ends wait as long as those that come later. */
struct moe_status moe_request_check_worker(const struct moe_standing *worker) MOE_CHECKED;
/* Checks the epoch, and the version of the weights, that a request wants; 0 = any. Errors:
 * MOE_FAILED_PRECONDITION/STALE_EPOCH, VERSION_MISMATCH. */
struct moe_status moe_request_check_epoch(const struct moe_standing *worker,
                                          uint64_t epoch) MOE_CHECKED;
struct moe_status moe_request_check_version(uint64_t present, uint64_t wanted) MOE_CHECKED;
/* Checks the digest of a model that a request wants; "" = any. Before the first view none is known:
 * moe_request_check_worker then refuses the request. Errors: MODEL_MISMATCH. */
struct moe_status moe_request_check_digest(const struct moe_standing *worker,
                                           const struct moe_served_model *model,
                                           const char *digest) MOE_CHECKED;
/* The refusal without a lease. */
struct moe_status moe_request_lease_lost(void) MOE_CHECKED;

#endif
