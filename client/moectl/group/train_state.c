/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/group/train_state.h"

#include "base/clock.h"

#include <inttypes.h>
#include <stdio.h>

enum { GLANCE_MS = 500, SINCE_BYTES = 96 };

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

struct moe_status moectl_train_probe(const char *worker, uint64_t deadline_ns,
                                     Moe__V1__GetTrainStateResponse **out)
{
    struct moectl_link *link = NULL;
    uint64_t limit = moe_clock_ns() + GLANCE_MS * MOE_NS_PER_MS;
    *out = NULL;
    struct moe_status st = moectl_link_open(worker, &link);
    if (st.code == MOE_OK)
        st = moectl_train_state(link, limit < deadline_ns ? limit : deadline_ns, out);
    moectl_link_close(link);
    return st;
}

/* "checkpoint epoch-3", or what else the steps were taken from. */
static const char *name_origin(const Moe__V1__GetTrainStateResponse *s, const char *otherwise,
                               char text[SINCE_BYTES])
{
    if (s->checkpoint[0] == '\0')
        return otherwise;
    snprintf(text, SINCE_BYTES, "checkpoint %.64s", s->checkpoint);
    return text;
}

void moectl_train_say_unsaved(const Moe__V1__GetTrainStateResponse *s)
{
    char origin[SINCE_BYTES];
    bool one = s->unsaved_steps == 1;
    if (s->unsaved_steps != 0 && s->saving[0] != '\0') {
        moectl_say("checkpoint %s is being written: unless that ends well, %" PRIu64
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

bool moectl_train_tell_unsaved(const char *worker, uint64_t deadline_ns)
{
    Moe__V1__GetTrainStateResponse *state;
    struct moe_status st = moectl_train_probe(worker, deadline_ns, &state);
    if (st.code != MOE_OK)
        return st.code == MOE_UNIMPLEMENTED;
    moectl_train_say_unsaved(state);
    if (state->checkpoint[0] != '\0')
        moectl_say("a group that is started anew goes on from checkpoint %s after `moectl training "
                   "load %s`",
                   state->checkpoint, state->checkpoint);
    moe__v1__get_train_state_response__free_unpacked(state, NULL);
    return true;
}

void moectl_train_say_at_stake(const Moe__V1__GetTrainStateResponse *s)
{
    char origin[SINCE_BYTES];
    if (s->problem[0] != '\0') {
        moectl_say("%s", s->problem);
        moectl_say(
            "the group forms when it is told where to go back to: `moectl training recover "
            "NAME` takes that checkpoint (`moectl training list` shows them), `recover-model` "
            "the model as loaded; steps since then are lost");
        return;
    }
    moectl_train_say_unsaved(s);
    if (s->backwards != 0)
        moectl_say("the gradients of %" PRIu32 " Backward call%s wait for a step", s->backwards,
                   s->backwards == 1 ? "" : "s");
    if (s->unsaved_steps != 0 || s->backwards != 0)
        moectl_say("with a worker that is started anew the group goes back to %s, and that is "
                   "lost; workers that come back as they were keep it",
                   name_origin(s, "the model as loaded", origin));
}
