/* A session on a GPU: this process's seat in an EP group. Owns the windows of all slots as device
 * addresses, the words by which kernels and host tell each other of failures, and the pass tables.
 *
 * Kernels wait, the host does not: whatever waits for a peer is a kernel on the device's compute
 * stream, bounded by the session's budget. The first wait that fails leaves a verdict in device
 * memory and sets `stop`, and every kernel queued behind it returns at once. */
#ifndef MOE_CUDA_SESSION_H
#define MOE_CUDA_SESSION_H

#include "cuda/device.h"
#include "cuda/net.h"
#include "cuda/window.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_ep;     /* prepare, dispatch and combine: ep.h */
struct moe_cuda_ep_net; /* the same over a network: ep_net.h */
struct moe_cuda_steps;  /* whole steps: step.h */

/* What became of a pass or an exchange. */
enum moe_cuda_verdict_code {
    MOE_CUDA_PASS_GOOD,
    /* All slots say so, and the session goes on: `slot` has no memory for this step, or, plus
     * MOE_CUDA_MEANS_OTHER, means another one. */
    MOE_CUDA_PASS_REFUSED,
    MOE_CUDA_PASS_LOST, /* `slot` did not answer in time */
    MOE_CUDA_PASS_ABORTED,
    MOE_CUDA_PASS_LIE,    /* `slot` sent something else than it announced */
    MOE_CUDA_PASS_BROKEN, /* the network broke: moe_cuda_net_verdict knows more */
};

/* More than any slot, so that of several reasons want of memory is told. */
enum { MOE_CUDA_MEANS_OTHER = MOE_MAX_SLOTS };

struct moe_cuda_verdict {
    uint32_t code; /* enum moe_cuda_verdict_code */
    uint32_t slot;
    uint64_t rows; /* computed on this slot; 0 unless good */
};

/* In device memory, one per session. Kernels read the step's number from here, so a captured graph
 * goes on counting when it is replayed. */
struct moe_cuda_control {
    uint32_t step;     /* number of the last step whose dispatch has begun, from 1 */
    uint32_t refused;  /* number of the last step that was refused */
    uint32_t told;     /* number of the last step that `done` was stored for */
    uint32_t exchange; /* number of the last exchange */
    uint32_t stop;     /* a wait failed: the session can only be left */
    uint32_t slot;     /* the own one */
    uint64_t live, epoch, budget_ns;
    uint8_t *window[MOE_MAX_SLOTS]; /* NULL where not live */
    struct moe_cuda_verdict verdict;
    uint32_t tokens_of[MOE_MAX_SLOTS]; /* of the current step */
    /* Work that warps take item by item. Those of dispatch by the step's parity: a dispatch clears
     * the ones that the next uses, and those of its combine. */
    uint32_t next_push[2], next_expand[2], next_return, next_home;
    uint32_t arrived; /* CTAs that have come to a point; zero between kernels */
    uint64_t looked;  /* when a thread that waits last looked at the host: ns of the GPU's clock */
};

/* Pinned memory, mapped into the device. */
struct moe_cuda_mailbox {
    uint64_t mine[MOE_WINDOW_EXCHANGE_BYTES / 8];
    uint64_t all[MOE_MAX_SLOTS][MOE_WINDOW_EXCHANGE_BYTES / 8];
    uint32_t bytes_came[MOE_MAX_SLOTS];
    struct moe_cuda_verdict verdict; /* copy for synchronous calls */
    uint32_t rows_in_use;            /* of the backward pass at work, padding included */
    uint32_t abort;                  /* host to device: waits end */
};

struct moe_session {
    struct moe_device *device;
    struct moe_session_config config;
    struct moe_window_layout layout;
    struct moe_cuda_window window;
    struct moe_cuda_control *control; /* device memory */
    struct moe_cuda_mailbox *mailbox; /* host address */
    struct moe_cuda_mailbox *mailbox_on_device;
    uint32_t step; /* host's count of steps enqueued: when to wipe the words */
    bool aborted;  /* atomic */
    uint64_t lost; /* atomic; bit s: slot s did not answer */
    bool failed;   /* atomic */
    int missing;   /* the slot that a wait failed for, or -1 */
    struct moe_cuda_ep *ep;
    struct moe_cuda_steps *steps;
    cudaEvent_t told; /* of a backward pass: dispatch's verdict has come to the host */
    /* Where rows travel over a network; else NULL, and the window has the peers' addresses. */
    struct moe_cuda_net *net;
    struct moe_cuda_ep_net *ep_net;
};

/* Members of struct moe_backend. */
struct moe_status moe_cuda_session_join(struct moe_device *device,
                                        const struct moe_session_config *config,
                                        struct moe_session **out) MOE_CHECKED;
struct moe_status moe_cuda_session_exchange(struct moe_session *s, const void *mine, void *all,
                                            size_t bytes) MOE_CHECKED;
void moe_cuda_session_abort(struct moe_session *s);
uint64_t moe_cuda_session_lost(struct moe_session *s);
const char *moe_cuda_session_transport(const struct moe_session *s);
void moe_cuda_session_leave(struct moe_session *s);

/* For ep.c, step.c and backward.c. */

/* The same as an exchange of its own, inside a pass that all slots make. */
struct moe_status moe_cuda_session_exchange_inside(struct moe_session *s, const void *mine,
                                                   void *all, size_t bytes) MOE_CHECKED;

/* The failure that later calls of this session get, or success. */
struct moe_status moe_cuda_session_usable(const struct moe_session *s) MOE_CHECKED;

/* To be called before each step is enqueued on device->compute, also before a captured one is
 * launched. Every 2^28 steps it enqueues the wiping of words that would look new again. */
struct moe_status moe_cuda_session_count_step(struct moe_session *s) MOE_CHECKED;

/* The status of a verdict that has come to the host. Marks the session as failed where it is. */
struct moe_status moe_cuda_session_judge(struct moe_session *s,
                                         const struct moe_cuda_verdict *verdict) MOE_CHECKED;

/* Whether a step that ended with this status was refused by all slots, which met with different
 * steps, and the session goes on. A verdict says more: MOE_CUDA_PASS_REFUSED. */
bool moe_cuda_session_refused(const struct moe_session *s, const struct moe_status *st);

/* Waits for the compute stream and judges. */
struct moe_status moe_cuda_session_finish(struct moe_session *s) MOE_CHECKED;

/* Runs fn(ctx), which makes passes outside a step and does not wait for them, on the thread that
 * this session makes passes on, until all that comes from peers has come. */
struct moe_status moe_cuda_session_run(struct moe_session *s, struct moe_status (*fn)(void *ctx),
                                       void *ctx) MOE_CHECKED;

/* Waits until all steps that were enqueued before have nothing more to exchange, so that the caller
 * may enqueue on the compute stream itself. Only a session over a network has to wait. */
struct moe_status moe_cuda_session_catch_up(struct moe_session *s) MOE_CHECKED;

/* A failure on that thread: the verdict's status where the network broke, else `st`. */
struct moe_status moe_cuda_session_explain(struct moe_session *s, struct moe_status st) MOE_CHECKED;

/* A step broke on this slot for a reason of its own (no memory, a CUDA error): nothing can be run
 * in this session any more. */
void moe_cuda_session_fail(struct moe_session *s);

#ifdef __cplusplus
}
#endif

#endif
