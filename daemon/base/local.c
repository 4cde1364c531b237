/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/local.h"

#include "daemon/endpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* The longest name of a socket: the kernel numbers namespaces with 32 bits. */
#define LONGEST_NAME "/65535-4294967295.sock"

enum {
    DIRECTORIES = 3,
    STALE_AFTER_S = 60,
    DIRECTORY_MAX = MOE_LOCAL_PATH_BYTES - sizeof LONGEST_NAME,
    SESSION_MAX = DIRECTORY_MAX - (sizeof "/moed" - 1),
};

/* $XDG_RUNTIME_DIR; NULL for one that leaves no room for the name of a socket. */
static const char *session_directory(void)
{
    const char *session = getenv("XDG_RUNTIME_DIR");
    return session != NULL && session[0] == '/' && strlen(session) <= SESSION_MAX ? session : NULL;
}

/* Directory `index` of the list; false at its end. */
static bool directory_at(unsigned index, char to[MOE_LOCAL_PATH_BYTES])
{
    const char *own = getenv("MOED_RUNTIME_DIR"), *session = session_directory();
    int n = -1;
    if (own != NULL && own[0] == '/')
        n = index == 0 && strlen(own) <= DIRECTORY_MAX
                ? snprintf(to, MOE_LOCAL_PATH_BYTES, "%s", own)
                : -1;
    else if (index == 0 && session != NULL)
        n = snprintf(to, MOE_LOCAL_PATH_BYTES, "%s/moed", session);
    else if (index == 0 || index == 1) /* a session that this environment does not name */
        n = snprintf(to, MOE_LOCAL_PATH_BYTES, "/run/user/%u/moed", geteuid());
    else if (index < DIRECTORIES)
        n = snprintf(to, MOE_LOCAL_PATH_BYTES, "/tmp/moed-%u", geteuid());
    return n > 0 && n < MOE_LOCAL_PATH_BYTES;
}

static bool is_private(const char *directory)
{
    struct stat st;
    return lstat(directory, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid() &&
           (st.st_mode & 077) == 0;
}

static bool name_socket(const char *directory, const char *port, char path[MOE_LOCAL_PATH_BYTES])
{
    struct stat network;
    if (stat("/proc/self/ns/net", &network) != 0)
        return false;
    int n = snprintf(path, MOE_LOCAL_PATH_BYTES, "%s/%s-%lu.sock", directory, port,
                     (unsigned long)network.st_ino);
    return n > 0 && n < MOE_LOCAL_PATH_BYTES;
}

/* 0 if somebody listens at the path, else the error of connecting. */
static int reach(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    memcpy(at.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    int error = connect(fd, (const struct sockaddr *)&at, sizeof at) == 0 ? 0 : errno;
    close(fd);
    return error == EAGAIN ? 0 : error; /* its queue is full: somebody listens */
}

/* Removes `name` if it is a socket that a killed daemon has left behind. A new daemon may take the
 * name meanwhile: so the file is moved away, and back if it is another one. */
static void remove_stale(int directory, const char *root, const char *name)
{
    struct stat file, moved;
    char path[MOE_LOCAL_PATH_BYTES], away[32];
    int n = snprintf(path, sizeof path, "%s/%s", root, name);
    (void)snprintf(away, sizeof away, "away-%ld.sock", (long)getpid());
    if (n <= 0 || (size_t)n >= sizeof path ||
        fstatat(directory, name, &file, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISSOCK(file.st_mode) ||
        time(NULL) - file.st_mtime < STALE_AFTER_S || reach(path) != ECONNREFUSED ||
        renameat(directory, name, directory, away) != 0)
        return;
    if (fstatat(directory, away, &moved, AT_SYMLINK_NOFOLLOW) == 0 && moved.st_ino == file.st_ino &&
        moved.st_mtime == file.st_mtime)
        (void)unlinkat(directory, away, 0);
    else
        (void)renameat(directory, away, directory, name);
}

/* No later daemon replaces the socket of a port that the kernel chose. */
static void remove_all_stale(const char *root)
{
    DIR *d = opendir(root);
    if (d == NULL)
        return;
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        size_t length = strlen(e->d_name);
        if (length > 5 && strcmp(e->d_name + length - 5, ".sock") == 0)
            remove_stale(dirfd(d), root, e->d_name);
    }
    closedir(d);
}

struct moe_status moe_local_listen_path(char path[MOE_LOCAL_PATH_BYTES])
{
    char directory[MOE_LOCAL_PATH_BYTES];
    struct moe_status st =
        moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                  "MOED_RUNTIME_DIR is too long for a directory of sockets: at most %d bytes",
                  (int)DIRECTORY_MAX);
    for (unsigned i = 0; directory_at(i, directory); i++) {
        int error = mkdir(directory, S_IRWXU) == 0 || errno == EEXIST ? 0 : errno;
        if (error == 0 && is_private(directory) && strpbrk(directory, ",*") == NULL) {
            remove_all_stale(directory);
            return name_socket(directory, "*", path)
                       ? moe_ok()
                       : moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "/proc/self/ns/net: %s",
                                   strerror(errno));
        }
        st =
            moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                      "no directory for the local socket: %s: %s; set MOED_RUNTIME_DIR", directory,
                      error != 0 ? strerror(error) : "not a directory of this user with mode 0700");
    }
    return st;
}

