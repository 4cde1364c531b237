/* SPDX-License-Identifier: Apache-2.0 */
/* moectl version: the releases of this program, a worker and the coordinator. */
#include "base/build.h"
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/group/state.h"

#include <string.h>

/* "0.1.0" and "0.1.7" are compatible, "0.1.0" and "0.2.0" are not. */
static bool same_minor(const char *a, const char *b)
{
    const char *patch = strrchr(a, '.');
    size_t n = patch != NULL ? (size_t)(patch - a) + 1 : strlen(a) + 1;
    return strncmp(a, b, n) == 0;
}

static void warn_if_skewed(const char *who, const char *version)
{
    if (!same_minor(moe_build_version(), version))
        moectl_say("warning: moectl is release %s, %s is %s", moe_build_version(), who, version);
}

/* Adds the releases of the group's daemons to `document`. */
static struct moe_status ask(const char *endpoint, uint64_t deadline_ns, json_t *document)
{
    struct moectl_link *link = NULL, *worker = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    Moe__V1__GetServerInfoResponse *info = NULL;
    MOE_TRY(moectl_admin_open(endpoint, deadline_ns, &link, &status));
    warn_if_skewed("the coordinator", status->version);
    json_object_set_new(document, "coordinator", json_string(status->version));
    struct moe_status st = moe_ok();
    if (status->n_workers > 0) {
        st = moectl_link_open_worker(moectl_link_endpoint(link), status->workers[0]->endpoint,
                                     &worker);
        if (st.code == MOE_OK)
            st = moectl_link_server_info(worker, deadline_ns, &info);
    }
    if (info != NULL) {
        warn_if_skewed("the worker", info->version);
        json_object_set_new(document, "worker", json_string(info->version));
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
    }
    moectl_link_close(worker);
    moe__v1__get_status_response__free_unpacked(status, NULL);
    moectl_link_close(link);
    return st;
}

static int print_table(json_t *document)
{
    static const char *const keys[] = {"client", "commit", "coordinator", "worker"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const char *value = json_string_value(json_object_get(document, keys[i]));
        if (value != NULL)
            moectl_put("%-12s %s\n", keys[i], value);
    }
    json_decref(document);
    return MOECTL_OK;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .timeout_s = 10};
    char endpoint[MOECTL_ENDPOINT_MAX];
    int code;
    if (!moectl_parse(self, NULL, 0, &common, argc, argv, &code))
        return code;
    json_t *document = moectl_document("Version");
    json_object_set_new(document, "client", json_string(moe_build_version()));
    json_object_set_new(document, "commit", json_string(moe_build_commit()));
    struct moe_status st = moectl_state_endpoint(&common, endpoint);
    bool somewhere = st.code == MOE_OK;
    if (somewhere)
        st = ask(endpoint, moectl_deadline(&common), document);
    code = common.document ? moectl_print(document) : print_table(document);
    if (somewhere && st.code != MOE_OK)
        return moectl_fail(&st);
    return code;
}

const struct moectl_command moectl_version = {
    .name = "version",
    .summary = "Shows the release of moectl and, if there is a group, of its daemons.",
    .usage = "[--endpoint H:P]",
    .examples = "  moectl version\n"
                "  moectl version --endpoint 127.0.0.1:7600 -o json\n",
    .run = run,
};
