/* SPDX-License-Identifier: Apache-2.0 */
/* See daemons.h. */
#include "moectl/group/daemons.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define READY_OPTION "--ready-fd"

enum {
    READY_FD = 3, /* MOECTL_READY_FD */
    FIRST_FREE_FD = 10,
    TAIL_BYTES = 4096,
    TAIL_LINES = 20,
};

static struct moe_status failed(const char *what)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "%s: %s", what, strerror(errno));
}

/* ------------------------------------------------------------------ finding */

static bool is_program(const char *path)
{
    return access(path, X_OK) == 0;
}

/* The folder of the moectl program. */
static bool moectl_folder(char path[MOECTL_PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", path, MOECTL_PATH_MAX - 1);
    if (n <= 0)
        return false;
    path[n] = '\0';
    char *slash = strrchr(path, '/');
    if (slash != NULL)
        *slash = '\0';
    return slash != NULL;
}

static bool find_in_path(const char *name, char path[MOECTL_PATH_MAX])
{
    const char *next = getenv("PATH");
    while (next != NULL) {
        size_t length = strcspn(next, ":");
        int n = snprintf(path, MOECTL_PATH_MAX, "%.*s/%s", (int)length, next, name);
        if (length > 0 && n < MOECTL_PATH_MAX && is_program(path))
            return true;
        next = next[length] == ':' ? next + length + 1 : NULL;
    }
    return false;
}

struct moe_status moectl_daemons_find(const char *name, char path[MOECTL_PATH_MAX])
{
    /* Relative to moectl: in the same folder, in libexec, or in the build tree, where moe-worker is
     * daemon/worker/moe-worker and moectl is client/moectl/moectl. */
    const char *room = strchr(name, '-') != NULL ? strchr(name, '-') + 1 : name;
    char folder[MOECTL_PATH_MAX], candidate[MOECTL_PATH_MAX], built[128];
    snprintf(built, sizeof built, "../../daemon/%s", room);
    const char *const places[] = {".", "../libexec/moed", built};
    bool found = false;
    if (moectl_folder(folder)) {
        for (size_t i = 0; i < sizeof places / sizeof *places && !found; i++) {
            int n = snprintf(candidate, sizeof candidate, "%s/%s/%s", folder, places[i], name);
            found = n < MOECTL_PATH_MAX && is_program(candidate);
        }
    }
    if ((found || find_in_path(name, candidate)) && realpath(candidate, path) != NULL)
        return moe_ok();
    return moe_error(MOE_NOT_FOUND, MOE_REASON_IO, "cannot find the program %s", name);
}

/* ------------------------------------------------------------------ starting */

struct moe_status moectl_daemons_init(struct moectl_daemons *d, int directory, const char *path,
                                      bool detached)
{
    *d = (struct moectl_daemons){
        .directory = directory, .path = path, .detached = detached, .signals = -1};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGCHLD);
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0)
        return failed("signals");
    d->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return d->signals >= 0 ? moe_ok() : failed("signals");
}

void moectl_daemons_free(struct moectl_daemons *d)
{
    for (size_t i = 0; i < d->count; i++) {
        json_decref(d->all[i].process.command);
        if (d->all[i].ready >= 0)
            close(d->all[i].ready);
    }
    if (d->signals >= 0)
        close(d->signals);
}

/* Descriptors for the next child, all close-on-exec, with higher numbers than the child uses. */
struct child_fds {
    int log, dev_null, ready_read, ready_write;
};

static int lift(int fd)
{
    if (fd < 0)
        return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FREE_FD);
    close(fd);
    return high;
}

static void close_child_fds(struct child_fds *p)
{
    int *const all[] = {&p->log, &p->dev_null, &p->ready_read, &p->ready_write};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (*all[i] >= 0)
            close(*all[i]);
        *all[i] = -1;
    }
}

static bool open_child_fds(const struct moectl_daemons *d, const char *name, struct child_fds *p)
{
    char log[sizeof d->all[0].process.name + 8];
    int ends[2];
    snprintf(log, sizeof log, "%s.log", name);
    *p = (struct child_fds){-1, -1, -1, -1};
    int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (d->keep_logs ? 0 : O_TRUNC);
    p->log = lift(openat(d->directory, log, flags, 0600));
    p->dev_null = lift(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (pipe2(ends, O_CLOEXEC) == 0) {
        p->ready_read = lift(ends[0]);
        p->ready_write = lift(ends[1]);
    }
    return p->log >= 0 && p->dev_null >= 0 && p->ready_read >= 0 && p->ready_write >= 0;
}

/* Runs in the child: only async-signal-safe calls until exec. */
_Noreturn static void exec_daemon(const struct child_fds *p, bool detached, pid_t parent,
                                  const char *program, const char *const *argv)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    if (!detached) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) /* the parent died before prctl */
            _exit(127);
    }
    if (dup2(p->dev_null, STDIN_FILENO) >= 0 && dup2(p->log, STDOUT_FILENO) >= 0 &&
        dup2(p->log, STDERR_FILENO) >= 0 && dup2(p->ready_write, READY_FD) >= 0)
        execv(program, (char *const *)(uintptr_t)argv);
    _exit(127);
}

