/* The inputs of the machine, its outputs, and its life from the log to the shutdown. */
#include "coordinator/membership_state.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A worker that claims a higher epoch than ours raises the floor (our state was lost, its was not);
 * one that claims more than this many is broken. */
#define EPOCH_PLAUSIBLE (UINT64_C(1) << 48)

#define REFUSALS_EVERY_NS (30 * MOE_NS_PER_S)

/* ------------------------------------------------------------------ outputs */

struct moe_membership_action *moe_membership__emit(struct moe_membership *m,
                                                   enum moe_membership_action_kind kind)
{
    MOE_INVARIANT(m->action_count < ACTIONS_MAX);
    size_t at = (m->action_head + m->action_count++) % ACTIONS_MAX;
    m->actions[at] = (struct moe_membership_action){.kind = kind};
    return &m->actions[at];
}

bool moe_membership_next_action(struct moe_membership *m, struct moe_membership_action *out)
{
    if (m->action_count == 0)
        return false;
    *out = m->actions[m->action_head];
    m->action_head = (m->action_head + 1) % ACTIONS_MAX;
    m->action_count--;
    return true;
}

void moe_membership__copy_text(char *to, size_t size, const char *from)
{
    size_t n = 0;
    for (; from[n] != '\0' && n + 1 < size; n++) {
        unsigned char c = (unsigned char)from[n];
        to[n] = c < 0x20 || c >= 0x7f ? '?' : (char)c;
    }
    to[n] = '\0';
}

void moe_membership__keep_error(struct seat *seat, const struct moe_status *error)
{
    seat->error = *error;
    moe_membership__copy_text(seat->error.text, sizeof seat->error.text, error->text);
}

void moe_membership__list_slots(char to[MOE_MEMBERSHIP_SLOT_LIST_BYTES], uint64_t mask)
{
    bool many = (mask & (mask - 1)) != 0;
    size_t at = (size_t)snprintf(to, MOE_MEMBERSHIP_SLOT_LIST_BYTES, "slot%s", many ? "s" : "");
    const char *before = " ";
    for (unsigned s = 0; s < SLOTS_MAX; s++) {
        if ((mask >> s & 1) == 0)
            continue;
        at += (size_t)snprintf(to + at, MOE_MEMBERSHIP_SLOT_LIST_BYTES - at, "%s%u", before, s);
        before = ", ";
    }
}

void moe_membership__log(struct moe_membership *m, enum moe_log_level level, const char *fmt, ...)
{
    char text[MOE_STATUS_TEXT];
    va_list args;
    va_start(args, fmt);
    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        text[0] = '\0';
    va_end(args);
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_LOG);
    a->level = level;
    moe_membership__copy_text(a->status.text, sizeof a->status.text, text);
}

struct moe_membership_action *moe_membership__send(struct moe_membership *m, uint32_t slot,
                                                   enum moe_membership_message message)
{
    const struct seat *seat = &m->seats[slot];
    if (seat->hold != SEAT_HELD || seat->stream == 0)
        return NULL;
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_SEND);
    a->message = message;
    a->stream = seat->stream;
    a->slot = slot;
    return a;
}

void moe_membership__close(struct moe_membership *m, uint64_t stream, struct moe_status status)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_CLOSE);
    a->stream = stream;
    a->status = status;
}

void moe_membership__save(struct moe_membership *m, bool await)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_SAVE);
    a->sequence = ++m->save_sequence;
    if (await)
        m->awaited_save = a->sequence;
}

/* ------------------------------------------------------------------ life of the machine */

