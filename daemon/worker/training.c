/* The state of training and what tickets do to it; see worker/training.h. Save, Load and Export,
 * which take long, are in training_phases.c. */
#include "worker/training_state.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---------------------------------------------------------------------------- series */

static struct moe_status add_counter(struct moe_metrics *m, const char *name, const char *help,
                                     struct moe_counter **out)
{
    const struct moe_metric_desc desc = {.name = name, .help = help};
    return moe_metrics_add_counter(m, &desc, out);
}

static struct moe_status add_gauge(struct moe_metrics *m, const char *name, const char *help,
                                   struct moe_gauge **out)
{
    const struct moe_metric_desc desc = {.name = name, .help = help};
    return moe_metrics_add_gauge(m, &desc, out);
}

static struct moe_status add_metrics(struct moe_metrics *m, struct moe_train_metrics *to)
{
    MOE_TRY(add_counter(m, "moe_train_backwards_total",
                        "Backward passes that this worker took part in.", &to->backwards));
    MOE_TRY(add_counter(m, "moe_train_steps_total", "Optimizer steps that moved the weights.",
                        &to->steps));
    MOE_TRY(add_counter(m, "moe_train_skipped_steps_total",
                        "Optimizer steps that moved nothing because a gradient was not finite.",
                        &to->skipped));
    MOE_TRY(add_counter(m, "moe_train_repeats_total",
                        "Training calls that had been run before and were not run again.",
                        &to->repeats));
    MOE_TRY(add_gauge(m, "moe_weights_version", "Version of the weights.", &to->version));
    MOE_TRY(add_gauge(m, "moe_train_lineage",
                      "Rises when the group goes back to a checkpoint or to the model as loaded.",
                      &to->lineage));
    MOE_TRY(add_gauge(m, "moe_train_saved_bytes",
                      "Memory of forward passes saved for Backward on this worker.", &to->saved));
    MOE_TRY(add_counter(m, "moe_train_saved_steps_total",
                        "Forward steps whose activations this worker's device kept for Backward.",
                        &to->saved_steps));
    MOE_TRY(add_counter(m, "moe_train_reused_steps_total",
                        "Backward passes that used kept activations here, instead of computing "
                        "gate and up again.",
                        &to->reused));
    MOE_TRY(add_gauge(m, "moe_train_saved_device_bytes",
                      "Device memory of activations kept for Backward on this worker.",
                      &to->activations));
    MOE_TRY(add_gauge(m, "moe_train_answers_bytes",
                      "Memory of Backward answers kept for repeats on this worker.", &to->answers));
    return add_gauge(m, "moe_train_state_bytes",
                     "Memory of gradients and optimizer state on this worker.", &to->state);
}

void moe_train__show(struct moe_train *t)
{
    if (t->config.metrics == NULL)
        return;
    pthread_mutex_lock(&t->lock);
    double version = (double)t->weights_version, lineage = (double)t->lineage;
    double state = (double)t->state_bytes, activations = (double)t->activation_bytes;
    pthread_mutex_unlock(&t->lock);
    moe_gauge_set(t->metrics.version, version);
    moe_gauge_set(t->metrics.lineage, lineage);
    moe_gauge_set(t->metrics.state, state);
    moe_gauge_set(t->metrics.activations, activations);
    moe_gauge_set(t->metrics.saved, (double)moe_saved_bytes(t->passes));
    moe_gauge_set(t->metrics.answers, (double)moe_saved_bytes(t->answers));
}

/* -------------------------------------------------------------------------- lifetime */

static uint64_t hash_config(const struct moe_trainer_config *c)
{
    const uint64_t words[] = {(uint64_t)c->optimizer, c->frozen, c->lora_rank, c->lora_targets,
                              c->lora_seed};
    uint64_t hash[2] = {0, 0};
    moe_content_mix(hash, words, sizeof words);
    moe_content_mix(hash, &c->lora_alpha, sizeof c->lora_alpha);
    return hash[0] | 1; /* 0 is no training */
}

