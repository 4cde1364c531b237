/* How an epoch comes about and ends: SAVE -> PREPARE -> blob rounds -> READY of all -> SAVE ->
 * COMMIT, and ABORT from anywhere. It never decides who lives: membership.c does. The one idea:
 * forming has no failure cases of its own, every miss ends the epoch and a later attempt starts
 * from nothing under a higher number. */
#include "coordinator/membership_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static uint32_t all_slots(const struct moe_membership *m)
{
    return (UINT32_C(1) << m->config.slots) - 1;
}

uint32_t moe_membership__count_held(const struct moe_membership *m)
{
    uint32_t held = 0;
    for (uint32_t s = 0; s < m->config.slots; s++)
        held += m->seats[s].hold == SEAT_HELD;
    return held;
}

bool moe_membership__all_held(const struct moe_membership *m)
{
    return moe_membership__count_held(m) == m->config.slots;
}

/* Why `seat` keeps the group from forming; NULL when it does not. */
static const char *hindrance(const struct seat *seat)
{
    return seat->hold != SEAT_HELD           ? "is empty"
           : seat->stream == 0               ? "is not connected"
           : seat->draining || seat->leaving ? "is leaving"
           : seat->load_failed               ? "cannot load"
           : !seat->assigned                 ? "waits for its share of the experts"
           : !seat->loaded                   ? "is loading"
                                             : NULL;
}

/* An empty seat comes first: as long as there is one, nobody loads for want of anything else. */
bool moe_membership__hindered(const struct moe_membership *m, uint32_t *slot, const char **why)
{
    bool complete = moe_membership__all_held(m);
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct seat *seat = &m->seats[s];
        *slot = s;
        *why = complete || seat->hold != SEAT_HELD ? hindrance(seat) : NULL;
        if (*why != NULL)
            return true;
    }
    return false;
}

/* ------------------------------------------------------------------ end of an epoch */

/* `missed`: failures in a row, this one too. */
static void set_pause(struct moe_membership *m, uint32_t missed)
{
    uint64_t pause = m->config.backoff_ns;
    for (uint32_t i = 1; i < missed && pause < m->config.backoff_max_ns; i++)
        pause *= 2;
    m->next_try_ns =
        m->now_ns + (pause < m->config.backoff_max_ns ? pause : m->config.backoff_max_ns);
}

/* What an operator has to decide or to mend (a full disk) is no failure of the group's, however
 * long that takes: it goes on trying. */
static void await_operator(struct moe_membership *m)
{
    m->attempts = 0;
    if (m->told) {
        m->told = false;
        m->waits = 0;
        m->next_try_ns = m->now_ns;
        return;
    }
    if (m->waits < UINT32_MAX)
        m->waits++;
    set_pause(m, m->waits);
}

/* Counts a failed attempt and says when the next one may start, or gives up. */
static void back_off(struct moe_membership *m)
{
    m->attempts++;
    m->waits = 0;
    if (m->attempts >= m->config.attempts_max) {
        m->failed = true;
        moe_membership__log(m, MOE_LOG_ERROR, "giving up after %u attempts: %s", m->attempts,
                            m->trouble);
        return;
    }
    set_pause(m, m->attempts);
}

static void forget_saved_view(struct moe_membership *m)
{
    if (m->saved.view_epoch == 0)
        return;
    m->saved.view_epoch = 0;
    memset(m->saved.members, 0, sizeof m->saved.members);
    moe_membership__save(m, false);
}

/* A view that lived for less than a lease counts as a failed attempt, so that a group that falls
 * apart again and again gives up like one that never forms. */
static void end_view(struct moe_membership *m)
{
    bool stable = m->now_ns - m->view_since_ns >= m->config.lease_ns;
    m->view_epoch = 0;
    m->degraded = true;
    m->restoring = false;
    for (uint32_t s = 0; s < m->config.slots; s++)
        m->seats[s].unverified = false;
    if (stable)
        m->attempts = 0;
    else if (!m->failed)
        back_off(m);
}

