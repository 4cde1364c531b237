/* SPDX-License-Identifier: Apache-2.0 */
/* Small models in the directory of a fixture: two layers, of which the second is a MoE layer. */
#ifndef MOE_TEST_SMALL_MODEL_H
#define MOE_TEST_SMALL_MODEL_H

#include "model_fixture.h"

enum { E = 4, H = 6, I = 5, LAYER = 1 };

/* Text of a config.json. */
#define CONFIG(type, h, i, extra)                                                                  \
    "{\"model_type\":\"" type "\",\"hidden_size\":" #h ",\"moe_intermediate_size\":" #i            \
    ",\"num_hidden_layers\":2,\"num_experts\":4,\"num_experts_per_tok\":2,"                        \
    "\"mlp_only_layers\":[0]" extra "}"

/* The router [E, h], and expert `e`, under their usual names. */
void add_router(struct tensors *t, const char *prefix, uint64_t h);
void add_expert(struct tensors *t, enum moe_st_dtype dtype, int e);

/* A whole qwen3_moe model in one file. */
void make_plain_model(const struct fixture *f, enum moe_st_dtype dtype);
/* Router and expert 0 in shard 1, experts 1..3 in shard 2; gate of expert 0 also in shard 2.
 * `extra_entry` goes into the index. */
void make_sharded_model(const struct fixture *f, const char *extra_entry);
/* Fused experts at `prefix`; returns the first value of gate_up in `*first`, of down in `*second`.
 */
void make_fused_model(const struct fixture *f, const char *config, const char *prefix, uint64_t h,
                      uint64_t i, bool transposed, uint32_t *first, uint32_t *second);

/* Fails the test unless the directory is taken. */
struct moe_model *open_model(const struct fixture *f);
/* Fails the test unless it is refused for this reason, with `named` in the text. */
void refuse_model(const struct fixture *f, enum moe_reason reason, const char *named);

#endif
