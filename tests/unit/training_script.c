/* SPDX-License-Identifier: Apache-2.0 */
/* See training_script.h. */
#include "training_script.h"

#include "base/wait.h"
#include "moe/training.h"
#include "step_rows.h"
#include "support/check.h"

#include <stdlib.h>
#include <string.h>

struct training_script script;

struct moe_step {
    bool backward;
    struct moe_step_args forward_args;
    struct moe_backward_args backward_args;
};

static struct moe_status script_alloc(struct moe_device *d, enum moe_mem kind, size_t bytes,
                                      void **out)
{
    (void)d;
    (void)kind;
    *out = calloc(1, bytes);
    return moe_ok();
}

static void script_free(struct moe_device *d, enum moe_mem kind, void *p, size_t bytes)
{
    (void)d;
    (void)kind;
    (void)bytes;
    free(p);
}

static struct moe_status start_step(struct moe_step step, struct moe_step **out)
{
    moe_mutex_lock(&script.lock);
    MOE_INVARIANT(script.unfinished < 2);
    script.unfinished++;
    script.forwards += !step.backward;
    script.backwards += step.backward;
    script.passes_overlap |= step.backward && script.running_passes > 0;
    script.running_passes += step.backward;
    if (step.backward)
        script.retained = step.backward_args.retained;
    else
        script.save = step.forward_args.retain;
    if (step.backward && script.retained != 0)
        script.in_use = script.retained;
    pthread_cond_broadcast(&script.changed);
    moe_mutex_unlock(&script.lock);
    *out = malloc(sizeof **out);
    MOE_INVARIANT(*out != NULL);
    **out = step;
    return moe_ok();
}

static struct moe_status script_enqueue(struct moe_session *s, const struct moe_step_args *args,
                                        struct moe_step **out)
{
    (void)s;
    return start_step((struct moe_step){.forward_args = *args}, out);
}

static struct moe_status
script_backward(struct moe_session *s, const struct moe_backward_args *args, struct moe_step **out)
{
    (void)s;
    return start_step((struct moe_step){.backward = true, .backward_args = *args}, out);
}

static void compute(const struct moe_step *step)
{
    if (!step->backward) {
        const struct moe_step_args *a = &step->forward_args;
        if (a->tokens > 0)
            memset(a->token_state, MOE_TOKEN_OK, a->tokens);
        for (uint32_t part = 0; part < step_parts(a); part++) {
            const struct moe_step_segment rows = step_part(a, part);
            for (uint32_t i = 0; i < rows.tokens * SCRIPT_HIDDEN; i++)
                ((float *)rows.y)[i] = 1;
        }
        return;
    }
    const struct moe_backward_args *a = &step->backward_args;
    *a->aux_loss = 0.25;
    for (uint32_t i = 0; i < a->tokens * SCRIPT_HIDDEN; i++)
        ((float *)a->dx)[i] = 2 * ((const float *)a->dy)[i];
    if (a->tokens > 0)
        memset(a->token_state, script.bad_token ? MOE_TOKEN_NONFINITE_LOGITS : MOE_TOKEN_OK,
               a->tokens);
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "slot 1 has no memory");
}

/* The other slot says what this one says, or that it has done what was asked. */
static struct moe_status script_exchange(struct moe_session *s, const void *mine, void *all,
                                         size_t bytes)
{
    (void)s;
    script.exchanges++;
    if (script.aborted)
        return moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "called off");
    memset(all, 0, 2 * bytes);
    memcpy(all, mine, bytes);
    if (!script.peer_has_done)
        memcpy((char *)all + bytes, mine, bytes);
    return moe_ok();
}

enum { KEPT = sizeof script.kept / sizeof *script.kept };

static uint64_t *find_kept(uint64_t name)
{
    for (size_t i = 0; i < KEPT; i++)
        if (script.kept[i] == name)
            return &script.kept[i];
    return NULL;
}

/* Lock held. What a step leaves, and what a pass finds. */
static void keep_or_use(const struct moe_step *step, bool aborted, struct moe_step_result *result)
{
    uint64_t *place = find_kept(0), retained = step->backward_args.retained;
    if (step->backward)
        script.in_use = 0;
    result->used_retained = step->backward && retained != 0 && find_kept(retained) != NULL;
    result->retained = !step->backward && !aborted && script.keep && step->forward_args.retain != 0;
    if (!result->retained)
        return;
    MOE_INVARIANT(place != NULL);
    *place = step->forward_args.retain;
}

static void script_retained_limit(struct moe_device *d, uint64_t bytes)
{
    (void)d;
    script.limit = bytes;
    memset(script.kept, 0, sizeof script.kept);
}

static void script_retained_drop(struct moe_trainer *t, uint64_t name)
{
    (void)t;
    moe_mutex_lock(&script.lock);
    for (size_t i = 0; i < KEPT; i++)
        if (name == 0 || script.kept[i] == name)
            script.kept[i] = 0;
    script.dropped_in_use |= name != 0 && name == script.in_use;
    moe_mutex_unlock(&script.lock);
}

/* One byte each. */
static uint64_t script_retained_bytes(struct moe_device *d)
{
    uint64_t count = 0;
    (void)d;
    for (size_t i = 0; i < KEPT; i++)
        count += script.kept[i] != 0;
    return count;
}

