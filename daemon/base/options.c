/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/options.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <ini.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LONG_BASE = 256,
    HEAD_WIDTH = 34,                /* of an option's name and metavar in the help */
    TEXT_COLUMN = 3 + HEAD_WIDTH,   /* where its text begins */
    COLUMNS_MIN = TEXT_COLUMN + 30, /* narrower terminals break the lines themselves */
};

static struct moe_status bad_value(const char *text, const char *want)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "'%.64s' is not %s", text,
                     want);
}

static struct moe_status parse_uint(const struct moe_option *o, const char *text)
{
    if (text[0] < '0' || text[0] > '9')
        return bad_value(text, "a number");
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    uint64_t scale = 1;
    if (o->kind == MOE_OPTION_BYTES && *end != '\0') {
        static const char suffix[] = "KMGT";
        const char *s = strchr(suffix, *end);
        if (s == NULL || end[1] != '\0')
            return bad_value(text, "a size such as 64M");
        scale = UINT64_C(1) << (10 * (s - suffix + 1));
    } else if (*end != '\0') {
        return bad_value(text, "a number");
    }
    uint64_t n;
    if (errno == ERANGE || __builtin_mul_overflow((uint64_t)v, scale, &n) || n < o->min ||
        (o->max != 0 && n > o->max))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%.64s is outside [%" PRIu64 ", %" PRIu64 "]", text, o->min,
                         o->max != 0 ? o->max : UINT64_MAX);
    *(uint64_t *)o->value = n;
    return moe_ok();
}

static struct moe_status parse_double(const struct moe_option *o, const char *text)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(v))
        return bad_value(text, "a number");
    if (v < (double)o->min && o->max == 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "%.64s is below %" PRIu64,
                         text, o->min);
    if (v < (double)o->min || (o->max != 0 && v > (double)o->max))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%.64s is outside [%" PRIu64 ", %" PRIu64 "]", text, o->min, o->max);
    *(double *)o->value = v;
    return moe_ok();
}

static struct moe_status parse_bool(const struct moe_option *o, const char *text)
{
    bool yes = strcmp(text, "true") == 0 || strcmp(text, "yes") == 0 || strcmp(text, "1") == 0;
    bool no = strcmp(text, "false") == 0 || strcmp(text, "no") == 0 || strcmp(text, "0") == 0;
    if (!yes && !no)
        return bad_value(text, "true or false");
    *(bool *)o->value = yes;
    return moe_ok();
}

static struct moe_status parse_choice(const struct moe_option *o, const char *text)
{
    size_t length = strlen(text);
    for (const char *at = o->metavar; *at != '\0';) {
        size_t n = strcspn(at, "|");
        if (n == length && strncmp(at, text, n) == 0) {
            *(const char **)o->value = text;
            return moe_ok();
        }
        at += n + (at[n] == '|');
    }
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "'%.64s' is none of %s", text,
                     o->metavar);
}

static struct moe_status renamed(const struct moe_option *o, const char *dashes)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY, "%s%s is now %s%s",
                     dashes, o->name, dashes, o->help);
}

static struct moe_status assign(const struct moe_option *o, const char *text)
{
    switch (o->kind) {
    case MOE_OPTION_BOOL: return parse_bool(o, text);
    case MOE_OPTION_UINT:
    case MOE_OPTION_BYTES: return parse_uint(o, text);
    case MOE_OPTION_DOUBLE: return parse_double(o, text);
    case MOE_OPTION_STRING: *(const char **)o->value = text; return moe_ok();
    case MOE_OPTION_CHOICE: return parse_choice(o, text);
    case MOE_OPTION_RENAMED: return renamed(o, "");
    }
    return moe_error(MOE_INTERNAL, MOE_REASON_NONE, "option %s has no kind", o->name);
}

struct file_context {
    const struct moe_option *table;
    size_t count;
    const bool *on_line; /* set on the command line: the file may not overwrite it */
    struct moe_options *out;
    struct moe_status status;
};

