/* SPDX-License-Identifier: Apache-2.0 */
/* Common parts of all commands: options, messages, exit codes. Never talks to a group. */
#include "moectl/io/cli.h"
#include "moectl/io/yaml.h"

#include "base/clock.h"
#include "daemon/endpoint.h"
#include "daemon/log.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TIMEOUT_OPTION = 2, /* --timeout among the shared ones */
    REMOTE_OPTIONS = 8, /* the last of the shared ones: not for local commands */
    TIMEOUT_MAX_S = 7 * 24 * 3600,
    TEXT_BYTES = 8192,                  /* longer texts are cut */
    ESCAPED_BYTES = 4 * TEXT_BYTES + 9, /* the longest escape has 4 bytes for one */
};

static bool prints_yaml; /* --format of this process's command */

static bool ends_line(const char *text)
{
    size_t length = strlen(text);
    return length > 0 && text[length - 1] == '\n';
}

/* Formats and escapes, because the arguments may be strings of a hostile server. */
MOE_PRINTF(2, 0) static void write_escaped(FILE *to, const char *fmt, va_list args)
{
    char text[TEXT_BYTES], escaped[ESCAPED_BYTES];
    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        text[0] = '\0';
    if (ends_line(fmt) && ends_line(text))
        text[strlen(text) - 1] = '\0';
    moe_log_escape(escaped, sizeof escaped, text);
    fputs(escaped, to);
    if (ends_line(fmt))
        fputc('\n', to);
}

void moectl_put(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    write_escaped(stdout, fmt, args);
    va_end(args);
}

void moectl_put_to(FILE *to, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    write_escaped(to, fmt, args);
    va_end(args);
}

char *moectl_escaped(const char *text)
{
    size_t size = 4 * strlen(text) + MOE_LOG_ESCAPE_BYTES;
    char *escaped = malloc(size);
    if (escaped != NULL)
        moe_log_escape(escaped, size, text);
    return escaped;
}

void moectl_say(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fputs("moectl: ", stderr);
    write_escaped(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
}

int moectl_usage_error(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fputs("moectl: ", stderr);
    write_escaped(stderr, fmt, args);
    fputs("; see --help\n", stderr);
    va_end(args);
    return MOECTL_USAGE;
}

int moectl_exit_code(enum moe_code code)
{
    switch (code) {
    case MOE_OK: return MOECTL_OK;
    case MOE_NOT_FOUND: return MOECTL_NOT_FOUND;
    case MOE_UNAVAILABLE:
    case MOE_DEADLINE_EXCEEDED: return MOECTL_UNREACHABLE;
    case MOE_PERMISSION_DENIED:
    case MOE_UNAUTHENTICATED: return MOECTL_PERMISSION;
    case MOE_ALREADY_EXISTS:
    case MOE_FAILED_PRECONDITION:
    case MOE_ABORTED: return MOECTL_CONFLICT;
    default: return MOECTL_FAILED;
    }
}

int moectl_fail(const struct moe_status *status)
{
    if (status->code == MOE_UNKNOWN && status->reason == MOE_REASON_NONE)
        moectl_say("%s", status->text);
    else if (status->reason != MOE_REASON_NONE)
        moectl_say("%s (%s, %s)", status->text, moe_code_name(status->code),
                   moe_reason_name(status->reason));
    else
        moectl_say("%s (%s)", status->text, moe_code_name(status->code));
    return moectl_exit_code(status->code);
}

static void print_help(const struct moectl_command *command, const struct moe_option *table,
                       size_t count)
{
    fprintf(stdout, "usage: moectl %s %s\n\n%s\n\n", command->name, command->usage,
            command->summary);
    if (command->more != NULL)
        fprintf(stdout, "%s\n", command->more);
    fputs("options:\n", stdout);
    moe_options_print(stdout, table, count, moe_options_columns(STDOUT_FILENO));
    fprintf(stdout, "\nexamples:\n%s", command->examples);
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return true;
    return false;
}

/* NULL if it is not set, or empty. */
static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

/* Takes endpoint and trust of --context, else of $MOED_CONTEXT, else of the current context. */
static int apply_context(struct moectl_common *common)
{
    static struct moectl_contexts contexts; /* outlives the command's use of its strings */
    struct moe_status st = moectl_contexts_read(&contexts);
    if (moe_failed(&st))
        return moectl_usage_error("%s", st.text);
    const char *name = common->context != NULL ? common->context : variable("MOED_CONTEXT");
    if (name != NULL && strcmp(name, MOECTL_CONTEXT_LOCAL) == 0)
        return MOECTL_OK;
    const struct moectl_context *c =
        moectl_contexts_find(&contexts, name != NULL ? name : contexts.current);
    if (c == NULL && name != NULL)
        return moectl_usage_error("there is no context '%s'", name);
    if (c == NULL)
        return MOECTL_OK;
    common->endpoint = c->endpoint;
    for (int i = 0; i < MOECTL_TRUST_COUNT; i++)
        if (common->trust[i] == NULL && c->trust[i][0] != '\0')
            common->trust[i] = c->trust[i];
    return MOECTL_OK;
}

/* --endpoint, else --context, else $MOED_ENDPOINT, else $MOED_CONTEXT or the current context; none
 * of these with --state-dir. Checks it. */
static int choose_endpoint(struct moectl_common *common)
{
    const char *setting = "--endpoint", *from_environment = variable("MOED_ENDPOINT");
    if (common->context != NULL && (common->endpoint != NULL || common->state_dir != NULL))
        return moectl_usage_error("--context goes with neither --endpoint nor --state-dir");
    bool open = common->endpoint == NULL && common->state_dir == NULL;
    if (open && common->context == NULL && from_environment != NULL) {
        common->endpoint = from_environment;
        setting = "$MOED_ENDPOINT";
    } else if (open) {
        int code = apply_context(common);
        if (code != MOECTL_OK)
            return code;
    }
    if (common->endpoint == NULL)
        return MOECTL_OK;
    struct moe_endpoints list;
    struct moe_status st = moe_endpoints_parse(setting, common->endpoint, &list);
    return st.code == MOE_OK ? MOECTL_OK : moectl_usage_error("%s", st.text);
}

int moectl_require(const struct moectl_required *options, size_t count)
{
    char missing[256] = "";
    size_t used = 0, found = 0;
    for (size_t i = 0; i < count && used < sizeof missing; i++)
        if (!options[i].given)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s--%s",
                                     found++ > 0 ? ", " : "", options[i].name);
    if (found == 0)
        return MOECTL_OK;
    return moectl_usage_error("%s %s missing", missing, found == 1 ? "is" : "are");
}

