#include "base/endpoint.h"

#include <string.h>

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
