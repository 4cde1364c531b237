/* SPDX-License-Identifier: Apache-2.0 */
/* Life, inputs and reports of the machine of added models. */
#include "coordinator/models_state.h"

#include "base/size.h"
#include "daemon/name.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TICK_NS       (250 * MOE_NS_PER_MS) /* while something is under way */
#define SAVE_AGAIN_NS (5 * MOE_NS_PER_S)

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for models");
}

/* ------------------------------------------------------------------ lifetime */

static struct moe_status restore(struct moe_added *m, const struct moe_added_saved *saved,
                                 uint64_t epoch)
{
    uint32_t last = 0;
    if (saved->count > MOE_ADDED_MAX || saved->highest > MOE_ADDED_NUMBER_MAX)
        return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "impossible list of models");
    m->highest = saved->highest;
    for (uint32_t i = 0; i < saved->count; i++) {
        struct model *x = &m->models[i];
        x->entry = saved->models[i];
        if (x->entry.number <= last || x->entry.number > saved->highest)
            return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "impossible list of models");
        last = x->entry.number;
        MOE_TRY(moe_placement_create(&x->placement));
        /* An unload that was not saved may have stopped requests. */
        x->phase = x->entry.leaving ? PHASE_REMOVE : PHASE_RESUME;
        x->added_epoch = epoch;
    }
    return moe_ok();
}

struct moe_status moe_added_create(const struct moe_added_config *config,
                                   const struct moe_added_saved *saved, uint64_t epoch,
                                   struct moe_added **out)
{
    MOE_INVARIANT(config->slots >= 1 && config->slots <= MOE_PLACEMENT_SLOTS_MAX);
    struct moe_added *m = calloc(1, sizeof *m);
    if (m == NULL)
        return no_memory();
    m->config = *config;
    m->next_order = config->first_order;
    m->models = calloc(MOE_ADDED_MAX, sizeof *m->models);
    m->queue = calloc(QUEUE_MAX, sizeof *m->queue);
    struct moe_status st =
        m->models != NULL && m->queue != NULL ? restore(m, saved, epoch) : no_memory();
    if (moe_failed(&st)) {
        moe_added_destroy(m);
        return st;
    }
    *out = m;
    return st;
}

void moe_added_destroy(struct moe_added *m)
{
    if (m == NULL)
        return;
    for (size_t i = 0; m->models != NULL && i < MOE_ADDED_MAX; i++)
        moe_placement_destroy(m->models[i].placement);
    free(m->models);
    free(m->queue);
    free(m);
}

static size_t count_models(const struct moe_added *m)
{
    size_t count = 0;
    while (count < MOE_ADDED_MAX && m->models[count].phase != PHASE_FREE)
        count++;
    return count;
}

/* Every input begins so: models that were answered go. */
static void begin(struct moe_added *m, uint64_t now_ns)
{
    if (now_ns > m->now_ns)
        m->now_ns = now_ns;
    size_t count = count_models(m);
    for (size_t i = 0; i < count;) {
        if (m->models[i].phase != PHASE_ANSWERED) {
            i++;
            continue;
        }
        moe_placement_destroy(m->models[i].placement);
        count--;
        memmove(&m->models[i], &m->models[i + 1], (count - i) * sizeof *m->models);
        memset(&m->models[count], 0, sizeof *m->models);
    }
}

static struct model *find(const struct moe_added *m, uint32_t number)
{
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++)
        if (m->models[i].entry.number == number && m->models[i].phase != PHASE_ANSWERED)
            return &m->models[i];
    return NULL;
}

static struct model *find_name(const struct moe_added *m, const char *name)
{
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++)
        if (strcmp(m->models[i].entry.name, name) == 0 && m->models[i].phase != PHASE_ANSWERED)
            return &m->models[i];
    return NULL;
}

/* ------------------------------------------------------------------ the group */

static bool can_be_undone(const struct model *x)
{
    return x->phase == PHASE_NUMBER || x->phase == PHASE_OPENING || x->phase == PHASE_LOADING;
}

static void change_process(struct moe_added *m, uint32_t slot, uint64_t process)
{
    bool first = m->slots[slot].process == 0;
    m->slots[slot].process = process;
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++) {
        struct model *x = &m->models[i];
        /* A process from before a restart may hold a model that views of others have closed. */
        bool asked = x->phase == PHASE_RESUME || x->phase == PHASE_CLOSE;
        x->places[slot] = (struct place){.done = process == 0 || !asked};
        if (!first && can_be_undone(x))
            moe_added__undo_load(m, x,
                                 moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000,
                                                 "slot %u has lost its worker", slot));
    }
}

