/* SPDX-License-Identifier: Apache-2.0 */
/* The manifest of a checkpoint: it makes a directory a checkpoint and has its files' hashes. */
#include "checkpoint/internal.h"

#include "model/json_file.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILES_MAX = 65536 };

void moe_ckpt__state_file(char name[MOE_CKPT_FILE_MAX], uint32_t slot, const char *extension)
{
    snprintf(name, MOE_CKPT_FILE_MAX, "slot-%05" PRIu32 ".%s", slot, extension);
}

/* `prefix`: the path of `directory` in the names. */
static struct moe_status add_sizes(int directory, const char *prefix, json_t *sizes)
{
    DIR *names;
    struct stat file;
    char path[sizeof MOE_CKPT_STATE + NAME_MAX + 1];
    struct moe_status st = moe_ok();
    MOE_TRY(moe_ckpt__open_names(directory, &names));
    for (struct dirent *e = readdir(names); e != NULL && !moe_failed(&st); e = readdir(names)) {
        if (!moe_file_name_is_plain(e->d_name) ||
            fstatat(directory, e->d_name, &file, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISREG(file.st_mode))
            continue;
        snprintf(path, sizeof path, "%s%s", prefix, e->d_name);
        if (json_object_size(sizes) == FILES_MAX)
            st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_IO, "more than %d files", FILES_MAX);
        else if (json_object_set_new(sizes, path, json_integer(file.st_size)) != 0)
            st = moe_ckpt__no_memory();
    }
    closedir(names);
    return st;
}

struct moe_status moe_ckpt__file_sizes(int directory, json_t **sizes)
{
    int state = -1;
    *sizes = json_object();
    if (*sizes == NULL)
        return moe_ckpt__no_memory();
    struct moe_status st = add_sizes(directory, "", *sizes);
    struct moe_status opened = moe_ckpt__open_dir(directory, MOE_CKPT_STATE, &state);
    if (!moe_failed(&opened)) {
        if (!moe_failed(&st))
            st = add_sizes(state, MOE_CKPT_STATE "/", *sizes);
        close(state);
    }
    return st;
}

struct moe_status moe_ckpt__manifest_hash(const json_t *manifest, char sha256[MOE_SHA256_HEX])
{
    json_t *copy = json_copy((json_t *)manifest);
    char *text = NULL;
    if (copy != NULL) {
        (void)json_object_del(copy, "sha256"); /* absent when the hash was computed */
        text = json_dumps(copy, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    }
    json_decref(copy);
    if (text == NULL)
        return moe_ckpt__no_memory();
    struct moe_status st = moe_sha256_of(text, strlen(text), sha256);
    free(text);
    return st;
}

static struct moe_status malformed_manifest(void)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, MOE_CKPT_MANIFEST " is damaged");
}

struct moe_status moe_ckpt__read_manifest(int directory, json_t **out)
{
    char hash[MOE_SHA256_HEX];
    json_t *m = NULL;
    MOE_TRY(moe_ckpt__damaged(
        moe_json_read_at(directory, MOE_CKPT_MANIFEST, MOE_CKPT_JSON_BYTES_MAX, &m)));
    struct moe_status st = moe_ckpt__manifest_hash(m, hash);
    const char *format = json_string_value(json_object_get(m, "format"));
    const char *stored = json_string_value(json_object_get(m, "sha256"));
    if (!moe_failed(&st) && (format == NULL || strcmp(format, MOE_CKPT_FORMAT) != 0 ||
                             stored == NULL || strcmp(stored, hash) != 0))
        st = malformed_manifest();
    if (!moe_failed(&st) &&
        json_integer_value(json_object_get(m, "format_version")) != MOE_CKPT_FORMAT_VERSION)
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                       "the checkpoint has a format version that this release does not read");
    if (moe_failed(&st)) {
        json_decref(m);
        return st;
    }
    *out = m;
    return st;
}

struct moe_status moe_ckpt__read_manifest_of(int root, const char *name, json_t **out)
{
    int fd = -1;
    MOE_TRY(moe_ckpt__open_dir(root, name, &fd));
    struct moe_status st = moe_ckpt__read_manifest(fd, out);
    close(fd);
    return st;
}
