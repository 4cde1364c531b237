/* SPDX-License-Identifier: Apache-2.0 */
/* Listening sockets: from a list of addresses to bound descriptors. */
#include "daemon/endpoint.h"
#include "listener/inside.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 4096, ADDRESS_MAX = 320 };

static const char unix_prefix[] = "unix:", group_prefix[] = "unix-group:";

static struct moe_status bad_address(const char *why)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "listen address %s", why);
}

static struct moe_status cannot_listen(const char *address, int error)
{
    return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot listen on %.120s: %s", address,
                     strerror(error));
}

static struct moe_status start_listening(struct moe_listen_socket *s, const char *address,
                                         const struct sockaddr *at, socklen_t length)
{
    if (bind(s->fd, at, length) == 0 && listen(s->fd, BACKLOG) == 0)
        return moe_ok();
    return cannot_listen(address, errno);
}

/* ------------------------------------------------------------------ TCP */

static uint16_t bound_port(int fd)
{
    struct sockaddr_in6 at = {0}; /* the port of IPv4 and of IPv6 is at the same place */
    socklen_t length = sizeof at;
    return getsockname(fd, (struct sockaddr *)&at, &length) == 0 ? ntohs(at.sin6_port) : 0;
}

static struct moe_status listen_tcp(const char *address, bool insecure, struct moe_listen_socket *s,
                                    bool *local)
{
    char host[256];
    MOE_TRY(moe_endpoint_check_listen("listen address", address));
    const char *port = moe_endpoint_split(address, host, sizeof host);
    if (port == NULL)
        return bad_address("has too long a host");
    struct moe_status st = moe_endpoint_check_loopback(address);
    *local = !moe_failed(&st);
    if (!*local && !insecure)
        return st;
    struct addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
    struct addrinfo *at = NULL;
    /* Without a name server: both families resolve it, and IPv4 is what clients try. */
    const char *name = strcasecmp(host, "localhost") == 0 ? "127.0.0.1" : host;
    int error = getaddrinfo(name, port, &hints, &at);
    if (error != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot listen on %.120s: %s", address,
                         gai_strerror(error));
    /* Two servers never share a port: SO_REUSEADDR allows only what is left of an earlier one. */
    int yes = 1, no = 0;
    s->fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (s->fd < 0 || setsockopt(s->fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
        (at->ai_family == AF_INET6 &&
         setsockopt(s->fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) != 0))
        st = cannot_listen(address, errno);
    else
        st = start_listening(s, address, at->ai_addr, at->ai_addrlen);
    freeaddrinfo(at);
    return st;
}

/* ------------------------------------------------------------------ Unix */

/* True if no process listens at the path any more. */
static bool is_stale(const struct sockaddr_un *at, socklen_t length)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    bool stale = connect(fd, (const struct sockaddr *)at, length) != 0 && errno == ECONNREFUSED;
    close(fd);
    return stale;
}

/* Opens the socket file to the group of its directory. A directory with the set-group-ID bit has
 * given it that group already. */
static struct moe_status give_to_group(const char *path)
{
    char directory[sizeof((struct sockaddr_un *)0)->sun_path];
    struct stat folder, file;
    (void)snprintf(directory, sizeof directory, "%.*s", (int)(strrchr(path, '/') - path), path);
    if (stat(directory, &folder) != 0 || lstat(path, &file) != 0)
        return cannot_listen(path, errno);
    if (folder.st_gid != file.st_gid && lchown(path, (uid_t)-1, folder.st_gid) != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO,
                         "cannot give %.120s to the group of its directory: %s; chmod g+s %.120s",
                         path, strerror(errno), directory);
    return chmod(path, S_IRUSR | S_IWUSR | S_IRGRP | S_IWGRP) == 0 ? moe_ok()
                                                                   : cannot_listen(path, errno);
}

/* A '*' in the path stands for the port of the first TCP address. */
static struct moe_status listen_unix(const char *pattern, uint16_t port, bool of_group,
                                     struct moe_listen_socket *s)
{
    const char *star = strchr(pattern, '*'), *address = pattern;
    char path[ADDRESS_MAX];
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    struct stat file;
    if (star != NULL)
        (void)snprintf(path, sizeof path, "%.*s%u%s", (int)(star - pattern), pattern, port,
                       star + 1);
    else
        (void)snprintf(path, sizeof path, "%s", pattern);
    if (path[0] != '/' || strlen(path) >= sizeof at.sun_path)
        return bad_address("needs an absolute path of at most 107 bytes after unix:");
    memcpy(at.sun_path, path, strlen(path) + 1);
    const socklen_t length = sizeof at;
    s->is_unix = true;
    s->is_group = of_group;
    s->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    /* The file gets the mode of the socket: no other user can connect, not even for a moment. */
    if (s->fd < 0 || fchmod(s->fd, S_IRUSR | S_IWUSR) != 0)
        return cannot_listen(address, errno);
    if (lstat(path, &file) == 0 && S_ISSOCK(file.st_mode) && is_stale(&at, length))
        (void)unlink(path);
    MOE_TRY(start_listening(s, address, (const struct sockaddr *)&at, length));
    if (lstat(path, &file) != 0)
        return cannot_listen(address, errno);
    s->device = file.st_dev;
    s->inode = file.st_ino;
    memcpy(s->path, path, strlen(path) + 1);
    return of_group ? give_to_group(path) : moe_ok();
}

/* ------------------------------------------------------------------ all */

static bool has_prefix(const char *address, const char *prefix)
{
    return strncmp(address, prefix, strlen(prefix)) == 0;
}

static struct moe_status listen_at(const char *address, bool insecure, uint16_t port,
                                   struct moe_listen_socket *s, bool *local)
{
    *s = (struct moe_listen_socket){.fd = -1};
    *local = true;
    struct moe_status st;
    if (has_prefix(address, unix_prefix))
        st = listen_unix(address + strlen(unix_prefix), port, false, s);
    else if (has_prefix(address, group_prefix))
        st = listen_unix(address + strlen(group_prefix), port, true, s);
    else
        st = listen_tcp(address, insecure, s, local);
    if (moe_failed(&st))
        moe_listen_close(s);
    return st;
}

struct moe_status moe_listen_open(const char *addresses, bool insecure,
                                  struct moe_listen_socket *sockets, size_t *count, uint16_t *port,
                                  bool *local)
{
    struct moe_status st = moe_ok();
    const char *from = addresses;
    *count = 0;
    *port = 0;
    *local = true;
    do {
        char address[ADDRESS_MAX];
        size_t length = strcspn(from, ",");
        bool loopback;
        if (*count == MOE_LISTENER_ADDRESSES_MAX || length >= sizeof address) {
            st = bad_address("list is too long: at most 4 addresses");
            break;
        }
        memcpy(address, from, length);
        address[length] = '\0';
        struct moe_listen_socket *s = &sockets[*count];
        st = listen_at(address, insecure, *port, s, &loopback);
        if (moe_failed(&st))
            break;
        (*count)++;
        *local = *local && loopback;
        if (*port == 0 && !s->is_unix)
            *port = bound_port(s->fd);
        from += length;
    } while (*from++ == ',');
    while (moe_failed(&st) && *count > 0)
        moe_listen_close(&sockets[--*count]);
    return st;
}

void moe_listen_close(struct moe_listen_socket *s)
{
    struct stat file;
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
    if (s->path[0] != '\0' && lstat(s->path, &file) == 0 && file.st_dev == s->device &&
        file.st_ino == s->inode)
        (void)unlink(s->path);
    s->path[0] = '\0';
}
