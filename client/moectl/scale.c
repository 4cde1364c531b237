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

/* What became of it; MOE_UNAVAILABLE while it goes on. */
static struct moe_status look(struct scale *s, const Moe__V1__GetStatusResponse *status)
{
    s->epoch = status->epoch;
    if (status->scaling_to != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_REFORMING, "the group is being scaled");
    if (status->size == s->size)
        return moe_ok();
    const Moe__V1__Error *e = status->scale_error;
    if (e == NULL)
        return moe_error(
            MOE_ABORTED, MOE_REASON_NONE,
            "the coordinator has started again meanwhile, or another scaling followed: "
            "the group has %" PRIu32 " workers",
            status->size);
    return moe_error((enum moe_code)e->code, moe_reason_from_name(e->reason),
                     "not scaled, the group serves as before: %s", e->message);
}

/* A coordinator that does not answer may answer the next time. */
static struct moe_status await(struct scale *s)
{
    uint64_t deadline_ns = moectl_deadline(&s->common);
    struct moe_status st =
        moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE, "the coordinator does not answer");
    while (moe_clock_ns() < deadline_ns) {
        Moe__V1__GetStatusResponse *status = NULL;
        uint64_t call_ns = moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS;
        struct moe_status asked =
            moectl_link_status(s->link, moe_earlier(call_ns, deadline_ns), &status);
        if (!moe_failed(&asked)) {
            st = look(s, status);
            moe__v1__get_status_response__free_unpacked(status, NULL);
        }
        if (st.code != MOE_UNAVAILABLE && st.code != MOE_DEADLINE_EXCEEDED)
            return st;
        moe_sleep_until(moe_clock_ns() + POLL_MS * MOE_NS_PER_MS);
    }
    return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                     "not done in time, and it goes on: see `moectl status`");
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
        return fflush(stdout) == 0 ? MOECTL_OK : MOECTL_FAILED;
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
    if (!moectl_parse(self, options, 1, &s.common, argc, argv, &code))
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
