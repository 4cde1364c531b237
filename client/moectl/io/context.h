/* SPDX-License-Identifier: Apache-2.0 */
/* Names for groups: an endpoint, and the files that calls to it need, by one word.
 *
 * The file is $XDG_CONFIG_HOME/moed/contexts, else ~/.config/moed/contexts:
 *
 *   current = prod
 *   [prod]
 *   endpoint = 10.0.0.7:7700
 *   tls-ca = /home/me/prod/ca.pem
 *   tls-certificate = /home/me/prod/me.pem
 *   tls-key = /home/me/prod/me.key
 *   token-file = /home/me/prod/token */
#ifndef MOECTL_CONTEXT_H
#define MOECTL_CONTEXT_H

#include "base/status.h"

#include <stddef.h>

#define MOECTL_CONTEXT_LOCAL "local" /* stands for no context: the group of this host */

enum {
    MOECTL_CONTEXT_NAME_BYTES = 48, /* [A-Za-z0-9._-], with the final 0 */
    MOECTL_CONTEXT_VALUE_BYTES = 256,
    MOECTL_CONTEXTS_MAX = 64,
};

/* What calls show and believe: an option, a setting of a context and a variable of the environment
 * each. */
enum moectl_trust {
    MOECTL_TLS_CA,
    MOECTL_TLS_CERTIFICATE,
    MOECTL_TLS_KEY,
    MOECTL_TLS_SERVER_NAME,
    MOECTL_TOKEN_FILE,
    MOECTL_TRUST_COUNT,
};
struct moectl_trust_name {
    const char *option;   /* "tls-ca", also the name in the file */
    const char *variable; /* "MOED_TLS_CA" */
    const char *json;     /* "tlsCa" */
};
extern const struct moectl_trust_name moectl_trust_names[MOECTL_TRUST_COUNT];

struct moectl_context {
    char name[MOECTL_CONTEXT_NAME_BYTES];
    char endpoint[MOECTL_CONTEXT_VALUE_BYTES];                  /* checked */
    char trust[MOECTL_TRUST_COUNT][MOECTL_CONTEXT_VALUE_BYTES]; /* "" = none */
};

struct moectl_contexts {
    char current[MOECTL_CONTEXT_NAME_BYTES]; /* "" = the local group */
    struct moectl_context all[MOECTL_CONTEXTS_MAX];
    size_t count;
};

/* A missing file is an empty one. Errors: MOE_INVALID_ARGUMENT/CONFIG_INVALID with the line,
 * MOE_FAILED_PRECONDITION/IO. */
struct moe_status moectl_contexts_read(struct moectl_contexts *out) MOE_CHECKED;
/* NULL for an unknown name. */
const struct moectl_context *moectl_contexts_find(const struct moectl_contexts *contexts,
                                                  const char *name);
/* Makes `name` the current one; "local" stands for the local group. The rest of the file stays as
 * it is. Errors: MOE_NOT_FOUND (no such context); as above. */
struct moe_status moectl_contexts_use(const char *name) MOE_CHECKED;

#endif
