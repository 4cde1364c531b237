/* SPDX-License-Identifier: Apache-2.0 */
/* The content of an access file: identities and tokens, each with roles. Pure: text goes in.
 *
 * JSON, strict (duplicate and unknown keys are refused); the room's README has an example.
 *
 * An identity is a URI or DNS name of a certificate, "uid:N" of a Unix socket, or "anonymous": a
 * connection without certificate or Unix socket. A final '*' of a URI stands for one or more of
 * [A-Za-z0-9._-]. Exact names have priority over patterns, and the longest pattern that matches
 * counts. A token is known by the SHA-256 of its text.
 *
 * A caller with the role "worker" speaks for the listed worker_ids; for a pattern without a list,
 * for the text that '*' stands for. */
#ifndef MOE_ACCESS_RULES_H
#define MOE_ACCESS_RULES_H

#include "base/status.h"

#include <stddef.h>

enum {
    MOE_ACCESS_NAME_BYTES = 256,    /* of an identity, or of "token:NAME", with the final 0 */
    MOE_ACCESS_ENTRIES_MAX = 4096,  /* identities and tokens of one file */
    MOE_ACCESS_WORKER_IDS_MAX = 64, /* of one entry */
    MOE_ACCESS_HASH_BYTES = 32,
};

struct moe_access_rules;

struct moe_access_entry {
    char name[MOE_ACCESS_NAME_BYTES];    /* "token:NAME" for a token */
    uint8_t hash[MOE_ACCESS_HASH_BYTES]; /* of a token */
    uint32_t roles;                      /* bits of enum moe_access_role */
    char **worker_ids;
    size_t worker_id_count;
};

/* `what` is the file's name for error texts. Free with moe_access_rules_free. Errors:
 * MOE_INVALID_ARGUMENT/CONFIG_INVALID, with the place; OUT_OF_MEMORY. */
struct moe_status moe_access_rules_parse(const char *text, size_t length, const char *what,
                                         struct moe_access_rules **out) MOE_CHECKED;
/* NULL is ignored. */
void moe_access_rules_free(struct moe_access_rules *rules);

/* The entry of an identity, by exact name or pattern; NULL for an unknown one, and for NULL
 * `rules`. */
const struct moe_access_entry *moe_access_rules_find(const struct moe_access_rules *rules,
                                                     const char *name);
/* The entry of a token. Takes the same time for each token of one length: it compares hashes, and
 * always all of them. */
const struct moe_access_entry *
moe_access_rules_find_token(const struct moe_access_rules *rules,
                            const uint8_t hash[MOE_ACCESS_HASH_BYTES]);
/* True when the caller `name` ("token:NAME" for a token) has the role "worker" and speaks for this
 * worker. */
bool moe_access_rules_speaks_for(const struct moe_access_rules *rules, const char *name,
                                 const char *worker_id);

/* True if `now` gives the identity fewer roles, or other worker_ids, than `before`. */
bool moe_access_rules_lost(const struct moe_access_rules *before,
                           const struct moe_access_rules *now, const char *name);
/* True if that holds for some token of `before`. */
bool moe_access_rules_lost_token(const struct moe_access_rules *before,
                                 const struct moe_access_rules *now);

/* The hash of a token. Errors: those of moe_token_check, MOE_RESOURCE_EXHAUSTED. */
struct moe_status moe_access_hash(const char *token,
                                  uint8_t hash[MOE_ACCESS_HASH_BYTES]) MOE_CHECKED;

#endif
