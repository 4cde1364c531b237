/* The worker's session with the coordinator, from Register to Leaving (moe/v1/coordinator.proto),
 * and nothing of what a worker does in it: that is behind the hooks.
 *
 * The coordinator is never on the request path. When it goes away, the worker goes on serving the
 * view that was committed last and registers again, as the same process, when it is back; only the
 * coordinator itself can take a seat away. */
#ifndef MOE_WORKER_GROUP_H
#define MOE_WORKER_GROUP_H

#include "moe/backend.h"
#include "rpc/client.h"

struct moe_group;

/* Who registers. Strings and specs are borrowed and outlive the group. */
struct moe_group_identity {
    const char *worker_id;
    uint64_t incarnation; /* new at each process start */
    const char *endpoint; /* where peers and clients reach this worker */
    const char *backend, *model, *fingerprint, *family, *version;
    const struct moe_layer_spec *const *layers;
    size_t layer_count;
    uint32_t max_tokens_per_step;
    uint32_t wanted_slot_plus_one; /* 0 = any */
};

/* One layer of an assignment, as it came: not yet checked. */
struct moe_group_layer {
    uint32_t layer;
    const uint32_t *copies; /* [experts] */
    size_t experts;
    const uint32_t *slots; /* [slot_count]: those of expert 0, then 1, ... */
    size_t slot_count;
};

struct moe_group_assignment {
    uint32_t slot, slots;
    uint32_t placement_version;
    const struct moe_group_layer *layers;
    size_t layer_count;
};

struct moe_group_member {
    const char *worker_id, *endpoint;
    uint64_t incarnation;
};

/* What PREPARE says, checked: the own seat is in it, with this process. */
struct moe_group_view {
    uint64_t epoch;
    uint32_t slot, slots;
    uint64_t live; /* bit s: slot s is a member */
    uint32_t placement_version;
    uint64_t placement_hash;
    uint32_t max_tokens_per_step;
    struct moe_group_member members[MOE_MAX_SLOTS];
};

struct moe_group_numbers { /* moe.v1.Heartbeat */
    uint64_t loaded_bytes, total_bytes, tokens, steps;
};

/* What the worker does. Pointers in arguments are valid during the call. */
struct moe_group_hooks {
    /* Called on the jobs thread, one at a time; may block. */

    /* Makes the assigned experts resident; does nothing when they already are. */
    struct moe_status (*load)(void *ctx, const struct moe_group_assignment *assignment);
    /* Leaves the previous view, joins the session of this one, and proves that all members agree.
     * `allgather` may be used until it returns. On failure nothing is left behind. */
    struct moe_status (*form)(void *ctx, const struct moe_group_view *view,
                              moe_allgather_fn allgather, void *allgather_ctx);
    /* The view that was formed last is in force: serve. */
    struct moe_status (*serve)(void *ctx);
    /* Whatever was formed or served is over. */
    void (*leave)(void *ctx);

    /* Called on the group's own thread; must not block. */

    void (*seated)(void *ctx, uint32_t slot, uint32_t slots);
    void (*numbers)(void *ctx, struct moe_group_numbers *out);
    /* `load` should end soon, with an error. */
    void (*cancel_load)(void *ctx);
    /* No view has come back for a while: requests that wait fail for this reason. */
    void (*give_up)(void *ctx, struct moe_status why);
    /* Refuse new requests; those accepted go on. */
    void (*drain)(void *ctx);
    bool (*drained)(void *ctx);
    /* The session is over for good; the last call of all. Success: drained in time. */
    void (*ended)(void *ctx, struct moe_status why);
    void *ctx;
};

struct moe_group_config {
    struct moe_rpc_client *client; /* borrowed */
    const char *coordinator;       /* "host:port" */
    struct moe_group_identity identity;
    uint32_t drain_ms;  /* limit of a drain that the coordinator sets none for */
    uint32_t gather_ms; /* limit of one round of the all-gather */
    uint32_t reform_ms; /* how long requests wait for a new view */
    struct moe_group_hooks hooks;
};

/* Starts connecting at once. */
struct moe_status moe_group_start(const struct moe_group_config *config,
                                  struct moe_group **out) MOE_CHECKED;
/* Ends the session, whatever its state, leaves the view, joins the threads. Not from a hook. NULL
 * is ignored. */
void moe_group_destroy(struct moe_group *g);

/* [any thread] This worker wants to leave: drains, then `ended`. Repeating it changes nothing. */
void moe_group_drain(struct moe_group *g, const char *reason);
/* [any thread] An operator has told this worker what to do about what keeps the group from forming:
 * asks the coordinator not to wait before it tries again, as soon as it is there. */
void moe_group_try_again(struct moe_group *g);
/* [any thread] Peers of the view of `epoch` are gone or its step failed: this worker is done with
 * the view, and tells the coordinator. `slots` (bit s: slot s) may be 0. Never blocks. */
void moe_group_report_lost(struct moe_group *g, uint64_t epoch, uint64_t slots,
                           struct moe_status why);

#endif