/* Without training in the backend, or with adapters that do not fit, nothing can begin. */
static struct moe_status check_config(const struct moe_train_config *c)
{
    const struct moe_trainer_config *trainer = &c->trainer;
    if (c->backend->training == NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "the %s backend cannot train", c->backend->name);
    if (trainer->lora_rank > 0 && trainer->lora_targets == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "adapters of rank %u need a matrix to adapt", trainer->lora_rank);
    for (size_t i = 0; i < c->layer_count; i++)
        if (trainer->lora_rank > c->specs[i]->hidden ||
            trainer->lora_rank > c->specs[i]->intermediate)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                             "adapters of rank %u do not fit layer %u", trainer->lora_rank,
                             c->specs[i]->layer);
    return moe_ok();
}

static struct moe_status choose_writer(uint64_t *writer)
{
    return getrandom(writer, sizeof *writer, 0) == (ssize_t)sizeof *writer
               ? moe_ok()
               : moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no random numbers");
}

struct moe_status moe_train_create(const struct moe_train_config *config, struct moe_train **out)
{
    MOE_TRY(check_config(config));
    struct moe_train *t = calloc(1, sizeof *t);
    if (t == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory to train");
    pthread_mutex_init(&t->lock, NULL);
    t->config = *config;
    t->config_hash = hash_config(&config->trainer);
    t->frozen = config->trainer.frozen;
    t->weights_version = 1;
    t->activation_limit = config->saved_device_bytes;
    struct moe_status st;
    MOE_TRY_GOTO(st, choose_writer(&t->writer), fail);
    t->trainers = calloc(config->layer_count + 1, sizeof(struct moe_trainer *));
    MOE_TRY_GOTO(st,
                 t->trainers != NULL ? moe_ok()
                                     : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                                 "no memory to train"),
                 fail);
    MOE_TRY_GOTO(st, moe_ledger_create(&t->ledger), fail);
    MOE_TRY_GOTO(st,
                 moe_saved_create(config->backend, config->device, config->saved_bytes,
                                  config->saved_ns, &t->passes),
                 fail);
    MOE_TRY_GOTO(st,
                 moe_saved_create(config->backend, config->device, config->saved_bytes,
                                  config->saved_ns, &t->answers),
                 fail);
    if (config->metrics != NULL)
        MOE_TRY_GOTO(st, add_metrics(config->metrics, &t->metrics), fail);
    moe_train__show(t);
    *out = t;
    return st;
fail:
    moe_train_destroy(t);
    return st;
}

void moe_train_destroy(struct moe_train *t)
{
    if (t == NULL)
        return;
    moe_train_end_jobs(t);
    if (t->trainers != NULL)
        moe_train__drop_trainers(t);
    free(t->trainers);
    moe_saved_destroy(t->passes);
    moe_saved_destroy(t->answers);
    moe_ledger_destroy(t->ledger);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

/* --------------------------------------------------------------- layers come and go */

void moe_train__drop_trainers(struct moe_train *t)
{
    for (size_t i = 0; i < t->config.layer_count; i++) {
        t->config.backend->training->trainer_destroy(t->trainers[i]);
        t->trainers[i] = NULL;
    }
}

struct moe_status moe_train__make_trainers(struct moe_train *t)
{
    const struct moe_training *backend = t->config.backend->training;
    for (size_t i = 0; i < t->config.layer_count; i++) {
        struct moe_status st =
            backend->trainer_create(t->layers[i], &t->config.trainer, &t->trainers[i]);
        if (moe_failed(&st)) {
            t->trainers[i] = NULL;
            moe_train__drop_trainers(t);
            return moe_error_context(st, "training state of layer %u", t->config.specs[i]->layer);
        }
    }
    return moe_ok();
}

struct moe_status moe_train_bytes(const struct moe_train *t, struct moe_layer *const *layers,
                                  uint64_t *bytes)
{
    *bytes = 0;
    for (size_t i = 0; i < t->config.layer_count; i++) {
        uint64_t more;
        MOE_TRY(t->config.backend->training->trainer_bytes(layers[i], &t->config.trainer, &more));
        if (more > UINT64_MAX - *bytes)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                             "training state would be too large");
        *bytes += more;
    }
    return moe_ok();
}

