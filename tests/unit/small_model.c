/* SPDX-License-Identifier: Apache-2.0 */
/* See small_model.h. */
#include "small_model.h"

#include <stdio.h>
#include <string.h>

void add_router(struct tensors *t, const char *prefix, uint64_t h)
{
    tensors_add(t, MOE_ST_F32, 2, (uint64_t[]){E, h}, "%s%d.mlp.gate.weight", prefix, LAYER);
}

void add_expert(struct tensors *t, enum moe_st_dtype dtype, int e)
{
    static const char *const names[] = {"gate", "up", "down"};
    for (int n = 0; n < 3; n++)
        tensors_add(t, dtype, 2, n < 2 ? (uint64_t[]){I, H} : (uint64_t[]){H, I},
                    "model.layers.%d.mlp.experts.%d.%s_proj.weight", LAYER, e, names[n]);
}

void make_plain_model(const struct fixture *f, enum moe_st_dtype dtype)
{
    struct tensors t = {0};
    add_router(&t, "model.layers.", H);
    for (int e = 0; e < E; e++)
        add_expert(&t, dtype, e);
    tensors_write(&t, f, "model.safetensors");
    tensors_free(&t);
    fixture_write_text(f, "config.json", CONFIG("qwen3_moe", 6, 5, ""));
}

struct moe_model *open_model(const struct fixture *f)
{
    struct moe_model *m = NULL;
    assert_ok(moe_model_open(f->directory, &m));
    return m;
}

void refuse_model(const struct fixture *f, enum moe_reason reason, const char *named)
{
    struct moe_model *m = NULL;
    struct moe_status st = moe_model_open(f->directory, &m);
    check_reason(st, reason);
    if (strstr(st.text, named) == NULL)
        fail_msg("the text does not name %s", named);
}

void make_fused_model(const struct fixture *f, const char *config, const char *prefix, uint64_t h,
                      uint64_t i, bool transposed, uint32_t *first, uint32_t *second)
{
    struct tensors t = {0};
    add_router(&t, prefix, h);
    *first = t.next;
    tensors_add(&t, MOE_ST_F32, 3,
                transposed ? (uint64_t[]){E, h, 2 * i} : (uint64_t[]){E, 2 * i, h},
                "%s%d.mlp.experts.gate_up_proj", prefix, LAYER);
    *second = t.next;
    tensors_add(&t, MOE_ST_F32, 3, transposed ? (uint64_t[]){E, i, h} : (uint64_t[]){E, h, i},
                "%s%d.mlp.experts.down_proj", prefix, LAYER);
    tensors_write(&t, f, "model.safetensors");
    tensors_free(&t);
    fixture_write_text(f, "config.json", config);
}

void make_sharded_model(const struct fixture *f, const char *extra_entry)
{
    struct tensors t = {0};
    char index[4096] = "{\"metadata\":{\"total_size\":1},\"weight_map\":{", *at = index;
    for (int shard = 1; shard <= 2; shard++) {
        if (shard == 1)
            add_router(&t, "model.layers.", H);
        for (int e = shard == 1 ? 0 : 1; e < (shard == 1 ? 1 : E); e++)
            add_expert(&t, MOE_ST_F32, e);
        for (size_t i = 0; i < t.count; i++) {
            at += strlen(at);
            sprintf(at, "\"%s\":\"model-%d.safetensors\",", t.list[i].name, shard);
        }
        if (shard == 2) /* not in the map: must be ignored */
            tensors_add(&t, MOE_ST_F32, 1, (uint64_t[]){1},
                        "model.layers.%d.mlp.experts.0.gate_proj.weight", LAYER);
        tensors_write(&t, f, shard == 1 ? "model-1.safetensors" : "model-2.safetensors");
        uint32_t next = t.next;
        tensors_free(&t);
        t.next = next;
    }
    at += strlen(at);
    sprintf(at, "%s}}", extra_entry);
    if (*extra_entry == '\0')
        memcpy(at - 1, "}}", 3);
    fixture_write_text(f, "model.safetensors.index.json", index);
    fixture_write_text(f, "config.json", CONFIG("qwen3_moe", 6, 5, ""));
}
