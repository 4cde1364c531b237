/* SPDX-License-Identifier: Apache-2.0 */
/* What the slots of a forming group make of where they all stand; see training/recovery.h. */
#include "training/recovery.h"

#include <string.h>

static bool same_state(const struct moe_train_stand *a, const struct moe_train_stand *b)
{
    return a->lineage == b->lineage && a->weights_version == b->weights_version &&
           a->calls == b->calls && a->record == b->record && a->torn == 0 && b->torn == 0;
}

/* Who knows more of the latest lineage knows the latest checkpoint. Of two that know the same
 * calls, one may have taken note of a checkpoint that the other has not: a view can end between. */
static bool knows_more(const struct moe_train_stand *a, const struct moe_train_stand *b)
{
    if (a->lineage != b->lineage)
        return a->lineage > b->lineage;
    if (a->calls != b->calls)
        return a->calls > b->calls;
    return a->unsaved < b->unsaved;
}

enum { FIRST_LINEAGE_BITS = 32, LINEAGE_STEP_BITS = 16 };

static uint64_t next_lineage(uint64_t highest, uint64_t fresh)
{
    uint64_t bits = highest == 0 ? FIRST_LINEAGE_BITS : LINEAGE_STEP_BITS;
    return highest + 1 + fresh % ((UINT64_C(1) << bits) - 1);
}

const char *moe_train_recovery_name(const char *checkpoint)
{
    return checkpoint[0] != '\0' ? checkpoint : "the model as loaded";
}

struct moe_status moe_train_decide(const struct moe_train_stand *stands, uint64_t live,
                                   struct moe_train_decision *out)
{
    const struct moe_train_stand *first = &stands[__builtin_ctzll(live)], *best = first;
    const struct moe_train_stand *told = NULL;
    uint64_t lineage = 0, version = 0;
    bool same = true, untouched = true;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_train_stand *stand = &stands[s];
        if ((live >> s & 1) == 0)
            continue;
        if (stand->config != first->config)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                             "slot %u was started with other settings of training than slot %d", s,
                             __builtin_ctzll(live));
        lineage = stand->lineage > lineage ? stand->lineage : lineage;
        version = stand->weights_version > version ? stand->weights_version : version;
        same = same && same_state(stand, first);
        untouched =
            untouched && stand->weights_version == 1 && stand->calls == 0 && stand->torn == 0;
        if (knows_more(stand, best))
            best = stand;
        if (stand->chosen != 0 && told != NULL && strcmp(stand->choice, told->choice) != 0)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CANNOT_GO_BACK,
                             "workers were told to recover from %s and from %s",
                             moe_train_recovery_name(told->choice),
                             moe_train_recovery_name(stand->choice));
        told = stand->chosen != 0 ? stand : told;
    }
    *out = (struct moe_train_decision){.lineage = lineage, .weights_version = version};
    memcpy(out->checkpoint, best->checkpoint, MOE_TRAINING_NAME_MAX);
    out->lost_steps = best->unsaved;
    out->told = best->told != 0;
    if (same && lineage != 0)
        return moe_ok();
    out->lineage = next_lineage(lineage, first->fresh);
    out->restart = !untouched;
    if (!out->restart)
        return moe_ok();
    out->weights_version = version + 1;
    if (told != NULL)
        memcpy(out->checkpoint, told->choice, MOE_TRAINING_NAME_MAX);
    out->told = out->told || told != NULL;
    return moe_ok();
}