/* Links and libmoeclient read the variables. */
static bool pass_on_trust(const struct moectl_common *common)
{
    bool good = !common->insecure || setenv("MOED_INSECURE", "1", 1) == 0;
    for (int i = 0; i < MOECTL_TRUST_COUNT; i++)
        if (common->trust[i] != NULL)
            good = setenv(moectl_trust_names[i].variable, common->trust[i], 1) == 0 && good;
    return good;
}

/* Options, settings of a context and variables together. */
static int check_trust(void)
{
    bool certificate = variable("MOED_TLS_CERTIFICATE") != NULL;
    if (certificate != (variable("MOED_TLS_KEY") != NULL))
        return moectl_usage_error("--tls-certificate and --tls-key need each other");
    if (certificate && variable("MOED_TLS_CA") == NULL)
        return moectl_usage_error("--tls-certificate needs --tls-ca: the CA of the daemons");
    return MOECTL_OK;
}

int moectl_check_digest(const char *digest)
{
    enum { DIGITS = 64 };
    if (digest == NULL)
        return MOECTL_OK;
    if (strlen(digest) == DIGITS && strspn(digest, "0123456789abcdef") == DIGITS)
        return MOECTL_OK;
    return moectl_usage_error("--model-digest must have %d digits of 0-9 a-f", (int)DIGITS);
}

bool moectl_parse(const struct moectl_command *command, const struct moe_option *own, size_t count,
                  struct moectl_common *common, int argc, char **argv, int *code)
{
    bool help = false;
    const struct moe_option shared[] = {
        {"format", 'o', MOE_OPTION_STRING, &common->format, 0, 0, "FORMAT",
         "table, wide (all columns), json or yaml"},
        {"state-dir", 0, MOE_OPTION_STRING, &common->state_dir, 0, 0, "DIR",
         "state directory of the local group; default: $XDG_RUNTIME_DIR/moed, else /tmp/moed-UID"},
        {"timeout", 't', MOE_OPTION_DOUBLE, &common->timeout_s, 0, TIMEOUT_MAX_S, "SECONDS",
         "limit of the command (forward, bench: of each call), 0 = none"},
        {"help", 'h', MOE_OPTION_BOOL, &help, 0, 0, NULL, "this text"},
        {"endpoint", 'e', MOE_OPTION_STRING, &common->endpoint, 0, 0, "H:P,...",
         "any worker or the coordinator, or several of which one answers; default: --context, else "
         "$MOED_ENDPOINT, else $MOED_CONTEXT, else the current context, else the local group. With "
         "--state-dir: that local group"},
        {"token-file", 0, MOE_OPTION_STRING, &common->trust[MOECTL_TOKEN_FILE], 0, 0, "FILE",
         "token for daemons that ask for one, mode 0600; default: $MOED_TOKEN_FILE"},
        {"tls-ca", 0, MOE_OPTION_STRING, &common->trust[MOECTL_TLS_CA], 0, 0, "FILE",
         "PEM: roots of the daemons' certificates; calls use TLS; default: $MOED_TLS_CA"},
        {"tls-certificate", 0, MOE_OPTION_STRING, &common->trust[MOECTL_TLS_CERTIFICATE], 0, 0,
         "FILE", "PEM: own certificate, then its chain; default: $MOED_TLS_CERTIFICATE"},
        {"tls-key", 0, MOE_OPTION_STRING, &common->trust[MOECTL_TLS_KEY], 0, 0, "FILE",
         "PEM: its key, mode 0600; default: $MOED_TLS_KEY"},
        {"tls-server-name", 0, MOE_OPTION_STRING, &common->trust[MOECTL_TLS_SERVER_NAME], 0, 0,
         "NAME",
         "name in the daemons' certificates; default: $MOED_TLS_SERVER_NAME, else the host of the "
         "endpoint"},
        {"insecure", 0, MOE_OPTION_BOOL, &common->insecure, 0, 0, NULL,
         "send the token without TLS also to other hosts; default: $MOED_INSECURE is 1"},
        {"context", 0, MOE_OPTION_STRING, &common->context, 0, 0, "NAME",
         "group of this name (moectl help context); default: $MOED_CONTEXT, else the current one"},
    };
    struct moe_option table[MOECTL_OPTIONS_MAX];
    const size_t own_count = count;
    size_t shared_count = sizeof shared / sizeof *shared - (command->local ? REMOTE_OPTIONS : 0);
    MOE_INVARIANT(count + shared_count <= MOECTL_OPTIONS_MAX);
    if (count > 0)
        memcpy(table, own, count * sizeof *own);
    memcpy(table + count, shared, shared_count * sizeof *shared);
    count += shared_count;

