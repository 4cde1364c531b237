/* Short messages between the workers of one host, through shared memory instead of a socket: a
 * message takes well under a microsecond where its reader is awake, and one wake-up where it
 * sleeps.
 *
 * A worker makes a mailbox for each view and reads it; each of its peers that can see the worker's
 * process (worker/shared.h) opens it and writes into the ring of its own slot. Every message rings
 * the reader's bell. A reader believes nothing: what is no message breaks the peer's ring, not the
 * reader. A mailbox dies with its view, so that nothing of an old view can ever be read. */
#ifndef MOE_WORKER_MAILBOX_H
#define MOE_WORKER_MAILBOX_H

#include "base/status.h"
#include "worker/bell.h"

#include <stddef.h>

struct moe_mailbox; /* the reader's side */
struct moe_post;    /* a writer's side */

enum {
    MOE_MAIL_MAX = 1020, /* bytes of a message, at least 1 */
    MOE_MAIL_CELLS = 64, /* messages of one peer that may wait; a power of two */
};

/* Where a mailbox is to be found. */
struct moe_mail_address {
    uint32_t process;       /* as its own pid namespace numbers it */
    uint32_t mailbox, bell; /* descriptors of that process */
    uint64_t key; /* random, not 0: tells the mailbox from one that has the same numbers */
};

/* `bell` is borrowed: the reader's own. */
struct moe_status moe_mailbox_create(struct moe_bell *bell, struct moe_mailbox **out) MOE_CHECKED;
/* Peers that have it open keep the memory; nobody reads it. NULL is ignored. */
void moe_mailbox_destroy(struct moe_mailbox *m);
struct moe_mail_address moe_mailbox_address(const struct moe_mailbox *m);

enum moe_mail {
    MOE_MAIL_NONE,
    MOE_MAIL_TAKEN,
    MOE_MAIL_BROKEN, /* the peer of that slot keeps no rules; nothing more comes from there */
};

/* The oldest message of `slot` (below MOE_MAX_SLOTS) into `bytes` [MOE_MAIL_MAX]. One thread at a
 * time. */
enum moe_mail moe_mailbox_take(struct moe_mailbox *m, uint32_t slot, uint8_t *bytes,
                               size_t *length);

/* Opens a peer's mailbox to write as `slot`; one writer per slot. Errors: MOE_FAILED_PRECONDITION
 * (it is not to be seen from here), MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_post_open(const struct moe_mail_address *to, uint32_t slot,
                                struct moe_post **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_post_close(struct moe_post *p);

/* Messages that can be sent now. One thread at a time, as is the next. */
size_t moe_post_room(const struct moe_post *p);
/* `length`: 1 .. MOE_MAIL_MAX. Needs room. */
void moe_post_send(struct moe_post *p, const uint8_t *bytes, size_t length);

#endif
