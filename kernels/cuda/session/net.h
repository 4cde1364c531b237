/* SPDX-License-Identifier: Apache-2.0 */
/* The network of a session with GPUs that cannot all store into each other's memory: NCCL's grouped
 * sends and receives, and the one thread that calls them.
 *
 * The host learns the sizes of messages only after a round trip. So a thread of the session, the
 * comm thread, runs the passes: it enqueues kernels and exchanges on the compute stream and waits
 * where it must. The caller that enqueues a step waits for nothing. The device never waits for the
 * host: the work in the stream ends on its own or because of the peers.
 *
 * An exchange is one message to and one from every live peer. Each message ends with a trailer, a
 * number that names the exchange. After a failure the trailers show which message did not arrive.
 * The comm thread watches all exchanges that have begun and not ended. If one lasts longer than the
 * session's budget, if the network fails, or after an abort, it ends the communicator. The work
 * behind it in the stream then finds the session stopped. Progress is read from pinned memory. No
 * CUDA call is made before the communicator has ended: such a call may wait for the kernel that
 * hangs. */
#ifndef MOE_CUDA_NET_H
#define MOE_CUDA_NET_H

#include "cuda/core/device.h"
#include "cuda/core/task.h"
#include "cuda/plan/limits.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_control;
struct moe_cuda_step_outcome;
struct moe_cuda_net;

enum {
    MOE_CUDA_TRAILER_BYTES = 16, /* at the end of every message; the trailer is the last 8 bytes */
};

/* Progress of exchanges, in pinned memory: the number of the last one that got so far. */
struct moe_cuda_net_progress {
    uint64_t begun, ended;
    uint32_t broken; /* host to device: from now on exchanges end without their rows */
};

struct moe_cuda_net_config {
    struct moe_device *device;
    struct moe_cuda_control *control; /* device memory; `stop` and `outcome` are set here */
    const uint32_t *abort;            /* host memory: not 0 when every wait must end */
    uint64_t live, epoch;
    uint32_t slot, slots;
    uint64_t budget_ns;
    bool keeps_group; /* `group` goes on to belong to the caller */
};

/* Collective over the live slots. Connects every slot with every other, so that no later exchange
 * has to. Takes over `group`, a non-blocking communicator of these slots, even if the call fails.
 * Ends by `deadline_ns` (monotonic).
 * Errors: MOE_UNAVAILABLE/PEER_LOST when not all slots came in time. */
struct moe_status moe_cuda_net_open(const struct moe_cuda_net_config *config, ncclComm_t group,
                                    uint64_t deadline_ns, struct moe_cuda_net **out) MOE_CHECKED;
/* Ends the comm thread once its tasks are done; the abort flag shortens them. `together`: all slots
 * are believed to leave in good order. Afterwards the stream has no exchange left. NULL is ignored.
 */
void moe_cuda_net_close(struct moe_cuda_net *net, bool together);

/* --------------------------------------------------------------------- tasks */

/* From one thread at a time: adds a task for the comm thread. */
void moe_cuda_net_post(struct moe_cuda_net *net, struct moe_cuda_task *task);
/* False when the task was not done by `deadline_ns` (monotonic; MOE_NEVER). */
bool moe_cuda_net_await(struct moe_cuda_net *net, const struct moe_cuda_task *task,
                        uint64_t deadline_ns);

/* Returns the reason why the network broke; false if it did not. Waits until the reason is known,
 * about as long as NCCL needs to abort a communicator (half a second). */
bool moe_cuda_net_outcome(struct moe_cuda_net *net, struct moe_cuda_step_outcome *out);

/* ------------------------------------------- exchanges: on the comm thread's thread */

/* Device memory that no peer maps. Both slots know both sizes; no message is empty. Without `send`,
 * there is no message between the two slots, on neither side. */
struct moe_cuda_transfer {
    const void *send;
    void *recv;
    size_t send_bytes, recv_bytes;
};

/* When an exchange ends, it copies `words` 64-bit words from device to pinned memory. */
struct moe_cuda_completion {
    const uint64_t *from;
    uint64_t *to;
    size_t words;
};

/* The trailer of the exchange that is enqueued next; never 0, and the same on all slots. */
uint64_t moe_cuda_net_next_trailer(const struct moe_cuda_net *net);
/* Enqueues an exchange on the compute stream; transfer[p] for each live peer p. `completion` may be
 * NULL. */
struct moe_status moe_cuda_net_exchange(struct moe_cuda_net *net,
                                        const struct moe_cuda_transfer transfer[MOE_CUDA_MAX_SLOTS],
                                        const struct moe_cuda_completion *completion) MOE_CHECKED;
/* Waits until all exchanges enqueued so far have ended. After a failure: see moe_cuda_net_outcome.
 */
struct moe_status moe_cuda_net_settle(struct moe_cuda_net *net) MOE_CHECKED;

/* net.cu */

/* Where the trailers of an exchange's messages lie, in device memory; NULL: there is no message. */
struct moe_cuda_trailers {
    uint64_t trailer;
    uint64_t *at[MOE_CUDA_MAX_SLOTS];
};
/* For messages that no kernel assembles, so that no other kernel writes their trailers. */
struct moe_status moe_cuda_launch_trailers(const struct moe_cuda_trailers *trailers,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_begun(struct moe_cuda_net_progress *progress, uint64_t number,
                                        cudaStream_t stream) MOE_CHECKED;
/* If the network is broken, also stops the session. */
struct moe_status moe_cuda_launch_ended(struct moe_cuda_net_progress *progress, uint64_t number,
                                        struct moe_cuda_control *control,
                                        const struct moe_cuda_completion *completion,
                                        cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
