/* SPDX-License-Identifier: Apache-2.0 */
/* Backward passes with retained activations: the same bits as without, on every slot, for any set
 * of slots that retain. And activations are gone when they must be. */
#include "trained.h"

#include "base/clock.h"
#include "common/activation_cache.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

enum { ROOM = 64 << 20 }; /* enough for any two steps of a case, on every backend */

/* A batch of the case: its tokens, or their negatives with the same ids (`turned`). One of those is
 * NaN, which the router refuses: its old rows must not be used. */
struct batch {
    uint64_t name;
    const void *x;
    struct pass want; /* of a pass without retained activations */
    float *gradients; /* after it */
    bool retained;    /* this slot retains */
    uint64_t bytes;   /* retained bytes with room for all */
};

/* A token that uses the router: the result shows a NaN only there. */
static void spoil_a_token(const struct trained *t, void *x)
{
    const struct subject *s = t->s;
    uint32_t i = 0;
    while (i < s->in->tokens && t->mode[i] != MOE_ROUTE_IDS)
        i++;
    if (i == s->in->tokens)
        return;
    size_t at = (size_t)i * s->c->spec.hidden + s->c->seed % s->c->spec.hidden;
    if (s->c->dtype == MOE_DTYPE_F32)
        ((float *)x)[at] = NAN;
    else
        ((uint16_t *)x)[at] = moe_f32_to_bf16(NAN);
}

static void *turned(struct trained *t)
{
    const struct subject *s = t->s;
    size_t n = (size_t)s->in->tokens * s->c->spec.hidden;
    void *x = take(&t->s->host, n * moe_dtype_bytes(s->c->dtype));
    for (size_t i = 0; i < n; i++)
        if (s->c->dtype == MOE_DTYPE_F32)
            ((float *)x)[i] = -((const float *)t->x)[i];
        else
            ((uint16_t *)x)[i] = ((const uint16_t *)t->x)[i] ^ 0x8000u;
    spoil_a_token(t, x);
    return x;
}

/* The expected used_retained of a pass. */
enum use { COMPUTES, USES };

static enum use use_of(const struct batch *b)
{
    return b->retained ? USES : COMPUTES;
}

static bool run_retained(struct trained *t, const struct batch *b, uint64_t name, bool accumulate,
                         enum use use, struct pass *p)
{
    struct moe_step *step;
    struct moe_step_result result;
    *p = blank_pass(t);
    struct moe_backward_args a = pass_args(t, p, accumulate);
    a.x = b->x;
    a.retained = name;
    t->counted += accumulate;
    return went_well(t->s, "backward", t->table->backward_enqueue(t->s->session, &a, &step)) &&
           went_well(t->s, "backward", t->s->backend->step_wait(step, MOE_NEVER, &result)) &&
           (result.used_retained == (use == USES) ||
            wrong(t->s, "a pass %s what a step retained", use == USES ? "did not use" : "used"));
}

static bool zero(struct trained *t)
{
    t->counted = 0;
    return went_well(t->s, "zero_grad", t->table->zero_grad(t->trainer));
}

/* From zero gradients, with `name`: the bits of the pass without retained activations. */
static bool same_from(struct trained *t, const struct batch *b, uint64_t name, enum use use,
                      const char *what)
{
    struct pass p;
    if (!zero(t) || !run_retained(t, b, name, true, use, &p) || !same_pass(t, what, &b->want, &p))
        return false;
    float *got = trained_read_all(t, MOE_TRAIN_GRAD);
    bool same = memcmp(got, b->gradients, t->floats * sizeof *got) == 0;
    free(got);
    return same || wrong(t->s, "gradients differ %s", what);
}

static bool learn(struct trained *t, struct batch *b)
{
    bool good = zero(t) && run_retained(t, b, 0, true, COMPUTES, &b->want);
    b->gradients = good ? trained_read_all(t, MOE_TRAIN_GRAD) : NULL;
    return good;
}

static struct moe_step_args forward(struct trained *t, const struct batch *b)
{
    struct subject *s = t->s;
    size_t bytes = tensor_bytes(s->c, s->in->tokens), pairs = s->in->tokens;
    pairs *= s->c->spec.router.top_k;
    return (struct moe_step_args){.layer = s->layer,
                                  .dtype = s->c->dtype,
                                  .bucket = s->c->bucket,
                                  .tokens = s->in->tokens,
                                  .x = b->x,
                                  .mode = t->mode,
                                  .ids_in = t->ids,
                                  .weights_in = t->weights,
                                  .y = take(&s->host, bytes),
                                  .ids_out = take(&s->host, pairs * sizeof(int32_t)),
                                  .weights_out = take(&s->host, pairs * sizeof(float)),
                                  .token_state = take(&s->host, s->in->tokens),
                                  .retain = b->name};
}

