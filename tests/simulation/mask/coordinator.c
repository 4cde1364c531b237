/* SPDX-License-Identifier: Apache-2.0 */
/* A coordinator: it forms views of the slots with a process, by a mask where it can. */
#include "simulation/world.h"

#include <string.h>

void tell(uint8_t process, struct message m)
{
    struct process *p = &w.process[process];
    if (p->dead)
        return;
    MOE_INVARIANT(p->messages < QUEUE);
    p->message[p->messages++] = m;
}

static void end_view(void)
{
    if (!w.coordinator.forms && !w.coordinator.serves)
        return;
    for (uint8_t s = 0; s < w.slots; s++)
        if (w.coordinator.live & (uint8_t)~w.coordinator.lost & bit(s))
            tell(w.coordinator.member[s],
                 (struct message){.kind = ABORT, .form = w.coordinator.form});
    /* Only a session that all members have is kept. */
    if (w.coordinator.forms && !w.coordinator.masks)
        w.coordinator.kept = false;
    w.coordinator.forms = w.coordinator.serves = false;
}

static uint8_t able(void)
{
    return (uint8_t)((bit(w.slots) - 1) & ~w.coordinator.lost);
}

bool may_form(void)
{
    for (uint8_t s = 0; s < w.slots; s++)
        if ((able() & bit(s)) && w.process[w.coordinator.member[s]].messages > QUEUE - 3)
            return false; /* it is slow: bounds this model */
    return !w.coordinator.forms && !w.coordinator.serves && able() != 0 &&
           w.coordinator.form < FORMS && w.coordinator.sessions < SESSIONS;
}

static bool can_mask(uint8_t live)
{
    bool fewer = (live & ~w.coordinator.session_live) == 0 && live != w.coordinator.session_live;
    bool same = true;
    for (uint8_t s = 0; s < w.slots; s++)
        same = same &&
               (!(live & bit(s)) || w.coordinator.member[s] == w.coordinator.session_member[s]);
    return w.coordinator.kept && MOE_GUARD(MASK_SHRINKS, fewer && same);
}

void form(void)
{
    uint8_t live = able();
    w.coordinator.masks = can_mask(live);
    if (!w.coordinator.masks) {
        w.coordinator.sessions++;
        memcpy(w.coordinator.session_member, w.coordinator.member,
               sizeof w.coordinator.session_member);
        w.coordinator.kept = true;
    }
    w.coordinator.session_live = w.coordinator.live = live;
    w.coordinator.form++;
    w.coordinator.ready = 0;
    w.coordinator.forms = true;
    w.live_of[w.coordinator.form] = live;
    struct message m = {.kind = PREPARE,
                        .form = w.coordinator.form,
                        .live = live,
                        .session = (uint8_t)(w.coordinator.sessions - 1),
                        .masks = w.coordinator.masks};
    memcpy(m.member, w.coordinator.member, sizeof m.member);
    for (uint8_t s = 0; s < w.slots; s++)
        if (live & bit(s))
            tell(w.coordinator.member[s], m);
}

void lose(uint8_t slot)
{
    struct process *p = &w.process[w.coordinator.member[slot]];
    if (w.coordinator.lost & bit(slot))
        return;
    w.coordinator.lost |= bit(slot);
    p->messages = 0; /* its stream is closed, and no other message comes */
    memset(p->message, 0, sizeof p->message);
    if (w.coordinator.live & bit(slot))
        end_view();
}

/* Of a living process that another misses, only the session is in doubt: the next one is new. */
void report(uint8_t number, uint8_t lost)
{
    bool current = (w.coordinator.serves || w.bare) && number == w.coordinator.form;
    if (!current)
        return;
    for (uint8_t s = 0; s < w.slots; s++)
        if ((lost & bit(s)) && w.process[w.coordinator.member[s]].dead)
            w.coordinator.lost |= bit(s);
    end_view();
}

void ready(const struct process *p, uint8_t number, bool good, bool kept)
{
    if (!w.coordinator.forms || number != w.coordinator.form)
        return;
    if (!good) {
        w.coordinator.kept = w.coordinator.kept && kept;
        end_view();
        return;
    }
    w.coordinator.ready |= bit(p->slot);
    if (!MOE_GUARD(READY_OF_ALL, w.coordinator.ready == w.coordinator.live))
        return;
    w.coordinator.forms = false;
    w.coordinator.serves = true;
    w.committed[number] = true;
    for (uint8_t s = 0; s < w.slots; s++)
        if (w.coordinator.live & bit(s))
            tell(w.coordinator.member[s], (struct message){.kind = COMMIT, .form = number});
}

/* Another process takes the slot; then the view ends for one with all. */
void refill(uint8_t slot)
{
    uint8_t number = PROCESSES - 1;
    struct process *p = &w.process[number];
    *p = (struct process){.used = true, .slot = slot, .over = true};
    w.coordinator.member[slot] = number;
    w.coordinator.lost &= (uint8_t)~bit(slot);
    end_view();
}
