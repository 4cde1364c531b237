/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors and register blocks of the kernels, in portable GNU C; for the sources that are built
 * once per instruction set. */
#ifndef MOE_CPU_ISA_VECTORS_H
#define MOE_CPU_ISA_VECTORS_H

#include "cpu/compute/isa.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define ISA_NAME     "avx512"
#define VECTOR_BYTES 64
#define ROWS         12 /* 24 accumulators + 4 weight vectors of 32 registers */
#elif defined(__AVX2__)
#define ISA_NAME     "avx2"
#define VECTOR_BYTES 32
#define ROWS         5 /* 10 accumulators + 4 weight vectors + 2 broadcasts of 16 registers */
#elif defined(__aarch64__)
#define ISA_NAME     "neon"
#define VECTOR_BYTES 16
#define ROWS         10 /* 20 accumulators + 4 weight vectors of 32 registers */
#else
#define ISA_NAME     "sse2"
#define VECTOR_BYTES 16
#define ROWS         4 /* 8 accumulators + 4 weight vectors + products of 16 registers */
#endif

#define GLUE2(a, b) a##b
#define GLUE(a, b)  GLUE2(a, b)

/* Loops over rows and vectors must be unrolled, or the accumulators go to memory. UNROLL_4 is for a
 * loop over inputs. */
#if defined(__clang__)
#define UNROLL   _Pragma("clang loop unroll(full)")
#define UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define UNROLL   _Pragma("GCC unroll 16")
#define UNROLL_4 _Pragma("GCC unroll 4")
#endif

/* moe_cpu_isa.place, for the ways in which isa_packed.c widens words. AVX-512: the words of outputs
 * n and n + LANES are neighbours. AVX2 has instructions that take the two halves of a vector apart.
 */
#if defined(__AVX512F__)
#define PLACES                                                                                     \
    0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19,  \
        21, 23, 25, 27, 29, 31
#elif defined(__AVX2__)
#define PLACES 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15
#else
#define PLACES                                                                                     \
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,  \
        26, 27, 28, 29, 30, 31
#endif

enum {
    LANES = VECTOR_BYTES / 4,
    VECTORS = 2,
    PANEL = LANES * VECTORS,
    PREFETCH_BYTES = 6144, /* distance from a load to its prefetch */
};
_Static_assert((int)PANEL <= (int)MOE_CPU_MAX_PANEL, "panel buffers elsewhere have that size");

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t uvec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ivec __attribute__((vector_size(VECTOR_BYTES)));

static inline vec vec_set(float f)
{
    return f - (vec){0};
}

/* One register block: `rows` is a constant after inlining. */
#define BLOCK static inline __attribute__((always_inline)) void

BLOCK store_block(uint32_t rows, vec acc[][VECTORS], float *y, size_t y_stride)
{
    UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            memcpy(y + r * y_stride + v * LANES, &acc[r][v], sizeof(vec));
    }
}

/* Calls `block` with the row count as a constant, so that each count has its own unrolled loop. */
#define ROW_CASE(block, n)                                                                         \
    case n:                                                                                        \
        block(n <= ROWS ? n : 1, x, x_stride, w, k, y, y_stride);                                  \
        break;
#define DEFINE_PANEL(name, block)                                                                  \
    static void name##_rows(uint32_t rows, const float *x, size_t x_stride, const void *w,         \
                            uint32_t k, float *y, size_t y_stride)                                 \
    {                                                                                              \
        switch (rows) {                                                                            \
            ROW_CASE(block, 1)                                                                     \
            ROW_CASE(block, 2)                                                                     \
            ROW_CASE(block, 3)                                                                     \
            ROW_CASE(block, 4)                                                                     \
            ROW_CASE(block, 5)                                                                     \
            ROW_CASE(block, 6)                                                                     \
            ROW_CASE(block, 7)                                                                     \
            ROW_CASE(block, 8)                                                                     \
            ROW_CASE(block, 9)                                                                     \
            ROW_CASE(block, 10)                                                                    \
            ROW_CASE(block, 11)                                                                    \
            ROW_CASE(block, 12)                                                                    \
        }                                                                                          \
    }                                                                                              \
    static void name(uint32_t rows, const float *x, size_t x_stride, const void *w, uint32_t k,    \
                     float *y, size_t y_stride)                                                    \
    {                                                                                              \
        /* Blocks of nearly equal height: 13 rows are 7 + 6, not 12 + 1. */                        \
        for (uint32_t blocks = (rows + ROWS - 1) / ROWS; blocks > 0; blocks--) {                   \
            uint32_t take = (rows + blocks - 1) / blocks;                                          \
            name##_rows(take, x, x_stride, w, k, y, y_stride);                                     \
            rows -= take;                                                                          \
            x += take * x_stride;                                                                  \
            y += take * y_stride;                                                                  \
        }                                                                                          \
    }

/* isa_packed.c and isa_interleave.c; members of struct moe_cpu_isa. */
#define MOE_CPU_PANELS_PACKED GLUE(moe_cpu_panels_packed_, MOE_CPU_ISA)
#define MOE_CPU_UNPACK        GLUE(moe_cpu_unpack_, MOE_CPU_ISA)
void MOE_CPU_PANELS_PACKED(uint32_t count, const struct moe_cpu_panel *panels, uint32_t rows,
                           const struct moe_cpu_rows *x, uint32_t k, size_t y_stride);
void MOE_CPU_UNPACK(const struct moe_cpu_packed *packed, const void *panel, uint32_t first,
                    uint32_t n, float *to);
#define MOE_CPU_INTERLEAVE GLUE(moe_cpu_interleave_, MOE_CPU_ISA)
bool MOE_CPU_INTERLEAVE(uint32_t size, size_t bytes, const void *const *rows, void *to);

#endif