static bool wait_step(struct trained *t, struct moe_step *step, bool *retained)
{
    struct moe_step_result result = {0};
    bool good = went_well(t->s, "step", t->s->backend->step_wait(step, MOE_NEVER, &result));
    *retained = result.retained;
    return good;
}

/* Both batches in flight at the same time, retained if `names`; y must not depend on it. */
static bool run_forwards(struct trained *t, struct batch *b, bool names, void *y[2])
{
    struct subject *s = t->s;
    struct moe_step *step[2];
    bool retained[2];
    for (int i = 0; i < 2; i++) {
        struct moe_step_args a = forward(t, &b[i]);
        a.retain = names ? b[i].name : 0;
        y[i] = a.y;
        if (!went_well(s, "enqueue", s->backend->step_enqueue(s->session, &a, &step[i])))
            return false;
    }
    bool good = wait_step(t, step[0], &retained[0]);
    good = wait_step(t, step[1], &retained[1]) && good;
    for (int i = 0; i < 2 && names; i++)
        b[i].retained = retained[i];
    return good &&
           (names || !(retained[0] || retained[1]) || wrong(s, "a step retains without a name"));
}

/* The first time, a backend may get more rows than it expects. */
static bool retain_both(struct trained *t, struct batch *b, bool able)
{
    const struct subject *s = t->s;
    void *plain[2], *retaining[2];
    if (!run_forwards(t, b, false, plain) || !run_forwards(t, b, true, retaining) ||
        !run_forwards(t, b, true, retaining))
        return false;
    for (int i = 0; i < 2; i++) {
        if (memcmp(plain[i], retaining[i], tensor_bytes(s->c, s->in->tokens)) != 0)
            return wrong(s, "y differs where a step retains");
        if (b[i].retained != able)
            return wrong(s, "a step %s", able ? "did not retain" : "retains what it should not");
    }
    t->s->tally->retained += able;
    return true;
}

/* Whether this slot can retain: from a result, because only some paths of CUDA can. */
static bool can_retain(struct trained *t, const struct batch *b, bool *can)
{
    struct moe_step *step;
    struct moe_step_result result = {0};
    struct pass p = blank_pass(t);
    struct moe_backward_args a = pass_args(t, &p, false);
    a.x = b->x;
    bool good = went_well(t->s, "backward", t->table->backward_enqueue(t->s->session, &a, &step)) &&
                went_well(t->s, "backward", t->s->backend->step_wait(step, MOE_NEVER, &result));
    *can = strcmp(t->s->backend->name, "cpu") == 0 || result.on_tensor_cores;
    return good;
}

/* Every write of a weight drops the activations, even a write of the same values. */
static bool dropped_by_writing(struct trained *t, const struct batch *b)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->list[i].key.weight == MOE_WEIGHT_ROUTER) {
            float *value = trained_read(t, &t->list[i], MOE_TRAIN_VALUE);
            trained_write(t, &t->list[i], MOE_TRAIN_VALUE, value);
            free(value);
        }
    return (t->table->retained_bytes(t->s->device) == 0 ||
            wrong(t->s, "something is retained for weights that were written")) &&
           same_from(t, b, b->name, COMPUTES, "after a weight was written");
}

static bool check_uses(struct trained *t, struct batch *b)
{
    struct pass p;
    /* Repeats, in both orders; gradients that stay; an unknown name. */
    bool good = same_from(t, &b[0], b[0].name, use_of(&b[0]), "from a retained step") &&
                same_from(t, &b[1], b[1].name, use_of(&b[1]), "from the second retained step") &&
                same_from(t, &b[0], b[0].name, use_of(&b[0]), "from a retained step again") &&
                run_retained(t, &b[0], b[0].name, false, use_of(&b[0]), &p) &&
                same_pass(t, "without gradients, from a retained step", &b[0].want, &p) &&
                same_from(t, &b[0], 99, COMPUTES, "from a name that was never retained");
    b[0].bytes = t->table->retained_bytes(t->s->device);
    t->table->retained_drop(t->trainer, b[0].name);
    b[1].bytes = t->table->retained_bytes(t->s->device);
    b[0].bytes -= b[1].bytes;
    good = good && same_from(t, &b[0], b[0].name, COMPUTES, "after it was dropped") &&
           same_from(t, &b[1], b[1].name, use_of(&b[1]), "next to one that was dropped");
    return good && dropped_by_writing(t, &b[1]);
}