/* inih calls this for each `name = value`; 0 stops it at that line. */
static int on_file_value(void *user, const char *section, const char *name, const char *value)
{
    struct file_context *f = user;
    if (f->status.code != MOE_OK) /* inih continues after a refused line */
        return 0;
    if (section[0] != '\0') {
        f->status =
            moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                      "'%.64s' is in section [%.64s]; settings have no sections", name, section);
        return 0;
    }
    for (size_t i = 0; i < f->count; i++) {
        if (strcmp(f->table[i].name, name) != 0)
            continue;
        if (f->on_line[i])
            return 1;
        if (f->table[i].kind == MOE_OPTION_RENAMED) {
            f->status = renamed(&f->table[i], "");
            return 0;
        }
        char *copy = strdup(value);
        char **grown = realloc(f->out->owned, (f->out->owned_count + 1) * sizeof *grown);
        if (grown != NULL)
            f->out->owned = grown;
        if (copy == NULL || grown == NULL) {
            free(copy);
            f->status = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "options");
            return 0;
        }
        f->out->owned[f->out->owned_count++] = copy;
        f->out->given[i] = true;
        f->status = moe_error_context(assign(&f->table[i], copy), "%s", name);
        return f->status.code == MOE_OK;
    }
    f->status = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                          "unknown setting '%.64s'", name);
    return 0;
}

/* inih would take the rest of a long line for a new one, an indented line for more of the value
 * before it, and a zero byte for the end of its line. */
char *moe_options_line(char *line, int size, void *file)
{
    static const char refused[] = "]\n"; /* neither a section nor a setting */
    bool fits = true;
    int length = 0, c = getc(file);
    while (c != '\n' && isspace(c))
        c = getc(file);
    if (c == EOF)
        return NULL;
    bool comment = c == '#' || c == ';';
    for (; c != '\n' && c != EOF; c = getc(file)) {
        fits = fits && c != '\0' && length < size - 2;
        if (fits)
            line[length++] = (char)c;
    }
    if (!fits && !comment)
        return strcpy(line, refused);
    line[length] = '\n';
    line[length + 1] = '\0';
    return line;
}

/* A device may never end, and a FIFO may wait for a writer. */
static struct moe_status check_file(const char *path, int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "cannot read %s: %s", path,
                         strerror(errno));
    if (!S_ISREG(st.st_mode))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%s is not a regular file", path);
    if (st.st_size > MOE_OPTIONS_FILE_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "%s is larger than %d bytes",
                         path, MOE_OPTIONS_FILE_MAX);
    return moe_ok();
}

struct moe_status moe_options_open(const char *path, FILE **out)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block */
    if (fd < 0)
        return moe_error(errno == ENOENT ? MOE_NOT_FOUND : MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "cannot read %s: %s", path, strerror(errno));
    struct moe_status st = check_file(path, fd);
    FILE *file = moe_failed(&st) ? NULL : fdopen(fd, "r");
    if (file == NULL) {
        if (!moe_failed(&st))
            st = moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "options");
        (void)close(fd);
    }
    *out = file;
    return st;
}

static struct moe_status read_file(const char *path, struct file_context *f)
{
    FILE *file;
    MOE_TRY(moe_options_open(path, &file));
    f->status = moe_ok();
    int line = ini_parse_stream(moe_options_line, file, on_file_value, f);
    bool unread = ferror(file) != 0;
    int cause = errno;
    (void)fclose(file);
    if (line < 0 || unread)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "cannot read %s: %s", path,
                         strerror(cause));
    if (f->status.code != MOE_OK)
        return moe_error_context(f->status, "%s:%d", path, line);
    if (line > 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "%s:%d: not 'name = value', or too long", path, line);
    return moe_ok();
}

static int value_rule(enum moe_option_kind kind)
{
    if (kind == MOE_OPTION_RENAMED)
        return optional_argument;
    return kind == MOE_OPTION_BOOL ? no_argument : required_argument;
}

struct moe_status moe_options_parse(const struct moe_option *table, size_t count,
                                    const char *config_name, int argc, char **argv, int *first,
                                    struct moe_options *out)
{
    struct option longs[MOE_OPTIONS_MAX + 1] = {0};
    char shorts[2 * MOE_OPTIONS_MAX + 2] = ":";
    bool on_line[MOE_OPTIONS_MAX] = {false};
    size_t at = 1;
    *out = (struct moe_options){0};
    MOE_INVARIANT(count <= MOE_OPTIONS_MAX);
    for (size_t i = 0; i < count; i++) {
        bool flag = table[i].kind == MOE_OPTION_BOOL;
        longs[i] =
            (struct option){table[i].name, value_rule(table[i].kind), NULL, LONG_BASE + (int)i};
        if (table[i].letter != 0) {
            shorts[at++] = table[i].letter;
            if (!flag)
                shorts[at++] = ':';
        }
    }

