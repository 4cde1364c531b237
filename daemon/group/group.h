/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's session with the coordinator, from Register to Leaving (moe/v1/coordinator.proto).
 * The worker's own actions are behind hooks.
 *
 * The coordinator is never on the request path. While it is away, the worker keeps serving the last
 * committed view and tries to register again as the same process. Only the coordinator can take a
 * slot away. The lease (daemon/lease.h) tells the worker for how long the coordinator cannot have
 * done so; without one, a group that trains changes and answers nothing. */
#ifndef MOE_GROUP_GROUP_H
#define MOE_GROUP_GROUP_H

#include "daemon/identity.h"
#include "daemon/name.h"
#include "moe/backend.h"

struct moe_group;
struct moe_histogram;
struct moe_lease_gate;
struct moe_rpc_client;

/* The worker that registers. Strings and specs are borrowed and outlive the group. */
struct moe_group_identity {
    const char *worker_id;
    uint64_t incarnation;                    /* new at each process start */
    uint8_t slot_token[16];                  /* secret of this process; see Register */
    const char *endpoint, *control_endpoint; /* for clients; for peers */
    const char *backend, *model, *fingerprint, *family, *version;
    const struct moe_layer_spec *const *layers;
    size_t layer_count;
    uint32_t max_tokens_per_step;
    uint32_t wanted_slot_plus_one; /* 0 = any */
    bool trains;
    bool partial;            /* its backend runs steps without some experts */
    bool trains_with_copies; /* its backend trains without some copies of experts */
    bool moves_experts;      /* it can change the placement of experts in a view */
    const struct moe_session_host *host;
    const char *host_name; /* for people */
};

/* One layer of an assignment, unchecked. */
struct moe_group_layer {
    uint32_t layer;
    const uint32_t *copies; /* [experts] */
    size_t experts;
    const uint32_t *slots; /* [slot_count]: slots of expert 0, then of expert 1, ... */
    size_t slot_count;
};

struct moe_group_assignment {
    uint32_t slot, slots;
    uint32_t placement_version;
    bool keep; /* in addition to what serves now, until a view of this placement forms */
    uint32_t spare_experts; /* of each layer: room for so many more is needed */
    const struct moe_group_layer *layers;
    size_t layer_count;
};

struct moe_group_member {
    const char *worker_id, *endpoint, *control_endpoint;
    uint64_t incarnation;
    const char *host_id, *domain, *network_address; /* "" = not known */
};

/* The view of a PREPARE, checked: this process is a member. */
struct moe_group_view {
    uint64_t epoch;
    uint32_t slot, slots;
    uint64_t live; /* bit s: slot s is a member */
    /* Not 0: the view is a mask of the session that was joined in this epoch. */
    uint64_t session_epoch;
    uint32_t placement_version;
    uint64_t placement_hash;
    uint32_t max_tokens_per_step;
    uint8_t secret[16];       /* of this epoch; see SequenceHello. Never logged */
    uint64_t group_id;        /* the same for all views of the group */
    bool may_shrink;          /* the group can go on without some members */
    bool has_heirs;           /* a member was in the group's last view */
    bool partial;             /* the members need not hold every expert */
    const char *model;        /* name for clients */
    const char *model_digest; /* in hexadecimal; "" = not known */
    struct moe_group_member members[MOE_MAX_SLOTS];
};

enum moe_model_step { /* values of moe.v1.ModelStep */
                      MOE_MODEL_OPEN = 1,
                      MOE_MODEL_LOAD = 2,
                      MOE_MODEL_ADD = 3,
                      MOE_MODEL_QUIESCE = 4,
                      MOE_MODEL_REMOVE = 5,
                      MOE_MODEL_CLOSE = 6,
                      /* Of the default model. */
                      MOE_MODEL_COUNT_ROWS = 7,
                      MOE_MODEL_FETCH = 8,
                      MOE_MODEL_SWAP = 9,
                      MOE_MODEL_DROP = 10,
};