/* The command line without --ready-fd, which is valid for this process only. */
static json_t *record_command(const char *program, const char *const *argv)
{
    json_t *command = json_array();
    json_array_append_new(command, json_string(program));
    for (size_t i = 1; argv[i] != NULL; i++) {
        if (strcmp(argv[i], READY_OPTION) == 0 && argv[i + 1] != NULL)
            i++;
        else
            json_array_append_new(command, json_string(argv[i]));
    }
    return command;
}

/* Replaces port 0 of an option by the real port, so that a restarted daemon gets the same one. */
static void record_endpoint(struct moectl_process *p, const char *option, const char *endpoint)
{
    for (size_t i = 0; i + 1 < json_array_size(p->command); i++)
        if (strcmp(json_string_value(json_array_get(p->command, i)), option) == 0)
            json_array_set_new(p->command, i + 1, json_string(endpoint));
}

void moectl_daemons_command(const struct moectl_process *p,
                            const char *argv[MOECTL_ARGUMENTS_MAX + 3])
{
    size_t n = 0;
    for (; n < json_array_size(p->command) && n < MOECTL_ARGUMENTS_MAX; n++)
        argv[n] = json_string_value(json_array_get(p->command, n));
    argv[n++] = READY_OPTION;
    argv[n++] = MOECTL_READY_FD;
    argv[n] = NULL;
}

/* Starts the program as a child. */
static struct moe_status launch(const struct moectl_daemons *d, struct moectl_daemon *daemon,
                                const char *program, const char *const *argv)
{
    struct child_fds p;
    pid_t parent = getpid();
    pid_t child = open_child_fds(d, daemon->process.name, &p) ? fork() : -1;
    if (child == 0)
        exec_daemon(&p, d->detached, parent, program, argv);
    struct moe_status st = child > 0 ? moe_ok() : failed(daemon->process.name);
    if (child > 0) {
        daemon->process.pid = child;
        daemon->running = true;
        daemon->ready = p.ready_read;
        p.ready_read = -1;
    }
    close_child_fds(&p);
    return st;
}

struct moe_status moectl_daemons_start(struct moectl_daemons *d, const char *name,
                                       const char *program, const char *const *argv)
{
    MOE_INVARIANT(d->count < MOECTL_PROCESSES_MAX);
    struct moectl_daemon *daemon = &d->all[d->count];
    *daemon = (struct moectl_daemon){.ready = -1};
    snprintf(daemon->process.name, sizeof daemon->process.name, "%s", name);
    if (snprintf(daemon->log, sizeof daemon->log, "%s/%s.log", d->path, name) >=
        (int)sizeof daemon->log)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "the name of the state directory is too long");
    MOE_TRY(launch(d, daemon, program, argv));
    daemon->process.command = record_command(program, argv);
    d->count++;
    return moe_ok();
}

struct moe_status moectl_daemons_restart(struct moectl_daemons *d, size_t i)
{
    struct moectl_daemon *daemon = &d->all[i];
    const char *argv[MOECTL_ARGUMENTS_MAX + 3];
    moectl_daemons_command(&daemon->process, argv);
    if (daemon->ready >= 0)
        close(daemon->ready);
    daemon->ready = -1;
    return launch(d, daemon, argv[0], argv);
}

/* ------------------------------------------------------------------ waiting */

/* Reads "host:port\n", of the coordinator "host:port host:port\n". The daemon writes it with one
 * call, so it arrives in one piece. */
static bool read_ready(struct moectl_daemon *daemon)
{
    char line[2 * MOECTL_ENDPOINT_MAX];
    ssize_t n = read(daemon->ready, line, sizeof line - 1);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return false;
    close(daemon->ready);
    daemon->ready = -1;
    line[n > 0 ? n : 0] = '\0';
    line[strcspn(line, "\n")] = '\0';
    size_t length = strcspn(line, " ");
    const char *control = line[length] == ' ' ? line + length + 1 : "";
    if (length == 0 || length >= MOECTL_ENDPOINT_MAX || strlen(control) >= MOECTL_ENDPOINT_MAX)
        return false;
    memcpy(daemon->process.endpoint, line, length);
    daemon->process.endpoint[length] = '\0';
    strcpy(daemon->control_endpoint, control);
    record_endpoint(&daemon->process, "--listen", daemon->process.endpoint);
    record_endpoint(&daemon->process, "--control-listen", control);
    return true;
}

