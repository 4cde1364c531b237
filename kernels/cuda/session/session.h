/* SPDX-License-Identifier: Apache-2.0 */
/* A session on a GPU: this process's seat in an EP group. Owns the windows of all slots as device
 * addresses, the words by which kernels and host tell each other of failures, and the pass tables.
 *
 * Kernels wait: whatever waits for a peer is a kernel on the device's compute stream, bounded by
 * the session's budget. The first wait that fails leaves an outcome in device
 * memory and sets `stop`, and every kernel queued behind it returns at once. */
#ifndef MOE_CUDA_SESSION_H
#define MOE_CUDA_SESSION_H

#include "cuda/core/device.h"
#include "cuda/plan/options.h"
#include "cuda/session/control.h"
#include "cuda/session/net.h"
#include "cuda/session/window.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_ep;     /* prepare, dispatch and combine: ep.h */
struct moe_cuda_ep_net; /* the same over a network: ep_net.h */
struct moe_cuda_steps;  /* whole steps: step.h */

struct moe_session {
    struct moe_device *device;
    struct moe_session_config config;
    enum moe_cuda_transport transport; /* as asked for */
    struct moe_window_layout layout;
    struct moe_cuda_window window;
    struct moe_cuda_control *control;           /* device memory */
    struct moe_cuda_host_control *host_control; /* host address */
    struct moe_cuda_host_control *host_control_on_device;
    uint32_t step; /* host's count of steps enqueued: when to wipe the words */
    bool aborted;  /* atomic */
    uint64_t lost; /* atomic; bit s: slot s did not answer */
    bool failed;   /* atomic */
    int missing;   /* atomic; the slot that a wait failed for, or -1 */
    struct moe_cuda_ep *ep;
    struct moe_cuda_steps *steps;
    cudaEvent_t outcome_ready; /* of a backward pass: dispatch's outcome has come to the host */
    /* Where rows travel over a network; else NULL, and the window has the peers' addresses. */
    struct moe_cuda_net *net;
    struct moe_cuda_ep_net *ep_net;
};

/* Members of struct moe_backend; the others are in step/join.h. */
void moe_cuda_session_abort(struct moe_session *s);
uint64_t moe_cuda_session_lost(struct moe_session *s);
const char *moe_cuda_session_transport(const struct moe_session *s);

/* For ep.c, step.c and backward.c. */

/* The failure that later calls of this session get, or success. */
struct moe_status moe_cuda_session_usable(const struct moe_session *s) MOE_CHECKED;

/* The slot that a wait failed for, or -1. */
int moe_cuda_session_missing(const struct moe_session *s);

/* The status of an outcome that has come to the host. Marks the session as failed where it is. */
struct moe_status
moe_cuda_session_outcome_status(struct moe_session *s,
                                const struct moe_cuda_step_outcome *outcome) MOE_CHECKED;

/* Whether a step that ended with this status was refused by all slots, which met with different
 * steps, and the session goes on. An outcome says more: MOE_CUDA_PASS_REFUSED. */
bool moe_cuda_session_refused(const struct moe_session *s, const struct moe_status *st);

/* Waits for the compute stream and judges. */
struct moe_status moe_cuda_session_finish(struct moe_session *s) MOE_CHECKED;

/* Runs fn(ctx), which makes passes outside a forward step and does not wait for them, until all
 * that comes from peers has come. In a session over a network the comm thread runs it; never to be
 * called from there. */
struct moe_status moe_cuda_session_run(struct moe_session *s, struct moe_status (*fn)(void *ctx),
                                       void *ctx) MOE_CHECKED;

/* Waits until all steps that were enqueued before have nothing more to exchange, so that the caller
 * may enqueue on the compute stream itself. Only a session over a network has to wait. */
struct moe_status moe_cuda_session_catch_up(struct moe_session *s) MOE_CHECKED;

/* A failure on that thread: the outcome's status where the network broke, else `st`. */
struct moe_status moe_cuda_session_explain(struct moe_session *s, struct moe_status st) MOE_CHECKED;

/* A step broke on this slot for a reason of its own (no memory, a CUDA error): nothing can be run
 * in this session any more. */
void moe_cuda_session_fail(struct moe_session *s);

#ifdef __cplusplus
}
#endif

#endif
