/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions and requests of moe/client_cuda.h. */
#include "base/mutex.h"
#include "base/size.h"
#include "device_region.h"
#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct moe_stream_session {
    struct moe_client_session *session;
    struct moe_cuda_driver driver;
    int device;
    bool spin;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) void *ring; /* registered for the device; NULL: not yet */
};

struct moe_stream_request {
    struct moe_stream_session *owner;
    struct moe_client_entry lent;
    struct moe_stream_wait wait;
};

/* Makes the session's device current; `*before` is what was. */
static struct moe_status enter(const struct moe_stream_session *s, int *before)
{
    MOE_TRY(moe_cuda_failure(cudaGetDevice(before), "cudaGetDevice"));
    return *before == s->device ? moe_ok()
                                : moe_cuda_failure(cudaSetDevice(s->device), "cudaSetDevice");
}

static void leave(const struct moe_stream_session *s, int before)
{
    if (before != s->device)
        (void)cudaSetDevice(before);
}

static struct moe_status out_of_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a request");
}

/* -------------------------------------------------------------------- sessions */

static struct moe_status check_config(const struct moe_stream_session_config *c)
{
    bool reserved = false;
    for (size_t i = 0; i < sizeof c->reserved / sizeof c->reserved[0]; i++)
        reserved = reserved || c->reserved[i] != 0;
    if (c->size != sizeof *c || reserved || c->spin > 1 || c->device < 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                         "moe_stream_session_config: set size, a device, and spin to 0 or 1");
    return moe_ok();
}

static struct moe_status prepare(struct moe_stream_session *s)
{
    int count = 0, before;
    MOE_TRY(moe_cuda_failure(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
    if (s->device >= count)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "there is no CUDA device %d: %d are visible", s->device, count);
    MOE_TRY(moe_cuda_driver_find(&s->driver));
    MOE_TRY(enter(s, &before));
    struct moe_status st = moe_cuda_failure(moe_stream_load(), "loading kernels");
    leave(s, before);
    return st;
}

struct moe_status moe_stream_session_open(struct moe_client_session *session,
                                          const struct moe_stream_session_config *config,
                                          struct moe_stream_session **out)
{
    const struct moe_stream_session_config defaults = {.size = sizeof defaults};
    if (config == NULL)
        config = &defaults;
    MOE_TRY(check_config(config));
    struct moe_stream_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return out_of_memory();
    s->session = session;
    s->device = config->device;
    s->spin = config->spin != 0;
    moe_mutex_init(&s->lock);
    struct moe_status st = prepare(s);
    if (moe_failed(&st))
        moe_stream_session_close(s);
    else
        *out = s;
    return st;
}

void moe_stream_session_close(struct moe_stream_session *s)
{
    int before;
    if (s == NULL)
        return;
    moe_mutex_not_shared(&s->lock);
    if (s->ring != NULL) {
        struct moe_status st = enter(s, &before);
        if (cudaHostUnregister(s->ring) != cudaSuccess)
            (void)cudaGetLastError();
        if (!moe_failed(&st))
            leave(s, before);
    }
    moe_mutex_destroy(&s->lock);
    free(s);
}

struct moe_status moe_region_alloc(struct moe_stream_session *s, const char *name, size_t bytes,
                                   struct moe_client_region **out)
{
    int before;
    MOE_TRY(enter(s, &before));
    struct moe_status st =
        moe_device_region_create(&s->driver, s->device, s->session, name, bytes, out);
    leave(s, before);
    return st;
}

static struct moe_status copy(const struct moe_stream_session *s,
                              const struct moe_client_region *region, uint64_t offset, void *to,
                              const void *from, size_t bytes)
{
    size_t end;
    int before;
    if (!moe_size_add(offset, bytes, &end) || end > moe_region_bytes(region))
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_REGION_RANGE,
                         "these bytes are not inside of the region");
    MOE_TRY(enter(s, &before));
    cudaError_t rc = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    if (rc == cudaSuccess) /* pageable memory: only a staged copy has been made so far */
        rc = cudaStreamSynchronize(NULL);
    leave(s, before);
    return moe_cuda_failure(rc, "cudaMemcpy");
}

struct moe_status moe_region_copy_in(struct moe_stream_session *s, struct moe_client_region *to,
                                     uint64_t offset, const void *from, size_t bytes)
{
    return copy(s, to, offset, (char *)moe_region_data(to) + offset, from, bytes);
}

struct moe_status moe_region_copy_out(struct moe_stream_session *s,
                                      const struct moe_client_region *from, uint64_t offset,
                                      void *to, size_t bytes)
{
    return copy(s, from, offset, to, (const char *)moe_region_data(from) + offset, bytes);
}

/* -------------------------------------------------------------------- requests */

/* Threads may make their first requests at once. */
static struct moe_status register_ring(struct moe_stream_session *s, void *ring, size_t bytes)
{
    struct moe_status st = moe_ok();
    moe_mutex_lock(&s->lock);
    if (s->ring == NULL) {
        st = moe_cuda_failure(
            cudaHostRegister(ring, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
            "cudaHostRegister");
        if (!moe_failed(&st))
            s->ring = ring;
    }
    moe_mutex_unlock(&s->lock);
    return st;
}

/* The ring's address on the device. It is registered with the first request. */
static struct moe_status ring_of(struct moe_stream_session *s, const struct moe_client_entry *e,
                                 struct moe_ring **out)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t bytes;
    void *there;
    if (e->ring_bytes != sizeof(struct moe_ring) || !moe_size_round_up(e->ring_bytes, page, &bytes))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "libmoeclient and libmoeclient_cuda are of different releases");
    MOE_TRY(register_ring(s, e->ring, bytes));
    MOE_TRY(
        moe_cuda_failure(cudaHostGetDevicePointer(&there, e->ring, 0), "cudaHostGetDevicePointer"));
    *out = there;
    return moe_ok();
}

