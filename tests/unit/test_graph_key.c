/* SPDX-License-Identifier: Apache-2.0 */
/* Promises of the key of captured graphs (kernels/cuda/plan/graph_key.h): steps that differ in
 * anything but the layer's index have different keys. */
#include "cuda/plan/graph_key.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static struct moe_cuda_graph_key key_of(const struct moe_layer_spec *spec)
{
    struct moe_cuda_graph_shape shape = {.spec = spec};
    struct moe_cuda_graph_key key;
    moe_cuda_graph_key_of(&shape, &key);
    return key;
}

static bool equal(const struct moe_cuda_graph_key *a, const struct moe_cuda_graph_key *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* The lowest bit of each byte changes: true of a bool, another value of an enumeration. In a field
 * of four bytes the other bytes change it too; in padding nothing may change. */
static void each_byte_of_the_spec_but_padding_and_index_changes_the_key(void **state)
{
    (void)state;
    struct moe_layer_spec spec;
    memset(&spec, 0, sizeof spec);
    struct moe_cuda_graph_key none = key_of(&spec);
    size_t ignored = 0;
    for (size_t i = sizeof spec.layer; i < sizeof spec; i++) {
        memset(&spec, 0, sizeof spec);
        ((unsigned char *)&spec)[i] = 1;
        struct moe_cuda_graph_key key = key_of(&spec);
        ignored += equal(&none, &key);
    }
    enum { PADDING_OF_ROUTER = 1, PADDING_OF_SPEC = 1 + 3, PADDING_OF_FORMAT = 2 };
    assert_int_equal(ignored, PADDING_OF_ROUTER + PADDING_OF_SPEC + 2 * PADDING_OF_FORMAT);
    memset(&spec, 0, sizeof spec);
    spec.layer = 7;
    struct moe_cuda_graph_key other = key_of(&spec);
    assert_true(equal(&none, &other));
}

static void each_field_of_the_step_changes_the_key(void **state)
{
    (void)state;
    struct moe_layer_spec spec;
    memset(&spec, 0, sizeof spec);
    struct moe_cuda_graph_shape shape[6 + MOE_CUDA_KEY_MATRICES];
    enum { SHAPES = sizeof shape / sizeof *shape };
    for (int i = 0; i < SHAPES; i++)
        shape[i] = (struct moe_cuda_graph_shape){.spec = &spec};
    shape[1].local_experts = 1;
    shape[2].copies = 1;
    shape[3].dtype = MOE_DTYPE_BF16;
    shape[4].bucket = 1;
    shape[5].retains = true;
    for (int m = 0; m < MOE_CUDA_KEY_MATRICES; m++)
        shape[6 + m].matrix[m] = MOE_DTYPE_BF16;
    struct moe_cuda_graph_key key[SHAPES];
    for (int i = 0; i < SHAPES; i++) {
        moe_cuda_graph_key_of(&shape[i], &key[i]);
        for (int j = 0; j < i; j++)
            assert_false(equal(&key[i], &key[j]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_byte_of_the_spec_but_padding_and_index_changes_the_key),
        cmocka_unit_test(each_field_of_the_step_changes_the_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
