/* SPDX-License-Identifier: Apache-2.0 */
/* See regions/wait.h. The client says that it sleeps before it looks for the last time, and the
 * daemon looks for sleepers after its store: so no completion is missed. */
#include "regions/wait.h"

#include "base/clock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SLEEP_NS = 20 * 1000 * 1000 };

/* The upper half of the completion. */
static uint32_t *sequence_at(struct moe_ring *ring, uint32_t entry)
{
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the upper half comes second");
    return (uint32_t *)(void *)&ring->completed[entry].word + 1;
}

void moe_ring_wake(struct moe_ring *ring, uint32_t entry)
{
    (void)syscall(SYS_futex, sequence_at(ring, entry), FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void sleep_while(uint32_t *at, uint32_t seen, uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / MOE_NS_PER_S),
                         .tv_nsec = (long)(ns % MOE_NS_PER_S)};
    (void)syscall(SYS_futex, at, FUTEX_WAIT, seen, &t, NULL, 0);
}

bool moe_ring_wait(struct moe_ring_caller *c, uint32_t entry, uint64_t spin_ns,
                   uint64_t deadline_ns, enum moe_code *code)
{
    uint64_t now = moe_clock_ns(), spin_end = moe_earlier(now + spin_ns, deadline_ns);
    uint32_t *at = sequence_at(c->ring, entry);
    for (; now < spin_end; now = moe_clock_ns())
        if (moe_ring_caller_poll(c, entry, code))
            return true;
    __atomic_store_n(&c->ring->waits[entry], 1, __ATOMIC_SEQ_CST);
    bool found;
    for (;;) {
        uint32_t seen = __atomic_load_n(at, __ATOMIC_SEQ_CST);
        found = moe_ring_caller_poll(c, entry, code);
        now = moe_clock_ns();
        if (found || now >= deadline_ns)
            break;
        sleep_while(at, seen, moe_earlier(deadline_ns - now, SLEEP_NS));
    }
    __atomic_store_n(&c->ring->waits[entry], 0, __ATOMIC_SEQ_CST);
    return found;
}
