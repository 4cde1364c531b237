/* SPDX-License-Identifier: Apache-2.0 */
/* Internal state of the membership machine, shared by membership.c (inputs, outputs), members.c
 * (slots), scale.c (places), formation.c (epochs) and report.c. Private to these files. */
#ifndef MOE_COORDINATOR_MEMBERSHIP_STATE_H
#define MOE_COORDINATOR_MEMBERSHIP_STATE_H

#include "base/clock.h"
#include "coordinator/membership.h"

enum {
    SLOTS_MAX = MOE_PLACEMENT_SLOTS_MAX,
    LAYERS_MAX = MOE_PLACEMENT_LAYERS_MAX,
    /* One input causes at most a few messages per slot. */
    ACTIONS_MAX = 16 * SLOTS_MAX,
    HISTORY_MAX = 4 * SLOTS_MAX,
};

enum slot_state {
    SLOT_EMPTY, /* was never taken */
    SLOT_TAKEN,
    SLOT_LEFT, /* was taken before; the fields describe the last member */
};

struct member {
    enum slot_state state;
    char worker_id[MOE_MEMBERSHIP_ID_BYTES];
    char endpoint[MOE_MEMBERSHIP_ENDPOINT_BYTES]; /* "": known from the log only */
    struct {
        char id[MOE_MEMBERSHIP_HOST_BYTES], name[MOE_MEMBERSHIP_HOST_BYTES];
        char domain[MOE_MEMBERSHIP_HOST_BYTES], network_address[MOE_MEMBERSHIP_HOST_BYTES];
    } host;
    char control_endpoint[MOE_MEMBERSHIP_ENDPOINT_BYTES];
    uint64_t incarnation;
    char identity[MOE_MEMBERSHIP_IDENTITY_BYTES];
    uint8_t slot_token[MOE_MEMBERSHIP_TOKEN_BYTES]; /* unknown while `endpoint` is "" */
    uint64_t stream;                                /* 0 = not connected; else TAKEN */
    uint64_t last_message_ns;
    uint32_t max_tokens;
    bool assigned;  /* ASSIGN was sent to this process */
    uint64_t order; /* of the last one, while it is not answered; 0 = it is. `loaded` may still be
                       true from before */
    uint64_t read_order;    /* of the last READ_CHECKPOINT */
    uint32_t read_failures; /* in a row, of this process */
    bool loaded;
    bool load_failed;    /* this process cannot take part; see `error` */
    bool draining;       /* DRAIN was sent */
    bool wants_to_leave; /* after its experts have moved, or cannot */
    bool leaving;        /* it sent Leaving */
    bool unverified;     /* its next heartbeat must confirm the view in force */
    bool missed; /* peers reported it since a view last came in force: it is lost with its stream */
    /* With replicas: views form without it until then, as it failed `strikes` times in a row; and
     * while it is `silent`: it has sent no heartbeat that shows that it has left the ended epoch.
     */
    uint64_t excluded_until_ns;
    uint32_t strikes;
    bool silent;
    uint32_t drain_limit_ms;
    struct moe_membership_heartbeat last;
    struct moe_status error;
};

enum phase {
    PHASE_IDLE,       /* no epoch is forming */
    PHASE_SAVE_EPOCH, /* the new epoch is being made durable; it is not announced */
    PHASE_PREPARE,    /* PREPARE was sent; blobs and READYs come in */
    PHASE_SAVE_VIEW,  /* all are ready; the view is being made durable */
};

struct moe_membership {
    struct moe_membership_config config;
    uint64_t now_ns; /* of the last input */
    struct member members[SLOTS_MAX];

    /* Properties that all workers share; the first one sets them. */
    bool model_known;
    char backend[MOE_MEMBERSHIP_SHORT_BYTES], family[MOE_MEMBERSHIP_SHORT_BYTES];
    char model[MOE_MEMBERSHIP_ID_BYTES], fingerprint[MOE_MEMBERSHIP_ID_BYTES];
    struct moe_membership_layer layers[LAYERS_MAX];
    size_t layer_count;
    bool trains; /* the process that registered last: views compare their training as they form */
    struct moe_placement *placement; /* over saved.places */
    bool placement_durable;          /* its version may be announced */

