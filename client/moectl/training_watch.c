/* SPDX-License-Identifier: Apache-2.0 */
/* See training_watch.h. */
#include "training_watch.h"

#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "moectl/group/link.h"
#include "moectl/group/train_state.h"
#include "moectl/io/progress.h"
#include "moectl/io/proto_json.h"

#include <stdlib.h>
#include <string.h>

enum {
    SILENCE_MS = 3000, /* before the first line */
    PERIOD_MS = 1000,  /* between two looks; moectl_progress_show has fewer lines */
    LIVE_MS = 300,     /* on a terminal: before the first look, and between two */
    ASK_LIMIT_MS = 1000,
};

struct moectl_watch {
    moectl_watch_ask ask;
    void *ctx;
    const char *endpoint; /* of a worker, for Saves and Loads */
    pthread_t thread;
    struct moe_mutex lock;
    pthread_cond_t ended;
    MOE_GUARDED_BY(lock) bool over;
    /* Of the thread. */
    struct moectl_link *links[MOE_MAX_SLOTS]; /* to all workers of the view */
    size_t count;
    struct moectl_progress progress;
    char last[MOECTL_WATCH_LINE]; /* what was said instead of figures */
};

/* "the group is DEGRADED: slot 1 is empty", or the error of the call; "" if the group serves. */
static void describe_group(const char *endpoint, char line[MOECTL_WATCH_LINE])
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *s = NULL;
    uint64_t limit = moe_clock_ns() + ASK_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st = moectl_admin_open(endpoint, limit, &link, &s);
    line[0] = '\0';
    if (st.code != MOE_OK)
        snprintf(line, MOECTL_WATCH_LINE, "%s", st.text);
    else if (s->state != MOE__V1__GROUP_STATE__GROUP_STATE_SERVING)
        snprintf(line, MOECTL_WATCH_LINE, "the group is %s%s%.200s",
                 moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state),
                 s->reason[0] != '\0' ? ": " : "", s->reason);
    if (s != NULL)
        moe__v1__get_status_response__free_unpacked(s, NULL);
    moectl_link_close(link);
}

void moectl_watch_report_group(const char *endpoint)
{
    char line[MOECTL_WATCH_LINE];
    describe_group(endpoint, line);
    if (line[0] != '\0')
        moectl_say("%s; `moectl status` shows more", line);
}

/* ------------------------------------------------------------------ the workers */

static void forget_workers(struct moectl_watch *w)
{
    while (w->count > 0)
        moectl_link_close(w->links[--w->count]);
}

/* A link for calls about training: a worker may have a separate address for trainers. */
static bool add_worker(struct moectl_watch *w, const char *worker, uint64_t limit_ns)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    struct moe_status st = moectl_link_check_worker(w->endpoint, worker);
    if (!moe_failed(&st))
        st = moectl_trainer_endpoint(worker, limit_ns, endpoint);
    if (!moe_failed(&st))
        st = moectl_link_open(endpoint, &w->links[w->count]);
    w->count += !moe_failed(&st);
    return !moe_failed(&st);
}

/* All workers of the view, or none. */
static void find_workers(struct moectl_watch *w)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    uint64_t limit_ns = moe_clock_ns() + ASK_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st = moectl_link_open(w->endpoint, &link);
    if (!moe_failed(&st))
        st = moectl_link_server_info(link, limit_ns, &info);
    bool good = !moe_failed(&st) && info->n_workers <= MOE_MAX_SLOTS;
    for (size_t i = 0; good && i < info->n_workers; i++)
        if (info->workers[i][0] != '\0')
            good = add_worker(w, info->workers[i], limit_ns);
    if (!good)
        forget_workers(w);
    if (info != NULL)
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
    moectl_link_close(link);
}

static void add_state(struct moectl_watch_look *t, const Moe__V1__GetTrainStateResponse *s)
{
    bool saving = s->saving[0] != '\0';
    const char *name = saving ? s->saving : s->loading;
    if (name[0] != '\0')
        (void)snprintf(t->what, sizeof t->what, "%s %.64s", saving ? "saving" : "loading", name);
    t->done += s->progress_bytes;
    t->total += s->progress_bytes_total;
}

