/* SPDX-License-Identifier: Apache-2.0 */
/* What the group does next with each added model, and the outputs of the machine. Orders are not
 * queued: the machine looks at each model and slot for the order that is wanted there, and sends it
 * if it was not sent on this stream, or was not reported for a while. So a lost stream needs no
 * care elsewhere. */
#include "coordinator/models_state.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LOAD_REPEATS = 30 }; /* a repeated LOAD waits for so many other ones: it is long */

/* ------------------------------------------------------------------ queue */

struct moe_added_action *moe_added__emit(struct moe_added *m, enum moe_added_action_kind kind)
{
    MOE_INVARIANT(m->queue_count < QUEUE_MAX);
    struct moe_added_action *a = &m->queue[(m->queue_head + m->queue_count++) % QUEUE_MAX];
    *a = (struct moe_added_action){.kind = kind, .slot = MOE_MEMBERSHIP_NO_SLOT};
    return a;
}

void moe_added__answer(struct moe_added *m, struct model *x, struct moe_status status)
{
    if (x->call == 0)
        return;
    struct moe_added_action *a = moe_added__emit(m, MOE_ADDED_ANSWER);
    a->number = x->entry.number;
    a->call = x->call;
    a->status = status;
    x->call = 0;
}

void moe_added__log(struct moe_added *m, enum moe_log_level level, enum moe_membership_event event,
                    uint32_t slot, const char *fmt, ...)
{
    struct moe_added_action *a = moe_added__emit(m, MOE_ADDED_LOG);
    va_list args;
    a->level = level;
    a->event = event;
    a->slot = slot;
    va_start(args, fmt);
    moe_membership_print_text(a->status.text, sizeof a->status.text, fmt, args);
    va_end(args);
}

void moe_added__save(struct moe_added *m, struct model *x)
{
    struct moe_added_action *a = moe_added__emit(m, MOE_ADDED_SAVE);
    a->number = x->entry.number;
    a->sequence = x->save = ++m->save_sequence;
}

/* ------------------------------------------------------------------ orders */

/* The slot opens or loads another model: only one at a time finds the right number of free
 * bytes. */
static bool is_busy(const struct moe_added *m, const struct model *x, uint32_t slot)
{
    for (size_t i = 0; i < MOE_ADDED_MAX; i++) {
        const struct model *other = &m->models[i];
        if (other->phase == PHASE_FREE || other == x)
            continue;
        const struct place *p = &other->places[slot];
        if (p->state == PLACE_OPEN || p->state == PLACE_BAD || p->step == MOE_ADDED_OPEN)
            return true;
    }
    return false;
}

bool moe_added__held_by_all(const struct moe_added *m, const struct model *x)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (moe_added__is_live(m, s) && x->places[s].state != PLACE_HELD)
            return false;
    return true;
}

bool moe_added__may_run(const struct moe_added *m, const struct model *x)
{
    return x->added_epoch != 0 && m->view <= x->added_epoch;
}

static enum moe_added_step wanted_of_kept(const struct moe_added *m, const struct model *x,
                                          uint32_t slot)
{
    const struct place *p = &x->places[slot];
    if (m->view == 0) /* what has begun goes on */
        return p->step == MOE_ADDED_OPEN || p->step == MOE_ADDED_LOAD ? p->step : 0;
    bool may_try = m->now_ns >= p->retry_ns && !is_busy(m, x, slot);
    switch (p->state) {
    case PLACE_NONE: return may_try ? MOE_ADDED_OPEN : 0;
    case PLACE_OPEN: return MOE_ADDED_LOAD;
    case PLACE_BAD:
        if (MOE_GUARD(REMOVE_BEFORE_CLOSE, !moe_added__may_run(m, x)))
            return MOE_ADDED_CLOSE;
        return may_try ? MOE_ADDED_OPEN : 0;
    case PLACE_HELD: break;
    }
    bool ready = MOE_GUARD(ADD_WHAT_ALL_HOLD, moe_added__held_by_all(m, x)) && !x->unsaved;
    return ready && moe_added__is_live(m, slot) && p->added != m->view ? MOE_ADDED_ADD : 0;
}

