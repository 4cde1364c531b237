/* SPDX-License-Identifier: Apache-2.0 */
/* The state machine of the coordinator: slots, leases, epochs. Pure: no I/O, no clock, no
 * allocation after create, one thread at a time. Inputs are messages, closed streams, finished
 * writes and ticks. Outputs are actions, which the caller carries out in order.
 *
 * Rules:
 *  - at most one process (worker_id, incarnation) takes a slot; a new incarnation of the same
 *    worker fences the old one once that is disconnected and the identity is the same, or its lease
 *    is over. A process proves by its slot token that it is the one that has the slot;
 *  - an epoch is durable before it is announced, and a view before it is committed;
 *  - a cordoned slot gets no new worker, also after a restart;
 *  - a view has a live mask: the slots of its members. It is in force only while all of its members
 *    live. The loss of one ends the epoch for all (ABORT);
 *  - a view forms of all slots, or of some if every expert has a copy on them. After the loss of a
 *    member that is at once. A group that had no view since the start waits a lease for the others;
 *  - with `partial`, a view forms also without experts that were lost with their slots: at least
 *    half of the slots form it, after a view that had all experts;
 *  - once a worker has taken an empty slot and has loaded, the view ends and one with it forms. In
 *    a group that trains, the worker first reads the checkpoint that has the members' state;
 *  - experts are on the slots of `places`; a worker in another slot is a spare. Scaling changes
 *    places: the new shares are loaded while the view in force goes on, and only then do the places
 * change, durably. Slots that lose their place are drained after that;
 *  - after a restart the log restores the view, and the first heartbeat of each member shows
 * whether it still belongs to the view;
 *  - a group that trains forms a view only when no earlier one can complete a change any more. A
 * change needs all members of its view. So it suffices that one of them has left the view for the
 * new one, or that the lease of one has run out (daemon/lease.h). */
#ifndef MOE_COORDINATOR_MEMBERSHIP_H
#define MOE_COORDINATOR_MEMBERSHIP_H

#include "coordinator/placement.h"
#include "daemon/log.h"
#include "daemon/name.h"

#include <stdarg.h>
#include <string.h>

enum {
    MOE_MEMBERSHIP_ID_BYTES = 128, /* worker_id, model, fingerprint; with the final 0 */
    MOE_MEMBERSHIP_ENDPOINT_BYTES = 256,
    MOE_MEMBERSHIP_SHORT_BYTES = 32, /* backend, family, version */
    MOE_MEMBERSHIP_HOST_BYTES = 80,  /* each text of a host */
    MOE_MEMBERSHIP_REASON_BYTES =
        512, /* reasons for operators: a status text and what is around it */
    MOE_MEMBERSHIP_BLOB_BYTES = 1024,
    MOE_MEMBERSHIP_IDENTITY_BYTES = 256,
    MOE_MEMBERSHIP_TOKEN_BYTES = 16,
    MOE_MEMBERSHIP_CORDON_BYTES = 128, /* reasons of cordons; longer ones are cut */
    MOE_MEMBERSHIP_ROUNDS_MAX = 64,    /* all-gather rounds of one epoch */
};

struct moe_membership;

struct moe_membership_config {
    uint32_t slots; /* workers that the group can have, 1..MOE_PLACEMENT_SLOTS_MAX */
    uint32_t size;  /* 0 = the group has a fixed size, `slots`. Else it can be scaled, and this is
                       the number of workers that hold experts in a new group */
    uint32_t replicas; /* copies of each expert, 1..size */
    bool partial;      /* views may lack experts. Then the group does not train */
    uint32_t spare;    /* places of each layer on a slot for copies that move (coordinator/moves).
                          Above 0, the group does not train */
    const struct moe_placement *placement; /* saved; read in create only. NULL: a linear one */
    uint64_t lease_ns; /* a worker without a message for this long loses its slot; never sooner */
    uint64_t group_id; /* a random number above 0; used unless `saved` has one */
    uint64_t form_ns;  /* from the start of an epoch to READY of all; with replicas at most two
                          leases */
    /* The least time that a member has to answer PREPARE with a heartbeat, if it does so (see
     * moe_membership_heartbeat). 0 = any time. */
    uint64_t answer_ns;
    /* The longest time that training waits, after one Save, for workers that read its checkpoint.
     */
    uint64_t read_ns;
    uint64_t shutdown_ns; /* time for a shutdown that names no limit */
    uint64_t backoff_ns;  /* pause after the first failed attempt; doubles up to backoff_max_ns */
    uint64_t backoff_max_ns;
    /* Failed attempts in a row, then FAILED until a new worker that is no spare registers or
     * TryAgain arrives. Attempts that fail with CANNOT_GO_BACK, or because the state cannot be
     * written, do not count. */
    uint32_t attempts_max;
    const char *version; /* release, "major.minor.patch"; lives as long as the machine */
};