/* Room for one of the two, or hardly: evicted activations are computed again. The second stays if
 * it was retained, because nothing comes after it. It may have evicted the first, then completely.
 */
static bool check_little_room(struct trained *t, struct batch *b)
{
    const uint64_t room = (b[0].bytes + b[1].bytes) * 3 / 4, padding = 3 * MOE_ACTIVATION_ALIGN;
    void *y[2];
    t->table->retained_limit(t->s->device, room);
    if (!run_forwards(t, b, true, y))
        return false;
    uint64_t bytes = t->table->retained_bytes(t->s->device),
             second = b[1].retained ? b[1].bytes : 0;
    if (!b[0].retained && b[0].bytes > 0 && b[0].bytes + padding <= room)
        return wrong(t->s, "a step did not retain in room enough");
    if (bytes > room || (bytes != second && !(b[0].retained && bytes == second + b[0].bytes)))
        return wrong(t->s,
                     "%" PRIu64 " bytes are retained in %" PRIu64 ", of two steps with %" PRIu64
                     " and %" PRIu64,
                     bytes, room, b[0].bytes, b[1].bytes);
    b[0].retained = bytes > second;
    return same_from(t, &b[0], b[0].name, use_of(&b[0]), "with little room to retain") &&
           same_from(t, &b[1], b[1].name, use_of(&b[1]), "with little room to retain");
}

/* Retains one batch if this slot can. */
static bool retain_one(struct trained *t, struct batch *b)
{
    struct moe_step *step;
    struct moe_step_args a = forward(t, b);
    return went_well(t->s, "enqueue", t->s->backend->step_enqueue(t->s->session, &a, &step)) &&
           wait_step(t, step, &b->retained) &&
           (b->retained || t->table->retained_bytes(t->s->device) == 0 || /* of no rows: no bytes */
            wrong(t->s, "something is retained that a step did not retain"));
}

static bool nothing_is_retained(struct trained *t, const char *when)
{
    return t->table->retained_bytes(t->s->device) == 0 ||
           wrong(t->s, "something is still retained after %s", when);
}

/* An optimizer step without gradients changes no value, but drops activations like any other. */
static bool dropped_by_optimizer(struct trained *t, struct batch *b)
{
    struct moe_optimizer_args a = {.beta2 = 0.9, .epsilon = 1, .grad_scale = 1, .number = 1};
    struct moe_optimizer_result result;
    t->table->retained_limit(t->s->device, ROOM);
    return retain_one(t, b) && zero(t) &&
           went_well(t->s, "optimizer",
                     t->table->optimizer_step(t->s->session, &t->trainer, 1, &a, &result)) &&
           nothing_is_retained(t, "an optimizer step");
}

bool check_retained_to_the_end(struct trained *t)
{
    size_t used = t->s->host.used;
    struct batch b = {.name = 3, .x = t->x};
    t->table->retained_limit(t->s->device, ROOM);
    bool good = retain_one(t, &b);
    t->s->host.used = used;
    trained_end(t);
    good = good && nothing_is_retained(t, "its trainer went");
    t->table->retained_limit(t->s->device, 0);
    return good;
}

bool check_retained(struct trained *t)
{
    struct subject *s = t->s;
    uint32_t slots = s->member->slots;
    size_t used = s->host.used;
    struct batch b[2] = {{.name = s->c->seed | 1, .x = t->x}, {.name = 2, .x = turned(t)}};
    /* One seed of three leaves room on no slot, one on all, one on all but one of several. */
    bool spared = slots > 1 && s->c->seed / 3 % slots == s->member->slot;
    bool room = s->c->seed % 3 == 2 || (s->c->seed % 3 == 1 && !spared);
    bool can = false;
    t->table->retained_limit(s->device, room ? ROOM : 0);
    bool good = can_retain(t, &b[0], &can) && learn(t, &b[0]) && learn(t, &b[1]) &&
                retain_both(t, b, room && can);
    good = good && check_uses(t, b) && check_little_room(t, b) && dropped_by_optimizer(t, &b[0]);
    /* Before and after: the gradients of one pass over the case. */
    good = good && same_from(t, &b[0], 0, COMPUTES, "after all");
    t->table->retained_limit(s->device, 0);
    free(b[0].gradients);
    free(b[1].gradients);
    s->host.used = used;
    return good;
}