enum moe_added_step moe_added__wanted(const struct moe_added *m, const struct model *x,
                                      uint32_t slot)
{
    const struct place *p = &x->places[slot];
    switch (x->phase) {
    case PHASE_OPENING: return p->state == PLACE_NONE && !is_busy(m, x, slot) ? MOE_ADDED_OPEN : 0;
    case PHASE_LOADING: return p->state == PLACE_OPEN ? MOE_ADDED_LOAD : 0;
    case PHASE_KEPT: return wanted_of_kept(m, x, slot);
    case PHASE_QUIESCE: return p->done ? 0 : MOE_ADDED_QUIESCE;
    case PHASE_RESUME: return p->done ? 0 : MOE_ADDED_RESUME;
    case PHASE_REMOVE:
        return m->view != 0 && moe_added__is_live(m, slot) && moe_added__may_run(m, x) &&
                       p->removed != m->view
                   ? MOE_ADDED_REMOVE
                   : 0;
    case PHASE_CLOSE: return p->done ? 0 : MOE_ADDED_CLOSE;
    default: return 0;
    }
}

static bool is_due(const struct moe_added *m, const struct place *p, enum moe_added_step step,
                   uint64_t stream)
{
    uint64_t pause = MOE_ADDED_REPEAT_NS * (step == MOE_ADDED_LOAD ? LOAD_REPEATS : 1);
    return p->step != step || p->stream != stream || m->now_ns - p->sent_ns >= pause;
}

static void order(struct moe_added *m, struct model *x, uint32_t slot, enum moe_added_step step,
                  struct moe_added_action *out)
{
    struct place *p = &x->places[slot];
    if (p->step != step) {
        p->order = m->next_order++;
        p->first_ns = p->alive_ns = m->now_ns;
    }
    p->step = step;
    p->stream = m->slots[slot].stream;
    p->sent_ns = m->now_ns;
    if (step == MOE_ADDED_ADD)
        x->added_epoch = m->view;
    *out = (struct moe_added_action){.kind = MOE_ADDED_ORDER,
                                     .step = step,
                                     .number = x->entry.number,
                                     .slot = slot,
                                     .stream = p->stream,
                                     .order = p->order,
                                     .epoch = m->view,
                                     .if_idle = x->if_idle && step == MOE_ADDED_QUIESCE,
                                     .again = x->phase == PHASE_KEPT && step == MOE_ADDED_CLOSE};
}

/* An order that is not wanted any more is forgotten, so that its report is ignored. */
static bool next_order(struct moe_added *m, struct model *x, struct moe_added_action *out)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        enum moe_added_step step = moe_added__wanted(m, x, s);
        if (step == 0)
            x->places[s].step = 0;
        else if (m->slots[s].stream != 0 && is_due(m, &x->places[s], step, m->slots[s].stream)) {
            order(m, x, s, step, out);
            return true;
        }
    }
    return false;
}

bool moe_added_next_action(struct moe_added *m, struct moe_added_action *out)
{
    if (m->queue_count > 0) {
        *out = m->queue[m->queue_head];
        m->queue_head = (m->queue_head + 1) % QUEUE_MAX;
        m->queue_count--;
        return true;
    }
    for (size_t i = 0; i < MOE_ADDED_MAX; i++)
        if (m->models[i].phase != PHASE_FREE && next_order(m, &m->models[i], out))
            return true;
    return false;
}

/* ------------------------------------------------------------------ phases */

void moe_added__enter(struct moe_added *m, struct model *x, enum model_phase phase)
{
    x->phase = phase;
    x->phase_ns = m->now_ns;
    x->entry.leaving = x->entry.leaving || phase == PHASE_DECIDE;
    for (uint32_t s = 0; s < m->config.slots; s++)
        x->places[s].done = m->slots[s].process == 0;
    if (phase == PHASE_NUMBER || phase == PHASE_SAVING || phase == PHASE_DECIDE ||
        phase == PHASE_GONE)
        moe_added__save(m, x);
}

