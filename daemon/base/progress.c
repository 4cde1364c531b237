/* SPDX-License-Identifier: Apache-2.0 */
/* A table of loops and a judge over it. Loops write two atomics each; only the judge takes the
 * lock. */
#include "daemon/progress.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "daemon/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A look counts at most this many periods of looks since the one before. */
enum { LOOKS_MISSED = 4 };

struct moe_progress {
    struct moe_progress_config config;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct moe_loop loops[MOE_PROGRESS_LOOPS];
        size_t count;
        uint64_t looked_ns; /* by the clock; 0 = never */
        uint64_t time_ns;   /* the judge's */
        void (*add)(void *ctx, struct moe_health *v);
        void *add_ctx;
        bool closed;
    };

    pthread_t thread;
    bool watches;
    struct moe_mutex watch_lock;
    pthread_cond_t wake;
    MOE_GUARDED_BY(watch_lock) bool quit;
    void (*changed)(void *ctx, const struct moe_health *v);
    void *ctx;
};

/* ----------------------------------------------------------------------------- health */

void moe_health_add(struct moe_health *v, const char *name, const char *code, bool kills,
                    const char *fmt, ...)
{
    v->ready = v->ready && code == NULL;
    v->alive = v->alive && (code == NULL || !kills);
    if (v->count == MOE_PROGRESS_LINES)
        return;
    struct moe_progress_line *line = &v->lines[v->count++];
    *line = (struct moe_progress_line){.name = name, .code = code, .kills = code != NULL && kills};
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(line->text, sizeof line->text, fmt, args);
    va_end(args);
}

/* Appends to the text of `size`; returns its length. */
static size_t append(char *out, size_t size, size_t length, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static size_t append(char *out, size_t size, size_t length, const char *fmt, ...)
{
    if (length + 1 >= size)
        return length;
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(out + length, size - length, fmt, args);
    va_end(args);
    size_t room = size - length - 1;
    return length + (n < 0 ? 0 : (size_t)n < room ? (size_t)n : room);
}

void moe_health_print(const struct moe_health *v, bool ready, bool verbose, char *out, size_t size)
{
    size_t length = 0;
    bool well = ready ? v->ready : v->alive;
    if (size > 0)
        out[0] = '\0';
    for (size_t i = 0; i < v->count; i++) {
        const struct moe_progress_line *line = &v->lines[i];
        bool against = line->code != NULL && (ready || line->kills);
        if (against)
            length =
                append(out, size, length, "[-] %s %s: %s\n", line->name, line->code, line->text);
        else if (verbose)
            length = append(out, size, length, "[+] %s%s%s: %s\n", line->name,
                            line->code != NULL ? " " : "", line->code != NULL ? line->code : "",
                            line->text);
    }
    (void)append(out, size, length, "%s\n", well ? "ok" : ready ? "not ready" : "not alive");
}

/* ------------------------------------------------------------------------------- judge */

static uint64_t sum_of(const struct moe_loop *l)
{
    uint64_t sum = atomic_load_explicit(&l->turns, memory_order_relaxed);
    return l->config.more != NULL ? sum + l->config.more(l->config.ctx) : sum;
}

/* Notes progress. A loop that was not judged before begins now. */
static void look_at(struct moe_loop *l, const struct moe_loop_place *place, uint64_t now)
{
    uint64_t sum = sum_of(l);
    bool judged = l->config.always || place != NULL;
    if (sum != l->seen || !judged || !l->was_judged)
        l->moved_ns = now;
    l->seen = sum;
    l->was_judged = judged;
}

static void say_stuck(struct moe_loop *l, bool stuck, const char *code, const char *what)
{
    if (stuck && !l->was_stuck)
        moe_log_warn("health: %s: %s, no progress in %s", l->config.name, code, what);
    else if (!stuck && l->was_stuck)
        moe_log_info("health: %s is not stuck any more", l->config.name);
    l->was_stuck = stuck;
}

static void judge_loop(const struct moe_progress *p, struct moe_loop *l, uint64_t now,
                       struct moe_health *v)
{
    const struct moe_loop_place *place = atomic_load_explicit(&l->place, memory_order_relaxed);
    look_at(l, place, now);
    const char *what = place != NULL ? place->what : l->config.always ? "its loop" : "idle";
    uint64_t rest = now - l->moved_ns;
    const struct moe_loop *mover = l->config.mover;
    l->excused = mover != NULL && (mover->was_stuck || mover->excused);
    bool stuck = rest > p->config.limit_ns && !l->excused;
    bool kills = rest > MOE_PROGRESS_DEAD * p->config.limit_ns && !l->config.readies_only &&
                 (place == NULL || !place->outside);
    const char *code = place != NULL && place->code != NULL ? place->code : l->config.code;
    say_stuck(l, stuck, code, what);
    if (stuck)
        moe_health_add(v, l->config.name, code, kills, "no progress for %.1f s in %s",
                       (double)rest / (double)MOE_NS_PER_S, what);
    else
        moe_health_add(v, l->config.name, NULL, false, "%s",
                       place == NULL && l->config.always ? "turns" : what);
}

/* Time that passes between two looks counts up to a bound: a longer gap is a pause of the whole
 * process. */
static uint64_t pass_time(struct moe_progress *p, uint64_t now_ns) MOE_REQUIRES(p->lock)
{
    const uint64_t most = LOOKS_MISSED * MOE_PROGRESS_LOOK_MS * MOE_NS_PER_MS;
    if (p->looked_ns != 0 && now_ns > p->looked_ns)
        p->time_ns += now_ns - p->looked_ns < most ? now_ns - p->looked_ns : most;
    if (now_ns > p->looked_ns)
        p->looked_ns = now_ns;
    return p->time_ns;
}

void moe_progress_judge(struct moe_progress *p, uint64_t now_ns, struct moe_health *out)
{
    *out = (struct moe_health){.alive = true, .ready = true};
    moe_mutex_lock(&p->lock);
    uint64_t now = pass_time(p, now_ns);
    for (size_t i = 0; i < p->count && !p->closed; i++)
        judge_loop(p, &p->loops[i], now, out);
    if (p->add != NULL && !p->closed)
        p->add(p->add_ctx, out);
    if (p->closed)
        moe_health_add(out, "daemon", "STOPPING", false, "it ends");
    moe_mutex_unlock(&p->lock);
}

bool moe_progress_is_alive(struct moe_progress *p)
{
    struct moe_health v = {.alive = true};
    if (p != NULL)
        moe_progress_judge(p, moe_clock_ns(), &v);
    return v.alive;
}

/* --------------------------------------------------------------------------- the watch */

static void *watch_main(void *arg)
{
    struct moe_progress *p = arg;
    struct moe_health v, last = {0};
    uint64_t at = moe_clock_ns();
    moe_mutex_lock(&p->watch_lock);
    for (bool first = true; !p->quit; first = false) {
        moe_mutex_unlock(&p->watch_lock);
        moe_progress_judge(p, moe_clock_ns(), &v);
        if (first || v.alive != last.alive || v.ready != last.ready)
            p->changed(p->ctx, &v);
        last = v;
        at = moe_clock_ns() + MOE_PROGRESS_LOOK_MS * MOE_NS_PER_MS;
        moe_mutex_lock(&p->watch_lock);
        while (!p->quit && moe_wait_until(&p->wake, &p->watch_lock, at))
            ;
    }
    moe_mutex_unlock(&p->watch_lock);
    return NULL;
}

struct moe_status moe_progress_watch(struct moe_progress *p,
                                     void (*changed)(void *ctx, const struct moe_health *v),
                                     void *ctx)
{
    MOE_INVARIANT(!p->watches);
    p->changed = changed;
    p->ctx = ctx;
    moe_mutex_lock(&p->watch_lock);
    p->quit = false;
    moe_mutex_unlock(&p->watch_lock);
    p->watches = moe_thread_create(&p->thread, "moe-health", watch_main, p) == 0;
    return p->watches ? moe_ok()
                      : moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_NONE, "cannot start a thread");
}

