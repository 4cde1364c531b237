/* SPDX-License-Identifier: Apache-2.0 */
/* Loading a checkpoint: all checks come before any change.
 *
 * The files say nothing about slots of the loading group: each slot looks up its tensors by name in
 * all files. The slots share the checks of hashes, each some of the files. */
#include "checkpoint/internal.h"

#include "model/json_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* An open checkpoint. */
struct source {
    int directory, state;
    json_t *manifest;
    struct moe_model *model;
    struct moe_st_file *files[MOE_MAX_SLOTS];
    size_t count;
};

static void close_source(struct source *s)
{
    for (size_t i = 0; i < s->count; i++)
        moe_st_close(s->files[i]);
    moe_model_close(s->model);
    json_decref(s->manifest);
    if (s->state >= 0)
        close(s->state);
    if (s->directory >= 0)
        close(s->directory);
}

static struct moe_status damaged(const char *what)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "%s is damaged", what);
}

static struct moe_status open_named(const char *path, const char *name, int *fd)
{
    int root = -1;
    if (!moe_file_name_is_plain(name) || strlen(name) > MOE_CHECKPOINT_NAME_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_NAME_INVALID,
                         "not the name of a checkpoint");
    MOE_TRY(moe_ckpt__open_root(path, &root));
    struct moe_status st = moe_ckpt__open_dir(root, name, fd);
    close(root);
    if (st.code == MOE_NOT_FOUND)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_CHECKPOINT_NOT_FOUND, "no such checkpoint");
    return st;
}

struct moe_status moe_checkpoint_check_there(const char *root, const char *name)
{
    int fd = -1;
    struct moe_status st = open_named(root, name, &fd);
    if (fd >= 0)
        close(fd);
    return moe_error_context(st, "checkpoint %s", name);
}

static struct moe_status open_states(struct source *s)
{
    size_t i;
    json_t *entry, *slots = json_object_get(s->manifest, "slots");
    if (json_array_size(slots) == 0 || json_array_size(slots) > MOE_MAX_SLOTS)
        return damaged(MOE_CKPT_MANIFEST);
    json_array_foreach(slots, i, entry)
    {
        char file[MOE_CKPT_FILE_MAX];
        json_int_t slot = json_integer_value(json_object_get(entry, "slot"));
        if (slot < 0 || slot >= MOE_MAX_SLOTS)
            return damaged(MOE_CKPT_MANIFEST);
        moe_ckpt__state_file(file, (uint32_t)slot, "safetensors");
        MOE_TRY(moe_ckpt__damaged(moe_st_open_at(s->state, file, &s->files[s->count])));
        s->count++;
    }
    return moe_ok();
}

static struct moe_status open_source(const struct moe_checkpoint_context *c, const char *name,
                                     struct source *s)
{
    *s = (struct source){.directory = -1, .state = -1};
    MOE_TRY(open_named(c->root, name, &s->directory));
    MOE_TRY(moe_ckpt__check_kind(s->directory));
    MOE_TRY(moe_ckpt__read_manifest(s->directory, &s->manifest));
    MOE_TRY(moe_ckpt__check_settings(c, s->manifest));
    MOE_TRY(moe_ckpt__damaged(moe_model_open_at(s->directory, ".", &s->model)));
    if (strcmp(moe_model_fingerprint(s->model), moe_model_fingerprint(c->model)) != 0)
        return damaged("the model");
    MOE_TRY(moe_ckpt__damaged(moe_ckpt__open_dir(s->directory, MOE_CKPT_STATE, &s->state)));
    return open_states(s);
}

/* ---------------------------------------------------------------------------- hashes */

/* Of a whole file. */
static struct moe_status check_hash(const struct moe_checkpoint_context *c, int at,
                                    const char *name, const char *want)
{
    char hash[MOE_SHA256_HEX];
    MOE_TRY(moe_ckpt__go_on(c));
    if (want == NULL)
        return damaged(MOE_CKPT_MANIFEST);
    MOE_TRY(moe_ckpt__damaged(moe_ckpt__hash(c, at, name, 0, UINT64_MAX, hash)));
    return strcmp(hash, want) == 0 ? moe_ok() : damaged(name);
}

/* Other bytes than were written, at `offset` of a file of the model: the error names the tensor. */
static struct moe_status damaged_tensor(int directory, const char *file, uint64_t offset)
{
    struct moe_st_file *f = NULL;
    struct moe_status st = moe_st_open_at(directory, file, &f);
    if (moe_failed(&st))
        return damaged(file);
    st = damaged(file);
    for (size_t i = 0; i < moe_st_count(f); i++) {
        const struct moe_tensor *t = moe_st_tensor(f, i);
        if (offset >= t->offset && offset - t->offset < t->bytes)
            st = moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "%.60s: tensor %.120s is damaged",
                           file, t->name);
    }
    moe_st_close(f);
    return st;
}