    *code = MOECTL_OK;
    if (wants_help(argc, argv)) {
        print_help(command, table, count);
        return false;
    }
    struct moe_options owned;
    int first;
    struct moe_status st = moe_options_parse(table, count, NULL, argc, argv, &first, &owned);
    if (st.code != MOE_OK) {
        *code = moectl_usage_error("%s", st.text);
        return false;
    }
    common->timeout_given = owned.given[own_count + TIMEOUT_OPTION];
    moe_options_free(&owned); /* empty, because there is no settings file */
    prints_yaml = strcmp(common->format, "yaml") == 0;
    common->document = prints_yaml || strcmp(common->format, "json") == 0;
    common->wide = strcmp(common->format, "wide") == 0;
    while (first < argc && common->word_count < common->words_max)
        common->words[common->word_count++] = argv[first++];
    if (first < argc)
        *code = moectl_usage_error("unexpected argument '%s'", argv[first]);
    else if (!common->document && !common->wide && strcmp(common->format, "table") != 0)
        *code = moectl_usage_error("--format must be table, wide, json or yaml, not '%s'",
                                   common->format);
    if (*code == MOECTL_OK && !command->local)
        *code = choose_endpoint(common);
    if (*code == MOECTL_OK && !pass_on_trust(common))
        *code = moectl_usage_error("out of memory");
    if (*code == MOECTL_OK && !command->local)
        *code = check_trust();
    return *code == MOECTL_OK;
}

json_t *moectl_document(const char *kind)
{
    return json_pack("{s:s, s:s}", "apiVersion", MOECTL_API_VERSION, "kind", kind);
}

/* Escapes DEL and C1 controls (U+0080 to U+009F), which jansson writes as they are. */
void moectl_write(const char *text)
{
    const unsigned char *c = (const unsigned char *)text;
    for (; *c != '\0'; c++) {
        bool is_c1 = c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0;
        if (is_c1)
            c++;
        if (is_c1 || *c == 0x7f)
            fprintf(stdout, "\\u%04x", *c);
        else
            fputc(*c, stdout);
    }
    fputc('\n', stdout);
}

int moectl_print(json_t *document)
{
    char *text = document == NULL ? NULL
                 : prints_yaml    ? moectl_yaml(document)
                                  : json_dumps(document, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(document);
    if (text != NULL)
        moectl_write(text);
    else
        moectl_say("no memory for the answer");
    int code = text != NULL ? MOECTL_OK : MOECTL_FAILED;
    free(text);
    return code;
}

int moectl_flush(void)
{
    return fflush(stdout) == 0 && ferror(stdout) == 0 ? MOECTL_OK : MOECTL_FAILED;
}

uint64_t moectl_timeout_ms(const struct moectl_common *common)
{
    /* For the library, 0 is its default and UINT64_MAX is no limit. */
    uint64_t ms = (uint64_t)(common->timeout_s * 1000.0);
    return common->timeout_s <= 0 ? UINT64_MAX : ms > 0 ? ms : 1;
}

uint64_t moectl_deadline(const struct moectl_common *common)
{
    return common->timeout_s > 0
               ? moe_clock_ns() + (uint64_t)(common->timeout_s * (double)MOE_NS_PER_S)
               : MOE_NEVER;
}
