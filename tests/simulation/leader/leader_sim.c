/* SPDX-License-Identifier: Apache-2.0 */
/* Two or three coordinators on a simulated etcd: revisions, leases, transactions. The election and
 * the fence of writes are the product's (daemon/store/election.c); calls, clocks and etcd are
 * models. Time is virtual, and one seed decides everything.
 *
 * Faults: processes stop and go on, or die and start again; requests and answers are slow, lost, or
 * carried out after their deadline; etcd does not answer for a while; its lease may last longer.
 * Each process and etcd have a clock that drifts by up to 5 %.
 *
 * Promises, checked all the time:
 *  - at most one process acts as the leader, and the leader's key is its own then;
 *  - a write continues the state that is there: nothing that was answered is lost, and no write of
 *    an old leader comes after one of a later leader;
 *  - without further faults a process leads again, and its writes are answered. */
#include "base/clock.h"
#include "base/guard.h"
#include "store/election.h"
#include "support/random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PROCESSES_MAX = 3,
    MESSAGES_MAX = 256,
    WRITES_MAX = 4096,
    LEASES_MAX = 256,
    STEP_MS = 5,
    TTL_S = 2,
    POLL_MS = 250,
    DEADLINE_MS = 500,
    WRITE_EVERY_MS = 60,
    STEPS = 3000,
    LAPSE_MS = 500, /* from the end of a lease until etcd removes its keys, at most */
};

/* ------------------------------------------------------------------ guards */

static const char *const guard_names[] = {
#define X(name, promise) #name,
#include "simulation/guards.h"
#undef X
};
static enum moe_guard off = MOE_GUARD_COUNT;

bool moe_guard_is_off(enum moe_guard guard)
{
    return off == guard;
}

/* ------------------------------------------------------------------ the world */

enum kind { LOOK, GRANT, PROPOSE, RENEW, RELEASE, READ, WRITE };

struct message {
    bool used, is_answer;
    uint64_t due_ns;
    enum kind kind;
    size_t process;
    unsigned life;    /* of the process that has sent it */
    uint64_t call;    /* its number */
    uint64_t renewal; /* RENEW */
    int64_t lease;
    struct moe_fence fence; /* WRITE */
    size_t write;
    /* Answers. */
    bool exists, succeeded;
    int64_t revision, leader, state, ttl_s;
};

struct process {
    bool alive;
    unsigned life;
    double rate;
    uint64_t asleep_ns; /* until then */
    struct moe_election election;
    enum moe_election_call calling;
    uint64_t call, call_deadline_ns; /* of the election; local time */
    enum kind blocked_on;
    uint64_t blocked_call, blocked_until_ns; /* a blocking call; 0 = none. Local time */
    size_t blocked_write;
    struct moe_fence fence;
    bool loaded;    /* the state was read in this term */
    int64_t cached; /* for READ_AS_THE_LEADER: state as read at the start; its write */
    size_t cached_write;
    bool has_cached;
    size_t known;      /* the write with the state that this process has in memory; 0 = the first */
    uint64_t write_ns; /* the next one; local time */
};

struct etcd {
    double rate;
    uint64_t away_ns; /* until then */
    int64_t revision;
    struct {
        int64_t create; /* 0 = there is none */
        int64_t lease;
        size_t process;
    } leader;
    int64_t state_mod; /* 0 = there is none */
    size_t state;      /* the write that it comes from */
    struct {
        bool alive;
        uint64_t ends_ns; /* etcd's time */
    } leases[LEASES_MAX];
    size_t lease_count;
};

struct world {
    struct rng random;
    uint64_t seed, now_ns, calls;
    bool quiet, prints;
    const char *broken;
    uint64_t lapse_steps; /* from the end of a lease until it is noticed, on average */
    size_t processes;
    struct process process[PROCESSES_MAX];
    struct etcd etcd;
    struct message messages[MESSAGES_MAX];
    struct {
        size_t parent;
    } writes[WRITES_MAX];
    size_t write_count, last_answered;
    int64_t last_term;
    size_t terms, answered, lost_terms, fenced, again;
};

