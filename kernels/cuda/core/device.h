/* SPDX-License-Identifier: Apache-2.0 */
/* One GPU: its streams, its pinned staging and the account of all memory that
 * is taken through it. Every byte of device and pinned memory in this folder goes through
 * moe_cuda_mem_alloc, or is charged here when another library took it.
 *
 * The current CUDA device belongs to a thread, so each call that can come from outside starts with
 * moe_cuda_device_use. */
#ifndef MOE_CUDA_DEVICE_H
#define MOE_CUDA_DEVICE_H

#include "base/mutex.h"
#include "cuda/core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "common/session_rules.h"
#include "moe/backend.h"

struct moe_activation_cache; /* activation_cache.h */
struct moe_cuda_moved;
struct moe_cuda_train_scratch;
struct moe_cuda_cublas;  /* ggemm_cublas.h */
struct moe_cuda_uploads; /* weights.c */

/* A second way beside `compute`, for a pass that has something to do meanwhile. It begins where
 * `compute` stands (moe_cuda_branch_fork) and ends before what `compute` gets next
 * (moe_cuda_branch_join); between passes nothing runs on it, so whoever waits for `compute` has
 * waited for it. Of high priority, so that combine, for which peers wait, gets multiprocessors
 * first; the shared expert's products beside dispatch do so as well, and end without a peer. */
struct moe_cuda_branch {
    cudaStream_t stream;
    cudaEvent_t fork_event, join_event;
};

struct moe_device {
    int ordinal;
    int arch; /* 10 * major + minor of the compute capability: 90 = Hopper */
    int multiprocessors;
    struct moe_cuda_cublas *cublas; /* what multiplies bf16; NULL: Hopper's kernels do */
    uint32_t bulk_shared_bytes; /* shared memory of a CTA; 0 where there is no bulk copy engine */
    char gpu_name[48];
    struct moe_gpu_uuid uuid;
    uint64_t memory_bytes;
    uint64_t used_bytes; /* atomic */
    struct moe_mutex memory_lock;
    MOE_GUARDED_BY(memory_lock)
    struct moe_cuda_moved *moved; /* device memory that is not what the driver gave */
    uint64_t buffers_moved;       /* how often a buffer grew: what was captured with it is void */

    /* Parts and whole steps compute on `compute`. Rows come in and go out on streams of their own,
     * so that they overlap the step between them. */
    cudaStream_t compute, copy_in, copy_out;
    struct moe_cuda_branch branch; /* of a backward pass */

    cudaStream_t upload;              /* zeroing of memory, copies of tables, layout of weights */
    struct moe_cuda_uploads *uploads; /* what brings weights in */

    struct moe_activation_cache *activation_cache; /* what forward steps keep for backward passes */
    struct moe_cuda_train_scratch *train; /* train_stages.h; NULL until a layer is trained */
};

/* A device with streams and memory only; step/open.h adds what computes. Destroying it frees what
 * create made: whoever added something has taken it away before. NULL is ignored. */
struct moe_status moe_cuda_device_create(int ordinal, struct moe_device **out) MOE_CHECKED;
void moe_cuda_device_destroy(struct moe_device *device);

/* Members of struct moe_backend; the others are in step/open.h. */
void moe_cuda_device_info(struct moe_device *device, struct moe_device_info *out);
struct moe_status moe_cuda_mem_alloc(struct moe_device *device, enum moe_mem kind, size_t bytes,
                                     void **out) MOE_CHECKED; /* 0 bytes: NULL */
void moe_cuda_mem_free(struct moe_device *device, enum moe_mem kind, void *p, size_t bytes);
struct moe_status moe_cuda_mem_copy(struct moe_device *device, void *dst, const void *src,
                                    size_t bytes) MOE_CHECKED;

/* Makes the device current on this thread. */
struct moe_status moe_cuda_device_use(const struct moe_device *device) MOE_CHECKED;

/* Waits for all that was enqueued on `compute`; parts end with it. */
struct moe_status moe_cuda_device_finish(struct moe_device *device) MOE_CHECKED;

/* Enqueued: what the branch gets from here on runs behind what `compute` has got, beside what it
 * gets from here on; then, what `compute` gets runs behind all that the branch has got. Meeting
 * without having parted does nothing. */
struct moe_status moe_cuda_branch_fork(struct moe_device *device) MOE_CHECKED;
struct moe_status moe_cuda_branch_join(struct moe_device *device) MOE_CHECKED;

/* Puts device memory that another library takes (NCCL's windows) on the account, before it is
 * taken. Errors: MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY when it cannot fit. */
struct moe_status moe_cuda_device_charge(struct moe_device *device, size_t bytes) MOE_CHECKED;
void moe_cuda_device_discharge(struct moe_device *device, size_t bytes);

/* Device memory that grows and never shrinks, for one user at a time; contents are lost when it
 * grows. Growing waits for the device, so a steady step never grows. */
struct moe_cuda_buffer {
    void *data;
    size_t bytes;
};
struct moe_status moe_cuda_buffer_reserve(struct moe_device *device, struct moe_cuda_buffer *buffer,
                                          size_t bytes) MOE_CHECKED;
void moe_cuda_buffer_free(struct moe_device *device, struct moe_cuda_buffer *buffer);

#ifdef __cplusplus
}
#endif

#endif
