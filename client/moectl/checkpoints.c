/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoints.h"

#include "moe/v1/training.pb-c.h"
#include "moectl/group/link.h"
#include "moectl/io/proto_json.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { WHEN_BYTES = 24, SIZE_BYTES = 24 };

static struct moe_status ask(const struct moectl_common *common,
                             Moe__V1__ListCheckpointsResponse **out)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    struct moectl_link *link = NULL;
    ProtobufCMessage *answer = NULL;
    Moe__V1__ListCheckpointsRequest request = MOE__V1__LIST_CHECKPOINTS_REQUEST__INIT;
    uint64_t deadline = moectl_deadline(common);
    MOE_TRY(moectl_training_endpoint(common, deadline, endpoint));
    MOE_TRY(moectl_link_open(endpoint, &link));
    struct moe_status st =
        moectl_link_call(link, "/moe.v1.TrainingService/ListCheckpoints", &request.base, deadline,
                         &moe__v1__list_checkpoints_response__descriptor, &answer);
    moectl_link_close(link);
    *out = (Moe__V1__ListCheckpointsResponse *)(void *)answer;
    return st;
}

/* ------------------------------------------------------------------------------ table */

static const char *when(uint64_t made_s, char text[WHEN_BYTES])
{
    struct tm parts;
    time_t at = (time_t)made_s;
    if (made_s == 0 || made_s > INT32_MAX * UINT64_C(64) || gmtime_r(&at, &parts) == NULL ||
        strftime(text, WHEN_BYTES, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0)
        return "-";
    return text;
}

static const char *size_of(uint64_t bytes, char text[SIZE_BYTES])
{
    const double mib = 1024.0 * 1024.0;
    if ((double)bytes < 1024 * mib)
        snprintf(text, SIZE_BYTES, "%.1f MiB", (double)bytes / mib);
    else
        snprintf(text, SIZE_BYTES, "%.1f GiB", (double)bytes / (1024 * mib));
    return text;
}

static const char *or_dash(const char *text)
{
    return text[0] != '\0' ? text : "-";
}

static void print_settings(const Moe__V1__CheckpointInfo *c)
{
    moectl_put("%s", moectl_enum_name(&moe__v1__optimizer__descriptor, (int)c->optimizer));
    if (c->lora_rank != 0)
        moectl_put(", adapters of rank %" PRIu32 ", alpha %g", c->lora_rank, c->lora_alpha);
    if (c->router_frozen || c->experts_frozen || c->shared_frozen)
        moectl_put(", frozen:%s%s%s", c->router_frozen ? " router" : "",
                   c->experts_frozen ? " experts" : "", c->shared_frozen ? " shared" : "");
}

static void print_row(const Moe__V1__CheckpointInfo *c, const char *present)
{
    char made[WHEN_BYTES], size[SIZE_BYTES];
    bool is_present = strcmp(c->name, present) == 0;
    moectl_put("%c %-20s ", is_present ? '*' : ' ', c->name);
    if (!c->readable) {
        moectl_put("%s\n", c->problem);
        return;
    }
    moectl_put("%6" PRIu64 " %8" PRIu64 "  %-20s  %10s  %-12s  ", c->steps, c->weights_version,
               when(c->made_s, made), size_of(c->bytes, size), or_dash(c->parent));
    if (c->problem[0] != '\0')
        moectl_put("%s", c->problem);
    else
        print_settings(c);
    moectl_put("\n");
}

static void print_table(const Moe__V1__ListCheckpointsResponse *a)
{
    moectl_put("  %-20s %6s %8s  %-20s  %10s  %-12s  %s\n", "NAME", "STEPS", "VERSION", "MADE",
               "SIZE", "PARENT", "SETTINGS OR PROBLEM");
    for (size_t i = 0; i < a->n_checkpoints; i++)
        print_row(a->checkpoints[i], a->checkpoint);
    if (a->count > a->n_checkpoints)
        moectl_put("  and %zu more\n", (size_t)a->count - a->n_checkpoints);
}

int moectl_list_checkpoints(const struct moectl_common *common, struct moe_status *st)
{
    Moe__V1__ListCheckpointsResponse *answer = NULL;
    *st = ask(common, &answer);
    if (st->code != MOE_OK)
        return moectl_exit_code(st->code);
    int code = MOECTL_OK;
    if (common->document)
        code = moectl_print_message("Checkpoints", &answer->base);
    else
        print_table(answer);
    moe__v1__list_checkpoints_response__free_unpacked(answer, NULL);
    return code;
}