static void check(struct world *w, bool holds, const char *promise)
{
    if (!holds && w->broken == NULL)
        w->broken = promise;
}

static uint64_t rnd(struct world *w, uint64_t below)
{
    return rng_next(&w->random) % below;
}

static bool chance(struct world *w, uint64_t in)
{
    return !w->quiet && rnd(w, in) == 0;
}

static uint64_t local(const struct world *w, const struct process *p)
{
    return (uint64_t)((double)w->now_ns * p->rate);
}

static uint64_t etcd_time(const struct world *w)
{
    return (uint64_t)((double)w->now_ns * w->etcd.rate);
}

static size_t index_of(const struct world *w, const struct process *p)
{
    return (size_t)(p - w->process);
}

static bool runs_now(const struct world *w, const struct process *p)
{
    return p->alive && w->now_ns >= p->asleep_ns;
}

static void say(const struct world *w, const struct process *p, const char *what, int64_t number)
{
    if (w->prints)
        printf("%8.3f  %zu %s %" PRId64 "\n", (double)w->now_ns / 1e9, index_of(w, p), what,
               number);
}

/* `a` is `b`, or a state before it. */
static bool is_before(const struct world *w, size_t a, size_t b)
{
    while (b > a)
        b = w->writes[b].parent;
    return a == b;
}

/* ------------------------------------------------------------------ messages */

/* Most are fast; some take as long as a lease. */
static uint64_t travel_ns(struct world *w)
{
    if (chance(w, 12))
        return rnd(w, 3000) * MOE_NS_PER_MS;
    return (1 + rnd(w, 20)) * MOE_NS_PER_MS;
}

static void post(struct world *w, struct message m)
{
    if (chance(w, 40))
        return; /* lost */
    for (size_t i = 0; i < MESSAGES_MAX; i++)
        if (!w->messages[i].used) {
            m.used = true;
            m.due_ns = w->now_ns + travel_ns(w);
            w->messages[i] = m;
            return;
        }
}

static struct message request(struct world *w, const struct process *p, enum kind kind)
{
    return (struct message){.kind = kind,
                            .process = index_of(w, p),
                            .life = p->life,
                            .call = ++w->calls,
                            .lease = p->election.lease_id};
}

/* ------------------------------------------------------------------ etcd */

static bool lease_lives(const struct etcd *e, int64_t lease)
{
    return lease > 0 && (size_t)lease <= e->lease_count && e->leases[lease - 1].alive;
}

static void end_lease(struct etcd *e, int64_t lease)
{
    if (!lease_lives(e, lease))
        return;
    e->leases[lease - 1].alive = false;
    e->revision++;
    if (e->leader.create != 0 && e->leader.lease == lease)
        e->leader.create = 0;
}

static void expire_leases(struct world *w)
{
    struct etcd *e = &w->etcd;
    for (size_t i = 0; i < e->lease_count; i++)
        if (e->leases[i].alive && etcd_time(w) >= e->leases[i].ends_ns &&
            (rnd(w, w->lapse_steps) == 0 ||
             etcd_time(w) > e->leases[i].ends_ns + LAPSE_MS * MOE_NS_PER_MS))
            end_lease(e, (int64_t)i + 1);
}

static uint64_t lease_end(const struct world *w)
{
    return etcd_time(w) + TTL_S * MOE_NS_PER_S;
}

static void apply_write(struct world *w, struct message *m)
{
    struct etcd *e = &w->etcd;
    bool leads = MOE_GUARD(WRITES_NEED_THE_KEY, e->leader.create == m->fence.leader);
    bool follows = MOE_GUARD(WRITES_FOLLOW, e->state_mod == m->fence.state);
    m->succeeded = leads && follows;
    m->leader = e->leader.create;
    m->state = e->state_mod;
    if (!m->succeeded)
        return;
    check(w, m->fence.leader >= w->last_term, "no write of an old leader follows a later one's");
    check(w, is_before(w, e->state, m->write), "a write continues the state that is there");
    check(w, is_before(w, w->last_answered, m->write), "a write that was answered stays");
    w->last_term = m->fence.leader;
    e->state_mod = ++e->revision;
    e->state = m->write;
}

