/* SPDX-License-Identifier: Apache-2.0 */
/* Ordered messages between processes over UCX: one listener, links to others, one thread at a time
 * that drives them. Knows nothing of slots, windows or sessions.
 *
 * Threads   One thread at a time calls these functions (moe_ucx_events: any), and all callbacks run
 *           inside moe_ucx_progress on that thread.
 * Order     Messages of a link arrive in the order in which they were sent, each once. UCX keeps it
 *           over one line; the receiver checks numbers nevertheless (network.c). */
#ifndef MOE_CPU_UCX_H
#define MOE_CPU_UCX_H

#include "base/status.h"

#include <stdint.h>
#include <sys/socket.h>

struct moe_ucx;
typedef struct ucp_ep *moe_ucx_link; /* to one process; NULL = none */

struct moe_ucx_callbacks {
    /* Valid during the call. `from` can be answered. */
    void (*message)(void *ctx, moe_ucx_link from, const void *head, size_t head_bytes,
                    const void *data, size_t bytes);
    /* A process connected. False: refuse it. */
    bool (*connected)(void *ctx, moe_ucx_link link);
    /* The other process is gone, or the line; `why` is static text. Close the link. */
    void (*broken)(void *ctx, moe_ucx_link link, const char *why);
    void *ctx;
};

/* A message on its way. */
struct moe_ucx_send {
    const void *head, *data;
    size_t head_bytes, bytes;
    /* The message has left, or will not: its memory is free again. */
    void (*done)(struct moe_ucx_send *send);
    struct moe_ucx *ucx; /* set by moe_ucx_send */
};

/* Listens on `address`, a numeric IPv4 or IPv6 address. `*port` becomes the port.
 * Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED without UCX; MOE_UNAVAILABLE/IO. */
struct moe_status moe_ucx_open(const char *address, const struct moe_ucx_callbacks *callbacks,
                               struct moe_ucx **out, uint16_t *port) MOE_CHECKED;
/* Begins to connect; a failure comes as `broken`. */
struct moe_status moe_ucx_dial(struct moe_ucx *u, const char *address, uint16_t port,
                               moe_ucx_link *out) MOE_CHECKED;
/* No process can connect any more. Idempotent. */
void moe_ucx_stop_listening(struct moe_ucx *u);
/* `send` and its memory stay until its `done`, which may come before this returns. */
void moe_ucx_send(struct moe_ucx *u, moe_ucx_link link, struct moe_ucx_send *send);
/* Runs callbacks; false if nothing happened. */
bool moe_ucx_progress(struct moe_ucx *u);
/* True: from now on the descriptor of moe_ucx_events is readable when there is something to do.
 * False: there is something to do already. */
bool moe_ucx_arm(struct moe_ucx *u);
int moe_ucx_events(const struct moe_ucx *u);
/* Ends a link at once; messages that wait are dropped, and `done` comes for each. */
void moe_ucx_hang_up(struct moe_ucx *u, moe_ucx_link link);
/* Links must be closed. NULL is ignored. */
void moe_ucx_close(struct moe_ucx *u);

#endif
