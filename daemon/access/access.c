/* SPDX-License-Identifier: Apache-2.0 */
#include "access/access.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "daemon/log.h"
#include "daemon/trusted_file.h"

#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RULES_FORBIDDEN = 0022 }; /* an access file holds no secret, but others must not write it */

/* Daemons of a group read a new token within seconds of each other. */
#define OLD_TOKEN_NS (60 * MOE_NS_PER_S)

static const char group_name[] = "token:group", anonymous_name[] = "anonymous";

struct moe_access {
    struct moe_access_config config;
    /* Of the refreshing thread. */
    struct moe_trusted_mark rules_mark;
    bool rules_refused;

    struct moe_mutex token_lock; /* held while the token's file is read */
    MOE_GUARDED_BY(token_lock) struct moe_trusted_mark token_mark;
    MOE_GUARDED_BY(token_lock) bool token_refused;

    struct moe_mutex lock;
    MOE_GUARDED_BY(lock) struct {
        struct moe_access_rules *rules;
        struct moe_access_rules *rules_before; /* that the last refresh has replaced, or NULL */
        uint8_t token[MOE_ACCESS_HASH_BYTES], old_token[MOE_ACCESS_HASH_BYTES];
        bool has_token, has_old_token;
        bool token_lost;       /* by the last refresh */
        uint64_t old_token_ns; /* it counts until then */
    };
};

/* ------------------------------------------------------------------ the group's token */

static struct moe_status read_token(const struct moe_access *a, uint8_t hash[MOE_ACCESS_HASH_BYTES])
{
    char *token;
    MOE_TRY(moe_token_read("--token-file", a->config.token_file, &token));
    struct moe_status st = moe_access_hash(token, hash);
    explicit_bzero(token, strlen(token));
    free(token);
    return st;
}

/* The old token counts for OLD_TOKEN_NS more: the group's daemons do not change at one instant. */
static void take_token(struct moe_access *a, const uint8_t hash[MOE_ACCESS_HASH_BYTES],
                       uint64_t now_ns)
{
    moe_mutex_lock(&a->lock);
    bool other = CRYPTO_memcmp(a->token, hash, MOE_ACCESS_HASH_BYTES) != 0;
    if (other) {
        memcpy(a->old_token, a->token, sizeof a->old_token);
        memcpy(a->token, hash, sizeof a->token);
        a->has_old_token = true;
        a->old_token_ns = now_ns + OLD_TOKEN_NS;
    }
    moe_mutex_unlock(&a->lock);
    if (other)
        moe_log_info("access: a new token; the one before counts for %d s more",
                     (int)(OLD_TOKEN_NS / MOE_NS_PER_S));
}

static void refresh_token(struct moe_access *a, uint64_t now_ns)
{
    uint8_t hash[MOE_ACCESS_HASH_BYTES];
    struct moe_status st = moe_ok();
    if (a->config.access_file != NULL || a->config.token_file == NULL)
        return;
    moe_mutex_lock(&a->token_lock);
    bool changed = moe_trusted_file_changed(a->config.token_file, &a->token_mark);
    bool read = changed || a->token_refused; /* descriptors may have been lacking */
    if (read)
        st = read_token(a, hash);
    a->token_refused = moe_failed(&st);
    if (read && !moe_failed(&st))
        take_token(a, hash, now_ns);
    moe_mutex_unlock(&a->token_lock);
    if (changed && moe_failed(&st))
        moe_log_error("%s; the token read before stays in force", st.text);
}

/* ------------------------------------------------------------------ deciding */

static bool is_local_owner(const struct moe_access *a, const struct moe_access_caller *c)
{
    return c->link == MOE_ACCESS_UNIX && (c->uid == a->config.own_uid || c->uid == 0);
}

/* The name of a connection in the access file. A certificate cannot have one of the other names. */
static void name_of(const struct moe_access_caller *c, char to[MOE_ACCESS_NAME_BYTES])
{
    bool named = c->link == MOE_ACCESS_TLS && c->name[0] != '\0';
    if (c->link == MOE_ACCESS_UNIX)
        (void)snprintf(to, MOE_ACCESS_NAME_BYTES, "uid:%u", c->uid);
    else
        (void)snprintf(to, MOE_ACCESS_NAME_BYTES, "%s", named ? c->name : anonymous_name);
    if (named && (strncmp(to, "uid:", 4) == 0 || strncmp(to, "token:", 6) == 0 ||
                  strcmp(to, anonymous_name) == 0))
        (void)snprintf(to, MOE_ACCESS_NAME_BYTES, "certificate");
}

static uint32_t roles_of(const struct moe_access *a, const struct moe_access_rules *rules,
                         const struct moe_access_caller *c)
{
    char name[MOE_ACCESS_NAME_BYTES];
    if (a->config.open || is_local_owner(a, c))
        return MOE_ROLES_ALL;
    name_of(c, name);
    const uint32_t by_socket = c->link == MOE_ACCESS_UNIX && c->is_operator ? MOE_ROLE_ADMIN : 0;
    const struct moe_access_entry *e = moe_access_rules_find(rules, name);
    if (e != NULL)
        return e->roles | by_socket;
    return strcmp(name, anonymous_name) == 0 ? a->config.anonymous_roles : by_socket;
}

