/* Random layers, tensors and comparisons for the tests of the compute kernels. */
#ifndef KERNELS_FIXTURE_H
#define KERNELS_FIXTURE_H

#include "cpu/layer.h"
#include "oracle/oracle.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* Seeds the generator from MOE_SEED, or the clock, and prints the seed. */
void seed_random(void);
uint64_t random_bits(void);
uint32_t random_below(uint32_t n);                    /* 0 .. n-1 */
uint32_t random_between(uint32_t low, uint32_t high); /* both included */
float random_normal(void);
bool one_in(uint32_t n);

/* A tensor of n elements of `dtype`: normal values times `scale`. Freed by the caller. */
void *random_tensor(enum moe_dtype dtype, size_t n, float scale);
double element_of(enum moe_dtype dtype, const void *tensor, size_t i);

/* ||got - want|| / ||want||; 0 when both are zero, infinite when `got` holds a NaN. */
double relative_error(size_t n, const float *got, const double *want);

#define assert_ok(expr)                                                                            \
    do {                                                                                           \
        struct moe_status ok_status = (expr);                                                      \
        if (moe_failed(&ok_status))                                                                \
            fail_msg("%s: %s %s", #expr, moe_code_name(ok_status.code), ok_status.text);           \
    } while (0)

/* The call fails with this code and reason; the sentence is printed. */
#define assert_refused(expr, want_code, want_reason)                                               \
    do {                                                                                           \
        struct moe_status refused_status = (expr);                                                 \
        print_message("  %s\n", refused_status.text);                                              \
        assert_int_equal(refused_status.code, want_code);                                          \
        assert_int_equal(refused_status.reason, want_reason);                                      \
    } while (0)

struct moe_device *open_device(const struct moe_cpu_isa *isa, uint32_t threads); /* NULL: best */

/* Small valid layer: hidden 4, one expert, top-1 softmax. Tests change what they are about. */
struct moe_layer_spec plain_spec(void);

/* A layer with all experts (or, for `holds_experts` false, none) local and random weights, each
 * expert weight of a dtype that is drawn when `dtype` is MOE_DTYPE_NONE; the same weights are given
 * to `oracle` if not NULL. */
struct moe_layer *random_layer(struct moe_device *device, const struct moe_layer_spec *spec,
                               enum moe_dtype dtype, bool holds_experts,
                               struct moe_oracle_layer **oracle);

/* A layer that routes x itself: hidden = E + Z and the router matrix is the identity, so that x are
 * the logits. Biases may be NULL where the spec has none. */
struct moe_layer *identity_router(struct moe_device *device, const struct moe_layer_spec *spec,
                                  const float *logit_bias, const float *select_bias);

#endif
