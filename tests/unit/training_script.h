/* SPDX-License-Identifier: Apache-2.0 */
/* A backend that trains, for tests of what drives one: steps and optimizer steps do nothing but be
 * counted, last as long as the test wants, and fail as it says. One device, session and layer: any
 * pointer will do for them. One test at a time. */
#ifndef MOE_TEST_TRAINING_SCRIPT_H
#define MOE_TEST_TRAINING_SCRIPT_H

#include "base/mutex.h"
#include "moe/backend.h"

#include <pthread.h>

/* The width of a row; rows are F32. */
enum { SCRIPT_HIDDEN = 4 };

/* What happened, and what shall happen. Everything is guarded by `lock` while steps run. */
struct training_script {
    struct moe_mutex lock;
    pthread_cond_t changed;  /* made by moe_wait_init */
    bool hold;               /* steps do not end, until aborted */
    bool aborted;            /* by session_abort; the test clears it for the next session */
    int forwards, backwards; /* begun */
    int running_passes;      /* backward passes that have not ended */
    int unfinished;          /* steps of either kind that have not ended; never above two */
    int optimizer_steps, zero_grads;
    int finished_steps; /* by optimizer_finish */
    double squares;     /* of the last of these */
    int trainers;       /* that exist */
    int exchanges;
    bool hold_passes;    /* backward passes do not end, until aborted */
    bool nobodys;        /* forward steps have no rows on this slot but for its own tokens */
    bool keep;           /* saving steps leave something on the device */
    uint64_t save;       /* of the last forward step that was begun */
    uint64_t retained;   /* of the last backward pass */
    uint64_t kept[64];   /* names of what the device keeps; 0 = a free place */
    uint64_t in_use;     /* `retained` of the backward pass that runs */
    bool dropped_in_use; /* something was dropped that a running pass uses */
    uint64_t limit;      /* retained_limit */
    bool optimizer_overlaps_step; /* an optimizer step began while a step ran */
    bool passes_overlap;          /* a backward pass began while another ran */
    bool nonfinite;               /* what optimizer steps say of their gradients */
    bool bad_token;               /* backward passes find logits that are not finite */
    bool refuse;                  /* passes and optimizer steps are refused by all slots */
    bool block_reads;             /* reads of tensors of a trainer do not end */
    bool no_read_memory;          /* they fail for lack of memory */
    int reads, writes;            /* of those tensors, begun */
    int reads_of_base;
    int reading;             /* reads that have not ended */
    bool changed_while_read; /* an optimizer step, a write or an end of a trainer during a read */
    bool peer_has_done;      /* what is refused here: the exchange says that a peer did it */
};
extern struct training_script script;
extern const struct moe_backend script_backend;

#endif
