/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' activation in exact fp32, for kernels that it does not limit. */
#ifndef MOE_CUDA_ACTIVATION_CUH
#define MOE_CUDA_ACTIVATION_CUH

#include "moe/layer_spec.h"

/* The clamps keep NaN, as on the CPU; fminf and fmaxf would drop it. */
__device__ inline float moe_activate(enum moe_activation activation, float limit, float alpha,
                                     float gate, float up)
{
    if (activation != MOE_ACT_SWIGLU) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
    }
    const bool oai = activation == MOE_ACT_SWIGLU_OAI;
    const float sigmoid = 1.0f / (1.0f + expf(oai ? -alpha * gate : -gate));
    return gate * sigmoid * (oai ? up + 1.0f : up);
}

#endif
