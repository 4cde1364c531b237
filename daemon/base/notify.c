/* SPDX-License-Identifier: Apache-2.0 */
/* See notify.h. */
#include "daemon/notify.h"

#include "base/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { LINE_BYTES = 256, FEEDS = 4 };

static int manager = -1;     /* connected datagram socket */
static uint64_t watchdog_us; /* 0 = none */

/* Decimal, from 1 on; false for all else. */
static bool read_number(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    *out = v;
    return text[0] >= '1' && text[0] <= '9' && *end == '\0' && errno == 0;
}

/* A path, or '@' and a name of the abstract namespace. */
static struct moe_status connect_to(const char *name)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    if ((name[0] != '/' && name[0] != '@') || length < 2 || length >= sizeof to.sun_path)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "NOTIFY_SOCKET is no name of a socket: %.60s", name);
    memcpy(to.sun_path, name, length);
    if (name[0] == '@')
        to.sun_path[0] = '\0';
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)(const void *)&to, size) != 0) {
        struct moe_status st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "NOTIFY_SOCKET %.60s: %s",
                                         name, strerror(errno));
        if (fd >= 0)
            close(fd);
        return st;
    }
    manager = fd;
    return moe_ok();
}

/* The watchdog is for one process; a wrapper may pass another's on. */
static struct moe_status read_watchdog(const char *period, const char *process)
{
    uint64_t us, pid;
    if (process != NULL && (!read_number(process, &pid) || pid != (uint64_t)getpid()))
        return moe_ok();
    if (!read_number(period, &us))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "WATCHDOG_USEC is no time: %.40s", period);
    watchdog_us = us;
    return moe_ok();
}

struct moe_status moe_notify_open(void)
{
    const char *name = getenv("NOTIFY_SOCKET"), *period = getenv("WATCHDOG_USEC");
    struct moe_status st = moe_ok();
    moe_notify_close();
    if (name != NULL)
        st = connect_to(name);
    if (manager >= 0 && period != NULL)
        st = read_watchdog(period, getenv("WATCHDOG_PID"));
    (void)unsetenv("NOTIFY_SOCKET");
    (void)unsetenv("WATCHDOG_USEC");
    (void)unsetenv("WATCHDOG_PID");
    return st;
}

void moe_notify_close(void)
{
    if (manager >= 0)
        close(manager);
    manager = -1;
    watchdog_us = 0;
}

static void send_text(const char *text)
{
    if (manager >= 0)
        (void)send(manager, text, strlen(text), MSG_NOSIGNAL);
}

void moe_notify_ready(void)
{
    send_text("READY=1");
}

void moe_notify_reloading(void)
{
    char text[LINE_BYTES]; /* the time tells this reload from an earlier one */
    (void)snprintf(text, sizeof text, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64,
                   moe_clock_ns() / 1000);
    send_text(text);
}

void moe_notify_stopping(void)
{
    send_text("STOPPING=1");
}

void moe_notify_status(const char *fmt, ...)
{
    char text[LINE_BYTES] = "STATUS=";
    size_t head = strlen(text);
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text + head, sizeof text - head, fmt, args);
    va_end(args);
    for (char *c = text; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = ' ';
    send_text(text);
}

void moe_notify_extend(uint64_t ms)
{
    char text[LINE_BYTES];
    (void)snprintf(text, sizeof text, "EXTEND_TIMEOUT_USEC=%" PRIu64, ms * 1000);
    send_text(text);
}

static void on_timer(uv_timer_t *timer)
{
    if (moe_progress_is_alive(timer->data))
        send_text("WATCHDOG=1");
}

struct moe_status moe_notify_watch(struct moe_progress *p, uv_loop_t *loop, uv_timer_t *timer)
{
    uint64_t period_ms = watchdog_us / (1000 * FEEDS);
    int wrong = uv_timer_init(loop, timer);
    timer->data = p;
    if (wrong == 0 && watchdog_us > 0)
        wrong = uv_timer_start(timer, on_timer, 0, period_ms > 0 ? period_ms : 1);
    return wrong == 0 ? moe_ok()
                      : moe_error(MOE_INTERNAL, MOE_REASON_IO, "watchdog: %s", uv_strerror(wrong));
}