static bool is_load(const struct model *x)
{
    return x->phase >= PHASE_NUMBER && x->phase <= PHASE_SAVING;
}

bool moe_added__is_change(const struct model *x)
{
    return x->phase != PHASE_FREE && x->phase != PHASE_ANSWERED &&
           (x->phase != PHASE_KEPT || x->call != 0);
}

bool moe_added__is_served(const struct moe_added *m, const struct model *x)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (moe_added__is_live(m, s) && x->places[s].added != m->view)
            return false;
    return m->view != 0;
}

void moe_added__undo_load(struct moe_added *m, struct model *x, struct moe_status why)
{
    x->result = why;
    if (why.code != MOE_OK)
        moe_added__log(m, MOE_LOG_WARN, MOE_EVENT_MODEL_FAILED, MOE_MEMBERSHIP_NO_SLOT,
                       "model %s is not loaded: %.150s", x->entry.name, why.text);
    moe_added__enter(m, x, PHASE_CLOSE);
}

void moe_added__undo_unload(struct moe_added *m, struct model *x, struct moe_status why)
{
    x->result = why;
    moe_added__enter(m, x, PHASE_RESUME);
}

void moe_added__fail(struct moe_added *m, struct model *x, uint32_t slot,
                     const struct moe_status *why)
{
    struct place *p = &x->places[slot];
    struct moe_status st = moe_error_context(*why, "slot %u", slot);
    moe_membership_copy_text(st.text, sizeof st.text, st.text);
    if (is_load(x)) {
        moe_added__undo_load(m, x, st);
        return;
    }
    memcpy(x->reason, st.text, sizeof x->reason);
    moe_added__log(m, MOE_LOG_ERROR, MOE_EVENT_MODEL_FAILED, slot, "model %s: %.180s",
                   x->entry.name, st.text);
    if (p->state != PLACE_NONE) /* else it was not opened */
        p->state = PLACE_BAD;
    p->failed = true;
    p->step = 0;
    p->backoff_ns = p->backoff_ns == 0 ? MOE_ADDED_RETRY_NS : 2 * p->backoff_ns;
    if (p->backoff_ns > MOE_ADDED_RETRY_MAX_NS)
        p->backoff_ns = MOE_ADDED_RETRY_MAX_NS;
    p->retry_ns = m->now_ns + p->backoff_ns;
}

/* ------------------------------------------------------------------ limits */

static struct moe_status late(const char *what)
{
    return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "%s", what);
}

/* Of the steps of single slots. */
static void check_places(struct moe_added *m, struct model *x)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct place *p = &x->places[s];
        struct moe_status st = moe_ok();
        if (p->step == MOE_ADDED_OPEN && m->now_ns - p->first_ns >= MOE_ADDED_OPEN_NS)
            st = late("it does not answer the order to open the model");
        else if (p->step == MOE_ADDED_LOAD && m->now_ns - p->alive_ns >= MOE_ADDED_STALL_NS)
            st = late("its load makes no progress");
        if (moe_failed(&st))
            moe_added__fail(m, x, s, &st);
    }
}

static void check_phase(struct moe_added *m, struct model *x)
{
    uint64_t age = m->now_ns - x->phase_ns;
    if (x->phase == PHASE_OPENING && age >= 2 * MOE_ADDED_OPEN_NS)
        moe_added__undo_load(m, x, late("a slot is busy with another model for too long"));
    else if (x->phase == PHASE_QUIESCE && age >= MOE_ADDED_QUIESCE_NS)
        moe_added__undo_unload(m, x, late("requests take too long to end; the model stays"));
    else if (x->phase == PHASE_KEPT && age >= MOE_ADDED_ADD_NS)
        moe_added__answer(m, x, late("loaded, and not yet served by all slots; the model stays"));
    else if (x->phase >= PHASE_REMOVE && age >= MOE_ADDED_CLOSE_NS)
        moe_added__answer(m, x,
                          x->entry.leaving ? late("the unload goes on: not all slots have ended it")
                                           : x->result);
    else if (x->phase == PHASE_RESUME && age >= MOE_ADDED_CLOSE_NS)
        moe_added__answer(m, x, x->result);
}

