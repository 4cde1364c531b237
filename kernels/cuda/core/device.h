/* SPDX-License-Identifier: Apache-2.0 */
/* One GPU: its streams, its pinned staging memory and the account of its memory. All device and
 * pinned memory of this folder comes from moe_cuda_mem_alloc, or is charged here if another library
 * allocated it.
 *
 * The current CUDA device belongs to a thread. So each function that outside callers use starts
 * with moe_cuda_device_use. */
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

/* A second stream next to `compute`, for passes that overlap two kinds of work. It forks from
 * `compute` (moe_cuda_branch_fork) and joins it again (moe_cuda_branch_join). Between passes
 * nothing runs on it, so a wait for `compute` covers it. It has high priority: peers wait for
 * combine, which thus gets multiprocessors first. The shared expert's products next to dispatch
 * also get them first, and need no peer to end. */
struct moe_cuda_branch {
    cudaStream_t stream;
    cudaEvent_t fork_event, join_event;
};

struct moe_device {
    int ordinal;
    int arch; /* 10 * major + minor of the compute capability: 90 = Hopper */
    int multiprocessors;
    struct moe_cuda_cublas *cublas; /* multiplies bf16; NULL: Hopper's kernels do */
    uint32_t bulk_shared_bytes;     /* shared memory of a CTA; 0 without a bulk copy engine */
    char gpu_name[48];
    struct moe_gpu_uuid uuid;
    char domain[64]; /* as in moe_device_info */
    uint64_t memory_bytes;
    uint64_t used_bytes; /* atomic */
    uint64_t progress;   /* atomic: bits of work that a host thread saw the device end */
    struct moe_mutex memory_lock;
    MOE_GUARDED_BY(memory_lock)
    struct moe_cuda_moved *moved; /* allocations at another address than the driver's */
    uint64_t buffers_moved;       /* how often a buffer grew; each growth invalidates graphs that
                                     were captured with it */

    /* Parts and whole steps compute on `compute`. Rows come in and go out on separate streams, so
     * that their copies overlap the step between them. */
    cudaStream_t compute, copy_in, copy_out;
    struct moe_cuda_branch branch; /* of a backward pass */

    cudaStream_t upload;              /* zeroes memory, copies tables, lays out weights */
    struct moe_cuda_uploads *uploads; /* loads weights */

    struct moe_activation_cache *activation_cache; /* retained activations of forward steps */
    struct moe_cuda_train_scratch *train; /* train_stages.h; NULL until a layer is trained */
};

/* A device with streams and memory only; step/open.h adds the parts that compute. Destroy frees
 * only what create made: first remove everything that was added. NULL is ignored. */
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

/* A host thread has seen the device end some work. Any thread. */
void moe_cuda_device_moved(struct moe_device *device);
uint64_t moe_cuda_device_progress(const struct moe_device *device);

/* Waits for all work on `compute`; backend calls for single parts end with it. */
struct moe_status moe_cuda_device_finish(struct moe_device *device) MOE_CHECKED;

/* Both enqueue only. Fork: the branch's next work runs after all earlier work on `compute`, and
 * concurrently with its later work. Join: the next work on `compute` runs after all work on the
 * branch. A join without a fork does nothing. */
struct moe_status moe_cuda_branch_fork(struct moe_device *device) MOE_CHECKED;
struct moe_status moe_cuda_branch_join(struct moe_device *device) MOE_CHECKED;

/* Charges device memory that another library is about to allocate (NCCL's windows). Errors:
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY if it cannot fit. */
struct moe_status moe_cuda_device_charge(struct moe_device *device, size_t bytes) MOE_CHECKED;
void moe_cuda_device_discharge(struct moe_device *device, size_t bytes);

/* Device memory that grows and never shrinks, for one user at a time. Growing loses the contents
 * and waits for the device, so a steady step never grows. */
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
