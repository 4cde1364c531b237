/* SPDX-License-Identifier: Apache-2.0 */
/* moectl model: decisions about the model of a group. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/group/state.h"

#include <string.h>

static int show(const struct moectl_common *common, const char *forgotten)
{
    if (common->document) {
        json_t *document = moectl_document("AcceptedModel");
        json_object_set_new(document, "forgotten", json_string(forgotten));
        return moectl_print(document);
    }
    moectl_put(forgotten[0] != '\0' ? "forgot the digests of model %s\n"
                                    : "no digests were recorded%s\n",
               forgotten);
    return fflush(stdout) == 0 ? MOECTL_OK : MOECTL_FAILED;
}

static int accept(const struct moectl_common *common, const char *reason)
{
    struct moectl_link *link = NULL;
    ProtobufCMessage *answer = NULL;
    Moe__V1__AcceptModelRequest request = MOE__V1__ACCEPT_MODEL_REQUEST__INIT;
    request.reason = (char *)(uintptr_t)reason;
    Moe__V1__GetStatusResponse *status = NULL;
    struct moe_status st = moectl_admin_find(common, moectl_deadline(common), &link, &status);
    if (status != NULL)
        moe__v1__get_status_response__free_unpacked(status, NULL);
    if (!moe_failed(&st))
        st = moectl_link_call(link, "/moe.v1.AdminService/AcceptModel", &request.base,
                              moectl_deadline(common), &moe__v1__accept_model_response__descriptor,
                              &answer);
    moectl_link_close(link);
    if (st.code == MOE_UNAVAILABLE)
        moectl_say("the coordinator keeps the record, so it must run, without workers. While it is "
                   "stopped, removing model.digests from its --state-dir does the same");
    if (moe_failed(&st))
        return moectl_fail(&st);
    int code = show(common, ((Moe__V1__AcceptModelResponse *)answer)->forgotten);
    protobuf_c_message_free_unpacked(answer, NULL);
    return code;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .timeout_s = 10};
    const char *reason = "moectl model accept";
    const struct moe_option options[] = {
        {"reason", 0, MOE_OPTION_STRING, &reason, 0, 0, "TEXT",
         "Reason, for the coordinator's log"},
    };
    int code;
    bool accepts = argc > 1 && strcmp(argv[1], "accept") == 0;
    if (argc > 1 && argv[1][0] != '-' && !accepts)
        return moectl_usage_error("there is no action 'model %s'", argv[1]);
    if (!moectl_parse(self, options, 1, &common, accepts ? argc - 1 : argc,
                      accepts ? argv + 1 : argv, &code))
        return code;
    if (!accepts)
        return moectl_usage_error("which action? model accept");
    return accept(&common, reason);
}

const struct moectl_command moectl_model = {
    .name = "model",
    .summary = "Accepts that the next workers of a group have other weights.",
    .usage =
        "accept [--endpoint H:P] [--reason TEXT]\n"
        "\n"
        "actions:\n"
        "  accept         let the next workers bring other weights\n"
        "\n"
        "A coordinator records the digests of the model that its group serves, and refuses\n"
        "workers with other bytes in their files. To serve those, end all workers, run\n"
        "`moectl model accept`, and start workers with the new files. The coordinator must run.\n"
        "While it is stopped, removing model.digests from its --state-dir does the same.\n"
        "`moectl up` begins a new record by itself. A model with another configuration needs no "
        "decision",
    .examples = "  moectl model accept --endpoint 127.0.0.1:7700 --reason \"fine-tuned again\"\n",
    .run = run,
};