/* False for an unknown token. */
static bool find_token(struct moe_access *a, const char *token, struct moe_access_grant *grant)
    MOE_REQUIRES(a->lock)
{
    uint8_t hash[MOE_ACCESS_HASH_BYTES];
    struct moe_status st = moe_access_hash(token, hash);
    if (moe_failed(&st))
        return false;
    const struct moe_access_entry *e = moe_access_rules_find_token(a->rules, hash);
    bool current = a->has_token && CRYPTO_memcmp(hash, a->token, sizeof hash) == 0;
    bool old = a->has_old_token && CRYPTO_memcmp(hash, a->old_token, sizeof hash) == 0;
    if (e == NULL && !current && !old)
        return false;
    grant->roles = e != NULL ? e->roles : MOE_ROLES_ALL;
    (void)snprintf(grant->who, sizeof grant->who, "%s", e != NULL ? e->name : group_name);
    return true;
}

static bool takes_tokens(const struct moe_access *a)
{
    return a->config.access_file != NULL || a->config.token_file != NULL;
}

static struct moe_status refuse(const struct moe_access_caller *caller,
                                const struct moe_access_policy *policy,
                                const struct moe_access_grant *grant)
{
    char needs[MOE_ROLES_TEXT], has[MOE_ROLES_TEXT];
    const char *method = strrchr(policy->path, '/') + 1;
    moe_access_role_names(policy->roles, needs);
    moe_access_role_names(grant->roles, has);
    if (strcmp(grant->who, anonymous_name) == 0 && caller->link == MOE_ACCESS_TCP)
        return moe_error(MOE_UNAUTHENTICATED, MOE_REASON_NONE,
                         "%s needs a role (%s), and this connection has no identity: on the "
                         "daemon's host, run as the group's user (and its MOED_RUNTIME_DIR); "
                         "elsewhere use a token or certificate",
                         method, needs);
    if (strcmp(grant->who, anonymous_name) == 0)
        return moe_error(MOE_UNAUTHENTICATED, MOE_REASON_NONE,
                         "%s needs a role (%s), and the caller sent neither certificate nor token",
                         method, needs);
    return moe_error(MOE_PERMISSION_DENIED, MOE_REASON_NONE, "%s needs a role (%s); %.80s has %s",
                     method, needs, grant->who, has);
}

static struct moe_status check_roles(const struct moe_access_caller *caller,
                                     const struct moe_access_policy *policy,
                                     const struct moe_access_grant *grant)
{
    return (policy->roles & grant->roles) != 0 ? moe_ok() : refuse(caller, policy, grant);
}

static struct moe_status no_such_method(void)
{
    return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED, "no such method");
}

struct moe_status moe_access_decide(struct moe_access *a, const struct moe_access_caller *caller,
                                    const char *path, const char *token,
                                    struct moe_access_grant *grant)
{
    const struct moe_access_policy *policy = moe_access_policy_find(path);
    bool known = true;
    memset(grant, 0, sizeof *grant);
    moe_mutex_lock(&a->lock);
    if (token == NULL) {
        (void)snprintf(grant->who, sizeof grant->who, "%s", anonymous_name);
    } else if (token[0] != '\0' && takes_tokens(a)) {
        known = find_token(a, token, grant);
    } else {
        name_of(caller, grant->who);
        grant->roles = roles_of(a, a->rules, caller);
    }
    moe_mutex_unlock(&a->lock);
    if (!known && a->config.access_file == NULL) {
        /* A caller may have read the group's new token before this daemon looked at the file. */
        refresh_token(a, moe_clock_ns());
        moe_mutex_lock(&a->lock);
        known = find_token(a, token, grant);
        moe_mutex_unlock(&a->lock);
    }
    if (policy == NULL)
        return no_such_method();
    if (policy->public)
        return moe_ok();
    if (token == NULL)
        return moe_error(MOE_UNAUTHENTICATED, MOE_REASON_NONE,
                         "the authorization header is malformed: send one, with the word Bearer, a "
                         "blank, and a token of printable characters");
    if (!known)
        return moe_error(MOE_UNAUTHENTICATED, MOE_REASON_NONE, "the token is not known here");
    return check_roles(caller, policy, grant);
}

struct moe_status moe_access_may_call(const struct moe_access_caller *caller,
                                      const struct moe_access_grant *grant, const char *path)
{
    const struct moe_access_policy *policy = moe_access_policy_find(path);
    return policy == NULL ? no_such_method() : check_roles(caller, policy, grant);
}

