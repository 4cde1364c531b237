/* SPDX-License-Identifier: Apache-2.0 */
/* One worker: a device, a model, and the parts around them (engine, service, peers, group), wired
 * together and taken apart in the right order. Whoever starts it decides which backend, and what to
 * do when it has ended; nothing here reads flags or signals. */
#ifndef MOE_WORKER_WORKER_H
#define MOE_WORKER_WORKER_H

#include "daemon/metrics.h"
#include "moe/training.h"

struct moe_worker;

/* Strings are borrowed and outlive the worker. */
struct moe_worker_config {
    const struct moe_backend *backend;
    struct moe_device_config device; /* its settings are the sessions' too */
    const char *model;               /* directory */
    const char *coordinator;         /* "host:port" */
    const char *listen;              /* "host:port"; port 0 = any */
    const char *advertise;           /* "host:port" for peers and clients; NULL = as listened */
    bool insecure;                   /* allow an address that is not loopback without TLS */
    const char *worker_id;           /* NULL = host name and port */
    uint32_t wanted_slot_plus_one;
    uint32_t max_message_bytes;
    uint64_t max_bytes_in_flight; /* staging memory for requests and answers; with training, as much
                                     again for Backward calls */
    uint32_t max_tokens_per_request;
    uint32_t max_tokens_per_step; /* largest bucket, a power of two */
    uint64_t max_queued_tokens;
    uint32_t wait_budget_ms;     /* per wait on a peer */
    uint32_t drain_ms;           /* limit of a drain that the coordinator sets none for */
    uint64_t spin_ns;            /* see moe_engine_config */
    struct moe_metrics *metrics; /* NULL = none */
    bool training;               /* offer TrainingService; the rest is read only then */
    struct moe_trainer_config trainer;
    uint32_t training_permille;           /* share of tickets while forward work waits */
    uint64_t retained_bytes, retained_ns; /* limits of saved passes, and of kept answers, each */
    uint64_t saved_device_bytes;    /* most device memory for activations that a Backward can use;
                                       0 = none. Time as above */
    const char *training_directory; /* root of checkpoints; NULL = none */
    /* The coordinator gave a seat. Any thread; must not block. */
    void (*slot_assigned)(void *ctx, uint32_t slot);
    /* The worker is done: drained, or refused by the coordinator. Any thread, once; must not stop
     * the worker from within. */
    void (*ended)(void *ctx, struct moe_status why);
    void *ctx;
};

/* Opens the model, listens, and begins to register; everything further happens by itself. */
struct moe_status moe_worker_start(const struct moe_worker_config *config,
                                   struct moe_worker **out) MOE_CHECKED;
/* Cancels what is left and frees everything; drain first for a peaceful end. NULL is ignored. */
void moe_worker_stop(struct moe_worker *w);

/* "host:port" of the ExpertService. */
const char *moe_worker_endpoint(const struct moe_worker *w);
/* [any thread] Finish what was accepted, leave the group, then `ended`; bounded by the drain limit.
 */
void moe_worker_drain(struct moe_worker *w, const char *reason);
/* [any thread] Epoch that is served; 0 = none. */
uint64_t moe_worker_epoch(const struct moe_worker *w);

#endif
