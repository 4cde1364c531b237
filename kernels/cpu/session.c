/* Forming and leaving a session, and waiting inside it; see session.h. Knows windows and peers, and
 * nothing of layers or rows.
 *
 * Every wait is on one word in the own window. It first looks, then yields the processor, then
 * sleeps on the window's bell, and at each turn checks for an abort, for lost peers and for its
 * budget. Data that is there counts even when its writer has just died. */
#include "cpu/session.h"

#include "base/clock.h"
#include "cpu/ep.h"
#include "cpu/step.h"
#include "session_rules.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SLEEP_MS = 20, /* longest sleep: a lost wake-up or a stopped peer costs no more than this */
    SPINS_WITH_A_CORE = 4000,
    SPINS_SHARING = 40,
    YIELDS = 100,
};

/* ------------------------------------------------------------------ waiting */

static struct moe_window_header *header_of(const struct moe_session *s, uint32_t slot)
{
    return (void *)s->window[slot].base;
}

static void ring(struct moe_window_header *h)
{
    __atomic_fetch_add(&h->bell, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&h->sleepers, __ATOMIC_SEQ_CST) != 0)
        syscall(SYS_futex, &h->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void moe_cpu_session_ring(struct moe_session *s, uint32_t slot)
{
    ring(header_of(s, slot));
}

static bool word_ready(const uint64_t *word, uint64_t stamp, uint32_t *value)
{
    uint64_t w = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (moe_window_word_stamp(w) != stamp)
        return false;
    *value = moe_window_word_value(w);
    return true;
}

static struct moe_status peer_lost(struct moe_session *s, uint32_t slot, const char *how)
{
    s->missing = (int)slot;
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u %s", slot, how);
}

/* Why a wait for `slot` cannot succeed any more, or success. A step needs all slots, so any lost
 * slot ends it; one that left in good order is only missed when something of it is. */
static struct moe_status hopeless(struct moe_session *s, uint32_t slot)
{
    if (__atomic_load_n(&s->aborted, __ATOMIC_ACQUIRE))
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "the session was aborted");
    if (moe_cpu_peers_lost(s->peers) != 0)
        return peer_lost(s, (uint32_t)moe_cpu_peers_first_lost(s->peers), "was lost");
    if (moe_cpu_peers_gone(s->peers) >> slot & 1)
        return peer_lost(s, slot, "has left the session");
    return moe_ok();
}

/* The slot that really holds `slot` up: follows who waits for whom through the windows, as far as
 * the waiting slots are seen to be alive. */
static uint32_t culprit(const struct moe_session *s, uint32_t slot)
{
    uint64_t fresh_ms = s->config.wait_budget_ms / 4 + 2 * SLEEP_MS;
    for (uint32_t hops = 0; hops < s->config.slots; hops++) {
        uint64_t waiting = __atomic_load_n(&header_of(s, slot)->waiting, __ATOMIC_ACQUIRE);
        uint32_t next = (uint32_t)(waiting & 0xff) - 1;
        bool alive = waiting != 0 && (waiting >> 8) + fresh_ms > moe_clock_ns() / MOE_NS_PER_MS;
        if (!alive || next >= s->config.slots || !moe_cpu_session_has_peer(s, next))
            break;
        slot = next;
    }
    return slot;
}

static struct moe_status out_of_budget(struct moe_session *s, uint32_t slot)
{
    uint32_t guilty = culprit(s, slot);
    moe_cpu_peers_blame(s->peers, UINT64_C(1) << guilty);
    struct moe_status st = peer_lost(s, guilty, "did not answer");
    return moe_error(st.code, st.reason, "%s within %u ms", st.text, s->config.wait_budget_ms);
}

