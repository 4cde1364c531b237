/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of a common state, from the digests of all slots; see training/recovery.h. */
#include "training/recovery.h"

#include "base/guard.h"

#include <string.h>

/* A lineage that follows on another without a restart has the same weights. Some slots may have
 * begun it in an attempt that failed. */
static bool related(const struct moe_train_digest *a, const struct moe_train_digest *b)
{
    return a->lineage == b->lineage || a->earlier == b->lineage || a->lineage == b->earlier ||
           (a->earlier != 0 && a->earlier == b->earlier);
}

/* `b` lacks the Backward that `a` recorded last, and nothing else. */
static bool one_behind(const struct moe_train_digest *b, const struct moe_train_digest *a)
{
    return a->backward.id != 0 && b->calls + 1 == a->calls && b->record == a->before;
}

/* `b` lacks the change that `a` recorded last, and can finish it. Both are of the same view: a slot
 * may have begun a call that no other has got, and the others, without it, another one. */
static bool can_finish(const struct moe_train_digest *b, const struct moe_train_digest *a)
{
    bool same_weights = a->only_recorded != 0 && b->weights_version == a->weights_version;
    bool same_view = b->group == a->group && b->epoch == a->epoch;
    return same_view && a->change.id != 0 && (same_weights || b->begun == a->change.id) &&
           b->lineage == a->lineage && b->calls + 1 == a->calls && b->record == a->before;
}

/* The same weights, masters, moments and settings; the same calls, but perhaps for one Backward, or
 * for a change that one of them can finish. */
static bool same_weights(const struct moe_train_digest *a, const struct moe_train_digest *b)
{
    bool same_calls = a->calls == b->calls && a->record == b->record;
    bool same = a->weights_version == b->weights_version &&
                (same_calls || one_behind(a, b) || one_behind(b, a));
    return a->lineage != 0 && b->lineage != 0 && related(a, b) && a->inconsistent == 0 &&
           b->inconsistent == 0 && (same || can_finish(a, b) || can_finish(b, a));
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
 * that of `best`; NULL if there is none. A process without a view in force has answered nothing:
 * what it has read for a view that failed does not set it apart. */
static const struct moe_train_digest *find_apart(const struct moe_train_digest *digests,
                                                 uint64_t live, const struct moe_train_digest *best)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_digest *d = &digests[s];
        if ((live >> s & 1) != 0 && d->epoch != 0 && knows_state(d) && d->group != best->group &&
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

/* A member of the last view that was in force; of several, one that can go on, and with most calls.
 * NULL if members come from different groups: their epochs cannot be compared. */
static const struct moe_train_digest *find_latest(const struct moe_train_digest *digests,
                                                  uint64_t live)
{
    const struct moe_train_digest *latest = &digests[__builtin_ctzll(live)];
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_digest *d = &digests[s];
        if ((live >> s & 1) == 0 || d->epoch == 0)
            continue;
        if (latest->epoch != 0 && d->group != latest->group)
            return NULL;
        int order = compare(d->epoch, latest->epoch);
        order = order != 0 ? order : compare(latest->inconsistent, d->inconsistent);
        order = order != 0 ? order : compare(d->weights_version, latest->weights_version);
        order = order != 0 ? order : compare(d->calls, latest->calls);
        latest = order > 0 ? d : latest;
    }
    return latest;
}

/* Slots of `live` with the state of `best`. */
static uint64_t find_heirs(const struct moe_train_digest *digests, uint64_t live,
                           const struct moe_train_digest *best)
{
    uint64_t heirs = 0;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && same_weights(&digests[s], best))
            heirs |= UINT64_C(1) << s;
    return heirs;
}

static bool are_older(const struct moe_train_digest *digests, uint64_t slots, uint64_t epoch)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((slots >> s & 1) != 0 && digests[s].epoch >= epoch)
            return false;
    return true;
}

/* What members with the same weights have lost together. Those that finish a change are then as the
 * others are. */
static enum moe_train_loss find_loss(const struct moe_train_digest *digests, uint64_t live,
                                     uint64_t finishers)
{
    const struct moe_train_digest *first = &digests[__builtin_ctzll(live & ~finishers)];
    enum moe_train_loss loss = MOE_TRAIN_LOSS_NONE;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_digest *d = &digests[s];
        if (((live & ~finishers) >> s & 1) == 0)
            continue;
        bool whole = MOE_GUARD(ALL_PARTS_ARE_THERE, (d->gradients & ~live) == 0) &&
                     MOE_GUARD(GRADIENTS_ARE_WHOLE, d->undefined == 0);
        bool same = d->lineage == first->lineage && d->calls == first->calls;
        if (!MOE_GUARD(ANSWERS_ARE_KEPT, (d->unsettled & ~live) == 0))
            return MOE_TRAIN_LOSS_CALL;
        loss = whole && same ? loss : MOE_TRAIN_LOSS_GRADIENTS;
    }
    return loss;
}

static bool tells_last(const struct moe_train_digest *d)
{
    return d->backward.id != 0 || d->change.id != 0;
}

