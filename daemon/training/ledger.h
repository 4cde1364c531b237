/* SPDX-License-Identifier: Apache-2.0 */
/* The record of training calls on a slot: it recognises repeats, so no call runs twice. All slots
 * see the same tickets in the same order and record the same calls. So the ledgers of a group are
 * equal at every ticket, and so are their decisions.
 *
 * Calls belong to sessions: Backward calls to the client's, all others to one sequence, the session
 * "". A session keeps its latest calls, and the highest id that it has forgotten; new ids must be
 * higher. When there are too many sessions, the one that recorded least recently is forgotten. Its
 * highest id goes into a small table by the hash of its name. Another session at the same place may
 * be refused without need (ID_TOO_OLD), but a forgotten call never runs again.
 *
 * Pure: no clock, no lock, no memory after create. */
#ifndef MOE_TRAINING_LEDGER_H
#define MOE_TRAINING_LEDGER_H

#include "base/status.h"
#include "daemon/name.h"

#include <stddef.h>

struct moe_ledger;

enum {
#ifdef MOE_SIMULATION /* so few that a run reaches them */
    MOE_LEDGER_SESSIONS = 4,
    MOE_LEDGER_CALLS = 6,
    MOE_LEDGER_FORGOTTEN = 4,
#else
    MOE_LEDGER_SESSIONS = 256,
    MOE_LEDGER_CALLS = 256,       /* of one session */
    MOE_LEDGER_FORGOTTEN = 65536, /* places for the highest ids of forgotten sessions */
#endif
};

/* Hashes of the content of a call. A Backward after a retained forward pass may come without x: it
 * has the same header_hash, and no tensor_hash. Of a call without tensors, tensor_hash is that of
 * its session's name; zeros for the session "". */
struct moe_content {
    uint64_t header_hash[2], tensor_hash[2];
};

/* What a call did; for calls that are the same on all slots this is the whole answer. */
struct moe_ledger_outcome {
    uint64_t epoch, lineage, weights_version, steps;
    union {
        uint64_t bytes;      /* that were written */
        uint64_t lost_steps; /* Load: steps that no checkpoint had */
    };
    uint64_t backwards; /* number of Backward calls with gradients that were used or dropped; of a
                           Backward: 1 if it has gradients */
    uint64_t nonfinite; /* 1: an optimizer step was skipped */
    double number;      /* gradient norm, or load-balance loss */
};

/* Checkpoints have these bytes: see pack. */
struct moe_ledger_call {
    uint64_t id;
    struct moe_content content;
    uint64_t origin; /* slot that was asked */
    struct moe_ledger_outcome outcome;
};

enum moe_ledger_decision {
    MOE_LEDGER_NEW,
    MOE_LEDGER_REPEAT,
    MOE_LEDGER_REUSED,  /* the id is known with other content */
    MOE_LEDGER_TOO_OLD, /* never seen or forgotten, and lower than one that was forgotten */
};

struct moe_status moe_ledger_create(struct moe_ledger **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_ledger_destroy(struct moe_ledger *l);
struct moe_status moe_ledger_copy(const struct moe_ledger *from,
                                  struct moe_ledger **out) MOE_CHECKED;
/* As after create. */
void moe_ledger_reset(struct moe_ledger *l);

/* The decision on a call. Changes nothing. On REPEAT `*call`, if asked for, is the record;
 * valid until the next change. */
enum moe_ledger_decision moe_ledger_look(const struct moe_ledger *l, const char *session,
                                         uint64_t id, const struct moe_content *content,
                                         const struct moe_ledger_call **call);
/* The call recorded under an id, whatever its content; NULL when there is none. */
const struct moe_ledger_call *moe_ledger_find(const struct moe_ledger *l, const char *session,
                                              uint64_t id);
/* Records a call that was NEW, or, after unpack, replaces the one with the same id. Names have at
 * most MOE_TRAINING_NAME_MAX characters. */
void moe_ledger_record(struct moe_ledger *l, const char *session,
                       const struct moe_ledger_call *call);

/* The same for a call that can be taken back, until moe_ledger_settle. */
void moe_ledger_record_pending(struct moe_ledger *l, const char *session,
                               const struct moe_ledger_call *call);
void moe_ledger_settle(struct moe_ledger *l);
/* Forgets all pending calls: their ids are free again, as far as the session remembers them. Calls
 * `each` for every one, ordered by session and id. Count and hash stay. */
typedef void (*moe_ledger_each_fn)(void *ctx, const char *session,
                                   const struct moe_ledger_call *call);
void moe_ledger_take_back(struct moe_ledger *l, moe_ledger_each_fn each, void *ctx);

/* Calls recorded since the beginning or the last reset or unpack, and a hash over all of them in
 * order: equal exactly when two slots have recorded the same. */
uint64_t moe_ledger_count(const struct moe_ledger *l);
uint64_t moe_ledger_hash(const struct moe_ledger *l);
/* The hash goes on from this one. For a ledger with equal calls, and another way to write the slots
 * that were asked. */
void moe_ledger_set_hash(struct moe_ledger *l, uint64_t hash);
/* The highest id of a session, 0 = none known. */
uint64_t moe_ledger_highest(const struct moe_ledger *l, const char *session);

/* For checkpoints. The packed form is for machines of one byte order. Unpack checks it
 * completely. */
size_t moe_ledger_packed_size(const struct moe_ledger *l);
void moe_ledger_pack(const struct moe_ledger *l, uint8_t *to); /* packed_size bytes */
/* Replaces everything. Errors: MOE_DATA_LOSS/MALFORMED, without effect. */
struct moe_status moe_ledger_unpack(struct moe_ledger *l, const uint8_t *from,
                                    size_t bytes) MOE_CHECKED;

#endif
