/* SPDX-License-Identifier: Apache-2.0 */
/* The cache of activations that forward steps retain on a device for backward passes
 * (moe/training.h, "Retained"): pieces of one block of device memory, found by name. Both backends
 * use it. It computes nothing and never accesses the contents of the block.
 *
 * The first step that retains allocates the block, as large as the limit, so a steady step
 * allocates nothing. A piece is open from moe_activation_cache_take until its step has succeeded;
 * open pieces are neither found nor evicted. The oldest name is evicted first, with all its pieces.
 * Nothing is evicted for a piece that cannot fit anyway.
 * Threads: any thread may call all functions. A reader must make sure that its piece is not dropped
 * meanwhile. Only moe_activation_cache_give_back may run at any moment: readers protect themselves
 * with read_begin and read_end. */
#ifndef MOE_ACTIVATION_CACHE_H
#define MOE_ACTIVATION_CACHE_H

#include "base/mutex.h"
#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_activation_part {
    MOE_ACTIVATION_ROUTED, /* of the routed experts' rows */
    MOE_ACTIVATION_SHARED, /* of the shared expert's rows: this slot's tokens */
    MOE_ACTIVATION_PARTS
};

enum {
    MOE_ACTIVATION_MAX = 512,   /* pieces at a time */
    MOE_ACTIVATION_ALIGN = 256, /* bytes; pieces start at multiples of it */
};

/* Owner and batch of a piece. A search compares all fields but `step`. */
struct moe_activation_key {
    const struct moe_layer *layer;
    const struct moe_session *session;
    uint64_t name; /* not 0 */
    enum moe_dtype dtype;
    uint32_t bucket, tokens;
    /* Distinguishes steps of one name that run at the same time: an open piece belongs to its step.
     * Never dereferenced. If steps do not overlap, any value will do. */
    const void *step;
};

struct moe_activation_piece {
    struct moe_activation_key key;
    enum moe_activation_part part;
    bool open;
    uint64_t rows;   /* (token, expert) pairs, or tokens */
    uint32_t in_use; /* rows, padding included */
    size_t offset, bytes;
    uint64_t age; /* of the name: higher is younger */
    void *data;
};

struct moe_activation_cache {
    struct moe_device *device;
    struct moe_status (*alloc)(struct moe_device *, enum moe_mem, size_t, void **);
    void (*free)(struct moe_device *, enum moe_mem, void *, size_t);
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        size_t limit;
        void *block; /* [limit], or NULL before it is allocated */
        uint64_t age;
        uint32_t readers; /* between moe_activation_cache_read_begin and _end */
        uint32_t count;
        struct moe_activation_piece piece[MOE_ACTIVATION_MAX]; /* by offset */
    };
};

/* `alloc` and `free` are mem_alloc and mem_free of the backend. */
void moe_activation_cache_open(struct moe_activation_cache *s, struct moe_device *device,
                               struct moe_status (*alloc)(struct moe_device *, enum moe_mem, size_t,
                                                          void **),
                               void (*free)(struct moe_device *, enum moe_mem, void *, size_t));
void moe_activation_cache_close(struct moe_activation_cache *s);

/* Drops everything and gives the block back. */
void moe_activation_cache_limit(struct moe_activation_cache *s, size_t bytes);
/* Frees the block with all pieces, if other memory is short; the next moe_activation_cache_take
 * allocates it again. False, with nothing changed, if there is no block, an open piece or a reader.
 */
bool moe_activation_cache_give_back(struct moe_activation_cache *s);
/* A reader finds and reads pieces between these two calls; the block is not given back meanwhile.
 */
void moe_activation_cache_read_begin(struct moe_activation_cache *s);
void moe_activation_cache_read_end(struct moe_activation_cache *s);
/* Bytes of all pieces, open ones included. */
uint64_t moe_activation_cache_bytes(struct moe_activation_cache *s);

/* Begins a step that retains under this name: drops the pieces of this name, which may be of
 * another batch. Returns the largest possible piece in bytes, if all committed pieces are evicted.
 */
size_t moe_activation_cache_begin(struct moe_activation_cache *s,
                                  const struct moe_activation_key *key);
/* Takes room for a piece, which is then open. Returns its address (not NULL, also for 0 bytes), or
 * NULL without room. Drops the committed pieces of the same name in any case. Evicts others only if
 * that makes room. */
void *moe_activation_cache_take(struct moe_activation_cache *s,
                                const struct moe_activation_key *key, enum moe_activation_part part,
                                size_t bytes);
/* Sets the rows of an open piece, and shrinks its room to `bytes`. */
void moe_activation_cache_fill(struct moe_activation_cache *s, const struct moe_activation_key *key,
                               enum moe_activation_part part, uint64_t rows, uint32_t in_use,
                               size_t bytes);
/* The step has succeeded: commits its open pieces, which replace others of its name. False if it
 * has none. */
bool moe_activation_cache_commit(struct moe_activation_cache *s,
                                 const struct moe_activation_key *key);
/* The step retains nothing: drops its open pieces. */
void moe_activation_cache_forget(struct moe_activation_cache *s,
                                 const struct moe_activation_key *key);

/* Finds a committed piece; false if there is none. */
bool moe_activation_cache_find(struct moe_activation_cache *s, const struct moe_activation_key *key,
                               enum moe_activation_part part, struct moe_activation_piece *out);

/* Drops pieces of a layer: all (name 0), or those of one name. */
void moe_activation_cache_drop(struct moe_activation_cache *s, const struct moe_layer *layer,
                               uint64_t name);
void moe_activation_cache_drop_session(struct moe_activation_cache *s,
                                       const struct moe_session *session);

#ifdef __cplusplus
}
#endif

#endif