/* A wait writes to y if the request fails. Its device may not have mapped memory of others. */
static struct moe_status place_y(const struct moe_stream_session *s,
                                 const struct moe_client_session_forward *f,
                                 struct moe_stream_wait *w)
{
    struct cudaPointerAttributes of;
    size_t bytes, end;
    if (f->tokens == 0)
        return moe_ok();
    if (f->y.region == NULL ||
        !moe_size_mul3(f->tokens, f->hidden, moe_dtype_bytes(f->dtype), &bytes) ||
        !moe_size_add(bytes, f->y.offset, &end) || end > moe_region_bytes(f->y.region))
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_REGION_RANGE,
                         "y is not inside of its region");
    w->y = (char *)moe_region_data(f->y.region) + f->y.offset;
    w->y_bytes = bytes;
    MOE_TRY(moe_cuda_failure(cudaPointerGetAttributes(&of, w->y), "cudaPointerGetAttributes"));
    return of.type == cudaMemoryTypeDevice && of.device == s->device
               ? moe_ok()
               : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_REGION_INVALID,
                           "y must lie in a region of moe_region_alloc, on CUDA device %d",
                           s->device);
}

static struct moe_status put_on_device(struct moe_stream_request *r)
{
    struct moe_stream_entry entry = {.entry.sequence = r->lent.sequence};
    memcpy(&entry.entry.request, r->lent.request, sizeof entry.entry.request);
    r->wait.number = r->lent.entry;
    MOE_TRY(ring_of(r->owner, &r->lent, &r->wait.ring));
    MOE_TRY(moe_cuda_failure(cudaMalloc((void **)&r->wait.entry, sizeof entry), "cudaMalloc"));
    return moe_cuda_failure(cudaMemcpy(r->wait.entry, &entry, sizeof entry, cudaMemcpyHostToDevice),
                            "cudaMemcpy");
}

static struct moe_status create(struct moe_stream_session *s,
                                const struct moe_client_session_forward *f,
                                struct moe_stream_request **out)
{
    struct moe_stream_request *r = calloc(1, sizeof *r);
    if (r == NULL)
        return out_of_memory();
    r->owner = s;
    r->lent.size = sizeof r->lent;
    struct moe_status st = moe_session_lend(s->session, f, &r->lent);
    if (moe_failed(&st)) {
        free(r);
        return st;
    }
    st = place_y(s, f, &r->wait);
    if (!moe_failed(&st))
        st = put_on_device(r);
    if (moe_failed(&st))
        moe_stream_request_destroy(r);
    else
        *out = r;
    return st;
}

struct moe_status moe_stream_request_create(struct moe_stream_session *s,
                                            const struct moe_client_session_forward *f,
                                            struct moe_stream_request **out)
{
    int before;
    MOE_TRY(enter(s, &before));
    struct moe_status st = create(s, f, out);
    leave(s, before);
    return st;
}

void moe_stream_request_destroy(struct moe_stream_request *r)
{
    int before;
    if (r == NULL)
        return;
    struct moe_status st = enter(r->owner, &before);
    (void)cudaFree(r->wait.entry);
    if (!moe_failed(&st))
        leave(r->owner, before);
    moe_session_take_back(r->owner->session, &r->lent);
    free(r);
}

struct moe_status moe_session_submit_on_stream(struct moe_stream_request *r,
                                               struct CUstream_st *stream)
{
    int before;
    MOE_TRY(enter(r->owner, &before));
    cudaError_t rc = moe_stream_enqueue_submit(&r->wait, stream);
    leave(r->owner, before);
    return moe_cuda_failure(rc, "moe_session_submit_on_stream");
}

/* Without spin the stream sleeps until the signal; the kernel then finds the result at once. */
static struct moe_status enqueue_wait(struct moe_stream_request *r, struct CUstream_st *stream)
{
    if (!r->owner->spin) {
        CUdeviceptr signal = (CUdeviceptr)(uintptr_t)&r->wait.ring->ends[r->wait.number];
        MOE_TRY(moe_cuda_driver_failure(
            r->owner->driver.wait_value(stream, signal, 1, CU_STREAM_WAIT_VALUE_EQ),
            "cuStreamWaitValue32"));
    }
    return moe_cuda_failure(moe_stream_enqueue_wait(&r->wait, stream),
                            "moe_session_wait_on_stream");
}

struct moe_status moe_session_wait_on_stream(struct moe_stream_request *r,
                                             struct CUstream_st *stream)
{
    int before;
    MOE_TRY(enter(r->owner, &before));
    struct moe_status st = enqueue_wait(r, stream);
    leave(r->owner, before);
    return st;
}

const struct moe_stream_status *moe_stream_request_status(const struct moe_stream_request *r)
{
    return &r->wait.entry->status;
}

struct moe_status moe_stream_request_result(struct moe_stream_request *r,
                                            struct moe_client_session_answer *answer)
{
    struct moe_stream_entry entry;
    int before;
    MOE_TRY(enter(r->owner, &before));
    cudaError_t rc = cudaMemcpy(&entry, r->wait.entry, sizeof entry, cudaMemcpyDeviceToHost);
    leave(r->owner, before);
    MOE_TRY(moe_cuda_failure(rc, "cudaMemcpy"));
    if (entry.entry.results == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "no wait of the request has ended");
    MOE_TRY(moe_session_result(r->owner->session, &r->lent, entry.entry.result, answer));
    if (answer != NULL)
        answer->stream_ns = entry.status.stream_ns;
    return moe_ok();
}
