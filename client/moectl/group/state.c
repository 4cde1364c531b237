/* SPDX-License-Identifier: Apache-2.0 */
/* See state.h. Never starts, ends or calls a daemon. */
#include "moectl/group/state.h"

#include "base/clock.h"
#include "daemon/trusted_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define GROUP_FILE   "group.json"
#define NEW_FILE     GROUP_FILE ".new"
#define LOCK_FILE    "lock"
#define CHANGES_FILE "turn"

enum { POLL_MS = 20, FIRST_FREE_FD = 10, ROOM_BYTES = 64 * 1024 };

static struct moe_status io_error(const char *what, const char *name)
{
    enum moe_code code = errno == ENOENT                     ? MOE_NOT_FOUND
                         : errno == EACCES || errno == EPERM ? MOE_PERMISSION_DENIED
                                                             : MOE_UNAVAILABLE;
    return moe_error(code, MOE_REASON_IO, "cannot %s %s: %s", what, name, strerror(errno));
}

static struct moe_status default_path(char path[MOECTL_PATH_MAX])
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    int n = runtime != NULL && runtime[0] == '/' && access(runtime, F_OK) == 0
                ? snprintf(path, MOECTL_PATH_MAX, "%s/moed", runtime)
                : snprintf(path, MOECTL_PATH_MAX, "/tmp/moed-%u", (unsigned)getuid());
    if (n >= MOECTL_PATH_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "XDG_RUNTIME_DIR is too long");
    return moe_ok();
}

struct moe_status moectl_state_open(const char *named, bool create, char path[MOECTL_PATH_MAX],
                                    int *directory)
{
    char wanted[MOECTL_PATH_MAX];
    if (named == NULL)
        MOE_TRY(default_path(wanted));
    else if (snprintf(wanted, sizeof wanted, "%s", named) >= (int)sizeof wanted)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "the name of the state directory is too long");
    memcpy(path, wanted, strlen(wanted) + 1);
    if (create && mkdir(wanted, 0700) != 0 && errno != EEXIST)
        return io_error("create", wanted);
    int fd = open(wanted, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return io_error("open", wanted);
    /* Any user can create a directory in /tmp. */
    struct moe_status st = moe_trusted_directory_check(wanted, fd);
    if (st.code == MOE_OK && realpath(wanted, path) == NULL)
        st = io_error("open", wanted);
    if (st.code != MOE_OK) {
        close(fd);
        return st;
    }
    *directory = fd;
    return st;
}

static struct moe_status open_lock(int directory, int *lock)
{
    int low = openat(directory, LOCK_FILE, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (low < 0)
        return io_error("open", LOCK_FILE);
    /* Above the descriptors of daemons. Not close-on-exec: daemons inherit the lock. */
    *lock = fcntl(low, F_DUPFD, FIRST_FREE_FD);
    close(low);
    return *lock >= 0 ? moe_ok() : io_error("open", LOCK_FILE);
}

struct moe_status moectl_state_lock(int directory, int *lock)
{
    int fd = -1;
    MOE_TRY(open_lock(directory, &fd));
    /* First exclusive, then shared. Of two `up` at the same time, the second step fails for at
     * least one. */
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 || flock(fd, LOCK_SH | LOCK_NB) != 0) {
        close(fd);
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NONE,
                         "a group is already running in this state directory; `moectl down` ends "
                         "it, --state-dir selects another one");
    }
    *lock = fd;
    return moe_ok();
}

struct moe_status moectl_state_join(int directory, int *lock)
{
    int fd = -1;
    MOE_TRY(open_lock(directory, &fd));
    if (flock(fd, LOCK_SH | LOCK_NB) != 0) {
        close(fd);
        return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NONE,
                         "another `moectl up` is starting a group in this state directory");
    }
    *lock = fd;
    return moe_ok();
}

/* A second lock on the first byte of the same file: a `down` has it from when it begins to wait. It
 * ends with the descriptor, as the first one does. */
static struct flock first_byte(short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_len = 1};
}

bool moectl_state_down_waits(int lock)
{
    struct flock wanted = first_byte(F_WRLCK);
    return fcntl(lock, F_OFD_GETLK, &wanted) == 0 && wanted.l_type != F_UNLCK;
}