struct moe_status moe_train_attach(struct moe_train *t, struct moe_layer *const *layers,
                                   const struct moe_placement *placements)
{
    uint64_t bytes;
    t->layers = layers;
    t->placements = placements;
    MOE_TRY(moe_train_bytes(t, layers, &bytes));
    MOE_TRY(moe_train__make_trainers(t));
    moe_train_limit_activations(t, t->activation_limit);
    pthread_mutex_lock(&t->lock);
    t->state_bytes = bytes;
    pthread_mutex_unlock(&t->lock);
    moe_train__show(t);
    return moe_ok();
}

bool moe_train_attached(const struct moe_train *t)
{
    return t->trainers[0] != NULL;
}

/* [lock held] Anything has happened since the model was loaded. */
static bool is_touched(const struct moe_train *t)
{
    return t->weights_version != 1 || moe_ledger_count(t->ledger) != 0;
}

void moe_train_detach(struct moe_train *t)
{
    moe_train__drop_trainers(t);
    pthread_mutex_lock(&t->lock);
    t->torn = t->torn || is_touched(t);
    t->state_bytes = 0;
    pthread_mutex_unlock(&t->lock);
}

/* -------------------------------------------------------------------------- agreeing */

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
    out->torn = t->torn;
    memcpy(out->checkpoint, t->checkpoint, sizeof t->checkpoint);
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

static const char *name_or_model(const char *checkpoint)
{
    return checkpoint[0] != '\0' ? checkpoint : "the model as loaded";
}

struct moe_status moe_train_decide(const struct moe_train_stand *stands, uint64_t live,
                                   uint64_t epoch, struct moe_train_decision *out)
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
    out->lineage = epoch > lineage ? epoch : lineage + 1;
    out->restart = !untouched;
    if (!out->restart)
        return moe_ok();
    out->weights_version = version + 1;
    memcpy(out->checkpoint, told != NULL ? told->choice : best->checkpoint, MOE_TRAINING_NAME_MAX);
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
    t->steps = t->unsaved = 0;
    t->frozen = t->config.trainer.frozen;
    memset(t->checkpoint, 0, sizeof t->checkpoint);
    memcpy(t->checkpoint, d->checkpoint, MOE_TRAINING_NAME_MAX);
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
    t->went_back = false;
    if (went_back)
        moe_log_warn("training went back to %s%s: lineage %llu, version %llu",
                     to_model ? "the model as loaded" : "checkpoint ", t->checkpoint,
                     (unsigned long long)t->lineage, (unsigned long long)t->weights_version);
    pthread_mutex_unlock(&t->lock);
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

/* --------------------------------------------------------------------------- tickets */

static struct moe_status wrong_lineage(uint64_t asked, uint64_t present)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_STATE_LOST,
                     "lineage %llu was asked for; it is %llu: what was not saved in a checkpoint "
                     "is lost",
                     (unsigned long long)asked, (unsigned long long)present);
}

