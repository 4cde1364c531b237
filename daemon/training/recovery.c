/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of a common state, from the digests of all slots; see training/recovery.h. */
#include "training/recovery.h"

#include <string.h>

static bool same_state(const struct moe_train_digest *a, const struct moe_train_digest *b)
{
    return a->lineage == b->lineage && a->weights_version == b->weights_version &&
           a->calls == b->calls && a->record == b->record && a->inconsistent == 0 &&
           b->inconsistent == 0;
}

/* 1, 0 or -1: a > b, a == b, a < b. */
static int compare(uint64_t a, uint64_t b)
{
    return (a > b) - (a < b);
}

/* It names a state to go back to: a checkpoint, or the model as loaded if somebody chose that. */
static bool knows_state(const struct moe_train_digest *d)
{
    return d->checkpoint[0] != '\0' || d->explicit_load != 0;
}

/* A known state counts first: a member without one has nothing to go back to. Then the latest view
 * of the group: changes under it were taken after those of an earlier view. In it, the slot with
 * most calls of the latest lineage knows the latest checkpoint. Of two with the same calls, only
 * one may have noted a checkpoint: a view can end between. The remaining comparisons make the
 * choice independent of the slots' order. */
static bool knows_more(const struct moe_train_digest *a, const struct moe_train_digest *b)
{
    const int by[] = {
        compare(knows_state(a), knows_state(b)),
        compare(a->group, b->group),
        compare(a->epoch, b->epoch),
        compare(a->lineage, b->lineage),
        compare(a->calls, b->calls),
        compare(b->unsaved, a->unsaved),
        compare(a->weights_version, b->weights_version),
        compare(a->record, b->record),
        strcmp(a->checkpoint, b->checkpoint),
        compare(a->explicit_load, b->explicit_load),
    };
    for (size_t i = 0; i < sizeof by / sizeof *by; i++)
        if (by[i] != 0)
            return by[i] > 0;
    return false;
}

/* The most steps that a member had beyond its checkpoint. In the lineage of `best`, another
 * checkpoint is an older one: the latest has some of those steps, and `best` counts the others. */
static uint64_t max_unsaved(const struct moe_train_digest *digests, uint64_t live,
                            const struct moe_train_digest *best)
{
    uint64_t most = best->unsaved;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_digest *d = &digests[s];
        bool counts = d->lineage != best->lineage || strcmp(d->checkpoint, best->checkpoint) == 0;
        if ((live >> s & 1) != 0 && counts && d->unsaved > most)
            most = d->unsaved;
    }
    return most;
}

/* Epochs of two groups cannot be compared: a member of another group with another known state than
 * that of `best`; NULL if there is none. */
static const struct moe_train_digest *find_apart(const struct moe_train_digest *digests,
                                                 uint64_t live, const struct moe_train_digest *best)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_digest *d = &digests[s];
        if ((live >> s & 1) != 0 && knows_state(d) && d->group != best->group &&
            strcmp(d->checkpoint, best->checkpoint) != 0)
            return d;
    }
    return NULL;
}

static struct moe_status refuse_apart(const struct moe_train_digest *digests,
                                      const struct moe_train_digest *a,
                                      const struct moe_train_digest *b)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CANNOT_GO_BACK,
                     "slots %d and %d come from groups that began apart: %s or %s?",
                     (int)((a < b ? a : b) - digests), (int)((a < b ? b : a) - digests),
                     moe_train_recovery_name((a < b ? a : b)->checkpoint),
                     moe_train_recovery_name((a < b ? b : a)->checkpoint));
}

enum { FIRST_LINEAGE_BITS = 32, LINEAGE_STEP_BITS = 16 };

static uint64_t next_lineage(uint64_t highest, uint64_t nonce)
{
    uint64_t bits = highest == 0 ? FIRST_LINEAGE_BITS : LINEAGE_STEP_BITS;
    return highest + 1 + nonce % ((UINT64_C(1) << bits) - 1);
}

const char *moe_train_recovery_name(const char *checkpoint)
{
    return checkpoint[0] != '\0' ? checkpoint : "the model as loaded";
}

struct moe_status moe_train_choose_recovery(const struct moe_train_digest *digests, uint64_t live,
                                            struct moe_train_recovery *out)
{
    const struct moe_train_digest *first = &digests[__builtin_ctzll(live)], *best = first;
    const struct moe_train_digest *named = NULL;
    uint64_t lineage = 0, version = 0;
    bool same = true, untouched = true;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_digest *digest = &digests[s];
        if ((live >> s & 1) == 0)
            continue;
        if (digest->config != first->config)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                             "slot %u was started with other settings of training than slot %d", s,
                             __builtin_ctzll(live));
        lineage = digest->lineage > lineage ? digest->lineage : lineage;
        version = digest->weights_version > version ? digest->weights_version : version;
        same = same && same_state(digest, first);
        untouched = untouched && digest->weights_version == 1 && digest->calls == 0 &&
                    digest->inconsistent == 0;
        if (knows_more(digest, best))
            best = digest;
        if (digest->has_target != 0 && named != NULL && strcmp(digest->target, named->target) != 0)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CANNOT_GO_BACK,
                             "workers got different recovery targets: %s and %s",
                             moe_train_recovery_name(named->target),
                             moe_train_recovery_name(digest->target));
        named = digest->has_target != 0 ? digest : named;
    }
    *out = (struct moe_train_recovery){.lineage = lineage, .weights_version = version};
    memcpy(out->checkpoint, best->checkpoint, MOE_TRAINING_NAME_MAX);
    out->lost_steps = best->unsaved;
    out->explicit_load = best->explicit_load != 0;
    if (same && lineage != 0)
        return moe_ok();
    const struct moe_train_digest *apart = find_apart(digests, live, best);
    if (apart != NULL && named == NULL)
        return refuse_apart(digests, best, apart);
    out->lineage = next_lineage(lineage, first->nonce);
    out->restart = !untouched;
    if (!out->restart)
        return moe_ok();
    out->weights_version = version + 1;
    out->lost_steps = max_unsaved(digests, live, best);
    if (named != NULL)
        memcpy(out->checkpoint, named->target, MOE_TRAINING_NAME_MAX);
    out->explicit_load = out->explicit_load || named != NULL;
    return moe_ok();
}