struct moe_status moectl_state_lock_changes(int directory, enum moectl_change change,
                                            uint64_t deadline_ns, int *lock)
{
    int kind = change == MOECTL_CHANGE_DOWN ? LOCK_SH : LOCK_EX;
    bool reported = false;
    int fd = openat(directory, CHANGES_FILE, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return io_error("open", CHANGES_FILE);
    struct flock waits = first_byte(F_RDLCK);
    if (change == MOECTL_CHANGE_DOWN && fcntl(fd, F_OFD_SETLK, &waits) != 0)
        moectl_say("a waiting `moectl replace` does not notice this `moectl down`: %s",
                   strerror(errno));
    struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    while (flock(fd, kind | LOCK_NB) != 0) {
        if (moe_clock_ns() >= deadline_ns) {
            close(fd);
            return moe_error(MOE_DEADLINE_EXCEEDED, MOE_REASON_NONE,
                             "another `moectl replace`%s did not finish within the time limit",
                             change == MOECTL_CHANGE_DOWN ? "" : " or `moectl down`");
        }
        if (!reported)
            moectl_say("waiting for the end of another `moectl replace`%s",
                       change == MOECTL_CHANGE_DOWN ? "" : " or `moectl down`");
        reported = true;
        nanosleep(&pause, NULL);
    }
    *lock = fd;
    return moe_ok();
}

void moectl_state_unlock_changes(int lock)
{
    if (lock < 0)
        return;
    /* A child that has not executed its program yet has the lock too: closing ends ours alone. */
    (void)flock(lock, LOCK_UN);
    close(lock);
}

bool moectl_state_is_alive(int directory)
{
    int fd = openat(directory, LOCK_FILE, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    bool alive = flock(fd, LOCK_EX | LOCK_NB) != 0;
    close(fd);
    return alive;
}

bool moectl_state_wait_gone(int directory, uint64_t deadline_ns)
{
    struct timespec pause = {.tv_nsec = POLL_MS * (long)MOE_NS_PER_MS};
    while (moectl_state_is_alive(directory)) {
        if (moe_clock_ns() >= deadline_ns)
            return false;
        nanosleep(&pause, NULL);
    }
    return true;
}

/* ------------------------------------------------------------------ group.json */

static json_t *group_to_json(const struct moectl_group *group)
{
    json_t *document = moectl_document("LocalGroup");
    json_t *processes = json_array();
    bool good = document != NULL && processes != NULL;
    for (size_t i = 0; i < group->count && good; i++) {
        const struct moectl_process *p = &group->processes[i];
        json_t *entry = json_pack("{s:s, s:I, s:s}", "name", p->name, "pid", (json_int_t)p->pid,
                                  "endpoint", p->endpoint);
        if (p->command != NULL)
            json_object_set(entry, "command", p->command);
        good = json_array_append_new(processes, entry) == 0;
    }
    good = good && json_object_set_new(document, "model", json_string(group->model)) == 0 &&
           json_object_set_new(document, "foreground", json_boolean(group->foreground)) == 0 &&
           json_object_set_new(document, "restarts", json_boolean(group->restarts)) == 0 &&
           json_object_set(document, "processes", processes) == 0;
    json_decref(processes);
    if (!good) {
        json_decref(document);
        return NULL;
    }
    return document;
}

struct moe_status moectl_state_check_room(int directory, const char *path)
{
    int fd = openat(directory, NEW_FILE, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return io_error("write in", path);
    int error = posix_fallocate(fd, 0, ROOM_BYTES);
    close(fd);
    unlinkat(directory, NEW_FILE, 0);
    errno = error;
    return error == 0 ? moe_ok() : io_error("write in", path);
}

struct moe_status moectl_state_write(int directory, const struct moectl_group *group)
{
    json_t *document = group_to_json(group);
    if (document == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "out of memory");
    int fd = openat(directory, NEW_FILE, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool good = fd >= 0 && json_dumpfd(document, fd, JSON_INDENT(2)) == 0;
    if (fd >= 0)
        good = close(fd) == 0 && good;
    good = good && renameat(directory, NEW_FILE, directory, GROUP_FILE) == 0;
    struct moe_status st = good ? moe_ok() : io_error("write", GROUP_FILE);
    if (fd >= 0 && !good)
        unlinkat(directory, NEW_FILE, 0);
    json_decref(document);
    return st;
}

static bool is_command(const json_t *command)
{
    size_t count = json_array_size(command);
    for (size_t i = 0; i < count; i++)
        if (!json_is_string(json_array_get(command, i)))
            return false;
    return count > 0 && count <= MOECTL_ARGUMENTS_MAX &&
           json_string_value(json_array_get(command, 0))[0] == '/';
}

static bool read_process(json_t *entry, struct moectl_process *p)
{
    const char *name, *endpoint;
    json_int_t pid;
    if (json_unpack(entry, "{s:s, s:I, s:s}", "name", &name, "pid", &pid, "endpoint", &endpoint) !=
            0 ||
        pid <= 1 || pid > INT_MAX)
        return false;
    p->pid = (pid_t)pid;
    p->command =
        json_incref(json_object_get(entry, "command")); /* absent in files of older releases */
    if (p->command != NULL && !is_command(p->command))
        return false;
    return snprintf(p->name, sizeof p->name, "%s", name) < (int)sizeof p->name &&
           snprintf(p->endpoint, sizeof p->endpoint, "%s", endpoint) < (int)sizeof p->endpoint;
}

static bool read_group(json_t *document, struct moectl_group *group)
{
    const char *model;
    json_t *processes;
    if (json_unpack(document, "{s:s, s:o}", "model", &model, "processes", &processes) != 0)
        return false;
    /* Both may be absent. */
    group->foreground = json_is_true(json_object_get(document, "foreground"));
    group->restarts = json_is_true(json_object_get(document, "restarts"));
    group->count = json_array_size(processes);
    if (group->count < 2 || group->count > MOECTL_PROCESSES_MAX ||
        snprintf(group->model, sizeof group->model, "%s", model) >= (int)sizeof group->model)
        return false;
    for (size_t i = 0; i < group->count; i++)
        if (!read_process(json_array_get(processes, i), &group->processes[i]))
            return false;
    return true;
}

struct moe_status moectl_state_read(int directory, struct moectl_group *group)
{
    int fd = openat(directory, GROUP_FILE, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return io_error("open", GROUP_FILE);
    json_t *document = json_loadfd(fd, 0, NULL);
    close(fd);
    memset(group, 0, sizeof *group);
    bool good = document != NULL && read_group(document, group);
    json_decref(document);
    if (!good)
        moectl_group_free(group);
    return good ? moe_ok()
                : moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_MALFORMED,
                            GROUP_FILE " is not a valid group file");
}

struct moe_status moectl_state_no_group(const char *path, bool alive)
{
    if (alive)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE,
                         "daemons run in %.200s, but it has no group.json: `moectl up` is starting "
                         "them, or the file was lost. `moectl down -e HOST:PORT` ends them; their "
                         "logs in that directory name the addresses",
                         path);
    return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE,
                     "no local group is running in %.200s; `moectl up` starts one, --state-dir "
                     "and --endpoint select another one",
                     path);
}

void moectl_state_remove(int directory)
{
    if (unlinkat(directory, GROUP_FILE, 0) != 0 && errno != ENOENT)
        moectl_say("cannot remove " GROUP_FILE ": %s", strerror(errno));
}

void moectl_group_free(struct moectl_group *group)
{
    for (size_t i = 0; i < MOECTL_PROCESSES_MAX; i++) {
        json_decref(group->processes[i].command);
        group->processes[i].command = NULL;
    }
}

/* Appends one word of a command line, quoted for the shell if necessary. */
static void append_word(char *text, size_t size, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "-_./:,=+@%";
    size_t used = strlen(text);
    const char *space = used > 0 ? " " : "";
    if (word[0] != '\0' && strspn(word, plain) == strlen(word)) {
        snprintf(text + used, size - used, "%s%s", space, word);
        return;
    }
    snprintf(text + used, size - used, "%s'", space);
    for (const char *c = word; *c != '\0'; c++) {
        used = strlen(text);
        snprintf(text + used, size - used, *c == '\'' ? "'\"'\"'" : "%c", *c);
    }
    used = strlen(text);
    snprintf(text + used, size - used, "'");
}

void moectl_command_text(const json_t *command, char *text, size_t size)
{
    text[0] = '\0';
    for (size_t i = 0; i < json_array_size(command); i++)
        append_word(text, size, json_string_value(json_array_get(command, i)));
}

/* ------------------------------------------------------------------ endpoints */

static bool is_of_group(const struct moectl_group *group, const char *endpoint)
{
    for (size_t i = 0; i < group->count; i++)
        if (strcmp(group->processes[i].endpoint, endpoint) == 0)
            return true;
    return false;
}

struct moe_status moectl_state_group(const struct moectl_common *common, struct moectl_group *group)
{
    char path[MOECTL_PATH_MAX];
    int directory;
    bool alive = false;
    struct moe_status st = moectl_state_open(common->state_dir, false, path, &directory);
    if (st.code == MOE_OK) {
        st = moectl_state_read(directory, group);
        alive = moectl_state_is_alive(directory);
        close(directory);
    }
    if (st.code == MOE_OK && common->endpoint != NULL && !is_of_group(group, common->endpoint)) {
        moectl_group_free(group);
        return moe_error(MOE_NOT_FOUND, MOE_REASON_NONE, "%s is not of the local group",
                         common->endpoint);
    }
    return st.code == MOE_NOT_FOUND ? moectl_state_no_group(path, alive) : st;
}

static struct moe_status endpoint_of(const struct moectl_common *common, size_t process,
                                     char endpoint[MOECTL_ENDPOINT_MAX])
{
    if (common->endpoint != NULL) {
        if (snprintf(endpoint, MOECTL_ENDPOINT_MAX, "%s", common->endpoint) >= MOECTL_ENDPOINT_MAX)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                             "the endpoint is too long");
        return moe_ok();
    }
    struct moectl_group group;
    MOE_TRY(moectl_state_group(common, &group));
    memcpy(endpoint, group.processes[process].endpoint, MOECTL_ENDPOINT_MAX);
    moectl_group_free(&group);
    return moe_ok();
}

struct moe_status moectl_state_endpoint(const struct moectl_common *common,
                                        char endpoint[MOECTL_ENDPOINT_MAX])
{
    return endpoint_of(common, 0, endpoint);
}

struct moe_status moectl_state_worker(const struct moectl_common *common,
                                      char endpoint[MOECTL_ENDPOINT_MAX])
{
    return endpoint_of(common, 1, endpoint);
}
