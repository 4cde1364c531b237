/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of a checkpoint's weights (daemon/model/digest.h). Each slot's list has those of the
 * weights that it wrote, as parts in hexadecimal; the manifest has the digest of the model. */
#include "checkpoint/internal.h"

#include "model/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PART_BYTES = 16384 };

/* ------------------------------------------------------------------------- writing */

static json_t *part_to_json(const uint8_t *part, size_t length)
{
    static const char digits[] = "0123456789abcdef";
    char text[2 * PART_BYTES];
    for (size_t i = 0; i < length; i++) {
        text[2 * i] = digits[part[i] >> 4];
        text[2 * i + 1] = digits[part[i] & 15];
    }
    return json_stringn(text, 2 * length);
}

json_t *moe_ckpt__digests(const struct moe_digest_table *table)
{
    uint8_t part[PART_BYTES];
    struct moe_digest_cursor at = {0};
    size_t length;
    json_t *parts = json_array();
    while (parts != NULL && (length = moe_digest_table_pack(table, &at, part, sizeof part)) > 0) {
        if (json_array_append_new(parts, part_to_json(part, length)) == 0)
            continue;
        json_decref(parts);
        parts = NULL;
    }
    return parts;
}

/* ------------------------------------------------------------------------- reading */

static struct moe_status damaged(const char *file)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "%s is damaged", file);
}

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static struct moe_status add_part(const json_t *text, const char *file,
                                  struct moe_digest_table *table)
{
    uint8_t part[PART_BYTES];
    const char *digits = json_string_value(text);
    size_t length = json_string_length(text) / 2;
    if (digits == NULL || length > sizeof part || json_string_length(text) % 2 != 0)
        return damaged(file);
    for (size_t i = 0; i < length; i++) {
        int high = digit_of(digits[2 * i]), low = digit_of(digits[2 * i + 1]);
        if (high < 0 || low < 0)
            return damaged(file);
        part[i] = (uint8_t)(high << 4 | low);
    }
    struct moe_status st = moe_digest_table_unpack(table, part, length);
    return st.code == MOE_INVALID_ARGUMENT ? damaged(file) : st;
}

/* Adds the digests of one slot's list; `entry`: its hash in the manifest. */
static struct moe_status add_list(int state, const json_t *entry, struct moe_digest_table *table)
{
    const struct moe_checkpoint_context nothing = {0};
    char list[MOE_CKPT_FILE_MAX], hash[MOE_SHA256_HEX];
    json_int_t slot = json_integer_value(json_object_get(entry, "slot"));
    const char *want = json_string_value(json_object_get(entry, "sha256"));
    json_t *part = NULL, *text;
    size_t i;
    if (slot < 0 || slot >= MOE_MAX_SLOTS || want == NULL)
        return damaged(MOE_CKPT_MANIFEST);
    moe_ckpt__state_file(list, (uint32_t)slot, "json");
    MOE_TRY(moe_ckpt__damaged(moe_ckpt__hash(&nothing, state, list, 0, UINT64_MAX, hash)));
    if (strcmp(hash, want) != 0)
        return damaged(list);
    MOE_TRY(moe_ckpt__damaged(moe_json_read_at(state, list, MOE_CKPT_JSON_BYTES_MAX, &part)));
    struct moe_status st = moe_ok();
    json_array_foreach(json_object_get(part, MOE_CKPT_DIGESTS), i, text)
    {
        if (!moe_failed(&st))
            st = add_part(text, list, table);
    }
    json_decref(part);
    return st;
}

/* All lists; `hex` becomes the digest of the model. */
static struct moe_status add_lists(int state, const json_t *manifest,
                                   struct moe_digest_table *table, char hex[MOE_SHA256_HEX])
{
    struct moe_digest digest;
    json_t *entry;
    size_t i;
    json_array_foreach(json_object_get(manifest, "slots"), i, entry)
    {
        MOE_TRY(add_list(state, entry, table));
    }
    if (!moe_digest_table_is_complete(table))
        return damaged(MOE_CKPT_STATE);
    MOE_TRY(moe_digest_table_model(table, &digest));
    moe_sha256_to_hex(digest.bytes, hex);
    return moe_ok();
}

struct moe_status moe_ckpt__add_model_digest(int state, json_t *manifest)
{
    struct moe_digest_table *table;
    char hex[MOE_SHA256_HEX];
    MOE_TRY(moe_digest_table_create(&table));
    struct moe_status st = add_lists(state, manifest, table, hex);
    moe_digest_table_destroy(table);
    MOE_TRY(st);
    return json_object_set_new(manifest, MOE_CKPT_DIGEST, json_string(hex)) == 0
               ? moe_ok()
               : moe_ckpt__no_memory();
}

/* ------------------------------------------------------------------------- a model directory */

/* Other programs may write a file of this name, too. */
static bool is_ours(int directory)
{
    json_t *m = NULL;
    struct moe_status st =
        moe_json_read_at(directory, MOE_CKPT_MANIFEST, MOE_CKPT_JSON_BYTES_MAX, &m);
    const char *format = moe_failed(&st) ? NULL : json_string_value(json_object_get(m, "format"));
    bool ours = format != NULL && strcmp(format, MOE_CKPT_FORMAT) == 0;
    json_decref(m);
    return ours;
}

static struct moe_status read_open(int directory, struct moe_digest_table *table,
                                   enum moe_checkpoint_digests *found)
{
    char hex[MOE_SHA256_HEX];
    json_t *m = NULL;
    int state = -1;
    *found = MOE_CHECKPOINT_DIGESTS_UNKNOWN;
    MOE_TRY(moe_ckpt__read_manifest(directory, &m));
    const char *want = json_string_value(json_object_get(m, MOE_CKPT_DIGEST));
    struct moe_status st = moe_ok();
    if (want != NULL && faccessat(directory, MOE_CKPT_STATE, F_OK, AT_SYMLINK_NOFOLLOW) == 0) {
        MOE_TRY_GOTO(st, moe_ckpt__open_dir(directory, MOE_CKPT_STATE, &state), done);
        MOE_TRY_GOTO(st, add_lists(state, m, table, hex), done);
        if (strcmp(hex, want) != 0)
            st = damaged(MOE_CKPT_MANIFEST);
        *found = MOE_CHECKPOINT_DIGESTS_FOUND;
    }
done:
    if (state >= 0)
        close(state);
    json_decref(m);
    return st;
}

struct moe_status moe_checkpoint_read_digests(const char *directory, struct moe_digest_table *table,
                                              enum moe_checkpoint_digests *found)
{
    *found = MOE_CHECKPOINT_DIGESTS_NONE;
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return moe_ckpt__io("opening the model's directory");
    struct moe_status st = is_ours(fd) ? read_open(fd, table, found) : moe_ok();
    close(fd);
    return st;
}
