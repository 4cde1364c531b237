/* Insides of the membership machine, shared by membership.c (seats: who is there) and formation.c
 * (epochs: who works together). Nothing else includes this. */
#ifndef MOE_COORDINATOR_MEMBERSHIP_STATE_H
#define MOE_COORDINATOR_MEMBERSHIP_STATE_H

#include "base/clock.h"
#include "coordinator/membership.h"

enum {
    SLOTS_MAX = MOE_PLACEMENT_SLOTS_MAX,
    LAYERS_MAX = MOE_PLACEMENT_LAYERS_MAX,
    /* One input causes at most a handful of messages per seat. */
    ACTIONS_MAX = 16 * SLOTS_MAX,
    HISTORY_MAX = 64,
};

enum seat_hold {
    SEAT_EMPTY, /* never held */
    SEAT_HELD,
    SEAT_GONE, /* held before; the fields tell by whom */
};

struct seat {
    enum seat_hold hold;
    char worker_id[MOE_MEMBERSHIP_ID_BYTES];
    char endpoint[MOE_MEMBERSHIP_ENDPOINT_BYTES]; /* "" = known from the log only */
    uint64_t incarnation;
    uint64_t stream; /* 0 = not connected; else HELD */
    uint64_t heard_ns;
    uint32_t max_tokens;
    bool assigned; /* ASSIGN was sent to this process */
    bool loaded;
    bool load_failed; /* this process cannot take part: `error` says why */
    bool draining;    /* DRAIN was sent */
    bool leaving;     /* it said that it is done */
    bool unverified;  /* member of the view in force that has to show so by its next heartbeat */
    uint32_t drain_limit_ms;
    struct moe_membership_heartbeat last;
    struct moe_status error;
};

enum phase {
    PHASE_IDLE,       /* no epoch is in work */
    PHASE_SAVE_EPOCH, /* the new epoch is being made durable; no worker knows of it */
    PHASE_PREPARE,    /* PREPARE was sent; blobs and READYs come in */
    PHASE_SAVE_VIEW,  /* all are ready; the view is being made durable */
};

struct moe_membership {
    struct moe_membership_config config;
    uint64_t now_ns; /* of the last input */
    struct seat seats[SLOTS_MAX];

    /* What the workers of this group have in common; set by the first one. */
    bool model_known;
    char backend[MOE_MEMBERSHIP_SHORT_BYTES], family[MOE_MEMBERSHIP_SHORT_BYTES];
    char model[MOE_MEMBERSHIP_ID_BYTES], fingerprint[MOE_MEMBERSHIP_ID_BYTES];
    struct moe_membership_layer layers[LAYERS_MAX];
    size_t layer_count;
    struct moe_placement *placement;
    bool placement_durable; /* its version may be announced */

    /* Processes that ever held a seat, oldest first; a ring. Of each worker only the latest may
     * come again: a late message of an older one must not win the seat back. */
    struct {
        char worker_id[MOE_MEMBERSHIP_ID_BYTES];
        uint64_t incarnation;
    } history[HISTORY_MAX];
    size_t history_count; /* ever; the next one goes to [history_count % HISTORY_MAX] */

    /* Durable state as it should be, and the write that is under way. */
    struct moe_membership_saved saved;
    uint64_t announced_epoch; /* highest that workers were told of; durable, <= saved.epoch */
    uint64_t save_sequence;   /* of the last SAVE */
    uint64_t awaited_save;    /* the SAVE whose end the machine waits for; 0 = none */

    /* The epoch in work. */
    enum phase phase;
    uint64_t epoch;            /* phase != IDLE; == saved.epoch */
    uint64_t form_deadline_ns; /* phase != IDLE */
    uint32_t ready_mask, blob_mask;
    uint32_t round; /* the round that is being collected */
    struct {
        size_t length;
        uint8_t data[MOE_MEMBERSHIP_BLOB_BYTES];
    } blobs[SLOTS_MAX];

    /* The epoch in force. All seats are HELD by its members as long as view_epoch != 0. */
    uint64_t view_epoch;
    uint64_t view_since_ns;

    /* Attempts. `attempts` falls back to 0 when a view has lasted a lease, or a new worker came. */
    uint32_t attempts;
    uint32_t
        waits; /* attempts in a row that failed for want of an operator's word; not counted above */
    bool told; /* the epoch in work may have begun before an operator spoke: the next one need not
                  wait */
    uint64_t next_try_ns;
    bool failed;
    bool degraded;  /* there was a view, and it was lost */
    bool restoring; /* the view comes from the log; not all of its members have come back */
    char trouble[MOE_MEMBERSHIP_REASON_BYTES]; /* why not serving; "" = nothing went wrong */
    uint64_t causes[MOE_CAUSE_COUNT];