/* A range is one tensor, or the part of an expert in it. */
static struct moe_status check_range(const struct moe_checkpoint_context *c, const struct source *s,
                                     const json_t *range)
{
    char hash[MOE_SHA256_HEX];
    const char *file = json_string_value(json_array_get(range, 0));
    const char *want = json_string_value(json_array_get(range, 3));
    json_int_t offset = json_integer_value(json_array_get(range, 1));
    json_int_t bytes = json_integer_value(json_array_get(range, 2));
    MOE_TRY(moe_ckpt__go_on(c));
    if (file == NULL || want == NULL || offset < 0 || bytes < 0)
        return damaged(MOE_CKPT_MANIFEST);
    MOE_TRY(moe_ckpt__damaged(
        moe_ckpt__hash(c, s->directory, file, (uint64_t)offset, (uint64_t)bytes, hash)));
    return strcmp(hash, want) == 0 ? moe_ok()
                                   : damaged_tensor(s->directory, file, (uint64_t)offset);
}

/* The files of one slot. */
static struct moe_status check_slot(const struct moe_checkpoint_context *c, const struct source *s,
                                    const json_t *entry)
{
    char list[MOE_CKPT_FILE_MAX], file[MOE_CKPT_FILE_MAX];
    json_t *part = NULL, *range;
    size_t i;
    uint32_t slot = (uint32_t)json_integer_value(json_object_get(entry, "slot"));
    moe_ckpt__state_file(list, slot, "json");
    moe_ckpt__state_file(file, slot, "safetensors");
    MOE_TRY(check_hash(c, s->state, list, json_string_value(json_object_get(entry, "sha256"))));
    MOE_TRY(moe_ckpt__damaged(moe_json_read_at(s->state, list, MOE_CKPT_JSON_BYTES_MAX, &part)));
    struct moe_status st =
        check_hash(c, s->state, file, json_string_value(json_object_get(part, "sha256")));
    json_array_foreach(json_object_get(part, "weights"), i, range)
    {
        if (!moe_failed(&st))
            st = check_range(c, s, range);
    }
    json_decref(part);
    return st;
}

static struct moe_status add_size(int at, const char *name, uint64_t *sum)
{
    struct stat file;
    if (fstatat(at, name, &file, AT_SYMLINK_NOFOLLOW) != 0 || file.st_size < 0)
        return damaged(name);
    *sum += (uint64_t)file.st_size;
    return moe_ok();
}

/* What check_slot will hash. The list is not checked yet: it only says how long that takes. */
static struct moe_status add_slot(const struct source *s, const json_t *entry, uint64_t *sum)
{
    char list[MOE_CKPT_FILE_MAX], file[MOE_CKPT_FILE_MAX];
    json_t *part = NULL, *range;
    size_t i;
    uint32_t slot = (uint32_t)json_integer_value(json_object_get(entry, "slot"));
    moe_ckpt__state_file(list, slot, "json");
    moe_ckpt__state_file(file, slot, "safetensors");
    MOE_TRY(add_size(s->state, list, sum));
    MOE_TRY(add_size(s->state, file, sum));
    MOE_TRY(moe_ckpt__damaged(moe_json_read_at(s->state, list, MOE_CKPT_JSON_BYTES_MAX, &part)));
    json_array_foreach(json_object_get(part, "weights"), i, range)
    {
        json_int_t bytes = json_integer_value(json_array_get(range, 2));
        *sum += bytes > 0 ? (uint64_t)bytes : 0;
    }
    json_decref(part);
    return moe_ok();
}

/* Which entries of the manifest's slots this slot checks: each is hashed by one slot only. */
static bool is_mine(const struct moe_checkpoint_context *c, size_t entry)
{
    size_t live = (size_t)__builtin_popcountll(c->live);
    size_t mine = (size_t)__builtin_popcountll(c->live & ((UINT64_C(1) << c->slot) - 1));
    return entry % live == mine;
}

static struct moe_status tell_expected(const struct moe_checkpoint_context *c,
                                       const struct source *s)
{
    uint64_t sum = 0;
    size_t i;
    json_t *entry;
    if (c->expected == NULL)
        return moe_ok();
    json_array_foreach(json_object_get(s->manifest, "slots"), i, entry)
    {
        if (is_mine(c, i))
            MOE_TRY(add_slot(s, entry, &sum));
    }
    MOE_TRY(add_size(s->state, MOE_CKPT_RECORDS, &sum));
    atomic_store(c->expected, sum);
    return moe_ok();
}