/* moe.v1.ModelOrder, unchecked. */
struct moe_group_model_order {
    uint32_t model;
    enum moe_model_step step;
    uint64_t order, epoch;
    const char *name, *directory, *digest; /* "" = none */
    bool if_idle, resume, again;
    struct moe_group_assignment assignment; /* LOAD, FETCH; its version also of SWAP */
};

/* moe.v1.LayerMemory */
struct moe_group_layer_memory {
    const struct moe_layer_spec *spec;
    uint64_t common_file_bytes, common_resident_bytes, expert_file_bytes, expert_resident_bytes;
};

struct moe_group_numbers { /* moe.v1.Heartbeat */
    uint64_t loaded_bytes, total_bytes, tokens, steps;
    struct moe_saved_training training_saved;
};

/* Largest part of digests; one message of the session carries it. */
enum { MOE_GROUP_PART_BYTES = 16384 };

typedef struct moe_status (*moe_group_part_fn)(void *ctx, const uint8_t *part, size_t length);

/* moe.v1.ModelReport */
struct moe_group_model_report {
    uint32_t model;
    enum moe_model_step step;
    uint64_t order, epoch;
    struct moe_status status;
    const char *fingerprint, *family; /* NULL = "" */
    const struct moe_group_layer_memory *layers;
    size_t layer_count;
    uint64_t free_bytes;
    /* Passes digests, which are sent before the report, to `add`. NULL: there are none. */
    struct moe_status (*digests)(void *ctx, moe_group_part_fn add, void *add_ctx);
    void *digests_ctx;
};

/* The worker's actions. Pointers in arguments are valid during the call. */
struct moe_group_hooks {
    /* Called on the serial executor's thread, one at a time; may block. */

    /* Makes the assigned experts resident; does nothing if they already are. */
    struct moe_status (*load)(void *ctx, const struct moe_group_assignment *assignment);
    /* Passes the digests of what is loaded to `add`, in parts of at most MOE_GROUP_PART_BYTES.
     * Called after each successful `load`. */
    struct moe_status (*digests)(void *ctx, moe_group_part_fn add, void *add_ctx);
    /* Reads the state of training before a view with this worker forms, or does nothing if that is
     * done. No view is in force here. Fails soon once allow_read says so. NULL: no training. */
    struct moe_status (*read_checkpoint)(void *ctx, const struct moe_saved_training *state,
                                         uint32_t slot, uint32_t slots);
    /* Leaves the previous view, joins the session of this one or takes a mask of an earlier one,
     * and checks that all members agree. `allgather` may be used until it returns. `*slots`,
     * 0 before: as Ready.together (coordinator.proto); after a failure, as Ready.without. There is
     * no view then. */
    struct moe_status (*form)(void *ctx, const struct moe_group_view *view,
                              moe_allgather_fn allgather, void *allgather_ctx, uint64_t *slots);
    /* The view that was formed last is in force: starts to serve. */
    struct moe_status (*serve)(void *ctx);
    /* Ends the view that was formed or served, if any. Its session may be kept for a mask. */
    void (*leave)(void *ctx);
    /* There has been no view for some leases: a session that was kept for a mask is left. */
    void (*drop_session)(void *ctx);

    /* Called on the group's own thread; must not block. */

