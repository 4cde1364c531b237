/* SPDX-License-Identifier: Apache-2.0 */
/* See slots.h. */
#include "moectl/group/slots.h"

#include "moectl/group/link.h"

#include "base/clock.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CALL_LIMIT_MS = 2000 };

/* Worker i of `moectl up` has the id worker-i, and asks for slot i. */
static bool fills_slot(const Moe__V1__GetStatusResponse *status, const char *name)
{
    for (size_t i = 0; i < status->n_workers; i++) {
        const Moe__V1__WorkerStatus *w = status->workers[i];
        if (strcmp(w->worker_id, name) == 0)
            return w->connected && w->state != MOE__V1__WORKER_STATE__WORKER_STATE_GONE &&
                   w->state != MOE__V1__WORKER_STATE__WORKER_STATE_DRAINING;
    }
    return false;
}

static bool is_cordoned(const Moe__V1__GetStatusResponse *status, size_t slot)
{
    for (size_t i = 0; i < status->n_cordons; i++)
        if (status->cordons[i]->slot == slot)
            return true;
    return false;
}

/* Runs in the child. */
static bool ask(const struct moectl_group *group, struct moectl_slots *out)
{
    uint64_t deadline_ns = moe_clock_ns() + CALL_LIMIT_MS * MOE_NS_PER_MS;
    struct moectl_link *link = NULL;
    Moe__V1__GetStatusResponse *status = NULL;
    struct moe_status st = moectl_link_open(group->processes[0].endpoint, &link);
    if (st.code == MOE_OK)
        st = moectl_link_status(link, deadline_ns, &status);
    if (st.code != MOE_OK)
        return false;
    memset(out, 0, sizeof *out);
    out->draining = status->state == MOE__V1__GROUP_STATE__GROUP_STATE_DRAINING;
    for (size_t i = 1; i < group->count; i++) {
        out->filled[i] = fills_slot(status, group->processes[i].name);
        out->cordoned[i] = is_cordoned(status, i - 1);
    }
    return true;
}

bool moectl_slots_ask(const struct moectl_group *group, struct moectl_slots *out)
{
    struct moectl_slots answer = {0};
    int ends[2];
    if (pipe(ends) != 0)
        return false;
    pid_t child = fork();
    if (child == 0) { /* a pipe takes the whole answer at once, so it arrives in one piece */
        bool good = ask(group, &answer);
        _exit(good && write(ends[1], &answer, sizeof answer) == (ssize_t)sizeof answer ? 0 : 1);
    }
    close(ends[1]);
    ssize_t n = 0;
    while (child > 0 && (n = read(ends[0], &answer, sizeof answer)) < 0 && errno == EINTR)
        ;
    close(ends[0]);
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR)
        ;
    if (n != (ssize_t)sizeof answer)
        return false;
    *out = answer;
    return true;
}
