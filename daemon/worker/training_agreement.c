/* From which state a forming group goes on: where each slot stands, what all of them decide, and
 * how this one gets there; see worker/training.h. */
#include "worker/training_state.h"

#include "base/log.h"

#include <string.h>

void moe_train_stand(struct moe_train *t, struct moe_train_stand *out)
{
    *out = (struct moe_train_stand){0};
    if (t == NULL)
        return;
    pthread_mutex_lock(&t->lock);
    out->config = t->config_hash;
    out->lineage = t->lineage;
    out->weights_version = t->weights_version;
    out->calls = moe_ledger_count(t->ledger);
    out->record = moe_ledger_hash(t->ledger);
    out->fresh = t->writer;
    out->torn = t->torn;
    out->unsaved = t->unsaved;
    memcpy(out->checkpoint, t->checkpoint, sizeof t->checkpoint);
    out->told = moe_checkpoint_told_has(&t->told, t->checkpoint);
    out->chosen = t->chosen;
    memcpy(out->choice, t->choice, sizeof t->choice);
    pthread_mutex_unlock(&t->lock);
}

void moe_train_choose(struct moe_train *t, const char *checkpoint)
{
    pthread_mutex_lock(&t->lock);
    t->chosen = true;
    memset(t->choice, 0, sizeof t->choice);
    strncpy(t->choice, checkpoint, MOE_TRAINING_NAME_MAX);
    pthread_mutex_unlock(&t->lock);
}

static bool same_state(const struct moe_train_stand *a, const struct moe_train_stand *b)
{
    return a->lineage == b->lineage && a->weights_version == b->weights_version &&
           a->calls == b->calls && a->record == b->record && a->torn == 0 && b->torn == 0;
}

/* Who knows more of the latest lineage knows the latest checkpoint. */
static bool knows_more(const struct moe_train_stand *a, const struct moe_train_stand *b)
{
    if (a->lineage != b->lineage)
        return a->lineage > b->lineage;
    return a->calls > b->calls;
}

enum { FIRST_LINEAGE_BITS = 32, LINEAGE_STEP_BITS = 16 };

static uint64_t next_lineage(uint64_t highest, uint64_t fresh)
{
    uint64_t bits = highest == 0 ? FIRST_LINEAGE_BITS : LINEAGE_STEP_BITS;
    return highest + 1 + fresh % ((UINT64_C(1) << bits) - 1);
}

static const char *name_or_model(const char *checkpoint)
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
                             name_or_model(told->choice), name_or_model(stand->choice));
        told = stand->chosen != 0 ? stand : told;
    }
    *out = (struct moe_train_decision){.lineage = lineage, .weights_version = version};
    if (same && lineage != 0)
        return moe_ok();
    out->lineage = next_lineage(lineage, first->fresh);
    out->restart = !untouched;
    if (!out->restart)
        return moe_ok();
    out->weights_version = version + 1;
    out->lost_steps = best->unsaved;
    memcpy(out->checkpoint, told != NULL ? told->choice : best->checkpoint, MOE_TRAINING_NAME_MAX);
    out->told = told != NULL || best->told != 0;
    return moe_ok();
}

void moe_train__begin_lineage(struct moe_train *t, uint64_t lineage, uint64_t version)
{
    t->lineage = lineage;
    t->weights_version = version;
    t->backwards = 0;
    moe_saved_clear(t->passes);
    moe_saved_clear(t->answers);
}

/* The layers are as loaded, and so are the trainers. */
static struct moe_status restart(struct moe_train *t, const struct moe_train_decision *d)
{
    pthread_mutex_lock(&t->lock);
    moe_train__begin_lineage(t, d->lineage, d->weights_version);
    moe_ledger_reset(t->ledger);
    /* Where it could not go there, the next try has to tell of the same steps. */
    t->lost_steps = d->lost_steps > t->lost_steps ? d->lost_steps : t->lost_steps;
    t->steps = t->unsaved = 0;
    t->frozen = t->config.trainer.frozen;
    memset(t->checkpoint, 0, sizeof t->checkpoint);
    memcpy(t->checkpoint, d->checkpoint, MOE_TRAINING_NAME_MAX);
    if (d->told && d->checkpoint[0] != '\0')
        moe_checkpoint_told_add(&t->told, d->checkpoint);
    t->torn = true;
    pthread_mutex_unlock(&t->lock);
    if (d->checkpoint[0] != '\0')
        MOE_TRY(moe_train__load_checkpoint(t));
    pthread_mutex_lock(&t->lock);
    t->torn = false;
    t->went_back = true;
    pthread_mutex_unlock(&t->lock);
    return moe_ok();
}

void moe_train_in_force(struct moe_train *t)
{
    pthread_mutex_lock(&t->lock);
    bool went_back = t->went_back;
    bool to_model = t->checkpoint[0] == '\0';
    uint64_t lost = t->lost_steps;
    t->went_back = false;
    t->lost_steps = went_back ? 0 : lost;
    if (went_back)
        moe_log_warn("training went back to %s%s: %llu optimizer step%s that no checkpoint had %s "
                     "lost; lineage %llu, version %llu",
                     to_model ? "the model as loaded" : "checkpoint ", t->checkpoint,
                     (unsigned long long)lost, lost == 1 ? "" : "s", lost == 1 ? "is" : "are",
                     (unsigned long long)t->lineage, (unsigned long long)t->weights_version);
    pthread_mutex_unlock(&t->lock);
    if (went_back && t->metrics.lost != NULL)
        moe_counter_add(t->metrics.lost, lost);
}

void moe_train_note_problem(struct moe_train *t, const char *why)
{
    pthread_mutex_lock(&t->lock);
    memset(t->problem, 0, sizeof t->problem);
    strncpy(t->problem, why, sizeof t->problem - 1);
    pthread_mutex_unlock(&t->lock);
}

struct moe_status moe_train_adopt(struct moe_train *t, const struct moe_train_decision *d,
                                  uint32_t slot, uint32_t slots, uint64_t live)
{
    moe_train__end_copying(t);
    pthread_mutex_lock(&t->lock);
    t->slot = slot;
    t->slots = slots;
    t->live = live;
    /* A group that has learnt nothing yet, and one of whose members is new, has saved nothing
     * either that counts in its new lineage. */
    if (!d->restart && d->lineage != t->lineage)
        moe_train__begin_lineage(t, d->lineage, d->weights_version);
    pthread_mutex_unlock(&t->lock);
    struct moe_status st = d->restart ? restart(t, d) : moe_ok();
    moe_train_note_problem(t, moe_failed(&st) ? st.text : "");
    pthread_mutex_lock(&t->lock);
    t->chosen = t->chosen && moe_failed(&st);
    pthread_mutex_unlock(&t->lock);
    if (moe_failed(&st))
        moe_log_error("training cannot go back to %s: %s. The group does not form; "
                      "\"moectl training recover\" says where else to go",
                      name_or_model(d->checkpoint), st.text);
    moe_train__show(t);
    return st;
}
