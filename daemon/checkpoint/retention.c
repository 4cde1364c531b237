/* SPDX-License-Identifier: Apache-2.0 */
/* Retention: the checkpoints of the training directory, those that count as this group's, and the
 * removal of older ones. */
#include "checkpoint/internal.h"

#include "daemon/log.h"
#include "model/json_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEPT_MAX = 65536 };

/* ---------------------------------------------------------------------- explicit loads */

void moe_checkpoint_explicit_loads_add(struct moe_checkpoint_explicit_loads *loads,
                                       const char *name)
{
    uint32_t at = 0;
    while (at < loads->count && strcmp(loads->names[at], name) != 0)
        at++;
    if (at == loads->count && loads->count < MOE_CHECKPOINT_EXPLICIT_LOADS_MAX)
        loads->count++;
    at = at < MOE_CHECKPOINT_EXPLICIT_LOADS_MAX ? at : MOE_CHECKPOINT_EXPLICIT_LOADS_MAX - 1;
    memmove(loads->names[1], loads->names[0], at * sizeof loads->names[0]);
    memset(loads->names[0], 0, sizeof loads->names[0]);
    strncpy(loads->names[0], name, MOE_CHECKPOINT_NAME_MAX);
}

bool moe_checkpoint_explicit_loads_has(const struct moe_checkpoint_explicit_loads *loads,
                                       const char *name)
{
    for (uint32_t i = 0; i < loads->count; i++)
        if (strcmp(loads->names[i], name) == 0)
            return true;
    return false;
}

void moe_checkpoint_explicit_loads_join(struct moe_checkpoint_explicit_loads *loads,
                                        const struct moe_checkpoint_explicit_loads *older)
{
    for (uint32_t i = 0; i < older->count && loads->count < MOE_CHECKPOINT_EXPLICIT_LOADS_MAX; i++)
        if (!moe_checkpoint_explicit_loads_has(loads, older->names[i]))
            memcpy(loads->names[loads->count++], older->names[i], sizeof loads->names[0]);
}

json_t *moe_ckpt__loads(const struct moe_checkpoint_explicit_loads *loads)
{
    json_t *names = json_array();
    for (uint32_t i = 0; i < loads->count; i++)
        if (json_array_append_new(names, json_string(loads->names[i])) != 0) {
            json_decref(names);
            return NULL;
        }
    return names;
}

void moe_ckpt__read_loads(const json_t *manifest, struct moe_checkpoint_explicit_loads *out)
{
    const json_t *names = json_object_get(manifest, MOE_CKPT_LOADS);
    *out = (struct moe_checkpoint_explicit_loads){0};
    for (size_t i = 0; i < json_array_size(names) && out->count < MOE_CHECKPOINT_EXPLICIT_LOADS_MAX;
         i++) {
        const char *name = json_string_value(json_array_get(names, i));
        if (name != NULL && strlen(name) <= MOE_CHECKPOINT_NAME_MAX)
            strcpy(out->names[out->count++], name);
    }
}

/* --------------------------------------------------------------------------- retention */

/* A checkpoint of the root. Directories without a manifest are left alone. */
struct kept {
    char name[MOE_CHECKPOINT_NAME_MAX + 1];
    char parent[MOE_CHECKPOINT_NAME_MAX + 1];
    uint64_t writer;
    json_int_t sequence; /* higher = newer */
    bool counts;         /* against `keep` */
    bool spared;         /* stays, whichever process wrote it */
};

static int newest_first(const void *a, const void *b)
{
    const struct kept *x = a, *y = b;
    return x->sequence > y->sequence ? -1 : x->sequence < y->sequence;
}

static bool read_kept(int root, const char *name, struct kept *out)
{
    json_t *m = NULL;
    if (!moe_file_name_is_plain(name) || strlen(name) > MOE_CHECKPOINT_NAME_MAX)
        return false;
    struct moe_status st = moe_ckpt__read_manifest_of(root, name, &m);
    if (moe_failed(&st))
        return false;
    strcpy(out->name, name);
    out->sequence = json_integer_value(json_object_get(m, "sequence"));
    out->counts = out->spared = false;
    const char *save = json_string_value(json_object_get(m, "save"));
    out->writer = save != NULL ? strtoull(save, NULL, 16) : 0;
    out->parent[0] = '\0';
    const char *parent = json_string_value(json_object_get(m, "parent"));
    if (parent != NULL && strlen(parent) <= MOE_CHECKPOINT_NAME_MAX)
        strcpy(out->parent, parent);
    json_decref(m);
    return true;
}