    /* The placement that the group is being scaled to. */
    struct {
        uint64_t places; /* 0 = it is not */
        struct moe_placement *placement;
        uint64_t asked, loaded; /* slots that were asked to load it; that have */
        uint64_t version_save; /* the SAVE of its version, before any is asked; 0 = it is durable */
    } next;
    uint64_t removed; /* slots that lost their place; their workers have not left yet */
    bool has_models;  /* added ones */
    struct moe_status scale_error;
    bool moved;                   /* `placement` is no linear one */
    struct moe_placement *before; /* of the last move */
    bool moved_before;

    /* Workers outside of the view that read the state of its members, before they join it. */
    struct {
        struct moe_saved_training state; /* of the members; `calls` 0 = none is known */
        uint64_t first_order;  /* of the first READ_CHECKPOINT of this state, or a later number */
        uint64_t deadline_ns;  /* training does not wait in this state any longer */
        uint64_t asked;        /* slots that have not answered their last order, of any state */
        uint64_t awaited;      /* those of them for which training waits */
        uint64_t read, failed; /* slots that have read `state`; that have not, and will not */
        uint64_t again;        /* slots that were asked, or had read, and have reconnected since */
    } join;

    /* Processes that have taken a slot, oldest first; a ring. Only the latest process of a worker
     * may register again: a late message of an older one must not regain the slot. */
    struct {
        char worker_id[MOE_MEMBERSHIP_ID_BYTES];
        uint64_t incarnation;
    } history[HISTORY_MAX];
    size_t history_count; /* in total; the next one goes to [history_count % HISTORY_MAX] */

    /* The wanted durable state, and the pending write. */
    struct moe_membership_saved saved;
    uint64_t announced_epoch; /* highest announced one; durable, <= saved.epoch */
    uint64_t save_sequence;   /* of the last SAVE */
    uint64_t last_order;      /* of ASSIGN; see moe_membership__assign */
    uint64_t awaited_save;    /* the SAVE that the machine waits for; 0 = none */
    uint64_t cordon_save; /* the SAVE of the last change of a cordon; 0 = a SAVE since succeeded */

    /* The epoch that is forming. */
    enum phase phase;
    uint64_t epoch;            /* phase != IDLE; == saved.epoch */
    uint64_t live;             /* phase != IDLE: the slots that form it */
    uint64_t form_deadline_ns; /* phase != IDLE */
    uint64_t prepared_ns;      /* phase == PREPARE: when it was sent */
    uint64_t answer_grace_ns;  /* phase == PREPARE: more time to answer; see answer_timeout */
    uint64_t ready_mask, blob_mask;
    uint32_t round; /* the round that is being collected */
    struct {
        size_t length;
        uint8_t data[MOE_MEMBERSHIP_BLOB_BYTES];
    } blobs[SLOTS_MAX];

    bool masks; /* phase != IDLE: `live` is a mask of `session`; else its members join a new one */

    /* The session that members of the last view have, or had. A smaller view of the same processes
     * can be a mask of it. */
    struct {
        uint64_t epoch; /* in which they joined it; 0 = none is known */
        /* Not 0: the log has a view of this epoch, and its members tell what its session is as they
         * come back. Before, `epoch` is 0. */
        uint64_t restored;
        uint64_t live;  /* of the last PREPARE with it */
        uint32_t slots; /* of its placement */
        uint32_t max_tokens;
        uint64_t together[SLOTS_MAX]; /* of Ready; 0 = its member takes no mask, or is not ready, or
                                         not back */
        uint64_t incarnations[SLOTS_MAX];
    } session;

