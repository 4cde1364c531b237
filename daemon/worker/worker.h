/* SPDX-License-Identifier: Apache-2.0 */
/* One worker: a device, a model, and the parts around them (engine, service, peers, group),
 * created, connected and destroyed in the right order. The caller chooses the backend and handles
 * the worker's end; options and signals are the caller's, too. */
#ifndef MOE_WORKER_WORKER_H
#define MOE_WORKER_WORKER_H

#include "daemon/identity.h"
#include "daemon/metrics.h"
#include "daemon/progress.h"
#include "moe/training.h"

struct moe_worker;
struct moe_guard;

/* Strings are borrowed and outlive the worker. */
struct moe_worker_config {
    const struct moe_backend *backend;
    /* How it was chosen, for operators: see GetServerInfoResponse. NULL = "". */
    const char *backend_asked, *cuda_module, *cuda_problem;
    struct moe_device_config device; /* its settings are the sessions' too */
    const char *model;               /* directory */
    bool decode_weights;             /* quantised experts become BF16 while they are loaded */
    bool w8a8;                       /* experts in FP8 quantise their rows, too; not in training */
    const char *coordinator;         /* "host:port,..."; see struct moe_group_config */
    const char *listen;              /* "host:port"; port 0 = any */
    const char *control_listen;      /* "host:port" for peers; NULL = host of `listen`, any port */
    const char *admin_listen;        /* "host:port" for trainers and operators: all services. Then
                                        `listen` refuses TrainingService. NULL = `listen` has all */
    const char *advertise;           /* "host:port" for clients; NULL = `listen`. Its host is also
                                        for peers if theirs is a wildcard address */
    bool insecure;                   /* allow an address that is not loopback without TLS */
    struct moe_rpc_trust trust;      /* for links to the coordinator and to peers */
    struct moe_guard *guard;         /* who may do what; NULL: every caller may do everything */
    const char *worker_id;           /* NULL = host name and port */
    uint32_t wanted_slot_plus_one;
    uint32_t max_message_bytes;
    uint64_t max_bytes_in_flight; /* staging memory for requests and answers; with training, the
                                     same again for Backward */
    uint32_t max_tokens_per_request;
    uint32_t max_tokens_per_step; /* largest bucket, a power of two */
    uint64_t max_queued_tokens;
    /* Widest layers of added models; 0, or less than the default model needs: as that one. The same
     * on all slots. */
    uint32_t max_hidden, max_experts, max_top_k;
    const char *network_address; /* numeric, for rows of other hosts; NULL = that of the endpoint */
    uint32_t rebalance_share;    /* percent; see moe_loader_fetch; 0 = 100 */
    uint32_t domain_size;        /* see struct moe_session_config; 0 = hosts as they are */
    uint32_t wait_budget_ms;     /* per wait on a peer */
    uint32_t drain_ms;           /* limit of a drain, unless the coordinator sets one */
    uint64_t spin_ns;            /* see moe_engine_config */
    struct moe_metrics *metrics; /* NULL = none */
    /* Gets the worker's loops and conditions; its judge answers health checks. Borrowed; closed by
     * moe_worker_stop. NULL: health checks know the conditions alone, and an idle group runs no
     * heartbeats. */
    struct moe_progress *progress;
    /* Memory that clients of this host may share with the worker: of all of them, and of one
     * identity (0 = the same). 0 = none may. The socket: see moe_region_service_config. */
    uint64_t client_memory, client_memory_each;
    const char *client_memory_socket;
    const char *otlp;    /* collector of traces, see moe_tracer_check; NULL = none */
    double trace_sample; /* with `otlp`: share of requests without a parent */
    bool training; /* offer TrainingService; without it the fields down to training_directory are
                      ignored */
    struct moe_trainer_config trainer;
    uint32_t training_permille; /* share of tickets while forward work waits */
    uint64_t retained_bytes,
        retained_ns;                /* limits of retained passes, and of cached answers, each */
    uint64_t retained_device_bytes; /* limit of device memory for retained activations; 0 = none.
                                       They stay for retained_ns, too */
    const char *training_directory; /* root of checkpoints; NULL = none */
    /* The coordinator assigned a slot. Any thread; must not block. */
    void (*slot_assigned)(void *ctx, uint32_t slot);
    /* The worker is done: drained, or refused by the coordinator. Any thread, once; must not stop
     * the worker from within. */
    void (*ended)(void *ctx, struct moe_status why);
    void *ctx;
};

/* Whether peers and clients can reach the worker at these addresses; `control_listen` and
 * `advertise` may be NULL. moe_worker_start checks the same. Errors:
 * MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_worker_check_names(const char *listen, const char *control_listen,
                                         const char *advertise) MOE_CHECKED;

/* Whether a coordinator takes this worker_id. Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID. */
struct moe_status moe_worker_check_id(const char *worker_id) MOE_CHECKED;

/* Opens the model, listens, and begins to register; the worker's threads do the rest. */
struct moe_status moe_worker_start(const struct moe_worker_config *config,
                                   struct moe_worker **out) MOE_CHECKED;
/* Cancels remaining work and frees all; to finish it, drain first. NULL is ignored. */
void moe_worker_stop(struct moe_worker *w);

/* "host:port" of the ExpertService. */
const char *moe_worker_endpoint(const struct moe_worker *w);
/* [one thread] Call it once a second: tells the service manager and the log how far a Save or Load
 * is. */
void moe_worker_report(struct moe_worker *w);
/* [any thread] Finishes accepted work, leaves the group, then calls `ended`, all within the drain
 * limit. */
void moe_worker_drain(struct moe_worker *w, const char *reason);
/* [any thread] The epoch in service; 0 = none. */
uint64_t moe_worker_epoch(const struct moe_worker *w);

#endif
