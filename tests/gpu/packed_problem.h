/* SPDX-License-Identifier: Apache-2.0 */
/* Random products with weights that stay quantised, for test_packed.c: matrices, their place on the
 * device, and the same product in double precision. Functions fail the running test. */
#ifndef MOE_TESTS_PACKED_PROBLEM_H
#define MOE_TESTS_PACKED_PROBLEM_H

#include "ggemm_fixture.h"

#include "cuda/gemm/ggemm.h"
#include "cuda/gemm/packed.h"
#include "cuda/plan/limits.h"
#include "moe/packed_matrix.h"

/* One of each packing, and of each kind of scales. */
enum { FORMATS = 21 };
extern const struct moe_weight_format formats[FORMATS];

/* One random matrix on the host, in the form of moe/packed_matrix.h. */
struct quantised {
    struct moe_packed_matrix m;
    struct moe_packed_sizes sizes;
    size_t rows, columns;
    uint8_t *bytes;
};

/* One product. */
struct problem {
    struct moe_cuda_ggemm g;
    const struct moe_weight_format *format;
    uint32_t start[MOE_CUDA_MAX_EXPERTS], count[MOE_CUDA_MAX_EXPERTS];
    struct moe_cuda_ggemm_weights weights, plain; /* packed; fp32 values for the reference */
    void *owned[32];
    size_t owns, out_bytes;
    void *x;      /* bf16 */
    float *alike; /* W8A8: the values of quantised rows, for the reference */
    uint32_t *wrong;
};

/* A format in words; valid until the next call. */
const char *name_of(const struct moe_weight_format *f);
/* The upper half of an fp32. */
uint16_t cut_to_bf16(float v);
/* Free `bytes`. */
struct quantised random_matrix(const struct moe_weight_format *f, size_t rows, size_t columns);
/* An element times its scale. */
float value_of(const struct moe_weight_format *f, const struct quantised *q, size_t row,
               size_t column);
/* A copy in device memory; free it with cudaFree. */
void *to_device(const void *data, size_t bytes);
/* Device memory that release frees. */
void *own(struct problem *p, void *memory);
/* Places a matrix, its elements in two pieces, as large uploads are. */
void put_matrix(const struct moe_cuda_packed_weight *w, const struct moe_weight_format *f,
                const struct quantised *q);
/* W8A8: quantises the rows, and finds their values on the host. All other rows stay NaN. */
void quantise_rows(struct problem *p);
/* Frees what the problem owns. */
void release(struct problem *p);
/* Fills the result with 0xff and multiplies. */
void multiply(struct problem *p, enum moe_cuda_gemm_tile tile);
/* A copy of the result; free it. */
char *result(const struct problem *p);
/* The worst error of an element; fails if anything else was written. `want`: device memory. */
double error_of(struct problem *p, const struct moe_cuda_ggemm_weights *const *plain, double *want);
/* Moves groups to multiples of 4 rows, which W8A8 needs. Returns the number of rows. */
uint32_t align_groups(struct problem *p);
/* Makes rows and weights of the problem. Returns those of the reference. */
const struct moe_cuda_ggemm_weights *const *make(struct problem *p);

#endif