    /* The epoch in force. While view_epoch != 0, its members take the slots of view_live. */
    uint64_t view_epoch, view_live;
    uint32_t view_version; /* of its placement */
    uint64_t view_since_ns;
    /* The last view that ended by a report, and the slots that have reported its end so far; 0 =
     * none, or a later view is in force. */
    uint64_t reported_epoch, reporters;
    uint64_t suspects;     /* slots that these reports exclude, and that have not reported it */
    uint64_t mask_from_ns; /* no view forms of fewer than all slots before */
    bool shrinks; /* the epoch that ends has lost a slot: the next one may do without it, at once */
    bool planned; /* the epoch ends for another placement, which is loaded: this is no failure */
    bool unsaved; /* a view in `saved` has ended, and no SAVE says so yet */

    /* The last view that was in force, once it has ended. */
    struct {
        uint64_t incarnations[SLOTS_MAX]; /* its members; 0 = not known */
        /* The earliest end of the lease of a member that is lost; MOE_NEVER = none is. Then no
         * change under that view can complete. */
        uint64_t lease_end_ns;
        bool settled; /* there was none, or all its members have drained */
    } past;

    /* `attempts` returns to 0 when a view has lasted a lease, or a new worker registers. */
    uint32_t attempts;
    uint32_t
        waits; /* attempts in a row that failed because an operator must act; not counted above */
    bool operator_decided; /* TryAgain arrived while an epoch was forming: the next one
                                        needs no back-off */
    uint64_t next_try_ns;
    bool failed;
    bool degraded;  /* a view was lost */
    bool restoring; /* the view is from the log; some members have not reconnected */
    char trouble[MOE_MEMBERSHIP_REASON_BYTES]; /* why the group does not serve; "" = no failure */
    uint64_t causes[MOE_CAUSE_COUNT];

    uint64_t refused_ns; /* time of the last logged refusal; 0 = never */
    enum moe_code refused_code;
    uint32_t refusals_unlogged;

    bool shutting_down, exited;
    uint64_t shutdown_deadline_ns;
    char shutdown_reason[MOE_MEMBERSHIP_REASON_BYTES];

    struct moe_membership_action actions[ACTIONS_MAX]; /* ring */
    size_t action_head, action_count;
};

/* ------------------------------------------------------------------ time (report.c) */

/* The machine's clock is the latest time of an input; an input that came in earlier and waited does
 * not set it back. A long time without any input means that this process was stopped or waited for
 * a slow disk. Heartbeats of that time wait unread, so all leases grow by the pause. */
void moe_membership__set_time(struct moe_membership *m, uint64_t now_ns);

/* ------------------------------------------------------------------ outputs (report.c) */

/* A zeroed action at the end of the queue; the caller fills it in. */
struct moe_membership_action *moe_membership__emit(struct moe_membership *m,
                                                   enum moe_membership_action_kind kind);
/* An event about `slot`, or MOE_MEMBERSHIP_NO_SLOT. */
void moe_membership__log(struct moe_membership *m, enum moe_log_level level,
                         enum moe_membership_event event, uint32_t slot, const char *fmt, ...)
    MOE_PRINTF(5, 6);
/* A message to the slot's stream; NULL when it is not connected. */
struct moe_membership_action *moe_membership__send(struct moe_membership *m, uint32_t slot,
                                                   enum moe_membership_message message);
/* ASSIGN of this version. A slot may get several of one version, before and after it reconnects,
 * and may have dropped its share in between: only the answer to the last one counts. False when it
 * is not connected. */
bool moe_membership__assign(struct moe_membership *m, uint32_t slot, uint32_t version, bool keep);
/* Ends any stream, also one without a slot. */
void moe_membership__close(struct moe_membership *m, uint64_t stream, struct moe_status status);
/* Makes `saved` durable; `await`: on_saved continues the epoch. */
void moe_membership__save(struct moe_membership *m, bool await);

void moe_membership__keep_error(struct member *member, const struct moe_status *error);
/* "slot 1" for mask 0b10, "slots 1, 3" for 0b1010. */
enum { MOE_MEMBERSHIP_SLOT_LIST_BYTES = 6 + 4 * SLOTS_MAX };
void moe_membership__list_slots(char to[MOE_MEMBERSHIP_SLOT_LIST_BYTES], uint64_t mask);