/* [lock held] What would have to be true for a new call to be run. */
static struct moe_status check_new(const struct moe_train *t, const struct moe_train_call *c)
{
    if (c->weights_version != 0 && c->weights_version != t->weights_version)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "weights version %llu was asked for; it is %llu",
                         (unsigned long long)c->weights_version,
                         (unsigned long long)t->weights_version);
    if (c->kind == MOE_STEP_OPTIMIZER && c->expected_backwards != 0 &&
        c->expected_backwards != t->backwards)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_MISSING,
                         "gradients of %u Backward calls are expected; those of %u are there",
                         c->expected_backwards, t->backwards);
    if ((c->kind == MOE_STEP_SAVE || c->kind == MOE_STEP_EXPORT) && t->backwards != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_GRADIENTS_PENDING,
                         "gradients of %u Backward calls wait for OptimizerStep or ZeroGrad",
                         t->backwards);
    bool of_checkpoints =
        c->kind == MOE_STEP_SAVE || c->kind == MOE_STEP_LOAD || c->kind == MOE_STEP_EXPORT;
    if (of_checkpoints && t->job != NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SAVE_RUNNING,
                         "a checkpoint is being written or loaded: one at a time (%s)",
                         moe_train__job_call(t)->name);
    if (c->kind == MOE_STEP_SET_FROZEN && (t->config.trainer.frozen & ~c->frozen) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "what was frozen when the workers were started cannot learn");
    return moe_ok();
}

static struct moe_status id_reused(uint64_t id)
{
    return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_REUSED,
                     "id %llu was used for something else", (unsigned long long)id);
}

/* [lock held] A call whose id is that of what is under way, and any poke; false for others. */
static bool judge_job(const struct moe_train *t, const struct moe_train_call *c,
                      struct moe_train_turn *turn)
{
    const struct moe_train_call *job = moe_train__job_call(t);
    bool same = job != NULL && c->session[0] == '\0' && c->id == job->id;
    if (same && memcmp(&c->content, &job->content, sizeof c->content) == 0)
        turn->run = turn->joined = true;
    else if (same && !c->poke)
        turn->refusal = id_reused(c->id);
    else if (c->poke)
        turn->refusal = moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "it is not under way");
    return same || c->poke;
}

/* [lock held] */
static void judge(const struct moe_train *t, const struct moe_train_call *c,
                  struct moe_train_turn *turn)
{
    *turn = (struct moe_train_turn){0};
    turn->refusal = moe_ok();
    if (c->lineage != 0 && c->lineage != t->lineage) {
        turn->refusal = wrong_lineage(c->lineage, t->lineage);
        return;
    }
    if (judge_job(t, c, turn))
        return;
    switch (moe_ledger_look(t->ledger, c->session, c->id, &c->content, NULL)) {
    case MOE_LEDGER_REPEAT: turn->repeat = true; return;
    case MOE_LEDGER_REUSED: turn->refusal = id_reused(c->id); return;
    case MOE_LEDGER_TOO_OLD:
        turn->refusal = moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD,
                                  "id %llu is below one that is forgotten: it may have been used",
                                  (unsigned long long)c->id);
        return;
    case MOE_LEDGER_NEW: break;
    }
    turn->refusal = check_new(t, c);
    turn->run = !moe_failed(&turn->refusal);
}

struct moe_trainer *moe_train__find_trainer(const struct moe_train *t, uint32_t layer)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        if (t->config.specs[i]->layer == layer)
            return t->trainers[i];
    return NULL;
}

/* A Save reads, and takes adapters away for a moment as it begins; a Load changes something in the
 * one turn that takes it (training_job.c says so then). */
static bool changes_state(const struct moe_train *t, const struct moe_train_call *call,
                          const struct moe_train_turn *turn)
{
    if (call->kind == MOE_STEP_SAVE)
        return !turn->joined && t->config.trainer.lora_rank > 0;
    return call->kind != MOE_STEP_LOAD;
}

struct moe_status moe_train_begin(struct moe_train *t, const struct moe_ticket *ticket,
                                  const struct moe_train_call *call, struct moe_train_turn *turn,
                                  struct moe_trainer **trainer)
{
    if (call->kind == MOE_STEP_BACKWARD) {
        *trainer = moe_train__find_trainer(t, ticket->layer);
        if (*trainer == NULL)
            return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "ticket %llu: layer %u is not trained",
                             (unsigned long long)ticket->seq, ticket->layer);
    }
    pthread_mutex_lock(&t->lock);
    judge(t, call, turn);
    turn->origin = ticket->order.origin;
    turn->changes = turn->run && changes_state(t, call, turn);
    turn->weights_version = t->weights_version;
    pthread_mutex_unlock(&t->lock);
    if (turn->run && call->kind == MOE_STEP_BACKWARD) {
        turn->saved = call->saved_epoch == ticket->epoch ? call->saved : 0;
        moe_train__hold_activations(t, call, true);
    }
    return moe_ok();
}