static void apply_proposal(struct world *w, struct message *m)
{
    struct etcd *e = &w->etcd;
    if (!lease_lives(e, m->lease))
        return;       /* an error: etcd refuses the lease */
    m->exists = true; /* is answered */
    m->succeeded = MOE_GUARD(KEY_IS_ABSENT, e->leader.create == 0);
    if (!m->succeeded)
        return;
    e->revision++;
    if (e->leader.create == 0)
        e->leader.create = e->revision;
    e->leader.lease = m->lease;
    e->leader.process = m->process;
}

static void apply(struct world *w, struct message *m)
{
    struct etcd *e = &w->etcd;
    switch (m->kind) {
    case LOOK: m->exists = e->leader.create != 0; break;
    case GRANT:
        if (e->lease_count == LEASES_MAX)
            break;
        e->leases[e->lease_count].alive = true;
        e->leases[e->lease_count++].ends_ns = lease_end(w);
        m->lease = (int64_t)e->lease_count;
        break;
    case PROPOSE: apply_proposal(w, m); break;
    case RENEW:
        m->ttl_s = lease_lives(e, m->lease) ? TTL_S : 0;
        if (m->ttl_s > 0)
            e->leases[m->lease - 1].ends_ns = lease_end(w);
        break;
    case RELEASE: end_lease(e, m->lease); break;
    case READ:
        m->state = e->state_mod;
        m->write = e->state;
        break;
    case WRITE: apply_write(w, m); break;
    }
    m->revision = e->revision;
}

/* A new leader among etcd's own members gives all leases their whole time again. */
static void extend_leases(struct world *w)
{
    for (size_t i = 0; i < w->etcd.lease_count; i++)
        if (w->etcd.leases[i].alive)
            w->etcd.leases[i].ends_ns = lease_end(w);
}

/* ------------------------------------------------------------------ a coordinator */

static void begin_blocking(struct world *w, struct process *p, struct message m)
{
    p->blocked_on = m.kind;
    p->blocked_call = m.call;
    p->blocked_write = m.write;
    p->blocked_until_ns = local(w, p) + DEADLINE_MS * MOE_NS_PER_MS;
    post(w, m);
}

static void begin_read(struct world *w, struct process *p)
{
    begin_blocking(w, p, request(w, p, READ));
}

static void send_write(struct world *w, struct process *p, size_t write)
{
    struct message m = request(w, p, WRITE);
    m.fence = p->fence;
    m.write = write;
    begin_blocking(w, p, m);
}

static void begin_write(struct world *w, struct process *p)
{
    if (w->write_count == WRITES_MAX)
        return;
    size_t write = w->write_count++;
    w->writes[write].parent = p->known;
    p->known = write; /* the machine goes on from what it wanted to save */
    send_write(w, p, write);
}

static void resign(struct world *w, struct process *p)
{
    moe_election_resign(&p->election, local(w, p), 0);
    p->loaded = false;
}

static void on_read(struct world *w, struct process *p, const struct message *m)
{
    if (p->election.revision == 0) { /* the read at the start of the process */
        p->cached = m->state;
        p->cached_write = m->write;
        p->has_cached = true;
        return;
    }
    bool fresh = !moe_guard_is_off(MOE_GUARD_READ_AS_THE_LEADER) || !p->has_cached;
    p->fence = (struct moe_fence){p->election.revision, fresh ? m->state : p->cached};
    p->known = fresh ? m->write : p->cached_write;
    p->loaded = true;
    w->terms++;
    say(w, p, "leads with state", (int64_t)p->known);
}

