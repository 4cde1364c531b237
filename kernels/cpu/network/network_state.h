/* SPDX-License-Identifier: Apache-2.0 */
/* The state of a session's network. Internal to network.c and message.c. */
#ifndef MOE_CPU_NETWORK_STATE_H
#define MOE_CPU_NETWORK_STATE_H

#include "cpu/network/network.h"
#include "cpu/network/ucx.h"

#include "base/wait.h"

enum {
    /* Messages of the network itself: hello, goodbye, notices. */
    MOE_CPU_OWN_MESSAGES = 8 * MOE_MAX_SLOTS,
    MOE_CPU_ALL_MESSAGES = MOE_CPU_MAX_MESSAGES + MOE_CPU_OWN_MESSAGES,
    MOE_CPU_MAX_STRANGERS = 2 * MOE_MAX_SLOTS, /* links without a hello */
};

enum moe_cpu_message_kind {
    MOE_CPU_HELLO = 1, /* body: the receiver's secret */
    MOE_CPU_STORES,    /* body: records of stores */
    MOE_CPU_NOTICE,    /* body: struct moe_cpu_notice */
    MOE_CPU_GOODBYE,   /* the sender leaves in order */
    MOE_CPU_FAREWELL,  /* answer to it: all that the leaver sent has been carried out */
};

/* Before the body. All processes of a group run one release on one kind of processor. */
struct moe_cpu_message_head {
    uint32_t kind, slot;    /* of the sender */
    uint64_t epoch, number; /* of the join; from 1 on each link, HELLO is not counted */
};

/* The sender has the mask of `epoch`, and has lost these slots in it. */
struct moe_cpu_notice {
    uint64_t epoch, lost;
};

/* A record: this, then `bytes` of data, rounded up to 8. */
struct moe_cpu_store_record {
    uint64_t offset;
    uint32_t bytes;
    uint32_t is_flags; /* data are flags, one after the other */
};

struct moe_cpu_message {
    struct moe_ucx_send send;
    struct moe_cpu_message_head head;
    struct moe_cpu_network *network;
    struct moe_cpu_message *next; /* in the free list, or in the queue */
    uint32_t slot;                /* the receiver */
    bool counted;                 /* in outstanding[slot] */
    size_t used;
    struct moe_cpu_store_record *flags; /* the last record, if it has flags */
    uint64_t body[MOE_CPU_MESSAGE_BYTES / 8];
};

/* Used while `drive` is held. */
struct moe_cpu_line {
    moe_ucx_link link;
    bool verified;
    bool broken;     /* the link is to be closed */
    const char *why; /* UCX's reason for it, static; NULL = none */
    bool left;
    uint64_t sent, received; /* numbers of messages */
};

struct moe_cpu_network {
    struct moe_cpu_network_config config;
    struct moe_cpu_network_endpoint endpoint;
    struct moe_mutex drive; /* held during calls of UCX, and its callbacks; taken before `lock` */
    struct moe_ucx *ucx;
    uint64_t peers; /* atomic once the thread runs */
    struct moe_cpu_line line[MOE_MAX_SLOTS];
    const struct moe_cpu_network_endpoint *endpoints; /* while connecting */
    moe_ucx_link stranger[MOE_CPU_MAX_STRANGERS];
    bool stranger_broken[MOE_CPU_MAX_STRANGERS];
    int wake_fd; /* eventfd */
    bool running;
    pthread_t thread;
    bool asleep;        /* atomic: a sender writes to wake_fd */
    uint64_t helped_ns; /* atomic: when a waiting thread last drove UCX; 0 = none does */

    struct moe_mutex lock;
    pthread_cond_t freed; /* a message is free, or `parted` grew */
    struct moe_cpu_message *all[MOE_CPU_ALL_MESSAGES] MOE_GUARDED_BY(lock);
    uint32_t made MOE_GUARDED_BY(lock);
    struct moe_cpu_message *free MOE_GUARDED_BY(lock);
    struct moe_cpu_message *first MOE_GUARDED_BY(lock), *last MOE_GUARDED_BY(lock); /* queue */
    uint32_t outstanding[MOE_MAX_SLOTS] MOE_GUARDED_BY(lock); /* taken and not sent */
    uint64_t parted MOE_GUARDED_BY(lock); /* peers that said farewell, or are gone */
    bool stop MOE_GUARDED_BY(lock);
};

/* Carries out the stores of a message's body. False if one does not fit the window. */
bool moe_cpu_message_carry_out(const struct moe_cpu_network *n, const void *body, size_t bytes);
/* A message of the network thread; NULL if there is no memory. */
struct moe_cpu_message *moe_cpu_message_own(struct moe_cpu_network *n, uint32_t slot,
                                            enum moe_cpu_message_kind kind);
/* Appends to the queue. */
void moe_cpu_message_enqueue(struct moe_cpu_message *m);
/* The queue as a list, oldest first, which is empty afterwards. */
struct moe_cpu_message *moe_cpu_message_queue(struct moe_cpu_network *n);
/* Puts a message back that was not sent. */
void moe_cpu_message_drop(struct moe_cpu_message *m);
void moe_cpu_message_free_all(struct moe_cpu_network *n);

#endif
