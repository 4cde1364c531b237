/* SPDX-License-Identifier: Apache-2.0 */
/* Saving: the model's files, the training state, and a manifest with hashes of both.
 *
 *   NAME/config.json, model*.safetensors, ...   the model, as daemon/model/model_write.h makes it
 *   NAME/optimizer/slot-00000.safetensors       training state that slot 0 wrote
 *   NAME/optimizer/slot-00000.json              hash of that, and of each byte range it wrote in
 *                                               the model's files
 *   NAME/optimizer/records.bin                  the record of calls
 *   NAME/manifest.json                          all other state, hashes of the files above, and
 *                                               sizes of all files */
#include "checkpoint/internal.h"

#include "daemon/log.h"
#include "model/json_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SAVE_TEXT = 6 * 17 };

void moe_checkpoint_state_free(struct moe_checkpoint_state *s)
{
    free(s->owned);
    *s = (struct moe_checkpoint_state){0};
}

static struct moe_status named(struct moe_status st, const char *name)
{
    return moe_error_context(st, "checkpoint %s", name);
}

/* ----------------------------------------------------------------------------- begin */

static struct moe_status make_frame(const struct moe_checkpoint_context *c, int hidden)
{
    uint64_t bytes;
    if (mkdirat(hidden, MOE_CKPT_STATE, 0700) != 0)
        return moe_ckpt__io("making a directory");
    return moe_model_write_frame(c->model, hidden, MOE_CKPT_MANIFEST, &bytes);
}

/* Names the writer and its call: in hexadecimal, because JSON has no unsigned numbers. */
static void name_save(const struct moe_checkpoint_context *c, const struct moe_checkpoint_state *s,
                      char text[SAVE_TEXT])
{
    int n = snprintf(text, SAVE_TEXT, "%016" PRIx64, c->writer);
    for (size_t i = 0; i < sizeof s->save / sizeof *s->save; i++)
        n += snprintf(text + n, SAVE_TEXT - (size_t)n, "-%016" PRIx64, s->save[i]);
}

/* True if an earlier attempt of this Save wrote the checkpoint `name`. */
static bool find_own(const struct moe_checkpoint_context *c, const char *name,
                     struct moe_checkpoint_state *s)
{
    int root = -1;
    json_t *m = NULL;
    char save[SAVE_TEXT];
    struct moe_status st = moe_ckpt__open_root(c->root, &root);
    if (!moe_failed(&st)) {
        st = moe_ckpt__read_manifest_of(root, name, &m);
        close(root);
    }
    if (moe_failed(&st))
        return false;
    name_save(c, s, save);
    const char *theirs = json_string_value(json_object_get(m, "save"));
    json_int_t lineage = json_integer_value(json_object_get(m, "lineage"));
    bool own = theirs != NULL && strcmp(theirs, save) == 0 && (uint64_t)lineage == s->lineage;
    if (own) {
        s->weights_version = (uint64_t)json_integer_value(json_object_get(m, "weights_version"));
        s->steps = (uint64_t)json_integer_value(json_object_get(m, "steps"));
    }
    json_decref(m);
    return own;
}

struct moe_status moe_checkpoint_save_begin(const struct moe_checkpoint_context *c,
                                            const char *name, struct moe_checkpoint_state *state,
                                            bool *found)
{
    int hidden = -1;
    struct moe_status begun = moe_ckpt__begin(c, name, &hidden);
    *found = begun.reason == MOE_REASON_CHECKPOINT_EXISTS && find_own(c, name, state);
    if (*found)
        return moe_ok();
    MOE_TRY(begun.reason == MOE_REASON_IO ? named(begun, name) : begun); /* others name it */
    struct moe_status st = make_frame(c, hidden);
    close(hidden);
    if (moe_failed(&st))
        moe_checkpoint_abandon(c, name);
    return named(st, name);
}

/* ----------------------------------------------------------------------------- write */