/* Members of the view in the log hold their seats, unheard of as yet, for one lease. */
static void restore_view(struct moe_membership *m)
{
    if (m->saved.slots != m->config.slots)
        m->saved.view_epoch = 0; /* the group has another size now: nothing to come back to */
    if (m->saved.view_epoch == 0) {
        memset(m->saved.members, 0, sizeof m->saved.members);
        m->saved.slots = m->config.slots;
        return;
    }
    m->view_epoch = m->saved.view_epoch;
    m->view_since_ns = m->now_ns;
    m->restoring = true;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct seat *seat = &m->seats[s];
        seat->hold = SEAT_HELD;
        memcpy(seat->worker_id, m->saved.members[s].worker_id, sizeof seat->worker_id);
        seat->incarnation = m->saved.members[s].incarnation;
        seat->heard_ns = m->now_ns;
        seat->unverified = true;
        moe_membership__remember(m, seat);
    }
    moe_membership__log(m, MOE_LOG_INFO, "waiting for the members of epoch %" PRIu64,
                        m->view_epoch);
}

struct moe_status moe_membership_create(const struct moe_membership_config *config,
                                        const struct moe_membership_saved *saved, uint64_t now_ns,
                                        struct moe_membership **out)
{
    if (config->slots < 1 || config->slots > SLOTS_MAX || config->lease_ns == 0 ||
        config->form_ns == 0 || config->attempts_max == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a group has 1..%d seats, and times above 0", SLOTS_MAX);
    struct moe_membership *m = calloc(1, sizeof *m);
    if (m == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "membership");
    struct moe_status st = moe_placement_create(&m->placement);
    if (st.code != MOE_OK) {
        free(m);
        return st;
    }
    m->config = *config;
    m->now_ns = now_ns;
    m->saved = *saved;
    m->announced_epoch = saved->epoch;
    m->placement_durable = saved->placement_version != 0;
    restore_view(m);
    *out = m;
    return moe_ok();
}

void moe_membership_destroy(struct moe_membership *m)
{
    if (m == NULL)
        return;
    moe_placement_destroy(m->placement);
    free(m);
}

void moe_membership__set_time(struct moe_membership *m, uint64_t now_ns)
{
    MOE_INVARIANT(now_ns >= m->now_ns);
    uint64_t pause = now_ns - m->now_ns;
    if (pause > m->config.lease_ns / 2)
        for (uint32_t s = 0; s < m->config.slots; s++)
            m->seats[s].heard_ns += pause;
    m->now_ns = now_ns;
}

/* Opens every input but on_saved. False after EXIT. */
static bool begin_input(struct moe_membership *m, uint64_t now_ns)
{
    MOE_INVARIANT(m->action_count == 0);
    moe_membership__set_time(m, now_ns);
    return !m->exited;
}

static void settle_shutdown(struct moe_membership *m)
{
    bool all_left = true;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct seat *seat = &m->seats[s];
        if (seat->hold == SEAT_HELD && !seat->leaving)
            all_left = false;
        if (seat->hold == SEAT_HELD && !seat->leaving && m->now_ns >= m->shutdown_deadline_ns)
            moe_membership__log(m, MOE_LOG_WARN, "slot %u did not leave in time", s);
    }
    if (!all_left && m->now_ns < m->shutdown_deadline_ns)
        return;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct seat *seat = &m->seats[s];
        if (seat->hold == SEAT_HELD && seat->stream != 0)
            moe_membership__close(m, seat->stream, moe_ok());
        if (seat->hold == SEAT_HELD)
            seat->hold = SEAT_GONE;
        seat->stream = 0;
    }
    m->view_epoch = 0;
    if (m->saved.view_epoch != 0) {
        m->saved.view_epoch = 0;
        moe_membership__save(m, false);
    }
    m->exited = true;
    moe_membership__log(m, MOE_LOG_INFO, "the group has shut down");
    moe_membership__emit(m, MOE_MEMBERSHIP_EXIT);
}

static void end_input(struct moe_membership *m)
{
    if (m->exited)
        return;
    moe_membership__advance(m);
    if (m->shutting_down)
        settle_shutdown(m);
}

/* Opens the input of a member: renews its lease. A stream without a seat is ended. */
static bool begin_member_input(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                               uint32_t *slot)
{
    if (!begin_input(m, now_ns))
        return false;
    if (!moe_membership__find_stream(m, stream, slot)) {
        moe_membership__close(m, stream,
                              moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                                        "the stream has no seat: Register comes first"));
        return false;
    }
    m->seats[*slot].heard_ns = now_ns;
    return true;
}

