/* SPDX-License-Identifier: Apache-2.0 */
/* What may happen next in the world, and making it happen. */
#include "simulation/world.h"

const char *const act_names[] = {
    "take",          "begin",          "finish",   "reap",     "settle",       "form",
    "leave",         "unmap",          "forget",   "submit",   "poll",         "reuse",
    "see end",       "watch",          "register", "end view", "bad token",    "release",
    "client dies",   "daemon dies",    "kick",     "close",    "rogue submit", "rogue overwrite",
    "rogue bad row", "rogue register",
};

static void offer(struct choices *to, bool possible, enum act act, uint32_t a, uint32_t b)
{
    if (possible && to->count < sizeof to->list / sizeof to->list[0])
        to->list[to->count++] = (struct choice){(uint8_t)act, (uint8_t)a, (uint8_t)b};
}

/* Steps of a session end in order. */
static bool is_oldest(const struct step *s)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        const struct step *o = &w.steps[i];
        if (o != s && o->state == STEP_RUNS && (s->order - o->order) % 4 == 1)
            return false;
    }
    return true;
}

static void offer_steps(struct choices *to)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        const struct step *s = &w.steps[i];
        bool runs = s->state == STEP_RUNS && (is_oldest(s) || s->forgotten);
        offer(to, runs, FINISH, i, STEP_GOOD);
        offer(to, runs && s->aborting, FINISH, i, STEP_ABORTED);
        offer(to, runs && w.left.bad_tokens > 0, BAD_TOKEN, i, 0);
        offer(to, s->state != STEP_NONE && s->state != STEP_RUNS, REAP, i, 0);
    }
    for (uint32_t i = 0; i < JOBS; i++) {
        const struct job *j = &w.jobs[i];
        offer(to, is_settled(j), SETTLE, i, 0);
        if (!j->used || j->failed || j->cancelled || !w.view)
            continue;
        for (uint32_t p = 0; p < j->parts; p++)
            if (j->part[p] == PART_QUEUED) { /* parts go in order */
                offer(to, w.steps[0].state == STEP_NONE || w.steps[1].state == STEP_NONE, BEGIN, i,
                      p);
                break;
            }
    }
}

static void offer_daemon(struct choices *to)
{
    for (uint32_t c = 0; c < CLIENTS; c++) {
        offer(to, w.joined[c] && !w.leaving[c], TAKE, c, 0);
        offer(to, w.joined[c] && !w.leaving[c] && w.clients[c].dead, LEAVE, c, 0);
        offer(to, w.joined[c] && !w.leaving[c] && !w.clients[c].dead && w.left.kicks > 0, KICK, c,
              0);
        offer(to, w.joined[c] && w.leaving[c], FORGET, c, 0);
    }
    offer_steps(to);
    offer(to, true, UNMAP, 0, 0);
    offer(to, may_form(), FORM, 0, 0);
    offer(to, w.view && w.left.aborts > 0, END_VIEW, 0, 0);
    offer(to, w.left.deaths > 0, DAEMON_DIES, 0, 0);
}

static void offer_honest(struct choices *to)
{
    struct client *c = &w.clients[HONEST];
    if (c->dead)
        return;
    for (uint32_t e = 0; e < MOE_RING_ENTRIES; e++) {
        const struct moe_ring_device_entry *lane = &w.lanes[e];
        bool idle = is_free(e), waits = w.callers[HONEST].waiting[e];
        offer(to, memory_is_free(e) && w.lent[8 * e + 4], REUSE, e, 0);
        if (w.by_device) { /* a stream sleeps until it sees the signal; it submits in any case */
            waits = lane->waiting != 0 || lane->refused != 0;
            idle = !waits;
        }
        idle = idle && (!w.one_memory || memory_is_free(e));
        offer(to, idle && w.left.requests[HONEST] > 0, SUBMIT, e, 0);
        offer(to, waits && (!w.by_device || w.rings[HONEST].ends[e] != 0), POLL, e, 0);
    }
    offer(to, w.by_device && c->saw_end, WATCH, 0, 0);
    bool over = w.daemon_dead || !w.joined[HONEST];
    offer(to, over && !c->saw_end, SEE_END, 0, 0);
    offer(to, w.left.releases > 0, RELEASE, 0, 0);
    offer(to, w.left.deaths > 0, CLIENT_DIES, HONEST, 0);
    bool serves = !w.daemon_dead && w.joined[HONEST] && !w.leaving[HONEST];
    offer(to, serves && c->registered && w.left.closes > 0, CLOSE, HONEST, 0);
    offer(to, serves && c->closing && !moe_regions_has(&w.regions, c->region), REGISTER, HONEST, 0);
}

