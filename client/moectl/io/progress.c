/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/io/progress.h"

#include "moectl/io/cli.h"

#include "base/clock.h"
#include "base/transfer.h"
#include "daemon/log.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum {
    LINE_MS = 5000,
    LINE_PERCENT = 10,
    BAR = 24,          /* cells of a bar, where the terminal is wide enough */
    BAR_LEAST = 8,     /* no bar below */
    COLUMNS = 80,      /* of a terminal that does not tell */
    COLUMNS_MAX = 250, /* longer lines are cut */
};

#define START "\r"
#define CLEAR "\r\x1b[K"

bool moectl_progress_is_live(void)
{
    return isatty(STDERR_FILENO) == 1;
}

static unsigned columns(void)
{
    struct winsize size = {0};
    bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    unsigned n = known ? size.ws_col : COLUMNS;
    return n < COLUMNS_MAX ? n : COLUMNS_MAX;
}

/* "loading [######......] 45 %, ...", cut to the terminal, in place. */
static void draw(struct moectl_progress *p, double share, const char *text)
{
    char bar[BAR + 4] = "", what[4 * sizeof p->what + 9], line[COLUMNS_MAX + 1];
    unsigned width = columns() - 1; /* the cursor has the last column */
    moe_log_escape(what, sizeof what, p->what);
    size_t rest = strlen(what) + strlen(text) + 4;
    size_t cells = rest + BAR <= width ? BAR : rest < width ? width - rest : 0;
    if (cells >= BAR_LEAST) {
        size_t full = (size_t)((double)cells * (share < 1 ? share : 1));
        bar[0] = '[';
        memset(bar + 1, '#', full);
        memset(bar + 1 + full, '.', cells - full);
        memcpy(bar + 1 + cells, "] ", 3);
    }
    (void)snprintf(line, sizeof line, "%s %s%s", what, bar, text);
    line[width < sizeof line - 1 ? width : sizeof line - 1] = '\0';
    fputs(START, stderr);
    fputs(line, stderr);
    fputs("\x1b[K", stderr);
    fflush(stderr);
    p->on_screen = true;
}

static void say(struct moectl_progress *p, unsigned percent, const char *text, uint64_t now)
{
    bool due = !p->said || now - p->said_ns >= LINE_MS * MOE_NS_PER_MS ||
               percent >= p->said_percent + LINE_PERCENT;
    if (!due || (p->said && percent == 100 && p->said_percent == 100))
        return;
    moectl_say("%s: %s", p->what, text);
    p->said = true;
    p->said_ns = now;
    p->said_percent = percent;
}

void moectl_progress_show(struct moectl_progress *p, const char *what, uint64_t done,
                          uint64_t total)
{
    char text[MOE_TRANSFER_TEXT];
    uint64_t now = moe_clock_ns();
    if (strncmp(p->what, what, sizeof p->what - 1) != 0 || done < p->first) {
        moectl_progress_clear(p);
        *p = (struct moectl_progress){.first = done, .begun_ns = now};
        (void)snprintf(p->what, sizeof p->what, "%s", what);
    }
    double seconds = (double)(now - p->begun_ns) / (double)MOE_NS_PER_S;
    unsigned percent = moe_transfer_percent(done, total);
    moe_transfer_text(done, total, seconds > 0 ? (double)(done - p->first) / seconds : 0, text);
    if (moectl_progress_is_live())
        draw(p, (double)done / (double)total, text);
    else
        say(p, percent, text, now);
}

void moectl_progress_clear(struct moectl_progress *p)
{
    if (!p->on_screen)
        return;
    fputs(CLEAR, stderr);
    fflush(stderr);
    p->on_screen = false;
}
