/* SPDX-License-Identifier: Apache-2.0 */
/* The counter and the sleeper's flag are in a sealed memfd of their page size. A process that opens
 * it sees no other memory of the owner. */
#include "links/eventcount.h"

#include "base/clock.h"
#include "links/shared.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x31544e5645656f6d) /* "moeEVNT1" */

enum { POLLS_PER_CLOCK_READ = 32 };

struct page {
    uint64_t magic;
    atomic_uint count;
    atomic_uint sleeping; /* the owner sleeps, or is about to */
};

struct moe_eventcount {
    struct moe_shared memory;
    struct page *page;
};

/* Tells the processor that this thread waits in a loop. */
static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static struct moe_status wrap(const struct moe_shared *memory, struct moe_eventcount **out)
{
    struct moe_eventcount *b = calloc(1, sizeof *b);
    if (b == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for an eventcount");
    b->memory = *memory;
    b->page = memory->base;
    *out = b;
    return moe_ok();
}

struct moe_status moe_eventcount_create(struct moe_eventcount **out)
{
    struct moe_shared memory;
    MOE_TRY(moe_shared_create("moe-eventcount", sizeof(struct page), &memory));
    struct moe_status st = wrap(&memory, out);
    if (moe_failed(&st))
        moe_shared_close(&memory);
    else
        (*out)->page->magic = MAGIC;
    return st;
}

struct moe_status moe_eventcount_open(uint32_t process, uint32_t fd, struct moe_eventcount **out)
{
    struct moe_shared memory;
    MOE_TRY(moe_shared_open(process, fd, sizeof(struct page), &memory));
    const struct page *page = memory.base;
    struct moe_status st = page->magic == MAGIC
                               ? wrap(&memory, out)
                               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                                           "the memory of a peer is no eventcount");
    if (moe_failed(&st))
        moe_shared_close(&memory);
    return st;
}

void moe_eventcount_destroy(struct moe_eventcount *b)
{
    if (b == NULL)
        return;
    moe_shared_close(&b->memory);
    free(b);
}

int moe_eventcount_fd(const struct moe_eventcount *b)
{
    return b->memory.fd;
}

/* Each side writes its own word and then reads the other's, sequentially consistent. So either the
 * owner sees the new count before it sleeps, or the notifier sees `sleeping`. */
void moe_eventcount_notify(struct moe_eventcount *b)
{
    (void)atomic_fetch_add(&b->page->count, 1);
    if (atomic_load(&b->page->sleeping) != 0)
        (void)syscall(SYS_futex, &b->page->count, FUTEX_WAKE, 1, NULL, NULL, 0);
}

uint32_t moe_eventcount_prepare(const struct moe_eventcount *b)
{
    return atomic_load(&b->page->count);
}

void moe_eventcount_wait(struct moe_eventcount *b, uint32_t seen, uint64_t deadline_ns)
{
    const struct timespec at = {.tv_sec = (time_t)(deadline_ns / MOE_NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % MOE_NS_PER_S)};
    atomic_store(&b->page->sleeping, 1);
    /* The time is absolute, on the monotonic clock. */
    (void)syscall(SYS_futex, &b->page->count, FUTEX_WAIT_BITSET, seen,
                  deadline_ns == MOE_NEVER ? NULL : &at, NULL, FUTEX_BITSET_MATCH_ANY);
    atomic_store(&b->page->sleeping, 0);
}

void moe_eventcount_poll(const struct moe_eventcount *b, uint32_t seen, uint64_t deadline_ns)
{
    do {
        for (int i = 0; i < POLLS_PER_CLOCK_READ; i++) {
            if (atomic_load_explicit(&b->page->count, memory_order_acquire) != seen)
                return;
            relax();
        }
        sched_yield(); /* threads with work come first */
    } while (moe_clock_ns() < deadline_ns);
}