/* The durable state. */
struct moe_membership_saved {
    uint64_t epoch; /* highest epoch that was announced, or is about to be */
    uint32_t placement_version;
    uint64_t placement_hash; /* moe_placement_content_hash */
    uint64_t view_epoch;     /* view in force; 0 = none, and the fields below are empty */
    uint32_t slots;
    struct {
        char worker_id[MOE_MEMBERSHIP_ID_BYTES];
        uint64_t incarnation;
    } members[MOE_PLACEMENT_SLOTS_MAX]; /* of the view; incarnation 0: the slot is not in it */
    uint64_t group_id;                  /* 0 = none yet */
    uint32_t lease_ms;                  /* that workers got; 0 = not known */
    bool settled;      /* no worker can hold a lease of a view before this record */
    uint64_t cordoned; /* bit s: slot s gets no new worker */
    char cordon_reasons[MOE_PLACEMENT_SLOTS_MAX][MOE_MEMBERSHIP_CORDON_BYTES];
    uint64_t places;       /* bit s: slot s holds experts in views that form; 0 = not known */
    uint32_t view_version; /* placement of the view in force; 0 = placement_version */
    /* Processes of the last view that was committed, by slot; also when it has ended. 0 = none. */
    uint64_t last_members[MOE_PLACEMENT_SLOTS_MAX];
    uint32_t last_version; /* highest version of a placement that workers may know; also of one that
                              is not saved itself */
};

/* `saved`: from the store; zeroes for a new group. Members of a view in it have one lease from
 * `now_ns` on to reconnect. Create counts as an input: actions may follow. */
