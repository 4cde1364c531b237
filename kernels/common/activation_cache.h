/* SPDX-License-Identifier: Apache-2.0 */
/* What forward steps keep on a device for backward passes (moe/training.h, "Retained"): pieces of
 * one block of device memory, found by name. Of both backends; it computes nothing and never
 * touches what is in the block.
 *
 * The block is taken when something is first to be kept, as large as the limit, so that a steady
 * step allocates nothing. A piece is open from the moment a step takes its room until the step has
 * succeeded: open pieces are neither found nor pushed out. The oldest name goes first, with all its
 * pieces; none goes for a piece that would find no room anyway.
 * Threads: all functions may be called from any thread; a piece that was found must not be dropped
 * while it is read. moe_activation_cache_give_back alone may be called at any moment by somebody
 * who knows nothing of readers, where these say when they begin and end. */
#ifndef MOE_ACTIVATION_CACHE_H
#define MOE_ACTIVATION_CACHE_H

#include "base/mutex.h"
#include "moe/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum moe_activation_part {
    MOE_ACTIVATION_ROUTED, /* of the routed experts' rows */
    MOE_ACTIVATION_SHARED, /* of the shared expert's: the own tokens */
    MOE_ACTIVATION_PARTS
};

enum {
    MOE_ACTIVATION_MAX = 512,   /* pieces at a time */
    MOE_ACTIVATION_ALIGN = 256, /* bytes: where pieces begin */
};

/* Whose, of which batch. All of it but `step` must be the same for a piece to be found. */
struct moe_activation_key {
    const struct moe_layer *layer;
    const struct moe_session *session;
    uint64_t name; /* not 0 */
    enum moe_dtype dtype;
    uint32_t bucket, tokens;
    /* Tells steps of one name apart that are in flight together: an open piece is its step's alone.
     * Never looked into; of any value where steps come one after the other. */
    const void *step;
};

struct moe_activation_piece {
    struct moe_activation_key key;
    enum moe_activation_part part;
    bool open;
    uint64_t rows;   /* (token, expert) pairs, or tokens, that it has */
    uint32_t in_use; /* rows with the padding between them */
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
        void *block; /* [limit], or NULL while nothing was kept */
        uint64_t age;
        uint32_t readers; /* between moe_activation_cache_read_begin and _end */
        uint32_t count;
        struct moe_activation_piece piece[MOE_ACTIVATION_MAX]; /* by offset */
    };
};

/* The functions take and give the block: mem_alloc and mem_free of the backend. */
void moe_activation_cache_open(struct moe_activation_cache *s, struct moe_device *device,
                               struct moe_status (*alloc)(struct moe_device *, enum moe_mem, size_t,
                                                          void **),
                               void (*free)(struct moe_device *, enum moe_mem, void *, size_t));
void moe_activation_cache_close(struct moe_activation_cache *s);

/* Drops everything and gives the block back. */
void moe_activation_cache_limit(struct moe_activation_cache *s, size_t bytes);
/* Gives the block back, with all that is kept, until something is to be kept again: for whoever
 * finds no memory otherwise. False, with nothing changed, where there is no block or a step is at
 * it. */
bool moe_activation_cache_give_back(struct moe_activation_cache *s);
/* Between them, the block is not given back: for who finds pieces and reads them. */
void moe_activation_cache_read_begin(struct moe_activation_cache *s);
void moe_activation_cache_read_end(struct moe_activation_cache *s);
/* Bytes of all pieces, open ones included. */
uint64_t moe_activation_cache_bytes(struct moe_activation_cache *s);

/* A step is to keep something under this name: what was kept under it goes, as it may be of another
 * batch. The bytes that a piece can have if all goes that can. */
size_t moe_activation_cache_begin(struct moe_activation_cache *s,
                                  const struct moe_activation_key *key);
/* Room for a piece, which is open then: its address (not NULL, also for 0 bytes), or NULL where
 * there is none. What was kept under the same name goes first, when its first part is taken, room
 * or not; others only where that makes room. */
void *moe_activation_cache_take(struct moe_activation_cache *s,
                                const struct moe_activation_key *key, enum moe_activation_part part,
                                size_t bytes);
/* What the piece has, and that it needs no more than `bytes` of its room. */
void moe_activation_cache_fill(struct moe_activation_cache *s, const struct moe_activation_key *key,
                               enum moe_activation_part part, uint64_t rows, uint32_t in_use,
                               size_t bytes);
/* The step has succeeded: its open pieces can be found from here on, and others of its name no
 * more. False where it has none. */
bool moe_activation_cache_commit(struct moe_activation_cache *s,
                                 const struct moe_activation_key *key);
/* The step keeps nothing: its open pieces are gone. */
void moe_activation_cache_forget(struct moe_activation_cache *s,
                                 const struct moe_activation_key *key);

/* A piece that was kept; false where there is none. */
bool moe_activation_cache_find(struct moe_activation_cache *s, const struct moe_activation_key *key,
                               enum moe_activation_part part, struct moe_activation_piece *out);

/* Pieces of a layer: all (name 0), or those of one name. */
void moe_activation_cache_drop(struct moe_activation_cache *s, const struct moe_layer *layer,
                               uint64_t name);
void moe_activation_cache_drop_session(struct moe_activation_cache *s,
                                       const struct moe_session *session);

#ifdef __cplusplus
}
#endif

#endif