/* ------------------------------------------------------------- exclusive tickets */

static struct moe_status step_optimizer(struct moe_train *t, struct moe_session *session,
                                        const struct moe_train_call *call,
                                        struct moe_ledger_outcome *o, struct moe_status *refusal)
{
    struct moe_optimizer_args args = call->optimizer;
    struct moe_optimizer_result result = {0};
    args.number = t->steps + 1;
    struct moe_status st = t->config.backend->training->optimizer_step(
        session, t->trainers, t->config.layer_count, &args, &result);
    if (moe_failed(&st))
        return moe_train__agree_on_refusal(t, session, st, refusal);
    pthread_mutex_lock(&t->lock);
    o->backwards = t->backwards;
    o->number = result.grad_norm;
    o->nonfinite = result.nonfinite;
    t->backwards = 0;
    t->steps += !result.nonfinite;
    t->unsaved += !result.nonfinite;
    t->weights_version += !result.nonfinite;
    pthread_mutex_unlock(&t->lock);
    if (t->metrics.steps != NULL)
        moe_counter_add(result.nonfinite ? t->metrics.skipped : t->metrics.steps, 1);
    return moe_ok();
}

static struct moe_status zero_gradients(struct moe_train *t, struct moe_ledger_outcome *o)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->zero_grad(t->trainers[i]));
    pthread_mutex_lock(&t->lock);
    o->backwards = t->backwards;
    t->backwards = 0;
    pthread_mutex_unlock(&t->lock);
    return moe_ok();
}

static struct moe_status set_frozen(struct moe_train *t, uint32_t frozen)
{
    for (size_t i = 0; i < t->config.layer_count; i++)
        MOE_TRY(t->config.backend->training->set_frozen(t->trainers[i], frozen));
    pthread_mutex_lock(&t->lock);
    t->frozen = frozen;
    pthread_mutex_unlock(&t->lock);
    return moe_ok();
}

struct moe_status moe_train_run(struct moe_train *t, struct moe_session *session,
                                const struct moe_ticket *ticket, const struct moe_train_call *call,
                                struct moe_train_turn *turn, struct moe_ledger_outcome *outcome)
{
    *outcome = (struct moe_ledger_outcome){.epoch = ticket->epoch};
    switch (call->kind) {
    case MOE_STEP_OPTIMIZER: return step_optimizer(t, session, call, outcome, &turn->refusal);
    case MOE_STEP_ZERO_GRAD: return zero_gradients(t, outcome);
    case MOE_STEP_SET_FROZEN: return set_frozen(t, call->frozen);
    default: return moe_train__run_phases(t, session, call, turn, outcome);
    }
}

/* ------------------------------------------------------------------------------ ends */

/* [lock held] Another slot of the view has the answer, if any has. */
static bool is_elsewhere(const struct moe_train *t, const struct moe_ledger_call *call)
{
    return call->origin != t->slot && call->origin < MOE_MAX_SLOTS &&
           (t->live >> call->origin & 1) != 0;
}

