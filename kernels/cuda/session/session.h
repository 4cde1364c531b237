/* SPDX-License-Identifier: Apache-2.0 */
/* A session on a GPU: this process as a member of an EP group. Owns the windows of all slots as
 * device addresses, the flags by which kernels and host report failures, and the pass tables.
 *
 * Only kernels wait for peers, on the device's compute stream and within the session's budget. The
 * first wait that fails leaves an outcome in device memory and sets `stop`. Every kernel queued
 * behind it then returns at once. */
#ifndef MOE_CUDA_SESSION_H
#define MOE_CUDA_SESSION_H

#include "common/masks.h"
#include "cuda/core/device.h"
#include "cuda/plan/options.h"
#include "cuda/session/control.h"
#include "cuda/session/net.h"
#include "cuda/session/relay.h"
#include "cuda/session/window.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_ep;     /* prepare, dispatch and combine: ep.h */
struct moe_cuda_ep_net; /* the same over a network: ep_net.h */
struct moe_cuda_steps;  /* whole steps: step.h */

struct moe_session {
    struct moe_device *device;
    struct moe_session_config config; /* epoch and live: of the present mask */
    struct moe_masks masks;
    uint32_t
        joined_slots; /* slots that have joined: steps are launched for so many under any mask */
    enum moe_cuda_transport transport; /* as asked for */
    struct moe_window_layout layout;
    struct moe_cuda_window window;
    struct moe_cuda_control *control;           /* device memory */
    struct moe_cuda_host_control *host_control; /* host address */
    struct moe_cuda_host_control *host_control_on_device;
    uint32_t step; /* number of steps the host has enqueued: when they start over */
    bool aborted;  /* atomic */
    uint64_t lost; /* atomic; bit s: slot s did not answer */
    bool failed;   /* atomic */
    int missing;   /* atomic; the slot for which a wait failed, or -1 */
    struct moe_cuda_ep *ep;
    struct moe_cuda_steps *steps;
    cudaEvent_t outcome_ready; /* of a backward pass: dispatch's outcome is in host memory */
    /* If rows travel over a network; else NULL, and the window has the peers' addresses. */
    struct moe_cuda_net *net;
    struct moe_cuda_ep_net *ep_net;
    struct moe_cuda_relay relay; /* of a session over several domains; with `net` */
};

/* Members of struct moe_backend; the others are in step/join.h. */
void moe_cuda_session_abort(struct moe_session *s);
uint64_t moe_cuda_session_lost(struct moe_session *s);
const char *moe_cuda_session_transport(const struct moe_session *s);

/* For ep.c, step.c and backward.c. */

/* The failure for later calls of this session, or success. */
struct moe_status moe_cuda_session_usable(const struct moe_session *s) MOE_CHECKED;

/* The slot for which a wait failed, or -1. */
int moe_cuda_session_missing(const struct moe_session *s);

/* The status of an outcome in host memory. Marks the session as failed if the outcome says so. */
struct moe_status
moe_cuda_session_outcome_status(struct moe_session *s,
                                const struct moe_cuda_step_outcome *outcome) MOE_CHECKED;

/* Whether all slots refused a step that ended with this status because their steps differed, and
 * the session goes on. An outcome says more: MOE_CUDA_PASS_REFUSED. */
bool moe_cuda_session_refused(const struct moe_session *s, const struct moe_status *st);

/* Waits for the compute stream and returns the status of its outcome. */
struct moe_status moe_cuda_session_finish(struct moe_session *s) MOE_CHECKED;

/* Runs fn(ctx), which makes passes outside a forward step and does not wait for them. Returns when
 * all data from peers has arrived. In a session over a network the comm thread runs fn; never call
 * this from there. */
struct moe_status moe_cuda_session_run(struct moe_session *s, struct moe_status (*fn)(void *ctx),
                                       void *ctx) MOE_CHECKED;

/* Waits until all earlier steps have nothing more to exchange, so that the caller may enqueue on
 * the compute stream. Waits only in a session over a network. */
struct moe_status moe_cuda_session_catch_up(struct moe_session *s) MOE_CHECKED;

/* A failure of the comm thread: the outcome's status if the network broke, else `st`. */
struct moe_status moe_cuda_session_explain(struct moe_session *s, struct moe_status st) MOE_CHECKED;

/* A step failed on this slot for a local reason (no memory, a CUDA error): the session can run
 * nothing any more. */
void moe_cuda_session_fail(struct moe_session *s);

#ifdef __cplusplus
}
#endif

#endif
