/* SPDX-License-Identifier: Apache-2.0 */
/* A client's side of one entry of a ring, on the client's device: what its kernels do. Each
 * function is the whole work of one thread of a kernel. C sources include it too: the simulation
 * and the tests run the same lines on the host.
 *
 * An entry belongs to one stream's work at a time: submit, wait, submit, wait, in its order. The
 * watchdog (caller.h) runs on the host, and releases waits. The entry itself is memory of the
 * device; a kernel's arguments are constant, so a captured graph can be launched again. CUDA
 * sources include <cuda/atomic> first. */
#ifndef MOE_REGIONS_DEVICE_CALLER_H
#define MOE_REGIONS_DEVICE_CALLER_H

#include "regions/ring.h"

#ifdef __CUDACC__
#define MOE_RING_DEVICE __device__ static inline
#else
#define MOE_RING_DEVICE static inline
#endif

struct moe_ring_device_entry {
    uint32_t sequence; /* of the last request submitted */
    uint32_t waiting;  /* 1: it has no result */
    /* 1: it was given up, and the daemon may still write to its outputs. Nothing is submitted
     * before its completion has come: a wait after such a submit fails at once. */
    uint32_t abandoned;
    uint32_t refused;           /* the last submit submitted nothing: enum moe_code; 0 = it did */
    uint64_t result;            /* of the last wait: sequence number and code, as moe_ring_word */
    uint64_t results, failures; /* so far */
    struct moe_ring_request request;
};

/* ------------------------------------------------- memory that host and device share */

/* Loads of a device are relaxed, so that several are under way at once; the fence follows them. */
MOE_RING_DEVICE uint64_t moe_ring_device_load(uint64_t *at)
{
#ifdef __CUDACC__
    return cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*at).load(
        cuda::memory_order_relaxed);
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
}

MOE_RING_DEVICE void moe_ring_device_fence(void)
{
#ifdef __CUDACC__
    cuda::atomic_thread_fence(cuda::memory_order_acquire, cuda::thread_scope_system);
#endif
}

/* A later store with release orders it. */
MOE_RING_DEVICE void moe_ring_device_set(uint32_t *at, uint32_t value)
{
#ifdef __CUDACC__
    cuda::atomic_ref<uint32_t, cuda::thread_scope_system>(*at).store(value,
                                                                     cuda::memory_order_relaxed);
#else
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
#endif
}

MOE_RING_DEVICE void moe_ring_device_release(uint32_t *at, uint32_t value)
{
#ifdef __CUDACC__
    cuda::atomic_ref<uint32_t, cuda::thread_scope_system>(*at).store(value,
                                                                     cuda::memory_order_release);
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

MOE_RING_DEVICE bool moe_ring_device_is_of(uint64_t word, uint32_t sequence)
{
    return word != 0 && MOE_GUARD(DEVICE_RESULT_OF_THIS, moe_ring_sequence_of(word) == sequence);
}

/* ------------------------------------------------------------------ submit, wait */

/* Submits the entry's request, after all earlier work of the stream. */
MOE_RING_DEVICE void moe_ring_device_submit(struct moe_ring_device_entry *e, struct moe_ring *ring,
                                            uint32_t entry)
{
    const struct moe_ring_request request = e->request; /* all loads before the first store */
    e->refused = 0;
    if (e->abandoned != 0 &&
        moe_ring_device_is_of(moe_ring_device_load(&ring->completed[entry].word), e->sequence))
        e->abandoned = 0;
    if (e->waiting != 0) { /* the caller's mistake: there was no wait */
        e->refused = (uint32_t)MOE_FAILED_PRECONDITION;
        e->abandoned = 1;
    } else if (!MOE_GUARD(DEVICE_ABANDONED_WAITS, e->abandoned == 0)) {
        e->refused = (uint32_t)MOE_UNAVAILABLE;
    }
    if (e->refused != 0) {
        moe_ring_device_set(&ring->ends[entry], 1);
        return;
    }
    e->sequence = moe_ring_next(e->sequence);
    e->waiting = 1;
    ring->requests[entry] = request;
    moe_ring_device_set(&ring->ends[entry], 0);
    moe_ring_device_release(&ring->submitted[entry], e->sequence);
}

MOE_RING_DEVICE void moe_ring_device_conclude(struct moe_ring_device_entry *e, uint64_t word)
{
    e->waiting = e->refused = 0;
    e->result = word;
    e->results++;
    e->failures += moe_ring_code_of(word) != MOE_OK;
}

/* True once the submitted request has a result, which is then in the entry. A kernel calls it until
 * then: the watchdog ends every wait. */
MOE_RING_DEVICE bool moe_ring_device_poll(struct moe_ring_device_entry *e, struct moe_ring *ring,
                                          uint32_t entry)
{
    if (e->refused != 0 || e->waiting == 0) {
        uint32_t code = e->refused != 0 ? e->refused : (uint32_t)MOE_FAILED_PRECONDITION;
        moe_ring_device_conclude(e, moe_ring_word(e->sequence, (enum moe_code)code));
        return true;
    }
    uint64_t word = moe_ring_device_load(&ring->completed[entry].word);
    const uint64_t released = moe_ring_device_load(&ring->released[entry]);
    if (!moe_ring_device_is_of(word, e->sequence)) {
        if (!moe_ring_device_is_of(released, e->sequence))
            return false;
        word = released;
        e->abandoned = 1;
    }
    moe_ring_device_fence();
    moe_ring_device_conclude(e, word);
    return true;
}

#endif
