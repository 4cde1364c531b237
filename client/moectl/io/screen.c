/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/io/screen.h"

#include "base/clock.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#define ENTER  "\x1b[?1049h\x1b[?25l" /* alternate screen, no cursor */
#define LEAVE  "\x1b[?25h\x1b[?1049l"
#define HOME   "\x1b[H"
#define STRONG "\x1b[7m"
#define PLAIN  "\x1b[0m"
#define TO_END "\x1b[K"
#define BELOW  "\x1b[J"

static struct termios before;
static volatile sig_atomic_t resized;

/* [signal handler] */
static void give_back(void)
{
    ssize_t written = write(STDOUT_FILENO, LEAVE, sizeof LEAVE - 1);
    (void)written; /* the terminal is gone */
    (void)tcsetattr(STDIN_FILENO, TCSANOW, &before);
}

static void on_end(int number)
{
    give_back();
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

static void on_resize(int number)
{
    (void)number;
    resized = 1;
}

/* No SA_RESTART: poll returns. */
static void handle(int number, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler};
    (void)sigaction(number, &action, NULL);
}

bool moectl_screen_open(void)
{
    if (!isatty(STDOUT_FILENO) || tcgetattr(STDIN_FILENO, &before) != 0)
        return false;
    struct termios raw = before;
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    handle(SIGINT, on_end);
    handle(SIGTERM, on_end);
    handle(SIGHUP, on_end);
    handle(SIGWINCH, on_resize);
    (void)tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    fputs(ENTER, stdout);
    fflush(stdout);
    return true;
}

void moectl_screen_close(void)
{
    fflush(stdout);
    give_back();
    handle(SIGWINCH, SIG_DFL);
    handle(SIGINT, SIG_DFL);
    handle(SIGTERM, SIG_DFL);
    handle(SIGHUP, SIG_DFL);
}

/* Bytes of the first `columns` characters of a line. */
static size_t cut(const char *line, size_t length, unsigned columns)
{
    size_t n = 0;
    for (unsigned shown = 0; n < length; n++) {
        bool begins = ((unsigned char)line[n] & 0xc0) != 0x80;
        if (begins && shown++ == columns)
            break;
    }
    return n;
}

void moectl_screen_show(const char *text)
{
    struct winsize size = {0};
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0;
    unsigned rows = known ? size.ws_row : 24, columns = known ? size.ws_col : 80;
    bool plain = getenv("NO_COLOR") != NULL;
    fputs(HOME, stdout);
    for (unsigned row = 0; row < rows && *text != '\0'; row++) {
        size_t length = strcspn(text, "\n");
        bool strong = row == 0 && !plain;
        if (row > 0)
            fputs("\r\n", stdout);
        if (strong)
            fputs(STRONG, stdout);
        fwrite(text, 1, cut(text, length, columns), stdout);
        if (strong)
            fputs(PLAIN, stdout);
        fputs(TO_END, stdout);
        text += length + (text[length] == '\n');
    }
    fputs(BELOW, stdout);
    fflush(stdout);
}

enum moectl_screen_key moectl_screen_wait(uint64_t until_ns)
{
    for (;;) {
        uint64_t now = moe_clock_ns();
        if (resized) {
            resized = 0;
            return MOECTL_SCREEN_RESIZED;
        }
        if (now >= until_ns)
            return MOECTL_SCREEN_TIME;
        struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
        char key;
        if (poll(&in, 1, (int)((until_ns - now) / MOE_NS_PER_MS) + 1) <= 0)
            continue;
        ssize_t got = read(STDIN_FILENO, &key, 1);
        if ((got == 1 && (key == 'q' || key == 'Q')) || got == 0)
            return MOECTL_SCREEN_QUIT;
    }
}