static void offer_rogue(struct choices *to)
{
    const struct client *c = &w.clients[ROGUE];
    if (c->dead || w.daemon_dead || !w.joined[ROGUE])
        return;
    for (uint32_t e = 0; e < MOE_RING_ENTRIES; e++)
        for (uint32_t kind = 0; kind < ROGUE_REQUESTS; kind++) {
            bool possible = kind != ROGUE_ALIAS || c->alias != 0;
            bool twin = kind == ROGUE_OVERLAP || kind == ROGUE_ALIAS; /* of entry 0 */
            offer(to, possible && twin == (e == 1) && w.left.requests[ROGUE] > 0, ROGUE_SUBMIT, e,
                  kind);
            offer(to, e == 0 && !twin && w.left.rogue_writes > 0, ROGUE_OVERWRITE, e, kind);
        }
    offer(to, w.left.rogue_writes > 0, ROGUE_BAD_ROW, 0, 0);
    bool serves = !w.leaving[ROGUE];
    offer(to, serves && w.left.registrations > 0, ROGUE_REGISTER, 0, 0);
    offer(to, serves && c->registered && w.left.closes > 0, CLOSE, ROGUE, 0);
    offer(to, w.left.deaths > 0, CLIENT_DIES, ROGUE, 0);
}

void find_choices(struct choices *to)
{
    to->count = 0;
    if (!w.daemon_dead)
        offer_daemon(to);
    offer_honest(to);
    offer_rogue(to);
}

static void close_by_client(uint32_t client)
{
    struct client *c = &w.clients[client];
    uint32_t number;
    struct moe_status st = moe_regions_close(&w.regions, client, "data", &number);
    check(!moe_failed(&st), "an open region can be closed");
    c->registered = false;
    c->closing = true;
    w.left.closes--;
    w.excused = w.excused || client == HONEST;
}

static void apply_daemon(struct choice c)
{
    switch ((enum act)c.act) {
    case TAKE: take(c.a); break;
    case BEGIN: begin(c.a, c.b, &w.steps[w.steps[0].state != STEP_NONE]); break;
    case FINISH: finish(&w.steps[c.a], (enum step_state)c.b); break;
    case REAP: reap(&w.steps[c.a]); break;
    case SETTLE: settle(&w.jobs[c.a]); break;
    case FORM: w.view = true; break;
    case LEAVE: leave(c.a); break;
    case UNMAP: unmap(); break;
    case FORGET:
        if (moe_regions_forget(&w.regions, c.a))
            w.joined[c.a] = false;
        break;
    case END_VIEW: end_view(); break;
    case BAD_TOKEN:
        w.left.bad_tokens--;
        w.excused = true;
        finish(&w.steps[c.a], STEP_BAD_TOKEN);
        break;
    case DAEMON_DIES:
        w.left.deaths--;
        w.excused = w.daemon_dead = true;
        break;
    case KICK:
        w.left.kicks--;
        w.excused = true;
        leave(c.a);
        break;
    default: break;
    }
}

static void apply_client(struct choice c)
{
    struct moe_ring_caller *caller = &w.callers[HONEST];
    switch ((enum act)c.act) {
    case SUBMIT: submit(c.a); break;
    case POLL: poll_result(c.a); break;
    case REUSE: lend(c.a, false); break;
    case SEE_END:
        w.clients[HONEST].saw_end = true;
        moe_ring_caller_end(caller);
        break;
    case WATCH: moe_ring_caller_watch(caller, 0, UINT64_MAX); break;
    case REGISTER:
        w.clients[HONEST].closing = false;
        add_region(HONEST, false);
        w.clients[HONEST].registered = true;
        break;
    case RELEASE:
        w.left.releases--;
        w.excused = true;
        moe_ring_caller_watch(caller, 1, 0);
        break;
    case CLIENT_DIES:
        w.left.deaths--;
        w.clients[c.a].dead = true;
        break;
    case CLOSE: close_by_client(c.a); break;
    case ROGUE_SUBMIT: {
        struct moe_ring_request q = rogue_request((enum rogue)c.b, c.a);
        w.left.requests[ROGUE]--;
        moe_ring_caller_submit(&w.callers[ROGUE], c.a, &q);
        break;
    }
    case ROGUE_OVERWRITE:
        w.left.rogue_writes--;
        w.rings[ROGUE].requests[c.a] = rogue_request((enum rogue)c.b, c.a);
        break;
    case ROGUE_BAD_ROW:
        w.left.rogue_writes--;
        x_of(ROGUE, 0)[0] = BAD;
        break;
    case ROGUE_REGISTER:
        w.left.registrations--;
        add_region(ROGUE, true);
        break;
    default: break;
    }
}

void apply(struct choice c)
{
    apply_daemon(c);
    apply_client(c);
}

/* Nothing is left to happen but faults. */
void check_rest(void)
{
    for (uint32_t e = 0; e < MOE_RING_ENTRIES; e++)
        check(w.clients[HONEST].dead || (!w.callers[HONEST].waiting[e] && !w.lanes[e].waiting),
              "every wait ends");
    if (w.daemon_dead)
        return;
    for (uint32_t i = 0; i < JOBS; i++)
        check(!w.jobs[i].used, "every request ends");
    for (uint32_t c = 0; c < CLIENTS; c++) {
        check(!w.leaving[c] || !w.joined[c], "a client that has left is forgotten");
        check(w.joined[c] || (!w.ring_mapped[c] && !w.mapped[c][0] && !w.mapped[c][1]),
              "no memory of a client that has left is mapped");
    }
}
