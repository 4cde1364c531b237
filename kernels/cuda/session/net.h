/* SPDX-License-Identifier: Apache-2.0 */
/* The network under a session whose GPUs cannot all store into each other's memory: NCCL's grouped
 * sends and receives, and the one thread that calls them.
 *
 * Sizes of messages are known to the host only after a round trip, so passes of such a session are
 * run by a thread of the session's own, the comm thread: it enqueues kernels and exchanges on the
 * compute stream, waits where it has to, and so whoever enqueues a step waits for nothing. The
 * device never waits for the host: what is in the stream ends by itself, or by the peers.
 *
 * An exchange is one message to and one from every live peer. Each message ends with a trailer, a
 * word that names the exchange, so that after a failure it can be seen whose message did not come.
 * The comm thread watches all exchanges that were begun and not ended: one that lasts longer than
 * the session's budget, an error of the network's, or an abort, ends the communicator; whatever
 * stands behind it in the stream then finds the session stopped. Progress is read from pinned
 * memory, and no call of CUDA's is made before the communicator has been ended: such calls may wait
 * for the very kernel that hangs. */
#ifndef MOE_CUDA_NET_H
#define MOE_CUDA_NET_H

#include "cuda/core/device.h"
#include "cuda/core/task.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_cuda_control;
struct moe_cuda_step_outcome;
struct moe_cuda_net;

enum {
    MOE_CUDA_TRAILER_BYTES = 16, /* end of every message; the trailer is its last word */
};

/* Progress of exchanges, in pinned memory; the number of the last one that has come so far. */
struct moe_cuda_net_progress {
    uint64_t begun, ended;
    uint32_t broken; /* host to device: exchanges end without their rows from now on */
};

struct moe_cuda_net_config {
    struct moe_device *device;
    struct moe_cuda_control *control; /* device memory; `stop` and `outcome` are set here */
    const uint32_t *abort;            /* host memory: not 0 when every wait is to end */
    uint64_t live, epoch;
    uint32_t slot, slots;
    uint64_t budget_ns;
};

/* Collective over the live slots. Connects every slot with every other, so that no exchange has to.
 * Takes `group`, a communicator of them that does not block, whatever becomes of the call. Ends by
 * `deadline_ns` (monotonic).
 * Errors: MOE_UNAVAILABLE/PEER_LOST when the slots did not all come in time. */
struct moe_status moe_cuda_net_open(const struct moe_cuda_net_config *config, ncclComm_t group,
                                    uint64_t deadline_ns, struct moe_cuda_net **out) MOE_CHECKED;
/* Ends the comm thread once its tasks are done, which the abort flag hurries. `together`: all slots
 * are believed to leave in good order. The stream has no exchange left afterwards. NULL is ignored.
 */
void moe_cuda_net_close(struct moe_cuda_net *net, bool together);

/* --------------------------------------------------------------------- tasks */

/* From one thread at a time: a task of the comm thread. */
void moe_cuda_net_post(struct moe_cuda_net *net, struct moe_cuda_task *task);
/* False when the task was not done by `deadline_ns` (monotonic; MOE_NEVER). */
bool moe_cuda_net_await(struct moe_cuda_net *net, const struct moe_cuda_task *task,
                        uint64_t deadline_ns);

/* What broke the network: false while nothing has. Waits until it is known, which takes about as
 * long as NCCL needs to give a communicator up (half a second). */
bool moe_cuda_net_outcome(struct moe_cuda_net *net, struct moe_cuda_step_outcome *out);

/* ------------------------------------------- exchanges: on the comm thread's thread */

/* Device memory, which no peer maps. Both slots know both sizes; no message is empty. */
struct moe_cuda_transfer {
    const void *send;
    void *recv;
    size_t send_bytes, recv_bytes;
};

/* What an exchange copies to the host when it ends: `words` words from device to pinned memory. */
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
                                        const struct moe_cuda_transfer transfer[MOE_MAX_SLOTS],
                                        const struct moe_cuda_completion *completion) MOE_CHECKED;
/* Waits until all exchanges enqueued so far have ended. Any failure: moe_cuda_net_outcome. */
struct moe_status moe_cuda_net_settle(struct moe_cuda_net *net) MOE_CHECKED;

/* net.cu */

/* Where the trailers of an exchange's messages are, in device memory; NULL: there is no message. */
struct moe_cuda_trailers {
    uint64_t trailer;
    uint64_t *at[MOE_MAX_SLOTS];
};
/* For messages that no kernel makes up, and which so have no other that ends them. */
struct moe_status moe_cuda_launch_trailers(const struct moe_cuda_trailers *trailers,
                                           cudaStream_t stream) MOE_CHECKED;
struct moe_status moe_cuda_launch_begun(struct moe_cuda_net_progress *progress, uint64_t number,
                                        cudaStream_t stream) MOE_CHECKED;
/* Also stops the session where the network is broken. */
struct moe_status moe_cuda_launch_ended(struct moe_cuda_net_progress *progress, uint64_t number,
                                        struct moe_cuda_control *control,
                                        const struct moe_cuda_completion *completion,
                                        cudaStream_t stream) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