static void change_view(struct moe_added *m, uint64_t view)
{
    m->view = view;
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++)
        if (m->models[i].phase == PHASE_QUIESCE)
            moe_added__undo_unload(
                m, &m->models[i],
                moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_REFORMING, 1000,
                                "the view ended before all requests; the model stays"));
}

void moe_added_on_group(struct moe_added *m, uint64_t now_ns, uint64_t view, uint64_t live,
                        uint64_t places, const struct moe_added_slot *slots)
{
    begin(m, now_ns);
    m->places = places;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if (m->slots[s].process != slots[s].process)
            change_process(m, s, slots[s].process);
        m->slots[s].stream = slots[s].stream;
        m->slots[s].memory = slots[s].memory;
    }
    m->live = view != 0 ? live : UINT64_MAX;
    if (m->view != view)
        change_view(m, view);
    moe_added__advance(m);
}

/* ------------------------------------------------------------------ operators */

static struct moe_status check_directory(const char *directory)
{
    size_t length = strlen(directory);
    if (length >= MOE_ADDED_DIRECTORY_BYTES)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "a directory may have %d bytes", MOE_ADDED_DIRECTORY_BYTES - 1);
    if (directory[0] != '/')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "the directory must be an absolute path");
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)directory[i] < 0x20 || directory[i] == 0x7f)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                             "the directory has a control character");
    return moe_ok();
}

/* `name`, or without one the last component of `directory`. */
static struct moe_status choose_name(const char *directory, const char *name,
                                     char out[MOE_ADDED_NAME_BYTES])
{
    size_t length = strlen(name);
    if (length == 0) {
        length = strlen(directory);
        while (length > 0 && directory[length - 1] == '/')
            length--;
        size_t start = length;
        while (start > 0 && directory[start - 1] != '/')
            start--;
        name = directory + start;
        length -= start;
    }
    if (length < MOE_ADDED_NAME_BYTES) {
        memcpy(out, name, length);
        out[length] = '\0';
        if (out[0] != '-' && moe_training_name_ok(out)) /* else a command takes it for an option */
            return moe_ok();
    }
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID,
                     "a model's name has 1 to %d letters, digits, '.', '_' and '-', and begins "
                     "with neither '.' nor '-'",
                     MOE_ADDED_NAME_BYTES - 1);
}

static struct moe_status check_no_change(const struct moe_added *m)
{
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++)
        if (moe_added__is_change(&m->models[i]))
            return moe_error_retry(MOE_UNAVAILABLE, MOE_REASON_NONE, 1000,
                                   "model %s is being loaded or unloaded: one change at a time",
                                   m->models[i].entry.name);
    return moe_ok();
}

static struct moe_status begin_load(struct moe_added *m, struct model *x)
{
    MOE_TRY(moe_placement_create(&x->placement));
    x->entry.number = ++m->highest;
    moe_added__enter(m, x, MOE_GUARD(NUMBER_IS_SAVED, false) ? PHASE_OPENING : PHASE_NUMBER);
    return moe_ok();
}

struct moe_status moe_added_load(struct moe_added *m, uint64_t now_ns, uint64_t call,
                                 const char *directory, const char *name, const char *taken,
                                 bool dry_run)
{
    char chosen[MOE_ADDED_NAME_BYTES];
    begin(m, now_ns);
    MOE_TRY(check_directory(directory));
    MOE_TRY(choose_name(directory, name, chosen));
    if (strcmp(chosen, taken) == 0 || find_name(m, chosen) != NULL)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NAME_INVALID,
                         "the group has a model named %s", chosen);
    if (m->view == 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING, "no view is in force");
    for (uint32_t s = 0; s < m->config.slots; s++)
        if ((m->places >> s & 1) != 0 && !moe_added__is_live(m, s))
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING,
                             "slot %u takes no part: a model is loaded on all slots", s);
    MOE_TRY(check_no_change(m));
    size_t count = count_models(m);
    if (count == MOE_ADDED_MAX || m->highest == MOE_ADDED_NUMBER_MAX)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE,
                         "a group has at most %d added models, and %d in its life", MOE_ADDED_MAX,
                         MOE_ADDED_NUMBER_MAX);
    struct model *x = &m->models[count];
    *x = (struct model){.dry_run = dry_run, .call = call};
    strcpy(x->entry.name, chosen);
    strcpy(x->entry.directory, directory);
    MOE_TRY(begin_load(m, x));
    moe_added__advance(m);
    return moe_ok();
}