/* All checkpoints of the root, newest first. The caller frees `*list`. */
static struct moe_status list_kept(int root, struct kept **list, size_t *count)
{
    struct moe_status st = moe_ok();
    DIR *names;
    size_t room = 0;
    *list = NULL;
    *count = 0;
    MOE_TRY(moe_ckpt__open_names(root, &names));
    for (struct dirent *e = readdir(names); e != NULL && *count < KEPT_MAX; e = readdir(names)) {
        if (*count == room) {
            room = room > 0 ? 2 * room : 16;
            struct kept *grown = reallocarray(*list, room, sizeof *grown);
            if (grown == NULL) {
                st = moe_ckpt__no_memory();
                break;
            }
            *list = grown;
        }
        if (read_kept(root, e->d_name, &(*list)[*count]))
            ++*count;
    }
    closedir(names);
    if (*count > 0)
        qsort(*list, *count, sizeof **list, newest_first);
    return st;
}

struct moe_status moe_ckpt__next_sequence(const char *path, json_int_t *sequence)
{
    int root = -1;
    struct kept *list = NULL;
    size_t count = 0;
    MOE_TRY(moe_ckpt__open_root(path, &root));
    struct moe_status st = list_kept(root, &list, &count);
    *sequence = count > 0 ? list[0].sequence + 1 : 1;
    free(list);
    close(root);
    return st;
}

/* Hides the checkpoint before it removes the files. `*gone` is set once it is hidden, even if the
 * files cannot be removed. */
static struct moe_status remove_kept(int root, const char *name, bool *gone)
{
    char hidden[MOE_CKPT_HIDDEN_MAX];
    snprintf(hidden, sizeof hidden, ".%s.removed", name);
    MOE_TRY(moe_ckpt__remove_tree(root, hidden));
    if (renameat(root, name, root, hidden) != 0)
        return moe_ckpt__io("renaming");
    *gone = true;
    return moe_ckpt__remove_tree(root, hidden);
}

/* Marks the checkpoint and its parents, until one is missing, or with `stops` is spared. The list
 * is newest first, so a parent comes after its child; an earlier one is another checkpoint, which
 * got the parent's name later. */
static void mark_line(struct kept *list, size_t count, const char *name, bool stops,
                      void (*mark)(struct kept *))
{
    for (size_t i = 0; i < count; i++) {
        if (name[0] == '\0' || strcmp(list[i].name, name) != 0)
            continue;
        if (stops && list[i].spared)
            return;
        mark(&list[i]);
        name = list[i].parent;
    }
}

static void spare(struct kept *k)
{
    k->spared = true;
}

static void count_it(struct kept *k)
{
    k->counts = true;
}

/* In a root that other groups may use, those count that this process has written, and the parents
 * of `newest` up to an explicit load. Explicit loads and their parents are spared: other trainings
 * may need them. */
static void count_ours(struct kept *list, size_t count, const char *newest, uint64_t writer,
                       const struct moe_checkpoint_explicit_loads *loads)
{
    for (uint32_t i = 0; i < loads->count; i++)
        mark_line(list, count, loads->names[i], false, spare);
    mark_line(list, count, newest, true, count_it);
    for (size_t i = 0; i < count; i++)
        list[i].counts = !list[i].spared && (list[i].counts || list[i].writer == writer);
}

static void note_removed(struct moe_checkpoint_removed *removed, const char *name)
{
    if (removed->count < MOE_CHECKPOINT_REMOVED_MAX)
        (void)snprintf(removed->names[removed->count], sizeof removed->names[0], "%s", name);
    removed->count++;
}

struct moe_status moe_ckpt__keep_newest(const struct moe_checkpoint_context *c, const char *newest,
                                        uint32_t keep, struct moe_checkpoint_removed *removed)
{
    int root = -1;
    struct kept *list = NULL;
    size_t count = 0;
    uint32_t counted = 0;
    MOE_TRY(moe_ckpt__open_root(c->root, &root));
    struct moe_checkpoint_explicit_loads loads;
    json_t *m = NULL;
    struct moe_status st = moe_ckpt__read_manifest_of(root, newest, &m);
    moe_ckpt__read_loads(m, &loads);
    json_decref(m);
    if (!moe_failed(&st))
        st = list_kept(root, &list, &count);
    count = moe_failed(&st) ? 0 : count;
    count_ours(list, count, newest, c->writer, &loads);
    for (size_t i = 0; i < count; i++) {
        if (!list[i].counts || counted++ < keep || strcmp(list[i].name, newest) == 0)
            continue;
        bool gone = false;
        struct moe_status one = remove_kept(root, list[i].name, &gone);
        if (moe_failed(&one))
            st = moe_error_context(one, "checkpoint %s", list[i].name);
        if (!gone)
            continue;
        note_removed(removed, list[i].name);
        moe_log_info("checkpoint %s: removed, because the Save of %s keeps %" PRIu32, list[i].name,
                     newest, keep);
    }
    free(list);
    close(root);
    return st;
}
