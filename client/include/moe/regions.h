/* SPDX-License-Identifier: Apache-2.0 */
/* Forward passes through memory that this process shares with a worker of its host.
 *
 * A session connects to one worker that runs with --allow-client-memory, as the same user. Regions
 * are memory that both map. A request names its tensors by region and offset; it travels through a
 * ring in such memory, and y appears in the region. So no tensor is sent. While the worker polls, a
 * request takes no system call.
 *
 * A request has the checks, errors, epochs and versions of moe_client_forward, and shares its
 * steps. It goes to the default model, is not retried, and is not retained for Backward. T = 0 is
 * allowed and has no tensors.
 *
 * Memory. While a request is in flight, do not write its inputs and do not read its outputs; no
 * output may share bytes with another tensor in flight. A process that breaks this gets wrong
 * results, and no other process does. If a request ended with DEADLINE_EXCEEDED or
 * UNAVAILABLE, the worker may still write to its outputs: until moe_region_destroy of their region
 * or moe_session_close, use other memory.
 *
 * The worker has ended, or the connection has: each request in flight ends with UNAVAILABLE within
 * 100 ms, and so do all later ones. Then open another session.
 *
 * Threads: any; at most one at a time for one request. A child that fork leaves without exec keeps
 * the connection open: the worker then frees nothing before the child has ended.
 * Errors and sizes: see moe/client.h. */
#ifndef MOE_REGIONS_H
#define MOE_REGIONS_H

#include "moe/client.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moe_client_session;
struct moe_client_region;

struct moe_client_session_config {
    size_t size;
    uint64_t timeout_ms; /* of each request, and of each call below; 0 = the client's default */
    uint32_t spin_us;    /* how long moe_session_wait polls before it sleeps; this saves the time of
                            waking, and costs a core. 0 = it sleeps at once */
    uint32_t reserved_flags; /* 0 */
};

/* Connects to the first worker of the client that shares memory with this process. `config` NULL =
 * defaults. Errors: MOE_FAILED_PRECONDITION/UNSUPPORTED (no --allow-client-memory),
 * MOE_UNAVAILABLE/IO (the worker's socket cannot be reached: another host, another user),
 * MOE_RESOURCE_EXHAUSTED/REGION_LIMIT, MOE_UNIMPLEMENTED/UNSUPPORTED (the client is bound to an
 * added model), and those of calls. */
struct moe_status moe_session_open(struct moe_client *c,
                                   const struct moe_client_session_config *config,
                                   struct moe_client_session **out) MOE_CHECKED;
/* Ends the session: requests in flight have no result any more, and its regions are destroyed. No
 * other call of the session may run. Before moe_client_close. NULL is ignored. */
void moe_session_close(struct moe_client_session *s);

/* New memory of `bytes` bytes, zeroed, that the worker maps too. `name`: 1 to 64 characters of
 * [A-Za-z0-9._-], not beginning with a dot, once in the session. Takes a millisecond for some MiB.
 * Errors: MOE_INVALID_ARGUMENT/NAME_INVALID, REGION_INVALID; MOE_ALREADY_EXISTS/REGION_EXISTS;
 * MOE_RESOURCE_EXHAUSTED/REGION_LIMIT, OUT_OF_MEMORY; MOE_UNAVAILABLE, MOE_DEADLINE_EXCEEDED (the
 * name may stay in use until the session is closed). */
struct moe_status moe_region_create(struct moe_client_session *s, const char *name, size_t bytes,
                                    struct moe_client_region **out) MOE_CHECKED;
/* Its first byte, at the start of a page; and its length. */
void *moe_region_data(const struct moe_client_region *r);
size_t moe_region_bytes(const struct moe_client_region *r);
/* Waits until no request uses the region, then frees it, content and all. Frees it here in every
 * case; on failure the worker may keep its mapping until the session is closed. Errors:
 * MOE_UNAVAILABLE, MOE_DEADLINE_EXCEEDED. */
struct moe_status moe_region_destroy(struct moe_client_region *r) MOE_CHECKED;

