/* SPDX-License-Identifier: Apache-2.0 */
/* One direction of a stream between the coordinator and a worker, in the simulations of the
 * membership machine: messages arrive in the order in which they were sent, each at its time. */
#ifndef MOE_TEST_SIM_STREAM_H
#define MOE_TEST_SIM_STREAM_H

#include "base/status.h"
#include "coordinator/membership.h"

enum sim_kind {
    SIM_REGISTERED, /* from the coordinator, in the order of enum moe_membership_message */
    SIM_ASSIGN,
    SIM_PREPARE,
    SIM_BLOBS,
    SIM_COMMIT,
    SIM_ABORT,
    SIM_DRAIN,
    SIM_TRYING_AGAIN,
    SIM_HEARTBEAT_ANSWER,
    SIM_READ_CHECKPOINT,
    SIM_CLOSED, /* either way: the stream has ended */
    SIM_REGISTER,
    SIM_HEARTBEAT,
    SIM_LOADED,
    SIM_BLOB,
    SIM_READY,
    SIM_PEER_LOST,
    SIM_NOTICE,
    SIM_LEAVING,
    SIM_TRY_AGAIN,
    SIM_CHECKPOINT_READ,
};
_Static_assert((int)SIM_READ_CHECKPOINT == (int)MOE_MEMBERSHIP_READ_CHECKPOINT,
               "kinds from the coordinator are those of the machine");

struct sim_message {
    enum sim_kind kind;
    uint64_t at_ns;  /* arrives then; never decreases along a queue */
    uint64_t stream; /* of the sender, where streams may change meanwhile */
    uint64_t epoch, mask, sequence, oldest_ns;
    uint64_t session; /* of SIM_PREPARE: Prepare.session_epoch; `mask`: the members' slots */
    uint32_t slot, round, version;
    uint64_t order; /* of SIM_ASSIGN, SIM_LOADED, SIM_READ_CHECKPOINT, SIM_CHECKPOINT_READ */
    uint64_t calls; /* of the state that is saved, released or read; 0 = none */
    bool error, keep;
    uint64_t together;      /* of SIM_READY */
    enum moe_reason reason; /* of SIM_CLOSED */
};

enum { SIM_QUEUE_MAX = 256 };

struct sim_queue {
    struct sim_message items[SIM_QUEUE_MAX]; /* a ring */
    size_t head, count;
};

/* `m` arrives at `at_ns`, or with the last message if that comes later. False: the queue is full.
 */
bool sim_push(struct sim_queue *q, struct sim_message m, uint64_t at_ns);
/* Takes the oldest message if it has arrived. */
bool sim_pop(struct sim_queue *q, uint64_t now_ns, struct sim_message *m);

#endif
