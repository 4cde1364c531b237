/* SPDX-License-Identifier: Apache-2.0 */
#include "access/rules.h"

#include "access/policy.h"
#include "daemon/trusted_file.h"

#include <jansson.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORKER_ID_MAX = 127 };

struct moe_access_rules {
    struct moe_access_entry *identities, *tokens;
    size_t identity_count, token_count;
};

/* What is being parsed, for error texts. */
struct place {
    const char *file, *name;
};

static struct moe_status bad(const struct place *at, const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID, "%.80s: \"%.80s\": %s",
                     at->file, at->name, what);
}

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for the rules");
}

/* ------------------------------------------------------------------ parsing */

static struct moe_status read_roles(const struct place *at, const json_t *list, uint32_t *roles)
{
    if (!json_is_array(list) || json_array_size(list) == 0)
        return bad(at, "needs a list \"roles\"");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        uint32_t role = name != NULL ? moe_access_role_of(name) : 0;
        if (role == 0)
            return bad(at, "a role is one of client, trainer, worker, admin, metrics");
        *roles |= role;
    }
    return moe_ok();
}

static struct moe_status read_worker_ids(const struct place *at, const json_t *list,
                                         struct moe_access_entry *e)
{
    size_t count = json_array_size(list); /* 0 unless it is an array */
    if (count == 0 || count > MOE_ACCESS_WORKER_IDS_MAX)
        return bad(at, "\"worker_ids\" is a list of 1 to 64 names");
    e->worker_ids = calloc(count, sizeof *e->worker_ids);
    if (e->worker_ids == NULL)
        return no_memory();
    for (size_t i = 0; i < count; i++) {
        const char *id = json_string_value(json_array_get(list, i));
        if (id == NULL || id[0] == '\0' || strlen(id) > WORKER_ID_MAX)
            return bad(at, "a worker_id is a name of 1 to 127 bytes");
        e->worker_ids[i] = strdup(id);
        if (e->worker_ids[i] == NULL)
            return no_memory();
        e->worker_id_count = i + 1;
    }
    return moe_ok();
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static struct moe_status read_hash(const struct place *at, const json_t *value, uint8_t *hash)
{
    const char *hex = json_string_value(value);
    if (hex == NULL || strlen(hex) != (size_t)2 * MOE_ACCESS_HASH_BYTES)
        return bad(at, "needs \"sha256\": 64 hexadecimal digits, lower case");
    for (size_t i = 0; i < MOE_ACCESS_HASH_BYTES; i++) {
        int high = hex_digit(hex[2 * i]), low = hex_digit(hex[2 * i + 1]);
        if (high < 0 || low < 0)
            return bad(at, "needs \"sha256\": 64 hexadecimal digits, lower case");
        hash[i] = (uint8_t)(high << 4 | low);
    }
    return moe_ok();
}

static bool is_pattern(const char *name)
{
    size_t length = strlen(name);
    return length > 0 && name[length - 1] == '*';
}

/* A '*' elsewhere, or in a name without a scheme, would match more than its writer thinks. */
static struct moe_status check_name(const struct place *at, bool token)
{
    const char *star = strchr(at->name, '*');
    size_t room = MOE_ACCESS_NAME_BYTES - (token ? sizeof "token:" : 1);
    if (at->name[0] == '\0' || strlen(at->name) > room)
        return bad(at, "a name has 1 to 249 bytes");
    if (star != NULL &&
        (token || star[1] != '\0' || star[-1] != '/' || strstr(at->name, "://") == NULL))
        return bad(at, "'*' may only follow the last '/' of a URI");
    return moe_ok();
}

static struct moe_status read_entry(const struct place *at, const json_t *value, bool token,
                                    struct moe_access_entry *e)
{
    const char *key;
    json_t *field, *roles = NULL, *ids = NULL, *hash = NULL;
    MOE_TRY(check_name(at, token));
    if (!json_is_object(value))
        return bad(at, "is not an object");
    json_object_foreach((json_t *)value, key, field)
    {
        json_t **to = strcmp(key, "roles") == 0             ? &roles
                      : strcmp(key, "worker_ids") == 0      ? &ids
                      : token && strcmp(key, "sha256") == 0 ? &hash
                                                            : NULL;
        if (to == NULL)
            return bad(at,
                       token ? "may hold sha256, roles, worker_ids" : "may hold roles, worker_ids");
        *to = field;
    }
    (void)snprintf(e->name, sizeof e->name, "%s%s", token ? "token:" : "", at->name);
    if (token)
        MOE_TRY(read_hash(at, hash, e->hash));
    MOE_TRY(read_roles(at, roles, &e->roles));
    bool worker = (e->roles & MOE_ROLE_WORKER) != 0;
    if (ids != NULL && !worker)
        return bad(at, "\"worker_ids\" needs the role worker");
    if (worker && ids == NULL && !is_pattern(at->name))
        return bad(at, "the role worker needs \"worker_ids\"");
    return ids != NULL ? read_worker_ids(at, ids, e) : moe_ok();
}

static struct moe_status read_table(const struct place *at, const json_t *object, bool token,
                                    struct moe_access_entry **entries, size_t *count)
{
    const char *name;
    json_t *value;
    if (!json_is_object(object) || json_object_size(object) > MOE_ACCESS_ENTRIES_MAX)
        return bad(at, "is not an object of at most 4096 entries");
    *entries = calloc(json_object_size(object) + 1, sizeof **entries);
    if (*entries == NULL)
        return no_memory();
    json_object_foreach((json_t *)object, name, value)
    {
        struct place here = {at->file, name};
        struct moe_access_entry *e = &(*entries)[(*count)++]; /* freed also when it is half read */
        MOE_TRY(read_entry(&here, value, token, e));
    }
    return moe_ok();
}

static struct moe_status read_root(const char *what, const json_t *root,
                                   struct moe_access_rules *rules)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)root, key, value)
    {
        struct place at = {what, key};
        if (strcmp(key, "identities") == 0)
            MOE_TRY(read_table(&at, value, false, &rules->identities, &rules->identity_count));
        else if (strcmp(key, "tokens") == 0)
            MOE_TRY(read_table(&at, value, true, &rules->tokens, &rules->token_count));
        else
            return bad(&at, "an access file may hold identities and tokens");
    }
    return moe_ok();
}