/* The writing of one layer by this slot. */
struct write {
    const struct moe_checkpoint_context *context;
    size_t layer;
    json_t *ranges; /* [[shard, offset, bytes, sha256], ...] */
    uint64_t bytes;
};

static struct moe_status read_weight(void *ctx, enum moe_weight weight, uint32_t expert, float *to,
                                     size_t count)
{
    const struct write *w = ctx;
    const struct moe_ckpt_tensor t = {.layer = w->layer,
                                      .key = {weight, expert, MOE_PART_WEIGHT, MOE_TRAIN_VALUE},
                                      .name = "of the model"};
    return moe_ckpt__read(w->context, &t, to, count * sizeof *to);
}

static struct moe_status note_range(void *ctx, const struct moe_model_range *range)
{
    struct write *w = ctx;
    w->bytes += range->bytes;
    json_t *entry = json_pack("[s, I, I, s]", range->shard, (json_int_t)range->offset,
                              (json_int_t)range->bytes, range->sha256);
    return json_array_append_new(w->ranges, entry) == 0 ? moe_ok() : moe_ckpt__no_memory();
}

static struct moe_status write_layers(const struct moe_checkpoint_context *c, int hidden,
                                      json_t *ranges, struct moe_digester *digester,
                                      struct moe_digest_table *digests, uint64_t *bytes)
{
    for (size_t i = 0; i < c->layer_count; i++) {
        struct write w = {.context = c, .layer = i, .ranges = ranges};
        uint32_t experts[MOE_MAX_EXPERTS];
        size_t n = moe_ckpt__experts(c, i, true, experts);
        MOE_TRY(moe_model_write_layer(c->model, hidden, i, moe_ckpt__is_lowest(c), experts, n,
                                      read_weight, note_range, &w, digester));
        MOE_TRY(moe_digester_finish(digester, digests));
        *bytes += w.bytes;
    }
    return moe_ok();
}

/* `*digests`: of what was written, as JSON. */
static struct moe_status write_weights(const struct moe_checkpoint_context *c, int hidden,
                                       json_t *ranges, json_t **digests, uint64_t *bytes)
{
    struct moe_digest_table *table = NULL;
    struct moe_digester *digester = NULL;
    struct moe_status st;
    MOE_TRY_GOTO(st, moe_digest_table_create(&table), done);
    MOE_TRY_GOTO(st, moe_digester_create(c->model, 1, &digester), done);
    MOE_TRY_GOTO(st, write_layers(c, hidden, ranges, digester, table, bytes), done);
    *digests = moe_ckpt__digests(table);
    if (*digests == NULL)
        st = moe_ckpt__no_memory();
done:
    moe_digester_destroy(digester);
    moe_digest_table_destroy(table);
    return st;
}

static struct moe_status write_state(const struct moe_checkpoint_context *c, int directory,
                                     const char *file, uint64_t *bytes, char *sha256)
{
    struct moe_ckpt_tensors tensors;
    MOE_TRY(moe_ckpt__list(c, true, &tensors));
    struct moe_status st = moe_ckpt__write_tensors(c, directory, file, &tensors, bytes, sha256);
    moe_ckpt__list_free(&tensors);
    return st;
}

static struct moe_status write_part(const struct moe_checkpoint_context *c, int hidden,
                                    int directory, uint64_t *bytes)
{
    struct moe_status st;
    char file[MOE_CKPT_FILE_MAX], list[MOE_CKPT_FILE_MAX], sha256[MOE_SHA256_HEX];
    uint64_t state_bytes = 0;
    json_t *ranges = json_array(), *part = NULL, *digests = NULL;
    moe_ckpt__state_file(file, c->slot, "safetensors");
    moe_ckpt__state_file(list, c->slot, "json");
    if (ranges == NULL)
        return moe_ckpt__no_memory();
    *bytes = 0;
    MOE_TRY_GOTO(st, write_weights(c, hidden, ranges, &digests, bytes), done);
    MOE_TRY_GOTO(st, write_state(c, directory, file, &state_bytes, sha256), done);
    part = json_pack("{s:s, s:I, s:s, s:O, s:O}", "file", file, "bytes", (json_int_t)state_bytes,
                     "sha256", sha256, "weights", ranges, MOE_CKPT_DIGESTS, digests);
    if (part == NULL) {
        st = moe_ckpt__no_memory();
        goto done;
    }
    MOE_TRY_GOTO(st, moe_ckpt__write_json(directory, list, part, NULL), done);
    *bytes += state_bytes;
    st = moe_ckpt__sync(directory);
done:
    json_decref(part);
    json_decref(digests);
    json_decref(ranges);
    return st;
}

