/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/io/table.h"

#include "daemon/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CELL_BYTES = 1024 }; /* longer ones are cut */

struct moectl_table {
    const struct moectl_column *columns;
    size_t column_count;
    bool wide, failed;
    char **cells; /* rows one after the other */
    size_t count, room;
};

struct moectl_table *moectl_table_create(const struct moectl_column *columns, size_t count,
                                         bool wide)
{
    struct moectl_table *t = calloc(1, sizeof *t);
    if (t == NULL)
        return NULL;
    t->columns = columns;
    t->column_count = count;
    t->wide = wide;
    return t;
}

void moectl_table_free(struct moectl_table *t)
{
    if (t == NULL)
        return;
    for (size_t i = 0; i < t->count; i++)
        free(t->cells[i]);
    free(t->cells);
    free(t);
}

static bool make_room(struct moectl_table *t)
{
    if (t->count < t->room)
        return true;
    size_t room = t->room == 0 ? 64 : 2 * t->room;
    char **cells = realloc(t->cells, room * sizeof *cells);
    if (cells == NULL)
        return false;
    t->cells = cells;
    t->room = room;
    return true;
}

void moectl_table_cell(struct moectl_table *t, const char *fmt, ...)
{
    char text[CELL_BYTES];
    va_list args;
    if (t == NULL || t->failed)
        return;
    va_start(args, fmt);
    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        text[0] = '\0';
    va_end(args);
    t->failed = !make_room(t) || (t->cells[t->count] = strdup(text)) == NULL;
    t->count += !t->failed;
}

/* Characters of UTF-8, as moectl_put escapes them. */
static int width_of(const char *text)
{
    char escaped[4 * CELL_BYTES + MOE_LOG_ESCAPE_BYTES];
    int width = 0;
    moe_log_escape(escaped, sizeof escaped, text);
    for (const char *at = escaped; *at != '\0'; at++)
        width += ((unsigned char)*at & 0xc0) != 0x80;
    return width;
}

static bool is_shown(const struct moectl_table *t, size_t column)
{
    return t->wide || !t->columns[column].wide;
}

static size_t row_count(const struct moectl_table *t)
{
    return t->count / t->column_count;
}

static int widest(const struct moectl_table *t, size_t column)
{
    int width = width_of(t->columns[column].title);
    for (size_t r = 0; r < row_count(t); r++) {
        int cell = width_of(t->cells[r * t->column_count + column]);
        width = cell > width ? cell : width;
    }
    return width;
}

static size_t last_shown(const struct moectl_table *t)
{
    size_t last = t->column_count - 1;
    while (last > 0 && !is_shown(t, last))
        last--;
    return last;
}

/* `cells` NULL: the titles. */
static void write_row(FILE *to, const struct moectl_table *t, const int *widths, char *const *cells)
{
    const char *gap = "";
    for (size_t c = 0; c < t->column_count; c++) {
        if (!is_shown(t, c))
            continue;
        const char *text = cells != NULL ? cells[c] : t->columns[c].title;
        int blanks = widths[c] - width_of(text);
        bool right = t->columns[c].right;
        moectl_put_to(to, "%s%*s%s%*s", gap, right ? blanks : 0, "", text,
                      right || c == last_shown(t) ? 0 : blanks, "");
        gap = "  ";
    }
    moectl_put_to(to, "\n");
}

static bool has_row(const struct moectl_table *t, char *const *cells)
{
    for (size_t r = 0; r < row_count(t); r++) {
        size_t c = 0;
        while (c < t->column_count &&
               (!is_shown(t, c) || strcmp(t->cells[r * t->column_count + c], cells[c]) == 0))
            c++;
        if (c == t->column_count)
            return true;
    }
    return false;
}

bool moectl_table_write(FILE *to, const struct moectl_table *t, const struct moectl_table *before)
{
    int *widths = t != NULL ? calloc(t->column_count, sizeof *widths) : NULL;
    if (t == NULL || t->failed || widths == NULL) {
        free(widths);
        return false;
    }
    for (size_t c = 0; c < t->column_count; c++) {
        int earlier = before != NULL ? widest(before, c) : 0;
        widths[c] = widest(t, c);
        widths[c] = earlier > widths[c] ? earlier : widths[c];
    }
    if (before == NULL)
        write_row(to, t, widths, NULL);
    for (size_t r = 0; r < row_count(t); r++)
        if (before == NULL || !has_row(before, t->cells + r * t->column_count))
            write_row(to, t, widths, t->cells + r * t->column_count);
    free(widths);
    return true;
}

int moectl_table_print(const struct moectl_table *t, const struct moectl_table *before)
{
    if (!moectl_table_write(stdout, t, before)) {
        moectl_say("out of memory");
        return MOECTL_FAILED;
    }
    return MOECTL_OK;
}
