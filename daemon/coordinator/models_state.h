/* SPDX-License-Identifier: Apache-2.0 */
/* Internal state of the machine of added models, shared by models.c (inputs, reading) and
 * model_steps.c (what comes next, outputs). Private to these files. */
#ifndef MOE_COORDINATOR_MODELS_STATE_H
#define MOE_COORDINATOR_MODELS_STATE_H

#include "base/clock.h"
#include "base/guard.h"
#include "coordinator/models.h"

/* What the group does with a model. */
enum model_phase {
    PHASE_FREE,     /* no model is here */
    PHASE_NUMBER,   /* the number is being made durable */
    PHASE_OPENING,  /* all slots open it; planning */
    PHASE_LOADING,  /* all slots load it */
    PHASE_SAVING,   /* all hold it; the model is being made durable */
    PHASE_KEPT,     /* the group has it: slots load it if they have not, and views add it */
    PHASE_QUIESCE,  /* an unload; it can still be undone */
    PHASE_RESUME,   /* an unload is undone */
    PHASE_DECIDE,   /* the unload is being made durable */
    PHASE_REMOVE,   /* the unload waits for REMOVE tickets, or for the next view */
    PHASE_CLOSE,    /* slots free it: an unload, or a load that is undone */
    PHASE_GONE,     /* an unload: its end is being made durable */
    PHASE_ANSWERED, /* free at the next input: until then, the caller may read it */
};

enum place_state { PLACE_NONE, PLACE_OPEN, PLACE_HELD, PLACE_BAD };

/* A model in one slot. Zeroes: a process that knows nothing of it. */
struct place {
    enum place_state state; /* BAD: a load has failed here; CLOSE comes next, if it may */
    /* The last order; `step` 0 = none, or it was reported. */
    enum moe_added_step step;
    uint64_t order, stream, first_ns, sent_ns;
    uint64_t alive_ns;       /* of the last progress of a LOAD */
    uint64_t added, removed; /* epochs of the tickets that the slot has run */
    bool done;               /* QUIESCE, RESUME, CLOSE: reported in this phase */
    bool failed;             /* until it holds the model */
    uint64_t retry_ns, backoff_ns;
    struct moe_model_plan plan;
    uint64_t loaded_bytes, total_bytes;
};

struct model {
    enum model_phase phase;
    struct moe_added_entry entry;
    char family[MOE_MEMBERSHIP_SHORT_BYTES];
    char reason[MOE_STATUS_TEXT]; /* of the last failure since the model was served; "" = none */
    struct moe_model_layer layers[MOE_PLACEMENT_LAYERS_MAX];
    size_t layer_count; /* 0: no slot has opened it */
    struct moe_placement *placement;
    bool dry_run, if_idle;
    bool unsaved;             /* the entry has a fingerprint that is not durable */
    uint64_t call;            /* that waits for an answer; 0 = none */
    struct moe_status result; /* CLOSE: of the load that is undone; code MOE_OK: dry run */
    uint64_t phase_ns;        /* when the phase began */
    uint64_t save;            /* awaited SAVE; 0 = none */
    uint64_t save_ns;         /* a failed SAVE is repeated then */
    uint64_t added_epoch;     /* slots may have tickets of it in epochs up to this; 0 = in none */
    uint64_t served_epoch;    /* the last that was logged */
    struct place places[MOE_PLACEMENT_SLOTS_MAX];
};

enum { QUEUE_MAX = 8 * MOE_ADDED_MAX };

struct moe_added {
    struct moe_added_config config;
    uint64_t now_ns, view, next_order, save_sequence;
    uint64_t live;   /* slots of `view`; without one, all */
    uint64_t places; /* slots with experts */
    uint32_t highest;
    struct moe_added_slot slots[MOE_PLACEMENT_SLOTS_MAX];
    struct model *models; /* [MOE_ADDED_MAX]: rising numbers, then free ones */
    struct moe_added_saved saved;
    struct moe_added_action *queue; /* [QUEUE_MAX], a ring: all but orders */
    size_t queue_head, queue_count;
};

/* ------------------------------------------------------------------ model_steps.c */

/* Takes every step that is possible now. Call after every input. */
void moe_added__advance(struct moe_added *m);
void moe_added__enter(struct moe_added *m, struct model *x, enum model_phase phase);
/* A load is undone, with `why` as its answer. */
void moe_added__undo_load(struct moe_added *m, struct model *x, struct moe_status why);
/* An unload is undone. */
void moe_added__undo_unload(struct moe_added *m, struct model *x, struct moe_status why);
/* A load on one slot has failed. */
void moe_added__fail(struct moe_added *m, struct model *x, uint32_t slot,
                     const struct moe_status *why);
static inline bool moe_added__is_live(const struct moe_added *m, uint32_t slot)
{
    return (m->live >> slot & 1) != 0;
}
bool moe_added__is_served(const struct moe_added *m, const struct model *x);
bool moe_added__is_change(const struct model *x);

struct moe_added_action *moe_added__emit(struct moe_added *m, enum moe_added_action_kind kind);
void moe_added__answer(struct moe_added *m, struct model *x, struct moe_status status);
void moe_added__log(struct moe_added *m, enum moe_log_level level, enum moe_membership_event event,
                    uint32_t slot, const char *fmt, ...) MOE_PRINTF(5, 6);
void moe_added__save(struct moe_added *m, struct model *x);
/* Slots may still get tickets of the model. */
bool moe_added__may_run(const struct moe_added *m, const struct model *x);
bool moe_added__held_by_all(const struct moe_added *m, const struct model *x);
/* What the slot should be ordered to do now; 0 = nothing. */
enum moe_added_step moe_added__wanted(const struct moe_added *m, const struct model *x,
                                      uint32_t slot);

#endif