struct moe_status moe_added_unload(struct moe_added *m, uint64_t now_ns, uint64_t call,
                                   const char *name, bool drain)
{
    begin(m, now_ns);
    struct model *x = find_name(m, name);
    if (x == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "no added model has this name");
    MOE_TRY(check_no_change(m));
    x->call = call;
    x->if_idle = !drain;
    moe_added__enter(m, x, m->view != 0 ? PHASE_QUIESCE : PHASE_DECIDE);
    moe_added__advance(m);
    return moe_ok();
}

void moe_added_cancel(struct moe_added *m, uint64_t now_ns, uint64_t call)
{
    begin(m, now_ns);
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++) {
        struct model *x = &m->models[i];
        if (x->call != call || x->phase == PHASE_ANSWERED)
            continue;
        x->call = 0;
        if (can_be_undone(x))
            moe_added__undo_load(
                m, x, moe_error(MOE_CANCELLED, MOE_REASON_ABORTED, "the operator has left"));
    }
    moe_added__advance(m);
}

bool moe_added_forget_files(struct moe_added *m, const char *name, uint32_t *number)
{
    struct model *x = find_name(m, name);
    if (x == NULL)
        return false;
    x->entry.fingerprint[0] = '\0';
    x->layer_count = 0;
    *number = x->entry.number;
    return true;
}

/* ------------------------------------------------------------------ reports */

static struct moe_status take_files(struct moe_added *m, struct model *x,
                                    const struct moe_added_report *r)
{
    size_t length = strlen(r->fingerprint);
    if (length == 0 || length >= MOE_ADDED_FINGERPRINT_BYTES)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "it has no fingerprint");
    MOE_TRY(moe_model_check_layers(r->layers, r->layer_count));
    bool recorded = x->entry.fingerprint[0] != '\0';
    bool same = (!recorded || strcmp(x->entry.fingerprint, r->fingerprint) == 0) &&
                (x->layer_count == 0 ||
                 moe_model_same_layers(x->layers, x->layer_count, r->layers, r->layer_count));
    if (!MOE_GUARD(COMPARE_FILES, same))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MODEL_MISMATCH,
                         "it has another model in %.120s than the others, or another form of its "
                         "weights (--weights, --fp8-compute)",
                         x->entry.directory);
    if (x->layer_count == 0) {
        MOE_TRY(moe_model_place(x->placement, m->places, m->config.replicas, r->layers,
                                r->layer_count));
        memcpy(x->layers, r->layers, r->layer_count * sizeof *r->layers);
        x->layer_count = r->layer_count;
        moe_membership_copy_text(x->family, sizeof x->family, r->family);
    }
    if (!recorded) {
        memcpy(x->entry.fingerprint, r->fingerprint, length + 1);
        x->unsaved = x->phase == PHASE_KEPT;
    }
    return moe_ok();
}

/* Each slot reported what was free before any of them loads. */
static struct moe_status check_shared_memory(const struct moe_added *m, const struct model *x,
                                             uint32_t slot)
{
    uint64_t needed = 0, left = UINT64_MAX;
    if (m->slots[slot].memory == 0)
        return moe_ok();
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct place *p = &x->places[s];
        if (p->state != PLACE_OPEN || m->slots[s].memory != m->slots[slot].memory)
            continue;
        if (!moe_size_add(needed, p->plan.resident_bytes, &needed))
            needed = UINT64_MAX;
        left = p->plan.free_bytes < left ? p->plan.free_bytes : left;
    }
    if (needed <= left)
        return moe_ok();
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "the workers on its host need %" PRIu64
                     " bytes for the model and have %" PRIu64 " free",
                     needed, left);
}

static struct moe_status take_open(struct moe_added *m, struct model *x, uint32_t slot,
                                   const struct moe_added_report *r)
{
    struct place *p = &x->places[slot];
    MOE_TRY(*r->error);
    p->state = PLACE_OPEN;
    MOE_TRY(take_files(m, x, r));
    p->plan.free_bytes = r->free_bytes;
    MOE_TRY(moe_model_plan_slot(x->placement, r->layers, slot, &p->plan));
    MOE_TRY(check_shared_memory(m, x, slot));
    p->loaded_bytes = 0;
    p->total_bytes = p->plan.file_bytes;
    return moe_ok();
}

static struct moe_status take_load(struct place *p, const struct moe_added_report *r)
{
    MOE_TRY(*r->error);
    p->state = PLACE_HELD;
    p->failed = false;
    p->backoff_ns = 0;
    p->loaded_bytes = p->total_bytes;
    return moe_ok();
}

