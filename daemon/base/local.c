/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/local.h"

#include "daemon/endpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { DIRECTORIES = 3 };

/* Directory `index` of the list; false at its end. */
static bool directory_at(unsigned index, char to[MOE_LOCAL_PATH_BYTES])
{
    const char *own = getenv("MOED_RUNTIME_DIR"), *session = getenv("XDG_RUNTIME_DIR");
    int n = -1;
    if (own != NULL && own[0] == '/')
        n = index == 0 ? snprintf(to, MOE_LOCAL_PATH_BYTES, "%s", own) : -1;
    else if (index == 0 && session != NULL && session[0] == '/')
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

struct moe_status moe_local_listen_path(char path[MOE_LOCAL_PATH_BYTES])
{
    char directory[MOE_LOCAL_PATH_BYTES];
    struct moe_status st = moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                                     "MOED_RUNTIME_DIR is too long, or is no absolute path");
    for (unsigned i = 0; directory_at(i, directory); i++) {
        int error = mkdir(directory, S_IRWXU) == 0 || errno == EEXIST ? 0 : errno;
        if (error == 0 && is_private(directory) && strchr(directory, ',') == NULL)
            return name_socket(directory, "*", path)
                       ? moe_ok()
                       : moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                                   "%s is too long for a socket's directory", directory);
        st =
            moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                      "no directory for the local socket: %s: %s; set MOED_RUNTIME_DIR", directory,
                      error != 0 ? strerror(error) : "not a directory of this user with mode 0700");
    }
    return st;
}

/* False for a socket that a killed daemon has left behind. */
static bool answers(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    memcpy(at.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool open = fd >= 0 && (connect(fd, (const struct sockaddr *)&at, sizeof at) == 0 ||
                            errno == EAGAIN); /* its queue is full: somebody listens */
    if (fd >= 0)
        close(fd);
    return open;
}

bool moe_local_find(const char *endpoint, char path[MOE_LOCAL_PATH_BYTES])
{
    char directory[MOE_LOCAL_PATH_BYTES];
    struct stat file;
    const char *colon = strrchr(endpoint, ':');
    struct moe_status st = moe_endpoint_check("endpoint", endpoint);
    if (!moe_failed(&st))
        st = moe_endpoint_check_loopback(endpoint);
    if (moe_failed(&st) || colon == NULL)
        return false;
    for (unsigned i = 0; directory_at(i, directory); i++)
        if (is_private(directory) && name_socket(directory, colon + 1, path) &&
            lstat(path, &file) == 0 && S_ISSOCK(file.st_mode) && file.st_uid == geteuid() &&
            answers(path))
            return true;
    return false;
}
