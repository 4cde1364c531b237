/* SPDX-License-Identifier: Apache-2.0 */
/* Agreement on the weights: passes what workers report to coordinator/weights.h, refuses those with
 * other bytes, and keeps the record in the state directory. */
#include "coordinator/service_state.h"

#include <stdlib.h>
#include <string.h>

/* Makes the digests of a model, and reads their record. */
static struct moe_status restore(struct moe_coordinator *c, uint32_t model,
                                 struct moe_weights **out)
{
    struct moe_membership_group g;
    uint8_t *image = NULL;
    size_t length = 0;
    moe_membership_group(c->machine, &g);
    MOE_TRY(moe_weights_create(g.slots,
                               model == 0 ? "end all workers, then `moectl model accept`"
                                          : "unload the model and load it again",
                               out));
    if (c->store == NULL)
        return moe_ok();
    MOE_TRY(moe_store_read(c->store, model, MOE_WEIGHTS_IMAGE_MAX_BYTES, &image, &length));
    if (image == NULL)
        return moe_ok();
    struct moe_status st = moe_weights_decode(*out, image, length);
    free(image);
    return model == 0 ? moe_error_context(st, MOE_STORE_IMAGE)
                      : moe_error_context(st, MOE_STORE_IMAGE ".%u", model);
}

static struct added_weights *find_added(struct moe_coordinator *c, uint32_t number)
{
    for (size_t i = 0; i < MOE_ADDED_MAX; i++)
        if (c->added[i].number == number)
            return &c->added[i];
    return NULL;
}

/* Of a model that the machine has; made when it is needed first. */
static struct moe_status get_added(struct moe_coordinator *c, uint32_t number,
                                   struct added_weights **out)
{
    *out = find_added(c, number);
    if (*out != NULL)
        return moe_ok();
    *out = find_added(c, 0);
    if (*out == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "too many models");
    struct moe_weights *w = NULL;
    struct moe_status st = restore(c, number, &w);
    if (moe_failed(&st)) {
        moe_weights_destroy(w);
        return st;
    }
    **out = (struct added_weights){.number = number, .weights = w};
    return st;
}

struct moe_status moe_coordinator__restore_weights(struct moe_coordinator *c)
{
    struct moe_added_info info;
    struct added_weights *added;
    MOE_TRY(restore(c, 0, &c->weights));
    if (moe_weights_digest(c->weights, NULL)[0] != '\0')
        moe_log_info("the group's model has digest %s", moe_weights_digest(c->weights, NULL));
    for (size_t i = 0; moe_added_info(c->models, i, &info); i++)
        MOE_TRY(get_added(c, info.number, &added));
    return moe_ok();
}

void moe_coordinator__destroy_weights(struct moe_coordinator *c)
{
    moe_weights_destroy(c->weights);
    for (size_t i = 0; i < MOE_ADDED_MAX; i++)
        moe_weights_destroy(c->added[i].weights);
}

static struct moe_status save(struct moe_coordinator *c, uint32_t model,
                              const struct moe_weights *w, bool *unsaved)
{
    uint8_t *image = NULL;
    size_t length = 0;
    if (!*unsaved || c->store == NULL)
        return moe_ok();
    MOE_TRY(moe_weights_encode(w, &image, &length));
    struct moe_status st = moe_store_write(c->store, model, image, length);
    free(image);
    *unsaved = moe_failed(&st);
    return st;
}

struct moe_status moe_coordinator__save_weights(struct moe_coordinator *c)
{
    MOE_TRY(save(c, 0, c->weights, &c->weights_unsaved));
    for (size_t i = 0; i < MOE_ADDED_MAX; i++)
        MOE_TRY(save(c, c->added[i].number, c->added[i].weights, &c->added[i].unsaved));
    return moe_ok();
}

const char *moe_coordinator__added_digest(const struct moe_coordinator *c,
                                          const struct moe_added_info *info)
{
    for (size_t i = 0; i < MOE_ADDED_MAX; i++)
        if (c->added[i].number == info->number)
            return moe_weights_digest(c->added[i].weights, info->fingerprint);
    return "";
}

