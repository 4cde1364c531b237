/* SPDX-License-Identifier: Apache-2.0 */
/* Forward passes from CUDA streams: hidden states stay on a GPU of the worker's host, and neither
 * submitting nor waiting takes a call of the host. In libmoeclient_cuda; link libmoeclient as well.
 *
 * A request object holds one request: its layer, shape and tensors. Submitting and waiting are
 * kernels on streams; both can be captured into a graph, which can be launched again and again. The
 * tensors' content may differ each time. Two objects are two microbatches in flight. T is fixed for
 * an object: pad it to buckets, and use one object for each.
 *
 *     moe_session_open(client, NULL, &session);
 *     moe_stream_session_open(session, NULL, &streams);
 *     moe_region_alloc(streams, "hidden", bytes, &region);           x and y are in it
 *     moe_stream_request_create(streams, &forward, &request);
 *     ... work on `stream` that writes x ...
 *     moe_session_submit_on_stream(request, stream);
 *     ... other work ...
 *     moe_session_wait_on_stream(request, stream);
 *     ... work on `stream` that reads y ...
 *
 * Order. Submits and waits of an object alternate, in the order of its streams' work. A wait
 * without a submit, or the reverse, fails with FAILED_PRECONDITION, and so does one launch of a
 * graph next to another launch of it.
 *
 * Errors of requests. Every wait ends: by the worker, or at most 100 ms after the session's
 * timeout, or after the worker's end. If it fails, y is NaN in all its bytes, and the request's
 * status on the device has the code. After DEADLINE_EXCEEDED or UNAVAILABLE, the worker may still
 * write to the outputs, also over the NaN. Until it is done, later submits of the object fail at
 * once, with UNAVAILABLE. Other memory for outputs is safe at once; that of these after the end of
 * their region.
 *
 * Memory. The worker's GPU must reach the session's: the same GPU, or a peer by NVLink or PCIe.
 * While a request is in flight, do not write its inputs and do not read its outputs.
 *
 * The worker. With --spin-us of more than the time between two requests, it sees a request at once.
 * A worker that sleeps is woken within one or two milliseconds.
 *
 * Threads: any, for different objects. The calls keep the thread's current device. None but submit
 * and wait may run while a stream of this thread is captured. Errors and sizes: see moe/client.h.
 */
#ifndef MOE_CLIENT_CUDA_H
#define MOE_CLIENT_CUDA_H

#include "moe/regions.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t is a pointer to it */
struct moe_stream_session;
struct moe_stream_request;

struct moe_stream_session_config {
    size_t size;
    int device; /* CUDA's ordinal in this process */
    /* How a stream waits. 0: as for an event; the GPU does other work meanwhile. 1: a kernel polls
     * the result, and one multiprocessor is busy with it; faster by some microseconds. Use 1 only
     * if the worker has another GPU: on the same one, the kernel would take its time. */
    uint32_t spin;
    uint64_t reserved[4]; /* 0 */
};

/* Prepares a session for a device; once for a session. `config` NULL = device 0, without spin. The
 * session outlives it.
 * Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED (no CUDA driver, no such device, or one that cannot
 * use host memory or virtual memory), MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_stream_session_open(struct moe_client_session *session,
                                          const struct moe_stream_session_config *config,
                                          struct moe_stream_session **out) MOE_CHECKED;
/* After all its requests; its regions stay until they or the session end. NULL is ignored. */
void moe_stream_session_close(struct moe_stream_session *s);

/* New memory on the device, zeroed, that the worker's GPU maps too. `bytes` is rounded up to the
 * device's granularity, often 2 MiB; moe_region_bytes returns that. moe_region_data is the device's
 * address, at a multiple of the granularity. End it by moe_region_destroy, or with the session.
 * Errors: those of moe_region_create; MOE_FAILED_PRECONDITION/UNSUPPORTED (the worker's device
 * cannot reach this one). */
struct moe_status moe_region_alloc(struct moe_stream_session *s, const char *name, size_t bytes,
                                   struct moe_client_region **out) MOE_CHECKED;

/* Copies between memory of the host and bytes of a region of moe_region_alloc, for programs without
 * a runtime of CUDA. Both wait for the copy. No request that is in flight uses these bytes. Errors:
 * MOE_OUT_OF_RANGE/REGION_RANGE, MOE_INTERNAL. */
struct moe_status moe_region_copy_in(struct moe_stream_session *s, struct moe_client_region *to,
                                     uint64_t offset, const void *from, size_t bytes) MOE_CHECKED;
struct moe_status moe_region_copy_out(struct moe_stream_session *s,
                                      const struct moe_client_region *from, uint64_t offset,
                                      void *to, size_t bytes) MOE_CHECKED;

/* A request that is submitted as often as wanted. y lies on the session's device; the other tensors
 * may lie in any region of the session. It takes one of the session's 64 requests in flight as long
 * as it lives. Waits for the device. Errors: those of moe_session_submit; MOE_INVALID_ARGUMENT/
 * REGION_INVALID (y is not on that device), MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_stream_request_create(struct moe_stream_session *s,
                                            const struct moe_client_session_forward *f,
                                            struct moe_stream_request **out) MOE_CHECKED;
/* All its work on streams has ended, and no graph with it is launched any more. NULL is ignored. */
void moe_stream_request_destroy(struct moe_stream_request *r);

/* Both enqueue on a stream of the session's device, NULL = its default stream, and wait for
 * nothing. Errors: those of a launch (MOE_INTERNAL). */
struct moe_status moe_session_submit_on_stream(struct moe_stream_request *r,
                                               struct CUstream_st *stream) MOE_CHECKED;
struct moe_status moe_session_wait_on_stream(struct moe_stream_request *r,
                                             struct CUstream_st *stream) MOE_CHECKED;

/* What the last wait has found. Kernels after the wait may read it. */
struct moe_stream_status {
    uint32_t code; /* enum moe_code */
    uint32_t reserved;
    uint64_t results, failures; /* waits so far; those that failed */
    uint64_t stream_ns;         /* from the submit to the end of the wait, by the device's clock */
};
/* Its address on the device; valid as long as the request. */
const struct moe_stream_status *moe_stream_request_status(const struct moe_stream_request *r);

/* The status of the last wait, with the worker's text; `answer` as in moe_session_wait, may be
 * NULL. All fields but stream_ns are 0 if a later submit has begun. Waits for the default stream,
 * and for others as far as it does. Call it when the stream has ended the wait. */
struct moe_status moe_stream_request_result(struct moe_stream_request *r,
                                            struct moe_client_session_answer *answer) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
