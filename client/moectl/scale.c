/* SPDX-License-Identifier: Apache-2.0 */
/* moectl scale: changes how many workers hold experts, and waits until a view of them serves. */
#include "commands.h"
#include "moectl/group/link.h"
#include "workers.h"

#include "base/clock.h"
#include "base/wait.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { POLL_MS = 20, CALL_LIMIT_MS = 2000 };

struct scale {
    struct moectl_common common;
    const char *reason;
    uint32_t size, before;
    uint64_t epoch;
    double seconds;
    struct moectl_link *link;
};

static struct moe_status ask(struct scale *s)
{
    ProtobufCMessage *answer = NULL;
    Moe__V1__ScaleRequest request = MOE__V1__SCALE_REQUEST__INIT;
    request.size = s->size;
    request.reason = (char *)(uintptr_t)s->reason;
    MOE_TRY(moectl_link_call(s->link, "/moe.v1.AdminService/Scale", &request.base,
                             moectl_deadline(&s->common), &moe__v1__scale_response__descriptor,
                             &answer));
    protobuf_c_message_free_unpacked(answer, NULL);
    return moe_ok();
}

/* What became of it; `goes_on`: nothing yet. */
static struct moe_status look(struct scale *s, const Moe__V1__GetStatusResponse *status,
                              bool *goes_on)
{
    bool serves = status->state == MOE__V1__GROUP_STATE__GROUP_STATE_SERVING;
    bool failed = status->state == MOE__V1__GROUP_STATE__GROUP_STATE_FAILED;
    s->epoch = status->epoch;
    *goes_on = status->scaling_to != 0 || (status->size == s->size && !serves && !failed);
    if (status->scaling_to != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "the group is being scaled");
    if (status->size == s->size)
        return serves ? moe_ok()
                      : moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING,
                                  "the size is %" PRIu32 ", and the group does not serve: %.150s",
                                  s->size, status->reason);
    const Moe__V1__Error *e = status->scale_error;
    if (e == NULL)
        return moe_error(
            MOE_ABORTED, MOE_REASON_NONE,
            "the coordinator has started again meanwhile, or another scaling followed: "
            "the group has %" PRIu32 " workers",
            status->size);
    return moe_error((enum moe_code)e->code, moe_reason_from_name(e->reason),
                     "not scaled, the experts stay where they are: %s", e->message);
}

/* A coordinator that does not answer may answer the next time. */
static struct moe_status await(struct scale *s)
{
    uint64_t deadline_ns = moectl_deadline(&s->common);
    struct moe_status st =
        moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "the coordinator does not answer");
    bool goes_on = true;
    while (moe_clock_ns() < deadline_ns) {
        Moe__V1__GetStatusResponse *status = NULL;
        uint64_t call_ns = moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS;
        struct moe_status asked =
            moectl_link_status(s->link, moe_earlier(call_ns, deadline_ns), &status);
        if (!moe_failed(&asked)) {
            st = look(s, status, &goes_on);
            moe__v1__get_status_response__free_unpacked(status, NULL);
        }
        if (!goes_on)
            return st;
        moe_sleep_until(moe_clock_ns() + POLL_MS * MOE_NS_PER_MS);
    }
    st.code = MOE_DEADLINE_EXCEEDED;
    return moe_error_context(st, "not done in time, and it goes on");
}

static struct moe_status work(struct scale *s)
{
    Moe__V1__GetStatusResponse *status = NULL;
    MOE_TRY(moectl_admin_find(&s->common, moectl_deadline(&s->common), &s->link, &status));
    s->before = status->size;
    moe__v1__get_status_response__free_unpacked(status, NULL);
    uint64_t begun_ns = moe_clock_ns();
    MOE_TRY(ask(s));
    struct moe_status st = await(s);
    s->seconds = (double)(moe_clock_ns() - begun_ns) / (double)MOE_NS_PER_S;
    return st;
}

static int report(const struct scale *s)
{
    if (!s->common.document) {
        moectl_put("%" PRIu32 " workers hold the experts (before: %" PRIu32 "), after %.1f s\n",
                   s->size, s->before, s->seconds);
        return MOECTL_OK;
    }
    json_t *document = moectl_document("Scaled");
    json_object_set_new(document, "size", json_integer((json_int_t)s->size));
    json_object_set_new(document, "before", json_integer((json_int_t)s->before));
    json_object_set_new(document, "epoch", json_sprintf("%" PRIu64, s->epoch));
    json_object_set_new(document, "seconds", json_real(s->seconds));
    return moectl_print(document);
}

/* MOECTL_OK, or MOECTL_USAGE after a message. The coordinator knows the limits. */
static int parse_size(const char *text, uint32_t *size)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || value > UINT32_MAX)
        return moectl_usage_error("'%s' is not a number of workers", text);
    *size = (uint32_t)value;
    return MOECTL_OK;
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct scale s = {.common = {.format = "table", .timeout_s = 600, .words_max = 1},
                      .reason = "moectl scale"};
    const struct moe_option options[] = {
        {"reason", 'r', MOE_OPTION_STRING, &s.reason, 0, 0, "TEXT",
         "why; for the log and the events; default: moectl scale"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &s.common, argc, argv,
                      &code))
        return code;
    if (s.common.word_count == 0)
        return moectl_usage_error("how many workers?");
    code = parse_size(s.common.words[0], &s.size);
    if (code != MOECTL_OK)
        return code;
    struct moe_status st = work(&s);
    code = moe_failed(&st) ? moectl_fail(&st) : report(&s);
    moectl_link_close(s.link);
    return code;
}

const struct moectl_command moectl_scale = {
    .name = "scale",
    .summary = "Changes how many workers hold the experts, while the group serves.",
    .usage = "SIZE [--reason TEXT]",
    .examples = "  moectl scale 4   # after starting one more worker, which waits as a spare\n"
                "  moectl scale 3   # the worker in the highest slot leaves\n",
    .run = run,
};