struct moe_status moe_checkpoint_save_write(const struct moe_checkpoint_context *c,
                                            const char *name,
                                            const struct moe_checkpoint_state *state,
                                            uint64_t *bytes)
{
    int hidden = -1, directory = -1;
    (void)state;
    *bytes = 0;
    MOE_TRY(named(moe_ckpt__join(c, name, &hidden), name));
    struct moe_status st = moe_ckpt__open_dir(hidden, MOE_CKPT_STATE, &directory);
    if (!moe_failed(&st)) {
        st = write_part(c, hidden, directory, bytes);
        close(directory);
    }
    close(hidden);
    return named(st, name);
}

/* ---------------------------------------------------------------------------- commit */

/* Puts the hash of a slot's list into the manifest; its tensors must be complete. */
static struct moe_status add_slot(const struct moe_checkpoint_context *c, json_t *slots,
                                  int directory, uint32_t slot)
{
    struct moe_checkpoint_context quiet = *c;
    quiet.processed = NULL; /* it counts what is written */
    char list[MOE_CKPT_FILE_MAX], file[MOE_CKPT_FILE_MAX], hash[MOE_SHA256_HEX];
    struct moe_st_file *tensors = NULL;
    moe_ckpt__state_file(list, slot, "json");
    moe_ckpt__state_file(file, slot, "safetensors");
    MOE_TRY(moe_st_open_at(directory, file, &tensors));
    moe_st_close(tensors);
    MOE_TRY(moe_ckpt__hash(&quiet, directory, list, 0, UINT64_MAX, hash));
    json_t *entry =
        json_pack("{s:I, s:s, s:s}", "slot", (json_int_t)slot, "list", list, "sha256", hash);
    return json_array_append_new(slots, entry) == 0 ? moe_ok() : moe_ckpt__no_memory();
}

static struct moe_status fill_manifest(const struct moe_checkpoint_context *c, json_t *m,
                                       const struct moe_checkpoint_state *s, int hidden,
                                       int directory, const char *records_hash)
{
    json_int_t sequence = 0;
    json_t *files = NULL;
    char hash[MOE_SHA256_HEX], save[SAVE_TEXT];
    if (s->lineage > INT64_MAX || s->weights_version > INT64_MAX || s->steps > INT64_MAX)
        return moe_error(MOE_OUT_OF_RANGE, MOE_REASON_VALUE_INVALID,
                         "a number of the training state is too large for a manifest");
    MOE_TRY(moe_ckpt__next_sequence(c->root, &sequence));
    name_save(c, s, save);
    json_t *more = json_pack(
        "{s:s, s:I, s:s, s:s, s:o, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:{s:I, s:s}, s:[]}",
        "format", MOE_CKPT_FORMAT, "format_version", (json_int_t)MOE_CKPT_FORMAT_VERSION, "save",
        save, "parent", s->parent, MOE_CKPT_LOADS, moe_ckpt__loads(&s->explicit_loads), "sequence",
        sequence, "made", (json_int_t)time(NULL), "settings", moe_ckpt__settings(c), "lineage",
        (json_int_t)s->lineage, "weights_version", (json_int_t)s->weights_version, "steps",
        (json_int_t)s->steps, "frozen", (json_int_t)s->frozen, "records", "bytes",
        (json_int_t)s->record_bytes, "sha256", records_hash, "slots");
    if (more == NULL || json_object_update(m, more) != 0) {
        json_decref(more);
        return moe_ckpt__no_memory();
    }
    json_decref(more);
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++)
        if ((c->live >> slot & 1) != 0)
            MOE_TRY(add_slot(c, json_object_get(m, "slots"), directory, slot));
    MOE_TRY(moe_ckpt__add_model_digest(directory, m));
    struct moe_status st = moe_ckpt__file_sizes(hidden, &files); /* all files but the manifest */
    if (!moe_failed(&st) && json_object_set(m, "files", files) != 0)
        st = moe_ckpt__no_memory();
    json_decref(files);
    MOE_TRY(st);
    MOE_TRY(moe_ckpt__manifest_hash(m, hash));
    return json_object_set_new(m, "sha256", json_string(hash)) == 0 ? moe_ok()
                                                                    : moe_ckpt__no_memory();
}