void moe_coordinator__forget_added(struct moe_coordinator *c, uint32_t number)
{
    struct added_weights *added = find_added(c, number);
    if (added != NULL) {
        moe_weights_destroy(added->weights);
        *added = (struct added_weights){0};
    }
    struct moe_status st = c->store != NULL ? moe_store_write(c->store, number, NULL, 0) : moe_ok();
    if (moe_failed(&st)) /* the file stays: its number is never given again */
        moe_log_warn("%s", st.text);
}

static void forget_lost(struct moe_coordinator *c)
{
    struct moe_membership_group g;
    uint64_t incarnations[MOE_PLACEMENT_SLOTS_MAX] = {0};
    moe_membership_group(c->machine, &g);
    for (uint32_t s = 0; s < g.slots; s++) {
        struct moe_membership_worker w;
        if (moe_membership_worker(c->machine, s, &w) && w.taken)
            incarnations[s] = w.incarnation;
    }
    moe_weights_keep(c->weights, incarnations);
    for (size_t i = 0; i < MOE_ADDED_MAX; i++)
        if (c->added[i].weights != NULL)
            moe_weights_keep(c->added[i].weights, incarnations);
}

/* The slot of a stream, and the process there; what lost processes have reported is forgotten. */
static bool find_reporter(struct moe_coordinator *c, uint64_t stream, uint32_t *slot,
                          uint64_t *incarnation)
{
    struct moe_membership_worker w;
    if (!moe_membership_slot_of(c->machine, stream, slot) ||
        !moe_membership_worker(c->machine, *slot, &w))
        return false;
    *incarnation = w.incarnation;
    forget_lost(c);
    return true;
}

/* Digests of an added model that the slot is not asked to load, or not any more, are ignored. */
static struct moe_status add_part(struct moe_coordinator *c, uint32_t slot, uint64_t incarnation,
                                  uint32_t model, const uint8_t *part, size_t length)
{
    struct moe_added_info info;
    struct added_weights *added;
    if (model == 0)
        return moe_weights_add_part(c->weights, slot, incarnation,
                                    moe_membership_placement(c->machine), part, length);
    if (!moe_added_awaits_load(c->models, slot, model, 0) ||
        !moe_added_find(c->models, model, &info))
        return moe_ok();
    MOE_TRY(get_added(c, model, &added));
    return moe_weights_add_part(added->weights, slot, incarnation, info.placement, part, length);
}

struct moe_status moe_coordinator__compare_added(struct moe_coordinator *c, uint32_t slot,
                                                 const struct moe_added_info *info)
{
    struct moe_membership_worker w;
    struct added_weights *added;
    bool begun = false;
    forget_lost(c);
    MOE_INVARIANT(moe_membership_worker(c->machine, slot, &w));
    MOE_TRY(get_added(c, info->number, &added));
    MOE_TRY(moe_weights_check(added->weights, slot, w.incarnation, info->fingerprint,
                              info->placement, &begun));
    if (begun) {
        added->unsaved = true;
        moe_log_info("model %s has digest %s", info->name,
                     moe_weights_digest(added->weights, info->fingerprint));
    }
    return moe_ok();
}

struct moe_status moe_coordinator__compare_fetched(struct moe_coordinator *c, uint32_t slot,
                                                   const struct moe_placement *p)
{
    struct moe_membership_worker w;
    forget_lost(c);
    MOE_INVARIANT(moe_membership_worker(c->machine, slot, &w));
    return moe_weights_check_more(c->weights, slot, w.incarnation, p);
}

void moe_coordinator__receive_digests(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                      uint32_t model, const uint8_t *part, size_t length)
{
    uint32_t slot;
    uint64_t incarnation;
    struct moe_status st = moe_ok();
    if (find_reporter(c, stream, &slot, &incarnation))
        st = add_part(c, slot, incarnation, model, part, length);
    if (moe_failed(&st))
        moe_membership_on_wrong_weights(c->machine, now_ns, stream, &st);
    else
        moe_membership_on_digests(c->machine, now_ns, stream);
}