bool moe_membership__is_cordoned(const struct moe_membership *m, uint32_t slot);

/* ------------------------------------------------------------------ inputs (membership.c) */

/* Begins every input except on_saved. False after EXIT. */
bool moe_membership__begin_input(struct moe_membership *m, uint64_t now_ns);
/* Takes the steps that the input allows. */
void moe_membership__end_input(struct moe_membership *m);
struct moe_status moe_membership__check_reason(const char *reason) MOE_CHECKED;

/* ------------------------------------------------------------------ slots (members.c) */

bool moe_membership__find_stream(const struct moe_membership *m, uint64_t stream, uint32_t *slot);
/* Records this process as the latest of its worker. */
void moe_membership__remember(struct moe_membership *m, const struct member *member);
struct moe_status moe_membership__register(struct moe_membership *m, uint64_t stream,
                                           const struct moe_membership_register *r) MOE_CHECKED;
/* Frees the slot, and ends the epoch. `last_status` ends the stream, if it is open. */
void moe_membership__lose(struct moe_membership *m, uint32_t slot, enum moe_membership_cause cause,
                          const char *what, struct moe_status last_status);
void moe_membership__drain(struct moe_membership *m, uint32_t slot, const char *reason,
                           uint32_t limit_ms);
/* Drains the slot. An epoch that forms starts over without it; a view goes on until it has left. */
void moe_membership__begin_drain(struct moe_membership *m, uint32_t slot, const char *why,
                                 const char *reason, uint32_t limit_ms);

/* Takes the next step to let `newcomers` join the view in force; 0: none waits. `state`: that the
 * sequencer reports; NULL = none. `all`: all members report it. */
void moe_membership__ask_to_read(struct moe_membership *m, uint64_t newcomers,
                                 const struct moe_saved_training *state, bool all);
/* Those of `newcomers` that have read `state`; 0 while training waits for one that reads it. */
uint64_t moe_membership__find_readers(const struct moe_membership *m, uint64_t newcomers,
                                      const struct moe_saved_training *state);
/* Those of `newcomers` that have read a state or can be ordered to: not late with an order. */
uint64_t moe_membership__free_to_read(const struct moe_membership *m, uint64_t newcomers);
/* As HeartbeatAnswer.released_calls. */
uint64_t moe_membership__released_calls(const struct moe_membership *m, uint64_t newcomers);
void moe_membership__checkpoint_read(struct moe_membership *m, uint32_t slot, uint64_t order,
                                     const struct moe_status *error);
/* False once it has failed too often, until a new process has the slot. */
bool moe_membership__may_read(const struct moe_membership *m, uint32_t slot);
/* These slots join a view, or their processes are lost or connect again. */
void moe_membership__forget_readers(struct moe_membership *m, uint64_t slots);

/* ------------------------------------------------------------------ places (scale.c) */

bool moe_membership__is_place(const struct moe_membership *m, uint32_t slot);
uint32_t moe_membership__size(const struct moe_membership *m);
/* The view in force has an older placement than the next one. */
bool moe_membership__is_replaced(const struct moe_membership *m);
/* A number above those of all placements so far, also of those before a restart. Make it durable
 * before a worker gets it: one that still loads an older placement reports it by its version. */
uint32_t moe_membership__new_version(struct moe_membership *m);
/* Begins to move experts to `places`, while the view in force goes on. */
struct moe_status moe_membership__begin_scaling(struct moe_membership *m, uint64_t places,
                                                const char *reason) MOE_CHECKED;
/* Whether the group can be scaled now. */
struct moe_status moe_membership__may_scale(const struct moe_membership *m) MOE_CHECKED;
/* Undoes a scaling, unless its placement is active; does nothing when there is none. */
void moe_membership__abandon_scaling(struct moe_membership *m, const struct moe_status *why);
/* Takes the next step of a scaling, if possible. Called after every input. */
void moe_membership__advance_scaling(struct moe_membership *m);
/* The slot has loaded the placement that the group is being scaled to, or failed to. */
void moe_membership__next_loaded(struct moe_membership *m, uint32_t slot,
                                 const struct moe_status *error);