struct moe_status moe_access_rules_parse(const char *text, size_t length, const char *what,
                                         struct moe_access_rules **out)
{
    json_error_t where;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &where);
    if (!json_is_object(root)) {
        json_decref(root);
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_CONFIG_INVALID,
                         "%.80s: line %d: not a JSON object", what, where.line);
    }
    struct moe_access_rules *rules = calloc(1, sizeof *rules);
    struct moe_status st = rules != NULL ? read_root(what, root, rules) : no_memory();
    json_decref(root);
    if (moe_failed(&st)) {
        moe_access_rules_free(rules);
        return st;
    }
    *out = rules;
    return st;
}

static void free_entries(struct moe_access_entry *entries, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t w = 0; w < entries[i].worker_id_count; w++)
            free(entries[i].worker_ids[w]);
        free(entries[i].worker_ids);
    }
    free(entries);
}

void moe_access_rules_free(struct moe_access_rules *rules)
{
    if (rules == NULL)
        return;
    free_entries(rules->identities, rules->identity_count);
    free_entries(rules->tokens, rules->token_count);
    free(rules);
}

/* ------------------------------------------------------------------ looking up */

/* The part of `name` that the '*' of `pattern` stands for; NULL when it does not match. */
static const char *match(const char *pattern, const char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t fixed = strlen(pattern) - 1;
    if (strncmp(pattern, name, fixed) != 0 || name[fixed] == '\0')
        return NULL;
    const char *rest = name + fixed;
    return rest[strspn(rest, allowed)] == '\0' ? rest : NULL;
}

