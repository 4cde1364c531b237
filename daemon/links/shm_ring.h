/* SPDX-License-Identifier: Apache-2.0 */
/* Control messages between the workers of one host, through shared memory instead of a socket. A
 * message takes well under a microsecond if its reader polls, and one wake-up if it sleeps.
 *
 * For each view a worker creates a reader: memory with one ring per slot. Each peer that can see
 * the worker's process (links/shared.h) opens a writer on the ring of its slot. Every message
 * notifies the reader's eventcount. The reader trusts no writer: a malformed message breaks that
 * writer's ring, not the reader. A reader ends with its view, so no message of an old view is read.
 */
#ifndef MOE_LINKS_SHM_RING_H
#define MOE_LINKS_SHM_RING_H

#include "base/status.h"
#include "links/eventcount.h"

#include <stddef.h>

struct moe_shm_reader;
struct moe_shm_writer;

enum {
    MOE_SHM_MESSAGE_MAX = 1020, /* bytes; a message has at least 1 */
    MOE_SHM_RING_CELLS = 64,    /* unread messages of one writer at most; a power of two */
};
#define MOE_SHM_BEAT_ENDED UINT32_MAX /* no further beat comes */

/* Where a peer finds the rings of a reader. */
struct moe_shm_address {
    uint32_t process;            /* pid in the pid namespace of the reader */
    uint32_t memory, eventcount; /* descriptors of that process */
    uint64_t key; /* random, not 0: another process with the same numbers has another key */
};

/* `eventcount`: of the reading thread; borrowed. */
struct moe_status moe_shm_reader_create(struct moe_eventcount *eventcount,
                                        struct moe_shm_reader **out) MOE_CHECKED;
/* Writers that are open keep the memory mapped, but it is not read again. NULL is ignored. */
void moe_shm_reader_destroy(struct moe_shm_reader *m);
struct moe_shm_address moe_shm_reader_address(const struct moe_shm_reader *m);

/* Writers see another beat after each call, which also names the calling thread to them; see
 * pulse.h. One thread at a time. */
void moe_shm_reader_beat(struct moe_shm_reader *m);
/* The last one. */
void moe_shm_reader_end_beats(struct moe_shm_reader *m);

enum moe_shm_read {
    MOE_SHM_READ_NONE,
    MOE_SHM_READ_MESSAGE,
    MOE_SHM_READ_BROKEN, /* the writer broke the protocol; its ring is not read again */
};

/* Reads the oldest message of `slot` (below MOE_MAX_SLOTS) into `bytes` [MOE_SHM_MESSAGE_MAX]. One
 * thread at a time. */
enum moe_shm_read moe_shm_reader_read(struct moe_shm_reader *m, uint32_t slot, uint8_t *bytes,
                                      size_t *length);

/* Opens the ring of `slot` at a peer; one writer per slot. Errors: MOE_FAILED_PRECONDITION (not
 * visible from here), MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_shm_writer_open(const struct moe_shm_address *to, uint32_t slot,
                                      struct moe_shm_writer **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_shm_writer_close(struct moe_shm_writer *p);

/* [any thread] The reader's beat. Any value may come: the reader's process stores it. */
uint32_t moe_shm_writer_beat(const struct moe_shm_writer *p);
/* [any thread] The reader's process, and the thread there that beats. */
void moe_shm_writer_peer(const struct moe_shm_writer *p, uint32_t *process, uint32_t *thread);

/* Free cells. One thread at a time uses a writer. */
size_t moe_shm_writer_room(const struct moe_shm_writer *p);
/* `length`: 1 .. MOE_SHM_MESSAGE_MAX. A cell must be free. */
void moe_shm_writer_write(struct moe_shm_writer *p, const uint8_t *bytes, size_t length);

#endif
