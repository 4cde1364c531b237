/* SPDX-License-Identifier: Apache-2.0 */
/* See training_watch.h. */
#include "training_watch.h"

#include "base/mutex.h"
#include "base/thread.h"
#include "base/wait.h"
#include "moectl/group/link.h"
#include "moectl/group/train_state.h"
#include "moectl/io/proto_json.h"

#include <stdlib.h>
#include <string.h>

enum {
    SILENCE_MS = 3000, /* before the first report */
    PERIOD_MS = 5000,  /* between two reports */
    ASK_LIMIT_MS = 1000,
    LINE_BYTES = 384,
};

struct moectl_watch {
    const char *endpoint;
    pthread_t thread;
    struct moe_mutex lock;
    pthread_cond_t ended;
    MOE_GUARDED_BY(lock) bool over;
};

/* "the group is DEGRADED: slot 1 is empty", or the error of the call; "" if the group serves. */
static void describe_group(const char *endpoint, char line[LINE_BYTES])
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *s = NULL;
    uint64_t limit = moe_clock_ns() + ASK_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st = moectl_admin_open(endpoint, limit, &link, &s);
    line[0] = '\0';
    if (st.code != MOE_OK)
        snprintf(line, LINE_BYTES, "%s", st.text);
    else if (s->state != MOE__V1__GROUP_STATE__GROUP_STATE_SERVING)
        snprintf(line, LINE_BYTES, "the group is %s%s%.200s",
                 moectl_enum_name(&moe__v1__group_state__descriptor, (int)s->state),
                 s->reason[0] != '\0' ? ": " : "", s->reason);
    if (s != NULL)
        moe__v1__get_status_response__free_unpacked(s, NULL);
    moectl_link_close(link);
}

void moectl_watch_report_group(const char *endpoint)
{
    char line[LINE_BYTES];
    describe_group(endpoint, line);
    if (line[0] != '\0')
        moectl_say("%s; `moectl status` shows more", line);
}

/* "saving k5: 12.0 of 40.0 MiB of this worker"; false if no Save or Load runs. */
static bool describe_progress(const char *endpoint, char line[LINE_BYTES])
{
    Moe__V1__GetTrainStateResponse *s = NULL;
    struct moe_status st =
        moectl_train_probe(endpoint, moe_clock_ns() + ASK_LIMIT_MS * MOE_NS_PER_MS, &s);
    if (st.code != MOE_OK)
        return false;
    bool saving = s->saving[0] != '\0', loading = s->loading[0] != '\0';
    if (saving || loading)
        snprintf(line, LINE_BYTES, "%s %.64s: %.1f of %.1f MiB of this worker",
                 saving ? "saving" : "loading", saving ? s->saving : s->loading,
                 (double)s->progress_bytes / (1024.0 * 1024.0),
                 (double)s->progress_bytes_total / (1024.0 * 1024.0));
    moe__v1__get_train_state_response__free_unpacked(s, NULL);
    return saving || loading;
}

static void report_progress(const struct moectl_watch *w, char last[LINE_BYTES])
{
    char line[LINE_BYTES], group[LINE_BYTES];
    if (!describe_progress(w->endpoint, line)) {
        describe_group(w->endpoint, group);
        snprintf(line, sizeof line, "waiting%s%.300s", group[0] != '\0' ? ": " : " for an answer",
                 group);
    }
    if (strcmp(line, last) != 0)
        moectl_say("%s", line);
    memcpy(last, line, LINE_BYTES);
}

static void *watch_main(void *arg)
{
    struct moectl_watch *w = arg;
    char last[LINE_BYTES] = "";
    uint64_t at = moe_clock_ns() + SILENCE_MS * MOE_NS_PER_MS;
    moe_mutex_lock(&w->lock);
    while (!w->over) {
        if (moe_wait_until(&w->ended, &w->lock, at) || w->over)
            continue;
        moe_mutex_unlock(&w->lock);
        report_progress(w, last);
        at = moe_clock_ns() + PERIOD_MS * MOE_NS_PER_MS;
        moe_mutex_lock(&w->lock);
    }
    moe_mutex_unlock(&w->lock);
    return NULL;
}

struct moectl_watch *moectl_watch_begin(const char *endpoint)
{
    struct moectl_watch *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->endpoint = endpoint;
    moe_mutex_init(&w->lock);
    moe_wait_init(&w->ended);
    if (moe_thread_create(&w->thread, "moectl-watch", watch_main, w) == 0)
        return w;
    pthread_cond_destroy(&w->ended);
    moe_mutex_destroy(&w->lock);
    free(w);
    return NULL;
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