static void on_written(struct world *w, struct process *p, const struct message *m)
{
    switch (moe_fence_on_written(&p->fence, m->succeeded, m->revision, m->leader, m->state)) {
    case MOE_FENCE_WRITTEN:
        check(w, is_before(w, m->write, w->etcd.state), "a write that is answered stays");
        if (is_before(w, w->last_answered, m->write)) /* answers may be late */
            w->last_answered = m->write;
        w->answered++;
        break;
    case MOE_FENCE_AGAIN:
        w->again++;
        if (moe_election_leads(&p->election, local(w, p)))
            send_write(w, p, m->write);
        break;
    case MOE_FENCE_LOST:
        w->fenced++;
        resign(w, p);
        break;
    }
}

static void on_blocking_answer(struct world *w, struct process *p, const struct message *m)
{
    if (p->blocked_until_ns == 0 || m->call != p->blocked_call)
        return; /* its deadline was before */
    p->blocked_until_ns = 0;
    if (m->kind == READ)
        on_read(w, p, m);
    else
        on_written(w, p, m);
}

/* The answer of the election's call, or its deadline (`m` NULL). */
static void on_election_answer(struct world *w, struct process *p, const struct message *m)
{
    struct moe_election *e = &p->election;
    uint64_t now = local(w, p);
    enum moe_election_call call = p->calling;
    p->calling = MOE_ELECTION_NONE;
    switch (call) {
    case MOE_ELECTION_LOOK:
        moe_election_on_looked(e, now, m != NULL, m != NULL && m->exists);
        break;
    case MOE_ELECTION_GRANT:
        moe_election_on_granted(e, now, m != NULL, m != NULL ? m->lease : 0, TTL_S);
        break;
    case MOE_ELECTION_PROPOSE: {
        bool ok = m != NULL && m->exists;
        moe_election_on_proposed(e, now, ok, ok && m->succeeded ? m->revision : 0);
        p->loaded = false;
        break;
    }
    default: moe_election_on_released(e, now); break;
    }
}

static void on_answer(struct world *w, struct process *p, const struct message *m)
{
    if (m->kind == READ || m->kind == WRITE) {
        on_blocking_answer(w, p, m);
    } else if (m->kind == RENEW) {
        moe_election_on_renewed(&p->election, local(w, p), m->renewal, m->ttl_s);
        if (p->election.phase == MOE_ELECTION_LEADS && moe_guard_is_off(MOE_GUARD_SENT))
            p->election.lease.until_ns = local(w, p) + p->election.lease.term_ns;
    } else if (p->calling != MOE_ELECTION_NONE && m->call == p->call) {
        on_election_answer(w, p, m);
    }
}

static void begin_call(struct world *w, struct process *p, enum moe_election_call call)
{
    static const enum kind kinds[] = {[MOE_ELECTION_LOOK] = LOOK,
                                      [MOE_ELECTION_GRANT] = GRANT,
                                      [MOE_ELECTION_PROPOSE] = PROPOSE,
                                      [MOE_ELECTION_RENEW] = RENEW,
                                      [MOE_ELECTION_RELEASE] = RELEASE};
    struct message m = request(w, p, kinds[call]);
    m.renewal = moe_election_renewal(&p->election);
    if (call != MOE_ELECTION_RENEW) {
        p->calling = call;
        p->call = m.call;
        p->call_deadline_ns = local(w, p) + DEADLINE_MS * MOE_NS_PER_MS;
    }
    post(w, m);
}

/* Runs as the owner's thread does: a blocking call keeps it from all else. */
static void run(struct world *w, struct process *p)
{
    uint64_t now = local(w, p);
    if (p->blocked_until_ns != 0 && now >= p->blocked_until_ns) {
        p->blocked_until_ns = 0;
        if (p->blocked_on == READ && p->election.revision != 0)
            resign(w, p);
    }
    if (p->blocked_until_ns != 0)
        return;
    if (p->calling != MOE_ELECTION_NONE && now >= p->call_deadline_ns)
        on_election_answer(w, p, NULL);
    enum moe_election_call call;
    while ((call = moe_election_next(&p->election, now)) != MOE_ELECTION_NONE)
        begin_call(w, p, call);
    if (!moe_election_leads(&p->election, now)) {
        w->lost_terms += p->loaded;
        p->loaded = false;
        return;
    }
    if (!p->loaded) {
        begin_read(w, p);
    } else if (now >= p->write_ns) {
        p->write_ns = now + (1 + rnd(w, 2 * WRITE_EVERY_MS)) * MOE_NS_PER_MS;
        begin_write(w, p);
    }
}

