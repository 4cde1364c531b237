/* SPDX-License-Identifier: Apache-2.0 */
/* moectl diag: all that a maintainer asks for, in one archive. Daemons that do not answer are named
 * in it. It has no tokens, keys, weights or activations. */
#include "commands.h"
#include "moectl/group/events.h"
#include "moectl/io/archive.h"
#include "moectl/io/proto_json.h"
#include "workers.h"

#include "base/build.h"
#include "base/clock.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LOG_TAIL_BYTES = 256 << 10, TOKEN_BYTES = 4096, WORKER_LIMIT_MS = 5000 };

struct diag {
    struct moectl_common common;
    const char *output;
    uint64_t deadline_ns;
    struct moectl_archive *archive;
};

/* ------------------------------------------------------------------ entries */

/* Takes `value`. */
static void add_json(struct diag *d, const char *name, json_t *value)
{
    char *text = value != NULL ? json_dumps(value, JSON_INDENT(2)) : NULL;
    moectl_archive_add(d->archive, name, text != NULL ? text : "out of memory\n");
    free(text);
    json_decref(value);
}

static void add_failure(struct diag *d, const char *name, const struct moe_status *st)
{
    char text[MOE_STATUS_TEXT + 64];
    (void)snprintf(text, sizeof text, "%s: %s\n", moe_code_name(st->code), st->text);
    moectl_archive_add(d->archive, name, text);
}

static void add_metrics(struct diag *d, struct moectl_link *link, const char *name)
{
    char *page = NULL;
    uint64_t limit = moe_clock_ns() + WORKER_LIMIT_MS * MOE_NS_PER_MS;
    struct moe_status st = moectl_link_metrics(link, moe_earlier(limit, d->deadline_ns), &page);
    if (moe_failed(&st))
        add_failure(d, name, &st);
    else
        moectl_archive_add(d->archive, name, page);
    free(page);
}

static void add_worker(struct diag *d, const char *by, const Moe__V1__WorkerStatus *w)
{
    char info_name[64], metrics_name[64];
    struct moectl_link *link = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    uint64_t limit = moe_clock_ns() + WORKER_LIMIT_MS * MOE_NS_PER_MS;
    (void)snprintf(info_name, sizeof info_name, "slot-%" PRIu32 "/server.json", w->slot);
    (void)snprintf(metrics_name, sizeof metrics_name, "slot-%" PRIu32 "/metrics.txt", w->slot);
    struct moe_status st = moectl_link_open_worker(by, w->endpoint, &link);
    if (!moe_failed(&st))
        st = moectl_link_server_info(link, moe_earlier(limit, d->deadline_ns), &info);
    if (moe_failed(&st)) {
        add_failure(d, info_name, &st);
    } else {
        add_json(d, info_name, moectl_proto_json(&info->base));
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
        add_metrics(d, link, metrics_name);
    }
    moectl_link_close(link);
}

static struct moe_status add_group(struct diag *d)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    Moe__V1__ListEventsResponse *events = NULL;
    struct moe_status st = moectl_admin_find(&d->common, d->deadline_ns, &link, &status);
    if (moe_failed(&st)) {
        add_failure(d, "status.json", &st);
        return st;
    }
    add_json(d, "status.json", moectl_proto_json(&status->base));
    st = moectl_events_ask(link, d->deadline_ns, 0, 0, &events);
    if (moe_failed(&st)) {
        add_failure(d, "events.json", &st);
    } else {
        add_json(d, "events.json", moectl_proto_json(&events->base));
        moe__v1__list_events_response__free_unpacked(events, NULL);
    }
    add_metrics(d, link, "coordinator/metrics.txt");
    for (size_t i = 0; i < status->n_workers; i++)
        if (status->workers[i]->endpoint[0] != '\0')
            add_worker(d, moectl_link_endpoint(link), status->workers[i]);
    moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
    return moe_ok();
}

/* ------------------------------------------------------------------ the local group */

/* The last `capacity` - 1 bytes of a file, as a text. */
static bool read_tail(int directory, const char *name, char *text, size_t capacity)
{
    struct stat file;
    size_t length = 0;
    int fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    off_t most = (off_t)capacity - 1;
    if (fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_size > most)
        (void)lseek(fd, file.st_size - most, SEEK_SET);
    for (ssize_t n = 1; n > 0 && length<capacity - 1; length += n> 0 ? (size_t)n : 0)
        n = read(fd, text + length, capacity - 1 - length);
    close(fd);
    for (size_t i = 0; i < length; i++)
        text[i] = (char)(text[i] == '\0' ? '?' : text[i]);
    text[length] = '\0';
    return true;
}

/* The token in the file `path`, which no entry may contain. */
static void hide_token(struct diag *d, const char *path)
{
    char token[TOKEN_BYTES];
    if (path == NULL || !read_tail(AT_FDCWD, path, token, sizeof token))
        return;
    token[strcspn(token, "\r\n")] = '\0';
    moectl_archive_hide(d->archive, token);
}

