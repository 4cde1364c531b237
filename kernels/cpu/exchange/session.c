/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting inside a session; see session.h. Uses windows and peers, not
 * layers or rows.
 *
 * Every wait is for one flag in this slot's window. It first spins, then yields the processor, then
 * sleeps on the window's wake_count. After the spins, each try checks for an abort, for lost peers
 * and for the end of the budget. A flag that has arrived counts even if its writer has died. */
#include "cpu/exchange/session.h"

#include "base/clock.h"
#include "cpu/compute/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SLEEP_MS = 20, /* longest sleep: bounds the cost of a lost wake-up or a stopped peer */
};

/* ------------------------------------------------------------------ waiting */

static struct moe_window_header *header_of(const struct moe_session *s, uint32_t slot)
{
    return (void *)s->window[slot].base;
}

static void wake(struct moe_window_header *h)
{
    __atomic_fetch_add(&h->wake_count, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&h->sleepers, __ATOMIC_SEQ_CST) != 0)
        syscall(SYS_futex, &h->wake_count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void moe_cpu_session_wake(struct moe_session *s, uint32_t slot)
{
    wake(header_of(s, slot));
}

static bool flag_ready(const uint64_t *flag, uint64_t stamp, uint32_t *value)
{
    uint64_t w = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    if (moe_window_flag_stamp(w) != stamp)
        return false;
    *value = moe_window_flag_value(w);
    return true;
}

static struct moe_status peer_lost(struct moe_session *s, uint32_t slot, const char *how)
{
    s->missing = (int)slot;
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u %s", slot, how);
}

/* The error that ends a wait for `slot`, or success. A step needs all slots, so any lost slot ends
 * the wait. A slot that left in order ends only waits for itself. */
static struct moe_status check_waiting(struct moe_session *s, uint32_t slot)
{
    if (__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE))
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
    /* A slot that leaves because it lost another says so first: look for the loss last. */
    bool left = moe_cpu_peers_left(s->peers) >> slot & 1;
    if (moe_cpu_peers_lost(s->peers) != 0)
        return peer_lost(s, (uint32_t)moe_cpu_peers_first_lost(s->peers), "was lost");
    return left ? peer_lost(s, slot, "has left the session") : moe_ok();
}

/* The slot that blocks `slot`: follows the `waiting` fields of the windows from slot to slot, as
 * long as they are recent. A window of another host is out of sight, and so is its clock. */
static uint32_t blocking_slot(const struct moe_session *s, uint32_t slot)
{
    uint64_t max_age_ms = s->config.wait_budget_ms / 4 + 2 * SLEEP_MS;
    for (uint32_t hops = 0; hops < s->config.slots && s->window[slot].base != NULL; hops++) {
        uint64_t waiting = __atomic_load_n(&header_of(s, slot)->waiting, __ATOMIC_ACQUIRE);
        uint32_t next = (uint32_t)(waiting & 0xff) - 1;
        bool alive = waiting != 0 && (waiting >> 8) + max_age_ms > moe_clock_ns() / MOE_NS_PER_MS;
        if (!alive || next >= s->config.slots || !moe_cpu_session_has_peer(s, next))
            break;
        slot = next;
    }
    return slot;
}

void moe_cpu_session_report_lost(struct moe_session *s, uint64_t slots)
{
    moe_cpu_peers_report_lost(s->peers, slots);
    if (s->network != NULL)
        moe_cpu_network_notify(s->network, s->config.epoch, slots);
}

static struct moe_status out_of_budget(struct moe_session *s, uint32_t slot)
{
    uint32_t blocking = blocking_slot(s, slot);
    moe_cpu_session_report_lost(s, UINT64_C(1) << blocking);
    struct moe_status st = peer_lost(s, blocking, "did not answer");
    return moe_error(st.code, st.reason, "%s within %u ms", st.text, s->config.wait_budget_ms);
}