static bool is_exempt(const struct moe_access *a, const char *who)
{
    char own[MOE_ACCESS_NAME_BYTES];
    (void)snprintf(own, sizeof own, "uid:%u", a->config.own_uid);
    return a->config.open || strcmp(who, own) == 0 || strcmp(who, "uid:0") == 0 ||
           (a->config.access_file == NULL && strcmp(who, group_name) == 0);
}

bool moe_access_speaks_for(struct moe_access *a, const struct moe_access_grant *grant,
                           const char *worker_id)
{
    if ((grant->roles & MOE_ROLE_WORKER) == 0)
        return false;
    if (is_exempt(a, grant->who))
        return true;
    moe_mutex_lock(&a->lock);
    bool speaks = moe_access_rules_speaks_for(a->rules, grant->who, worker_id);
    moe_mutex_unlock(&a->lock);
    return speaks;
}

/* ------------------------------------------------------------------ files */

static struct moe_status read_rules(const struct moe_access *a, struct moe_access_rules **rules)
{
    char *text;
    size_t length;
    MOE_TRY(moe_trusted_file_read("--access-file", a->config.access_file, RULES_FORBIDDEN, &text,
                                  &length));
    struct moe_status st = moe_access_rules_parse(text, length, a->config.access_file, rules);
    free(text);
    return st;
}

static bool refresh_rules(struct moe_access *a)
{
    struct moe_access_rules *rules = NULL;
    if (a->config.access_file == NULL)
        return false;
    bool changed = moe_trusted_file_changed(a->config.access_file, &a->rules_mark);
    if (!changed && !a->rules_refused) /* of a refused file, descriptors may have been lacking */
        return false;
    struct moe_status st = read_rules(a, &rules);
    a->rules_refused = moe_failed(&st);
    if (a->rules_refused && changed)
        moe_log_error("%s; the rules read before stay in force", st.text);
    if (a->rules_refused)
        return false;
    moe_mutex_lock(&a->lock);
    a->rules_before = a->rules;
    a->rules = rules;
    moe_mutex_unlock(&a->lock);
    moe_log_info("access: the rules were read anew");
    return true;
}

bool moe_access_refresh(struct moe_access *a, uint64_t now_ns)
{
    moe_mutex_lock(&a->lock);
    moe_access_rules_free(a->rules_before);
    a->rules_before = NULL;
    a->token_lost = a->has_old_token && now_ns >= a->old_token_ns;
    if (a->token_lost)
        a->has_old_token = false;
    bool lost = a->token_lost;
    moe_mutex_unlock(&a->lock);
    refresh_token(a, now_ns);
    return refresh_rules(a) || lost;
}

struct moe_access_refused moe_access_refused(struct moe_access *a)
{
    moe_mutex_lock(&a->token_lock);
    struct moe_access_refused refused = {.rules = a->rules_refused, .token = a->token_refused};
    moe_mutex_unlock(&a->token_lock);
    return refused;
}

bool moe_access_has_lost(struct moe_access *a, const struct moe_access_caller *caller)
{
    char name[MOE_ACCESS_NAME_BYTES];
    if (a->config.open || is_local_owner(a, caller))
        return false;
    name_of(caller, name);
    moe_mutex_lock(&a->lock);
    bool lost = a->token_lost;
    if (a->rules_before != NULL)
        lost = lost || moe_access_rules_lost(a->rules_before, a->rules, name) ||
               moe_access_rules_lost_token(a->rules_before, a->rules) ||
               (roles_of(a, a->rules_before, caller) & ~roles_of(a, a->rules, caller)) != 0;
    moe_mutex_unlock(&a->lock);
    return lost;
}

/* ------------------------------------------------------------------ lifetime */

struct moe_status moe_access_create(const struct moe_access_config *config, struct moe_access **out)
{
    struct moe_status st = moe_ok();
    struct moe_access *a = calloc(1, sizeof *a);
    if (a == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for access");
    moe_mutex_init(&a->lock);
    moe_mutex_init(&a->token_lock);
    moe_mutex_not_shared(&a->lock);
    moe_mutex_not_shared(&a->token_lock);
    a->config = *config;
    if (config->access_file != NULL) {
        (void)moe_trusted_file_changed(config->access_file, &a->rules_mark);
        st = read_rules(a, &a->rules);
    } else if (config->token_file != NULL) {
        (void)moe_trusted_file_changed(config->token_file, &a->token_mark);
        st = read_token(a, a->token);
        a->has_token = true;
    }
    if (moe_failed(&st)) {
        moe_access_destroy(a);
        return st;
    }
    *out = a;
    return st;
}

void moe_access_destroy(struct moe_access *a)
{
    if (a == NULL)
        return;
    moe_mutex_not_shared(&a->lock);
    moe_mutex_not_shared(&a->token_lock);
    moe_access_rules_free(a->rules);
    moe_access_rules_free(a->rules_before);
    moe_mutex_destroy(&a->lock);
    moe_mutex_destroy(&a->token_lock);
    free(a);
}
