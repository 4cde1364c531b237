/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/endpoint.h"

#include <netdb.h>
#include <netinet/in.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum { PORT_MAX = 65535, PORT_DIGITS_MAX = 5 };

/* -1 when the text is not a decimal port number. */
static long port_number(const char *text)
{
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > PORT_DIGITS_MAX || text[digits] != '\0')
        return -1;
    long port = 0;
    for (size_t i = 0; i < digits; i++)
        port = 10 * port + (text[i] - '0');
    return port <= PORT_MAX ? port : -1;
}

static bool is_host(const char *text, size_t length)
{
    static const char name_chars[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";
    static const char ipv6_chars[] = "0123456789abcdefABCDEF:.";
    if (length > 2 && text[0] == '[') {
        /* a zone ("%eth0") is free text */
        size_t address = 1 + strspn(text + 1, ipv6_chars);
        return text[length - 1] == ']' &&
               (address == length - 1 || (address > 1 && text[address] == '%'));
    }
    return length > 0 && strspn(text, name_chars) == length;
}

static struct moe_status check(const char *setting, const char *text, long port_min)
{
    const char *colon = strrchr(text, ':');
    if (colon != NULL && is_host(text, (size_t)(colon - text)) &&
        port_number(colon + 1) >= port_min)
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "%s: '%.64s' is not HOST:PORT with a port from %ld to %d", setting, text,
                     port_min, PORT_MAX);
}

struct moe_status moe_endpoint_check(const char *setting, const char *text)
{
    return check(setting, text, 1);
}

struct moe_status moe_endpoint_check_listen(const char *setting, const char *text)
{
    return check(setting, text, 0);
}

/* The address that a number stands for, an IPv4 address as ::ffff:A.B.C.D. Takes what connecting
 * takes, also "127.1" and "0x7f000001". False for a name; nothing is looked up. */
static bool read_address(const char *host, struct in6_addr *out)
{
    const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found;
    if (getaddrinfo(host, NULL, &hints, &found) != 0)
        return false;
    const bool v4 = found->ai_family == AF_INET;
    *out = (struct in6_addr){.s6_addr = {[10] = 0xff, [11] = 0xff}};
    if (v4)
        memcpy(out->s6_addr + 12, &((const struct sockaddr_in *)(void *)found->ai_addr)->sin_addr,
               4);
    else
        *out = ((const struct sockaddr_in6 *)(void *)found->ai_addr)->sin6_addr;
    freeaddrinfo(found);
    return true;
}

static bool is_loopback(const char *host)
{
    struct in6_addr a;
    if (!read_address(host, &a))
        return strcasecmp(host, "localhost") == 0;
    return IN6_IS_ADDR_V4MAPPED(&a) ? a.s6_addr[12] == 127 : IN6_IS_ADDR_LOOPBACK(&a);
}

const char *moe_endpoint_split(const char *text, char *host, size_t capacity)
{
    const char *colon = strrchr(text, ':');
    size_t length = colon != NULL ? (size_t)(colon - text) : 0;
    bool bracketed = length > 2 && text[0] == '[' && text[length - 1] == ']';
    if (bracketed) {
        text++;
        length -= 2;
    }
    if (colon == NULL || length >= capacity)
        return NULL;
    memcpy(host, text, length);
    host[length] = '\0';
    return colon + 1;
}

bool moe_endpoint_is_wildcard(const char *text)
{
    static const uint8_t zero[4];
    char host[256];
    struct in6_addr a;
    if (moe_endpoint_split(text, host, sizeof host) == NULL || !read_address(host, &a))
        return false;
    return IN6_IS_ADDR_UNSPECIFIED(&a) ||
           (IN6_IS_ADDR_V4MAPPED(&a) && memcmp(a.s6_addr + 12, zero, sizeof zero) == 0);
}

struct moe_status moe_endpoint_check_loopback(const char *text)
{
    char host[256];
    const bool fits = moe_endpoint_split(text, host, sizeof host) != NULL;
    if (fits && is_loopback(host))
        return moe_ok();
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                     "%.255s is not a loopback address: listening there, without TLS, needs "
                     "--insecure",
                     fits ? host : text);
}

/* ------------------------------------------------------------------ lists */

static struct moe_status add_endpoint(const char *setting, const char *from, size_t length,
                                      struct moe_endpoints *out)
{
    if (out->count == MOE_ENDPOINTS_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%s: at most %d endpoints", setting, MOE_ENDPOINTS_MAX);
    char *to = out->all[out->count];
    if (length >= MOE_ENDPOINT_BYTES)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%s: an endpoint is too long", setting);
    memcpy(to, from, length);
    to[length] = '\0';
    MOE_TRY(moe_endpoint_check(setting, to));
    for (size_t i = 0; i < out->count; i++)
        if (strcmp(out->all[i], to) == 0)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                             "%s: %.100s is named twice", setting, to);
    out->count++;
    return moe_ok();
}

struct moe_status moe_endpoints_parse(const char *setting, const char *text,
                                      struct moe_endpoints *out)
{
    out->count = 0;
    for (;;) {
        size_t length = strcspn(text, ",");
        MOE_TRY(add_endpoint(setting, text, length, out));
        if (text[length] == '\0')
            return moe_ok();
        text += length + 1;
    }
}

const char *moe_endpoint_of_leader(const struct moe_status *why)
{
    if (why->reason != MOE_REASON_NOT_LEADER)
        return "";
    const char *space = strrchr(why->text, ' ');
    struct moe_status st = moe_endpoint_check("", space != NULL ? space + 1 : "");
    return moe_failed(&st) ? "" : space + 1;
}

size_t moe_endpoints_next(const struct moe_endpoints *list, size_t at, const struct moe_status *why)
{
    const char *leader = moe_endpoint_of_leader(why);
    for (size_t i = 0; i < list->count; i++)
        if (i != at && strcmp(list->all[i], leader) == 0)
            return i;
    return (at + 1) % list->count;
}