/* False unless all workers answer: a part of the sum would mislead. */
static bool ask_workers(struct moectl_watch *w, struct moectl_watch_look *t)
{
    *t = (struct moectl_watch_look){0};
    if (w->count == 0)
        find_workers(w);
    for (size_t i = 0; i < w->count; i++) {
        Moe__V1__GetTrainStateResponse *s = NULL;
        struct moe_status st =
            moectl_train_state(w->links[i], moe_clock_ns() + ASK_LIMIT_MS * MOE_NS_PER_MS, &s);
        if (moe_failed(&st)) {
            forget_workers(w); /* the next view may have others */
            return false;
        }
        add_state(t, s);
        moe__v1__get_train_state_response__free_unpacked(s, NULL);
    }
    return w->count > 0;
}

/* ------------------------------------------------------------------ reports */

static void say_once(struct moectl_watch *w, const char *line)
{
    moectl_progress_clear(&w->progress);
    if (strcmp(line, w->last) != 0)
        moectl_say("%s", line);
    (void)snprintf(w->last, sizeof w->last, "%s", line);
}

/* moectl_watch_ask; `ctx` is the watch. */
static void ask_training(void *ctx, struct moectl_watch_look *look)
{
    struct moectl_watch *w = ctx;
    char group[MOECTL_WATCH_LINE];
    bool known = ask_workers(w, look);
    if (known && look->total > 0)
        return;
    look->total = 0;
    if (known && look->what[0] != '\0') {
        (void)snprintf(look->waiting, sizeof look->waiting, "%s: the workers prepare it",
                       look->what);
        return;
    }
    describe_group(w->endpoint, group);
    (void)snprintf(look->waiting, sizeof look->waiting, "waiting%s%.300s",
                   group[0] != '\0' ? ": " : " for an answer", group);
}

/* `patient`: without figures, say nothing yet. */
static void report_progress(struct moectl_watch *w, bool patient)
{
    struct moectl_watch_look look = {0};
    w->ask(w->ctx, &look);
    if (look.total > 0)
        moectl_progress_show(&w->progress, look.what, look.done, look.total);
    else if (!patient)
        say_once(w, look.waiting);
}

static void *watch_main(void *arg)
{
    struct moectl_watch *w = arg;
    bool live = moectl_progress_is_live();
    uint64_t begun = moe_clock_ns();
    uint64_t at = begun + (uint64_t)(live ? LIVE_MS : SILENCE_MS) * MOE_NS_PER_MS;
    moe_mutex_lock(&w->lock);
    while (!w->over) {
        if (moe_wait_until(&w->ended, &w->lock, at) || w->over)
            continue;
        moe_mutex_unlock(&w->lock);
        uint64_t now = moe_clock_ns();
        report_progress(w, now - begun < SILENCE_MS * MOE_NS_PER_MS);
        at = moe_clock_ns() + (uint64_t)(live ? LIVE_MS : PERIOD_MS) * MOE_NS_PER_MS;
        moe_mutex_lock(&w->lock);
    }
    moe_mutex_unlock(&w->lock);
    moectl_progress_clear(&w->progress);
    forget_workers(w);
    return NULL;
}

static struct moectl_watch *begin(struct moectl_watch *w)
{
    moe_mutex_init(&w->lock);
    moe_wait_init(&w->ended);
    if (moe_thread_create(&w->thread, "moectl-watch", watch_main, w) == 0)
        return w;
    pthread_cond_destroy(&w->ended);
    moe_mutex_destroy(&w->lock);
    free(w);
    return NULL;
}

struct moectl_watch *moectl_watch_begin(moectl_watch_ask ask, void *ctx)
{
    struct moectl_watch *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->ask = ask;
    w->ctx = ctx;
    return begin(w);
}

struct moectl_watch *moectl_watch_training(const char *endpoint)
{
    struct moectl_watch *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->ask = ask_training;
    w->ctx = w;
    w->endpoint = endpoint;
    return begin(w);
}

void moectl_watch_end(struct moectl_watch *w)
{
    if (w == NULL)
        return;
    moe_mutex_lock(&w->lock);
    w->over = true;
    pthread_cond_signal(&w->ended);
    moe_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->ended);
    moe_mutex_destroy(&w->lock);
    free(w);
}
