/* SPDX-License-Identifier: Apache-2.0 */
/* Stores into windows of slots on other hosts. A message is a list of stores; the other side's
 * network thread carries them out in order, as if the sender had stored them through shared memory.
 * So the algorithm, its order and its bits are those of windows (moe/window.h).
 *
 * One thread per session, the network thread, drives UCX: it sends the messages that other threads
 * hand over, and carries out those that come in. It never waits for a step, so a slot that computes
 * still takes rows.
 *
 * Links prove both ends by secrets that travel through the session's all-gather. A link belongs to
 * one session, and every message has its epoch and number: late data of an older session finds no
 * link. After a mask, late stores of the epoch before may come, before those of the new one: they
 * travel on the same link. What crosses is not encrypted. */
#ifndef MOE_CPU_NETWORK_H
#define MOE_CPU_NETWORK_H

#include "base/status.h"
#include "moe/window.h"

struct moe_cpu_network;
struct moe_cpu_message;

enum {
    MOE_CPU_ADDRESS_BYTES = 48,        /* a numeric address and its final 0 */
    MOE_CPU_MESSAGE_BYTES = 160 << 10, /* of stores in a message; the largest row fits */
    MOE_CPU_MAX_MESSAGES = 256,        /* of a session at once; then senders wait */
};

/* How other slots reach this one. Travels through the caller's all-gather. */
struct moe_cpu_network_endpoint {
    char address[MOE_CPU_ADDRESS_BYTES];
    uint8_t secret[32];
    uint32_t port;
};

struct moe_cpu_network_config {
    uint32_t slot;
    uint64_t epoch;      /* in which the session is joined; every message has it */
    const char *address; /* numeric, of this host; copied */
    uint8_t *window;     /* this slot's, from its base */
    const struct moe_window_layout *layout;
    uint32_t budget_ms; /* how long a sender waits for a free message */
    /* Called by the network thread, and inside moe_cpu_network_help; must not block. */
    void (*stored)(void *ctx);                /* flags of the window have changed */
    void (*closed)(void *ctx, uint32_t slot); /* its line ended without a goodbye */
    void (*left)(void *ctx, uint32_t slot);   /* it said goodbye */
    /* It has the mask of this epoch, and has lost these slots in it. */
    void (*noticed)(void *ctx, uint32_t slot, uint64_t epoch, uint64_t lost);
    /* Any thread, inside moe_cpu_network_take: these take nothing within the budget. */
    void (*late)(void *ctx, uint64_t slots);
    /* Any thread: whether waits must end. */
    bool (*ended)(void *ctx);
    void *ctx;
};

/* False: this build has no network transport, and the other functions are not there. */
bool moe_cpu_network_built(void);

/* Sets what UCX reads from the environment when it is loaded, for moe_backends_prepare: before the
 * process has a second thread. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_cpu_network_prepare(const char *interface, const char *suggested) MOE_CHECKED;

/* Listens; fills in this slot's endpoint.
 * Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED (UCX is not installed), MOE_UNAVAILABLE/IO. */
struct moe_status moe_cpu_network_open(const struct moe_cpu_network_config *config,
                                       struct moe_cpu_network **out,
                                       struct moe_cpu_network_endpoint *endpoint) MOE_CHECKED;
/* Connects to `peers` (bit s: slot s), which do the same, and starts the network thread.
 * `endpoints` by slot. Returns by `deadline_ns`.
 * Errors: MOE_UNAVAILABLE/PEER_LOST, with the slot and its address. */
struct moe_status moe_cpu_network_connect(struct moe_cpu_network *n, uint64_t peers,
                                          const struct moe_cpu_network_endpoint *endpoints,
                                          uint64_t deadline_ns) MOE_CHECKED;
/* For a thread that waits for a flag. Moves messages, as the network thread does: that thread then
 * need not wake up first. Callbacks run inside. */
void moe_cpu_network_help(struct moe_cpu_network *n);
/* The thread that helped goes to sleep: the network thread goes on. */
void moe_cpu_network_stop_helping(struct moe_cpu_network *n);
/* Any thread. Tells all peers that this slot has the mask of `epoch`, and has lost the slots of
 * `lost` in it. */
void moe_cpu_network_notify(struct moe_cpu_network *n, uint64_t epoch, uint64_t lost);
/* Closes the lines of slots that `live` lacks, so that no message waits for them. No other thread
 * takes a message meanwhile. */
void moe_cpu_network_keep(struct moe_cpu_network *n, uint64_t live);
/* Says goodbye, waits a moment until peers have all that was sent, ends the thread. No other call
 * runs or follows. NULL is ignored. */
void moe_cpu_network_close(struct moe_cpu_network *n);

/* --------------------------------------------------------------------- messages */

/* An empty message for `slot`; any thread. Waits while MOE_CPU_MAX_MESSAGES are on their way. NULL:
 * the slot takes nothing within the budget and is reported lost, or waits have ended. */
struct moe_cpu_message *moe_cpu_network_take(struct moe_cpu_network *n, uint32_t slot);
/* Adds a store of `bytes` at `offset` of the slot's window, and returns where the data goes; NULL
 * if the message is full. The memory is 8-byte aligned. */
void *moe_cpu_message_store(struct moe_cpu_message *m, size_t offset, size_t bytes);
/* The same for one flag: a reader that sees it sees all before it. False: full. */
bool moe_cpu_message_flag(struct moe_cpu_message *m, size_t offset, uint64_t flag);
/* Hands the message over. Messages for a slot are carried out in this order. Any thread; callbacks
 * do not run inside. */
void moe_cpu_network_send(struct moe_cpu_network *n, struct moe_cpu_message *m);

#endif