/* A worker that is refused tries again and again: one line for all of a kind within
 * REFUSALS_EVERY_NS. */
static void log_refusal(struct moe_membership *m, const struct moe_status *st)
{
    bool said = m->refused_ns != 0 && m->refused_code == st->code;
    if (said && m->now_ns < m->refused_ns + REFUSALS_EVERY_NS) {
        m->refusals_unsaid++;
        return;
    }
    if (m->refusals_unsaid > 0)
        moe_membership__log(m, MOE_LOG_WARN, "refused a worker: %s (%u more before)", st->text,
                            m->refusals_unsaid);
    else
        moe_membership__log(m, MOE_LOG_WARN, "refused a worker: %s", st->text);
    m->refused_ns = m->now_ns;
    m->refused_code = st->code;
    m->refusals_unsaid = 0;
}

void moe_membership_on_register(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                const struct moe_membership_register *r)
{
    if (!begin_input(m, now_ns))
        return;
    struct moe_status st = moe_membership__register(m, stream, r);
    if (st.code != MOE_OK) {
        log_refusal(m, &st);
        uint32_t slot;
        if (!moe_membership__find_stream(m, stream, &slot))
            moe_membership__close(m, stream, st);
        else
            moe_membership__lose(m, slot, MOE_CAUSE_LEFT, "broke the protocol", st);
    }
    end_input(m);
}

/* ------------------------------------------------------------------ messages of members */

/* A worker that was away when its epoch ended, and serves it still, is told so. An ABORT of an
 * epoch that the worker has left already, because messages crossed, means nothing to it. */
static void abort_stale(struct moe_membership *m, uint32_t slot, uint64_t epoch)
{
    struct moe_membership_action *a = moe_membership__send(m, slot, MOE_MEMBERSHIP_ABORT);
    if (a == NULL)
        return;
    a->epoch = epoch;
    moe_membership__copy_text(a->status.text, sizeof a->status.text, "this epoch is over");
}

void moe_membership_on_heartbeat(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                 const struct moe_membership_heartbeat *h)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    struct seat *seat = &m->seats[slot];
    seat->last = *h;
    if (h->epoch > m->saved.epoch && h->epoch < EPOCH_PLAUSIBLE) {
        moe_membership__log(m, MOE_LOG_WARN,
                            "slot %u knows epoch %" PRIu64 ", later than ours: going on from there",
                            slot, h->epoch);
        if (m->phase != PHASE_IDLE)
            moe_membership__end_epoch(m, MOE_CAUSE_OUT_OF_STEP, "a worker knows a later epoch");
        m->saved.epoch = h->epoch;
    }
    if (seat->unverified && h->epoch == m->view_epoch) {
        seat->unverified = false;
    } else if (seat->unverified) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "slot %u came back without the epoch in force", slot);
        moe_membership__end_epoch(m, MOE_CAUSE_OUT_OF_STEP, why);
    }
    if (h->epoch != 0 && h->epoch != m->view_epoch)
        abort_stale(m, slot, h->epoch);
    end_input(m);
}

void moe_membership_on_loaded(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                              uint32_t placement_version, const struct moe_status *error)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    struct seat *seat = &m->seats[slot];
    bool ours = seat->assigned && placement_version == moe_placement_version(m->placement);
    if (ours && error->code == MOE_OK) {
        seat->loaded = true;
        seat->load_failed = false;
    } else if (ours && !seat->loaded) {
        seat->load_failed = true;
        moe_membership__keep_error(seat, error);
        moe_membership__log(m, MOE_LOG_ERROR, "slot %u cannot load: %s", slot, error->text);
    }
    end_input(m);
}

void moe_membership_on_blob(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                            uint64_t epoch, uint32_t round, const uint8_t *data, size_t length)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    moe_membership__blob(m, slot, epoch, round, data, length);
    end_input(m);
}

