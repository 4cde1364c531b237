/* SPDX-License-Identifier: Apache-2.0 */
/* Agreement on the weights: passes what workers report to coordinator/weights.h, refuses those with
 * other bytes, and keeps the record in the state directory. */
#include "coordinator/service_state.h"

#include <stdlib.h>
#include <string.h>

struct moe_status moe_coordinator__restore_weights(struct moe_coordinator *c)
{
    struct moe_membership_group g;
    uint8_t *image = NULL;
    size_t length = 0;
    moe_membership_group(c->machine, &g);
    MOE_TRY(moe_weights_create(g.slots, &c->weights));
    if (c->store == NULL)
        return moe_ok();
    MOE_TRY(moe_store_read_weights(c->store, &image, &length));
    if (image == NULL)
        return moe_ok();
    struct moe_status st = moe_weights_decode(c->weights, image, length);
    free(image);
    if (!moe_failed(&st))
        moe_log_info("the group's model has digest %s", moe_weights_digest(c->weights, NULL));
    return moe_error_context(st, MOE_STORE_WEIGHTS);
}

struct moe_status moe_coordinator__save_weights(struct moe_coordinator *c)
{
    uint8_t *image = NULL;
    size_t length = 0;
    if (!c->weights_unsaved || c->store == NULL)
        return moe_ok();
    MOE_TRY(moe_weights_encode(c->weights, &image, &length));
    struct moe_status st = moe_store_write_weights(c->store, image, length);
    free(image);
    c->weights_unsaved = moe_failed(&st);
    return st;
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

void moe_coordinator__receive_digests(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                      const uint8_t *part, size_t length)
{
    uint32_t slot;
    uint64_t incarnation;
    struct moe_status st = moe_ok();
    if (find_reporter(c, stream, &slot, &incarnation))
        st = moe_weights_add_part(c->weights, slot, incarnation,
                                  moe_membership_placement(c->machine), part, length);
    if (moe_failed(&st))
        moe_membership_on_wrong_weights(c->machine, now_ns, stream, &st);
    else
        moe_membership_on_digests(c->machine, now_ns, stream);
}

/* Without a slot, or for an assignment that is over, there is nothing to compare. */
static struct moe_status compare(struct moe_coordinator *c, uint64_t stream, uint32_t version)
{
    struct moe_membership_group g;
    uint32_t slot;
    uint64_t incarnation;
    bool begun = false;
    if (!find_reporter(c, stream, &slot, &incarnation) ||
        !moe_membership_awaits(c->machine, slot, version))
        return moe_ok();
    moe_membership_group(c->machine, &g);
    const char *before = moe_weights_digest(c->weights, NULL);
    bool another = before[0] != '\0' && moe_weights_digest(c->weights, g.fingerprint)[0] == '\0';
    MOE_TRY(moe_weights_check(c->weights, slot, incarnation, g.fingerprint,
                              moe_membership_placement(c->machine), &begun));
    if (!begun)
        return moe_ok();
    moe_log_info("%s %s has digest %s", another ? "another model is served from now on:" : "model",
                 g.model, moe_weights_digest(c->weights, g.fingerprint));
    c->weights_unsaved = true;
    return moe_ok();
}

void moe_coordinator__receive_loaded(struct moe_coordinator *c, uint64_t now_ns, uint64_t stream,
                                     uint32_t version, const struct moe_status *error)
{
    struct moe_status st = moe_ok();
    if (!moe_failed(error))
        st = compare(c, stream, version);
    if (moe_failed(&st))
        moe_membership_on_wrong_weights(c->machine, now_ns, stream, &st);
    else
        moe_membership_on_loaded(c->machine, now_ns, stream, version, error);
}

struct moe_status moe_coordinator__accept_model(struct moe_coordinator *c, const char *reason,
                                                char forgotten[MOE_SHA256_HEX])
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
    if (c->store != NULL)
        MOE_TRY(moe_store_write_weights(c->store, NULL, 0));
    strcpy(forgotten, moe_weights_digest(c->weights, NULL));
    moe_weights_forget(c->weights);
    c->weights_unsaved = false;
    char clean[MOE_MEMBERSHIP_REASON_BYTES], text[MOE_STATUS_TEXT];
    moe_membership_copy_text(clean, sizeof clean, reason);
    (void)snprintf(text, sizeof text, "the digests of the model are forgotten: %s", clean);
    moe_coordinator__note(c, MOE_LOG_INFO, MOE_EVENT_MODEL_ACCEPTED, MOE_MEMBERSHIP_NO_SLOT, text);
    return moe_ok();
}
