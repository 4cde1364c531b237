/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/io/samples.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Splits `name{labels} value` in place. */
static bool parse_line(char *line, struct moectl_sample *out)
{
    char *space = strrchr(line, ' '), *end;
    if (line[0] == '#' || space == NULL || space == line)
        return false;
    *space = '\0';
    *out = (struct moectl_sample){.name = line, .labels = "", .value = strtod(space + 1, &end)};
    if (*end != '\0' || end == space + 1)
        return false;
    char *open = strchr(line, '{'), *close = space - 1;
    if (open == NULL)
        return true;
    if (*close != '}')
        return false;
    *open = *close = '\0';
    out->labels = open + 1;
    return true;
}

static size_t count_lines(const char *text)
{
    size_t lines = 1;
    for (; (text = strchr(text, '\n')) != NULL; text++)
        lines++;
    return lines;
}

bool moectl_samples_parse(const char *page, struct moectl_samples *out)
{
    char *rest = NULL;
    *out = (struct moectl_samples){.text = strdup(page)};
    out->all = calloc(count_lines(page), sizeof *out->all);
    if (out->text == NULL || out->all == NULL)
        return false;
    for (char *line = strtok_r(out->text, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest))
        out->count += parse_line(line, &out->all[out->count]);
    return true;
}

void moectl_samples_free(struct moectl_samples *s)
{
    free(s->text);
    free(s->all);
    *s = (struct moectl_samples){0};
}

double moectl_samples_sum(const struct moectl_samples *s, const char *name, const char *label)
{
    double sum = 0;
    for (size_t i = 0; s != NULL && i < s->count; i++)
        if (strcmp(s->all[i].name, name) == 0 &&
            (label == NULL || strstr(s->all[i].labels, label) != NULL))
            sum += s->all[i].value;
    return sum;
}

bool moectl_samples_have(const struct moectl_samples *s, const char *name)
{
    for (size_t i = 0; s != NULL && i < s->count; i++)
        if (strcmp(s->all[i].name, name) == 0)
            return true;
    return false;
}

bool moectl_sample_label(const struct moectl_sample *sample, const char *key, char *out,
                         size_t size)
{
    size_t length = strlen(key);
    for (const char *at = sample->labels; (at = strstr(at, key)) != NULL; at++) {
        bool begins = at == sample->labels || at[-1] == ',';
        if (!begins || strncmp(at + length, "=\"", 2) != 0)
            continue;
        const char *value = at + length + 2;
        size_t bytes = strcspn(value, "\"");
        if (bytes >= size)
            return false;
        memcpy(out, value, bytes);
        out[bytes] = '\0';
        return true;
    }
    return false;
}
