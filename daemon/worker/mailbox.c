/* See worker/mailbox.h. A ring per slot: the writer owns `head`, the reader `tail`, each counts
 * messages modulo 2^32 and is read by the other side only. Both keep their own count to themselves
 * as well and never read it back from shared memory. */
#include "worker/mailbox.h"

#include "base/random.h"
#include "base/size.h"
#include "moe/types.h"
#include "worker/shared.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x314c49414d656f6d) /* "moeMAIL1" */

enum { LINE = 64 }; /* bytes that processors share at a time */

struct cell {
    uint32_t length;
    uint8_t bytes[MOE_MAIL_MAX];
};
_Static_assert(sizeof(struct cell) == 1024, "a cell is a whole number of cache lines");

struct ring {
    alignas(LINE) atomic_uint head; /* messages written */
    alignas(LINE) atomic_uint tail; /* messages read */
    alignas(LINE) struct cell cells[MOE_MAIL_CELLS];
};

struct box {
    uint64_t magic, key;
    struct ring rings[MOE_MAX_SLOTS];
};

struct moe_mailbox {
    struct moe_shared memory;
    struct box *box;
    struct moe_bell *bell;
    uint64_t key;
    uint32_t tail[MOE_MAX_SLOTS];
    uint64_t broken; /* bit s */
};

struct moe_post {
    struct moe_shared memory;
    struct ring *ring;
    struct moe_bell *bell;
    uint32_t head;
};

/* ------------------------------------------------------------------------ reading */

struct moe_status moe_mailbox_create(struct moe_bell *bell, struct moe_mailbox **out)
{
    struct moe_mailbox *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for a mailbox");
    struct moe_status st;
    m->bell = bell;
    MOE_TRY_GOTO(st, moe_random_id(&m->key), fail);
    MOE_TRY_GOTO(st, moe_shared_create("moe-mailbox", sizeof *m->box, &m->memory), fail);
    m->box = m->memory.base;
    m->box->magic = MAGIC;
    m->box->key = m->key;
    *out = m;
    return st;
fail:
    moe_mailbox_destroy(m);
    return st;
}

void moe_mailbox_destroy(struct moe_mailbox *m)
{
    if (m == NULL)
        return;
    moe_shared_close(&m->memory);
    free(m);
}

struct moe_mail_address moe_mailbox_address(const struct moe_mailbox *m)
{
    return (struct moe_mail_address){.process = (uint32_t)getpid(),
                                     .mailbox = (uint32_t)m->memory.fd,
                                     .bell = (uint32_t)moe_bell_fd(m->bell),
                                     .key = m->key};
}

static enum moe_mail broken(struct moe_mailbox *m, uint32_t slot)
{
    m->broken |= UINT64_C(1) << slot;
    return MOE_MAIL_BROKEN;
}

enum moe_mail moe_mailbox_take(struct moe_mailbox *m, uint32_t slot, uint8_t *bytes, size_t *length)
{
    MOE_INVARIANT(slot < MOE_MAX_SLOTS);
    struct ring *ring = &m->box->rings[slot];
    uint32_t tail = m->tail[slot];
    uint32_t waiting = atomic_load_explicit(&ring->head, memory_order_acquire) - tail;
    if (waiting == 0 || (m->broken >> slot & 1) != 0)
        return MOE_MAIL_NONE;
    const struct cell *cell = &ring->cells[tail % MOE_MAIL_CELLS];
    uint32_t bytes_in =
        *(const volatile uint32_t *)&cell->length; /* once: it may change under us */
    if (waiting > MOE_MAIL_CELLS || bytes_in == 0 || bytes_in > MOE_MAIL_MAX)
        return broken(m, slot);
    memcpy(bytes, cell->bytes, bytes_in);
    *length = bytes_in;
    m->tail[slot] = tail + 1;
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
    return MOE_MAIL_TAKEN;
}

/* ------------------------------------------------------------------------ writing */

static struct moe_status open_box(const struct moe_mail_address *to, uint32_t slot,
                                  struct moe_post *p)
{
    MOE_TRY(moe_shared_open(to->process, to->mailbox, sizeof(struct box), &p->memory));
    struct box *box = p->memory.base;
    if (box->magic != MAGIC || box->key != to->key)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "the process that has the peer's number here is another one");
    p->ring = &box->rings[slot];
    p->head = atomic_load(&p->ring->head);
    return moe_ok();
}

struct moe_status moe_post_open(const struct moe_mail_address *to, uint32_t slot,
                                struct moe_post **out)
{
    MOE_INVARIANT(slot < MOE_MAX_SLOTS);
    struct moe_post *p = calloc(1, sizeof *p);
    if (p == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for mail");
    struct moe_status st;
    MOE_TRY_GOTO(st, open_box(to, slot, p), fail);
    MOE_TRY_GOTO(st, moe_bell_open(to->process, to->bell, &p->bell), fail);
    *out = p;
    return st;
fail:
    moe_post_close(p);
    return st;
}

void moe_post_close(struct moe_post *p)
{
    if (p == NULL)
        return;
    moe_bell_destroy(p->bell);
    moe_shared_close(&p->memory);
    free(p);
}

size_t moe_post_room(const struct moe_post *p)
{
    uint32_t waiting = p->head - atomic_load_explicit(&p->ring->tail, memory_order_acquire);
    return waiting >= MOE_MAIL_CELLS ? 0 : MOE_MAIL_CELLS - waiting;
}

void moe_post_send(struct moe_post *p, const uint8_t *bytes, size_t length)
{
    MOE_INVARIANT(length > 0 && length <= MOE_MAIL_MAX && moe_post_room(p) > 0);
    struct cell *cell = &p->ring->cells[p->head % MOE_MAIL_CELLS];
    cell->length = (uint32_t)length;
    memcpy(cell->bytes, bytes, length);
    p->head++;
    atomic_store_explicit(&p->ring->head, p->head, memory_order_release);
    moe_bell_ring(p->bell);
}
