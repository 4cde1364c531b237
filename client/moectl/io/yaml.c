/* SPDX-License-Identifier: Apache-2.0 */
/* Block style for objects and arrays. Scalars are JSON scalars, which YAML 1.2 contains; a string
 * that can only be a string stands without quotes. */
#include "moectl/io/yaml.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { INDENT = 2 };

/* A word that no reader takes for another type: upper-case first letters, or a known shape. */
static bool is_plain(const char *text)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    static const char more[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_/-";
    static const char *const others[] = {"true", "false", "null", "yes", "no", "on",
                                         "off",  "y",     "n",    "inf", "nan"};
    if (text[0] == '\0' || strchr(letters, text[0]) == NULL || text[strspn(text, more)] != '\0')
        return false;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcasecmp(text, others[i]) == 0)
            return false;
    return true;
}

static void put_scalar(FILE *to, const json_t *value)
{
    const char *text = json_string_value(value);
    if (text != NULL && is_plain(text)) {
        fputs(text, to);
        return;
    }
    char *json = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9));
    fputs(json != NULL ? json : "null", to);
    free(json);
}

static bool is_empty(const json_t *value)
{
    return json_is_object(value) ? json_object_size(value) == 0 : json_array_size(value) == 0;
}

static void begin_line(FILE *to, int depth)
{
    fprintf(to, "\n%*s", depth * INDENT, "");
}

static void put(FILE *to, const json_t *value, int depth, bool in_line);

/* `value` after "key:" or "-". */
static void put_after(FILE *to, const json_t *value, int depth, bool in_line)
{
    bool block = json_is_object(value) || json_is_array(value);
    if (!block || is_empty(value)) {
        fputc(' ', to);
        put(to, value, depth, true);
        return;
    }
    if (in_line)
        fputc(' ', to);
    put(to, value, depth, in_line);
}

/* `in_line`: the first entry goes to the present line. */
static void put(FILE *to, const json_t *value, int depth, bool in_line)
{
    const char *key;
    json_t *item;
    size_t index;
    if (json_is_object(value) && !is_empty(value)) {
        json_object_foreach((json_t *)value, key, item)
        {
            if (!in_line)
                begin_line(to, depth);
            in_line = false;
            fprintf(to, "%s:", key);
            put_after(to, item, depth + 1, false);
        }
    } else if (json_is_array(value) && !is_empty(value)) {
        json_array_foreach(value, index, item)
        {
            if (!in_line)
                begin_line(to, depth);
            in_line = false;
            fputc('-', to);
            put_after(to, item, depth + 1, json_is_object(item));
        }
    } else if (json_is_object(value)) {
        fputs("{}", to);
    } else if (json_is_array(value)) {
        fputs("[]", to);
    } else {
        put_scalar(to, value);
    }
}

char *moectl_yaml(const json_t *document)
{
    char *text = NULL;
    size_t length;
    FILE *to = open_memstream(&text, &length);
    if (to == NULL)
        return NULL;
    put(to, document, 0, true);
    bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}