void moe_membership__end_epoch(struct moe_membership *m, enum moe_membership_cause cause,
                               const char *why)
{
    bool forming = m->phase != PHASE_IDLE;
    if (m->view_epoch == 0 && !forming)
        return;
    uint64_t epoch = forming ? m->epoch : m->view_epoch;
    moe_membership__copy_text(m->trouble, sizeof m->trouble, why);
    m->causes[cause]++;
    moe_membership__log(m, MOE_LOG_WARN, "epoch %" PRIu64 " ends: %s", epoch, why);
    for (uint32_t s = 0; m->phase != PHASE_SAVE_EPOCH && s < m->config.slots; s++) {
        struct moe_membership_action *a = moe_membership__send(m, s, MOE_MEMBERSHIP_ABORT);
        if (a == NULL)
            continue;
        a->epoch = epoch;
        moe_membership__copy_text(a->status.text, sizeof a->status.text, why);
    }
    m->awaited_save = 0;
    m->phase = PHASE_IDLE;
    if (forming && (cause == MOE_CAUSE_NOT_TOLD || cause == MOE_CAUSE_NOT_SAVED))
        await_operator(m);
    else if (forming)
        back_off(m);
    else
        end_view(m);
    forget_saved_view(m);
}

/* ------------------------------------------------------------------ start of an epoch */

static void assign(struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct seat *seat = &m->seats[s];
        if (seat->assigned || seat->draining)
            continue;
        if (moe_membership__send(m, s, MOE_MEMBERSHIP_ASSIGN) != NULL)
            seat->assigned = true;
    }
}

static void begin_epoch(struct moe_membership *m)
{
    m->told = false;
    m->saved.epoch++;
    m->epoch = m->saved.epoch;
    m->phase = PHASE_SAVE_EPOCH;
    m->form_deadline_ns = m->now_ns + m->config.form_ns;
    moe_membership__save(m, true);
}

/* The view found in the log is in force again when its last member has come back. */
static void check_restored(struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (m->seats[s].unverified)
            return;
    m->restoring = false;
    m->view_since_ns = m->now_ns;
    moe_membership__log(m, MOE_LOG_INFO, "all members of epoch %" PRIu64 " are back",
                        m->view_epoch);
}

void moe_membership__advance(struct moe_membership *m)
{
    if (m->shutting_down || m->phase != PHASE_IDLE || m->awaited_save != 0)
        return;
    if (m->restoring)
        check_restored(m);
    if (!moe_membership__all_held(m) || !m->model_known || m->failed || m->now_ns < m->next_try_ns)
        return;
    if (!m->placement_durable) {
        moe_membership__save(m, true);
        return;
    }
    assign(m);
    uint32_t slot;
    const char *why;
    if (m->view_epoch == 0 && !moe_membership__hindered(m, &slot, &why))
        begin_epoch(m);
}

/* ------------------------------------------------------------------ progress of an epoch */

static void prepare(struct moe_membership *m)
{
    m->phase = PHASE_PREPARE;
    m->announced_epoch = m->epoch;
    m->ready_mask = 0;
    m->blob_mask = 0;
    m->round = 0;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct moe_membership_action *a = moe_membership__send(m, s, MOE_MEMBERSHIP_PREPARE);
        MOE_INVARIANT(a != NULL); /* a lost stream ends the epoch in work */
        a->epoch = m->epoch;
    }
    moe_membership__log(m, MOE_LOG_INFO, "preparing epoch %" PRIu64, m->epoch);
}

static void commit(struct moe_membership *m)
{
    m->phase = PHASE_IDLE;
    m->view_epoch = m->epoch;
    m->view_since_ns = m->now_ns;
    m->degraded = false;
    m->waits = 0;
    m->told = false;
    m->trouble[0] = '\0';
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct moe_membership_action *a = moe_membership__send(m, s, MOE_MEMBERSHIP_COMMIT);
        MOE_INVARIANT(a != NULL);
        a->epoch = m->view_epoch;
        m->seats[s].error = moe_ok(); /* it is over */
    }
    moe_membership__log(m, MOE_LOG_INFO, "serving under epoch %" PRIu64, m->view_epoch);
}