static void hide_tokens_of(struct diag *d, const json_t *command)
{
    static const char option[] = "--token-file";
    size_t index;
    json_t *word;
    json_array_foreach(command, index, word)
    {
        const char *text = json_string_value(word);
        if (text == NULL || strncmp(text, option, sizeof option - 1) != 0)
            continue;
        hide_token(d, text[sizeof option - 1] == '='
                          ? text + sizeof option
                          : json_string_value(json_array_get(command, index + 1)));
    }
}

static void add_logs(struct diag *d, int directory, const struct moectl_group *group)
{
    char *text = malloc(LOG_TAIL_BYTES);
    for (size_t i = 0; text != NULL && i < group->count; i++) {
        char file[64], name[80];
        (void)snprintf(file, sizeof file, "%s.log", group->processes[i].name);
        (void)snprintf(name, sizeof name, "logs/%s", file);
        if (read_tail(directory, file, text, LOG_TAIL_BYTES))
            moectl_archive_add(d->archive, name, text);
    }
    free(text);
}

static void add_commands(struct diag *d, const struct moectl_group *group)
{
    json_t *commands = json_object();
    for (size_t i = 0; i < group->count; i++)
        if (group->processes[i].command != NULL)
            json_object_set(commands, group->processes[i].name, group->processes[i].command);
    add_json(d, "commands.json", commands);
}

/* Its tokens are hidden before anything is added. */
static void add_local(struct diag *d, int directory, const struct moectl_group *group)
{
    add_commands(d, group);
    add_logs(d, directory, group);
}

static bool open_local(const struct diag *d, int *directory, struct moectl_group *group)
{
    char path[MOECTL_PATH_MAX];
    if (d->common.endpoint != NULL)
        return false;
    struct moe_status st = moectl_state_open(d->common.state_dir, false, path, directory);
    if (moe_failed(&st))
        return false;
    st = moectl_state_read(*directory, group);
    if (moe_failed(&st))
        close(*directory);
    return !moe_failed(&st);
}

/* ------------------------------------------------------------------ the command */

static void add_version(struct diag *d)
{
    char text[256], when[MOECTL_TIME_BYTES];
    (void)snprintf(text, sizeof text, "moectl %s (commit %s)\nmade %s\n", moe_build_version(),
                   moe_build_commit(), moectl_time_text((int64_t)time(NULL) * 1000, when));
    moectl_archive_add(d->archive, "version.txt", text);
}

static struct moe_status work(struct diag *d, const char *folder)
{
    struct moectl_group group;
    int directory;
    MOE_TRY(moectl_archive_create(d->output, folder, &d->archive));
    bool local = open_local(d, &directory, &group);
    hide_token(d, getenv("MOED_TOKEN_FILE")); /* --token-file too, by moectl_parse */
    for (size_t i = 0; local && i < group.count; i++)
        hide_tokens_of(d, group.processes[i].command);
    add_version(d);
    struct moe_status asked = add_group(d);
    if (local) {
        if (moe_failed(&asked)) /* the logs may say why */
            moectl_say("%s", asked.text);
        add_local(d, directory, &group);
        moectl_group_free(&group);
        close(directory);
    }
    MOE_TRY(moectl_archive_close(d->archive));
    if (!moe_failed(&asked) || local)
        return moe_ok();
    (void)unlink(d->output); /* there is nothing in it */
    return asked;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct diag d = {.common = {.format = "table", .timeout_s = 30}};
    const struct moe_option options[] = {
        {"output", 0, MOE_OPTION_STRING, &d.output, 0, 0, "FILE",
         "the archive; default: moed-diag-TIME.tar here"},
    };
    char folder[40], name[48];
    time_t now = time(NULL);
    struct tm parts;
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &d.common, argc, argv,
                      &code))
        return code;
    if (gmtime_r(&now, &parts) == NULL ||
        strftime(folder, sizeof folder, "moed-diag-%Y%m%dT%H%M%SZ", &parts) == 0)
        (void)snprintf(folder, sizeof folder, "moed-diag");
    (void)snprintf(name, sizeof name, "%s.tar", folder);
    if (d.output == NULL)
        d.output = name;
    d.deadline_ns = moectl_deadline(&d.common);
    struct moe_status st = work(&d, folder);
    if (moe_failed(&st))
        return moectl_fail(&st);
    if (d.common.document) {
        json_t *document = moectl_document("Diagnosis");
        json_object_set_new(document, "file", json_string(d.output));
        return moectl_print(document);
    }
    moectl_put("%s\n", d.output);
    return MOECTL_OK;
}

const struct moectl_command moectl_diag = {
    .name = "diag",
    .summary = "Writes an archive for a bug report: states, events, metrics, logs; no secrets.",
    .usage = "[--endpoint H:P] [--output FILE]",
    .examples = "  moectl diag\n"
                "  moectl diag --endpoint 10.0.0.7:7700 --output /tmp/diag.tar\n",
    .run = run,
};
