/* SPDX-License-Identifier: Apache-2.0 */
/* Checks endpoints: HOST:PORT only.
 *
 * gRPC would take a URI, a name without a port, or a port modulo 65536, and fail much later with a
 * resolver's words or, worse, reach another server. Every program and library checks the text here
 * before gRPC sees it. It checks the form only: no name is looked up. */
#ifndef MOE_BASE_ENDPOINT_H
#define MOE_BASE_ENDPOINT_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>

/* An endpoint to connect to: a host name, an IPv4 address or a bracketed IPv6 address, and a port
 * from 1 to 65535 ("node7:7601", "[::1]:7601"). `setting` is its name for the user ("--endpoint");
 * the text of the error starts with it. Errors: MOE_INVALID_ARGUMENT, CONFIG_INVALID. */
struct moe_status moe_endpoint_check(const char *setting, const char *text) MOE_CHECKED;

/* The same for an address to listen on, where port 0 means any free port. */
struct moe_status moe_endpoint_check_listen(const char *setting, const char *text) MOE_CHECKED;

/* Refuses an address (of the form above) unless its host is a loopback address or "localhost". The
 * text names --insecure, which allows other addresses. Errors: MOE_INVALID_ARGUMENT,
 * CONFIG_INVALID. */
struct moe_status moe_endpoint_check_loopback(const char *text) MOE_CHECKED;
/* True for "0.0.0.0:P" and "[::]:P", however the address is written: all addresses of the host. Who
 * connects to it reaches its own host. */
bool moe_endpoint_is_wildcard(const char *text);

/* The host of "HOST:PORT" goes to `host`, without brackets and ended with a NUL. Returns the port's
 * text, a part of `text`; NULL if there is no colon or the host does not fit `capacity`. Checks
 * nothing else. */
const char *moe_endpoint_split(const char *text, char *host, size_t capacity);

/* Endpoints that stand for one service, of which one answers at a time. */
enum { MOE_ENDPOINTS_MAX = 8, MOE_ENDPOINT_BYTES = 264 };
struct moe_endpoints {
    size_t count;
    char all[MOE_ENDPOINTS_MAX][MOE_ENDPOINT_BYTES];
};
/* Reads "HOST:PORT,HOST:PORT", and checks each as moe_endpoint_check does. Errors: those, and
 * CONFIG_INVALID for more than MOE_ENDPOINTS_MAX or one that is named twice. */
struct moe_status moe_endpoints_parse(const char *setting, const char *text,
                                      struct moe_endpoints *out) MOE_CHECKED;
/* The next endpoint to try after `at` has failed with `why`: the leader that a NOT_LEADER names, if
 * it is in the list, else the one behind `at`. */
size_t moe_endpoints_next(const struct moe_endpoints *list, size_t at,
                          const struct moe_status *why);
/* The leader's endpoint in an error with the reason NOT_LEADER; "" = none. A part of the text. */
const char *moe_endpoint_of_leader(const struct moe_status *why);

#endif