static struct moe_status script_wait(struct moe_step *step, uint64_t deadline_ns,
                                     struct moe_step_result *result)
{
    moe_mutex_lock(&script.lock);
    while ((script.hold || (script.hold_passes && step->backward)) && !script.aborted) {
        if (!moe_wait_until(&script.changed, &script.lock, deadline_ns)) {
            moe_mutex_unlock(&script.lock);
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "still running");
        }
    }
    bool aborted = script.aborted, refused = script.refuse && step->backward && !aborted;
    script.unfinished--;
    script.running_passes -= step->backward;
    *result = (struct moe_step_result){.missing_slot = -1, .total_ns = 1, .refused = refused};
    if (!step->backward)
        result->rows = step->forward_args.tokens + !script.nobodys;
    keep_or_use(step, aborted, result);
    moe_mutex_unlock(&script.lock);
    if (!aborted && !refused)
        compute(step);
    free(step);
    if (refused)
        return no_memory();
    return aborted ? moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "called off") : moe_ok();
}

static void script_abort(struct moe_session *s)
{
    (void)s;
    moe_mutex_lock(&script.lock);
    script.aborted = true;
    pthread_cond_broadcast(&script.changed);
    moe_mutex_unlock(&script.lock);
}

static uint64_t script_lost(struct moe_session *s)
{
    (void)s;
    return 0;
}

static struct moe_status script_trainer(struct moe_layer *l, const struct moe_trainer_config *c,
                                        struct moe_trainer **out)
{
    (void)l;
    (void)c;
    script.trainers++;
    *out = malloc(1);
    return moe_ok();
}

static void script_trainer_destroy(struct moe_trainer *t)
{
    script.changed_while_read |= t != NULL && script.reading > 0;
    script.trainers -= t != NULL;
    free(t);
}

static struct moe_status script_bytes(struct moe_layer *l, const struct moe_trainer_config *c,
                                      uint64_t *bytes)
{
    (void)l;
    (void)c;
    *bytes = 100;
    return moe_ok();
}

static struct moe_status script_zero(struct moe_trainer *t)
{
    (void)t;
    script.zero_grads++;
    return moe_ok();
}

static struct moe_status script_set_frozen(struct moe_trainer *t, uint32_t frozen)
{
    (void)t;
    (void)frozen;
    return moe_ok();
}

static struct moe_status script_optimizer(struct moe_session *s, struct moe_trainer *const *t,
                                          size_t count, const struct moe_optimizer_args *args,
                                          struct moe_optimizer_result *result)
{
    (void)s;
    (void)t;
    (void)count;
    moe_mutex_lock(&script.lock);
    script.optimizer_overlaps_step |= script.unfinished > 0;
    script.changed_while_read |= script.reading > 0;
    script.optimizer_steps++;
    *result = (struct moe_optimizer_result){.grad_norm = (double)args->number,
                                            .nonfinite = script.nonfinite,
                                            .unchanged = script.aborted,
                                            .can_finish = script.aborted};
    struct moe_status st = script.aborted  ? moe_error(MOE_ABORTED, MOE_REASON_ABORTED, "aborted")
                           : script.refuse ? no_memory()
                                           : moe_ok();
    moe_mutex_unlock(&script.lock);
    return st;
}

static struct moe_status script_finish(struct moe_trainer *const *t, size_t count,
                                       const struct moe_optimizer_args *args, double squares,
                                       struct moe_optimizer_result *result)
{
    (void)t;
    (void)count;
    script.finished_steps++;
    script.squares = squares;
    *result = (struct moe_optimizer_result){.grad_norm = (double)args->number};
    return moe_ok();
}

static struct moe_status script_read(struct moe_trainer *t, const struct moe_train_key *key,
                                     float *to, size_t bytes)
{
    (void)t;
    moe_mutex_lock(&script.lock);
    script.reads++;
    script.reads_of_base += key->tensor == MOE_TRAIN_BASE;
    script.reading++;
    while (script.block_reads)
        (void)moe_wait_until(&script.changed, &script.lock, MOE_NEVER);
    script.reading--;
    bool poor = script.no_read_memory;
    moe_mutex_unlock(&script.lock);
    memset(to, 0, bytes);
    return poor ? no_memory() : moe_ok();
}

static struct moe_status script_write(struct moe_trainer *t, const struct moe_train_key *key,
                                      const float *from, size_t bytes)
{
    (void)t;
    (void)key;
    (void)from;
    (void)bytes;
    script.changed_while_read |= script.reading > 0;
    script.writes++;
    return moe_ok();
}

static const struct moe_training script_training = {
    .trainer_read = script_read,
    .trainer_write = script_write,
    .trainer_create = script_trainer,
    .trainer_destroy = script_trainer_destroy,
    .trainer_bytes = script_bytes,
    .zero_grad = script_zero,
    .set_frozen = script_set_frozen,
    .backward_enqueue = script_backward,
    .optimizer_step = script_optimizer,
    .optimizer_finish = script_finish,
    .retained_limit = script_retained_limit,
    .retained_drop = script_retained_drop,
    .retained_bytes = script_retained_bytes,
};

const struct moe_backend script_backend = {
    .name = "script",
    .training = &script_training,
    .mem_alloc = script_alloc,
    .mem_free = script_free,
    .session_abort = script_abort,
    .session_lost = script_lost,
    .session_exchange = script_exchange,
    .step_enqueue = script_enqueue,
    .step_wait = script_wait,
};