/* ------------------------------------------------------------------ steps */

static bool all_places(const struct moe_added *m, const struct model *x, enum place_state state)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if ((m->places >> s & 1) != 0 && x->places[s].state != state)
            return false;
    return true;
}

/* A slot that is not connected needs no CLOSE: it learns from Registered that the model is gone. */
static bool all_done(const struct moe_added *m, const struct model *x)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (!x->places[s].done && (x->phase != PHASE_CLOSE || m->slots[s].stream != 0))
            return false;
    return true;
}

static bool all_removed(const struct moe_added *m, const struct model *x)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (moe_added__is_live(m, s) && !MOE_GUARD(REMOVE_ON_ALL, x->places[s].removed == m->view))
            return false;
    return m->view != 0;
}

static void end_close(struct moe_added *m, struct model *x)
{
    moe_added__emit(m, MOE_ADDED_FORGET)->number = x->entry.number;
    if (x->entry.leaving) {
        moe_added__enter(m, x, PHASE_GONE);
        return;
    }
    moe_added__answer(m, x, x->result);
    x->phase = PHASE_ANSWERED;
}

static void serve(struct moe_added *m, struct model *x)
{
    if (x->served_epoch == m->view)
        return;
    x->served_epoch = m->view;
    x->reason[0] = '\0';
    moe_added__log(m, MOE_LOG_INFO, MOE_EVENT_MODEL_SERVING, MOE_MEMBERSHIP_NO_SLOT,
                   "model %s is served", x->entry.name);
    moe_added__answer(m, x, moe_ok());
}

/* An accepted set of other files becomes durable once all slots agree on it. */
static void keep(struct moe_added *m, struct model *x)
{
    if (x->unsaved && x->save == 0 && m->now_ns >= x->save_ns && moe_added__held_by_all(m, x))
        moe_added__save(m, x);
    if (moe_added__is_served(m, x))
        serve(m, x);
}

static void advance(struct moe_added *m, struct model *x)
{
    check_places(m, x);
    check_phase(m, x);
    if (x->phase == PHASE_OPENING && all_places(m, x, PLACE_OPEN)) {
        if (x->dry_run)
            moe_added__undo_load(m, x, moe_ok());
        else
            moe_added__enter(m, x, PHASE_LOADING);
    }
    if (x->phase == PHASE_LOADING && moe_added__held_by_all(m, x))
        moe_added__enter(m, x, MOE_GUARD(ADD_WHAT_IS_SAVED, false) ? PHASE_KEPT : PHASE_SAVING);
    if (x->phase == PHASE_KEPT)
        keep(m, x);
    if (x->phase == PHASE_QUIESCE && MOE_GUARD(QUIESCE_ALL, all_done(m, x)))
        moe_added__enter(m, x, PHASE_DECIDE);
    if (x->phase == PHASE_RESUME && all_done(m, x)) {
        moe_added__answer(m, x, x->result);
        moe_added__enter(m, x, PHASE_KEPT);
    }
    if (x->phase == PHASE_REMOVE && all_removed(m, x))
        x->added_epoch = 0;
    if (x->phase == PHASE_REMOVE && MOE_GUARD(REMOVE_BEFORE_CLOSE, !moe_added__may_run(m, x)))
        moe_added__enter(m, x, PHASE_CLOSE);
    if (x->phase == PHASE_CLOSE && all_done(m, x))
        end_close(m, x);
    if (x->phase == PHASE_GONE && x->save == 0 && m->now_ns >= x->save_ns)
        moe_added__save(m, x);
}

void moe_added__advance(struct moe_added *m)
{
    for (size_t i = 0; i < MOE_ADDED_MAX; i++)
        if (m->models[i].phase != PHASE_FREE && m->models[i].phase != PHASE_ANSWERED)
            advance(m, &m->models[i]);
}
