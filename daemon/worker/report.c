/* SPDX-License-Identifier: Apache-2.0 */
/* Reports a Save or Load under way to the service manager and the log, with the figures of
 * GetTrainState and the metrics. Loading of the model reports itself (loader.c). */
#include "worker/worker_state.h"

#include "base/clock.h"
#include "base/transfer.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "training/training.h"

#include <stdio.h>
#include <string.h>

enum { LOG_MS = 5000 };

static void begin(struct moe_worker *w, const char *what, uint64_t now)
{
    (void)snprintf(w->report.what, sizeof w->report.what, "%s", what);
    w->report.begun_ns = w->report.logged_ns = now;
}

/* The status that the transfer has replaced. */
static void end(struct moe_worker *w)
{
    uint64_t epoch = atomic_load(&w->epoch);
    if (w->report.what[0] != '\0' && epoch != 0 && !atomic_load(&w->draining))
        moe_notify_status("serving under epoch %llu", (unsigned long long)epoch);
    w->report.what[0] = '\0';
}

void moe_worker_report(struct moe_worker *w)
{
    struct moe_train_state s = {0};
    char what[sizeof w->report.what], text[MOE_TRANSFER_TEXT];
    uint64_t now = moe_clock_ns();
    if (w->train != NULL)
        moe_train_read_state(w->train, &s);
    if ((s.job != MOE_STEP_SAVE && s.job != MOE_STEP_LOAD) || s.job_bytes_total == 0) {
        end(w);
        return;
    }
    (void)snprintf(what, sizeof what, "%s checkpoint %s",
                   s.job == MOE_STEP_SAVE ? "saving" : "loading", s.job_name);
    if (strcmp(what, w->report.what) != 0)
        begin(w, what, now);
    double seconds = (double)(now - w->report.begun_ns) / (double)MOE_NS_PER_S;
    moe_transfer_text(s.job_bytes, s.job_bytes_total,
                      seconds > 0 ? (double)s.job_bytes / seconds : 0, text);
    moe_notify_status("%s: %s", what, text);
    if (now - w->report.logged_ns < LOG_MS * MOE_NS_PER_MS)
        return;
    w->report.logged_ns = now;
    moe_log_info("%s: %s", what, text);
}
