/* moectl training: where a group's training stands, as one of its workers knows it. */
#include "commands.h"
#include "link.h"
#include "proto_json.h"
#include "state.h"

#include "moe/v1/training.pb-c.h"

#include <inttypes.h>
#include <string.h>

static const char *frozen_or_not(protobuf_c_boolean frozen)
{
    return frozen ? "frozen" : "learns";
}

static const char *optimizer_name(const Moe__V1__GetTrainStateResponse *s)
{
    return s->optimizer == MOE__V1__OPTIMIZER__OPTIMIZER_SGD ? "SGD" : "AdamW";
}

static void print_table(const Moe__V1__GetTrainStateResponse *s)
{
    printf("weights     version %" PRIu64 ", lineage %" PRIu64 "\n", s->weights_version,
           s->lineage);
    printf("steps       %" PRIu64 " of %s, last id %" PRIu64 "\n", s->steps, optimizer_name(s),
           s->last_step_id);
    printf("gradients   of %" PRIu32 " Backward calls\n", s->backwards);
    printf("router      %s\nexperts     %s\nshared      %s\n", frozen_or_not(s->router_frozen),
           frozen_or_not(s->experts_frozen), frozen_or_not(s->shared_frozen));
    if (s->lora_rank != 0) {
        printf("adapters    rank %" PRIu32 ", scale %g:", s->lora_rank, s->lora_alpha);
        for (size_t i = 0; i < s->n_lora_targets; i++)
            printf(" %s", s->lora_targets[i]);
        printf("\n");
    }
    printf("checkpoint  %s\n", s->checkpoint[0] != '\0' ? s->checkpoint : "none");
    printf("memory      %.1f MiB of state, %.1f of %.1f MiB of saved passes\n",
           (double)s->state_bytes / (1024.0 * 1024.0), (double)s->saved_bytes / (1024.0 * 1024.0),
           (double)s->saved_bytes_limit / (1024.0 * 1024.0));
}

static int print_state(const struct moectl_common *common, const Moe__V1__GetTrainStateResponse *s)
{
    if (!common->json) {
        print_table(s);
        return fflush(stdout) == 0 ? MOECTL_OK : MOECTL_FAILED;
    }
    json_t *document = moectl_document("TrainState");
    if (document != NULL && !moectl_proto_to_json(&s->base, document)) {
        json_decref(document);
        document = NULL;
    }
    return moectl_print(document);
}

static struct moe_status ask(const struct moectl_common *common, ProtobufCMessage **out)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    struct moectl_link *link = NULL;
    Moe__V1__GetTrainStateRequest request = MOE__V1__GET_TRAIN_STATE_REQUEST__INIT;
    uint64_t deadline = moectl_deadline(common);
    MOE_TRY(moectl_worker_endpoint(common, deadline, endpoint));
    MOE_TRY(moectl_link_open(endpoint, &link));
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.TrainingService/GetTrainState", &request.base, deadline,
                         &moe__v1__get_train_state_response__descriptor, out);
    moectl_link_close(link);
    return st;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct moectl_common common = {.format = "table", .timeout_s = 10};
    ProtobufCMessage *state = NULL;
    int code;
    if (!moectl_parse(self, NULL, 0, &common, argc, argv, &code))
        return code;
    struct moe_status st = ask(&common, &state);
    if (st.code == MOE_UNIMPLEMENTED) {
        moectl_say("this group does not train: its workers were started without --training");
        return MOECTL_NOT_FOUND;
    }
    if (st.code != MOE_OK)
        return moectl_fail(&st);
    code = print_state(&common, (const Moe__V1__GetTrainStateResponse *)(const void *)state);
    protobuf_c_message_free_unpacked(state, NULL);
    return code;
}

const struct moectl_command moectl_training = {
    .name = "training",
    .summary = "Shows where a group's training stands.",
    .usage = "[--endpoint H:P] [-o json]",
    .examples = "  moectl training\n"
                "  moectl training -o json | jq .weights_version\n",
    .run = run,
};
