/* SPDX-License-Identifier: Apache-2.0 */
/* Policy and index of retained steps; see activations/activations.h. The index is
 * activation_index.c. */
#include "activations/activations.h"

#include "activations/activation_index.h"
#include "base/clock.h"
#include "base/mutex.h"

#include <stdlib.h>
#include <string.h>

/* After this many misses in a row stop retaining; try again after this many further requests. */
enum { RETAIN_MISSES_MAX = 8, RETAIN_SKIPS = 64 };

struct moe_activations {
    struct moe_activations_config config;

    struct moe_mutex lock; /* of the next three lines */
    uint64_t bytes, limit;
    uint32_t retain_misses[2]; /* [is F32] steps of this slot in a row that left nothing here */
    uint32_t retain_skips[2];  /* [is F32] requests since then that got no separate step */

    /* The engine's thread only. */
    struct moe_activation_index index;
    bool in_use; /* a Backward's pass runs: of (used_session, used_id) */
    char used_session[MOE_TRAINING_NAME_MAX + 1];
    uint64_t used_id;
};

struct moe_status moe_activations_create(const struct moe_activations_config *config,
                                         struct moe_activations **out)
{
    struct moe_activations *a = calloc(1, sizeof *a);
    if (a == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the index of activations");
    moe_mutex_init(&a->lock);
    a->config = *config;
    moe_mutex_not_shared(&a->lock);
    a->limit = config->limit;
    *out = a;
    return moe_ok();
}

void moe_activations_destroy(struct moe_activations *a)
{
    if (a == NULL)
        return;
    moe_mutex_destroy(&a->lock);
    free(a);
}

/* --------------------------------------------------------------------------- numbers */

static void set_bytes(struct moe_activations *a, uint64_t bytes)
{
    moe_mutex_lock(&a->lock);
    a->bytes = bytes;
    moe_mutex_unlock(&a->lock);
}

static void read_bytes(struct moe_activations *a)
{
    set_bytes(a, a->config.backend->training->retained_bytes(a->config.device));
}

void moe_activations_set_limit(struct moe_activations *a, uint64_t bytes)
{
    moe_mutex_lock(&a->lock);
    a->limit = bytes;
    moe_mutex_unlock(&a->lock);
    a->config.backend->training->retained_limit(a->config.device, bytes);
    a->index.count = 0;
    read_bytes(a);
}

uint64_t moe_activations_limit(struct moe_activations *a)
{
    moe_mutex_lock(&a->lock);
    uint64_t limit = a->limit;
    moe_mutex_unlock(&a->lock);
    return limit;
}

uint64_t moe_activations_bytes(struct moe_activations *a)
{
    moe_mutex_lock(&a->lock);
    uint64_t bytes = a->bytes;
    moe_mutex_unlock(&a->lock);
    return bytes;
}

/* ---------------------------------------------------------------------------- policy */

bool moe_activations_are_worth(struct moe_activations *a, enum moe_dtype dtype, uint32_t tokens)
{
    if (tokens < MOE_ACTIVATIONS_TOKENS_MIN)
        return false;
    bool wide = dtype == MOE_DTYPE_F32;
    moe_mutex_lock(&a->lock);
    bool worth = a->limit > 0;
    if (worth && a->retain_misses[wide] >= RETAIN_MISSES_MAX) {
        a->retain_skips[wide] = (a->retain_skips[wide] + 1) % RETAIN_SKIPS;
        worth = a->retain_skips[wide] == 0;
    }
    moe_mutex_unlock(&a->lock);
    return worth;
}

static void note_success(struct moe_activations *a, const struct moe_retained_step *step)
{
    bool wide = step->dtype == MOE_DTYPE_F32;
    if (!step->asked_here)
        return;
    moe_mutex_lock(&a->lock);
    a->retain_misses[wide] = step->retained ? 0 : a->retain_misses[wide] + 1;
    moe_mutex_unlock(&a->lock);
}

/* ----------------------------------------------------------------------------- index */

static void drop_step(struct moe_activations *a, uint32_t layer, uint64_t name)
{
    for (size_t i = 0; i < a->config.layer_count; i++)
        if (a->config.specs[i]->layer == layer && a->config.trainers[i] != NULL)
            a->config.backend->training->retained_drop(a->config.trainers[i], name);
}

static void drop_of(struct moe_activations *a, const char *session, uint64_t id, bool busy_too)
{
    struct moe_activation_entry step;
    while (moe_activation_index_take(&a->index, session, id, busy_too, &step))
        drop_step(a, step.layer, step.name);
}

static bool is_in_use(const struct moe_activations *a, const struct moe_retained_step *step)
{
    return a->in_use && a->used_id == step->id && strcmp(a->used_session, step->session) == 0;
}

static void add_step(struct moe_activations *a, const struct moe_retained_step *from)
{
    struct moe_activation_entry oldest;
    if (moe_activation_index_full(&a->index) &&
        moe_activation_index_take_old(&a->index, MOE_NEVER, &oldest))
        drop_step(a, oldest.layer, oldest.name);
    if (from->used || moe_activation_index_full(&a->index)) {
        drop_step(a, from->layer, from->name);
        return;
    }
    struct moe_activation_entry step = {.id = from->id,
                                        .layer = from->layer,
                                        .name = from->name,
                                        .expires_ns = moe_clock_ns() + a->config.keep_ns};
    strncpy(step.session, from->session, MOE_TRAINING_NAME_MAX);
    /* On a slot that was not asked, the Backward may have begun before this step has ended. */
    step.busy = is_in_use(a, from);
    moe_activation_index_add(&a->index, &step);
}

void moe_activations_note(struct moe_activations *a, const struct moe_retained_step *step)
{
    /* A repeat of the same pass: the client has not got the first answer. */
    drop_of(a, step->session, step->id, false);
    if (step->retained)
        add_step(a, step);
    note_success(a, step);
    read_bytes(a);
}

void moe_activations_note_empty(struct moe_activations *a, uint32_t layer, uint64_t name)
{
    drop_step(a, layer, name);
    read_bytes(a);
}

void moe_activations_set_use(struct moe_activations *a, const char *session, uint64_t id, bool used)
{
    moe_activation_index_set_busy(&a->index, session, id, used);
    a->in_use = used;
    a->used_id = id;
    memset(a->used_session, 0, sizeof a->used_session);
    strncpy(a->used_session, session, MOE_TRAINING_NAME_MAX);
}

void moe_activations_drop(struct moe_activations *a, const char *session, uint64_t id)
{
    drop_of(a, session, id, true);
    a->in_use = false; /* one pass runs at a time: this one, or none while a repeat is answered */
    read_bytes(a);
}

void moe_activations_drop_all(struct moe_activations *a)
{
    for (size_t i = 0; i < a->config.layer_count; i++)
        if (a->config.trainers[i] != NULL)
            a->config.backend->training->retained_drop(a->config.trainers[i], 0);
    moe_activations_forget(a);
}

void moe_activations_forget(struct moe_activations *a)
{
    a->index.count = 0;
    a->in_use = false;
    set_bytes(a, 0);
}

void moe_activations_expire(struct moe_activations *a, uint64_t now)
{
    struct moe_activation_entry step;
    if (moe_activations_next_expiry(a) > now)
        return;
    while (moe_activation_index_take_old(&a->index, now, &step))
        drop_step(a, step.layer, step.name);
    read_bytes(a);
}

uint64_t moe_activations_next_expiry(const struct moe_activations *a)
{
    return moe_activation_index_next(&a->index);
}