static void note_error(struct moe_added *m, struct model *x, uint32_t slot,
                       const struct moe_status *error)
{
    struct moe_status st = moe_error_context(*error, "slot %u", slot);
    bool known = x->reason[0] != '\0';
    moe_membership_copy_text(x->reason, sizeof x->reason, st.text);
    if (!known)
        moe_added__log(m, MOE_LOG_WARN, MOE_EVENT_MODEL_FAILED, slot, "model %s: %.180s",
                       x->entry.name, x->reason);
}

/* Reports of orders; ADD and REMOVE are not among them. */
static void take_ordered(struct moe_added *m, struct model *x, uint32_t slot,
                         const struct moe_added_report *r)
{
    struct place *p = &x->places[slot];
    enum moe_added_step step = p->step;
    struct moe_status st = moe_ok();
    p->step = 0;
    switch (step) {
    case MOE_ADDED_OPEN: st = take_open(m, x, slot, r); break;
    case MOE_ADDED_LOAD: st = take_load(p, r); break;
    case MOE_ADDED_QUIESCE:
        p->done = true;
        if (moe_failed(r->error))
            moe_added__undo_unload(m, x, moe_error_context(*r->error, "slot %u", slot));
        return;
    case MOE_ADDED_RESUME: p->done = true; return;
    case MOE_ADDED_CLOSE:
        if (moe_failed(r->error)) {
            p->step = step; /* it is repeated */
            note_error(m, x, slot, r->error);
            return;
        }
        p->done = true;
        p->state = PLACE_NONE;
        return;
    default: MOE_INVARIANT(false);
    }
    if (moe_failed(&st))
        moe_added__fail(m, x, slot, &st);
}

static void take_ticket(struct moe_added *m, struct model *x, uint32_t slot,
                        const struct moe_added_report *r)
{
    struct place *p = &x->places[slot];
    if (r->epoch != m->view || m->view == 0)
        return;
    if (moe_failed(r->error)) {
        note_error(m, x, slot, r->error);
        return;
    }
    if (r->step == MOE_ADDED_ADD)
        p->added = m->view;
    else
        p->removed = m->view;
}

void moe_added_on_report(struct moe_added *m, uint64_t now_ns, uint32_t slot,
                         const struct moe_added_report *r)
{
    begin(m, now_ns);
    MOE_INVARIANT(slot < m->config.slots);
    struct model *x = find(m, r->number);
    if (x != NULL && (r->step == MOE_ADDED_ADD || r->step == MOE_ADDED_REMOVE)) {
        take_ticket(m, x, slot, r);
    } else if (x != NULL) {
        enum moe_added_step step = x->places[slot].step;
        bool same = step == r->step || (step == MOE_ADDED_RESUME && r->step == MOE_ADDED_QUIESCE);
        if (step != 0 && same && MOE_GUARD(KNOW_THE_ORDER, x->places[slot].order == r->order))
            take_ordered(m, x, slot, r);
    }
    moe_added__advance(m);
}

void moe_added_on_progress(struct moe_added *m, uint64_t now_ns, uint32_t slot, uint32_t number,
                           uint64_t loaded_bytes, uint64_t total_bytes)
{
    begin(m, now_ns);
    struct model *x = find(m, number);
    if (x == NULL || x->places[slot].step != MOE_ADDED_LOAD)
        return;
    struct place *p = &x->places[slot];
    if (loaded_bytes != p->loaded_bytes)
        p->alive_ns = m->now_ns;
    p->loaded_bytes = loaded_bytes;
    p->total_bytes = total_bytes;
}

/* ------------------------------------------------------------------ saves, time */

static void end_unload(struct moe_added *m, struct model *x)
{
    moe_added__log(m, MOE_LOG_INFO, MOE_EVENT_MODEL_UNLOADED, MOE_MEMBERSHIP_NO_SLOT,
                   "model %s is unloaded", x->entry.name);
    moe_added__answer(m, x, moe_ok());
    x->phase = PHASE_ANSWERED;
}

static void take_saved(struct moe_added *m, struct model *x)
{
    switch (x->phase) {
    case PHASE_NUMBER: moe_added__enter(m, x, PHASE_OPENING); break;
    case PHASE_SAVING: moe_added__enter(m, x, PHASE_KEPT); break;
    case PHASE_KEPT: x->unsaved = false; break;
    case PHASE_DECIDE: moe_added__enter(m, x, PHASE_REMOVE); break;
    case PHASE_GONE: end_unload(m, x); break;
    default: break; /* a cancelled load */
    }
}

static void take_unsaved(struct moe_added *m, struct model *x, const struct moe_status *status)
{
    x->save_ns = m->now_ns + SAVE_AGAIN_NS;
    switch (x->phase) {
    case PHASE_NUMBER:
        moe_added__answer(m, x, *status);
        x->phase = PHASE_ANSWERED;
        break;
    case PHASE_SAVING: moe_added__undo_load(m, x, *status); break;
    case PHASE_DECIDE:
        x->entry.leaving = false;
        moe_added__undo_unload(m, x, *status);
        break;
    default: break; /* repeated */
    }
}

