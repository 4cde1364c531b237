/* SPDX-License-Identifier: Apache-2.0 */
/* See host.h. The id is a hash, because a machine's id is not for other programs. */
#include "worker/host.h"

#include "daemon/endpoint.h"
#include "model/sha256.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ID_DIGITS = 16 };

/* ------------------------------------------------------------------- interfaces */

/* The numeric text of an address that others may reach; false for others. */
static bool print_address(const struct sockaddr *a, char out[48])
{
    if (a == NULL)
        return false;
    if (a->sa_family == AF_INET)
        return inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)a)->sin_addr, out,
                         48) != NULL;
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr;
    return a->sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(v6) &&
           inet_ntop(AF_INET6, v6, out, 48) != NULL;
}

static bool better(const struct sockaddr *a, const char *have)
{
    return have[0] == '\0' || (a->sa_family == AF_INET && strchr(have, ':') != NULL);
}

struct moe_status moe_worker_find_interface(const char *wanted, struct moe_worker_interface *out)
{
    struct ifaddrs *all;
    *out = (struct moe_worker_interface){0};
    if (getifaddrs(&all) != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "cannot list network interfaces: %s",
                         strerror(errno));
    for (const struct ifaddrs *i = all; i != NULL; i = i->ifa_next) {
        char address[48];
        bool usable = (i->ifa_flags & IFF_UP) && print_address(i->ifa_addr, address);
        if (!usable || strlen(i->ifa_name) >= sizeof out->name)
            continue;
        bool named = strcmp(i->ifa_name, wanted) == 0 && better(i->ifa_addr, out->address);
        if (!named && strcmp(address, wanted) != 0)
            continue;
        (void)snprintf(out->name, sizeof out->name, "%s", i->ifa_name);
        (void)snprintf(out->address, sizeof out->address, "%s", address);
    }
    freeifaddrs(all);
    if (out->address[0] != '\0')
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "--net-interface: this host has no interface or address '%.60s' that is up",
                     wanted);
}

/* ------------------------------------------------------------------------- host */

/* The file's first line; "" if there is none. */
static void read_line(const char *path, char *out, int size)
{
    FILE *f = fopen(path, "re");
    out[0] = '\0';
    if (f == NULL)
        return;
    if (fgets(out, size, f) == NULL)
        out[0] = '\0';
    out[strcspn(out, "\n")] = '\0';
    (void)fclose(f);
}

static struct moe_status make_id(char *out, size_t size)
{
    char machine[64], boot[64], both[130], hex[MOE_SHA256_HEX];
    struct stat network;
    read_line("/etc/machine-id", machine, sizeof machine);
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    if (boot[0] == '\0' || stat("/proc/self/ns/net", &network) != 0)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO,
                         "cannot tell this host from others: /proc has no boot id or namespace");
    int n = snprintf(both, sizeof both, "moed:%s:%s", machine, boot);
    MOE_TRY(moe_sha256_of(both, (size_t)n, hex));
    (void)snprintf(out, size, "%.*s-%llx", ID_DIGITS, hex, (unsigned long long)network.st_ino);
    return moe_ok();
}

/* The address of the host in "host:port"; "" if its name has none. */
static void find_address(const char *endpoint, char out[48])
{
    char host[256];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    out[0] = '\0';
    if (moe_endpoint_split(endpoint, host, sizeof host) != NULL &&
        getaddrinfo(host, NULL, &hints, &found) == 0 && !print_address(found->ai_addr, out))
        out[0] = '\0';
    if (found != NULL)
        freeaddrinfo(found);
}

bool moe_worker_find_interface_of(const char *endpoint, struct moe_worker_interface *out)
{
    char address[48];
    find_address(endpoint, address);
    struct moe_status st = moe_worker_find_interface(address, out);
    return !moe_failed(&st);
}

struct moe_status moe_worker_describe_host(const char *network_address, const char *endpoint,
                                           struct moe_session_host *out, char *name,
                                           size_t name_size)
{
    *out = (struct moe_session_host){0};
    MOE_TRY(make_id(out->id, sizeof out->id));
    if (network_address != NULL)
        (void)snprintf(out->address, sizeof out->address, "%s", network_address);
    else
        find_address(endpoint, out->address);
    if (gethostname(name, name_size) != 0)
        name[0] = '\0';
    name[name_size - 1] = '\0';
    return moe_ok();
}
