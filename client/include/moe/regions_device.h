/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions of moe/regions.h for libraries of a device's runtime: the device has the tensors,
 * submits and waits. Programs with CUDA use moe/client_cuda.h, which is built on this header.
 *
 * Memory of a device comes into a session as a region that the library has made. Its data is an
 * address of the device. An entry of the session's ring can be lent to a device: kernels then write
 * requests there, and read their completions. The session's watchdog ends their waits as well.
 *
 * A device wakes no thread of the worker. A worker that sleeps is woken by the session within a
 * millisecond; one with --spin-us polls between requests, and is not asleep.
 *
 * Threads: any; calls for one entry must not overlap. Errors and sizes: see moe/client.h. */
#ifndef MOE_REGIONS_DEVICE_H
#define MOE_REGIONS_DEVICE_H

#include "moe/regions.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory that a library has made. */
struct moe_client_memory {
    size_t size;
    void *data;   /* what moe_region_data returns */
    size_t bytes; /* what moe_region_bytes returns; all of the memory */
    /* Frees the memory when the region ends, after the worker has let it go or the session has
     * closed. NULL = the library frees it later. */
    void (*release)(void *ctx, void *data, size_t bytes);
    void *ctx;
    int descriptor;         /* borrowed until moe_region_adopt returns */
    uint32_t reserved_bits; /* 0 */
    uint64_t reserved[2];   /* 0 */
};

/* Makes a region of memory that the worker's device imports. With a CUDA worker it is an allocation
 * of cuMemCreate, exported as a POSIX descriptor, on a GPU that the worker's GPU reaches. With a
 * CPU worker it is a sealed memfd. On failure the memory stays the library's. Errors: those of
 * moe_region_create; MOE_INVALID_ARGUMENT/REGION_INVALID (no such memory, or `bytes` is wrong);
 * MOE_FAILED_PRECONDITION/UNSUPPORTED (the worker's device cannot reach it). */
struct moe_status moe_region_adopt(struct moe_client_session *s, const char *name,
                                   const struct moe_client_memory *memory,
                                   struct moe_client_region **out) MOE_CHECKED;

/* An entry of the ring, lent to a device. daemon/regions/device_caller.h is its protocol; both
 * libraries are of one release. */
struct moe_client_entry {
    size_t size;
    void *
        ring; /* host memory of the session, with room for all entries; its end is that of a page */
    size_t ring_bytes;
    uint32_t entry;       /* its number */
    uint32_t sequence;    /* of the last request that was in it */
    uint8_t request[256]; /* what the device submits, again and again */
    uint64_t reserved[4]; /* 0 */
};

/* Lends an entry for requests `f`. All regions of `f` stay until the entry is given back. Errors:
 * those of moe_session_submit. */
struct moe_status moe_session_lend(struct moe_client_session *s,
                                   const struct moe_client_session_forward *f,
                                   struct moe_client_entry *out) MOE_CHECKED;
/* Takes it back. The device has ended all its work with the entry. Before moe_session_close. */
void moe_session_take_back(struct moe_client_session *s, const struct moe_client_entry *e);

/* The status of the result `word` that the device read in the ring, with the worker's text and
 * `answer` if the worker has reported them and no later request is in the entry. The report may
 * come some microseconds after the result: waits for it, at most 100 ms. Without a report of a
 * success, all fields of `answer` are 0. `answer` may be NULL. */
struct moe_status moe_session_result(struct moe_client_session *s, const struct moe_client_entry *e,
                                     uint64_t word,
                                     struct moe_client_session_answer *answer) MOE_CHECKED;

#ifdef __cplusplus
}
#endif

#endif
