/* SPDX-License-Identifier: Apache-2.0 */
/* See ggemm_fixture.h. */
#include "ggemm_fixture.h"

#include "cuda/gemm/ggemm.h"
#include "moe/numbers.h"

#include <cuda_runtime_api.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

uint64_t random_state;

bool ggemm_test_begin(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const char *replay = getenv("MOE_SEED");
    random_state = replay != NULL ? strtoull(replay, NULL, 10) : (uint64_t)time(NULL);
    printf("MOE_SEED=%" PRIu64 "\n", random_state);
    if (moe_cuda_ggemm_serves(8, 8))
        return true;
    printf("skipped: no Hopper GPU\n");
    return false;
}

uint32_t random_below(uint32_t n)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((random_state >> 33) % n);
}

void ok(struct moe_status st)
{
    if (moe_failed(&st))
        fail_msg("%s", st.text);
}

void *device_alloc(size_t bytes, int byte)
{
    void *p = NULL;
    assert_int_equal(cudaMalloc(&p, bytes), cudaSuccess);
    assert_int_equal(cudaMemset(p, byte, bytes), cudaSuccess);
    return p;
}

void finish(void)
{
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
}

uint32_t random_groups(uint32_t experts, uint32_t most, bool tight, uint32_t *start,
                       uint32_t *count)
{
    uint32_t at = 0;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t kind = random_below(6);
        start[e] = at;
        count[e] = kind < 2 ? kind : 1 + random_below(most);
        at += tight ? count[e] : (count[e] + 127) / 128 * 128;
    }
    return at > 0 ? at : 1;
}

void quantise_row(const struct moe_weight_format *f, uint32_t n, float *x, float *codes,
                  float *scales)
{
    uint32_t group = moe_activation_group(f, n);
    for (uint32_t first = 0; first < n; first += group) {
        uint32_t end = n - first < group ? n : first + group;
        float largest = 0;
        for (uint32_t i = first; i < end; i++)
            largest = fmaxf(largest, fabsf(x[i]));
        float s = moe_e4m3_scale(largest, f->activations == MOE_ACTIVATIONS_F8_POW2);
        for (uint32_t i = first; i < end; i++) {
            float code = moe_round_to_e4m3(x[i] / s);
            if (codes != NULL)
                codes[i] = code;
            x[i] = code * s;
        }
        if (scales != NULL)
            scales[first / group] = s;
    }
}
