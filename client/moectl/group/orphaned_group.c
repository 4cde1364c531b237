/* SPDX-License-Identifier: Apache-2.0 */
/* See orphaned_group.h. Changes nothing. */
#include "moectl/group/orphaned_group.h"

#include "moectl/group/process.h"

#include "base/clock.h"

#include <string.h>

enum { PROBE_MS = 500, NAMES_BYTES = 400 };

static void add_worker(struct moectl_orphaned_group *r, const char *endpoint)
{
    if (endpoint[0] == '\0' || r->count == MOE_MAX_SLOTS)
        return;
    for (size_t i = 0; i < r->count; i++)
        if (strcmp(r->workers[i], endpoint) == 0)
            return;
    if (snprintf(r->workers[r->count], MOECTL_ENDPOINT_MAX, "%s", endpoint) < MOECTL_ENDPOINT_MAX)
        r->count++;
}

static struct moe_status ask(const char *endpoint, Moe__V1__GetServerInfoResponse **info)
{
    struct moectl_link *link = NULL;
    *info = NULL;
    struct moe_status st = moectl_link_open(endpoint, &link);
    if (st.code == MOE_OK)
        st = moectl_link_server_info(link, moe_clock_ns() + PROBE_MS * MOE_NS_PER_MS, info);
    moectl_link_close(link);
    return st;
}

/* Asks worker `i`, which may name further workers; see moectl_link_check_worker. */
static void probe(struct moectl_orphaned_group *r, size_t i)
{
    Moe__V1__GetServerInfoResponse *info;
    struct moe_status st = ask(r->workers[i], &info);
    if (st.code != MOE_OK)
        return;
    r->answers[i] = true;
    r->answering++;
    r->serving += info->epoch != 0;
    if (r->coordinator[0] == '\0')
        snprintf(r->coordinator, sizeof r->coordinator, "%s", info->coordinator);
    for (size_t n = 0; n < info->n_workers; n++) {
        st = moectl_link_check_worker(r->workers[i], info->workers[n]);
        if (!moe_failed(&st))
            add_worker(r, info->workers[n]);
    }
    moe__v1__get_server_info_response__free_unpacked(info, NULL);
}

void moectl_orphaned_group_find(const struct moectl_common *common,
                                struct moectl_orphaned_group *out)
{
    struct moectl_group group;
    memset(out, 0, sizeof *out);
    struct moe_status st = moectl_state_group(common, &group);
    if (st.code == MOE_OK) {
        out->local = true;
        out->foreground = group.foreground;
        if (moectl_process_state(&group, 0) == MOECTL_PROCESS_RUNS)
            out->process = group.processes[0].pid;
        memcpy(out->coordinator, group.processes[0].endpoint, sizeof out->coordinator);
        moectl_command_text(group.processes[0].command, out->command, sizeof out->command);
        for (size_t i = 1; i < group.count; i++)
            add_worker(out, group.processes[i].endpoint);
        moectl_group_free(&group);
    } else if (common->endpoint != NULL) {
        add_worker(out, common->endpoint);
    }
    for (size_t i = 0; i < out->count; i++)
        probe(out, i);
}

static void list_answering(const struct moectl_orphaned_group *r, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < r->count && used < size; i++)
        if (r->answers[i])
            used += (size_t)snprintf(text + used, size - used, "%s%s", used > 0 ? ", " : "",
                                     r->workers[i]);
}

bool moectl_orphaned_group_report(const struct moectl_orphaned_group *r)
{
    char names[NAMES_BYTES];
    if (r->answering == 0)
        return false;
    list_answering(r, names, sizeof names);
    moectl_say("the coordinator (%s) does not answer; %zu of %zu workers still serve (%s answer%s)",
               r->coordinator, r->serving, r->count, names, r->answering == 1 ? "s" : "");
    if (r->foreground)
        moectl_say("Ctrl-C in its `moectl up`, or `moectl down --force`, ends the group");
    else if (r->process != 0)
        moectl_say("its process runs; to restart it: `kill -9 %d && moectl replace`",
                   (int)r->process);
    else if (r->local)
        moectl_say("`moectl replace` restarts it%s%s", r->command[0] != '\0' ? ": " : "",
                   r->command);
    else
        moectl_say("restart it with the same options and --state-dir: the workers reconnect and "
                   "keep their state");
    return true;
}

/* False also if it hangs: its host accepts the connection, but no answer comes. */
static bool answers(const char *endpoint)
{
    Moe__V1__GetServerInfoResponse *info;
    struct moe_status st = ask(endpoint, &info);
    if (info != NULL)
        moe__v1__get_server_info_response__free_unpacked(info, NULL);
    return st.code != MOE_UNAVAILABLE && st.code != MOE_DEADLINE_EXCEEDED;
}

bool moectl_orphaned_group_explain(const struct moectl_common *common,
                                   const struct moe_status *failure)
{
    struct moectl_orphaned_group r;
    if (failure->code != MOE_UNAVAILABLE && failure->code != MOE_DEADLINE_EXCEEDED)
        return false;
    moectl_orphaned_group_find(common, &r);
    if (r.coordinator[0] == '\0' || answers(r.coordinator))
        return false;
    return moectl_orphaned_group_report(&r);
}
