/* SPDX-License-Identifier: Apache-2.0 */
/* Common parts of all commands: exit codes, options, errors, output.
 *
 * Data goes to stdout, messages to stderr. A command parses its own options together with the
 * common ones, works, and returns an exit code. */
#ifndef MOECTL_CLI_H
#define MOECTL_CLI_H

#include "base/status.h"
#include "daemon/options.h"
#include "moectl/io/context.h"

#include <jansson.h>
#include <stdio.h>

/* A contract with scripts. MOECTL_USAGE: the command line is wrong (also an invalid NAME). No
 * daemon was contacted and nothing has changed. Errors of daemons and of the file system give the
 * other codes (moectl_exit_code). */
enum {
    MOECTL_OK = 0,
    MOECTL_FAILED = 1,      /* the operation failed */
    MOECTL_USAGE = 2,       /* the command line is wrong */
    MOECTL_UNHEALTHY = 3,   /* the group answers but does not serve */
    MOECTL_NOT_FOUND = 4,   /* no such file, layer, model or group */
    MOECTL_UNREACHABLE = 5, /* no answer, or not in time */
    MOECTL_PERMISSION = 6,  /* not allowed */
    MOECTL_CONFLICT = 7,    /* stale epoch or version, or a group is already there */
    MOECTL_WARNING = 8,     /* the group serves, and a check has a warning (health) */
};

#define MOECTL_API_VERSION "moed/v1"

struct moectl_command {
    const char *name;
    const char *summary;  /* one line of `moectl help` */
    const char *usage;    /* one line, after "moectl NAME" */
    const char *more;     /* lines of `moectl NAME --help` behind the summary, each ending in a
                             newline: "actions:" first, if there are any. NULL: none */
    const char *examples; /* lines of `moectl NAME --help`, each ending in a newline */
    bool local;           /* works on this machine only: no --endpoint */
    int (*run)(const struct moectl_command *self, int argc, char **argv);
};

enum { MOECTL_OPTIONS_MAX = 32, MOECTL_WORDS_MAX = 2 };

/* Common options; preset with the command's defaults. */
struct moectl_common {
    const char *format;    /* "table", "wide", "json" or "yaml" */
    const char *endpoint;  /* --endpoint, else of a context or $MOED_ENDPOINT, else NULL */
    const char *state_dir; /* NULL = the default one */
    const char *context;   /* --context, or NULL; moectl_parse applies it */
    const char *trust[MOECTL_TRUST_COUNT]; /* --tls-ca and so on, or NULL; moectl_parse passes them
                                              and `insecure` on, by the environment */
    bool insecure;
    double timeout_s;
    bool document;                       /* json or yaml; set by moectl_parse, as is `wide` */
    bool wide;                           /* a table with all columns */
    bool timeout_given;                  /* timeout_s is the user's; set by moectl_parse */
    int words_max;                       /* how many words the command takes: actions, names */
    int word_count;                      /* set by moectl_parse */
    const char *words[MOECTL_WORDS_MAX]; /* those that were given; the others stay as preset */
};

/* Of functions that format a text, which moectl_put prints later. */
#define MOECTL_FORMAT(text, first) MOE_PRINTF(text, first)

/* Parses `own`, the common options and the words, in any order. False if the command ends here,
 * after help or a message: `*code` is its exit code. */
bool moectl_parse(const struct moectl_command *command, const struct moe_option *own, size_t count,
                  struct moectl_common *common, int argc, char **argv, int *code);

struct moectl_required {
    const char *name;
    bool given;
};
/* MOECTL_OK, or MOECTL_USAGE after a message that names the missing options. */
int moectl_require(const struct moectl_required *options, size_t count);
/* MOECTL_OK for NULL and for the hexadecimal digits of a SHA-256; else MOECTL_USAGE. */
int moectl_check_digest(const char *digest);

/* Prints the failure and returns the exit code for it. */
int moectl_fail(const struct moe_status *status);
int moectl_exit_code(enum moe_code code);
/* Prints "moectl: " and the text on stderr; returns MOECTL_USAGE. */
int moectl_usage_error(const char *fmt, ...) MOE_PRINTF(1, 2);
/* Prints on stdout. Escapes control characters as the daemons' logs do, so that a string of a
 * server cannot control the terminal. Only a line break at the end of `fmt` stays one. */
void moectl_put(const char *fmt, ...) MOE_PRINTF(1, 2);
/* The same on another stream. */
void moectl_put_to(FILE *to, const char *fmt, ...) MOE_PRINTF(2, 3);
/* Writes what was printed on stdout now, for a command that goes on. MOECTL_FAILED: it cannot be
 * written, and the command ends. Other commands leave both to main. */
int moectl_flush(void);
/* A copy of `text`, escaped in the same way; the caller frees it. NULL when out of memory. */
char *moectl_escaped(const char *text);
/* Prints "moectl: " and a line on stderr, escaped in the same way. */
void moectl_say(const char *fmt, ...) MOE_PRINTF(1, 2);

/* A new object with apiVersion and kind; NULL when out of memory. */
json_t *moectl_document(const char *kind);
/* Prints the text of a document on stdout, and a line break. */
void moectl_write(const char *document);
/* Prints `document` on stdout, as JSON or YAML by --format, and frees it. NULL, if memory was
 * lacking for it, is a failure. */
int moectl_print(json_t *document);

/* Monotonic deadline of a command that begins now. */
uint64_t moectl_deadline(const struct moectl_common *common);
/* The limit of one call of libmoeclient. */
uint64_t moectl_timeout_ms(const struct moectl_common *common);

#endif
