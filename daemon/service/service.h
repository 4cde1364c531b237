/* SPDX-License-Identifier: Apache-2.0 */
/* moe.v1.ExpertService: checks requests, copies their tensors once into staging memory, hands them
 * to the engine, and sends the answers by reference. It does not compute and does not wait.
 *
 * A message is checked completely, in one fixed order, before it is queued: a bad message always
 * gets the same typed error, and after any error the next good request is served. */
#ifndef MOE_SERVICE_SERVICE_H
#define MOE_SERVICE_SERVICE_H

#include "daemon/metrics.h"
#include "engine/engine.h"
#include "models/models.h"
#include "rpc/server.h"
#include "service/info.h"
#include "service/request_checks.h"
#include "service/staging.h"

struct ProtobufCMessage;
struct moe_lease_gate;
struct moe_tracer;
struct moe_service;
struct moe_service_metrics; /* service/service_metrics.h */

enum {
    MOE_SERVICE_METHODS = 4,
    MOE_SERVICE_STREAM_REQUESTS = 64, /* of one stream, unanswered; reading pauses beyond */
};

struct moe_service_config {
    struct moe_service_info info;
    struct moe_engine *engine; /* borrowed, as is the pool; see moe_service_destroy */
    struct moe_staging *staging;
    struct moe_train *training;  /* borrowed; NULL = none */
    struct moe_models *models;   /* added models; borrowed; NULL = none */
    struct moe_metrics *metrics; /* registry of the request metrics; NULL = none */
    /* NULL: the group does not train, and serves without a lease. Borrowed. */
    const struct moe_lease_gate *lease;
    struct moe_tracer *tracer; /* of Forward and ForwardStream; NULL = none. Borrowed */
    /* [any thread] Whether the caller may have a pass retained, which takes the place of an older
     * one; the failure is the answer. NULL: every caller may. */
    struct moe_status (*may_retain)(void *ctx, const struct moe_rpc_call *call);
    void *may_retain_ctx;
};

struct moe_status moe_service_create(const struct moe_service_config *config,
                                     struct moe_service **out) MOE_CHECKED;
/* After moe_rpc_server_stop and moe_engine_destroy, before moe_staging_destroy. NULL is ignored. */
void moe_service_destroy(struct moe_service *s);

/* The methods to start the server with; their `ctx` is the service. */
void moe_service_methods(struct moe_service *s, struct moe_rpc_method out[MOE_SERVICE_METHODS]);

/* [any thread] The metrics in which the training service counts its requests. */
struct moe_service_metrics *moe_service_counts(struct moe_service *s);

/* Packs and sends an answer without tensors; fails the call where memory lacks. */
void moe_service_reply(struct moe_rpc_call *call, const struct ProtobufCMessage *answer);
struct moe_status moe_service_out_of_memory(void) MOE_CHECKED;

/* [any thread] For the other services: whether requests are taken; whether each answer needs a
 * lease, as in a group that trains; whether an answer may leave now; the endpoint of a slot's
 * worker ("" = none). */
void moe_service_read(struct moe_service *s, struct moe_standing *out);
bool moe_service_needs_lease(const struct moe_service *s);
bool moe_service_may_answer(const struct moe_service *s);
void moe_service_worker(struct moe_service *s, uint32_t slot, char *out, size_t capacity);

/* [any thread] The committed view. epoch = 0: none; requests wait for the next view until
 * moe_service_give_up, and are then refused with UNAVAILABLE/REFORMING. `workers`: ExpertService
 * endpoints by slot ("" = empty slot); copied. */
struct moe_status moe_service_set_view(struct moe_service *s, uint64_t epoch,
                                       const char *const *workers, size_t count) MOE_CHECKED;
/* [any thread] The model's name and digest ("" = not known) for clients; copied. */
struct moe_status moe_service_set_model(struct moe_service *s, const char *name,
                                        const char *digest) MOE_CHECKED;
/* [any thread] No view has come in time: requests are refused from now on, until one comes. */
void moe_service_give_up(struct moe_service *s);
/* [any thread] Endpoint of the group's coordinator; copied. */
struct moe_status moe_service_set_coordinator(struct moe_service *s,
                                              const char *endpoint) MOE_CHECKED;
/* [any thread] Endpoint for trainers, if it is not that for clients; copied. */
struct moe_status moe_service_set_training_endpoint(struct moe_service *s,
                                                    const char *endpoint) MOE_CHECKED;
/* [any thread] The slot that the coordinator assigned; info.slot until then. */
void moe_service_set_slot(struct moe_service *s, uint32_t slot);
/* [any thread] This worker is a spare, and these endpoints have experts: refusals name them. count
 * = 0: it is none. Copied. */
void moe_service_set_places(struct moe_service *s, const char *const *endpoints, size_t count);
/* [any thread] From now on new requests are refused with UNAVAILABLE/DRAINING. */
void moe_service_set_draining(struct moe_service *s);

#endif
