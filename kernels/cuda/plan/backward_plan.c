/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of a backward pass; see backward_plan.h. The rates were measured on an H200
 * (tests/bench/results/training.md) and need only be roughly right. If the expected time is too
 * long, combine keeps its multiprocessors longer than it needs them. If it is too short, the
 * remaining products wait for combine. */
#include "cuda/plan/backward_plan.h"

#include "moe/types.h"

/* Bytes and operations per nanosecond. */
static const double WIRE = 330;         /* to peers */
static const double MEMORY = 3000;      /* of gradients, to write or to read and write */
static const double MOVED = 49;         /* by one multiprocessor that combines */
static const double MULTIPLIED = 600e3; /* by tensor cores */
/* Time until rows move everywhere, because slots do not arrive at the same moment, and time at the
 * end: nanoseconds, once and for each token of the bucket; and by bytes sent. */
static const double BEGIN = 60e3, BEGIN_TOKEN = 40, LAST = 2000;
static const double SPARE = 1.15;     /* factor: combine may take this much longer than expected */
static const double MAX_SHARE = 0.75; /* of the products: above, all would wait for combine */

enum {
    FEWEST = 48, /* multiprocessors: a smaller device runs nothing in parallel */
    /* Dispatch with these keeps up with the wire. If the shared expert computes one more product,
     * both end at the same time with fewer. */
    DISPATCH = 64,
    DISPATCH_PRE = 48,
    /* The fewer multiprocessors combine gets, the less they idle. */
    COMBINE = 24,
    COMBINE_STEP = 8,
};

static uint32_t at_most(uint32_t n, uint32_t limit)
{
    return n < limit ? n : limit;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* Nanoseconds that combine takes on `processors`, when the routing is even. */
static double combine_time(const struct moe_cuda_backward_params *f, uint32_t processors)
{
    double row = (f->hidden + (double)MOE_COMMON_TOP_K) * sizeof(float);
    double rows = (double)f->bucket * f->top_k;
    double each = f->top_k < f->slots ? rows / f->slots : f->bucket; /* for one peer, at most */
    double sent = (f->slots - 1.0) * each;
    /* Reads: rows, and what peers sent. Writes: rows for peers, and the sums at home. */
    double moved = (rows + 2 * sent + f->bucket) * row;
    return BEGIN + BEGIN_TOKEN * f->bucket + sent * row / LAST +
           larger(sent * row / WIRE, moved / (MOVED * processors));
}

/* Nanoseconds for the gradients of all experts' weights, on `processors`. */
static double weights_time(const struct moe_cuda_backward_params *f, uint32_t processors)
{
    double weights = 3.0 * f->hidden * f->intermediate;
    double bytes = weights * f->local_experts * sizeof(float) * (f->adds ? 2 : 1);
    double whole = larger(2 * weights * f->bucket * f->top_k / MULTIPLIED, bytes / MEMORY);
    return whole * f->multiprocessors / processors;
}

/* Gives combine as few multiprocessors as possible, as long as it does not become the critical
 * path. */
static void plan_combine(const struct moe_cuda_backward_params *f, uint32_t all,
                         struct moe_cuda_backward_plan *plan)
{
    double share = 0;
    for (uint32_t n = COMBINE; n <= all / 2; n += COMBINE_STEP) {
        share = SPARE * combine_time(f, n) / weights_time(f, all - n);
        plan->combine = n;
        if (share <= MAX_SHARE)
            break;
    }
    plan->overlap.processors = all - plan->combine;
    plan->overlap.share = share < 1 ? share : 1;
}

struct moe_cuda_backward_plan moe_cuda_backward_plan(const struct moe_cuda_backward_params *f)
{
    struct moe_cuda_backward_plan plan = {0};
    const uint32_t all = f->multiprocessors / 2 * 2; /* a block of the gradients takes two */
    if (f->slots < 2 || all < FEWEST)
        return plan;
    if (f->shared) {
        plan.dispatch = at_most(f->shared_pre ? DISPATCH_PRE : DISPATCH, all / 2);
        plan.shared = all - plan.dispatch;
    }
    if (f->weights && f->local_experts > 0)
        plan_combine(f, all, &plan);
    return plan;
}
