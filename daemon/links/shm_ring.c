/* SPDX-License-Identifier: Apache-2.0 */
/* In each ring the writer owns `head` and the reader owns `tail`; both count messages modulo 2^32.
 * Each side also keeps a private copy of its count and never reads it back from shared memory. */
#include "links/shm_ring.h"

#include "base/random.h"
#include "links/shared.h"
#include "moe/types.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x32474e4952656f6d) /* "moeRING2" */

enum { LINE = 64 }; /* bytes of a cache line */

struct cell {
    uint32_t length;
    uint8_t bytes[MOE_SHM_MESSAGE_MAX];
};
_Static_assert(sizeof(struct cell) == 1024, "a cell is a whole number of cache lines");

struct ring {
    alignas(LINE) atomic_uint head; /* messages written */
    alignas(LINE) atomic_uint tail; /* messages read */
    alignas(LINE) struct cell cells[MOE_SHM_RING_CELLS];
};

struct ring_memory {
    uint64_t magic, key;
    alignas(LINE) atomic_uint beat; /* the reader's; see pulse.h */
    atomic_uint beating;            /* the thread that stores it */
    struct ring rings[MOE_MAX_SLOTS];
};

struct moe_shm_reader {
    struct moe_shared memory;
    struct ring_memory *map;
    struct moe_eventcount *eventcount;
    uint64_t key;
    uint32_t tail[MOE_MAX_SLOTS];
    uint64_t broken; /* bit s */
};

struct moe_shm_writer {
    struct moe_shared memory;
    const struct ring_memory *map;
    uint32_t process;
    struct ring *ring;
    struct moe_eventcount *eventcount;
    uint32_t head;
};

/* ------------------------------------------------------------------------ reading */

struct moe_status moe_shm_reader_create(struct moe_eventcount *eventcount,
                                        struct moe_shm_reader **out)
{
    struct moe_shm_reader *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for rings of peers");
    struct moe_status st;
    m->eventcount = eventcount;
    MOE_TRY_GOTO(st, moe_random_id(&m->key), fail);
    MOE_TRY_GOTO(st, moe_shared_create("moe-shm-rings", sizeof *m->map, &m->memory), fail);
    m->map = m->memory.base;
    m->map->magic = MAGIC;
    m->map->key = m->key;
    *out = m;
    return st;
fail:
    moe_shm_reader_destroy(m);
    return st;
}

void moe_shm_reader_destroy(struct moe_shm_reader *m)
{
    if (m == NULL)
        return;
    moe_shared_close(&m->memory);
    free(m);
}

struct moe_shm_address moe_shm_reader_address(const struct moe_shm_reader *m)
{
    return (struct moe_shm_address){.process = (uint32_t)getpid(),
                                    .memory = (uint32_t)m->memory.fd,
                                    .eventcount = (uint32_t)moe_eventcount_fd(m->eventcount),
                                    .key = m->key};
}

static enum moe_shm_read broken(struct moe_shm_reader *m, uint32_t slot)
{
    m->broken |= UINT64_C(1) << slot;
    return MOE_SHM_READ_BROKEN;
}

void moe_shm_reader_beat(struct moe_shm_reader *m)
{
    uint32_t next = atomic_load_explicit(&m->map->beat, memory_order_relaxed) + 1;
    atomic_store_explicit(&m->map->beating, (uint32_t)gettid(), memory_order_relaxed);
    atomic_store_explicit(&m->map->beat, next != MOE_SHM_BEAT_ENDED ? next : 0,
                          memory_order_release);
}

void moe_shm_reader_end_beats(struct moe_shm_reader *m)
{
    atomic_store_explicit(&m->map->beat, MOE_SHM_BEAT_ENDED, memory_order_release);
}

enum moe_shm_read moe_shm_reader_read(struct moe_shm_reader *m, uint32_t slot, uint8_t *bytes,
                                      size_t *length)
{
    MOE_INVARIANT(slot < MOE_MAX_SLOTS);
    struct ring *ring = &m->map->rings[slot];
    uint32_t tail = m->tail[slot];
    uint32_t waiting = atomic_load_explicit(&ring->head, memory_order_acquire) - tail;
    if (waiting == 0 || (m->broken >> slot & 1) != 0)
        return MOE_SHM_READ_NONE;
    const struct cell *cell = &ring->cells[tail % MOE_SHM_RING_CELLS];
    uint32_t bytes_in =
        *(const volatile uint32_t *)&cell->length; /* read once: the writer may change it */
    if (waiting > MOE_SHM_RING_CELLS || bytes_in == 0 || bytes_in > MOE_SHM_MESSAGE_MAX)
        return broken(m, slot);
    memcpy(bytes, cell->bytes, bytes_in);
    *length = bytes_in;
    m->tail[slot] = tail + 1;
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
    return MOE_SHM_READ_MESSAGE;
}

/* ------------------------------------------------------------------------ writing */

static struct moe_status open_box(const struct moe_shm_address *to, uint32_t slot,
                                  struct moe_shm_writer *p)
{
    MOE_TRY(moe_shared_open(to->process, to->memory, sizeof(struct ring_memory), &p->memory));
    struct ring_memory *map = p->memory.base;
    if (map->magic != MAGIC || map->key != to->key)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "the process with the peer's pid is another process");
    p->map = map;
    p->process = to->process;
    p->ring = &map->rings[slot];
    p->head = atomic_load(&p->ring->head);
    return moe_ok();
}

struct moe_status moe_shm_writer_open(const struct moe_shm_address *to, uint32_t slot,
                                      struct moe_shm_writer **out)
{
    MOE_INVARIANT(slot < MOE_MAX_SLOTS);
    struct moe_shm_writer *p = calloc(1, sizeof *p);
    if (p == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a ring");
    struct moe_status st;
    MOE_TRY_GOTO(st, open_box(to, slot, p), fail);
    MOE_TRY_GOTO(st, moe_eventcount_open(to->process, to->eventcount, &p->eventcount), fail);
    *out = p;
    return st;
fail:
    moe_shm_writer_close(p);
    return st;
}

void moe_shm_writer_close(struct moe_shm_writer *p)
{
    if (p == NULL)
        return;
    moe_eventcount_destroy(p->eventcount);
    moe_shared_close(&p->memory);
    free(p);
}

uint32_t moe_shm_writer_beat(const struct moe_shm_writer *p)
{
    return atomic_load_explicit(&p->map->beat, memory_order_acquire);
}

void moe_shm_writer_peer(const struct moe_shm_writer *p, uint32_t *process, uint32_t *thread)
{
    *process = p->process;
    *thread = atomic_load_explicit(&p->map->beating, memory_order_relaxed);
}

size_t moe_shm_writer_room(const struct moe_shm_writer *p)
{
    uint32_t waiting = p->head - atomic_load_explicit(&p->ring->tail, memory_order_acquire);
    return waiting >= MOE_SHM_RING_CELLS ? 0 : MOE_SHM_RING_CELLS - waiting;
}

void moe_shm_writer_write(struct moe_shm_writer *p, const uint8_t *bytes, size_t length)
{
    MOE_INVARIANT(length > 0 && length <= MOE_SHM_MESSAGE_MAX && moe_shm_writer_room(p) > 0);
    struct cell *cell = &p->ring->cells[p->head % MOE_SHM_RING_CELLS];
    cell->length = (uint32_t)length;
    memcpy(cell->bytes, bytes, length);
    p->head++;
    atomic_store_explicit(&p->ring->head, p->head, memory_order_release);
    moe_eventcount_notify(p->eventcount);
}
