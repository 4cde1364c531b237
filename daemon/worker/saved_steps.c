/* An array in order of age, which is also the order of expiry. */
#include "worker/saved_steps.h"

#include "base/clock.h"

#include <string.h>

bool moe_saved_steps_full(const struct moe_saved_steps *l)
{
    return l->count == MOE_SAVED_STEPS_MAX;
}

void moe_saved_steps_add(struct moe_saved_steps *l, const struct moe_saved_step *a)
{
    MOE_INVARIANT(!moe_saved_steps_full(l) && a->name != 0);
    l->entries[l->count++] = *a;
}

static void take_at(struct moe_saved_steps *l, size_t i, struct moe_saved_step *out)
{
    *out = l->entries[i];
    l->count--;
    memmove(&l->entries[i], &l->entries[i + 1], (l->count - i) * sizeof l->entries[0]);
}

static bool is_of(const struct moe_saved_step *a, const char *session, uint64_t id)
{
    return a->id == id && strcmp(a->session, session) == 0;
}

bool moe_saved_steps_take(struct moe_saved_steps *l, const char *session, uint64_t id,
                          bool busy_too, struct moe_saved_step *out)
{
    for (size_t i = 0; i < l->count; i++)
        if (is_of(&l->entries[i], session, id) && (busy_too || !l->entries[i].busy)) {
            take_at(l, i, out);
            return true;
        }
    return false;
}

bool moe_saved_steps_take_old(struct moe_saved_steps *l, uint64_t now, struct moe_saved_step *out)
{
    size_t i = 0;
    while (i < l->count && l->entries[i].busy)
        i++;
    if (i == l->count || l->entries[i].expires_ns > now)
        return false;
    take_at(l, i, out);
    return true;
}

uint64_t moe_saved_steps_next(const struct moe_saved_steps *l)
{
    for (size_t i = 0; i < l->count; i++)
        if (!l->entries[i].busy)
            return l->entries[i].expires_ns;
    return MOE_NEVER;
}

void moe_saved_steps_set_busy(struct moe_saved_steps *l, const char *session, uint64_t id,
                              bool busy)
{
    for (size_t i = 0; i < l->count; i++)
        if (is_of(&l->entries[i], session, id))
            l->entries[i].busy = busy;
}