/* The version of the placement that the group is being scaled to is durable, or cannot be saved. */
void moe_membership__version_saved(struct moe_membership *m, const struct moe_status *status);
/* Whether the slots that serve, or could, have every expert without this one. */
bool moe_membership__spares(const struct moe_membership *m, uint32_t slot);
/* Whether the experts of the slot go to others before its worker leaves. */
bool moe_membership__moves_first(const struct moe_membership *m, uint32_t slot);
/* The places without this slot, and without workers that leave: with a spare worker instead if
 * there is one. */
struct moe_status moe_membership__find_other_places(const struct moe_membership *m, uint32_t slot,
                                                    uint64_t *places) MOE_CHECKED;
/* Begins to move the experts of the slot to those places; it is drained after that. An input. */
struct moe_status moe_membership__move_away(struct moe_membership *m, uint64_t now_ns,
                                            uint32_t slot, const char *reason,
                                            uint64_t *epoch) MOE_CHECKED;
/* The process in the slot is lost. */
void moe_membership__note_lost_place(struct moe_membership *m, uint32_t slot);

/* ------------------------------------------------------------------ epochs (formation.c) */

/* Ends the forming epoch, else the view in force; does nothing when there is neither. */
void moe_membership__end_epoch(struct moe_membership *m, enum moe_membership_cause cause,
                               const char *why);
/* Every expert has a copy on these slots. */
bool moe_membership__covers(const struct moe_membership *m, uint64_t slots);
/* True for slots of the epoch that forms, else of that in force. */
bool moe_membership__takes_part(const struct moe_membership *m, uint32_t slot);
/* Views may form without some slots: there are replicas, or views may lack experts. */
bool moe_membership__may_shrink(const struct moe_membership *m);
/* phase != IDLE: a slot of `live` has a process of the last view. */
bool moe_membership__has_heirs(const struct moe_membership *m);
/* Workers outside of the view in force that could take part; 0 = none. */
uint64_t moe_membership__newcomers(const struct moe_membership *m);
/* In such a group: if the others suffice for a view, views form without `slots` for a while. Call
 * it before the epoch ends. */
void moe_membership__exclude(struct moe_membership *m, uint64_t slots);
/* Slots that can take part in the next view. */
uint64_t moe_membership__able_slots(const struct moe_membership *m);
/* Takes the next step towards a view, if possible. Called after every input. */
void moe_membership__advance(struct moe_membership *m);
/* The worker in `slot` has come back, perhaps with the session of the view in the log. */
void moe_membership__learn_session(struct moe_membership *m, uint32_t slot,
                                   const struct moe_membership_register *r);
void moe_membership__blob(struct moe_membership *m, uint32_t slot, uint64_t epoch, uint32_t round,
                          const uint8_t *data, size_t length);
void moe_membership__ready(struct moe_membership *m, uint32_t slot, uint64_t epoch,
                           uint64_t together, const struct moe_status *error);
/* The smallest max_tokens_per_step of the workers in these slots; 0 = none is known. */
uint32_t moe_membership__least_tokens(const struct moe_membership *m, uint64_t slots);
/* form_deadline_ns has passed. */
void moe_membership__form_timeout(struct moe_membership *m);
/* When members that have given no sign since PREPARE are left out of the attempt; MOE_NEVER = they
 * are not. */
uint64_t moe_membership__answer_deadline(const struct moe_membership *m);
/* That time has passed. */
void moe_membership__answer_timeout(struct moe_membership *m);
/* A member of the last view may still complete changes with the others: a group that trains waits
 * until past.lease_end_ns. */
bool moe_membership__fenced(const struct moe_membership *m);
/* Finds a slot that keeps the group from forming, and the reason; false when none does. */
bool moe_membership__blocked(const struct moe_membership *m, uint32_t *slot, const char **why);
uint32_t moe_membership__count_taken(const struct moe_membership *m);
bool moe_membership__all_taken(const struct moe_membership *m);

#endif