void moe_added_on_saved(struct moe_added *m, uint64_t now_ns, uint64_t sequence,
                        const struct moe_status *status)
{
    begin(m, now_ns);
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++) {
        struct model *x = &m->models[i];
        if (x->save != sequence)
            continue;
        x->save = 0;
        if (moe_failed(status))
            take_unsaved(m, x, status);
        else
            take_saved(m, x);
    }
    moe_added__advance(m);
}

void moe_added_on_tick(struct moe_added *m, uint64_t now_ns)
{
    begin(m, now_ns);
    moe_added__advance(m);
}

uint64_t moe_added_deadline(const struct moe_added *m)
{
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++) {
        const struct model *x = &m->models[i];
        if (moe_added__is_change(x) || (m->view != 0 && !moe_added__is_served(m, x)))
            return m->now_ns + TICK_NS;
    }
    return MOE_NEVER;
}

/* ------------------------------------------------------------------ reading */

static enum moe_model_state state_of(const struct moe_added *m, const struct model *x)
{
    switch (x->phase) {
    case PHASE_NUMBER:
    case PHASE_OPENING: return MOE_MODEL_PLANNING;
    case PHASE_LOADING:
    case PHASE_SAVING: return MOE_MODEL_LOADING;
    case PHASE_KEPT:
    case PHASE_RESUME: break;
    default: return x->dry_run ? MOE_MODEL_PLANNING : MOE_MODEL_UNLOADING;
    }
    if (m->view == 0)
        return MOE_MODEL_WAITING;
    if (moe_added__is_served(m, x))
        return MOE_MODEL_SERVING;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if (x->places[s].failed)
            return MOE_MODEL_FAILED;
    return MOE_MODEL_LOADING;
}

static void fill_info(const struct moe_added *m, const struct model *x, struct moe_added_info *out)
{
    *out = (struct moe_added_info){.number = x->entry.number,
                                   .state = state_of(m, x),
                                   .closed = !MOE_GUARD(UNLIST_CLOSED, x->phase < PHASE_GONE),
                                   .name = x->entry.name,
                                   .directory = x->entry.directory,
                                   .family = x->family,
                                   .fingerprint = x->entry.fingerprint,
                                   .reason = x->reason,
                                   .layers = x->layers,
                                   .layer_count = x->layer_count,
                                   .placement = x->placement};
    for (uint32_t s = 0; s < m->config.slots; s++) {
        out->plans[s] = x->places[s].plan;
        out->loaded_bytes += x->places[s].loaded_bytes;
        out->total_bytes += x->places[s].total_bytes;
    }
}

bool moe_added_info(const struct moe_added *m, size_t index, struct moe_added_info *out)
{
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++) {
        if (m->models[i].phase == PHASE_ANSWERED || index-- > 0)
            continue;
        fill_info(m, &m->models[i], out);
        return true;
    }
    return false;
}

bool moe_added_find(const struct moe_added *m, uint32_t number, struct moe_added_info *out)
{
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++) {
        if (m->models[i].entry.number != number)
            continue;
        fill_info(m, &m->models[i], out);
        return true;
    }
    return false;
}

bool moe_added_find_name(const struct moe_added *m, const char *name, struct moe_added_info *out)
{
    const struct model *x = find_name(m, name);
    if (x != NULL)
        fill_info(m, x, out);
    return x != NULL;
}

bool moe_added_awaits_load(const struct moe_added *m, uint32_t slot, uint32_t number,
                           uint64_t order)
{
    const struct model *x = find(m, number);
    return x != NULL && x->places[slot].step == MOE_ADDED_LOAD &&
           (order == 0 || x->places[slot].order == order);
}

const struct moe_added_saved *moe_added_to_save(struct moe_added *m)
{
    struct moe_added_saved *s = &m->saved;
    *s = (struct moe_added_saved){.highest = m->highest};
    size_t count = count_models(m);
    for (size_t i = 0; i < count; i++) {
        const struct model *x = &m->models[i];
        bool kept = (x->phase >= PHASE_SAVING && x->phase <= PHASE_REMOVE) ||
                    (x->phase == PHASE_CLOSE && x->entry.leaving);
        if (!kept)
            continue;
        struct moe_added_entry *e = &s->models[s->count++];
        *e = x->entry;
        if (x->unsaved && x->save == 0)
            e->fingerprint[0] = '\0';
    }
    return s;
}
