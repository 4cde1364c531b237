/* SPDX-License-Identifier: Apache-2.0 */
/* Command-line flags and INI files from one table.
 *
 * A program describes its settings once, in a `struct moe_option` array; this file then parses
 * `--long-name VALUE` / `--long-name=VALUE` (getopt_long) and an INI file of `long-name = value`
 * lines (inih; `;` and `#` begin a comment, a value is taken as it stands, without quoting),
 * prints the help text, and refuses unknown names. A flag beats the file, the file beats the
 * default. */
#ifndef MOE_BASE_OPTIONS_H
#define MOE_BASE_OPTIONS_H

#include "base/status.h"

#include <stddef.h>
#include <stdio.h>

enum moe_option_kind {
    MOE_OPTION_BOOL,   /* bool; a flag without a value, or true/false in a file */
    MOE_OPTION_UINT,   /* uint64_t, decimal, within [min, max] */
    MOE_OPTION_DOUBLE, /* double, finite, within [min, max] */
    MOE_OPTION_BYTES,  /* uint64_t; 4096, 64K, 16M, 2G (powers of 1024) */
    MOE_OPTION_STRING, /* const char *: points into argv or into memory owned by the result */
    /* The same, one of those that `metavar` lists: "off|adamw|sgd". A preset of NULL stands for the
     * first of them. */
    MOE_OPTION_CHOICE,
    /* An old name. `help` holds the new name and all other fields are 0. Using the old name is an
     * error that gives the new one; the help text does not list the old name. */
    MOE_OPTION_RENAMED,
};

/* Preset of a UINT that has no default; the help prints none. */
#define MOE_OPTION_UNSET UINT64_MAX

struct moe_option {
    const char *name; /* long name without dashes */
    char letter;      /* short flag, or 0 */
    enum moe_option_kind kind;
    void *value;         /* preset with the default */
    uint64_t min, max;   /* UINT, DOUBLE and BYTES; max = 0 means no upper bound */
    const char *metavar; /* "DIR"; NULL for BOOL */
    const char *help;    /* one sentence, no full stop needed */
};

enum { MOE_OPTIONS_MAX = 96 }; /* entries of a table */

/* What parsing found. Free with moe_options_free. */
struct moe_options {
    bool given[MOE_OPTIONS_MAX]; /* by place in the table: a flag or the file has set it */
    char **owned;                /* strings that came from the file */
    size_t owned_count;
};

/* Parses argv[1..]; positional arguments are moved to the end as getopt does, and `*first` is the
 * index of the first of them. `config_name` is the option that names an INI file ("config"), or
 * NULL when the program takes none.
 * Errors: MOE_INVALID_ARGUMENT (unknown name, bad value), those of moe_options_open; with a text to
 * show to the user. */
struct moe_status moe_options_parse(const struct moe_option *table, size_t count,
                                    const char *config_name, int argc, char **argv, int *first,
                                    struct moe_options *out) MOE_CHECKED;

/* Columns of a terminal, for moe_options_print. SIZE_MAX: the file is no terminal, or the terminal
 * is too narrow for that. */
size_t moe_options_columns(int file);

/* One line per option: name, metavar, help and default; several ones where a line has more than
 * `columns`. Call before parsing (defaults are read from the values). */
void moe_options_print(FILE *to, const struct moe_option *table, size_t count, size_t columns);

void moe_options_free(struct moe_options *o);

/* Bytes of a file of settings. */
enum { MOE_OPTIONS_FILE_MAX = 1 << 20 };
/* Opens a file of settings for moe_options_line; fclose it. Follows links; refuses devices, FIFOs
 * and folders, and larger files. `*out` is NULL after a failure.
 * Errors: MOE_NOT_FOUND/IO (it does not exist), MOE_FAILED_PRECONDITION/IO (it cannot be opened),
 * MOE_INVALID_ARGUMENT/CONFIG_INVALID (not a regular file), MOE_INVALID_ARGUMENT/TOO_LARGE,
 * MOE_RESOURCE_EXHAUSTED/OUT_OF_MEMORY. */
struct moe_status moe_options_open(const char *path, FILE **out) MOE_CHECKED;

/* A reader of lines for ini_parse_stream, from a FILE. Blanks before a setting mean nothing. A line
 * of more than about 200 bytes, or with a zero byte, is refused like one without a `=`, unless it
 * is a comment. */
char *moe_options_line(char *line, int size, void *file);

#endif