void moe_membership_on_saved(struct moe_membership *m, uint64_t now_ns, uint64_t sequence,
                             const struct moe_status *status)
{
    moe_membership__set_time(m, now_ns);
    if (status->code != MOE_OK)
        moe_membership__log(m, MOE_LOG_ERROR, "cannot save the group's state: %s", status->text);
    if (sequence != m->awaited_save || m->exited)
        return;
    m->awaited_save = 0;
    if (status->code != MOE_OK) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "cannot save the group's state: %.100s", status->text);
        if (m->phase != PHASE_IDLE) {
            moe_membership__end_epoch(m, MOE_CAUSE_NOT_SAVED, why);
        } else {
            moe_membership__copy_text(m->trouble, sizeof m->trouble, why);
            await_operator(m);
        }
        return;
    }
    switch (m->phase) {
    case PHASE_IDLE:
        m->placement_durable = true;
        m->attempts = 0;
        m->trouble[0] = '\0';
        moe_membership__advance(m);
        break;
    case PHASE_SAVE_EPOCH: prepare(m); break;
    case PHASE_SAVE_VIEW: commit(m); break;
    case PHASE_PREPARE: break; /* waits for no write */
    }
}

/* ------------------------------------------------------------------ messages of members */

/* The seat of `stream` when `epoch` is the one being prepared; late messages about epochs that are
 * over cross with ABORT and mean nothing. */
static bool takes_part(const struct moe_membership *m, uint64_t epoch)
{
    return m->phase == PHASE_PREPARE && epoch == m->epoch;
}

void moe_membership__blob(struct moe_membership *m, uint32_t slot, uint64_t epoch, uint32_t round,
                          const uint8_t *data, size_t length)
{
    if (!takes_part(m, epoch))
        return;
    uint32_t bit = UINT32_C(1) << slot;
    const char *fault = length > MOE_MEMBERSHIP_BLOB_BYTES       ? "too large"
                        : round >= MOE_MEMBERSHIP_ROUNDS_MAX     ? "of too many rounds"
                        : round != m->round                      ? "of another round"
                        : ((m->blob_mask | m->ready_mask) & bit) ? "more than asked for"
                                                                 : NULL;
    if (fault != NULL) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "slot %u sent a blob %s", slot, fault);
        moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED, why);
        return;
    }
    m->blobs[slot].length = length;
    if (length > 0)
        memcpy(m->blobs[slot].data, data, length);
    m->blob_mask |= bit;
    if (m->blob_mask != all_slots(m))
        return;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        struct moe_membership_action *a = moe_membership__send(m, s, MOE_MEMBERSHIP_BLOBS);
        MOE_INVARIANT(a != NULL);
        a->epoch = m->epoch;
        a->round = m->round;
    }
    m->blob_mask = 0;
    m->round++;
}

void moe_membership__ready(struct moe_membership *m, uint32_t slot, uint64_t epoch,
                           const struct moe_status *error)
{
    if (!takes_part(m, epoch))
        return;
    if (error->code != MOE_OK) {
        char why[MOE_MEMBERSHIP_REASON_BYTES];
        snprintf(why, sizeof why, "slot %u: %.120s", slot, error->text);
        moe_membership__keep_error(&m->seats[slot], error);
        moe_membership__end_epoch(m,
                                  error->reason == MOE_REASON_CANNOT_GO_BACK ? MOE_CAUSE_NOT_TOLD
                                                                             : MOE_CAUSE_NOT_FORMED,
                                  why);
        return;
    }
    m->ready_mask |= UINT32_C(1) << slot;
    if (m->ready_mask != all_slots(m))
        return;
    m->phase = PHASE_SAVE_VIEW;
    m->saved.view_epoch = m->epoch;
    m->saved.slots = m->config.slots;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        memcpy(m->saved.members[s].worker_id, m->seats[s].worker_id, MOE_MEMBERSHIP_ID_BYTES);
        m->saved.members[s].incarnation = m->seats[s].incarnation;
    }
    moe_membership__save(m, true);
}

void moe_membership__form_timeout(struct moe_membership *m)
{
    char why[MOE_MEMBERSHIP_REASON_BYTES], slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(slots, all_slots(m) & ~m->ready_mask);
    snprintf(why, sizeof why, "no READY in time from %s", slots);
    moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED,
                              m->phase == PHASE_PREPARE ? why : "saving the state took too long");
}