static struct moe_status check_share(const struct moe_checkpoint_context *c, const struct source *s)
{
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(s->manifest, "slots"), i, entry)
    {
        if (is_mine(c, i))
            MOE_TRY(check_slot(c, s, entry));
    }
    return moe_ok();
}

/* --------------------------------------------------------------------------- tensors */

static struct moe_status find(const struct source *s, const struct moe_ckpt_tensor *t,
                              const struct moe_st_file **file, const struct moe_tensor **tensor)
{
    for (size_t i = 0; i < s->count; i++) {
        const struct moe_tensor *found = moe_st_find(s->files[i], t->name);
        if (found == NULL)
            continue;
        if (found->dtype != MOE_ST_F32 || found->rank != 2 || found->shape[0] != t->rows ||
            found->shape[1] != t->columns)
            break;
        *file = s->files[i];
        *tensor = found;
        return moe_ok();
    }
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED,
                     "tensor %s is missing, or has another shape or type", t->name);
}

static struct moe_status check_tensors(const struct moe_checkpoint_context *c,
                                       const struct source *s)
{
    struct moe_ckpt_tensors all;
    const struct moe_st_file *file;
    const struct moe_tensor *tensor;
    MOE_TRY(moe_ckpt__list(c, false, &all));
    struct moe_status st = moe_ok();
    for (size_t i = 0; i < all.count && !moe_failed(&st); i++)
        st = find(s, &all.list[i], &file, &tensor);
    moe_ckpt__list_free(&all);
    return st;
}

static void count_moved(const struct moe_checkpoint_context *c, size_t bytes)
{
    if (c->moved != NULL)
        atomic_fetch_add_explicit(c->moved, bytes, memory_order_relaxed);
}

static struct moe_status take_tensors(const struct moe_checkpoint_context *c,
                                      const struct source *s, const struct moe_ckpt_tensors *all)
{
    float *buffer = NULL;
    uint64_t room = 0;
    struct moe_status st = moe_ok();
    for (size_t i = 0; i < all->count && !moe_failed(&st); i++) {
        const struct moe_ckpt_tensor *t = &all->list[i];
        const struct moe_st_file *file = NULL;
        const struct moe_tensor *tensor = NULL;
        MOE_TRY_GOTO(st, moe_ckpt__go_on(c), done);
        MOE_TRY_GOTO(st, find(s, t, &file, &tensor), done);
        if (tensor->bytes > room || buffer == NULL) {
            free(buffer);
            room = tensor->bytes;
            buffer = malloc((size_t)room + 1);
        }
        if (buffer == NULL) {
            st = moe_ckpt__no_memory();
            goto done;
        }
        MOE_TRY_GOTO(st, moe_st_read(file, tensor, 0, tensor->bytes, buffer), done);
        count_moved(c, (size_t)tensor->bytes);
        st = c->backend->training->trainer_write(c->trainers[t->layer], &t->key, buffer,
                                                 (size_t)tensor->bytes);
    }
done:
    free(buffer);
    return st;
}

/* ----------------------------------------------------- weights outside the training state */

struct plain {
    const struct moe_checkpoint_context *context;
    size_t layer;
};

static struct moe_status take_weight(void *ctx, enum moe_weight weight, uint32_t expert,
                                     enum moe_dtype dtype, const void *data, size_t bytes)
{
    const struct plain *p = ctx;
    const struct moe_checkpoint_context *c = p->context;
    const struct moe_train_key key = {weight, expert, MOE_PART_WEIGHT, MOE_TRAIN_VALUE};
    MOE_TRY(moe_ckpt__go_on(c));
    if (moe_ckpt__has_value(c, p->layer, weight))
        return moe_ok();
    size_t count = bytes / moe_dtype_bytes(dtype);
    float *values = malloc(count * sizeof *values + 1);
    if (values == NULL)
        return moe_ckpt__no_memory();
    for (size_t i = 0; i < count; i++) {
        uint16_t narrow;
        if (dtype == MOE_DTYPE_F32) {
            memcpy(&values[i], (const char *)data + 4 * i, sizeof values[i]);
        } else {
            memcpy(&narrow, (const char *)data + 2 * i, sizeof narrow);
            values[i] = moe_bf16_to_f32(narrow);
        }
    }
    struct moe_status st = c->backend->training->trainer_write(c->trainers[p->layer], &key, values,
                                                               count * sizeof *values);
    count_moved(c, bytes);
    free(values);
    return st;
}