/* The port of "127.0.0.1:7700" and other loopback addresses, else NULL. */
static const char *port_of(const char *endpoint)
{
    const char *colon = strrchr(endpoint, ':');
    struct moe_status st = moe_endpoint_check("endpoint", endpoint);
    if (!moe_failed(&st))
        st = moe_endpoint_check_loopback(endpoint);
    return moe_failed(&st) || colon == NULL ? NULL : colon + 1;
}

/* True if `owner` listens there. */
static bool has_listener(const char *directory, const char *port, uid_t owner,
                         char path[MOE_LOCAL_PATH_BYTES])
{
    struct stat file;
    return name_socket(directory, port, path) && lstat(path, &file) == 0 &&
           S_ISSOCK(file.st_mode) && file.st_uid == owner && reach(path) == 0;
}

bool moe_local_find(const char *endpoint, char path[MOE_LOCAL_PATH_BYTES])
{
    char directory[MOE_LOCAL_PATH_BYTES];
    const char *port = port_of(endpoint);
    for (unsigned i = 0; port != NULL && directory_at(i, directory); i++)
        if (is_private(directory) && has_listener(directory, port, geteuid(), path))
            return true;
    return false;
}

/* ------------------------------------------------------------------ operators */

/* NULL, or why not. */
static const char *refuse_shared(const char *directory, struct stat *st)
{
    if (lstat(directory, st) != 0)
        return strerror(errno);
    if (!S_ISDIR(st->st_mode))
        return "not a directory";
    if ((st->st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return "others than its owner may write to it";
    return NULL;
}

struct moe_status moe_local_admin_path(const char *directory, char path[MOE_LOCAL_PATH_BYTES])
{
    struct stat st;
    /* The listener puts its port in the place of the first '*'. */
    if (directory[0] != '/' || strpbrk(directory, ",*") != NULL ||
        strlen(directory) > DIRECTORY_MAX || !name_socket(directory, "*", path))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "--admin-socket-dir: %.80s has more than %d bytes, is no absolute path or "
                         "has a comma or an asterisk",
                         directory, (int)DIRECTORY_MAX);
    const char *wrong = refuse_shared(directory, &st);
    if (wrong == NULL && st.st_uid != geteuid() && st.st_uid != 0)
        wrong = "it belongs to another user";
    if (wrong != NULL)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "--admin-socket-dir: %.80s: %s",
                         directory, wrong);
    remove_all_stale(directory);
    return moe_ok();
}

bool moe_local_find_admin(const char *endpoint, char path[MOE_LOCAL_PATH_BYTES])
{
    const char *named = getenv("MOED_ADMIN_DIR"), *port = port_of(endpoint);
    const char *directory = named != NULL && named[0] == '/' ? named : "/run/moed-admin";
    struct stat st;
    return port != NULL && refuse_shared(directory, &st) == NULL &&
           has_listener(directory, port, st.st_uid, path);
}
