/* SPDX-License-Identifier: Apache-2.0 */
/* Names of stages, for metrics and tables. */
#include "moe/backend.h"

const char *const moe_stage_names[MOE_STAGE_COUNT] = {
    [MOE_STAGE_ROUTER] = "router",     [MOE_STAGE_PREPARE] = "prepare",
    [MOE_STAGE_DISPATCH] = "dispatch", [MOE_STAGE_GEMM1] = "gemm1",
    [MOE_STAGE_GEMM2] = "gemm2",       [MOE_STAGE_SHARED] = "shared",
    [MOE_STAGE_COMBINE] = "combine",
};
const char *const moe_backward_stage_names[MOE_BACKWARD_STAGE_COUNT] = {
    [MOE_BACKWARD_ROUTER] = "router",
    [MOE_BACKWARD_DISPATCH] = "dispatch",
    [MOE_BACKWARD_PRE] = "pre",
    [MOE_BACKWARD_DH] = "dh",
    [MOE_BACKWARD_ACTIVATION] = "activation",
    [MOE_BACKWARD_DX] = "dx",
    [MOE_BACKWARD_WGRAD_GATE_UP] = "wgrad_gate_up",
    [MOE_BACKWARD_WGRAD_DOWN] = "wgrad_down",
    [MOE_BACKWARD_COMBINE] = "combine",
    [MOE_BACKWARD_LOGITS] = "logits",
    [MOE_BACKWARD_SHARED] = "shared",
    [MOE_BACKWARD_FINISH] = "finish",
};
