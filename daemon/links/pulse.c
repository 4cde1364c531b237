/* SPDX-License-Identifier: Apache-2.0 */
/* The judge, and the thread that beats and judges; see pulse.h. */
#include "links/pulse.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "moe/types.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------------------- the judge */

/* The state is the field after the name, which is in parentheses and may contain any byte. */
enum moe_pulse_thread moe_pulse_look(uint32_t process, uint32_t thread)
{
    char path[64], text[256];
    (void)snprintf(path, sizeof path, "/proc/%u/task/%u/stat", process, thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) /* other failures (no descriptor left) tell nothing of that thread */
        return errno == ENOENT || errno == ESRCH ? MOE_PULSE_GONE : MOE_PULSE_SLEEPS;
    ssize_t n = read(fd, text, sizeof text - 1);
    bool gone = n == 0 || (n < 0 && errno == ESRCH);
    close(fd);
    if (n <= 0)
        return gone ? MOE_PULSE_GONE : MOE_PULSE_SLEEPS;
    text[n] = '\0';
    const char *end = strrchr(text, ')');
    switch (end != NULL && end[1] == ' ' ? end[2] : 'X') {
    case 'R': return MOE_PULSE_RUNS;
    case 'T':
    case 't': return MOE_PULSE_STOPPED;
    case 'Z':
    case 'X':
    case 'x': return MOE_PULSE_GONE;
    default: return MOE_PULSE_SLEEPS;
    }
}

bool moe_pulse_judge(struct moe_pulse_peer *peer, uint32_t beat,
                     enum moe_pulse_thread (*look)(void *ctx), void *ctx)
{
    if (beat != peer->beat || beat == MOE_SHM_BEAT_ENDED) {
        peer->beat = beat;
        peer->silent = 0;
        return false;
    }
    if (peer->silent < UINT32_MAX)
        peer->silent++;
    if (peer->judged || peer->silent < MOE_PULSE_SUSPECT_TURNS)
        return false;
    switch (look(ctx)) {
    case MOE_PULSE_RUNS: peer->silent = 0; break;
    case MOE_PULSE_SLEEPS: peer->judged = peer->silent >= MOE_PULSE_ASLEEP_TURNS; break;
    case MOE_PULSE_STOPPED:
    case MOE_PULSE_GONE: peer->judged = true; break;
    }
    return peer->judged;
}

/* ------------------------------------------------------------------------ the thread */

struct moe_pulse {
    void (*stopped)(void *ctx, uint64_t epoch, uint64_t slots, const char *why);
    void (*turn)(void *ctx);
    void *ctx;
    pthread_t thread;
    pthread_cond_t wake;
    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        bool view; /* there is one */
        uint64_t epoch;
        struct moe_shm_reader *reader;                       /* NULL: no view, or no memory */
        const struct moe_shm_writer *watched[MOE_MAX_SLOTS]; /* NULL: not watched */
        struct moe_pulse_peer peers[MOE_MAX_SLOTS];
        bool quit;
    };
};

static enum moe_pulse_thread look_at(void *ctx)
{
    uint32_t process, thread;
    moe_shm_writer_peer(ctx, &process, &thread);
    return moe_pulse_look(process, thread);
}

bool moe_pulse_judge_too(struct moe_pulse_peer *peer, enum moe_pulse_thread (*look)(void *ctx),
                         void *ctx)
{
    if (peer->silent < 2 || peer->judged) /* one turn is jitter */
        return false;
    enum moe_pulse_thread state = look(ctx);
    peer->judged = state == MOE_PULSE_STOPPED || state == MOE_PULSE_GONE;
    return peer->judged;
}

/* The slots that this turn judges, as bits. */
static uint64_t take_turn(struct moe_pulse *p) MOE_REQUIRES(p->lock)
{
    uint64_t stopped = 0;
    if (p->reader != NULL)
        moe_shm_reader_beat(p->reader);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if (p->watched[s] != NULL &&
            moe_pulse_judge(&p->peers[s], moe_shm_writer_beat(p->watched[s]), look_at,
                            (void *)(uintptr_t)p->watched[s]))
            stopped |= UINT64_C(1) << s;
    for (uint32_t s = 0; stopped != 0 && s < MOE_MAX_SLOTS; s++)
        if (p->watched[s] != NULL &&
            moe_pulse_judge_too(&p->peers[s], look_at, (void *)(uintptr_t)p->watched[s]))
            stopped |= UINT64_C(1) << s;
    return stopped;
}

static void *run(void *arg)
{
    struct moe_pulse *p = arg;
    moe_mutex_lock(&p->lock);
    while (!p->quit) {
        uint64_t stopped = take_turn(p), epoch = p->epoch;
        if (p->view) {
            moe_mutex_unlock(&p->lock);
            if (stopped != 0)
                p->stopped(p->ctx, epoch, stopped, "has stopped: it gives no sign of life");
            if (p->turn != NULL)
                p->turn(p->ctx);
            moe_mutex_lock(&p->lock);
        }
        /* Without a view there is nothing to do: begin and destroy wake the thread. */
        uint64_t until = p->view ? moe_clock_ns() + MOE_PULSE_TURN_MS * MOE_NS_PER_MS : MOE_NEVER;
        if (!p->quit)
            (void)moe_wait_until(&p->wake, &p->lock, until);
    }
    moe_mutex_unlock(&p->lock);
    return NULL;
}

struct moe_status moe_pulse_create(void (*stopped)(void *ctx, uint64_t epoch, uint64_t slots,
                                                   const char *why),
                                   void (*turn)(void *ctx), void *ctx, struct moe_pulse **out)
{
    struct moe_pulse *p = calloc(1, sizeof *p);
    if (p == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "no memory for the peers");
    p->stopped = stopped;
    p->turn = turn;
    p->ctx = ctx;
    moe_mutex_init(&p->lock);
    moe_wait_init(&p->wake);
    int rc = moe_thread_create(&p->thread, "moe-pulse", run, p);
    if (rc == 0) {
        *out = p;
        return moe_ok();
    }
    pthread_cond_destroy(&p->wake);
    moe_mutex_destroy(&p->lock);
    free(p);
    return moe_thread_failure("moe-pulse", rc);
}

void moe_pulse_destroy(struct moe_pulse *p)
{
    if (p == NULL)
        return;
    moe_mutex_lock(&p->lock);
    p->quit = true;
    pthread_cond_signal(&p->wake);
    moe_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->wake);
    moe_mutex_destroy(&p->lock);
    free(p);
}

void moe_pulse_begin(struct moe_pulse *p, uint64_t epoch, struct moe_shm_reader *reader)
{
    moe_mutex_lock(&p->lock);
    p->view = true;
    p->epoch = epoch;
    p->reader = reader;
    if (reader != NULL)
        moe_shm_reader_beat(reader);
    pthread_cond_signal(&p->wake);
    moe_mutex_unlock(&p->lock);
}

void moe_pulse_watch(struct moe_pulse *p, uint32_t slot, const struct moe_shm_writer *writer)
{
    MOE_INVARIANT(slot < MOE_MAX_SLOTS);
    moe_mutex_lock(&p->lock);
    p->watched[slot] = writer;
    p->peers[slot] = (struct moe_pulse_peer){0};
    moe_mutex_unlock(&p->lock);
}

void moe_pulse_end(struct moe_pulse *p)
{
    moe_mutex_lock(&p->lock);
    if (p->reader != NULL)
        moe_shm_reader_end_beats(p->reader);
    p->reader = NULL;
    p->view = false;
    memset(p->watched, 0, sizeof p->watched);
    moe_mutex_unlock(&p->lock);
}
