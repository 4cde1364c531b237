/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/group/train_state.h"

#include "base/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { PROBE_MS = 500, SINCE_BYTES = 96 };

struct moe_status moectl_train_state(struct moectl_link *link, uint64_t deadline_ns,
                                     Moe__V1__GetTrainStateResponse **out)
{
    Moe__V1__GetTrainStateRequest request = MOE__V1__GET_TRAIN_STATE_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.TrainingService/GetTrainState", &request.base, deadline_ns,
                         &moe__v1__get_train_state_response__descriptor, &answer);
    *out = (Moe__V1__GetTrainStateResponse *)(void *)answer;
    return st;
}

static struct moe_status probe(const char *endpoint, uint64_t deadline_ns,
                               Moe__V1__GetTrainStateResponse **out)
{
    struct moectl_link *link = NULL;
    struct moe_status st = moectl_link_open(endpoint, &link);
    if (st.code == MOE_OK)
        st = moectl_train_state(link, deadline_ns, out);
    moectl_link_close(link);
    return st;
}

struct moe_status moectl_train_probe(const char *worker, uint64_t deadline_ns,
                                     Moe__V1__GetTrainStateResponse **out)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    uint64_t limit = moe_clock_ns() + PROBE_MS * MOE_NS_PER_MS;
    limit = limit < deadline_ns ? limit : deadline_ns;
    *out = NULL;
    struct moe_status st = probe(worker, limit, out);
    if (st.code != MOE_UNIMPLEMENTED)
        return st;
    MOE_TRY(moectl_trainer_endpoint(worker, limit, endpoint));
    return strcmp(endpoint, worker) == 0 ? st : probe(endpoint, limit, out);
}

/* "checkpoint epoch-3", or `otherwise` without a checkpoint. */
static const char *name_origin(const Moe__V1__GetTrainStateResponse *s, const char *otherwise,
                               char text[SINCE_BYTES])
{
    if (s->checkpoint[0] == '\0')
        return otherwise;
    snprintf(text, SINCE_BYTES, "checkpoint %.64s", s->checkpoint);
    return text;
}

void moectl_train_report_unsaved_steps(const Moe__V1__GetTrainStateResponse *s)
{
    char origin[SINCE_BYTES];
    bool one = s->unsaved_steps == 1;
    if (s->unsaved_steps != 0 && s->saving[0] != '\0') {
        moectl_say("checkpoint %s is being written: if that fails, %" PRIu64
                   " optimizer step%s since %s %s lost",
                   s->saving, s->unsaved_steps, one ? "" : "s",
                   name_origin(s, "the model was loaded", origin), one ? "is" : "are");
        return;
    }
    if (s->unsaved_steps != 0)
        moectl_say("%" PRIu64 " optimizer step%s since %s %s not saved", s->unsaved_steps,
                   one ? "" : "s", name_origin(s, "the model was loaded", origin),
                   one ? "was" : "were");
}

bool moectl_train_report_unsaved(const char *worker, uint64_t deadline_ns)
{
    Moe__V1__GetTrainStateResponse *state;
    struct moe_status st = moectl_train_probe(worker, deadline_ns, &state);
    if (st.code != MOE_OK)
        return st.code == MOE_UNIMPLEMENTED;
    moectl_train_report_unsaved_steps(state);
    if (state->checkpoint[0] != '\0')
        moectl_say("after a restart, `moectl training load %s` continues from checkpoint %s",
                   state->checkpoint, state->checkpoint);
    moe__v1__get_train_state_response__free_unpacked(state, NULL);
    return true;
}

void moectl_train_report_at_stake(const Moe__V1__GetTrainStateResponse *s)
{
    char origin[SINCE_BYTES];
    if (s->problem[0] != '\0') {
        moectl_say("%s", s->problem);
        moectl_say(
            "the group waits: `moectl training recover NAME` takes it back to a checkpoint "
            "(`moectl training list` shows them), `moectl training recover-model` to the model as "
            "loaded; later steps are lost");
        return;
    }
    moectl_train_report_unsaved_steps(s);
    if (s->backwards != 0)
        moectl_say("the gradients of %" PRIu32 " Backward call%s wait for a step", s->backwards,
                   s->backwards == 1 ? "" : "s");
    if (s->unsaved_steps != 0 || s->backwards != 0)
        moectl_say("if a worker process is restarted, the group goes back to %s and loses them; a "
                   "worker that only reconnects keeps them",
                   name_origin(s, "the model as loaded", origin));
}
