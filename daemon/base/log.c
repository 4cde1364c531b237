#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES = 1024 };

static _Atomic int threshold = MOE_LOG_INFO;
static _Atomic int line_format = MOE_LOG_TEXT;
static const char *_Atomic process_component = "moed";

void moe_log_set_level(enum moe_log_level level)
{
    atomic_store(&threshold, (int)level);
}
void moe_log_set_format(enum moe_log_format format)
{
    atomic_store(&line_format, (int)format);
}
void moe_log_set_component(const char *name)
{
    atomic_store(&process_component, name);
}

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static const char *const level_labels[] = {"ERROR", "WARN ", "INFO ", "DEBUG"};

bool moe_log_level_from_name(const char *name, enum moe_log_level *out)
{
    for (size_t i = 0; i < sizeof level_names / sizeof *level_names; i++) {
        if (strcmp(name, level_names[i]) == 0) {
            *out = (enum moe_log_level)i;
            return true;
        }
    }
    return false;
}

/* Appends `text` to the JSON string under construction; stops where there is no room left. */
static size_t put_escaped(char *line, size_t at, size_t cap, const char *text)
{
    for (; *text && at + 8 < cap; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            line[at++] = '\\';
            line[at++] = (char)c;
        } else if (c < 0x20) {
            at += (size_t)snprintf(line + at, cap - at, "\\u%04x", c);
        } else {
            line[at++] = (char)c;
        }
    }
    return at;
}

void moe_log_write(enum moe_log_level level, const char *fmt, ...)
{
    if ((int)level > atomic_load_explicit(&threshold, memory_order_relaxed))
        return;

    char text[LINE_BYTES / 2];
    va_list args;
    va_start(args, fmt);
    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        text[0] = '\0';
    va_end(args);

    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    char stamp[32];
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);

    char line[LINE_BYTES];
    const char *component = atomic_load(&process_component);
    int ms = (int)(now.tv_nsec / 1000000);
    size_t n;
    if (atomic_load(&line_format) == MOE_LOG_JSON) {
        n = (size_t)snprintf(line, sizeof line,
                             "{\"time\":\"%s.%03dZ\",\"level\":\"%s\",\"component\":\"", stamp, ms,
                             level_names[level]);
        n = put_escaped(line, n, sizeof line - 16, component);
        n += (size_t)snprintf(line + n, sizeof line - n, "\",\"text\":\"");
        n = put_escaped(line, n, sizeof line - 4, text);
        n += (size_t)snprintf(line + n, sizeof line - n, "\"}\n");
    } else {
        int len = snprintf(line, sizeof line, "%s.%03dZ %s %s: %s\n", stamp, ms,
                           level_labels[level], component, text);
        n = len < 0 ? 0 : (size_t)len;
        if (n >= sizeof line) {
            n = sizeof line - 1;
            line[n - 1] = '\n';
        }
    }
    /* One write per line keeps lines of several threads and processes whole. */
    ssize_t written = write(STDERR_FILENO, line, n);
    (void)written; /* there is nowhere left to complain to */
}