/* Sleeps until a peer raises wake_count, at most SLEEP_MS or until the deadline. */
static void sleep_until_woken(struct moe_session *s, const uint64_t *flag, uint64_t stamp,
                              uint32_t slot, uint64_t now, uint64_t deadline)
{
    struct moe_window_header *h = header_of(s, s->config.slot);
    uint64_t ns = SLEEP_MS * MOE_NS_PER_MS;
    if (deadline - now < ns)
        ns = deadline - now;
    struct timespec limit = {.tv_nsec = (long)ns};
    if (s->network != NULL)
        moe_cpu_network_stop_helping(s->network);
    __atomic_store_n(&h->waiting, now / MOE_NS_PER_MS << 8 | (slot + 1), __ATOMIC_RELEASE);
    uint32_t seen = __atomic_load_n(&h->wake_count, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&h->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t value;
    struct moe_status st = check_waiting(s, slot);
    if (!flag_ready(flag, stamp, &value) && !moe_failed(&st))
        syscall(SYS_futex, &h->wake_count, FUTEX_WAIT, seen, &limit, NULL, 0);
    __atomic_fetch_sub(&h->sleepers, 1, __ATOMIC_SEQ_CST);
}

static struct moe_status wait_slowly(struct moe_session *s, const uint64_t *flag, uint64_t stamp,
                                     uint32_t slot, uint32_t *value)
{
    uint64_t deadline = moe_clock_ns() + s->config.wait_budget_ms * MOE_NS_PER_MS;
    for (uint32_t tries = 0;; tries++) {
        if (flag_ready(flag, stamp, value))
            return moe_ok();
        if (s->network != NULL && tries < s->spins + s->yields)
            moe_cpu_network_help(s->network);
        if (tries < s->spins) {
            moe_cpu_spin_pause();
            continue;
        }
        struct moe_status st = check_waiting(s, slot);
        if (moe_failed(&st)) /* a flag that arrived before the loss counts */
            return flag_ready(flag, stamp, value) ? moe_ok() : st;
        uint64_t now = moe_clock_ns();
        if (now >= deadline)
            return out_of_budget(s, slot);
        if (tries < s->spins + s->yields)
            sched_yield();
        else
            sleep_until_woken(s, flag, stamp, slot, now, deadline);
    }
}

struct moe_status moe_cpu_session_wait(struct moe_session *s, const uint64_t *flag, uint64_t stamp,
                                       uint32_t slot, uint32_t *value)
{
    if (flag_ready(flag, stamp, value))
        return moe_ok();
    struct moe_status st = wait_slowly(s, flag, stamp, slot, value);
    /* After a failure `waiting` stays: a peer that runs out of budget now can still follow it. */
    if (!moe_failed(&st))
        __atomic_store_n(&header_of(s, s->config.slot)->waiting, 0, __ATOMIC_RELEASE);
    return st;
}

struct moe_status moe_cpu_session_usable(const struct moe_session *s)
{
    if (__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE))
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
    if (!s->failed)
        return moe_ok();
    if (s->missing >= 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST,
                         "the session broke earlier, without slot %d", s->missing);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE, "the session broke earlier");
}

void moe_cpu_session_fail(struct moe_session *s, const struct moe_status *why)
{
    bool ours = why->reason != MOE_REASON_PEER_LOST && why->code != MOE_ABORTED;
    if (ours && !s->failed)
        moe_cpu_session_report_lost(s, UINT64_C(1) << s->config.slot);
    s->failed = true;
}

void moe_cpu_session_abort(struct moe_session *s)
{
    __atomic_store_n(&s->aborted, true, __ATOMIC_SEQ_CST);
    wake(header_of(s, s->config.slot));
}

uint64_t moe_cpu_session_lost(struct moe_session *s)
{
    return moe_cpu_peers_lost(s->peers);
}

const char *moe_cpu_session_transport(const struct moe_session *s)
{
    uint64_t mapped = 0, live = s->config.live;
    for (uint32_t p = 0; p < s->config.slots; p++)
        mapped |= s->window[p].base != NULL ? UINT64_C(1) << p : 0;
    if ((live & (live - 1)) == 0)
        return "none";
    if (mapped == live)
        return "shared memory";
    return (mapped & (mapped - 1)) != 0 ? "shared memory and network" : "network";
}
