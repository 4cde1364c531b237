/* SPDX-License-Identifier: Apache-2.0 */
/* Shards and their tensor names. After opening, a sorted table maps each tensor name to its shard;
 * other files do not see whether the checkpoint is split. */
#include "model/checkpoint.h"

#include "model/json_file.h"

#include <stdlib.h>
#include <string.h>

enum { INDEX_BYTES_MAX = 64 * 1024 * 1024, SHARDS_MAX = 512 };

#define SINGLE_FILE "model.safetensors"
#define INDEX_FILE  "model.safetensors.index.json"

struct shard {
    char *name;
    struct moe_st_file *file;
};

struct entry {
    const struct moe_tensor *tensor;
    size_t shard;
};

struct moe_checkpoint {
    struct shard *shards; /* [shard_count] */
    size_t shard_count;
    struct entry *entries; /* [entry_count], by tensor name */
    size_t entry_count;
};

static struct moe_status no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                     "no memory for the list of tensors");
}

static struct moe_status bad_index(const char *text)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, INDEX_FILE ": %s", text);
}

struct moe_status moe_checkpoint_check_index(const json_t *index, json_t **map)
{
    json_t *weight_map = json_object_get(index, "weight_map");
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0)
        return bad_index("no weight_map");
    const char *tensor;
    json_t *file;
    json_object_foreach(weight_map, tensor, file)
    {
        if (!json_is_string(file))
            return bad_index("weight_map holds something that is not a string");
        if (!moe_file_name_is_plain(json_string_value(file)))
            return bad_index("weight_map names a file outside the model directory");
    }
    *map = weight_map;
    return moe_ok();
}

/* Finds or opens the shard `name`. Shards are few: a linear search is enough. */
static struct moe_status need_shard(struct moe_checkpoint *c, int directory, const char *name,
                                    size_t *index)
{
    for (size_t i = c->shard_count; i-- > 0;) {
        if (strcmp(c->shards[i].name, name) == 0) {
            *index = i;
            return moe_ok();
        }
    }
    if (c->shard_count == SHARDS_MAX)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "more than %d shards",
                         SHARDS_MAX);
    struct shard *s = &c->shards[c->shard_count];
    MOE_TRY(moe_st_open_at(directory, name, &s->file));
    s->name = strdup(name);
    if (s->name == NULL) {
        moe_st_close(s->file);
        return no_memory();
    }
    *index = c->shard_count++;
    return moe_ok();
}

static struct moe_status add_entries(struct moe_checkpoint *c, int directory, json_t *map)
{
    c->entries = calloc(json_object_size(map) + 1, sizeof *c->entries);
    if (c->entries == NULL)
        return no_memory();
    const char *tensor;
    json_t *file;
    json_object_foreach(map, tensor, file)
    {
        struct entry *e = &c->entries[c->entry_count];
        MOE_TRY(need_shard(c, directory, json_string_value(file), &e->shard));
        e->tensor = moe_st_find(c->shards[e->shard].file, tensor);
        if (e->tensor == NULL)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TENSOR_MISSING,
                             "%s lacks tensor %.100s", c->shards[e->shard].name, tensor);
        c->entry_count++;
    }
    return moe_ok();
}

static struct moe_status add_whole_file(struct moe_checkpoint *c, int directory)
{
    size_t shard = 0;
    MOE_TRY(need_shard(c, directory, SINGLE_FILE, &shard));
    size_t count = moe_st_count(c->shards[shard].file);
    c->entries = calloc(count + 1, sizeof *c->entries);
    if (c->entries == NULL)
        return no_memory();
    for (size_t i = 0; i < count; i++)
        c->entries[i].tensor = moe_st_tensor(c->shards[shard].file, i);
    c->entry_count = count;
    return moe_ok();
}

static int by_name(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return strcmp(x->tensor->name, y->tensor->name);
}

static struct moe_status open_index(struct moe_checkpoint *c, int directory, json_t *index)
{
    json_t *map = NULL;
    MOE_TRY(moe_checkpoint_check_index(index, &map));
    return add_entries(c, directory, map);
}

struct moe_status moe_checkpoint_open(int directory, struct moe_checkpoint **out)
{
    struct moe_status st;
    json_t *index = NULL;
    struct moe_checkpoint *c = calloc(1, sizeof *c);
    if (c == NULL)
        return no_memory();
    c->shards = calloc(SHARDS_MAX, sizeof *c->shards);
    if (c->shards == NULL) {
        st = no_memory();
        goto fail;
    }
    st = moe_json_read_at(directory, INDEX_FILE, INDEX_BYTES_MAX, &index);
    if (st.code == MOE_NOT_FOUND)
        st = add_whole_file(c, directory);
    else if (!moe_failed(&st))
        st = open_index(c, directory, index);
    json_decref(index);
    if (moe_failed(&st))
        goto fail;
    qsort(c->entries, c->entry_count, sizeof *c->entries, by_name);
    *out = c;
    return st;
fail:
    moe_checkpoint_close(c);
    return st;
}

void moe_checkpoint_close(struct moe_checkpoint *c)
{
    if (c == NULL)
        return;
    for (size_t i = 0; i < c->shard_count; i++) {
        moe_st_close(c->shards[i].file);
        free(c->shards[i].name);
    }
    free(c->shards);
    free(c->entries);
    free(c);
}

bool moe_checkpoint_find(const struct moe_checkpoint *c, const char *name,
                         struct moe_checkpoint_tensor *out)
{
    struct moe_tensor tensor = {.name = name};
    struct entry key = {.tensor = &tensor};
    const struct entry *e = bsearch(&key, c->entries, c->entry_count, sizeof key, by_name);
    if (e == NULL)
        return false;
    out->file = c->shards[e->shard].file;
    out->shard = c->shards[e->shard].name;
    out->tensor = e->tensor;
    return true;
}

size_t moe_checkpoint_count(const struct moe_checkpoint *c)
{
    return c->entry_count;
}

const struct moe_tensor *moe_checkpoint_tensor(const struct moe_checkpoint *c, size_t i)
{
    return c->entries[i].tensor;
}

size_t moe_checkpoint_shards(const struct moe_checkpoint *c)
{
    return c->shard_count;
}

const struct moe_st_file *moe_checkpoint_shard(const struct moe_checkpoint *c, size_t i,
                                               const char **name)
{
    *name = c->shards[i].name;
    return c->shards[i].file;
}
