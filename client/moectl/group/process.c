/* SPDX-License-Identifier: Apache-2.0 */
/* See process.h. */
#include "moectl/group/process.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Reads the value of `key` in /proc/PID/status; false if there is none. */
static bool read_status(pid_t pid, const char *key, char value[64])
{
    char path[64], line[256];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        found = strncmp(line, key, strlen(key)) == 0;
        if (found)
            sscanf(line + strlen(key), " %63s", value);
    }
    if (file != NULL)
        fclose(file);
    return found;
}

/* The kernel marks a process that it kills at once, long before its files are closed. */
static bool is_killed(pid_t pid)
{
    static const char *const pending[] = {"ShdPnd:", "SigPnd:"};
    char value[64] = "";
    for (size_t i = 0; i < sizeof pending / sizeof *pending; i++)
        if (read_status(pid, pending[i], value) &&
            (strtoull(value, NULL, 16) >> (SIGKILL - 1) & 1) != 0)
            return true;
    return read_status(pid, "CoreDumping:", value) && strcmp(value, "1") == 0;
}

/* All threads have ended, so its files are closed. A zombie counts as ended. */
static bool has_ended(pid_t pid)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return errno == ESRCH;
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    bool yes = poll(&ended, 1, 0) > 0;
    close(fd);
    return yes;
}

enum moectl_process_state moectl_process_state(const struct moectl_group *group, size_t i)
{
    const char *name = i == 0 ? "moe-coordinator" : "moe-worker";
    char link[64], program[MOECTL_PATH_MAX], command[64] = "";
    pid_t pid = group->processes[i].pid;
    snprintf(link, sizeof link, "/proc/%d/exe", (int)pid);
    ssize_t n = readlink(link, program, sizeof program - 1);
    if (n > 0) { /* another program may have the same process id now */
        program[n] = '\0';
        return strstr(program, name) == NULL ? MOECTL_PROCESS_ENDED
               : is_killed(pid)              ? MOECTL_PROCESS_ENDING
                                             : MOECTL_PROCESS_RUNS;
    }
    /* Without an exe link the process has released its memory; it closes its files after that. */
    if (read_status(pid, "Name:", command) && strcmp(command, name) == 0 && !has_ended(pid))
        return MOECTL_PROCESS_ENDING;
    return MOECTL_PROCESS_ENDED;
}

bool moectl_process_runs(const struct moectl_group *group, size_t i)
{
    return moectl_process_state(group, i) != MOECTL_PROCESS_ENDED;
}