/* Without a slot, or for an assignment that is over, there is nothing to compare. */
static struct moe_status compare(struct moe_coordinator *c, uint64_t stream, uint32_t version,
                                 uint64_t order)
{
    struct moe_membership_group g;
    uint32_t slot;
    uint64_t incarnation;
    bool begun = false;
    if (!find_reporter(c, stream, &slot, &incarnation) ||
        !moe_membership_awaits(c->machine, slot, version, order))
        return moe_ok();
    moe_membership_group(c->machine, &g);
    const char *before = moe_weights_digest(c->weights, NULL);
    bool another = before[0] != '\0' && moe_weights_digest(c->weights, g.fingerprint)[0] == '\0';
    MOE_TRY(moe_weights_check(c->weights, slot, incarnation, g.fingerprint,
                              moe_membership_find_placement(c->machine, version), &begun));
    if (!begun)
        return moe_ok();
    moe_log_info("%s %s has digest %s", another ? "another model is served from now on:" : "model",
                 g.model, moe_weights_digest(c->weights, g.fingerprint));
    c->weights_unsaved = true;
    return moe_ok();
}

void moe_coordinator__receive_loaded(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                     const Moe__V1__Loaded *loaded, const struct moe_status *error)
{
    struct moe_status st = moe_ok();
    if (!moe_failed(error))
        st = compare(c, stream, loaded->placement_version, loaded->order);
    if (moe_failed(&st))
        moe_membership_on_wrong_weights(c->machine, now_ns, stream, &st);
    else
        moe_membership_on_loaded(c->machine, now_ns, stream, loaded->placement_version,
                                 loaded->order, error);
}

/* The record of an added model, and what its files have to be. */
static struct moe_status forget_files(struct moe_coordinator *c, const char *model,
                                      char forgotten[MOE_SHA256_HEX])
{
    struct moe_added_info info;
    uint32_t number;
    if (!moe_added_find_name(c->models, model, &info))
        return moe_error(MOE_NOT_FOUND, MOE_REASON_MODEL_NOT_FOUND, "no model has this name");
    strcpy(forgotten, moe_coordinator__added_digest(c, &info));
    MOE_INVARIANT(moe_added_forget_files(c->models, model, &number));
    moe_coordinator__forget_added(c, number);
    return moe_coordinator__save(c);
}

static struct moe_status forget_default(struct moe_coordinator *c, char forgotten[MOE_SHA256_HEX])
{
    if (c->store != NULL)
        MOE_TRY(moe_store_write(c->store, 0, NULL, 0));
    strcpy(forgotten, moe_weights_digest(c->weights, NULL));
    moe_weights_forget(c->weights);
    c->weights_unsaved = false;
    return moe_ok();
}

struct moe_status moe_coordinator__accept_model(struct moe_coordinator *c, const char *model,
                                                const char *reason, char forgotten[MOE_SHA256_HEX])
{
    struct moe_membership_group g;
    if (reason[0] == '\0')
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NONE, "a reason is required");
    moe_membership_group(c->machine, &g);
    for (uint32_t s = 0; s < g.slots; s++) {
        struct moe_membership_worker w;
        if (moe_membership_worker(c->machine, s, &w) && w.taken)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                             "slot %u has a worker: end all workers first", s);
    }
    if (model[0] == '\0' || strcmp(model, g.model) == 0)
        MOE_TRY(forget_default(c, forgotten));
    else
        MOE_TRY(forget_files(c, model, forgotten));
    char clean[MOE_MEMBERSHIP_REASON_BYTES], text[MOE_STATUS_TEXT];
    moe_membership_copy_text(clean, sizeof clean, reason);
    (void)snprintf(text, sizeof text, "the digests of %s are forgotten: %s",
                   model[0] != '\0' ? model : "the model", clean);
    moe_coordinator__note(c, MOE_LOG_INFO, MOE_EVENT_MODEL_ACCEPTED, MOE_MEMBERSHIP_NO_SLOT, text);
    return moe_ok();
}
