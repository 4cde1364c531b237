/* SPDX-License-Identifier: Apache-2.0 */
/* An array in order of age, which is also the order of expiry. */
#include "activations/activation_index.h"

#include "base/clock.h"

#include <string.h>

bool moe_activation_index_full(const struct moe_activation_index *l)
{
    return l->count == MOE_ACTIVATION_INDEX_MAX;
}

void moe_activation_index_add(struct moe_activation_index *l, const struct moe_activation_entry *a)
{
    MOE_INVARIANT(!moe_activation_index_full(l) && a->name != 0);
    l->entries[l->count++] = *a;
}

static void take_at(struct moe_activation_index *l, size_t i, struct moe_activation_entry *out)
{
    *out = l->entries[i];
    l->count--;
    memmove(&l->entries[i], &l->entries[i + 1], (l->count - i) * sizeof l->entries[0]);
}

static bool is_of(const struct moe_activation_entry *a, const char *session, uint64_t id)
{
    return a->id == id && strcmp(a->session, session) == 0;
}

bool moe_activation_index_take(struct moe_activation_index *l, const char *session, uint64_t id,
                               bool busy_too, struct moe_activation_entry *out)
{
    for (size_t i = 0; i < l->count; i++)
        if (is_of(&l->entries[i], session, id) && (busy_too || !l->entries[i].busy)) {
            take_at(l, i, out);
            return true;
        }
    return false;
}

bool moe_activation_index_take_old(struct moe_activation_index *l, uint64_t now,
                                   struct moe_activation_entry *out)
{
    size_t i = 0;
    while (i < l->count && l->entries[i].busy)
        i++;
    if (i == l->count || l->entries[i].expires_ns > now)
        return false;
    take_at(l, i, out);
    return true;
}

uint64_t moe_activation_index_next(const struct moe_activation_index *l)
{
    for (size_t i = 0; i < l->count; i++)
        if (!l->entries[i].busy)
            return l->entries[i].expires_ns;
    return MOE_NEVER;
}

void moe_activation_index_set_busy(struct moe_activation_index *l, const char *session, uint64_t id,
                                   bool busy)
{
    for (size_t i = 0; i < l->count; i++)
        if (is_of(&l->entries[i], session, id))
            l->entries[i].busy = busy;
}
