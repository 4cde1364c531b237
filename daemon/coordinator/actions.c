/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs of the machine, its clock, and texts. The files of the machine use these functions, and
 * they use none of those files. */
#include "coordinator/membership_state.h"

#include <stdarg.h>
#include <stdio.h>

void moe_membership__set_time(struct moe_membership *m, uint64_t now_ns)
{
    if (now_ns <= m->now_ns)
        return;
    uint64_t pause = now_ns - m->now_ns;
    if (pause > m->config.lease_ns / 2)
        for (uint32_t s = 0; s < m->config.slots; s++)
            m->members[s].last_message_ns += pause;
    m->now_ns = now_ns;
}

/* ------------------------------------------------------------------ actions */

struct moe_membership_action *moe_membership__emit(struct moe_membership *m,
                                                   enum moe_membership_action_kind kind)
{
    MOE_INVARIANT(m->action_count < ACTIONS_MAX);
    size_t at = (m->action_head + m->action_count++) % ACTIONS_MAX;
    m->actions[at] = (struct moe_membership_action){.kind = kind};
    return &m->actions[at];
}

bool moe_membership_next_action(struct moe_membership *m, struct moe_membership_action *out)
{
    if (m->action_count == 0)
        return false;
    *out = m->actions[m->action_head];
    m->action_head = (m->action_head + 1) % ACTIONS_MAX;
    m->action_count--;
    return true;
}

void moe_membership_copy_text(char *to, size_t size, const char *from)
{
    size_t n = 0;
    for (; from[n] != '\0' && n + 1 < size; n++) {
        unsigned char c = (unsigned char)from[n];
        to[n] = c < 0x20 || c >= 0x7f ? '?' : (char)c;
    }
    to[n] = '\0';
}

void moe_membership_print_text(char *to, size_t size, const char *fmt, va_list args)
{
    char text[MOE_STATUS_TEXT];
    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        text[0] = '\0';
    moe_membership_copy_text(to, size, text);
}

void moe_membership__keep_error(struct member *member, const struct moe_status *error)
{
    member->error = *error;
    moe_membership_copy_text(member->error.text, sizeof member->error.text, error->text);
}

void moe_membership__list_slots(char to[MOE_MEMBERSHIP_SLOT_LIST_BYTES], uint64_t mask)
{
    bool many = (mask & (mask - 1)) != 0;
    size_t at = (size_t)snprintf(to, MOE_MEMBERSHIP_SLOT_LIST_BYTES, "slot%s", many ? "s" : "");
    const char *before = " ";
    for (unsigned s = 0; s < SLOTS_MAX; s++) {
        if ((mask >> s & 1) == 0)
            continue;
        at += (size_t)snprintf(to + at, MOE_MEMBERSHIP_SLOT_LIST_BYTES - at, "%s%u", before, s);
        before = ", ";
    }
}

void moe_membership__log(struct moe_membership *m, enum moe_log_level level,
                         enum moe_membership_event event, uint32_t slot, const char *fmt, ...)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_LOG);
    va_list args;
    a->level = level;
    a->event = event;
    a->slot = slot;
    va_start(args, fmt);
    moe_membership_print_text(a->status.text, sizeof a->status.text, fmt, args);
    va_end(args);
}

struct moe_membership_action *moe_membership__send(struct moe_membership *m, uint32_t slot,
                                                   enum moe_membership_message message)
{
    const struct member *member = &m->members[slot];
    if (member->state != SLOT_TAKEN || member->stream == 0)
        return NULL;
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_SEND);
    a->message = message;
    a->stream = member->stream;
    a->slot = slot;
    return a;
}

void moe_membership__close(struct moe_membership *m, uint64_t stream, struct moe_status status)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_CLOSE);
    a->stream = stream;
    a->status = status;
}

void moe_membership__save(struct moe_membership *m, bool await)
{
    struct moe_membership_action *a = moe_membership__emit(m, MOE_MEMBERSHIP_SAVE);
    a->sequence = ++m->save_sequence;
    m->unsaved = false; /* a write has the whole state */
    if (await)
        m->awaited_save = a->sequence;
}
