/* Save, Load and Export: what their phases share; nobody else includes this. A phase is one slot's
 * part of one, on a thread of its own; see training_phases.c and training_job.c. */
#ifndef MOE_WORKER_TRAINING_PHASES_H
#define MOE_WORKER_TRAINING_PHASES_H

#include "worker/checkpoint.h"
#include "worker/training_state.h"

/* One Save, Load or Export on this slot. */
struct work {
    struct moe_train *train;
    const struct moe_train_call *call;
    struct moe_checkpoint_context context;
    struct moe_checkpoint_state state;
    uint64_t bytes; /* written by this slot, in the phase that runs */
    bool found;     /* the Save had been done before, and not recorded: `state` says which it was */
    struct moe_checkpoint_removed removed; /* by the last phase of a Save; the lowest slot's */
    struct moe_checkpoint_copy *copy;      /* owned; NULL = none */
};

typedef struct moe_status (*phase_fn)(struct work *);

/* A phase as other slots see it. */
struct report {
    uint32_t running, code, reason;
    uint16_t unwanted, found;
    uint64_t bytes;
    uint64_t weights_version, steps; /* with `found` */
    uint64_t writer;                 /* of this slot's process */
    char text[184];
};

struct moe_checkpoint_context moe_train__context_of(struct moe_train *t);
bool moe_train__is_lowest(const struct work *w);

struct report moe_train__report_of(const struct moe_status *st);
/* Tells each other how the slots stand; `mine->writer` need not be set. From then on the context's
 * writer is the lowest slot's, on all slots. A failure is the session's. */
struct moe_status moe_train__exchange(struct work *w, struct moe_session *session,
                                      struct report *mine,
                                      struct report all[MOE_MAX_SLOTS]) MOE_CHECKED;
/* What the group as a whole makes of finished phases: the failure of the lowest slot that failed,
 * so that all slots say the same; bytes of all. Lack of memory only where no slot has another
 * reason: it can be helped, by a copy less. */
struct moe_status moe_train__conclude(const struct report *all, uint64_t live,
                                      uint64_t *bytes) MOE_CHECKED;
/* RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
bool moe_train__lacks_memory(const struct moe_status *st);
bool moe_train__any_running(const struct report *all, uint64_t live);

/* Runs one phase on all slots. `*verdict`: how it went, the same everywhere; `*bytes`: over all
 * slots. A failure is the session's: nobody knows how the others did. */
struct moe_status moe_train__together(struct work *w, struct moe_session *session, phase_fn run,
                                      struct moe_status *verdict, uint64_t *bytes) MOE_CHECKED;

/* When a Save has ended well: all slots get to know what the lowest has removed. */
struct moe_status moe_train__share_removed(struct work *w, struct moe_session *session,
                                           struct moe_checkpoint_removed *out) MOE_CHECKED;

/* Phases. Nothing to do on slots that they are not for. */
enum { SAVE_COPY, SAVE_BEGIN, SAVE_WRITE, SAVE_COMMIT, SAVE_TIDY, SAVE_PHASES };
extern const phase_fn moe_train__save_phases[SAVE_PHASES];
struct moe_status moe_train__load_read(struct work *w) MOE_CHECKED;
/* What a Save or Load that was given up left here is removed; FAILED_PRECONDITION/SAVE_RUNNING
 * while its thread still runs. training_job.c. */
struct moe_status moe_train__settle_old(struct work *w) MOE_CHECKED;
struct moe_status moe_train__load_take(struct work *w) MOE_CHECKED;
/* Lowest slot: which calls will have been run when this Save has. Once is enough. */
struct moe_status moe_train__pack_records(struct work *w) MOE_CHECKED;
/* Checkpoint `name`, of the state after `steps`, is where the group goes back to from now on. */
void moe_train__note_checkpoint(struct moe_train *t, const char *name, uint64_t steps);
/* All of it but the copy, from the trainers, while the engine waits. */
struct moe_status moe_train__run_save(struct work *w, struct moe_session *session,
                                      struct moe_status *verdict, uint64_t *bytes) MOE_CHECKED;

#endif
