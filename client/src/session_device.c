/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device in sessions, and entries of the ring that a device uses; see
 * moe/regions_device.h. */
#include "abi.h"
#include "session.h"

/* -------------------------------------------------------------------- memory */

struct moe_status moe_region_adopt(struct moe_client_session *s, const char *name,
                                   const struct moe_client_memory *memory,
                                   struct moe_client_region **out)
{
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(memory, memory, MEMORY));
    MOE_TRY(
        moe_client_check_reserved("moe_client_memory", memory->reserved, sizeof memory->reserved));
    MOE_TRY(moe_client_check_reserved("moe_client_memory", &memory->reserved_bits,
                                      sizeof memory->reserved_bits));
    const struct moe_client_region region = {.data = memory->data,
                                             .bytes = memory->bytes,
                                             .in_device = true,
                                             .release = memory->release,
                                             .ctx = memory->ctx};
    return moe_client_region_add(s, name, &region, memory->descriptor, out);
}

/* -------------------------------------------------------------------- entries */

static bool lend(struct moe_client_session *s, struct moe_client_entry *out)
{
    uint32_t i;
    moe_mutex_lock(&s->lock);
    bool found = moe_client_session_take(s, &i);
    if (found) {
        /* A wait before the first submit ends at once, as a mistake. */
        __atomic_store_n(&s->caller.ring->ends[i], 1, __ATOMIC_RELEASE);
        out->entry = i;
        out->sequence = s->caller.sequence[i];
    }
    moe_mutex_unlock(&s->lock);
    return found;
}

struct moe_status moe_session_lend(struct moe_client_session *s,
                                   const struct moe_client_session_forward *f,
                                   struct moe_client_entry *out)
{
    struct moe_ring_request q;
    MOE_TRY(MOE_CLIENT_CHECK_SIZE(out, entry, ENTRY));
    MOE_TRY(moe_client_session_fill(s, f, &q));
    if (!lend(s, out))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_QUEUE_FULL,
                         "%d requests of this session are in flight", MOE_RING_ENTRIES);
    out->ring = s->caller.ring;
    out->ring_bytes = sizeof(struct moe_ring);
    _Static_assert(sizeof q == sizeof out->request, "a request");
    memcpy(out->request, &q, sizeof q);
    atomic_fetch_add(&s->lent, 1);
    moe_client_session_watch(s);
    return moe_ok();
}

void moe_session_take_back(struct moe_client_session *s, const struct moe_client_entry *e)
{
    moe_mutex_lock(&s->lock);
    moe_ring_caller_take_back(&s->caller, e->entry);
    s->taken[e->entry] = false;
    moe_mutex_unlock(&s->lock);
    atomic_fetch_sub(&s->lent, 1);
}

struct moe_status moe_session_result(struct moe_client_session *s, const struct moe_client_entry *e,
                                     uint64_t word, struct moe_client_session_answer *answer)
{
    const uint32_t sequence = moe_ring_sequence_of(word);
    const enum moe_code code = moe_ring_code_of(word);
    struct moe_ring_details d = {0};
    if (answer != NULL)
        MOE_TRY(MOE_CLIENT_CHECK_SIZE(answer, session_answer, SESSION_ANSWER));
    const bool reported = moe_client_session_details(s, e->entry, sequence, code, &d);
    if (answer != NULL && code == MOE_OK)
        moe_client_session_answer_of(&d, answer);
    return moe_client_session_status(code, reported ? &d : NULL);
}
