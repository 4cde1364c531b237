/* SPDX-License-Identifier: Apache-2.0 */
/* What a coordinator has to keep: one record, which each change replaces as a whole, and next to it
 * images of bytes, by number. The store knows nothing of their content.
 *
 * A store is a table of functions, with two makers: `file` (store/file.h, a log in a directory) and
 * `etcd` (store/etcd.h). All functions block until the change is durable, and run on one thread. */
#ifndef MOE_STORE_STORE_H
#define MOE_STORE_STORE_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

struct moe_store;

struct moe_store_ops {
    /* On success the record is durable. After a failure with the reason NOT_LEADER another process
     * owns the state, and the old content stays. After any other, the old or the new one is there.
     * Errors: MOE_UNAVAILABLE/IO, OUT_OF_MEMORY, MOE_FAILED_PRECONDITION/NOT_LEADER. */
    struct moe_status (*append)(struct moe_store *s, const uint8_t *record, size_t length);
    /* The caller frees `*image`, which is NULL if there is none. At most `max` bytes. Errors:
     * MOE_DATA_LOSS (larger, or incomplete), MOE_UNAVAILABLE/IO, OUT_OF_MEMORY. */
    struct moe_status (*read)(struct moe_store *s, uint32_t number, size_t max, uint8_t **image,
                              size_t *length);
    /* Replaces the image; at any moment the whole old or the whole new one exists. NULL removes it.
     * Errors: as append. */
    struct moe_status (*write)(struct moe_store *s, uint32_t number, const uint8_t *image,
                               size_t length);
    void (*close)(struct moe_store *s);
};

/* Images from this number on are of placements; the file store names them so. */
enum { MOE_STORE_PLACEMENTS = 65536 };

/* The first member of each kind of store. */
struct moe_store {
    const struct moe_store_ops *ops;
    char name[160]; /* where the record is, for texts: "DIR/group.log", "etcd PREFIX/state" */
};

/* The record that a store holds when it is opened. */
struct moe_store_found {
    uint8_t *record; /* the caller frees it; NULL: a new store */
    size_t length;
    uint32_t format; /* that it was written in */
    size_t lost;     /* so many later records may have been acknowledged, and are lost */
};

/* How records are written and read. */
struct moe_store_format {
    uint32_t version;    /* of what this release writes; it reads all from 1 on */
    size_t record_least; /* bytes of the shortest record */
    size_t record_most;  /* and of the longest */
};

static inline struct moe_status moe_store_append(struct moe_store *s, const uint8_t *record,
                                                 size_t length)
{
    return s->ops->append(s, record, length);
}

static inline struct moe_status moe_store_read(struct moe_store *s, uint32_t number, size_t max,
                                               uint8_t **image, size_t *length)
{
    return s->ops->read(s, number, max, image, length);
}

static inline struct moe_status moe_store_write(struct moe_store *s, uint32_t number,
                                                const uint8_t *image, size_t length)
{
    return s->ops->write(s, number, image, length);
}

/* NULL is ignored. */
static inline void moe_store_close(struct moe_store *s)
{
    if (s != NULL)
        s->ops->close(s);
}

#endif