/* Sleeps until the bell rings, at most SLEEP_MS or until the deadline. */
static void sleep_on_bell(struct moe_session *s, const uint64_t *word, uint64_t stamp,
                          uint32_t slot, uint64_t now, uint64_t deadline)
{
    struct moe_window_header *h = header_of(s, s->config.slot);
    uint64_t ns = SLEEP_MS * MOE_NS_PER_MS;
    if (deadline - now < ns)
        ns = deadline - now;
    struct timespec limit = {.tv_nsec = (long)ns};
    __atomic_store_n(&h->waiting, now / MOE_NS_PER_MS << 8 | (slot + 1), __ATOMIC_RELEASE);
    uint32_t bell = __atomic_load_n(&h->bell, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&h->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t value;
    struct moe_status st = hopeless(s, slot);
    if (!word_ready(word, stamp, &value) && !moe_failed(&st))
        syscall(SYS_futex, &h->bell, FUTEX_WAIT, bell, &limit, NULL, 0);
    __atomic_fetch_sub(&h->sleepers, 1, __ATOMIC_SEQ_CST);
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static struct moe_status wait_slowly(struct moe_session *s, const uint64_t *word, uint64_t stamp,
                                     uint32_t slot, uint32_t *value)
{
    uint64_t deadline = moe_clock_ns() + s->config.wait_budget_ms * MOE_NS_PER_MS;
    for (uint32_t turn = 0;; turn++) {
        if (word_ready(word, stamp, value))
            return moe_ok();
        if (turn < s->spins) {
            relax();
            continue;
        }
        struct moe_status st = hopeless(s, slot);
        if (moe_failed(&st)) /* what came before the loss was seen still counts */
            return word_ready(word, stamp, value) ? moe_ok() : st;
        uint64_t now = moe_clock_ns();
        if (now >= deadline)
            return out_of_budget(s, slot);
        if (turn < s->spins + s->yields)
            sched_yield();
        else
            sleep_on_bell(s, word, stamp, slot, now, deadline);
    }
}

struct moe_status moe_cpu_session_wait(struct moe_session *s, const uint64_t *word, uint64_t stamp,
                                       uint32_t slot, uint32_t *value)
{
    if (word_ready(word, stamp, value))
        return moe_ok();
    struct moe_status st = wait_slowly(s, word, stamp, slot, value);
    /* After a failure it goes on naming the missing slot: a peer may run out of budget at the same
     * moment, before it has heard of this one's finding. */
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
        moe_cpu_peers_blame(s->peers, UINT64_C(1) << s->config.slot);
    s->failed = true;
}

void moe_cpu_session_abort(struct moe_session *s)
{
    __atomic_store_n(&s->aborted, true, __ATOMIC_SEQ_CST);
    ring(header_of(s, s->config.slot));
}

uint64_t moe_cpu_session_lost(struct moe_session *s)
{
    return moe_cpu_peers_lost(s->peers);
}

const char *moe_cpu_session_transport(const struct moe_session *s)
{
    return (s->config.live & (s->config.live - 1)) != 0 ? "shared memory" : "none";
}

/* ----------------------------------------------------------------- exchange */

static void put_exchange(struct moe_session *s, uint32_t peer, const void *data, size_t bytes)
{
    struct moe_window_exchange *e =
        moe_window_exchange_of(&s->layout, s->window[peer].base, s->exchanges & 1, s->config.slot);
    if (bytes > 0)
        memcpy(e->data, data, bytes);
    moe_cpu_session_store(&e->word, moe_window_stamp(s->config.epoch, s->exchanges),
                          (uint32_t)bytes);
    moe_cpu_session_ring(s, peer);
}

static struct moe_status get_exchange(struct moe_session *s, uint32_t peer, void *data,
                                      size_t bytes)
{
    const struct moe_window_exchange *e =
        moe_window_exchange_of(&s->layout, moe_cpu_session_own(s), s->exchanges & 1, peer);
    uint32_t came;
    MOE_TRY(moe_cpu_session_wait(s, &e->word, moe_window_stamp(s->config.epoch, s->exchanges), peer,
                                 &came));
    if (came != bytes)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SHAPE_MISMATCH,
                         "slot %u exchanges %u bytes, this slot %zu", peer, came, bytes);
    if (bytes > 0)
        memcpy(data, e->data, bytes);
    return moe_ok();
}

/* Two parities are enough: a peer is at most one exchange ahead, because it needs this slot's word
 * of each exchange to finish it. */
static struct moe_status exchange(struct moe_session *s, const void *mine, void *all, size_t bytes)
{
    s->exchanges++;
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p))
            put_exchange(s, p, mine, bytes);
    for (uint32_t p = 0; p < s->config.slots; p++)
        if (moe_cpu_session_has_peer(s, p))
            MOE_TRY(get_exchange(s, p, bytes > 0 ? (uint8_t *)all + p * bytes : NULL, bytes));
    return moe_ok();
}