/* True if the state has all expert weights of a layer: then none is read from the model. */
static bool experts_in_state(const struct moe_checkpoint_context *c, size_t layer)
{
    for (unsigned w = MOE_WEIGHT_GATE; w <= MOE_WEIGHT_DOWN_BIAS; w++) {
        size_t rows, columns;
        moe_weight_shape(c->specs[layer], (enum moe_weight)w, &rows, &columns);
        if (rows > 0 && !moe_ckpt__has_value(c, layer, (enum moe_weight)w))
            return false;
    }
    return true;
}

static struct moe_status take_weights(const struct moe_checkpoint_context *c,
                                      const struct source *s)
{
    for (size_t i = 0; i < c->layer_count; i++) {
        struct plain p = {c, i};
        uint32_t experts[MOE_MAX_EXPERTS];
        size_t n = experts_in_state(c, i) ? 0 : moe_ckpt__experts(c, i, false, experts);
        MOE_TRY(moe_model_load_layer(s->model, i, experts, n, take_weight, &p, NULL, NULL));
    }
    return moe_ok();
}

/* ------------------------------------------------------------------------------ calls */

static struct moe_status read_records(const struct moe_checkpoint_context *c,
                                      const struct source *s, struct moe_checkpoint_state *out)
{
    int fd = -1;
    uint64_t size = 0;
    const json_t *records = json_object_get(s->manifest, "records");
    MOE_TRY(check_hash(c, s->state, MOE_CKPT_RECORDS,
                       json_string_value(json_object_get(records, "sha256"))));
    MOE_TRY(moe_ckpt__damaged(moe_file_open_at(s->state, MOE_CKPT_RECORDS, &fd, &size)));
    out->owned = size < SIZE_MAX ? malloc((size_t)size + 1) : NULL;
    struct moe_status st = out->owned != NULL
                               ? moe_ckpt__damaged(moe_file_read(fd, 0, out->owned, size))
                               : moe_ckpt__no_memory();
    close(fd);
    out->records = out->owned;
    out->record_bytes = (size_t)size;
    return st;
}

static struct moe_status read_number(const json_t *m, const char *key, uint64_t *out)
{
    const json_t *value = json_object_get(m, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return damaged(MOE_CKPT_MANIFEST);
    *out = (uint64_t)json_integer_value(value);
    return moe_ok();
}

static struct moe_status read_all(const struct moe_checkpoint_context *c, const struct source *s,
                                  struct moe_checkpoint_state *state)
{
    uint64_t frozen = 0;
    MOE_TRY(read_number(s->manifest, "lineage", &state->lineage));
    MOE_TRY(read_number(s->manifest, "weights_version", &state->weights_version));
    MOE_TRY(read_number(s->manifest, "steps", &state->steps));
    MOE_TRY(read_number(s->manifest, "frozen", &frozen));
    state->frozen = (uint32_t)frozen;
    moe_ckpt__read_loads(s->manifest, &state->explicit_loads);
    MOE_TRY(tell_expected(c, s));
    MOE_TRY(check_share(c, s));
    MOE_TRY(check_tensors(c, s));
    return read_records(c, s, state);
}

struct moe_status moe_checkpoint_load_read(const struct moe_checkpoint_context *c, const char *name,
                                           struct moe_checkpoint_state *state)
{
    struct source s;
    *state = (struct moe_checkpoint_state){0};
    struct moe_status st = open_source(c, name, &s);
    if (!moe_failed(&st))
        st = read_all(c, &s, state);
    close_source(&s);
    return moe_error_context(st, "checkpoint %s", name);
}

struct moe_status moe_checkpoint_load_take(const struct moe_checkpoint_context *c, const char *name)
{
    struct source s;
    struct moe_ckpt_tensors all = {0};
    struct moe_status st;
    MOE_TRY_GOTO(st, open_source(c, name, &s), done);
    MOE_TRY_GOTO(st, moe_ckpt__list(c, false, &all), done);
    MOE_TRY_GOTO(st, take_weights(c, &s), done);
    MOE_TRY_GOTO(st, take_tensors(c, &s, &all), done);
    for (size_t i = 0; i < c->layer_count && !moe_failed(&st); i++)
        st = c->backend->training->zero_grad(c->trainers[i]);
done:
    moe_ckpt__list_free(&all);
    close_source(&s);
    return moe_error_context(st, "checkpoint %s", name);
}