    opterr = 0;
    optind = 0; /* glibc: reset, so that a program may parse more than once */
    int c;
    while ((c = getopt_long(argc, argv, shorts, longs, NULL)) != -1) {
        if (c == '?')
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                             "unknown option '%.64s'", argv[optind - 1]);
        if (c == ':')
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                             "option '%.64s' needs a value", argv[optind - 1]);
        size_t i = 0;
        while (i < count && c != LONG_BASE + (int)i && c != table[i].letter)
            i++;
        MOE_INVARIANT(i < count);
        if (table[i].kind == MOE_OPTION_RENAMED)
            return renamed(&table[i], "--");
        on_line[i] = out->given[i] = true;
        struct moe_status st =
            assign(&table[i], table[i].kind == MOE_OPTION_BOOL ? "true" : optarg);
        MOE_TRY(moe_error_context(st, "--%s", table[i].name));
    }
    *first = optind;

    for (size_t i = 0; config_name != NULL && i < count; i++) {
        const char *path =
            strcmp(table[i].name, config_name) == 0 ? *(const char **)table[i].value : NULL;
        if (path == NULL)
            continue;
        struct file_context f = {.table = table, .count = count, .on_line = on_line, .out = out};
        struct moe_status st = read_file(path, &f);
        if (st.code != MOE_OK) {
            moe_options_free(out);
            return st;
        }
    }
    return moe_ok();
}

/* "[value]", or "" where there is no default. */
static void write_default(const struct moe_option *o, char *out, size_t size)
{
    out[0] = '\0';
    const char *text = o->kind == MOE_OPTION_STRING || o->kind == MOE_OPTION_CHOICE
                           ? *(const char *const *)o->value
                           : NULL;
    if (text == NULL && o->kind == MOE_OPTION_CHOICE)
        snprintf(out, size, "[%.*s]", (int)strcspn(o->metavar, "|"), o->metavar);
    else if (text != NULL)
        snprintf(out, size, "[%s]", text);
    else if (o->kind == MOE_OPTION_UINT && *(uint64_t *)o->value != MOE_OPTION_UNSET)
        snprintf(out, size, "[%" PRIu64 "]", *(uint64_t *)o->value);
    else if (o->kind == MOE_OPTION_DOUBLE)
        snprintf(out, size, "[%g]", *(double *)o->value);
    else if (o->kind == MOE_OPTION_BYTES)
        snprintf(out, size, "[%" PRIu64 "M]", *(uint64_t *)o->value >> 20);
}

size_t moe_options_columns(int file)
{
    struct winsize size;
    bool known = ioctl(file, TIOCGWINSZ, &size) == 0;
    return known && size.ws_col >= COLUMNS_MIN ? size.ws_col : SIZE_MAX;
}

/* Prints the words of `text` behind `at` columns, on several lines if they do not fit into one.
 * Returns the columns of the last line. */
static size_t print_words(FILE *to, const char *text, size_t at, size_t columns)
{
    while (*text != '\0') {
        size_t length = strcspn(text, " ");
        if (at < columns && length < columns - at) {
            fputc(' ', to);
            at++;
        } else {
            fprintf(to, "\n%*s", TEXT_COLUMN, "");
            at = TEXT_COLUMN;
        }
        fwrite(text, 1, length, to);
        at += length;
        text += length;
        text += strspn(text, " ");
    }
    return at;
}

void moe_options_print(FILE *to, const struct moe_option *table, size_t count, size_t columns)
{
    for (size_t i = 0; i < count; i++) {
        const struct moe_option *o = &table[i];
        if (o->kind == MOE_OPTION_RENAMED)
            continue;
        char head[64], preset[PATH_MAX + 16];
        snprintf(head, sizeof head, "%c%c%s --%s %s", o->letter != 0 ? '-' : ' ',
                 o->letter != 0 ? o->letter : ' ', o->letter != 0 ? "," : " ", o->name,
                 o->metavar != NULL ? o->metavar : "");
        write_default(o, preset, sizeof preset);
        size_t at = (size_t)fprintf(to, "  %-*s", HEAD_WIDTH, head);
        at = print_words(to, o->help, at, columns);
        print_words(to, preset, at, columns);
        fputc('\n', to);
    }
}

void moe_options_free(struct moe_options *o)
{
    for (size_t i = 0; i < o->owned_count; i++)
        free(o->owned[i]);
    free(o->owned);
    *o = (struct moe_options){0};
}