struct moe_status moe_cpu_session_barrier(struct moe_session *s)
{
    return exchange(s, NULL, NULL, 0);
}

struct moe_status moe_cpu_session_gather(struct moe_session *s, const void *mine, void *all,
                                         size_t bytes)
{
    if (bytes > 0) {
        memset(all, 0, bytes * s->config.slots);
        memcpy((uint8_t *)all + s->config.slot * bytes, mine, bytes);
    }
    return exchange(s, mine, all, bytes);
}

struct moe_status moe_cpu_session_exchange(struct moe_session *s, const void *mine, void *all,
                                           size_t bytes)
{
    if (bytes > MOE_WINDOW_EXCHANGE_BYTES || (bytes > 0 && (mine == NULL || all == NULL)))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE,
                         "an exchange carries at most %d bytes", MOE_WINDOW_EXCHANGE_BYTES);
    MOE_TRY(moe_cpu_steps_idle(s->steps));
    MOE_TRY(moe_cpu_session_usable(s));
    struct moe_status st = moe_cpu_session_gather(s, mine, all, bytes);
    if (moe_failed(&st))
        moe_cpu_session_fail(s, &st);
    return st;
}

/* ------------------------------------------------------------ join and leave */

/* What the slots tell each other through the caller's all-gather. */
struct introduction {
    uint64_t magic, epoch, live, window_bytes;
    uint32_t version, slot, slots, max_tokens, max_hidden, max_top_k, max_experts, training;
    struct moe_cpu_card card;
};

static struct introduction introduce(const struct moe_session *s, const struct moe_cpu_card *card)
{
    const struct moe_session_config *c = &s->config;
    return (struct introduction){.magic = MOE_WINDOW_MAGIC,
                                 .epoch = c->epoch,
                                 .live = c->live,
                                 .window_bytes = s->layout.bytes,
                                 .version = MOE_WINDOW_VERSION,
                                 .slot = c->slot,
                                 .slots = c->slots,
                                 .max_tokens = c->max_tokens,
                                 .max_hidden = c->max_hidden,
                                 .max_top_k = c->max_top_k,
                                 .max_experts = c->max_experts,
                                 .training = c->training,
                                 .card = *card};
}

/* What of `theirs` is not as it should be: the first thing that can be told apart. */
static struct moe_status explain(uint32_t slot, const struct introduction *want,
                                 const struct introduction *theirs)
{
    if (theirs->version != want->version || theirs->magic != want->magic)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "slot %u runs another release", slot);
    if (theirs->epoch != want->epoch || theirs->live != want->live ||
        theirs->slots != want->slots || theirs->slot != want->slot)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "slot %u joins another view", slot);
    if (theirs->training != want->training)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "slot %u was started %s --training, this slot %s", slot,
                         theirs->training ? "with" : "without",
                         want->training ? "with" : "without");
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "slot %u joins with other sizes: %u tokens, width %u, top-k %u, %u experts; "
                     "this slot %u, %u, %u, %u",
                     slot, theirs->max_tokens, theirs->max_hidden, theirs->max_top_k,
                     theirs->max_experts, want->max_tokens, want->max_hidden, want->max_top_k,
                     want->max_experts);
}

/* All slots see the same introductions, so all of them refuse, or none. */
static struct moe_status check_introductions(const struct moe_session *s,
                                             const struct introduction *all)
{
    const struct moe_session_config *c = &s->config;
    for (uint32_t p = 0; p < c->slots; p++) {
        if (!(c->live >> p & 1))
            continue;
        if (all[p].magic == 0)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "slot %u did not join", p);
        struct introduction want = introduce(s, &all[p].card);
        want.slot = p;
        if (memcmp(&want, &all[p], sizeof want) != 0)
            return explain(p, &want, &all[p]);
    }
    return moe_ok();
}