const struct moe_access_entry *moe_access_rules_find(const struct moe_access_rules *rules,
                                                     const char *name)
{
    const struct moe_access_entry *best = NULL;
    for (size_t i = 0; rules != NULL && i < rules->identity_count; i++) {
        const struct moe_access_entry *e = &rules->identities[i];
        if (strcmp(e->name, name) == 0)
            return is_pattern(name) ? NULL : e;
        if (is_pattern(e->name) && match(e->name, name) != NULL &&
            (best == NULL || strlen(e->name) > strlen(best->name)))
            best = e;
    }
    return best;
}

const struct moe_access_entry *
moe_access_rules_find_token(const struct moe_access_rules *rules,
                            const uint8_t hash[MOE_ACCESS_HASH_BYTES])
{
    const struct moe_access_entry *found = NULL;
    for (size_t i = 0; rules != NULL && i < rules->token_count; i++)
        if (CRYPTO_memcmp(rules->tokens[i].hash, hash, MOE_ACCESS_HASH_BYTES) == 0)
            found = &rules->tokens[i];
    return found;
}

static const struct moe_access_entry *find_any(const struct moe_access_rules *rules,
                                               const char *name)
{
    if (strncmp(name, "token:", strlen("token:")) != 0)
        return moe_access_rules_find(rules, name);
    for (size_t i = 0; rules != NULL && i < rules->token_count; i++)
        if (strcmp(rules->tokens[i].name, name) == 0)
            return &rules->tokens[i];
    return NULL;
}

static bool has_worker_id(const struct moe_access_entry *e, const char *id)
{
    for (size_t i = 0; i < e->worker_id_count; i++)
        if (strcmp(e->worker_ids[i], id) == 0)
            return true;
    return false;
}

bool moe_access_rules_speaks_for(const struct moe_access_rules *rules, const char *name,
                                 const char *worker_id)
{
    const struct moe_access_entry *e = find_any(rules, name);
    if (e == NULL || (e->roles & MOE_ROLE_WORKER) == 0)
        return false;
    if (has_worker_id(e, worker_id))
        return true;
    const char *rest = e->worker_id_count == 0 ? match(e->name, name) : NULL;
    return rest != NULL && strcmp(rest, worker_id) == 0;
}

/* ------------------------------------------------------------------ comparing */

/* `now` NULL: the entry is gone. */
static bool entry_lost(const struct moe_access_entry *before, const struct moe_access_entry *now)
{
    if (now == NULL || (before->roles & ~now->roles) != 0)
        return true;
    for (size_t i = 0; i < before->worker_id_count; i++)
        if (!has_worker_id(now, before->worker_ids[i]))
            return true;
    return before->worker_id_count == 0 && now->worker_id_count != 0;
}

bool moe_access_rules_lost(const struct moe_access_rules *before,
                           const struct moe_access_rules *now, const char *name)
{
    const struct moe_access_entry *e = moe_access_rules_find(before, name);
    return e != NULL && entry_lost(e, moe_access_rules_find(now, name));
}

bool moe_access_rules_lost_token(const struct moe_access_rules *before,
                                 const struct moe_access_rules *now)
{
    for (size_t i = 0; i < before->token_count; i++)
        if (entry_lost(&before->tokens[i],
                       moe_access_rules_find_token(now, before->tokens[i].hash)))
            return true;
    return false;
}

/* ------------------------------------------------------------------ tokens */

struct moe_status moe_access_hash(const char *token, uint8_t hash[MOE_ACCESS_HASH_BYTES])
{
    MOE_TRY(moe_token_check(token));
    if (EVP_Digest(token, strlen(token), hash, NULL, EVP_sha256(), NULL) != 1)
        return no_memory();
    return moe_ok();
}
