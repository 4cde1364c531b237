/* SPDX-License-Identifier: Apache-2.0 */
/* Optimizer steps, the balance rule and adapters of the oracle, one formula each. */
#include "oracle/oracle.h"

#include <math.h>

void moe_oracle_add_squares(size_t n, const double *grad, double *sum)
{
    for (size_t i = 0; i < n; i++)
        *sum += grad[i] * grad[i];
}

double moe_oracle_gradient_factor(const struct moe_optimizer_args *args, double squares,
                                  double *norm)
{
    double factor = args->grad_scale;
    *norm = fabs(factor) * sqrt(squares);
    if (args->max_grad_norm > 0 && args->max_grad_norm / (*norm + 1e-6) < 1)
        factor *= args->max_grad_norm / (*norm + 1e-6);
    return factor;
}

void moe_oracle_optimizer_step(enum moe_optimizer optimizer, const struct moe_optimizer_args *args,
                               double factor, size_t n, const double *grad, double *value,
                               double *moment1, double *moment2)
{
    double correction1 = 1 - pow(args->beta1, (double)args->number);
    double correction2 = 1 - pow(args->beta2, (double)args->number);
    for (size_t i = 0; i < n; i++) {
        double g = factor * grad[i];
        value[i] -= args->learning_rate * args->weight_decay * value[i];
        if (optimizer == MOE_OPTIMIZER_SGD) {
            moment1[i] = args->momentum * moment1[i] + g;
            value[i] -= args->learning_rate * moment1[i];
            continue;
        }
        moment1[i] = args->beta1 * moment1[i] + (1 - args->beta1) * g;
        moment2[i] = args->beta2 * moment2[i] + (1 - args->beta2) * g * g;
        value[i] -= args->learning_rate * (moment1[i] / correction1) /
                    (sqrt(moment2[i] / correction2) + args->epsilon);
    }
}

void moe_oracle_balance(uint32_t experts, const uint64_t *load, double rate, double *select_bias)
{
    uint64_t total = 0;
    for (uint32_t e = 0; e < experts; e++)
        total += load[e];
    for (uint32_t e = 0; e < experts; e++)
        if (load[e] * experts != total)
            select_bias[e] += load[e] * experts < total ? rate : -rate;
}

void moe_oracle_lora_merge(size_t out, size_t in, size_t rank, double alpha, const double *base,
                           const double *a, const double *b, double *merged)
{
    for (size_t o = 0; o < out; o++)
        for (size_t i = 0; i < in; i++) {
            double sum = 0;
            for (size_t r = 0; r < rank; r++)
                sum += b[o * rank + r] * a[r * in + i];
            merged[o * in + i] = base[o * in + i] + alpha / (double)rank * sum;
        }
}

void moe_oracle_lora_backward(size_t out, size_t in, size_t rank, double alpha, const double *a,
                              const double *b, const double *dw, double *da, double *db)
{
    for (size_t r = 0; r < rank; r++) {
        for (size_t i = 0; i < in; i++) {
            da[r * in + i] = 0;
            for (size_t o = 0; o < out; o++)
                da[r * in + i] += alpha / (double)rank * b[o * rank + r] * dw[o * in + i];
        }
        for (size_t o = 0; o < out; o++) {
            db[o * rank + r] = 0;
            for (size_t i = 0; i < in; i++)
                db[o * rank + r] += alpha / (double)rank * dw[o * in + i] * a[r * in + i];
        }
    }
}