static bool reap(struct moectl_daemons *d)
{
    bool ended = false;
    for (size_t i = 0; i < d->count; i++) {
        struct moectl_daemon *daemon = &d->all[i];
        if (daemon->running &&
            waitpid(daemon->process.pid, &daemon->wait_status, WNOHANG) == daemon->process.pid) {
            daemon->running = false;
            ended = true;
        }
    }
    return ended;
}

/* True after a signal that asks moectl to end. */
static bool read_signals(struct moectl_daemons *d, bool *child)
{
    struct signalfd_siginfo info;
    bool stop = false;
    while (read(d->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGCHLD)
            *child = true;
        else
            stop = true;
    }
    return stop;
}

static int poll_timeout(uint64_t deadline_ns)
{
    uint64_t now = moe_clock_ns();
    if (deadline_ns == MOE_NEVER)
        return -1;
    uint64_t ms = deadline_ns > now ? (deadline_ns - now) / MOE_NS_PER_MS + 1 : 0;
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

enum moectl_event moectl_daemons_wait(struct moectl_daemons *d, uint64_t deadline_ns)
{
    for (;;) {
        struct pollfd fds[MOECTL_PROCESSES_MAX + 1];
        for (size_t i = 0; i < d->count; i++) /* negative descriptors are skipped by poll */
            fds[i] = (struct pollfd){.fd = d->all[i].ready, .events = POLLIN};
        fds[d->count] = (struct pollfd){.fd = d->signals, .events = POLLIN};
        int rc = poll(fds, d->count + 1, poll_timeout(deadline_ns));
        if (rc == 0)
            return MOECTL_EVENT_TIME;
        bool child = false, ready = false;
        bool stop = rc > 0 && fds[d->count].revents != 0 && read_signals(d, &child);
        for (size_t i = 0; i < d->count && rc > 0; i++)
            ready = (fds[i].revents != 0 && read_ready(&d->all[i])) || ready;
        bool ended = child && reap(d);
        if (stop)
            return MOECTL_EVENT_STOP;
        if (ended)
            return MOECTL_EVENT_ENDED;
        if (ready)
            return MOECTL_EVENT_READY;
    }
}

size_t moectl_daemons_running(const struct moectl_daemons *d)
{
    size_t n = 0;
    for (size_t i = 0; i < d->count; i++)
        n += d->all[i].running;
    return n;
}

const struct moectl_daemon *moectl_daemons_failed(const struct moectl_daemons *d)
{
    for (size_t i = 0; i < d->count; i++)
        if (!d->all[i].running && d->all[i].wait_status != 0)
            return &d->all[i];
    return NULL;
}

/* ------------------------------------------------------------------ ending */

static void print_tail(const char *path, const char *advice)
{
    char text[TAIL_BYTES + 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    off_t end = lseek(fd, 0, SEEK_END);
    ssize_t n = pread(fd, text, TAIL_BYTES, end > TAIL_BYTES ? end - TAIL_BYTES : 0);
    close(fd);
    if (n <= 0)
        return;
    text[n] = '\0';
    const char *from = text + n;
    for (int lines = 0; from > text; from--)
        if (from[-1] == '\n' && from != text + n && ++lines == TAIL_LINES)
            break;
    fprintf(stderr, "--- end of %s:\n%s---\n", path, from);
    if (strstr(from, "cannot listen on ") != NULL)
        moectl_say("%s", advice);
}

void moectl_daemons_report(const struct moectl_daemon *daemon, const char *advice)
{
    const char *name = daemon->process.name;
    if (WIFSIGNALED(daemon->wait_status))
        moectl_say("%s was killed by signal %d (%s)", name, WTERMSIG(daemon->wait_status),
                   strsignal(WTERMSIG(daemon->wait_status)));
    else
        moectl_say("%s ended with exit code %d", name, WEXITSTATUS(daemon->wait_status));
    print_tail(daemon->log, advice);
}

void moectl_daemons_signal(const struct moectl_daemons *d, int signal_number)
{
    for (size_t i = 0; i < d->count; i++)
        if (d->all[i].running)
            kill(d->all[i].process.pid, signal_number);
}
