/* SPDX-License-Identifier: Apache-2.0 */
/* Tables on stdout. A column is as wide as its longest cell; the last one is not padded. Cells are
 * added one after the other, row by row.
 *
 *     static const struct moectl_column columns[] = {{.title = "SLOT", .right = true}, ...};
 *     struct moectl_table *t = moectl_table_create(columns, 2, wide);
 *     moectl_table_cell(t, "%u", slot);
 *     moectl_table_cell(t, "%s", name);
 *     code = moectl_table_print(t, NULL);
 *     moectl_table_free(t); */
#ifndef MOECTL_TABLE_H
#define MOECTL_TABLE_H

#include "moectl/io/cli.h"

struct moectl_column {
    const char *title;
    bool right; /* numbers */
    bool wide;  /* only in tables with all columns */
};

struct moectl_table;

/* `columns` must outlive the table. NULL when out of memory; all functions take it. */
struct moectl_table *moectl_table_create(const struct moectl_column *columns, size_t count,
                                         bool wide);
/* NULL is ignored. */
void moectl_table_free(struct moectl_table *t);
/* The next cell. Printing escapes it as moectl_put does. */
void moectl_table_cell(struct moectl_table *t, const char *fmt, ...) MOECTL_FORMAT(2, 3);
/* Writes the head and all rows; false when out of memory. */
bool moectl_table_write(FILE *to, const struct moectl_table *t, const struct moectl_table *before);
/* Prints the head and all rows. With `before`, the same table at an earlier time: only rows that it
 * lacks, and no head. MOECTL_OK, or MOECTL_FAILED after a message. */
int moectl_table_print(const struct moectl_table *t, const struct moectl_table *before);

#endif
