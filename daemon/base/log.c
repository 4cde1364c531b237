/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES = 1536, FILE_MODE = 0640 };

static _Atomic int threshold = MOE_LOG_INFO;
static _Atomic int line_format = MOE_LOG_TEXT;
static const char *_Atomic process_component = "moed";
static _Atomic uint64_t process_epoch; /* 0: none */
static _Atomic uint32_t process_slot;  /* plus one; 0: none */
static const char *_Atomic file_path;  /* NULL: the log goes to the stderr of the start */
static _Atomic uint64_t lost_lines;    /* that could not be written, and are not reported */
static _Atomic bool is_cut;            /* the last line has no end */

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

void moe_log_set_slot(uint32_t slot)
{
    atomic_store(&process_slot, slot + 1);
}
void moe_log_set_epoch(uint64_t epoch)
{
    atomic_store(&process_epoch, epoch);
}
enum moe_log_level moe_log_level(void)
{
    return (enum moe_log_level)atomic_load(&threshold);
}
bool moe_log_is_on(enum moe_log_level level)
{
    return (int)level <= atomic_load_explicit(&threshold, memory_order_relaxed);
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

const char *moe_log_level_name(enum moe_log_level level)
{
    return level_names[level];
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
    bool is_present = is_same_file(fd, STDERR_FILENO);
    bool done = dup2(fd, STDERR_FILENO) >= 0 && (!with_stdout || dup2(fd, STDOUT_FILENO) >= 0);
    struct moe_status st = moe_ok();
    if (!done)
        st = moe_error(MOE_INTERNAL, MOE_REASON_IO, "log file %s: %s", path, strerror(errno));
    close(fd);
    if (done && !is_present)
        atomic_store(&is_cut, false);
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

/* Format characters and separators (general categories Cf, Zl, Zp of Unicode 15): they reorder what
 * is shown, or hide in it. */
static bool is_format(uint32_t code)
{
    static const struct {
        uint32_t first, last;
    } ranges[] = {
        {0xad, 0xad},       {0x600, 0x605},     {0x61c, 0x61c},     {0x6dd, 0x6dd},
        {0x70f, 0x70f},     {0x890, 0x891},     {0x8e2, 0x8e2},     {0x180e, 0x180e},
        {0x200b, 0x200f},   {0x2028, 0x202e},   {0x2060, 0x206f},   {0xfeff, 0xfeff},
        {0xfff9, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f},
        {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe007f},
    };
    for (size_t i = 0; code > 0x7f && i < sizeof ranges / sizeof *ranges; i++)
        if (code >= ranges[i].first && code <= ranges[i].last)
            return true;
    return false;
}

static size_t put_code(char *to, bool json, uint32_t code)
{
    if (code < 0x80 && !json)
        return (size_t)sprintf(to, "\\x%02x", (unsigned)code);
    if (code < 0x10000)
        return (size_t)sprintf(to, "\\u%04x", (unsigned)code);
    if (!json)
        return (size_t)sprintf(to, "\\U%08x", (unsigned)code);
    const unsigned rest = code - 0x10000; /* JSON has UTF-16 */
    return (size_t)sprintf(to, "\\u%04x\\u%04x", 0xd800 + (rest >> 10), 0xdc00 + (rest & 0x3ff));
}

/* Writes the escape of the `n` bytes at `s` to `to` (capacity MOE_LOG_ESCAPE_BYTES). `n` = 0: `*s`
 * is not valid UTF-8. */
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
    if (is_control(code) || is_format(code))
        return put_code(to, json, code);
    memcpy(to, s, n);
    return n;
}

/* Appends `text` to the line under construction, escaped; stops when the line is full. */
static size_t put_escaped(char *line, size_t at, size_t cap, enum moe_log_format format,
                          const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    while (*s != '\0' && at + MOE_LOG_ESCAPE_BYTES <= cap) {
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

/* A line under construction. The room behind `cap` is for its end. */
struct line {
    char text[LINE_BYTES];
    size_t at;
};

enum {
    END_BYTES = 4,                        /* "}", a quote and the line break */
    FIELD_BYTES = 160,                    /* of one string: a request's name, a trace's */
    FIELDS_BYTES = 2 * FIELD_BYTES + 128, /* of all fields */
};

/* Puts `value`, escaped, between `before` and `after`. `spare`: bytes that stay free behind them.
 */
static void put_string(struct line *l, enum moe_log_format format, const char *before,
                       const char *value, const char *after, size_t room, size_t spare)
{
    size_t most = sizeof l->text - spare;
    l->at += (size_t)sprintf(l->text + l->at, "%s", before);
    size_t end = l->at + room < most ? l->at + room : most;
    l->at = put_escaped(l->text, l->at, end, format, value);
    l->at += (size_t)sprintf(l->text + l->at, "%s", after);
}

static void put_json_fields(struct line *l, const struct moe_log_fields *about)
{
    uint64_t epoch = atomic_load_explicit(&process_epoch, memory_order_relaxed);
    uint32_t slot = atomic_load_explicit(&process_slot, memory_order_relaxed);
    if (about->request != NULL)
        put_string(l, MOE_LOG_JSON, ",\"request\":\"", about->request, "\"", FIELD_BYTES,
                   END_BYTES);
    if (about->trace != NULL)
        put_string(l, MOE_LOG_JSON, ",\"trace\":\"", about->trace, "\"", FIELD_BYTES, END_BYTES);
    if (epoch != 0)
        l->at += (size_t)sprintf(l->text + l->at, ",\"epoch\":%" PRIu64, epoch);
    if (slot != 0)
        l->at += (size_t)sprintf(l->text + l->at, ",\"slot\":%" PRIu32, slot - 1);
    if (about->layer_plus_one != 0)
        l->at += (size_t)sprintf(l->text + l->at, ",\"layer\":%" PRIu32, about->layer_plus_one - 1);
}

static void put_text_fields(struct line *l, const struct moe_log_fields *about)
{
    if (about->request != NULL)
        put_string(l, MOE_LOG_TEXT, " request=", about->request, "", FIELD_BYTES, END_BYTES);
    if (about->trace != NULL)
        put_string(l, MOE_LOG_TEXT, " trace=", about->trace, "", FIELD_BYTES, END_BYTES);
    if (about->layer_plus_one != 0)
        l->at += (size_t)sprintf(l->text + l->at, " layer=%" PRIu32, about->layer_plus_one - 1);
}

/* The message is cut so that the fields fit behind it. */
static void format_line(struct line *l, enum moe_log_level level, const char *message,
                        const struct moe_log_fields *about)
{
    const char *component = atomic_load(&process_component);
    struct timespec now;
    struct tm utc;
    char stamp[32], head[64];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    int ms = (int)(now.tv_nsec / 1000000);
    if ((enum moe_log_format)atomic_load(&line_format) == MOE_LOG_JSON) {
        l->at = (size_t)sprintf(l->text, "{\"time\":\"%s.%03dZ\",\"level\":\"%s\"", stamp, ms,
                                level_names[level]);
        put_string(l, MOE_LOG_JSON, ",\"component\":\"", component, "\"", FIELD_BYTES,
                   FIELDS_BYTES);
        put_string(l, MOE_LOG_JSON, ",\"message\":\"", message, "\"", LINE_BYTES, FIELDS_BYTES);
        put_json_fields(l, about);
        l->at += (size_t)sprintf(l->text + l->at, "}\n");
        return;
    }
    (void)snprintf(head, sizeof head, "%s.%03dZ %s ", stamp, ms, level_labels[level]);
    l->at = (size_t)sprintf(l->text, "%s%.64s: ", head, component);
    put_string(l, MOE_LOG_TEXT, "", message, "", LINE_BYTES, FIELDS_BYTES);
    put_text_fields(l, about);
    l->at += (size_t)sprintf(l->text + l->at, "\n");
}

/* One write per line keeps lines of several threads and processes whole. False: it is lost, or a
 * part of it. */
static bool put_line(const struct line *l)
{
    if (atomic_exchange(&is_cut, false) && write(STDERR_FILENO, "\n", 1) != 1)
        atomic_store(&is_cut, true);
    ssize_t written = write(STDERR_FILENO, l->text, l->at);
    if (written == (ssize_t)l->at)
        return true;
    if (written > 0)
        atomic_store(&is_cut, true);
    return false;
}

/* A failure cannot be reported while it lasts, as on a full disk. */
static void write_line(enum moe_log_level level, const struct moe_log_fields *about,
                       const char *fmt, va_list args)
{
    static const struct moe_log_fields nothing = {0};
    char message[LINE_BYTES / 2];
    struct line l;
    uint64_t lost = atomic_exchange(&lost_lines, 0);
    if (lost > 0) {
        (void)snprintf(message, sizeof message,
                       "the log could not be written: %" PRIu64 " lines are lost", lost);
        format_line(&l, MOE_LOG_WARN, message, &nothing);
        lost = put_line(&l) ? 0 : lost;
    }
    if (vsnprintf(message, sizeof message, fmt, args) < 0)
        message[0] = '\0';
    format_line(&l, level, message, about);
    if (lost > 0 || !put_line(&l))
        atomic_fetch_add(&lost_lines, lost + 1);
}

void moe_log_write(enum moe_log_level level, const char *fmt, ...)
{
    static const struct moe_log_fields nothing = {0};
    va_list args;
    if (!moe_log_is_on(level))
        return;
    va_start(args, fmt);
    write_line(level, &nothing, fmt, args);
    va_end(args);
}

void moe_log_write_about(enum moe_log_level level, const struct moe_log_fields *about,
                         const char *fmt, ...)
{
    va_list args;
    if (!moe_log_is_on(level))
        return;
    va_start(args, fmt);
    write_line(level, about, fmt, args);
    va_end(args);
}
