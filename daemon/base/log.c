/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES = 1024, FILE_MODE = 0640 };

static _Atomic int threshold = MOE_LOG_INFO;
static _Atomic int line_format = MOE_LOG_TEXT;
static const char *_Atomic process_component = "moed";
static const char *_Atomic file_path; /* NULL: the log goes to the stderr of the start */

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

/* ----------------------------------------------------------------------- file */

static bool is_same_file(int a, int b)
{
    struct stat x, y;
    return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* A FIFO blocks its writers: at open until somebody reads, later while its reader is slow. */
static bool can_hold_a_log(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && (S_ISREG(st.st_mode) || S_ISCHR(st.st_mode));
}

static struct moe_status open_file(const char *path, int *out)
{
    const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY;
    int fd = open(path, flags | O_NONBLOCK, FILE_MODE);
    if (fd < 0 && errno != ENXIO) /* ENXIO: a socket, or a FIFO without a reader */
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "cannot open the log file %s: %s",
                         path, strerror(errno));
    if (fd < 0 || !can_hold_a_log(fd) || fcntl(fd, F_SETFL, O_APPEND) != 0) {
        if (fd >= 0)
            close(fd);
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CONFIG_INVALID,
                         "the log file %s is neither a regular file nor a character device", path);
    }
    *out = fd;
    return moe_ok();
}

/* dup2 replaces a descriptor in one step, so a line of another thread goes to the old file or to
 * the new one. */
static struct moe_status switch_to(const char *path)
{
    int fd = -1;
    MOE_TRY(open_file(path, &fd));
    bool with_stdout = is_same_file(STDOUT_FILENO, STDERR_FILENO);
    bool done = dup2(fd, STDERR_FILENO) >= 0 && (!with_stdout || dup2(fd, STDOUT_FILENO) >= 0);
    struct moe_status st = moe_ok();
    if (!done)
        st = moe_error(MOE_INTERNAL, MOE_REASON_IO, "log file %s: %s", path, strerror(errno));
    close(fd);
    return st;
}

struct moe_status moe_log_open(const char *path)
{
    MOE_TRY(switch_to(path));
    atomic_store(&file_path, path);
    return moe_ok();
}

const char *moe_log_path(void)
{
    return atomic_load(&file_path);
}

struct moe_status moe_log_reopen(void)
{
    const char *path = moe_log_path();
    return path != NULL ? switch_to(path) : moe_ok();
}

/* ---------------------------------------------------------------------- escaping */

/* Decodes the UTF-8 sequence at `s`, which ends with a zero. Its length, or 0 where it is not
 * well-formed: cut short, longer than it needs to be, a surrogate or over U+10FFFF. */
static size_t decode(const unsigned char *s, uint32_t *code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000}; /* [length] */
    size_t n = s[0] < 0x80 ? 1 : s[0] >> 5 == 6 ? 2 : s[0] >> 4 == 14 ? 3 : s[0] >> 3 == 30 ? 4 : 0;
    if (n == 0)
        return 0;
    uint32_t c = n == 1 ? s[0] : s[0] & (0xffU >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if (s[i] >> 6 != 2)
            return 0;
        c = c << 6 | (s[i] & 0x3f);
    }
    *code = c;
    bool surrogate = c >= 0xd800 && c < 0xe000;
    return c >= least[n] && c <= 0x10ffff && !surrogate ? n : 0;
}

/* C0, DEL and C1: they could control a terminal or fake a log line. */
static bool is_control(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0);
}

/* Writes the escape of the `n` bytes at `s` to `to` (capacity 8). `n` = 0: `*s` is not valid
 * UTF-8. */
static size_t put_character(char *to, enum moe_log_format format, const unsigned char *s, size_t n,
                            uint32_t code)
{
    bool json = format == MOE_LOG_JSON;
    if (n == 0)
        return (size_t)(json ? sprintf(to, "\\ufffd") : sprintf(to, "\\x%02x", s[0]));
    if (code == '\\' || (json && code == '"'))
        return (size_t)sprintf(to, "\\%c", s[0]);
    if (code == '\n' || code == '\t')
        return (size_t)sprintf(to, "\\%c", code == '\n' ? 'n' : 't');
    if (is_control(code))
        return (size_t)(json || code > 0x7f ? sprintf(to, "\\u%04x", (unsigned)code)
                                            : sprintf(to, "\\x%02x", (unsigned)code));
    memcpy(to, s, n);
    return n;
}

/* Appends `text` to the line under construction, escaped; stops when the line is full. */
static size_t put_escaped(char *line, size_t at, size_t cap, enum moe_log_format format,
                          const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    while (*s != '\0' && at + 8 < cap) {
        uint32_t code = 0;
        size_t n = decode(s, &code);
        at += put_character(line + at, format, s, n, code);
        s += n > 0 ? n : 1;
    }
    return at;
}

void moe_log_escape(char *to, size_t cap, const char *text)
{
    to[put_escaped(to, 0, cap, MOE_LOG_TEXT, text)] = '\0';
}

/* ------------------------------------------------------------------------ lines */

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
    enum moe_log_format format = (enum moe_log_format)atomic_load(&line_format);
    if (format == MOE_LOG_JSON) {
        n = (size_t)snprintf(line, sizeof line,
                             "{\"time\":\"%s.%03dZ\",\"level\":\"%s\",\"component\":\"", stamp, ms,
                             level_names[level]);
        n = put_escaped(line, n, sizeof line - 16, format, component);
        n += (size_t)snprintf(line + n, sizeof line - n, "\",\"text\":\"");
        n = put_escaped(line, n, sizeof line - 4, format, text);
        n += (size_t)snprintf(line + n, sizeof line - n, "\"}\n");
    } else {
        n = (size_t)snprintf(line, sizeof line, "%s.%03dZ %s %.64s: ", stamp, ms,
                             level_labels[level], component);
        n = put_escaped(line, n, sizeof line - 1, format, text);
        line[n++] = '\n';
    }
    /* One write per line keeps lines of several threads and processes whole. */
    ssize_t written = write(STDERR_FILENO, line, n);
    (void)written; /* a failure cannot be reported */
}