void moe_membership_on_ready(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                             uint64_t epoch, const struct moe_status *error)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    moe_membership__ready(m, slot, epoch, error);
    end_input(m);
}

/* The step that failed has ended the epoch, whoever was at fault. Who is lost is another question:
 * a suspect whose stream is gone too is; any other keeps its seat for as long as it renews its
 * lease, and has its chance to answer the next PREPARE. */
void moe_membership_on_peer_lost(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                 uint64_t epoch, uint64_t slots)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    if (m->view_epoch != 0 && epoch == m->view_epoch) {
        char why[MOE_MEMBERSHIP_REASON_BYTES], missed[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
        moe_membership__list_slots(missed, slots);
        snprintf(why, sizeof why, "slot %u got no answer from %s", slot, missed);
        moe_membership__end_epoch(m, MOE_CAUSE_PEER_LOST, why);
        for (uint32_t s = 0; s < m->config.slots; s++)
            if ((slots >> s & 1) != 0 && m->seats[s].hold == SEAT_HELD && m->seats[s].stream == 0)
                moe_membership__lose(m, s, MOE_CAUSE_PEER_LOST,
                                     "lost: disconnected and missed by its peers", moe_ok());
    }
    end_input(m);
}

void moe_membership_on_drain_notice(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                                    const char *reason)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    if (!m->seats[slot].draining) {
        char clean[MOE_MEMBERSHIP_REASON_BYTES], why[MOE_MEMBERSHIP_REASON_BYTES];
        moe_membership__copy_text(clean, sizeof clean, reason);
        snprintf(why, sizeof why, "slot %u is leaving: %.120s", slot, clean);
        moe_membership__log(m, MOE_LOG_INFO, "%s", why);
        if (m->phase != PHASE_IDLE)
            moe_membership__end_epoch(m, MOE_CAUSE_LEFT, why);
        moe_membership__drain(m, slot, clean, 0);
    }
    end_input(m);
}

void moe_membership_on_leaving(struct moe_membership *m, uint64_t now_ns, uint64_t stream,
                               const char *reason)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    m->seats[slot].leaving = true;
    if (!m->shutting_down) {
        char clean[MOE_MEMBERSHIP_REASON_BYTES], what[MOE_MEMBERSHIP_REASON_BYTES];
        moe_membership__copy_text(clean, sizeof clean, reason);
        snprintf(what, sizeof what, "left: %.120s", clean);
        moe_membership__lose(m, slot, MOE_CAUSE_LEFT, what, moe_ok());
    }
    end_input(m);
}

/* Whatever keeps the group waiting may be over. An epoch in work may have begun too early to know.
 */
void moe_membership_on_try_again(struct moe_membership *m, uint64_t now_ns, uint64_t stream)
{
    uint32_t slot;
    if (!begin_member_input(m, now_ns, stream, &slot))
        return;
    (void)moe_membership__send(m, slot, MOE_MEMBERSHIP_TRYING_AGAIN);
    m->told = m->phase != PHASE_IDLE;
    m->attempts = 0;
    m->waits = 0;
    m->failed = false;
    m->next_try_ns = now_ns;
    end_input(m);
}

/* Not yet a loss: the worker may come back until its lease runs out. */
void moe_membership_on_stream_closed(struct moe_membership *m, uint64_t now_ns, uint64_t stream)
{
    uint32_t slot;
    if (!begin_input(m, now_ns) || !moe_membership__find_stream(m, stream, &slot))
        return;
    m->seats[slot].stream = 0;
    char why[MOE_MEMBERSHIP_REASON_BYTES];
    snprintf(why, sizeof why, "slot %u disconnected", slot);
    if (m->shutting_down) {
        moe_membership__lose(m, slot, MOE_CAUSE_LEFT, "left", moe_ok());
    } else {
        moe_membership__log(m, MOE_LOG_WARN, "%s", why);
        if (m->phase != PHASE_IDLE)
            moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED, why);
    }
    end_input(m);
}