static struct moe_status write_manifest(const struct moe_checkpoint_context *c, int hidden,
                                        int directory, const struct moe_checkpoint_state *s)
{
    char records_hash[MOE_SHA256_HEX];
    MOE_TRY(moe_ckpt__write_file(directory, MOE_CKPT_RECORDS, s->records, s->record_bytes,
                                 records_hash));
    json_t *m = json_object();
    if (m == NULL)
        return moe_ckpt__no_memory();
    struct moe_status st = fill_manifest(c, m, s, hidden, directory, records_hash);
    if (!moe_failed(&st))
        st = moe_ckpt__write_json(hidden, MOE_CKPT_MANIFEST, m, NULL);
    if (!moe_failed(&st))
        st = moe_ckpt__sync(directory);
    if (!moe_failed(&st))
        st = moe_ckpt__sync(hidden);
    json_decref(m);
    return st;
}

/* Before the rename: the written model opens, and is this model. */
static struct moe_status check_model(const struct moe_checkpoint_context *c, int hidden)
{
    struct moe_model *written = NULL;
    MOE_TRY(moe_model_open_at(hidden, ".", &written));
    bool same = strcmp(moe_model_fingerprint(written), moe_model_fingerprint(c->model)) == 0;
    moe_model_close(written);
    return same ? moe_ok()
                : moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED,
                            "the written files are not the model that was read");
}

struct moe_status moe_checkpoint_save_commit(const struct moe_checkpoint_context *c,
                                             const char *name,
                                             const struct moe_checkpoint_state *state)
{
    int hidden = -1, directory = -1;
    MOE_TRY(named(moe_ckpt__join(c, name, &hidden), name));
    struct moe_status st = moe_ckpt__open_dir(hidden, MOE_CKPT_STATE, &directory);
    if (!moe_failed(&st)) {
        st = check_model(c, hidden);
        if (!moe_failed(&st))
            st = write_manifest(c, hidden, directory, state);
        close(directory);
    }
    close(hidden);
    if (!moe_failed(&st))
        st = moe_ckpt__go_on(c);
    if (!moe_failed(&st))
        st = moe_ckpt__publish(c, name);
    return named(st, name);
}

/* Removing takes long: the fence is not held meanwhile, so that it delays no new view. */
static struct moe_status check_fence(const struct moe_checkpoint_context *c)
{
    int root = -1, fence = -1;
    MOE_TRY(moe_ckpt__open_root(c->root, &root));
    struct moe_status st = moe_ckpt__pass_fence(c, root, &fence);
    if (!moe_failed(&st))
        moe_ckpt__leave_fence(fence);
    close(root);
    return st;
}

void moe_checkpoint_save_tidy(const struct moe_checkpoint_context *c, const char *name,
                              uint32_t keep, struct moe_checkpoint_removed *removed)
{
    *removed = (struct moe_checkpoint_removed){0};
    struct moe_status st = keep > 0 ? check_fence(c) : moe_ok();
    if (keep > 0 && !moe_failed(&st))
        st = moe_ckpt__keep_newest(c, name, keep, removed);
    if (moe_failed(&st))
        moe_log_warn("old checkpoints could not be removed: %s", st.text);
}
