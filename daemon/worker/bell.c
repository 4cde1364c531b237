/* See worker/bell.h. The counter and the sleeper's flag lie in a sealed memfd, alone on their page,
 * so that a process that has the bell sees nothing else of its owner. */
#include "worker/bell.h"

#include "base/clock.h"
#include "worker/shared.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x314c4c4542656f6d) /* "moeBELL1" */

enum { WATCH_LOOKS = 32 }; /* between two looks at the clock */

struct page {
    uint64_t magic;
    atomic_uint count;
    atomic_uint sleeping; /* the owner sleeps, or is about to */
};

struct moe_bell {
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

static struct moe_status wrap(const struct moe_shared *memory, struct moe_bell **out)
{
    struct moe_bell *b = calloc(1, sizeof *b);
    if (b == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for a bell");
    b->memory = *memory;
    b->page = memory->base;
    *out = b;
    return moe_ok();
}

struct moe_status moe_bell_create(struct moe_bell **out)
{
    struct moe_shared memory;
    MOE_TRY(moe_shared_create("moe-bell", sizeof(struct page), &memory));
    struct moe_status st = wrap(&memory, out);
    if (moe_failed(&st))
        moe_shared_close(&memory);
    else
        (*out)->page->magic = MAGIC;
    return st;
}

struct moe_status moe_bell_open(uint32_t process, uint32_t fd, struct moe_bell **out)
{
    struct moe_shared memory;
    MOE_TRY(moe_shared_open(process, fd, sizeof(struct page), &memory));
    const struct page *page = memory.base;
    struct moe_status st = page->magic == MAGIC
                               ? wrap(&memory, out)
                               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                                           "the memory of a peer is no bell");
    if (moe_failed(&st))
        moe_shared_close(&memory);
    return st;
}

void moe_bell_destroy(struct moe_bell *b)
{
    if (b == NULL)
        return;
    moe_shared_close(&b->memory);
    free(b);
}

int moe_bell_fd(const struct moe_bell *b)
{
    return b->memory.fd;
}

/* Both sides write one word and then read the other's, in one total order: either the owner sees
 * the new count before it sleeps, or it is seen sleeping. */
void moe_bell_ring(struct moe_bell *b)
{
    (void)atomic_fetch_add(&b->page->count, 1);
    if (atomic_load(&b->page->sleeping) != 0)
        (void)syscall(SYS_futex, &b->page->count, FUTEX_WAKE, 1, NULL, NULL, 0);
}

uint32_t moe_bell_count(const struct moe_bell *b)
{
    return atomic_load(&b->page->count);
}

void moe_bell_wait(struct moe_bell *b, uint32_t heard, uint64_t deadline_ns)
{
    const struct timespec at = {.tv_sec = (time_t)(deadline_ns / MOE_NS_PER_S),
                                .tv_nsec = (long)(deadline_ns % MOE_NS_PER_S)};
    atomic_store(&b->page->sleeping, 1);
    /* The time is absolute, on the monotonic clock. */
    (void)syscall(SYS_futex, &b->page->count, FUTEX_WAIT_BITSET, heard,
                  deadline_ns == MOE_NEVER ? NULL : &at, NULL, FUTEX_BITSET_MATCH_ANY);
    atomic_store(&b->page->sleeping, 0);
}

void moe_bell_watch(const struct moe_bell *b, uint32_t heard, uint64_t deadline_ns)
{
    do {
        for (int i = 0; i < WATCH_LOOKS; i++) {
            if (atomic_load_explicit(&b->page->count, memory_order_acquire) != heard)
                return;
            relax();
        }
        sched_yield(); /* who has something to do comes first */
    } while (moe_clock_ns() < deadline_ns);
}
