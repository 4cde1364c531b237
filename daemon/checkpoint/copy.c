/* SPDX-License-Identifier: Apache-2.0 */
/* A slot's part of a Save, copied to host memory while steps run: one block of values, and a sorted
 * list of its tensors. */
#include "checkpoint/internal.h"

#include "base/memory.h"
#include "base/size.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    CHECK_FLOATS = 16 << 20, /* copied between two checks of the host's memory */
    HUGE_PAGE = 2 << 20,
};

struct moe_checkpoint_copy {
    struct moe_ckpt_tensors tensors; /* ascending by layer, key, base */
    size_t *at;                      /* [tensors.count] first float of each in `values` */
    float *values;
};

static int compare(const void *a, const void *b)
{
    const struct moe_ckpt_tensor *x = a, *y = b;
    const uint64_t p[] = {x->layer,    x->key.weight, x->key.expert,
                          x->key.part, x->key.tensor, x->base},
                   q[] = {y->layer,    y->key.weight, y->key.expert,
                          y->key.part, y->key.tensor, y->base};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (p[i] != q[i])
            return p[i] < q[i] ? -1 : 1;
    return 0;
}

static size_t bytes_of(const struct moe_ckpt_tensor *t)
{
    return (size_t)(t->rows * t->columns * sizeof(float));
}

/* A value that is part of the state is read twice: for the state and for the model's file. */
static uint64_t bytes_to_read(const struct moe_checkpoint_context *c,
                              const struct moe_ckpt_tensor *t)
{
    bool in_model = t->key.part == MOE_PART_WEIGHT && t->key.tensor == MOE_TRAIN_VALUE && !t->base;
    bool in_state = !in_model || moe_ckpt__has_master(c, t->layer, t->key.weight);
    return bytes_of(t) * ((uint64_t)in_model + in_state);
}

/* Gives each tensor its place; `*floats` is the sum. */
static struct moe_status lay_out(const struct moe_checkpoint_context *c,
                                 struct moe_checkpoint_copy *copy, size_t *floats)
{
    uint64_t expected = 0;
    *floats = 0;
    copy->at = calloc(copy->tensors.count + 1, sizeof *copy->at);
    if (copy->at == NULL)
        return moe_ckpt__no_memory();
    for (size_t i = 0; i < copy->tensors.count; i++) {
        const struct moe_ckpt_tensor *t = &copy->tensors.list[i];
        size_t n;
        copy->at[i] = *floats;
        if (!moe_size_mul((size_t)t->rows, (size_t)t->columns, &n) ||
            !moe_size_add(*floats, n, floats) || *floats > SIZE_MAX / sizeof(float))
            return moe_ckpt__no_memory();
        expected += bytes_to_read(c, t);
    }
    if (c->expected != NULL)
        atomic_store(c->expected, expected);
    return moe_ok();
}

static struct moe_status no_room(size_t floats)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no room on the host for a copy of %llu MiB",
                     (unsigned long long)((uint64_t)floats * sizeof(float) >> 20));
}

/* Memory beyond what is available would make the system kill a process. */
static struct moe_status check_room(size_t floats)
{
    return (uint64_t)floats * sizeof(float) < moe_available_memory() ? moe_ok() : no_room(floats);
}

static struct moe_status take_room(struct moe_checkpoint_copy *copy, size_t floats)
{
    MOE_TRY(check_room(floats));
    copy->values = aligned_alloc(HUGE_PAGE, (floats * sizeof(float) / HUGE_PAGE + 1) * HUGE_PAGE);
    if (copy->values == NULL)
        return no_room(floats);
    /* Fewer faults as it is filled; without huge pages, small ones suffice. */
    (void)madvise(copy->values, floats * sizeof(float) / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    return moe_ok();
}

static const float *copied(const struct moe_checkpoint_copy *copy, const struct moe_ckpt_tensor *t,
                           size_t bytes)
{
    struct moe_ckpt_tensor wanted = *t;
    wanted.key.expert = moe_weight_is_expert(t->key.weight) ? t->key.expert : 0;
    const struct moe_ckpt_tensor *found = bsearch(&wanted, copy->tensors.list, copy->tensors.count,
                                                  sizeof *copy->tensors.list, compare);
    if (found == NULL || bytes_of(found) != bytes)
        return NULL;
    return copy->values + copy->at[found - copy->tensors.list];
}

struct moe_status moe_ckpt__read(const struct moe_checkpoint_context *c,
                                 const struct moe_ckpt_tensor *t, float *to, size_t bytes)
{
    MOE_TRY(moe_ckpt__go_on(c));
    if (c->copy != NULL) {
        const float *from = copied(c->copy, t, bytes);
        if (from == NULL)
            return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "tensor %s was not copied", t->name);
        memcpy(to, from, bytes);
    } else {
        struct moe_train_key key = t->key;
        key.tensor = t->base ? MOE_TRAIN_BASE : key.tensor;
        MOE_TRY(c->backend->training->trainer_read(c->trainers[t->layer], &key, to, bytes));
    }
    if (c->processed != NULL)
        atomic_fetch_add(c->processed, bytes);
    return moe_ok();
}

/* The system gives memory at the first write, and other slots of the host fill their copies at the
 * same time: so check repeatedly that the rest still fits. */
static struct moe_status fill(const struct moe_checkpoint_context *c,
                              struct moe_checkpoint_copy *copy, size_t floats)
{
    struct moe_checkpoint_context from = *c;
    size_t next = 0;
    from.processed = NULL; /* it counts what is written */
    for (size_t i = 0; i < copy->tensors.count; i++) {
        const struct moe_ckpt_tensor *t = &copy->tensors.list[i];
        if (copy->at[i] >= next) {
            MOE_TRY(check_room(floats - copy->at[i]));
            next = copy->at[i] + CHECK_FLOATS;
        }
        MOE_TRY(moe_ckpt__read(&from, t, copy->values + copy->at[i], bytes_of(t)));
    }
    return moe_ok();
}

struct moe_status moe_checkpoint_copy_take(const struct moe_checkpoint_context *c,
                                           struct moe_checkpoint_copy **out)
{
    struct moe_status st;
    size_t floats;
    struct moe_checkpoint_copy *copy = calloc(1, sizeof *copy);
    if (copy == NULL)
        return moe_ckpt__no_memory();
    MOE_TRY_GOTO(st, moe_ckpt__list_copied(c, &copy->tensors), fail);
    if (copy->tensors.count > 0) /* another slot may write all that this one has copies of */
        qsort(copy->tensors.list, copy->tensors.count, sizeof *copy->tensors.list, compare);
    MOE_TRY_GOTO(st, lay_out(c, copy, &floats), fail);
    MOE_TRY_GOTO(st, take_room(copy, floats), fail);
    MOE_TRY_GOTO(st, fill(c, copy, floats), fail);
    *out = copy;
    return moe_ok();
fail:
    moe_checkpoint_copy_free(copy);
    return st;
}

void moe_checkpoint_copy_free(struct moe_checkpoint_copy *copy)
{
    if (copy == NULL)
        return;
    moe_ckpt__list_free(&copy->tensors);
    free(copy->at);
    free(copy->values);
    free(copy);
}
