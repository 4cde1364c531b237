/* SPDX-License-Identifier: Apache-2.0 */
/* What is kept on this worker between two training calls: forward passes until their Backward, and
 * answers of Backward until nobody will ask again. Records are known by (session, id), never take
 * more memory together than the budget says, and go when they are too old, or when newer ones need
 * the room (the oldest first). Their memory is kept for records of the same size, within the budget
 * and for as long as a record would be; what is over by time goes when somebody says what time it
 * is.
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

/* A record. `data` and `head` are the holder's to fill before moe_pass_store_put, and do not change
 * afterwards. */
struct moe_pass_record {
    char session[MOE_TRAINING_NAME_MAX + 1];
    uint64_t id;
    size_t bytes;
    void *data; /* [bytes] MOE_MEM_HOST, aligned to 4096, undefined at first */
    _Alignas(16) unsigned char head[MOE_PASS_RECORD_HEAD]; /* whatever its user puts there */
    /* the store's own */
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

/* A record of `bytes` bytes that nobody finds yet, with one reference. Makes room by dropping old
 * ones that nobody holds, if that is enough; otherwise drops none. Errors:
 * MOE_RESOURCE_EXHAUSTED/QUEUE_FULL (larger than the budget, or what others hold leaves no room),
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY; nothing was taken then. */
struct moe_status moe_pass_store_reserve(struct moe_pass_store *s, size_t bytes, uint64_t now,
                                         struct moe_pass_record **out) MOE_CHECKED;
/* From now on (session, id) finds it, in place of an older one. Takes over one reference. */
void moe_pass_store_put(struct moe_pass_store *s, struct moe_pass_record *r, const char *session,
                        uint64_t id, uint64_t now);
/* With a reference for the caller; NULL when there is none (any more). */
struct moe_pass_record *moe_pass_store_get(struct moe_pass_store *s, const char *session,
                                           uint64_t id, uint64_t now);
/* Nobody finds it any more. */
void moe_pass_store_drop(struct moe_pass_store *s, const char *session, uint64_t id);
/* Nor any; the memory of those that nobody holds goes, too. */
void moe_pass_store_clear(struct moe_pass_store *s);

/* Drops what is too old. Of memory that has been idle for too long it frees one record's: giving
 * pinned memory back takes a while, and the caller may have other things to do in between. */
void moe_pass_store_expire(struct moe_pass_store *s, uint64_t now);
/* When that has something to do, `now` or earlier where it has already. In `keep_ns` where nothing
 * is kept now: what is from now on will not be too old before that. */
uint64_t moe_pass_store_next_expiry(struct moe_pass_store *s, uint64_t now);

void moe_pass_record_ref(struct moe_pass_record *r);
/* NULL is ignored. */
void moe_pass_record_unref(struct moe_pass_record *r);

/* Bytes taken, those of records included that nobody finds any more but somebody still holds. */
uint64_t moe_pass_store_bytes(struct moe_pass_store *s);
/* Bytes beside them that wait for the next records. */
uint64_t moe_pass_store_idle_bytes(struct moe_pass_store *s);
uint64_t moe_pass_store_budget(const struct moe_pass_store *s);

#endif
