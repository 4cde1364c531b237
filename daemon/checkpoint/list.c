/* SPDX-License-Identifier: Apache-2.0 */
/* Lists a training root from manifests, names and sizes of files, without reading a tensor. */
#include "checkpoint/internal.h"

#include "model/json_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LISTED_MAX = 65536 };

/* ----------------------------------------------------------------------- one directory */

static uint64_t sum(const json_t *files)
{
    const char *name;
    json_t *bytes;
    uint64_t total = 0;
    json_object_foreach((json_t *)files, name, bytes) total += (uint64_t)json_integer_value(bytes);
    return total;
}

/* Load reads these; others, such as a README, may change. */
static bool is_loaded(const char *name)
{
    return strchr(name, '/') != NULL || strstr(name, ".safetensors") != NULL ||
           strcmp(name, "config.json") == 0;
}

/* Compares the files that are there with those that the manifest names. */
static struct moe_status check_files(const json_t *files, const json_t *manifest)
{
    const char *name;
    json_t *want;
    json_object_foreach(json_object_get(manifest, "files"), name, want)
    {
        const json_t *bytes = json_object_get(files, name);
        if (!is_loaded(name) || json_equal(bytes, want))
            continue;
        if (bytes == NULL)
            return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "damaged: %.80s: it is missing",
                             name);
        return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED,
                         "damaged: %.80s: it has %lld bytes instead of %lld", name,
                         (long long)json_integer_value(bytes), (long long)json_integer_value(want));
    }
    return moe_ok();
}

static uint64_t number(const json_t *object, const char *key)
{
    json_int_t value = json_integer_value(json_object_get(object, key));
    return value > 0 ? (uint64_t)value : 0;
}

static void copy_name(char to[MOE_CHECKPOINT_NAME_MAX + 1], const char *from)
{
    if (from != NULL && strlen(from) <= MOE_CHECKPOINT_NAME_MAX)
        strcpy(to, from);
}

static void read_settings(const json_t *settings, struct moe_checkpoint_listed *out)
{
    const char *optimizer = json_string_value(json_object_get(settings, "optimizer"));
    const json_t *lora = json_object_get(settings, "lora");
    if (optimizer != NULL && strcmp(optimizer, "adamw") == 0)
        out->optimizer = MOE_OPTIMIZER_ADAMW;
    else if (optimizer != NULL && strcmp(optimizer, "sgd") == 0)
        out->optimizer = MOE_OPTIMIZER_SGD;
    out->never_trained = (uint32_t)number(settings, "never_trained");
    out->lora_rank = (uint32_t)number(lora, "rank");
    out->lora_targets = (uint32_t)number(lora, "targets");
    out->lora_alpha = json_number_value(json_object_get(lora, "alpha"));
}

static void read_manifest(const json_t *m, struct moe_checkpoint_listed *out)
{
    out->readable = true;
    out->sequence = number(m, "sequence");
    out->made_s = number(m, "made");
    out->lineage = number(m, "lineage");
    out->weights_version = number(m, "weights_version");
    out->steps = number(m, "steps");
    out->frozen = (uint32_t)number(m, "frozen");
    copy_name(out->parent, json_string_value(json_object_get(m, "parent")));
    read_settings(json_object_get(m, "settings"), out);
}

static struct moe_status look_into(const struct moe_checkpoint_context *c, int directory,
                                   struct moe_checkpoint_listed *out)
{
    json_t *m = NULL, *files = NULL;
    MOE_TRY(moe_ckpt__check_kind(directory));
    MOE_TRY(moe_ckpt__read_manifest(directory, &m));
    read_manifest(m, out);
    struct moe_status st = moe_ckpt__file_sizes(directory, &files);
    if (!moe_failed(&st)) {
        out->bytes = sum(files);
        st = check_files(files, m);
    }
    if (!moe_failed(&st))
        st = moe_ckpt__check_settings(c, m);
    json_decref(files);
    json_decref(m);
    return st;
}

/* False for an entry that is neither a directory nor a link, or was removed meanwhile. */
static bool look_at(const struct moe_checkpoint_context *c, int root, const char *name,
                    struct moe_checkpoint_listed *out)
{
    struct stat there;
    int directory = -1;
    *out = (struct moe_checkpoint_listed){0};
    if (fstatat(root, name, &there, AT_SYMLINK_NOFOLLOW) != 0 ||
        (!S_ISDIR(there.st_mode) && !S_ISLNK(there.st_mode)))
        return false;
    strcpy(out->name, name);
    struct moe_status st = moe_ckpt__open_dir(root, name, &directory);
    if (!moe_failed(&st)) {
        st = look_into(c, directory, out);
        close(directory);
    }
    if (moe_failed(&st))
        snprintf(out->problem, sizeof out->problem, "%s", st.text);
    return st.code != MOE_NOT_FOUND;
}

/* ------------------------------------------------------------------------ the whole root */

static int by_age(const void *a, const void *b)
{
    const struct moe_checkpoint_listed *x = a, *y = b;
    if (x->readable != y->readable)
        return x->readable ? -1 : 1;
    if (x->sequence != y->sequence)
        return x->sequence > y->sequence ? -1 : 1;
    return strcmp(x->name, y->name);
}

static bool may_be_named(const char *name)
{
    return moe_file_name_is_plain(name) && strlen(name) <= MOE_CHECKPOINT_NAME_MAX;
}

static struct moe_status list_open(const struct moe_checkpoint_context *c, int root, DIR *names,
                                   struct moe_checkpoint_listed **list, size_t *count)
{
    size_t room = 0;
    for (struct dirent *e = readdir(names); e != NULL && *count < LISTED_MAX; e = readdir(names)) {
        if (!may_be_named(e->d_name))
            continue;
        if (*count == room) {
            room = room > 0 ? 2 * room : 16;
            struct moe_checkpoint_listed *grown = reallocarray(*list, room, sizeof *grown);
            if (grown == NULL)
                return moe_ckpt__no_memory();
            *list = grown;
        }
        if (look_at(c, root, e->d_name, &(*list)[*count]))
            ++*count;
    }
    return moe_ok();
}

struct moe_status moe_checkpoint_list(const struct moe_checkpoint_context *c,
                                      struct moe_checkpoint_listed **list, size_t *count)
{
    int root = -1;
    DIR *names;
    *list = NULL;
    *count = 0;
    MOE_TRY(moe_ckpt__open_root(c->root, &root));
    struct moe_status st = moe_ckpt__open_names(root, &names);
    if (!moe_failed(&st)) {
        st = list_open(c, root, names, list, count);
        closedir(names);
    }
    close(root);
    if (moe_failed(&st)) {
        free(*list);
        *list = NULL;
        *count = 0;
    } else if (*count > 0) {
        qsort(*list, *count, sizeof **list, by_age);
    }
    return st;
}