static void start(struct world *w, struct process *p)
{
    static const double rates[] = {0.95, 1.0, 1.05};
    unsigned life = p->life + 1;
    *p = (struct process){.alive = true, .life = life, .rate = rates[rnd(w, 3)]};
    moe_election_init(&p->election, TTL_S, POLL_MS * MOE_NS_PER_MS, local(w, p));
    if (moe_guard_is_off(MOE_GUARD_MARGIN))
        p->election.margin_percent = 8;
    begin_read(w, p);
}

/* ------------------------------------------------------------------ steps */

static void deliver(struct world *w)
{
    for (size_t i = 0; i < MESSAGES_MAX; i++) {
        struct message *m = &w->messages[i];
        if (!m->used || w->now_ns < m->due_ns)
            continue;
        struct process *p = &w->process[m->process];
        if (m->is_answer) {
            bool held = !runs_now(w, p) || (p->blocked_until_ns != 0 && m->call != p->blocked_call);
            if (p->alive && held && p->life == m->life)
                continue;
            m->used = false;
            if (p->alive && p->life == m->life)
                on_answer(w, p, m);
        } else {
            m->used = false;
            if (w->now_ns < w->etcd.away_ns)
                continue;
            struct message answer = *m;
            apply(w, &answer);
            if (answer.kind == PROPOSE && !answer.exists)
                continue; /* the error comes as the deadline does */
            answer.is_answer = true;
            post(w, answer);
        }
    }
}

static void add_faults(struct world *w)
{
    struct process *p = &w->process[rnd(w, w->processes)];
    if (chance(w, 400))
        p->asleep_ns = w->now_ns + rnd(w, 4000) * MOE_NS_PER_MS;
    if (chance(w, 1500))
        p->alive = false;
    if (!p->alive && (w->quiet || chance(w, 100)))
        start(w, p);
    if (chance(w, 1500))
        w->etcd.away_ns = w->now_ns + rnd(w, 5000) * MOE_NS_PER_MS;
    if (chance(w, 2000))
        extend_leases(w);
}

static void check_leaders(struct world *w)
{
    size_t leaders = 0;
    for (size_t i = 0; i < w->processes; i++) {
        const struct process *p = &w->process[i];
        if (!runs_now(w, p) || p->blocked_until_ns != 0 ||
            !moe_election_leads(&p->election, local(w, p)))
            continue;
        leaders++;
        check(w, w->etcd.leader.create == p->election.revision && w->etcd.leader.process == i,
              "a leader has the leader's key");
    }
    check(w, leaders <= 1, "at most one process leads");
}

static void step(struct world *w)
{
    w->now_ns += STEP_MS * MOE_NS_PER_MS;
    expire_leases(w);
    add_faults(w);
    deliver(w);
    for (size_t i = 0; i < w->processes; i++)
        if (runs_now(w, &w->process[i]))
            run(w, &w->process[i]);
    check_leaders(w);
}

/* Late calls, a lease and its lapse later, a process leads; then writes are answered.
 */
static void expect_progress(struct world *w)
{
    w->quiet = true;
    for (size_t i = 0; i < w->processes; i++)
        w->process[i].asleep_ns = 0;
    w->etcd.away_ns = 0;
    for (size_t i = 0; i < 8 * 1000 / STEP_MS && w->broken == NULL; i++)
        step(w);
    size_t before = w->answered;
    for (size_t i = 0; i < 1000 / STEP_MS && w->broken == NULL; i++)
        step(w);
    bool full = w->write_count == WRITES_MAX || w->etcd.lease_count == LEASES_MAX;
    check(w, w->answered > before || full, "without faults a leader writes");
}

