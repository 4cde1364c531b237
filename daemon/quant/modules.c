/* SPDX-License-Identifier: Apache-2.0 */
/* Matches module paths. Regular expressions are compiled once. */
#include "quant/modules.h"

#include <ctype.h>
#include <fnmatch.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

/* Of one entry, and of a list; more means a damaged file. Each matrix is compared with each entry.
 */
enum { PATTERN_MAX = 512, ENTRIES_MAX = 1 << 16 };

struct entry {
    char *text;
    bool is_regex;
    regex_t regex;
};

struct moe_modules {
    enum moe_modules_syntax syntax;
    struct entry *list;
    size_t count, room;
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for lists of modules");
}

struct moe_status moe_modules_create(enum moe_modules_syntax syntax, struct moe_modules **out)
{
    struct moe_modules *m = calloc(1, sizeof *m);
    if (m == NULL)
        return no_memory();
    m->syntax = syntax;
    *out = m;
    return moe_ok();
}

void moe_modules_destroy(struct moe_modules *m)
{
    if (m == NULL)
        return;
    for (size_t i = 0; i < m->count; i++) {
        free(m->list[i].text);
        if (m->list[i].is_regex)
            regfree(&m->list[i].regex);
    }
    free(m->list);
    free(m);
}

static struct moe_status not_understood(const char *pattern)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_UNKNOWN_KEY,
                     "the regular expression %.100s is not understood", pattern);
}

/* Length of a set such as [a-z_], if both syntaxes read it alike; else 0. POSIX has no escapes in
 * it, and Python has no classes. */
static size_t length_of_set(const char *from)
{
    size_t n = from[1] == '^' ? 2 : 1;
    if (from[n] == ']')
        return 0;
    n += strcspn(from + n, "[]\\");
    return from[n] == ']' ? n + 1 : 0;
}

/* From Python's syntax to POSIX': "(?:" to "(", "\d" to "[0-9]". False for what has no equal. */
static bool translate(const char *from, char *to, size_t capacity)
{
    size_t n = 0;
    for (; *from != '\0'; from++) {
        char piece[8] = {*from};
        const char *copied = piece;
        size_t length = 0;
        if (from[0] == '\\') {
            from++;
            if (*from != 'd' && (!ispunct((unsigned char)*from) || strchr("<>`'", *from) != NULL))
                return false;
            if (*from == 'd')
                memcpy(piece, "[0-9]", 6);
            else
                piece[1] = *from;
        } else if (from[0] == '(' && from[1] == '?') {
            if (from[2] != ':')
                return false;
            from += 2;
        } else if (from[0] == '[') {
            length = length_of_set(from);
            if (length == 0)
                return false;
            copied = from;
            from += length - 1;
        } else if (from[0] == '{') {
            return false; /* counts within counts take memory without a bound */
        } else if (strchr("*+?", from[0]) != NULL && strchr("?+", from[1]) != NULL &&
                   from[1] != '\0') {
            return false; /* lazy or possessive */
        }
        if (length == 0)
            length = strlen(piece);
        if (n + length >= capacity)
            return false;
        memcpy(to + n, copied, length);
        n += length;
    }
    to[n] = '\0';
    return true;
}

static struct moe_status compile(const char *pattern, regex_t *out)
{
    char anchored[3 * PATTERN_MAX + 8], posix[3 * PATTERN_MAX];
    if (!translate(pattern, posix, sizeof posix))
        return not_understood(pattern);
    /* The group keeps the anchor for all alternatives. */
    memcpy(anchored, "^(", 2);
    memcpy(anchored + 2, posix, strlen(posix));
    memcpy(anchored + 2 + strlen(posix), ")", 2);
    return regcomp(out, anchored, REG_EXTENDED | REG_NOSUB) == 0 ? moe_ok()
                                                                 : not_understood(pattern);
}

struct moe_status moe_modules_add(struct moe_modules *m, const char *entry)
{
    if (strlen(entry) > PATTERN_MAX || m->count == ENTRIES_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "a list of modules has more than %d entries, or one of more than %d bytes",
                         ENTRIES_MAX, PATTERN_MAX);
    if (m->count == m->room) {
        size_t room = m->room > 0 ? 2 * m->room : 16;
        struct entry *more = reallocarray(m->list, room, sizeof *more);
        if (more == NULL)
            return no_memory();
        m->list = more;
        m->room = room;
    }
    struct entry *e = &m->list[m->count];
    *e =
        (struct entry){.is_regex = m->syntax == MOE_MODULES_EXACT && strncmp(entry, "re:", 3) == 0};
    if (e->is_regex)
        MOE_TRY(compile(entry + 3, &e->regex));
    e->text = strdup(entry);
    if (e->text == NULL) {
        if (e->is_regex)
            regfree(&e->regex);
        return no_memory();
    }
    m->count++;
    return moe_ok();
}

/* True if the names of `entry` stand at the beginning of `path`. */
static bool begins_with(const char *path, const char *entry)
{
    for (;;) {
        size_t has = strcspn(path, "."), wants = strcspn(entry, ".");
        bool any = wants == 1 && entry[0] == '*';
        if (!any && (has != wants || memcmp(path, entry, has) != 0))
            return false;
        if (entry[wants] == '\0')
            return true;
        if (path[has] == '\0')
            return false;
        path += has + 1;
        entry += wants + 1;
    }
}

static bool has_path(const char *path, const char *entry)
{
    while (!begins_with(path, entry)) {
        path = strchr(path, '.');
        if (path == NULL)
            return false;
        path++;
    }
    return true;
}

static bool matches(const struct moe_modules *m, const struct entry *e, const char *path)
{
    switch (m->syntax) {
    case MOE_MODULES_PATHS: return has_path(path, e->text);
    case MOE_MODULES_GLOBS: return fnmatch(e->text, path, 0) == 0;
    case MOE_MODULES_EXACT: break;
    }
    if (e->is_regex)
        return regexec(&e->regex, path, 0, NULL, 0) == 0;
    return strcmp(e->text, path) == 0 || strcmp(e->text, "Linear") == 0;
}

bool moe_modules_match(const struct moe_modules *m, const char *path)
{
    for (size_t i = 0; m != NULL && i < m->count; i++)
        if (matches(m, &m->list[i], path))
            return true;
    return false;
}