/* A tensor in a region of the session. */
struct moe_client_tensor {
    struct moe_client_region *region; /* NULL = absent */
    uint64_t offset;                  /* of its first byte; a multiple of 16 */
};

struct moe_client_session_forward {
    size_t size;
    uint32_t layer;                  /* the model's layer index */
    uint32_t tokens, hidden;         /* T, H */
    enum moe_dtype dtype;            /* of x and y */
    uint64_t epoch, weights_version; /* fail unless the worker has these; 0 = any */
    struct moe_client_tensor x;      /* [T,H] */
    struct moe_client_tensor ids_in; /* [T,K] int32; absent = the worker routes; -1 = not routed */
    struct moe_client_tensor weights_in;   /* [T,K] float; absent = the worker computes them */
    struct moe_client_tensor y;            /* [T,H] */
    struct moe_client_tensor ids, weights; /* [T,K] int32 and float, as used; both or neither */
    /* The trace and the span that the request belongs to, as in W3C Trace Context; zeros: none. */
    uint8_t trace_id[16], parent_id[8];
    uint32_t trace_flags; /* bit 0: the caller samples it, and the worker sends its spans */
    /* Summands of y. With MOE_PARTS_SHARED, token_ids_in, ids_in, weights_in, ids and weights are
     * absent. */
    enum moe_parts parts;
    /* [T] int64 in host memory: as moe_client_forward.token_ids_in. Excludes ids_in. */
    struct moe_client_tensor token_ids_in;
};

struct moe_client_session_answer {
    size_t size;
    uint64_t epoch, weights_version;
    /* On the worker: until its first step began; its last step; all. */
    uint64_t queue_ns, step_ns, server_ns;
    uint32_t step_tokens, steps; /* as in moe_client_stages */
    /* Of step_ns: the stages from router to combine; the copies of x in and y out. A CUDA worker
     * does not measure the copies. */
    uint64_t layer_ns, copy_in_ns, copy_out_ns;
    uint64_t stream_ns; /* of moe/client_cuda.h: from the submit to the end of the wait, by the
                           clock of the client's device; 0 = the request was not of a stream */
};

/* Submits a request and returns at once. `f` is not used afterwards. At most 64 are in flight.
 * `*request` names it for one successful or failed end by the functions below. Errors:
 * MOE_INVALID_ARGUMENT, MOE_NOT_FOUND/LAYER_NOT_FOUND, MOE_RESOURCE_EXHAUSTED/QUEUE_FULL (take
 * results first); nothing was submitted then. */
struct moe_status moe_session_submit(struct moe_client_session *s,
                                     const struct moe_client_session_forward *f,
                                     uint64_t *request) MOE_CHECKED;
/* Waits for the end of a request, and returns its status; y is complete on success. `answer` may be
 * NULL; it is filled on success. If y is on a device, the worker tells `answer` some microseconds
 * after the end; this and the next calls wait for that, at most 100 ms. All fields are 0 if it does
 * not come, as when the worker ends meanwhile. It returns at most 100 ms after the request's
 * timeout. Errors: MOE_INVALID_ARGUMENT/VALUE_INVALID (there is no such request, or its end has
 * been returned), and all that moe_client_forward has, with REGION_NOT_FOUND, REGION_RANGE and
 * REGION_OVERLAP. */
struct moe_status moe_session_wait(struct moe_client_session *s, uint64_t request,
                                   struct moe_client_session_answer *answer) MOE_CHECKED;
/* The same, but it returns after `limit_ms` at the latest: MOE_OK with `*done` false if the request
 * is still in flight. For callers that have other things to look at, as signals. */
struct moe_status moe_session_wait_for(struct moe_client_session *s, uint64_t request,
                                       uint64_t limit_ms, bool *done,
                                       struct moe_client_session_answer *answer) MOE_CHECKED;
/* The same without waiting: MOE_OK with `*done` false while the request is in flight. */
struct moe_status moe_session_poll(struct moe_client_session *s, uint64_t request, bool *done,
                                   struct moe_client_session_answer *answer) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