/* [lock held] The answer of a call that is in the ledger. */
static struct moe_status answer_repeat(struct moe_train *t, const struct moe_train_call *call,
                                       struct moe_train_answer *answer)
{
    const struct moe_ledger_call *known = moe_ledger_find(t->ledger, call->session, call->id);
    if (known == NULL)
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ID_TOO_OLD,
                         "id %llu has been run and forgotten", (unsigned long long)call->id);
    answer->outcome = known->outcome;
    answer->repeated = true;
    answer->recorded_at = known->origin;
    if (call->kind != MOE_STEP_BACKWARD)
        return moe_ok();
    if (is_elsewhere(t, known))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_RECORDED_ELSEWHERE,
                         "the answer is recorded at slot %u", known->origin);
    answer->record = moe_saved_get(t->answers, call->session, call->id, moe_clock_ns());
    if (answer->record != NULL)
        return moe_ok();
    return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_ANSWER_GONE,
                     "id %llu has been run; its answer is no longer kept",
                     (unsigned long long)call->id);
}

/* [lock held] */
static void record(struct moe_train *t, const struct moe_ticket *ticket,
                   const struct moe_train_call *call, struct moe_ledger_outcome *outcome)
{
    if (outcome->lineage == 0) { /* a Save speaks of the state that it copied */
        outcome->lineage = t->lineage;
        outcome->weights_version = t->weights_version;
        outcome->steps = t->steps;
    }
    const struct moe_ledger_call entry = {
        .id = call->id,
        .content = call->content,
        .origin = ticket->order.origin,
        .outcome = *outcome,
    };
    moe_ledger_record(t->ledger, call->session, &entry);
}

/* [lock held] A Backward's own numbers are not recorded: its answer is kept with the tensors, and
 * only where it was asked. */
static void record_backward(struct moe_train *t, const struct moe_ticket *ticket,
                            const struct moe_train_call *call, struct moe_ledger_outcome *outcome)
{
    *outcome = (struct moe_ledger_outcome){.epoch = ticket->epoch};
    record(t, ticket, call, outcome);
    t->backwards += !call->input_only;
}

static struct moe_status end_run(struct moe_train *t, const struct moe_ticket *ticket,
                                 const struct moe_train_call *call,
                                 const struct moe_train_turn *turn,
                                 const struct moe_ledger_outcome *outcome,
                                 struct moe_train_answer *answer)
{
    pthread_mutex_lock(&t->lock);
    if (call->kind == MOE_STEP_BACKWARD) {
        record_backward(t, ticket, call, &answer->outcome);
        answer->outcome.number = turn->aux_loss;
    } else {
        answer->outcome = *outcome;
        record(t, ticket, call, &answer->outcome);
    }
    pthread_mutex_unlock(&t->lock);
    if (call->kind == MOE_STEP_BACKWARD && t->metrics.backwards != NULL)
        moe_counter_add(t->metrics.backwards, 1);
    return moe_ok();
}

/* What was kept for a Backward goes with it, and everything goes with the weights that it is of. */
static void end_activations(struct moe_train *t, const struct moe_train_call *call,
                            const struct moe_train_turn *turn, bool done)
{
    bool other_weights = call->merge || moe_train_weights_version(t) != turn->weights_version;
    if (call->kind != MOE_STEP_BACKWARD && done && other_weights)
        moe_train__drop_all_activations(t);
    else if (call->kind == MOE_STEP_BACKWARD && done)
        moe_train__drop_activations(t, call);
    else if (call->kind == MOE_STEP_BACKWARD && turn->run)
        moe_train__hold_activations(t, call, false);
}

struct moe_status moe_train_end(struct moe_train *t, const struct moe_ticket *ticket,
                                const struct moe_train_call *call,
                                const struct moe_train_turn *turn,
                                const struct moe_ledger_outcome *outcome,
                                struct moe_train_answer *answer)
{
    struct moe_status st = turn->refusal;
    bool done = turn->run && !turn->waits && !moe_failed(&st);
    *answer = (struct moe_train_answer){0};
    end_activations(t, call, turn, done);
    if (done) {
        st = end_run(t, ticket, call, turn, outcome, answer);
    } else if (turn->repeat) {
        if (t->metrics.repeats != NULL)
            moe_counter_add(t->metrics.repeats, 1);
        pthread_mutex_lock(&t->lock);
        if (ticket->order.origin == t->slot)
            st = answer_repeat(t, call, answer);
        pthread_mutex_unlock(&t->lock);
    }
    moe_train__show(t);
    return st;
}

