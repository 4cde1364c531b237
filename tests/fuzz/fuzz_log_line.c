/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as the strings of a log event: its message, the names of its request and its trace, the
 * component. Each event is one line of valid UTF-8 without control characters. A JSON line is one
 * object that has its fields, and gives clean strings back unchanged. */
#include "driver.h"

#include "daemon/log.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 2048, CLEAN_BYTES = 24, STRINGS = 4 };

/* Of the input: separated by zeros. */
struct event {
    char *bytes;
    const char *message, *request, *trace, *component;
};

#define SEED(text)                                                                                 \
    {                                                                                              \
        text, sizeof(text) - 1                                                                     \
    }
static const struct {
    const char *text;
    size_t bytes;
} seeds[] = {
    SEED("a step was refused\0"
         "7\0"
         "4bf92f3577b34da6a3ce929d0e0e4736\0"
         "worker 2"),
    SEED("quote \" backslash \\ \n\t\r\b\x7f\x1b[31m\0\"},{\"\0\"\0\""),
    SEED("\xc2\x80\xc2\x9f\xe2\x80\xa8\xef\xbf\xbf\xf0\x9f\x98\x80\xff\xc0\x80\xed\xa0\x80\0\xc2\0"
         "\xf0"),
    SEED("%s%n\\u0000\\\"}\0,\"epoch\":1"),
};

static void split(struct event *e, const uint8_t *data, size_t size)
{
    const char **at[STRINGS] = {&e->message, &e->request, &e->trace, &e->component};
    e->bytes = calloc(size + STRINGS, 1);
    if (e->bytes == NULL)
        abort();
    if (size > 0)
        memcpy(e->bytes, data, size);
    char *next = e->bytes;
    for (size_t i = 0; i < STRINGS; i++) {
        *at[i] = next;
        next += strlen(next);
        next += next < e->bytes + size; /* past the zero, if it is not the last */
    }
}

/* What the log writes to stderr; returns its length. */
static size_t write_event(const struct event *e, enum moe_log_format format, char *line)
{
    static int file = -1, own = -1;
    if (file < 0) {
        file = memfd_create("log", MFD_CLOEXEC);
        own = dup(STDERR_FILENO);
    }
    const struct moe_log_fields about = {
        .request = e->request, .trace = e->trace, .layer_plus_one = 4};
    if (file < 0 || own < 0 || ftruncate(file, 0) != 0 || lseek(file, 0, SEEK_SET) != 0 ||
        dup2(file, STDERR_FILENO) < 0)
        abort();
    moe_log_set_format(format);
    moe_log_set_component(e->component);
    moe_log_set_epoch(5);
    moe_log_set_slot(2);
    moe_log_write_about(MOE_LOG_ERROR, &about, "%s", e->message);
    moe_log_set_component("fuzz");
    if (dup2(own, STDERR_FILENO) < 0)
        abort();
    ssize_t length = pread(file, line, LINE_MAX_BYTES, 0);
    MOE_INVARIANT(length > 0 && length < LINE_MAX_BYTES);
    return (size_t)length;
}

static void check_line(const char *line, size_t length)
{
    MOE_INVARIANT(line[length - 1] == '\n');
    for (size_t i = 0; i + 1 < length; i++) {
        const unsigned char c = (unsigned char)line[i], next = (unsigned char)line[i + 1];
        MOE_INVARIANT(c >= 0x20 && c != 0x7f);
        MOE_INVARIANT(!(c == 0xc2 && next >= 0x80 && next < 0xa0)); /* C1 */
    }
    json_t *text = json_stringn(line, length); /* jansson takes valid UTF-8 only */
    MOE_INVARIANT(text != NULL);
    json_decref(text);
}

/* ASCII, and short enough that its escapes are not cut. */
static bool is_clean(const char *text)
{
    size_t length = strlen(text);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)text[i] >= 0x80)
            return false;
    return length <= CLEAN_BYTES;
}

/* ASCII comes back as it was, control characters too. */
static void check_field(const json_t *object, const char *key, const char *value)
{
    const char *got = json_string_value(json_object_get(object, key));
    MOE_INVARIANT(got != NULL);
    if (is_clean(value))
        MOE_INVARIANT(strcmp(got, value) == 0);
}

static void check_json(const struct event *e, const char *line, size_t length)
{
    json_error_t error;
    json_t *object = json_loadb(line, length, JSON_REJECT_DUPLICATES, &error);
    MOE_INVARIANT(json_is_object(object));
    check_field(object, "component", e->component);
    check_field(object, "message", e->message);
    check_field(object, "request", e->request);
    check_field(object, "trace", e->trace);
    check_field(object, "level", "error");
    MOE_INVARIANT(json_string_value(json_object_get(object, "time")) != NULL);
    MOE_INVARIANT(json_integer_value(json_object_get(object, "epoch")) == 5);
    MOE_INVARIANT(json_integer_value(json_object_get(object, "slot")) == 2);
    MOE_INVARIANT(json_integer_value(json_object_get(object, "layer")) == 3);
    MOE_INVARIANT(json_object_size(object) == 9);
    json_decref(object);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char line[LINE_MAX_BYTES];
    struct event e;
    split(&e, data, size);
    size_t length = write_event(&e, MOE_LOG_JSON, line);
    check_line(line, length);
    check_json(&e, line, length);
    e.component = "fuzz"; /* of the text format it is not escaped: it never comes from a peer */
    length = write_event(&e, MOE_LOG_TEXT, line);
    check_line(line, length);
    free(e.bytes);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    if (i >= sizeof seeds / sizeof *seeds)
        return 0;
    *data = (const uint8_t *)seeds[i].text;
    return seeds[i].bytes;
}
