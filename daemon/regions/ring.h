/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of a ring: requests of one client, and their completions, in memory that the client
 * and a daemon share. README.md describes the protocol; caller.h and server.h are its two sides.
 *
 * Each field has one writer. The client may write any byte at any time all the same: so the daemon
 * copies a request once, checks the copy, and never reads back what it wrote itself.
 *
 * CUDA sources include this file too: there kernels submit and wait, by device_caller.h. */
#ifndef MOE_REGIONS_RING_H
#define MOE_REGIONS_RING_H

#include "base/guard.h"
#include "moe/status.h"

#include <assert.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Functions of both sides, of host and device. */
#ifdef __CUDACC__
#define MOE_RING_INLINE __host__ __device__ static inline
#else
#define MOE_RING_INLINE static inline
#endif

enum {
#ifdef MOE_SIMULATION /* so few that all interleavings can be tried */
    MOE_RING_ENTRIES = 2,
#else
    MOE_RING_ENTRIES = 64, /* requests of one ring in flight */
#endif
    MOE_RING_LINE = 64, /* bytes of a cache line */
    MOE_RING_TEXT = 208,
};

/* The tensors of a request; T tokens, H hidden width, K experts per token. */
enum moe_ring_role {
    MOE_RING_X,           /* [T,H] of the request's dtype */
    MOE_RING_IDS,         /* [T,K] int32, with client routing; or [T] int64, token ids */
    MOE_RING_WEIGHTS,     /* [T,K] float, with given weights */
    MOE_RING_Y,           /* [T,H] of the request's dtype; the first output */
    MOE_RING_IDS_OUT,     /* [T,K] int32, as used; may be absent */
    MOE_RING_WEIGHTS_OUT, /* [T,K] float, as used; absent if IDS_OUT is */
    MOE_RING_TOKEN_STATE, /* [T] uint8, enum moe_token_state; may be absent */
    MOE_RING_ROLES,
    MOE_RING_INPUTS = MOE_RING_Y, /* roles below read, all others write */
};

/* Where the routing comes from. */
enum moe_ring_routing {
    MOE_RING_ROUTE_SERVER,      /* the layer's router */
    MOE_RING_ROUTE_IDS,         /* given ids, the router's weights */
    MOE_RING_ROUTE_IDS_WEIGHTS, /* given ids and weights */
    MOE_RING_ROUTE_TOKEN_IDS,   /* the layer's table of token ids, the router's weights */
    MOE_RING_ROUTES,
};

/* Bytes of a region. */
struct moe_ring_tensor {
    uint64_t offset; /* a multiple of 16 */
    uint64_t bytes;  /* exactly those of its shape */
    uint32_t region; /* its number, from registration; 0 = absent, then all fields are 0 */
    uint32_t reserved;
};

/* One request, written by the client. All bytes of `reserved` are 0. */
struct moe_ring_request {
    uint32_t layer;      /* the model's layer index */
    uint32_t tokens;     /* T; 0 is answered at once */
    uint32_t hidden;     /* H */
    uint32_t timeout_ms; /* from when the daemon takes it; 0 = the daemon's default */
    uint64_t epoch;      /* serve under this epoch only; 0 = any */
    uint64_t weights_version;
    uint32_t dtype;   /* enum moe_dtype */
    uint32_t routing; /* enum moe_ring_routing */
    /* The caller's trace, as in W3C Trace Context. An id of zeros: it has none. */
    uint8_t trace_id[16], parent_id[8];
    uint32_t trace_flags; /* bit 0: the caller samples; the others mean nothing */
    uint32_t parts; /* enum moe_parts; with SHARED, routing is SERVER and no routing comes back */
    uint64_t reserved[2];
    struct moe_ring_tensor tensors[MOE_RING_ROLES];
};
static_assert(sizeof(struct moe_ring_request) == 256, "a request is four cache lines");

/* What is known of a request that has ended, written by the host side of the daemon. */
struct moe_ring_details {
    uint32_t sequence; /* of the request; written last */
    uint32_t reason;   /* enum moe_reason */
    uint32_t retry_after_ms;
    uint32_t step_tokens, steps;
    uint32_t reserved;
    uint64_t epoch, weights_version;
    uint64_t queue_ns, layer_ns, step_ns, server_ns;
    uint64_t copy_in_ns, copy_out_ns;
    char text[MOE_RING_TEXT]; /* of an error; ends with a 0 */
};

struct moe_ring {
    /* The client's. `submitted`: sequence number of the entry's last request, 0 before the first;
     * stored after the request, with release. */
    alignas(MOE_RING_LINE) uint32_t submitted[MOE_RING_ENTRIES];
    /* The client's, never read by the daemon: its watchdog gives up waiting. */
    alignas(MOE_RING_LINE) uint64_t released[MOE_RING_ENTRIES];
    /* The client's: 1 = a thread sleeps on the entry's completion. */
    alignas(MOE_RING_LINE) uint32_t waits[MOE_RING_ENTRIES];
    /* 1 = the entry's request may have ended: a stream of the client's device sleeps until then.
     * Host, device and watchdog store it before a completion or a release: it may be the last store
     * of a daemon that dies. The client's device stores 0 before it submits. A 1 proves nothing. */
    alignas(MOE_RING_LINE) uint32_t ends[MOE_RING_ENTRIES];
    /* The daemon's: 1 = its thread sleeps, and a byte on the socket wakes it. */
    alignas(MOE_RING_LINE) uint32_t sleeps;
    /* The daemon's. `word`: a completion of moe_ring_word, 0 before the first; stored after the
     * outputs, with release. If a device stores it, the details come later. */
    struct {
        alignas(MOE_RING_LINE) uint64_t word;
        struct moe_ring_details details;
    } completed[MOE_RING_ENTRIES];
    /* The client's. */
    alignas(MOE_RING_LINE) struct moe_ring_request requests[MOE_RING_ENTRIES];
};

/* ---------------------------------------------------------------- completions */

/* A completion holds the request's sequence number and its code. It is never 0. */
MOE_RING_INLINE uint64_t moe_ring_word(uint32_t sequence, enum moe_code code)
{
    return (uint64_t)sequence << 32 | ((uint32_t)code + 1);
}

MOE_RING_INLINE uint32_t moe_ring_sequence_of(uint64_t word)
{
    return (uint32_t)(word >> 32);
}

/* MOE_UNKNOWN for a code that does not exist. */
MOE_RING_INLINE enum moe_code moe_ring_code_of(uint64_t word)
{
    uint32_t code = (uint32_t)word - 1;
    return code <= (uint32_t)MOE_UNAUTHENTICATED ? (enum moe_code)code : MOE_UNKNOWN;
}

/* The sequence number after `sequence`; never 0. */
MOE_RING_INLINE uint32_t moe_ring_next(uint32_t sequence)
{
    return sequence + 1 == 0 ? 1 : sequence + 1;
}

#endif
