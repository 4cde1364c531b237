/* SPDX-License-Identifier: Apache-2.0 */
#include "shapes.h"

#include "plain_layer.h"

const struct bench_shape bench_shapes[] = {
    {"deepseek-v3",
     {.hidden = 7168,
      .experts = 256,
      .intermediate = 2048,
      .shared_intermediate = 2048,
      .router = {.score = MOE_SCORE_SIGMOID,
                 .top_k = 8,
                 .select_bias = true,
                 .groups = 8,
                 .topk_group = 4,
                 .group_best = 2,
                 .renorm = MOE_RENORM_SUM,
                 .renorm_eps = 1e-20f,
                 .scale = 2.5f}}},
    {"qwen3-30b", {.hidden = 2048, .experts = 128, .intermediate = 768, .router = PLAIN_ROUTER(8)}},
    {"mixtral-8x7b",
     {.hidden = 4096, .experts = 8, .intermediate = 14336, .router = PLAIN_ROUTER(2)}},
    {"gpt-oss-120b", /* without its biases */
     {.hidden = 2880,
      .experts = 128,
      .intermediate = 2880,
      .activation = MOE_ACT_SWIGLU_OAI,
      .swiglu_limit = 7,
      .swiglu_alpha = 1.702f,
      .router = PLAIN_ROUTER(4)}},
    {"tiny", /* to test the benchmark itself */
     {.hidden = 64,
      .experts = 16,
      .intermediate = 32,
      .shared_intermediate = 32,
      .router = PLAIN_ROUTER(4)}},
};
const uint32_t bench_shape_count = sizeof bench_shapes / sizeof *bench_shapes;
