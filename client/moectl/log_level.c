/* SPDX-License-Identifier: Apache-2.0 */
/* moectl log-level: which lines daemons log. */
#include "commands.h"
#include "daemon/endpoint.h"
#include "daemon/log.h"
#include "moectl/group/link.h"
#include "moectl/group/state.h"

#include <string.h>

/* Sets the level of the daemon behind `link` and adds it to `list`, as `daemon`. */
static struct moe_status set(struct moectl_link *link, const char *daemon, const char *level,
                             uint64_t deadline_ns, json_t *list)
{
    ProtobufCMessage *answer = NULL;
    Moe__V1__SetLogLevelRequest request = MOE__V1__SET_LOG_LEVEL_REQUEST__INIT;
    request.level = (char *)(uintptr_t)level;
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.AdminService/SetLogLevel", &request.base, deadline_ns,
                         &moe__v1__set_log_level_response__descriptor, &answer);
    if (moe_failed(&st))
        return moe_error_context(st, "%s", daemon);
    const char *previous = ((Moe__V1__SetLogLevelResponse *)answer)->previous;
    json_array_append_new(
        list, json_pack("{s:s, s:s, s:s}", "daemon", daemon, "level", level, "previous", previous));
    protobuf_c_message_free_unpacked(answer, NULL);
    return st;
}

/* `by`: the daemon that names `endpoint`; itself if the command names it. */
static struct moe_status set_at(const char *by, const char *endpoint, const char *level,
                                uint64_t deadline_ns, json_t *list)
{
    struct moectl_link *link = NULL;
    struct moe_status st = moectl_link_open_worker(by, endpoint, &link);
    if (!moe_failed(&st))
        st = set(link, endpoint, level, deadline_ns, list);
    moectl_link_close(link);
    return st;
}

static bool is_listed(const json_t *list, const char *daemon)
{
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item)
    {
        if (strcmp(json_string_value(json_object_get(item, "daemon")), daemon) == 0)
            return true;
    }
    return false;
}

/* All daemons that `common` names. The first failure is returned after all have been asked. */
static struct moe_status set_named(const struct moectl_common *common, const char *level,
                                   uint64_t deadline_ns, json_t *list)
{
    char named[MOECTL_ENDPOINT_MAX];
    struct moe_endpoints endpoints;
    MOE_TRY(moectl_state_endpoint(common, named));
    MOE_TRY(moe_endpoints_parse("--endpoint", named, &endpoints));
    struct moe_status st = moe_ok();
    for (size_t i = 0; i < endpoints.count; i++) {
        struct moe_status one = set_at(endpoints.all[i], endpoints.all[i], level,
                                       moectl_share(deadline_ns, endpoints.count - i), list);
        if (!moe_failed(&st))
            st = one;
    }
    return st;
}

/* The coordinator behind `link`, unless it has been asked, and all workers that live. */
static struct moe_status set_group(struct moectl_link *link,
                                   const Moe__V1__GetStatusResponse *status, const char *level,
                                   uint64_t deadline_ns, json_t *list)
{
    struct moe_status st = moe_ok(), one;
    if (!is_listed(list, moectl_link_endpoint(link)))
        st = set(link, moectl_link_endpoint(link), level,
                 moectl_share(deadline_ns, status->n_workers + 1), list);
    for (size_t i = 0; i < status->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = status->workers[i];
        if (w->state == MOE__V1__WORKER_STATE__WORKER_STATE_GONE || is_listed(list, w->endpoint))
            continue;
        one = set_at(moectl_link_endpoint(link), w->endpoint, level,
                     moectl_share(deadline_ns, status->n_workers - i), list);
        if (!moe_failed(&st))
            st = one;
    }
    return st;
}

/* All daemons that `common` names, the coordinator that leads, and all its workers that live. The
 * first failure is returned after all have been asked. */
static struct moe_status set_all(const struct moectl_common *common, const char *level,
                                 uint64_t deadline_ns, json_t *list)
{
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    struct moe_status st = set_named(common, level, moectl_share(deadline_ns, 2), list);
    MOE_TRY(moectl_admin_find(common, moectl_share(deadline_ns, 2), &link, &status));
    struct moe_status other = set_group(link, status, level, deadline_ns, list);
    if (strcmp(status->store, "etcd") == 0 &&
        (common->endpoint == NULL || strchr(common->endpoint, ',') == NULL))
        moectl_say("of the coordinators that wait, none was asked: --endpoint does not name them");
    moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
    return moe_failed(&st) ? st : other;
}

static int show(const struct moectl_common *common, json_t *list)
{
    size_t i;
    json_t *item;
    if (common->document) {
        json_t *document = moectl_document("LogLevels");
        json_object_set_new(document, "daemons", list);
        return moectl_print(document);
    }
    json_array_foreach(list, i, item)
    {
        moectl_put("%s: %s (before: %s)\n", json_string_value(json_object_get(item, "daemon")),
                   json_string_value(json_object_get(item, "level")),
                   json_string_value(json_object_get(item, "previous")));
    }
    json_decref(list);
    return MOECTL_OK;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .timeout_s = 10, .words_max = 1};
    bool all = false;
    const struct moe_option options[] = {
        {"all", 0, MOE_OPTION_BOOL, &all, 0, 0, NULL,
         "also the coordinator that leads, and all workers of the group"},
    };
    enum moe_log_level known;
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &common, argc, argv, &code))
        return code;
    const char *level = common.words[0];
    if (level == NULL || !moe_log_level_from_name(level, &known))
        return moectl_usage_error("which level? error, warn, info or debug");
    json_t *list = json_array();
    uint64_t deadline_ns = moectl_deadline(&common);
    struct moe_status st = all ? set_all(&common, level, deadline_ns, list)
                               : set_named(&common, level, deadline_ns, list);
    code = show(&common, list);
    return moe_failed(&st) ? moectl_fail(&st) : code;
}

const struct moectl_command moectl_log_level = {
    .name = "log-level",
    .summary = "Sets which lines daemons log: error, warn, info or debug.",
    .usage = "LEVEL [--endpoint H:P,...] [--all]",
    .more =
        "The level holds for each daemon at --endpoint, coordinator or worker, and with --all\n"
        "also for the coordinator that leads and all workers, until the daemon ends or gets\n"
        "SIGHUP. Of several coordinators, name all at --endpoint: those that wait have no list.\n",
    .examples = "  moectl log-level debug --endpoint 127.0.0.1:7600\n"
                "  moectl log-level info --all\n"
                "  moectl log-level info --all --endpoint 127.0.0.1:7700,127.0.0.1:7710\n",
    .run = run,
};