struct moe_status moe_membership_create(const struct moe_membership_config *config,
                                        const struct moe_membership_saved *saved, uint64_t now_ns,
                                        struct moe_membership **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_membership_destroy(struct moe_membership *m);

/* ------------------------------------------------------------------ inputs
 *
 * `now_ns`: of a message, when it came in, so that a lease runs from there although the message has
 * waited for the machine; of all else, the present. `stream` is a number > 0, unique for each
 * session stream. The caller carries out all actions of an input before the next input. */

/* moe.v1.LayerInfo */
struct moe_membership_layer {
    uint32_t layer, hidden, experts, top_k, intermediate, zero_experts, shared_intermediate;
    uint32_t routed_encoding, shared_encoding;       /* moe.v1.WeightEncoding */
    uint32_t routed_activations, shared_activations; /* moe.v1.ActivationEncoding */
    uint32_t routes_by_token_id;                     /* 0 or 1 */
    uint32_t vocabulary;
    uint32_t latent; /* 0: none */
};
_Static_assert(sizeof(struct moe_membership_layer) == 14 * sizeof(uint32_t),
               "without padding, layers are compared as bytes");

static inline bool moe_membership_same_layers(const struct moe_membership_layer *a,
                                              const struct moe_membership_layer *b, size_t count)
{
    return memcmp(a, b, count * sizeof *a) == 0;
}

struct moe_membership_host { /* moe.v1.Host; "" = not known */
    const char *id, *name, *domain, *network_address;
};

struct moe_membership_register { /* moe.v1.Register; strings are copied */
    const char *worker_id, *endpoint, *control_endpoint, *backend, *model, *fingerprint, *family,
        *version;
    uint64_t incarnation;
    const char *identity; /* of the connection, as this process has checked it; "" = any caller */
    const uint8_t *slot_token; /* [MOE_MEMBERSHIP_TOKEN_BYTES]; NULL: none was sent */
    uint32_t max_tokens_per_step, wanted_slot_plus_one;
    bool trains;
    bool partial;            /* its backend runs steps without some experts */
    bool trains_with_copies; /* it trains in views without some copies of experts */
    bool moves_experts;      /* it changes placements in a view */
    const struct moe_membership_layer *layers;
    size_t layer_count;
    struct moe_membership_host host; /* texts may be NULL: not known */
    struct {                         /* moe.v1.KeptSession; epoch 0 = none */
        uint64_t epoch, together;
        uint32_t max_tokens;
    } session;
};

struct moe_membership_heartbeat {
    uint64_t epoch, loaded_bytes, total_bytes, tokens, steps, sequence;
    /* Of the member's heartbeats lately. Not 0: it also sends one as soon as it gets PREPARE. */
    uint64_t round_trip_ns;
    /* The state that a checkpoint has. The member holds changes back, as it knows that a worker
     * waits. */
    struct moe_saved_training training_saved;
};

void moe_membership_on_register(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                const struct moe_membership_register *r);
void moe_membership_on_heartbeat(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                 const struct moe_membership_heartbeat *h);
/* `order`: of the ASSIGN that is answered; 0 = not known. `error`: code MOE_OK on success. */
void moe_membership_on_loaded(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                              uint32_t placement_version, uint64_t order,
                              const struct moe_status *error);
/* Answer to READ_CHECKPOINT with this order. `error`: code MOE_OK on success. */
void moe_membership_on_checkpoint_read(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                       uint64_t order, const struct moe_status *error);
/* A member's message that concerns the caller alone; it renews the lease. */
void moe_membership_on_digests(struct moe_membership *m, uint64_t now_ns, uint64_t stream);
/* The member has other weights than the group, or has broken its protocol about them: it loses its
 * slot, and its stream ends with `why`. */
void moe_membership_on_wrong_weights(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                     const struct moe_status *why);
void moe_membership_on_blob(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                            uint64_t epoch, uint32_t round, const uint8_t *data, size_t length);
/* `together`: Ready.together; 0 = a later view of fewer members cannot be a mask of this session.
 * With an error: Ready.without. */
void moe_membership_on_ready(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                             uint64_t epoch, uint64_t together, const struct moe_status *error);
void moe_membership_on_peer_lost(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                 uint64_t epoch, uint64_t slots);
void moe_membership_on_drain_notice(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                    const char *reason);
void moe_membership_on_leaving(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                               const char *reason);
/* An operator has resolved the cause that kept the group from forming. Ends the back-off, and a
 * FAILED group starts again. Answered by TRYING_AGAIN. */
void moe_membership_on_try_again(struct moe_membership *m, uint64_t now_ns, uint64_t stream);
void moe_membership_on_stream_closed(struct moe_membership *m, uint64_t now_ns, uint64_t stream);
/* Answer to MOE_MEMBERSHIP_SAVE; allowed while actions are being carried out. */
void moe_membership_on_saved(struct moe_membership *m, uint64_t now_ns, uint64_t sequence,
                             const struct moe_status *status);
void moe_membership_on_tick(struct moe_membership *m, uint64_t now_ns);
/* Latest time of the next tick; MOE_NEVER after MOE_MEMBERSHIP_EXIT. */
uint64_t moe_membership_deadline(const struct moe_membership *m);

/* Operators. `*epoch`: epoch in force, 0 = none. Errors: MOE_INVALID_ARGUMENT (no reason given),
 * MOE_NOT_FOUND (no such slot, or empty). Both may be repeated, with the same answer.
 * A drain in a group with replicas: MOE_FAILED_PRECONDITION/EXPERT_UNAVAILABLE unless `force`, if
 * the other slots do not have a copy of every expert. */
struct moe_status moe_membership_drain(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                       const char *reason, uint32_t limit_ms, bool force,
                                       uint64_t *epoch) MOE_CHECKED;
struct moe_status moe_membership_shutdown(struct moe_membership *m, uint64_t now_ns,
                                          const char *reason, uint32_t limit_ms,
                                          uint64_t *epoch) MOE_CHECKED;

/* A cordoned slot gets no new worker: who asks for it waits. The worker that has it keeps it, also
 * when it reconnects. Saved with the group's state; see moe_membership_cordons_saved. May be
 * repeated: the last reason counts. Errors: MOE_INVALID_ARGUMENT (no reason given), MOE_NOT_FOUND
 * (no such slot). */
struct moe_status moe_membership_cordon(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                        const char *reason) MOE_CHECKED;
struct moe_status moe_membership_uncordon(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                          const char *reason) MOE_CHECKED;
/* True if a restart would find the present cordons. */
bool moe_membership_cordons_saved(const struct moe_membership *m);
/* NULL when the slot is not cordoned; else why it is. */
const char *moe_membership_cordon_reason(const struct moe_membership *m, uint32_t slot);

/* Scales the group: `size` slots hold experts from then on. Those that hold some keep theirs as far
 * as possible; those with the highest numbers leave. Begins, and answers at once: see `scaling_to`
 * of moe_membership_group, then `scale_error`. With a view in force, the new shares are loaded
 * while it goes on, then it is replaced. A failure before that undoes the change, and so does a
 * call with the present size. A group without a view takes the size at once. May be repeated.
 * Errors: MOE_INVALID_ARGUMENT (no reason given, 0, above `slots`), MOE_FAILED_PRECONDITION (fewer
 * than the replicas; UNSUPPORTED: the group trains; too few workers), MOE_UNAVAILABLE/REFORMING
 * (the group forms, or is being scaled already). Nothing has changed then. */
struct moe_status moe_membership_scale(struct moe_membership *m, uint64_t now_ns, uint32_t size,
                                       const char *reason) MOE_CHECKED;

/* The group has added models, which have the places of now: it is not scaled. */
void moe_membership_set_models(struct moe_membership *m, bool has_models);
/* ------------------------------------------------------------------ moves
 *
 * Not inputs: allowed while actions are being carried out. */

/* All slots take part in the view in force, and have loaded the present placement. */
bool moe_membership_may_move(const struct moe_membership *m);
/* From now on `p`, with its version, is the placement: of to_save, of new views, and of workers
 * that register. moe_membership_may_move is true, and each slot holds its experts. The view goes
 * on. */
void moe_membership_move(struct moe_membership *m, const struct moe_placement *p);
/* The last move could not be saved: the placement before is the present one again. */
void moe_membership_undo_move(struct moe_membership *m);

/* ------------------------------------------------------------------ actions */

enum moe_membership_action_kind {
    MOE_MEMBERSHIP_SAVE,  /* make moe_membership_to_save() durable, then on_saved(sequence) */
    MOE_MEMBERSHIP_SEND,  /* `message` to `stream` */
    MOE_MEMBERSHIP_CLOSE, /* end `stream` with `status` (MOE_OK: regular end) */
    MOE_MEMBERSHIP_LOG,   /* `event`: status.text at `level`, about `slot` */
    MOE_MEMBERSHIP_EXIT,  /* the shutdown is complete; the last action */
};

enum moe_membership_message {
    MOE_MEMBERSHIP_REGISTERED, /* slot */
    MOE_MEMBERSHIP_ASSIGN,     /* version: moe_membership_find_placement(); order; keep: a member of
                                  views keeps what it holds until the new placement is in force */
    MOE_MEMBERSHIP_PREPARE,    /* epoch, session_epoch; members: moe_membership_worker() */
    MOE_MEMBERSHIP_BLOBS,      /* epoch, round; moe_membership_blob() */
    MOE_MEMBERSHIP_COMMIT,     /* epoch */
    MOE_MEMBERSHIP_ABORT,      /* epoch; status.text = reason */
    MOE_MEMBERSHIP_DRAIN,      /* limit_ms; status.text = reason; keep: its experts move first,
                                  and another one follows */
    MOE_MEMBERSHIP_TRYING_AGAIN,
    MOE_MEMBERSHIP_HEARTBEAT_ANSWER, /* sequence, oldest_ms; keep: a worker waits to join;
                                        released_calls */
    MOE_MEMBERSHIP_READ_CHECKPOINT,  /* order; moe_membership_to_read() */
};

enum moe_membership_event { /* values of moe.v1.EventKind */
                            MOE_EVENT_JOINED = 1,
                            MOE_EVENT_RECONNECTED,
                            MOE_EVENT_DISCONNECTED,
                            MOE_EVENT_LOST,
                            MOE_EVENT_LEFT,
                            MOE_EVENT_DRAINING,
                            MOE_EVENT_REFUSED,
                            MOE_EVENT_LOAD_FAILED,
                            MOE_EVENT_RESTORING,
                            MOE_EVENT_PREPARING,
                            MOE_EVENT_SERVING,
                            MOE_EVENT_ENDED,
                            MOE_EVENT_ADOPTED,
                            MOE_EVENT_FAILED,
                            MOE_EVENT_ENDING,
                            MOE_EVENT_NOT_SAVED,
                            MOE_EVENT_MODEL_ACCEPTED, /* of the caller */
                            MOE_EVENT_CORDONED,
                            MOE_EVENT_UNCORDONED,
                            MOE_EVENT_MODEL_SERVING, /* coordinator/models.h */
                            MOE_EVENT_MODEL_UNLOADED,
                            MOE_EVENT_MODEL_FAILED,
                            MOE_EVENT_SCALING,
                            MOE_EVENT_SCALED,
                            MOE_EVENT_NOT_SCALED,
                            MOE_EVENT_MOVE_BEGUN, /* coordinator/moves/moves.h */
                            MOE_EVENT_MOVED,
                            MOE_EVENT_MOVE_FAILED,
};

/* Copies at most `size` - 1 bytes. Replaces all but printable ASCII by '?', as the text may come
 * from a peer and goes to logs and proto3 strings. */
void moe_membership_copy_text(char *to, size_t size, const char *from);
/* The same of a text that is printed first, of at most MOE_STATUS_TEXT - 1 bytes. */
void moe_membership_print_text(char *to, size_t size, const char *fmt, va_list args);

#define MOE_MEMBERSHIP_NO_SLOT UINT32_MAX /* of an event: it is about the group */

struct moe_membership_action {
    enum moe_membership_action_kind kind;
    enum moe_membership_event event; /* LOG */
    enum moe_membership_message message;
    enum moe_log_level level;
    uint64_t stream, sequence, epoch, order;
    uint64_t session_epoch;  /* PREPARE: in which the members joined the session that they keep; 0 =
                                they join a new one */
    uint64_t released_calls; /* HEARTBEAT_ANSWER: calls of the state in which training does not wait
                                for a worker; 0 = none */
    uint32_t slot, round, limit_ms, oldest_ms, version;
    bool keep;
    struct moe_status status;
};

/* Removes the oldest action; false when there is none. */
bool moe_membership_next_action(struct moe_membership *m, struct moe_membership_action *out);

/* ------------------------------------------------------------------ reading
 *
 * Pointers are valid until the next input. */

enum moe_group_state { /* values of moe.v1.GroupState */
                       MOE_GROUP_WAITING = 1,
                       MOE_GROUP_LOADING,
                       MOE_GROUP_FORMING,
                       MOE_GROUP_SERVING,
                       MOE_GROUP_DEGRADED,
                       MOE_GROUP_DRAINING,
                       MOE_GROUP_FAILED,
};

enum moe_worker_state { /* values of moe.v1.WorkerState */
                        MOE_WORKER_REGISTERED = 1,
                        MOE_WORKER_LOADING,
                        MOE_WORKER_LOADED,
                        MOE_WORKER_PREPARING,
                        MOE_WORKER_SERVING,
                        MOE_WORKER_DRAINING,
                        MOE_WORKER_GONE,
};

/* Why an epoch ended or did not form; `moe_group_reforms_total{reason}`. */
enum moe_membership_cause {
    MOE_CAUSE_LEASE_EXPIRED,
    MOE_CAUSE_REPLACED,  /* a new process of the same worker */
    MOE_CAUSE_PEER_LOST, /* reported by a member */
    MOE_CAUSE_LEFT,
    MOE_CAUSE_OUT_OF_STEP,    /* a member reconnected without the epoch, or broke the protocol */
    MOE_CAUSE_NOT_FORMED,     /* a deadline, error or lost stream while forming */
    MOE_CAUSE_CANNOT_GO_BACK, /* an operator must choose the checkpoint to go back to */
    MOE_CAUSE_NOT_SAVED,      /* the state directory cannot be written */
    MOE_CAUSE_NO_TRANSPORT,   /* two members have no way to exchange rows: FAILED at once */
    MOE_CAUSE_WRONG_WEIGHTS,  /* a member has other weights than the group */
    MOE_CAUSE_GROWN,          /* a slot that was not in the view can take part */
    MOE_CAUSE_SCALED,         /* another placement is loaded */
    MOE_CAUSE_COUNT
};
const char *moe_membership_cause_name(enum moe_membership_cause cause);

struct moe_membership_group {
    enum moe_group_state state;
    char reason[MOE_MEMBERSHIP_REASON_BYTES];
    uint64_t epoch; /* in force; 0 = none */
    uint64_t live;  /* bit s: slot s is in the view that forms, else in that in force; 0 = none */
    uint32_t slots, replicas, max_tokens_per_step;
    uint64_t places;     /* bit s: slot s holds experts in views that form */
    uint32_t size;       /* that many slots */
    uint32_t scaling_to; /* the size that the group is being scaled to; 0 = it is not */
    const struct moe_status *scale_error; /* of the last scaling that was undone; code MOE_OK: none,
                                             or a later one succeeded */
    bool has_heirs;                       /* the view that forms has a process of the last one */
    bool partial, may_shrink; /* of the configuration; views may form without some slots */
    bool trains;              /* so the worker that registered last says */
    const char *model, *family, *backend, *fingerprint; /* "" until the first worker registered */
    const struct moe_membership_layer *layers;
    size_t layer_count;
    uint64_t last_epoch; /* highest that was announced */
    uint64_t group_id;
    const uint64_t *causes; /* [MOE_CAUSE_COUNT] */
};

struct moe_membership_worker {
    uint32_t slot;
    enum moe_worker_state state;
    const char *worker_id, *endpoint, *control_endpoint;
    struct moe_membership_host host; /* "" where not known */
    uint64_t incarnation;
    uint64_t lease_remaining_ns;          /* 0 when it has left */
    bool connected;                       /* its stream is open */
    uint64_t stream;                      /* 0 = not connected */
    bool taken;                           /* the process has the slot */
    struct moe_membership_heartbeat last; /* epoch: as reported */
    const struct moe_status
        *error; /* last failure since a view came in force; code MOE_OK = none */
};

void moe_membership_group(const struct moe_membership *m, struct moe_membership_group *out);
/* The slot of the process with this stream; false when it has none. */
bool moe_membership_slot_of(const struct moe_membership *m, uint64_t stream, uint32_t *slot);
/* True if the process in `slot` was asked to load this version of the placement, and `order` is
 * that of its last ASSIGN or 0 (of an older release). */
bool moe_membership_awaits(const struct moe_membership *m, uint32_t slot,
                           uint32_t placement_version, uint64_t order);
/* False when the slot was never taken, or holds no experts and its worker has left. */
bool moe_membership_worker(const struct moe_membership *m, uint32_t slot,
                           struct moe_membership_worker *out);
/* Of views that form. */
const struct moe_placement *moe_membership_placement(const struct moe_membership *m);
/* Version of the placement that the group is being scaled to; 0 = it is not. */
uint32_t moe_membership_next_version(const struct moe_membership *m);
/* That one, or the one that the group is being scaled to; NULL when neither has this version. */
const struct moe_placement *moe_membership_find_placement(const struct moe_membership *m,
                                                          uint32_t version);
const struct moe_membership_saved *moe_membership_to_save(const struct moe_membership *m);
/* The state that READ_CHECKPOINT orders a worker to read. */
const struct moe_saved_training *moe_membership_to_read(const struct moe_membership *m);
/* Blob of `slot` in the last completed round. May hold secrets: do not log. */
const uint8_t *moe_membership_blob(const struct moe_membership *m, uint32_t slot, size_t *length);

#endif