    uint64_t refused_ns; /* when a refusal was logged last; 0 = never */
    enum moe_code refused_code;
    uint32_t refusals_unsaid;

    bool shutting_down, exited;
    uint64_t shutdown_deadline_ns;
    char shutdown_reason[MOE_MEMBERSHIP_REASON_BYTES];

    struct moe_membership_action actions[ACTIONS_MAX]; /* ring */
    size_t action_head, action_count;
};

/* ------------------------------------------------------------------ time (membership.c) */

/* When nothing reached this machine for long, it was held up itself (stopped, or by a slow disk)
 * and the heartbeats of that time wait unread: the pause is no worker's fault, and leases grow by
 * it. */
void moe_membership__set_time(struct moe_membership *m, uint64_t now_ns);

/* ------------------------------------------------------------------ outputs (membership.c) */

/* A zeroed action at the end of the queue, to be filled in. */
struct moe_membership_action *moe_membership__emit(struct moe_membership *m,
                                                   enum moe_membership_action_kind kind);
void moe_membership__log(struct moe_membership *m, enum moe_log_level level, const char *fmt, ...)
    MOE_PRINTF(3, 4);
/* A message to the seat's stream; NULL when it is not connected. */
struct moe_membership_action *moe_membership__send(struct moe_membership *m, uint32_t slot,
                                                   enum moe_membership_message message);
/* Ends a stream: any, also one without a seat. */
void moe_membership__close(struct moe_membership *m, uint64_t stream, struct moe_status status);
/* Makes `saved` durable; `await`: the machine goes on in on_saved. */
void moe_membership__save(struct moe_membership *m, bool await);
/* Copies at most `size` - 1 bytes; anything but printable ASCII becomes '?', because the text may
 * come from a peer and goes into logs and proto3 strings. */
void moe_membership__copy_text(char *to, size_t size, const char *from);

void moe_membership__keep_error(struct seat *seat, const struct moe_status *error);
/* "slot 1" for mask 0b10, "slots 1, 3" for 0b1010. */
enum { MOE_MEMBERSHIP_SLOT_LIST_BYTES = 6 + 4 * SLOTS_MAX };
void moe_membership__list_slots(char to[MOE_MEMBERSHIP_SLOT_LIST_BYTES], uint64_t mask);

/* ------------------------------------------------------------------ seats (seats.c) */

bool moe_membership__find_stream(const struct moe_membership *m, uint64_t stream, uint32_t *slot);
/* Remembers that this process is the latest of its worker. */
void moe_membership__remember(struct moe_membership *m, const struct seat *seat);
struct moe_status moe_membership__register(struct moe_membership *m, uint64_t stream,
                                           const struct moe_membership_register *r) MOE_CHECKED;
/* The seat becomes free. `parting` is what its stream, if there still is one, ends with. */
void moe_membership__lose(struct moe_membership *m, uint32_t slot, enum moe_membership_cause cause,
                          const char *what, struct moe_status parting);
void moe_membership__drain(struct moe_membership *m, uint32_t slot, const char *reason,
                           uint32_t limit_ms);

/* ------------------------------------------------------------------ epochs (formation.c) */

/* The view in force (if any) or the epoch in work (if any) is over. */
void moe_membership__end_epoch(struct moe_membership *m, enum moe_membership_cause cause,
                               const char *why);
/* Takes the next step towards a view, if one can be taken now. Called after every input. */
void moe_membership__advance(struct moe_membership *m);
void moe_membership__blob(struct moe_membership *m, uint32_t slot, uint64_t epoch, uint32_t round,
                          const uint8_t *data, size_t length);
void moe_membership__ready(struct moe_membership *m, uint32_t slot, uint64_t epoch,
                           const struct moe_status *error);
/* form_deadline_ns has come. */
void moe_membership__form_timeout(struct moe_membership *m);
/* A seat that keeps the group from forming, and why; false when none does. */
bool moe_membership__hindered(const struct moe_membership *m, uint32_t *slot, const char **why);
uint32_t moe_membership__count_held(const struct moe_membership *m);
bool moe_membership__all_held(const struct moe_membership *m);

#endif