    /* coordinator: the endpoint that has answered. admin_port: of the AdminService on its host. */
    void (*slot_assigned)(void *ctx, uint32_t slot, uint32_t slots, const char *coordinator,
                          uint32_t admin_port);
    void (*numbers)(void *ctx, struct moe_group_numbers *out);
    /* Makes a running `load` fail soon, and every later one. */
    void (*cancel_load)(void *ctx);
    /* Whether loads of assignments with `keep` may run. If not, a running or queued one fails soon:
     * the view has ended, and the next one must not wait. */
    void (*allow_next_load)(void *ctx, bool allowed);
    /* Whether read_checkpoint may run. If not, one that runs fails soon: a view forms, or experts
     * must be loaded. NULL: no training. */
    void (*allow_read)(void *ctx, bool allowed);
    /* The lease was renewed, is a little shorter, or has ended. The gate shows it already. */
    void (*lease_changed)(void *ctx, bool held);
    /* With each answer to a heartbeat: endpoints for clients of the workers that hold experts, if
     * this one is a spare; else none. NULL: not needed. */
    void (*places_listed)(void *ctx, const char *const *endpoints, size_t count);
    /* With each answer to a heartbeat: whether a worker waits to join the view; calls of the state
     * in which training does not wait for it, 0 = none. */
    void (*joiner_waits)(void *ctx, bool waits, uint64_t released_calls);
    /* There has been no view for reform_ms: fails waiting requests with `why`. */
    void (*give_up)(void *ctx, struct moe_status why);
    /* Refuses new requests; accepted ones continue. */
    void (*drain)(void *ctx);
    bool (*drained)(void *ctx);
    /* A step of an added model, or of the default one; moe_group_report_model answers it, at any
     * time. NULL: this worker has no added models. */
    void (*model_order)(void *ctx, const struct moe_group_model_order *order);
    /* After each registration: the added models of the group, by number and name. This worker frees
     * any other, because it may have been away when the group closed it. NULL: as for model_order.
     */
    void (*models_listed)(void *ctx, const uint32_t *models, const char *const *names,
                          size_t count);
    /* After each registration: fetched experts of another version of the placement are of no use.
     */
    void (*fetched_listed)(void *ctx, uint32_t placement_version);
    /* The session has ended for good; the last call of all hooks. Success: drained in time. */
    void (*ended)(void *ctx, struct moe_status why);
    void *ctx;
};

struct moe_group_config {
    struct moe_rpc_client *client; /* borrowed */
    /* "host:port,...": the group's coordinators, of which one leads. */
    const char *coordinator;
    struct moe_rpc_trust trust; /* for the link to the coordinator; borrowed strings */
    struct moe_group_identity identity;
    uint32_t drain_ms;            /* limit of a drain, unless the coordinator sets one */
    uint32_t gather_ms;           /* limit of an all-gather */
    uint32_t reform_ms;           /* how long requests wait for a new view */
    struct moe_lease_gate *lease; /* initialised; the group writes it. Borrowed */
    /* Seconds from each heartbeat to its answer. NULL: not measured. Borrowed */
    struct moe_histogram *heartbeat_seconds;
    struct moe_progress *progress; /* gets the loops of both threads; borrowed, may be NULL */
    struct moe_group_hooks hooks;
};

/* Starts connecting at once. */
struct moe_status moe_group_start(const struct moe_group_config *config,
                                  struct moe_group **out) MOE_CHECKED;
/* Ends the session in any state, leaves the view, joins the threads. Not from a hook. NULL is
 * ignored. */
void moe_group_destroy(struct moe_group *g);

/* [any thread] Drains this worker, then calls `ended`. Repeated calls change nothing. */
void moe_group_drain(struct moe_group *g, const char *reason);
/* [any thread] Asks the coordinator to try to form the group again without its usual wait. Used
 * when an operator has resolved what kept the group from forming. Sent as soon as it is connected.
 */
void moe_group_try_again(struct moe_group *g);
/* [any thread] Sent in the order of calls. Without a session the report is lost: the coordinator
 * repeats its orders. */
void moe_group_report_model(struct moe_group *g, const struct moe_group_model_report *report);
/* [any thread] Rows of the experts of a layer, before the report of the order. */
void moe_group_report_rows(struct moe_group *g, uint64_t order, uint32_t layer,
                           const uint64_t *rows, size_t count);
void moe_group_report_model_progress(struct moe_group *g, uint32_t model, uint64_t loaded_bytes,
                                     uint64_t total_bytes);
/* [any thread] Peers of the view of `epoch` are gone, or a step failed. Ends the view here and
 * reports to the coordinator. `slots` (bit s: slot s) may be 0. Never blocks. */
void moe_group_report_lost(struct moe_group *g, uint64_t epoch, uint64_t slots,
                           struct moe_status why);

#endif
