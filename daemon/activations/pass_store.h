/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory that this worker keeps between two training calls: forward passes until their
 * Backward, and cached answers of Backward for repeats. A record's key is (session, id). All
 * records together stay within the budget; a record is dropped when it expires or when newer ones
 * need the room, the oldest first. Its memory is reused for records of the same size, within the
 * budget, and expires as a record does. Expiry happens only in calls that pass the time.
 *
 * Every function is safe from any thread. The time is given by the caller. */
#ifndef MOE_ACTIVATIONS_PASS_STORE_H
#define MOE_ACTIVATIONS_PASS_STORE_H

#include "daemon/name.h"
#include "moe/backend.h"

struct moe_pass_store;

enum {
    MOE_PASS_RECORD_HEAD = 192,
    MOE_PASS_STORE_RECORDS = 4096, /* at once */
};

/* A record. The owner of a reference fills `data` and `head` before moe_pass_store_put; they do not
 * change afterwards. */
struct moe_pass_record {
    char session[MOE_TRAINING_NAME_MAX + 1];
    uint64_t id;
    size_t bytes;
    void *data; /* [bytes] MOE_MEM_HOST, aligned to 4096, undefined at first */
    _Alignas(16) unsigned char head[MOE_PASS_RECORD_HEAD]; /* free for its user */
    /* the store's fields */
    struct moe_pass_store *store;
    struct moe_pass_record *next, *prev;
    uint64_t expires_ns;
    _Atomic uint32_t references;
};

/* `budget` in bytes; `keep_ns`: how long a record stays. The device outlives the store. */
struct moe_status moe_pass_store_create(const struct moe_backend *backend,
                                        struct moe_device *device, uint64_t budget,
                                        uint64_t keep_ns, struct moe_pass_store **out) MOE_CHECKED;
/* Waits until every record has been released, then frees all. NULL is ignored. */
void moe_pass_store_destroy(struct moe_pass_store *s);

/* A record of `bytes` bytes that is not listed yet, with one reference. Makes room by dropping old
 * records without other references if that is enough; otherwise drops none. Errors:
 * MOE_RESOURCE_EXHAUSTED/QUEUE_FULL (larger than the budget, or referenced records leave no room),
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; nothing was taken then. */
struct moe_status moe_pass_store_reserve(struct moe_pass_store *s, size_t bytes, uint64_t now,
                                         struct moe_pass_record **out) MOE_CHECKED;
/* From now on (session, id) finds it, in place of an older one. Takes over one reference. */
void moe_pass_store_put(struct moe_pass_store *s, struct moe_pass_record *r, const char *session,
                        uint64_t id, uint64_t now);
/* With a reference for the caller; NULL when there is none. */
struct moe_pass_record *moe_pass_store_get(struct moe_pass_store *s, const char *session,
                                           uint64_t id, uint64_t now);
/* Takes the record out of the list; references stay valid. */
void moe_pass_store_drop(struct moe_pass_store *s, const char *session, uint64_t id);
/* The same for all records; frees the memory of those without references. */
void moe_pass_store_clear(struct moe_pass_store *s);

/* Drops expired records. Frees the memory of one expired idle record only: freeing pinned memory
 * takes a while, and the caller has other work in between. */
void moe_pass_store_expire(struct moe_pass_store *s, uint64_t now);
/* When to call moe_pass_store_expire next; `now` or earlier if something has expired. now + keep_ns
 * when nothing is kept: a record that is made later expires later. */
uint64_t moe_pass_store_next_expiry(struct moe_pass_store *s, uint64_t now);

void moe_pass_record_ref(struct moe_pass_record *r);
/* NULL is ignored. */
void moe_pass_record_unref(struct moe_pass_record *r);

/* Bytes taken, including dropped records that still have references. */
uint64_t moe_pass_store_bytes(struct moe_pass_store *s);
/* Further bytes: idle memory for the next records. */
uint64_t moe_pass_store_idle_bytes(struct moe_pass_store *s);
uint64_t moe_pass_store_budget(const struct moe_pass_store *s);

#endif
