/* SPDX-License-Identifier: Apache-2.0 */
/* moectl drain, cordon, uncordon: an operator takes a slot's worker out of service, for good or for
 * a while. */
#include "commands.h"
#include "moectl/group/link.h"
#include "workers.h"

#include <inttypes.h>
#include <string.h>

struct slot_change {
    struct moectl_common common;
    uint32_t slot;
    const char *reason;
    bool cordon; /* of `drain`: first */
    bool force;
    uint64_t limit_ms;
    struct moectl_link *link;
};

static struct moe_status cordon(struct slot_change *c, bool uncordon)
{
    ProtobufCMessage *answer = NULL;
    Moe__V1__CordonSlotRequest request = MOE__V1__CORDON_SLOT_REQUEST__INIT;
    request.slot = c->slot;
    request.reason = (char *)(uintptr_t)c->reason;
    request.uncordon = uncordon;
    MOE_TRY(moectl_link_call(c->link, "/moe.v1.AdminService/CordonSlot", &request.base,
                             moectl_deadline(&c->common),
                             &moe__v1__cordon_slot_response__descriptor, &answer));
    protobuf_c_message_free_unpacked(answer, NULL);
    return moe_ok();
}

static struct moe_status drain(struct slot_change *c, uint64_t *epoch)
{
    ProtobufCMessage *answer = NULL;
    Moe__V1__DrainWorkerRequest request = MOE__V1__DRAIN_WORKER_REQUEST__INIT;
    if (c->cordon)
        MOE_TRY(cordon(c, false));
    request.slot = c->slot;
    request.reason = (char *)(uintptr_t)c->reason;
    request.limit_ms = (uint32_t)c->limit_ms;
    request.force = c->force;
    MOE_TRY(moectl_link_call(c->link, "/moe.v1.AdminService/DrainWorker", &request.base,
                             moectl_deadline(&c->common),
                             &moe__v1__drain_worker_response__descriptor, &answer));
    *epoch = ((Moe__V1__DrainWorkerResponse *)answer)->epoch;
    protobuf_c_message_free_unpacked(answer, NULL);
    return moe_ok();
}

static struct moe_status change(const struct moectl_command *self, struct slot_change *c,
                                uint64_t *epoch)
{
    Moe__V1__GetStatusResponse *status = NULL;
    struct moe_status st =
        moectl_admin_find(&c->common, moectl_deadline(&c->common), &c->link, &status);
    if (!moe_failed(&st))
        moe__v1__get_status_response__free_unpacked(status, NULL);
    if (!moe_failed(&st))
        st = self == &moectl_drain ? drain(c, epoch) : cordon(c, self == &moectl_uncordon);
    moectl_link_close(c->link);
    return st;
}

static int show(const struct moectl_command *self, const struct slot_change *c, uint64_t epoch)
{
    bool drains = self == &moectl_drain;
    if (!c->common.document) {
        moectl_put(drains ? "slot %" PRIu32 ": its worker finishes its requests, then leaves\n"
                   : self == &moectl_cordon ? "slot %" PRIu32 ": gets no new worker\n"
                                            : "slot %" PRIu32 ": takes workers again\n",
                   c->slot);
        return MOECTL_OK;
    }
    json_t *document = moectl_document(drains                   ? "DrainedSlot"
                                       : self == &moectl_cordon ? "CordonedSlot"
                                                                : "UncordonedSlot");
    json_object_set_new(document, "slot", json_integer((json_int_t)c->slot));
    json_object_set_new(document, "reason", json_string(c->reason));
    if (drains)
        json_object_set_new(document, "epoch", json_sprintf("%" PRIu64, epoch));
    return moectl_print(document);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct slot_change c = {.common = {.format = "table", .timeout_s = 10, .words_max = 1}};
    const struct moe_option options[] = {
        /* all but the first are of drain */
        {"reason", 'r', MOE_OPTION_STRING, &c.reason, 0, 0, "TEXT",
         "why; for the log and the events (required)"},
        {"cordon", 0, MOE_OPTION_BOOL, &c.cordon, 0, 0, NULL,
         "first close the slot, so that a restarted worker does not take it again"},
        {"limit-ms", 0, MOE_OPTION_UINT, &c.limit_ms, 0, UINT32_MAX, "MS",
         "time for its requests, then they are cancelled; 0 = the worker's setting"},
        {"force", 0, MOE_OPTION_BOOL, &c.force, 0, 0, NULL,
         "in a group with replicas, also if it has the last copy of some experts"},
    };
    uint64_t epoch = 0;
    int code;
    size_t count = self == &moectl_drain ? sizeof options / sizeof *options : 1;
    if (!moectl_parse(self, options, count, &c.common, argc, argv, &code))
        return code;
    if (c.common.word_count == 0)
        return moectl_usage_error("which slot?");
    code = moectl_parse_slot(c.common.words[0], &c.slot);
    if (code == MOECTL_OK)
        code = moectl_require(&(struct moectl_required){"reason", c.reason != NULL}, 1);
    if (code != MOECTL_OK)
        return code;
    struct moe_status st = change(self, &c, &epoch);
    return moe_failed(&st) ? moectl_fail(&st) : show(self, &c, epoch);
}

const struct moectl_command moectl_drain = {
    .name = "drain",
    .summary = "Makes a worker finish its requests and leave.",
    .usage = "SLOT --reason TEXT [--cordon] [--force]",
    .examples = "  moectl drain 3 --cordon --reason \"a fan is broken\"\n",
    .run = run,
};

const struct moectl_command moectl_cordon = {
    .name = "cordon",
    .summary = "Closes a slot to new workers. Its present worker stays.",
    .usage = "SLOT --reason TEXT",
    .examples = "  moectl cordon 3 --reason \"waits for a new GPU\"\n",
    .run = run,
};

const struct moectl_command moectl_uncordon = {
    .name = "uncordon",
    .summary = "Opens a slot to new workers again.",
    .usage = "SLOT --reason TEXT",
    .examples = "  moectl uncordon 3 --reason \"has a new GPU\"\n",
    .run = run,
};