static void run_one(struct world *w, uint64_t seed, bool prints)
{
    static const double rates[] = {0.95, 1.0, 1.05};
    memset(w, 0, sizeof *w);
    w->seed = w->random.state = seed;
    w->prints = prints;
    w->now_ns = 10 * MOE_NS_PER_S;
    w->processes = 2 + rnd(w, 4) / 3;
    w->lapse_steps = rnd(w, 2) == 0 ? 1 : LAPSE_MS / STEP_MS / 4;
    w->etcd.rate = rates[rnd(w, 3)];
    w->write_count = 1; /* 0 is the first state */
    for (size_t i = 0; i < w->processes; i++)
        start(w, &w->process[i]);
    for (size_t i = 0; i < STEPS && w->broken == NULL; i++)
        step(w);
    expect_progress(w);
}

struct totals {
    uint64_t broken; /* a seed; 0 = none */
    size_t terms, answered, lost_terms, fenced, again;
};

static struct totals run_seeds(struct world *w, uint64_t first, uint64_t count, bool prints)
{
    struct totals t = {0};
    for (uint64_t seed = first; seed < first + count && t.broken == 0; seed++) {
        run_one(w, seed, prints);
        t.broken = w->broken != NULL ? seed : 0;
        t.terms += w->terms;
        t.answered += w->answered;
        t.lost_terms += w->lost_terms;
        t.fenced += w->fenced;
        t.again += w->again;
    }
    return t;
}

/* Every guard, switched off, has to be found. */
static int try_guards(struct world *w, uint64_t seeds)
{
    int unfound = 0;
    for (int guard = 0; guard < MOE_GUARD_COUNT; guard++) {
        off = (enum moe_guard)guard;
        struct totals t = run_seeds(w, 1, seeds, false);
        printf("%-20s off: ", guard_names[guard]);
        if (t.broken != 0)
            printf("seed %" PRIu64 ": %s\n", t.broken, w->broken);
        else
            printf("nothing was broken in %" PRIu64 " runs\n", seeds);
        unfound += t.broken == 0;
    }
    return unfound > 0;
}

static int run_all(struct world *w, uint64_t first, uint64_t seeds, bool prints)
{
    struct totals t = run_seeds(w, first, seeds, prints);
    if (t.broken != 0)
        printf("seed %" PRIu64 ", t = %.3f s: %s (replay with --seed %" PRIu64 ")\n", t.broken,
               (double)w->now_ns / 1e9, w->broken, t.broken);
    printf("%" PRIu64
           " runs: %zu terms, %zu lost, %zu writes answered, %zu fenced, %zu made again\n",
           seeds, t.terms, t.lost_terms, t.answered, t.fenced, t.again);
    bool rough = t.terms > 3 * seeds && t.lost_terms > seeds && t.again > seeds / 10;
    return t.broken != 0 || (seeds >= 1000 && !rough);
}

int main(int argc, char **argv)
{
    uint64_t first = 1, seeds = 2000;
    bool guards = false, prints = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        guards = guards || strcmp(argv[i], "--guards") == 0;
        if (strcmp(argv[i], "--seeds") == 0)
            seeds = strtoull(value, NULL, 10);
        if (strcmp(argv[i], "--seed") == 0) {
            first = strtoull(value, NULL, 10);
            seeds = 1;
            prints = true;
        }
        for (int g = 0; strcmp(argv[i], "--off") == 0 && g < MOE_GUARD_COUNT; g++)
            if (strcmp(value, guard_names[g]) == 0)
                off = (enum moe_guard)g;
    }
    struct world *w = calloc(1, sizeof *w);
    if (w == NULL)
        return 2;
    int failed = guards ? try_guards(w, seeds) : run_all(w, first, seeds, prints);
    free(w);
    return failed;
}