/* The member with most calls; of those, one that can tell the last. */
static const struct moe_train_digest *find_furthest(const struct moe_train_digest *digests,
                                                    uint64_t live)
{
    const struct moe_train_digest *furthest = &digests[__builtin_ctzll(live)];
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_digest *d = &digests[s];
        if ((live >> s & 1) == 0)
            continue;
        bool tells_more = d->calls == furthest->calls && tells_last(d) && !tells_last(furthest);
        furthest = d->calls > furthest->calls || tells_more ? d : furthest;
    }
    return furthest;
}

static uint64_t earliest_lineage(const struct moe_train_digest *digests, uint64_t live)
{
    uint64_t earliest = UINT64_MAX;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && digests[s].lineage < earliest)
            earliest = digests[s].lineage;
    return earliest;
}

/* All members have the same weights: the group keeps them. `highest`: lineage that is known. */
static void keep(const struct moe_train_digest *digests, uint64_t live, uint64_t highest,
                 struct moe_train_recovery *out)
{
    const struct moe_train_digest *furthest = find_furthest(digests, live);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && can_finish(&digests[s], furthest))
            out->finishers |= UINT64_C(1) << s;
    out->change = furthest->change;
    out->squares = furthest->squares;
    out->only_recorded = furthest->only_recorded != 0;
    out->loss = find_loss(digests, live, out->finishers);
    out->calls = furthest->calls;
    out->record = furthest->record;
    if (out->loss == MOE_TRAIN_LOSS_NONE)
        return;
    out->backward = furthest->backward;
    memcpy(out->backward_session, furthest->backward_session, sizeof out->backward_session);
    out->earlier = earliest_lineage(digests, live);
    out->lineage = next_lineage(highest, digests[__builtin_ctzll(live)].nonce);
}

struct moe_status moe_train_keep_copies(const struct moe_train_digest *digests, uint64_t live,
                                        bool covers, struct moe_train_recovery *r)
{
    uint64_t others = live & ~r->heirs;
    if (!r->restart || r->by_choice || r->heirs == 0 || others == 0 || !covers)
        return moe_ok();
    if (!r->saved && !r->older)
        return moe_ok();
    r->joiners = others;
    if (!MOE_GUARD(ONLY_WHAT_IS_SAVED, r->saved))
        return moe_error_retry(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING, 1000,
                               "slot %d lacks the state of training, which no checkpoint has yet: "
                               "it takes part after the next SaveCheckpoint",
                               __builtin_ctzll(others));
    const struct moe_train_digest *heir = &digests[__builtin_ctzll(r->heirs)];
    r->restart = false;
    r->lineage = heir->lineage;
    r->weights_version = heir->weights_version;
    memcpy(r->checkpoint, heir->checkpoint, MOE_TRAINING_NAME_MAX);
    r->explicit_load = heir->explicit_load != 0;
    r->lost_steps = 0;
    r->calls = heir->calls;
    r->record = heir->record;
    return moe_ok();
}

bool moe_train_is_ahead(const struct moe_saved_training *ahead, const struct moe_train_recovery *r)
{
    bool same = strcmp(ahead->checkpoint, r->checkpoint) == 0 && ahead->calls == r->calls &&
                ahead->record == r->record;
    return ahead->checkpoint[0] != '\0' && MOE_GUARD(AHEAD_IS_THE_STATE, same);
}

struct moe_status moe_train_choose_recovery(const struct moe_train_digest *digests, uint64_t live,
                                            struct moe_train_recovery *out)
{
    const struct moe_train_digest *first = &digests[__builtin_ctzll(live)], *best = first;
    const struct moe_train_digest *named = NULL;
    uint64_t lineage = 0, version = 0;
    bool untouched = true;
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
    if (find_heirs(digests, live, find_furthest(digests, live)) == live) {
        keep(digests, live, lineage, out);
        out->settled = best->settled != 0 && best->calls == out->calls;
        return moe_ok();
    }
    const struct moe_train_digest *apart = find_apart(digests, live, best);
    if (apart != NULL && named == NULL)
        return refuse_apart(digests, best, apart);
    out->lineage = next_lineage(lineage, first->nonce);
    out->restart = !untouched;
    if (!out->restart)
        return moe_ok();
    const struct moe_train_digest *latest = find_latest(digests, live);
    out->heirs = latest != NULL ? find_heirs(digests, live, latest) : 0;
    out->saved = out->heirs != 0 && latest->saved != 0 &&
                 find_loss(digests, out->heirs, 0) == MOE_TRAIN_LOSS_NONE;
    out->older = latest != NULL && are_older(digests, live & ~out->heirs, latest->epoch);
    out->by_choice = named != NULL;
    out->weights_version = version + 1;
    out->lost_steps = max_unsaved(digests, live, best);
    if (named != NULL)
        memcpy(out->checkpoint, named->target, MOE_TRAINING_NAME_MAX);
    out->explicit_load = out->explicit_load || named != NULL;
    return moe_ok();
}