void moe_train_torn(struct moe_train *t)
{
    pthread_mutex_lock(&t->lock);
    t->torn = true;
    pthread_mutex_unlock(&t->lock);
}

/* ------------------------------------------------------------------------ any thread */

bool moe_train_recall(struct moe_train *t, const struct moe_train_call *call,
                      struct moe_train_answer *answer)
{
    struct moe_train_turn turn;
    *answer = (struct moe_train_answer){0};
    pthread_mutex_lock(&t->lock);
    judge(t, call, &turn);
    struct moe_status st = turn.refusal;
    if (turn.repeat)
        st = answer_repeat(t, call, answer);
    pthread_mutex_unlock(&t->lock);
    /* A Backward that is recorded here and has no answer may be about to get one. */
    return turn.repeat && !moe_failed(&st);
}

bool moe_train_knows(struct moe_train *t, const struct moe_train_call *call,
                     struct moe_train_known *out)
{
    *out = (struct moe_train_known){0};
    pthread_mutex_lock(&t->lock);
    const struct moe_ledger_call *known = NULL;
    if (call->lineage != 0 && call->lineage != t->lineage)
        out->refusal = wrong_lineage(call->lineage, t->lineage);
    else
        known = moe_ledger_find(t->ledger, call->session, call->id);
    if (known != NULL) {
        out->content = known->content;
        out->origin = known->origin;
        out->origin_elsewhere = is_elsewhere(t, known);
    } else if (!moe_failed(&out->refusal)) {
        out->refusal = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_SAVED_STATE_GONE,
                                 "no forward pass is saved here under this name: send x and the "
                                 "routing");
    }
    pthread_mutex_unlock(&t->lock);
    return known != NULL;
}

uint64_t moe_train_weights_version(struct moe_train *t)
{
    pthread_mutex_lock(&t->lock);
    uint64_t version = t->weights_version;
    pthread_mutex_unlock(&t->lock);
    return version;
}

uint32_t moe_train_slot(struct moe_train *t)
{
    pthread_mutex_lock(&t->lock);
    uint32_t slot = t->slot;
    pthread_mutex_unlock(&t->lock);
    return slot;
}

/* [lock held] Of the steps that were run and the one that is under way: an id above it is free. */
static uint64_t highest_id(const struct moe_train *t)
{
    const struct moe_train_call *job = moe_train__job_call(t);
    uint64_t highest = moe_ledger_highest(t->ledger, "");
    return job != NULL && job->id > highest ? job->id : highest;
}

void moe_train_read_state(struct moe_train *t, struct moe_train_state *out)
{
    *out = (struct moe_train_state){0};
    pthread_mutex_lock(&t->lock);
    out->lineage = t->lineage;
    out->weights_version = t->weights_version;
    out->steps = t->steps;
    out->unsaved = t->unsaved;
    out->last_step_id = highest_id(t);
    out->state_bytes = t->state_bytes;
    out->activation_bytes = t->activation_bytes;
    out->activation_bytes_limit = t->activation_limit;
    out->backwards = t->backwards;
    out->frozen = t->frozen;
    memcpy(out->checkpoint, t->checkpoint, sizeof out->checkpoint);
    memcpy(out->problem, t->problem, sizeof out->problem);
    moe_train__read_job(t, out);
    pthread_mutex_unlock(&t->lock);
    out->saved_bytes = moe_saved_bytes(t->passes);
    out->saved_bytes_limit = moe_saved_budget(t->passes);
}

const struct moe_train_config *moe_train_configured(const struct moe_train *t)
{
    return &t->config;
}

struct moe_saved *moe_train_passes(struct moe_train *t)
{
    return t->passes;
}

struct moe_saved *moe_train_answers(struct moe_train *t)
{
    return t->answers;
}
