/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/io/context.h"

#include "daemon/endpoint.h"
#include "daemon/options.h"

#include <errno.h>
#include <ini.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 512, LINE_BYTES = 1024 };

const struct moectl_trust_name moectl_trust_names[MOECTL_TRUST_COUNT] = {
    [MOECTL_TLS_CA] = {"tls-ca", "MOED_TLS_CA", "tlsCa"},
    [MOECTL_TLS_CERTIFICATE] = {"tls-certificate", "MOED_TLS_CERTIFICATE", "tlsCertificate"},
    [MOECTL_TLS_KEY] = {"tls-key", "MOED_TLS_KEY", "tlsKey"},
    [MOECTL_TLS_SERVER_NAME] = {"tls-server-name", "MOED_TLS_SERVER_NAME", "tlsServerName"},
    [MOECTL_TOKEN_FILE] = {"token-file", "MOED_TOKEN_FILE", "tokenFile"},
};

static struct moe_status path_of_file(char path[PATH_BYTES])
{
    const char *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    int n = -1;
    if (config != NULL && config[0] == '/')
        n = snprintf(path, PATH_BYTES, "%s/moed/contexts", config);
    else if (home != NULL && home[0] == '/')
        n = snprintf(path, PATH_BYTES, "%s/.config/moed/contexts", home);
    return n > 0 && n < PATH_BYTES
               ? moe_ok()
               : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                           "no directory for the contexts: set HOME or XDG_CONFIG_HOME");
}

/* ------------------------------------------------------------------ reading */

static bool is_name(const char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t length = strlen(name);
    return length > 0 && length < MOECTL_CONTEXT_NAME_BYTES && name[strspn(name, allowed)] == '\0';
}

struct reading {
    struct moectl_contexts *to;
    const char *wrong; /* the first error */
};

static struct moectl_context *enter(struct reading *r, const char *name)
{
    struct moectl_contexts *c = r->to;
    for (size_t i = 0; i < c->count; i++)
        if (strcmp(c->all[i].name, name) == 0)
            return &c->all[i];
    if (!is_name(name) || strcmp(name, MOECTL_CONTEXT_LOCAL) == 0)
        r->wrong = "a context's name has 1 to 47 letters, digits, '.', '_', '-', and is not local";
    else if (c->count == MOECTL_CONTEXTS_MAX)
        r->wrong = "there are too many contexts";
    if (r->wrong != NULL)
        return NULL;
    struct moectl_context *made = &c->all[c->count++];
    memcpy(made->name, name, strlen(name) + 1);
    return made;
}

/* Where the value of a context's setting goes; NULL: there is none of this name. */
static char *find_setting(struct moectl_context *c, const char *name)
{
    if (strcmp(name, "endpoint") == 0)
        return c->endpoint;
    for (int i = 0; i < MOECTL_TRUST_COUNT; i++)
        if (strcmp(name, moectl_trust_names[i].option) == 0)
            return c->trust[i];
    return NULL;
}

/* For inih: 0 ends the reading. */
static int on_setting(void *ctx, const char *section, const char *name, const char *value)
{
    struct reading *r = ctx;
    char *to = NULL;
    size_t capacity = MOECTL_CONTEXT_VALUE_BYTES;
    if (section[0] == '\0') {
        to = strcmp(name, "current") == 0 ? r->to->current : NULL;
        capacity = MOECTL_CONTEXT_NAME_BYTES;
    } else {
        struct moectl_context *c = enter(r, section);
        if (c == NULL)
            return 0;
        to = find_setting(c, name);
    }
    if (to == NULL)
        r->wrong = "the settings are current, and of a [context] endpoint, token-file, tls-ca, "
                   "tls-certificate, tls-key and tls-server-name";
    else if (strlen(value) >= capacity)
        r->wrong = "the value is too long";
    else
        memcpy(to, value, strlen(value) + 1);
    return r->wrong == NULL;
}

static struct moe_status check(const struct moectl_contexts *contexts)
{
    for (size_t i = 0; i < contexts->count; i++) {
        struct moe_status st = moe_endpoint_check("endpoint", contexts->all[i].endpoint);
        if (moe_failed(&st))
            return moe_error_context(st, "context %s", contexts->all[i].name);
    }
    if (strcmp(contexts->current, MOECTL_CONTEXT_LOCAL) != 0 && contexts->current[0] != '\0' &&
        moectl_contexts_find(contexts, contexts->current) == NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "contexts: the current one, %s, does not exist", contexts->current);
    return moe_ok();
}

struct moe_status moectl_contexts_read(struct moectl_contexts *out)
{
    char path[PATH_BYTES];
    struct reading r = {.to = out};
    memset(out, 0, sizeof *out);
    MOE_TRY(path_of_file(path));
    FILE *file;
    struct moe_status opened = moe_options_open(path, &file);
    if (opened.code == MOE_NOT_FOUND)
        return moe_ok();
    MOE_TRY(opened);
    int line = ini_parse_stream(moe_options_line, file, on_setting, &r);
    (void)fclose(file);
    if (line != 0)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "%.120s: line %d: %s",
                         path, line > 0 ? line : 0,
                         r.wrong != NULL ? r.wrong
                                         : "neither 'name = value' nor '[context]', or too long");
    MOE_TRY(check(out));
    if (strcmp(out->current, MOECTL_CONTEXT_LOCAL) == 0)
        out->current[0] = '\0';
    return moe_ok();
}

const struct moectl_context *moectl_contexts_find(const struct moectl_contexts *contexts,
                                                  const char *name)
{
    for (size_t i = 0; i < contexts->count; i++)
        if (strcmp(contexts->all[i].name, name) == 0)
            return &contexts->all[i];
    return NULL;
}

/* ------------------------------------------------------------------ writing */

/* Copies the file without its line `current = ...`, after a new one. */
static bool copy_with(FILE *from, FILE *to, const char *name)
{
    char line[LINE_BYTES];
    bool first_section = false, begins = true;
    bool good = fprintf(to, "current = %s\n", name) > 0;
    while (good && fgets(line, sizeof line, from) != NULL) {
        const char *text = line + strspn(line, " \t");
        first_section = first_section || (begins && text[0] == '[');
        bool replaced = begins && !first_section && strncmp(text, "current", 7) == 0;
        begins = strchr(line, '\n') != NULL;
        good = replaced || fputs(line, to) >= 0;
    }
    return good && !ferror(from);
}

struct moe_status moectl_contexts_use(const char *name)
{
    struct moectl_contexts contexts;
    char path[PATH_BYTES], fresh[PATH_BYTES + 4];
    MOE_TRY(moectl_contexts_read(&contexts));
    if (strcmp(name, MOECTL_CONTEXT_LOCAL) != 0 && moectl_contexts_find(&contexts, name) == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "there is no context %.60s", name);
    MOE_TRY(path_of_file(path));
    (void)snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *from = fopen(path, "re");
    if (from == NULL && errno == ENOENT)
        return moe_ok(); /* no context: the local group is the current one */
    FILE *to = from != NULL ? fopen(fresh, "we") : NULL;
    bool good = to != NULL && copy_with(from, to, name);
    good = to != NULL && fclose(to) == 0 && good;
    if (from != NULL)
        (void)fclose(from);
    if (good && rename(fresh, path) == 0)
        return moe_ok();
    int error = errno;
    (void)unlink(fresh);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "%.160s: %s", path, strerror(error));
}