void moe_progress_close(struct moe_progress *p)
{
    if (p == NULL)
        return;
    moe_mutex_lock(&p->lock);
    p->closed = true;
    moe_mutex_unlock(&p->lock);
    if (!p->watches)
        return;
    moe_mutex_lock(&p->watch_lock);
    p->quit = true;
    pthread_cond_signal(&p->wake);
    moe_mutex_unlock(&p->watch_lock);
    pthread_join(p->thread, NULL);
    p->watches = false;
}

/* ---------------------------------------------------------------------------- lifetime */

struct moe_status moe_progress_create(const struct moe_progress_config *config,
                                      struct moe_progress **out)
{
    struct moe_progress *p = aligned_alloc(_Alignof(struct moe_progress), sizeof *p);
    if (p == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for health");
    memset(p, 0, sizeof *p);
    p->config = *config;
    moe_mutex_init(&p->lock);
    moe_mutex_init(&p->watch_lock);
    moe_wait_init(&p->wake);
    *out = p;
    return moe_ok();
}

void moe_progress_destroy(struct moe_progress *p)
{
    if (p == NULL)
        return;
    moe_progress_close(p);
    pthread_cond_destroy(&p->wake);
    moe_mutex_destroy(&p->watch_lock);
    moe_mutex_destroy(&p->lock);
    free(p);
}

uint64_t moe_progress_step_ns(const struct moe_progress *p)
{
    return p != NULL ? p->config.step_ns : 0;
}

struct moe_loop *moe_progress_add(struct moe_progress *p, const struct moe_loop_config *config)
{
    if (p == NULL)
        return NULL;
    moe_mutex_lock(&p->lock);
    struct moe_loop *l = p->count < MOE_PROGRESS_LOOPS ? &p->loops[p->count] : NULL;
    if (l != NULL) {
        l->config = *config;
        p->count++;
    }
    moe_mutex_unlock(&p->lock);
    if (l == NULL)
        moe_log_error("health: no room for the loop %s", config->name);
    return l;
}

void moe_progress_set_conditions(struct moe_progress *p,
                                 void (*add)(void *ctx, struct moe_health *v), void *ctx)
{
    if (p == NULL)
        return;
    moe_mutex_lock(&p->lock);
    p->add = add;
    p->add_ctx = ctx;
    moe_mutex_unlock(&p->lock);
}