/* ------------------------------------------------------------------ time */

void moe_membership_on_tick(struct moe_membership *m, uint64_t now_ns)
{
    if (!begin_input(m, now_ns))
        return;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct seat *seat = &m->seats[s];
        if (seat->hold == SEAT_HELD && now_ns >= seat->heard_ns + m->config.lease_ns)
            moe_membership__lose(
                m, s, MOE_CAUSE_LEASE_EXPIRED, "lost: lease expired",
                moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_PEER_LOST, "the lease expired"));
    }
    if (m->phase != PHASE_IDLE && now_ns >= m->form_deadline_ns)
        moe_membership__form_timeout(m);
    end_input(m);
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint64_t moe_membership_deadline(const struct moe_membership *m)
{
    if (m->exited)
        return MOE_NEVER;
    /* Often enough for a pause of our own to be told from one of the workers. */
    uint64_t at = m->now_ns + m->config.lease_ns / 4;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (m->seats[s].hold == SEAT_HELD)
            at = earlier(at, m->seats[s].heard_ns + m->config.lease_ns);
    if (m->phase != PHASE_IDLE)
        at = earlier(at, m->form_deadline_ns);
    else if (m->next_try_ns > m->now_ns)
        at = earlier(at, m->next_try_ns);
    if (m->shutting_down)
        at = earlier(at, m->shutdown_deadline_ns);
    return at;
}

/* ------------------------------------------------------------------ operators */

static struct moe_status check_reason(const char *reason)
{
    if (reason[0] == '\0')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "a reason is required");
    return moe_ok();
}

struct moe_status moe_membership_drain(struct moe_membership *m, uint64_t now_ns, uint32_t slot,
                                       const char *reason, uint32_t limit_ms, uint64_t *epoch)
{
    MOE_TRY(check_reason(reason));
    if (slot >= m->config.slots || m->seats[slot].hold != SEAT_HELD)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "no worker holds slot %u", slot);
    if (!begin_input(m, now_ns))
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_DRAINING, "the group has shut down");
    *epoch = m->view_epoch;
    if (!m->seats[slot].draining) {
        char clean[MOE_MEMBERSHIP_REASON_BYTES], why[MOE_MEMBERSHIP_REASON_BYTES];
        moe_membership__copy_text(clean, sizeof clean, reason);
        snprintf(why, sizeof why, "slot %u is drained: %.120s", slot, clean);
        moe_membership__log(m, MOE_LOG_INFO, "%s", why);
        if (m->phase != PHASE_IDLE)
            moe_membership__end_epoch(m, MOE_CAUSE_LEFT, why);
        moe_membership__drain(m, slot, clean, limit_ms);
    }
    end_input(m);
    return moe_ok();
}

struct moe_status moe_membership_shutdown(struct moe_membership *m, uint64_t now_ns,
                                          const char *reason, uint32_t limit_ms, uint64_t *epoch)
{
    MOE_TRY(check_reason(reason));
    *epoch = m->view_epoch;
    if (!begin_input(m, now_ns) || m->shutting_down)
        return moe_ok();
    moe_membership__copy_text(m->shutdown_reason, sizeof m->shutdown_reason, reason);
    moe_membership__log(m, MOE_LOG_INFO, "shutting down: %s", m->shutdown_reason);
    if (m->phase != PHASE_IDLE)
        moe_membership__end_epoch(m, MOE_CAUSE_LEFT, "the group is shutting down");
    m->shutting_down = true;
    /* Workers cancel what is left at the limit, and then need a moment to say that they leave. */
    uint64_t limit =
        limit_ms != 0 ? limit_ms * MOE_NS_PER_MS + m->config.lease_ns : m->config.shutdown_ns;
    m->shutdown_deadline_ns = now_ns + limit;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (m->seats[s].hold == SEAT_HELD && !m->seats[s].draining)
            moe_membership__drain(m, s, m->shutdown_reason, limit_ms);
    end_input(m);
    return moe_ok();
}