static void ring_own(void *session)
{
    struct moe_session *s = session;
    ring(header_of(s, s->config.slot));
}

/* Spinning pays only where every slot of the host has a core for itself. */
static void choose_patience(struct moe_session *s)
{
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    bool enough = n >= __builtin_popcountll(s->config.live);
    s->spins = enough ? SPINS_WITH_A_CORE : SPINS_SHARING;
    s->yields = YIELDS;
}

/* Everything that involves other slots: the all-gather, the sockets, the windows. */
static struct moe_status meet_peers(struct moe_session *s, int window_fd)
{
    const struct moe_session_config *c = &s->config;
    struct moe_cpu_card card, cards[MOE_MAX_SLOTS];
    struct introduction all[MOE_MAX_SLOTS] = {0};
    int fds[MOE_MAX_SLOTS];
    MOE_TRY(moe_cpu_peers_listen(c->slot, c->live, &s->peers, &card));
    struct introduction mine = introduce(s, &card);
    MOE_TRY(c->allgather(c->allgather_ctx, &mine, all, sizeof mine));
    MOE_TRY(check_introductions(s, all));
    for (uint32_t p = 0; p < c->slots; p++)
        cards[p] = all[p].card;
    uint64_t deadline = moe_clock_ns() + 2 * MOE_NS_PER_MS * c->wait_budget_ms;
    MOE_TRY(moe_cpu_peers_meet(s->peers, cards, window_fd, deadline, fds));
    struct moe_status st = moe_ok();
    for (uint32_t p = 0; p < c->slots; p++) {
        if (fds[p] < 0)
            continue;
        if (!moe_failed(&st))
            st = moe_cpu_window_map(&s->layout, p, c->epoch, fds[p], &s->window[p]);
        close(fds[p]);
    }
    return moe_failed(&st) ? st : moe_cpu_peers_watch(s->peers, ring_own, s);
}

struct moe_status moe_cpu_session_join(struct moe_device *device,
                                       const struct moe_session_config *config,
                                       struct moe_session **out)
{
    struct moe_window_layout layout;
    MOE_TRY(moe_session_check(config, &layout));
    struct moe_session *s = calloc(1, sizeof *s);
    if (s == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for a session");
    s->device = device;
    s->config = *config;
    s->layout = layout;
    s->missing = -1;
    choose_patience(s);
    int window_fd = -1;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_cpu_device_charge(device, layout.bytes), failed);
    s->charged = layout.bytes;
    MOE_TRY_GOTO(st,
                 moe_cpu_window_create(&layout, config->slot, config->epoch,
                                       &s->window[config->slot], &window_fd),
                 failed);
    MOE_TRY_GOTO(st, moe_cpu_ep_create(s, &s->ep), failed);
    MOE_TRY_GOTO(st, meet_peers(s, window_fd), failed);
    MOE_TRY_GOTO(st, moe_cpu_steps_create(s, &s->steps), failed);
    close(window_fd);
    *out = s;
    return st;
failed:
    if (window_fd >= 0)
        close(window_fd);
    moe_cpu_session_leave(s);
    return st;
}

void moe_cpu_session_leave(struct moe_session *s)
{
    if (s == NULL)
        return;
    if (moe_cpu_session_own(s) != NULL)
        moe_cpu_session_abort(s); /* nothing may wait any longer */
    moe_cpu_steps_destroy(s->steps);
    moe_kept_drop_session(moe_cpu_device_kept(s->device), s);
    moe_cpu_peers_close(s->peers);
    moe_cpu_ep_destroy(s->ep);
    for (uint32_t p = 0; p < MOE_MAX_SLOTS; p++)
        moe_cpu_window_unmap(&s->window[p]);
    moe_cpu_device_discharge(s->device, s->charged);
    free(s);
}
