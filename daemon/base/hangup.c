/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/hangup.h"

#include "daemon/log.h"
#include "daemon/notify.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

static int arrivals = -1; /* signalfd; open for as long as the process lives */
static struct {
    void (*fn)(void *ctx);
    void *ctx;
} parts[MOE_HANGUP_PARTS];

void moe_hangup_call(enum moe_hangup_part part, void (*fn)(void *ctx), void *ctx)
{
    parts[part].fn = fn;
    parts[part].ctx = ctx;
}

struct moe_status moe_hangup_hold(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGHUP);
    int wrong = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (wrong == 0 && arrivals < 0)
        arrivals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (wrong == 0 && arrivals < 0)
        wrong = errno;
    return wrong == 0 ? moe_ok()
                      : moe_error(MOE_INTERNAL, MOE_REASON_IO, "SIGHUP: %s", strerror(wrong));
}

static void on_readable(uv_poll_t *watch, int status, int events)
{
    (void)watch;
    (void)events;
    struct signalfd_siginfo info;
    bool came = false;
    while (status == 0 && read(arrivals, &info, sizeof info) == (ssize_t)sizeof info)
        came = true;
    if (!came)
        return;
    moe_notify_reloading();
    for (int i = 0; i < MOE_HANGUP_PARTS; i++)
        if (parts[i].fn != NULL)
            parts[i].fn(parts[i].ctx);
    struct moe_status st = moe_log_reopen();
    if (moe_failed(&st))
        moe_log_error("SIGHUP: %s; lines go on to the old file", st.text);
    else if (moe_log_path() != NULL)
        moe_log_info("SIGHUP: the log file %s was opened anew", moe_log_path());
    else
        moe_log_info("SIGHUP: looked at the settings and the files of trust again");
    moe_notify_ready();
}

struct moe_status moe_hangup_watch(uv_loop_t *loop, uv_poll_t *watch)
{
    MOE_INVARIANT(arrivals >= 0);
    int wrong = uv_poll_init(loop, watch, arrivals);
    if (wrong == 0)
        wrong = uv_poll_start(watch, UV_READABLE, on_readable);
    return wrong == 0 ? moe_ok()
                      : moe_error(MOE_INTERNAL, MOE_REASON_IO, "SIGHUP: %s", uv_strerror(wrong));
}
